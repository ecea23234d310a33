"""What a GGUF file says in Hugging Face's words: its metadata as config.json, and its tensors under their HF names.

Architectures llama, qwen2 and qwen3 are read; the rest is refused by name.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from octavo.errors import LoadError
from octavo.loading.gguf import GGUFFile, TensorInfo

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FREQS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor under its Hugging Face name. `rotary_heads` above 0 says that its rows, that many heads of them, lie
    interleaved for ggml's rotary kernel (element pairs side by side) and must be put back into two halves."""

    hf_name: str
    info: TensorInfo
    rotary_heads: int = 0


def named_tensors(file: GGUFFile) -> Iterator[NamedTensor]:
    """The tensors of the file that a model reads, in file order. Names that are not known pass as they are."""
    architecture = _architecture(file)
    # llama.cpp's converter interleaves the rows of q and k for `llama` only; the qwen family keeps the halves apart.
    heads = {}
    if architecture == "llama":
        num_heads = _number(file, "llama.attention.head_count")
        heads = {"attn_q": num_heads, "attn_k": _number(file, "llama.attention.head_count_kv", num_heads)}
    for info in file.tensors.values():
        if info.name == ROPE_FREQS:
            continue  # part of the configuration, see _rope
        parts = info.name.split(".")
        if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
            _, layer, module, kind = parts
            yield NamedTensor(f"model.layers.{layer}.{_LAYER_NAMES[module]}.{kind}", info, heads.get(module, 0))
        else:
            yield NamedTensor(_TOP_NAMES.get(info.name, info.name), info)


def gguf_config(file: GGUFFile) -> tuple[dict[str, Any], dict[str, Any]]:
    """The file's config.json and generation_config.json. Raises `LoadError` where it cannot say them."""
    architecture = _architecture(file)
    if _number(file, f"{architecture}.expert_count", 0):
        raise LoadError(f"{file.path}: mixture-of-experts models of architecture {architecture} are not built yet.")
    tensors = file.tensors
    if "token_embd.weight" not in tensors:
        raise LoadError(f"{file.path} has no tensor token_embd.weight: it is not a whole model.")
    hidden_size = _number(file, f"{architecture}.embedding_length")
    num_heads = _number(file, f"{architecture}.attention.head_count")
    num_kv_heads = _number(file, f"{architecture}.attention.head_count_kv", num_heads)
    if num_heads <= 0 or num_kv_heads <= 0:
        raise LoadError(f"{file.path} is damaged: it counts {num_heads} query and {num_kv_heads} key/value heads.")
    head_dim = _number(file, f"{architecture}.attention.key_length", hidden_size // num_heads)
    value_dim = _number(file, f"{architecture}.attention.value_length", head_dim)
    if value_dim != head_dim:
        raise LoadError(f"{file.path}: heads with keys of {head_dim} and values of {value_dim} are not built.")
    rotary_dim = _number(file, f"{architecture}.rope.dimension_count", head_dim)
    num_layers = _number(file, f"{architecture}.block_count")
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[architecture]],
        "model_type": architecture,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": _number(file, f"{architecture}.feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": _number(file, f"{architecture}.context_length"),
        "rms_norm_eps": _real(file, f"{architecture}.attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(file, architecture, head_dim, rotary_dim),
        "tie_word_embeddings": "output.weight" not in tensors,
        "dtype": "float32" if all(t.type.name == "F32" for t in tensors.values()) else "bfloat16",
    }
    if architecture == "llama":
        config["attention_bias"] = _bias(file, num_layers, ("attn_q", "attn_k", "attn_v", "attn_output"))
        config["mlp_bias"] = _bias(file, num_layers, ("ffn_gate", "ffn_up", "ffn_down"))
    ids = _token_ids(file)
    return config | ids, ids


def _token_ids(file: GGUFFile) -> dict[str, Any]:
    read = {
        name: file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom", "padding")
    }
    # A chat model ends its turn with eot or eom (Llama 3's <|eot_id|>, <|eom_id|>) where eos ends a document.
    eos = list(dict.fromkeys(read[name] for name in ("eos", "eot", "eom") if read[name] is not None))
    ids = {
        "bos_token_id": read["bos"],
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": read["padding"],
    }
    return {key: value for key, value in ids.items() if value is not None}


