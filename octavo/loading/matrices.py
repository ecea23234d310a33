"""In which format a stored matrix is handed to packers: the one place that decides on it."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from octavo.quantization import StoredWeight, dequantize
from octavo.quantization.formats import PLAIN, PLAIN_OF_DTYPE, QUANTIZED_AT_LOAD

Bounds = tuple[int, int] | None  # a share (begin, end) of rows or columns, or all of them


def handed_format(stored_format: str, dtype: str, quantization: str | None) -> str:
    """The format of a matrix that a file stores as `stored_format`.

    Floats come in the model's type, or as they are stored where the packer is to quantize them. Blocks of few bits stay
    as they are, unless the model computes in float32: that is the reference, which computes with what they stand for.
    """
    if stored_format in PLAIN and quantization in QUANTIZED_AT_LOAD:
        return QUANTIZED_AT_LOAD[quantization]
    if stored_format in PLAIN or dtype == "float32":
        return PLAIN_OF_DTYPE[dtype]
    return stored_format


def handed(
    stored: StoredWeight, dtype: str, quantization: str | None, rows: Bounds = None, columns: Bounds = None
) -> StoredWeight:
    """A share of a matrix in its `handed_format`. Only the share is read."""
    target = handed_format(stored.format, dtype, quantization)
    if target in QUANTIZED_AT_LOAD.values():  # nothing is computed here: the packer quantizes as it reads
        stored = StoredWeight(target, stored.tensors, stored.shape)
    if rows is not None:
        stored = stored.rows(*rows)
    if columns is not None:
        stored = stored.columns(*columns)
    return stored if stored.format == target else floats(dequantize(stored, dtype))


def floats(data: NDArray[Any]) -> StoredWeight:
    """A matrix [N, K] of float32, float16 or bfloat16."""
    return StoredWeight(PLAIN_OF_DTYPE[data.dtype.name], {"data": data}, (data.shape[0], data.shape[1]))
