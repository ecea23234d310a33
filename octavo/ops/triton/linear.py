"""Products with matrices whose elements are multiplied as stored: floats, and (`SCALED`) eight-bit numbers with a scale
for each output channel, times activations with a scale for each token.

A program computes a tile of channels by tokens over all of k. The model in `schedule` chooses the tile. With few tokens
the tensor cores are not the limit, and all multiprocessors must read weights all the time. Then channels may be divided
evenly among programs: a program of a small matrix has fewer channels than its tile, and the rest of the tile is masked.
This wastes sums, which are not the limit, and needs no second pass over partial sums, unlike splits of k."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.triton import schedule
from octavo.ops.triton.launch import capability, num_multiprocessors
from octavo.ops.triton.schedule import Tile
from octavo.ops.triton.tiles import (
    GATED,
    LARGE_SHARED,
    UNIT,
    Added,
    Groups,
    adapted_arguments,
    add_adapted,
    dot,
    finish,
    place,
)


# `slots` may be part of a step's array, so its address may have any alignment.
@triton.jit(do_not_specialize=["num_rows", "units"], do_not_specialize_on_alignment=["slots"])
def _linear(
    x, x_scales, w, w_scales, bias, tile_experts, out, num_rows, width, num_in, units, stride_x, stride_xs, stride_w,
    stride_out, scale, slots, entries, entry_size, added, stride_added, ADAPTED: tl.constexpr, SCALED: tl.constexpr,
    EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_T: tl.constexpr, PROMOTE: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """Write the epilogue of x w^T to `out` [num_rows, width]; x [num_rows, num_in], w [width, num_in], or [2 * width,
    num_in] if gated.

    A program writes `units` times 8 columns. With GROUPED, w is a stack of such matrices, and each tile of BLOCK_T rows
    is multiplied by one of them, or by none."""
    first, first_t = place(width, num_rows, units * UNIT, BLOCK_T, GROUP_T)
    SIDES: tl.constexpr = 2 if EPILOGUE >= GATED else 1
    first_n, rows, num_out = first * SIDES, units * (UNIT * SIDES), width * SIDES
    if GROUPED:
        expert = tl.load(tile_experts + first_t // BLOCK_T)
        if expert < 0:
            return
        w += (expert * num_out).to(tl.int64) * stride_w
        if SCALED:
            w_scales += expert * num_out
        if HAS_BIAS:
            bias += expert * num_out
    k = tl.arange(0, BLOCK_K)
    channels = tl.arange(0, BLOCK_N)
    tokens = tl.arange(0, BLOCK_T)
    channel_mask = ((channels < rows) & (first_n + channels < num_out))[:, None]
    token_mask = (first_t + tokens < num_rows)[None, :]
    w_at = w + first_n.to(tl.int64) * stride_w + (channels[:, None] * stride_w + k[None, :])
    x_at = x + first_t.to(tl.int64) * stride_x + (tokens[None, :] * stride_x + k[:, None])
    acc = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.int32 if w.dtype.element_ty == tl.int8 else tl.float32)
    for first_k in range(0, num_in, BLOCK_K):
        if EVEN_K:
            w_mask, x_mask = channel_mask, token_mask
        else:
            w_mask = channel_mask & (first_k + k < num_in)[None, :]
            x_mask = token_mask & (first_k + k < num_in)[:, None]
        acc = dot(tl.load(w_at, mask=w_mask, other=0.0), tl.load(x_at, mask=x_mask, other=0.0), acc, PROMOTE)
        w_at += BLOCK_K
        x_at += BLOCK_K
    y = tl.trans(acc)
    if SCALED:
        w_scale = tl.load(w_scales + first_n + channels, mask=first_n + channels < num_out, other=0.0)
        t = first_t + tokens
        x_scale = tl.load(x_scales + t.to(tl.int64) * stride_xs, mask=t < num_rows, other=0.0)
        y = y.to(tl.float32) * x_scale[:, None] * w_scale[None, :]
    if ADAPTED:
        y = add_adapted(
            y, first, first_t, width, num_rows, slots, entries, entry_size, added, stride_added, ADAPTED, EPILOGUE,
            BLOCK_N, BLOCK_T,
        )  # fmt: skip
    finish(
        y, first, first_t, units * UNIT, width, num_rows, bias, out, stride_out, scale, EPILOGUE, HAS_BIAS, BLOCK_N,
        BLOCK_T,
    )  # fmt: skip


# Tiles in order of preference. k is in bytes, not elements, so that types of one, two and four bytes take the same
# memory. Hopper's instruction takes 64 channels for each group of four warps. A tile fills a multiprocessor's shared
# memory, or half of it: then one program reads while another begins or ends.
_HOPPER = (
    Tile(64, 16, 256, 4, 5),
    Tile(64, 16, 512, 4, 5),
    Tile(64, 32, 256, 4, 4),
    Tile(64, 32, 512, 4, 4),
    Tile(128, 64, 128, 8, 6),
    Tile(64, 64, 128, 4, 6),
    Tile(64, 64, 256, 4, 6),
    Tile(128, 256, 128, 8, 4),
    Tile(128, 128, 128, 8, 4),
    Tile(64, 128, 256, 4, 4),
)
# Ampere's instruction takes 16 channels. Multiprocessors of 8.6 and 8.9 have 100 KB, of which these use 96.
_AMPERE = (
    Tile(64, 16, 256, 4, 4),
    Tile(64, 32, 256, 4, 4),
    Tile(64, 64, 128, 4, 4),
    Tile(128, 256, 64, 8, 4),
    Tile(128, 128, 64, 4, 4),
    Tile(64, 128, 128, 4, 4),
)
# Float32 is multiplied without tensor cores, from registers.
_SINGLE = (Tile(32, 16, 128, 4, 3), Tile(32, 32, 64, 4, 3), Tile(32, 64, 64, 4, 3))


def choose_tile(
    capability: tuple[int, int], multiprocessors: int, num_rows: int, num_out: int, row_bytes: int, dtype: torch.dtype,
    unit: int, block_t: int | None = None,
) -> tuple[Tile, int]:  # fmt: skip
    """Return the tile for a product with a matrix of `num_out` rows of `row_bytes`, and the number of its channels that
    a program computes, a multiple of `unit`. `block_t` fixes the number of tokens of a tile."""
    row_class = schedule.row_class(num_rows)
    return _tile_of_class(capability, multiprocessors, row_class, num_out, row_bytes, dtype, unit, block_t)


@cache
def _tile_of_class(
    capability: tuple[int, int], multiprocessors: int, num_rows: int, num_out: int, row_bytes: int, dtype: torch.dtype,
    unit: int, block_t: int | None,
) -> tuple[Tile, int]:  # fmt: skip
    """Return what `choose_tile` does for a class of rows. A choice takes 1 to 8 ms, so prompts of new lengths must find
    those of other lengths here."""
    hopper = capability[0] in LARGE_SHARED
    if dtype is torch.float32:
        tile = next((t for t in _SINGLE if num_rows <= t.block_t), _SINGLE[-1])
        return tile, tile.block_n
    most = min(triton.next_power_of_2(num_rows), 256)
    tiles = [t for t in (_HOPPER if hopper else _AMPERE) if most <= 4 * t.block_t <= 4 * most]
    if block_t is not None:
        tiles = [t for t in tiles if t.block_t == block_t]
    # Leave out tiles that would spill registers: on Hopper each product of 8-bit floats has two sums.
    if dtype is torch.float8_e4m3fn and hopper:
        tiles = [t for t in tiles if t.block_n * t.block_t <= 128 * 32 * t.num_warps // 8 * 4 and t.block_t < 256]
    elif dtype.itemsize == 1 and not hopper:
        tiles = [t for t in tiles if t.block_t <= 64]
    tile, channels = schedule.choose(
        schedule.machine_like(capability, multiprocessors), num_rows, num_out, row_bytes, unit, tuple(tiles)
    )
    if channels < tile.block_n and not hopper:
        tile = replace(tile, block_n=max(16, triton.next_power_of_2(channels)))
    return tile, channels


def launch(
    x: Tensor, x_scales: Tensor | None, w: Tensor, w_scales: Tensor | None, bias: Tensor | None, out: Tensor,
    epilogue: tl.constexpr, scale: float = 1.0, groups: Groups | None = None, added: Added | None = None,
) -> None:  # fmt: skip
    """Launch the product: the epilogue of x [T, K] w^T, w [N, K], in the rows of `out`.

    The scales [T], [N] are for eight-bit elements. `added` has a row for each row of x. With `groups`, w is a stack
    [experts * N, K]."""
    num_rows, num_in = x.shape
    num_out = w.shape[0] // (1 if groups is None else groups.num_experts)
    if num_rows == 0:
        return
    sides = 2 if epilogue.value >= GATED.value else 1
    width, unit = num_out // sides, UNIT.value * sides
    # The tile is chosen as if the stack were one matrix and each expert had one tile of rows.
    rows_alike, block_t = (num_rows, None) if groups is None else (groups.block_t, groups.block_t)
    tile, rows = choose_tile(
        capability(x.device), num_multiprocessors(x.device), rows_alike, w.shape[0], num_in * w.element_size(), w.dtype,
        unit, block_t,
    )  # fmt: skip
    block_k = tile.block_k // w.element_size()
    if (x.stride(0) * x.element_size()) % 16 or x.data_ptr() % 16:
        block_k = max(16, block_k // 8)  # such rows are read element by element, through registers
    grid = (triton.cdiv(num_out, rows) * triton.cdiv(num_rows, tile.block_t),)
    _linear[grid](
        x, x_scales, w, w_scales, bias, None if groups is None else groups.tile_experts, out, num_rows, width, num_in,
        rows // unit, x.stride(0), 0 if x_scales is None else x_scales.stride(0), w.stride(0), out.stride(0), scale,
        **adapted_arguments(added), SCALED=w_scales is not None, EPILOGUE=epilogue, HAS_BIAS=bias is not None,
        EVEN_K=num_in % block_k == 0, BLOCK_N=tile.block_n, BLOCK_T=tile.block_t, BLOCK_K=block_k, GROUP_T=8,
        PROMOTE=min(128, block_k) if capability(x.device)[0] == 9 else 0, GROUPED=groups is not None,
        num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=False,
    )  # fmt: skip
