"""GGUF's block formats, as ggml-common.h lays them out: blocks of bytes to codes, scales and minima, exactly."""

from __future__ import annotations

from collections.abc import Callable

from octavo.quantization.arrays import Array, arange, cast, namespace, reinterpret
from octavo.quantization.codes import Codes
from octavo.quantization.formats import BLOCK_TYPES
from octavo.quantization.layout import Layout
from octavo.quantization.stored import StoredWeight

# Types of five and six bits take eight. Signed types need no minima.
LAYOUTS = {
    "Q4_0": Layout(4, 32, False),
    "Q4_1": Layout(4, 32, True),
    "Q5_0": Layout(8, 32, False),
    "Q5_1": Layout(8, 32, True),
    "Q8_0": Layout(8, 32, False),
    "Q4_K": Layout(4, 32, True),
    "Q5_K": Layout(8, 32, True),
    "Q6_K": Layout(8, 16, False),
}


def unpack(stored: StoredWeight) -> Codes:
    """What the matrix's bytes say, exactly."""
    layout = LAYOUTS[stored.format]
    num_out, num_in = stored.shape
    blocks = stored.data.reshape(num_out, -1, BLOCK_TYPES[stored.format].block_bytes)
    codes, scales, minima = _UNPACKERS[stored.format](blocks)
    codes, scales = codes.reshape(num_out, -1), scales.reshape(num_out, -1)
    assert codes.shape == (num_out, num_in)
    return Codes(layout.bits, layout.group, codes, scales, None if minima is None else minima.reshape(num_out, -1))


# Blocks [N, B, bytes] -> codes [N, B, ...] uint8, scales [N, B, groups] and perhaps minima, float32.
_Unpacked = tuple[Array, Array, Array | None]


def _half(blocks: Array, offset: int) -> Array:
    """The float16 at a byte of each block, as float32 [N, B, 1]."""
    return cast(reinterpret(blocks[..., offset : offset + 2], "float16"), "float32")


def _nibbles(packed: Array) -> Array:
    """[..., 16] bytes: the low halves are elements 0 to 15, the high halves 16 to 31."""
    return namespace(packed).concatenate([packed & 15, packed >> 4], axis=-1)


def _five_bits(packed: Array) -> Array:
    """[..., 4 + 16] bytes: a fifth bit for each of 32 elements, lowest bit first, then their nibbles."""
    fifth = (packed[..., :4, None] >> arange(packed, 8, dtype="uint8")) & 1
    return _nibbles(packed[..., 4:]) | fifth.reshape(*packed.shape[:-1], 32) << 4


def _k_scales(blocks: Array) -> tuple[Array, Array]:
    """The eight scales and eight minima of a 256-element block: a float16 for each kind, times numbers of six bits.

    Of the twelve bytes at byte 4, bytes 0-3 and 4-7 hold the first four scales and minima in their low six bits; the
    last four have their low nibbles in bytes 8-11 (scales low, minima high) and their top two bits in the top bits of
    bytes 0-7.
    """
    low, mid, high = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    concatenate = namespace(blocks).concatenate
    scales = concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=-1)
    minima = concatenate([mid & 63, (high >> 4) | (mid >> 6 << 4)], axis=-1)
    return _half(blocks, 0) * scales, -(_half(blocks, 2) * minima)


def _q4_k(blocks: Array) -> _Unpacked:
    pairs = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32)
    return namespace(blocks).stack([pairs & 15, pairs >> 4], axis=-2), *_k_scales(blocks)


def _q5_k(blocks: Array) -> _Unpacked:
    pairs = blocks[..., 48:].reshape(*blocks.shape[:2], 4, 32)
    groups = namespace(blocks).stack([pairs & 15, pairs >> 4], axis=-2).reshape(*blocks.shape[:2], 8, 32)
    bits = arange(blocks, 8, dtype="uint8")[:, None]
    fifth = (blocks[..., None, 16:48] >> bits) & 1  # bit g of byte i belongs to element i of group g
    return groups | fifth << 4, *_k_scales(blocks)


def _q6_k(blocks: Array) -> _Unpacked:
    # Two halves of 128 elements; in each, four runs of 32 that share 64 bytes of nibbles and 32 bytes of top bits.
    low = blocks[..., :128].reshape(*blocks.shape[:2], 2, 2, 32)
    runs = namespace(blocks).concatenate([low & 15, low >> 4], axis=-2)
    bits = arange(blocks, 8, 2, dtype="uint8")[:, None]
    top = (blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32) >> bits) & 3
    codes = runs | top << 4
    # A scale for 16 elements.
    return codes + (128 - 32), _half(blocks, 208) * reinterpret(blocks[..., 192:208], "int8"), None


_UNPACKERS: dict[str, Callable[[Array], _Unpacked]] = {
    "Q4_0": lambda blocks: (_nibbles(blocks[..., 2:]), _half(blocks, 0), None),
    "Q4_1": lambda blocks: (_nibbles(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2)),
    "Q5_0": lambda blocks: (_five_bits(blocks[..., 2:]) + (128 - 16), _half(blocks, 0), None),
    "Q5_1": lambda blocks: (_five_bits(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2)),
    # From two's complement to 128 more.
    "Q8_0": lambda blocks: (blocks[..., 2:] ^ 128, _half(blocks, 0), None),
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
