"""Named tensors of a checkpoint, one at a time: arrays in the type that the model computes in, or stored matrices.

Everything is numpy's and in the host's memory; `octavo.ops` packs it and brings it to its device. Names and shapes are
Hugging Face's whatever the format. `octavo.loading.file_weights` opens checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.quantization import Layout, StoredWeight, dequantize, take_rows
from octavo.quantization.array_functions import transposed
from octavo.quantization.formats import PLAIN, PLAIN_OF_DTYPE, QUANTIZED_AT_LOAD

Bounds = tuple[int, int] | None  # a share (begin, end) of rows or columns, or all of them


class Weights:
    """An open checkpoint. Tensors that were taken stay valid after `close`, and may alias the files: never write.

    Floats come in `dtype` ("float32", "bfloat16", "float16"), or, with `quantization` "int8", "int4" or "fp8", as they
    are stored where they are matrices: the packer quantizes them. Blocks of few bits stay as they are, unless `dtype`
    is float32: that is the reference, which computes with what they stand for.
    """

    position_bytes = 0  # for each position that a sequence may have: of the tables of the model they are for

    def __init__(self, dtype: str, quantization: str | None) -> None:
        self._dtype, self._quantization = dtype, quantization

    def __contains__(self, name: str) -> bool:
        raise NotImplementedError

    def stored_format(self, name: str) -> str:
        """The `StoredWeight.format` of a tensor as it is stored. Raises `LoadError` if it is absent or not read."""
        raise NotImplementedError

    def stored(self, name: str, shape: tuple[int, ...]) -> StoredWeight:
        """The tensor as it is stored; one of another number of dimensions than two is a row. Raises `LoadError` if it
        is absent, not read, or not of this shape."""
        raise NotImplementedError

    def is_untransposed(self, name: str, untransposed_shape: tuple[int, ...] | None = None) -> bool:
        """Return True if the matrix is stored as [N, K] although this class usually stores [K, N]: GGUF files do, and
        files in which it has `untransposed_shape`."""
        return False

    def take(
        self, name: str, shape: tuple[int, ...], dtype: str | None = None, own: range | None = None
    ) -> NDArray[Any]:
        """The tensor in the model's type, or in `dtype`; of its first dimension those entries that are `own`, and only
        they are read. Raises `LoadError` if it is absent or of another shape."""
        stored = self.stored(name, shape)
        if own is not None:
            rows, matrix = math.prod(shape[1:-1]), _as_matrix(stored, shape)
            is_row = len(shape) == 1
            stored = matrix.columns(own.start, own.stop) if is_row else matrix.rows(own.start * rows, own.stop * rows)
            shape = (len(own), *shape[1:])
        return dequantize(stored, dtype or self._dtype).reshape(shape)

    def take_integers(self, name: str, shape: tuple[int, ...]) -> NDArray[np.int64]:
        """A tensor of whole numbers; zeros where there are no files. Raises `LoadError` as `take` does."""
        return np.zeros(shape, np.int64)

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
        """A matrix of `shape` [N, K] that is going to be packed, or a share of its rows and columns, or of its rows
        those that `order` names, in this order. Only that is read. One that is stored transposed has `shape` [K, N].
        Matrices stacked in a tensor [..., N, K] are one below the other.

        Raises `LoadError` as `take` does, and `ConfigError` for a share that cannot be cut.
        """
        if is_transposed and self.is_untransposed(name):
            shape, is_transposed = (*shape[:-2], shape[-1], shape[-2]), False
        stored = _as_matrix(self.stored(name, shape), shape)
        if is_transposed:
            stored = floats(transposed(dequantize(stored, self._dtype)))
        target = self._matrix_format(stored.format)
        if target in QUANTIZED_AT_LOAD.values():  # nothing is computed here: the packer quantizes as it reads
            stored = StoredWeight(target, stored.tensors, stored.shape)
        stored = stored.shard(rows, columns)
        stored = stored if stored.format == target else floats(dequantize(stored, self._dtype))
        return stored if order is None else take_rows(stored, order)

    def matrix_format(self, name: str) -> str:
        """The `StoredWeight.format` that `take_matrix` gives, without taking. Raises `LoadError` if it is absent."""
        return self._matrix_format(self.stored_format(name))

    def matrix_layout(self, name: str) -> Layout | None:
        """How a matrix is held once it is packed, where its format does not say so. `LoadError` if it is absent."""
        return None

    def _matrix_format(self, stored_format: str) -> str:
        if stored_format in PLAIN and self._quantization in QUANTIZED_AT_LOAD:
            return QUANTIZED_AT_LOAD[self._quantization]
        if stored_format in PLAIN or self._dtype == "float32":
            return PLAIN_OF_DTYPE[self._dtype]
        return stored_format

    def read_again(self, take: Callable[[], object]) -> None:
        """A layer shares what `take` would take with one before it: nothing is taken, but a step reads it again."""

    def pass_over(self, prefix: str) -> None:
        """The model knows tensors whose names begin so, and has no use for them."""

    def check_all_taken(self) -> None:
        """Raise `LoadError` if the checkpoint has weights that the model did not ask for: it would compute nonsense."""

    def close(self) -> None:
        """Let go of the files."""


def _as_matrix(stored: StoredWeight, shape: tuple[int, ...]) -> StoredWeight:
    """A tensor [..., N, K] as matrices one below the other."""
    size = (math.prod(shape[:-1]), shape[-1])
    if stored.shape == size:
        return stored
    return StoredWeight(stored.format, {"data": stored.data.reshape(size[0], -1)}, size)


def floats(data: NDArray[Any]) -> StoredWeight:
    """A tensor of float32, float16 or bfloat16."""
    rows = data if data.ndim == 2 else data.reshape(1, -1)
    return StoredWeight(PLAIN_OF_DTYPE[data.dtype.name], {"data": rows}, (rows.shape[0], rows.shape[1]))
