"""Unpacks GGUF's IQ1, IQ2 and IQ3 types exactly, to indices into tables of integers. The types store numbers of
codebook vectors, scales, and a bit for each element or for several.

Four or eight neighbours are one vector of a codebook. ggml-common.h defines the codebooks, and the `gguf` package (the
extra `gguf`) contains them. The codebooks of IQ2 and IQ3 hold magnitudes; an element is negative if its bit is set. The
codebooks of IQ1 hold -1, 0 and 1; an eighth is added to an element, or subtracted if its bit is set.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ConfigError
from octavo.quantization.array_functions import Array, arange, cast, constant, namespace, reinterpret

_Unpacked = tuple[Array, Array, None]

# The integers of each type: eight for elements whose bit is not set, then eight for the same indices with the bit set.
# IQ1's are eighths. IQ1 and IQ2 share a table, so that one matrix can hold both.
IQ1_IQ2_TABLE = (-7, 1, 9, 8, 25, 43, 0, 0, -9, -1, 7, -8, -25, -43, 0, 0)
IQ3_XXS_TABLE = (4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62)
IQ3_S_TABLE = (1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15)
_TABLES = {"IQ3_XXS": IQ3_XXS_TABLE, "IQ3_S": IQ3_S_TABLE}
_BIT = 8  # of an index into a table: the element's bit
_BIT_OF_EIGHT = int.from_bytes([_BIT] * 8, "little")

_Words = NDArray[Any]


@cache
def _codebook(name: str) -> _Words:
    """Return a type's codebook: for each vector a word of four or eight bytes. Each byte is an index into the first
    eight integers of the type's table. Raises `ConfigError` if the `gguf` package is missing."""
    try:
        from gguf import quants
    except ImportError:
        raise ConfigError(f"{name} matrices need the codebooks of the gguf package: scripts/install gguf.") from None
    kind = getattr(quants, name)
    kind.init_grid()
    vectors = kind.grid.reshape(kind.grid.shape[-2:])
    integers = 8 * vectors + 1 if name.startswith("IQ1") else vectors
    table = np.array(_TABLES.get(name, IQ1_IQ2_TABLE)[:_BIT])
    return _as_words((integers[..., None] == table).argmax(-1))


@cache
def _signs() -> _Words:
    """Return for each byte a word with the bits of eight elements, lowest bit first."""
    return _as_words((np.arange(256)[:, None] >> np.arange(8) & 1) * _BIT)


@cache
def _even_signs() -> _Words:
    """Return for each 7-bit number a word with the bits of eight elements: seven bits, and an eighth that makes the
    number of set bits even."""
    numbers = np.arange(128)
    parity = (numbers[:, None] >> np.arange(7) & 1).sum(1) & 1
    words: _Words = _signs()[numbers | parity << 7]
    return words


def _as_words(rows: NDArray[Any]) -> _Words:
    """Return rows of four or eight small numbers as words, a byte for each number: [n, 4 or 8] -> [n]."""
    return np.ascontiguousarray(rows, np.uint8).view(np.int64 if rows.shape[1] == 8 else np.int32)[:, 0]


def _taken(words: _Words, numbers: Array) -> Array:
    """Return the words with these numbers [..., n]: int64 [..., n], or [..., n / 2] if words have four bytes."""
    return reinterpret(constant(numbers, words, words.dtype.name)[cast(numbers, "int64")], "int64")


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


def _indices(name: str, numbers: Array, bits: Array) -> Array:
    """Return the indices of elements into the table of a type: uint8 [N, B, 256]. `numbers` [N, B, 32 or 64] are the
    numbers of vectors; `bits` int64 [N, B, 32] are words with the bits of eight elements."""
    return reinterpret(_taken(_codebook(name), numbers) | bits, "uint8")


def iq2_xxs(blocks: Array) -> _Unpacked:
    """Unpack IQ2_XXS. Each 32 elements have four vector numbers of a byte, then a word of four sign patterns of seven
    bits and a scale of four bits."""
    parts = blocks[..., 2:].reshape(*blocks.shape[:2], 8, 8)
    words = _words(parts[..., 4:], 4)[..., 0]
    signs = _taken(_even_signs(), _pieces(words & (1 << 28) - 1, 7, 4))
    scales = _half(blocks[..., :2]) * (cast(words >> 28, "float32") + 0.5) * 0.25
    return _indices("IQ2_XXS", parts[..., :4].reshape(*blocks.shape[:2], 32), signs), scales, None


def iq2_xs(blocks: Array) -> _Unpacked:
    """Unpack IQ2_XS. Each eight elements have a vector number of nine bits and seven bits of signs. Each 16 elements
    have a scale of four bits."""
    words = _words(blocks[..., 2:66], 2)
    signs = _taken(_even_signs(), words >> 9)
    return _indices("IQ2_XS", words & 511, signs), _scales_by_16(blocks, 66), None


def iq2_s(blocks: Array) -> _Unpacked:
    """Unpack IQ2_S: low bytes of the vector numbers, eight bits of signs for each vector, two more bits of each number,
    scales as in IQ2_XS."""
    numbers = cast(blocks[..., 2:34], "int64") | _pieces(blocks[..., 66:74], 2, 4) << 8
    signs = _taken(_signs(), blocks[..., 34:66])
    return _indices("IQ2_S", numbers, signs), _scales_by_16(blocks, 74), None


def iq3_xxs(blocks: Array) -> _Unpacked:
    """Unpack IQ3_XXS: first the codebook numbers of vectors of four elements; then, for each 32 elements, a word of
    four sign patterns of seven bits and a scale of four bits."""
    words = _words(blocks[..., 66:], 4)
    signs = _taken(_even_signs(), _pieces(words & (1 << 28) - 1, 7, 4))
    scales = _half(blocks[..., :2]) * (cast(words >> 28, "float32") + 0.5) * 0.5
    return _indices("IQ3_XXS", blocks[..., 2:66], signs), scales, None


def iq3_s(blocks: Array) -> _Unpacked:
    """Unpack IQ3_S: low bytes of the numbers of vectors of four elements, a ninth bit of each number, a byte of signs
    for each eight elements, scales of four bits."""
    numbers = cast(blocks[..., 2:66], "int64") | _pieces(blocks[..., 66:74], 1, 8) << 8
    signs = _taken(_signs(), blocks[..., 74:106])
    scales = _half(blocks[..., :2]) * cast(2 * _pieces(blocks[..., 106:], 4, 2) + 1, "float32")
    return _indices("IQ3_S", numbers, signs), scales, None


def iq1_s(blocks: Array) -> _Unpacked:
    """Unpack IQ1_S: low bytes of the vector numbers; then for each 32 elements three more bits of each of four numbers,
    a scale of three bits, and a bit that is set if the eighth is subtracted."""
    words = _words(blocks[..., 34:], 2)
    numbers = cast(blocks[..., 2:34], "int64") | _pieces(words & 0xFFF, 3, 4) << 8
    is_less = _pieces((words >> 15) * 15, 1, 4)
    scales = _half(blocks[..., :2]) * cast(2 * (words >> 12 & 7) + 1, "float32") * 0.125
    return _indices("IQ1_S", numbers, is_less * _BIT_OF_EIGHT), scales, None


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
    return _indices("IQ1_M", numbers, (more >> 3) * _BIT_OF_EIGHT), scales, None


def _scales_by_16(blocks: Array, start: int) -> Array:
    numbers = cast(_pieces(blocks[..., start : start + 8], 4, 2), "float32")
    return _half(blocks[..., :2]) * (numbers + 0.5) * 0.25
