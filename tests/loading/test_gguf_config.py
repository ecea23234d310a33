"""GGUF metadata in Hugging Face's words."""

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from octavo.errors import LoadError
from octavo.loading.checkpoint import Checkpoint, resolve
from octavo.loading.gguf_config import _sampling_defaults, gguf_config
from octavo.loading.gguf_file import read_gguf
from octavo.loading.gguf_settings import each
from octavo.loading.gguf_tensors import named_tensors
from octavo.loading.gguf_values import Metadata

Write = Callable[..., Path]
Tensors = Callable[..., dict[str, np.ndarray]]

# What the tiny files of conftest describe.
_TINY = {
    "has_standard_names": True,
    "vocab_size": 32, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "hidden_act": "silu", "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
_NO_BIAS = {"attention_bias": False, "mlp_bias": False}


def test_the_default_model_is_described_as_its_own_config_json_does(default_checkpoint: Checkpoint) -> None:
    assert default_checkpoint.config == _NO_BIAS | {
        "has_standard_names": True,
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152, "hidden_size": 576,
        "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "head_dim": 64, "hidden_act": "silu", "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}, "tie_word_embeddings": True,
        "dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
    }  # fmt: skip
    assert default_checkpoint.generation_config == {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "temperature": 0.0,  # Octavo's own additions for the default model
        "max_new_tokens": 512,
    }


@pytest.mark.parametrize(
    ("arch", "options", "expected"),
    [
        ("llama", {}, {"architectures": ["LlamaForCausalLM"]} | _NO_BIAS),
        ("llama", {"tied": False}, {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False} | _NO_BIAS),
        ("qwen2", {"qkv_bias": True}, {"architectures": ["Qwen2ForCausalLM"]}),
        ("qwen3", {"qk_norm": True}, {"architectures": ["Qwen3ForCausalLM"]}),
    ],
)
def test_each_architecture_is_described_and_its_tensors_carry_their_hugging_face_names(
    arch: str, options: dict[str, bool], expected: dict[str, Any], tmp_path: Path, write_gguf: Write,
    gguf_tensors: Tensors, hf_shapes: Callable[..., dict[str, tuple[int, ...]]],
) -> None:  # fmt: skip
    path = write_gguf(tmp_path / "m.gguf", gguf_tensors(arch, **options), arch=arch)
    config = resolve(str(path)).config
    assert config == _TINY | {"model_type": arch} | expected
    assert {t.hf_name: t.shape for t in named_tensors(read_gguf(str(path)), config)} == hf_shapes(**options)


def test_head_size_comes_from_key_length_where_it_is_given(tmp_path: Path, write_gguf: Write) -> None:
    config = _config(tmp_path, write_gguf, {"llama.attention.key_length": 32, "llama.attention.value_length": 32})
    assert config["head_dim"] == 32


def test_end_of_turn_tokens_end_an_answer_too(tmp_path: Path, write_gguf: Write) -> None:
    metadata = {"tokenizer.ggml.eot_token_id": 9, "tokenizer.ggml.eom_token_id": 2}
    path = write_gguf(tmp_path / "m.gguf", {"token_embd.weight": np.ones((4, 64), np.float32)}, metadata)
    checkpoint = resolve(str(path))
    assert checkpoint.generation_config["eos_token_id"] == [2, 9]
    assert checkpoint.eos_token_ids == (2, 9)


def test_sampling_defaults_of_a_file_are_those_of_its_model(tmp_path: Path, write_gguf: Write) -> None:
    given = {"temp": 0.7, "top_p": 0.95, "top_k": 20, "min_p": "0.1", "penalty_repeat": 1.1, "mirostat": 2}
    metadata = {f"general.sampling.{name}": value for name, value in given.items()}
    path = write_gguf(tmp_path / "m.gguf", {"token_embd.weight": np.ones((4, 64), np.float32)}, metadata)
    found = resolve(str(path)).generation_config
    expected = {"temperature": 0.7, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.1}
    assert {name: found.get(name) for name in expected} == expected and "min_p" not in found


@pytest.mark.parametrize(("window", "defaults"), [(-1, {"repetition_penalty": 1.1}), (64, {})])
def test_a_penalty_of_the_last_tokens_is_no_penalty_of_all(window: int, defaults: dict[str, float]) -> None:
    metadata = {"general.sampling.penalty_repeat": 1.1, "general.sampling.penalty_last_n": window}
    file: Any = SimpleNamespace(metadata=metadata)
    assert _sampling_defaults(file) == defaults


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
ENDED = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|done|>\n{% endfor %}"
OPEN = "{% for m in messages %}<|user|>{{ m.content }}{{ eos_token }}{% endfor %}"


