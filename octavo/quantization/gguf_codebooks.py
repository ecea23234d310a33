"""Unpacks GGUF's IQ1, IQ2 and IQ3 types exactly, to 8-bit codes. They store numbers of codebook vectors, signs, scales.

Four or eight neighbours are one vector of a codebook. ggml-common.h defines the codebooks, and the `gguf` package (the
extra `gguf`) contains them. The codebooks of IQ2 and IQ3 hold magnitudes, and each element has a sign. The codebooks of
IQ1 hold -1, 0 and 1; an eighth is added to a whole group, or subtracted from it.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ConfigError
from octavo.quantization.array_functions import Array, arange, cast, constant, namespace, reinterpret

_Unpacked = tuple[Array, Array, None]


@cache
def _codebook(name: str) -> NDArray[np.int8]:
    """Return a type's codebook [vectors, 4 or 8], in eighths for IQ1. Raises `ConfigError` if the `gguf` package is
    missing."""
    try:
        from gguf import quants
    except ImportError:
        raise ConfigError(f"{name} matrices need the codebooks of the gguf package: scripts/install gguf.") from None
    kind = getattr(quants, name)
    kind.init_grid()
    units = 8 if name.startswith("IQ1") else 1
    return np.ascontiguousarray(units * kind.grid.reshape(kind.grid.shape[-2:]), np.int8)


@cache
def _signs() -> NDArray[np.int8]:
    """Return the signs of each byte [256, 8]: -1 if the bit is set, else 1, lowest bit first."""
    return (1 - 2 * (np.arange(256)[:, None] >> np.arange(8) & 1)).astype(np.int8)


@cache
def _even_signs() -> NDArray[np.int8]:
    """Return the signs of each 7-bit number [128, 8]: seven bits are signs, and the eighth sign makes the number of
    minus signs even."""
    numbers = np.arange(128)
    parity = (numbers[:, None] >> np.arange(7) & 1).sum(1) & 1
    return np.ascontiguousarray(_signs()[numbers | parity << 7])


def _rows(table: NDArray[np.int8], numbers: Array) -> Array:
    """Look up rows of a table of four or eight columns: numbers [..., n] -> int8 [..., n, columns]. A row is copied as
    one word."""
    columns = table.shape[1]
    words = table.view(np.int64 if columns == 8 else np.int32)[:, 0]
    found = constant(numbers, words.tolist(), words.dtype.name)[cast(numbers, "int64")]
    return reinterpret(found, "int8").reshape(*numbers.shape, columns)


def _words(blocks: Array, num_bytes: int) -> Array:
    """Read little-endian numbers of two or four bytes: uint8 [..., n * num_bytes] -> int64 [..., n]."""
    return cast(reinterpret(blocks, f"uint{8 * num_bytes}"), "int64")


def _half(two_bytes: Array) -> Array:
    return cast(reinterpret(two_bytes, "float16"), "float32")


def _pieces(numbers: Array, bits: int, count: int) -> Array:
    """Split each number into `count` numbers of `bits` bits, lowest bits first: [..., n] -> [..., n * count]."""
    shifts = cast(arange(numbers, bits * count, bits), "int64")
    found = cast(numbers, "int64")[..., None] >> shifts & ((1 << bits) - 1)
    return found.reshape(*numbers.shape[:-1], -1)


def _signed(name: str, numbers: Array, signs: Array) -> Array:
    """Return a codebook's magnitudes times `signs` [..., n, 8], with 128 added: uint8 [N, B, 256]."""
    magnitudes = _rows(_codebook(name), numbers)
    return cast(magnitudes.reshape(*signs.shape) * signs, "uint8").reshape(*numbers.shape[:2], -1) ^ 128


def _shifted(name: str, numbers: Array, is_less: Array) -> Array:
    """Return a codebook's -1, 0 and 1 plus or minus an eighth, in eighths with 128 added: uint8 [N, B, 256]. `is_less`
    [N, B, 32] is 1 where the eighth is subtracted, for eight elements each."""
    eighths = _rows(_codebook(name), numbers) + (1 - 2 * cast(is_less, "int8"))[..., None]
    return cast(eighths, "uint8").reshape(*numbers.shape[:2], -1) ^ 128


