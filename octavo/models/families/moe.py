"""The architectures with experts.

Tensors have the checkpoints' names. `transformers` 5 renames and stacks some tensors when it loads them; both names are
read if models with either name have been published.
"""

import math
from dataclasses import replace
from typing import Any

from octavo.errors import LoadError
from octavo.layers.attention import GateDescription
from octavo.layers.experts import EXPERT_NAMES, ExpertNames, stacked
from octavo.layers.rotary import AttentionTemperature
from octavo.models.config_reader import (
    Config,
    Family,
    Setting,
    activation_of,
    key,
    layer_norm,
    rms,
    rope_settings,
    routing,
)
from octavo.models.description import OutputScales
from octavo.models.families.settings import (
    AFTER,
    ALL_SLIDE,
    AROUND,
    CORRECTION,
    CORRECTION_NAMES,
    FULL,
    GRANITE_EXPERTS,
    LATE_SLIDE,
    LOGIT_SCALE,
    ROUTED,
    SIGMOID_GROUPS,
    W123,
    all_but_every,
    by_layer,
    granite_rotates,
    rotates_as_listed,
    rotates_unless_all_is_seen,
    several,
    shared_expert,
    slides,
    sliding,
    sparse_by_step,
)


def _ernie_sparse(config: Config, i: int) -> bool:
    last = config["moe_layer_end_index"]
    last = config["num_hidden_layers"] - 1 if last in (None, -1) else last
    return bool((i + 1) % config["moe_layer_interval"] == 0 and config["moe_layer_start_index"] <= i <= last)


def _flint_slides(config: Config, i: int) -> bool:
    return not (i < 2 or i % 4 == 1 or i == config["num_hidden_layers"] - 1)


def _cohere_rotates(config: Config, i: int) -> bool:
    is_dense_prefix = config["mlp_layer_types"][i] == "dense"
    has_rope = is_dense_prefix and config["prefix_dense_sliding_window_pattern"] == 1
    return has_rope or slides(config, i)


def _cohere_slides(config: Config, i: int) -> bool:
    first = config["first_k_dense_replace"]
    if i < first:
        return bool((i + 1) % config["prefix_dense_sliding_window_pattern"])
    return bool((i - first + 1) % config["sliding_window_pattern"])


def _cohere_norm(config: Config, _: int) -> Any:
    if config["rms_norm_eps"] is None:
        return layer_norm(bias=False, eps=config["layer_norm_eps"])(config, 0)
    return rms(eps=config["rms_norm_eps"])(config, 0)


def _half_if_averaged(config: Config, _: int) -> float:
    is_average = config["shared_expert_combination_strategy"] == "average"
    return 0.5 if is_average and config["n_shared_experts"] else 1.0


def _llama4_sparse(config: Config, i: int) -> bool:
    layers, step = config["moe_layers"], config["interleave_moe_layer_step"]
    return i in layers if layers is not None else (i + 1) % step == 0


def _dbrx(part: str, setting: str, default: Any) -> Setting:
    return lambda c, _: (c.get(part) or {}).get(setting, default)


def _dbrx_normalizes(config: Config, i: int) -> bool:
    power = _dbrx("ffn_config", "moe_normalize_expert_weights", 1.0)(config, i)
    if power not in (None, 1, 1.0):
        raise LoadError(f"expert weights divided by their norm of power {power} are not built; the sum (1) is.")
    return power is not None


def _phimoe_attention_factor(config: Config, _: int) -> float:
    scaling = rope_settings(config)
    if "long_mscale" not in scaling:
        return 1.0
    if scaling["long_mscale"] != scaling["short_mscale"]:
        raise LoadError("a long_mscale that differs from short_mscale is not built.")
    return float(scaling["long_mscale"])


def _of_sliding(sliding: Any, other: Any) -> Setting:
    return lambda c, i: sliding if slides(c, i) else other


