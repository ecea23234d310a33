"""The decoder that a `ModelDescription` describes: embedding, blocks, final norm, output matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Protocol

from octavo.batch import GroupTables, StepBatch
from octavo.kv_cache.groups import group_layers
from octavo.layers.attention import Attention, AttentionDescription
from octavo.layers.experts import Experts, ExpertsDescription
from octavo.layers.feed_forward import FeedForward, FeedForwardDescription
from octavo.layers.norm import Norm
from octavo.layers.parameters import Parameters
from octavo.layers.positions import position_table
from octavo.layers.product import Summand
from octavo.layers.recurrent import (
    GatedDelta,
    GatedDeltaDescription,
    Mamba,
    MambaDescription,
    ShortConv,
    ShortConvDescription,
)
from octavo.loading.weights import Weights
from octavo.models.description import HeadDescription, LayerDescription, ModelDescription
from octavo.ops import Array, LayerKVCache, LinearWeight, Ops


class FeedForwardLike(Protocol):
    @property
    def consumer(self) -> LinearWeight | None:
        """The only matrix that reads the layer's input: a norm may quantize for it."""

    def forward(self, hidden: Array) -> Summand:
        """hidden [T, H] -> [T, H]"""


class AttentionLike(Protocol):
    @property
    def consumer(self) -> LinearWeight | None:
        """As of `FeedForwardLike`."""

    def forward(self, hidden: Array, batch: StepBatch, tables: GroupTables, cache: LayerKVCache) -> Summand:
        """hidden [T, H] -> [T, H]; `tables` are those of the layer's cache group."""


# What each description builds: of description, hidden size, parameters, prefix of names.
ATTENTIONS: dict[type, Callable[[Any, int, Parameters, str], AttentionLike]] = {
    AttentionDescription: Attention,
    MambaDescription: Mamba,
    ShortConvDescription: ShortConv,
    GatedDeltaDescription: GatedDelta,
}
FEED_FORWARDS: dict[type, Callable[[Any, int, Parameters, str], FeedForwardLike]] = {
    FeedForwardDescription: FeedForward,
    ExpertsDescription: Experts,
}


Place = tuple[GroupTables, LayerKVCache]  # where a mixer keeps what it keeps


