"""config.json -> `ModelDescription`, for the architectures of the Llama family: a line each in a table.

A setting that config.json leaves out has the default of the architecture's configuration class in transformers 5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.errors import LoadError
from octavo.layers.attention import AttentionDescription
from octavo.layers.feed_forward import FeedForwardDescription
from octavo.layers.norm import NormDescription
from octavo.layers.rotary import RopeConfig
from octavo.models.description import LayerDescription, ModelDescription

Config = Mapping[str, Any]

# What most configuration classes have. Sizes have no default here: without them config.json is no model's.
_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
    "use_sliding_window": False,
    "layer_types": None,
}
# Of query, key and value; of gate and up.
_NAMES: tuple[tuple[str, ...], tuple[str, ...]] = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
)
_STACKED_NAMES: tuple[tuple[str, ...], tuple[str, ...]] = (("self_attn.qkv_proj",), ("mlp.gate_up_proj",))


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How an architecture differs from Llama. A string for a bias is the setting that says whether there is one."""

    defaults: Mapping[str, Any]  # of the configuration class, where they are not `_DEFAULTS`
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    is_stacked: bool = False  # the checkpoint has qkv_proj and gate_up_proj
    has_multipliers: bool = False  # of embedding, residual, scores and logits
    slides: Callable[[Config], list[bool]] | None = None  # which layers have the window; default: none
    has_window_switch: bool = False  # use_sliding_window
    rotates: Callable[[Config], list[bool]] | None = None  # whether each layer does; default: all do


def read(name: str, family: Family, given: Config) -> ModelDescription:
    """Raises `LoadError` for a setting that is not built, `KeyError` for one that is absent and has no default."""
    if given.get("quantization_config"):
        method = given["quantization_config"].get("quant_method", "unknown")
        raise LoadError(f"checkpoints quantized with {method!r} are not built yet; GGUF files are.")
    config = {**_DEFAULTS, **family.defaults, **given}
    hidden_size, num_layers = config["hidden_size"], config["num_hidden_layers"]
    num_heads = config["num_attention_heads"]
    num_kv_heads = config["num_key_value_heads"] or num_heads
    if num_heads % num_kv_heads:
        raise LoadError(f"{num_heads} query heads do not divide into {num_kv_heads} key/value heads.")
    head_size = config["head_dim"] or hidden_size // num_heads
    multipliers = config if family.has_multipliers else {}
    norm = NormDescription(config["rms_norm_eps"])
    qkv_names, up_names = _STACKED_NAMES if family.is_stacked else _NAMES
    feed_forward = FeedForwardDescription(
        intermediate_size=config["intermediate_size"],
        activation={"swish": "silu"}.get(config["hidden_act"], config["hidden_act"]),
        bias=_flag(config, family.mlp_bias),
        up_names=up_names,
    )
    rope = _rope(config, head_size)
    windows = _windows(config, family)
    rotates = family.rotates(config) if family.rotates else [True] * num_layers
    layers = tuple(
        LayerDescription(
            attention=AttentionDescription(
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_size=head_size,
                scale=multipliers.get("attention_multiplier", head_size**-0.5),
                rope=rope if rotates[i] else None,
                window=windows[i],
                qk_norm=norm if family.qk_norm else None,
                qkv_bias=_flag(config, family.qkv_bias),
                output_bias=_flag(config, family.output_bias),
                qkv_names=qkv_names,
            ),
            feed_forward=feed_forward,
            norm=norm,
            residual_multiplier=multipliers.get("residual_multiplier", 1.0),
        )
        for i in range(num_layers)
    )
    return ModelDescription(
        architecture=name,
        vocab_size=config["vocab_size"],
        hidden_size=hidden_size,
        max_position_embeddings=config["max_position_embeddings"],
        tie_word_embeddings=bool(config["tie_word_embeddings"]),
        layers=layers,
        norm=norm,
        embedding_multiplier=multipliers.get("embedding_multiplier", 1.0),
        logits_divisor=multipliers.get("logits_scaling", 1.0),
    )


def _flag(config: Config, setting: bool | str) -> bool:
    return setting if isinstance(setting, bool) else bool(config[setting])


