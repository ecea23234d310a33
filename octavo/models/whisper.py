"""Configuration reader of Whisper, a model that transcribes speech. This module describes the decoder, which attends to
the encoder's output; transformers computes the encoder (`octavo.multimodal.speech_encoder`).
"""

from collections.abc import Mapping
from typing import Any

from octavo.errors import LoadError
from octavo.layers.attention import AttentionDescription
from octavo.layers.cross_attention import CrossAttentionDescription
from octavo.layers.feed_forward import FeedForwardDescription
from octavo.layers.norm import NormDescription
from octavo.layers.positions import PositionsDescription
from octavo.models.config_reader import activation_of
from octavo.models.description import LayerDescription, ModelDescription

WHISPER = "WhisperForConditionalGeneration"
# The defaults of the class in transformers 5: checkpoints leave out settings that equal them.
_WHISPER_DEFAULTS: dict[str, Any] = {
    "vocab_size": 51865, "d_model": 384, "decoder_layers": 4, "decoder_attention_heads": 6, "decoder_ffn_dim": 1536,
    "activation_function": "gelu", "max_source_positions": 1500, "max_target_positions": 448, "scale_embedding": False,
    "tie_word_embeddings": True,
}  # fmt: skip
_NORM = NormDescription(1e-5, "layer", bias=True)


def read_whisper(given: Mapping[str, Any]) -> ModelDescription:
    """Return the description of Whisper's decoder. Raises `LoadError` for a setting that is not built."""
    config = _WHISPER_DEFAULTS | dict(given)
    size, num_heads = config["d_model"], config["decoder_attention_heads"]
    if size % num_heads:
        raise LoadError(f"d_model {size} does not divide into {num_heads} heads.")
    if not config["tie_word_embeddings"]:
        raise LoadError("an output matrix of its own (tie_word_embeddings = False) is not built yet.")
    head_size = size // num_heads
    attention = AttentionDescription(
        num_heads, num_heads, head_size, head_size**-0.5, rope=None, qkv_bias=True, keys_have_bias=False,
        output_bias=True, output_name="self_attn.out_proj",
    )  # fmt: skip
    cross = CrossAttentionDescription(num_heads, head_size, head_size**-0.5, config["max_source_positions"], num_heads)
    feed_forward = FeedForwardDescription(
        config["decoder_ffn_dim"], activation_of(config["activation_function"]), gated=False, bias=True,
        up_names=("fc1",), down_name="fc2",
    )  # fmt: skip
    layers: list[LayerDescription] = []
    for checkpoint_layer in range(config["decoder_layers"]):
        layers += [
            LayerDescription(attention, None, _NORM, "self_attn_layer_norm", checkpoint_layer=checkpoint_layer),
            LayerDescription(
                cross, feed_forward, _NORM, "encoder_attn_layer_norm", feed_forward_norm="final_layer_norm",
                checkpoint_layer=checkpoint_layer,
            ),
        ]  # fmt: skip
    return ModelDescription(
        WHISPER,
        config["vocab_size"],
        size,
        config["max_target_positions"],
        tie_word_embeddings=True,
        layers=tuple(layers),
        norm=_NORM,
        embedding_multiplier=size**0.5 if config["scale_embedding"] else 1.0,
        positions=PositionsDescription("model.decoder.embed_positions.weight", config["max_target_positions"]),
        embedding_name="model.decoder.embed_tokens",
        layer_prefix="model.decoder.layers.",
        norm_name="model.decoder.layer_norm",
        output_name="proj_out",
        unused=("model.encoder.", "proj_out."),
    )
