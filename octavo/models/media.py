"""Models that see or hear: a tower and a projector, which transformers computes (`octavo.multimodal.tower`), before a
decoder of `octavo.models.families`. Here is what their configurations say of the decoder, one line a family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from octavo.errors import LoadError
from octavo.layers.attention import AttentionDescription
from octavo.layers.experts import stacked
from octavo.models.crossing import NUM_PICTURES, with_cross_attention
from octavo.models.description import LayerDescription, ModelDescription
from octavo.models.families import FAMILIES
from octavo.models.readers import overlaid, read

_QWEN_VL: dict[str, Any] = {
    "vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0, "sliding_window": 4096, "max_window_layers": 80,
}  # fmt: skip
_GLM_ASR: dict[str, Any] = {
    "vocab_size": 59264, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}  # fmt: skip
_VOXTRAL: dict[str, Any] = {
    "vocab_size": 131072, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 30,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "rope_theta": 1e8,
}  # fmt: skip
_GEMMA_4: dict[str, Any] = {
    "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8,
}  # fmt: skip
# The decoder of a `text_config`, by its model_type, and the defaults of its class in transformers 5: checkpoints leave
# out what equals them.
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "max_position_embeddings": 2048,
    }),
    "mistral": ("MistralForCausalLM", {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096,
    }),
    "qwen2": ("Qwen2ForCausalLM", {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 32768,
    }),
    "qwen3": ("Qwen3ForCausalLM", {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768,
    }),
    "granite": ("GraniteForCausalLM", {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "max_position_embeddings": 2048, "embedding_multiplier": 1.0, "logits_scaling": 1.0,
        "residual_multiplier": 1.0, "attention_multiplier": 1.0,
    }),
    "cohere2": ("Cohere2ForCausalLM", {
        "vocab_size": 256000, "hidden_size": 8192, "intermediate_size": 22528, "num_hidden_layers": 40,
        "num_attention_heads": 64, "max_position_embeddings": 8192, "sliding_window": 4096, "logit_scale": 0.0625,
        "layer_norm_eps": 1e-5,
    }),
    "aria_text": ("AriaTextForCausalLM", {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "max_position_embeddings": 2048, "moe_num_experts": 8, "moe_topk": 2,
        "moe_num_shared_experts": 2,
    }),
    "gemma3_text": ("Gemma3ForCausalLM", {
        "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
        "sliding_window": 4096,
    }),
    "qwen2_vl_text": ("Qwen2ForCausalLM", _QWEN_VL),
    "qwen2_5_vl_text": ("Qwen2ForCausalLM", _QWEN_VL),
    "qwen3_vl_text": ("Qwen3ForCausalLM", {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 128000,
        "rope_theta": 500000.0,
    }),
    "qwen3_vl_moe_text": ("Qwen3MoeForCausalLM", {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
        "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 128000,
        "rope_theta": 500000.0, "moe_intermediate_size": 1408, "num_experts_per_tok": 4, "num_local_experts": 60,
        "norm_topk_prob": True,
    }),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", {
        "vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
        "num_attention_heads": 16,
    }),
    "qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM", {
        "vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
    }),
    "gemma": ("GemmaForCausalLM", {  # as PaliGemma has it
        "vocab_size": 257152, "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 18,
        "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "max_position_embeddings": 8192,
    }),
    "gemma2": ("Gemma2ForCausalLM", {
        "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192,
    }),
    "glm4v_text": ("Glm4ForCausalLM", {
        "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40,
        "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": None, "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5, "attention_bias": True,
    }),
    "glm4v_moe_text": ("Glm4MoeForCausalLM", {
        "vocab_size": 151424, "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46,
        "num_attention_heads": 96, "num_key_value_heads": 8, "max_position_embeddings": 65536, "rms_norm_eps": 1e-5,
        "attention_bias": True, "norm_topk_prob": True,
    }),
    "glm_ocr_text": ("Glm4ForCausalLM", {
        "vocab_size": 59392, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": None, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
    }),
    "paddleocr_vl_text": ("LlamaForCausalLM", {
        "vocab_size": 103424, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True,
    }),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {
        "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
        "num_attention_heads": 128, "num_key_value_heads": 128, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
    }),
    "lfm2": ("Lfm2ForCausalLM", {
        "vocab_size": 65536, "hidden_size": 2560, "intermediate_size": 12288, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 128000,
    }),
    "llama4_text": ("Llama4ForCausalLM", {
        "vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192, "num_hidden_layers": 48,
        "num_attention_heads": 40,
    }),
    "phi4_multimodal": ("Phi3ForCausalLM", {
        "vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "original_max_position_embeddings": 4096,
    }),
    "gemma4_text": ("Gemma4ForCausalLM", _GEMMA_4),
    "gemma4_unified_text": ("Gemma4UnifiedForCausalLM", _GEMMA_4),
}  # fmt: skip
DECODERS["mllama_text_model"] = ("LlamaForCausalLM", {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 40,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
})  # fmt: skip
DECODERS["kimi_k2"] = DECODERS["deepseek_v3"]  # as Kimi's own files call it
# Where experts lie otherwise than in the decoder's own checkpoints.
_EXPERTS = {"qwen3_vl_moe_text": (stacked("mlp.experts.gate_up_proj", "mlp.experts.down_proj", is_transposed=True),)}
# What is refused beside what the decoder's own architecture refuses, and what a class takes whatever config.json says.
_REFUSES = {"paddleocr_vl_text": ("use_bias",)}
_FIXED: dict[str, dict[str, Any]] = {
    "glm_ocr_text": {"attention_bias": False}, "mllama_text_model": {"attention_bias": False, "mlp_bias": False},
}  # fmt: skip
# Those that go with any family that does not have one of its own.
_ANY_FAMILY = ("llama", "mistral", "qwen2", "qwen3", "granite", "cohere2", "aria_text")


@dataclass(frozen=True, slots=True)
class MediaFamily:
    """What the configurations of one class leave out when it equals these, and what sets its pictures apart."""

    decoder: str  # the `model_type` of the text_config
    token: int  # which a row stands in the place of
    kind: Literal["image", "audio"] = "image"  # of the media that it takes
    audio_token: int | None = None  # which a row of a sound beside pictures stands in the place of; None: it takes none
    video_token: int | None = None  # which a row of a video stands in the place of; None: it takes none
    shares_token: bool = False  # it takes videos, whose rows stand in the place of the same token as a picture's
    may_tie_in_text: bool = False  # tie_word_embeddings of the text_config counts beside that of the whole
    counts_pictures: bool = False  # a picture that is alone in its prompt is cut up, one among others is not
    # How many pairs of elements a token's position in time, height and width turns (M-RoPE); None: it has one position.
    sections: tuple[int, int, int] | None = None
    interleaves: bool = False  # pairs of the three take turns, until those of height and width are used up
    stacked_layers: tuple[int, ...] = ()  # of the tower, whose rows are added after the decoder's first layers
    sees_ahead: Literal["", "picture", "prompt"] = ""  # of `ModelDescription`
    sees_ahead_in_windows: bool = False  # as a "picture", in layers with a window, if the text_config says so
    frames_prompts: bool = False  # the processor puts marks behind the last picture and at the end of the text
    other_decoders: tuple[str, ...] = ()  # that models of the class may have
    multiplies_rows: bool = True  # where the decoder multiplies embeddings, rows of pictures too
    # By kind, the folder below the checkpoint's with the adapter that a prompt with such a medium takes; of several
    # kinds in one prompt the first that is here.
    adapters: Mapping[str, str] = field(default_factory=dict)
    # Layers of the decoder attend to a picture's rows, which stand in the place of no token: `with_cross_attention`.
    crosses: bool = False
    longest_s: float | None = None  # what its tower hears of a sound; None: all that its processor takes
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of its text_config, before those of the decoder's class

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
    "GlmAsrForConditionalGeneration": MediaFamily("llama", 59260, kind="audio", defaults=_GLM_ASR),
    "VoxtralForConditionalGeneration": MediaFamily("llama", 24, kind="audio", defaults=_VOXTRAL),
    "GraniteSpeechForConditionalGeneration": MediaFamily("granite", 49155, kind="audio", adapters={"audio": "."}),
    "GraniteSpeechPlusForConditionalGeneration": MediaFamily("granite", 49155, kind="audio", adapters={"audio": "."}),
    "Phi4MultimodalForCausalLM": MediaFamily(
        "phi4_multimodal", 200010, audio_token=200011, adapters={"image": "vision-lora", "audio": "speech-lora"}
    ),
}  # fmt: skip
# Checkpoints' own names of classes that transformers has by others.
OTHER_NAMES = {"KimiK25ForConditionalGeneration": "Kimi_K25ForConditionalGeneration"}
# Prefixes of what is not the decoder's.
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
        "embed_tokens_extend.",
    )
)


def read_media(name: str, config: Mapping[str, Any]) -> ModelDescription:
    """The decoder of the class `name`, one of `MEDIA_FAMILIES`. Raises `LoadError` for one that is not built."""
    family = MEDIA_FAMILIES[name]
    text = _text_config(family, config)
    kind, built = text["model_type"], decoders_of(name)
    if kind not in built:
        raise LoadError(f"a decoder of the type {kind!r} is not built yet; {', '.join(built)} are.")
    decoder, defaults = DECODERS[kind]
    reader = FAMILIES[decoder]
    if kind in _EXPERTS:
        assert reader.experts is not None
        reader = replace(reader, experts={**reader.experts, "names": _EXPERTS[kind]})
    reader = replace(reader, refuses=(*reader.refuses, *_REFUSES.get(kind, ())))
    completed = {**text, **overlaid({**defaults, **family.defaults}, text)}
    description = read(decoder, reader, {**completed, **_FIXED.get(kind, {})})
    # Most files do not say it of the whole; the class's own default there is not what was trained (Mistral 3).
    is_tied = description.tie_word_embeddings
    if (whole := config.get("tie_word_embeddings")) is not None:
        is_tied = bool(whole) or (family.may_tie_in_text and bool(text.get("tie_word_embeddings")))
    if family.crosses:
        description = with_cross_attention(
            replace(description, tie_word_embeddings=is_tied), text, vision_config(config), config.get(NUM_PICTURES, 1)
        )
    if media_token(config, name) >= description.vocab_size:
        raise LoadError(
            f"the token of media is {media_token(config, name)}, and the decoder's are 0 to "
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
    if description.token_inputs is not None:
        stand_in = int(text.get("pad_token_id") or 0)
    num_media_layers = 0
    if family.stacked_layers:
        num_media_layers = len(vision_config(config).get("deepstack_visual_indexes", family.stacked_layers))
    return replace(
        description,
        architecture=name,
        tie_word_embeddings=is_tied,
        layers=layers,
        num_unused_layers=description.num_unused_layers or int(text.get("num_nextn_predict_layers") or 0),
        takes_media=True,
        num_media_layers=num_media_layers,
        sees_ahead=sees_ahead,
        media_stand_in=stand_in,
        unused=(*description.unused, *_TOWERS),
    )


def vision_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json says of what sees; a null says nothing."""
    return _said(config.get("vision_config") or {})


