"""What makes the small model of `tests.execution` one of other layers: settings for `hf_overrides`, on top of `CUT`."""

from __future__ import annotations

from typing import Any

# Whose heads and inner elements make eight equal parts, each whole blocks of any format.
CUT: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 512}

_COMPRESSED: dict[str, Any] = {
    "q_lora_rank": 48, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 64,
}  # fmt: skip
DEEPSEEK = _COMPRESSED | {
    "architectures": ["DeepseekV3ForCausalLM"], "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 512, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "norm_topk_prob": True,
}  # fmt: skip
MINICPM_3 = _COMPRESSED | {"architectures": ["MiniCPM3ForCausalLM"]}
_MIXED = {"layer_types": ["linear_attention", "full_attention"]}
_DELTA: dict[str, Any] = _MIXED | {
    "linear_key_head_dim": 16, "linear_value_head_dim": 64, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_conv_kernel_dim": 4, "partial_rotary_factor": 0.25,
}  # fmt: skip
QWEN_3_5 = _DELTA | {"architectures": ["Qwen3_5ForCausalLM"]}
QWEN_3_NEXT = _DELTA | {
    "architectures": ["Qwen3NextForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 512, "mlp_only_layers": [], "decoder_sparse_step": 1,
}  # fmt: skip
_MAMBA_2: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_d_conv": 4,
    "mamba_expand": 8,
}  # fmt: skip
BAMBA = _MAMBA_2 | {"architectures": ["BambaForCausalLM"], "attn_layer_indices": [1]}
FALCON_H1 = _MAMBA_2 | {
    "architectures": ["FalconH1ForCausalLM"], "mamba_d_ssm": 512, "mamba_rms_norm": True,
    "mamba_norm_before_gate": False, "ssm_multipliers": [0.5, 1.5, 0.8, 1.2, 0.7],
}  # fmt: skip
MAMBA = {"architectures": ["MambaForCausalLM"], "state_size": 16, "expand": 8, "conv_kernel": 4}
JAMBA = {
    "architectures": ["JambaForCausalLM"], "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8,
    "mamba_expand": 8, "num_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
LFM_2 = {"architectures": ["Lfm2ForCausalLM"], "layer_types": ["conv", "full_attention"], "hidden_size": 512}
RECURRENT_GEMMA = {
    "architectures": ["RecurrentGemmaForCausalLM"], "lru_width": 512, "num_key_value_heads": 1,
    "attention_window_size": 20, "num_hidden_layers": 3,
}  # fmt: skip
MINIMAX = _MIXED | {
    "architectures": ["MiniMaxForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2, "block_size": 16,
}  # fmt: skip
OLMO_2 = {"architectures": ["Olmo2ForCausalLM"], "num_key_value_heads": 2}
COHERE = {"architectures": ["CohereForCausalLM"], "use_qk_norm": True}
BITNET = {"architectures": ["BitNetForCausalLM"], "hidden_act": "relu2"}
ZAMBA = {
    "architectures": ["ZambaForCausalLM"], "layers_block_type": ["linear_attention", "hybrid"],
    "num_key_value_heads": 8, "attention_hidden_size": 128, "attention_head_dim": 16,
    "mamba_d_state": 8, "mamba_expand": 8, "n_mamba_heads": 2,
}  # fmt: skip
ZAMBA_2 = ZAMBA | {
    "architectures": ["Zamba2ForCausalLM"], "n_mamba_heads": 8, "mamba_ngroups": 2, "adapter_rank": 4,
    "use_shared_attention_adapter": True, "use_mem_rope": True, "num_mem_blocks": 1,
}  # fmt: skip
GEMMA_4 = {
    "architectures": ["Gemma4ForCausalLM"], "num_hidden_layers": 4, "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "global_head_dim": 64, "sliding_window": 16,
    "attention_k_eq_v": True, "num_global_key_value_heads": 2, "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 320,
}  # fmt: skip
GEMMA_3N = {
    "architectures": ["Gemma3nForCausalLM"], "num_hidden_layers": 4, "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 16, "laurel_rank": 12,
    "activation_sparsity_pattern": [0.9, 0.0, 0.6, 0.0], "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 320,
}  # fmt: skip
