"""A model layer by layer, without its weights: what a configuration reader makes of config.json, and what a model is
built from. An architecture is settings of these; see `octavo.models.families`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeVar

from octavo.kv_cache.groups import LayerCacheSpec
from octavo.layers.altup import PROJECTIONS, UNEMBED, AltUpDescription
from octavo.layers.attention import AttentionDescription
from octavo.layers.cross_attention import CrossAttentionDescription
from octavo.layers.experts import ExpertsDescription
from octavo.layers.feed_forward import FeedForwardDescription
from octavo.layers.mixer import MixerDescription
from octavo.layers.mla import MLADescription
from octavo.layers.norm import NormDescription
from octavo.layers.pooler import PoolingDescription
from octavo.layers.positions import PositionsDescription
from octavo.layers.projection_head import ProjectionHeadDescription
from octavo.layers.reused_layer import ReusedLayerDescription
from octavo.layers.tensor_parallel import WHOLE, Shard
from octavo.layers.token_inputs import TokenInputsDescription

_Mixer = TypeVar("_Mixer")


@dataclass(frozen=True, slots=True)
class LayerDescription:
    """Attention, or a mixer in its place, and feed-forward, one of which may be absent, and the norms around them. A
    norm is there if it has a name: that of the checkpoint's module, after the layer's prefix, or several with "|"
    between, the first of which that the checkpoint has counts. Norms before see the residual stream, norms after what
    is added to it.

    In a parallel layer both get the same residual stream; without a norm of its own the feed-forward also gets the norm
    that attention gets.
    """

    attention: MixerDescription | None
    feed_forward: FeedForwardDescription | ExpertsDescription | None
    norm: NormDescription
    attention_norm: str | None = "input_layernorm"
    attention_post_norm: str | None = None
    feed_forward_norm: str | None = "post_attention_layernorm"
    feed_forward_post_norm: str | None = None
    is_parallel: bool = False
    norms_stream: bool = False  # norms after see the sum instead, and what they return is the residual stream
    keeps_normed: bool = False  # what a norm before returns is the residual stream
    # Of the residual stream as attention, and the feed-forward, are added to it.
    stream_multipliers: tuple[float, float] = (1.0, 1.0)
    parallel_mixer: MixerDescription | None = None  # another mixer that sees what attention does
    reused: ReusedLayerDescription | None = None  # what it adds to the residual stream attention alone sees
    # Of what attention, the mixer beside it and the feed-forward return.
    multipliers: tuple[float, float, float] = (1.0, 1.0, 1.0)
    residual_multiplier: float = 1.0  # of what is added to the residual stream
    # Names of gates, tensors [1]: attention's output is multiplied by tanh(gate[0]), the feed-forward's by
    # tanh(gate[1]). A token that sees no encoder output skips the layer.
    gates: tuple[str, str] | None = None
    stream_scale: str | None = None  # tensor [1] that the residual stream is multiplied with at the end
    deferred_by: int = 0  # so many layers further on what the feed-forward returns is added to the residual stream
    checkpoint_layer: int | None = None  # of the checkpoint's layer, where several of these are one of its

    @property
    def keepers(self) -> tuple[MixerDescription | ReusedLayerDescription, ...]:
        """Its attention or mixers that keep something of a sequence themselves."""
        own = self.attention
        if isinstance(own, AttentionDescription) and own.reads_layer is not None:
            own = None
        return tuple(mixer for mixer in (own, self.parallel_mixer, self.reused) if mixer is not None)


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """Sizes in elements. Names are those of the checkpoint's modules."""

    architecture: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    layers: tuple[LayerDescription, ...]
    norm: NormDescription | None  # the final one
    embedding_multiplier: float = 1.0
    embedding_size: int | None = None  # where it is not the hidden size, and a matrix leads from one to the other
    projects_last: bool = False  # that matrix, which has a bias then, comes after the tables and the norm
    embedding_norm: NormDescription | None = None
    positions: PositionsDescription | None = None  # that are added to the embedding
    token_inputs: TokenInputsDescription | None = None  # of all layers
    altup: AltUpDescription | None = None  # None: the residual stream is one
    token_types: int = 0  # rows of a table that is added to the embedding: 0 of the first text, 1 of the second
    projection_head: ProjectionHeadDescription | None = None  # between the final norm and the output matrix
    pooling: PoolingDescription | None = None  # in the place of the output matrix
    logits_divisor: float = 1.0
    logits_softcap: float = 0.0  # 0 is none
    output_bias: bool = False
    num_input_only_tokens: int = 0  # the last of the vocabulary, which the output matrix of checkpoints has no rows of
    num_unused_layers: int = 0  # in the checkpoint after those of the model: multi-token prediction
    impl: str = "octavo"  # or "transformers": who computes it
    embedding_name: str = "model.embed_tokens"
    embedding_norm_name: str = ""
    embedding_projection_name: str = ""
    token_types_name: str = ""
    layer_prefix: str = "model.layers."  # then the layer's number
    norm_name: str = "model.norm"
    output_name: str = "lm_head"
    takes_media: bool = False  # rows of a tower may stand in the place of embeddings
    num_media_layers: int = 0  # after so many of the first layers further rows of the tower are added
    # Which tokens see later ones, beside themselves and those before: those of a "picture" its own, those of the
    # "prompt" all of it.
    sees_ahead: Literal["", "picture", "prompt"] = ""
    media_stand_in: int | None = None  # the token that all with rows are, where `token_inputs` asks which it is
    unused: tuple[str, ...] = ()  # prefixes of tensors that checkpoints have and the model has no use for
    shard: Shard = WHOLE  # of the output matrix, and of the layers' matrices: `octavo.models.sharding`
    num_precise_layers: int = 0  # so many of the first have inputs of sixteen bits where others have eight
    # Of a stage of several, which layers it computes; the first one embeds, and the last one makes logits.
    own_layers: range | None = None

    @property
    def stage(self) -> range:
        """The layers that are computed here."""
        return range(len(self.layers)) if self.own_layers is None else self.own_layers

    def caches_of(self, layers: range) -> range:
        """Which of `layer_caches` are those of some layers that follow each other."""
        counts = [len(layer.keepers) for layer in self.layers]
        return range(sum(counts[: layers.start]), sum(counts[: layers.stop]))

    @property
    def is_first_stage(self) -> bool:
        return self.stage.start == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage.stop == len(self.layers)

    @property
    def carries_embedding(self) -> bool:
        """Whether layers read the embedding beside the residual stream, so that stages pass it on."""
        return self.token_inputs is not None or any(layer.reused is not None for layer in self.layers)

    @property
    def stage_width(self) -> int:
        """Elements of a row that goes from stage to stage: the residual streams, and the embedding behind them where
        stages pass it on."""
        num_residual_streams = 1 if self.altup is None else self.altup.count
        return self.hidden_size * (num_residual_streams + self.carries_embedding)

    @property
    def other_stages(self) -> tuple[str, ...]:
        """Prefixes of the tensors outside of layers that other stages have."""
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
        """What stands in the place of attention and is of that kind, layer by layer."""
        return [layer.attention for layer in self.layers if isinstance(layer.attention, kind)]

    @property
    def is_bidirectional(self) -> bool:
        """Whether a token's hidden state depends on those after it, so that a text is one step's."""
        return any(attention.bidirectional for attention in self.mixers(AttentionDescription))

    @property
    def has_axes(self) -> bool:
        """Whether a token has a position in time, height and width each."""
        return any(a.rope is not None and a.rope.axes for a in self.mixers(AttentionDescription))

    @property
    def checkpoint_layers(self) -> tuple[int, ...]:
        """Which of the checkpoint's layers each is, or is a part of."""
        return tuple(
            i if layer.checkpoint_layer is None else layer.checkpoint_layer for i, layer in enumerate(self.layers)
        )

    @property
    def num_cross_tokens(self) -> int:
        """Of another network's output that a token attends to at most; 0 is none."""
        return max((cross.num_tokens for cross in self.mixers(CrossAttentionDescription)), default=0)

    @property
    def num_chosen_keys(self) -> int:
        """That a token reads at most, as indexes of layers choose them; 0: it reads all it sees."""
        indexes = [latent.index for latent in self.mixers(MLADescription)]
        return min((index.num_chosen for index in indexes if index is not None), default=0)

    @property
    def layer_caches(self) -> tuple[LayerCacheSpec, ...]:
        """What each attention, or mixer in its place or beside it, keeps of a sequence, layer by layer."""
        return tuple(mixer.cache for layer in self.layers for mixer in layer.keepers)
