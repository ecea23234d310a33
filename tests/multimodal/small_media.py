"""Small models of every family that sees or hears, as files: their configurations, with processors of
`small_processors`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import transformers

from octavo.models.multimodal_models import MEDIA_FAMILIES
from tests.multimodal import small_processors as processors
from tests.multimodal.conftest import save
from tests.multimodal.granite_speech import SavedGraniteSpeech, encoder, granite_speech, with_adapter

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip


class Case(NamedTuple):
    """A family's configuration beside `text_config`, and its processor."""

    text: dict[str, Any]
    settings: Callable[[], dict[str, Any]]
    processor: Callable[[Any], Any]
    token: str = "<image>"  # which a row stands in the place of
    needs: str = "transformers"  # what its processor asks for
    theirs: Callable[[Path], Any] | None = None  # the processor to compare with, where Octavo has one of its own
    finish: Callable[[Path], None] | None = None  # what is added to the files
    num_tokens: int = 256  # that the prompts of the table need
    mark: str = "<image>"  # which a picture stands in the place of


def mrope(*sections: int, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": list(sections)} | more}


def clip() -> Any:
    return transformers.CLIPVisionConfig(**SIZES)


TOWER = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
HEARS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_mel_bins": 16}
CASES: dict[str, Case] = {
    "LlavaForConditionalGeneration": Case({"model_type": "llama"}, lambda: {"vision_config": clip()}, processors.llava),
    "LlavaForConditionalGeneration (Pixtral)": Case(
        {"model_type": "mistral", "sliding_window": None},
        lambda: {
            "vision_config": transformers.PixtralVisionConfig(**SIZES | {"image_size": 84}),
            "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
        },
        lambda tokenizer: processors.pixtral(tokenizer, 1),
        needs="torchvision",
    ),
    "LlavaNextForConditionalGeneration": Case(
        # Its rows are multiplied as embeddings are. transformers does not apply `logits_scaling` here.
        {"model_type": "granite", "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2},
        lambda: {"vision_config": clip(), "image_grid_pinpoints": processors.GRID},
        processors.llava_next,
    ),
    "VipLlavaForConditionalGeneration": Case(
        {"model_type": "llama"}, lambda: {"vision_config": clip(), "vision_feature_layers": [-1, -2]}, processors.llava
    ),
    "Mistral3ForConditionalGeneration": Case(
        {"model_type": "mistral", "sliding_window": None},
        lambda: {
            "vision_config": transformers.PixtralVisionConfig(**SIZES | {"image_size": 84}), "spatial_merge_size": 2,
        },
        lambda tokenizer: processors.pixtral(tokenizer, 2),
        needs="torchvision",
    ),
    "Idefics3ForConditionalGeneration": Case(
        {"model_type": "llama"},
        lambda: {"vision_config": transformers.Idefics3VisionConfig(**SIZES), "scale_factor": 2},
        processors.idefics3,
    ),
    "SmolVLMForConditionalGeneration": Case(
        {"model_type": "llama"},
        lambda: {
            "vision_config": transformers.AutoConfig.for_model("smolvlm_vision", **SIZES), "scale_factor": 2,
        },
        processors.smolvlm,
        needs="num2words",
    ),
    "LlavaOnevisionForConditionalGeneration": Case(
        {"model_type": "qwen2"},
        lambda: {
            "vision_config": transformers.SiglipVisionConfig(**SIZES), "image_grid_pinpoints": processors.GRID,
            "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
        },
        processors.onevision,
    ),
    "InternVLForConditionalGeneration": Case(
        {"model_type": "qwen3"},
        lambda: {
            "vision_config": transformers.InternVLVisionConfig(
                **SIZES | {"image_size": [28, 28], "patch_size": [14, 14]}
            ),
            "image_seq_length": 1,
        },
        processors.internvl,
    ),
    "AyaVisionForConditionalGeneration": Case(
        {"model_type": "cohere2", "logit_scale": 1.0},  # which transformers does not apply here, and the model has
        lambda: {"vision_config": transformers.SiglipVisionConfig(**SIZES), "downsample_factor": 2},
        processors.aya,
        "<|IMG_PATCH|>",
    ),
    "AriaForConditionalGeneration": Case(
        {"model_type": "aria_text", "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
        lambda: {
            "vision_config": transformers.Idefics3VisionConfig(**SIZES | {"image_size": 490, "patch_size": 70}),
            "projector_patch_to_query_dict": {49: 3, 196: 4},
        },
        processors.aria,
    ),
    "Qwen2VLForConditionalGeneration": Case(
        {"model_type": "qwen2_vl_text", **mrope(2, 3, 3)},
        lambda: {"vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2}},
        processors.qwen_vl(transformers.Qwen2VLProcessor),
    ),
    "Qwen2_5_VLForConditionalGeneration": Case(
        {"model_type": "qwen2_5_vl_text", **mrope(4, 2, 2)},
        lambda: {
            "vision_config": TOWER | {"window_size": 56, "fullatt_block_indexes": [1]},
        },
        processors.qwen_vl(transformers.Qwen2_5_VLProcessor),
    ),
    **{
        f"Qwen3VL{name}ForConditionalGeneration": Case(
            {"head_dim": 16, "num_hidden_layers": 3, **mrope(4, 2, 2), **more},
            lambda: {"vision_config": TOWER | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}},
            processors.qwen_vl(transformers.Qwen3VLProcessor, 16),
        )
        for name, more in {
            "": {"model_type": "qwen3_vl_text"},
            "Moe": {
                "model_type": "qwen3_vl_moe_text", "num_experts": 4, "num_experts_per_tok": 2,
                "moe_intermediate_size": 24, "mlp_only_layers": [1],
            },
        }.items()
    },
    **{
        f"Qwen3_5{name}ForConditionalGeneration": Case(
            {
                "head_dim": 16, "num_hidden_layers": 3,
                "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_key_heads": 2,
                "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, **more,
                **mrope(2, 1, 1, partial_rotary_factor=0.5),
            },
            lambda: {"vision_config": TOWER | {"num_position_embeddings": 16}},
            processors.qwen_vl(transformers.Qwen3VLProcessor, 16),
        )
        for name, more in {
            "": {"model_type": "qwen3_5_text"},
            "Moe": {
                "model_type": "qwen3_5_moe_text", "num_experts": 4, "num_experts_per_tok": 2,
                "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
            },
        }.items()
    },
    "MiniCPMV4_6ForConditionalGeneration": Case(
        {
            "model_type": "qwen3_5_text", "head_dim": 16, "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
            **mrope(2, 1, 1, partial_rotary_factor=0.5),
        },
        lambda: {
            "vision_config": SIZES | {"patch_size": 7, "image_size": 56, "num_hidden_layers": 3}, "insert_layer_id": 1,
        },
        processors.minicpm,
    ),
    "Glm4vForConditionalGeneration": Case(
        {"model_type": "glm4v_text", **mrope(2, 1, 1, partial_rotary_factor=0.5)},
        lambda: {"vision_config": TOWER | {"image_size": 56}},
        processors.glm4v,
    ),
    "Glm46VForConditionalGeneration": Case(
        {"model_type": "glm4v_text", **mrope(2, 1, 1, partial_rotary_factor=0.5)},
        lambda: {"vision_config": TOWER | {"model_type": "glm4v_vision", "image_size": 56}},
        processors.glm46v,
    ),
    "Glm4vMoeForConditionalGeneration": Case(
        {
            "model_type": "glm4v_moe_text", "head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 24, **mrope(2, 1, 1, partial_rotary_factor=0.5),
        },
        lambda: {"vision_config": TOWER | {"image_size": 56}},
        processors.glm4v,
    ),
    "GlmOcrForConditionalGeneration": Case(
        {"model_type": "glm_ocr_text", "head_dim": 16, **mrope(2, 1, 1, partial_rotary_factor=0.5)},
        lambda: {"vision_config": TOWER | {"image_size": 56}},
        processors.glm46v,
    ),
    "PaddleOCRVLForConditionalGeneration": Case(
        {"model_type": "paddleocr_vl_text", "head_dim": 16, **mrope(2, 3, 3)},
        lambda: {"vision_config": SIZES | {"image_size": 56}},
        processors.paddle_ocr,
    ),
    "VideoLlama3ForConditionalGeneration": Case(
        {"model_type": "qwen2"},
        lambda: {"vision_config": SIZES | {"image_size": 56}},
        processors.video_llama,
    ),
    "LightOnOcrForConditionalGeneration": Case(
        {"model_type": "qwen3", "head_dim": 16},
        lambda: {"vision_config": transformers.PixtralVisionConfig(**SIZES | {"image_size": 84})},
        processors.lighton_ocr,
        needs="torchvision",
    ),
    "Cohere2VisionForConditionalGeneration": Case(
        {"model_type": "cohere2", "logit_scale": 1.0},
        lambda: {"vision_config": SIZES | {"model_type": "siglip_vision_model"}, "alignment_intermediate_size": 48},
        processors.command_vision,
        needs="torchvision",
    ),
    "Lfm2VlForConditionalGeneration": Case(
        {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
        lambda: {
            "vision_config": SIZES | {"model_type": "siglip2_vision_model", "num_patches": 16},
            "projector_hidden_size": 48,
        },
        processors.lfm2_vl,
        needs="torchvision",
    ),
    "Kimi_K25ForConditionalGeneration": Case(
        {
            "model_type": "deepseek_v3", "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
            "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
            "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4,
        },
        lambda: {
            "vision_config": {
                "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
                "pos_emb_height": 8, "pos_emb_width": 8,
            },
            "projection_hidden_size": 32,
        },
        processors.kimi,
        needs="torchvision",
        finish=processors.kimi_as_published,
    ),
    "DeepseekVLForConditionalGeneration": Case(
        {"model_type": "llama"},
        lambda: {"vision_config": SIZES | {"model_type": "siglip_vision_model"}},
        processors.deepseek_vl,
    ),
    "DeepseekVLHybridForConditionalGeneration": Case(
        {"model_type": "llama"},
        lambda: {
            "vision_config": SIZES | {"model_type": "siglip_vision_model"},
            "high_res_vision_config": SIZES | {
                "model_type": "sam_vision_model", "image_size": 56, "window_size": 2, "global_attn_indexes": [0],
                "output_channels": 8,
            },
        },
        processors.deepseek_vl_hybrid,
    ),
    "Llama4ForConditionalGeneration": Case(
        {
            "model_type": "llama4_text", "head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 4,
            "num_hidden_layers": 4, "interleave_moe_layer_step": 2,
        },
        lambda: {
            "vision_config": SIZES | {
                "model_type": "llama4_vision_model", "patch_size": 7, "intermediate_size": 128,
                "projector_input_dim": 32, "projector_output_dim": 32, "vision_output_dim": 32,
            },
        },
        processors.llama4,
        "<|patch|>",
        needs="torchvision",
        mark="<|image|>",
    ),
    "Gemma3ForConditionalGeneration": Case(
        {
            "model_type": "gemma3_text", "head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        lambda: {"vision_config": SIZES | {"model_type": "siglip_vision_model"}, "mm_tokens_per_image": 4},
        processors.gemma3,
        "<|IMG_PATCH|>",
    ),
    **{
        f"Gemma4ForConditionalGeneration{name}": Case(
            {
                "model_type": "gemma4_text", "head_dim": 16, "global_head_dim": 32, "sliding_window": 16,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
                "num_hidden_layers": 4, "max_position_embeddings": 2048, "pad_token_id": 5, **more,
            },
            lambda: {
                "vision_config": {
                    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
                    "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "position_embedding_size": 64,
                },
                "audio_config": None,
            },
            processors.gemma4,
            num_tokens=1536,  # a step may have all of a picture's 70
        )
        for name, more in {
            "": {
                "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 280, "num_kv_shared_layers": 2,
                "use_bidirectional_attention": None,
            },
            # Of a size with which no answer has a picture's token, which transformers would take for another.
            " (both ways)": {
                "hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision", "intermediate_size": 112,
            },
        }.items()
    },
    "Gemma4UnifiedForConditionalGeneration": Case(
        {
            "model_type": "gemma4_unified_text", "head_dim": 16, "global_head_dim": 32, "sliding_window": 80,
            "max_position_embeddings": 2048, "pad_token_id": 5,
        },
        lambda: {
            "vision_config": {
                "patch_size": 4, "pooling_kernel_size": 3, "mm_embed_dim": 32, "mm_posemb_size": 64,
                "output_proj_dims": 32,
            },
            "audio_config": None,
        },
        partial(processors.gemma4, kind="Gemma4Unified", images="ImageProcessor"),
        needs="torchvision",
        num_tokens=1536,
    ),
    "PaliGemmaForConditionalGeneration": Case(
        {"model_type": "gemma", "head_dim": 16},
        lambda: {"vision_config": SIZES | {"model_type": "siglip_vision_model"}, "projection_dim": 64},
        processors.paligemma,
    ),
    "PaliGemmaForConditionalGeneration (2)": Case(
        {
            "model_type": "gemma2", "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        lambda: {"vision_config": SIZES | {"model_type": "siglip_vision_model"}, "projection_dim": 64},
        processors.paligemma,
    ),
    "Qwen2AudioForConditionalGeneration": Case(
        {"model_type": "qwen2"},
        lambda: {
            "audio_config": {
                "model_type": "qwen2_audio_encoder", "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2,
                "encoder_ffn_dim": 48, "num_mel_bins": 16,
            },
        },
        processors.qwen2_audio,
        "<sound>",
    ),
    "AudioFlamingo3ForConditionalGeneration": Case(
        {"model_type": "qwen2"},
        lambda: {"audio_config": HEARS | {"model_type": "audioflamingo3_encoder", "intermediate_size": 48}},
        processors.windows_of_sounds(transformers.AudioFlamingo3Processor),
        "<sound>",
        theirs=processors.OneByOne,
    ),
    "GlmAsrForConditionalGeneration": Case(
        {"model_type": "llama"},
        lambda: {"audio_config": HEARS | {"model_type": "glmasr_encoder", "intermediate_size": 128}},
        processors.windows_of_sounds(transformers.GlmAsrProcessor),
        "<sound>",
        theirs=processors.OneByOne,
    ),
    **{
        f"GraniteSpeech{plus}ForConditionalGeneration": Case(
            # transformers does not apply `logits_scaling` here.
            {"model_type": "granite", "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
            partial(encoder, is_plus=bool(plus)),
            lambda tokenizer: granite_speech(processors.with_sounds(tokenizer)),
            "<sound>",
            theirs=SavedGraniteSpeech,
            finish=with_adapter,
        )
        for plus in ("", "Plus")
    },
    "VoxtralForConditionalGeneration": Case(
        {"model_type": "llama", "head_dim": 16, "max_position_embeddings": 1024},
        lambda: {"audio_config": HEARS | {"model_type": "voxtral_encoder", "intermediate_size": 128}},
        processors.voxtral,
        "[AUDIO]",
        theirs=processors.saved_voxtral,
        num_tokens=1024,
    ),
}  # fmt: skip


def kind_of(name: str) -> str:
    """Of a case's media."""
    return MEDIA_FAMILIES[name.partition(" ")[0]].kind


def save_case(folder: Path, name: str, tokenizer: Any) -> None:
    case = CASES[name]
    processor = case.processor(tokenizer)
    tokenizer = processor.tokenizer
    text = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": len(tokenizer), "max_position_embeddings": 512, **case.text,
    }  # fmt: skip
    builder = getattr(transformers, name.partition(" ")[0])
    settings = case.settings() | {"tie_word_embeddings": False}
    name_of_token = f"{kind_of(name)}_token"
    end = "index" if hasattr(builder.config_class, f"{name_of_token}_index") else "id"
    settings[f"{name_of_token}_{end}"] = tokenizer.convert_tokens_to_ids(case.token)
    save(folder, builder(builder.config_class(text_config=text, **settings)), processor)
    if case.finish is not None:
        case.finish(folder)
