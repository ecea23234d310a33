"""The GGUF architectures: for each the class of `transformers` that its files are of, what its metadata says in
config.json's words, and how its tensors are called and laid out. `gguf_config` and `gguf_tensors` read files by it,
`gguf_settings` and `gguf_layout` have what its entries share.

An architecture has a line here once a test has compared its logits with those of `transformers`; the others are refused
by name.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from octavo.loading.gguf_layout import PERMUTED, RANK, Architecture, Names, per_group, per_head, shared
from octavo.loading.gguf_metadata import Metadata
from octavo.loading.gguf_settings import (
    LATENT,
    MAMBA_1,
    MAMBA_2,
    QKVO,
    WINDOW,
    biases,
    by_layer_type,
    each,
    gemma_scalar,
    growing_rope,
    has,
    keys_are_values,
    layers_by,
    number,
    of_layers,
    periods,
    real,
    rows_of,
    share_cut_off,
    window,
    xielu,
)

# Names, each as those of `gguf_layout` or otherwise.
_AROUND = {"ffn_norm": "pre_feedforward_layernorm"}
_UNGATED = {"ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h"}
_GPT2 = {
    "attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj",
}  # fmt: skip
_GPT2_TOP = {
    "token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f",
}  # fmt: skip
# Gate and up are one matrix in checkpoints. Files of models without experts have the shared one's as others their own.
_GRANITE = {"ffn_gate_inp": "block_sparse_moe.router.layer"} | {
    f"ffn_{part}{end}": f"shared_mlp.{name}"
    for part, name in (("gate", "input_linear.0"), ("up", "input_linear.1"), ("down", "output_linear"))
    for end in ("", "_shexp")
}
_JAMBA = {
    "ffn_norm": "pre_ff_layernorm", "ffn_gate": "feed_forward.gate_proj", "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
}  # fmt: skip
_FINAL_NORM = {"output_norm": "model.final_layernorm"}
_BACKBONE_TOP = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f"}
_LFM_TOP = {"token_embd_norm": "model.embedding_norm"}
_LFM = {
    "attn_norm": "operator_norm", "attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm",
    "attn_output": "self_attn.out_proj", "ffn_norm": "ffn_norm", "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2", "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj", "shortconv.out_proj": "conv.out_proj",
}  # fmt: skip
_DELTA = {
    "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z", "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba", "ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d", "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj",
    **shared("mlp.shared_expert"),
}  # fmt: skip
_TOKEN_INPUTS_TOP = {
    "per_layer_token_embd": "model.embed_tokens_per_layer", "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}  # fmt: skip
_TOKEN_INPUTS = {
    "inp_gate": "per_layer_input_gate", "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm"
}  # fmt: skip
_HUNYUAN_NORMS = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
# An encoder's positions begin at 0 in files: those of RoBERTa's that stand for padding are left out.
_ENCODER_TOP = {
    "token_embd": "embeddings.word_embeddings", "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings", "token_embd_norm": "embeddings.LayerNorm",
}  # fmt: skip


def _state_space(name: str) -> dict[str, str]:
    """Modules of Mamba 1 and 2, which checkpoints have under this one."""
    modules = {
        "in": "in_proj", "conv1d": "conv1d", "x": "x_proj", "dt": "dt_proj", "dt_norm": "dt_layernorm",
        "b_norm": "b_layernorm", "c_norm": "c_layernorm", "norm": "norm", "out": "out_proj",
    }  # fmt: skip
    return {f"ssm_{own}": f"{name}.{module}" for own, module in modules.items()}


def _state_tensors(name: str, has_time_matrix: bool = False) -> dict[str, str]:
    """Tensors of theirs whose names end in another way."""
    found = {"ssm_a": f"{name}.A_log", "ssm_d": f"{name}.D"}
    return found if has_time_matrix else found | {"ssm_dt.bias": f"{name}.dt_bias"}


def _is_bamba(m: Metadata) -> bool:
    """Of the two hybrids in files of Granite's kind, the one whose layers rotate."""
    return bool(m.get("rope.scaling.finetuned", True))


def _has_two_norms(m: Metadata) -> bool:
    return "blk.0.attn_norm_2.weight" in m.tensors


