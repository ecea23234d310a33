"""Small models of every architecture with latent attention; see `small_models`."""

from __future__ import annotations

from typing import Any

from tests.models.small_models import ROPE, SIZES, SmallModel

_SIZES: dict[str, Any] = {name: size for name, size in SIZES.items() if name != "head_dim"} | {"num_key_value_heads": 4}
_LATENT: dict[str, Any] = {
    "hidden_size": 64, "q_lora_rank": 40, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "routed_scaling_factor": 1.5,
}  # fmt: skip
_GROUPS: dict[str, Any] = {"n_group": 4, "topk_group": 2}
_YARN: dict[str, Any] = ROPE | {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}


def _model(name: str, /, **settings: Any) -> SmallModel:
    return SmallModel(f"{name}ForCausalLM", _SIZES | _LATENT | settings)


LATENT_MODELS: dict[str, SmallModel] = {
    "deepseek v2": _model(
        "DeepseekV2", first_k_dense_replace=1, topk_method="group_limited_greedy", **_EXPERTS, **_GROUPS
    ),
    "deepseek v2, queries not compressed": _model("DeepseekV2", **_EXPERTS | {"n_shared_experts": 1}
        | {"q_lora_rank": None, "rope_parameters": _YARN}),
    "deepseek v2, biases, but of queries that are not compressed": _model(
        "DeepseekV2", attention_bias=True, **_EXPERTS | {"q_lora_rank": None}
    ),
    "deepseek v3": _model(
        "DeepseekV3", first_k_dense_replace=1, rope_parameters=_YARN, attention_bias=True, **_EXPERTS, **_GROUPS
    ),
    "deepseek v3, halves": _model("DeepseekV3", rope_interleave=False, first_k_dense_replace=2, **_EXPERTS, **_GROUPS),
    "glm 4 moe lite": _model("Glm4MoeLite", **_EXPERTS),
    "a.x k1": _model("AXK1", **_EXPERTS, **_GROUPS),
    "mistral 4": _model(
        "Mistral4", first_k_dense_replace=1, **_EXPERTS, **_GROUPS,
        rope_parameters=_YARN | {"llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 16},
    ),
    "deepseek v3.2, as many keys as its index chooses": _model(
        "DeepseekV32", first_k_dense_replace=1, index_n_heads=2, index_head_dim=16, **_EXPERTS, **_GROUPS
    ),
    "glm moe dsa, likewise": _model(
        "GlmMoeDsa", first_k_dense_replace=1, index_n_heads=2, index_head_dim=16, **_EXPERTS, **_GROUPS
    ),
    "deepseek v3.2, of whose keys its index chooses 8": _model(
        "DeepseekV32", first_k_dense_replace=1, index_n_heads=16, index_head_dim=16, index_topk=8,
        attention_bias=True, rope_parameters=_YARN, **_EXPERTS, **_GROUPS,
    ),
    "glm moe dsa, of whose keys indexes of some layers choose 8": _model(
        "GlmMoeDsa", first_k_dense_replace=1, index_n_heads=16, index_head_dim=24, index_topk=8,
        indexer_types=["full", "shared"], **_EXPERTS, **_GROUPS,
    ),
    "longcat flash": SmallModel(
        "LongcatFlashForCausalLM", {
            **{name: size for name, size in _SIZES.items() if name not in ("num_hidden_layers", "intermediate_size")},
            **_LATENT, "num_layers": 2, "ffn_hidden_size": 56, "expert_ffn_hidden_size": 24, "n_routed_experts": 5,
            "zero_expert_num": 3, "moe_topk": 3, "head_dim": 8,
        },
    ),
    "minicpm 3": _model("MiniCPM3", dim_model_base=32),
    "youtu": _model("Youtu", kv_lora_rank=32, qk_rope_head_dim=16),
}  # fmt: skip
