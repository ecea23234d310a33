"""Zamba and Zamba 2: state spaces in every layer, some of which also see what a transformer makes that they share."""

from __future__ import annotations

import math
from typing import Any

from octavo.layers.attention import AttentionDescription
from octavo.layers.feed_forward import FeedForwardDescription
from octavo.layers.mamba import MambaDescription
from octavo.layers.norm import NormDescription
from octavo.layers.shared import SharedDescription
from octavo.models.families.settings import defaults, mamba_rank
from octavo.models.readers import Config, Family, Setting, activation_of, rope_of

_DEFAULTS: dict[str, Any] = defaults(
    4096, eps=1e-5, act="gelu", tied=True, mamba_d_conv=4, mamba_expand=2, add_bias_linear=False, num_mem_blocks=1,
    adapter_rank=0, use_shared_attention_adapter=False, use_mem_rope=False,
)  # fmt: skip


def _zamba_shares(config: Config, i: int) -> bool:
    """Whether layer i has the transformer."""
    if config["layer_types"] is not None:
        return bool(config["layer_types"][i] == "hybrid")
    return i == 2 or (i > 2 and (i - 3) % config["attn_layer_period"] == config["attn_layer_offset"])


def _zamba_2_shares(config: Config, i: int) -> bool:
    if config["layer_types"] is not None:
        return bool(config["layer_types"][i] == "hybrid")
    return i in (6, 12, 18, 24, 30, 36, 42, 47, 51)


def _mamba_name(shares: Setting) -> Setting:
    return lambda c, i: "mamba_decoder.mamba" if shares(c, i) else "mamba"


def _mamba_1(config: Config, i: int) -> MambaDescription:
    return MambaDescription(
        config["mamba_expand"] * config["hidden_size"], 1, config["mamba_d_state"], config["mamba_d_conv"],
        config["n_mamba_heads"], time_rank=mamba_rank(config, "mamba_dt_rank"), bias=config["mamba_proj_bias"],
        output_bias=config["mamba_proj_bias"], conv_bias=config["mamba_conv_bias"], tensors_by_group=True,
        name=_mamba_name(_zamba_shares)(config, i),
    )  # fmt: skip


def _mamba_2(config: Config, i: int) -> MambaDescription:
    heads, bias = config["n_mamba_heads"], config["add_bias_linear"]
    return MambaDescription(
        heads, int(config["mamba_expand"] * config["hidden_size"]) // heads, config["mamba_d_state"],
        config["mamba_d_conv"], config["mamba_ngroups"], time_limit=(config["time_step_min"], math.inf),
        norm=NormDescription(1e-5), bias=bias, output_bias=bias, name=_mamba_name(_zamba_2_shares)(config, i),
    )  # fmt: skip


def _shared(shares: Setting, module: str, up_names: tuple[str, ...]) -> Setting:
    """The transformer of layer i. There may be several, which take turns; the first layer of each has its weights."""

    def find(config: Config, i: int) -> SharedDescription | None:
        if not shares(config, i):
            return None
        sharing = [k for k in range(config["num_hidden_layers"]) if shares(config, k)]
        number, hidden_size, heads = sharing.index(i), config["hidden_size"], config["num_attention_heads"]
        size, rank = 2 * hidden_size // heads, config["adapter_rank"]
        attention = AttentionDescription(
            heads, config["num_key_value_heads"] or heads, size, (size / 2) ** -0.5,
            rope_of(config, i, size, {}) if config["use_mem_rope"] else None, input_size=2 * hidden_size,
        )  # fmt: skip
        feed_forward = FeedForwardDescription(
            config["intermediate_size"] or 4 * hidden_size, activation_of(config["hidden_act"]),
            bias=config["add_bias_linear"], up_names=up_names, down_name="feed_forward.down_proj",
            has_adapters=bool(rank),
        )  # fmt: skip
        return SharedDescription(
            f"model.layers.{sharing[number % config['num_mem_blocks']]}.{module}", attention, feed_forward,
            NormDescription(config["norm_eps"]), number, rank, bool(config["use_shared_attention_adapter"]),
        )  # fmt: skip

    return find


def _family(shares: Setting, mixer: Setting, shared: Setting, further: dict[str, Any]) -> Family:
    return Family(
        defaults=_DEFAULTS | further, mixer=mixer, has_feed_forward=lambda *_: False,
        layer={
            "shared": shared,
            "attention_norm": lambda c, i: "mamba_decoder.input_layernorm" if shares(c, i) else "input_layernorm",
        },
        model={"norm_name": "model.final_layernorm"}, refuses=("use_long_context",),
    )  # fmt: skip


FAMILIES = {
    "ZambaForCausalLM": _family(
        _zamba_shares, _mamba_1,
        _shared(_zamba_shares, "shared_transf", ("feed_forward.gate_proj", "feed_forward.up_proj")),
        defaults(
            attn_layer_period=6, attn_layer_offset=4, n_mamba_heads=2, mamba_d_state=16, mamba_dt_rank="auto",
            mamba_conv_bias=True, mamba_proj_bias=False,
        ),
    ),
    "Zamba2ForCausalLM": _family(
        _zamba_2_shares, _mamba_2, _shared(_zamba_2_shares, "shared_transformer", ("feed_forward.gate_up_proj",)),
        defaults(n_mamba_heads=8, mamba_d_state=64, mamba_ngroups=1, time_step_min=0.001, adapter_rank=128),
    ),
}  # fmt: skip
