"""Reads GGUF adapters as llama.cpp's convert_lora_to_gguf.py writes them: `blk.0.attn_q.weight.lora_a` [r, K] and
`.lora_b` [N, r], scaled by adapter.lora.alpha / r. The rows of B have the same order as the base matrix's rows in GGUF
files. For an embedding [N, K], A is transposed, [N, r], and B is [K, r]. For experts, both have one more dimension in
front."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from octavo.errors import LoadError
from octavo.loading.gguf_file import GGUFFile, TensorInfo, parse_gguf
from octavo.loading.gguf_tensors import named_tensors, stored_tensor
from octavo.loading.mapped_file import ReadFile
from octavo.lora.peft_format import ModuleAdapter
from octavo.quantization import dequantize

_INVOCATION = "adapter.alora.invocation_tokens"  # key of aLoRA: the adapter applies from these tokens on


def read_gguf_adapter(opened: ReadFile, config: Mapping[str, Any], max_rank: int) -> dict[str, ModuleAdapter]:
    """Return the adapter of each module, by the module's name in transformers. `config` is the base model's. Raises
    `LoadError`."""
    file, path = parse_gguf(opened), opened.path
    kind = file.metadata.get("general.type"), file.metadata.get("adapter.type")
    if kind != ("adapter", "lora"):
        raise LoadError(f"{path} is no LoRA adapter: its general.type is {kind[0]!r}, its adapter.type {kind[1]!r}.")
    if file.metadata.get("split.count", 0) not in (0, 1):
        raise LoadError(f"{path} is a part of an adapter that was split, which is not built; merge its parts.")
    alpha = file.metadata.get("adapter.lora.alpha", 0)
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise LoadError(f"{path}: adapter.lora.alpha must be a number, got {str(alpha)[:40]!r}.")
    if _INVOCATION in file.metadata:
        raise LoadError(f"{path} is an activated adapter ({_INVOCATION}), which is not built.")
    halves: dict[str, dict[str, TensorInfo]] = {"a": {}, "b": {}}
    for name, info in file.tensors.items():
        base, _, half = name.rpartition(".lora_")
        if half not in halves or not base:
            raise LoadError(f"{path}: LoRA adapters have no tensor {name}.")
        halves[half][base] = info
    if unpaired := set(halves["a"]) ^ set(halves["b"]):
        raise LoadError(f"{path} has {sorted(unpaired)[0]} without its other half.")
    # B gets the names of the base matrices, so that its rows are renamed and reordered as theirs.
    renamed = {base: replace(info, name=base) for base, info in halves["b"].items()}
    modules: dict[str, ModuleAdapter] = {}
    for tensor in named_tensors(GGUFFile(file.parts, file.metadata, renamed), config):
        name, base = tensor.hf_name.removesuffix(".weight"), tensor.info.name
        if name == tensor.hf_name or isinstance(tensor.rows, int | slice) or tensor.is_untransposed:
            raise LoadError(f"{path}: tensor {base}.lora_b is of a matrix that adapters in GGUF files cannot change.")
        info, num_experts = halves["a"][base], None
        b = dequantize(stored_tensor(file, tensor), "float32")
        a = dequantize(stored_tensor(file, replace(tensor, info=info, rows=None)), "float32")
        if len(tensor.info.shape) == 3 and len(info.shape) == 3:
            a, b = a.reshape(info.shape), b.reshape(tensor.info.shape)
            num_experts = len(b)
            if len(a) != num_experts or a.shape[1] != b.shape[2]:
                raise LoadError(f"{path}: {base}.lora_a {a.shape} and .lora_b {b.shape} do not fit each other.")
        names = {"a": info.name, "b": f"{base}.lora_b"}
        is_embedding = base == "token_embd.weight"
        if is_embedding:  # files have A transposed, [N, r], so that its rows are looked up, and B [K, r]
            a, b = np.ascontiguousarray(b.T), a
            names = {"a": names["b"], "b": names["a"]}
        rank = a.shape[-2] if a.ndim >= 2 else 0
        if num_experts is not None:  # to PEFT's form, [experts * r, K] and [N, r * experts]
            a, b = a.reshape(-1, a.shape[2]), b.transpose(1, 2, 0).reshape(b.shape[1], -1)
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
            raise LoadError(f"{path}: {base}.lora_a {a.shape} and .lora_b {b.shape} do not fit each other.")
        if rank > max_rank:
            raise LoadError(f"{path}: {info.name} has rank {rank}, and --max-lora-rank is {max_rank}.")
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise LoadError(f"{path}: {base} has numbers that are not finite.")
        scale = alpha / rank if alpha else 1  # like llama.cpp
        scaled = np.asarray(b * np.float32(scale), np.float32)
        modules[name] = ModuleAdapter(
            np.asarray(a, np.float32), scaled, tensors=names, is_embedding=is_embedding, num_experts=num_experts
        )
    if not modules:
        raise LoadError(f"{path} has no tensors.")
    return modules
