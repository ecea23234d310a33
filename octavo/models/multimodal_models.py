"""Models that see or hear: a tower and a projector before a decoder of `octavo.models.families`.

transformers computes tower and projector (`octavo.multimodal.tower`). This module reads the decoder's description from
the model's configuration; each family is one entry of `MEDIA_FAMILIES`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from octavo.errors import LoadError
from octavo.layers.attention import AttentionDescription
from octavo.layers.experts import stacked
from octavo.models.config_reader import overlaid, read, rope_settings
from octavo.models.description import LayerDescription, ModelDescription
from octavo.models.families import FAMILIES
from octavo.models.mllama import NUM_PICTURES, with_cross_attention

# model_type of a `text_config` -> the architecture of its decoder.
DECODERS = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "aria_text": "AriaTextForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "gemma": "GemmaForCausalLM",  # with PaliGemma's defaults
    "gemma2": "Gemma2ForCausalLM",
    "glm4v_text": "Glm4ForCausalLM",
    "glm4v_moe_text": "Glm4MoeForCausalLM",
    "glm_ocr_text": "Glm4ForCausalLM",
    "paddleocr_vl_text": "LlamaForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
    "mllama_text_model": "LlamaForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",  # the model_type in Kimi's own files
}
# Defaults of the configuration classes in transformers 5, by model_type or by the family's class: checkpoints leave out
# settings that equal their default.
TEXT_DEFAULTS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("text_defaults.json").read_text())
# Names of experts, where they differ from those of the decoder's own checkpoints.
_EXPERTS = {"qwen3_vl_moe_text": (stacked("mlp.experts.gate_up_proj", "mlp.experts.down_proj", is_transposed=True),)}
# Settings that are refused in addition to the decoder's own, and settings that a class ignores in config.json.
_REFUSES = {"paddleocr_vl_text": ("use_bias",)}
_FIXED: dict[str, dict[str, Any]] = {
    "glm_ocr_text": {"attention_bias": False}, "mllama_text_model": {"attention_bias": False, "mlp_bias": False},
}  # fmt: skip
# A family whose default decoder is one of these may have any of them.
_ANY_FAMILY = ("llama", "mistral", "qwen2", "qwen3", "granite", "cohere2", "aria_text")


@dataclass(frozen=True, slots=True)
class MediaFamily:
    """One class of models with media: defaults of its configuration, and how its decoder gets the tower's rows."""

    decoder: str  # default `model_type` of the text_config
    token: int  # default token that each row of a medium replaces
    kind: Literal["image", "audio"] = "image"  # the kind of media that it takes
    video_token: int | None = None  # token that a row of a video replaces; None: no videos, or `shares_token`
    shares_token: bool = False  # it takes videos, whose rows replace the same token as a picture's
    may_tie_in_text: bool = False  # embeddings are also tied if the text_config's tie_word_embeddings is true
    counts_pictures: bool = False  # a picture alone in its prompt is cut into tiles, one of several pictures is not
    # Numbers of pairs of elements that are rotated by the position in time, height and width (M-RoPE); None: a token
    # has one position.
    sections: tuple[int, int, int] | None = None
    interleaves: bool = False  # pairs alternate between time, height and width until height and width have all theirs
    stacked_layers: tuple[int, ...] = ()  # layers of the tower whose rows are added after the decoder's first layers
    sees_ahead: Literal["", "picture", "prompt"] = ""  # see `ModelDescription`
    sees_ahead_in_windows: bool = False  # "picture" in layers with a window, if the text_config says so
    frames_prompts: bool = False  # the processor puts marks after the last picture and at the end of the text
    other_decoders: tuple[str, ...] = ()  # further decoders that models of the class may have
    multiplies_rows: bool = True  # if the decoder multiplies embeddings, it multiplies rows of pictures too
    brings_adapter: bool = False  # an adapter lies beside the weights, for prompts with media
    # Cross-attention layers of the decoder read a picture's rows; the rows replace no tokens: `with_cross_attention`.
    crosses: bool = False
    longest_s: float | None = None  # longest sound that its tower takes, in seconds; None: the processor's limit

    @property
    def sees_videos(self) -> bool:
        return self.video_token is not None or self.shares_token