def _mimo_kv_heads(config: Config, i: int) -> int:
    return int(config["num_key_value_heads"] * (2 if slides(config, i) else 1))


def _mimo_window(config: Config, i: int) -> int:
    """Return the layer's window. sliding_window_size, a setting of other engines, comes first: the number of positions
    that a token sees beside itself."""
    before = config.get("sliding_window_size")
    window = config["sliding_window"] if before is None else before + 1
    return int(window) if slides(config, i) else 0


def _laguna_gate(config: Config, _: int) -> GateDescription:
    return GateDescription("self_attn.g_proj", "softplus", by_head=config["gating"] in (True, "per-head"))


def _beam_rotates(config: Config, i: int) -> bool:
    return config["rope_parameters"].get(config["layer_types"][i]) is not None


def _beam_depth(keeps_stream: bool) -> Setting:
    """Return a setting for the factors of the residual stream (`keeps_stream`), or of the outputs of attention and
    feed-forward. Together they keep the magnitude of the residual stream."""

    def factor(added: int) -> float:
        return math.sqrt((added - 1) / added if keeps_stream else 1 / added)

    def find(_: Config, i: int) -> tuple[float, float] | OutputScales:
        of_attention, of_feed_forward = factor(2 * i + 2), factor(2 * i + 3)
        if keeps_stream:
            return of_attention, of_feed_forward
        return OutputScales(attention=of_attention, feed_forward=of_feed_forward)

    return find


_GRANITE = Family(experts=GRANITE_EXPERTS)

