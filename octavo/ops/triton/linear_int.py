"""Products with matrices of 4- and 8-bit codes (`packed_weights.IntWeight`). Codes become floats of the activations'
type in registers and are multiplied on the tensor cores.

Unpacking takes about four instructions for each element, so a tile must not be partly empty as in products of floats:
all 64 channels of Hopper's instruction are real. Instead, for few tokens, k is cut into chunks, so that there are
enough programs for the machine. The number of chunks depends on the matrix alone. A chunk's sum starts from zero, and
an output is the sum of its chunks in order. Either one program computes all chunks, or each chunk has a program, and
the last program to finish adds the chunks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.triton.launch import capability, num_multiprocessors, stream
from octavo.ops.triton.packed_weights import BLOCK_WORDS, IntWeight, Workspace
from octavo.ops.triton.schedule import row_class
from octavo.ops.triton.tiles import (
    GATED,
    INTERPRETED,
    LARGE_SHARED,
    Added,
    Groups,
    adapted_arguments,
    add_adapted,
    dot,
    finish,
    place,
)


@triton.jit
def _half(words, high):
    """Return one of the two float16 in each word, as float32."""
    return ((words >> (16 * high)) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


# Of the low four codes of a word: the entry of each among the first eight, and among the last eight. The third
# instruction takes one of the two by the code's highest bit. A selector's nibble below 8 copies a byte unchanged.
_LOOK_UP = tl.constexpr("""{
.reg .b32 entry, first, last, half;
and.b32 entry, $1, 0x7777;
prmt.b32 first, $2, $3, entry;
prmt.b32 last, $4, $5, entry;
shr.u32 half, $1, 1;
and.b32 half, half, 0x4444;
or.b32 half, half, 0x3210;
prmt.b32 $0, first, last, half;
}""")


@triton.jit
def _looked_up(codes, t0, t1, t2, t3):
    """Return the entries of the four codes in the low halves of words, one in each byte of a word. A table has sixteen
    entries of a byte, four in each of t0 to t3, which are broadcast to the shape of `codes`."""
    if INTERPRETED:  # the interpreter runs no assembly
        found = tl.zeros_like(codes)
        for i in tl.static_range(4):
            code = (codes >> (4 * i)) & 15
            four = tl.where(code < 8, tl.where(code < 4, t0, t1), tl.where(code < 12, t2, t3))
            found |= ((four >> (8 * (code & 3))) & 255) << (8 * i)
        return found
    return tl.inline_asm_elementwise(_LOOK_UP, "=r,r,r,r,r,r", [codes, t0, t1, t2, t3], tl.int32, is_pure=True, pack=1)


# A float32 from 2^15 on that has a byte at 2^0: of $2 all but its second byte.
_PLACE = tl.constexpr("prmt.b32 $0, $1, $2, $3;")
_2_TO_15, _SELECTOR = tl.constexpr(0x47000000), tl.constexpr(0x7504)


@triton.jit
def _placed(words, PLANE: tl.constexpr):
    """Return 2^15 plus byte PLANE of words, as float32."""
    if INTERPRETED:
        bits = (((words >> (8 * PLANE)) & 255) << 8) | _2_TO_15
    else:
        selector: tl.constexpr = _SELECTOR + (PLANE << 4)
        bits = tl.inline_asm_elementwise(
            _PLACE, "=r,r,r,r", [words, _2_TO_15, selector], tl.int32, is_pure=True, pack=1
        )  # fmt: skip
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _unpack(words, scales, minima, PLANE: tl.constexpr, BITS: tl.constexpr, MINIMA: tl.constexpr, DTYPE: tl.constexpr):
    """Return the values of elements PLANE of words in DTYPE. Scales and minima are broadcast to the words' shape."""
    if BITS == 8 and not MINIMA:
        value = _placed(words, PLANE)
    else:
        # The code becomes the top of the mantissa of a number from 2^BITS on: an exact float without a conversion.
        SHIFT: tl.constexpr = BITS * PLANE + BITS - 23
        MASK: tl.constexpr = 0x7FFFFF >> (23 - BITS) << (23 - BITS)
        ONE: tl.constexpr = (127 + BITS) << 23
        bits = words >> SHIFT if SHIFT > 0 else words << -SHIFT
        value = ((bits & MASK) | ONE).to(tl.float32, bitcast=True)
    first: tl.constexpr = 32768.0 if BITS == 8 and not MINIMA else 1.0 * (1 << BITS)
    base: tl.constexpr = first if MINIMA else first + (1 << (BITS - 1))
    if DTYPE == tl.float32:  # noqa: SIM300
        return tl.fma(value - base, scales, minima)
    # One instruction less. It is less exact if a minimum is far larger than its scale, but by less than DTYPE resolves.
    return tl.fma(value, scales, tl.fma(scales, -base, minima)).to(DTYPE)


