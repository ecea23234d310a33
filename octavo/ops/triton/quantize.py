"""Quantization of activations for eight-bit matrices: a row becomes codes and one scale, chosen by the row's largest
magnitude.

Quantized rows are uint8 [T, K + 16]: K codes, int8 or float8_e4m3fn, then the row's float32 scale in the first four of
the last 16 bytes. The 16 bytes keep rows aligned (K is a multiple of 16). A value is its code times the scale.

A row that is not finite has the scale NaN, so that results computed from it are NaN too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SCALE_BYTES = 16
# The code of a row's largest magnitude, for `row_scale`.
LARGEST_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def empty_quantized(rows: int, width: int, device: torch.device) -> Tensor:
    """Return uninitialised quantized rows, uint8 [rows, width + 16]."""
    assert width % 16 == 0, f"rows of {width} elements are not quantized; they must be a multiple of 16"
    return torch.empty((rows, width + SCALE_BYTES), dtype=torch.uint8, device=device)


def codes_of(quantized: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the codes [T, K] of quantized rows uint8 [T, K + 16], as a view whose rows are K + 16 apart."""
    return quantized.view(dtype)[:, :-SCALE_BYTES]


def scales_of(quantized: Tensor) -> Tensor:
    """Return the scales [T] float32 of quantized rows uint8 [T, K + 16], as a view with stride (K + 16) / 4."""
    return quantized.view(torch.float32)[:, -SCALE_BYTES // 4]


@triton.jit
def magnitude(x):
    """Return |x| for `row_scale`; NaN becomes infinity."""
    x = tl.abs(x)
    return tl.where(x < float("inf"), x, float("inf"))


@triton.jit
def row_scale(absmax, LARGEST: tl.constexpr):
    """Return the scale to store and its inverse to multiply by, for a row's largest `magnitude` (or several rows')."""
    is_finite = absmax < float("inf")
    is_some = is_finite & (absmax > 2.0**-100)  # below, the inverse might overflow
    divisor = tl.where(is_some, absmax, 1.0)
    scale = tl.where(is_some, tl.div_rn(divisor, tl.full(divisor.shape, LARGEST, tl.float32)), 0.0)
    inverse = tl.where(is_some, tl.div_rn(tl.full(divisor.shape, LARGEST, tl.float32), divisor), 0.0)
    return tl.where(is_finite, scale, float("nan")), inverse


@triton.jit
def encode(x, inverse, DTYPE: tl.constexpr):
    """Return codes of float32 values times their row's inverse scale, rounded to nearest even. DTYPE is tl.int8 or
    tl.float8e4nv."""
    x = tl.where(tl.abs(x) < float("inf"), x, 0.0) * inverse
    if tl.int8 == DTYPE:
        # Near 1.5 * 2^23 floats are integers: adding it rounds to even. No other operation here does so everywhere.
        x = (x + 12582912.0) - 12582912.0
        x = tl.minimum(tl.maximum(x, -127.0), 127.0)
    else:
        x = tl.minimum(tl.maximum(x, -448.0), 448.0)
    return x.to(DTYPE)


@triton.jit
def _quantize_rows(
    x, x_stride, codes, scales, WIDTH: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr, SINGLE: tl.constexpr
):
    """One program for each row, which it reads twice unless the row is a SINGLE block."""
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    codes += row * (WIDTH + 16)
    column = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    values = largest
    for start in tl.range(0, WIDTH, BLOCK):
        values = tl.load(x + start + column, mask=start + column < WIDTH, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, magnitude(values))
    scale, inverse = row_scale(tl.max(largest, 0), LARGEST)
    tl.store(scales + row * ((WIDTH + 16) // 4) + WIDTH // 4, scale)
    for start in tl.range(0, WIDTH, BLOCK):
        if not SINGLE:
            values = tl.load(x + start + column, mask=start + column < WIDTH, other=0.0).to(tl.float32)
        tl.store(codes + start + column, encode(values, inverse, codes.dtype.element_ty), mask=start + column < WIDTH)


def quantize_rows(x: Tensor, codes_dtype: torch.dtype) -> Tensor:
    """Return x [T, K] quantized, uint8 [T, K + 16]. `codes_dtype` is int8, or float8_e4m3fn from compute capability 8.9
    on."""
    rows, width = x.shape
    assert x.stride(1) == 1 or width == 1
    out = empty_quantized(rows, width, x.device)
    if rows:
        block, num_warps = _tile(width)
        _quantize_rows[(rows,)](
            x, x.stride(0), out.view(codes_dtype), out.view(torch.float32), WIDTH=width, BLOCK=block,
            LARGEST=LARGEST_CODE[codes_dtype], SINGLE=block >= width, num_warps=num_warps, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def _tile(width: int) -> tuple[int, int]:
    """Return the number of elements that a program has in registers at once, and its number of warps: about 16 elements
    for each thread."""
    block = min(triton.next_power_of_2(width), 8192)
    return block, min(max(block // 512, 1), 16)
