"""The architectures with attention and layers that keep a state, other than Mamba."""

import math
from dataclasses import replace
from typing import Any

from octavo.layers.attention import GateDescription
from octavo.layers.experts import one_by_one, stacked
from octavo.layers.mla import MLADescription
from octavo.layers.norm import NormDescription
from octavo.layers.recurrent import (
    GatedDeltaDescription,
    GatedRecurrenceDescription,
    LightningDescription,
    ShortConvDescription,
)
from octavo.models.config_reader import (
    Config,
    Family,
    Setting,
    activation_of,
    head_size,
    key,
    rms,
    rope_settings,
    routing,
)
from octavo.models.description import OutputScales
from octavo.models.families.deepseek import latent
from octavo.models.families.settings import (
    CORRECTION_NAMES,
    SIGMOID_GROUPS,
    W123,
    only_silu,
    several,
    shared_expert,
    sparse_by_step,
    where_no_attention,
)


def _lightning(config: Config, i: int) -> LightningDescription:
    heads, size, activation = config["num_attention_heads"], head_size(config), activation_of(config["hidden_act"])
    rate = 1 - i / (config["num_hidden_layers"] - 1 + 1e-5) + 1e-5
    return LightningDescription(heads, size, rate, NormDescription(1e-6), activation)


def _minimax_constants(config: Config, _: int) -> tuple[str, ...]:
    """Return unused tensors: constants that follow from the configuration."""
    names = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
    return tuple(f"model.layers.{i}.self_attn.{name}" for i in range(config["num_hidden_layers"]) for name in names)


def _minimax_factors(kind: str) -> Setting:
    """Return a setting for the factors of (lightning) attention and feed-forward; `kind` is "alpha" or "beta"."""

    def find(config: Config, i: int) -> tuple[float, float]:
        name = "linear_attn" if config["layer_types"][i] == "linear_attention" else "full_attn"
        return float(config[f"{name}_{kind}_factor"]), float(config[f"mlp_{kind}_factor"])

    return find


def _minimax_output_scales(config: Config, i: int) -> OutputScales:
    of_attention, of_feed_forward = _minimax_factors("beta")(config, i)
    return OutputScales(attention=of_attention, feed_forward=of_feed_forward)


def _lfm_type(config: Config, i: int) -> str:
    listed = config.get("full_attn_idxs")
    return "full_attention" if listed is None or i in listed else "conv"


def _lfm3_type(_: Config, i: int) -> str:
    return "full_attention" if i % 4 == 2 else "sliding_attention" if i % 4 == 0 and i > 0 else "conv"


def _short_conv(config: Config, _: int) -> ShortConvDescription:
    return ShortConvDescription(config["hidden_size"], config["conv_L_cache"], config["conv_bias"])


