"""Settings that the tables of several families share."""

from typing import Any

from octavo.errors import LoadError
from octavo.layers.experts import EXPERT_NAMES, one_by_one, stacked
from octavo.layers.feed_forward import FeedForwardDescription
from octavo.layers.norm import NormDescription
from octavo.layers.projection_head import ProjectionHeadDescription
from octavo.models.config_reader import Config, Family, Setting, activation_of, key, per_layer, routing, valued

# Norms before and after each part of a layer (AROUND), and only after each part (AFTER).
AROUND = {
    "attention_post_norm": "post_attention_layernorm", "feed_forward_norm": "pre_feedforward_layernorm",
    "feed_forward_post_norm": "post_feedforward_layernorm",
}  # fmt: skip
AFTER = AROUND | {"attention_norm": None, "feed_forward_norm": None}


def norms_of_sum(attention: str, feed_forward: str) -> dict[str, Any]:
    """Return settings for layers with post norms only, applied to the residual stream after each part is added (Vaswani
    et al. 2017)."""
    return {
        "post_norm_residual": True, "attention_norm": None, "feed_forward_norm": None, "attention_post_norm": attention,
        "feed_forward_post_norm": feed_forward,
    }  # fmt: skip


# Factors of embedding and logits in models whose configurations name them otherwise or not at all.
ROOT = {"embedding_multiplier": lambda c, _: c["hidden_size"] ** 0.5}
LOGIT_SCALE = {"logits_divisor": lambda c, _: 1 / c["logit_scale"]}
# Layer types without attention.
_OTHER_TYPES = ("linear_attention", "mamba", "recurrent", "conv", "mlp", "moe")
# Mixtral's names of experts, then the usual ones.
W123 = (
    one_by_one("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3", "block_sparse_moe.experts.{}.w2"),
    *EXPERT_NAMES,
)


def granite_rotates(config: Config, i: int) -> bool:
    """Return whether the layer rotates. A base of 0 in layer_rope_theta means no rotation."""
    return config["layer_rope_theta"] is None or bool(config["layer_rope_theta"][i])


def sliding(rule: Setting) -> Setting:
    """Return a setting for the layer's type: "sliding_attention" if the rule is true, else "full_attention"."""
    return lambda c, i: "sliding_attention" if rule(c, i) else "full_attention"


FULL = sliding(lambda *_: False)
ALL_SLIDE = sliding(lambda *_: True)
LATE_SLIDE = sliding(lambda c, i: i >= c["max_window_layers"])


def all_but_every(number: int, setting: str = "", first: int = 1) -> Setting:
    """Return a setting for layer types where all layers but every n-th slide; n is the value of `setting`, else
    `number`. With `first` = 0 the first layer is one of the n-th layers."""

    def slides(config: Config, i: int) -> bool:
        period = config.get(setting) or number
        period = len(period) if isinstance(period, str) else period  # "LLLG"
        return bool(config["sliding_window"]) and (i + first) % period != 0

    return sliding(slides)


def slides(config: Config, i: int) -> bool:
    """Return whether the layer has the window."""
    return bool(config["layer_types"][i] == "sliding_attention")


def rotates_as_listed(config: Config, i: int) -> bool:
    if not config["no_rope_layers"]:
        return bool((i + 1) % config["no_rope_layer_interval"])
    return bool(per_layer("no_rope_layers")(config, i))  # 1 where the layer rotates, despite the name


def rotates_unless_all_is_seen(config: Config, i: int) -> bool:
    """Return whether the layer rotates: in models with a window only layers with the window do."""
    return not config["sliding_window"] or slides(config, i)


def only_silu(config: Config, setting: str = "hidden_act") -> None:
    """Raise `LoadError` if the activation of convolutions before a state is not silu: no other is built."""
    if activation_of(config[setting]) != "silu":
        raise LoadError(f"{setting} = {config[setting]!r} before a state is not built yet; silu is.")


