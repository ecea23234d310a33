"""The dense architectures: each entry lists the differences from Llama.

A setting that a configuration class of transformers computes is computed by a function here. Tensors have the names in
checkpoints and the names that `transformers` writes.
"""

from dataclasses import replace
from typing import Any

from octavo.layers.norm import NormDescription
from octavo.layers.positions import PositionsDescription
from octavo.layers.projection_head import ProjectionHeadDescription
from octavo.models.config_reader import Config, Family, Setting, head_size, key, layer_norm, rms
from octavo.models.families.settings import (
    AFTER,
    ALL_SLIDE,
    AROUND,
    LATE_SLIDE,
    LOGIT_SCALE,
    MODERN_BERT,
    ROOT,
    all_but_every,
    granite_rotates,
    modern_bert_head,
    norms_of_sum,
    rotates_as_listed,
    rotates_unless_all_is_seen,
    slides,
    sliding,
)

_STACKED = {"qkv_names": ("self_attn.qkv_proj",)}
_STACKED_UP = {"up_names": ("mlp.gate_up_proj",)}
_PER_HEAD = {"qkv_blocks": key("num_attention_heads")}
_QKV_BIAS = {"qkv_bias": True, "output_bias": False}
_PARALLEL = {"parallel_residual": True, "feed_forward_norm": None}
_GEMMA_RMS = rms(offset=1.0)
_GEMMA_SCORES = {
    "scale": lambda c, _: c["query_pre_attn_scalar"] ** -0.5,
    "softcap": lambda c, _: c["attn_logit_softcapping"] or 0.0,
}


def _ungated(up: str, down: str, **more: Any) -> dict[str, Any]:
    return {"gated": False, "up_names": (up,), "down_name": down} | more


def _when(setting: str, value: Setting) -> Setting:
    return lambda c, i: value(c, i) if c[setting] else None


def _gemma_3_window(config: Config, i: int) -> int:
    """Return the layer's window. With bidirectional attention the setting is the sum of both sides."""
    window = int(config["sliding_window"] or 0) if slides(config, i) else 0
    return window // 2 + 1 if window and config.get("use_bidirectional_attention") else window


_EVERY_4TH_FULL = all_but_every(4, "sliding_window_pattern")


def _is_local(config: Config, i: int) -> bool:
    kinds = [kind for pattern, repeats in config["attention_types"] for kind in list(pattern) * repeats]
    return bool(kinds[i] == "local")


def _mpt(setting: str, default: Any = None) -> Setting:
    return lambda c, _: (c.get("attn_config") or {}).get(setting) or default


def _mpt_scale(config: Config, i: int) -> float:
    return float(_mpt("softmax_scale")(config, i) or head_size(config) ** -0.5)


def _falcon_kv_heads(config: Config, _: int) -> int:
    if config["new_decoder_architecture"]:
        return int(config["num_key_value_heads"] or config["num_attention_heads"])
    return 1 if config["multi_query"] else int(config["num_attention_heads"])


def _falcon_blocks(config: Config, i: int) -> int:
    return 1 if config["multi_query"] and not config["new_decoder_architecture"] else _falcon_kv_heads(config, i)


def _falcon_norms(before_attention: bool) -> Setting:
    def find(config: Config, _: int) -> str | None:
        is_new = config["new_decoder_architecture"]
        if is_new and (config["num_ln_in_parallel_attn"] or 2) == 2:
            return "ln_attn" if before_attention else "ln_mlp"
        if before_attention:
            return "input_layernorm"
        return None if is_new or config["parallel_attn"] else "post_attention_layernorm"

    return find


def _gpt2_scale(config: Config, i: int) -> float:
    scale = head_size(config) ** -0.5 if config["scale_attn_weights"] else 1.0
    return float(scale / (i + 1) if config["scale_attn_by_inverse_layer_idx"] else scale)


def _learned(name: str, offset: int = 0) -> Setting:
    return lambda c, _: PositionsDescription(name, c["max_position_embeddings"] + offset, offset)


def _where(setting: str, yes: Any, no: Any) -> Setting:
    return lambda c, _: yes if c[setting] else no


