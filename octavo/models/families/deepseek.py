"""The architectures with latent attention: DeepSeek's, and others with the same attention."""

import math
from collections.abc import Callable
from typing import Any

from octavo.layers.experts import EXPERT_NAMES
from octavo.layers.mla import MLADescription
from octavo.layers.sparse_indexer import SparseIndexerDescription
from octavo.models.config_reader import (
    Config,
    Family,
    attention_temperature,
    key,
    rms,
    rope_of,
    rope_settings,
    routing,
    valued,
)
from octavo.models.families.settings import ROUTED, several, shared_expert


def latent(**changes: Any) -> Callable[[Config, int], MLADescription]:
    """Return a setting for latent attention with the usual settings and `changes`, which are values or settings."""

    def find(config: Config, i: int) -> MLADescription:
        num_heads, plain, rotated = (config[n] for n in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim"))
        settings = {
            "num_heads": num_heads, "q_lora_rank": config["q_lora_rank"] or None,
            "kv_lora_rank": config["kv_lora_rank"], "qk_nope_head_dim": plain, "qk_rope_head_dim": rotated,
            "value_size": config["v_head_dim"] or config["hidden_size"] // num_heads,
            "rope": rope_of(
                config, i, rotated, {"interleaved": bool(config["rope_interleave"]), "rotary_dim": rotated}
            ),
            "scale": (plain + rotated) ** -0.5 * _sharper(config), "norm": rms(eps=1e-6)(config, i),
            "bias": bool(config["attention_bias"]), "attention_temperature": attention_temperature(config),
        }  # fmt: skip
        return MLADescription(**settings | valued(changes, config, i))

    return find


def _sharper(config: Config) -> float:
    """Return the factor of scores when positions are scaled: yarn's `mscale`, squared (once for queries, once for
    keys)."""
    scaling = rope_settings(config)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    factor, all_dim = float(scaling.get("factor") or 1.0), float(scaling.get("mscale_all_dim") or 0.0)
    return 1.0 if kind == "default" or factor <= 1 else (0.1 * all_dim * math.log(factor) + 1.0) ** 2


def _group_limited(config: Config, _: int) -> bool:
    return bool(config["topk_method"] == "group_limited_greedy")


def _is_sparse(config: Config, i: int) -> bool:
    return bool(config["mlp_layer_types"][i] == "sparse")


def _rank_scale(rank: str) -> Callable[[Config, int], float]:
    """Return a setting for LongCat's factor of compressed vectors; `rank` is the setting with their size."""
    return lambda c, _: (c["hidden_size"] / c[rank]) ** 0.5


def _longcat_mixer(config: Config, i: int) -> MLADescription | None:
    """Return the mixer of part i % 3 of a layer: attention and experts; a feed-forward; attention and a
    feed-forward."""
    if i % 3 == 1:
        return None
    scales = {"query_scale": _rank_scale("q_lora_rank"), "latent_scale": _rank_scale("kv_lora_rank")}
    return latent(**scales, name=f"self_attn.{i % 3 // 2}")(config, i)


_SHARED = {"shared": shared_expert(several("n_shared_experts"))}


def _shares_index(config: Config, i: int) -> bool:
    """Return whether layer i reads the keys that were chosen for an earlier layer (GLM), by the rule of
    `transformers`."""
    if types := config.get("indexer_types") or config.get("index_topk_pattern"):
        return bool(types[i] in ("shared", "S"))
    every, first = max(config.get("index_topk_freq") or 1, 1), config.get("index_skip_topk_offset", 2)
    return bool(max(i - first + 1, 0) % every)


def _indexed(is_interleaved: bool, shares: Callable[[Config, int], bool] = lambda _, __: False) -> Family:
    """Return a family whose attention reads the keys that an index chooses. In the checkpoint, the index's rotated
    pairs are neighbours if `is_interleaved`, else two halves."""

    def index(config: Config, i: int) -> SparseIndexerDescription | None:
        if not config["index_topk"] or shares(config, i):
            return None
        rotated = config["qk_rope_head_dim"]
        return SparseIndexerDescription(
            num_heads=config["index_n_heads"], head_size=config["index_head_dim"], num_chosen=config["index_topk"],
            rope=rope_of(config, i, rotated, {"interleaved": is_interleaved, "rotary_dim": rotated}),
        )  # fmt: skip

    def unused(config: Config, _: int) -> tuple[str, ...]:
        layers = (i for i in range(config["num_hidden_layers"]) if index(config, i) is None)
        return tuple(f"model.layers.{i}.self_attn.indexer." for i in layers)

    return Family(
        mixer=latent(index=index, shares_index=lambda c, i: bool(c["index_topk"]) and shares(c, i)), experts=ROUTED,
        model={"unused": unused},
    )  # fmt: skip


FAMILIES = {
    "DeepseekV2ForCausalLM": Family(
        mixer=latent(),
        experts=_SHARED | {
            "routing": routing(
                scale=key("routed_scaling_factor"),
                num_groups=lambda c, i: c["n_group"] if _group_limited(c, i) else 1,
                kept_groups=lambda c, i: c["topk_group"] if _group_limited(c, i) else 1,
            ),
        },
        refuses=("mlp_bias",),
    ),
    "DeepseekV3ForCausalLM": Family(mixer=latent(), experts=ROUTED),
    "Glm4MoeLiteForCausalLM": Family(mixer=latent(), experts=ROUTED, is_sparse=lambda _, i: i > 0),
    "AXK1ForCausalLM": Family(
        mixer=latent(),
        layer={
            "feed_forward_post_norm": lambda c, i: "post_mlp_layernorm|mlp.post_mlp_layernorm"
            if _is_sparse(c, i) else None
        },
        experts=ROUTED | {"needs_correction": False},
        is_sparse=lambda c, i: i >= c["first_k_dense_replace"] and i % c["moe_layer_freq"] == 0,
        model={  # released checkpoints have this norm also in dense layers, which do not use it
            "unused": lambda c, _: tuple(
                f"model.layers.{i}.post_mlp_layernorm" for i in range(c["num_hidden_layers"]) if not _is_sparse(c, i)
            )
        },
    ),
    "Mistral4ForCausalLM": Family(
        mixer=latent(),
        experts=_SHARED | {
            "routing": routing(
                scale=key("routed_scaling_factor"), num_groups=key("n_group"), kept_groups=key("topk_group"),
                group_by_two=lambda c, _: c["topk_group"] < c["n_group"],
            ),
            "names": (EXPERT_NAMES[1], EXPERT_NAMES[0]),
        },
    ),
    "MiniCPM3ForCausalLM": Family(
        mixer=latent(),
        layer={
            "residual_multiplier": lambda c, _: (c["scale_depth"] or math.sqrt(c["num_hidden_layers"]))
            / math.sqrt(c["num_hidden_layers"])
        },
        model={
            "embedding_multiplier": lambda c, _: float(c["scale_emb"]),
            "logits_divisor": lambda c, _: c["hidden_size"] / (c["dim_model_base"] or c["hidden_size"]),
        },
        refuses=("mlp_bias",),
    ),
    "DeepseekV32ForCausalLM": _indexed(is_interleaved=False),
    "GlmMoeDsaForCausalLM": _indexed(is_interleaved=True, shares=_shares_index),
    "LongcatFlashForCausalLM": Family(
        num_layers=lambda c, _: 3 * c["num_hidden_layers"], mixer=_longcat_mixer,
        feed_forward={
            "up_names": lambda _, i: (f"mlps.{i % 3 - 1}.gate_proj", f"mlps.{i % 3 - 1}.up_proj"),
            "down_name": lambda _, i: f"mlps.{i % 3 - 1}.down_proj",
        },
        experts={
            "routing": routing(scale=key("routed_scaling_factor")), "num_identities": lambda c, _:
            c["zero_expert_num"] or 0, "router_names": ("mlp.router.classifier",), "router_bias": key("router_bias"),
            "correction_names": ("mlp.router.e_score_correction_bias",),
        },
        is_sparse=lambda _, i: i % 3 == 0,
        layer={
            "checkpoint_layer": lambda _, i: i // 3, "deferred_by": lambda _, i: 2 if i % 3 == 0 else 0,
            "attention_norm": lambda _, i: f"input_layernorm.{i % 3 // 2}",
            "feed_forward_norm": lambda _, i: f"post_attention_layernorm.{i % 3 // 2}",
        },
        # Tensors of multi-token prediction, and tensors that transformers writes for identity experts.
        model={"unused": lambda c, _: ("model.mtp.", *(
            f"model.layers.{i}.mlp.experts.{c['num_experts'] + e}."
            for i in range(c["num_hidden_layers"]) for e in range(c["zero_expert_num"] or 0)
        ))},
    ),
    "YoutuForCausalLM": Family(mixer=latent()),
}  # fmt: skip
