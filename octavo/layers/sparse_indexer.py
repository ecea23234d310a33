"""The index of DeepSeek sparse attention (DeepSeek-AI 2025): a few small heads that score the keys a token sees, of
which its attention reads the best. Its keys lie behind those of the layer's attention in the cache. Who attends to what
was chosen is `octavo.layers.mla`.

As in `transformers` no key of it is in eight bits, and no Hadamard transform comes before. Heads' weights, which are
float32 there, are of the model's type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from octavo.batch import GroupTables, StepBatch
from octavo.layers.norm import Norm, NormDescription
from octavo.layers.parameters import Parameters
from octavo.layers.rotary import RopeConfig, halves
from octavo.ops import Array, IndexOps, LayerKVCache


@dataclass(frozen=True, slots=True)
class SparseIndexerDescription:
    """The first elements of a head are rotated as those of the attention, whose `rope` this is but for how the
    checkpoint has them."""

    num_heads: int
    head_size: int
    num_chosen: int  # keys that a token reads at most
    rope: RopeConfig

    def element_order(self) -> NDArray[np.intp]:
        """The checkpoint's elements of a head as ours."""
        return halves(self.rope, self.head_size)

    def query_order(self) -> NDArray[np.intp]:
        """The checkpoint's rows of all heads' queries as ours."""
        heads = np.arange(self.num_heads)[:, None] * self.head_size
        return (heads + self.element_order()).reshape(-1)


class SparseIndexer:
    """The norm of its keys, and the choice. The matrices are parts of those of the layer."""

    def __init__(
        self, description: SparseIndexerDescription, parameters: Parameters, prefix: str, rotary: Array
    ) -> None:
        self.description, self._ops, self._rotary = description, cast(IndexOps, parameters.ops), rotary
        norm = NormDescription(eps=1e-6, kind="layer", bias=True)
        self._norm = Norm(norm, parameters, f"{prefix}k_norm", description.head_size, order=description.element_order())
        self.chosen: Array | None = None  # of the step that was the last, for layers that read the same keys

    def keys(self, x: Array, batch: StepBatch) -> Array:
        """x [T, D], the product with the matrix of keys -> [T, 1, D], as the cache has them"""
        keys = self._norm.forward(x).reshape(x.shape[0], 1, self.description.head_size)
        self._ops.rotate(keys, batch.positions, self._rotary)
        return keys

    def choose(
        self, queries: Array, weights: Array, batch: StepBatch, tables: GroupTables, cache: LayerKVCache
    ) -> None:
        """queries [T, I * D], weights [T, I]: the products with their matrices. What they are multiplied with beside
        (I and D to the power of -1/2) changes no choice."""
        d = self.description
        queries = queries.reshape(queries.shape[0], d.num_heads, d.head_size)
        self._ops.rotate(queries, batch.positions, self._rotary)
        self.chosen = self._ops.choose_keys(
            queries, weights, cache, tables.block_tables, batch.query_start_loc, batch.seq_lens, d.num_chosen
        )