MEDIA_FAMILIES: dict[str, MediaFamily] = {
    "LlavaForConditionalGeneration": MediaFamily("llama", 32000, may_tie_in_text=True),  # Pixtral too
    "LlavaNextForConditionalGeneration": MediaFamily("llama", 32000),
    "LlavaOnevisionForConditionalGeneration": MediaFamily(
        "qwen2", 151646, video_token=151647, may_tie_in_text=True, counts_pictures=True
    ),
    "VipLlavaForConditionalGeneration": MediaFamily("llama", 32000),
    "Mistral3ForConditionalGeneration": MediaFamily("mistral", 10),
    "Idefics3ForConditionalGeneration": MediaFamily("llama", 128257),
    "SmolVLMForConditionalGeneration": MediaFamily("llama", 128257, shares_token=True),
    "InternVLForConditionalGeneration": MediaFamily("qwen2", 151667, shares_token=True),
    "AyaVisionForConditionalGeneration": MediaFamily("cohere2", 255036),
    "AriaForConditionalGeneration": MediaFamily("aria_text", 9),
    "Qwen2VLForConditionalGeneration": MediaFamily(
        "qwen2_vl_text", 151655, video_token=151656, may_tie_in_text=True, sections=(16, 24, 24)
    ),
    "Qwen2_5_VLForConditionalGeneration": MediaFamily(
        "qwen2_5_vl_text", 151655, video_token=151656, may_tie_in_text=True, sections=(16, 24, 24)
    ),
    "Qwen3VLForConditionalGeneration": MediaFamily(
        "qwen3_vl_text", 151655, video_token=151656, may_tie_in_text=True, sections=(24, 20, 20), interleaves=True,
        stacked_layers=(8, 16, 24),
    ),
    "Qwen3VLMoeForConditionalGeneration": MediaFamily(
        "qwen3_vl_moe_text", 151655, video_token=151656, sections=(24, 20, 20), interleaves=True,
        stacked_layers=(8, 16, 24),
    ),
    "Qwen3_5ForConditionalGeneration": MediaFamily(
        "qwen3_5_text", 248056, video_token=248057, sections=(11, 11, 10), interleaves=True
    ),
    "Qwen3_5MoeForConditionalGeneration": MediaFamily(
        "qwen3_5_moe_text", 248056, video_token=248057, sections=(11, 11, 10), interleaves=True
    ),
    "MiniCPMV4_6ForConditionalGeneration": MediaFamily("qwen3_5_text", 248056, video_token=248057),
    "Glm4vForConditionalGeneration": MediaFamily("glm4v_text", 151343, shares_token=True, sections=(8, 12, 12)),
    "Glm46VForConditionalGeneration": MediaFamily(
        "glm4v_text", 151343, shares_token=True, sections=(8, 12, 12), other_decoders=("glm4v_moe_text",)
    ),
    "Glm4vMoeForConditionalGeneration": MediaFamily(
        "glm4v_moe_text", 151363, shares_token=True, sections=(8, 12, 12)
    ),
    "GlmOcrForConditionalGeneration": MediaFamily("glm_ocr_text", 59280, sections=(8, 12, 12)),
    "PaddleOCRVLForConditionalGeneration": MediaFamily("paddleocr_vl_text", 100295, sections=(16, 24, 24)),
    "DeepseekVLForConditionalGeneration": MediaFamily("llama", 100015),
    "DeepseekVLHybridForConditionalGeneration": MediaFamily("llama", 100015),
    "VideoLlama3ForConditionalGeneration": MediaFamily("qwen2", 151655, video_token=151656, may_tie_in_text=True),
    "LightOnOcrForConditionalGeneration": MediaFamily("qwen3", 151655),
    "Cohere2VisionForConditionalGeneration": MediaFamily("cohere2", 255036),
    "Lfm2VlForConditionalGeneration": MediaFamily("lfm2", 396),
    "Kimi_K25ForConditionalGeneration": MediaFamily("deepseek_v3", 163605, other_decoders=("kimi_k2",)),
    "Gemma3ForConditionalGeneration": MediaFamily(
        "gemma3_text", 262144, sees_ahead="picture", multiplies_rows=False
    ),
    "PaliGemmaForConditionalGeneration": MediaFamily(
        "gemma", 256000, sees_ahead="prompt", multiplies_rows=False, frames_prompts=True, other_decoders=("gemma2",)
    ),
    "Gemma4ForConditionalGeneration": MediaFamily(
        "gemma4_text", 258880, video_token=258884, sees_ahead_in_windows=True, multiplies_rows=False
    ),
    "Gemma4UnifiedForConditionalGeneration": MediaFamily(
        "gemma4_unified_text", 258880, sees_ahead="picture", multiplies_rows=False
    ),
    "Llama4ForConditionalGeneration": MediaFamily("llama4_text", 200092),
    "MllamaForConditionalGeneration": MediaFamily("mllama_text_model", 128256, crosses=True),
    "Qwen2AudioForConditionalGeneration": MediaFamily("qwen2", 151646, kind="audio", longest_s=30.0),
    "AudioFlamingo3ForConditionalGeneration": MediaFamily("qwen2", 151669, kind="audio"),
    "GlmAsrForConditionalGeneration": MediaFamily("llama", 59260, kind="audio"),
    "VoxtralForConditionalGeneration": MediaFamily("llama", 24, kind="audio"),
    "GraniteSpeechForConditionalGeneration": MediaFamily("granite", 49155, kind="audio", brings_adapter=True),
    "GraniteSpeechPlusForConditionalGeneration": MediaFamily("granite", 49155, kind="audio", brings_adapter=True),
}  # fmt: skip
# A checkpoint's name of a class -> the name in transformers. Such checkpoints have their own code, or are older than
# the class in transformers.
OTHER_NAMES = {
    "KimiK25ForConditionalGeneration": "Kimi_K25ForConditionalGeneration",
    "LightOnOCRForConditionalGeneration": "LightOnOcrForConditionalGeneration",
    "PhiMoEForCausalLM": "PhimoeForCausalLM", "ExaoneMoEForCausalLM": "ExaoneMoeForCausalLM",
    "MPTForCausalLM": "MptForCausalLM", "LLaMAForCausalLM": "LlamaForCausalLM",
}  # fmt: skip
# Prefixes of tensors that belong to tower or projector, not to the decoder.
_TOWERS = tuple(
    at + name
    for at in ("", "model.")
    for name in (
        "vision_tower.",
        "vision_model.",
        "high_res_vision_",
        "merger.",
        "visual.",
        "multi_modal_projector.",
        "mlp_AR.",
        "aligner.",
        "vision_encoder.",
        "vision_projection.",
        "mm_projector.",
        "connector.",
        "image_newline",
        "audio_tower.",
        "embed_vision.",
        "vision_embedder.",
        "embed_audio.",
        "encoder.",
        "projector.",
    )
)