def iq2_xxs(blocks: Array) -> _Unpacked:
    """Unpack IQ2_XXS. Each 32 elements have four vector numbers of a byte, then a word: four times seven bits of signs
    and a scale of four bits."""
    parts = blocks[..., 2:].reshape(*blocks.shape[:2], 8, 8)
    words = _words(parts[..., 4:], 4)[..., 0]
    signs = _rows(_even_signs(), _pieces(words & (1 << 28) - 1, 7, 4))
    scales = _half(blocks[..., :2]) * (cast(words >> 28, "float32") + 0.5) * 0.25
    return _signed("IQ2_XXS", parts[..., :4].reshape(*blocks.shape[:2], 32), signs), scales, None


def iq2_xs(blocks: Array) -> _Unpacked:
    """Unpack IQ2_XS. Each eight elements have a vector number of nine bits and seven bits of signs. Each 16 elements
    have a scale of four bits."""
    words = _words(blocks[..., 2:66], 2)
    signs = _rows(_even_signs(), words >> 9)
    return _signed("IQ2_XS", words & 511, signs), _scales_by_16(blocks, 66), None


def iq2_s(blocks: Array) -> _Unpacked:
    """Unpack IQ2_S: low bytes of the vector numbers, eight bits of signs for each vector, two more bits of each number,
    scales as in IQ2_XS."""
    numbers = cast(blocks[..., 2:34], "int64") | _pieces(blocks[..., 66:74], 2, 4) << 8
    signs = _rows(_signs(), blocks[..., 34:66])
    return _signed("IQ2_S", numbers, signs), _scales_by_16(blocks, 74), None


def iq3_xxs(blocks: Array) -> _Unpacked:
    """Unpack IQ3_XXS: numbers of vectors of four elements; then a word for each 32 elements, with four times seven bits
    of signs and a scale of four bits."""
    words = _words(blocks[..., 66:], 4)
    signs = _rows(_even_signs(), _pieces(words & (1 << 28) - 1, 7, 4))
    scales = _half(blocks[..., :2]) * (cast(words >> 28, "float32") + 0.5) * 0.5
    return _signed("IQ3_XXS", blocks[..., 2:66], signs), scales, None


def iq3_s(blocks: Array) -> _Unpacked:
    """Unpack IQ3_S: low bytes of the numbers of vectors of four elements, a ninth bit of each number, a byte of signs
    for each eight elements, scales of four bits."""
    numbers = cast(blocks[..., 2:66], "int64") | _pieces(blocks[..., 66:74], 1, 8) << 8
    signs = _rows(_signs(), blocks[..., 74:106])
    scales = _half(blocks[..., :2]) * cast(2 * _pieces(blocks[..., 106:], 4, 2) + 1, "float32")
    return _signed("IQ3_S", numbers, signs), scales, None


def iq1_s(blocks: Array) -> _Unpacked:
    """Unpack IQ1_S: low bytes of the vector numbers; then for each 32 elements three more bits of each of four numbers,
    a scale of three bits, and a bit that is set if the eighth is subtracted."""
    words = _words(blocks[..., 34:], 2)
    numbers = cast(blocks[..., 2:34], "int64") | _pieces(words & 0xFFF, 3, 4) << 8
    is_less = _pieces((words >> 15) * 15, 1, 4)
    scales = _half(blocks[..., :2]) * cast(2 * (words >> 12 & 7) + 1, "float32") * 0.125
    return _shifted("IQ1_S", numbers, is_less), scales, None


def iq1_m(blocks: Array) -> _Unpacked:
    """Unpack IQ1_M: low bytes of the vector numbers; then for each eight elements three more bits of the number, and a
    bit that is set if the eighth is subtracted; then scales of three bits for each 16 elements. Four scales are in a
    word of 16 bits, and its top four bits are a quarter of the bits of the float16 unit."""
    more = _pieces(blocks[..., 32:48], 4, 2)
    numbers = cast(blocks[..., :32], "int64") | (more & 7) << 8
    words = _words(blocks[..., 48:], 2)
    unit = ((words >> 12) << arange(words, 16, 4)).sum(-1)
    unit_bytes = cast(namespace(unit).stack([unit & 255, unit >> 8], axis=-1), "uint8")
    scales = _half(unit_bytes) * cast(2 * _pieces(words & 0xFFF, 3, 4) + 1, "float32") * 0.125
    return _shifted("IQ1_M", numbers, more >> 3), scales, None


def _scales_by_16(blocks: Array, start: int) -> Array:
    numbers = cast(_pieces(blocks[..., start : start + 8], 4, 2), "float32")
    return _half(blocks[..., :2]) * (numbers + 0.5) * 0.25
