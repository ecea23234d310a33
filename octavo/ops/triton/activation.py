"""SiLU and multiply by itself, for products that do not end in it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.triton.quantize import empty_quantized, encode, largest_code, magnitude, row_scale

_BLOCK = 1024


@triton.jit
def silu_times(gate, up):
    """silu(gate) * up of float32 values."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _silu_and_mul(x, x_stride, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Program (r, c): piece c of row r."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    gate = tl.load(x + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, silu_times(gate, up).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _silu_and_mul_quantized(
    x, x_stride, codes, scales, WIDTH: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr
):
    """One program a row, which it reads twice: once for the scale."""
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    codes += row * (WIDTH + 16)
    column = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, WIDTH, BLOCK):
        mask = start + column < WIDTH
        gate = tl.load(x + start + column, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(x + WIDTH + start + column, mask=mask, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, magnitude(silu_times(gate, up)))
    scale, inverse = row_scale(tl.max(largest, 0), LARGEST)
    tl.store(scales + row * ((WIDTH + 16) // 4) + WIDTH // 4, scale)
    for start in tl.range(0, WIDTH, BLOCK):
        mask = start + column < WIDTH
        gate = tl.load(x + start + column, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(x + WIDTH + start + column, mask=mask, other=0.0).to(tl.float32)
        values = encode(silu_times(gate, up), inverse, codes.dtype.element_ty)
        tl.store(codes + start + column, values, mask=mask)


def silu_and_mul(x: Tensor, codes_dtype: torch.dtype | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """x [T, 2I], gate before up -> silu(gate) * up: [T, I] in `out_dtype` (x's by default), or quantized to uint8
    [T, I + 16] if `codes_dtype` is given. In float32, rounded once."""
    rows, width = x.shape[0], x.shape[1] // 2
    assert x.shape[1] == 2 * width and x.stride(1) == 1
    if codes_dtype is not None:
        out = empty_quantized(rows, width, x.device)
        if rows:
            block = min(triton.next_power_of_2(width), 4 * _BLOCK)
            _silu_and_mul_quantized[(rows,)](
                x, x.stride(0), out.view(codes_dtype), out.view(torch.float32), WIDTH=width, BLOCK=block,
                LARGEST=largest_code(codes_dtype), num_warps=min(max(block // 512, 1), 8), enable_fp_fusion=False,
            )  # fmt: skip
        return out
    out = torch.empty((rows, width), dtype=out_dtype or x.dtype, device=x.device)
    if rows:
        grid = (rows, triton.cdiv(width, _BLOCK))
        _silu_and_mul[grid](x, x.stride(0), out, WIDTH=width, BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=False)
    return out
