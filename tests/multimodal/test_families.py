"""Every family that sees or hears, with small random weights and its real processor, beside itself in transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError, LoadError, RequestError
from octavo.models.media import MEDIA_FAMILIES
from octavo.models.registry import describe
from octavo.multimodal.processor_class import without_videos
from tests.multimodal.conftest import picture, save
from tests.multimodal.granite_speech import SavedGraniteSpeech, encoder, granite_speech, with_adapter
from tests.multimodal.phi4_multimodal import ADAPTER, TARGETS, Phi4, towers
from tests.multimodal.test_llava import assert_as_transformers, generate, tower
from tests.speech.conftest import sound

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
SQUARE = {"height": 28, "width": 28}
GRID = [[28, 56], [56, 28], [56, 56]]
TOKENS = {
    "image_token": "<image>", "start_image_token": "<img>", "end_image_token": "</img>", "video_token": "<video>",
    "context_image_token": "<image>",
}  # fmt: skip
MORE_TOKENS = [
    "[IMG_BREAK]", "[IMG_END]", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<|IMG_PATCH|>",
    *(f"<row_{i}_col_{j}>" for i in range(1, 3) for j in range(1, 3)),
]  # fmt: skip

LLAMA4_TOKENS = [
    "<|image|>", "<|image_start|>", "<|image_end|>", "<|patch|>", "<|tile_x_separator|>", "<|tile_y_separator|>"
]  # fmt: skip


SOUND_TEMPLATE = (  # which looks for sounds as Qwen2-Audio's does
    "{% for m in messages %}{{ m['role'].upper() + ': ' }}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if 'audio' in c %}<sound>{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %} ASSISTANT:{% endif %}"
)


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


def pixtral(tokenizer: Any, merge: int) -> Any:
    images = transformers.PixtralImageProcessorPil(size={"longest_edge": 84}, patch_size=14 * merge)
    return transformers.PixtralProcessor(
        images, tokenizer, patch_size=14, spatial_merge_size=merge, image_token="<image>"
    )


def llava_next(tokenizer: Any) -> Any:
    images = transformers.LlavaNextImageProcessorPil(
        size={"shortest_edge": 28}, crop_size=SQUARE, image_grid_pinpoints=GRID
    )
    return transformers.LlavaNextProcessor(
        images, tokenizer, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )


def llava(tokenizer: Any) -> Any:
    images = transformers.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=SQUARE)
    return transformers.LlavaProcessor(
        images, tokenizer, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )


def idefics3(tokenizer: Any) -> Any:
    images = transformers.Idefics3ImageProcessorPil(size={"longest_edge": 56}, max_image_size={"longest_edge": 28})
    return transformers.Idefics3Processor(images, tokenizer, image_seq_len=1)


def tiles() -> Any:
    return transformers.GotOcr2ImageProcessorPil(size=SQUARE, crop_to_patches=True, max_patches=4)


def aya(tokenizer: Any) -> Any:
    return transformers.AyaVisionProcessor(tiles(), tokenizer, patch_size=14, img_size=28, downsample_factor=2)


def internvl(tokenizer: Any) -> Any:
    return without_videos(transformers.InternVLProcessor)(tiles(), tokenizer, image_seq_length=1)


def onevision(tokenizer: Any) -> Any:
    images = transformers.LlavaOnevisionImageProcessorPil(size=SQUARE, image_grid_pinpoints=GRID)
    return without_videos(transformers.LlavaOnevisionProcessor)(
        images, tokenizer, num_image_tokens=4, vision_feature_select_strategy="full"
    )


def smolvlm(tokenizer: Any) -> Any:
    images = transformers.SmolVLMImageProcessorPil(size={"longest_edge": 56}, max_image_size={"longest_edge": 28})
    return without_videos(transformers.SmolVLMProcessor)(images, tokenizer, None, image_seq_len=1)


def aria(tokenizer: Any) -> Any:
    images = transformers.AriaImageProcessorPil(max_image_size=490, min_image_size=28)
    return transformers.AriaProcessor(images, tokenizer, size_conversion={490: 3, 980: 4})


def llama4(tokenizer: Any) -> Any:
    tokenizer = type(tokenizer).from_pretrained(tokenizer.name_or_path, extra_special_tokens=TOKENS)
    tokenizer.add_special_tokens({"additional_special_tokens": LLAMA4_TOKENS})
    images = transformers.Llama4ImageProcessor(size=SQUARE, max_patches=4)
    return transformers.Llama4Processor(images, tokenizer, patch_size=7)


def qwen_vl(processor: Any, patch_size: int = 14) -> Callable[[Any], Any]:
    images = transformers.Qwen2VLImageProcessorPil(
        size={"shortest_edge": 84 * 84, "longest_edge": 112 * 112}, patch_size=patch_size
    )
    return lambda tokenizer: without_videos(processor)(images, tokenizer)


def glm4v(tokenizer: Any) -> Any:
    images = transformers.Glm4vImageProcessorPil(size={"shortest_edge": 84 * 84 * 2, "longest_edge": 112 * 112 * 2})
    return without_videos(transformers.Glm4vProcessor)(images, tokenizer)


def minicpm(tokenizer: Any) -> Any:
    marks = {
        f"{what}_{side}_token": f"<{'' if side == 'start' else '/'}{what}>"
        for what in ("slice", "image_id") for side in ("start", "end")
    }  # fmt: skip
    marks |= {"image_start_token": "<img>", "image_end_token": "</img>"}
    tokenizer = type(tokenizer).from_pretrained(tokenizer.name_or_path, extra_special_tokens=TOKENS | marks)
    tokenizer.add_special_tokens({"additional_special_tokens": MORE_TOKENS})
    images = transformers.MiniCPMV4_6ImageProcessorPil(scale_resolution=56, patch_size=7, max_slice_nums=4)
    return without_videos(transformers.MiniCPMV4_6Processor)(image_processor=images, tokenizer=tokenizer)


def glm46v(tokenizer: Any) -> Any:
    images = transformers.Glm46VImageProcessorPil(size={"shortest_edge": 84 * 84 * 2, "longest_edge": 112 * 112 * 2})
    return without_videos(transformers.Glm46VProcessor)(images, tokenizer)


def paddle_ocr(tokenizer: Any) -> Any:
    images = transformers.PaddleOCRVLImageProcessorPil(min_pixels=84 * 84, max_pixels=112 * 112)
    return transformers.PaddleOCRVLProcessor(images, tokenizer)


def deepseek_vl(tokenizer: Any) -> Any:
    images = transformers.DeepseekVLImageProcessorPil(size=SQUARE, min_size=14)
    return transformers.DeepseekVLProcessor(images, tokenizer, num_image_tokens=4)


def video_llama(tokenizer: Any) -> Any:
    images = transformers.VideoLlama3ImageProcessorPil(min_tokens=4, max_tokens=16)
    return without_videos(transformers.VideoLlama3Processor)(images, tokenizer)


def lighton_ocr(tokenizer: Any) -> Any:
    marks = {"image_token": "<image>", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
    tokenizer = type(tokenizer).from_pretrained(tokenizer.name_or_path, extra_special_tokens=marks)
    images = transformers.PixtralImageProcessorPil(size={"longest_edge": 84}, patch_size=14)
    return transformers.LightOnOcrProcessor(images, tokenizer, patch_size=14, spatial_merge_size=2)


def command_vision(tokenizer: Any) -> Any:
    marks = {
        "boi_token": "<img>", "eoi_token": "</img>", "image_token": "<image>", "img_line_break_token": "[IMG_BREAK]"
    }  # fmt: skip
    tokenizer = type(tokenizer).from_pretrained(tokenizer.name_or_path, extra_special_tokens=marks)
    images = transformers.Cohere2VisionImageProcessor(size=SQUARE, patch_size=1, max_patches=4)
    return transformers.Cohere2VisionProcessor(images, tokenizer)


def lfm2_vl(tokenizer: Any) -> Any:
    marks = {"image_token": "<image>", "image_start_token": "<img>", "image_end_token": "</img>"}
    tokenizer = type(tokenizer).from_pretrained(tokenizer.name_or_path, extra_special_tokens=marks)
    images = transformers.Lfm2VlImageProcessor(
        encoder_patch_size=14, tile_size=56, size={"height": 56, "width": 56}, min_image_tokens=1, max_image_tokens=4,
        max_num_patches=64,
    )  # fmt: skip
    return transformers.Lfm2VlProcessor(images, tokenizer)


def kimi(tokenizer: Any) -> Any:
    images = transformers.Kimi_K25ImageProcessor(max_patches=32)
    return without_videos(transformers.Kimi_K25Processor)(images, tokenizer)


def kimi_as_published(folder: Path) -> None:
    """transformers writes its tower's name of layers into the decoder's."""
    path = folder / "model.safetensors"
    tensors = {name.replace("model.blocks.", "model.layers."): tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["architectures"], config["text_config"]["model_type"] = ["KimiK25ForConditionalGeneration"], "kimi_k2"
    (folder / "config.json").write_text(json.dumps(config))


def gemma3(tokenizer: Any) -> Any:
    """Whose prompts have the mark before a picture in the place of all of it."""
    marks = {"boi_token": "<image>", "eoi_token": "</img>", "image_token": "<|IMG_PATCH|>"}
    tokenizer = type(tokenizer).from_pretrained(tokenizer.name_or_path, extra_special_tokens=TOKENS | marks)
    tokenizer.add_special_tokens({"additional_special_tokens": MORE_TOKENS})
    images = transformers.Gemma3ImageProcessorPil(size=SQUARE)
    return transformers.Gemma3Processor(images, tokenizer, image_seq_length=4)


def gemma4(tokenizer: Any, kind: str = "Gemma4", images: str = "ImageProcessorPil") -> Any:
    marks = {"boi_token": "<img>", "eoi_token": "</img>", "image_token": "<image>"}
    marks |= {name: f"<{name}>" for name in ("audio_token", "boa_token", "eoa_token")}
    tokenizer = type(tokenizer).from_pretrained(tokenizer.name_or_path, extra_special_tokens=TOKENS | marks)
    tokenizer.add_special_tokens({"additional_special_tokens": MORE_TOKENS})
    part = partial(getattr, transformers)
    made = part(f"{kind}{images}")(patch_size=4, max_soft_tokens=70)
    return without_videos(part(f"{kind}Processor"))(part(f"{kind}AudioFeatureExtractor")(), made, tokenizer, None)


def paligemma(tokenizer: Any) -> Any:
    images = transformers.SiglipImageProcessorPil(size=SQUARE)
    images.image_seq_length = 4
    return transformers.PaliGemmaProcessor(images, tokenizer)


def with_sounds(tokenizer: Any) -> Any:
    return type(tokenizer).from_pretrained(tokenizer.name_or_path, extra_special_tokens={"audio_token": "<sound>"})


def qwen2_audio(tokenizer: Any) -> Any:
    extractor = transformers.WhisperFeatureExtractor(feature_size=16)
    return transformers.Qwen2AudioProcessor(extractor, with_sounds(tokenizer), chat_template=SOUND_TEMPLATE)


def windows_of_sounds(processor: Any) -> Callable[[Any], Any]:
    def make(tokenizer: Any) -> Any:
        tokenizer = with_sounds(tokenizer)
        tokenizer.pad_token_id = 0
        return processor(transformers.WhisperFeatureExtractor(feature_size=16), tokenizer, audio_token="<sound>")

    return make


class OneByOne:
    """A processor that takes one sound a text: the parts of a text with several, one behind the other."""

    def __init__(self, folder: Path) -> None:
        self._processor = transformers.AutoProcessor.from_pretrained(folder)

    def __call__(self, text: str, audio: list[Any], return_tensors: str) -> dict[str, Any]:
        *texts, end = text.split("<sound>")
        found = [self._processor(text=f"{one}<sound>", audio=[given]) for one, given in zip(texts, audio, strict=True)]
        inputs = {name: torch.cat([one[name] for one in found]) for name in ("input_features", "input_features_mask")}
        tail = self._processor.tokenizer(end, return_tensors=return_tensors)["input_ids"]
        return {"input_ids": torch.cat([*(one["input_ids"] for one in found), tail], 1), **inputs}


class Voxtral:
    """What its processor in transformers makes of sounds, and of the text what mistral-common, which that asks for,
    would: so many tokens a sound, with a mark before them."""

    def __init__(self, extractor: Any, tokenizer: Any) -> None:
        self.feature_extractor, self.tokenizer = extractor, tokenizer

    def __call__(self, text: str, audio: list[Any] | None, return_tensors: str) -> dict[str, Any]:
        kind, more = transformers.VoxtralProcessor, {}
        if audio:
            settings = kind.audio_kwargs | {"return_tensors": return_tensors}
            more["input_features"] = kind._retrieve_input_features(self, audio, **settings)
        text = text.replace("[AUDIO]", "[BEGIN_AUDIO]" + 375 * "[AUDIO]")
        return {**self.tokenizer(text, return_tensors=return_tensors), **more}

    def save_pretrained(self, folder: Path) -> None:
        self.feature_extractor.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


def voxtral(tokenizer: Any) -> Any:
    tokenizer = type(tokenizer).from_pretrained(tokenizer.name_or_path)
    tokenizer.add_special_tokens({"additional_special_tokens": ["[AUDIO]", "[BEGIN_AUDIO]"]})
    return Voxtral(transformers.WhisperFeatureExtractor(feature_size=16), tokenizer)


def saved_voxtral(folder: Path) -> Any:
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(folder)
    return Voxtral(extractor, PreTrainedTokenizerFast.from_pretrained(folder))


def mrope(*sections: int, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": list(sections)} | more}


def clip() -> Any:
    return transformers.CLIPVisionConfig(**SIZES)


TOWER = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
HEARS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_mel_bins": 16}
CASES: dict[str, Case] = {
    "LlavaForConditionalGeneration": Case({"model_type": "llama"}, lambda: {"vision_config": clip()}, llava),
    "LlavaForConditionalGeneration (Pixtral)": Case(
        {"model_type": "mistral", "sliding_window": None},
        lambda: {
            "vision_config": transformers.PixtralVisionConfig(**SIZES | {"image_size": 84}),
            "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
        },
        lambda tokenizer: pixtral(tokenizer, 1),
        needs="torchvision",
    ),
    "LlavaNextForConditionalGeneration": Case(
        # Its rows are multiplied as embeddings are. transformers does not apply `logits_scaling` here.
        {"model_type": "granite", "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2},
        lambda: {"vision_config": clip(), "image_grid_pinpoints": GRID},
        llava_next,
    ),
    "VipLlavaForConditionalGeneration": Case(
        {"model_type": "llama"}, lambda: {"vision_config": clip(), "vision_feature_layers": [-1, -2]}, llava
    ),
    "Mistral3ForConditionalGeneration": Case(
        {"model_type": "mistral", "sliding_window": None},
        lambda: {
            "vision_config": transformers.PixtralVisionConfig(**SIZES | {"image_size": 84}), "spatial_merge_size": 2,
        },
        lambda tokenizer: pixtral(tokenizer, 2),
        needs="torchvision",
    ),
    "Idefics3ForConditionalGeneration": Case(
        {"model_type": "llama"},
        lambda: {"vision_config": transformers.Idefics3VisionConfig(**SIZES), "scale_factor": 2},
        idefics3,
    ),
    "SmolVLMForConditionalGeneration": Case(
        {"model_type": "llama"},
        lambda: {
            "vision_config": transformers.AutoConfig.for_model("smolvlm_vision", **SIZES), "scale_factor": 2,
        },
        smolvlm,
        needs="num2words",
    ),
    "LlavaOnevisionForConditionalGeneration": Case(
        {"model_type": "qwen2"},
        lambda: {
            "vision_config": transformers.SiglipVisionConfig(**SIZES), "image_grid_pinpoints": GRID,
            "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
        },
        onevision,
    ),
    "InternVLForConditionalGeneration": Case(
        {"model_type": "qwen3"},
        lambda: {
            "vision_config": transformers.InternVLVisionConfig(
                **SIZES | {"image_size": [28, 28], "patch_size": [14, 14]}
            ),
            "image_seq_length": 1,
        },
        internvl,
    ),
    "AyaVisionForConditionalGeneration": Case(
        {"model_type": "cohere2", "logit_scale": 1.0},  # which transformers does not apply here, and the model has
        lambda: {"vision_config": transformers.SiglipVisionConfig(**SIZES), "downsample_factor": 2},
        aya,
        "<|IMG_PATCH|>",
    ),
    "AriaForConditionalGeneration": Case(
        {"model_type": "aria_text", "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
        lambda: {
            "vision_config": transformers.Idefics3VisionConfig(**SIZES | {"image_size": 490, "patch_size": 70}),
            "projector_patch_to_query_dict": {49: 3, 196: 4},
        },
        aria,
    ),
    "Qwen2VLForConditionalGeneration": Case(
        {"model_type": "qwen2_vl_text", **mrope(2, 3, 3)},
        lambda: {"vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2}},
        qwen_vl(transformers.Qwen2VLProcessor),
    ),
    "Qwen2_5_VLForConditionalGeneration": Case(
        {"model_type": "qwen2_5_vl_text", **mrope(4, 2, 2)},
        lambda: {
            "vision_config": TOWER | {"window_size": 56, "fullatt_block_indexes": [1]},
        },
        qwen_vl(transformers.Qwen2_5_VLProcessor),
    ),
    **{
        f"Qwen3VL{name}ForConditionalGeneration": Case(
            {"head_dim": 16, "num_hidden_layers": 3, **mrope(4, 2, 2), **more},
            lambda: {"vision_config": TOWER | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}},
            qwen_vl(transformers.Qwen3VLProcessor, 16),
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
            qwen_vl(transformers.Qwen3VLProcessor, 16),
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
        minicpm,
    ),
    "Glm4vForConditionalGeneration": Case(
        {"model_type": "glm4v_text", **mrope(2, 1, 1, partial_rotary_factor=0.5)},
        lambda: {"vision_config": TOWER | {"image_size": 56}},
        glm4v,
    ),
    "Glm46VForConditionalGeneration": Case(
        {"model_type": "glm4v_text", **mrope(2, 1, 1, partial_rotary_factor=0.5)},
        lambda: {"vision_config": TOWER | {"model_type": "glm4v_vision", "image_size": 56}},
        glm46v,
    ),
    "Glm4vMoeForConditionalGeneration": Case(
        {
            "model_type": "glm4v_moe_text", "head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 24, **mrope(2, 1, 1, partial_rotary_factor=0.5),
        },
        lambda: {"vision_config": TOWER | {"image_size": 56}},
        glm4v,
    ),
    "GlmOcrForConditionalGeneration": Case(
        {"model_type": "glm_ocr_text", "head_dim": 16, **mrope(2, 1, 1, partial_rotary_factor=0.5)},
        lambda: {"vision_config": TOWER | {"image_size": 56}},
        glm46v,
    ),
    "PaddleOCRVLForConditionalGeneration": Case(
        {"model_type": "paddleocr_vl_text", "head_dim": 16, **mrope(2, 3, 3)},
        lambda: {"vision_config": SIZES | {"image_size": 56}},
        paddle_ocr,
    ),
    "VideoLlama3ForConditionalGeneration": Case(
        {"model_type": "qwen2"},
        lambda: {"vision_config": SIZES | {"image_size": 56}},
        video_llama,
    ),
    "LightOnOcrForConditionalGeneration": Case(
        {"model_type": "qwen3", "head_dim": 16},
        lambda: {"vision_config": transformers.PixtralVisionConfig(**SIZES | {"image_size": 84})},
        lighton_ocr,
        needs="torchvision",
    ),
    "Cohere2VisionForConditionalGeneration": Case(
        {"model_type": "cohere2", "logit_scale": 1.0},
        lambda: {"vision_config": SIZES | {"model_type": "siglip_vision_model"}, "alignment_intermediate_size": 48},
        command_vision,
        needs="torchvision",
    ),
    "Lfm2VlForConditionalGeneration": Case(
        {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
        lambda: {
            "vision_config": SIZES | {"model_type": "siglip2_vision_model", "num_patches": 16},
            "projector_hidden_size": 48,
        },
        lfm2_vl,
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
        kimi,
        needs="torchvision",
        finish=kimi_as_published,
    ),
    "DeepseekVLForConditionalGeneration": Case(
        {"model_type": "llama"},
        lambda: {"vision_config": SIZES | {"model_type": "siglip_vision_model"}},
        deepseek_vl,
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
        llama4,
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
        gemma3,
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
            gemma4,
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
        partial(gemma4, kind="Gemma4Unified", images="ImageProcessor"),
        needs="torchvision",
        num_tokens=1536,
    ),
    "PaliGemmaForConditionalGeneration": Case(
        {"model_type": "gemma", "head_dim": 16},
        lambda: {"vision_config": SIZES | {"model_type": "siglip_vision_model"}, "projection_dim": 64},
        paligemma,
    ),
    "PaliGemmaForConditionalGeneration (2)": Case(
        {
            "model_type": "gemma2", "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        lambda: {"vision_config": SIZES | {"model_type": "siglip_vision_model"}, "projection_dim": 64},
        paligemma,
    ),
    "Qwen2AudioForConditionalGeneration": Case(
        {"model_type": "qwen2"},
        lambda: {
            "audio_config": {
                "model_type": "qwen2_audio_encoder", "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2,
                "encoder_ffn_dim": 48, "num_mel_bins": 16,
            },
        },
        qwen2_audio,
        "<sound>",
    ),
    "AudioFlamingo3ForConditionalGeneration": Case(
        {"model_type": "qwen2"},
        lambda: {"audio_config": HEARS | {"model_type": "audioflamingo3_encoder", "intermediate_size": 48}},
        windows_of_sounds(transformers.AudioFlamingo3Processor),
        "<sound>",
        theirs=OneByOne,
    ),
    "GlmAsrForConditionalGeneration": Case(
        {"model_type": "llama"},
        lambda: {"audio_config": HEARS | {"model_type": "glmasr_encoder", "intermediate_size": 128}},
        windows_of_sounds(transformers.GlmAsrProcessor),
        "<sound>",
        theirs=OneByOne,
    ),
    **{
        f"GraniteSpeech{plus}ForConditionalGeneration": Case(
            # transformers does not apply `logits_scaling` here.
            {"model_type": "granite", "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
            partial(encoder, is_plus=bool(plus)),
            lambda tokenizer: granite_speech(with_sounds(tokenizer)),
            "<sound>",
            theirs=SavedGraniteSpeech,
            finish=with_adapter,
        )
        for plus in ("", "Plus")
    },
    "Phi4MultimodalForCausalLM": Case(
        {"pad_token_id": 0, "bos_token_id": 0},
        towers,
        lambda tokenizer: Phi4(with_sounds(tokenizer)),
        "<sound>",
        theirs=lambda folder: Phi4(PreTrainedTokenizerFast.from_pretrained(folder), folder),
        finish=partial(with_adapter, name=ADAPTER, targets=TARGETS),
    ),
    "VoxtralForConditionalGeneration": Case(
        {"model_type": "llama", "head_dim": 16, "max_position_embeddings": 1024},
        lambda: {"audio_config": HEARS | {"model_type": "voxtral_encoder", "intermediate_size": 128}},
        voxtral,
        "[AUDIO]",
        theirs=saved_voxtral,
        num_tokens=1024,
    ),
}  # fmt: skip
# Of each kind two of different sizes and one of the first's.
MEDIA: dict[str, list[Any]] = {
    "image": [picture(0), picture(1, 90, 33), picture(2)], "audio": [sound(0, 0.5), sound(1, 1.1), sound(2, 0.5)],
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tiny_tokenizer: Path) -> Any:
    found = PreTrainedTokenizerFast.from_pretrained(tiny_tokenizer, extra_special_tokens=TOKENS)
    found.add_special_tokens({"additional_special_tokens": MORE_TOKENS})
    return found


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
    name_of_token = f"{MEDIA_FAMILIES[name.partition(' ')[0]].kind}_token"
    end = "index" if hasattr(builder.config_class, f"{name_of_token}_index") else "id"
    settings[f"{name_of_token}_{end}"] = tokenizer.convert_tokens_to_ids(case.token)
    if name.startswith("Phi4"):  # whose decoder's settings are beside its towers'
        settings["audio_config"]["audio_token_id"] = settings.pop("audio_token_id")
        config = builder.config_class(**text, **settings)
    else:
        config = builder.config_class(text_config=text, **settings)
    save(folder, builder(config), processor)
    if case.finish is not None:
        case.finish(folder)


# Whose decoder or rule another has too.
LONG = {
    "Glm46VForConditionalGeneration", "Glm4vMoeForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration", "Glm4vForConditionalGeneration",
    "PaliGemmaForConditionalGeneration",
    "AudioFlamingo3ForConditionalGeneration", "GlmAsrForConditionalGeneration",
    "GraniteSpeechPlusForConditionalGeneration",
    "Gemma4ForConditionalGeneration (both ways)",
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in CASES])
def test_it_answers_as_transformers_does(tmp_path: Path, tokenizer: Any, name: str) -> None:
    pytest.importorskip(CASES[name].needs)
    save_case(tmp_path, name, tokenizer)
    family = MEDIA_FAMILIES[name.partition(" ")[0]]
    is_whole = family.sees_ahead == "prompt"  # not to be cut
    length = CASES[name].num_tokens
    budget = 256 if is_whole else 13 * length // 256
    llm = LLM(
        str(tmp_path), dtype="float32", max_model_len=length, max_num_batched_tokens=budget, max_num_seqs=4,
        num_gpu_blocks_override=80 * length // 256, check_invariants=True,
    )  # fmt: skip
    (first, second, third), mark = MEDIA[family.kind], CASES[name].mark if family.kind == "image" else CASES[name].token
    theirs = CASES[name].theirs
    # Where grids make positions, `generate` of transformers goes on from those of the last token, be it a picture's.
    two = f"{mark}\nbeside this one:{mark}."
    prompts = {
        "one": (f"What is it? {mark} Say it.", [first]),
        "two of different sizes": (two, [first, second]),
        "a second turn": (f"{two} It is. And now?", [first, second]),
        # transformers takes pictures without a token between them for one, where their grids make positions.
        "the same twice": (f"{mark}{mark}." if family.sections is None else f"{mark} {mark}.", [second, second]),
        "another": (f"What is it? {mark} Say it.", [third]),
    }
    asked = [{"prompt": text, "multi_modal_data": {family.kind: media}} for text, media in prompts.values()]
    alone = []
    for one, (text, media) in zip(asked, prompts.values(), strict=True):
        alone += generate(llm, one)
        # Nested, as chats of transformers have it; a flat list is one of pictures that are alone.
        given = [media] if family.counts_pictures else media
        processor = theirs and theirs(tmp_path)
        assert_as_transformers(tmp_path, alone[-1], text, given, family.kind, processor)
    assert alone[-1].prompt_token_ids == alone[0].prompt_token_ids
    assert alone[-1].outputs[0].logprobs != alone[0].outputs[0].logprobs
    assert alone[2].num_cached_tokens >= (0 if is_whole else len(alone[1].prompt_token_ids) // 16 * 16)
    llm.reset_prefix_cache()
    runs = tower(llm).num_runs
    for one, other in zip(alone, generate(llm, *asked), strict=True):
        assert one.outputs[0].logprobs == other.outputs[0].logprobs
    assert tower(llm).num_runs == runs
    if family.frames_prompts:  # of text alone
        llm.close()
        return
    as_ids = {
        "prompt_token_ids": llm.get_tokenizer().encode(prompts["one"][0]),
        "multi_modal_data": {family.kind: first},
    }
    assert generate(llm, as_ids)[0].outputs[0].logprobs == alone[0].outputs[0].logprobs
    llm.close()


@pytest.mark.parametrize(
    ("name", "shift"),
    [
        ("Qwen3VLForConditionalGeneration", 4),
        ("Gemma3ForConditionalGeneration", 1),
        pytest.param("Qwen2AudioForConditionalGeneration", 1, marks=pytest.mark.long),
        pytest.param("Qwen3_5ForConditionalGeneration", 2, marks=pytest.mark.long),
    ],
)
def test_preempted_forked_and_found_prompts_see_the_same(tmp_path: Path, tokenizer: Any, name: str, shift: int) -> None:
    """Where positions or what a token sees follow from the picture, not from the token's place alone."""
    save_case(tmp_path, name, tokenizer)
    sizes: dict[str, Any] = {"dtype": "float32", "max_model_len": 112, "max_num_batched_tokens": 13, "max_num_seqs": 4}
    params = SamplingParams(temperature=1, seed=5, max_tokens=60, logprobs=1, ignore_eos=True, n=2)
    hears = MEDIA_FAMILIES[name].kind == "audio"
    media: dict[str, Any] = {"audio": sound(3, 0.5)} if hears else {"image": picture(3, 120, 110)}
    mark = "<sound>" if hears else "<image>"
    # In each the first block of 16 ends within the picture or the sound.
    texts = [f"number {i}: {'x' * (shift + i % 2)}{mark} and so on" for i in range(3)]
    prompts = [{"prompt": text, "multi_modal_data": media} for text in texts]
    llm = LLM(str(tmp_path), num_gpu_blocks_override=80, check_invariants=True, **sizes)
    alone = []
    for prompt in prompts:
        alone += generate(llm, prompt, params=params)
        one = alone[-1]
        assert one.prompt_token_ids[15] == one.prompt_token_ids[16] == llm.config.media.token_id
        [again] = generate(llm, prompt, params=params)
        assert again.num_cached_tokens >= 16
        assert [found.logprobs for found in again.outputs] == [found.logprobs for found in one.outputs]
    llm.close()
    crowded = LLM(
        str(tmp_path), num_gpu_blocks_override=13, check_invariants=True, enable_prefix_caching=False, **sizes
    )
    together = generate(crowded, *prompts, params=params)
    assert sum(output.metrics.num_preemptions for output in together) > 0
    for one, other in zip(alone, together, strict=True):
        assert [found.logprobs for found in one.outputs] == [found.logprobs for found in other.outputs]
    crowded.close()


