"""A transformer whose weights several layers share, with low-rank adapters of each layer's own (Glorioso et al. 2024).

It reads the residual stream beside the embedding. What it makes is added to what the layer's own mixer sees, and the
residual stream does not keep it.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.batch import GroupTables, StepBatch
from octavo.kv_cache.groups import LayerCacheSpec
from octavo.layers.attention import AttentionDescription
from octavo.layers.feed_forward import FeedForwardDescription
from octavo.layers.norm import Norm, NormDescription
from octavo.layers.parameters import Parameters
from octavo.ops import Array, LayerKVCache


@dataclass(frozen=True, slots=True)
class SharedDescription:
    """`adapter` is the layer's number among those that share. Names are those of the checkpoint's modules; that of the
    last matrix, which is the layer's own, comes after the layer's prefix."""

    name: str  # of the transformer, where the checkpoint has it
    attention: AttentionDescription
    feed_forward: FeedForwardDescription
    norm: NormDescription
    adapter: int = 0
    adapter_rank: int = 0  # 0: there are none
    adapts_attention: bool = False
    output_name: str = "linear"

    @property
    def cache(self) -> LayerCacheSpec:
        return self.attention.cache

    def build(self, hidden_size: int, parameters: Parameters, prefix: str) -> Shared:
        return Shared(self, hidden_size, parameters, prefix)


class _Transformer:
    """What the layers share."""

    def __init__(self, description: SharedDescription, hidden_size: int, parameters: Parameters) -> None:
        d, name = description, description.name
        self.attention_norm = Norm(d.norm, parameters, f"{name}.input_layernorm", 2 * hidden_size)
        self.attention = d.attention.build(hidden_size, parameters, f"{name}.")
        self.feed_forward_norm = Norm(d.norm, parameters, f"{name}.pre_ff_layernorm", hidden_size)
        self.feed_forward = d.feed_forward.build(hidden_size, parameters, f"{name}.")


class _Adapters:
    """Low-rank summands of a product, one for each of its parts."""

    def __init__(self, names: list[str], sizes: list[int], num_in: int, rank: int, parameters: Parameters) -> None:
        self._ops, self._dtype, self._rank, self._sizes = parameters.ops, parameters.dtype, rank, sizes
        self._down = parameters.linear([f"{name}.0" for name in names], [rank] * len(names), num_in)
        self._up = [parameters.linear([f"{n}.1"], [size], rank) for n, size in zip(names, sizes, strict=True)]

    def add_to(self, product: Array, x: Array) -> None:
        """product [T, sum of sizes] += that of x [T, K]"""
        ops, rank, begin = self._ops, self._rank, 0
        inner = ops.linear(x, self._down, self._dtype)
        for i, (size, up) in enumerate(zip(self._sizes, self._up, strict=True)):
            summand = ops.linear(inner[:, i * rank : (i + 1) * rank], up, "float32")
            ops.add(product[:, begin : begin + size], summand)
            begin += size


class Shared:
    def __init__(self, description: SharedDescription, hidden_size: int, parameters: Parameters, prefix: str) -> None:
        d, self._ops, self._dtype, self._size = description, parameters.ops, parameters.dtype, hidden_size
        self._shared = parameters.once(d.name, lambda: _Transformer(d, hidden_size, parameters))
        self._output = parameters.linear([f"{prefix}{d.output_name}"], [hidden_size], hidden_size)
        self._of_attention: _Adapters | None = None
        self._of_feed_forward: _Adapters | None = None
        if d.adapter_rank:
            name = f"{d.name}.feed_forward.gate_up_proj_adapter_list.{d.adapter}"
            size, rank = 2 * d.feed_forward.intermediate_size, d.adapter_rank
            self._of_feed_forward = _Adapters([name], [size], hidden_size, rank, parameters)
        if d.adapts_attention:
            names = [f"{d.name}.self_attn.linear_{part}_adapter_list.{d.adapter}" for part in "qkv"]
            a = d.attention
            sizes = [a.num_heads * a.head_size, *[a.num_kv_heads * a.head_size] * 2]
            self._of_attention = _Adapters(names, sizes, 2 * hidden_size, d.adapter_rank, parameters)

    def forward(
        self, residual: Array, pair: Array, batch: StepBatch, tables: GroupTables, cache: LayerKVCache
    ) -> Array:
        """residual [T, H]; pair [T, 2 H], whose second half is the embedding and whose first half is overwritten ->
        the residual stream with what the transformer adds to it, [T, H]"""
        ops, shared, first = self._ops, self._shared, pair[:, : self._size]
        ops.add(first, first, -1.0)
        ops.add(first, residual)
        hidden = shared.attention_norm.forward(pair, None if self._of_attention else shared.attention.consumer)
        attended = shared.attention.forward(hidden, batch, tables, cache, adapters=self._of_attention)
        consumer = None if self._of_feed_forward else shared.feed_forward.consumer
        hidden = shared.feed_forward_norm.forward(attended.value(self._dtype), consumer)
        fed = shared.feed_forward.forward(hidden, self._of_feed_forward)
        stream = ops.linear(fed.value(self._dtype), self._output, self._dtype)
        ops.add(stream, residual)
        return stream