@pytest.mark.parametrize(
    ("tokens", "template", "eos"),
    [
        (["a", "b", "</s>", "<|im_end|>", "<|im_start|>"], CHATML, (2, 3)),
        (["a", "b", "</s>", "<|eot_id|>", "<end_of_turn>"], None, (2, 3, 4)),
        (["a", "b", "</s>", "<|done|>", "<|user|>"], ENDED, (2, 3)),
        (["a", "b", "</s>", "<|done|>", "<|user|>"], OPEN, (2,)),
        (["a", "b", "</s>", "<|done|>", "<|user|>"], "{{ raise_exception('no') }}", (2,)),
        # Harmony's messages end with <|end|>, and its turns do not.
        (["a", "b", "<|return|>", "<|call|>", "<|end|>"], None, (2, 3)),
        (["a", "b", "</s>", "<|end|>", "c"], None, (2, 3)),
        # Muse Glimmer's reasoning is a message of its own.
        (["a", "b", "</s>", "<|eot|>", "<|eom|>"], "{{ '<|start|>assistant to=self<|message|>' }}", (2, 3)),
        (["a", "b", "</s>", "<|eot|>", "<|eom|>"], CHATML, (2, 3, 4)),
    ],
)
def test_ends_of_turns_that_a_file_does_not_name_are_known_by_their_text_or_by_the_template(
    tokens: list[str], template: str | None, eos: tuple[int, ...], tmp_path: Path, write_gguf: Write
) -> None:
    metadata: dict[str, Any] = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1, 1, 3, 3, 3]}
    metadata |= {"tokenizer.ggml.eos_token_id": 2} | ({"tokenizer.chat_template": template} if template else {})
    path = write_gguf(tmp_path / "m.gguf", {"token_embd.weight": np.ones((5, 64), np.float32)}, metadata)
    assert resolve(str(path)).eos_token_ids == eos


@pytest.mark.parametrize(("array", "dtype"), [(np.float32, "float32"), (np.float16, "bfloat16")])
def test_only_a_file_of_float32_asks_for_float32(array: type, dtype: str, tmp_path: Path, write_gguf: Write) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"token_embd.weight": np.ones((4, 64), array)})
    assert resolve(str(path)).config["dtype"] == dtype


