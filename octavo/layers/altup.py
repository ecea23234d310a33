"""Alternating updates, AltUp (Baykal et al. 2023): a model with several residual streams, in rows [T, streams * H].
Each layer predicts all streams as weighted sums, computes with the first stream, and corrects all streams by the
result.

Gemma 3n uses AltUp, with a low-rank branch beside attention (LAuReL: Menghani et al. 2024).
"""

from dataclasses import dataclass

from octavo.layers.in_place import scale_in_place
from octavo.layers.norm import Norm, NormDescription
from octavo.layers.parameters import Parameters
from octavo.layers.zero_rows import ZeroRows
from octavo.ops import Array
from octavo.quantization import StoredWeight

PROJECTIONS, UNEMBED = "model.altup_projections", "model.altup_unembed_projections"  # a number follows
_LEAST_SQUARE = 1e-10  # added to the mean square before a row is divided by its magnitude


@dataclass(frozen=True, slots=True)
class AltUpDescription:
    count: int
    branch_rank: int


class AltUp:
    """Expands one residual stream to several before the first layer, and merges them after the last layer."""

    def __init__(
        self, description: AltUpDescription, hidden_size: int, parameters: Parameters, is_first: bool, is_last: bool
    ) -> None:
        """The first pipeline stage calls `expand`, the last one `merge`."""
        ops, count, size = parameters.ops, description.count, hidden_size
        self._ops, self._dtype, self._count, self._size = ops, parameters.dtype, count, size

        def taken(name: str) -> list[StoredWeight]:
            names = (f"{name}.{i}.weight" for i in range(count - 1))
            return [parameters.weights.take_matrix(name, (size, size)) for name in names]

        self._projections = ops.pack_linear(taken(PROJECTIONS)) if is_first else None
        self._streams = ZeroRows(size, count * size, parameters) if is_first else None
        self._unembed = [ops.pack_linear([matrix]) for matrix in taken(UNEMBED)] if is_last else []
        weights = [*self._unembed, *([] if self._projections is None else [self._projections])]
        parameters.num_matrix_bytes += sum(weight.num_bytes for weight in weights)
        self._norm = Norm(NormDescription(_LEAST_SQUARE, has_weight=False), parameters, "", size)
        self._mean = parameters.mean_of(size)

    def expand(self, hidden: Array) -> Array:
        """Return the residual streams [T, streams * H]: hidden [T, H], then projections of it, scaled to the same
        magnitude."""
        ops, rows = self._ops, hidden.shape[0]
        assert self._projections is not None and self._streams is not None, "the first stage expands"
        others = ops.linear(hidden, self._projections, self._dtype)
        normed = self._norm.forward(others.reshape(rows, self._count - 1, self._size)).reshape(rows, -1)
        residual_streams = self._streams.of(hidden)
        ops.add(residual_streams[:, : self._size], hidden)
        ops.add(residual_streams[:, self._size :], ops.multiply(normed, self._magnitude(hidden)))
        return residual_streams

    def merge(self, residual_streams: Array) -> Array:
        """Return one stream [T, H]: the mean of the first stream and of the projections of the others, which are scaled
        to the first stream's magnitude. residual_streams [T, streams * H]."""
        ops, size = self._ops, self._size
        first = residual_streams[:, :size]
        magnitude, merged = self._magnitude(first), None
        for i, matrix in enumerate(self._unembed, 1):
            other = ops.linear(residual_streams[:, i * size : (i + 1) * size], matrix, self._dtype)
            other = ops.multiply(self._norm.forward(other), magnitude)
            if merged is None:
                merged = other
            else:
                ops.add(merged, other)
        assert merged is not None
        ops.add(merged, first)
        scale_in_place(ops, merged, 1 / self._count)
        return merged

    def _magnitude(self, x: Array) -> Array:
        """Return the root mean square of each row of x [T, H]: [T, 1]. It is computed as the mean of x * norm(x)."""
        return self._ops.linear(self._ops.multiply(x, self._norm.forward(x)), self._mean, self._dtype)
