"""Which tensors a model takes from a checkpoint: the model is built over weights that only record what is taken.

The model's constructor is the only list of its tensors. Memory estimates and dummy checkpoints are made from the
record.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.loading.weights import Bounds, Weights
from octavo.quantization import Layout, StoredWeight, packed_bytes
from octavo.quantization.array_functions import FLOATS
from octavo.quantization.formats import AXES, BLOCK_TYPES, PLAIN, PLAIN_OF_DTYPE


@dataclass(frozen=True, slots=True)
class RecordedTensor:
    """A taken tensor: a whole array, some entries of its first dimension, or a matrix of which a part was taken."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    shard: StoredWeight | None  # the taken part [N, K] of a matrix for the packer; None for an array
    layout: Layout | None = None  # of the packed matrix; None if its format determines the layout
    num_own: int | None = None  # number of entries of an array's first dimension that were taken; None: all

    @property
    def is_matrix(self) -> bool:
        return self.shard is not None


class RecordingWeights(Weights):
    """`Weights` that record the tensors that are taken, and return zeros that take no memory.

    `tensors` lists the taken tensors in order. `repeated` lists the tensors that a layer shares with an earlier layer,
    once for each such layer. `weights` is a checkpoint to look up formats and optional tensors in; nothing is taken
    from it. Without it, every tensor exists, in floats of `dtype`.
    """

    def __init__(self, dtype: str, weights: Weights | None = None) -> None:
        super().__init__(dtype, None)
        self.tensors: list[RecordedTensor] = []
        self.repeated: list[RecordedTensor] = []
        self._weights = weights

    def __contains__(self, name: str) -> bool:
        return self._weights is None or name in self._weights

    def is_untransposed(self, name: str, untransposed_shape: tuple[int, ...] | None = None) -> bool:
        return self._weights is not None and self._weights.is_untransposed(name, untransposed_shape)

    def take(
        self, name: str, shape: tuple[int, ...], dtype: str | None = None, own: range | None = None
    ) -> NDArray[Any]:
        if self._weights is not None:
            self._weights.check_shape(name, shape)
        num_own = None if own is None else len(own)
        self.tensors.append(RecordedTensor(name, shape, None, num_own=num_own))
        return _zeros(shape if num_own is None else (num_own, *shape[1:]), FLOATS[dtype or self._dtype])

    def take_matrix(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: Bounds = None,
        columns: Bounds = None,
        *,
        is_transposed: bool = False,
        order: NDArray[np.intp] | None = None,
    ) -> StoredWeight:
        if is_transposed and self.is_untransposed(name):
            shape, is_transposed = (*shape[:-2], shape[-1], shape[-2]), False
        if self._weights is not None:
            self._weights.check_shape(name, shape)
        if order is not None:  # all rows are zeros, so only their number counts
            assert rows is None
            rows = (0, len(order))
        stored_format = self.matrix_format(name)
        if stored_format in AXES:
            return self._take_quantized(name, stored_format, shape, rows, columns, is_transposed)
        block = BLOCK_TYPES.get(stored_format)
        num_rows, num_columns = math.prod(shape[:-1]), shape[-1]
        if block is None:
            data = _zeros((num_rows, num_columns), FLOATS[PLAIN.get(stored_format, self._dtype)])
        else:
            data = _zeros((num_rows, num_columns // block.block_size * block.block_bytes), np.dtype(np.uint8))
        stored = StoredWeight(stored_format, {"data": data}, (num_rows, num_columns))
        if is_transposed:
            stored = StoredWeight(stored_format, {"data": data.T}, (num_columns, num_rows))
        stored = stored.shard(rows, columns)
        self.tensors.append(RecordedTensor(name, shape, stored))
        return stored

    def _take_quantized(
        self, name: str, stored_format: str, shape: tuple[int, ...], rows: Bounds, columns: Bounds, is_transposed: bool
    ) -> StoredWeight:
        """Record and return a quantized matrix without its tensors: each format has several, with their own shapes."""
        assert self._weights is not None
        size = (math.prod(shape[:-1]), shape[-1])
        if is_transposed and not self.is_untransposed(name):
            size = size[::-1]
        stored = StoredWeight(stored_format, {}, size).shard(rows, columns)
        self.tensors.append(RecordedTensor(name, shape, stored, self._weights.matrix_layout(name)))
        return stored

    def matrix_format(self, name: str) -> str:
        return PLAIN_OF_DTYPE[self._dtype] if self._weights is None else self._weights.matrix_format(name)

    def read_again(self, take: Callable[[], object]) -> None:
        taken, self.tensors = self.tensors, []
        take()
        self.repeated += self.tensors
        self.tensors = taken

    def packed_bytes(
        self, keeps_superblocks: bool = False, *, with_repeated: bool = False, num_positions: int = 0
    ) -> tuple[int, str]:
        """Return the bytes of the taken matrices, each packed by itself, and the names of their formats.

        Arrays of several dimensions count unpacked, such as the arrays that latent attention makes matrices of; so do
        the model's tables for `num_positions`. Norms and biases are too small to count. With `with_repeated`, the
        bytes are those that a step reads.
        """
        num_bytes, kinds = num_positions * self.position_bytes, dict[str, None]()
        for tensor in self.tensors + self.repeated if with_repeated else self.tensors:
            if tensor.shard is not None:
                shard = tensor.shard
                num_bytes += packed_bytes(shard.format, shard.shape, tensor.layout, keeps_superblocks)
                kinds[_KINDS.get(tensor.shard.format, tensor.shard.format)] = None
            elif len(tensor.shape) > 1:
                count = tensor.shape[0] if tensor.num_own is None else tensor.num_own
                num_bytes += count * math.prod(tensor.shape[1:]) * FLOATS[self._dtype].itemsize
        return num_bytes, " and ".join(kinds)


# Users' names of the formats that are not the name of a file's type.
_KINDS = PLAIN | {"INT8": "int8", "INT4": "int4", "FP8": "fp8"}


def _zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.broadcast_to(np.zeros((), dtype), shape)
