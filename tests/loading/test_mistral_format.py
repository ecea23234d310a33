"""Mistral's own format says the same as Hugging Face's."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from octavo.errors import LoadError
from octavo.loading.checkpoint import resolve
from octavo.loading.file_weights import open_weights
from tests.loading.conftest import HEAD_DIM, HEADS, HIDDEN, INTERMEDIATE, KV_HEADS, LAYERS, VOCAB

PARAMS = {
    "dim": HIDDEN, "n_layers": LAYERS, "head_dim": HEAD_DIM, "hidden_dim": INTERMEDIATE, "n_heads": HEADS,
    "n_kv_heads": KV_HEADS, "norm_eps": 1e-5, "vocab_size": VOCAB, "rope_theta": 10000.0, "max_seq_len": 128,
}  # fmt: skip
NAMES = {
    "model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output", "model.layers": "layers",
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


@pytest.fixture
def tensors(hf_tensors: Callable[..., dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return hf_tensors(tied=False)


def write(folder: Path, tensors: dict[str, torch.Tensor], params: dict[str, Any]) -> Path:
    """As mistral-inference has it: its rotary kernel takes neighbours for pairs."""
    written = {}
    for name, tensor in tensors.items():
        for projection, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS)):
            if projection in name:
                tensor = tensor.view(heads, 2, HEAD_DIM // 2, HIDDEN).transpose(1, 2).reshape(-1, HIDDEN).contiguous()
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        written[name] = tensor.bfloat16()
    first = {name: tensor for name, tensor in written.items() if "layers.0" in name}
    save_file(first, folder / "consolidated-00001-of-00002.safetensors")
    save_file({n: t for n, t in written.items() if n not in first}, folder / "consolidated-00002-of-00002.safetensors")
    (folder / "params.json").write_text(json.dumps(params))
    return folder


def test_weights_and_configuration_are_those_of_hugging_faces_form(
    tmp_path: Path, tensors: dict[str, torch.Tensor], hf_config: dict[str, Any]
) -> None:
    checkpoint = resolve(str(write(tmp_path, tensors, PARAMS)))
    assert checkpoint.format == "mistral"
    assert checkpoint.eos_token_ids == (2,)
    expected = {key: value for key, value in hf_config.items() if key != "rope_theta"} | {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "tie_word_embeddings": False,
        "hidden_act": "silu", "sliding_window": None, "dtype": "bfloat16",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }  # fmt: skip
    assert checkpoint.config == expected
    weights = open_weights(checkpoint, "float32", None, None, False)
    for name, tensor in tensors.items():
        assert np.array_equal(weights.take(name, tuple(tensor.shape)), tensor.numpy()), name
    weights.check_all_taken()


def test_yarn_is_carried_over(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    yarn = {"factor": 4, "original_max_position_embeddings": 64, "beta": 32, "alpha": 1, "apply_scale": False}
    config = resolve(str(write(tmp_path, tensors, PARAMS | {"yarn": yarn}))).config
    assert config["rope_parameters"] == {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4, "original_max_position_embeddings": 64,
        "beta_fast": 32, "beta_slow": 1, "attention_factor": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (PARAMS | {"vision_encoder": {"dim": 8}}, "vision encoders in Mistral's own format are not built"),
        (PARAMS | {"quantization": {"qformat_weight": "fp8_e4m3"}}, "quantized weights"),
        (PARAMS | {"moe": {"num_experts": 8}}, "mixture-of-experts layers"),
        (PARAMS | {"sliding_window": [8, 16]}, "sliding_window for each layer"),
        ({"dim": 64}, "has no 'vocab_size': it is not one of Mistral's models"),
    ],
)
def test_what_is_not_built_is_refused_by_name(
    params: dict[str, Any], message: str, tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    with pytest.raises(LoadError, match=message):
        resolve(str(write(tmp_path, tensors, params)))


def test_hugging_faces_form_is_preferred_where_both_are_there(hf_folder: Path) -> None:
    save_file({"a": torch.ones(1)}, hf_folder / "consolidated.safetensors")
    (hf_folder / "params.json").write_text("{}")
    assert resolve(str(hf_folder)).format == "safetensors"