def _rope(config: Config, head_size: int) -> RopeConfig:
    # transformers 5 writes rope_parameters; earlier versions wrote rope_theta and rope_scaling, which it prefers.
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ("default", "linear", "llama3"):
        raise LoadError(f"rope scaling {kind!r} is not built yet; default, linear and llama3 are.")
    original = config.get("original_max_position_embeddings") or scaling.get("original_max_position_embeddings")
    partial_factor = scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    return RopeConfig(
        theta=float(scaling.get("rope_theta") or config["rope_theta"]),
        rotary_dim=int(head_size * partial_factor),
        kind=kind,
        factor=float(scaling.get("factor") or 1.0),
        low_freq_factor=float(scaling.get("low_freq_factor") or 1.0),
        high_freq_factor=float(scaling.get("high_freq_factor") or 4.0),
        original_max_position=int(original or config["max_position_embeddings"]),
    )


def _per_layer(config: Config, setting: str) -> list[Any]:
    """A setting that is a list with an entry for each layer at least."""
    values, num_layers = config[setting], config["num_hidden_layers"]
    if len(values) < num_layers:
        raise LoadError(f"{setting} has {len(values)} entries for {num_layers} layers.")
    return list(values[:num_layers])


def _windows(config: Config, family: Family) -> list[int]:
    """Of each layer; 0 is none. `layer_types` says which layers have the window; where it is absent `slides` does."""
    if family.slides is None or (family.has_window_switch and not config["use_sliding_window"]):
        return [0] * config["num_hidden_layers"]
    if config["layer_types"] is None:
        slides = family.slides(config)
    else:
        types = _per_layer(config, "layer_types")
        for layer_type in types:
            if layer_type not in ("full_attention", "attention", "sliding_attention"):
                raise LoadError(
                    f"layer type {layer_type!r} is not built yet; full_attention and sliding_attention are."
                )
        slides = [layer_type == "sliding_attention" for layer_type in types]
    return [(config["sliding_window"] or 0) if layer_slides else 0 for layer_slides in slides]


def _all_slide(config: Config) -> list[bool]:
    return [True] * config["num_hidden_layers"]


def _late_layers_slide(config: Config) -> list[bool]:
    return [i >= config["max_window_layers"] for i in range(config["num_hidden_layers"])]


def _unrotated_layers_slide(config: Config) -> list[bool]:
    return [not rotates for rotates in _smollm3_rotates(config)]


def _smollm3_rotates(config: Config) -> list[bool]:
    if config["no_rope_layers"] is None:
        interval = config["no_rope_layer_interval"]
        return [(i + 1) % interval != 0 for i in range(config["num_hidden_layers"])]
    return [bool(flag) for flag in _per_layer(config, "no_rope_layers")]  # 1 where the layer rotates, despite the name


FAMILIES = {
    "LlamaForCausalLM": Family(
        defaults={"max_position_embeddings": 2048},
        qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias",
    ),
    "MistralForCausalLM": Family(
        defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        slides=_all_slide,
    ),
    "Qwen2ForCausalLM": Family(
        defaults={
            "max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096,
            "max_window_layers": 28,
        },
        qkv_bias=True,
        slides=_late_layers_slide, has_window_switch=True,
    ),
    "Qwen3ForCausalLM": Family(
        defaults={
            "max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096,
            "max_window_layers": 28,
        },
        qkv_bias="attention_bias", output_bias="attention_bias", qk_norm=True,
        slides=_late_layers_slide, has_window_switch=True,
    ),
    "Phi3ForCausalLM": Family(
        defaults={
            "max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        },
        is_stacked=True,
        slides=_all_slide,
    ),
    "GraniteForCausalLM": Family(
        defaults={
            "max_position_embeddings": 2048, "embedding_multiplier": 1.0, "residual_multiplier": 1.0,
            "attention_multiplier": 1.0, "logits_scaling": 1.0,
        },
        qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias", has_multipliers=True,
    ),
    "SmolLM3ForCausalLM": Family(
        defaults={
            "max_position_embeddings": 32768, "num_key_value_heads": 4, "tie_word_embeddings": True,
            "rope_theta": 2000000.0, "no_rope_layers": None, "no_rope_layer_interval": 4,
        },
        qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias",
        slides=_unrotated_layers_slide, has_window_switch=True, rotates=_smollm3_rotates,
    ),
}  # fmt: skip
