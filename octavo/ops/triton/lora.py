"""LoRA adapters' part of products and of looked-up rows, for any mix of adapters in a step.

`rows_by_adapter` sorts the rows of a step by adapter, once, on the device, into tiles of one adapter each. A product
with adapters then takes two more launches. `shrink` multiplies each tile by the adapter's A, in chunks of K that are
cut at fixed places. `added` sums the chunks in order and multiplies by B. The product's own epilogue adds this float32
result (`Added`, `tiles.add_adapted`); rows without an adapter do not read it. Only the device knows the number of
tiles: grids have as many programs as there are full tiles, and a program may compute several tiles in turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops import AdapterTable, Expand, ExpandExperts, LinearWeight, Lookup
from octavo.ops.triton.adapter_tables import BIAS, PANEL, RANK_UNIT, RANKS, TritonAdapterTable
from octavo.ops.triton.launch import by_pieces, capability
from octavo.ops.triton.packed_weights import PackedWeight
from octavo.ops.triton.quantize import codes_of, scales_of
from octavo.ops.triton.schedule import row_class
from octavo.ops.triton.tiles import KIND, REPLACES, SCALES, Added, dot

_CHUNK = 2048  # elements of K in a chunk
_MAX_SPLIT_ROWS = 128
_KIND, _SCALES, _BIAS = tl.constexpr(KIND), tl.constexpr(SCALES), tl.constexpr(BIAS)
_RANKS, _RANK_UNIT, _REPLACES = tl.constexpr(RANKS), tl.constexpr(RANK_UNIT), tl.constexpr(REPLACES)
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """A step's rows, sorted by adapter."""

    slots: Tensor  # [T] int32: the slot of each row's adapter, or -1
    row_class: int  # class of the step's number of tokens, which chooses kernels; the start runs each class once
    block_t: int  # rows of a tile
    tile_slots: Tensor  # [T] int32: the slot of each tile; only the first `num_tiles` count
    sources: Tensor  # [T * block_t] int32: the row at each place of each tile, or -1
    num_tiles: Tensor  # [1] int32


def rows_by_adapter(slots: Tensor) -> AdaptedRows:
    """`AdapterOps.rows_by_adapter`."""
    return _in_tiles(slots, row_class(len(slots)))


def _in_tiles(slots: Tensor, of_class: int) -> AdaptedRows:
    """Return rows with the adapters `slots` [T] int32, sorted into tiles; `of_class` is the step's row class."""
    count, device = len(slots), slots.device
    block_t = 16 if of_class <= 64 else 64
    found, order = slots.sort(stable=True)
    index = torch.arange(count, device=device)
    begins = torch.ones(count, dtype=torch.bool, device=device)
    begins[1:] = found[1:] != found[:-1]
    within = index - torch.where(begins, index, 0).cummax(0).values if count else index
    has_adapter = found >= 0
    is_tile = has_adapter & (within % block_t == 0)
    tile = is_tile.cumsum(0) - 1
    # Rows that belong to no tile are written behind the last place.
    tile_slots = torch.zeros(count + 1, dtype=torch.int32, device=device)
    tile_slots.scatter_(0, torch.where(is_tile, tile, count), found)
    sources = torch.full((count * block_t + 1,), -1, dtype=torch.int32, device=device)
    sources.scatter_(0, torch.where(has_adapter, tile * block_t + within % block_t, count * block_t), order.int())
    num_tiles = is_tile.sum(0, keepdim=True, dtype=torch.int32)
    return AdaptedRows(slots, of_class, block_t, tile_slots[:count], sources[:-1], num_tiles)


@dataclass(frozen=True, slots=True)
class Shrunk:
    """Rows times A: sums [chunks, T, ranks of all projections] float32, one for each chunk of K, not added up yet. `x`
    has the rows themselves, for adapters that replace the matrix."""

    sums: Tensor
    x: Tensor
    x_scales: Tensor | None


