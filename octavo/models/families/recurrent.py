"""The architectures with layers that keep a state, alone or beside attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from octavo.layers.attention import GateDescription
from octavo.layers.experts import ExpertNames, one_by_one, stacked
from octavo.layers.feed_forward import FeedForwardDescription
from octavo.layers.latent import LatentDescription
from octavo.layers.norm import NormDescription
from octavo.layers.recurrent import (
    GatedDeltaDescription,
    GatedRecurrenceDescription,
    LightningDescription,
    MambaDescription,
    ShortConvDescription,
)
from octavo.models.families.latent import SIZES, latent
from octavo.models.families.settings import (
    ATTENTION_BIAS,
    CORRECTION_NAMES,
    MLP_BIAS,
    MULTIPLIERS,
    NO_MULTIPLIERS,
    RESIDUAL,
    SCALE,
    SIGMOID_GROUPS,
    W123,
    defaults,
    granite_shared,
    mamba_rank,
    routing,
    said_by_types,
    several,
    shared_expert,
    sparse_by_step,
    sparse_from,
)
from octavo.models.readers import Config, Family, Setting, activation_of, head_size, key, rms

_LIMITLESS = 262144  # positions: a state has no limit of its own
_RECURRENT = ("linear_attention", "mamba")
_BACKBONE = {
    "embedding_name": "backbone.embeddings", "layer_prefix": "backbone.layers.", "norm_name": "backbone.norm_f",
}  # fmt: skip
_MAMBA_DEFAULTS: dict[str, Any] = defaults(
    _LIMITLESS, eps=1e-5, conv_kernel=4, expand=2, use_bias=False, use_conv_bias=True, time_step_limit=None,
)  # fmt: skip
_MAMBA_1_DEFAULTS = _MAMBA_DEFAULTS | defaults(state_size=16, time_step_rank="auto", tied=True)
_HYBRID_DEFAULTS: dict[str, Any] = defaults(
    mamba_n_heads=128, mamba_d_head="auto", mamba_n_groups=1, mamba_d_state=256, mamba_d_conv=4, mamba_expand=2,
    mamba_conv_bias=True, mamba_proj_bias=False, time_step_limit=None,
)  # fmt: skip


def _mamba_1(config: Config, _: int) -> MambaDescription:
    """Of the older names of settings."""
    inner = config.get("mixer_rms_eps")
    return MambaDescription(
        int(config["expand"] * config["hidden_size"]), 1, config["state_size"], config["conv_kernel"],
        time_rank=mamba_rank(config, "time_step_rank"), bias=config["use_bias"],
        inner_norm=None if inner is None else NormDescription(inner, has_weight=False),
        output_bias=config["use_bias"], conv_bias=config["use_conv_bias"], name="mixer",
    )  # fmt: skip


def _mamba_2(heads: str, head_size: str, limits: Callable[[Config], tuple[float, float]]) -> Setting:
    def find(config: Config, _: int) -> MambaDescription:
        return MambaDescription(
            config[heads], config[head_size], config.get("state_size") or config["ssm_state_size"],
            config["conv_kernel"], config["n_groups"], time_limit=limits(config),
            norm=NormDescription(config["norm_eps"]), bias=config["use_bias"], output_bias=config["use_bias"],
            conv_bias=config["use_conv_bias"], name="mixer",
        )  # fmt: skip

    return find


def _nemotron_kind(config: Config, i: int) -> str:
    """linear_attention, full_attention, mlp or moe."""
    if config["layer_types"] is None:
        letter = config["hybrid_override_pattern"][i]
        return {"M": "linear_attention", "*": "full_attention", "-": "mlp"}.get(letter, "moe")
    kind = str(config["layer_types"][i])
    return {"mamba": "linear_attention", "attention": "full_attention"}.get(kind, kind)


def _nemotron_mixer(config: Config, i: int) -> MambaDescription | str | None:
    kind = _nemotron_kind(config, i)
    if kind != "linear_attention":
        return "attention" if kind == "full_attention" else None
    found = _mamba_2("mamba_num_heads", "mamba_head_dim", lambda c: (c["time_step_min"], math.inf))(config, i)
    assert isinstance(found, MambaDescription)
    return found


def _nemotron_shared(config: Config, _: int) -> FeedForwardDescription:
    return FeedForwardDescription(
        config["moe_shared_expert_intermediate_size"], activation_of(config["mlp_hidden_act"]), gated=False,
        bias=config["mlp_bias"], up_names=("mixer.shared_experts.up_proj",),
        down_name="mixer.shared_experts.down_proj",
    )  # fmt: skip


def _is_lightning(config: Config, i: int) -> bool:
    types = config["layer_types"]
    return bool((i + 1) % 2 == 0 if types is None else types[i] == "linear_attention")


def _minimax_mixer(config: Config, i: int) -> LightningDescription | str:
    if not _is_lightning(config, i):
        return "attention"
    rate = 1 - i / (config["num_hidden_layers"] - 1 + 1e-5) + 1e-5
    return LightningDescription(
        config["num_attention_heads"],
        head_size(config),
        rate,
        NormDescription(1e-6),
        activation_of(config["hidden_act"]),
    )


def _minimax_constants(config: Config, _: int) -> tuple[str, ...]:
    """Checkpoints have what follows from the configuration."""
    names = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
    return tuple(f"model.layers.{i}.self_attn.{name}" for i in range(config["num_hidden_layers"]) for name in names)


def _minimax_factors(kind: str) -> Setting:
    """Of attention or lightning attention, and of the feed-forward."""

    def find(config: Config, i: int) -> tuple[float, float]:
        name = "linear_attn" if _is_lightning(config, i) else "full_attn"
        return float(config[f"{name}_{kind}_factor"]), float(config[f"mlp_{kind}_factor"])

    return find


def _limits(config: Config) -> tuple[float, float]:
    low, high = config["time_step_limit"] or (0.0, math.inf)
    # As transformers writes infinity.
    return float(low), float(high["__float__"] if isinstance(high, dict) else high)


def _hybrid_mamba(config: Config) -> MambaDescription:
    heads, size = config["mamba_n_heads"], config["mamba_d_head"]
    channels = config.get("mamba_d_ssm") or int(config["mamba_expand"] * config["hidden_size"])
    return MambaDescription(
        heads, channels // heads if size == "auto" else size, config["mamba_d_state"], config["mamba_d_conv"],
        config["mamba_n_groups"], time_limit=_limits(config), norm=NormDescription(config["norm_eps"]),
        bias=config["mamba_proj_bias"], output_bias=config["mamba_proj_bias"], conv_bias=config["mamba_conv_bias"],
    )  # fmt: skip


def _falcon_mamba(config: Config, _: int) -> MambaDescription:
    """Of Falcon-H1, beside attention."""
    scale = config["ssm_in_multiplier"]
    return replace(
        _hybrid_mamba(config), norm=NormDescription(config["norm_eps"]) if config["mamba_rms_norm"] else None,
        norms_before_gate=config["mamba_norm_before_gate"], output_bias=config["projectors_bias"],
        multipliers=tuple(scale * multiplier for multiplier in config["ssm_multipliers"] or [1.0] * 5),
    )  # fmt: skip


def _falcon_scale(config: Config, _: int) -> float:
    """Of scores: keys and the inputs of queries and keys are multiplied too."""
    head_size = config["head_dim"] or config["hidden_size"] // config["num_attention_heads"]
    return float(head_size**-0.5 * config["key_multiplier"] * config["attention_in_multiplier"] ** 2)


def _jamba_mixer(config: Config, i: int) -> MambaDescription | str:
    if i % config["attn_layer_period"] == config["attn_layer_offset"]:
        return "attention"
    return MambaDescription(
        config["mamba_expand"] * config["hidden_size"], 1, config["mamba_d_state"], config["mamba_d_conv"],
        time_rank=mamba_rank(config, "mamba_dt_rank"), inner_norm=NormDescription(config["norm_eps"]),
        bias=config["mamba_proj_bias"], output_bias=config["mamba_proj_bias"], conv_bias=config["mamba_conv_bias"],
    )  # fmt: skip


def _bamba_mixer(config: Config, i: int) -> MambaDescription | str:
    return "attention" if i in (config["attn_layer_indices"] or ()) else _hybrid_mamba(config)


def _granite_mixer(config: Config, i: int) -> MambaDescription | str:
    types = config["layer_types"]
    return _hybrid_mamba(config) if types is None or types[i] in _RECURRENT else "attention"


def _lfm_is_attention(config: Config, i: int) -> bool:
    types, listed = config["layer_types"], config.get("full_attn_idxs")
    return bool(types[i] == "full_attention") if types is not None else listed is None or i in listed


def _lfm3_type(config: Config, i: int) -> str:
    if config["layer_types"] is not None:
        return str(config["layer_types"][i])
    return "full_attention" if i % 4 == 2 else "sliding_attention" if i % 4 == 0 and i > 0 else "conv"


def _short_conv(is_attention: Setting) -> Setting:
    """The layers that are no attention."""

    def find(config: Config, i: int) -> ShortConvDescription | str:
        if is_attention(config, i):
            return "attention"
        return ShortConvDescription(config["hidden_size"], config["conv_L_cache"], config["conv_bias"])

    return find


def _lfm_intermediate(config: Config, _: int) -> int:
    size = int(config.get("block_ff_dim") or config["intermediate_size"])
    if config["block_auto_adjust_ff_dim"]:
        size = int(2 * size / 3)
        if config["block_ffn_dim_multiplier"] is not None:
            multiple = config["block_multiple_of"]
            size = multiple * -(-int(config["block_ffn_dim_multiplier"] * size) // multiple)
    return size


def _delta(config: Config, i: int, **changes: Any) -> GatedDeltaDescription | str:
    types, period = config["layer_types"], int(config.get("full_attention_interval") or 4)
    if (types is None and (i + 1) % period == 0) or (types is not None and types[i] != "linear_attention"):
        return "attention"
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


def _olmo_mixer(config: Config, i: int) -> GatedDeltaDescription | str:
    heads = config["num_attention_heads"]
    key_heads = config["linear_num_key_heads"] or heads
    key_size = config["linear_key_head_dim"] or int(0.75 * config["hidden_size"] / key_heads)
    return _delta(
        config, i, num_key_heads=key_heads, num_value_heads=config["linear_num_value_heads"] or heads,
        key_size=key_size, value_size=config["linear_value_head_dim"] or 2 * key_size, in_names=_OLMO_NAMES,
        beta_scale=2.0 if config["linear_allow_neg_eigval"] else 1.0, norm=NormDescription(1e-5),
        norm_name="o_norm", output_name="o_proj", conv_names=_OLMO_CONVS,
    )  # fmt: skip


def _kimi_attention(config: Config, i: int) -> bool:
    types, listed = config["layer_types"], (config.get("linear_attn_config") or {}).get("full_attn_layers")
    if types is not None:
        return bool(types[i] != "linear_attention")
    return i + 1 in listed if listed is not None else i > 0 and i % 4 == 0  # listed from one on


def _delta_by_element(config: Config, heads: int, size: int, kernel: int, **changes: Any) -> GatedDeltaDescription:
    """With a decay for each element of a key (Kimi Team 2025)."""
    return GatedDeltaDescription(
        heads, heads, size, size, kernel, NormDescription(config["norm_eps"]), decays_by_element=True,
        gate_activation="sigmoid", conv_names=_OLMO_CONVS, norm_name="o_norm", **changes,
    )  # fmt: skip


def _kimi_mixer(config: Config, i: int) -> GatedDeltaDescription | LatentDescription:
    if _kimi_attention(config, i):
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


def _bailing_mixer(config: Config, i: int) -> GatedDeltaDescription | LatentDescription:
    types = config["layer_types"]
    names = {"name": "attention", "output_name": "dense"}
    if (i + 1) % config["layer_group_size"] == 0 if types is None else types[i] != "linear_attention":
        return latent(**names, gate_name="g_proj")(config, i)
    # transformers gives head_dim another meaning as it writes.
    size = config.get("linear_head_dim") or config["head_dim"]
    return _delta_by_element(
        config, config["num_attention_heads"], size, config["short_conv_kernel_size"],
        lowest=config["kda_lower_bound"] if config["kda_safe_gate"] else 0.0,
        in_names=("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "f_proj"), **names,
    )  # fmt: skip


def _olmo_norm(recurrent: str | None, attention: str | None) -> Setting:
    return lambda c, i: attention if _olmo_mixer(c, i) == "attention" else recurrent


_DELTA_DEFAULTS: dict[str, Any] = defaults(
    32768, head_size=256, partial=0.25, linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_value_head_dim=128,
    linear_num_key_heads=16, linear_num_value_heads=32,
)  # fmt: skip
_GATED_ATTENTION = {
    **ATTENTION_BIAS, "gate": GateDescription(None), "qk_norm": rms(offset=1.0),
}  # fmt: skip
_GUESSING = {"unused": ("mtp.",)}  # a module of multi-token prediction: see `octavo.models.heads.module_names`
_QWEN_EXPERTS = {
    "routing": routing(), "shared": shared_expert(key("shared_expert_intermediate_size"), "mlp.shared_expert"),
    "shared_gate_name": "mlp.shared_expert_gate",
}  # fmt: skip
_JAMBA_MLP = {
    "up_names": ("feed_forward.gate_proj", "feed_forward.up_proj"), "down_name": "feed_forward.down_proj"
}  # fmt: skip
_LFM_MLP = {"up_names": ("feed_forward.w1", "feed_forward.w3"), "down_name": "feed_forward.w2"}
_LFM_ATTENTION = {
    "qk_norm": rms(), "qk_norm_names": ("self_attn.q_layernorm", "self_attn.k_layernorm"),
    "output_name": "self_attn.out_proj",
}  # fmt: skip
_LFM_NORMS = {"attention_norm": "operator_norm", "feed_forward_norm": "ffn_norm"}
_LFM_MODEL = {"norm_name": "model.embedding_norm", "tie_word_embeddings": lambda c, _: c.get(
    "tie_embedding", c["tie_word_embeddings"])}  # fmt: skip
_LFM_DEFAULTS: dict[str, Any] = defaults(
    128000, kv_heads=8, eps=1e-5, tied=True, theta=1000000.0, conv_bias=False, conv_L_cache=3,
)  # fmt: skip
_MAMBA_LAYER = {"attention_norm": "norm"}


def _never(config: Config, i: int) -> bool:
    return False


def _griffin_mixer(config: Config, i: int) -> GatedRecurrenceDescription | str:
    """Two recurrences, then attention with a window, or what is said."""
    kinds = config["block_types"]
    if kinds[i % len(kinds)] != "recurrent":
        return "attention"
    return GatedRecurrenceDescription(
        config["lru_width"] or config["hidden_size"], config["num_attention_heads"], config["conv1d_width"],
        activation_of(config["hidden_act"]),
    )  # fmt: skip


def _root_in_bfloat16(config: Config, _: int) -> float:
    """The root of the hidden size, of which eight bits are kept."""
    fraction, exponent = math.frexp(config["hidden_size"] ** 0.5)
    return math.ldexp(round(fraction * 256) / 256, exponent)


FAMILIES = {
    "MambaForCausalLM": Family(
        defaults=_MAMBA_1_DEFAULTS, mixer=_mamba_1, has_feed_forward=_never, layer=_MAMBA_LAYER, model=_BACKBONE
    ),
    "FalconMambaForCausalLM": Family(
        defaults=_MAMBA_1_DEFAULTS | defaults(mixer_rms_eps=1e-6), mixer=_mamba_1, has_feed_forward=_never,
        layer=_MAMBA_LAYER, model=_BACKBONE,
    ),
    "Mamba2ForCausalLM": Family(
        defaults=_MAMBA_DEFAULTS | defaults(num_heads=128, head_size=64, state_size=128, n_groups=8),
        mixer=_mamba_2("num_heads", "head_dim", _limits), has_feed_forward=_never, layer=_MAMBA_LAYER, model=_BACKBONE,
    ),
    "JambaForCausalLM": Family(
        defaults=defaults(
            262144, kv_heads=8, experts=16, top_k=2, expert_layer_period=2, expert_layer_offset=1, attn_layer_period=8,
            attn_layer_offset=4, mamba_d_state=16, mamba_d_conv=4, mamba_expand=2, mamba_dt_rank="auto",
            mamba_conv_bias=True, mamba_proj_bias=False,
        ),
        mixer=_jamba_mixer, rope=None, feed_forward=_JAMBA_MLP, layer={"feed_forward_norm": "pre_ff_layernorm"},
        model={"norm_name": "model.final_layernorm"},
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
        defaults=_HYBRID_DEFAULTS | defaults(262144, kv_heads=8, eps=1e-5, attn_layer_indices=None, partial=0.5),
        mixer=_bamba_mixer, attention=ATTENTION_BIAS,
        feed_forward=_JAMBA_MLP | MLP_BIAS, layer={"feed_forward_norm": "pre_ff_layernorm"},
        model={"norm_name": "model.final_layernorm"},
    ),
    "GraniteMoeHybridForCausalLM": Family(
        defaults=_HYBRID_DEFAULTS | {
            **NO_MULTIPLIERS, "max_position_embeddings": 2048, "num_experts": 8, "num_experts_per_tok": 2,
            "shared_intermediate_size": 1024, "position_embedding_type": None,
        },
        mixer=_granite_mixer, rotates=lambda c, _: c["position_embedding_type"] == "rope",
        attention=ATTENTION_BIAS | SCALE,
        feed_forward={
            "intermediate_size": key("shared_intermediate_size"), "up_names": ("shared_mlp.input_linear",),
            "down_name": "shared_mlp.output_linear",
        },
        layer=RESIDUAL, model=MULTIPLIERS,
        experts={
            "routing": routing(normalize=True), "shared": granite_shared,
            "router_names": ("block_sparse_moe.router.layer", "block_sparse_moe.router"),
            "names": (
                ExpertNames(("block_sparse_moe.input_linear.weight",), "block_sparse_moe.output_linear.weight"),
                stacked("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"),
            ),
        },
        is_sparse=lambda c, _: c["num_experts"] > 0,
    ),
    "FalconH1ForCausalLM": Family(
        defaults=_HYBRID_DEFAULTS | defaults(
            8192, kv_heads=8, eps=1e-5, mamba_d_ssm=1024, mamba_norm_before_gate=True, mamba_rms_norm=False,
            projectors_bias=False, lm_head_multiplier=1.0, embedding_multiplier=1.0, mlp_multipliers=None,
            key_multiplier=1.0, attention_out_multiplier=1.0, attention_in_multiplier=1.0, ssm_multipliers=None,
            ssm_in_multiplier=1.0, ssm_out_multiplier=1.0,
        ),
        refuses=("attention_bias",), attention={"scale": _falcon_scale},
        feed_forward=_JAMBA_MLP | {
            "bias": key("mlp_bias"), "gate_multiplier": lambda c, _: (c["mlp_multipliers"] or (1.0, 1.0))[0],
        },
        layer={
            "beside": _falcon_mamba, "feed_forward_norm": "pre_ff_layernorm",
            "multipliers": lambda c, _: (
                c["attention_in_multiplier"] * c["attention_out_multiplier"], c["ssm_out_multiplier"],
                (c["mlp_multipliers"] or (1.0, 1.0))[1],
            ),
        },
        model={
            "norm_name": "model.final_layernorm", "embedding_multiplier": key("embedding_multiplier"),
            "logits_divisor": lambda c, _: 1 / c["lm_head_multiplier"],
        },
    ),
    "NemotronHForCausalLM": Family(
        defaults=defaults(
            4096, kv_heads=8, head_size=128, eps=1e-5, mlp_hidden_act="relu2", ssm_state_size=128, mamba_num_heads=128,
            mamba_head_dim=64, n_groups=8, conv_kernel=4, time_step_min=0.001, use_conv_bias=True, use_bias=False,
            hybrid_override_pattern="M-*-", experts=8, top_k=2, n_group=1, topk_group=1, routed_scaling_factor=1.0,
            expert_size=7688, moe_shared_expert_intermediate_size=7688,
        ),
        mixer=_nemotron_mixer, rope=None, has_feed_forward=lambda c, i: _nemotron_kind(c, i) in ("mlp", "moe"),
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
        is_sparse=lambda c, i: _nemotron_kind(c, i) == "moe", refuses=("moe_latent_size",),
    ),
    "Lfm2ForCausalLM": Family(
        defaults=_LFM_DEFAULTS | defaults(
            block_auto_adjust_ff_dim=True, block_ffn_dim_multiplier=1.0, block_multiple_of=256,
        ),
        mixer=_short_conv(_lfm_is_attention), attention=_LFM_ATTENTION,
        feed_forward=_LFM_MLP | {"intermediate_size": _lfm_intermediate, "activation": "silu"}, layer=_LFM_NORMS,
        model=_LFM_MODEL,
    ),
    "Lfm2MoeForCausalLM": Family(
        defaults=_LFM_DEFAULTS | defaults(
            experts=32, top_k=4, expert_size=1792, num_dense_layers=2, use_expert_bias=True, routed_scaling_factor=1.0,
        ),
        mixer=_short_conv(_lfm_is_attention), attention=_LFM_ATTENTION,
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
        is_sparse=lambda c, i: i >= c["num_dense_layers"],
    ),
    "Lfm3ForCausalLM": Family(
        defaults=defaults(
            128000, kv_heads=4, head_size=128, eps=1e-5, tied=True, conv_bias=False, conv_L_cache=7, window=256,
            use_sandwich_norm=True, use_attention_gate=True, rope_parameters={
                "sliding_attention": {"rope_theta": 10000.0}, "full_attention": {
                    "rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.5,
                },
            },
        ),
        mixer=_short_conv(lambda c, i: _lfm3_type(c, i) != "conv"),
        slides=lambda c, i: _lfm3_type(c, i) == "sliding_attention",
        attention=ATTENTION_BIAS | {
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
        defaults=_DELTA_DEFAULTS | defaults(
            kv_heads=2, decoder_sparse_step=1, mlp_only_layers=None, expert_size=512,
            shared_expert_intermediate_size=512, experts=512, top_k=10,
        ),
        norm=rms(offset=1.0), mixer=_delta, attention=_GATED_ATTENTION, experts=_QWEN_EXPERTS,
        is_sparse=sparse_by_step, model=_GUESSING,
    ),
    "Qwen3_5ForCausalLM": Family(
        defaults=_DELTA_DEFAULTS | defaults(kv_heads=4), norm=rms(offset=1.0),
        mixer=lambda c, i: _delta(c, i, in_names=_SEPARATE), attention=_GATED_ATTENTION, model=_GUESSING,
    ),
    "Qwen3_5MoeForCausalLM": Family(
        defaults=_DELTA_DEFAULTS | defaults(
            kv_heads=2, expert_size=512, shared_expert_intermediate_size=512, experts=256, top_k=8,
        ),
        norm=rms(offset=1.0), mixer=lambda c, i: _delta(c, i, in_names=_SEPARATE), attention=_GATED_ATTENTION,
        experts=_QWEN_EXPERTS, model=_GUESSING,
    ),
    "OlmoHybridForCausalLM": Family(
        defaults=defaults(
            65536, linear_num_key_heads=None, linear_num_value_heads=None, linear_key_head_dim=None,
            linear_value_head_dim=None, linear_conv_kernel_dim=4, linear_allow_neg_eigval=True,
        ),
        mixer=_olmo_mixer, rotates=lambda c, _: bool((c.get("rope_parameters") or {}).get("rope_theta")),
        attention={
            **ATTENTION_BIAS, "qk_norm": rms(), "qk_norm_scope": "all",
        },
        layer={
            "attention_norm": _olmo_norm("attention_layer_norm", None),
            # transformers writes the first name.
            "attention_post_norm": _olmo_norm(None, "feedforward_layer_norm|post_attention_layernorm"),
            "feed_forward_norm": _olmo_norm("feedforward_layer_norm", None),
            "feed_forward_post_norm": _olmo_norm(None, "post_feedforward_layernorm"),
        },
    ),
    "KimiLinearForCausalLM": Family(
        defaults=SIZES | defaults(
            1048576, eps=1e-5, experts=256, top_k=8, num_shared_experts=1, expert_size=1024, n_group=1, topk_group=1,
            routed_scaling_factor=2.446, q_lora_rank=None, first_k_dense_replace=1, linear_head_dim=128,
            linear_num_heads=32, linear_conv_kernel_dim=4,
        ),
        mixer=_kimi_mixer,
        experts={
            "routing": SIGMOID_GROUPS, "router_names": ("block_sparse_moe.gate",), "names": W123,
            "correction_names": ("block_sparse_moe.gate.e_score_correction_bias",),
            "shared": shared_expert(several("num_shared_experts"), "block_sparse_moe.shared_experts"),
        },
        is_sparse=said_by_types(sparse_from("first_k_dense_replace")),
    ),
    "BailingHybridForCausalLM": Family(
        defaults=SIZES | defaults(
            262144, theta=6000000.0, experts=512, top_k=8, num_shared_experts=1, expert_size=768, n_group=8,
            topk_group=4, routed_scaling_factor=2.5, q_lora_rank=None, first_k_dense_replace=2, head_size=128,
            short_conv_kernel_size=4, layer_group_size=6, kda_safe_gate=True, kda_lower_bound=-5.0,
            num_nextn_predict_layers=1,
        ),
        mixer=_bailing_mixer,
        experts={
            "routing": SIGMOID_GROUPS, "correction_names": ("mlp.gate.expert_bias", *CORRECTION_NAMES),
            "shared": shared_expert(several("num_shared_experts")),
        },
        is_sparse=said_by_types(sparse_from("first_k_dense_replace")),
        model={"embedding_name": "model.word_embeddings", "num_unused_layers": key("num_nextn_predict_layers")},
        refuses=("attention_bias",),
    ),
    "MiniMaxForCausalLM": Family(
        defaults=defaults(
            131072, kv_heads=8, eps=1e-5, theta=1000000.0, experts=8, top_k=2, full_attn_alpha_factor=1,
            full_attn_beta_factor=1, linear_attn_alpha_factor=1, linear_attn_beta_factor=1, mlp_alpha_factor=1,
            mlp_beta_factor=1,
        ),
        mixer=_minimax_mixer,
        layer={
            "keeps_normed": True, "stream_multipliers": _minimax_factors("alpha"),
            "multipliers": lambda c, i: (_minimax_factors("beta")(c, i)[0], 1.0, _minimax_factors("beta")(c, i)[1]),
        },
        experts={"routing": routing(), "router_names": ("block_sparse_moe.gate", "mlp.gate"), "names": W123},
        model={"unused": _minimax_constants},
    ),
    "RecurrentGemmaForCausalLM": Family(
        defaults=defaults(
            8192, act="gelu_pytorch_tanh", tied=True, partial=0.5, lru_width=None, conv1d_width=4, logits_soft_cap=30.0,
            window=2048, block_types=["recurrent", "recurrent", "attention"],
        ),
        norm=rms(offset=1.0), mixer=_griffin_mixer, slides=lambda *_: True,
        attention={
            "qkv_bias": key("attention_bias"), "output_bias": True, "output_name": "temporal_block.o_proj",
            "qkv_names": tuple(f"temporal_block.{part}_proj" for part in "qkv"),
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
