"""Conversion of numpy arrays to torch tensors, uploads that do not wait for the device, and torch's types by name."""

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
# Types that numpy gets from ml_dtypes: (integer type of the same size, torch's type).
_AS_INTEGERS = {
    np.dtype(ml_dtypes.bfloat16): (np.dtype(np.int16), torch.bfloat16),
    np.dtype(ml_dtypes.float8_e4m3fn): (np.dtype(np.uint8), torch.float8_e4m3fn),
    np.dtype(ml_dtypes.float8_e5m2): (np.dtype(np.uint8), torch.float8_e5m2),
}

_PIECE_BYTES = 32 << 20  # of a large array, copied to a device at once


def to_torch(array: NDArray[Any]) -> Tensor:
    """Return the same memory as a tensor on the CPU. The caller must not write to it if the array is read-only."""
    if array.dtype.itemsize == 4 and array.dtype.kind == "u":
        array = array.view(np.int32)  # words of bits
    integers, dtype = _AS_INTEGERS.get(array.dtype, (array.dtype, None))
    if array.flags.writeable:
        tensor = torch.from_numpy(array.view(integers))
    else:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            tensor = torch.from_numpy(array.view(integers))
    return tensor if dtype is None else tensor.view(dtype)


def upload(x: Tensor | NDArray[Any], device: torch.device) -> Tensor:
    """Return `x` on `device`, copied in the order of the current stream, without waiting if `x` is small.

    From pageable memory torch would wait until the device has finished all earlier work, and a driver's thread would
    copy alone. So torch's threads copy `x` to pinned memory first. torch keeps pinned memory until the stream has read
    it. An `x` of more than `_PIECE_BYTES` goes in pieces. Two of them are in pinned memory at a time, so the third one
    waits until the stream has read the first."""
    tensor = x if isinstance(x, Tensor) else to_torch(x)
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    if tensor.nbytes <= _PIECE_BYTES:
        return tensor.pin_memory().to(device, non_blocking=True)
    out = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    rows = max(1, len(tensor) * _PIECE_BYTES // tensor.nbytes)
    copied: list[torch.cuda.Event] = []
    for begin in range(0, len(tensor), rows):
        if len(copied) == 2:
            copied.pop(0).synchronize()
        piece = tensor[begin : begin + rows].contiguous()  # a part of a transposed array would pin all of it
        out[begin : begin + rows].copy_(piece.pin_memory(), non_blocking=True)
        copied.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
        copied[-1].record()
    return out
