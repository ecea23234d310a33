"""GGUF files with experts give the logits of `transformers` with the same weights: names, tensors of all experts, and
what the metadata says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from octavo import LLM, SamplingParams
from tests.models.small_experts import EXPERT_MODELS
from tests.models.small_models import VOCAB

ARCHITECTURES = {
    "qwen3moe": "qwen3 moe", "qwen2moe": "qwen2 moe", "olmoe": "olmoe", "llama": "mixtral"
}  # fmt: skip


def converted(arch: str, reference: Any) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Tensors and metadata as llama.cpp's converter writes them."""
    config = reference.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config.num_hidden_layers)
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in reference.state_dict().items():
        value = tensor.numpy()
        if name.endswith("gate_up_proj"):
            for part, half in zip(("gate", "up"), np.split(value, 2, axis=1), strict=True):
                tensors[f"blk.{name.split('.')[2]}.ffn_{part}_exps.weight"] = half.copy()
            continue
        if name.endswith("experts.down_proj"):
            tensors[f"blk.{name.split('.')[2]}.ffn_down_exps.weight"] = value
            continue
        for projection, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if arch == "llama" and projection in name:
                halves = value.reshape(heads, 2, -1, *value.shape[1:])
                value = halves.swapaxes(1, 2).reshape(value.shape).copy()
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        tensors[found] = value.reshape(-1) if "shared_expert_gate" in name else value
    metadata = {
        f"{arch}.block_count": config.num_hidden_layers, f"{arch}.context_length": 256,
        f"{arch}.embedding_length": config.hidden_size, f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.key_length": 16, f"{arch}.attention.value_length": 16,
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{arch}.rope.freq_base": config.rope_parameters["rope_theta"], f"{arch}.expert_count": 6,
        f"{arch}.expert_used_count": 2,
    }  # fmt: skip
    for key, setting in (
        ("expert_feed_forward_length", "moe_intermediate_size"),
        ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
    ):
        if hasattr(config, setting):
            metadata[f"{arch}.{key}"] = getattr(config, setting)
    return tensors, metadata


def write(path: Path, arch: str, tensors: dict[str, np.ndarray], metadata: dict[str, Any], kind: Any) -> None:
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(key, value)
    for name, value in tensors.items():
        if kind is not None and value.ndim == 3:
            writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def logits(path: Path, tokenizer: Path, prompt: list[int], dtype: str) -> torch.Tensor:
    found = []

    def keep(_: list[int], __: list[int], row: torch.Tensor) -> torch.Tensor:
        found.append(row.clone())
        return row

    llm = LLM(str(path), tokenizer=str(tokenizer), dtype=dtype, max_model_len=96, num_gpu_blocks_override=32)
    params = SamplingParams(temperature=0, max_tokens=1, logits_processors=[keep])
    llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    return found[0].float()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_files_with_experts_give_the_logits_of_transformers(arch: str, tmp_path: Path, tiny_tokenizer: Path) -> None:
    model = EXPERT_MODELS[ARCHITECTURES[arch]]
    # What such files do not say: a window, and layers without experts.
    model = model._replace(settings=model.settings | {"sliding_window": None, "mlp_only_layers": []})
    reference = model.reference(0)
    tensors, metadata = converted(arch, reference)
    write(tmp_path / "m.gguf", arch, tensors, metadata, None)
    prompt = torch.randint(3, VOCAB, (30,)).tolist()
    with torch.no_grad():
        expected = reference(torch.tensor([prompt])).logits[0, -1]
    torch.testing.assert_close(
        logits(tmp_path / "m.gguf", tiny_tokenizer, prompt, "float32"), expected, atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1])
def test_experts_of_few_bits_are_multiplied_as_they_are(kind: Any, tmp_path: Path, tiny_tokenizer: Path) -> None:
    model = EXPERT_MODELS["qwen3 moe"]
    reference = model._replace(settings=model.settings | {"moe_intermediate_size": 32}).reference(0)
    tensors, metadata = converted("qwen3moe", reference)
    write(tmp_path / "few.gguf", "qwen3moe", tensors, metadata, kind)
    for name, value in tensors.items():
        if value.ndim == 3:
            tensors[name] = gguf.quants.dequantize(gguf.quants.quantize(value, kind), kind)
    write(tmp_path / "floats.gguf", "qwen3moe", tensors, metadata, None)
    prompt = torch.randint(3, VOCAB, (30,)).tolist()
    expected = logits(tmp_path / "floats.gguf", tiny_tokenizer, prompt, "float32")
    exact = logits(tmp_path / "few.gguf", tiny_tokenizer, prompt, "float32")
    torch.testing.assert_close(exact, expected, atol=1e-4, rtol=0)
    served = logits(tmp_path / "few.gguf", tiny_tokenizer, prompt, "bfloat16")
    assert torch.nn.functional.cosine_similarity(served, expected, dim=0) > 0.998
