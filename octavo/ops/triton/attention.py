"""Paged attention: one launch for any mix of prefill and decode rows, whatever their lengths.

A tile of work has the query heads of one key/value head for as many tokens as fill a tensor-core tile, so that grouped
heads share what is loaded. It passes over the keys as online softmax does (Milakov & Gimelshein 2018; Dao et al. 2022).

*Reduction.* Keys are cut into splits at fixed places (`_split_begin`). Each split is summed from scratch, tile by tile,
and the splits are merged in their order. Few rows with many keys (decode) let one program sum each split, and the last
of them to finish merges (FlashDecoding: Dao et al. 2023); all other tiles merge as they go, with the same arithmetic.
So nothing but its own position decides how a row is summed, and the kernel may choose freely who does it.

*Work.* Programs stay on their multiprocessor and fetch tiles of work until there are none. The plan of who computes
what is made on the device, from the lengths, once a step for all layers alike (`begin_step`): a captured graph follows
the lengths of the batch that it is replayed with, and wide block tables cost nothing while sequences are short.

*Limits.* A decode row reads 2 * D * bytes a key and key/value head and does 4 * D * group operations with them: 4 a
byte for a group of 4 in bfloat16, where an H100 can do 300. Even the 64 rows that its tensor cores are given at least
keep them busy for a quarter of the time that the bytes take, and the softmax of these rows takes about as long beside
it. Two programs a multiprocessor with 32 KiB or more in flight each are three times the latency of memory times its
bandwidth (20 KiB a multiprocessor), so large batches should read at 80 to 90% of the rate of a copy. Prefill does
2 * BLOCK_M operations a byte that it loads: 128 rows ask 3 TB/s of the L2 cache at 400 Tflop/s, 64 more than it has.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops import LayerKVCache
from octavo.ops.triton import launch, schedule

SPLIT_KEYS = 256  # of the first splits; a multiple of every BLOCK_N
_SPLITS_PER_LEVEL = tl.constexpr(16)  # then their size doubles,
_NUM_LEVELS = tl.constexpr(5)  # up to 4096: larger ones would be all that some program does for one long sequence
_LOG2E = tl.constexpr(1.4426950408889634)

_LENGTHS = ["query_start_loc", "seq_lens"]
_SEQS = 256  # that a plan or a search in it looks at in one turn
SPLIT_OVERHEAD = schedule.SPLIT_OVERHEAD
_WORKSPACE_FLOATS = 8 << 20  # sequences that find no room here are not split
_MIN_PARTIAL_FLOATS = 16  # what a split of one key/value head takes there at least
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_NEXT_ITEM, _FINISHED_PROGRAMS, _NUM_GLOBAL_COUNTERS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


# --- Splits: fixed places in the keys, and who sums what -------------------------------------------------------------


@triton.jit
def _split_of(key, SPLIT: tl.constexpr):
    """The split that a key belongs to."""
    level = key * 0
    for i in tl.static_range(1, _NUM_LEVELS):
        level += (key // (_SPLITS_PER_LEVEL * SPLIT) + 1 >= (1 << i)).to(tl.int32)
    level_begin = _SPLITS_PER_LEVEL * SPLIT * ((1 << level) - 1)
    return _SPLITS_PER_LEVEL * level + ((key - level_begin) // SPLIT >> level)


@triton.jit
def _split_begin(split, SPLIT: tl.constexpr):
    """The first key of a split."""
    level = tl.minimum(split // _SPLITS_PER_LEVEL, _NUM_LEVELS - 1)
    return (_SPLITS_PER_LEVEL * ((1 << level) - 1) + (split - _SPLITS_PER_LEVEL * level << level)) * SPLIT


@triton.jit
def _first_key(keys, tokens, WINDOW: tl.constexpr):
    """The first key that the last `tokens` positions of `keys` see."""
    first = keys * 0
    if WINDOW > 0:
        first = tl.maximum(keys - tokens - WINDOW + 1, 0)
    return first


@triton.jit
def _num_splits(keys, tokens, SPLIT: tl.constexpr, WINDOW: tl.constexpr):
    return _split_of(tl.maximum(keys - 1, 0), SPLIT) - _split_of(_first_key(keys, tokens, WINDOW), SPLIT) + 1


@triton.jit(do_not_specialize=["num_seqs", "num_partials", "num_programs"], do_not_specialize_on_alignment=_LENGTHS)
def _plan_kernel(
    query_start_loc, seq_lens, plan, num_seqs, num_partials, num_programs, KV_HEADS: tl.constexpr,
    TILE_TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr,
    OVERHEAD: tl.constexpr, SEQS: tl.constexpr,
):  # fmt: skip
    """One program. `plan` becomes how many items there are of split sequences and in all, then for each sequence the
    end of its items among those of split sequences, the end among the others, and its first place among the partial
    sums, or -1 if it is not split.

    An item is a tile of query tokens, or one split of a sequence whose tokens are one tile, times a key/value head.
    """
    total, num_items = 0, 0
    for first in range(0, num_seqs, SEQS):
        _, num_tiles, cost, _ = _work(
            first, query_start_loc, seq_lens, num_seqs, TILE_TOKENS, BLOCK_N, SPLIT, WINDOW, SEQS
        )
        total += tl.sum(num_tiles * cost, 0) * KV_HEADS
        num_items += tl.sum(num_tiles, 0) * KV_HEADS
    # `schedule.wants_split` says why.
    idle = (num_programs - num_items % num_programs) % num_programs
    splits_end, tiles_end, partials_end = 0, 0, 0
    for first in range(0, num_seqs, SEQS):
        tokens, num_tiles, cost, num_splits = _work(
            first, query_start_loc, seq_lens, num_seqs, TILE_TOKENS, BLOCK_N, SPLIT, WINDOW, SEQS
        )
        gain = cost - OVERHEAD // BLOCK_N
        wants_split = (2 * idle * gain > total) | (gain * num_programs > 2 * total)
        wants_split = wants_split & (num_tiles == 1) & (num_splits > 1)
        partials = tl.where(wants_split, num_splits * tokens, 0)
        ends = partials_end + tl.cumsum(partials, 0)
        is_split = wants_split & (ends <= num_partials)
        splits = tl.where(is_split, num_splits * KV_HEADS, 0)
        tiles = tl.where(is_split, 0, num_tiles * KV_HEADS)
        seqs = first + tl.arange(0, SEQS)
        at = plan + 2 + seqs
        tl.store(at, splits_end + tl.cumsum(splits, 0), mask=seqs < num_seqs)
        tl.store(at + num_seqs, tiles_end + tl.cumsum(tiles, 0), mask=seqs < num_seqs)
        tl.store(at + 2 * num_seqs, tl.where(is_split, ends - partials, -1), mask=seqs < num_seqs)
        splits_end += tl.sum(splits, 0)
        tiles_end += tl.sum(tiles, 0)
        partials_end += tl.sum(partials, 0)
    tl.store(plan, splits_end)
    tl.store(plan + 1, splits_end + tiles_end)


@triton.jit
def _work(
    first, query_start_loc, seq_lens, num_seqs, TILE_TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    WINDOW: tl.constexpr, SEQS: tl.constexpr,
):  # fmt: skip
    """Of SEQS sequences: tokens, tiles of them, tiles of keys that each of these passes over at most, splits."""
    seqs = first + tl.arange(0, SEQS)
    start = tl.load(query_start_loc + seqs, mask=seqs < num_seqs, other=0)
    tokens = tl.load(query_start_loc + seqs + 1, mask=seqs < num_seqs, other=0) - start
    keys = tl.load(seq_lens + seqs, mask=seqs < num_seqs, other=0)
    cost = (keys - _first_key(keys, tokens, WINDOW)) // BLOCK_N + 1
    return tokens, (tokens + TILE_TOKENS - 1) // TILE_TOKENS, cost, _num_splits(keys, tokens, SPLIT, WINDOW)


@triton.jit
def _sequence_of(item, plan, num_seqs, SEQS: tl.constexpr):
    """The sequence that an item is of. Items of split sequences come first, so that what is left for the end is
    short."""
    num_split_items = tl.load(plan)
    is_split = item < num_split_items
    ends = plan + tl.where(is_split, 2, 2 + num_seqs)
    item -= tl.where(is_split, 0, num_split_items)
    seq = 0
    for first in range(0, num_seqs, SEQS):
        seqs = first + tl.arange(0, SEQS)
        seq += tl.sum((tl.load(ends + seqs, mask=seqs < num_seqs, other=0x7FFFFFFF) <= item).to(tl.int32), 0)
    return seq


@triton.jit
def _locate(item, seq, plan, query_start_loc, num_seqs, KV_HEADS: tl.constexpr):
    """-> (the sequence's place among partial sums, key/value head, split or tile, first token, number of tokens).

    The last of a sequence come first: late splits are longer, and late tiles have more keys."""
    partial = tl.load(plan + 2 + 2 * num_seqs + seq, volatile=True)
    num_split_items = tl.load(plan, volatile=True)
    is_split = item < num_split_items
    end = tl.load(plan + tl.where(is_split, 2, 2 + num_seqs) + seq, volatile=True)
    from_end = end - 1 - (item - tl.where(is_split, 0, num_split_items))
    token = tl.load(query_start_loc + seq, volatile=True)
    tokens = tl.load(query_start_loc + seq + 1, volatile=True) - token
    return partial, from_end % KV_HEADS, from_end // KV_HEADS, token, tokens


@triton.jit
def _rows(partial, part, seq_tokens, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """-> (first token of the item's tile, rows of the sequence [BLOCK_M], which are of this tile [BLOCK_M]).

    A sequence has GROUP rows for each token."""
    TILE_TOKENS: tl.constexpr = BLOCK_M // GROUP
    tile_token = tl.where(partial >= 0, 0, part * TILE_TOKENS)
    row = tile_token * GROUP + tl.arange(0, BLOCK_M)
    return tile_token, row, row < tl.minimum(tile_token + TILE_TOKENS, seq_tokens) * GROUP


# --- Arithmetic ------------------------------------------------------------------------------------------------------
# Fused multiply-adds are written out and the compiler forms no others (see `launch`), so that two places that sum the
# same give the same bits.


@triton.jit
def _finite(x):
    """The maximum that exponents are taken relative to, also where nothing has been seen yet."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def _merge(acc, row_max, row_sum, split_acc, split_max, split_sum):
    """Add a split's sums to those of the splits before it. A split without visible keys changes nothing."""
    new_max = tl.maximum(row_max, split_max)
    before = tl.exp2(row_max - _finite(new_max))
    added = tl.exp2(split_max - _finite(new_max))
    acc = tl.fma(split_acc, added[:, None], acc * before[:, None])
    return acc, new_max, tl.fma(split_sum, added, row_sum * before)


@triton.jit
def _hide(scores, key, position, WINDOW: tl.constexpr):
    visible = key[None, :] <= position[:, None]
    if WINDOW > 0:
        visible = visible & (key[None, :] > position[:, None] - WINDOW)
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def _normalized(acc, row_sum):
    """Rows that have seen no key are zeros."""
    return acc * tl.where(row_sum > 0, 1.0 / row_sum, 0.0)[:, None]


@triton.jit
def _cap(x, CAP: tl.constexpr):
    """CAP * tanh(x / CAP)"""
    e = tl.exp2(x * (2 * _LOG2E / CAP))
    return CAP - (2 * CAP) / (e + 1)


@triton.jit
def _sink(sinks, head, row_max, mask):
    """The weight of one more key, relative to the maximum of a row."""
    sink = tl.load(sinks + head, mask=mask, other=float("-inf"))
    return tl.exp2(sink * _LOG2E - _finite(row_max))


@triton.jit
def _dot(a, b, acc):
    if _INTERPRETED:  # it takes bfloat16 for integers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _as_query(x, DTYPE: tl.constexpr):
    """Loaded keys or values in the dtype of the query. Bytes are float8_e4m3fn for GPUs that cannot convert it: its
    exponent and mantissa lie in float16 as in a number that is 2^-8 times as large."""
    if x.dtype == tl.uint8:
        bits = x.to(tl.uint16)
        x = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
    return x.to(DTYPE)


@triton.jit
def _block_of(table, first_key, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The cache's block of a tile of keys or, where blocks are smaller, of each key."""
    if BLOCK_SIZE < BLOCK_N:
        first_key += tl.arange(0, BLOCK_N)
    return tl.load(table + first_key // BLOCK_SIZE, mask=first_key < end, other=0)


@triton.jit
def _load(
    cached, block, first_key, end, kv_head, KV_HEADS: tl.constexpr, D: tl.constexpr, D_P2: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A tile of keys or values. Those from `end` on are zeros: a weight of 0 would not hide a value that is NaN."""
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, D_P2)
    row = (block * BLOCK_SIZE + (first_key + n) % BLOCK_SIZE) * KV_HEADS + kv_head  # numbers below 2^31
    mask = (first_key + n < end)[:, None]
    if D < D_P2:
        mask = mask & (d < D)[None, :]
    return tl.load(cached + (row.to(tl.int64) * D)[:, None] + d[None, :], mask=mask, other=0.0)


@triton.jit
def _load_scales(
    scales, block, first_key, end, kv_head, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """-> the scales of a tile's keys and of its values [BLOCK_N], two bfloat16 in an int32, where they have some.
    They stay together until they are used, for the sake of registers."""
    n = tl.arange(0, BLOCK_N)
    if SCALED:
        row = (block * BLOCK_SIZE + (first_key + n) % BLOCK_SIZE) * KV_HEADS + kv_head
        n = tl.load(scales + row, mask=first_key + n < end, other=0)
    return n


@triton.jit
def _scaled(x, scales, LEFT: tl.constexpr, SCALED: tl.constexpr):
    """Scores or weights [rows, keys] times what `_load_scales` brought for them, where it did: those of keys are the
    lower half, LEFT by 16, those of values the upper one."""
    if SCALED:
        x = x * ((scales << LEFT) & -0x10000).to(tl.float32, bitcast=True)[None, :]
    return x


@triton.jit
def _weigh(
    scores, split_max, split_sum, tile_key, first_position, position, slope, score_scale, scale,
    TILE_TOKENS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SLOPES: tl.constexpr,
    MASKS_ALL: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """-> (weights of a tile of keys, what earlier sums are multiplied with, the split's new maximum and sum)."""
    keys = tile_key + tl.arange(0, BLOCK_N)
    if SOFTCAP > 0:
        scores = _cap(scores * score_scale, SOFTCAP)
    if SLOPES:
        if SOFTCAP == 0:
            scores = scores * score_scale
        distance = (keys[None, :] - position[:, None]).to(tl.float32)
        scores = tl.fma(tl.broadcast_to(slope[:, None], scores.shape), distance, scores)
    if not MASKS_ALL:
        hides = tile_key + BLOCK_N > first_position + 1
        if WINDOW > 0:
            hides = hides | (tile_key <= first_position + TILE_TOKENS - 1 - WINDOW)
        if hides:
            scores = _hide(scores, keys, position, WINDOW)
    else:
        scores = _hide(scores, keys, position, WINDOW)
    new_max = tl.maximum(split_max, tl.max(scores, 1) * scale)
    weights = tl.exp2(tl.fma(scores, scale, -_finite(new_max)[:, None]))
    before = tl.exp2(split_max - _finite(new_max))
    return weights, before, new_max, tl.fma(split_sum, before, tl.sum(weights, 1))


# --- The kernel ------------------------------------------------------------------------------------------------------


@triton.jit(
    do_not_specialize=["num_tokens", "num_seqs", "num_partials", "table_stride"],
    do_not_specialize_on_alignment=["block_tables", *_LENGTHS],
)
def _attention_kernel(
    query, key, value, scales, block_tables, query_start_loc, seq_lens, out, plan, partials, counters, slopes, sinks,
    num_tokens, num_seqs, num_partials, query_stride, table_stride, score_scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_P2: tl.constexpr, D: tl.constexpr, D_P2: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SLOPES: tl.constexpr,
    SINKS: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKS_ALL: tl.constexpr, NESTED: tl.constexpr, SEQS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """`partials` holds sums [Q, D] for each (split of a sequence, token), then maxima and sums [Q, 2] for each of them.
    `counters` are 0 before and after."""
    HEADS: tl.constexpr = KV_HEADS * GROUP
    TILE_TOKENS: tl.constexpr = BLOCK_M // GROUP
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    num_items = tl.load(plan + 1)
    stats = partials + num_partials * (HEADS * D)

    d = tl.arange(0, D_P2)

    # Tokens that belong to no sequence pad the batch of a graph. They are zeros, as they must not become NaN.
    padding = tl.load(query_start_loc + num_seqs).to(tl.int64)
    for pad in range(padding * HEADS + program, num_tokens.to(tl.int64) * HEADS, num_programs):
        tl.store(out + (padding * 0 + pad) * D + d, d * 0.0, mask=d < D)

    item = program
    while item < num_items:
        seq = _sequence_of(item, plan, num_seqs, SEQS)
        partial, kv_head, part, seq_token, seq_tokens = _locate(item, seq, plan, query_start_loc, num_seqs, KV_HEADS)

        num_keys = tl.load(seq_lens + seq)
        tile_token, row, is_row = _rows(partial, part, seq_tokens, GROUP, BLOCK_M)
        first_position = num_keys - seq_tokens + tile_token
        position = num_keys - seq_tokens + row // GROUP
        begin = first_position * 0
        if WINDOW > 0:
            begin = tl.maximum(first_position - WINDOW + 1, 0)
        end = tl.minimum(first_position + TILE_TOKENS, num_keys)
        split = _split_of(begin, SPLIT)
        if partial >= 0:
            split += part
            begin = tl.maximum(begin, _split_begin(split, SPLIT))
            end = tl.minimum(end, _split_begin(split + 1, SPLIT))
        begin = begin // BLOCK_N * BLOCK_N

        token = (seq_token + row // GROUP).to(tl.int64)
        head = kv_head * GROUP + row % GROUP
        q = tl.load(
            query + token[:, None] * query_stride + head[:, None] * D + d[None, :],
            mask=is_row[:, None] & (d < D)[None, :], other=0.0,
        )  # fmt: skip

        acc = tl.zeros([BLOCK_M, D_P2], tl.float32)
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        table = block_tables + seq.to(tl.int64) * table_stride
        block = _block_of(table, begin, end, BLOCK_SIZE, BLOCK_N)  # a tile ahead
        split_acc, split_max, split_sum = acc, row_max, row_sum
        scale = score_scale * _LOG2E
        if (SOFTCAP > 0) or SLOPES:
            scale = scale * 0 + _LOG2E
        slope = row_max  # which nobody reads without ALiBi
        if SLOPES:
            slope = tl.load(slopes + head, mask=is_row, other=0.0)
        if NESTED:
            while begin < end:
                split += 1
                split_end = tl.minimum(_split_begin(split, SPLIT), end)
                split_acc = tl.zeros([BLOCK_M, D_P2], tl.float32)
                split_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
                split_sum = tl.zeros([BLOCK_M], tl.float32)
                for tile_key in range(begin, split_end, BLOCK_N):
                    k = _load(key, block, tile_key, end, kv_head, KV_HEADS, D, D_P2, BLOCK_SIZE, BLOCK_N)
                    v = _load(value, block, tile_key, end, kv_head, KV_HEADS, D, D_P2, BLOCK_SIZE, BLOCK_N)
                    pair = _load_scales(scales, block, tile_key, end, kv_head, KV_HEADS, BLOCK_SIZE, BLOCK_N, SCALED)
                    block = _block_of(table, tile_key + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
                    scores = _dot(q, tl.trans(_as_query(k, q.dtype)), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
                    scores = _scaled(scores, pair, 16, SCALED)
                    weights, before, split_max, split_sum = _weigh(
                        scores, split_max, split_sum, tile_key, first_position, position, slope, score_scale, scale,
                        TILE_TOKENS, WINDOW, SOFTCAP, SLOPES, MASKS_ALL, BLOCK_N,
                    )  # fmt: skip
                    # Nothing waits for this product before the next tile's scores are under way.
                    weights = _scaled(weights, pair, 0, SCALED)
                    split_acc = _dot(weights.to(q.dtype), _as_query(v, q.dtype), split_acc * before[:, None])
                acc, row_max, row_sum = _merge(acc, row_max, row_sum, split_acc, split_max, split_sum)
                begin = split_end
        else:
            split_end = _split_begin(split + 1, SPLIT)
            for tile_key in range(begin, end, BLOCK_N):
                k = _load(key, block, tile_key, end, kv_head, KV_HEADS, D, D_P2, BLOCK_SIZE, BLOCK_N)
                v = _load(value, block, tile_key, end, kv_head, KV_HEADS, D, D_P2, BLOCK_SIZE, BLOCK_N)
                pair = _load_scales(scales, block, tile_key, end, kv_head, KV_HEADS, BLOCK_SIZE, BLOCK_N, SCALED)
                block = _block_of(table, tile_key + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
                scores = _dot(q, tl.trans(_as_query(k, q.dtype)), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
                scores = _scaled(scores, pair, 16, SCALED)
                if tile_key >= split_end:
                    acc, row_max, row_sum = _merge(acc, row_max, row_sum, split_acc, split_max, split_sum)
                    # The next weights are 2^(-inf) times the other sums: these start again from zero.
                    split_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
                    split += 1
                    split_end = _split_begin(split + 1, SPLIT)
                weights, before, split_max, split_sum = _weigh(
                    scores, split_max, split_sum, tile_key, first_position, position, slope, score_scale, scale,
                    TILE_TOKENS, WINDOW, SOFTCAP, SLOPES, MASKS_ALL, BLOCK_N,
                )  # fmt: skip
                weights = _scaled(weights, pair, 0, SCALED)
                split_acc = _dot(weights.to(q.dtype), _as_query(v, q.dtype), split_acc * before[:, None])
            acc, row_max, row_sum = _merge(acc, row_max, row_sum, split_acc, split_max, split_sum)

        # Found once more, so that none of it takes registers meanwhile.
        partial, kv_head, part, seq_token, seq_tokens = _locate(item, seq, plan, query_start_loc, num_seqs, KV_HEADS)
        tile_token, row, is_row = _rows(partial, part, seq_tokens, GROUP, BLOCK_M)
        head = kv_head * GROUP + row % GROUP
        if partial >= 0:
            place = (partial + part * seq_tokens + row // GROUP) * HEADS + head
            tl.store(partials + (place[:, None] * D + d[None, :]), acc, mask=is_row[:, None] & (d < D)[None, :])
            tl.store(stats + place * 2, row_max, mask=is_row)
            tl.store(stats + place * 2 + 1, row_sum, mask=is_row)
            tl.debug_barrier()  # all threads have written before one of them counts
            counter = counters + _NUM_GLOBAL_COUNTERS + partial * KV_HEADS + kv_head
            num_splits = _num_splits(tl.load(seq_lens + seq), seq_tokens, SPLIT, WINDOW)
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_splits - 1:
                tl.store(counter, 0)
                for i in range(seq_tokens):
                    _merge_partials(
                        partials, stats, (partial + i) * HEADS + kv_head * GROUP, seq_tokens * HEADS, num_splits,
                        out + ((seq_token.to(tl.int64) + i) * HEADS + kv_head * GROUP) * D,
                        sinks + kv_head * GROUP, GROUP, GROUP_P2, D, D_P2, SINKS,
                    )  # fmt: skip
        else:
            token = (seq_token + row // GROUP).to(tl.int64)
            if SINKS:
                row_sum += _sink(sinks, head, row_max, is_row)
            tl.store(
                out + (token * HEADS + head)[:, None] * D + d[None, :], _normalized(acc, row_sum),
                mask=is_row[:, None] & (d < D)[None, :],
            )  # fmt: skip

        # The first items are handed out by number. Who comes last cleans up for the next launch.
        item = num_items
        if num_items > num_programs:
            item = num_programs + tl.atomic_add(counters + _NEXT_ITEM, 1, sem="relaxed", scope="gpu")
    if num_items > num_programs:  # noqa: SIM102
        if tl.atomic_add(counters + _FINISHED_PROGRAMS, 1, sem="acq_rel", scope="gpu") == num_programs - 1:
            tl.store(counters + _NEXT_ITEM, 0)
            tl.store(counters + _FINISHED_PROGRAMS, 0)


@triton.jit
def _merge_partials(
    partials, stats, row, split_stride, num_splits, out, sinks, GROUP: tl.constexpr,
    GROUP_P2: tl.constexpr, D: tl.constexpr, D_P2: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one token's heads, which are rows `row` .. of `partials`, and write their output."""
    g = tl.arange(0, GROUP_P2)
    d = tl.arange(0, D_P2)
    acc = tl.zeros([GROUP_P2, D_P2], tl.float32)
    row_max = tl.full([GROUP_P2], float("-inf"), tl.float32)
    row_sum = tl.zeros([GROUP_P2], tl.float32)
    for first in range(0, num_splits, 4):
        for i in tl.static_range(4):  # loads of four splits at a time overlap
            rows = row + (first + i) * split_stride + g
            exists = (g < GROUP) & (g * 0 + first + i < num_splits)
            # What other programs wrote is in the L2 cache (.cg), not in this multiprocessor's.
            split_acc = tl.load(
                partials + (rows[:, None] * D + d[None, :]), mask=exists[:, None] & (d < D)[None, :], other=0.0,
                cache_modifier=".cg",
            )  # fmt: skip
            split_max = tl.load(stats + rows * 2, mask=exists, other=float("-inf"), cache_modifier=".cg")
            split_sum = tl.load(stats + rows * 2 + 1, mask=exists, other=0.0, cache_modifier=".cg")
            acc, row_max, row_sum = _merge(acc, row_max, row_sum, split_acc, split_max, split_sum)
    if SINKS:
        row_sum += _sink(sinks, g, row_max, g < GROUP)
    is_element = (g < GROUP)[:, None] & (d < D)[None, :]
    tl.store(out + g[:, None] * D + d[None, :], _normalized(acc, row_sum), mask=is_element)


# --- The launch ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a launch is cut: rows and keys of a tile, and what a program takes of its multiprocessor.

    With `masks_all` no tile of scores is left unmasked because all of it is visible: before Hopper that branch would
    hide from the compiler that one product feeds the other, and warps would lie along keys too.

    `nested` loops, over splits and over the tiles of each, let the product of weights and values go on while the next
    tile's scores are computed: a loop that merges splits reads its sums. But the pipeline of loads drains at the end of
    each split, which costs decodes more: they wait for memory.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_multiprocessor: int
    masks_all: bool = False
    nested: bool = False


def _tiles(query: Tensor, cache_dtype: torch.dtype, group: int, is_prefill: bool) -> Tiles:
    """Bits depend on block_n, and on where the warps lie: only along rows, or there is one layout for all batches.

    64 rows and four warps are the least that Hopper's instructions take. Registers decide the rest: a thread holds
    block_m * head_size / (32 * num_warps) sums, as many merged ones, and half as many scores.
    """
    padded = triton.next_power_of_2(query.shape[2])
    has_wgmma = launch.capability(query.device) >= (9, 0)
    if query.dtype is torch.float32:  # for comparisons only: it uses no tensor cores
        return Tiles(max(16, triton.next_power_of_2(group)), 16, 4, 1, 2)
    if padded > 128:
        return Tiles(128 if group > 64 else 64, 32, 8, 2, 1)
    block_n = (8192 if has_wgmma else 4096) // max(padded, 64)
    num_stages = 2 if block_n == 128 else 3
    unpacks_float8 = cache_dtype.itemsize == 1 and not has_wgmma
    if (is_prefill and has_wgmma) or unpacks_float8 or group > 64:
        return Tiles(128, block_n, 8, num_stages, 1, masks_all=not has_wgmma, nested=is_prefill and has_wgmma)
    return Tiles(64, block_n, 4, num_stages, 2, masks_all=not has_wgmma)


@cache
def _workspace(device: torch.device, stream: int) -> tuple[Tensor, Tensor]:
    """Partial sums, and counters that every launch leaves at zero. Those of one stream share them, as its launches
    never overlap."""
    num_counters = _NUM_GLOBAL_COUNTERS.value + _WORKSPACE_FLOATS // _MIN_PARTIAL_FLOATS
    partials = torch.empty(_WORKSPACE_FLOATS, dtype=torch.float32, device=device)
    return partials, torch.zeros(num_counters, dtype=torch.int32, device=device)


@dataclass(frozen=True, slots=True)
class _Step:
    """The lengths of a step, and the plans that its layers have made of them so far."""

    query_start_loc: Tensor
    seq_lens: Tensor
    plans: dict[tuple[int, ...], Tensor]


_steps: dict[int, _Step] = {}  # by stream: the one that is under way


def begin_step(query_start_loc: Tensor, seq_lens: Tensor) -> None:
    """`DeviceOps.begin_step`."""
    _steps[launch.stream(seq_lens.device)] = _Step(query_start_loc, seq_lens, {})


def _plan(query_start_loc: Tensor, seq_lens: Tensor, *key: int) -> Tensor:
    """Who computes what, for layers alike in `key`: number of partial sums, of programs, of key/value heads, tokens and
    keys of a tile, window. Made once a step, where the lengths are those that it has begun with."""
    step = _steps.get(launch.stream(seq_lens.device))
    if step is None or step.query_start_loc is not query_start_loc or step.seq_lens is not seq_lens:
        step = _Step(query_start_loc, seq_lens, {})
    if key not in step.plans:
        num_seqs = len(seq_lens)
        num_partials, num_programs, num_kv_heads, tile_tokens, block_n, window = key
        plan = step.plans[key] = torch.empty(2 + 3 * num_seqs, dtype=torch.int32, device=seq_lens.device)
        _plan_kernel[(1,)](
            query_start_loc, seq_lens, plan, num_seqs, num_partials, num_programs, KV_HEADS=num_kv_heads,
            TILE_TOKENS=tile_tokens, BLOCK_N=block_n, SPLIT=SPLIT_KEYS, WINDOW=window,
            OVERHEAD=SPLIT_OVERHEAD, SEQS=_SEQS, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return step.plans[key]


def paged_attention(
    query: Tensor, cache: LayerKVCache, block_tables: Tensor, query_start_loc: Tensor, seq_lens: Tensor, scale: float,
    sliding_window: int = 0, softcap: float = 0.0, slopes: Tensor | None = None, sinks: Tensor | None = None,
    bidirectional: bool = False, distance_biases: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`Ops.paged_attention` for caches of `octavo.ops.triton.cache`, in any dtype that the query is in, int8 or float8.

    Rows of sequences without keys and rows after the last sequence's are zeros. Entries of a block table that
    `seq_lens` does not reach may be anything.
    """
    assert not bidirectional and distance_biases is None, "models that attend both ways are refused on GPUs"
    num_tokens, num_heads, head_size = query.shape
    num_blocks, block_size, num_kv_heads, _ = cache.key.shape
    num_seqs, group = len(seq_lens), num_heads // num_kv_heads
    assert cache.key.shape == cache.value.shape == (num_blocks, block_size, num_kv_heads, head_size)
    assert cache.key.is_contiguous() and cache.value.is_contiguous()
    assert cache.key.dtype is cache.value.dtype
    assert cache.key.dtype is query.dtype if cache.scales is None else cache.key.dtype.itemsize == 1
    assert query.stride()[1:] == (head_size, 1), "the heads of a token must be contiguous"
    assert num_heads == group * num_kv_heads and group <= 128 and 16 <= head_size <= 256
    assert block_size & (block_size - 1) == 0
    assert block_tables.dtype is query_start_loc.dtype is seq_lens.dtype is torch.int32
    assert block_tables.stride(1) == 1 and query_start_loc.is_contiguous() and seq_lens.is_contiguous()
    for by_head in (slopes, sinks):
        assert by_head is None or (by_head.shape == (num_heads,) and by_head.dtype is torch.float32)
    assert len(query_start_loc) == num_seqs + 1 and len(block_tables) >= num_seqs
    out = torch.empty((num_tokens, num_heads * head_size), dtype=query.dtype, device=query.device)
    if num_tokens == 0:
        return out

    tiles = _tiles(query, cache.key.dtype, group, is_prefill=num_tokens > 2 * num_seqs)
    padded_size = triton.next_power_of_2(head_size)
    num_programs = launch.num_multiprocessors(query.device) * tiles.programs_per_multiprocessor
    partials, counters = _workspace(query.device, launch.stream(query.device))
    num_partials = len(partials) // (num_heads * (head_size + 2))
    plan = _plan(
        query_start_loc, seq_lens, num_partials, num_programs, num_kv_heads, tiles.block_m // group, tiles.block_n,
        sliding_window,
    )  # fmt: skip
    key, value = cache.key, cache.value
    if key.dtype is torch.float8_e4m3fn and launch.capability(query.device) < (8, 9):
        key, value = key.view(torch.uint8), value.view(torch.uint8)
    _attention_kernel[(num_programs,)](
        query, key, value, key if cache.scales is None else cache.scales.view(torch.int32), block_tables,
        query_start_loc, seq_lens, out, plan, partials, counters,
        partials if slopes is None else slopes, partials if sinks is None else sinks,
        num_tokens, num_seqs, num_partials, query.stride(0), block_tables.stride(0), float(scale),
        KV_HEADS=num_kv_heads, GROUP=group, GROUP_P2=triton.next_power_of_2(group), D=head_size, D_P2=padded_size,
        BLOCK_SIZE=block_size, WINDOW=sliding_window, SOFTCAP=float(softcap),
        SLOPES=slopes is not None, SINKS=sinks is not None, SPLIT=SPLIT_KEYS,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, MASKS_ALL=tiles.masks_all, NESTED=tiles.nested,
        SEQS=_SEQS, SCALED=cache.scales is not None,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, enable_fp_fusion=False,
    )  # fmt: skip
    return out
