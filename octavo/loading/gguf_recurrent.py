"""The GGUF architectures whose layers keep recurrent states, alone or beside attention: a part of the table in
`gguf_architectures`.
"""

from dataclasses import replace
from typing import Any

from octavo.loading.gguf_layout import PERMUTED, Architecture, shared
from octavo.loading.gguf_settings import MAMBA_1, MAMBA_2, MLP, biases, has, layers_by, number, periods, real
from octavo.loading.gguf_values import Metadata

# Names of modules that differ from the names in `gguf_layout`.
# Gate and up are one matrix in checkpoints. In files of models without experts, the shared expert's matrices have the
# names of an ordinary feed-forward's.
GRANITE = {"ffn_gate_inp": "block_sparse_moe.router.layer"} | {
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


def _state_space(name: str) -> dict[str, str]:
    """Return the names of Mamba's modules (1 and 2), which checkpoints have below the module `name`."""
    modules = {
        "in": "in_proj", "conv1d": "conv1d", "x": "x_proj", "dt": "dt_proj", "dt_norm": "dt_layernorm",
        "b_norm": "b_layernorm", "c_norm": "c_layernorm", "norm": "norm", "out": "out_proj",
    }  # fmt: skip
    return {f"ssm_{own}": f"{name}.{module}" for own, module in modules.items()}


def _state_tensors(name: str, has_time_matrix: bool = False) -> dict[str, str]:
    """Return the names of Mamba's tensors whose endings differ between file and checkpoint."""
    found = {"ssm_a": f"{name}.A_log", "ssm_d": f"{name}.D"}
    return found if has_time_matrix else found | {"ssm_dt.bias": f"{name}.dt_bias"}


def _is_bamba(m: Metadata) -> bool:
    """Return True for Bamba. Two hybrids have files of Granite's architecture, and Bamba is the one with rotary
    embeddings."""
    return bool(m.get("rope.scaling.finetuned", True))


# Settings: functions of the metadata, or plain values.
GRANITE_MULTIPLIERS = {
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
    "linear_value_head_dim": lambda m: m.number("ssm.inner_size") // m.divisor("ssm.time_step_rank"),
    "layer_types": layers_by({"attn_q.weight": "full_attention"}, "linear_attention"),
}  # fmt: skip
_BY_TURNS = {"linear_value_heads_alternate": True}  # value heads are assigned to key heads by turns

# Architectures that several entries of the table share, or nearly share.
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

RECURRENT: dict[str, Architecture] = {
    "granitehybrid": Architecture(
        class_name="GraniteMoeHybridForCausalLM", variants={"BambaForCausalLM": _is_bamba}, rows=PERMUTED, experts=True,
        names=lambda m: _state_space("mamba") | (_JAMBA if _is_bamba(m) else GRANITE),
        top_names=lambda m: _FINAL_NORM if _is_bamba(m) else {}, tensor_names=_state_tensors("mamba"),
        settings=GRANITE_MULTIPLIERS | MAMBA_2 | {
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
    # The files' weights contain the multipliers, and llama.cpp normalizes after the gate's multiplication.
    "falcon-h1": Architecture(
        class_name="FalconH1ForCausalLM", names=_JAMBA | _state_space("mamba"), top_names=_FINAL_NORM,
        tensor_names=_state_tensors("mamba") | {"ffn_norm": "pre_ff_layernorm.weight"},
        settings=MAMBA_2 | {
            "mamba_d_ssm": number("ssm.inner_size"), "mamba_norm_before_gate": False,
            "mamba_rms_norm": has("ssm_norm.weight"), "projectors_bias": biases("ssm_out"),
            "mlp_bias": biases(*MLP),
        },
    ),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "lfm2": Architecture(
        class_name="Lfm2ForCausalLM", names=_LFM, top_names=_LFM_TOP,
        settings=_LFM_SETTINGS | {"block_auto_adjust_ff_dim": False},  # the file has the final size
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
}  # fmt: skip
