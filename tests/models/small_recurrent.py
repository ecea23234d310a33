"""Small models of every architecture with layers that keep a state; see `small_models`."""

from __future__ import annotations

from typing import Any

from tests.models.small_models import SIZES, VOCAB, SmallModel

_MIXED = ["linear_attention", "full_attention"]
_MAMBA_1: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 24, "state_size": 6, "num_hidden_layers": 2}
_MAMBA_2: dict[str, Any] = {
    "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 32
}  # fmt: skip
_DELTA: dict[str, Any] = {
    "linear_key_head_dim": 12, "linear_value_head_dim": 20, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "layer_types": _MIXED,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2}
_MOE: dict[str, Any] = {"moe_intermediate_size": 24}


def _model(name: str, /, **settings: Any) -> SmallModel:
    return SmallModel(f"{name}ForCausalLM", SIZES | settings)


_NEMOTRON: dict[str, Any] = {name: size for name, size in SIZES.items() if name != "num_hidden_layers"} | {
    "ssm_state_size": 8,
    "mamba_num_heads": 6,
    "mamba_head_dim": 10,
    "n_groups": 2,
    "chunk_size": 32,
    "time_step_min": 1e-30,  # which transformers takes for the least time step, and checkpoints do not
}

_LATENT: dict[str, Any] = {
    "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "n_group": 4, "topk_group": 2,
    "num_local_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "hidden_size": 64,
    "num_key_value_heads": 4, "layer_types": _MIXED,
}  # fmt: skip

