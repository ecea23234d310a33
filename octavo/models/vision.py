"""Models that see: a tower and a projector, which transformers computes (`octavo.multimodal.tower`), before a decoder
of `octavo.models.families`. Here is what their configurations say of the decoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
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
}  # fmt: skip
_TOWERS = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
_DEFAULT_IMAGE_TOKEN = 32000  # of transformers' LlavaConfig


def read_llava(config: Mapping[str, Any]) -> ModelDescription:
    """`LlavaForConditionalGeneration` (Liu et al. 2023). Raises `LoadError` for a decoder that is not built."""
    text = dict(config["text_config"])
    kind = text.get("model_type", "llama")
    if kind not in DECODERS:
        raise LoadError(f"a decoder of the type {kind!r} is not built yet; {', '.join(DECODERS)} are.")
    name, defaults = DECODERS[kind]
    description = read(name, FAMILIES[name], defaults | text)
    if image_token(config) >= description.vocab_size:
        raise LoadError(
            f"the token of pictures is {image_token(config)}, and the decoder's are 0 to {description.vocab_size - 1}."
        )
    return replace(
        description,
        architecture="LlavaForConditionalGeneration",
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        takes_media=True,
        unused=(*description.unused, *_TOWERS),
    )


def image_token(config: Mapping[str, Any]) -> int:
    """The token that stands for a picture."""
    found = config.get("image_token_index", config.get("image_token_id"))
    return _DEFAULT_IMAGE_TOKEN if found is None else int(found)