def _falcon_names(m: Metadata) -> Names:
    """Those of 40B and more have a second norm, for attention."""
    return _UNGATED | {
        "attn_qkv": "self_attention.query_key_value", "attn_output": "self_attention.dense",
        "attn_norm": "ln_mlp" if _has_two_norms(m) else "input_layernorm", "attn_norm_2": "ln_attn",
    }  # fmt: skip


# Settings. Values that are no functions of the metadata stand for themselves.
_SILU = {"hidden_act": "silu"}
_QKV_BIAS = {"attention_bias": biases("attn_q", "attn_k", "attn_v")}
_LLAMA_BIASES = {"attention_bias": biases(*QKVO), "mlp_bias": biases("ffn_gate", "ffn_up", "ffn_down")}
_SOFTCAPS = {name: real(name) for name in ("attn_logit_softcapping", "final_logit_softcapping")}
_MULTIPLIERS = {
    "attention_multiplier": real("attention.scale"), "embedding_multiplier": real("embedding_scale"),
    "residual_multiplier": real("residual_scale"), "logits_scaling": real("logit_scale"),
}  # fmt: skip
_LFM_SETTINGS: dict[str, Any] = {
    "layer_types": layers_by({"attn_q.weight": "full_attention"}, "conv"), "conv_L_cache": number("shortconv.l_cache"),
    "conv_bias": biases("shortconv.conv", "shortconv.in_proj", "shortconv.out_proj"),
}  # fmt: skip
_DELTA_SETTINGS: dict[str, Any] = {
    "linear_conv_kernel_dim": number("ssm.conv_kernel"), "linear_key_head_dim": number("ssm.state_size"),
    "linear_num_key_heads": number("ssm.group_count"), "linear_num_value_heads": number("ssm.time_step_rank"),
    "linear_value_head_dim": lambda m: m.number("ssm.inner_size") // m.number("ssm.time_step_rank"),
    "layer_types": layers_by({"attn_q.weight": "full_attention"}, "linear_attention"),
}  # fmt: skip
_BY_TURNS = {"linear_value_heads_alternate": True}  # heads of values go by turns to those of keys
_ENCODER = {"type_vocab_size": rows_of("token_types.weight")}

