"""GGUF adapters as llama.cpp's convert_lora_to_gguf.py writes them: `blk.0.attn_q.weight.lora_a` [r, K] and
`.lora_b` [N, r], scaled by adapter.lora.alpha / r. Rows of B lie as those of the base do in GGUF files. Of an embedding
[N, K] A is turned, [N, r], and B is [K, r]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from octavo.errors import LoadError
from octavo.loading.gguf import GGUFFile, TensorInfo, read_gguf
from octavo.loading.gguf_tensors import named_tensors, stored_tensor
from octavo.lora.peft import ModuleAdapter
from octavo.quantization import dequantize


def read_gguf_adapter(path: str, config: Mapping[str, Any], max_rank: int) -> dict[str, ModuleAdapter]:
    """By module of the model, as transformers names them. `config` is the base model's. Raises `LoadError`."""
    file = read_gguf(path)
    kind = file.metadata.get("general.type"), file.metadata.get("adapter.type")
    if kind != ("adapter", "lora"):
        raise LoadError(f"{path} is no LoRA adapter: its general.type is {kind[0]!r}, its adapter.type {kind[1]!r}.")
    alpha = file.metadata.get("adapter.lora.alpha")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool):
        raise LoadError(f"{path} does not say adapter.lora.alpha.")
    halves: dict[str, dict[str, TensorInfo]] = {"a": {}, "b": {}}
    for name, info in file.tensors.items():
        base, _, half = name.rpartition(".lora_")
        if half not in halves or not base:
            raise LoadError(f"{path}: tensor {name} is not one that LoRA adapters have.")
        halves[half][base] = info
    if unpaired := set(halves["a"]) ^ set(halves["b"]):
        raise LoadError(f"{path} has {sorted(unpaired)[0]} without its other half.")
    # As if B were the matrices themselves: the same names, and rows moved likewise.
    renamed = {base: replace(info, name=base) for base, info in halves["b"].items()}
    modules: dict[str, ModuleAdapter] = {}
    for tensor in named_tensors(GGUFFile(file.parts, file.metadata, renamed), config):
        name, base = tensor.hf_name.removesuffix(".weight"), tensor.info.name
        if name == tensor.hf_name or isinstance(tensor.rows, int | slice) or tensor.is_turned:
            raise LoadError(f"{path}: tensor {base}.lora_b is of a matrix that adapters in GGUF files cannot change.")
        b = dequantize(stored_tensor(file, tensor), "float32")
        info = halves["a"][base]
        a = dequantize(stored_tensor(file, replace(tensor, info=info, rows=None)), "float32")
        names = {"a": info.name, "b": f"{base}.lora_b"}
        is_embedding = base == "token_embd.weight"
        if is_embedding:  # whose A files have turned, so that its rows are looked up: [N, r], and B [K, r]
            a, b = np.ascontiguousarray(b.T), a
            names = {"a": names["b"], "b": names["a"]}
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
            raise LoadError(f"{path}: {base}.lora_a {a.shape} and .lora_b {b.shape} do not fit each other.")
        if a.shape[0] > max_rank:
            raise LoadError(f"{path}: {info.name} has rank {a.shape[0]}, and --max-lora-rank is {max_rank}.")
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise LoadError(f"{path}: {base} has numbers that are not finite.")
        scaled = np.asarray(b * np.float32(alpha / a.shape[0]), np.float32)
        modules[name] = ModuleAdapter(np.asarray(a, np.float32), scaled, tensors=names, is_embedding=is_embedding)
    if not modules:
        raise LoadError(f"{path} has no tensors.")
    return modules
