"""The description of a model, layer by layer, without its weights. Configuration readers make it from config.json;
`octavo.models.decoder` builds the model from it.

An architecture is a set of settings of these classes: see `octavo.models.families`.
"""

from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, NamedTuple, TypeVar

from octavo.errors import LoadError
from octavo.kv_cache.groups import LayerCacheSpec
from octavo.layers.altup import PROJECTIONS, UNEMBED, AltUpDescription
from octavo.layers.attention import AttentionDescription
from octavo.layers.cross_attention import CrossAttentionDescription
from octavo.layers.experts import ExpertsDescription
from octavo.layers.feed_forward import FeedForwardDescription
from octavo.layers.mixer import MixerDescription
from octavo.layers.mla import MLADescription
from octavo.layers.norm import NormDescription
from octavo.layers.per_layer_embeddings import PerLayerEmbeddingsDescription
from octavo.layers.pooler import PoolingDescription
from octavo.layers.positions import PositionsDescription
from octavo.layers.projection_head import ProjectionHeadDescription
from octavo.layers.reused_layer import ReusedLayerDescription
from octavo.layers.tensor_parallel import WHOLE, Shard

_Mixer = TypeVar("_Mixer")


# The types of fields with numbers, by their annotations, which are texts in some modules.
_NUMBERS: dict[Any, Any] = {int: int, int | None: int | None, float: int | float, float | None: int | float | None}
_NUMBERS |= {"int": int, "int | None": int | None, "float": int | float, "float | None": int | float | None}
_LARGEST = (1 << 31) - 1


def check_numbers(description: Any) -> None:
    """Raise `LoadError` if a description, or one inside it, has something else than a number in a field for numbers.
    Configurations may have a list or a text there."""
    for field in fields(description):
        value, kind = getattr(description, field.name), _NUMBERS.get(field.type)
        if kind is not None and not (isinstance(value, kind) and (value is None or abs(value) <= _LARGEST)):
            name = f"{type(description).__name__}.{field.name}"
            raise LoadError(f"the model's configuration makes {name} {str(value)[:60]}, which it cannot be.")
        before = None
        for one in value if isinstance(value, tuple) else (value,):
            if is_dataclass(one) and not isinstance(one, type) and one != before:  # most layers equal the layer before
                check_numbers(one)
            before = one


class OutputScales(NamedTuple):
    """The factors of a layer's outputs, before they are added to the residual stream."""

    attention: float = 1.0
    second_mixer: float = 1.0
    feed_forward: float = 1.0


_UNSCALED = OutputScales()


