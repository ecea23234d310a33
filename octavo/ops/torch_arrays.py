"""Between numpy's arrays and torch's tensors, and the names of element types in torch."""

from __future__ import annotations

import warnings
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_NAMES = (
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16", "int8",
    "uint8", "bool",
)  # fmt: skip
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES}
_NAME_OF = {dtype: name for name, dtype in DTYPES.items()}
# What numpy has of another library, as integers of the same size.
_AS_INTEGERS = {
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: (torch.uint8, ml_dtypes.float8_e5m2),
}
_INTEGERS_OF = {
    np.dtype(target): (np.dtype(str(integers).removeprefix("torch.")), source)
    for source, (integers, target) in _AS_INTEGERS.items()
}


def dtype_name(dtype: torch.dtype) -> str:
    return _NAME_OF[dtype]


def to_torch(array: NDArray[Any]) -> Tensor:
    """The same memory as a tensor on the CPU. It is the caller's not to write where the array is read-only."""
    if array.dtype.itemsize == 4 and array.dtype.kind == "u":
        array = array.view(np.int32)  # words of bits
    integers, dtype = _INTEGERS_OF.get(array.dtype, (array.dtype, None))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        tensor = torch.from_numpy(array.view(integers))
    return tensor if dtype is None else tensor.view(dtype)


def to_numpy(tensor: Tensor) -> NDArray[Any]:
    """The same memory of a tensor on the CPU as an array."""
    if found := _AS_INTEGERS.get(tensor.dtype):
        integers, dtype = found
        return tensor.view(integers).numpy().view(dtype)
    array: NDArray[Any] = tensor.numpy()
    return array