@triton.jit
def _scales_of(scales_at, stride_scales, k, in_n, i, GROUP: tl.constexpr, MINIMA: tl.constexpr):
    """Return the scales and minima of the 32 elements from k on: [channels, 1], or [channels, 32] if these are two
    groups."""
    if GROUP == 16:
        if MINIMA:
            one = tl.load(scales_at + (k // 16) * stride_scales, mask=in_n, other=0)
            two = tl.load(scales_at + (k // 16 + 1) * stride_scales, mask=in_n, other=0)
            minima = tl.where((i < 16)[None, :], _half(one, 1)[:, None], _half(two, 1)[:, None])
            return tl.where((i < 16)[None, :], _half(one, 0)[:, None], _half(two, 0)[:, None]), minima
        else:
            both = tl.load(scales_at + (k // 32) * stride_scales, mask=in_n, other=0)
            return tl.where((i < 16)[None, :], _half(both, 0)[:, None], _half(both, 1)[:, None]), 0.0
    elif MINIMA:
        both = tl.load(scales_at + (k // GROUP) * stride_scales, mask=in_n, other=0)
        return _half(both, 0)[:, None], _half(both, 1)[:, None]
    else:
        both = tl.load(scales_at + (k // (2 * GROUP)) * stride_scales, mask=in_n, other=0)
        return _half(both, (k // GROUP) % 2)[:, None], 0.0


@triton.jit
def _scales_of_pair(
    scales_at, stride_scales, block, in_n, i, OFFSET: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr,
    MINIMA: tl.constexpr, HOPPER: tl.constexpr,
):  # fmt: skip
    """Return `_scales_of` of 32 elements and of the next 32, from OFFSET on, a multiple of 64, in a block of SIZE
    elements. With HOPPER a word that has the scales of both is loaded once, and at a known place if groups allow it:
    otherwise ptxas has the products wait for each other. For 8.0 loops would spill."""
    k = block * SIZE + OFFSET
    if HOPPER and not MINIMA and GROUP >= 32 and SIZE % (2 * GROUP) == 0:
        word = block * (SIZE // (2 * GROUP)) + OFFSET // (2 * GROUP)
        both = tl.load(scales_at + word * stride_scales, mask=in_n, other=0)
        return _half(both, OFFSET // GROUP % 2)[:, None], 0.0, _half(both, (OFFSET + 32) // GROUP % 2)[:, None], 0.0
    elif HOPPER and GROUP % 64 == 0:
        d, minima = _scales_of(scales_at, stride_scales, k, in_n, i, GROUP, MINIMA)
        return d, minima, d, minima
    else:
        d, minima = _scales_of(scales_at, stride_scales, k, in_n, i, GROUP, MINIMA)
        d_high, minima_high = _scales_of(scales_at, stride_scales, k + 32, in_n, i, GROUP, MINIMA)
        return d, minima, d_high, minima_high


@triton.jit
def _add_blocks(
    acc, total, x, codes, scales, table, first_n, first_t, first_block, last_block, chunk_blocks, num_out, num_rows,
    num_in, stride_x, stride_codes, stride_scales, BITS: tl.constexpr, GROUP: tl.constexpr, MINIMA: tl.constexpr,
    TABLE: tl.constexpr, HOPPER: tl.constexpr, MANY_CHUNKS: tl.constexpr, EVEN_K: tl.constexpr, WORDS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Return the sums over blocks of k: acc, of the last chunk, and with MANY_CHUNKS the total of all other chunks."""
    PLANES: tl.constexpr = 32 // BITS
    n = first_n + tl.arange(0, BLOCK_N)
    t = tl.arange(0, BLOCK_T)
    i = tl.arange(0, WORDS)
    j = tl.arange(0, 2 * WORDS)
    in_n, in_t = n < num_out, first_t + t < num_rows
    codes_at = codes + n.to(tl.int64)[:, None] * stride_codes + i[None, :]
    x_at = x + first_t.to(tl.int64) * stride_x + (t[None, :] * stride_x + j[:, None])
    scales_at = scales + n
    if TABLE:
        tl.assume(first_block < last_block)  # otherwise ptxas may have the products wait for each other
        t0, t1, t2, t3 = tl.load(table), tl.load(table + 1), tl.load(table + 2), tl.load(table + 3)
    for block in range(first_block, last_block):
        if MANY_CHUNKS:  # noqa: SIM102
            if block % chunk_blocks == 0:
                total += acc
                acc = tl.zeros_like(acc)
        words = tl.load(codes_at + block * WORDS, mask=in_n[:, None], other=0)
        # A product of two planes: its k is 64, and the program waits for the tensor cores half as often.
        for pair in tl.static_range(PLANES // 2):
            k = (block * PLANES + 2 * pair) * WORDS
            x_mask = in_t[None, :] if EVEN_K else in_t[None, :] & (k + j < num_in)[:, None]
            x_tile = tl.load(x_at + k, mask=x_mask, other=0.0)
            d, minima, d_high, minima_high = _scales_of_pair(
                scales_at, stride_scales, block, in_n, i, 2 * pair * WORDS, PLANES * WORDS, GROUP, MINIMA, HOPPER
            )
            if TABLE:
                entries = _looked_up(words >> (pair // 2 * 16), t0, t1, t2, t3)
                low = _unpack(entries, d, minima, pair % 2 * 2, 8, False, x.dtype.element_ty)
                high = _unpack(entries, d_high, minima_high, pair % 2 * 2 + 1, 8, False, x.dtype.element_ty)
            else:
                low = _unpack(words, d, minima, 2 * pair, BITS, MINIMA, x.dtype.element_ty)
                high = _unpack(words, d_high, minima_high, 2 * pair + 1, BITS, MINIMA, x.dtype.element_ty)
            both = tl.permute(tl.join(low, high), (0, 2, 1))
            acc = dot(tl.reshape(both, (BLOCK_N, 2 * WORDS)), x_tile, acc)
    return acc, total


@triton.jit(do_not_specialize=["num_rows", "chunk_blocks", "num_blocks"], do_not_specialize_on_alignment=["slots"])
def _linear_int(
    x, codes, scales, table, bias, tile_experts, factors, out, partials, tickets, num_rows, width, num_in, num_blocks,
    chunk_blocks, stride_expert,
    stride_x, stride_codes, stride_scales, stride_out, scale, factor, slots, entries, entry_size, added, stride_added,
    ADAPTED: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, MINIMA: tl.constexpr, TABLE: tl.constexpr,
    HOPPER: tl.constexpr, EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr,
    NUM_CHUNKS: tl.constexpr, SPLIT: tl.constexpr, WORDS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
    GROUP_T: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """Program (tile, 0) computes all chunks; with SPLIT, program (tile, chunk) computes one.

    With GROUPED, codes and scales are a stack of matrices (scales `stride_expert` apart), and each tile of BLOCK_T rows
    is multiplied by one of them, or by none."""
    SIDES: tl.constexpr = 2 if EPILOGUE >= GATED else 1
    COLUMNS: tl.constexpr = BLOCK_N // SIDES
    first, first_t = place(width, num_rows, COLUMNS, BLOCK_T, GROUP_T)
    first_n, num_out = first * SIDES, width * SIDES
    if GROUPED:
        expert = tl.load(tile_experts + first_t // BLOCK_T)
        if expert < 0:
            return
        codes += (expert * num_out).to(tl.int64) * stride_codes
        scales += expert.to(tl.int64) * stride_expert
        if TABLE:
            table += expert * 4
        factor = tl.load(factors + expert)
        if HAS_BIAS:
            bias += expert * num_out
    first_block, last_block = 0, num_blocks
    if SPLIT:
        first_block = tl.program_id(1) * chunk_blocks
        last_block = tl.minimum(first_block + chunk_blocks, num_blocks)
    zeros = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    acc, total = _add_blocks(
        zeros, zeros, x, codes, scales, table, first_n, first_t, first_block, last_block, chunk_blocks, num_out,
        num_rows, num_in, stride_x, stride_codes, stride_scales, BITS, GROUP, MINIMA, TABLE, HOPPER,
        NUM_CHUNKS > 1 and not SPLIT, EVEN_K, WORDS, BLOCK_N, BLOCK_T,
    )  # fmt: skip
    if SPLIT:
        n, t = first_n + tl.arange(0, BLOCK_N), first_t + tl.arange(0, BLOCK_T)
        mask = (t < num_rows)[:, None] & (n < num_out)[None, :]
        at = partials + (t[:, None] * num_out + n[None, :])
        chunk_size = num_rows * num_out
        tl.store(at + tl.program_id(1) * chunk_size, tl.trans(acc), mask=mask)
        # This program's partial sums are written before its ticket; other programs' are written before they are read.
        tl.debug_barrier()
        ticket = tl.atomic_add(tickets + tl.program_id(0), 1, sem="acq_rel")
        if ticket == NUM_CHUNKS - 1:
            tl.store(tickets + tl.program_id(0), 0)  # for the next product
            y = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
            for chunk in tl.static_range(NUM_CHUNKS):
                y += tl.load(at + chunk * chunk_size, mask=mask, other=0.0, cache_modifier=".cg")
            y *= factor
            if ADAPTED:
                y = add_adapted(
                    y, first, first_t, width, num_rows, slots, entries, entry_size, added, stride_added, ADAPTED,
                    EPILOGUE, BLOCK_N, BLOCK_T,
                )  # fmt: skip
            finish(
                y, first, first_t, COLUMNS, width, num_rows, bias, out, stride_out, scale, EPILOGUE, HAS_BIAS,
                BLOCK_N, BLOCK_T,
            )  # fmt: skip
    else:
        y = tl.trans(total + acc) * factor
        if ADAPTED:
            y = add_adapted(
                y, first, first_t, width, num_rows, slots, entries, entry_size, added, stride_added, ADAPTED, EPILOGUE,
                BLOCK_N, BLOCK_T,
            )  # fmt: skip
        finish(
            y, first, first_t, COLUMNS, width, num_rows, bias, out, stride_out, scale,
            EPILOGUE, HAS_BIAS, BLOCK_N, BLOCK_T,
        )  # fmt: skip


# With tiles of 64 channels, chunks make about two programs for each multiprocessor of an H100. A chunk has at least
# `_MIN_BLOCKS` blocks. Chunks determine the bits of results, so they do not depend on the device.
_PROGRAMS, _TILE_CHANNELS, _MIN_BLOCKS = 264, 64, 4
_MAX_SPLIT_ROWS = 128


def num_chunks(num_out: int, num_blocks: int) -> tuple[int, int]:
    """Return the number of chunks of k of a matrix, and the number of blocks in each (fewer in the last)."""
    wanted = max(1, _PROGRAMS // triton.cdiv(num_out, _TILE_CHANNELS))
    blocks = max(triton.cdiv(num_blocks, wanted), min(num_blocks, _MIN_BLOCKS))
    return triton.cdiv(num_blocks, blocks), blocks


_workspaces: dict[tuple[torch.device, int], Workspace] = {}


def workspace_for(num_out: int, num_blocks: int, device: torch.device) -> Workspace | None:
    """Return a workspace for products with a matrix of this size; None if the matrix has one chunk only.

    Matrices that are packed and multiplied on one stream share the largest workspace so far. A smaller, older workspace
    lives as long as a matrix that uses it."""
    chunks, _ = num_chunks(num_out, num_blocks)
    if chunks == 1:
        return None
    size = chunks * num_out * _MAX_SPLIT_ROWS
    tiles = triton.cdiv(num_out, 16) * triton.cdiv(_MAX_SPLIT_ROWS, 16)
    key = (device, stream(device))
    found = _workspaces.get(key)
    if found is None or found.partials.numel() < size or found.tickets.numel() < tiles:
        found = _workspaces[key] = Workspace(
            torch.empty(size, dtype=torch.float32, device=device), torch.zeros(tiles, dtype=torch.int32, device=device)
        )
    return found


def _tile(num_rows: int, hopper: bool, single: bool) -> tuple[int, int, int, int]:
    """Return channels, tokens, warps and stages of a tile that spills no registers and leaves room for a second
    program."""
    if single:
        return 32, 16, 4, 2
    if num_rows <= 16 and hopper:
        return 64, 16, 4, 4
    if num_rows <= 32:
        return 64, 32, 4, 3 if hopper else 4
    if num_rows <= 64:
        return (128, 64, 8, 2) if hopper else (64, 64, 4, 2)
    return (128, 128, 8, 2) if hopper else (64, 128, 8, 2)


def launch(
    x: Tensor, weight: IntWeight, out: Tensor, epilogue: tl.constexpr, scale: float = 1.0, groups: Groups | None = None,
    added: Added | None = None,
) -> None:  # fmt: skip
    """Launch the product: the epilogue of x [T, K] W^T in the rows of `out`. With `groups` the weight's tensors are
    stacks. `added` has a row for each row of x."""
    num_rows, num_in = x.shape
    if num_rows == 0:
        return
    num_experts = 1 if groups is None else groups.num_experts
    num_out = weight.codes.shape[0] // num_experts
    num_blocks = weight.codes.shape[1] // BLOCK_WORDS
    # All experts together make enough programs without chunks.
    chunks, chunk_blocks = num_chunks(num_out, num_blocks) if groups is None else (1, num_blocks)
    hopper = capability(x.device)[0] in LARGE_SHARED
    size = row_class(num_rows) if groups is None else groups.block_t
    block_n, block_t, warps, stages = _tile(size, hopper, x.dtype is torch.float32)
    if groups is not None:
        block_t = groups.block_t
    tiles_n = triton.cdiv(num_out, block_n)
    most = tiles_n * triton.cdiv(size, block_t)
    split = chunks > 1 and size <= _MAX_SPLIT_ROWS and most < 2 * num_multiprocessors(x.device)
    if chunks > 1 and not split and capability(x.device)[0] == 10:
        stages = 1  # Triton 3.9 fails to overlap sums in chunks for 10.0
    tiles = tiles_n * triton.cdiv(num_rows, block_t)
    workspace = weight.workspace
    assert workspace is not None or not split
    _linear_int[(tiles, chunks if split else 1)](
        x, weight.codes, weight.scales, weight.table, weight.bias, None if groups is None else groups.tile_experts,
        None if groups is None else groups.factors, out, None if workspace is None else workspace.partials,
        None if workspace is None else workspace.tickets, num_rows, out.shape[1], num_in, num_blocks, chunk_blocks,
        weight.scales.shape[0] // num_experts * weight.scales.stride(0),
        x.stride(0), weight.codes.stride(0), weight.scales.stride(0), out.stride(0), scale, weight.factor,
        **adapted_arguments(added), BITS=weight.bits, GROUP=weight.group, MINIMA=weight.minima,
        TABLE=weight.table is not None, HOPPER=hopper, EPILOGUE=epilogue,
        HAS_BIAS=weight.bias is not None, EVEN_K=num_in % (BLOCK_WORDS * 32 // weight.bits) == 0, NUM_CHUNKS=chunks,
        SPLIT=split, WORDS=BLOCK_WORDS, BLOCK_N=block_n, BLOCK_T=block_t, GROUP_T=8, GROUPED=groups is not None,
        num_warps=warps, num_stages=stages, enable_fp_fusion=False,
    )  # fmt: skip