def test_linear_rope_scaling_is_carried_over(tmp_path: Path, write_gguf: Write) -> None:
    config = _config(tmp_path, write_gguf, {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    assert config["rope_parameters"] == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    old = _config(tmp_path, write_gguf, {"llama.rope.scale_linear": 2.0})
    assert old["rope_parameters"] == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}


@pytest.mark.parametrize(("factor", "head_dim"), [(8.0, 128), (32.0, 64)])  # Llama 3.1 and 3.2
def test_llama3_rope_is_recovered_from_the_divisors_of_its_frequencies(
    factor: float, head_dim: int, tmp_path: Path, write_gguf: Write
) -> None:
    divisors = _llama3_divisors(factor, head_dim)
    config = _config(
        tmp_path, write_gguf, {"llama.rope.freq_base": 500000.0, "llama.attention.key_length": head_dim,
        "llama.attention.value_length": head_dim}, {"rope_freqs.weight": divisors},
    )  # fmt: skip
    assert config["rope_parameters"] == {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip


def _llama3_divisors(factor: float, head_dim: int, low: float = 1.0, high: float = 4.0) -> np.ndarray:
    """As transformers' llama3 rope divides its frequencies, one at a time and by cases."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * 500000.0 ** (i / head_dim)
        if wavelength < 8192 / high:
            divisors.append(1.0)
        elif wavelength > 8192 / low:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


def test_divisors_of_another_rope_scaling_are_refused(tmp_path: Path, write_gguf: Write) -> None:
    metadata = {"llama.rope.freq_base": 500000.0}
    divisors = {"rope_freqs.weight": np.linspace(1, 9, 8, dtype=np.float32)}
    with pytest.raises(LoadError, match="is not Llama 3's rope scaling"):
        _config(tmp_path, write_gguf, metadata, divisors)
    ones = {"rope_freqs.weight": np.ones(8, np.float32)}
    assert _config(tmp_path, write_gguf, metadata, ones)["rope_parameters"]["rope_type"] == "default"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.rope.scaling.type": "su"}, "rope scaling 'su' is not built"),
        ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.original_context_length is absent"),
        ({"llama.expert_count": 8}, "llama.expert_used_count is absent"),
        ({"llama.context_length": None}, "llama.context_length is absent"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is absent"),
        ({"llama.attention.head_count": [4, 8]}, r"head_count is \[4, 8\], which is not one whole number"),
        ({"llama.attention.head_count": 0}, "0 query and 2 key/value heads"),
        ({"llama.attention.value_length": 8}, "keys of 16 and values of 8"),
        ({"llama.block_count": 10**9}, "metadata key llama.block_count is 1000000000"),
        ({"llama.block_count": [-2, -2]}, "llama.block_count is -2, which is not one whole number"),
        ({"llama.context_length": 1 << 31}, "llama.context_length is 2147483648, which is not one whole number"),
        ({"llama.embedding_length": 2}, "llama.embedding_length is 2, which is not an element for each head"),
        ({"llama.attention.key_length": 0}, "llama.attention.key_length is 0, which is not a size or count above 0"),
        ({"tokenizer.ggml.eos_token_id": "x"}, "tokenizer.ggml.eos_token_id is x, no token id"),
        ({"tokenizer.ggml.eot_token_id": [1, 2]}, r"tokenizer.ggml.eot_token_id is \[1, 2\], no token id"),
    ],
)
def test_what_is_not_built_is_refused_by_name(
    metadata: dict[str, Any], message: str, tmp_path: Path, write_gguf: Write
) -> None:
    with pytest.raises(LoadError, match=message):
        _config(tmp_path, write_gguf, metadata)


def test_a_number_may_be_listed_for_many_layers(tmp_path: Path, write_gguf: Write) -> None:
    many = {"llama.block_count": [2] * (1 << 17), "llama.feed_forward_length": [0, 96] * (1 << 16)}
    config = _config(tmp_path, write_gguf, many)
    assert (config["num_hidden_layers"], config["intermediate_size"]) == (2, 96)


@pytest.mark.parametrize("num_rows", [2, 66])
def test_rows_that_no_heads_divide_are_refused(num_rows: int, tmp_path: Path, write_gguf: Write) -> None:
    tensors = {"token_embd.weight": np.ones((4, 64), np.float32), "blk.0.attn_q.weight": np.ones((num_rows, 64), "f")}
    file = read_gguf(str(write_gguf(tmp_path / "m.gguf", tensors)))
    with pytest.raises(LoadError, match=f"do not divide the {num_rows} rows of blk.0.attn_q.weight"):
        list(named_tensors(file, gguf_config(file)[0]))


def test_settings_of_layers_are_numbers_for_all_layers(tmp_path: Path, write_gguf: Write) -> None:
    embeddings = {"token_embd.weight": np.ones((4, 64), np.float32)}
    for value in ([1.0], ["a", "b"]):
        path = write_gguf(tmp_path / "m.gguf", embeddings, {"llama.activation_sparsity_scale": value})
        with pytest.raises(LoadError, match=r"llama\.activation_sparsity_scale is not a number for each of 2 layers"):
            each(Metadata(read_gguf(str(path)), "llama"), "activation_sparsity_scale")


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path, write_gguf: Write) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"token_embd.weight": np.ones((4, 64), np.float32)}, arch="rwkv7")
    with pytest.raises(LoadError, match="architecture 'rwkv7' is not built yet; these are: llama, qwen2moe, qwen3moe"):
        resolve(str(path))


def test_experts_are_refused_where_they_are_not_built(tmp_path: Path, write_gguf: Write) -> None:
    path = write_gguf(
        tmp_path / "m.gguf",
        {"token_embd.weight": np.ones((4, 64), np.float32)},
        {"qwen2.expert_count": 8},
        arch="qwen2",
    )
    with pytest.raises(LoadError, match="architecture 'qwen2' with experts is not built yet; these are: llama,"):
        resolve(str(path))


def test_biases_on_some_projections_only_are_refused(tmp_path: Path, write_gguf: Write) -> None:
    biased = {"blk.0.attn_q.bias": np.ones(64, np.float32), "blk.0.attn_k.weight": np.ones((32, 64), np.float32)}
    with pytest.raises(LoadError, match="biases on attn_q but not on all of"):
        _config(tmp_path, write_gguf, {}, biased)


def test_a_file_without_embeddings_is_no_model(tmp_path: Path, write_gguf: Write) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"output_norm.weight": np.ones(64, np.float32)})
    with pytest.raises(LoadError, match=r"no tensor token_embd\.weight"):
        resolve(str(path))


def _config(
    tmp_path: Path, write_gguf: Write, metadata: dict[str, Any], tensors: dict[str, np.ndarray] | None = None
) -> dict[str, Any]:
    embeddings = {"token_embd.weight": np.ones((4, 64), np.float32)}
    return resolve(str(write_gguf(tmp_path / "m.gguf", embeddings | (tensors or {}), metadata))).config
