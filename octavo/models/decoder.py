"""The decoder that a `ModelDescription` describes: embedding, blocks, final norm, output matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from octavo.batch import GroupTables, StepBatch
from octavo.kv_cache.groups import group_layers
from octavo.layers.attention import Attention
from octavo.layers.feed_forward import FeedForward
from octavo.layers.norm import Norm
from octavo.layers.parameters import Parameters
from octavo.layers.product import Product
from octavo.loading.weights import Weights
from octavo.models.description import LayerDescription, ModelDescription
from octavo.ops import Array, LayerKVCache, LinearWeight, Ops


class Block:
    """Attention and feed-forward with their norms, added to the residual stream one after the other or together."""

    def __init__(self, layer: LayerDescription, hidden_size: int, parameters: Parameters, prefix: str) -> None:
        def norm(name: str | None) -> Norm | None:
            return None if name is None else Norm(layer.norm, parameters, f"{prefix}{name}", hidden_size)

        self._layer, self._ops = layer, parameters.ops
        self._attention_norm = norm(layer.attention_norm)
        self._attention = Attention(layer.attention, hidden_size, parameters, prefix)
        self._attention_post_norm = norm(layer.attention_post_norm)
        self._feed_forward_norm = norm(layer.feed_forward_norm)
        self._feed_forward = FeedForward(layer.feed_forward, hidden_size, parameters, prefix)
        self._feed_forward_post_norm = norm(layer.feed_forward_post_norm)

    def forward(self, residual: Array, batch: StepBatch, tables: GroupTables, cache: LayerKVCache) -> None:
        """residual [T, H], in place."""
        is_shared = self._layer.is_parallel and self._feed_forward_norm is None
        # A norm that two matrices consume cannot quantize for one of them.
        hidden = _normed(self._attention_norm, residual, None if is_shared else self._attention.qkv)
        attended = self._attention.forward(hidden, batch, tables, cache)
        if not self._layer.is_parallel:
            self._add(residual, attended, self._attention_post_norm)
        if not is_shared:
            hidden = _normed(self._feed_forward_norm, residual, self._feed_forward.up)
        fed = self._feed_forward.forward(hidden)
        if self._layer.is_parallel:
            self._add(residual, attended, self._attention_post_norm)
        self._add(residual, fed, self._feed_forward_post_norm)

    def _add(self, residual: Array, product: Product, post_norm: Norm | None) -> None:
        scale = self._layer.residual_multiplier
        if post_norm is None:
            product.add_to(residual, scale)
        else:
            self._ops.add(residual, post_norm.forward(product.value()), scale)


def _normed(norm: Norm | None, residual: Array, consumer: LinearWeight | None) -> Array:
    return residual if norm is None else norm.forward(residual, consumer)


class BlockLike(Protocol):
    def forward(self, residual: Array, batch: StepBatch, tables: GroupTables, cache: LayerKVCache) -> None:
        """residual [T, H], in place."""


# `Block`, or a class that an architecture brings instead: layer, hidden size, parameters, prefix of names
BlockBuilder = Callable[[LayerDescription, int, Parameters, str], BlockLike]


class Decoder:
    """token ids -> hidden states -> logits."""

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
        self._embedding = parameters.linear([description.embedding_name], [vocab_size], hidden_size)
        self._positions: Array | None = None
        if description.learned_positions:
            shape = (description.learned_positions, hidden_size)
            self._positions = parameters.array(f"{description.position_name}.weight", shape)
        self._blocks = [
            block(layer, hidden_size, parameters, f"{description.layer_prefix}{i}.")
            for i, layer in enumerate(description.layers)
        ]
        self._group_of_layer = {
            layer: number for number, group in enumerate(group_layers(self.layer_caches)) for layer in group.layers
        }
        # Granite divides its logits: the norm before the output matrix may as well.
        self._norm = Norm(description.norm, parameters, description.norm_name, hidden_size, description.logits_divisor)
        self._output = self._embedding
        if not description.tie_word_embeddings:
            self._output = parameters.linear([description.output_name], [vocab_size], hidden_size)
        self._num_weight_bytes = parameters.num_matrix_bytes

    def num_weight_bytes(self) -> int:
        """Bytes of the packed matrices."""
        return self._num_weight_bytes

    def forward(self, batch: StepBatch, caches: Sequence[LayerKVCache]) -> Array:
        """-> hidden [T, H] before the final norm. One cache a layer."""
        ops = self._ops
        residual = ops.embedding(batch.token_ids, self._embedding, self._dtype, self.description.embedding_multiplier)
        if self._positions is not None:
            ops.add(residual, ops.take_rows(self._positions, batch.positions))
        for i, (block, cache) in enumerate(zip(self._blocks, caches, strict=True)):
            block.forward(residual, batch, batch.groups[self._group_of_layer[i]], cache)
        return residual

    def logits(self, hidden: Array) -> Array:
        """hidden [N, H] -> [N, vocab_size] float32."""
        return self._ops.linear(self._norm.forward(hidden, self._output), self._output, "float32")
