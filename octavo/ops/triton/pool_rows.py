"""Pooling of hidden states: `Ops.pool`.

Rows are summed in tiles that begin with a text's first row, so the order of its sums does not depend on the text's
place in the step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops import POOLINGS
from octavo.ops.torch_arrays import DTYPES
from octavo.ops.triton.launch import by_pieces

_ROWS, _COLUMNS = 32, 128  # size of a tile
_MAX, _MEAN_SQRT, _WEIGHTED = (tl.constexpr(POOLINGS.index(kind)) for kind in ("max", "mean_sqrt", "weighted_mean"))


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["starts", "ends"])
def _pool(
    x, starts, ends, out, stride, num_rows, KIND: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (n, c) pools piece c of rows starts[n] .. ends[n]. Rows beyond those of x are ignored."""
    n = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = tl.maximum(tl.load(starts + n), 0)
    count = (tl.minimum(tl.load(ends + n) + 1, num_rows) - start).to(tl.int32)
    r = tl.arange(0, ROWS)
    nothing: tl.constexpr = float("-inf") if KIND == _MAX else 0.0
    sums = tl.full([ROWS, BLOCK], nothing, tl.float32)
    for first in range(0, count, ROWS):
        row = start + first + r
        mask = (first + r < count)[:, None] & (column < WIDTH)[None, :]
        values = tl.load(x + row[:, None] * stride + column[None, :], mask=mask, other=nothing).to(tl.float32)
        if KIND == _MAX:
            sums = tl.maximum(sums, values)
        elif KIND == _WEIGHTED:
            sums += values * (first + r + 1).to(tl.float32)[:, None]
        else:
            sums += values
    if KIND == _MAX:
        pooled = tl.max(sums, 0)
    else:
        number = tl.maximum(count, 1).to(tl.float32)
        if KIND == _MEAN_SQRT:
            number = tl.sqrt(number)
        elif KIND == _WEIGHTED:
            number = number * (number + 1.0) / 2.0
        pooled = tl.sum(sums, 0) / number
    tl.store(out + n * WIDTH + column, pooled.to(out.dtype.element_ty), mask=column < WIDTH)


def pool(x: Tensor, starts: Tensor, ends: Tensor, kind: str, out_dtype: str | None = None) -> Tensor:
    """`Ops.pool`."""
    assert starts.dtype is ends.dtype is torch.int64 and starts.is_contiguous() and ends.is_contiguous()
    num_rows, width = x.shape
    assert starts.shape == ends.shape and (x.stride(1) == 1 or width == 1)
    dtype = DTYPES[out_dtype] if out_dtype else x.dtype
    out = torch.empty((len(starts), width), dtype=dtype, device=x.device)
    by_pieces(
        _pool, len(starts), width, _COLUMNS, x, starts, ends, out, x.stride(0), num_rows, KIND=POOLINGS.index(kind),
        ROWS=_ROWS,
    )  # fmt: skip
    return out
