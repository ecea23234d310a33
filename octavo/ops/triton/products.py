"""The products of `octavo.ops.Ops` on CUDA devices: outputs are allocated here, and the kernel for the kind of weight
is launched."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from octavo.ops import ACTIVATIONS, Expand, LinearWeight, Lookup
from octavo.ops.torch_arrays import DTYPES
from octavo.ops.triton import linear as linear_float
from octavo.ops.triton import linear_int
from octavo.ops.triton.lora import added, look_up
from octavo.ops.triton.pack import pack_linear
from octavo.ops.triton.packed_weights import IntWeight, PackedWeight, ScaledWeight
from octavo.ops.triton.quantize import SCALE_BYTES, codes_of, quantize_rows, scales_of
from octavo.ops.triton.rows import embedded
from octavo.ops.triton.tiles import ACTIVATED, ADD, GATED, STORE, UNIT

__all__ = ["embedding", "linear", "linear_activated", "linear_add", "linear_silu_and_mul", "pack_linear", "quantize"]


def _product(
    op: str, x: Tensor, weight: PackedWeight, out: Tensor, epilogue: tl.constexpr, expand: Expand | None,
    scale: float = 1.0,
) -> None:  # fmt: skip
    assert x.stride(1) == 1 or x.shape[1] == 1
    more = None if expand is None else added(expand)
    if isinstance(weight, ScaledWeight):
        x = quantize(x, weight)
        assert x.shape[1] == weight.in_features + SCALE_BYTES, f"{op}: quantized for another matrix"
        codes, x_scales = codes_of(x, weight.activation_dtype), scales_of(x)
        linear_float.launch(codes, x_scales, weight.codes, weight.scales, weight.bias, out, epilogue, scale, added=more)
        return
    assert x.shape[1] == weight.in_features, f"{op}: {x.shape[1]} inputs for a matrix of {weight.in_features}"
    if isinstance(weight, IntWeight):
        x = x if weight.order is None else x[:, weight.order]
        linear_int.launch(x, weight, out, epilogue, scale, added=more)
        return
    if x.dtype is not weight.data.dtype:
        raise TypeError(f"{op}: the input is {x.dtype} but the matrix is packed as {weight.data.dtype}.")
    linear_float.launch(x, None, weight.data, None, weight.bias, out, epilogue, scale, added=more)


def embedding(
    token_ids: Tensor, weight: LinearWeight, out_dtype: str | None = None, scale: float = 1.0,
    adapted: Lookup | None = None,
) -> Tensor:  # fmt: skip
    """`AdapterOps.embedding`."""
    out = embedded(token_ids, weight, out_dtype, scale)
    if adapted is not None:
        look_up(embedded(token_ids, weight, "float32"), token_ids, adapted, out, scale)
    return out


def _float_output(x: Tensor, out_dtype: str | None) -> torch.dtype:
    return DTYPES[out_dtype] if out_dtype else (torch.float32 if x.dtype is torch.uint8 else x.dtype)


def linear(x: Tensor, weight: LinearWeight, out_dtype: str | None = None, expand: Expand | None = None) -> Tensor:
    assert isinstance(weight, PackedWeight) and not weight.gated
    out = torch.empty((x.shape[0], weight.out_features), dtype=_float_output(x, out_dtype), device=x.device)
    _product("linear", x, weight, out, STORE, expand)
    return out


def linear_add(
    x: Tensor, weight: LinearWeight, residual: Tensor, scale: float = 1.0, expand: Expand | None = None
) -> None:
    assert isinstance(weight, PackedWeight) and not weight.gated
    assert residual.shape == (x.shape[0], weight.out_features)
    assert residual.stride(1) == 1 or weight.out_features == 1
    _product("linear_add", x, weight, residual, ADD, expand, scale)


def linear_silu_and_mul(
    x: Tensor, gate_up: LinearWeight, consumer: LinearWeight | None = None, out_dtype: str | None = None,
    activation: str = "silu", expand: Expand | None = None,
) -> Tensor:  # fmt: skip
    assert isinstance(gate_up, PackedWeight) and gate_up.gated
    width = gate_up.out_features // 2
    scaled = consumer if isinstance(consumer, ScaledWeight) else None
    dtype = torch.float32 if scaled else _float_output(x, out_dtype)
    # Gate and up are padded to whole units.
    out = torch.empty((x.shape[0], -(-width // UNIT.value) * UNIT.value), dtype=dtype, device=x.device)
    epilogue = tl.constexpr(GATED.value + ACTIVATIONS.index(activation))
    _product("linear_silu_and_mul", x, gate_up, out, epilogue, expand)
    out = out[:, :width]
    return quantize(out, scaled) if scaled else out


def linear_activated(
    x: Tensor, weight: LinearWeight, activation: str, consumer: LinearWeight | None = None,
    out_dtype: str | None = None, expand: Expand | None = None,
) -> Tensor:  # fmt: skip
    assert isinstance(weight, PackedWeight) and not weight.gated
    scaled = consumer if isinstance(consumer, ScaledWeight) else None
    dtype = torch.float32 if scaled else _float_output(x, out_dtype)
    out = torch.empty((x.shape[0], weight.out_features), dtype=dtype, device=x.device)
    epilogue = tl.constexpr(ACTIVATED.value + ACTIVATIONS.index(activation))
    _product("linear_activated", x, weight, out, epilogue, expand)
    return quantize(out, scaled) if scaled else out


def quantize(x: Tensor, consumer: LinearWeight) -> Tensor:
    if not isinstance(consumer, ScaledWeight) or x.dtype is torch.uint8:
        return x
    assert x.shape[1] == consumer.in_features, f"quantize: {x.shape[1]} elements for a matrix of {consumer.in_features}"
    return quantize_rows(x, consumer.activation_dtype)
