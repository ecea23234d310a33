"""Where layers get their weights: tensors of a checkpoint on their way to a backend.

Layers name what they need and what it is for; this module takes it from the checkpoint as the model is built, layer by
layer, so that a checkpoint is never in memory twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from octavo.layers.rotary import RopeConfig, identity_table, rotary_table
from octavo.loading.weights import Weights
from octavo.ops import Array, LinearWeight, Ops


class Parameters:
    """The weights of one model that computes in `dtype` on one backend, for positions below `max_positions`."""

    def __init__(self, weights: Weights, ops: Ops, max_positions: int, dtype: str) -> None:
        self.weights, self.ops, self.max_positions, self.dtype = weights, ops, max_positions, dtype
        self.num_matrix_bytes = 0  # of packed matrices
        self._rotary_tables: dict[tuple[RopeConfig | None, int], Array] = {}

    def array(self, name: str, shape: tuple[int, ...]) -> Array:
        """A constant in the model's type: a norm, a table."""
        return self.ops.place(self.weights.take(name, shape))

    def linear(
        self, names: Sequence[str], sizes: Sequence[int], num_in: int, bias: bool = False, gated: bool = False
    ) -> LinearWeight:
        """Projections to `sizes` outputs of one input of `num_in` as one matrix: outputs side by side, or `gated`.

        `names` are those of the checkpoint's modules: one a projection, or a single one that has them stacked.
        """
        num_out = sum(sizes)
        if len(names) == len(sizes):
            parts = [
                self.weights.take_matrix(f"{name}.weight", (size, num_in))
                for name, size in zip(names, sizes, strict=True)
            ]
        else:
            (name,) = names
            bounds = accumulate(sizes, initial=0) if gated else (0, num_out)
            parts = [
                self.weights.take_matrix(f"{name}.weight", (num_out, num_in), rows=share) for share in pairwise(bounds)
            ]
        biases = None
        if bias:
            bias_sizes = sizes if len(names) == len(sizes) else [num_out]
            biases = np.concatenate(
                [self.weights.take(f"{name}.bias", (size,)) for name, size in zip(names, bias_sizes, strict=True)]
            )
        packed = self.ops.pack_linear(parts, biases, gated)
        self.num_matrix_bytes += packed.num_bytes
        return packed

    def rotary(self, rope: RopeConfig | None, head_size: int) -> Array:
        """The table of cosines and sines, one for all layers of the same settings; without settings nothing rotates."""
        key = (rope, head_size)
        if key not in self._rotary_tables:
            positions = self.max_positions
            host = identity_table(head_size, positions) if rope is None else rotary_table(rope, positions)
            self._rotary_tables[key] = self.ops.place(host)
        return self._rotary_tables[key]
