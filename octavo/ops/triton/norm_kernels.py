"""RMS norm and layer norm, which quantize their result if a quantized matrix consumes it.

The order of sums depends on the row's length alone: it chooses tile, warps and rows of a program; the number of rows
does not.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops import LinearWeight
from octavo.ops.triton.quantize import LARGEST_CODE, empty_quantized, encode, magnitude, row_scale

_MAX_TILE = 16384  # elements that a program has in registers at once


@triton.jit
def _row_start(row, inner, outer_stride, inner_stride):
    """Return the offset of row (row // inner, row % inner) of a view."""
    return (row // inner).to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * inner_stride


@triton.jit
def _weighted(normed, weight, bias, column, WIDTH: tl.constexpr, BIAS: tl.constexpr):
    """Return normed rows, or some columns of them, times the weight, plus the bias."""
    out = normed * tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    if BIAS:
        out += tl.load(bias + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    return out


@triton.jit(do_not_specialize=["num_rows", "inner"])
def _norm(
    x, weight, bias, out, num_rows, inner, outer_stride, inner_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, CENTERED: tl.constexpr, BIAS: tl.constexpr,
    OWN_WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Program p normalises rows p * ROWS ..; a whole row is in registers. Inner rows may have weights of their own."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < num_rows)[:, None] & (column < WIDTH)
    start = _row_start(row, inner, outer_stride, inner_stride)
    values = tl.load(x + start[:, None] + column, mask=mask, other=0.0).to(tl.float32)
    if CENTERED:
        values = tl.where(mask, values - (tl.sum(values, 1) / WIDTH)[:, None], 0.0)
    factor = tl.rsqrt(tl.sum(values * values, 1) / WIDTH + eps)
    if OWN_WEIGHTS:
        weight += (row % inner)[:, None] * WIDTH
        bias += (row % inner)[:, None] * WIDTH
    normed = _weighted(values * factor[:, None], weight, bias, column, WIDTH, BIAS)
    row = row.to(tl.int64)
    tl.store(out + row[:, None] * WIDTH + column, normed.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["inner"])
def _norm_of_long_rows(
    x, weight, bias, out, inner, outer_stride, inner_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, CENTERED: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """One program for each row, which it reads twice, or three times if CENTERED."""
    row = tl.program_id(0)
    x += _row_start(row, inner, outer_stride, inner_stride)
    row = row.to(tl.int64)
    column = tl.arange(0, BLOCK)
    mean = 0.0
    if CENTERED:
        sums = tl.zeros((BLOCK,), tl.float32)
        for start in tl.range(0, WIDTH, BLOCK):
            sums += tl.load(x + start + column, mask=start + column < WIDTH, other=0.0).to(tl.float32)
        mean = tl.sum(sums, 0) / WIDTH
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, WIDTH, BLOCK):
        values = tl.load(x + start + column, mask=start + column < WIDTH, other=0.0).to(tl.float32)
        if CENTERED:
            values = tl.where(start + column < WIDTH, values - mean, 0.0)
        squares += values * values
    factor = tl.rsqrt(tl.sum(squares, 0) / WIDTH + eps)
    for start in tl.range(0, WIDTH, BLOCK):
        mask = start + column < WIDTH
        values = tl.load(x + start + column, mask=mask, other=0.0).to(tl.float32)
        if CENTERED:
            values -= mean
        normed = _weighted(values * factor, weight, bias, start + column, WIDTH, BIAS)
        tl.store(out + row * WIDTH + start + column, normed.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["inner"])
def _norm_quantized(
    x, weight, bias, codes, scales, inner, outer_stride, inner_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr, CENTERED: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """One program for each row, which is in registers, writes a quantized row as in `octavo.ops.triton.quantize`."""
    row = tl.program_id(0)
    x += _row_start(row, inner, outer_stride, inner_stride)
    row = row.to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    values = tl.load(x + column, mask=mask, other=0.0).to(tl.float32)
    if CENTERED:
        values = tl.where(mask, values - tl.sum(values, 0) / WIDTH, 0.0)
    factor = tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
    normed = _weighted(values * factor, weight, bias, column, WIDTH, BIAS)
    scale, inverse = row_scale(tl.max(magnitude(normed), 0), LARGEST)
    tl.store(scales + row * ((WIDTH + 16) // 4) + WIDTH // 4, scale)
    tl.store(codes + row * (WIDTH + 16) + column, encode(normed, inverse, codes.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, consumer: LinearWeight | None = None) -> Tensor:
    """`Ops.rms_norm`: x [..., H] -> the same shape and dtype; for a `consumer` whose `activation_dtype` is an
    eight-bit type, uint8 [rows, H + 16]. x may be a strided view of two or three dimensions."""
    return _normalized(x, weight, None, eps, consumer, centered=False)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, consumer: LinearWeight | None = None
) -> Tensor:
    """`Ops.layer_norm`, as `rms_norm`."""
    assert bias is None or (bias.shape == weight.shape and bias.is_contiguous())
    return _normalized(x, weight, bias, eps, consumer, centered=True)


def _normalized(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, consumer: LinearWeight | None, centered: bool
) -> Tensor:
    width = x.shape[-1]
    assert weight.shape in ((width,), x.shape[1:]) and weight.is_contiguous()
    has_own_weights = weight.dim() == 2
    codes_dtype: torch.dtype | None = getattr(consumer, "activation_dtype", None)
    rows = x.numel() // width
    if codes_dtype is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    else:
        out = empty_quantized(rows, width, x.device)
    if not rows:
        return out
    assert not has_own_weights or (codes_dtype is None and x.stride(-1) == 1 and width <= _MAX_TILE)
    if x.stride(-1) != 1 or x.dim() > 3:
        x = x.reshape(-1, width).contiguous()
    inner, outer_stride, inner_stride = 1, 0, 0
    if x.dim() == 2:
        outer_stride = x.stride(0)
    elif x.dim() == 3:
        inner, (outer_stride, inner_stride) = x.shape[1], x.stride()[:2]
    block = triton.next_power_of_2(width)
    meta = {"WIDTH": width, "CENTERED": centered, "BIAS": bias is not None, "enable_fp_fusion": False}
    if codes_dtype is not None:
        assert block <= 2 * _MAX_TILE, f"norm: rows of {width} are too long to be quantized"
        _norm_quantized[(rows,)](
            x, weight, bias, out.view(codes_dtype), out.view(torch.float32), inner, outer_stride, inner_stride, eps,
            BLOCK=block, LARGEST=LARGEST_CODE[codes_dtype], num_warps=_num_warps(block), **meta,
        )  # fmt: skip
    elif block > _MAX_TILE:
        _norm_of_long_rows[(rows,)](
            x, weight, bias, out, inner, outer_stride, inner_stride, eps, BLOCK=8192, num_warps=16, **meta
        )
    else:
        rows_per_program = max(1, 1024 // block)  # the norms of heads are short
        _norm[(triton.cdiv(rows, rows_per_program),)](
            x, weight, weight if bias is None else bias, out, rows, inner, outer_stride, inner_stride, eps,
            OWN_WEIGHTS=has_own_weights, BLOCK=block, ROWS=rows_per_program,
            num_warps=_num_warps(block * rows_per_program), **meta,
        )  # fmt: skip
    return out


def _num_warps(elements: int) -> int:
    """Return the number of warps: 8 elements for each thread (one load of 16 bytes in bfloat16), up to 16 warps."""
    return min(max(elements // 256, 1), 16)
