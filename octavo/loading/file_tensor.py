"""A tensor of a file that is not read yet: what formats of files make and `FileWeights` serves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.loading.weights import floats
from octavo.quantization import Layout, StoredWeight
from octavo.quantization.formats import PLAIN_OF_DTYPE


class FileTensor(NamedTuple):
    """`layout` is how a matrix is held once it is packed, where its format does not say so. `array` are the elements of
    a tensor that is no more than that."""

    format: str  # a `StoredWeight.format`, or the name of an element type that is not read
    shape: tuple[int, ...]
    read: Callable[[], StoredWeight]
    is_untransposed: bool = False  # a matrix [outputs, inputs] that checkpoints of its class have the other way round
    layout: Layout | None = None
    array: Callable[[], NDArray[Any]] | None = None


def element_tensor(dtype: str, shape: tuple[int, ...], array: Callable[[], NDArray[Any]]) -> FileTensor:
    """A tensor of elements of one type. Those of 64 bits, which no packer reads, become float32."""

    def read() -> StoredWeight:
        found = array()
        return floats(found.astype(np.float32) if dtype == "float64" else found)

    name = "F32" if dtype == "float64" else PLAIN_OF_DTYPE.get(dtype, dtype)
    return FileTensor(name, shape, read, array=array)