def where_no_attention(mixer: Setting) -> Setting:
    """Return a setting for the mixer: `mixer` in layers of types without attention, else "attention". Layers of unknown
    types count as attention, which refuses them."""
    return lambda c, i: mixer(c, i) if c["layer_types"][i] in _OTHER_TYPES else "attention"


def shared_expert(size: Setting, name: str = "mlp.shared_experts", **changes: Any) -> Setting:
    """Return a setting for the expert that sees every token, with `changes` of its description; None if its size is
    0."""
    usual = {
        "intermediate_size": size, "activation": lambda c, _: activation_of(c["hidden_act"]),
        "up_names": (f"{name}.gate_proj", f"{name}.up_proj"), "down_name": f"{name}.down_proj",
    }  # fmt: skip
    return lambda c, i: FeedForwardDescription(**valued(usual | changes, c, i)) if size(c, i) else None


def sparse_by_step(config: Config, i: int) -> bool:
    return i not in (config["mlp_only_layers"] or ()) and (i + 1) % config["decoder_sparse_step"] == 0


# Experts of Granite: names in checkpoints, then names in transformers 5.
GRANITE_EXPERTS = {
    "shared": shared_expert(
        key("shared_intermediate_size"), up_names=("shared_mlp.input_linear",), down_name="shared_mlp.output_linear"
    ),
    "router_names": ("block_sparse_moe.router.layer", "block_sparse_moe.router"),
    "names": (
        stacked("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
        stacked("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"),
    ),
}  # fmt: skip
# The router of DeepSeek-V3 and of models with the same router.
SIGMOID_GROUPS = routing(
    scoring="sigmoid", scale=key("routed_scaling_factor"), num_groups=key("n_group"), kept_groups=key("topk_group"),
    group_by_two=lambda c, _: c["topk_group"] < c["n_group"],
)  # fmt: skip
# Names of the correction bias: in checkpoints, in some files of transformers 5, in GGUF files.
CORRECTION_NAMES = (
    "mlp.gate.e_score_correction_bias", "mlp.gate.e_score_correction.bias", "mlp.e_score_correction_bias"
)  # fmt: skip
CORRECTION = {"correction_names": CORRECTION_NAMES}


def by_layer(setting: str) -> Setting:
    """Return a setting that is one value for all layers, or a list with a value for each layer."""
    return lambda c, i: c[setting][i] if isinstance(c[setting], list) else c[setting]


def several(count: str, size: str = "moe_intermediate_size") -> Setting:
    """Return a setting for the size of several shared experts, which are computed as one wider expert."""
    return lambda c, _: (c[count] or 0) * c[size]


ROUTED = CORRECTION | {"routing": SIGMOID_GROUPS, "shared": shared_expert(several("n_shared_experts"))}


def _modern_bert_norm(config: Config, _: int) -> NormDescription:
    return NormDescription(config["norm_eps"], "layer", config["norm_bias"])


def modern_bert_head(name: str) -> Setting:
    return lambda c, i: ProjectionHeadDescription(
        f"{name}.dense", c["hidden_size"], c["classifier_bias"], activation_of(c["classifier_activation"]),
        _modern_bert_norm(c, i), f"{name}.norm",
    )  # fmt: skip


MODERN_BERT = Family(
    norm=_modern_bert_norm, layer_type=sliding(lambda c, i: i % c["global_attn_every_n_layers"]),
    feed_forward={"up_names": ("mlp.Wi",), "down_name": "mlp.Wo"},
    layer={"attention_norm": lambda _, i: "attn_norm" if i else None, "feed_forward_norm": "mlp_norm"},
    model={
        "embedding_name": "model.embeddings.tok_embeddings", "embedding_norm": _modern_bert_norm,
        "embedding_norm_name": "model.embeddings.norm", "norm_name": "model.final_norm",
    },
)  # fmt: skip
