"""The products of `octavo.ops.Ops` on CUDA devices: outputs are made here, and each kind of weight has its kernel."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from octavo.ops import LinearWeight
from octavo.ops.triton import linear as linear_float
from octavo.ops.triton import linear_int
from octavo.ops.triton.pack import pack_linear
from octavo.ops.triton.tiles import ADD, GATED, STORE
from octavo.ops.triton.weights import FloatWeight, IntWeight, PackedWeight

__all__ = ["linear", "linear_add", "linear_silu_and_mul", "pack_linear", "quantize"]


def _product(op: str, x: Tensor, weight: PackedWeight, out: Tensor, epilogue: tl.constexpr, scale: float = 1.0) -> None:
    assert x.shape[1] == weight.in_features, f"{op}: {x.shape[1]} inputs for a matrix of {weight.in_features}"
    assert x.stride(1) == 1 or x.shape[1] == 1
    if isinstance(weight, IntWeight):
        linear_int.launch(x, weight, out, epilogue, scale)
        return
    assert isinstance(weight, FloatWeight)
    if x.dtype is not weight.data.dtype:
        raise TypeError(f"{op}: the input is {x.dtype} but the matrix is packed as {weight.data.dtype}.")
    linear_float.launch(x, None, weight.data, None, weight.bias, out, epilogue, scale)


def _float_output(x: Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    return out_dtype or (torch.float32 if x.dtype is torch.uint8 else x.dtype)


def linear(x: Tensor, weight: LinearWeight, out_dtype: torch.dtype | None = None) -> Tensor:
    assert isinstance(weight, PackedWeight)
    assert not weight.gated
    out = torch.empty((x.shape[0], weight.out_features), dtype=_float_output(x, out_dtype), device=x.device)
    _product("linear", x, weight, out, STORE)
    return out


def linear_add(x: Tensor, weight: LinearWeight, residual: Tensor, scale: float = 1.0) -> None:
    assert isinstance(weight, PackedWeight)
    assert not weight.gated
    assert residual.shape == (x.shape[0], weight.out_features)
    assert residual.stride(1) == 1 or weight.out_features == 1
    _product("linear_add", x, weight, residual, ADD, scale)


def linear_silu_and_mul(
    x: Tensor, gate_up: LinearWeight, consumer: LinearWeight | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    assert isinstance(gate_up, PackedWeight)
    assert gate_up.gated
    width = gate_up.out_features // 2
    padded = -(-width // 8) * 8
    out = torch.empty((x.shape[0], padded), dtype=_float_output(x, out_dtype), device=x.device)
    _product("linear_silu_and_mul", x, gate_up, out, GATED)
    return out[:, :width]


def quantize(x: Tensor, consumer: LinearWeight) -> Tensor:
    assert isinstance(consumer, PackedWeight)
    return x