def _architecture(file: GGUFFile) -> str:
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _ARCHITECTURES:
        raise LoadError(
            f"{file.path}: GGUF architecture {architecture!r} is not built yet; these are: {', '.join(_ARCHITECTURES)}."
        )
    return architecture


def _number(file: GGUFFile, key: str, default: int | None = None) -> int:
    value = file.metadata.get(key, default)
    if not isinstance(value, int):
        found = "is absent" if value is None else f"is {str(value)[:60]}, which is not one whole number"
        raise LoadError(f"{file.path}: metadata key {key} {found}.")
    return value


def _real(file: GGUFFile, key: str, default: float | None = None) -> float:
    value = file.metadata.get(key, default)
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        found = "is absent" if value is None else f"is {str(value)[:60]}, which is not one number"
        raise LoadError(f"{file.path}: metadata key {key} {found}.")
    # Files hold float32: 1e-05 arrives as 9.999999747378752e-06. Seven digits give back what was written.
    return float(f"{value:.7g}")


def _bias(file: GGUFFile, num_layers: int, modules: tuple[str, ...]) -> bool:
    """Whether these modules have biases; all of them or none, since config.json has one switch for the group."""
    found = [m for m in modules if num_layers and f"blk.0.{m}.bias" in file.tensors]
    if found and len(found) != len(modules):
        raise LoadError(
            f"{file.path}: biases on {', '.join(found)} but not on all of {', '.join(modules)} are not built."
        )
    return bool(found)


def _rope(file: GGUFFile, architecture: str, head_dim: int, rotary_dim: int) -> dict[str, Any]:
    """config.json's rope_parameters."""
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": _real(file, f"{architecture}.rope.freq_base", 10000.0),
    }
    if rotary_dim != head_dim:
        rope["partial_rotary_factor"] = rotary_dim / head_dim
    kind = file.metadata.get(f"{architecture}.rope.scaling.type", "none")
    # Files from before rope.scaling.type have only the factor, and mean linear scaling.
    old_factor = _real(file, f"{architecture}.rope.scale_linear", 1.0)
    factor = _real(file, f"{architecture}.rope.scaling.factor", old_factor)
    if kind == "linear" or (kind == "none" and old_factor != 1.0):
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind != "none":
        raise LoadError(f"{file.path}: rope scaling {kind!r} is not built yet; none, linear and llama3 are.")
    freqs = file.tensors.get(ROPE_FREQS)
    if freqs is None:
        return rope
    if freqs.type.name != "F32" or rope["rope_type"] != "default":
        raise LoadError(
            f"{file.path}: {ROPE_FREQS} of type {freqs.type.name} with rope {rope['rope_type']} is not built."
        )
    divisors = struct.unpack_from(f"<{freqs.num_bytes // 4}f", file.data, freqs.offset)
    return rope | _llama3_rope(file, architecture, divisors, rope["rope_theta"])


def _llama3_rope(file: GGUFFile, architecture: str, divisors: tuple[float, ...], theta: float) -> dict[str, Any]:
    """The llama3 scaling that these divisors of the frequencies were computed from.

    The converter writes the divisors in place of the four parameters. Every released model has the same three of them
    (low 1, high 4, original context 8192) and the largest divisor is the fourth, so they are recomputed and compared.
    """
    factor = max(divisors)
    if all(d == 1.0 for d in divisors):
        return {}
    if not (0 < factor < math.inf and theta > 0):
        raise LoadError(f"{file.path} is damaged: {ROPE_FREQS} goes up to {factor} with rope.freq_base {theta}.")
    low, high = 1.0, 4.0
    original = _number(file, f"{architecture}.rope.scaling.original_context_length", 8192)
    for i, divisor in enumerate(divisors):
        wavelength = 2 * math.pi * theta ** (i / len(divisors))
        smooth = min(1.0, max(0.0, (original / wavelength - low) / (high - low)))
        expected = 1 / ((1 - smooth) / factor + smooth)
        if not math.isclose(expected, divisor, rel_tol=1e-3):
            raise LoadError(
                f"{file.path}: {ROPE_FREQS} is not Llama 3's rope scaling (frequency {i} is divided by {divisor:.4g}, "
                f"expected {expected:.4g}); other scalings by frequency are not built yet."
            )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def architectures() -> set[str]:
    """Names of the architectures, as config.json has them, of which GGUF files are read."""
    return set(_ARCHITECTURES.values())