def _opt_size(config: Config, _: int) -> int | None:
    size = config["word_embed_proj_dim"]
    return None if size in (None, config["hidden_size"]) else int(size)


def _opt_head(config: Config, i: int) -> ProjectionHeadDescription | None:
    size = _opt_size(config, i)
    return None if size is None else ProjectionHeadDescription("model.decoder.project_out", size)


def _opt_norm(config: Config, i: int) -> NormDescription:
    has_weight = config["layer_norm_elementwise_affine"]
    return NormDescription(1e-5, "layer", bias=has_weight, has_weight=has_weight)


def _opt_final_norm(config: Config, i: int) -> NormDescription | None:
    has_norm = config["do_layer_norm_before"] and not config["_remove_final_layer_norm"]
    return _opt_norm(config, i) if has_norm else None


_BART = {"qkv_bias": True, "output_bias": True, "output_name": "self_attn.out_proj"}
_BART_NORMS = {"attention_norm": "self_attn_layer_norm", "feed_forward_norm": "final_layer_norm"}
_GPT2_MODEL = {
    "embedding_name": "transformer.wte", "layer_prefix": "transformer.h.", "norm_name": "transformer.ln_f",
}  # fmt: skip
_GPT2_NORMS = {"attention_norm": "ln_1", "feed_forward_norm": "ln_2"}
_GPT2_ATTENTION = {
    "qkv_names": ("attn.c_attn",), "output_name": "attn.c_proj", "qkv_bias": True, "output_bias": True,
}  # fmt: skip
_NEOX_ATTENTION = {"qkv_names": ("attention.query_key_value",), "output_name": "attention.dense"} | _PER_HEAD

_MISTRAL = Family(layer_type=ALL_SLIDE)
_GLM = Family(
    attention={"output_bias": False}, rope={"interleaved": True}, feed_forward=_STACKED_UP,
)  # fmt: skip
_GEMMA2 = Family(
    norm=_GEMMA_RMS, attention=_GEMMA_SCORES, layer=AROUND,
    model=ROOT, layer_type=all_but_every(2), refuses=("use_bidirectional_attention",),
)  # fmt: skip
_GPTJ = Family(
    norm=layer_norm(),
    attention={"qkv_names": ("attn.q_proj", "attn.k_proj", "attn.v_proj"), "output_name": "attn.out_proj"},
    rope={"interleaved": True, "theta": 10000.0},
    feed_forward=_ungated("mlp.fc_in", "mlp.fc_out", bias=True),
    layer=_PARALLEL | {"attention_norm": "ln_1"}, model=_GPT2_MODEL | {"output_bias": True},
)  # fmt: skip

