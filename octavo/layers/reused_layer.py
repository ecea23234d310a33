"""A transformer layer that several layers reuse, with low-rank adapters for each of them (Zamba: Glorioso et al. 2024).

It reads the residual stream and the embedding. Its output is added to the input of the layer's own mixer only, not to
the residual stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.kv_cache.groups import LayerCacheSpec
from octavo.layers.attention import AttentionDescription
from octavo.layers.feed_forward import FeedForwardDescription
from octavo.layers.in_place import scale_in_place
from octavo.layers.norm import Norm, NormDescription
from octavo.layers.parameters import Parameters
from octavo.layers.product import Summand
from octavo.layers.tensor_parallel import Shard, elements
from octavo.ops import Array, LayerKVCache
from octavo.step_batch import GroupTables, StepBatch


@dataclass(frozen=True, slots=True)
class ReusedLayerDescription:
    """One layer's use of a reused transformer layer. `adapter` is this layer's index among all layers that use it. The
    last matrix belongs to the using layer."""

    name: str  # name of the transformer's modules in the checkpoint
    attention: AttentionDescription
    feed_forward: FeedForwardDescription
    norm: NormDescription
    adapter: int = 0
    adapter_rank: int = 0  # 0: no adapters
    adapts_attention: bool = False

    @property
    def cache(self) -> LayerCacheSpec:
        return self.attention.cache

    def build(self, hidden_size: int, parameters: Parameters, prefix: str) -> ReusedLayer:
        return ReusedLayer(self, hidden_size, parameters, prefix)


class _Transformer:
    """The weights that all using layers share."""

    def __init__(self, description: ReusedLayerDescription, hidden_size: int, parameters: Parameters) -> None:
        d, name = description, description.name
        self.attention_norm = Norm(d.norm, parameters, f"{name}.input_layernorm", 2 * hidden_size)
        self.attention = d.attention.build(hidden_size, parameters, f"{name}.")
        self.feed_forward_norm = Norm(d.norm, parameters, f"{name}.pre_ff_layernorm", hidden_size)
        self.feed_forward = d.feed_forward.build(hidden_size, parameters, f"{name}.")


@dataclass(frozen=True, slots=True)
class _Part:
    """One product: the name of its adapter, the sizes of its projections, and this worker's outputs of each."""

    name: str
    sizes: tuple[int, ...]
    own: range


class _Adapters:
    """Low-rank adapters of a product, one for each of its parts."""

    def __init__(
        self, parts: Sequence[_Part], num_in: int, rank: int, shard: Shard, parameters: Parameters
    ) -> None:  # fmt: skip
        self._ops, self._dtype, self._rank = parameters.ops, parameters.dtype, rank
        self._sizes = [len(part.own) * len(part.sizes) for part in parts]
        self._down = parameters.linear([f"{part.name}.0" for part in parts], [rank] * len(parts), num_in)
        self._up = [parameters.linear([f"{part.name}.1"], part.sizes, rank, own=part.own) for part in parts]

    def add_to(self, product: Array, x: Array) -> None:
        """Add the adapters' outputs for x [T, K] to product [T, sum of sizes] in place."""
        ops, rank, begin = self._ops, self._rank, 0
        inner = ops.linear(x, self._down, self._dtype)
        for i, (size, up) in enumerate(zip(self._sizes, self._up, strict=True)):
            summand = ops.linear(inner[:, i * rank : (i + 1) * rank], up, "float32")
            ops.add(product[:, begin : begin + size], summand)
            begin += size


class ReusedLayer:
    def __init__(
        self, description: ReusedLayerDescription, hidden_size: int, parameters: Parameters, prefix: str
    ) -> None:
        d, self._ops, self._dtype, self._size = description, parameters.ops, parameters.dtype, hidden_size
        self._shard = shard = d.feed_forward.shard
        self._shared = parameters.once(d.name, lambda: _Transformer(d, hidden_size, parameters))
        self._output = parameters.linear([f"{prefix}linear"], [hidden_size], hidden_size)
        self._of_attention: _Adapters | None = None
        self._of_feed_forward: _Adapters | None = None
        if d.adapter_rank:
            name = f"{d.name}.feed_forward.gate_up_proj_adapter_list.{d.adapter}"
            size = d.feed_forward.intermediate_size
            gate_up = _Part(name, (size, size), shard.of(size, "inner elements of a feed-forward"))
            self._of_feed_forward = _Adapters([gate_up], hidden_size, d.adapter_rank, shard, parameters)
        if d.adapts_attention:
            a = d.attention
            queries, keys = (a.num_heads, a.own_heads), (a.num_kv_heads, a.own_kv_heads)
            of_heads = [
                _Part(
                    f"{d.name}.self_attn.linear_{part}_adapter_list.{d.adapter}", (count * a.head_size,),
                    elements(own, a.head_size),
                )
                for part, (count, own) in zip("qkv", (queries, keys, keys), strict=True)
            ]  # fmt: skip
            self._of_attention = _Adapters(of_heads, 2 * hidden_size, d.adapter_rank, shard, parameters)

    def forward(
        self, residual: Array, padded_embedding: Array, batch: StepBatch, tables: GroupTables, cache: LayerKVCache
    ) -> Array:
        """Return residual [T, H] plus the transformer's output: [T, H].

        The second half of padded_embedding [T, 2 H] is the embedding; the first half is overwritten."""
        ops, shared, first = self._ops, self._shared, padded_embedding[:, : self._size]
        scale_in_place(ops, first, 0.0)
        ops.add(first, residual)
        hidden = shared.attention_norm.forward(
            padded_embedding, None if self._of_attention else shared.attention.consumer
        )
        attended = shared.attention.forward(hidden, batch, tables, cache, adapters=self._of_attention)
        consumer = None if self._of_feed_forward else shared.feed_forward.consumer
        hidden = shared.feed_forward_norm.forward(self._rounded(attended, first), consumer)
        fed = shared.feed_forward.forward(hidden, self._of_feed_forward)
        stream = ops.linear(self._rounded(fed, first), self._output, self._dtype)
        ops.add(stream, residual)
        return stream

    def _rounded(self, summand: Summand, place: Array) -> Array:
        """Return the summand's value in the model's type. With several workers the sum is float32 and is rounded by
        writing it to `place` [T, H]."""
        if self._shard.is_whole:
            return summand.value(self._dtype)
        scale_in_place(self._ops, place, 0.0)
        summand.add_to(place)
        return place
