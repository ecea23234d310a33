"""Gemma 3n and 4. Layers have heads of two sizes; late layers may read the keys and values of earlier layers; each
layer has an embedding of its own; experts stand beside a dense feed-forward.
"""

from dataclasses import replace
from typing import Any

from octavo.errors import LoadError
from octavo.layers.altup import AltUpDescription
from octavo.layers.experts import PartNorms, stacked
from octavo.layers.per_layer_embeddings import PerLayerEmbeddingsDescription
from octavo.layers.rotary import RopeConfig
from octavo.models.config_reader import Config, Family, Setting, activation_of, rms, rope_of
from octavo.models.families.settings import AROUND, ROOT, all_but_every, by_layer, shared_expert, sliding

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def _layer_type(config: Config, i: int) -> str:
    """Return the layer's type. The last layer has full attention, whatever config.json says."""
    if i == config["num_hidden_layers"] - 1:
        return "full_attention"
    return str(config["layer_types"][i])


def _own(config: Config, i: int, setting: str, of_full: str) -> Any:
    """Return a setting that layers with full attention may have of their own: by layer, as transformers 5 writes it, or
    `of_full` for all of them."""
    by_layer = {int(number): settings for number, settings in (config.get("per_layer_config") or {}).items()}
    if setting in by_layer.get(i, {}):
        return by_layer[i][setting]
    if not by_layer and _layer_type(config, i) == "full_attention" and config[of_full]:
        return config[of_full]
    return config[setting]


def _head_size(config: Config, i: int) -> int:
    return int(_own(config, i, "head_dim", "global_head_dim"))


def _kv_heads(config: Config, i: int) -> int:
    if not config["attention_k_eq_v"]:
        return int(config["num_key_value_heads"])
    return int(_own(config, i, "num_key_value_heads", "num_global_key_value_heads"))


def _rope(config: Config, i: int) -> RopeConfig:
    return rope_of(config, i, _head_size(config, i), {}, _layer_type(config, i))


def _reads_layer(config: Config, i: int, type_of: Setting = _layer_type) -> int | None:
    """Return the layer whose keys and values layer i reads; None if it has its own. Late layers read those of the last
    layer of their type that has its own."""
    first = config["num_hidden_layers"] - config["num_kv_shared_layers"]
    if i < first:
        return None
    kind = type_of(config, i)
    found = [j for j in range(first) if type_of(config, j) == kind]
    if not found:
        raise LoadError(f"layer {i} needs the keys of an earlier layer of type {kind}, but there is no such layer.")
    return found[-1]


def _keys_are_values(config: Config, i: int) -> bool:
    return bool(config["attention_k_eq_v"]) and _layer_type(config, i) == "full_attention"


def _qkv_names(config: Config, i: int) -> tuple[str, ...]:
    if _reads_layer(config, i) is not None:
        return _QKV[:1]
    return _QKV[:2] if _keys_are_values(config, i) else _QKV


def _window(config: Config, i: int) -> int:
    if config["use_bidirectional_attention"] == "all":  # "vision" applies to pictures only
        raise LoadError("bidirectional attention in all layers of Gemma 4 is not built yet.")
    return int(config["sliding_window"]) if _layer_type(config, i) == "sliding_attention" else 0


def _intermediate_size(config: Config, i: int) -> int:
    is_wide = config["use_double_wide_mlp"] and _reads_layer(config, i) is not None
    return int(config["intermediate_size"] * (2 if is_wide else 1))


def _per_layer_embeddings(config: Config, _: int) -> PerLayerEmbeddingsDescription | None:
    size = config["hidden_size_per_layer_input"]
    if not size:
        return None
    activation = activation_of(config["hidden_act"])
    return PerLayerEmbeddingsDescription(config["vocab_size_per_layer_input"], size, activation, rms()(config, 0))


def _part_norms(config: Config, _: int) -> PartNorms:
    after = "post_feedforward_layernorm"
    return PartNorms(
        rms()(config, 0), before_shared="pre_feedforward_layernorm", after_shared=f"{after}_1",
        before="pre_feedforward_layernorm_2", after=f"{after}_2", router_scale="router.scale",
    )  # fmt: skip


def _reads_layer_3n(config: Config, i: int) -> int | None:
    return _reads_layer(config, i, lambda c, i: c["layer_types"][i])


def _sparsity(config: Config, i: int) -> float:
    if config["activation_sparsity_pattern"] is None:
        return 0.95 if i < 10 < config["num_hidden_layers"] else 0.0
    return float(by_layer("activation_sparsity_pattern")(config, i))


def _per_layer_embeddings_3n(config: Config, i: int) -> PerLayerEmbeddingsDescription | None:
    found = _per_layer_embeddings(config, i)
    assert found is not None
    scale = "altup.correct_output_scale" if config["altup_correct_scale"] else None
    return replace(found, num_streams=config["altup_num_inputs"], input_scale=scale)


def _unused_3n(config: Config, _: int) -> tuple[str, ...]:
    """Return unused tensors: keys and values of layers that read other layers', and scales if they are disabled."""
    layers = [f"model.layers.{i}." for i in range(config["num_hidden_layers"])]
    scales = [] if config["altup_correct_scale"] else [f"{layer}altup.correct_output_scale" for layer in layers]
    readers = [layer for i, layer in enumerate(layers) if _reads_layer_3n(config, i) is not None]
    parts = [f"{layer}self_attn.{part}." for layer in readers for part in ("k_proj", "v_proj", "k_norm", "v_norm")]
    return (*scales, *parts)


_GEMMA_4 = Family(
    attention={
        "head_size": _head_size, "num_kv_heads": _kv_heads, "scale": 1.0, "rope": _rope, "window": _window,
        "qk_norm": rms(), "value_norm": rms(has_weight=False), "keys_are_values": _keys_are_values,
        "reads_layer": _reads_layer, "qkv_names": _qkv_names,
    },
    feed_forward={"intermediate_size": _intermediate_size},
    experts={
        "router_names": ("router.proj",),
        "names": (stacked("experts.gate_up_proj", "experts.down_proj"),),
        "shared": shared_expert(_intermediate_size, "mlp"), "weight_scales": "router.per_expert_scale",
        "part_norms": _part_norms,
    },
    is_sparse=lambda c, _: bool(c["enable_moe_block"]),
    layer=AROUND | {
        "residual_scale_name": "layer_scalar",
        "feed_forward_norm": lambda c, _: None if c["enable_moe_block"] else AROUND["feed_forward_norm"],
    },
    model=ROOT | {"per_layer_embeddings": _per_layer_embeddings}, layer_type=all_but_every(6),
)  # fmt: skip
FAMILIES = {
    "Gemma3nForCausalLM": Family(
        attention={
            "scale": 1.0, "qk_norm": rms(), "value_norm": rms(has_weight=False), "reads_layer": _reads_layer_3n,
            "qkv_names": lambda c, i: _QKV if _reads_layer_3n(c, i) is None else _QKV[:1],
        },
        feed_forward={"intermediate_size": by_layer("intermediate_size"), "sparsity": _sparsity}, layer=AROUND,
        model=ROOT | {
            "per_layer_embeddings": _per_layer_embeddings_3n,
            "altup": lambda c, _: AltUpDescription(c["altup_num_inputs"], c["laurel_rank"]), "unused": _unused_3n,
        },
        layer_type=sliding(lambda _, i: (i + 1) % 5), refuses=("altup_active_idx",),
    ),
    "Gemma4ForCausalLM": _GEMMA_4,
    "Gemma4UnifiedForCausalLM": _GEMMA_4,
}  # fmt: skip
