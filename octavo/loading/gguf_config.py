"""What a GGUF file says in Hugging Face's words: its metadata as config.json, and its tensors under their HF names.

Architectures llama (with experts too), qwen2, qwen2moe, qwen3, qwen3moe and olmoe are read; the rest is refused by
name.
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
# Of files that have experts.
_EXPERT_ARCHITECTURES = {
    "llama": "MixtralForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
}
# Those whose weights of experts are divided by their sum, where the file does not say (llama.cpp has it in its code).
_NORMALIZING = ("llama", "qwen3moe")

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
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
ROPE_FREQS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor under its Hugging Face name. `rotary_heads` above 0 says that its rows, that many heads of them, lie
    interleaved for ggml's rotary kernel (element pairs side by side) and must be put back into two halves."""

    hf_name: str
    info: TensorInfo
    rotary_heads: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """In Hugging Face's words."""
        is_row = self.hf_name.endswith("shared_expert_gate.weight") and len(self.info.shape) == 1
        return (1, *self.info.shape) if is_row else self.info.shape


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
    num_experts = _number(file, f"{architecture}.expert_count", 0)
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
        "architectures": [(_EXPERT_ARCHITECTURES if num_experts else _ARCHITECTURES)[architecture]],
        "model_type": architecture,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": _number(file, f"{architecture}.feed_forward_length", 0 if num_experts else None),
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
    if num_experts:
        config |= _experts(file, architecture, num_experts, num_layers)
    ids = _token_ids(file)
    return config | ids, ids


def _experts(file: GGUFFile, architecture: str, num_experts: int, num_layers: int) -> dict[str, Any]:
    """A layer without a router is dense."""
    config = {
        "num_experts": num_experts,
        "num_experts_per_tok": _number(file, f"{architecture}.expert_used_count"),
        "norm_topk_prob": bool(file.metadata.get(f"{architecture}.expert_weights_norm", architecture in _NORMALIZING)),
        "mlp_only_layers": [i for i in range(num_layers) if f"blk.{i}.ffn_gate_inp.weight" not in file.tensors],
    }
    for key, setting in (
        ("expert_feed_forward_length", "moe_intermediate_size"),
        ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
    ):
        if f"{architecture}.{key}" in file.metadata:
            config[setting] = _number(file, f"{architecture}.{key}")
    return config


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
    """One that is read, with experts or without as the file has it."""
    architecture = file.metadata.get("general.architecture")
    has_experts = bool(file.metadata.get(f"{architecture}.expert_count"))
    read = _EXPERT_ARCHITECTURES if has_experts else _ARCHITECTURES
    if not isinstance(architecture, str) or architecture not in read:
        raise LoadError(
            f"{file.path}: GGUF architecture {architecture!r}{' with experts' if has_experts else ''} is not built "
            f"yet; these are: {', '.join(read)}."
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
    return {*_ARCHITECTURES.values(), *_EXPERT_ARCHITECTURES.values()}
