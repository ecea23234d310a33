"""Array functions for unpackers that work on numpy arrays and torch tensors.

A file's bytes are a numpy array. A GPU's packers move the bytes to the GPU first and unpack them there with the same
functions. So unpackers are written once: with operators, slices, `reshape`, the functions below, and the functions of
`namespace`, which take `axis` in both libraries. torch is imported only when a torch tensor is passed.
"""

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = Any  # a numpy array or a torch tensor

# The element types of models by name.
FLOATS: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def namespace(x: Array) -> Any:
    """Return the module whose functions take `x`: numpy or torch."""
    if isinstance(x, (np.ndarray, np.generic)):
        return np
    import torch

    return torch


def dtype_of(x: Array, name: str) -> Any:
    """Return the element type `name` ("uint8", "float32", "float8_e4m3fn", ...) of the library of `x`."""
    xp = namespace(x)
    return getattr(xp, name) if hasattr(xp, name) else np.dtype(getattr(ml_dtypes, name))


def cast(x: Array, name: str) -> Array:
    """Return the values converted to the element type `name`."""
    return x.astype(dtype_of(x, name)) if namespace(x) is np else x.to(dtype_of(x, name))


def reinterpret(x: Array, name: str) -> Array:
    """Return the bytes as elements of the type `name`; the last axis shrinks or grows."""
    contiguous = np.ascontiguousarray(x) if namespace(x) is np else x.contiguous()
    return contiguous.view(dtype_of(x, name))


def transposed(x: Array) -> Array:
    """Return x [N, K] as a contiguous array [K, N]. A transposed view would make later work jump through memory.

    If rows lie a power of two apart, numpy's own copy of a view takes up to a hundred times as long: all its cache
    lines compete for one place in the cache. Pieces of 64 by 256 avoid this."""
    if not isinstance(x, np.ndarray):
        return x.T.contiguous()
    out = np.empty(x.shape[::-1], x.dtype)
    for row in range(0, x.shape[0], 64):
        for column in range(0, x.shape[1], 256):
            piece = x[row : row + 64, column : column + 256]
            out[column : column + 256, row : row + 64] = piece.T
    return out


def arange(like: Array, stop: int, step: int = 1, dtype: str = "int64") -> Array:
    """Return 0, step, 2 * step, ... below `stop`, in the library and on the device of `like`."""
    if namespace(like) is np:
        return np.arange(0, stop, step, dtype=dtype)
    return namespace(like).arange(0, stop, step, dtype=dtype_of(like, dtype), device=like.device)


def constant(like: Array, values: Sequence[float] | NDArray[Any], dtype: str) -> Array:
    """Return an array of `values` in the library and on the device of `like`."""
    if namespace(like) is np:
        return np.array(values, dtype)
    return namespace(like).tensor(values, dtype=dtype_of(like, dtype), device=like.device)


def taken(indices: Array, values: Sequence[float], dtype: str) -> Array:
    """Return the elements of `values`, of which there are sixteen, with these indices uint8 [N, K], as `dtype`. K is
    even."""
    table = constant(indices, values, dtype)
    if namespace(indices) is not np:
        return table[cast(indices, "int64")]
    # Two neighbours are taken as one word: the first has the low byte of the word of both indices.
    pairs = np.zeros((16, 256, 2), dtype)
    pairs[:, :16, 0], pairs[..., 1] = table, table[:, None]
    word = f"uint{16 * table.itemsize}"
    return pairs.view(word).ravel().take(reinterpret(indices, "uint16")).view(dtype)


def repeated(x: Array, count: int, length: int) -> Array:
    """Return x [N, G] with each column repeated `count` times, cut to [N, length]."""
    return x[:, arange(x, length) // count]


def padded(x: Array, multiple: int) -> Array:
    """Return x [N, K] with columns of zeros added, up to a multiple of `multiple` columns."""
    rest = -x.shape[1] % multiple
    if namespace(x) is np:
        return np.pad(x, ((0, 0), (0, rest)))
    return namespace(x).nn.functional.pad(x, (0, rest))


def converted(x: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Return floats in a type of `FLOATS`, rounded to nearest even; `x` itself if it has this type already."""
    target = FLOATS[dtype]
    if x.dtype == target:
        return x
    with np.errstate(over="ignore", invalid="ignore"):
        # float64 is rounded to float32 first, as in torch.
        return (x.astype(np.float32) if x.dtype.itemsize == 8 else x).astype(target, copy=False)