# Architectures of which files have several names, or nearly.
_QWEN_2 = Architecture(class_name="Qwen2ForCausalLM", settings=_SILU)
_QWEN_3 = Architecture(class_name="Qwen3ForCausalLM", settings=_SILU)
_QWEN_3_MOE = Architecture(class_name="Qwen3MoeForCausalLM", experts=True)
_GEMMA_3 = Architecture(
    class_name="Gemma3ForCausalLM", names=_AROUND, norm_offset=1.0,
    settings=_SOFTCAPS | window(6) | {"query_pre_attn_scalar": gemma_scalar(62), "rope_parameters": by_layer_type},
)  # fmt: skip
_NEMOTRON_H = Architecture(
    class_name="NemotronHForCausalLM", top_names=_BACKBONE_TOP, layer_prefix="backbone.layers.", experts=False,
    names=_state_space("mixer") | shared("mixer.shared_experts") | {
        "attn_norm": "norm", "attn_q": "mixer.q_proj", "attn_k": "mixer.k_proj", "attn_v": "mixer.v_proj",
        "attn_output": "mixer.o_proj", "ffn_up": "mixer.up_proj", "ffn_down": "mixer.down_proj",
        "ffn_gate_inp": "mixer.gate",
    },
    tensor_names=_state_tensors("mixer") | {"exp_probs_b.bias": "mixer.gate.e_score_correction_bias"},
    settings=MAMBA_2 | {
        "moe_shared_expert_intermediate_size": number("expert_shared_feed_forward_length"),
        "mlp_bias": biases("ffn_up", "ffn_down"),
        "layer_types": layers_by(
            {"attn_q.weight": "full_attention", "ssm_in.weight": "linear_attention", "ffn_gate_inp.weight": "moe"},
            "mlp",
        ),
    },
)  # fmt: skip
_QWEN_3_5 = Architecture(
    class_name="Qwen3_5ForCausalLM", norm_offset=1.0, names=_DELTA, tensor_names=_state_tensors("linear_attn"),
    settings=_DELTA_SETTINGS | _BY_TURNS,
)  # fmt: skip

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        class_name="LlamaForCausalLM", variants={"MixtralForCausalLM": lambda m: m.number("expert_count", 0) > 0},
        settings=_SILU | _LLAMA_BIASES, rows=PERMUTED, experts=True,
    ),
    "qwen2moe": Architecture(class_name="Qwen2MoeForCausalLM", names=shared("mlp.shared_expert"), experts=False),
    "qwen3moe": _QWEN_3_MOE,
    "olmoe": Architecture(class_name="OlmoeForCausalLM", experts=False),
    "qwen2": _QWEN_2,
    "qwen3": _QWEN_3,
    # The language models of those that see: for text alone their three positions are one, and pictures' deeper
    # features, which a file of its own has the weights for, are none.
    "qwen2vl": _QWEN_2,
    "qwen3vl": _QWEN_3,
    "qwen3vlmoe": _QWEN_3_MOE,
    "mistral3": Architecture(
        class_name="MistralForCausalLM", settings={"rope_parameters": growing_rope}, rows=PERMUTED,
        variants={"Ministral3ForCausalLM": lambda m: m.get("attention.temperature_scale") is not None},
    ),
    "arcee": Architecture(class_name="ArceeForCausalLM", rows=PERMUTED),
    "apertus": Architecture(
        class_name="ApertusForCausalLM", settings=_LLAMA_BIASES | {"hidden_act": "xielu", "xielu": xielu},
        names={"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
    ),
    "seed_oss": Architecture(class_name="SeedOssForCausalLM", settings=_QKV_BIAS),
    "smollm3": Architecture(class_name="SmolLM3ForCausalLM", rows=PERMUTED),
    "ernie4_5": Architecture(class_name="Ernie4_5ForCausalLM", settings={"use_bias": biases(*QKVO)}),
    "granite": Architecture(class_name="GraniteForCausalLM", rows=PERMUTED, settings=_LLAMA_BIASES | _MULTIPLIERS),
    "granitemoe": Architecture(
        class_name="GraniteMoeForCausalLM", names=_GRANITE, rows=PERMUTED, experts=True,
        variants={"GraniteMoeSharedForCausalLM": lambda m: m.number("expert_shared_feed_forward_length", 0) > 0},
        settings=_MULTIPLIERS | {
            "shared_intermediate_size": number("expert_shared_feed_forward_length", 0),
            "attention_bias": biases(*QKVO),
        },
    ),
    "granitehybrid": Architecture(
        class_name="GraniteMoeHybridForCausalLM", variants={"BambaForCausalLM": _is_bamba}, rows=PERMUTED, experts=True,
        names=lambda m: _state_space("mamba") | (_JAMBA if _is_bamba(m) else _GRANITE),
        top_names=lambda m: _FINAL_NORM if _is_bamba(m) else {}, tensor_names=_state_tensors("mamba"),
        settings=_MULTIPLIERS | MAMBA_2 | {
            "num_experts": number("expert_count", 0), "position_embedding_type": "nope",
            "shared_intermediate_size": lambda m: m.number(
                "expert_shared_feed_forward_length", m.number("feed_forward_length")
            ),
            "layer_types": layers_by({"attn_q.weight": "full_attention"}, "linear_attention"),
            "attn_layer_indices": lambda m: [i for i in range(m.number("block_count")) if m.has("attn_q.weight", i)],
        },
    ),
    "mamba": Architecture(
        class_name="MambaForCausalLM", variants={"FalconMambaForCausalLM": lambda m: bool(m.get("ssm.dt_b_c_rms"))},
        names=_state_space("mixer") | {"attn_norm": "norm"}, tensor_names=_state_tensors("mixer", has_time_matrix=True),
        top_names=_BACKBONE_TOP, layer_prefix="backbone.layers.", is_without_heads=True,
        settings=MAMBA_1,
    ),
    "mamba2": Architecture(
        class_name="Mamba2ForCausalLM", names=_state_space("mixer") | {"attn_norm": "norm"},
        tensor_names=_state_tensors("mixer"), top_names=_BACKBONE_TOP, layer_prefix="backbone.layers.",
        is_without_heads=True,
        settings=MAMBA_2 | {"num_heads": MAMBA_2["mamba_n_heads"], "head_dim": MAMBA_2["mamba_d_head"]},
    ),
    "jamba": Architecture(
        class_name="JambaForCausalLM", tensor_names=_state_tensors("mamba", has_time_matrix=True), experts=False,
        names=_JAMBA | _state_space("mamba") | {"ffn_gate_inp": "feed_forward.router"}, top_names=_FINAL_NORM,
        settings=MAMBA_1 | periods("attn_q.weight", "attn") | periods("ffn_gate_inp.weight", "expert") | {
            "num_experts": number("expert_count", 0),
        },
    ),
    # The multipliers are in the weights, and what llama.cpp normalizes is what the gate has multiplied.
    "falcon-h1": Architecture(
        class_name="FalconH1ForCausalLM", names=_JAMBA | _state_space("mamba"), top_names=_FINAL_NORM,
        tensor_names=_state_tensors("mamba") | {"ffn_norm": "pre_ff_layernorm.weight"},
        settings=MAMBA_2 | {
            "mamba_d_ssm": number("ssm.inner_size"), "mamba_norm_before_gate": False,
            "mamba_rms_norm": has("ssm_norm.weight"), "projectors_bias": biases("ssm_out"),
            "mlp_bias": _LLAMA_BIASES["mlp_bias"],
        },
    ),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "lfm2": Architecture(
        class_name="Lfm2ForCausalLM", names=_LFM, top_names=_LFM_TOP,
        settings=_LFM_SETTINGS | {"block_auto_adjust_ff_dim": False},  # it is what the file says
    ),
    "lfm2moe": Architecture(
        class_name="Lfm2MoeForCausalLM", names=_LFM | {"ffn_gate_inp": "feed_forward.gate"}, top_names=_LFM_TOP,
        tensor_names={"exp_probs_b.bias": "feed_forward.expert_bias"}, experts=True,
        settings=_LFM_SETTINGS | {"use_expert_bias": has("exp_probs_b.bias")},
    ),
    "qwen3next": Architecture(
        class_name="Qwen3NextForCausalLM", norm_offset=1.0, names=_DELTA, tensor_names=_state_tensors("linear_attn"),
        settings=_DELTA_SETTINGS, experts=True,
    ),
    "qwen35": _QWEN_3_5,
    "qwen35moe": replace(_QWEN_3_5, class_name="Qwen3_5MoeForCausalLM", experts=True),
    "dots1": Architecture(class_name="Dots1ForCausalLM", settings={"sliding_window": 0}, experts=False),
    "glm4moe": Architecture(
        class_name="Glm4MoeForCausalLM", settings=_QKV_BIAS | {"use_qk_norm": has("attn_q_norm.weight")}, experts=False
    ),
    "ernie4_5-moe": Architecture(
        class_name="Ernie4_5_MoeForCausalLM", experts=True,
        tensor_names={"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
        settings={
            "use_bias": biases(*QKVO), "moe_layer_start_index": number("leading_dense_block_count", 0),
            "moe_layer_interval": number("interleave_moe_layer_step", 1),
        },
    ),
    "hunyuan-dense": Architecture(class_name="HunYuanDenseV1ForCausalLM", names=_HUNYUAN_NORMS),
    "hunyuan-moe": Architecture(
        class_name="HunYuanMoEV1ForCausalLM", experts=True,
        names=_HUNYUAN_NORMS | shared("mlp.shared_mlp") | {"ffn_gate_inp": "mlp.gate.wg"},
        settings={"intermediate_size": lambda m: m.number("expert_shared_feed_forward_length")},
    ),
    "minimax-m2": Architecture(
        class_name="MiniMaxM2ForCausalLM", tensor_names={"exp_probs_b.bias": "mlp.e_score_correction_bias"},
        experts=True,
    ),
    "phimoe": Architecture(
        class_name="PhimoeForCausalLM", names={"ffn_gate_inp": "block_sparse_moe.gate"}, experts=False,
        settings=WINDOW | {"attention_bias": biases(*QKVO), "lm_head_bias": lambda m: "output.bias" in m.tensors},
    ),
    "dbrx": Architecture(
        class_name="DbrxForCausalLM", layer_prefix="transformer.blocks.", experts=True,
        top_names=_GPT2_TOP | {"output_norm": "transformer.norm_f"},
        names={
            "attn_norm": "norm_attn_norm.norm_1", "attn_output_norm": "norm_attn_norm.norm_2",
            "attn_qkv": "norm_attn_norm.attn.Wqkv", "attn_output": "norm_attn_norm.attn.out_proj",
            "ffn_gate_inp": "ffn.router.layer",
        },
        settings={
            "attn_config": lambda m: {
                "kv_n_heads": m.number("attention.head_count_kv"), "clip_qkv": m.real("attention.clamp_kqv", None),
                "rope_theta": m.real("rope.freq_base", 10000.0),
            },
            "ffn_config": lambda m: {
                "ffn_hidden_size": m.number("feed_forward_length"), "moe_num_experts": m.number("expert_count"),
                "moe_top_k": m.number("expert_used_count"), "moe_normalize_expert_weights": 1.0,
            },
        },
    ),
    "afmoe": Architecture(
        class_name="AfmoeForCausalLM", tensor_names={"exp_probs_b.bias": "mlp.expert_bias"}, experts=True,
        names={
            "attn_gate": "self_attn.gate_proj", "ffn_norm": "pre_mlp_layernorm", "post_ffw_norm": "post_mlp_layernorm",
            "ffn_gate_inp": "mlp.router.gate",
        },
        settings=window(4) | {"mup_enabled": True},
    ),
    "exaone-moe": Architecture(class_name="ExaoneMoeForCausalLM", settings=window(4), experts=False),
    "jais2": Architecture(
        class_name="Jais2ForCausalLM", rows=PERMUTED,
        settings={"attention_bias": biases(*QKVO), "mlp_bias": biases("ffn_up", "ffn_down")},
    ),
    "gemma": Architecture(class_name="GemmaForCausalLM", norm_offset=1.0),
    "gemma2": Architecture(
        class_name="Gemma2ForCausalLM", names=_AROUND, norm_offset=1.0,
        settings=_SOFTCAPS | window(2) | {"query_pre_attn_scalar": gemma_scalar(46)},
    ),
    "gemma3": _GEMMA_3,
    "gemma-embedding": replace(
        _GEMMA_3, class_name="Gemma3TextModel",
        settings={**_GEMMA_3.settings, "use_bidirectional_attention": lambda m: not m.get("attention.causal", False)},
    ),
    "gemma3n": Architecture(
        class_name="Gemma3nForCausalLM",
        names=_AROUND | _TOKEN_INPUTS | {
            "altup_correct_coef": "altup.correction_coefs", "altup_predict_coef": "altup.prediction_coefs",
            "altup_router": "altup.modality_router", "altup_router_norm": "altup.router_norm",
            "laurel_l": "laurel.linear_left", "laurel_r": "laurel.linear_right",
            "laurel_post_norm": "laurel.post_laurel_norm",
        },
        top_names=_TOKEN_INPUTS_TOP | {
            "altup_proj": ("model.altup_projections.{}",), "altup_unembd_proj": ("model.altup_unembed_projections.{}",),
        },
        tensor_names={"altup_correct_scale.weight": "altup.correct_output_scale"},
        settings=_SOFTCAPS | window(5) | {
            "num_kv_shared_layers": lambda m: m.number("attention.shared_kv_layers"),
            "intermediate_size": lambda m: each(m, "feed_forward_length"),
            "hidden_size_per_layer_input": number("embedding_length_per_layer_input"),
            "vocab_size_per_layer_input": rows_of("per_layer_token_embd.weight"),
            "laurel_rank": rows_of("blk.0.laurel_l.weight"), "altup_num_inputs": number("altup.num_inputs"),
            "altup_active_idx": number("altup.active_idx"), "activation_sparsity_pattern": share_cut_off,
            "rope_parameters": by_layer_type,
        },
    ),
    "gemma4": Architecture(
        class_name="Gemma4ForCausalLM", top_names=_TOKEN_INPUTS_TOP, experts=True,
        names=_AROUND | _TOKEN_INPUTS | {
            "ffn_gate_inp": "router.proj", "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_1": "post_feedforward_layernorm_1", "post_ffw_norm_2": "post_feedforward_layernorm_2",
        },
        tensor_names={
            "layer_output_scale.weight": "layer_scalar", "ffn_gate_inp.scale": "router.scale",
            "ffn_down_exps.scale": "router.per_expert_scale", "ffn_gate_up_exps.weight": "experts.gate_up_proj",
            "ffn_down_exps.weight": "experts.down_proj",
        },
        settings=_SOFTCAPS | window(6) | {
            "head_dim": lambda m: m.number("attention.key_length_swa"),
            "global_head_dim": number("attention.key_length"),
            "num_key_value_heads": of_layers("attention.head_count_kv", slides=True),
            "num_global_key_value_heads": lambda m: (
                of_layers("attention.head_count_kv", slides=False)(m) if keys_are_values(m) else None
            ),
            "attention_k_eq_v": keys_are_values, "num_kv_shared_layers": number("attention.shared_kv_layers", 0),
            "intermediate_size": lambda m: min(each(m, "feed_forward_length")),
            "use_double_wide_mlp": lambda m: len(set(each(m, "feed_forward_length"))) > 1,
            "hidden_size_per_layer_input": number("embedding_length_per_layer_input", 0),
            "vocab_size_per_layer_input": rows_of("per_layer_token_embd.weight"),
            "enable_moe_block": lambda m: m.number("expert_count", 0) > 0,
            "rope_parameters": lambda m: {
                "full_attention": {
                    "rope_type": "proportional", "rope_theta": m.real("rope.freq_base"),
                    "partial_rotary_factor": m.rotary_share(),
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": m.real("rope.freq_base_swa", 10000.0)},
            },
        },
    ),
    "olmo": Architecture(
        class_name="OlmoForCausalLM", settings={"clip_qkv": real("attention.clamp_kqv")}, rows=PERMUTED
    ),
    "olmo2": Architecture(
        class_name="Olmo2ForCausalLM",
        variants={"Olmo3ForCausalLM": lambda m: m.number("attention.sliding_window", 0) > 0},
        settings=window(4) | {
            "rope_parameters": lambda m: by_layer_type(m, m.real("rope.freq_base", 10000.0))
            if m.number("attention.sliding_window", 0) else m.rope(),
        },
    ),
    "exaone4": Architecture(
        class_name="Exaone4ForCausalLM", settings=window(4) | {"sliding_window": number("attention.sliding_window", 0)}
    ),
    "glm4": Architecture(
        class_name="Glm4ForCausalLM", settings=_QKV_BIAS,
        names={
            "post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
    ),
    "phi3": Architecture(
        class_name="Phi3ForCausalLM", names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        settings=WINDOW | {"original_max_position_embeddings": number("rope.scaling.original_context_length")},
    ),
    "command-r": Architecture(
        class_name="CohereForCausalLM",
        settings={
            "logit_scale": real("logit_scale"), "use_qk_norm": lambda m: "blk.0.attn_q_norm.weight" in m.tensors
        },
    ),
    "cohere2": Architecture(
        class_name="Cohere2ForCausalLM", settings=window(4) | {"logit_scale": real("logit_scale")}
    ),
    "nemotron": Architecture(class_name="NemotronForCausalLM", settings=_LLAMA_BIASES, norm_offset=1.0),
    "starcoder2": Architecture(
        class_name="Starcoder2ForCausalLM", names={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        settings={"use_bias": biases(*QKVO, "ffn_up", "ffn_down")},
    ),
    "stablelm": Architecture(
        class_name="StableLmForCausalLM",
        names={
            "attn_q_norm": ("self_attn.q_layernorm.norms.{}",), "attn_k_norm": ("self_attn.k_layernorm.norms.{}",)
        },
        settings={
            "use_qkv_bias": _QKV_BIAS["attention_bias"],
            "use_parallel_residual": lambda m: "blk.0.ffn_norm.weight" not in m.tensors,
            "qk_layernorm": lambda m: "blk.0.attn_q_norm.weight" in m.tensors,
        },
    ),
    "phi2": Architecture(
        class_name="PhiForCausalLM", top_names=_FINAL_NORM,
        names={
            "attn_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2",
        },
    ),
    "gptneox": Architecture(
        class_name="GPTNeoXForCausalLM", layer_prefix="gpt_neox.layers.", rows={"attn_qkv": per_head},
        names=_UNGATED | {"attn_qkv": "attention.query_key_value", "attn_output": "attention.dense"},
        top_names={
            "token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "embed_out"
        },
        settings={
            "use_parallel_residual": lambda m: bool(m.get("use_parallel_residual", True)),
            "attention_bias": biases("attn_qkv", "attn_output"),
        },
    ),
    "falcon": Architecture(
        class_name="FalconForCausalLM", names=_falcon_names, layer_prefix="transformer.h.",
        top_names=_GPT2_TOP | {"token_embd": "transformer.word_embeddings"}, rows={"attn_qkv": per_group},
        settings={
            "bias": biases("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
            "multi_query": lambda m: m.number("attention.head_count_kv", 1) == 1,
            "new_decoder_architecture": lambda m: m.number("attention.head_count_kv", 1) > 1,
            "num_ln_in_parallel_attn": lambda m: 2 if _has_two_norms(m) else 1,
        },
    ),
    "bloom": Architecture(
        class_name="BloomForCausalLM", layer_prefix="transformer.h.", rows={"attn_qkv": per_head},
        names=_UNGATED | {"attn_qkv": "self_attention.query_key_value", "attn_output": "self_attention.dense"},
        top_names=_GPT2_TOP | {
            "token_embd": "transformer.word_embeddings", "token_embd_norm": "transformer.word_embeddings_layernorm"
        },
    ),
    "mpt": Architecture(
        class_name="MptForCausalLM", layer_prefix="transformer.blocks.",
        names={
            "attn_norm": "norm_1", "attn_qkv": "attn.Wqkv", "attn_output": "attn.out_proj", "ffn_norm": "norm_2",
            "ffn_up": "ffn.up_proj", "ffn_down": "ffn.down_proj",
        },
        top_names=_GPT2_TOP | {"output_norm": "transformer.norm_f"},
        settings={"attn_config": lambda m: {
            "alibi_bias_max": m.real("attention.max_alibi_bias", 8.0), "clip_qkv": m.real("attention.clamp_kqv", None)
        }},
    ),
    "gpt2": Architecture(
        class_name="GPT2LMHeadModel", names=_GPT2, top_names=_GPT2_TOP, layer_prefix="transformer.h.",
        turned=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
    ),
    "starcoder": Architecture(
        class_name="GPTBigCodeForCausalLM", names=_GPT2, top_names=_GPT2_TOP, layer_prefix="transformer.h.",
        settings={"multi_query": lambda m: m.number("attention.head_count_kv", 1) == 1},
    ),
    "deepseek2": Architecture(
        class_name="DeepseekV2ForCausalLM", experts=False,
        variants={"DeepseekV3ForCausalLM": lambda m: m.number("expert_gating_func", 1) == 2},  # sigmoid
        settings=LATENT | {
            "v_head_dim": lambda m: m.number("attention.value_length_mla", m.number("attention.value_length")),
            "topk_method": lambda m: "group_limited_greedy" if m.number("expert_group_count", 1) > 1 else "greedy",
        },
    ),
    # llama.cpp knows the multipliers of the model, of which there is one size.
    "minicpm3": Architecture(class_name="MiniCPM3ForCausalLM", settings=LATENT),
    "gpt-oss": Architecture(
        class_name="GptOssForCausalLM", names={"ffn_gate_inp": "mlp.router"}, experts=True,
        tensor_names={"attn_sinks.weight": "self_attn.sinks"},
        settings=window(2) | {
            "rope_parameters": lambda m: m.rope() | {"truncate": False},  # the model's; files do not say
            "attention_bias": biases(*QKVO), "intermediate_size": lambda m: m.number("expert_feed_forward_length"),
        },
    ),
    "bert": Architecture(
        class_name="BertModel", layer_prefix="encoder.layer.", settings=_ENCODER,
        # RoBERTa's head, whose first matrix stands where BERT's pooler does.
        variants={"BertForSequenceClassification": lambda m: m.number("pooling_type", 0) == RANK},
        top_names=_ENCODER_TOP | {"cls": "pooler.dense", "cls.output": "classifier"},
        names={
            "attn_q": "attention.self.query", "attn_k": "attention.self.key", "attn_v": "attention.self.value",
            "attn_output": "attention.output.dense", "attn_output_norm": "attention.output.LayerNorm",
            "ffn_up": "intermediate.dense", "ffn_down": "output.dense", "layer_output_norm": "output.LayerNorm",
        },
    ),
    "nomic-bert": Architecture(
        class_name="NomicBertModel", top_names=_ENCODER_TOP | {"token_embd_norm": "emb_ln"},
        layer_prefix="encoder.layers.", settings=_ENCODER,
        names={
            "attn_qkv": "attn.Wqkv", "attn_output": "attn.out_proj", "attn_output_norm": "norm1",
            "ffn_up": "mlp.fc11", "ffn_gate": "mlp.fc12", "ffn_down": "mlp.fc2", "layer_output_norm": "norm2",
        },
    ),
}  # fmt: skip
