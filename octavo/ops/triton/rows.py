"""Rows by index: which of a step's tokens are sampled."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _take_rows(x, rows, out, x_stride, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Program (n, c): piece c of out[n] = x[rows[n]]. Rows that x does not have become zeros."""
    n = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + n)
    width = tl.where((row >= 0) & (row < count), WIDTH, 0)
    values = tl.load(x + row * x_stride + column, mask=column < width, other=0)
    tl.store(out + n * WIDTH + column, values, mask=column < WIDTH)


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """`Ops.take_rows`: x [T, H], rows [N] int64 -> x[rows]: [N, H]."""
    assert rows.dtype is torch.int64 and rows.is_contiguous()
    count, width = x.shape
    assert x.stride(1) == 1 or width == 1
    out = torch.empty((rows.shape[0], width), dtype=x.dtype, device=x.device)
    if out.numel():
        block = min(triton.next_power_of_2(width), 2048)
        grid = (rows.shape[0], triton.cdiv(width, block))
        _take_rows[grid](
            x, rows, out, x.stride(0), count, WIDTH=width, BLOCK=block, num_warps=4, enable_fp_fusion=False
        )
    return out
