"""Adapters in GGUF files are those of PEFT that llama.cpp has converted: the same answers, to the bit."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from octavo import LLM, SamplingParams
from octavo.errors import LoadError, RequestError
from octavo.loading.mapped_file import ReadFile
from octavo.lora.gguf_format import read_gguf_adapter
from octavo.lora.request import LoRARequest
from tests.lora.random_adapters import write_random_adapter

_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
_HEADS = {"attn_q": 9, "attn_k": 3}


def permuted(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """As convert_hf_to_gguf.py orders the rows of Llama's queries and keys."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def convert(folder: Path, path: Path, **changes: NDArray[np.float32]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 4.0)
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        if ".lora_embedding_" in name:  # as convert_lora_to_gguf.py turns A
            turned = tensor.T if name.endswith("A") else tensor
            writer.add_tensor(f"token_embd.weight.lora_{name[-1].lower()}", np.ascontiguousarray(turned))
            continue
        layer, module = name.split("layers.")[1].split(".", 1)
        module, half = module.removesuffix(".weight").rsplit(".lora_", 1)
        ours = _NAMES[module]
        if half == "B" and ours in _HEADS:
            tensor = permuted(tensor, _HEADS[ours])
        writer.add_tensor(f"blk.{layer}.{ours}.weight.lora_{half.lower()}", np.ascontiguousarray(tensor))
    for name, tensor in changes.items():
        writer.add_tensor(name, tensor)
    write(writer)


def write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.long
def test_gguf_adapters_say_what_those_of_peft_say(tmp_path: Path) -> None:
    folder = write_random_adapter(tmp_path / "peft", 3, strength=1.0)
    tensors = load_file(folder / "adapter_model.safetensors")
    generator = np.random.default_rng(0)
    for half, size in (("A", (4, 49152)), ("B", (576, 4))):
        values = generator.standard_normal(size, np.float32) * np.float32(0.2)
        tensors[f"base_model.model.model.embed_tokens.lora_embedding_{half}"] = values
    save_file(tensors, folder / "adapter_model.safetensors")
    convert(folder, tmp_path / "same.gguf")
    convert(folder, tmp_path / "more.gguf", **{"blk.0.attn_q.weight.lora_a": np.ones((4, 576), np.float32)})
    llm = LLM(max_model_len=64, num_gpu_blocks_override=32, enable_lora=True)
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=1)
    asked = [LoRARequest("peft", 1, str(folder)), LoRARequest("gguf", 2, str(tmp_path / "same.gguf")), None]
    outputs = llm.generate(["Once upon a time"] * 3, params, use_tqdm=False, lora_request=asked)
    of_peft, of_gguf, base = [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]
    assert of_gguf == of_peft != base
    with pytest.raises(RequestError, match=r"blk\.0\.attn_q\.weight without its other half"):
        llm.generate("x", params, use_tqdm=False, lora_request=LoRARequest("x", 3, str(tmp_path / "more.gguf")))
    model = LoRARequest("x", 3, llm.config.model.checkpoint.path)
    with pytest.raises(RequestError, match="is no LoRA adapter"):
        llm.generate("x", params, use_tqdm=False, lora_request=model)


@pytest.mark.parametrize(("alpha", "scale"), [(8.0, 4.0), (0.0, 1.0), (None, 1.0)])
def test_factors_are_scaled_as_by_llama_cpp(tmp_path: Path, alpha: float | None, scale: float) -> None:
    """Without an alpha, and with one of 0, they are applied as they are."""
    values = np.arange(6, dtype=np.float32)
    writer = gguf.GGUFWriter(path := tmp_path / "adapter.gguf", "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    if alpha is not None:
        writer.add_float32("adapter.lora.alpha", alpha)
    writer.add_tensor("blk.0.ffn_up.weight.lora_a", values.reshape(2, 3))
    writer.add_tensor("blk.0.ffn_up.weight.lora_b", values.reshape(3, 2))
    write(writer)
    [(_, found)] = read_gguf_adapter(ReadFile(str(path)), {}, 16).items()
    assert found.a is not None and found.b is not None
    assert np.array_equal(found.a, values.reshape(2, 3)) and np.array_equal(found.b, values.reshape(3, 2) * scale)


def test_activated_adapters_are_refused(tmp_path: Path) -> None:
    """They apply to the tokens from certain tokens on alone."""
    writer = gguf.GGUFWriter(path := tmp_path / "adapter.gguf", "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_array("adapter.alora.invocation_tokens", [1, 2])
    write(writer)
    with pytest.raises(LoadError, match=r"activated adapter \(adapter.alora.invocation_tokens\)"):
        read_gguf_adapter(ReadFile(str(path)), {}, 16)
