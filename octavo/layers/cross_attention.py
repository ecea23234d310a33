"""Attention to another network's output (Vaswani et al. 2017): the keys and values of a sequence are made of that once,
and its tokens see all of them, or nothing of them.

They lie in the paged cache, in blocks of their own group: `write` puts them there when a sequence starts, `forward`
reads them in every step. Workers share out heads, as in other attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from octavo.batch import GroupTables, StepBatch
from octavo.kv_cache.groups import LayerCacheSpec
from octavo.layers.all_gather import AllGather
from octavo.layers.norm import Norm, NormDescription
from octavo.layers.parameters import Parameters
from octavo.layers.product import Summand
from octavo.layers.tensor_parallel import WHOLE, Shard, elements
from octavo.ops import Array, LayerKVCache


@dataclass(frozen=True, slots=True)
class CrossAttentionDescription:
    """Sizes in elements; `num_` are counts. Where there are biases keys have none. Names are those of the checkpoint's
    modules, after the layer's prefix."""

    num_heads: int
    head_size: int
    scale: float  # of the scores
    num_tokens: int  # of the other network's output, at most
    num_kv_heads: int
    has_biases: bool = True
    qk_norm: NormDescription | None = None  # of each head
    has_cross_mask: bool = False  # some see nothing of that output: `StepBatch.cross_mask`
    query_name: str = "encoder_attn.q_proj"
    key_name: str = "encoder_attn.k_proj"
    value_name: str = "encoder_attn.v_proj"
    output_name: str = "encoder_attn.out_proj"
    qk_norm_names: tuple[str, str] = ("", "")
    shard: Shard = WHOLE  # of the heads

    @property
    def units(self) -> int:
        """What workers share out."""
        return self.num_heads

    @property
    def all_gather_size(self) -> int:
        """Elements of a row that all workers are brought, at most: queries or keys, where somebody asks for them."""
        return self.num_heads * self.head_size

    @property
    def own_heads(self) -> range:
        return self.shard.of(self.num_heads, "attention heads")

    @property
    def own_kv_heads(self) -> range:
        return self.shard.of_few(self.num_kv_heads, "key and value heads")

    @property
    def cache(self) -> LayerCacheSpec:
        """What the layer keeps of each sequence."""
        return LayerCacheSpec(
            "cross", len(self.own_kv_heads), self.head_size, self.head_size, num_tokens=self.num_tokens
        )

    def build(self, hidden_size: int, parameters: Parameters, prefix: str) -> CrossAttention:
        return CrossAttention(self, hidden_size, parameters, prefix)


class CrossAttention:
    """One layer's, as `octavo.layers.mixer.Mixer`."""

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
        self._norms: list[Norm] = []  # of queries and of keys
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
        self.query: Array | None = None  # [T, heads of all workers, D] float32 of the last step, where it is kept
        self.consumer = self._query  # the only matrix that reads the layer's input

    def write(self, rows: Array, positions: Array, slots: Array, cache: LayerKVCache) -> None:
        """The keys and values of rows [N, H] of the other network's output, into `slots` [N] int64. `positions` [N] are
        any: nothing rotates."""
        key_value = self._ops.linear(rows, self._key_value, self._dtype)
        key, value = self._heads(key_value[:, : self._kv_size]), self._heads(key_value[:, self._kv_size :])
        if self._norms:
            key = self._norms[1].forward(key)
        self._ops.rotary_and_cache(key, key, value, positions, self._no_rotation, cache, slots)

    def forward(self, hidden: Array, batch: StepBatch, tables: GroupTables, cache: LayerKVCache) -> Summand:
        """hidden [T, H] -> [T, H]"""
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
        """The keys of `heads`, those of other workers too: [heads, blocks * block_size, D] float32. All call it, and
        bring each other `most_rows` at a time. There must be as many heads of keys as of queries."""
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
        """[T, heads * D] -> [T, heads, D]"""
        return x.reshape(x.shape[0], -1, self.description.head_size)