class Block:
    """Attention and feed-forward with their norms, added to the residual stream one after the other or together."""

    def __init__(self, layer: LayerDescription, hidden_size: int, parameters: Parameters, prefix: str) -> None:
        def norm(name: str | None) -> Norm | None:
            if name is None:
                return None
            names = [f"{prefix}{n}" for n in name.split("|")]
            found = next((n for n in names if f"{n}.weight" in parameters.weights), names[0])
            return Norm(layer.norm, parameters, found, hidden_size)

        self._layer, self._ops = layer, parameters.ops
        self._attention: AttentionLike | None = None
        if layer.attention is not None:
            self._attention_norm = norm(layer.attention_norm)
            self._attention = ATTENTIONS[type(layer.attention)](layer.attention, hidden_size, parameters, prefix)
            self._attention_post_norm = norm(layer.attention_post_norm)
        self._beside: AttentionLike | None = None
        if layer.beside is not None:
            self._beside = ATTENTIONS[type(layer.beside)](layer.beside, hidden_size, parameters, prefix)
        self._feed_forward: FeedForwardLike | None = None
        if (feed_forward := layer.feed_forward) is not None:
            self._feed_forward_norm = norm(layer.feed_forward_norm)
            self._feed_forward = FEED_FORWARDS[type(feed_forward)](feed_forward, hidden_size, parameters, prefix)
            self._feed_forward_post_norm = norm(layer.feed_forward_post_norm)

    def forward(
        self, residual: Array, batch: StepBatch, tables: GroupTables, cache: LayerKVCache, beside: Place | None = None
    ) -> Array:
        """residual [T, H], which is overwritten -> the residual stream after this layer"""
        if self._layer.is_parallel:
            return self._forward_parallel(residual, batch, tables, cache)
        if self._attention is not None:
            consumer = None if self._beside is not None else self._attention.consumer
            hidden = _normed(self._attention_norm, residual, consumer)
            attended = self._attention.forward(hidden, batch, tables, cache)
            if self._beside is not None and beside is not None:
                other = self._beside.forward(hidden, batch, *beside)
                residual = self._add(residual, other, self._attention_post_norm, self._layer.multipliers[1])
            residual = self._add(residual, attended, self._attention_post_norm, self._layer.multipliers[0])
        if self._feed_forward is not None:
            hidden = _normed(self._feed_forward_norm, residual, self._feed_forward.consumer)
            fed = self._feed_forward.forward(hidden)
            residual = self._add(residual, fed, self._feed_forward_post_norm, self._layer.multipliers[2])
        return residual

    def _forward_parallel(self, residual: Array, batch: StepBatch, tables: GroupTables, cache: LayerKVCache) -> Array:
        assert self._attention is not None and self._feed_forward is not None
        # A norm that two matrices consume cannot quantize for one of them.
        is_shared = self._feed_forward_norm is None
        hidden = _normed(self._attention_norm, residual, None if is_shared else self._attention.consumer)
        attended = self._attention.forward(hidden, batch, tables, cache)
        if not is_shared:
            hidden = _normed(self._feed_forward_norm, residual, self._feed_forward.consumer)
        fed = self._feed_forward.forward(hidden)
        residual = self._add(residual, attended, self._attention_post_norm)
        return self._add(residual, fed, self._feed_forward_post_norm)

    def _add(self, residual: Array, summand: Summand, post_norm: Norm | None, multiplier: float = 1.0) -> Array:
        scale = self._layer.residual_multiplier * multiplier
        if post_norm is None or self._layer.norms_stream:
            summand.add_to(residual, scale)
            return _normed(post_norm, residual, None)
        self._ops.add(residual, post_norm.forward(summand.value()), scale)
        return residual


def _normed(norm: Norm | None, residual: Array, consumer: LinearWeight | None) -> Array:
    return residual if norm is None else norm.forward(residual, consumer)


class BlockLike(Protocol):
    def forward(
        self, residual: Array, batch: StepBatch, tables: GroupTables, cache: LayerKVCache, beside: Place | None = None
    ) -> Array:
        """residual [T, H], which is overwritten -> the residual stream after this layer. `beside` is for the mixer
        beside attention, where there is one."""


# `Block`, or a class that an architecture brings instead: layer, hidden size, parameters, prefix of names
BlockBuilder = Callable[[LayerDescription, int, Parameters, str], BlockLike]


class _Head:
    def __init__(self, description: HeadDescription, hidden_size: int, parameters: Parameters) -> None:
        self._ops, self._dtype, self._activation = parameters.ops, parameters.dtype, description.activation
        self.consumer = parameters.linear([description.name], [description.size], hidden_size, description.bias)
        self._norm: Norm | None = None
        if description.norm is not None:
            self._norm = Norm(description.norm, parameters, description.norm_name, description.size)

    def forward(self, hidden: Array, consumer: LinearWeight) -> Array:
        """hidden [N, H] -> [N, size], as the `consumer` multiplies it"""
        hidden = self._ops.linear(hidden, self.consumer, self._dtype)
        if self._activation is not None:
            hidden = self._ops.activation(hidden, self._activation)
        return _normed(self._norm, hidden, consumer)


