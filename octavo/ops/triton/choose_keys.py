"""The index that chooses the keys of latent attention (DeepSeek-AI 2025): it scores all keys that a token sees and
chooses the best.

Three kernels run on as many rows at a time as have room for their scores in `_SCRATCH_BYTES`. docs/layer_kernels.md
describes the index.

1. `_score_kernel`, programs (row, part): scores of tiles of keys for all heads of a token. The sum over heads is stored
   as an integer with the same order as the score.
2. `_count_kernel`, programs (row, part), called four times: a radix selection from the highest bits down. It counts the
   values of the next eight bits, among scores whose higher bits equal those of the last chosen score.
3. `_pick_kernel`, a program for each row: the positions of scores above the last chosen score, and of the first scores
   equal to it.

If few rows have many keys, a row's keys are divided into parts for several programs. Counts are integers, and a tile of
keys has a fixed position and a sum of its own, so results do not depend on the program that computes them. Nothing is
read back to the host. Rows with no more keys than are chosen only read their length in steps 1 and 2; step 3 chooses
all of their keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.errors import ConfigError
from octavo.ops import LayerKVCache
from octavo.ops.triton import launch
from octavo.ops.triton.attention_math import block_of, exact_dot, load_rows
from octavo.ops.triton.attention_plan import LENGTHS, SEQS_AT_ONCE, keys_seen

_SCRATCH_BYTES = 64 << 20  # bytes of scores: 128 rows of 131,072 keys
_PROGRAMS_PER_MULTIPROCESSOR = 4
_MAX_HEADS = 128  # a program keeps the products of all heads with a tile of keys in registers
_TILE = 1024  # number of scores that are counted at a time
_LEVELS = tl.constexpr(4)  # levels of eight bits
_VALUES = tl.constexpr(256)
_SIGN = tl.constexpr(-0x80000000)


@triton.jit
def _ordered(x):
    """Return float32 x as int32 whose bits, read as an unsigned number, have the order of x. Both zeros are equal."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) | _SIGN)


@triton.jit(
    do_not_specialize=["first_token", "num_seqs", "table_stride"],
    do_not_specialize_on_alignment=["block_tables", *LENGTHS],
)
def _score_kernel(
    query, weights, key, block_tables, query_start_loc, seq_lens, scores, counts, ends, first_token, num_seqs,
    query_stride, weight_stride, table_stride, width, HEADS: tl.constexpr, HEADS_P2: tl.constexpr, E: tl.constexpr,
    E_P2: tl.constexpr, KEY_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_CHOSEN: tl.constexpr,
    BLOCK_N: tl.constexpr, SEQS: tl.constexpr,
):  # fmt: skip
    """Programs (row, part) write `scores` [rows, width]. The first part also writes the row's `ends` and clears its
    `counts` for the next kernels."""
    row, part = tl.program_id(0), tl.program_id(1)
    token = first_token + row
    seq, end = keys_seen(token, query_start_loc, seq_lens, num_seqs, SEQS)
    if part == 0:
        tl.store(ends + row, end)
        count = counts + row * (_LEVELS * _VALUES) + tl.arange(0, _LEVELS * _VALUES)
        tl.store(count, tl.zeros([_LEVELS * _VALUES], tl.int32))
    end = tl.where(end > NUM_CHOSEN, end, 0)
    n, h, e = tl.arange(0, BLOCK_N), tl.arange(0, HEADS_P2), tl.arange(0, E_P2)
    query_row = query + token.to(tl.int64) * query_stride
    q = tl.load(query_row + h[:, None] * E + e[None, :], mask=(h < HEADS)[:, None] & (e < E)[None, :], other=0.0)
    weight = tl.load(weights + token.to(tl.int64) * weight_stride + h, mask=h < HEADS, other=0.0).to(tl.float32)
    table = block_tables + seq.to(tl.int64) * table_stride
    out = scores + row.to(tl.int64) * width
    for tile_key in range(part * BLOCK_N, end, tl.num_programs(1) * BLOCK_N):
        block = block_of(table, tile_key, end, BLOCK_SIZE, BLOCK_N)
        at = block * BLOCK_SIZE + (tile_key + n) % BLOCK_SIZE
        k = load_rows(key + (KEY_D - E), at, tile_key + n < end, KEY_D, E, E_P2)
        products = exact_dot(k, tl.trans(q), tl.zeros([BLOCK_N, HEADS_P2], tl.float32))
        score = tl.sum(tl.maximum(products, 0.0) * weight[None, :], 1)
        tl.store(out + tile_key + n, _ordered(score), mask=tile_key + n < end)


@triton.jit
def _narrowed(counts, num_levels, NUM_CHOSEN: tl.constexpr):
    """Return (the highest bits of the last chosen score, known from `num_levels` levels of `counts`, then zeros; the
    number of chosen scores among those that share these bits)."""
    value = tl.arange(0, _VALUES)
    bits = num_levels * 0
    wanted = bits + NUM_CHOSEN
    for level in range(num_levels):
        count = tl.load(counts + level * _VALUES + value)
        from_here = tl.cumsum(count, 0, reverse=True)
        last = tl.sum((from_here >= wanted).to(tl.int32), 0) - 1
        wanted -= tl.sum(tl.where(value == last, from_here - count, 0), 0)
        bits |= last << (24 - 8 * level)
    return bits, wanted


