"""Named tensors of a checkpoint, one at a time: arrays in the type that the model computes in, or stored matrices.

All tensors are numpy arrays in host memory; `octavo.ops` packs them and moves them to the device. Names and shapes are
Hugging Face's for every file format. `octavo.loading.file_weights` opens checkpoints.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.quantization import Layout, StoredWeight, dequantize, take_rows
from octavo.quantization.array_functions import transposed
from octavo.quantization.formats import PLAIN, PLAIN_OF_DTYPE, QUANTIZED_AT_LOAD

Bounds = tuple[int, int] | None  # the rows or columns from begin to end, exclusive; None: all


class Weights:
    """An open checkpoint. Taken tensors stay valid after `close` and may alias the files: never write to them.

    Floats come in `dtype` ("float32", "bfloat16", "float16"). With `quantization` "int8", "int4" or "fp8", float
    matrices come as they are stored, because the packer quantizes them. Quantized blocks stay as they are, unless
    `dtype` is float32: the float32 reference computes with the dequantized values.
    """

    position_bytes = 0  # bytes of the model's tables for each position that a sequence may have
    on_taken: Callable[[float], None] | None = None  # called with the share of the checkpoint's elements that are taken

    def __init__(self, dtype: str, quantization: str | None) -> None:
        self._dtype, self._quantization = dtype, quantization

    def __contains__(self, name: str) -> bool:
        raise NotImplementedError

    def stored_format(self, name: str) -> str:
        """Return the `StoredWeight.format` of a stored tensor. Raises `LoadError` if the tensor is absent or its format
        cannot be read."""
        raise NotImplementedError

    def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise `LoadError` if the tensor is absent or has another shape."""

    def stored(self, name: str, shape: tuple[int, ...]) -> StoredWeight:
        """Return the tensor as it is stored: a matrix as [N, K], a tensor of another number of dimensions as one row.
        Raises `LoadError` if it is absent, cannot be read, or has another shape."""
        raise NotImplementedError

    def is_untransposed(self, name: str, untransposed_shape: tuple[int, ...] | None = None) -> bool:
        """Return True if the matrix is stored as [N, K] although checkpoints of this model class usually store [K, N].
        GGUF files do, and so do files in which the matrix has `untransposed_shape`."""
        return False

    def take(
        self, name: str, shape: tuple[int, ...], dtype: str | None = None, own: range | None = None
    ) -> NDArray[Any]:
        """Return the tensor in the model's type, or in `dtype`. With `own`, only these entries of the first dimension
        are read and returned. Raises `LoadError` if the tensor is absent or has another shape."""
        stored = self.stored(name, shape)
        if own is not None:
            rows, matrix = math.prod(shape[1:-1]), _as_matrix(stored, shape)
            is_row = len(shape) == 1
            stored = matrix.columns(own.start, own.stop) if is_row else matrix.rows(own.start * rows, own.stop * rows)
            shape = (len(own), *shape[1:])
        return dequantize(stored, dtype or self._dtype).reshape(shape)

    def take_integers(self, name: str, shape: tuple[int, ...]) -> NDArray[np.int64]:
        """Return a tensor of integers; zeros if there are no files. Raises `LoadError` as `take` does."""
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
        """Return a matrix of `shape` [N, K] for the packer, or a part of the matrix: `rows` and `columns` cut it, and
        `order` names the rows to take, in this order. Only the returned part is read.

        With `is_transposed`, `shape` is [K, N]. A stack of matrices [..., N, K] becomes one matrix, with the matrices
        one below the other. Raises `LoadError` as `take` does, and `ConfigError` if the matrix cannot be cut there.
        """
        if is_transposed and self.is_untransposed(name):
            shape, is_transposed = (*shape[:-2], shape[-1], shape[-2]), False
        stored = _as_matrix(self.stored(name, shape), shape)
        if is_transposed:
            stored = floats(transposed(dequantize(stored, self._dtype)))
        target = self._matrix_format(stored.format)
        if target in QUANTIZED_AT_LOAD.values():  # only the name changes here: the packer quantizes while it reads
            stored = StoredWeight(target, stored.tensors, stored.shape)
        stored = stored.shard(rows, columns)
        stored = stored if stored.format == target else floats(dequantize(stored, self._dtype))
        return stored if order is None else take_rows(stored, order)

    def matrix_format(self, name: str) -> str:
        """Return the `StoredWeight.format` that `take_matrix` would return; takes nothing. Raises `LoadError` if the
        matrix is absent."""
        return self._matrix_format(self.stored_format(name))

    def matrix_layout(self, name: str) -> Layout | None:
        """Return the layout of the packed matrix, or None if its format determines the layout. Raises `LoadError` if
        the matrix is absent."""
        return None

    def _matrix_format(self, stored_format: str) -> str:
        if stored_format in PLAIN and self._quantization in QUANTIZED_AT_LOAD:
            return QUANTIZED_AT_LOAD[self._quantization]
        if stored_format in PLAIN or self._dtype == "float32":
            return PLAIN_OF_DTYPE[self._dtype]
        return stored_format

    def read_again(self, take: Callable[[], object]) -> None:
        """Note that a layer shares the tensors that `take` would take with an earlier layer. Nothing is taken, but each
        step reads these tensors again."""

    def ignore(self, prefix: str) -> None:
        """Let `check_all_taken` accept all tensors whose names begin with `prefix`: the model knows them and does not
        use them."""

    def check_all_taken(self) -> None:
        """Raise `LoadError` if the checkpoint has weights that the model did not take: a model without them would
        compute nonsense."""

    def close(self) -> None:
        """Release the files."""


def _as_matrix(stored: StoredWeight, shape: tuple[int, ...]) -> StoredWeight:
    """Return a stack of matrices [..., N, K] as one matrix, with the matrices one below the other."""
    size = (math.prod(shape[:-1]), shape[-1])
    if stored.shape == size:
        return stored
    return StoredWeight(stored.format, {"data": stored.data.reshape(size[0], -1)}, size)


def floats(data: NDArray[Any]) -> StoredWeight:
    """Return a float32, float16 or bfloat16 array as a `StoredWeight`; an array that is no matrix becomes one row."""
    rows = data if data.ndim == 2 else data.reshape(1, -1)
    return StoredWeight(PLAIN_OF_DTYPE[data.dtype.name], {"data": rows}, (rows.shape[0], rows.shape[1]))