@pytest.mark.parametrize(
    "name",
    [
        "Qwen3VLForConditionalGeneration",
        pytest.param("Qwen2VLForConditionalGeneration", marks=pytest.mark.long),
        "LlavaNextForConditionalGeneration",
        pytest.param("Qwen2AudioForConditionalGeneration", marks=pytest.mark.long),
        "SmolVLMForConditionalGeneration",
    ],
)
def test_rows_of_the_tower_may_be_brought(tmp_path: Path, tokenizer: Any, name: str) -> None:
    pytest.importorskip(CASES[name].needs)
    save_case(tmp_path, name, tokenizer)
    family = MEDIA_FAMILIES[name]
    llm = LLM(str(tmp_path), dtype="float32", max_model_len=256, num_gpu_blocks_override=80, enable_mm_embeds=True)
    medium, mark = MEDIA[family.kind][0], "<image>" if family.kind == "image" else CASES[name].token
    prompt = f"number {mark} and so on"
    alone = generate(llm, {"prompt": prompt, "multi_modal_data": {family.kind: medium}})[0]
    [(_, made)] = tower(llm)._entries.values()
    parts, num_rows, hidden_size = made.result().shape
    rows = torch.tensor(made.result()).transpose(0, 1).reshape(num_rows, parts * hidden_size)
    rows /= llm.config.media.row_multiplier  # type: ignore[union-attr]
    given: dict[str, Any] = {f"{family.kind}_embeds": rows}
    if family.sections is not None:
        assert llm.inputs.media is not None
        merge = llm.inputs.media._processor.image_processor.merge_size
        found = llm.inputs.media._processor.image_processor(images=[medium])["image_grid_thw"][0]
        assert found[0] * found[1] * found[2] == num_rows * merge**2
        with pytest.raises(RequestError, match="need image_grid_thw"):
            generate(llm, {"prompt": prompt, "multi_modal_data": {family.kind: rows}})
        for grid in ([1, 2, 2], [2, *found[1:]], [1, 0, 1], [1, 2]):
            with pytest.raises(RequestError, match="image_grid_thw"):
                generate(llm, {"prompt": prompt, "multi_modal_data": {family.kind: given | {"image_grid_thw": grid}}})
        given["image_grid_thw"] = torch.tensor(found)
    if name.startswith("SmolVLM"):
        with pytest.raises(RequestError, match="not built for models with marks between its rows"):
            generate(llm, {"prompt": prompt, "multi_modal_data": {family.kind: given}})
    else:
        brought = generate(llm, {"prompt": prompt, "multi_modal_data": {family.kind: given}})[0]
        assert brought.prompt_token_ids == alone.prompt_token_ids
        for one, other in zip(brought.outputs[0].logprobs, alone.outputs[0].logprobs, strict=True):
            assert {token: pytest.approx(of.logprob, abs=1e-4) for token, of in one.items()} == {
                token: of.logprob for token, of in other.items()
            }
    llm.close()


