"""A tensor of a file that is not read yet. The modules of file formats make these, and `FileWeights` serves them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.loading.weights import floats
from octavo.quantization import Layout, StoredWeight
from octavo.quantization.formats import PLAIN_OF_DTYPE


class FileTensor(NamedTuple):
    """A tensor of a file, to be read by `read`. `layout` is the layout of the packed matrix; None if its format
    determines the layout. `array` returns the elements of a tensor that is a plain array."""

    format: str  # a `StoredWeight.format`, or the name of an element type that is not read
    shape: tuple[int, ...]
    read: Callable[[], StoredWeight]
    is_untransposed: bool = False  # True for [outputs, inputs] where the class's checkpoints have the transpose
    layout: Layout | None = None
    array: Callable[[], NDArray[Any]] | None = None

    def elements(self) -> NDArray[Any]:
        """Return what `array` returns."""
        assert self.array is not None, "it is no plain array"
        return self.array()


def element_tensor(dtype: str, shape: tuple[int, ...], array: Callable[[], NDArray[Any]]) -> FileTensor:
    """Return a tensor of elements of one type. float64 becomes float32, because no packer reads float64."""

    def read() -> StoredWeight:
        found = array()
        return floats(found.astype(np.float32) if dtype == "float64" else found)

    name = "F32" if dtype == "float64" else PLAIN_OF_DTYPE.get(dtype, dtype)
    return FileTensor(name, shape, read, array=array)