def read_media(name: str, config: Mapping[str, Any]) -> ModelDescription:
    """Return the description of the decoder of class `name`, one of `MEDIA_FAMILIES`. Raises `LoadError` for a decoder
    or a setting that is not built."""
    family = MEDIA_FAMILIES[name]
    text = _text_config(family, config)
    kind, built = text["model_type"], decoders_of(name)
    if kind not in built:
        raise LoadError(f"a decoder of the type {kind!r} is not built yet; {', '.join(built)} are.")
    decoder, defaults = DECODERS[kind], {**TEXT_DEFAULTS[kind], **TEXT_DEFAULTS.get(name, {})}
    reader = FAMILIES[decoder]
    if kind in _EXPERTS:
        assert reader.experts is not None
        reader = replace(reader, experts={**reader.experts, "names": _EXPERTS[kind]})
    reader = replace(reader, refuses=(*reader.refuses, *_REFUSES.get(kind, ())))
    completed = {**text, **overlaid(defaults, text)}
    description = read(decoder, reader, {**completed, **_FIXED.get(kind, {})})
    # Most files have no tie_word_embeddings outside of text_config, and the class's default is wrong for some trained
    # models (Mistral 3); so only a given value counts.
    is_tied = description.tie_word_embeddings
    if (whole := config.get("tie_word_embeddings")) is not None:
        is_tied = bool(whole) or (family.may_tie_in_text and bool(text.get("tie_word_embeddings")))
    if family.crosses:
        description = with_cross_attention(
            replace(description, tie_word_embeddings=is_tied), text, vision_config(config), config.get(NUM_PICTURES, 1)
        )
    if media_token(config, name) >= description.vocab_size:
        raise LoadError(
            f"the placeholder token of media has id {media_token(config, name)}; the decoder's vocabulary ends at "
            f"{description.vocab_size - 1}."
        )
    layers = description.layers
    if family.sections is not None:
        layers = tuple(_with_axes(layer, family, text) for layer in layers)
    sees_ahead = family.sees_ahead
    if family.decoder == "gemma4_unified_text" and text.get("use_bidirectional_attention", "vision") != "vision":
        sees_ahead = ""
    if family.sees_ahead_in_windows:
        sees_ahead = "picture" if text.get("use_bidirectional_attention") == "vision" else ""
        layers = tuple(_seeing_ahead_in_windows(layer) for layer in layers)
    stand_in: int | None = None
    if description.per_layer_embeddings is not None:
        stand_in = int(text.get("pad_token_id") or 0)
    num_media_layers = 0
    if family.stacked_layers:
        num_media_layers = len(vision_config(config).get("deepstack_visual_indexes", family.stacked_layers))
    return replace(
        description,
        architecture=name,
        tie_word_embeddings=is_tied,
        layers=layers,
        takes_media=True,
        num_media_layers=num_media_layers,
        sees_ahead=sees_ahead,
        media_stand_in=stand_in,
        unused=(*description.unused, *_TOWERS),
    )


