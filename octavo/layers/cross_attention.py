"""Attention to another network's output (Vaswani et al. 2017). Keys and values are computed from this output once for
each sequence; a token sees all of them or none.

Keys and values lie in the paged cache, in blocks of their own group: `write` writes them when a sequence starts,
`forward` reads them in every step. Heads are divided among workers, as in other attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from octavo.kv_cache.groups import LayerCacheSpec
from octavo.layers.all_gather import AllGather
from octavo.layers.norm import Norm, NormDescription
from octavo.layers.parameters import Parameters
from octavo.layers.product import Summand
from octavo.layers.tensor_parallel import WHOLE, Shard, ShardedHeads, elements
from octavo.ops import Array, LayerKVCache
from octavo.step_batch import GroupTables, StepBatch


@dataclass(frozen=True, slots=True)
class CrossAttentionDescription(ShardedHeads):
    """The description of cross attention. Sizes are in elements, `num_` are counts. Keys never have a bias. Names are
    those of the checkpoint's modules, without the layer's prefix."""

    num_heads: int
    head_size: int
    scale: float  # of the scores
    num_tokens: int  # the most rows of the other network's output
    num_kv_heads: int
    has_biases: bool = True
    qk_norm: NormDescription | None = None  # norm of each head's query and key
    has_cross_mask: bool = False  # some tokens see none of the output's rows: `StepBatch.cross_mask`
    query_name: str = "encoder_attn.q_proj"
    key_name: str = "encoder_attn.k_proj"
    value_name: str = "encoder_attn.v_proj"
    output_name: str = "encoder_attn.out_proj"
    qk_norm_names: tuple[str, str] = ("", "")
    shard: Shard = WHOLE  # this worker's heads

    @property
    def all_gather_size(self) -> int:
        """Return the most elements of a row that workers gather: queries (`keeps_query`) or `keys`, if asked for."""
        return self.num_heads * self.head_size

    @property
    def own_kv_heads(self) -> range:
        return self.shard.of_few(self.num_kv_heads, "key and value heads")

    @property
    def cache(self) -> LayerCacheSpec:
        """Return the layer's cache of each sequence."""
        return LayerCacheSpec(
            "cross", len(self.own_kv_heads), self.head_size, self.head_size, num_tokens=self.num_tokens
        )

    def build(self, hidden_size: int, parameters: Parameters, prefix: str) -> CrossAttention:
        return CrossAttention(self, hidden_size, parameters, prefix)


class CrossAttention:
    """The cross attention of one layer, an `octavo.layers.mixer.Mixer`."""

    def __init__(
        self, description: CrossAttentionDescription, hidden_size: int, parameters: Parameters, prefix: str
    ) -> None:
        self.description, self._ops, self._dtype = description, parameters.ops, parameters.dtype
        shard, head_size, has_biases = description.shard, description.head_size, description.has_biases
        all_size, all_kv_size = description.num_heads * head_size, description.num_kv_heads * head_size
        own, own_kv = elements(description.own_heads, head_size), elements(description.own_kv_heads, head_size)
        size, self._kv_size = len(own), len(own_kv)
        self._query = parameters.linear(
            [f"{prefix}{description.query_name}"], [all_size], hidden_size, has_biases,
            own=None if shard.is_whole else own,
        )  # fmt: skip
        names = [f"{prefix}{description.key_name}", f"{prefix}{description.value_name}"]
        self._key_value = parameters.linear(
            names, [all_kv_size, all_kv_size], hidden_size, has_biases,
            own=None if shard.is_whole else own_kv, without_bias=names[:1] if has_biases else (),
        )  # fmt: skip
        self._output = parameters.ending(f"{prefix}{description.output_name}", hidden_size, size, has_biases, shard)
        self._all_gather = AllGather(self._ops, shard, own, all_size, "elements of all heads")
        self._norms: list[Norm] = []  # the norm of queries, then the norm of keys
        if description.qk_norm is not None:
            self._norms = [
                Norm(description.qk_norm, parameters, f"{prefix}{name}", description.head_size)
                for name in description.qk_norm_names
            ]
        assert not (description.has_cross_mask and has_biases), "what sees nothing adds nothing"
        nothing = np.zeros((1, len(own)), np.float32)
        self._nothing = parameters.once(("nothing", len(own)), lambda: self._ops.place(nothing))
        self._no_rotation = parameters.rotary(None, description.head_size)
        self.keeps_query = False
        self.query: Array | None = None  # [T, heads of all workers, D] float32 of the last step, if `keeps_query`
        self.consumer = self._query  # the only matrix that reads the layer's input

    def write(self, rows: Array, positions: Array, slots: Array, cache: LayerKVCache) -> None:
        """Write the keys and values of rows [N, H] of the other network's output to `slots` [N] int64. `positions` [N]
        may be any valid positions: keys are not rotated."""
        key_value = self._ops.linear(rows, self._key_value, self._dtype)
        key, value = self._heads(key_value[:, : self._kv_size]), self._heads(key_value[:, self._kv_size :])
        if self._norms:
            key = self._norms[1].forward(key)
        self._ops.rotary_and_cache(key, key, value, positions, self._no_rotation, cache, slots)

    def forward(self, hidden: Array, batch: StepBatch, tables: GroupTables, cache: LayerKVCache) -> Summand:
        query = self._heads(self._ops.linear(hidden, self._query, self._dtype))
        if self._norms:
            query = self._norms[0].forward(query)
        if self.keeps_query:
            self.query = self._heads(self._all_gather.forward(self._ops.linear(hidden, self._query, "float32")))
        attended = self._ops.paged_attention(
            query, cache, tables.block_tables, batch.query_start_loc, batch.cross_lens, self.description.scale, 0, 0.0,
            None, None, True,
        )  # fmt: skip
        if self.description.has_cross_mask:
            self._ops.replace_rows(attended, self._nothing, batch.cross_mask)
        return self._output.product(attended)

    def keys(self, cache: LayerKVCache, blocks: Sequence[int], heads: Sequence[int], most_rows: int) -> Array:
        """Return the keys of `heads` of all workers: [heads, blocks * block_size, D] float32.

        All workers call this together and exchange `most_rows` rows at a time. The numbers of key heads and of query
        heads must be equal."""
        if self.description.shard.is_whole:
            return self._ops.keys_of(cache, blocks, heads)
        own: Any = self._ops.keys_of(cache, blocks, range(len(self.description.own_kv_heads)))
        rows: Any = own.swapaxes(0, 1).reshape(own.shape[1], -1)
        parts = [
            np.asarray(self._all_gather.forward(rows[first : first + most_rows])).copy()
            for first in range(0, len(rows), most_rows)
        ]
        return cast(Array, np.concatenate(parts).reshape(len(rows), -1, own.shape[-1]).swapaxes(0, 1)[list(heads)])

    def _heads(self, x: Array) -> Array:
        """Return x [T, heads * D] as [T, heads, D]."""
        return x.reshape(x.shape[0], -1, self.description.head_size)
