"""Models that see: a tower and a projector, which transformers computes (`octavo.multimodal.tower`), before a decoder
of `octavo.models.families`. Here is what their configurations say of the decoder, one line a family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from octavo.errors import LoadError
from octavo.models.description import ModelDescription
from octavo.models.families import FAMILIES
from octavo.models.readers import read

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
    "gemma4_text": ("Gemma4ForCausalLM", {
        "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
        "num_attention_heads": 8,
    }),
}  # fmt: skip
# Of the decoders of families that see, only Granite multiplies its embeddings, and then the rows of pictures too.


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """What the configurations of one class leave out when it equals these, and what sets its pictures apart."""

    decoder: str  # the `model_type` of the text_config
    image_token: int  # the token that a row stands in the place of
    may_tie_in_text: bool = False  # tie_word_embeddings of the text_config counts beside that of the whole
    sees: bool = True  # otherwise its pictures are `NOT_BUILT`, and it is a language model
    counts_pictures: bool = False  # a picture that is alone in its prompt is cut up, one among others is not


VISION_FAMILIES: dict[str, VisionFamily] = {
    "LlavaForConditionalGeneration": VisionFamily("llama", 32000, may_tie_in_text=True),  # Pixtral too
    "LlavaNextForConditionalGeneration": VisionFamily("llama", 32000),
    "LlavaOnevisionForConditionalGeneration": VisionFamily("qwen2", 151646, may_tie_in_text=True, counts_pictures=True),
    "VipLlavaForConditionalGeneration": VisionFamily("llama", 32000),
    "Mistral3ForConditionalGeneration": VisionFamily("mistral", 10),
    "Idefics3ForConditionalGeneration": VisionFamily("llama", 128257),
    "SmolVLMForConditionalGeneration": VisionFamily("llama", 128257),
    "InternVLForConditionalGeneration": VisionFamily("qwen2", 151667),
    "AyaVisionForConditionalGeneration": VisionFamily("cohere2", 255036),
    "AriaForConditionalGeneration": VisionFamily("aria_text", 9),
    "Gemma3ForConditionalGeneration": VisionFamily("gemma3_text", 262144, sees=False),
    "Gemma4ForConditionalGeneration": VisionFamily("gemma4_text", 258880, sees=False),
}
_THREE_POSITIONS = "tokens have three positions (M-RoPE)"
# Classes whose pictures are not built, and what is special about them.
NOT_BUILT = {
    "Gemma3ForConditionalGeneration": "tokens of a picture attend to later ones of it",
    "Gemma4ForConditionalGeneration": "tokens of a picture attend to later ones of it",
    "PaliGemmaForConditionalGeneration": "tokens of the prompt attend to later ones of it",
    "Qwen2VLForConditionalGeneration": _THREE_POSITIONS,
    "Qwen2_5_VLForConditionalGeneration": _THREE_POSITIONS,
    "Qwen3VLForConditionalGeneration": _THREE_POSITIONS,
}
# Prefixes of what is not the decoder's.
_TOWERS = tuple(
    at + name
    for at in ("", "model.")
    for name in (
        "vision_tower.",
        "vision_model.",
        "multi_modal_projector.",
        "connector.",
        "image_newline",
        "audio_tower.",
        "embed_vision.",
        "embed_audio.",
    )
)


def read_vision(name: str, config: Mapping[str, Any]) -> ModelDescription:
    """The decoder of the class `name`, one of `VISION_FAMILIES`. Raises `LoadError` for one that is not built."""
    family = VISION_FAMILIES[name]
    text = dict(config["text_config"])
    kind = text.get("model_type", family.decoder)
    built = decoders_of(name)
    if kind not in built:
        raise LoadError(f"a decoder of the type {kind!r} is not built yet; {', '.join(built)} are.")
    decoder, defaults = DECODERS[kind]
    description = read(decoder, FAMILIES[decoder], defaults | text)
    if family.sees and image_token(config, name) >= description.vocab_size:
        raise LoadError(
            f"the token of pictures is {image_token(config, name)}, and the decoder's are 0 to "
            f"{description.vocab_size - 1}."
        )
    # Most files do not say it of the whole; the class's own default there is not what was trained (Mistral 3).
    is_tied = description.tie_word_embeddings
    if (whole := config.get("tie_word_embeddings")) is not None:
        is_tied = bool(whole) or (family.may_tie_in_text and bool(text.get("tie_word_embeddings")))
    return replace(
        description,
        architecture=name,
        tie_word_embeddings=is_tied,
        takes_media=family.sees,
        unused=(*description.unused, *_TOWERS),
    )


def decoders_of(name: str) -> list[str]:
    """The types of decoders that models of the class `name` may have."""
    family = VISION_FAMILIES[name]
    blind = {other.decoder for other in VISION_FAMILIES.values() if not other.sees}
    return [kind for kind in DECODERS if kind not in blind] if family.sees else [family.decoder]


def image_token(config: Mapping[str, Any], name: str) -> int:
    """The token that stands for a row of a picture."""
    found = config.get("image_token_index", config.get("image_token_id"))
    return VISION_FAMILIES[name].image_token if found is None else int(found)
