"""Attention to another network's output (Vaswani et al. 2017): the keys and values of a sequence are made of that once,
and its tokens see all of them, or nothing of them.

They lie in the paged cache, in blocks of their own group: `write` puts them there when a sequence starts, `forward`
reads them in every step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from octavo.batch import GroupTables, StepBatch
from octavo.kv_cache.groups import LayerCacheSpec
from octavo.layers.norm import Norm, NormDescription
from octavo.layers.parameters import Parameters
from octavo.layers.product import Summand
from octavo.layers.share import WHOLE, Share, elements
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
    has_blind_tokens: bool = False  # some see nothing of that output: `StepBatch.blind`
    query_name: str = "encoder_attn.q_proj"
    key_name: str = "encoder_attn.k_proj"
    value_name: str = "encoder_attn.v_proj"
    output_name: str = "encoder_attn.out_proj"
    qk_norm_names: tuple[str, str] = ("", "")
    share: Share = WHOLE  # of the heads

    @property
    def units(self) -> int:
        """What workers share out."""
        return self.num_heads

    @property
    def own_heads(self) -> range:
        return self.share.of(self.num_heads, "heads of cross attention")

    @property
    def own_kv_heads(self) -> range:
        return self.share.of_few(self.num_kv_heads, "key and value heads of cross attention")

    @property
    def cache(self) -> LayerCacheSpec:
        """What the layer keeps of each sequence."""
        num_kv_heads = len(self.own_kv_heads)
        return LayerCacheSpec("cross", num_kv_heads, self.head_size, self.head_size, num_tokens=self.num_tokens)

    def build(self, hidden_size: int, parameters: Parameters, prefix: str) -> CrossAttention:
        return CrossAttention(self, hidden_size, parameters, prefix)


class CrossAttention:
    """One layer's, as `octavo.layers.layer.Mixer`."""

    def __init__(
        self, description: CrossAttentionDescription, hidden_size: int, parameters: Parameters, prefix: str
    ) -> None:
        self.description, self._ops, self._dtype = description, parameters.ops, parameters.dtype
        head_size, has_biases, share = description.head_size, description.has_biases, description.share
        own = elements(description.own_heads, head_size)
        own_keys = elements(description.own_kv_heads, head_size)
        self._kv_size = len(own_keys)
        self._query = parameters.linear(
            [f"{prefix}{description.query_name}"], [description.num_heads * head_size], hidden_size, has_biases,
            own=None if share.is_whole else own,
        )  # fmt: skip
        names = [f"{prefix}{description.key_name}", f"{prefix}{description.value_name}"]
        self._key_value = parameters.linear(
            names, [description.num_kv_heads * head_size] * 2, hidden_size, has_biases,
            own=None if share.is_whole else own_keys, without_bias=names[:1] if has_biases else (),
        )  # fmt: skip
        self._output = parameters.ending(f"{prefix}{description.output_name}", hidden_size, len(own), has_biases, share)
        self._norms: list[Norm] = []  # of queries and of keys
        if description.qk_norm is not None:
            self._norms = [
                Norm(description.qk_norm, parameters, f"{prefix}{name}", description.head_size)
                for name in description.qk_norm_names
            ]
        assert not (description.has_blind_tokens and has_biases), "what sees nothing adds nothing"
        nothing = np.zeros((1, len(own)), np.float32)
        self._nothing = parameters.once(("nothing", len(own)), lambda: self._ops.place(nothing))
        self._no_rotation = parameters.rotary(None, description.head_size)
        self.keeps_query = False
        self.query: Array | None = None  # [T, heads, D] float32 of the last step, where it is kept
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
            self.query = self._heads(self._ops.linear(hidden, self._query, "float32"))
        attended = self._ops.paged_attention(
            query, cache, tables.block_tables, batch.query_start_loc, batch.cross_lens, self.description.scale, 0, 0.0,
            None, None, True,
        )  # fmt: skip
        if self.description.has_blind_tokens:
            self._ops.replace_rows(attended, self._nothing, batch.blind)
        return self._output.product(attended)

    def _heads(self, x: Array) -> Array:
        """[T, heads * D] -> [T, heads, D]"""
        return x.reshape(x.shape[0], -1, self.description.head_size)