FAMILIES = {
    "MixtralForCausalLM": Family(
        experts={"router_names": ("block_sparse_moe.gate", "mlp.gate"), "names": W123}, layer_type=ALL_SLIDE,
    ),
    "Qwen2MoeForCausalLM": Family(
        attention={"qkv_bias": key("qkv_bias"), "output_bias": False},
        experts={
            "shared": shared_expert(key("shared_expert_intermediate_size"), "mlp.shared_expert"),
            "shared_gate_name": "mlp.shared_expert_gate",
        },
        is_sparse=sparse_by_step, layer_type=LATE_SLIDE, window_switch="use_sliding_window",
    ),
    "Qwen3MoeForCausalLM": Family(
        attention={"qk_norm": rms()}, experts={}, is_sparse=sparse_by_step,
        layer_type=ALL_SLIDE, window_switch="use_sliding_window",
    ),
    "MellumForCausalLM": Family(attention={"qk_norm": rms()}, experts={}, layer_type=FULL),
    "OlmoeForCausalLM": Family(attention={"qk_norm": rms(), "qk_norm_scope": "all"}, experts={}, refuses=("clip_qkv",)),
    "FlexOlmoForCausalLM": Family(attention={"qk_norm": rms(), "qk_norm_scope": "all"}, experts={}, layer=AFTER),
    "HunYuanMoEV1ForCausalLM": Family(
        attention={
            "qk_norm": rms(), "norms_after_rotation": True,
            "qk_norm_names": ("self_attn.query_layernorm", "self_attn.key_layernorm"),
        },
        experts={
            "num_experts": by_layer("num_experts"), "routing": routing(top_k=by_layer("num_experts_per_tok")),
            "router_names": ("mlp.gate.wg",), "shared": shared_expert(key("intermediate_size"), "mlp.shared_mlp"),
        },
    ),
    "MiMoV2FlashForCausalLM": Family(
        attention={
            "output_bias": False, "num_kv_heads": _mimo_kv_heads, "head_value_size": key("v_head_dim"),
            "window": _mimo_window, "sinks": _of_sliding("self_attn.attention_sink_bias", None),
        },
        # The factor of values.
        layer={"output_scales": lambda c, _: OutputScales(attention=c["attention_value_scale"] or 1.0)},
        experts=CORRECTION | {"routing": SIGMOID_GROUPS}, is_sparse=lambda _, i: i > 0,
        layer_type=sliding(lambda _, i: i > 0 and (i + 1) % 6 != 0),
    ),
    "LagunaForCausalLM": Family(
        attention={
            "num_heads": lambda c, i: (c["num_attention_heads_per_layer"] or [c["num_attention_heads"]] * (i + 1))[i],
            "qk_norm": rms(), "gate": _laguna_gate,
        },
        experts={
            "routing": routing(
                scoring="sigmoid", normalize=True, scale=key("routed_scaling_factor"),
                softcap=key("moe_router_logit_softcapping"),
            ),
            "correction_names": ("mlp.experts.e_score_correction_bias", *CORRECTION_NAMES),
            "shared": shared_expert(key("shared_expert_intermediate_size"), "mlp.shared_expert"),
        },
        is_sparse=lambda _, i: i > 0, layer_type=FULL, refuses=("moe_apply_router_weight_on_input",),
    ),
    "BeamForCausalLM": Family(
        attention={
            "qk_norm": rms(), "gate": GateDescription("self_attn.gate_proj", bias="self_attn.gate_bias"),
            "attention_temperature": lambda c, i: (
                None if _beam_rotates(c, i) else AttentionTemperature(0.1, 2048, 1, is_power=True)
            ),
        },
        layer=AROUND | {"residual_scales": _beam_depth(True), "output_scales": _beam_depth(False)},
        experts=CORRECTION | {"routing": SIGMOID_GROUPS}, is_sparse=lambda _, i: i > 2,
        layer_type=sliding(lambda c, i: (i + 1) % 6 != 0 and i + 1 != c["num_hidden_layers"]), rotates=_beam_rotates,
        refuses=("attention_bias",),
    ),
    "DbrxForCausalLM": Family(
        norm=layer_norm(bias=False),
        attention={
            "num_kv_heads": _dbrx("attn_config", "kv_n_heads", 1),
            "qkv_clip": lambda c, i: _dbrx("attn_config", "clip_qkv", None)(c, i) or 0.0,
            "qkv_names": ("norm_attn_norm.attn.Wqkv",), "output_name": "norm_attn_norm.attn.out_proj",
        },
        rope={"theta": lambda c, i: float(_dbrx("attn_config", "rope_theta", 10000.0)(c, i))},
        layer={"attention_norm": "norm_attn_norm.norm_1", "feed_forward_norm": "norm_attn_norm.norm_2"},
        experts={
            "num_experts": _dbrx("ffn_config", "moe_num_experts", 4),
            "intermediate_size": _dbrx("ffn_config", "ffn_hidden_size", 3584),
            "activation": lambda c, i: activation_of(_dbrx("ffn_config", "ffn_act_fn", {})(c, i).get("name", "silu")),
            "routing": routing(top_k=_dbrx("ffn_config", "moe_top_k", 1), normalize=_dbrx_normalizes),
            "router_names": ("ffn.router.layer",),
            "names": (
                ExpertNames(
                    ("ffn.experts.mlp.w1", "ffn.experts.mlp.v1"), "ffn.experts.mlp.w2", is_down_transposed=True,
                    is_flat=True,
                ),
            ),
        },
        model={
            "embedding_name": "transformer.wte", "layer_prefix": "transformer.blocks.",
            "norm_name": "transformer.norm_f",
        },
    ),
    "PhimoeForCausalLM": Family(
        norm=layer_norm(), rope={"attention_factor": _phimoe_attention_factor},
        experts={
            "routing": routing(scoring="sparsemixer", jitter=key("router_jitter_noise")), "names": W123,
            "router_names": ("block_sparse_moe.gate", "mlp.router"),
        },
        model={"output_bias": key("lm_head_bias")}, layer_type=ALL_SLIDE,
    ),
    "GraniteMoeForCausalLM": _GRANITE,
    "GraniteMoeSharedForCausalLM": _GRANITE,
    "GraniteMoeSWAForCausalLM": replace(
        _GRANITE, attention={"sinks": "self_attn.sinks"},
        rotates=granite_rotates, layer_type=sliding(lambda _, i: i % 4 != 0),
        # Newer names first.
        experts={name: v[::-1] if isinstance(v, tuple) else v for name, v in GRANITE_EXPERTS.items()},
    ),
    "GptOssForCausalLM": Family(
        attention={"sinks": "self_attn.sinks"},
        experts={
            "bias": True, "router_names": ("mlp.router",), "router_bias": True,
            "clamp": lambda c, _: (c["swiglu_alpha"], c["swiglu_limit"]),
            "names": (
                stacked("mlp.experts.gate_up_proj", "mlp.experts.down_proj", is_transposed=True, is_interleaved=True),
                EXPERT_NAMES[2],
            ),
        },
        layer_type=sliding(lambda _, i: i % 2 == 0),
    ),
    "AriaTextForCausalLM": Family(
        experts={
            "activation": "silu", "router_names": ("mlp.router",),
            "names": (
                stacked("mlp.experts.fc1.weight", "mlp.experts.fc2.weight", is_transposed=True),
                stacked("mlp.experts.gate_up_proj", "mlp.experts.down_proj", is_transposed=True),
            ),
            "shared": shared_expert(several("n_shared_experts", "intermediate_size"), bias=key("mlp_bias")),
        },
    ),
    "Cohere2MoeForCausalLM": Family(
        norm=_cohere_norm, rope={"interleaved": True},
        feed_forward={
            "intermediate_size": lambda c, _: c["prefix_dense_intermediate_size"] or c["intermediate_size"]
        },
        layer={"parallel_residual": True, "feed_forward_norm": None},
        experts={
            "routing": routing(
                scoring=key("expert_selection_fn"), scale=_half_if_averaged,
                normalize=lambda c, _: c["expert_selection_fn"] == "softmax" or c["norm_topk_prob"],
            ),
            "shared": shared_expert(several("n_shared_experts", "intermediate_size")),
            "shared_scale": _half_if_averaged,
        },
        model=LOGIT_SCALE, layer_type=sliding(_cohere_slides), rotates=_cohere_rotates,
    ),
    "Ernie4_5_MoeForCausalLM": Family(
        attention={"qkv_bias": key("use_bias"), "output_bias": key("use_bias")}, rope={"interleaved": True},
        feed_forward={"bias": key("use_bias")},
        experts={
            "shared": shared_expert(several("n_shared_experts"), bias=key("use_bias")),
            "correction_names": (
                "mlp.moe_statics.e_score_correction_bias", "mlp.gate.moe_statics.e_score_correction_bias"
            ),
            "correction_is_row": True,
        },
        is_sparse=_ernie_sparse, model={"output_bias": key("use_bias")},
    ),
    # In most layers queries see only the keys of their own chunk. Contexts are limited to one chunk (`longest`), so
    # queries see all keys.
    "Llama4ForCausalLM": Family(
        # Llama 4 norms heads after the rotation; without weights the order makes no difference.
        attention={
            "qk_norm": lambda c, i: rms(has_weight=False)(c, i)
            if c["use_qk_norm"] and rotates_as_listed(c, i) else None,
            "attention_temperature": lambda c, i: AttentionTemperature(c["attn_scale"], c["floor_scale"], 1)
            if c["attn_temperature_tuning"] and not rotates_as_listed(c, i) else None,
        },
        rope={"interleaved": True},
        feed_forward={
            "intermediate_size": key("intermediate_size_mlp"), "down_name": "feed_forward.down_proj",
            "up_names": ("feed_forward.gate_proj", "feed_forward.up_proj"),
        },
        experts={
            "routing": routing(scoring="sigmoid", normalize=False), "scales_inputs": True,
            "router_names": ("feed_forward.router",),
            "names": (
                stacked(
                    "feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj", is_transposed=True,
                    confuses_peft=True,
                ),
            ),
            "shared": shared_expert(key("intermediate_size"), "feed_forward.shared_expert"),
        },
        is_sparse=_llama4_sparse, rotates=rotates_as_listed, longest=("attention_chunk_size",),
    ),
    "Dots1ForCausalLM": Family(attention={"qk_norm": rms()}, experts=ROUTED, layer_type=LATE_SLIDE),
    "Glm4MoeForCausalLM": Family(
        attention={"output_bias": False, "qk_norm": lambda c, i: rms()(c, i) if c["use_qk_norm"] else None},
        experts=ROUTED,
    ),
    "SolarOpenForCausalLM": Family(attention={"output_bias": False}, experts=ROUTED),
    "ExaoneMoeForCausalLM": Family(
        attention={"qk_norm": rms()},
        experts={
            "routing": SIGMOID_GROUPS, "shared": shared_expert(several("n_shared_experts")),
            "correction_names": CORRECTION_NAMES[::-1],
        },
        layer_type=all_but_every(4, "sliding_window_pattern"), rotates=rotates_unless_all_is_seen,
    ),
    "MiniMaxM2ForCausalLM": Family(
        attention={"qk_norm": rms(), "qk_norm_scope": "all"},
        experts={
            "routing": routing(scoring="sigmoid"), "names": W123,
            "router_names": ("block_sparse_moe.gate", "mlp.gate"),
            "correction_names": ("block_sparse_moe.e_score_correction_bias", "mlp.e_score_correction_bias"),
        },
    ),
    "HYV3ForCausalLM": Family(
        attention={"qk_norm": rms()},
        experts={
            "routing": routing(scoring="sigmoid", scale=key("routed_scaling_factor")),
            "router_names": ("mlp.router.gate", "mlp.gate"),
            "correction_names": ("mlp.expert_bias", "mlp.e_score_correction_bias"),
            "shared": shared_expert(several("n_shared_experts"), "mlp.shared_mlp", bias=key("mlp_bias")),
        },
        is_sparse=lambda _, i: i > 0,
    ),
    "FlintForCausalLM": Family(
        attention={"qk_norm": rms(), "sinks": "self_attn.softmax_offset"},
        experts={
            "routing": routing(scoring="sigmoid"),
            "shared": shared_expert(key("shared_expert_intermediate_size"), "mlp.shared_expert"),
        },
        is_sparse=sparse_by_step, layer_type=sliding(_flint_slides), rotates=slides,
    ),
    "Kolibri1ForCausalLM": Family(
        attention={"qk_norm": rms()},
        layer={"attention_post_norm": "post_attn_norm", "feed_forward_post_norm": "post_ffn_norm"},
        experts={
            "routing": routing(scoring="sigmoid", bias_logits=True),
            "correction_names": ("moe.router.expert_bias", "mlp.gate.e_score_correction_bias"),
            "shared": shared_expert(key("shared_expert_intermediate_size")),
        },
        layer_type=all_but_every(5), rotates=rotates_unless_all_is_seen,
    ),
    "AfmoeForCausalLM": Family(
        attention={"qk_norm": rms(), "gate": GateDescription("self_attn.gate_proj")},
        layer=AROUND | {"feed_forward_norm": "pre_mlp_layernorm", "feed_forward_post_norm": "post_mlp_layernorm"},
        experts={
            "routing": routing(scoring="sigmoid", normalize=True, scale=key("routed_scaling_factor")),
            "router_names": ("mlp.router.gate",), "correction_names": ("mlp.expert_bias",),
            "shared": shared_expert(several("n_shared_experts")),
        },
        layer_type=all_but_every(4, "global_attn_every_n_layers"), rotates=slides,
        model={"embedding_multiplier": lambda c, _: c["hidden_size"] ** 0.5 if c["mup_enabled"] else 1.0},
        refuses=("attention_bias",),
    ),
}  # fmt: skip
