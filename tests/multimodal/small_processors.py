"""The real processors of families that see or hear, with settings that make few rows of small media."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from octavo.multimodal.processor_loader import without_videos

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


def deepseek_vl_hybrid(tokenizer: Any) -> Any:
    high_res_size = {"height": 56, "width": 56}
    images = transformers.DeepseekVLHybridImageProcessorPil(size=SQUARE, min_size=14, high_res_size=high_res_size)
    return transformers.DeepseekVLHybridProcessor(images, tokenizer, num_image_tokens=4)


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
