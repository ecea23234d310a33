"""Settings that several families' tables are made of, dense ones, those with experts and those with states alike."""

from __future__ import annotations

import math
from typing import Any

from octavo.layers.experts import EXPERT_NAMES, one_by_one
from octavo.layers.feed_forward import FeedForwardDescription
from octavo.layers.rotary import QueryGrowth
from octavo.models.readers import Config, Setting, activation_of, key, per_layer
from octavo.ops import Routing

ATTENTION_BIAS = {"qkv_bias": key("attention_bias"), "output_bias": key("attention_bias")}
MLP_BIAS = {"bias": key("mlp_bias")}
# Norms around a layer, and only after it.
AROUND = {
    "attention_post_norm": "post_attention_layernorm", "feed_forward_norm": "pre_feedforward_layernorm",
    "feed_forward_post_norm": "post_feedforward_layernorm",
}  # fmt: skip
AFTER = AROUND | {"attention_norm": None, "feed_forward_norm": None}
# Granite's, of scores, of what is added to the residual stream, of embedding and logits.
SCALE = {"scale": key("attention_multiplier")}
RESIDUAL = {"residual_multiplier": key("residual_multiplier")}
MULTIPLIERS = {"embedding_multiplier": key("embedding_multiplier"), "logits_divisor": key("logits_scaling")}


# Mixtral's names of experts, and those of files and of transformers 5.
W123 = (
    one_by_one("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3", "block_sparse_moe.experts.{}.w2"),
    *EXPERT_NAMES,
)


def mamba_rank(config: Config, setting: str) -> int:
    """Of the product that Mamba 1 makes its time steps by."""
    rank = config[setting]
    return math.ceil(config["hidden_size"] / 16) if rank == "auto" else int(rank)


def late_layers_slide(config: Config, i: int) -> bool:
    return bool(i >= config["max_window_layers"])


def all_but_every(number: int, setting: str = "", first: int = 1) -> Setting:
    """All layers but every n-th slide, where n is the setting or else the number. `first` = 0 counts from the first
    one."""

    def slides(config: Config, i: int) -> bool:
        period = config.get(setting) or number
        period = len(period) if isinstance(period, str) else period  # "LLLG"
        return bool(config["sliding_window"]) and (i + first) % period != 0

    return slides


def slides_by(rule: Setting) -> Setting:
    """Whether the layer has the window, said by its type or else by the rule."""

    def find(config: Config, i: int) -> bool:
        if config["layer_types"] is None:
            return bool(rule(config, i))
        return bool(config["layer_types"][i] == "sliding_attention")

    return find


def rotates_unless_all_is_seen(rule: Setting) -> Setting:
    """Layers without the window do not rotate, in models that have one."""
    return lambda c, i: not c["sliding_window"] or slides_by(rule)(c, i)


def routing(**changes: Any) -> Setting:
    """A router by the usual settings; `changes` are values or settings."""

    def find(config: Config, i: int) -> Routing:
        settings = {"top_k": config["num_experts_per_tok"], "normalize": bool(config["norm_topk_prob"])}
        return Routing(**settings | {name: v(config, i) if callable(v) else v for name, v in changes.items()})

    return find


def shared_expert(size: Setting, name: str = "mlp.shared_experts", bias: Any = False) -> Setting:
    """The expert that sees every token; without a size there is none."""

    def find(config: Config, i: int) -> FeedForwardDescription | None:
        found = size(config, i)
        if not found:
            return None
        return FeedForwardDescription(
            found, activation_of(config["hidden_act"]), bias=bias(config, i) if callable(bias) else bias,
            up_names=(f"{name}.gate_proj", f"{name}.up_proj"), down_name=f"{name}.down_proj",
        )  # fmt: skip

    return find


def query_growth(config: Config, _: int) -> QueryGrowth | None:
    """Llama 4's, as later models say it."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rate = rope.get("llama_4_scaling_beta")
    return QueryGrowth(float(rate), int(rope["original_max_position_embeddings"])) if rate else None


def sparse_by_step(config: Config, i: int) -> bool:
    return i not in (config["mlp_only_layers"] or ()) and (i + 1) % config["decoder_sparse_step"] == 0


def granite_shared(config: Config, _: int) -> FeedForwardDescription | None:
    """Granite's shared expert, whose gate and up are one matrix."""
    if not config["shared_intermediate_size"]:
        return None
    return FeedForwardDescription(
        config["shared_intermediate_size"], activation_of(config["hidden_act"]),
        up_names=("shared_mlp.input_linear",), down_name="shared_mlp.output_linear",
    )  # fmt: skip


# Of DeepSeek-V3 and all that follow it.
SIGMOID_GROUPS = routing(
    scoring="sigmoid", scale=key("routed_scaling_factor"), num_groups=key("n_group"), kept_groups=key("topk_group"),
    group_by_two=lambda c, _: c["topk_group"] < c["n_group"],
)  # fmt: skip
# Of checkpoints, of what transformers 5 makes of some, of GGUF files.
CORRECTION_NAMES = (
    "mlp.gate.e_score_correction_bias", "mlp.gate.e_score_correction.bias", "mlp.e_score_correction_bias"
)  # fmt: skip
CORRECTION = {"correction_names": CORRECTION_NAMES}


def several(count: str, size: str = "moe_intermediate_size") -> Setting:
    """So many shared experts are one that is so much wider."""
    return lambda c, _: (c[count] or 0) * c[size]


def sparse_from(setting: str) -> Setting:
    """All layers but the first ones are sparse."""
    return lambda c, i: i >= c[setting]


def said_by_types(first: Setting) -> Setting:
    """By `mlp_layer_types`, or where that is absent by `first`."""
    return lambda c, i: (
        first(c, i) if c.get("mlp_layer_types") is None else per_layer("mlp_layer_types")(c, i) == "sparse"
    )