@pytest.mark.long
def test_experts_may_lie_as_qwen3_vl_files_have_them(tmp_path: Path, tokenizer: Any) -> None:
    save_case(tmp_path, "Qwen3VLMoeForConditionalGeneration", tokenizer)
    answers = []
    for _ in range(2):
        with LLM(str(tmp_path), dtype="float32", max_model_len=64, num_gpu_blocks_override=8) as llm:
            answers.append(generate(llm, {"prompt": "What is it?"})[0].outputs[0].logprobs)
        tensors = load_file(tmp_path / "model.safetensors")
        turned = {k: v.transpose(1, 2).contiguous() for k, v in tensors.items() if ".experts." in k}
        save_file(tensors | turned, tmp_path / "model.safetensors", {"format": "pt"})
    assert answers[0] == answers[1]


def test_prompts_that_see_themselves_are_not_without_pictures_nor_cut(tmp_path: Path, tokenizer: Any) -> None:
    save_case(tmp_path, "PaliGemmaForConditionalGeneration", tokenizer)
    for more, said in (
        ({"language_model_only": True}, "is no language model without pictures"),
        ({"max_num_batched_tokens": 13}, "--max-num-batched-tokens 13 is less than --max-model-len 64"),
    ):
        with pytest.raises(ConfigError, match=said):
            LLM(str(tmp_path), max_model_len=64, num_gpu_blocks_override=8, **more)


