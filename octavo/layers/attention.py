"""Grouped-query attention (Ainslie et al. 2023) over the paged cache."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.batch import GroupTables, StepBatch
from octavo.kv_cache.groups import LayerCacheSpec
from octavo.layers.norm import Norm, NormDescription
from octavo.layers.parameters import Parameters
from octavo.layers.product import Product
from octavo.layers.rotary import RopeConfig
from octavo.ops import Array, LayerKVCache


@dataclass(frozen=True, slots=True)
class AttentionDescription:
    """Sizes in elements; `num_` are counts. Names are those of the checkpoint's modules, after the layer's prefix."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float  # of the scores
    rope: RopeConfig | None  # None: queries and keys are not rotated
    window: int = 0  # how many positions a token sees, its own included; 0 is all
    softcap: float = 0.0  # of the scores; 0 is none
    qk_norm: NormDescription | None = None  # of each query and key head, before the rotation
    qkv_bias: bool = False
    output_bias: bool = False
    qkv_names: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")  # a single one: stacked
    output_name: str = "self_attn.o_proj"
    qk_norm_names: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")

    @property
    def cache(self) -> LayerCacheSpec:
        """What the layer keeps of each token."""
        return LayerCacheSpec(
            kind="window" if self.window else "full",
            num_kv_heads=self.num_kv_heads,
            key_size=self.head_size,
            value_size=self.head_size,
            window=self.window,
        )


class Attention:
    """Queries, keys and values of one input by one product, the cache, and the output matrix."""

    def __init__(
        self, description: AttentionDescription, hidden_size: int, parameters: Parameters, prefix: str
    ) -> None:
        self.description, self._ops, self._dtype = description, parameters.ops, parameters.dtype
        query_size = description.num_heads * description.head_size
        kv_size = description.num_kv_heads * description.head_size
        names = [f"{prefix}{name}" for name in description.qkv_names]
        self.qkv = parameters.linear(names, (query_size, kv_size, kv_size), hidden_size, description.qkv_bias)
        self._output = parameters.linear(
            [f"{prefix}{description.output_name}"], [hidden_size], query_size, description.output_bias
        )
        self._rotary = parameters.rotary(description.rope, description.head_size)
        self._qk_norms: list[Norm] = []
        if description.qk_norm is not None:
            self._qk_norms = [
                Norm(description.qk_norm, parameters, f"{prefix}{name}", description.head_size)
                for name in description.qk_norm_names
            ]

    def forward(self, hidden: Array, batch: StepBatch, tables: GroupTables, cache: LayerKVCache) -> Product:
        """hidden [T, H] -> [T, H]; `tables` are those of the layer's cache group."""
        description, ops = self.description, self._ops
        num_heads, num_kv_heads = description.num_heads, description.num_kv_heads
        qkv = ops.linear(hidden, self.qkv, self._dtype).reshape(-1, num_heads + 2 * num_kv_heads, description.head_size)
        query = qkv[:, :num_heads]
        key = qkv[:, num_heads : num_heads + num_kv_heads]
        value = qkv[:, num_heads + num_kv_heads :]
        if self._qk_norms:
            query, key = (norm.forward(x) for norm, x in zip(self._qk_norms, (query, key), strict=True))
        ops.rotary_and_cache(query, key, value, batch.positions, self._rotary, cache, tables.slot_mapping)
        attended = ops.paged_attention(
            query,
            cache,
            tables.block_tables,
            batch.query_start_loc,
            batch.seq_lens,
            description.scale,
            description.window,
            description.softcap,
        )
        return Product(ops, attended, self._output)