FAMILIES = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": _MISTRAL,
    "MinistralForCausalLM": _MISTRAL,
    "Ministral3ForCausalLM": _MISTRAL,
    "CwmForCausalLM": Family(layer_type=all_but_every(4, "window_pattern", first=0)),
    "SeedOssForCausalLM": Family(attention={"output_bias": key("attention_out_bias")}),
    "Emu3ForCausalLM": Family(),
    "Qwen2ForCausalLM": Family(attention=_QKV_BIAS, layer_type=LATE_SLIDE, window_switch="use_sliding_window"),
    "Qwen3ForCausalLM": Family(attention={"qk_norm": rms()}, layer_type=LATE_SLIDE, window_switch="use_sliding_window"),
    "Phi3ForCausalLM": Family(attention=_STACKED, feed_forward=_STACKED_UP, layer_type=ALL_SLIDE),
    "SmolLM3ForCausalLM": Family(
        rotates=rotates_as_listed,
        layer_type=sliding(lambda c, i: not rotates_as_listed(c, i)), window_switch="use_sliding_window",
    ),
    "HeliumForCausalLM": Family(attention={"output_bias": False}, rope={"interleaved": True}),
    "Ernie4_5ForCausalLM": Family(
        attention={"qkv_bias": key("use_bias"), "output_bias": key("use_bias")}, rope={"interleaved": True},
        feed_forward={"bias": key("use_bias")},
    ),
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": replace(
        _GLM,
        layer={"attention_post_norm": "post_self_attn_layernorm", "feed_forward_post_norm": "post_mlp_layernorm"},
    ),
    "GraniteForCausalLM": Family(),
    "GraniteSWAForCausalLM": Family(
        attention={"sinks": "self_attn.sinks"}, rotates=granite_rotates,
        layer_type=all_but_every(4, "window_pattern", first=0),
    ),
    "HyperCLOVAXForCausalLM": Family(
        layer={
            "attention_post_norm": _where("use_post_norm", "post_norm1", None),
            "feed_forward_post_norm": _where("use_post_norm", "post_norm2", None),
        },
        model={"logits_divisor": lambda c, _: 1 / c["logits_scaling"]},
    ),
    "ApertusForCausalLM": Family(
        attention={"qk_norm": rms()},
        feed_forward=_ungated("mlp.up_proj", "mlp.down_proj", xielu=lambda c, i: (c.get("xielu") or {i: ()})[i]),
        layer={"attention_norm": "attention_layernorm", "feed_forward_norm": "feedforward_layernorm"},
    ),
    "HunYuanDenseV1ForCausalLM": Family(
        attention={
            "qk_norm": rms(), "norms_after_rotation": True,
            "qk_norm_names": ("self_attn.query_layernorm", "self_attn.key_layernorm"),
        },
    ),
    # NanoChat norms heads after the rotation; without weights the order makes no difference.
    "NanoChatForCausalLM": Family(
        norm=rms(has_weight=False), attention={"qk_norm": rms(has_weight=False)},
        rope={"reversed": True, "attention_factor": 1.0},  # a factor would have no effect: heads are normed
        feed_forward=_ungated("mlp.fc1", "mlp.fc2"), model={"embedding_norm": rms(has_weight=False)},
    ),
    "BitNetForCausalLM": Family(
        attention={"output_norm": rms(), "output_norm_name": "self_attn.attn_sub_norm"},
        feed_forward={"inner_norm": rms(), "inner_norm_name": "mlp.ffn_sub_norm"},
    ),
    "Olmo2ForCausalLM": Family(attention={"qk_norm": rms(), "qk_norm_scope": "all"}, layer=AFTER),
    "Olmo3ForCausalLM": Family(
        attention={"qk_norm": rms(), "qk_norm_scope": "all"}, layer=AFTER, layer_type=_EVERY_4TH_FULL,
    ),
    "Exaone4ForCausalLM": Family(
        attention={"qk_norm": rms()}, layer=AFTER, layer_type=_EVERY_4TH_FULL, rotates=rotates_unless_all_is_seen,
    ),
    "GemmaForCausalLM": Family(norm=_GEMMA_RMS, model=ROOT, refuses=("use_bidirectional_attention",)),
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": Family(
        norm=_GEMMA_RMS,
        attention=_GEMMA_SCORES | {
            "qk_norm": _GEMMA_RMS, "bidirectional": lambda c, _: bool(c.get("use_bidirectional_attention")),
            "window": _gemma_3_window,
        },
        layer=AROUND, model=ROOT, layer_type=all_but_every(6, "sliding_window_pattern"),
    ),
    "VaultGemmaForCausalLM": replace(_GEMMA2, layer={"feed_forward_norm": "pre_feedforward_layernorm"}, refuses=()),
    "ArceeForCausalLM": Family(feed_forward=_ungated("mlp.up_proj", "mlp.down_proj")),
    "NemotronForCausalLM": Family(norm=layer_norm(offset=1.0), feed_forward=_ungated("mlp.up_proj", "mlp.down_proj")),
    "Jais2ForCausalLM": Family(norm=layer_norm(), feed_forward=_ungated("mlp.up_proj", "mlp.down_proj")),
    "Starcoder2ForCausalLM": Family(
        norm=layer_norm(), attention={"qkv_bias": key("use_bias"), "output_bias": key("use_bias")},
        feed_forward=_ungated("mlp.c_fc", "mlp.c_proj", bias=key("use_bias")), layer_type=ALL_SLIDE,
    ),
    "PersimmonForCausalLM": Family(
        norm=layer_norm(),
        attention=_PER_HEAD | {
            "qkv_names": ("self_attn.query_key_value",), "output_name": "self_attn.dense", "qkv_bias": True,
            "output_bias": True, "qk_norm": _when("qk_layernorm", layer_norm()),
            "qk_norm_names": ("self_attn.q_layernorm", "self_attn.k_layernorm"),
        },
        feed_forward=_ungated("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", bias=True),
        model={"norm_name": "model.final_layernorm"},
    ),
    "PhiForCausalLM": Family(
        norm=layer_norm(),
        attention={
            "output_name": "self_attn.dense", "qkv_bias": True, "output_bias": True,
            "qk_norm": _when("qk_layernorm", layer_norm()),
            "qk_norm_names": ("self_attn.q_layernorm", "self_attn.k_layernorm"),
        },
        feed_forward=_ungated("mlp.fc1", "mlp.fc2", bias=True), layer=_PARALLEL,
        model={"norm_name": "model.final_layernorm", "output_bias": True},
    ),
    "GPTNeoXForCausalLM": Family(
        norm=layer_norm(), attention=_NEOX_ATTENTION,
        feed_forward=_ungated("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", bias=True),
        layer={"parallel_residual": key("use_parallel_residual")},
        model={
            "embedding_name": "gpt_neox.embed_in", "layer_prefix": "gpt_neox.layers.",
            "norm_name": "gpt_neox.final_layer_norm", "output_name": "embed_out",
        },
    ),
    "GPTNeoXJapaneseForCausalLM": Family(
        norm=layer_norm(),
        attention=_NEOX_ATTENTION | {
            "output_bias": lambda c, i: "attention.dense_bias" if i == c["num_hidden_layers"] - 1 else False,
        },
        feed_forward=_ungated("mlp.dense_h_to_4h", "mlp.dense_4h_to_h") | {
            "intermediate_size": lambda c, _: int(c["hidden_size"] * c["intermediate_multiple_size"]),
        },
        model={
            "embedding_name": "gpt_neox_japanese.embed_in", "layer_prefix": "gpt_neox_japanese.layers.",
            "norm_name": "gpt_neox_japanese.final_layer_norm", "output_name": "embed_out",
        },
    ),
    "GPTJForCausalLM": _GPTJ,
    "CodeGenForCausalLM": replace(
        _GPTJ, attention={
            "qkv_names": ("attn.qkv_proj",), "output_name": "attn.out_proj", "qkv_blocks": 4, "qkv_order": "qvk",
        },
    ),
    "CohereForCausalLM": Family(
        norm=layer_norm(bias=False),
        attention={"qk_norm": _when("use_qk_norm", layer_norm(bias=False)), "qk_norm_scope": "heads"},
        rope={"interleaved": True}, layer=_PARALLEL, model=LOGIT_SCALE,
    ),
    "Cohere2ForCausalLM": Family(
        norm=layer_norm(bias=False), rope={"interleaved": True}, layer=_PARALLEL,
        model=LOGIT_SCALE, layer_type=_EVERY_4TH_FULL, rotates=slides,
    ),
    "StableLmForCausalLM": Family(
        norm=layer_norm(),
        attention={
            "qkv_bias": key("use_qkv_bias"), "qk_norm": _when("qk_layernorm", layer_norm(bias=False)),
            "qk_norm_scope": "heads",
            "qk_norm_names": ("self_attn.q_layernorm.norms.{head}", "self_attn.k_layernorm.norms.{head}"),
        },
        layer={
            "parallel_residual": key("use_parallel_residual"),
            "feed_forward_norm": _where("use_parallel_residual", None, "post_attention_layernorm"),
        },
    ),
    "FalconForCausalLM": Family(
        norm=layer_norm(),
        attention={
            "num_kv_heads": _falcon_kv_heads, "qkv_names": ("self_attention.query_key_value",),
            "qkv_blocks": _falcon_blocks, "output_name": "self_attention.dense", "qkv_bias": key("bias"),
            "output_bias": key("bias"), "alibi_max": _where("alibi", 8.0, 0.0),
            "alibi_scale": lambda c, _: head_size(c) ** -0.5,
        },
        feed_forward=_ungated("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", bias=key("bias")),
        layer={
            "parallel_residual": lambda c, _: c["new_decoder_architecture"] or c["parallel_attn"],
            "attention_norm": _falcon_norms(True), "feed_forward_norm": _falcon_norms(False),
        },
        model=_GPT2_MODEL | {"embedding_name": "transformer.word_embeddings"}, rotates=_where("alibi", False, True),
    ),
    "BloomForCausalLM": Family(
        norm=layer_norm(), rope=None,
        attention=_PER_HEAD | {
            "qkv_names": ("self_attention.query_key_value",), "output_name": "self_attention.dense", "qkv_bias": True,
            "output_bias": True, "alibi_max": 8.0,
        },
        feed_forward=_ungated("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", bias=True),
        model=_GPT2_MODEL | {
            "embedding_name": "transformer.word_embeddings", "embedding_norm": layer_norm(),
            "embedding_norm_name": "transformer.word_embeddings_layernorm",
        },
        refuses=("apply_residual_connection_post_layernorm",),
    ),
    "MptForCausalLM": Family(
        norm=layer_norm(bias=False), rope=None,
        attention={
            "qkv_names": ("attn.Wqkv",), "output_name": "attn.out_proj", "qkv_clip": _mpt("clip_qkv", 0.0),
            "alibi_max": _mpt("alibi_bias_max", 8.0), "scale": _mpt_scale,
        },
        feed_forward=_ungated("ffn.up_proj", "ffn.down_proj"),
        layer={"attention_norm": "norm_1", "feed_forward_norm": "norm_2"},
        model={
            "embedding_name": "transformer.wte", "layer_prefix": "transformer.blocks.",
            "norm_name": "transformer.norm_f",
        },
        refuses=("logit_scale",),
    ),
    "GPT2LMHeadModel": Family(
        norm=layer_norm(), rope=None, attention=_GPT2_ATTENTION | {"scale": _gpt2_scale, "is_transposed": True},
        feed_forward=_ungated("mlp.c_fc", "mlp.c_proj", bias=True, is_transposed=True), layer=_GPT2_NORMS,
        model=_GPT2_MODEL | {"positions": _learned("transformer.wpe.weight")}, refuses=("add_cross_attention",),
    ),
    "GPTBigCodeForCausalLM": Family(
        norm=layer_norm(), rope=None,
        attention=_GPT2_ATTENTION | {
            "scale": _gpt2_scale, "num_kv_heads": lambda c, _: 1 if c["multi_query"] else c["num_attention_heads"],
            "qkv_blocks": lambda c, _: 1 if c["multi_query"] else c["num_attention_heads"],
        },
        feed_forward=_ungated("mlp.c_fc", "mlp.c_proj", bias=True), layer=_GPT2_NORMS,
        model=_GPT2_MODEL | {"positions": _learned("transformer.wpe.weight")}, refuses=("add_cross_attention",),
    ),
    "OPTForCausalLM": Family(
        norm=_opt_norm, rope=None,
        attention=_BART | {"qkv_bias": key("enable_bias"), "output_bias": key("enable_bias")},
        feed_forward=_ungated("fc1", "fc2", bias=key("enable_bias")),
        layer={
            "post_norm_residual": _where("do_layer_norm_before", False, True),
            "attention_norm": _where("do_layer_norm_before", "self_attn_layer_norm", None),
            "feed_forward_norm": _where("do_layer_norm_before", "final_layer_norm", None),
            "attention_post_norm": _where("do_layer_norm_before", None, "self_attn_layer_norm"),
            "feed_forward_post_norm": _where("do_layer_norm_before", None, "final_layer_norm"),
        },
        model={
            "embedding_name": "model.decoder.embed_tokens", "layer_prefix": "model.decoder.layers.",
            "positions": _learned("model.decoder.embed_positions.weight", 2),
            "norm": _opt_final_norm,
            "norm_name": "model.decoder.final_layer_norm", "projection_head": _opt_head, "embedding_size": _opt_size,
            "embedding_projection_name": "model.decoder.project_in",
        },
    ),
    "GPTNeoForCausalLM": Family(
        norm=layer_norm(), rope=None,
        attention={
            "qkv_names": ("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
            "output_name": "attn.attention.out_proj", "output_bias": True, "scale": 1.0,
        },
        feed_forward=_ungated("mlp.c_fc", "mlp.c_proj", bias=True), layer=_GPT2_NORMS,
        model=_GPT2_MODEL | {"positions": _learned("transformer.wpe.weight")}, layer_type=sliding(_is_local),
    ),
    "BioGptForCausalLM": Family(
        norm=layer_norm(eps=1e-5), rope=None,
        attention=_BART, feed_forward=_ungated("fc1", "fc2", bias=True), layer=_BART_NORMS,
        model={
            "embedding_name": "biogpt.embed_tokens", "layer_prefix": "biogpt.layers.", "norm_name": "biogpt.layer_norm",
            "output_name": "output_projection", "positions": _learned("biogpt.embed_positions.weight", 2),
            "embedding_multiplier": lambda c, _: c["hidden_size"] ** 0.5 if c["scale_embedding"] else 1.0,
        },
    ),
    "XGLMForCausalLM": Family(
        norm=layer_norm(eps=1e-5), rope=None,
        attention=_BART, feed_forward=_ungated("fc1", "fc2", bias=True), layer=_BART_NORMS,
        model={
            "norm_name": "model.layer_norm",
            "positions": lambda c, _: PositionsDescription(offset=2, steps=c["hidden_size"] // 2 - 1),
            "embedding_multiplier": lambda c, _: c["hidden_size"] ** 0.5 if c["scale_embedding"] else 1.0,
        },
        refuses=("add_cross_attention",),
    ),
    "OpenAIGPTLMHeadModel": Family(
        norm=layer_norm(), rope=None, attention=_GPT2_ATTENTION | {"is_transposed": True},
        feed_forward=_ungated("mlp.c_fc", "mlp.c_proj", bias=True, is_transposed=True) | {
            "activation": lambda c, _: {"gelu": "gelu_tanh", "swish": "silu"}.get(c["hidden_act"], c["hidden_act"]),
        },
        layer=norms_of_sum("ln_1", "ln_2"),
        model=_GPT2_MODEL | {
            "embedding_name": "transformer.tokens_embed", "norm": None,
            "positions": _learned("transformer.positions_embed.weight"),
        },
    ),
    "CTRLLMHeadModel": Family(
        norm=layer_norm(eps=1e-6), rope=None,
        attention={
            "qkv_names": ("multi_head_attention.Wq", "multi_head_attention.Wk", "multi_head_attention.Wv"),
            "output_name": "multi_head_attention.dense", "qkv_bias": True, "output_bias": True,
        },
        feed_forward=_ungated("ffn.0", "ffn.2", bias=True),
        layer={"attention_norm": "layernorm1", "feed_forward_norm": "layernorm2"},
        model=ROOT | {
            "embedding_name": "transformer.w", "layer_prefix": "transformer.h.", "norm_name": "transformer.layernorm",
            "norm": layer_norm(), "output_bias": True,
            "positions": lambda c, _: PositionsDescription(steps=c["hidden_size"] // 2),
        },
    ),
    "OlmoForCausalLM": Family(
        norm=layer_norm(eps=1e-5, bias=False, has_weight=False),
        attention={"qkv_clip": lambda c, _: c["clip_qkv"] or 0.0},
    ),
    "ModernBertDecoderForCausalLM": replace(
        MODERN_BERT,
        attention={
            "qkv_names": ("attn.q_proj", "attn.k_proj", "attn.v_proj"), "output_name": "attn.Wo",
            "window": lambda c, i: c["local_attention"] // 2 if slides(c, i) else 0,
        },
        model={
            **MODERN_BERT.model,
            "projection_head": modern_bert_head("lm_head"),
            "output_name": "decoder", "output_bias": key("decoder_bias"),
        },
    ),
}  # fmt: skip
