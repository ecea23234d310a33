"""Attention to another network's output (Vaswani et al. 2017): the keys and values of a sequence are made of that once,
and all of its tokens see all of them.

They lie in the paged cache, in blocks of their own group: `write` puts them there when a sequence starts, `forward`
reads them in every step.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.batch import GroupTables, StepBatch
from octavo.kv_cache.groups import LayerCacheSpec
from octavo.layers.parameters import Parameters
from octavo.layers.product import Summand
from octavo.layers.share import WHOLE
from octavo.ops import Array, LayerKVCache


@dataclass(frozen=True, slots=True)
class CrossAttentionDescription:
    """Sizes in elements; `num_` are counts. Query, value and output have biases, keys have none. Names are those of the
    checkpoint's modules, after the layer's prefix."""

    num_heads: int
    head_size: int
    scale: float  # of the scores
    num_tokens: int  # of the other network's output
    query_name: str = "encoder_attn.q_proj"
    key_name: str = "encoder_attn.k_proj"
    value_name: str = "encoder_attn.v_proj"
    output_name: str = "encoder_attn.out_proj"

    @property
    def cache(self) -> LayerCacheSpec:
        """What the layer keeps of each sequence."""
        return LayerCacheSpec("cross", self.num_heads, self.head_size, self.head_size, num_tokens=self.num_tokens)

    def build(self, hidden_size: int, parameters: Parameters, prefix: str) -> CrossAttention:
        return CrossAttention(self, hidden_size, parameters, prefix)


class CrossAttention:
    """One layer's, as `octavo.layers.layer.Mixer`."""

    def __init__(
        self, description: CrossAttentionDescription, hidden_size: int, parameters: Parameters, prefix: str
    ) -> None:
        self.description, self._ops, self._dtype = description, parameters.ops, parameters.dtype
        size = self._size = description.num_heads * description.head_size
        self._query = parameters.linear([f"{prefix}{description.query_name}"], [size], hidden_size, True)
        names = [f"{prefix}{description.key_name}", f"{prefix}{description.value_name}"]
        self._key_value = parameters.linear(names, [size, size], hidden_size, True, without_bias=names[:1])
        self._output = parameters.ending(f"{prefix}{description.output_name}", hidden_size, size, True, WHOLE)
        self._no_rotation = parameters.rotary(None, description.head_size)
        self.keeps_query = False
        self.query: Array | None = None  # [T, heads, D] float32 of the last step, where it is kept
        self.consumer = self._query  # the only matrix that reads the layer's input

    def write(self, rows: Array, positions: Array, slots: Array, cache: LayerKVCache) -> None:
        """The keys and values of rows [N, H] of the other network's output, into `slots` [N] int64. `positions` [N] are
        any: nothing rotates."""
        key_value = self._ops.linear(rows, self._key_value, self._dtype)
        key, value = self._heads(key_value[:, : self._size]), self._heads(key_value[:, self._size :])
        self._ops.rotary_and_cache(key, key, value, positions, self._no_rotation, cache, slots)

    def forward(self, hidden: Array, batch: StepBatch, tables: GroupTables, cache: LayerKVCache) -> Summand:
        """hidden [T, H] -> [T, H]"""
        query = self._heads(self._ops.linear(hidden, self._query, self._dtype))
        if self.keeps_query:
            self.query = self._heads(self._ops.linear(hidden, self._query, "float32"))
        attended = self._ops.paged_attention(
            query, cache, tables.block_tables, batch.query_start_loc, batch.cross_lens, self.description.scale, 0, 0.0,
            None, None, True,
        )  # fmt: skip
        return self._output.product(attended)

    def _heads(self, x: Array) -> Array:
        """[T, heads * D] -> [T, heads, D]"""
        return x.reshape(x.shape[0], -1, self.description.head_size)
