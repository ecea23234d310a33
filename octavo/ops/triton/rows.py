"""Kernels over pieces of rows: rows by index, of matrices and packed matrices; element-wise functions; sums, also those
of several workers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.errors import ConfigError
from octavo.ops import ACTIVATIONS, PARAMETRIC_ACTIVATIONS, LinearWeight
from octavo.ops.torch_arrays import DTYPES
from octavo.ops.triton.launch import by_pieces
from octavo.ops.triton.packed_weights import BLOCK_WORDS, FloatWeight, IntWeight, PackedWeight, ScaledWeight
from octavo.ops.triton.quantize import quantize_rows
from octavo.ops.triton.tiles import activate

_BLOCK = 1024  # elements of a program


@triton.jit(do_not_specialize=["count"])
def _take_rows(x, rows, out, x_stride, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Program (n, c) writes piece c of out[n] = x[rows[n]]. Rows that x does not have become zeros."""
    n = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + n)
    width = tl.where((row >= 0) & (row < count), WIDTH, 0)
    values = tl.load(x + row * x_stride + column, mask=column < width, other=0)
    tl.store(out + n * WIDTH + column, values, mask=column < WIDTH)


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """`Ops.take_rows`: return x[rows] [N, H] of x [T, H] and rows [N] int64."""
    assert rows.dtype is torch.int64 and rows.is_contiguous()
    count, width = x.shape
    assert x.stride(1) == 1 or width == 1
    out = torch.empty((rows.shape[0], width), dtype=x.dtype, device=x.device)
    by_pieces(_take_rows, len(rows), width, 2048, x, rows, out, x.stride(0), count)
    return out


@triton.jit
def _embed(token_ids, data, scales, out, stride, scale, WIDTH: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr):
    """Program (t, c) writes piece c of row token_ids[t]; with SCALED each row has a scale."""
    t = tl.program_id(0).to(tl.int64)
    token = tl.load(token_ids + t).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(data + token * stride + k, mask=k < WIDTH, other=0.0).to(tl.float32)
    if SCALED:
        value *= tl.load(scales + token)
    tl.store(out + t * WIDTH + k, (value * scale).to(out.dtype.element_ty), mask=k < WIDTH)


