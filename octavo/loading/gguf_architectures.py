"""The table of GGUF architectures: for each its class in `transformers`, its settings in config.json's words, and the
names and layouts of its tensors. `gguf_config` and `gguf_tensors` read files by this table. `gguf_settings` and
`gguf_layout` have the parts that entries share. Architectures whose layers keep states are in `gguf_recurrent`.

An architecture has an entry only after a test has compared its logits with `transformers`. Other architectures are
refused by name.
"""

from dataclasses import replace

from octavo.loading.gguf_layout import NEIGHBOURS, PERMUTED, RANK, Architecture, Names, per_group, per_head, shared
from octavo.loading.gguf_recurrent import GRANITE, GRANITE_MULTIPLIERS, RECURRENT
from octavo.loading.gguf_settings import (
    MLA,
    MLP,
    QKVO,
    WINDOW,
    biases,
    by_layer_type,
    each,
    gemma_scalar,
    growing_rope,
    has,
    keys_are_values,
    number,
    of_layers,
    real,
    rows_of,
    share_cut_off,
    window,
    xielu,
)
from octavo.loading.gguf_values import Metadata

# Names of modules that differ from the names in `gguf_layout`.
_AROUND = {"ffn_norm": "pre_feedforward_layernorm"}
_UNGATED = {"ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h"}
_GPT2 = {
    "attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj",
}  # fmt: skip
_GPT2_TOP = {
    "token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f",
}  # fmt: skip
_TOKEN_INPUTS_TOP = {
    "per_layer_token_embd": "model.embed_tokens_per_layer", "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}  # fmt: skip
_TOKEN_INPUTS = {
    "inp_gate": "per_layer_input_gate", "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm"
}  # fmt: skip
_HUNYUAN_NORMS = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
# An encoder's positions begin at 0 in files: files leave out the positions that RoBERTa has for padding.
_ENCODER_TOP = {
    "token_embd": "embeddings.word_embeddings", "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings", "token_embd_norm": "embeddings.LayerNorm",
}  # fmt: skip


def _has_two_norms(m: Metadata) -> bool:
    return "blk.0.attn_norm_2.weight" in m.tensors


def _falcon_names(m: Metadata) -> Names:
    """Return Falcon's names. Models of 40B and more have a second norm, for attention."""
    return _UNGATED | {
        "attn_qkv": "self_attention.query_key_value", "attn_output": "self_attention.dense",
        "attn_norm": "ln_mlp" if _has_two_norms(m) else "input_layernorm", "attn_norm_2": "ln_attn",
    }  # fmt: skip


# Settings: functions of the metadata, or plain values.
_SILU = {"hidden_act": "silu"}
_QKV_BIAS = {"attention_bias": biases("attn_q", "attn_k", "attn_v")}
_LLAMA_BIASES = {"attention_bias": biases(*QKVO), "mlp_bias": biases(*MLP)}
_SOFTCAPS = {name: real(name) for name in ("attn_logit_softcapping", "final_logit_softcapping")}
_ENCODER = {"type_vocab_size": rows_of("token_types.weight")}

# Architectures that several entries of the table share, or nearly share.
_QWEN_2 = Architecture(class_name="Qwen2ForCausalLM", settings=_SILU)
_QWEN_3 = Architecture(class_name="Qwen3ForCausalLM", settings=_SILU)
_QWEN_3_MOE = Architecture(class_name="Qwen3MoeForCausalLM", experts=True)
_GEMMA_3 = Architecture(
    class_name="Gemma3ForCausalLM", names=_AROUND, norm_offset=1.0,
    settings=_SOFTCAPS | window(6) | {"query_pre_attn_scalar": gemma_scalar(62), "rope_parameters": by_layer_type},
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
    # Language models of vision-language models. For text alone their three positions are equal. Text has no deep
    # features of images; the weights for these are in another file.
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
    "granite": Architecture(
        class_name="GraniteForCausalLM", rows=PERMUTED, settings=_LLAMA_BIASES | GRANITE_MULTIPLIERS
    ),
    "granitemoe": Architecture(
        class_name="GraniteMoeForCausalLM", names=GRANITE, rows=PERMUTED, experts=True,
        variants={"GraniteMoeSharedForCausalLM": lambda m: m.number("expert_shared_feed_forward_length", 0) > 0},
        settings=GRANITE_MULTIPLIERS | {
            "shared_intermediate_size": number("expert_shared_feed_forward_length", 0),
            "attention_bias": biases(*QKVO),
        },
    ),
    **RECURRENT,
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
        class_name="Glm4ForCausalLM", rows=NEIGHBOURS,
        # For vision-language models (GLM-4.1V): all parts of a text token's position are equal.
        settings=_QKV_BIAS | {"has_rotary_halves": lambda m: m.get("rope.dimension_sections") is not None},
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
        class_name="PhiForCausalLM", top_names={"output_norm": "model.final_layernorm"},
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
        transposed_modules=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
    ),
    "starcoder": Architecture(
        class_name="GPTBigCodeForCausalLM", names=_GPT2, top_names=_GPT2_TOP, layer_prefix="transformer.h.",
        settings={"multi_query": lambda m: m.number("attention.head_count_kv", 1) == 1},
    ),
    "deepseek2": Architecture(
        class_name="DeepseekV2ForCausalLM", experts=False,
        variants={"DeepseekV3ForCausalLM": lambda m: m.number("expert_gating_func", 1) == 2},  # sigmoid
        settings=MLA | {
            "v_head_dim": lambda m: m.number("attention.value_length_mla", m.number("attention.value_length")),
            "topk_method": lambda m: "group_limited_greedy" if m.number("expert_group_count", 1) > 1 else "greedy",
        },
    ),
    # llama.cpp has the model's multipliers as constants, because the model has only one size.
    "minicpm3": Architecture(class_name="MiniCPM3ForCausalLM", settings=MLA),
    "gpt-oss": Architecture(
        class_name="GptOssForCausalLM", names={"ffn_gate_inp": "mlp.router"}, experts=True,
        tensor_names={"attn_sinks.weight": "self_attn.sinks"},
        settings=window(2) | {
            "rope_parameters": lambda m: m.rope() | {"truncate": False},  # the model's setting, which files lack
            "attention_bias": biases(*QKVO), "intermediate_size": lambda m: m.number("expert_feed_forward_length"),
        },
    ),
    "bert": Architecture(
        class_name="BertModel", layer_prefix="encoder.layer.", settings=_ENCODER,
        # A reranker has RoBERTa's head: its first matrix is in the place of BERT's pooler.
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