def _said(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if value is not None}


def _has_text_config(config: Mapping[str, Any]) -> bool:
    return config.get("text_config") is not None


def _text_config(family: MediaFamily, config: Mapping[str, Any]) -> dict[str, Any]:
    """That of the decoder, which earlier files have beside everything else (Qwen2-VL)."""
    text = dict(config["text_config"]) if _has_text_config(config) else {**config, "model_type": family.decoder}
    if text.get("model_type") is None:
        text["model_type"] = family.decoder
    if family.sees_ahead == "prompt":
        text.pop("use_bidirectional_attention", None)  # which is that
    for name in ("rope_scaling", "rope_parameters"):
        scaling = text.get(name) or {}
        if "mrope" in (scaling.get("rope_type"), scaling.get("type")):  # what else turns is not stretched
            text[name] = {**scaling, "rope_type": "default"}
    return text


def _with_axes(layer: LayerDescription, family: MediaFamily, text: Mapping[str, Any]) -> LayerDescription:
    """A layer whose tokens have three positions, if it looks at positions. Raises `LoadError` for sections that do not
    fit its heads."""
    attention = layer.attention
    if not isinstance(attention, AttentionDescription):
        return layer
    assert attention.rope is not None and family.sections is not None
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
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
    """The types of decoders that models of the class `name` may have."""
    family = MEDIA_FAMILIES[name]
    return list(_ANY_FAMILY) if family.decoder in _ANY_FAMILY else [family.decoder, *family.other_decoders]


