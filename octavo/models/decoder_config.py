"""A decoder-only transformer as numbers and switches, read from Hugging Face's config.json vocabulary.

Architectures of the Llama family differ only in these settings; `octavo.models.decoder` builds the network from them.
No torch here: the server process reads sizes from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo.errors import LoadError


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: its base, how many elements of a head turn, and how positions are stretched."""

    theta: float
    rotary_dim: int
    kind: str = "default"  # "default", "linear" or "llama3"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes in elements; `num_` are counts."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm of each query and key head before the rotation (Qwen3)
    fused_projections: bool = False  # the checkpoint holds qkv_proj and gate_up_proj (Phi-3)
    sliding_window: int = 0  # 0 is none
    embedding_multiplier: float = 1.0  # Granite's four scalars
    residual_multiplier: float = 1.0
    attention_multiplier: float | None = None
    logits_divisor: float = 1.0
    no_rope_layers: tuple[bool, ...] = ()  # per layer, True where positions are not rotated (SmolLM3); empty: none

    @property
    def attention_scale(self) -> float:
        return self.head_size**-0.5 if self.attention_multiplier is None else self.attention_multiplier

    def num_weight_parameters(self) -> int:
        """Parameters of the matrices (norms and biases are noise beside them)."""
        attention = self.hidden_size * self.head_size * (2 * self.num_heads + 2 * self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * (attention + mlp) + embeddings

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> DecoderConfig:
        """Read config.json. Raises `LoadError` for an architecture or a setting that is not built."""
        architecture = (config.get("architectures") or ["(none)"])[0]
        read = _ARCHITECTURES.get(architecture)
        if read is None:
            raise LoadError(
                f"architecture {architecture} is not built yet; Octavo runs {', '.join(sorted(_ARCHITECTURES))}."
            )
        try:
            decoder = cls(**_common(config, architecture) | read(config))
        except KeyError as e:
            raise LoadError(f"the model's configuration has no {e.args[0]!r}.") from None
        if decoder.num_heads % decoder.num_kv_heads:
            raise LoadError(
                f"{decoder.num_heads} query heads do not divide into {decoder.num_kv_heads} key/value heads."
            )
        return decoder


def _common(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise LoadError(f"activation {activation!r} of {architecture} is not built yet.")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise LoadError(f"checkpoints quantized with {method!r} are not built yet; GGUF files are.")
    num_heads = config["num_attention_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // num_heads
    return {
        "architecture": architecture,
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": num_heads,
        "num_kv_heads": config.get("num_key_value_heads") or num_heads,
        "head_size": head_size,
        "max_position_embeddings": config["max_position_embeddings"],
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope": _rope(config, head_size),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
    }


def _rope(config: dict[str, Any], head_size: int) -> RopeConfig:
    # transformers 5 writes rope_parameters; earlier versions wrote rope_theta and rope_scaling.
    scaling = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ("default", "linear", "llama3"):
        raise LoadError(f"rope scaling {kind!r} is not built yet; default, linear and llama3 are.")
    partial = scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    return RopeConfig(
        theta=float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0),
        rotary_dim=int(head_size * partial),
        kind=kind,
        factor=float(scaling.get("factor") or 1.0),
        low_freq_factor=float(scaling.get("low_freq_factor") or 1.0),
        high_freq_factor=float(scaling.get("high_freq_factor") or 4.0),
        original_max_position=int(scaling.get("original_max_position_embeddings") or config["max_position_embeddings"]),
    )


def _llama(config: dict[str, Any]) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", False))
    return {"qkv_bias": bias, "output_bias": bias, "mlp_bias": bool(config.get("mlp_bias", False))}


def _mistral(config: dict[str, Any]) -> dict[str, Any]:
    return {"sliding_window": config.get("sliding_window") or 0}


def _qwen2(config: dict[str, Any]) -> dict[str, Any]:
    return {"qkv_bias": True, "sliding_window": _qwen_window(config)}


def _qwen3(config: dict[str, Any]) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", False))
    return {"qk_norm": True, "qkv_bias": bias, "output_bias": bias, "sliding_window": _qwen_window(config)}


def _qwen_window(config: dict[str, Any]) -> int:
    if not config.get("use_sliding_window"):
        return 0
    if config.get("max_window_layers", 0) > 0:
        raise LoadError("sliding windows in only some layers (max_window_layers) are not built yet.")
    return config.get("sliding_window") or 0


def _phi3(config: dict[str, Any]) -> dict[str, Any]:
    return {"fused_projections": True, "sliding_window": config.get("sliding_window") or 0}


def _granite(config: dict[str, Any]) -> dict[str, Any]:
    return _llama(config) | {
        "embedding_multiplier": config.get("embedding_multiplier", 1.0),
        "residual_multiplier": config.get("residual_multiplier", 1.0),
        "attention_multiplier": config.get("attention_multiplier"),
        "logits_divisor": config.get("logits_scaling", 1.0),
    }


def _smollm3(config: dict[str, Any]) -> dict[str, Any]:
    use_rope = config.get("no_rope_layers") or []  # 1 where the layer rotates, despite the name
    return _llama(config) | {"no_rope_layers": tuple(not flag for flag in use_rope)}


_ARCHITECTURES = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Phi3ForCausalLM": _phi3,
    "GraniteForCausalLM": _granite,
    "SmolLM3ForCausalLM": _smollm3,
}