RECURRENT_MODELS: dict[str, SmallModel] = {
    # Of dense layers transformers writes other names than checkpoints have.
    "kimi linear": _model(
        "KimiLinear", linear_head_dim=8, linear_num_heads=6, mlp_layer_types=["sparse"] * 2, **_LATENT
    ),
    "bailing hybrid": _model("BailingHybrid", first_k_dense_replace=1, **_LATENT),
    "bailing hybrid, decays without a bound": _model("BailingHybrid", kda_safe_gate=False, **_LATENT),
    "lfm 3": _model(
        "Lfm3", num_hidden_layers=3, layer_types=["conv", "sliding_attention", "full_attention"], sliding_window=20
    ),
    "lfm 3, plain": _model(
        "Lfm3", use_sandwich_norm=False, use_attention_gate=False, layer_types=["conv", "full_attention"]
    ),
    "recurrent gemma": SmallModel(
        "RecurrentGemmaForCausalLM",
        {
            "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 1, "attention_window_size": 20,
        },
    ),
    "mamba": SmallModel("MambaForCausalLM", _MAMBA_1 | {"use_bias": True}),
    "falcon mamba": SmallModel("FalconMambaForCausalLM", _MAMBA_1),
    "mamba 2": SmallModel(
        "Mamba2ForCausalLM",
        {
            "vocab_size": VOCAB, "hidden_size": 24, "num_heads": 4, "head_dim": 12, "state_size": 9, "n_groups": 2,
            "num_hidden_layers": 2, "chunk_size": 32, "time_step_limit": (0.3, 0.9), "use_bias": True,
        },
    ),
    "jamba": _model(
        "Jamba", head_dim=12, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=6, num_hidden_layers=3,
        **_EXPERTS,
    ),
    "bamba": _model("Bamba", head_dim=16, attn_layer_indices=[1], **_MAMBA_2),
    "granite hybrid, experts": _model(
        "GraniteMoeHybrid", head_dim=12, layer_types=_MIXED, shared_intermediate_size=40, num_local_experts=6,
        logits_scaling=2.0, embedding_multiplier=3.0, residual_multiplier=0.6, attention_multiplier=0.2, **_MAMBA_2,
    ),
    "granite hybrid, rope": _model(
        "GraniteMoeHybrid", head_dim=12, layer_types=_MIXED, shared_intermediate_size=40, num_local_experts=0,
        position_embedding_type="rope", **_MAMBA_2,
    ),
    "falcon h1": _model(
        "FalconH1", mamba_d_ssm=96, lm_head_multiplier=0.5, embedding_multiplier=3.0, mlp_multipliers=[0.7, 1.4],
        key_multiplier=0.6, attention_out_multiplier=0.8, attention_in_multiplier=1.2, ssm_in_multiplier=0.9,
        ssm_multipliers=[0.5, 1.5, 0.8, 1.2, 0.7], ssm_out_multiplier=1.3, **_MAMBA_2,
    ),
    "falcon h1, norm before the gate": _model("FalconH1", mamba_d_ssm=96, mamba_rms_norm=True, **_MAMBA_2),
    "falcon h1, norm after the gate": _model(
        "FalconH1", mamba_d_ssm=96, mamba_rms_norm=True, mamba_norm_before_gate=False, mamba_proj_bias=True, **_MAMBA_2
    ),
    "falcon h1, biases that are multiplied": _model(
        "FalconH1", mamba_d_ssm=96, mlp_bias=True, mamba_proj_bias=True, mlp_multipliers=[0.7, 1.4],
        ssm_multipliers=[0.5, 1.5, 0.8, 1.2, 0.7], **_MAMBA_2,
    ),
    "minimax": SmallModel(
        "MiniMaxForCausalLM",
        SIZES | {
            "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 4, "num_experts_per_tok": 2, "full_attn_alpha_factor": 1.5,
            "linear_attn_alpha_factor": 2.0, "linear_attn_beta_factor": 0.8, "mlp_alpha_factor": 1.2,
            "mlp_beta_factor": 0.7, "block_size": 16,
        },
    ),
    "minimax, window": SmallModel(
        "MiniMaxForCausalLM",
        SIZES | {"layer_types": _MIXED, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 20},
    ),
    "nemotron h": SmallModel(
        "NemotronHForCausalLM",
        _NEMOTRON | {"layers_block_type": ["mlp", "linear_attention", "mlp", "full_attention"]},
    ),
    "nemotron h, experts": SmallModel(
        "NemotronHForCausalLM",
        _NEMOTRON | {
            "layers_block_type": ["moe", "linear_attention", "moe", "full_attention"], "n_routed_experts": 8,
            "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 40,
            "moe_shared_expert_intermediate_size": 24, "routed_scaling_factor": 1.5,
        },
    ),
    "zamba": _model(
        "Zamba", num_hidden_layers=4, layers_block_type=["linear_attention", "hybrid"] * 2, hidden_size=32,
        num_key_value_heads=4, mamba_d_state=6, mamba_proj_bias=True,
    ),
    "zamba, heads of another size": _model(
        "Zamba", num_hidden_layers=3, layers_block_type=["hybrid", "linear_attention", "hybrid"], hidden_size=32,
        attention_head_dim=24, num_key_value_heads=4, mamba_d_state=6,
    ),
    "zamba 2": _model(
        "Zamba2", num_hidden_layers=5, layers_block_type=["hybrid", "linear_attention", *["hybrid"] * 3],
        num_mem_blocks=2, adapter_rank=6, use_shared_attention_adapter=True, use_mem_rope=True, hidden_size=32,
        n_mamba_heads=4, mamba_ngroups=2, mamba_d_state=8, time_step_min=0.4, chunk_size=32, num_key_value_heads=4,
    ),
    "zamba 2, biases, no adapters of attention": _model(
        "Zamba2", num_hidden_layers=3, layers_block_type=["hybrid", "linear_attention", "hybrid"], adapter_rank=6,
        add_bias_linear=True, use_conv_bias=False, hidden_size=32, n_mamba_heads=4, mamba_d_state=8, chunk_size=32,
        num_key_value_heads=4,
    ),
    "lfm 2": _model("Lfm2", layer_types=["conv", "full_attention"], block_multiple_of=8, conv_bias=True),
    "lfm 2 moe": _model(
        "Lfm2Moe", layer_types=["conv", "full_attention"], num_dense_layers=1, **_MOE, **_EXPERTS
    ),
    "qwen3 next": _model(
        "Qwen3Next", shared_expert_intermediate_size=40, mlp_only_layers=[0], **_MOE, **_EXPERTS, **_DELTA
    ),
    "qwen 3.5": _model("Qwen3_5", **_DELTA),
    "qwen 3.5 moe": _model("Qwen3_5Moe", shared_expert_intermediate_size=40, **_MOE, **_EXPERTS, **_DELTA),
    "olmo hybrid": _model(
        "OlmoHybrid", head_dim=12, **_DELTA | {"linear_value_head_dim": 6}  # transformers cuts convolutions in thirds
    ),
}  # fmt: skip