@triton.jit
def _embed_int(
    token_ids, codes, scales, table, out, stride_codes, stride_scales, scale, WIDTH: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, MINIMA: tl.constexpr, TABLE: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same for rows of an `IntWeight`."""
    t = tl.program_id(0).to(tl.int64)
    token = tl.load(token_ids + t).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    PLANES: tl.constexpr = 32 // BITS
    word_at = k // (PLANES * WORDS) * WORDS + k % WORDS
    word = tl.load(codes + token * stride_codes + word_at, mask=k < WIDTH, other=0)
    code = (word >> (k // WORDS % PLANES * BITS)) & ((1 << BITS) - 1)
    group = k // GROUP
    scale_at = (group if MINIMA else group // 2).to(tl.int64) * stride_scales + token
    both = tl.load(scales + scale_at, mask=k < WIDTH, other=0)
    low = (both & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    high = ((both >> 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    if MINIMA:
        value = code.to(tl.float32) * low + high
    else:
        looked_up = (tl.load(table + code // 4) >> (code % 4 * 8)) & 255 if TABLE else code
        number = looked_up - (1 << (7 if TABLE else BITS - 1))
        value = number.to(tl.float32) * tl.where(group % 2 == 0, low, high)
    tl.store(out + t * WIDTH + k, (value * scale).to(out.dtype.element_ty), mask=k < WIDTH)


def embedded(token_ids: Tensor, weight: LinearWeight, out_dtype: str | None = None, scale: float = 1.0) -> Tensor:
    """`Ops.embedding`: return rows `token_ids` [T] int32 of a packed matrix [V, H], times `scale`: [T, H]."""
    assert isinstance(weight, PackedWeight)
    assert not weight.gated
    assert token_ids.dtype is torch.int32 and token_ids.is_contiguous()
    default = weight.data.dtype if isinstance(weight, FloatWeight) else torch.float32
    rows, width = token_ids.shape[0], weight.in_features
    out = torch.empty((rows, width), dtype=DTYPES[out_dtype] if out_dtype else default, device=token_ids.device)
    if isinstance(weight, IntWeight):
        if weight.order is not None:
            raise ConfigError("embeddings that were quantized in the order of activations (desc_act) are not built.")
        by_pieces(
            _embed_int, rows, width, _BLOCK, token_ids, weight.codes, weight.scales, weight.table, out,
            weight.codes.stride(0), weight.scales.stride(0), scale * weight.factor, BITS=weight.bits,
            GROUP=weight.group, MINIMA=weight.minima, TABLE=weight.table is not None, WORDS=BLOCK_WORDS,
        )  # fmt: skip
        return out
    data, scales = (weight.codes, weight.scales) if isinstance(weight, ScaledWeight) else (weight.data, None)
    is_scaled = scales is not None
    by_pieces(_embed, rows, width, _BLOCK, token_ids, data, scales, out, data.stride(0), scale, SCALED=is_scaled)
    return out


@triton.jit
def _activate(x, KIND: tl.constexpr, KINDS: tl.constexpr, p0, p1, p2, p3):
    """Return activation number KIND of x; numbers from KINDS on are `PARAMETRIC_ACTIVATIONS`."""
    if KIND < KINDS:
        return activate(x, KIND)
    elif KIND == KINDS:  # xielu; near zero exp(z) - 1 is the Taylor series
        z = tl.minimum(x, p3)
        series = 0.5 + z * (1 / 6 + z * (1 / 24 + z * (1 / 120 + z * (1 / 720 + z * (1 / 5040)))))
        below = tl.where(z > -0.25, z * z * series + (z - x), tl.exp(z) - 1.0 - x)
        return tl.where(x > 0, p0 * x * x, p1 * below) + p2 * x
    elif KIND == KINDS + 1:  # softcap
        e = tl.exp(2.0 * x / p0)
        return p0 - 2.0 * p0 / (e + 1.0)
    else:  # clip
        return tl.minimum(tl.maximum(x, -p0), p0)


@triton.jit
def _activation(
    x, stride, out, p0, p1, p2, p3, WIDTH: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, KINDS: tl.constexpr
):
    """Program (n, c): piece c of row n."""
    n = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + n * stride + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    values = _activate(values, KIND, KINDS, p0, p1, p2, p3)
    tl.store(out + n * WIDTH + column, values.to(out.dtype.element_ty), mask=column < WIDTH)


def activation(
    x: Tensor, kind: str, consumer: LinearWeight | None = None, parameters: tuple[float, ...] = ()
) -> Tensor:
    """`Ops.activation` of x [T, N]: the same shape and dtype, or quantized for the `consumer`."""
    rows, width = x.shape
    assert x.stride(1) == 1 or width == 1
    assert len(parameters) == PARAMETRIC_ACTIVATIONS.get(kind, 0)
    codes_dtype: torch.dtype | None = getattr(consumer, "activation_dtype", None)
    out = torch.empty((rows, width), dtype=torch.float32 if codes_dtype else x.dtype, device=x.device)
    place = [*ACTIVATIONS, *PARAMETRIC_ACTIVATIONS].index(kind)
    padded = (*map(float, parameters), 0.0, 0.0, 0.0, 0.0)[:4]
    by_pieces(
        _activation, rows, width, _BLOCK, x, x.stride(0), out, *padded, KIND=place, KINDS=len(ACTIVATIONS)
    )  # fmt: skip
    return out if codes_dtype is None else quantize_rows(out, codes_dtype)


@triton.jit
def _add(x, stride, out, out_stride, scale, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Program (n, c) adds piece c of row n, like the epilogue of a product."""
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
    by_pieces(_add, rows, width, _BLOCK, x, x.stride(0), residual, residual.stride(0), float(scale))


@triton.jit
def _sum_of_two(parts, at, part_stride, mask, FIRST: tl.constexpr, COUNT: tl.constexpr):
    total = tl.load(parts + FIRST * part_stride + at, mask=mask, other=0.0)
    if COUNT > FIRST + 1:
        total += tl.load(parts + (FIRST + 1) * part_stride + at, mask=mask, other=0.0)
    return total


@triton.jit
def _sum_of_four(parts, at, part_stride, mask, FIRST: tl.constexpr, COUNT: tl.constexpr):
    total = _sum_of_two(parts, at, part_stride, mask, FIRST, COUNT)
    if COUNT > FIRST + 2:
        total += _sum_of_two(parts, at, part_stride, mask, FIRST + 2, COUNT)
    return total


@triton.jit(do_not_specialize=["num_rows"])
def _sum_in_tree(
    parts, bias, out, num_rows, WIDTH: tl.constexpr, COUNT: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Program (t, c) computes piece c of row t of the sum."""
    t = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    at, part_stride = t * WIDTH + column, num_rows.to(tl.int64) * WIDTH
    total = _sum_of_four(parts, at, part_stride, mask, 0, COUNT)
    if COUNT > 4:
        total += _sum_of_four(parts, at, part_stride, mask, 4, COUNT)
    if HAS_BIAS:
        total += tl.load(bias + column, mask=mask, other=0.0)
    tl.store(out + at, total, mask=mask)


MAX_PARTS = 8  # most parts of `sum_in_tree`


def sum_in_tree(parts: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write the sum of parts [N, T, H], in the order of `SegmentOps.sum_by_segments`, plus the bias [H] to out [T, H].
    All are float32; N is at most `MAX_PARTS`."""
    count, rows, width = parts.shape
    assert count <= MAX_PARTS and out.shape == (rows, width) and parts.is_contiguous() and out.is_contiguous()
    assert parts.dtype is out.dtype is torch.float32
    by_pieces(
        _sum_in_tree, rows, width, _BLOCK, parts, bias, out, rows, COUNT=count, HAS_BIAS=bias is not None
    )  # fmt: skip