class Decoder:
    """token ids -> hidden states -> logits."""

    is_recordable = True

    def __init__(
        self,
        description: ModelDescription,
        weights: Weights,
        ops: Ops,
        max_positions: int,
        dtype: str,
        block: BlockBuilder = Block,
    ) -> None:
        self.description, self._ops, self._dtype = description, ops, dtype
        self.vocab_size, self.layer_caches = description.vocab_size, description.layer_caches
        parameters = Parameters(weights, ops, max_positions, dtype)
        vocab_size, hidden_size = description.vocab_size, description.hidden_size
        output_bias = f"{description.output_name}.bias" if description.output_bias else False
        is_tied, embedding_size = description.tie_word_embeddings, description.embedding_size or hidden_size
        self._embedding = parameters.linear(
            [description.embedding_name], [vocab_size], embedding_size, output_bias if is_tied else False
        )
        self._projection: LinearWeight | None = None
        if description.embedding_size is not None:
            self._projection = parameters.linear([description.embedding_projection_name], [hidden_size], embedding_size)
        self._embedding_norm: Norm | None = None
        if description.embedding_norm is not None:
            self._embedding_norm = Norm(
                description.embedding_norm, parameters, description.embedding_norm_name, hidden_size
            )
        self._positions: Array | None = None
        if description.positions is not None:
            self._positions = position_table(description.positions, parameters, hidden_size)
        self._blocks = [
            block(layer, hidden_size, parameters, f"{description.layer_prefix}{i}.")
            for i, layer in enumerate(description.layers)
        ]
        for i in range(description.num_unused_layers):
            weights.pass_over(f"{description.layer_prefix}{len(self._blocks) + i}.")
        self._group_of_cache = {
            cache: number for number, group in enumerate(group_layers(self.layer_caches)) for cache in group.layers
        }
        # The numbers of each layer's caches; one that has none is given its neighbour's and does not read it.
        counts = [(layer.attention is not None) + (layer.beside is not None) for layer in description.layers]
        self._caches_of_layer = [
            range(end - count, end) or range(end - 1, end)
            for count, end in zip(counts, accumulate(counts), strict=True)
        ]
        # Granite divides its logits: the norm before the output matrix may as well.
        self._norm: Norm | None = None
        if description.norm is not None:
            divisor = description.logits_divisor
            self._norm = Norm(description.norm, parameters, description.norm_name, hidden_size, divisor=divisor)
        self._head = None if description.head is None else _Head(description.head, hidden_size, parameters)
        self._output = self._embedding
        if not is_tied:
            size = hidden_size if description.head is None else description.head.size
            self._output = parameters.linear([description.output_name], [vocab_size], size, output_bias)
        self._num_weight_bytes = parameters.num_matrix_bytes

    def num_weight_bytes(self) -> int:
        """Bytes of the packed matrices."""
        return self._num_weight_bytes

    def forward(self, batch: StepBatch, caches: Sequence[LayerKVCache]) -> Array:
        """-> hidden [T, H] before the final norm. Caches are those of `layer_caches`."""
        ops, description = self._ops, self.description
        residual = ops.embedding(batch.token_ids, self._embedding, self._dtype, description.embedding_multiplier)
        if self._projection is not None:
            residual = ops.linear(residual, self._projection, self._dtype)
        if self._positions is not None:
            ops.add(residual, ops.take_rows(self._positions, batch.positions))
        residual = _normed(self._embedding_norm, residual, None)
        places = [(batch.groups[self._group_of_cache[i]], cache) for i, cache in enumerate(caches)]
        for block, numbers in zip(self._blocks, self._caches_of_layer, strict=True):
            (tables, cache), *beside = (places[i] for i in numbers)
            residual = block.forward(residual, batch, tables, cache, *beside)
        return residual

    def logits(self, hidden: Array) -> Array:
        """hidden [N, H] -> [N, vocab_size] float32."""
        ops = self._ops
        hidden = _normed(self._norm, hidden, self._output if self._head is None else self._head.consumer)
        if self._head is not None:
            hidden = self._head.forward(hidden, self._output)
        logits = ops.linear(hidden, self._output, "float32")
        cap = self.description.logits_softcap
        return ops.activation(logits, "softcap", parameters=(cap,)) if cap else logits
