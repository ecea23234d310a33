"""What unpackers need beyond operators, for numpy's arrays and torch's tensors alike.

A file's bytes are numpy's. Packers of a GPU move them there first and unpack with the same functions, so that these are
written once: with operators, slices, `reshape`, and the functions of `namespace`, which take `axis` in both libraries.
torch is imported only where a tensor of its own comes in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = Any  # numpy's or torch's

# The element types of models by their names.
FLOATS: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def namespace(x: Array) -> Any:
    """The module whose functions take `x`: numpy or torch."""
    if isinstance(x, (np.ndarray, np.generic)):
        return np
    import torch

    return torch


def dtype_of(x: Array, name: str) -> Any:
    """An element type as the library of `x` knows it: "uint8", "float32", "float8_e4m3fn", ..."""
    xp = namespace(x)
    return getattr(xp, name) if hasattr(xp, name) else np.dtype(getattr(ml_dtypes, name))


def cast(x: Array, name: str) -> Array:
    """The values in another element type."""
    return x.astype(dtype_of(x, name)) if namespace(x) is np else x.to(dtype_of(x, name))


def reinterpret(x: Array, name: str) -> Array:
    """The bytes as another element type; the last axis shrinks or grows."""
    contiguous = np.ascontiguousarray(x) if namespace(x) is np else x.contiguous()
    return contiguous.view(dtype_of(x, name))


def transposed(x: Array) -> Array:
    """x [N, K] as rows [K, N] that lie one after the other: what is made of a mere view of them goes across memory.

    numpy's own copy of a view takes up to a hundred times as long where rows lie a power of two apart, as all of its
    lines have one place in a cache; a piece of 64 by 256 has places enough."""
    if not isinstance(x, np.ndarray):
        return x.T.contiguous()
    out = np.empty(x.shape[::-1], x.dtype)
    for row in range(0, x.shape[0], 64):
        for column in range(0, x.shape[1], 256):
            piece = x[row : row + 64, column : column + 256]
            out[column : column + 256, row : row + 64] = piece.T
    return out


def arange(like: Array, stop: int, step: int = 1, dtype: str = "int64") -> Array:
    """0, step, 2 * step, ... below `stop`, where `like` is."""
    if namespace(like) is np:
        return np.arange(0, stop, step, dtype=dtype)
    return namespace(like).arange(0, stop, step, dtype=dtype_of(like, dtype), device=like.device)


def constant(like: Array, values: Sequence[float], dtype: str) -> Array:
    """A table, where `like` is."""
    if namespace(like) is np:
        return np.array(values, dtype)
    return namespace(like).tensor(values, dtype=dtype_of(like, dtype), device=like.device)


def repeated(x: Array, count: int, length: int) -> Array:
    """x [N, G], each column `count` times, cut to [N, length]."""
    return x[:, arange(x, length) // count]


def padded(x: Array, multiple: int) -> Array:
    """x [N, K] with zeros up to a multiple of columns."""
    rest = -x.shape[1] % multiple
    if namespace(x) is np:
        return np.pad(x, ((0, 0), (0, rest)))
    return namespace(x).nn.functional.pad(x, (0, rest))


def converted(x: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Floats in a type of `FLOATS`, rounded to nearest even; `x` itself if they are of that type already."""
    target = FLOATS[dtype]
    if x.dtype == target:
        return x
    with np.errstate(over="ignore", invalid="ignore"):
        # From 64 bits by way of 32, as torch rounds too.
        return (x.astype(np.float32) if x.dtype.itemsize == 8 else x).astype(target, copy=False)
