"""Where layers get their weights: tensors of a checkpoint on their way to a backend.

Layers name what they need and what it is for; this module takes it from the checkpoint as the model is built, layer by
layer, so that a checkpoint is never in memory twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from octavo.layers.rotary import RopeConfig, identity_table, query_growth, rotary_table
from octavo.loading.weights import Weights
from octavo.ops import Array, LinearWeight, Ops
from octavo.quantization import take_rows


class Parameters:
    """The weights of one model that computes in `dtype` on one backend, for positions below `max_positions`."""

    def __init__(self, weights: Weights, ops: Ops, max_positions: int, dtype: str) -> None:
        self.weights, self.ops, self.max_positions, self.dtype = weights, ops, max_positions, dtype
        self.num_matrix_bytes = 0  # of packed matrices
        self._tables: dict[tuple[object, ...], Array] = {}  # made once for all layers of the same settings

    def array(self, name: str, shape: tuple[int, ...]) -> Array:
        """A constant in the model's type: a norm, a table."""
        return self.ops.place(self.weights.take(name, shape))

    def linear(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        num_in: int,
        bias: bool | str = False,
        gated: bool = False,
        *,
        orders: Sequence[NDArray[np.intp]] | None = None,
        is_transposed: bool = False,
        scales: Sequence[float] = (),
    ) -> LinearWeight:
        """Projections to `sizes` outputs of one input of `num_in` as one matrix: outputs side by side, or `gated`.

        `names` are those of the checkpoint's modules: one a projection, or a single one that has them stacked. `orders`
        are, of each, its rows in the order that is wanted; stored `is_transposed` they are columns. `bias` may be the
        name of the tensor. Projections, without their biases, may be multiplied with `scales`.
        """
        num_out = sum(sizes)
        stored_sizes = sizes if len(names) == len(sizes) else [num_out]
        parts = []
        for name, size in zip(names, stored_sizes, strict=True):
            bounds = accumulate(sizes, initial=0) if gated and len(names) != len(sizes) else (0, size)
            for share in pairwise(bounds):
                shape = (num_in, size) if is_transposed else (size, num_in)
                parts.append(self.weights.take_matrix(f"{name}.weight", shape, share, is_transposed=is_transposed))
        if any(scale != 1.0 for scale in scales):
            if len(parts) != len(sizes):
                parts = [parts[0].rows(*share) for share in pairwise(accumulate(sizes, initial=0))]
            parts = [part.scaled(scale) for part, scale in zip(parts, scales, strict=True)]
        if orders is not None:
            parts = [take_rows(part, order) for part, order in zip(parts, orders, strict=True)]
        biases = None
        if bias:
            bias_names = [bias] if isinstance(bias, str) else [f"{name}.bias" for name in names]
            taken = [self.weights.take(n, (size,)) for n, size in zip(bias_names, stored_sizes, strict=True)]
            if orders is not None:
                taken = [part[order] for part, order in zip(taken, orders, strict=True)]
            biases = np.concatenate(taken)
        packed = self.ops.pack_linear(parts, biases, gated)
        self.num_matrix_bytes += packed.num_bytes
        return packed

    def rotary(self, rope: RopeConfig | None, head_size: int) -> Array:
        """The table of cosines and sines; without settings nothing rotates."""
        positions = self.max_positions
        return self._table(
            (rope, head_size),
            lambda: identity_table(head_size, positions) if rope is None else rotary_table(rope, positions),
        )

    def query_growth(self, beta: float, length: int, first: int = 0) -> Array:
        """What queries are multiplied with, [max_positions] float32."""
        return self._table((beta, length, first), lambda: query_growth(beta, length, self.max_positions, first))

    def _table(self, key: tuple[object, ...], make: Callable[[], NDArray[np.float32]]) -> Array:
        if key not in self._tables:
            self._tables[key] = self.ops.place(make())
        return self._tables[key]
