"""The cross-attention layers of Llama 3.2 Vision, which attend to a picture and stand between a language model's
layers. `octavo.models.multimodal_models` reads the rest of the configuration.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.errors import LoadError
from octavo.layers.attention import AttentionDescription
from octavo.layers.cross_attention import CrossAttentionDescription
from octavo.models.description import LayerDescription, ModelDescription

# The defaults of the classes in transformers 5: checkpoints leave out settings that equal them.
_LAYERS = (3, 8, 13, 18, 23, 28, 33, 38)
_VISION: dict[str, Any] = {"image_size": 448, "patch_size": 14, "max_num_tiles": 4}
NUM_PICTURES = "max_pictures_in_a_row"  # a setting of Octavo's own: the most pictures that a token sees
_NUM_MORE_TOKENS = 8  # tokens with an embedding but no row in the output matrix; one of them stands for a picture


def with_cross_attention(
    description: ModelDescription, text: Mapping[str, Any], vision: Mapping[str, Any], num_pictures: int = 1
) -> ModelDescription:
    """Return the decoder with its cross-attention layers, by its `text_config` and the tower's `vision_config`.

    A token sees `num_pictures` pictures at most. Raises `LoadError` for settings that are not built."""
    if description.tie_word_embeddings:
        raise LoadError("an output matrix that is the embedding (tie_word_embeddings = True) is not built yet.")
    num_tokens = tile_rows(vision) * max_tiles(vision) * num_pictures
    chosen = text.get("cross_attention_layers")
    chosen = _LAYERS if chosen is None else chosen
    return replace(
        description,
        vocab_size=description.vocab_size + _NUM_MORE_TOKENS,
        num_input_only_tokens=_NUM_MORE_TOKENS,
        layers=tuple(
            _with_cross_attention(layer, num_tokens) if i in chosen else layer
            for i, layer in enumerate(description.layers)
        ),
    )


def tile_rows(vision: Mapping[str, Any]) -> int:
    """Return the number of rows of one tile of a picture: a row for each patch, and one for the class token."""
    sizes = _VISION | dict(vision)
    return int((sizes["image_size"] // sizes["patch_size"]) ** 2 + 1)


def max_tiles(vision: Mapping[str, Any]) -> int:
    return int((_VISION | dict(vision))["max_num_tiles"])


def _with_cross_attention(layer: LayerDescription, num_tokens: int) -> LayerDescription:
    own = layer.attention
    assert isinstance(own, AttentionDescription)
    cross = CrossAttentionDescription(
        own.num_heads, own.head_size, own.scale, num_tokens, own.num_kv_heads, has_biases=False, qk_norm=layer.norm,
        has_cross_mask=True, query_name="cross_attn.q_proj", key_name="cross_attn.k_proj",
        value_name="cross_attn.v_proj", output_name="cross_attn.o_proj",
        qk_norm_names=("cross_attn.q_norm", "cross_attn.k_norm"),
    )  # fmt: skip
    return replace(layer, attention=cross, tanh_gates=("cross_attn_attn_gate", "cross_attn_mlp_gate"))
