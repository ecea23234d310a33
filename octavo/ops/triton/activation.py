"""Element-wise functions of rows, and sums of two matrices in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops import ACTIVATIONS, LinearWeight
from octavo.ops.triton.quantize import quantize_rows

_BLOCK = 1024  # elements of a program


@triton.jit
def _activate(x, KIND: tl.constexpr):
    """float32 -> float32, by the place of the function in `ACTIVATIONS`."""
    if KIND == 0:  # silu
        return x / (1.0 + tl.exp(-x))
    elif KIND == 1:  # gelu
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == 2:  # gelu_tanh, whose tanh is a logistic function of twice its argument
        return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        positive = tl.where(x < 0, 0.0, x)  # NaN for NaN
        if KIND == 3:  # relu
            return positive
        else:  # relu2
            return positive * positive


@triton.jit
def _activation(x, stride, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr):
    """Program (n, c): piece c of row n."""
    n = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + n * stride + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    tl.store(out + n * WIDTH + column, _activate(values, KIND).to(out.dtype.element_ty), mask=column < WIDTH)


def activation(x: Tensor, kind: str, consumer: LinearWeight | None = None) -> Tensor:
    """`Ops.activation`: x [T, N] -> the same shape and dtype, or quantized for the `consumer`."""
    rows, width = x.shape
    assert x.stride(1) == 1 or width == 1
    codes_dtype: torch.dtype | None = getattr(consumer, "activation_dtype", None)
    out = torch.empty((rows, width), dtype=torch.float32 if codes_dtype else x.dtype, device=x.device)
    if rows:
        block = min(triton.next_power_of_2(width), _BLOCK)
        _activation[(rows, triton.cdiv(width, block))](
            x, x.stride(0), out, WIDTH=width, BLOCK=block, KIND=ACTIVATIONS.index(kind), num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out if codes_dtype is None else quantize_rows(out, codes_dtype)


@triton.jit
def _add(x, stride, out, out_stride, scale, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Program (n, c): piece c of row n, as the epilogue of a product adds it."""
    n = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + n * stride + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    before = tl.load(out + n * out_stride + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    tl.store(out + n * out_stride + column, tl.fma(values, scale, before).to(out.dtype.element_ty), mask=column < WIDTH)


def add(residual: Tensor, x: Tensor, scale: float = 1.0) -> None:
    """`Ops.add`: residual [T, N] += scale * x [T, N]."""
    assert residual.shape == x.shape
    rows, width = x.shape
    assert width == 1 or x.stride(1) == residual.stride(1) == 1
    if rows:
        block = min(triton.next_power_of_2(width), _BLOCK)
        _add[(rows, triton.cdiv(width, block))](
            x, x.stride(0), residual, residual.stride(0), float(scale), WIDTH=width, BLOCK=block, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
