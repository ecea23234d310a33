"""Rows of packed matrices by index: what tokens become."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops import LinearWeight
from octavo.ops.torch_arrays import DTYPES
from octavo.ops.triton.weights import BLOCK_WORDS, FloatWeight, IntWeight, PackedWeight, ScaledWeight

_BLOCK = 1024  # elements of a program


@triton.jit
def _embed(token_ids, data, scales, out, stride, scale, WIDTH: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr):
    """Program (t, c): piece c of row token_ids[t], which SCALED has a scale of its own."""
    t = tl.program_id(0).to(tl.int64)
    token = tl.load(token_ids + t).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(data + token * stride + k, mask=k < WIDTH, other=0.0).to(tl.float32)
    if SCALED:
        value *= tl.load(scales + token)
    tl.store(out + t * WIDTH + k, (value * scale).to(out.dtype.element_ty), mask=k < WIDTH)


@triton.jit
def _embed_int(
    token_ids, codes, scales, out, stride_codes, stride_scales, scale, WIDTH: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, MINIMA: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same out of `weights.IntWeight`."""
    t = tl.program_id(0).to(tl.int64)
    token = tl.load(token_ids + t).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    PLANES: tl.constexpr = 32 // BITS
    word_at = k // (PLANES * WORDS) * WORDS + k % WORDS
    word = tl.load(codes + token * stride_codes + word_at, mask=k < WIDTH, other=0)
    code = ((word >> (k // WORDS % PLANES * BITS)) & ((1 << BITS) - 1)).to(tl.float32)
    group = k // GROUP
    scale_at = (group if MINIMA else group // 2).to(tl.int64) * stride_scales + token
    both = tl.load(scales + scale_at, mask=k < WIDTH, other=0)
    low = (both & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    high = ((both >> 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    value = code * low + high if MINIMA else (code - (1 << (BITS - 1))) * tl.where(group % 2 == 0, low, high)
    tl.store(out + t * WIDTH + k, (value * scale).to(out.dtype.element_ty), mask=k < WIDTH)


def embedding(token_ids: Tensor, weight: LinearWeight, out_dtype: str | None = None, scale: float = 1.0) -> Tensor:
    """`Ops.embedding`: rows `token_ids` [T] int32 of a packed matrix [V, H], times `scale` -> [T, H]."""
    assert isinstance(weight, PackedWeight)
    assert not weight.gated
    assert token_ids.dtype is torch.int32 and token_ids.is_contiguous()
    default = weight.data.dtype if isinstance(weight, FloatWeight) else torch.float32
    rows, width = token_ids.shape[0], weight.in_features
    out = torch.empty((rows, width), dtype=DTYPES[out_dtype] if out_dtype else default, device=token_ids.device)
    if rows == 0:
        return out
    block = min(_BLOCK, triton.next_power_of_2(width))
    grid = (rows, triton.cdiv(width, block))
    if isinstance(weight, IntWeight):
        _embed_int[grid](
            token_ids, weight.codes, weight.scales, out, weight.codes.stride(0), weight.scales.stride(0),
            scale * weight.factor, WIDTH=width, BITS=weight.bits, GROUP=weight.group, MINIMA=weight.minima,
            WORDS=BLOCK_WORDS, BLOCK=block, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        return out
    data, scales = (weight.codes, weight.scales) if isinstance(weight, ScaledWeight) else (weight.data, None)
    _embed[grid](
        token_ids, data, scales, out, data.stride(0), scale, WIDTH=width, SCALED=scales is not None, BLOCK=block,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out
