"""GGUF's blocks as codes, scales and minima, on whichever device the bytes are. The block layouts are described in
`octavo.loading.gguf_dequant`, which makes values of them."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops import QuantizedMatrix
from octavo.quantization.codes import Codes
from octavo.quantization.gguf import LAYOUTS, block_bytes


def unpack(matrix: QuantizedMatrix) -> Codes:
    """What the matrix's bytes say, exactly."""
    layout = LAYOUTS[matrix.format]
    num_out, num_in = matrix.shape
    blocks = matrix.data.reshape(num_out, -1, block_bytes(matrix.format))
    codes, scales, minima = _UNPACKERS[matrix.format](blocks)
    codes, scales = codes.reshape(num_out, -1), scales.reshape(num_out, -1)
    assert codes.shape == (num_out, num_in)
    return Codes(layout.bits, layout.group, codes, scales, None if minima is None else minima.reshape(num_out, -1))


# Blocks [N, B, bytes] -> codes [N, B, elements] uint8, scales [N, B, groups] and perhaps minima, float32.
_Unpacked = tuple[Tensor, Tensor, Tensor | None]


def _half(blocks: Tensor, offset: int) -> Tensor:
    """The float16 at a byte of each block: [N, B, 1]."""
    return blocks[..., offset : offset + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Low halves, then high halves."""
    return torch.cat([packed & 15, packed >> 4], -1)


def _five_bits(packed: Tensor) -> Tensor:
    """A fifth bit for each of 32 elements, then their nibbles."""
    bits = torch.arange(8, dtype=torch.uint8, device=packed.device)
    fifth = (packed[..., :4, None] >> bits) & 1
    return _nibbles(packed[..., 4:]) | fifth.flatten(-2) << 4


def _q4_0(blocks: Tensor) -> _Unpacked:
    return _nibbles(blocks[..., 2:]), _half(blocks, 0), None


def _q4_1(blocks: Tensor) -> _Unpacked:
    return _nibbles(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Tensor) -> _Unpacked:
    return _five_bits(blocks[..., 2:]) + (128 - 16), _half(blocks, 0), None


def _q5_1(blocks: Tensor) -> _Unpacked:
    return _five_bits(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Tensor) -> _Unpacked:
    return blocks[..., 2:] ^ 128, _half(blocks, 0), None  # from two's complement to 128 more


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of a block's eight groups; see `gguf_dequant`."""
    low, mid, high = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat([low & 63, (high & 15) | (low >> 6 << 4)], -1)
    minima = torch.cat([mid & 63, (high >> 4) | (mid >> 6 << 4)], -1)
    return _half(blocks, 0) * scales, -(_half(blocks, 2) * minima)


def _q4_k(blocks: Tensor) -> _Unpacked:
    pairs = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32)
    return torch.stack([pairs & 15, pairs >> 4], -2).flatten(-3), *_k_scales(blocks)


def _q5_k(blocks: Tensor) -> _Unpacked:
    pairs = blocks[..., 48:].reshape(*blocks.shape[:2], 4, 32)
    groups = torch.stack([pairs & 15, pairs >> 4], -2).flatten(-3, -2)  # [N, B, 8, 32]
    bits = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    fifth = (blocks[..., None, 16:48] >> bits) & 1  # bit g of byte i belongs to element i of group g
    return (groups | fifth << 4).flatten(-2), *_k_scales(blocks)


def _q6_k(blocks: Tensor) -> _Unpacked:
    low = blocks[..., :128].reshape(
        *blocks.shape[:2], 2, 2, 32
    )  # halves of 128 elements, which have four runs of 32 each
    runs = torch.cat([low & 15, low >> 4], -2)
    bits = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
    top = (blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32) >> bits) & 3
    codes = (runs | top << 4).flatten(-3)
    return codes + (128 - 32), _half(blocks, 208) * blocks[..., 192:208].view(torch.int8), None


_UNPACKERS = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
