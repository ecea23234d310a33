"""Small models of every architecture with experts; see `small_models`."""

from __future__ import annotations

from typing import Any

from tests.models.small_models import MIXED, MODELS, MULTIPLIERS, NARROW, ROPE, SIZES, YARN, SmallModel

_EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2}
_LOCAL: dict[str, Any] = {"num_local_experts": 6, "num_experts_per_tok": 2}
_MOE: dict[str, Any] = {"moe_intermediate_size": 24}
_ROUTED: dict[str, Any] = _MOE | {"n_routed_experts": 8, "num_experts_per_tok": 3, "hidden_size": 64}
_GROUPS: dict[str, Any] = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}
_PARTIAL = ROPE | {"rope_type": "default", "partial_rotary_factor": 0.5}
_SPARSE_LAST: dict[str, Any] = {"mlp_layer_types": ["dense", "sparse"]}


def _model(name: str, /, **settings: Any) -> SmallModel:
    return SmallModel(f"{name}ForCausalLM", SIZES | {"hidden_size": 64} | settings)


EXPERT_MODELS: dict[str, SmallModel] = {
    "mixtral": _model("Mixtral", sliding_window=20, **_LOCAL),
    "qwen2 moe": _model("Qwen2Moe", shared_expert_intermediate_size=40, mlp_only_layers=[0], **_MOE, **_EXPERTS),
    "qwen3 moe": _model("Qwen3Moe", norm_topk_prob=True, **_MOE, **_LOCAL),
    "qwen3 moe, every second layer, gelu": _model(
        "Qwen3Moe", decoder_sparse_step=2, hidden_act="gelu", attention_bias=True, **_MOE, **_LOCAL
    ),
    "mellum": _model(
        "Mellum", **_MOE, **_LOCAL, **NARROW,
        rope_parameters={"full_attention": ROPE | {"rope_type": "default"}, "sliding_attention": {
            "rope_type": "default", "rope_theta": 500.0}},
    ),
    "olmoe": _model("Olmoe", **_EXPERTS),
    "flex olmo": _model("FlexOlmo", norm_topk_prob=True, **_EXPERTS),
    "hunyuan moe": _model("HunYuanMoEV1", num_experts=6, moe_topk=2),
    "phimoe": _model("Phimoe", attention_bias=True, lm_head_bias=True, router_jitter_noise=0.3, **_LOCAL),
    "granite moe": _model("GraniteMoe", logits_scaling=2.0, **MULTIPLIERS, **_LOCAL),
    "granite moe shared": _model("GraniteMoeShared", shared_intermediate_size=40, **MULTIPLIERS, **_LOCAL),
    "granite moe swa": _model(
        "GraniteMoeSWA", shared_intermediate_size=40, sliding_window=20, num_hidden_layers=3,
        layer_types=[*MIXED, "full_attention"], layer_rope_theta=[500.0, 10000.0, 0.0], **MULTIPLIERS, **_LOCAL,
    ),
    "gpt-oss": _model("GptOss", rope_parameters=YARN | {"truncate": False}, swiglu_limit=0.5, **_LOCAL, **NARROW),
    "aria": _model("AriaText", moe_num_experts=6, moe_topk=2),
    "cohere 2 moe": _model(
        "Cohere2Moe", logit_scale=2.0, num_shared_experts=2, **_EXPERTS, **NARROW
    ),
    "cohere 2 moe, sigmoid, rms, dense prefix": _model(
        "Cohere2Moe", expert_selection_fn="sigmoid", rms_norm_eps=1e-5, num_shared_experts=1,
        prefix_dense_intermediate_size=40, shared_expert_combination_strategy="sum", **_EXPERTS, **_SPARSE_LAST,
        sliding_window=20, layer_types=["full_attention", "sliding_attention"],
    ),
    "ernie 4.5 moe": _model(
        "Ernie4_5_Moe", moe_num_experts=6, moe_k=2, moe_num_shared_experts=2, use_bias=True, **_MOE
    ),
    "llama 4": SmallModel(
        "Llama4ForCausalLM",
        SIZES | {
            "hidden_size": 64, "intermediate_size_mlp": 40, "no_rope_layers": [1, 0], "moe_layers": [1],
            "attn_scale": 0.5, "floor_scale": 16, "num_local_experts": 6, "num_experts_per_tok": 2,
        },
    ),
    "dots 1": _model(
        "Dots1", n_shared_experts=2, sliding_window=20, max_window_layers=1, first_k_dense_replace=1,
        **_GROUPS, **_ROUTED,
    ),
    "glm 4 moe": _model("Glm4Moe", use_qk_norm=True, attention_bias=True, **_GROUPS, **_ROUTED),
    "solar open": _model("SolarOpen", **_GROUPS, **_ROUTED),
    "exaone moe": _model("ExaoneMoe", **_MOE, **_EXPERTS, **NARROW, **_SPARSE_LAST),
    "minimax m2": _model("MiniMaxM2", rotary_dim=8, **_LOCAL),
    "hy v3": _model("HYV3", **_MOE, **_EXPERTS, **_SPARSE_LAST),
    "flint": _model("Flint", shared_expert_intermediate_size=40, mlp_only_layers=[0], **_MOE, **_EXPERTS, **NARROW),
    "kolibri 1": _model("Kolibri1", shared_expert_intermediate_size=40, **_MOE, **_LOCAL, **NARROW),
    "afmoe": _model(
        "Afmoe", mup_enabled=True, num_shared_experts=2, route_scale=1.5, num_dense_layers=1, sliding_window=20,
        layer_types=["sliding_attention", "full_attention"], **_MOE, **_EXPERTS,
    ),
    "mimo v2 flash": _model("MiMoV2Flash", v_head_dim=12, **_ROUTED, **NARROW, rope_parameters={
        "full_attention": _PARTIAL, "sliding_attention": _PARTIAL | {"rope_theta": 500.0}}),
    "laguna": _model(
        "Laguna", shared_expert_intermediate_size=40, num_attention_heads_per_layer=[4, 6], attention_bias=True,
        moe_routed_scaling_factor=1.5, moe_router_logit_softcapping=0.7, **_MOE, **_EXPERTS, **NARROW,
    ),
    "laguna, gates by element": _model(
        "Laguna", shared_expert_intermediate_size=40, gating="per-element", **_MOE, **_EXPERTS
    ),
    "beam": _model(
        "Beam", num_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2, final_logit_softcapping=3.0, **_MOE,
        **NARROW, **_SPARSE_LAST,
    ),
    "dbrx": SmallModel(
        "DbrxForCausalLM",
        {
            "vocab_size": SIZES["vocab_size"], "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 256,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 10000.0},
            "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 24, "moe_num_experts": 6, "moe_top_k": 2},
        },
    ),
}  # fmt: skip
_GEMMA_4: dict[str, Any] = {
    "num_hidden_layers": 4, "layer_types": [MIXED[1], MIXED[0], *MIXED], "sliding_window": 20, "head_dim": 8,
    "global_head_dim": 16, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": SIZES["vocab_size"],
}  # fmt: skip
_GEMMA_3N: dict[str, Any] = {
    "num_hidden_layers": 4, "layer_types": [*MIXED, *MIXED], "sliding_window": 20, "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": SIZES["vocab_size"], "laurel_rank": 12,
    "activation_sparsity_pattern": [0.9, 0.0, 0.6, 0.0],
}  # fmt: skip
GEMMA_4_MODELS = {
    "gemma 4": _model("Gemma4", final_logit_softcapping=3.0, **_GEMMA_4),
    "gemma 4, shared keys": _model("Gemma4", num_kv_shared_layers=2, use_double_wide_mlp=True, **_GEMMA_4),
    "gemma 4, experts": _model(
        "Gemma4", attention_k_eq_v=True, num_global_key_value_heads=1, enable_moe_block=True, top_k_experts=2,
        num_experts=6, **_MOE, **_GEMMA_4 | {"hidden_size_per_layer_input": 0},
    ),
    "gemma 4 unified": _model(
        "Gemma4Unified", attention_k_eq_v=True, num_global_key_value_heads=1, final_logit_softcapping=3.0,
        **{name: value for name, value in _GEMMA_4.items() if "per_layer_input" not in name},
    ),
    "gemma 3n": _model("Gemma3n", **_GEMMA_3N),
    "gemma 3n, three streams, not scaled": _model(
        "Gemma3n", altup_num_inputs=3, altup_correct_scale=False, final_logit_softcapping=3.0,
        **_GEMMA_3N | {"num_kv_shared_layers": 0},
    ),
}  # fmt: skip
# The last two layers read the keys of the two before them: stages can begin with the ones before those.
_SIX_LAYERS: dict[str, Any] = {"num_hidden_layers": 6, "layer_types": [*MIXED] * 3, "num_kv_shared_layers": 2}
SIX_LAYERS = {
    "gemma 4, six layers": _model("Gemma4", use_double_wide_mlp=True, **_GEMMA_4 | _SIX_LAYERS),
    "gemma 3n, six layers": _model(
        "Gemma3n", **_GEMMA_3N | _SIX_LAYERS | {"activation_sparsity_pattern": [0.9, 0.0, 0.6, 0.0, 0.9, 0.0]}
    ),
}  # fmt: skip
ALL_MODELS = MODELS | EXPERT_MODELS | GEMMA_4_MODELS