@triton.jit
def _pointer(address, DTYPE: tl.constexpr):
    """Return the address of a piece as a pointer that the compiler knows to be a multiple of 16 bytes."""
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)


@triton.jit(do_not_specialize=["num_rows"])
def _shrink(
    x, x_scales, entries, tile_slots, sources, num_tiles, out, num_rows, num_in, num_blocks, chunk_blocks, entry_size,
    stride_x, stride_xs, stride_a, PROJECTIONS: tl.constexpr, MAX_RANK: tl.constexpr, SCALED: tl.constexpr,
    SPLIT: tl.constexpr, DTYPE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (lane, ranks, chunk) computes some ranks of a projection for every num_programs(0)-th tile, over all
    chunks; with SPLIT over one chunk.

    out [chunks, num_rows, PROJECTIONS * MAX_RANK] float32; without SPLIT it has one entry, the sum of all chunks."""
    BLOCKS: tl.constexpr = (MAX_RANK + BLOCK_R - 1) // BLOCK_R
    projection = tl.program_id(1) // BLOCKS
    first_r = tl.program_id(1) % BLOCKS * BLOCK_R
    first_block, last_block = 0, num_blocks
    if SPLIT:
        first_block = tl.program_id(2) * chunk_blocks
        last_block = tl.minimum(first_block + chunk_blocks, num_blocks)
        out += tl.program_id(2).to(tl.int64) * num_rows * (PROJECTIONS * MAX_RANK)
    r = tl.arange(0, BLOCK_R)
    t = tl.arange(0, BLOCK_T)
    k = tl.arange(0, BLOCK_K)
    count = tl.load(num_tiles)
    for tile in range(tl.program_id(0), count, tl.num_programs(0)):
        entry = entries + tl.load(tile_slots + tile).to(tl.int64) * entry_size
        rank = tl.load(entry + _RANKS + projection).to(tl.int32) * _RANK_UNIT
        row = tl.load(sources + tile * BLOCK_T + t)
        in_r, in_t = (first_r + r < rank)[:, None], (row >= 0)[None, :]
        row = tl.maximum(row, 0).to(tl.int64)
        a = _pointer(tl.load(entry + _RANKS + PROJECTIONS + projection), DTYPE)
        a_at = a + (first_r + r).to(tl.int64)[:, None] * stride_a + k[None, :]
        x_at = x + row[None, :] * stride_x + k[:, None]
        acc = tl.zeros((BLOCK_R, BLOCK_T), dtype=tl.float32)
        total = tl.zeros((BLOCK_R, BLOCK_T), dtype=tl.float32)
        # No asynchronous products in a conditional: Triton 3.9 may forget to wait for them.
        for block in range(first_block, tl.where(first_r < rank, last_block, first_block)):
            if not SPLIT:  # noqa: SIM102
                if block % chunk_blocks == 0:
                    total += acc
                    acc = tl.zeros_like(acc)
            in_k = block * BLOCK_K + k < num_in
            a_tile = tl.load(a_at + block * BLOCK_K, mask=in_r & in_k[None, :], other=0.0)
            x_tile = tl.load(x_at + block * BLOCK_K, mask=in_t & in_k[:, None], other=0.0)
            acc = dot(a_tile, x_tile.to(DTYPE), acc)
        y = total + acc
        if SCALED:
            y *= tl.load(x_scales + row * stride_xs)[None, :]
        at = out + row[None, :] * (PROJECTIONS * MAX_RANK) + (projection * MAX_RANK + first_r + r)[:, None]
        tl.store(at, y, mask=in_r & in_t)


@triton.jit(do_not_specialize=["num_rows"])
def _added(
    sums, x, x_scales, entries, tile_slots, sources, num_tiles, panels, out, num_rows, num_in, entry_size, stride_x,
    stride_xs, stride_whole, whole_rows, first_b, stride_out, PROJECTIONS: tl.constexpr, MAX_RANK: tl.constexpr,
    CHUNKS: tl.constexpr, REPLACEABLE: tl.constexpr, SCALED: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (lane, panel) writes the adapters' part of a panel's columns to `out` [num_rows, columns] float32, for
    every num_programs(0)-th tile: B times the summed chunks, or the replacement times x; times scales, plus bias.

    Pieces of B have ROWS rows."""
    panel = panels + tl.program_id(1) * 5
    projection, first, column = tl.load(panel), tl.load(panel + 1), tl.load(panel + 2)
    width, piece = tl.load(panel + 3), tl.load(panel + 4)
    n = tl.arange(0, BLOCK_N)
    in_n = n < width
    t = tl.arange(0, BLOCK_T)
    r = tl.arange(0, BLOCK_R)
    count = tl.load(num_tiles)
    for tile in range(tl.program_id(0), count, tl.num_programs(0)):
        entry = entries + tl.load(tile_slots + tile).to(tl.int64) * entry_size
        kind = tl.load(entry + _KIND)
        row = tl.load(sources + tile * BLOCK_T + t)
        in_t = row >= tl.where(kind > 0, 0, 1 << 30)
        row = tl.maximum(row, 0).to(tl.int64)
        acc = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
        rank = tl.load(entry + _RANKS + projection).to(tl.int32) * _RANK_UNIT
        b = _pointer(tl.load(entry + piece), DTYPE)
        b_at = b + (first % ROWS + n)[:, None] * rank + r[None, :]
        sums_at = sums + row[None, :] * (PROJECTIONS * MAX_RANK) + (projection * MAX_RANK + r)[:, None]
        for first_r in range(0, rank, BLOCK_R):
            in_r = first_r + r < rank
            shrunk = tl.zeros((BLOCK_R, BLOCK_T), dtype=tl.float32)
            for chunk in tl.static_range(CHUNKS):
                at = sums_at + first_r + chunk * (num_rows * (PROJECTIONS * MAX_RANK)).to(tl.int64)
                shrunk += tl.load(at, mask=in_r[:, None] & in_t[None, :], other=0.0)
            b_tile = tl.load(b_at + first_r, mask=in_n[:, None] & in_r[None, :], other=0.0)
            acc = dot(b_tile, shrunk.to(DTYPE), acc)
        if REPLACEABLE:
            k = tl.arange(0, BLOCK_K)
            m = _pointer(tl.load(entry + first_b + first // whole_rows), DTYPE)
            m_at = m + (first % whole_rows + n).to(tl.int64)[:, None] * stride_whole
            x_at = x + row[None, :] * stride_x
            for first_k in range(0, tl.where(kind == _REPLACES, num_in, 0), BLOCK_K):
                at_k = first_k + k
                m_tile = tl.load(m_at + at_k[None, :], mask=in_n[:, None] & (at_k < num_in)[None, :], other=0.0)
                x_tile = tl.load(x_at + at_k[:, None], mask=in_t[None, :] & (at_k < num_in)[:, None], other=0.0)
                acc = dot(m_tile, x_tile.to(DTYPE), acc)
            if SCALED:
                acc *= tl.where(kind == _REPLACES, tl.load(x_scales + row * stride_xs), 1.0)[None, :]
        scales = tl.load(entry + _SCALES)
        scale_at = scales.to(tl.pointer_type(tl.float32)) + column + n
        scale = tl.load(scale_at, mask=n < tl.where(scales != 0, width, 0), other=1.0)
        biases = tl.load(entry + _BIAS)
        bias_at = biases.to(tl.pointer_type(tl.float32)) + column + n
        bias = tl.load(bias_at, mask=n < tl.where(biases != 0, width, 0), other=0.0)
        y = tl.fma(acc, scale[:, None], tl.broadcast_to(bias[:, None], (BLOCK_N, BLOCK_T)))
        at = out + row[:, None] * stride_out + (column + n)[None, :]
        tl.store(at, tl.trans(y), mask=in_t[:, None] & in_n[None, :])


@triton.jit
def _look_up(
    rows, token_ids, slots, entries, out, scale, entry_size, stride_a, piece_rows, whole_rows, first_a,
    DTYPE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (t, c) writes piece c of row t of `out`, if the row has an adapter, from the base's row in `rows`."""
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + t)
    if slot >= 0:
        entry = entries + slot.to(tl.int64) * entry_size
        kind = tl.load(entry + _KIND)
        if kind > 0:
            k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
            in_k = k < WIDTH
            token = tl.load(token_ids + t)
            value = tl.load(rows + t * WIDTH + k, mask=in_k, other=0.0)
            if kind == _REPLACES:
                at = (
                    _pointer(tl.load(entry + first_a + 1 + token // whole_rows), DTYPE)
                    + (token % whole_rows).to(tl.int64) * stride_a
                )
                value = tl.load(at + k, mask=in_k, other=0.0).to(tl.float32)
            else:
                rank = tl.load(entry + _RANKS).to(tl.int32) * _RANK_UNIT
                a = _pointer(tl.load(entry + first_a), DTYPE)
                b = _pointer(tl.load(entry + first_a + 1 + token // piece_rows), DTYPE)
                added = tl.zeros((BLOCK,), tl.float32)
                for r in range(0, rank):
                    factor = tl.load(b + token % piece_rows * rank + r).to(tl.float32)
                    added += factor * tl.load(a + r * stride_a + k, mask=in_k, other=0.0).to(tl.float32)
                value += added
            tl.store(out + t * WIDTH + k, (value * scale).to(out.dtype.element_ty), mask=in_k)


def _block_r(table: TritonAdapterTable) -> int:
    return next((size for size in (16, 32) if table.max_rank <= size), 64)


def _block_k(dtype: torch.dtype) -> int:
    return 256 // dtype.itemsize


def shrink(x: Tensor, table: AdapterTable, slots: AdaptedRows, weight: LinearWeight) -> Shrunk:
    """`AdapterOps.shrink`."""
    assert isinstance(table, TritonAdapterTable) and isinstance(weight, PackedWeight)
    assert isinstance(slots, AdaptedRows) and len(slots.slots) == len(x)
    x_scales, num_in = None, table.shape.num_in
    if x.dtype is torch.uint8:
        assert weight.activation_dtype is not None
        x, x_scales = codes_of(x, weight.activation_dtype), scales_of(x)
    assert x.shape[1] == num_in, f"shrink: {x.shape[1]} inputs for factors of {num_in}"
    num_rows, projections = len(x), len(table.shape.widths)
    block_k = _block_k(table.dtype)
    num_blocks, chunk_blocks = triton.cdiv(num_in, block_k), _CHUNK // block_k
    chunks = triton.cdiv(num_blocks, chunk_blocks)
    split = chunks > 1 and slots.row_class <= _MAX_SPLIT_ROWS
    sums = torch.empty(
        (chunks if split else 1, num_rows, projections * table.max_rank), dtype=torch.float32, device=x.device
    )
    if num_rows:
        block_r = _block_r(table)
        ranks = projections * triton.cdiv(table.max_rank, block_r)
        _shrink[(triton.cdiv(num_rows, slots.block_t), ranks, len(sums))](
            x, x_scales, table.entries, slots.tile_slots, slots.sources, slots.num_tiles, sums, num_rows, num_in,
            num_blocks, chunk_blocks, table.entry_size, x.stride(0), 0 if x_scales is None else x_scales.stride(0),
            table.stride_a, PROJECTIONS=projections, MAX_RANK=table.max_rank, SCALED=x_scales is not None, SPLIT=split,
            DTYPE=_TYPES[table.dtype], BLOCK_R=block_r, BLOCK_T=slots.block_t, BLOCK_K=block_k, num_warps=4,
            num_stages=1 if capability(x.device)[0] == 10 and not split else 3,  # as in `linear_int`
            enable_fp_fusion=False,
        )  # fmt: skip
    return Shrunk(sums, x, x_scales)


def added(expand: Expand) -> Added:
    """Return the adapters' part of a product, for its epilogue."""
    table, rows, shrunk = expand.table, expand.slots, expand.shrunk
    assert isinstance(table, TritonAdapterTable) and isinstance(rows, AdaptedRows) and isinstance(shrunk, Shrunk)
    num_rows, x_scales = len(shrunk.x), shrunk.x_scales
    out = torch.empty((num_rows, table.num_columns), dtype=torch.float32, device=shrunk.x.device)
    if num_rows:
        _added[(triton.cdiv(num_rows, rows.block_t), len(table.panels))](
            shrunk.sums, shrunk.x, x_scales, table.entries, rows.tile_slots, rows.sources, rows.num_tiles,
            table.panels, out, num_rows, table.shape.num_in, table.entry_size, shrunk.x.stride(0),
            0 if x_scales is None else x_scales.stride(0), table.stride_a, table.whole_rows, table.first_b,
            out.stride(0), PROJECTIONS=len(table.shape.widths), MAX_RANK=table.max_rank, CHUNKS=len(shrunk.sums),
            REPLACEABLE=table.shape.replaceable, SCALED=x_scales is not None, DTYPE=_TYPES[table.dtype],
            ROWS=table.piece_rows, BLOCK_R=_block_r(table), BLOCK_T=rows.block_t, BLOCK_N=PANEL,
            BLOCK_K=_block_k(table.dtype), num_warps=4, num_stages=3, enable_fp_fusion=False,
        )  # fmt: skip
    return Added(rows.slots, table.entries, table.entry_size, out, table.shape.gated)


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Rows of products with a stack of experts, sorted by pairs of an adapter and an expert."""

    expand: ExpandExperts
    pairs: AdaptedRows

    def added(self, table: Any, x: Tensor, stack: PackedWeight) -> Added | None:
        """Return the adapters' part of the product of rows x with a `stack`; `table` is the stack's
        `ExpertsAdapterTable`, or None."""
        if table is None:
            return None
        return added(Expand(table.pairs, self.pairs, shrink(x, table.pairs, self.pairs, stack)))


def rows_of_experts(expand: ExpandExperts, ids: Tensor, rows: Tensor, num_rows: int, num_experts: int) -> ExpertRows:
    """Return the rows of a product with a stack, sorted for adapters. Entry [t, j] of ids [T, top_k] is at rows[t, j],
    or has no row (-1)."""
    slots = expand.slots.slots[:, None].expand(ids.shape)
    pairs = torch.full((num_rows + 1,), -1, dtype=torch.int32, device=ids.device)
    found = torch.where(slots >= 0, slots * num_experts + ids, -1)
    pairs.scatter_(0, torch.where(rows >= 0, rows, num_rows).reshape(-1), found.reshape(-1))
    return ExpertRows(expand, _in_tiles(pairs[:num_rows], row_class(len(ids))))


def look_up(rows: Tensor, token_ids: Tensor, adapted: Lookup, out: Tensor, scale: float) -> None:
    """Replace rows of `out` [T, K] that have an adapter by the base's `rows` [T, K] float32, changed by the adapter,
    times `scale`."""
    table, slots = adapted.table, adapted.slots
    assert isinstance(table, TritonAdapterTable) and isinstance(slots, AdaptedRows) and table.shape.is_embedding
    by_pieces(
        _look_up, *out.shape, 1024, rows, token_ids, slots.slots, table.entries, out, scale, table.entry_size,
        table.stride_a, table.piece_rows, table.whole_rows, table.first_a, DTYPE=_TYPES[table.dtype],
    )  # fmt: skip