@dataclass(frozen=True, slots=True)
class LayerDescription:
    """A layer: attention (or another mixer) and feed-forward, one of which may be absent, and the norms around them.
    `octavo.models.block` lists the order of its work.

    A norm exists if it has a name. The name is the checkpoint's module without the layer's prefix; several names are
    separated by "|", and the first that the checkpoint has is used. Norms before a part read the residual stream; post
    norms read the part's output before it is added to the stream.

    With `parallel_residual` both parts read the same residual stream. A feed-forward without a norm of its own reads
    the output of attention's norm.
    """

    attention: MixerDescription | None
    feed_forward: FeedForwardDescription | ExpertsDescription | None
    norm: NormDescription
    attention_norm: str | None = "input_layernorm"
    attention_post_norm: str | None = None
    feed_forward_norm: str | None = "post_attention_layernorm"
    feed_forward_post_norm: str | None = None
    parallel_residual: bool = False
    post_norm_residual: bool = False  # post norms read the residual stream after a part's output is added to it
    residual_from_norm: bool = False  # the output of a norm before a part becomes the residual stream
    # Factors of the residual stream before attention's output, and before the feed-forward's output, is added. The
    # first also scales a second mixer's output.
    residual_scales: tuple[float, float] = (1.0, 1.0)
    second_mixer: MixerDescription | None = None  # it has attention's input and post norm
    reused: ReusedLayerDescription | None = None  # its output is added to attention's input, not to the residual stream
    output_scales: OutputScales = _UNSCALED
    residual_multiplier: float = 1.0  # factor of every output that is added to the residual stream
    # Names of gates, tensors [1]: attention's output is multiplied by tanh(gate[0]), the feed-forward's by
    # tanh(gate[1]). A token that sees no encoder output skips the layer.
    tanh_gates: tuple[str, str] | None = None
    residual_scale_name: str | None = None  # a tensor [1], the factor of the residual stream after the layer
    # The feed-forward's output is added this many layers later, in the same pipeline stage (`octavo.models.sharding`).
    deferred_by: int = 0
    checkpoint_layer: int | None = None  # index of the checkpoint's layer, if several descriptions make up one layer

    def __post_init__(self) -> None:
        if self.deferred_by:
            scale = self.output_scales.feed_forward * self.residual_multiplier
            assert self.feed_forward_post_norm is None and scale == 1.0, "a deferred output is not normed or scaled"

    @property
    def cached_mixers(self) -> tuple[MixerDescription | ReusedLayerDescription, ...]:
        """Return the layer's mixers that have a cache of their own."""
        own = self.attention
        if isinstance(own, AttentionDescription) and own.reads_layer is not None:
            own = None
        return tuple(mixer for mixer in (own, self.second_mixer, self.reused) if mixer is not None)


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """A model: its sizes (in elements), its layers, and the names of the checkpoint's modules."""

    architecture: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    layers: tuple[LayerDescription, ...]
    norm: NormDescription | None  # the final one
    embedding_multiplier: float = 1.0
    embedding_size: int | None = None  # if it is not the hidden size; a matrix projects the embedding to that size
    projects_after_norm: bool = False  # this matrix has a bias, and comes after positions, token types and norm
    embedding_norm: NormDescription | None = None
    positions: PositionsDescription | None = None  # added to the embedding
    per_layer_embeddings: PerLayerEmbeddingsDescription | None = None  # a second embedding, with a part for each layer
    altup: AltUpDescription | None = None  # several residual streams; None: one
    num_token_types: int = 0  # rows of a table added to the embedding: 0 for the first text of a pair, 1 for the second
    projection_head: ProjectionHeadDescription | None = None  # between the final norm and the output matrix
    pooling: PoolingDescription | None = None  # instead of the output matrix
    logits_divisor: float = 1.0
    logits_softcap: float = 0.0  # 0: no soft cap
    output_bias: bool = False
    num_input_only_tokens: int = 0  # the last tokens of the vocabulary, without rows in the output matrix
    num_unused_layers: int = 0  # layers of multi-token prediction, in the checkpoint after the model's layers
    impl: str = "octavo"  # the code that computes the model; or "transformers"
    embedding_name: str = "model.embed_tokens"
    embedding_norm_name: str = ""
    embedding_projection_name: str = ""
    token_types_name: str = ""
    layer_prefix: str = "model.layers."  # followed by the layer's number
    norm_name: str = "model.norm"
    output_name: str = "lm_head"
    takes_media: bool = False  # rows of a tower may replace embeddings
    num_media_layers: int = 0  # number of first layers after which further rows of the tower are added
    # Which tokens also see later tokens: "picture": a picture's tokens see the whole picture; "prompt": a prompt's
    # tokens see the whole prompt.
    sees_ahead: Literal["", "picture", "prompt"] = ""
    media_stand_in: int | None = None  # the token that `per_layer_embeddings` reads instead of tokens with media rows
    unused: tuple[str, ...] = ()  # prefixes of tensors that the model does not use
    shard: Shard = WHOLE  # this worker's part of the layers and of the output matrix; see `octavo.models.sharding`
    num_precise_layers: int = 0  # number of first layers whose inputs are quantized to 16 bits instead of 8
    # The layers of this pipeline stage; None: all layers. The first stage embeds, the last stage makes logits.
    own_layers: range | None = None

    @property
    def stage(self) -> range:
        return range(len(self.layers)) if self.own_layers is None else self.own_layers

    def cache_indices(self, layers: range) -> range:
        """Return the indices of the entries of `layer_caches` that belong to these consecutive layers."""
        counts = [len(layer.cached_mixers) for layer in self.layers]
        return range(sum(counts[: layers.start]), sum(counts[: layers.stop]))

    @property
    def is_first_stage(self) -> bool:
        return self.stage.start == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage.stop == len(self.layers)

    @property
    def makes_logits(self) -> bool:
        return self.pooling is None and self.is_last_stage

    @property
    def output_bias_name(self) -> str | bool:
        """Return the name of the output matrix's bias, or False if it has none."""
        return f"{self.output_name}.bias" if self.output_bias and self.pooling is None else False

    @property
    def carries_embedding(self) -> bool:
        """Return whether layers read the embedding, so that stages must pass it on."""
        return self.per_layer_embeddings is not None or any(layer.reused is not None for layer in self.layers)

    @property
    def stage_width(self) -> int:
        """Return the number of elements of a row that a stage sends to the next: the residual streams, then the
        embedding if layers read it."""
        num_residual_streams = 1 if self.altup is None else self.altup.count
        return self.hidden_size * (num_residual_streams + self.carries_embedding)

    @property
    def other_stages(self) -> tuple[str, ...]:
        """Return the prefixes of tensors outside of layers that only other stages use."""
        start = [self.embedding_norm_name, self.embedding_projection_name, self.token_types_name]
        if self.positions is not None and self.positions.name is not None:
            start.append(self.positions.name.removesuffix(".weight"))
        if not (self.is_last_stage and self.tie_word_embeddings and self.pooling is None):
            start.append(self.embedding_name)
        if self.altup is not None:
            start.append(PROJECTIONS)
        others = [] if self.is_first_stage else start
        if not self.is_last_stage:
            others += [] if self.altup is None else [UNEMBED]
            others += [self.norm_name, self.output_name]
            heads = [
                *(() if self.projection_head is None else (self.projection_head,)),
                *(() if self.pooling is None else self.pooling.head),
            ]
            others += [name for projection_head in heads for name in (projection_head.name, projection_head.norm_name)]
        return tuple(f"{name}." for name in others if name)

    def mixers(self, kind: type[_Mixer]) -> list[_Mixer]:
        """Return the layers' mixers of this kind, in order."""
        return [layer.attention for layer in self.layers if isinstance(layer.attention, kind)]

    @property
    def is_bidirectional(self) -> bool:
        """Return whether hidden states depend on later tokens, so that a text must be computed in one step."""
        return any(attention.bidirectional for attention in self.mixers(AttentionDescription))

    @property
    def has_axes(self) -> bool:
        """Return whether tokens have three positions: time, height and width."""
        return any(a.rope is not None and a.rope.axes for a in self.mixers(AttentionDescription))

    @property
    def checkpoint_layers(self) -> tuple[int, ...]:
        """Return, for each layer, the index of its layer in the checkpoint."""
        return tuple(
            i if layer.checkpoint_layer is None else layer.checkpoint_layer for i, layer in enumerate(self.layers)
        )

    @property
    def num_cross_tokens(self) -> int:
        """Return the most rows of an encoder's output that a token attends to; 0 without cross attention."""
        return max((cross.num_tokens for cross in self.mixers(CrossAttentionDescription)), default=0)

    @property
    def num_chosen_keys(self) -> int:
        """Return the most keys that a token reads with sparse attention; 0: it reads all keys."""
        indexes = [latent.index for latent in self.mixers(MLADescription)]
        return min((index.num_chosen for index in indexes if index is not None), default=0)

    @property
    def layer_caches(self) -> tuple[LayerCacheSpec, ...]:
        """Return the cache of each mixer that has one, layer by layer."""
        return tuple(mixer.cache for layer in self.layers for mixer in layer.cached_mixers)