@pytest.mark.parametrize(
    ("name", "guessing", "text"),
    [
        ("Qwen3_5ForConditionalGeneration", "mtp.fc.weight", {}),
        # A layer after those of the model.
        (
            "GlmOcrForConditionalGeneration",
            "model.language_model.layers.2.eh_proj.weight",
            {"num_nextn_predict_layers": 1},
        ),
    ],
)
def test_tensors_of_a_head_that_guesses_are_passed_over(
    tmp_path: Path, tokenizer: Any, name: str, guessing: str, text: dict[str, Any]
) -> None:
    save_case(tmp_path, name, tokenizer)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"] |= text
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {guessing: torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    sizes: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "num_gpu_blocks_override": 8}
    with LLM(str(tmp_path), language_model_only=True, **sizes) as llm:
        assert generate(llm, {"prompt": "x"})[0].outputs[0].token_ids
    save_file(tensors | {"other.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match=r"other\.weight"):
        LLM(str(tmp_path), language_model_only=True, **sizes)


def test_every_family_has_its_case() -> None:
    assert {name.partition(" ")[0] for name in CASES} == set(MEDIA_FAMILIES)


@pytest.mark.parametrize(
    ("name", "whole", "text", "is_tied"),
    [
        ("Mistral3ForConditionalGeneration", {}, {}, False),
        ("AyaVisionForConditionalGeneration", {}, {}, True),
        ("AyaVisionForConditionalGeneration", {"tie_word_embeddings": False}, {}, False),
        ("LlavaOnevisionForConditionalGeneration", {"tie_word_embeddings": False}, {"tie_word_embeddings": True}, True),
        ("SmolVLMForConditionalGeneration", {"tie_word_embeddings": False}, {"tie_word_embeddings": True}, False),
    ],
)
def test_whose_word_counts_on_tied_embeddings(
    name: str, whole: dict[str, Any], text: dict[str, Any], is_tied: bool
) -> None:
    config = {"architectures": [name], "image_token_id": 0, "text_config": text, **whole}
    assert describe(config).tie_word_embeddings == is_tied


def test_a_decoder_that_is_described_beside_the_rest_is_the_same() -> None:
    text = {
        "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "rope_theta": 5e5, "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]},
        "tie_word_embeddings": True,
    }  # fmt: skip
    whole = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "image_token_id": 7, "vision_config": {}}
    flat = describe(whole | text | {"model_type": "qwen2_5_vl"})
    assert flat == describe(whole | {"text_config": text})
    assert flat.tie_word_embeddings
    rope = flat.layers[0].attention.rope  # type: ignore[union-attr]
    assert rope is not None and rope.axes == (0, 0, 0, 0, 1, 1, 2, 2) and rope.theta == 5e5
    text["rope_scaling"] = {"type": "mrope", "mrope_section": [4, 2, 1]}
    with pytest.raises(LoadError, match=r"mrope_section \[4, 2, 1\] does not share out the 8 pairs of a head"):
        describe(whole | text)