@triton.jit(do_not_specialize=["level"])
def _count_kernel(scores, counts, ends, width, level, NUM_CHOSEN: tl.constexpr, TILE: tl.constexpr):
    """Programs (row, part) add to the row's `counts` of the next eight bits."""
    row, part = tl.program_id(0), tl.program_id(1)
    end = tl.load(ends + row)
    end = tl.where(end > NUM_CHOSEN, end, 0)
    if part * TILE < end:
        row_counts = counts + row * (_LEVELS * _VALUES)
        bits, _ = _narrowed(row_counts, level, NUM_CHOSEN)
        shift = 24 - 8 * level
        count = tl.zeros([_VALUES], tl.int32)
        for first in range(part * TILE, end, tl.num_programs(1) * TILE):
            i = first + tl.arange(0, TILE)
            score = tl.load(scores + row.to(tl.int64) * width + i, mask=i < end, other=0)
            shares_bits = (((score ^ bits) >> shift >> 8) == 0) | (level == 0)
            count += tl.histogram((score >> shift) & 255, _VALUES, mask=(i < end) & shares_bits)
        value = tl.arange(0, _VALUES)
        tl.atomic_add(row_counts + level * _VALUES + value, count, mask=count > 0, sem="relaxed")


@triton.jit(do_not_specialize=["first_token"])
def _pick_kernel(scores, counts, ends, out, first_token, width, NUM_CHOSEN: tl.constexpr, TILE: tl.constexpr):
    """A program for each row writes `out` [T, NUM_CHOSEN]."""
    row = tl.program_id(0)
    end = tl.load(ends + row)
    chosen = out + (first_token + row).to(tl.int64) * NUM_CHOSEN
    if end <= NUM_CHOSEN:
        for first in range(0, NUM_CHOSEN, TILE):
            i = first + tl.arange(0, TILE)
            tl.store(chosen + i, tl.where(i < end, i, -1), mask=i < NUM_CHOSEN)
    else:
        bits, wanted = _narrowed(counts + row * (_LEVELS * _VALUES), end * 0 + _LEVELS, NUM_CHOSEN)
        num_found, num_equal = end * 0, end * 0
        for first in range(0, end, TILE):
            i = first + tl.arange(0, TILE)
            score = tl.load(scores + row.to(tl.int64) * width + i, mask=i < end, other=0)
            is_equal = ((score == bits) & (i < end)).to(tl.int32)
            is_early = (is_equal > 0) & (num_equal + tl.cumsum(is_equal, 0) <= wanted)
            is_chosen = ((score ^ _SIGN) > (bits ^ _SIGN)) & (i < end) | is_early
            place = num_found + tl.cumsum(is_chosen.to(tl.int32), 0) - 1
            tl.store(chosen + place, i, mask=is_chosen)
            num_equal += tl.sum(is_equal, 0)
            num_found += tl.sum(is_chosen.to(tl.int32), 0)


def choose_keys(
    query: Tensor, weights: Tensor, cache: LayerKVCache, block_tables: Tensor, query_start_loc: Tensor,
    seq_lens: Tensor, num_chosen: int,
) -> Tensor:  # fmt: skip
    """`IndexOps.choose_keys`. Tokens of no sequence have no keys. Raises `ConfigError` for more than 128 heads."""
    num_tokens, num_heads, size = query.shape
    block_size, key_size, device = cache.key.shape[1], cache.key.shape[3], query.device
    assert cache.key.shape[2] == 1 and cache.key.is_contiguous() and cache.scales is None and size <= key_size
    if num_heads > _MAX_HEADS:
        raise ConfigError(f"an index of {num_heads} heads is not built for GPUs: {_MAX_HEADS} are the most.")
    assert query.dtype is weights.dtype is cache.key.dtype
    assert query.stride()[1:] == (size, 1) and weights.shape == (num_tokens, num_heads) and weights.stride(1) == 1
    assert block_tables.dtype is query_start_loc.dtype is seq_lens.dtype is torch.int32 and block_tables.stride(1) == 1
    out = torch.empty((num_tokens, num_chosen), dtype=torch.int32, device=device)
    width = block_tables.shape[1] * block_size
    num_rows = min(num_tokens, max(1, _SCRATCH_BYTES // (4 * width)))
    scores = torch.empty((num_rows, width), dtype=torch.int32, device=device)
    counts = torch.empty((num_rows, _LEVELS.value, _VALUES.value), dtype=torch.int32, device=device)
    ends = torch.empty(num_rows, dtype=torch.int32, device=device)
    num_programs = launch.num_multiprocessors(device) * _PROGRAMS_PER_MULTIPROCESSOR
    block_n = 16 if query.dtype is torch.float32 else 128
    for first in range(0, num_tokens, max(1, num_rows)):
        rows = min(num_rows, num_tokens - first)
        parts = triton.cdiv(num_programs, rows)
        _score_kernel[(rows, min(parts, triton.cdiv(width, block_n)))](
            query, weights, cache.key, block_tables, query_start_loc, seq_lens, scores, counts, ends, first,
            len(seq_lens), query.stride(0), weights.stride(0), block_tables.stride(0), width, HEADS=num_heads,
            HEADS_P2=max(16, triton.next_power_of_2(num_heads)), E=size, E_P2=max(16, triton.next_power_of_2(size)),
            KEY_D=key_size, BLOCK_SIZE=block_size, NUM_CHOSEN=num_chosen, BLOCK_N=block_n, SEQS=SEQS_AT_ONCE,
            num_warps=4, num_stages=3, enable_fp_fusion=False,
        )  # fmt: skip
        for level in range(_LEVELS.value):
            _count_kernel[(rows, min(parts, triton.cdiv(width, _TILE)))](
                scores, counts, ends, width, level, NUM_CHOSEN=num_chosen, TILE=_TILE, num_warps=4,
                enable_fp_fusion=False,
            )  # fmt: skip
        _pick_kernel[(rows,)](
            scores, counts, ends, out, first, width, NUM_CHOSEN=num_chosen, TILE=_TILE, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out
