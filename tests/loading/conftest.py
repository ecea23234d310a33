"""Small models on disk in every format, written by other people's libraries so that they are an oracle too."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from octavo.loading.checkpoint import Checkpoint, resolve

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCAB = 64, 96, 4, 2, 16, 2, 32


@pytest.fixture(scope="session")
def default_checkpoint() -> Checkpoint:
    """The real default model, through Octavo's own cache and, the first time, the package index."""
    return resolve("")


@pytest.fixture(scope="session")
def hf_shapes() -> Callable[..., dict[str, tuple[int, ...]]]:
    """Names and shapes of the tensors of the tiny model, as transformers names them."""

    def shapes(*, tied: bool = True, qkv_bias: bool = False, qk_norm: bool = False) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (VOCAB, HIDDEN),
            "model.norm.weight": (HIDDEN,),
        }
        if not tied:
            found["lm_head.weight"] = (VOCAB, HIDDEN)
        for layer in range(LAYERS):
            p = f"model.layers.{layer}."
            for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
                found[f"{p}self_attn.{name}_proj.weight"] = (heads * HEAD_DIM, HIDDEN)
                if qkv_bias:
                    found[f"{p}self_attn.{name}_proj.bias"] = (heads * HEAD_DIM,)
            if qk_norm:
                found[f"{p}self_attn.q_norm.weight"] = found[f"{p}self_attn.k_norm.weight"] = (HEAD_DIM,)
            found[f"{p}self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD_DIM)
            found[f"{p}mlp.gate_proj.weight"] = found[f"{p}mlp.up_proj.weight"] = (INTERMEDIATE, HIDDEN)
            found[f"{p}mlp.down_proj.weight"] = (HIDDEN, INTERMEDIATE)
            found[f"{p}input_layernorm.weight"] = found[f"{p}post_attention_layernorm.weight"] = (HIDDEN,)
        return found

    return shapes


@pytest.fixture(scope="session")
def hf_tensors(hf_shapes: Callable[..., dict[str, tuple[int, ...]]]) -> Callable[..., dict[str, torch.Tensor]]:
    """Seeded values for `hf_shapes`, exact in bfloat16 so that every type holds the same numbers."""

    def tensors(**options: bool) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        shapes = hf_shapes(**options)
        return {n: torch.randn(s, generator=generator).bfloat16().float() for n, s in shapes.items()}

    return tensors


@pytest.fixture(scope="session")
def hf_config() -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


@pytest.fixture
def hf_folder(tmp_path: Path, hf_config: dict[str, Any], hf_tensors: Callable[..., dict[str, torch.Tensor]]) -> Path:
    """A folder with config.json and model.safetensors."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf_config))
    save_file(hf_tensors(), folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def write_gguf() -> Callable[..., Path]:
    """Write a GGUF file. `metadata` is added to the least that architecture llama needs; None takes a key out."""

    def write(
        path: Path,
        tensors: dict[str, np.ndarray],
        metadata: dict[str, Any] | None = None,
        *,
        arch: str = "llama",
        types: dict[str, gguf.GGMLQuantizationType] | None = None,
    ) -> Path:
        writer = gguf.GGUFWriter(path, arch)
        keys: dict[str, Any] = {
            f"{arch}.block_count": LAYERS, f"{arch}.context_length": 128, f"{arch}.embedding_length": HIDDEN,
            f"{arch}.feed_forward_length": INTERMEDIATE, f"{arch}.attention.head_count": HEADS,
            f"{arch}.attention.head_count_kv": KV_HEADS, f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
            f"{arch}.rope.freq_base": 10000.0, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
        }  # fmt: skip
        for key, value in (keys | (metadata or {})).items():
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            elif value is not None:
                writer.add_array(key, value)
        for name, array in tensors.items():
            writer.add_tensor(name, array, raw_dtype=(types or {}).get(name))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.fixture(scope="session")
def gguf_tensors(hf_tensors: Callable[..., dict[str, torch.Tensor]]) -> Callable[..., dict[str, np.ndarray]]:
    """The tiny model's tensors as llama.cpp's converter would write them: its names, and q and k rows interleaved."""

    def tensors(arch: str = "llama", **options: bool) -> dict[str, np.ndarray]:
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], LAYERS)
        written = {}
        for name, tensor in hf_tensors(**options).items():
            value = tensor.numpy()
            for projection, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS)):
                if arch == "llama" and projection in name:
                    halves = value.reshape(heads, 2, HEAD_DIM // 2, *value.shape[1:])
                    value = halves.swapaxes(1, 2).reshape(value.shape).copy()
            gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert gguf_name is not None
            written[gguf_name] = value
        return written

    return tensors