def media_token(config: Mapping[str, Any], name: str) -> int:
    """The token that stands for a row of a picture or a sound."""
    family = MEDIA_FAMILIES[name]
    return _token(config, family.kind, family.token)


def audio_token(config: Mapping[str, Any], name: str) -> int | None:
    """The token that stands for a row of a sound beside pictures; None where models of the class `name` take none."""
    default = MEDIA_FAMILIES[name].audio_token
    return None if default is None else _token(config, "audio", default)


def video_token(config: Mapping[str, Any], name: str) -> int | None:
    """The token that stands for a row of a video; None where models of the class `name` take none."""
    if MEDIA_FAMILIES[name].shares_token:
        return media_token(config, name)
    default = MEDIA_FAMILIES[name].video_token
    return None if default is None else _token(config, "video", default)


def media_adapters(config: Mapping[str, Any], name: str) -> Mapping[str, str]:
    """By kind, where the adapters lie that prompts take by their media: of files that have some."""
    return MEDIA_FAMILIES[name].adapters if config.get("has_lora_adapter", True) else {}


def _token(config: Mapping[str, Any], kind: str, default: int) -> int:
    if not _has_text_config(config):  # the settings of the tower may have it then
        of_tower = config.get("vision_config" if kind == "image" else f"{kind}_config") or {}
        config = {**of_tower, **_said(config)}
    found = [config.get(f"{kind}_token_{name}") for name in ("index", "id")]
    return next((int(token) for token in found if token is not None), default)
