"""Matrices of few bits into the panels of the native kernels: which layout, how much memory, the calls that fill it.

`octavo.ops.cpu.pack_linear` calls `pack_quantized` where all parts of a matrix are quantized. The packing itself is
csrc/cpu/pack_int.cpp, which reads the file's bytes and writes the panels, so that a matrix is never in memory twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo import _cpu
from octavo.ops import QuantizedMatrix
from octavo.ops.cpu_memory import zeros
from octavo.quantization import Layout, common_layout, int8, layout_of

_FLOATS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
# Formats whose scales are float16 numbers in the file already, and not products of two numbers.
_PLAIN_SCALES = frozenset({"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"})


@dataclass(frozen=True, slots=True)
class PackedIntegers:
    """A packed integer matrix (csrc/cpu/kernels.h: Matrix) without its bias."""

    data: Tensor
    num_out: int  # of all parts; gate and up together
    num_in: int
    layout: Layout
    factor: float
    gated: bool


def pack_quantized(parts: Sequence[QuantizedMatrix], gated: bool = False) -> PackedIntegers:
    """`parts` on top of each other in one layout that holds them all; with `gated`, two of one shape alternate."""
    num_in = parts[0].shape[1]
    num_out = sum(part.shape[0] for part in parts)
    assert all(part.shape[1] == num_in for part in parts), f"parts of {[part.shape for part in parts]}"
    assert not gated or (len(parts) == 2 and parts[0].shape == parts[1].shape)
    layout = common_layout(layout_of(part.format) for part in parts)
    sources = [_source(part) for part in parts]
    factor = _factor(parts)
    shape = (layout.bits, layout.group, layout.minima, gated)
    # Zeros stand for weights of 0 where no part writes.
    data = zeros(_cpu.integer_matrix_bytes(num_out, num_in, *shape))
    first_row = 0
    for part, (address, source_format, stride) in zip(parts, sources, strict=True):
        _cpu.pack_part(
            data.data_ptr(), num_out, num_in, factor, *shape, first_row, address, source_format, stride, part.shape[0]
        )
        first_row += 1 if gated else part.shape[0]
    return PackedIntegers(data, num_out, num_in, layout, factor, gated)


def _source(part: QuantizedMatrix) -> tuple[int, int, int]:
    """Address, format and row stride in bytes of a part, as the native packer takes them."""
    data = part.data
    assert data.dim() == 2
    assert data.shape[0] == part.shape[0], f"{data.shape[0]} rows of data in a matrix {part.shape}"
    assert data.stride(1) == 1
    name = part.format
    if name == int8.FORMAT:
        name = _FLOATS[data.dtype]
        assert data.shape == part.shape
    else:
        assert data.dtype is torch.uint8
    # The stride of a single row means nothing; that many bytes are there.
    stride = data.stride(0) if data.shape[0] > 1 else data.shape[1]
    return data.data_ptr(), _cpu.SOURCE_FORMATS[name], stride * data.element_size()


def _factor(parts: Sequence[QuantizedMatrix]) -> float:
    """A power of two that takes the scales into float16's range: 1 if they are float16 already; otherwise the largest
    becomes 2^14 and more, which leaves the others 28 binary orders of magnitude at full precision."""
    if all(part.format in _PLAIN_SCALES for part in parts):
        return 1.0
    largest = 0.0
    for part in parts:
        address, source_format, stride = _source(part)
        largest = max(largest, _cpu.max_scale(address, source_format, stride, *part.shape))
    if largest == 0.0:
        return 1.0
    _, exponent = math.frexp(largest)  # largest < 2^exponent
    return math.ldexp(1.0, max(-126, exponent - 15))
