"""The architectures with Mamba's state spaces: alone, with attention, and with a transformer that layers share."""

import math
from typing import Any

from octavo.errors import LoadError
from octavo.layers.attention import AttentionDescription
from octavo.layers.experts import ExpertNames, one_by_one, stacked
from octavo.layers.feed_forward import FeedForwardDescription
from octavo.layers.mamba import MambaDescription
from octavo.layers.norm import NormDescription
from octavo.layers.reused_layer import ReusedLayerDescription
from octavo.models.config_reader import Config, Family, Setting, activation_of, head_size, key, rope_of, routing
from octavo.models.description import OutputScales
from octavo.models.families.settings import (
    GRANITE_EXPERTS,
    SIGMOID_GROUPS,
    only_silu,
    shared_expert,
    where_no_attention,
)

_OWN_ACT = "mamba_hidden_act"  # the activation of Mamba layers, if feed-forwards have another


def _mamba(
    config: Config, num_heads: int, size: int, bias: str = "mamba_proj_bias", activation: str = "hidden_act",
    **changes: Any,
) -> MambaDescription:  # fmt: skip
    """Return a Mamba layer. `bias` names the setting for the biases of the first and the last matrix, `activation` the
    setting for the activation."""
    only_silu(config, activation)
    usual = {"bias": config[bias], "output_bias": config[bias], "conv_bias": config["mamba_conv_bias"]}
    return MambaDescription(num_heads, size, config["mamba_d_state"], config["mamba_d_conv"], **usual | changes)


def _mamba_1(config: Config, **changes: Any) -> MambaDescription:
    """Return a Mamba 1 layer: each channel is a head, and time steps come from a product of rank mamba_dt_rank."""
    channels, rank = int(config["mamba_expand"] * config["hidden_size"]), config["mamba_dt_rank"]
    rank = math.ceil(config["hidden_size"] / 16) if rank == "auto" else int(rank)
    return _mamba(config, channels, 1, time_rank=rank, **changes)


def _mamba_2(config: Config, num_heads: int, size: int, **changes: Any) -> MambaDescription:
    usual = {"num_groups": config["mamba_n_groups"], "norm": NormDescription(config["norm_eps"])}
    return _mamba(config, num_heads, size, **usual | changes)


def _limits(config: Config) -> tuple[float, float]:
    low, high = config["time_step_limit"] or (0.0, math.inf)
    # transformers writes infinity as {"__float__": "Infinity"}.
    return float(low), float(high["__float__"] if isinstance(high, dict) else high)


def _pure_1(config: Config, _: int) -> MambaDescription:
    inner = config.get("mixer_rms_eps")
    norm = None if inner is None else NormDescription(inner, has_weight=False)
    return _mamba_1(config, bias="use_bias", name="mixer", inner_norm=norm)


def _pure_2(config: Config, _: int) -> MambaDescription:
    heads, size, limit = config["num_heads"], config["head_dim"], _limits(config)
    return _mamba_2(config, heads, size, bias="use_bias", name="mixer", time_limit=limit)


def _jamba(config: Config, _: int) -> MambaDescription:
    return _mamba_1(config, inner_norm=NormDescription(config["norm_eps"]))


def _hybrid(config: Config, _: int, **changes: Any) -> MambaDescription:
    heads, size = config["mamba_n_heads"], config["mamba_d_head"]
    channels = config.get("mamba_d_ssm") or int(config["mamba_expand"] * config["hidden_size"])
    size = channels // heads if size == "auto" else size
    return _mamba_2(config, heads, size, **{"time_limit": _limits(config)} | changes)


def _falcon(config: Config, i: int) -> MambaDescription:
    """Return the Mamba layer of Falcon-H1, which runs in parallel to attention."""
    scale = config["ssm_in_multiplier"]
    if scale != 1.0 and config["mamba_proj_bias"]:
        raise LoadError(
            "mamba_proj_bias with an ssm_in_multiplier, which multiplies only the weights, is not built yet."
        )
    return _hybrid(
        config, i, norm=NormDescription(config["norm_eps"]) if config["mamba_rms_norm"] else None,
        norms_before_gate=config["mamba_norm_before_gate"], output_bias=config["projectors_bias"],
        multipliers=tuple(scale * multiplier for multiplier in config["ssm_multipliers"] or [1.0] * 5),
    )  # fmt: skip


def _falcon_scale(config: Config, _: int) -> float:
    """Return the scale of scores. It includes the multipliers of keys and of the inputs of queries and keys."""
    return float(head_size(config) ** -0.5 * config["key_multiplier"] * config["attention_in_multiplier"] ** 2)


def _jamba_type(config: Config, i: int) -> str:
    is_attention = i % config["attn_layer_period"] == config["attn_layer_offset"]
    return "full_attention" if is_attention else "linear_attention"


