"""A model layer by layer, without its weights: made from config.json by a configuration reader; models are built from
it.

An architecture is settings of these classes: see `octavo.models.families`.
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
    """Attention (or another mixer) and feed-forward, one of which may be absent, and the norms around them.

    A norm exists if it has a name: the checkpoint's module, after the layer's prefix; of several with "|" between them,
    the first that the checkpoint has. Norms before a part read the residual stream; post norms read what is added to
    it.

    In a parallel layer both parts read the same residual stream; without a norm of its own the feed-forward reads
    attention's.
    """

    attention: MixerDescription | None
    feed_forward: FeedForwardDescription | ExpertsDescription | None
    norm: NormDescription
    attention_norm: str | None = "input_layernorm"
    attention_post_norm: str | None = None
    feed_forward_norm: str | None = "post_attention_layernorm"
    feed_forward_post_norm: str | None = None
    is_parallel: bool = False
    norms_stream: bool = False  # post norms read the sum instead, and return the residual stream
    keeps_normed: bool = False  # what a norm before a part returns is the residual stream
    # Factors of the residual stream where attention, and the feed-forward, are added to it.
    stream_multipliers: tuple[float, float] = (1.0, 1.0)
    parallel_mixer: MixerDescription | None = None  # a second mixer with attention's input
    reused: ReusedLayerDescription | None = None  # only attention reads what it adds to the residual stream
    # Factors of the outputs of attention, parallel mixer and feed-forward.
    multipliers: tuple[float, float, float] = (1.0, 1.0, 1.0)
    residual_multiplier: float = 1.0  # factor of all that is added to the residual stream
    # Names of gates, tensors [1]: attention's output is multiplied by tanh(gate[0]), the feed-forward's by
    # tanh(gate[1]). A token that sees no encoder output skips the layer.
    gates: tuple[str, str] | None = None
    stream_scale: str | None = None  # name of a tensor [1], the residual stream's factor at the end
    deferred_by: int = 0  # the feed-forward's output is added so many layers later
    checkpoint_layer: int | None = None  # if several of these are one layer of the checkpoint: its index

    @property
    def keepers(self) -> tuple[MixerDescription | ReusedLayerDescription, ...]:
        """Its mixers with a cache of their own."""
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
    embedding_size: int | None = None  # if it is not the hidden size: a matrix projects it
    projects_last: bool = False  # that matrix has a bias, and comes after positions, token types and norm
    embedding_norm: NormDescription | None = None
    positions: PositionsDescription | None = None  # added to the embedding
    token_inputs: TokenInputsDescription | None = None  # that all layers read
    altup: AltUpDescription | None = None  # None: there is one residual stream
    token_types: int = 0  # rows of a table added to the embedding: 0 for the first text of a pair, 1 for the second
    projection_head: ProjectionHeadDescription | None = None  # between the final norm and the output matrix
    pooling: PoolingDescription | None = None  # instead of the output matrix
    logits_divisor: float = 1.0
    logits_softcap: float = 0.0  # 0 is none
    output_bias: bool = False
    num_input_only_tokens: int = 0  # the last tokens of the vocabulary, without rows in the output matrix
    num_unused_layers: int = 0  # in the checkpoint after those of the model: multi-token prediction
    impl: str = "octavo"  # or "transformers": the code that computes it
    embedding_name: str = "model.embed_tokens"
    embedding_norm_name: str = ""
    embedding_projection_name: str = ""
    token_types_name: str = ""
    layer_prefix: str = "model.layers."  # then the layer's number
    norm_name: str = "model.norm"
    output_name: str = "lm_head"
    takes_media: bool = False  # rows of a tower may replace embeddings
    num_media_layers: int = 0  # so many of the first layers add further rows of the tower
    # Which tokens also see later ones: those of a "picture" its tokens, those of the "prompt" all of it.
    sees_ahead: Literal["", "picture", "prompt"] = ""
    media_stand_in: int | None = None  # the token that `token_inputs` reads for tokens with media rows
    unused: tuple[str, ...] = ()  # prefixes of tensors that the model does not use
    shard: Shard = WHOLE  # of the output matrix and of the layers': `octavo.models.sharding`
    num_precise_layers: int = 0  # so many first layers have 16-bit inputs where others have 8-bit ones
    # The layers of this pipeline stage; None: all. The first stage embeds, the last one makes logits.
    own_layers: range | None = None

    @property
    def stage(self) -> range:
        """The layers of this stage."""
        return range(len(self.layers)) if self.own_layers is None else self.own_layers

    def caches_of(self, layers: range) -> range:
        """Return the indices in `layer_caches` of consecutive layers."""
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
        """Whether layers read the embedding too, so that stages pass it on."""
        return self.token_inputs is not None or any(layer.reused is not None for layer in self.layers)

    @property
    def stage_width(self) -> int:
        """Elements of a row that a stage sends to the next: the residual streams, then the embedding if layers read
        it."""
        num_residual_streams = 1 if self.altup is None else self.altup.count
        return self.hidden_size * (num_residual_streams + self.carries_embedding)

    @property
    def other_stages(self) -> tuple[str, ...]:
        """Prefixes of other stages' tensors outside of layers."""
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
        """Return the layers' mixers of a kind, in order."""
        return [layer.attention for layer in self.layers if isinstance(layer.attention, kind)]

    @property
    def is_bidirectional(self) -> bool:
        """Whether hidden states depend on later tokens, so that a text must be computed in one step."""
        return any(attention.bidirectional for attention in self.mixers(AttentionDescription))

    @property
    def has_axes(self) -> bool:
        """Whether tokens have three positions: time, height and width."""
        return any(a.rope is not None and a.rope.axes for a in self.mixers(AttentionDescription))

    @property
    def checkpoint_layers(self) -> tuple[int, ...]:
        """The checkpoint's layer of each layer."""
        return tuple(
            i if layer.checkpoint_layer is None else layer.checkpoint_layer for i, layer in enumerate(self.layers)
        )

    @property
    def num_cross_tokens(self) -> int:
        """The most rows of an encoder's output that a token attends to; 0 without cross attention."""
        return max((cross.num_tokens for cross in self.mixers(CrossAttentionDescription)), default=0)

    @property
    def num_chosen_keys(self) -> int:
        """The most keys that a token reads with sparse attention; 0: it reads all."""
        indexes = [latent.index for latent in self.mixers(MLADescription)]
        return min((index.num_chosen for index in indexes if index is not None), default=0)

    @property
    def layer_caches(self) -> tuple[LayerCacheSpec, ...]:
        """The cache of each mixer, layer by layer."""
        return tuple(mixer.cache for layer in self.layers for mixer in layer.keepers)
