"""The index of DeepSeek sparse attention (DeepSeek-AI 2025): a few small heads score the keys that a token sees, and
attention reads only the best of them. The index's keys follow those of the layer's attention in the cache.
`octavo.layers.mla` attends to the chosen keys.

As in `transformers`, the index's keys are not stored in eight bits, and there is no Hadamard transform. The heads'
weights have the model's type; in `transformers` they are float32.
"""

from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from octavo.layers.norm import Norm, NormDescription
from octavo.layers.parameters import Parameters
from octavo.layers.rotary import RopeConfig, halves
from octavo.ops import Array, IndexOps, LayerKVCache
from octavo.step_batch import GroupTables, StepBatch


@dataclass(frozen=True, slots=True)
class SparseIndexerDescription:
    """The description of an index. The first elements of a head are rotated as in the layer's attention: `rope` equals
    the attention's, but the checkpoint may have another order of elements."""

    num_heads: int
    head_size: int
    num_chosen: int  # the most keys that a token reads
    rope: RopeConfig

    def element_order(self) -> NDArray[np.intp]:
        """Return the order of a head's elements: for each of Octavo's elements the index of the checkpoint's."""
        return halves(self.rope, self.head_size)

    def query_order(self) -> NDArray[np.intp]:
        """Return the checkpoint's rows of all heads' queries, in Octavo's order."""
        heads = np.arange(self.num_heads)[:, None] * self.head_size
        return (heads + self.element_order()).reshape(-1)


class SparseIndexer:
    """The norm of the index's keys, and the choice. Its matrices are packed with those of the layer."""

    def __init__(
        self, description: SparseIndexerDescription, parameters: Parameters, prefix: str, rotary: Array
    ) -> None:
        self.description, self._ops, self._rotary = description, cast(IndexOps, parameters.ops), rotary
        norm = NormDescription(eps=1e-6, kind="layer", bias=True)
        self._norm = Norm(norm, parameters, f"{prefix}k_norm", description.head_size, order=description.element_order())
        self.chosen: Array | None = None  # the last step's choice, for later layers that share it

    def keys(self, x: Array, batch: StepBatch) -> Array:
        """Return the keys [T, 1, D] as the cache holds them; x [T, D] is the product with the matrix of keys."""
        keys = self._norm.forward(x).reshape(x.shape[0], 1, self.description.head_size)
        self._ops.rotate(keys, batch.positions, self._rotary)
        return keys

    def choose(
        self, queries: Array, weights: Array, batch: StepBatch, tables: GroupTables, cache: LayerKVCache
    ) -> None:
        """Choose the step's keys and keep them in `chosen`.

        queries [T, I * D] and weights [T, I] are products with their matrices. The usual factors (I and D to the power
        of -1/2) are left out, because they do not change the choice."""
        d = self.description
        queries = queries.reshape(queries.shape[0], d.num_heads, d.head_size)
        self._ops.rotate(queries, batch.positions, self._rotary)
        self.chosen = self._ops.choose_keys(
            queries, weights, cache, tables.block_tables, batch.query_start_loc, batch.seq_lens, d.num_chosen
        )