def _bamba_type(config: Config, i: int) -> str:
    return "full_attention" if i in (config["attn_layer_indices"] or ()) else "linear_attention"


def _nemotron_type(config: Config, i: int) -> str:
    letter = config["hybrid_override_pattern"][i]
    return {"M": "linear_attention", "*": "full_attention", "-": "mlp"}.get(letter, "moe")


def _nemotron(config: Config, i: int) -> MambaDescription | None:
    """Return the layer's Mamba layer, or None for a feed-forward or experts; each layer has one part only."""
    if config["layer_types"][i] in ("mlp", "moe"):
        return None
    heads, size = config["mamba_n_heads"], config["mamba_d_head"]
    # transformers 5 limits time steps from below by time_step_min, a setting for the initial biases. NVIDIA's training
    # code and vLLM use time_step_limit, which sets no limit in these models. Perplexity is higher with time_step_min.
    limit = _limits(config)
    return _mamba_2(config, heads, size, bias="use_bias", activation=_OWN_ACT, name="mixer", time_limit=limit)


_nemotron_shared = shared_expert(
    key("moe_shared_expert_intermediate_size"), "mixer.shared_experts", gated=False, bias=key("mlp_bias"),
    activation=lambda c, _: activation_of(c["mlp_hidden_act"]), up_names=("mixer.shared_experts.up_proj",),
)  # fmt: skip


def _zamba_type(config: Config, i: int) -> str:
    period, offset = config["attn_layer_period"], config["attn_layer_offset"]
    return "hybrid" if i == 2 or (i > 2 and (i - 3) % period == offset) else "linear_attention"


def _zamba_2_type(config: Config, i: int) -> str:
    return "hybrid" if i in (6, 12, 18, 24, 30, 36, 42, 47, 51) else "linear_attention"


def _shares(config: Config, i: int) -> bool:
    """Return whether layer i has Zamba's shared transformer."""
    return bool(config["layer_types"][i] == "hybrid")


def _zamba_name(config: Config, i: int, name: str) -> str:
    return f"mamba_decoder.{name}" if _shares(config, i) else name


def _zamba_1(config: Config, i: int) -> MambaDescription:
    name = _zamba_name(config, i, "mamba")
    return _mamba_1(
        config, num_groups=config["mamba_n_heads"], activation=_OWN_ACT, tensors_by_group=True, name=name
    )  # fmt: skip


def _zamba_2(config: Config, i: int) -> MambaDescription:
    heads, channels = config["mamba_n_heads"], int(config["mamba_expand"] * config["hidden_size"])
    limit, norm = (config["time_step_min"], math.inf), NormDescription(1e-5)
    name = _zamba_name(config, i, "mamba")
    return _mamba_2(
        config, heads, channels // heads, bias="add_bias_linear", activation=_OWN_ACT, conv_bias=True,
        time_limit=limit, norm=norm, name=name,
    )  # fmt: skip


def _shared(module: str, up_names: tuple[str, ...]) -> Setting:
    """Return a setting for the shared transformer of layer i. There may be several transformers, which take turns; the
    checkpoint has a transformer's weights in the first layer that uses it."""

    def find(config: Config, i: int) -> ReusedLayerDescription | None:
        if not _shares(config, i):
            return None
        sharing = [k for k in range(config["num_hidden_layers"]) if _shares(config, k)]
        number, hidden_size, heads = sharing.index(i), config["hidden_size"], config["num_attention_heads"]
        size, rank = config.get("attention_head_dim") or 2 * hidden_size // heads, config["adapter_rank"]
        attention = AttentionDescription(
            heads, config["num_key_value_heads"] or heads, size, (size / 2) ** -0.5,
            rope_of(config, i, size, {}) if config["use_mem_rope"] else None, input_size=2 * hidden_size,
        )  # fmt: skip
        feed_forward = FeedForwardDescription(
            config["intermediate_size"] or 4 * hidden_size, activation_of(config["hidden_act"]),
            bias=config["add_bias_linear"], up_names=up_names, down_name="feed_forward.down_proj",
            has_adapters=bool(rank),
        )  # fmt: skip
        return ReusedLayerDescription(
            f"model.layers.{sharing[number % config['num_mem_blocks']]}.{module}", attention, feed_forward,
            NormDescription(config["norm_eps"]), number, rank, bool(config["use_shared_attention_adapter"]),
        )  # fmt: skip

    return find


def _zamba(layer_type: Setting, mixer: Setting, shared: Setting) -> Family:
    return Family(
        layer_type=layer_type, mixer=mixer, has_feed_forward=_never, model=_FINAL_NORM, refuses=("use_long_context",),
        layer={"reused": shared, "attention_norm": lambda c, i: _zamba_name(c, i, "input_layernorm")},
    )  # fmt: skip


def _never(config: Config, i: int) -> bool:
    return False