def vision_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the vision_config of config.json without nulls, which stand for defaults."""
    return _said(config.get("vision_config") or {})


def _said(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if value is not None}


def _has_text_config(config: Mapping[str, Any]) -> bool:
    return config.get("text_config") is not None


def _text_config(family: MediaFamily, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the decoder's configuration. Older files have no text_config; its settings are at the top (Qwen2-VL)."""
    text = dict(config["text_config"]) if _has_text_config(config) else {**config, "model_type": family.decoder}
    if text.get("model_type") is None:
        text["model_type"] = family.decoder
    if family.sees_ahead == "prompt":
        text.pop("use_bidirectional_attention", None)  # the family's `sees_ahead` says this
    for name in ("rope_scaling", "rope_parameters"):
        scaling = text.get(name) or {}
        if "mrope" in (
            scaling.get("rope_type"),
            scaling.get("type"),
        ):  # "mrope" only means three positions: positions are not scaled
            text[name] = {**scaling, "rope_type": "default"}
    return text


def _with_axes(layer: LayerDescription, family: MediaFamily, text: Mapping[str, Any]) -> LayerDescription:
    """Return the layer with three positions for each token, if it has attention. Raises `LoadError` for sections that
    do not fit its heads."""
    attention = layer.attention
    if not isinstance(attention, AttentionDescription):
        return layer
    assert attention.rope is not None and family.sections is not None
    scaling = rope_settings(text)
    sections, num_pairs = tuple(scaling.get("mrope_section") or family.sections), attention.rope.rotary_dim // 2
    if len(sections) != 3 or sum(sections) != num_pairs or min(sections) < 0:
        raise LoadError(f"mrope_section {list(sections)} does not share out the {num_pairs} pairs of a head.")
    if family.interleaves:
        axes = [pair % 3 if pair < 3 * sections[pair % 3] else 0 for pair in range(num_pairs)]
    else:
        axes = [axis for axis, count in enumerate(sections) for _ in range(count)]
    return replace(layer, attention=replace(attention, rope=replace(attention.rope, axes=tuple(axes))))


def _seeing_ahead_in_windows(layer: LayerDescription) -> LayerDescription:
    attention = layer.attention
    assert isinstance(attention, AttentionDescription)
    return replace(layer, attention=replace(attention, sees_ahead=attention.window > 0))


def decoders_of(name: str) -> list[str]:
    """Return the model types of decoders that models of the class `name` may have."""
    family = MEDIA_FAMILIES[name]
    return list(_ANY_FAMILY) if family.decoder in _ANY_FAMILY else [family.decoder, *family.other_decoders]


def media_token(config: Mapping[str, Any], name: str) -> int:
    """Return the token that stands for a row of a picture, or of a sound if the class takes sounds only."""
    family = MEDIA_FAMILIES[name]
    return _token(config, family.kind, family.token)


def video_token(config: Mapping[str, Any], name: str) -> int | None:
    """Return the token that stands for a row of a video; None if class `name` takes no videos."""
    if MEDIA_FAMILIES[name].shares_token:
        return media_token(config, name)
    default = MEDIA_FAMILIES[name].video_token
    return None if default is None else _token(config, "video", default)


def _token(config: Mapping[str, Any], kind: str, default: int) -> int:
    if not _has_text_config(config):  # then the tower's configuration may have the token
        of_tower = config.get("vision_config" if kind == "image" else f"{kind}_config") or {}
        config = {**of_tower, **_said(config)}
    found = [config.get(f"{kind}_token_{name}") for name in ("index", "id")]
    return next((int(token) for token in found if token is not None), default)
