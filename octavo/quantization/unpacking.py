"""What can be asked of a stored weight of any format: its codes, its values, how large it becomes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ConfigError
from octavo.quantization import awq, fp8, gguf, gptq, int8
from octavo.quantization.arrays import FLOATS, converted
from octavo.quantization.codes import Codes
from octavo.quantization.formats import PLAIN
from octavo.quantization.layout import Layout
from octavo.quantization.stored import StoredWeight

_UNPACKERS: dict[str, Callable[[StoredWeight], Codes]] = {
    **dict.fromkeys(gguf.LAYOUTS, gguf.unpack),
    int8.FORMAT: int8.unpack,
    "GPTQ": gptq.unpack,
    "GPTQ_V2": gptq.unpack,
    "AWQ": awq.unpack,
}
# Elements unpacked at once, so that what lies between packed bytes and values stays in the processor's cache.
_CHUNK_ELEMENTS = 1 << 16


def unpack(stored: StoredWeight) -> Codes:
    """What a matrix of few bits says, exactly. Raises `ConfigError` for formats that have no codes."""
    unpacker = _UNPACKERS.get(stored.format)
    if unpacker is None:
        raise ConfigError(f"{stored.format} matrices have no codes; these have: {', '.join(_UNPACKERS)}.")
    return unpacker(stored)


def dequantize(stored: StoredWeight, dtype: str = "float32") -> NDArray[Any]:
    """The values [N, K] that the matrix stands for, rounded once if `dtype` is not float32. Floats of that type already
    are given back as they are. Only for tensors of numpy's; elsewhere `unpack(stored).dequantize()`."""
    if stored.format in PLAIN:
        return converted(stored.data, dtype)
    if stored.format not in gguf.LAYOUTS:
        values = fp8.dequantize(stored) if stored.format == fp8.FORMAT else unpack(stored).dequantize()
        return converted(values, dtype)
    num_out, num_in = stored.shape
    out = np.empty(stored.shape, FLOATS[dtype])
    step = max(1, _CHUNK_ELEMENTS // num_in)
    for begin in range(0, num_out, step):
        end = min(begin + step, num_out)
        out[begin:end] = converted(unpack(stored.rows(begin, end)).dequantize(), dtype)
    return out


def layout_of(stored_format: str) -> Layout:
    """The least layout that holds a matrix of this `StoredWeight.format`. Raises `ConfigError` if none does."""
    if stored_format == fp8.FORMAT:
        raise ConfigError("8-bit floats are multiplied by GPUs only; --quantization int8 is for every device.")
    if stored_format == int8.FORMAT:
        return int8.LAYOUT
    if stored_format not in gguf.LAYOUTS:
        raise ConfigError(f"{stored_format} matrices have no layout of their own; those of their codes have one.")
    return gguf.LAYOUTS[stored_format]


def packed_bytes(stored_format: str, shape: tuple[int, int]) -> int:
    """Memory of a matrix of this `StoredWeight.format` once it is packed, by itself."""
    if plain := PLAIN.get(stored_format):
        return shape[0] * shape[1] * FLOATS[plain].itemsize
    # An eight-bit float and its scale take no more than an integer and its.
    return layout_of(int8.FORMAT if stored_format == fp8.FORMAT else stored_format).packed_bytes(*shape)