_BACKBONE = {
    "embedding_name": "backbone.embeddings", "layer_prefix": "backbone.layers.", "norm_name": "backbone.norm_f",
}  # fmt: skip
_FINAL_NORM = {"norm_name": "model.final_layernorm"}
_ONE_NORM = {"attention_norm": "norm"}
_MLP = {"up_names": ("feed_forward.gate_proj", "feed_forward.up_proj"), "down_name": "feed_forward.down_proj"}
_MLP_NORM = {"feed_forward_norm": "pre_ff_layernorm"}
_MAMBA_1 = Family(mixer=_pure_1, has_feed_forward=_never, layer=_ONE_NORM, model=_BACKBONE)

FAMILIES = {
    "MambaForCausalLM": _MAMBA_1,
    "FalconMambaForCausalLM": _MAMBA_1,
    "Mamba2ForCausalLM": Family(mixer=_pure_2, has_feed_forward=_never, layer=_ONE_NORM, model=_BACKBONE),
    "JambaForCausalLM": Family(
        layer_type=_jamba_type, mixer=where_no_attention(_jamba), rope=None, feed_forward=_MLP, layer=_MLP_NORM,
        model=_FINAL_NORM,
        experts={
            "routing": routing(normalize=False), "router_names": ("feed_forward.router",),
            "names": (
                one_by_one(*(f"feed_forward.experts.{{}}.{name}_proj" for name in ("gate", "up", "down"))),
                stacked("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
            ),
        },
        is_sparse=lambda c, i: c["num_experts"] > 1 and i % c["expert_layer_period"] == c["expert_layer_offset"],
    ),
    "BambaForCausalLM": Family(
        layer_type=_bamba_type, mixer=where_no_attention(_hybrid),
        feed_forward=_MLP, layer=_MLP_NORM, model=_FINAL_NORM,
    ),
    "GraniteMoeHybridForCausalLM": Family(
        layer_type=lambda *_: "linear_attention", mixer=where_no_attention(_hybrid),
        rotates=lambda c, _: c["position_embedding_type"] == "rope",
        feed_forward={
            "intermediate_size": key("shared_intermediate_size"), "up_names": ("shared_mlp.input_linear",),
            "down_name": "shared_mlp.output_linear",
        },
        experts=GRANITE_EXPERTS | {"routing": routing(normalize=True)}, is_sparse=lambda c, _: c["num_experts"] > 0,
    ),
    "FalconH1ForCausalLM": Family(
        refuses=("attention_bias",), attention={"scale": _falcon_scale},
        feed_forward=_MLP | {
            "bias": key("mlp_bias"), "gate_multiplier": lambda c, _: (c["mlp_multipliers"] or (1.0, 1.0))[0],
        },
        layer=_MLP_NORM | {
            "second_mixer": _falcon,
            "output_scales": lambda c, _: OutputScales(
                c["attention_in_multiplier"] * c["attention_out_multiplier"], c["ssm_out_multiplier"],
                (c["mlp_multipliers"] or (1.0, 1.0))[1],
            ),
        },
        model=_FINAL_NORM | {
            "logits_divisor": lambda c, _: 1 / c["lm_head_multiplier"],
        },
    ),
    "NemotronHForCausalLM": Family(
        layer_type=_nemotron_type, mixer=where_no_attention(_nemotron), rope=None,
        has_feed_forward=lambda c, i: c["layer_types"][i] in ("mlp", "moe"),
        attention={
            "qkv_names": ("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"), "output_name": "mixer.o_proj",
        },
        feed_forward={
            "gated": False, "up_names": ("mixer.up_proj",), "down_name": "mixer.down_proj", "bias": key("mlp_bias"),
            "activation": lambda c, _: activation_of(c["mlp_hidden_act"]),
        },
        layer={"attention_norm": "norm", "feed_forward_norm": "norm"}, model=_BACKBONE,
        experts={
            "routing": SIGMOID_GROUPS, "gated": False, "router_names": ("mixer.gate",),
            "activation": lambda c, _: activation_of(c["mlp_hidden_act"]), "shared": _nemotron_shared,
            "correction_names": ("mixer.gate.e_score_correction_bias",),
            "names": (
                ExpertNames(("mixer.experts.{}.up_proj.weight",), "mixer.experts.{}.down_proj.weight"),
                ExpertNames(("mixer.experts.up_proj",), "mixer.experts.down_proj"),
            ),
        },
        is_sparse=lambda c, i: c["layer_types"][i] == "moe", refuses=("moe_latent_size",),
    ),
    "ZambaForCausalLM": _zamba(
        _zamba_type, _zamba_1, _shared("shared_transf", ("feed_forward.gate_proj", "feed_forward.up_proj"))
    ),
    "Zamba2ForCausalLM": _zamba(
        _zamba_2_type, _zamba_2, _shared("shared_transformer", ("feed_forward.gate_up_proj",))
    ),
}  # fmt: skip