def _lfm_intermediate(config: Config, _: int) -> int:
    size = int(config.get("block_ff_dim") or config["intermediate_size"])
    if config["block_auto_adjust_ff_dim"]:
        size = int(2 * size / 3)
        if config["block_ffn_dim_multiplier"] is not None:
            multiple = config["block_multiple_of"]
            size = multiple * -(-int(config["block_ffn_dim_multiplier"] * size) // multiple)
    return size


def _delta_type(config: Config, i: int) -> str:
    period = int(config.get("full_attention_interval") or 4)
    return "linear_attention" if (i + 1) % period else "full_attention"


def _delta(config: Config, _: int, **changes: Any) -> GatedDeltaDescription:
    only_silu(config)
    sizes = {
        "num_key_heads": config["linear_num_key_heads"], "num_value_heads": config["linear_num_value_heads"],
        "key_size": config["linear_key_head_dim"], "value_size": config["linear_value_head_dim"],
        "kernel": config["linear_conv_kernel_dim"], "norm": NormDescription(config["norm_eps"]),
        "alternates": bool(config.get("linear_value_heads_alternate")),  # in GGUF files
    }  # fmt: skip
    return GatedDeltaDescription(**sizes | changes)


_SEPARATE = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
_OLMO_CONVS = ("q_conv1d", "k_conv1d", "v_conv1d")
_OLMO_NAMES = ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj")


def _olmo_delta(config: Config, i: int) -> GatedDeltaDescription:
    heads = config["num_attention_heads"]
    key_heads = config["linear_num_key_heads"] or heads
    key_size = config["linear_key_head_dim"] or int(0.75 * config["hidden_size"] / key_heads)
    return _delta(
        config, i, num_key_heads=key_heads, num_value_heads=config["linear_num_value_heads"] or heads,
        key_size=key_size, value_size=config["linear_value_head_dim"] or 2 * key_size, in_names=_OLMO_NAMES,
        beta_scale=2.0 if config["linear_allow_neg_eigval"] else 1.0, norm=NormDescription(1e-5),
        norm_name="o_norm", output_name="o_proj", conv_names=_OLMO_CONVS,
    )  # fmt: skip


def _kimi_type(config: Config, i: int) -> str:
    listed = (config.get("linear_attn_config") or {}).get("full_attn_layers")
    is_full = i + 1 in listed if listed is not None else i > 0 and i % 4 == 0  # the list counts layers from 1
    return "full_attention" if is_full else "linear_attention"


def _delta_by_element(config: Config, heads: int, size: int, kernel: int, **changes: Any) -> GatedDeltaDescription:
    """Return a gated delta rule with a decay for each element of a key (Kimi Team 2025)."""
    only_silu(config)
    return GatedDeltaDescription(
        heads, heads, size, size, kernel, NormDescription(config["norm_eps"]), decays_by_element=True,
        gate_activation="sigmoid", conv_names=_OLMO_CONVS, norm_name="o_norm", **changes,
    )  # fmt: skip


def _kimi_mixer(config: Config, i: int) -> GatedDeltaDescription | MLADescription:
    if config["layer_types"][i] != "linear_attention":
        return latent(rope=None)(config, i)
    said: dict[str, Any] = {
        "num_heads": config["linear_num_heads"], "head_dim": config["linear_head_dim"],
        "short_conv_kernel_size": config["linear_conv_kernel_dim"],
    } | (config.get("linear_attn_config") or {})  # fmt: skip
    heads, size = said["num_heads"], said["head_dim"]
    return _delta_by_element(
        config, heads, size, said["short_conv_kernel_size"], rank=size, rates_shape=(1, 1, heads, 1), name="self_attn",
        in_names=("q_proj", "k_proj", "v_proj", "g_a_proj", "b_proj", "f_a_proj"), output_name="o_proj",
    )  # fmt: skip


def _bailing_mixer(config: Config, i: int) -> GatedDeltaDescription | MLADescription:
    names = {"name": "attention", "output_name": "dense"}
    if config["layer_types"][i] != "linear_attention":
        return latent(**names, gate_name="g_proj")(config, i)
    # In files that transformers writes, head_dim has another meaning, and linear_head_dim has the size.
    size = config.get("linear_head_dim") or config["head_dim"]
    return _delta_by_element(
        config, config["num_attention_heads"], size, config["short_conv_kernel_size"],
        lowest=config["kda_lower_bound"] if config["kda_safe_gate"] else 0.0,
        in_names=("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "f_proj"), **names,
    )  # fmt: skip


def _olmo_norm(recurrent: str | None, attention: str | None) -> Setting:
    return lambda c, i: recurrent if c["layer_types"][i] == "linear_attention" else attention


_GATED_ATTENTION = {"gate": GateDescription(None), "qk_norm": rms(offset=1.0)}
_GUESSING = {"unused": ("mtp.",)}  # a module of multi-token prediction: see `octavo.models.draft_heads.module_names`
_QWEN_EXPERTS = {
    "shared": shared_expert(key("shared_expert_intermediate_size"), "mlp.shared_expert"),
    "shared_gate_name": "mlp.shared_expert_gate",
}  # fmt: skip
_QWEN_3_5 = Family(
    norm=rms(offset=1.0), layer_type=_delta_type, attention=_GATED_ATTENTION, model=_GUESSING,
    mixer=where_no_attention(lambda c, i: _delta(c, i, in_names=_SEPARATE)),
)  # fmt: skip
_LFM_MLP = {"up_names": ("feed_forward.w1", "feed_forward.w3"), "down_name": "feed_forward.w2"}
_LFM_ATTENTION = {
    "qk_norm": rms(), "qk_norm_names": ("self_attn.q_layernorm", "self_attn.k_layernorm"),
    "output_name": "self_attn.out_proj",
}  # fmt: skip
_LFM_NORMS = {"attention_norm": "operator_norm", "feed_forward_norm": "ffn_norm"}
_LFM_MODEL = {"norm_name": "model.embedding_norm", "tie_word_embeddings": lambda c, _: c.get(
    "tie_embedding", c["tie_word_embeddings"])}  # fmt: skip


def _griffin_type(config: Config, i: int) -> str:
    """Return the layer's type by block_types, a pattern that repeats (default: two recurrences, then attention)."""
    kinds = config["block_types"]
    return "linear_attention" if kinds[i % len(kinds)] == "recurrent" else "full_attention"


def _griffin(config: Config, _: int) -> GatedRecurrenceDescription:
    return GatedRecurrenceDescription(
        config["lru_width"] or config["hidden_size"], config["num_attention_heads"], config["conv1d_width"],
        activation_of(config["hidden_act"]),
    )  # fmt: skip


def _root_in_bfloat16(config: Config, _: int) -> float:
    """Return the square root of the hidden size, rounded to bfloat16's eight significant bits."""
    fraction, exponent = math.frexp(config["hidden_size"] ** 0.5)
    return math.ldexp(round(fraction * 256) / 256, exponent)


FAMILIES = {
    "Lfm2ForCausalLM": Family(
        layer_type=_lfm_type, mixer=where_no_attention(_short_conv), attention=_LFM_ATTENTION,
        feed_forward=_LFM_MLP | {"intermediate_size": _lfm_intermediate, "activation": "silu"}, layer=_LFM_NORMS,
        model=_LFM_MODEL,
    ),
    "Lfm2MoeForCausalLM": Family(
        layer_type=_lfm_type, mixer=where_no_attention(_short_conv), attention=_LFM_ATTENTION,
        feed_forward=_LFM_MLP | {"activation": "silu"}, layer=_LFM_NORMS, model=_LFM_MODEL,
        experts={
            "routing": routing(scoring="sigmoid", scale=key("routed_scaling_factor")), "activation": "silu",
            "router_names": ("feed_forward.gate",),
            "correction_names": lambda c, _: ("feed_forward.expert_bias",) if c["use_expert_bias"] else (),
            "names": (
                one_by_one(*(f"feed_forward.experts.{{}}.{name}" for name in ("w1", "w3", "w2"))),
                stacked("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
            ),
        },
    ),
    "Lfm3ForCausalLM": Family(
        layer_type=_lfm3_type, mixer=where_no_attention(_short_conv),
        attention={
            "qk_norm": rms(), "gate": lambda c, _: GateDescription("self_attn.gate_proj", by_head=True)
            if c["use_attention_gate"] else None,
        },
        feed_forward=_LFM_MLP | {"activation": "silu"}, model=_LFM_MODEL,
        layer=_LFM_NORMS | {
            "attention_post_norm": lambda c, _: "post_operator_norm" if c["use_sandwich_norm"] else None,
            "feed_forward_post_norm": lambda c, _: "post_ffn_norm" if c["use_sandwich_norm"] else None,
        },
    ),
    "Qwen3NextForCausalLM": Family(
        norm=rms(offset=1.0), layer_type=_delta_type, mixer=where_no_attention(_delta), attention=_GATED_ATTENTION,
        experts=_QWEN_EXPERTS, is_sparse=sparse_by_step, model=_GUESSING,
    ),
    "Qwen3_5ForCausalLM": _QWEN_3_5,
    "Qwen3_5MoeForCausalLM": replace(_QWEN_3_5, experts=_QWEN_EXPERTS),
    "OlmoHybridForCausalLM": Family(
        layer_type=_delta_type, mixer=where_no_attention(_olmo_delta),
        rotates=lambda c, _: rope_settings(c).get("rope_theta", 0) is not None,  # null means no rotation
        attention={"qk_norm": rms(), "qk_norm_scope": "all"},
        layer={
            "attention_norm": _olmo_norm("attention_layer_norm", None),
            # transformers writes the first name.
            "attention_post_norm": _olmo_norm(None, "feedforward_layer_norm|post_attention_layernorm"),
            "feed_forward_norm": _olmo_norm("feedforward_layer_norm", None),
            "feed_forward_post_norm": _olmo_norm(None, "post_feedforward_layernorm"),
        },
    ),
    "KimiLinearForCausalLM": Family(
        layer_type=_kimi_type, mixer=_kimi_mixer,
        experts={
            "routing": SIGMOID_GROUPS, "router_names": ("block_sparse_moe.gate",), "names": W123,
            "correction_names": ("block_sparse_moe.gate.e_score_correction_bias",),
            "shared": shared_expert(several("n_shared_experts"), "block_sparse_moe.shared_experts"),
        },
    ),
    "BailingHybridForCausalLM": Family(
        layer_type=lambda c, i: "linear_attention" if (i + 1) % c["layer_group_size"] else "full_attention",
        mixer=_bailing_mixer,
        experts={
            "routing": SIGMOID_GROUPS, "correction_names": ("mlp.gate.expert_bias", *CORRECTION_NAMES),
            "shared": shared_expert(several("n_shared_experts")),
        },
        model={"embedding_name": "model.word_embeddings"}, refuses=("attention_bias",),
    ),
    "MiniMaxForCausalLM": Family(
        layer_type=lambda _, i: "linear_attention" if (i + 1) % 2 == 0 else "full_attention",
        mixer=where_no_attention(_lightning), attention={"window": lambda c, _: c["sliding_window"] or 0},
        layer={
            "residual_from_norm": True, "residual_scales": _minimax_factors("alpha"),
            "output_scales": _minimax_output_scales,
        },
        experts={"router_names": ("block_sparse_moe.gate", "mlp.gate"), "names": W123},
        model={"unused": _minimax_constants},
    ),
    "RecurrentGemmaForCausalLM": Family(
        norm=rms(offset=1.0), layer_type=_griffin_type, mixer=where_no_attention(_griffin),
        attention={
            "output_bias": True, "output_name": "temporal_block.o_proj",
            "qkv_names": tuple(f"temporal_block.{part}_proj" for part in "qkv"), "window": key("sliding_window"),
        },
        feed_forward={
            "intermediate_size": lambda c, _: c["intermediate_size"] // 2, "bias": True,
            "up_names": ("mlp_block.gate_proj", "mlp_block.up_proj"), "down_name": "mlp_block.down_proj",
        },
        layer={"attention_norm": "temporal_pre_norm", "feed_forward_norm": "channel_pre_norm"},
        model={
            "embedding_multiplier": _root_in_bfloat16, "logits_softcap": key("logits_soft_cap"),
            "norm_name": "model.final_norm",
        },
    ),
}  # fmt: skip
