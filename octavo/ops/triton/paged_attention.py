"""Paged attention: one launch for any mix of prefill and decode rows, whatever their lengths.

A tile of work has the query heads of one key/value head, for as many tokens as fill a tensor-core tile, so that grouped
heads share loaded keys and values. It reads the keys once, with online softmax (Milakov & Gimelshein 2018; Dao et al.
2022).

*Reduction.* Keys are cut into splits at fixed places (`split_begin`). Each split is summed from scratch, tile by tile,
and the splits are merged in their order. For few rows with many keys (decodes), one program sums each split, and the
last program to finish merges them (FlashDecoding: Dao et al. 2023). All other tiles merge as they go, with the same
arithmetic. So the order of a row's sum depends on its position alone, and any program may compute any part.

*Work.* Programs stay on their multiprocessor and fetch tiles of work until none are left. `attention_plan` makes the
list of tiles.

*Limits.* For each key and key/value head, a decode row reads 2 * D elements and does 4 * D * group operations: 4
operations a byte for a group of 4 in bfloat16, where an H100 can do 300. Its tensor cores take at least 64 rows, which
keep them busy for a quarter of the time that reading takes; the softmax of these rows takes about as long, at the same
time. Two programs a multiprocessor with at least 32 KiB in flight each are three times what memory latency times
bandwidth requires (20 KiB a multiprocessor), so large batches should read at 80 to 90% of the rate of a copy. Prefill
does 2 * BLOCK_M operations for each byte that it loads: at 400 Tflop/s, 128 rows need 3 TB/s from the L2 cache; 64 rows
would need more than it has.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops import BIAS_PADDING, LayerKVCache
from octavo.ops.triton import attention_plan, launch
from octavo.ops.triton.attention_math import (
    LOG2E,
    as_query,
    block_of,
    exact_dot,
    load_scales,
    load_tile,
    merged,
    normalized,
    scaled,
    sink_weight,
    weigh,
)
from octavo.ops.triton.attention_plan import (
    LENGTHS,
    count_splits,
    locate,
    plan_of,
    rows_of,
    sequence_of,
    split_begin,
    split_of,
)
from octavo.ops.triton.tiles import LARGE_SHARED

_WORKSPACE_FLOATS = 8 << 20  # sequences without room here are not split
_MIN_PARTIAL_FLOATS = 16  # the least room that a split of one key/value head takes there
_NEXT_ITEM, _FINISHED_PROGRAMS, _NUM_GLOBAL_COUNTERS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit(
    do_not_specialize=["num_tokens", "num_seqs", "num_partials", "table_stride", "bias_stride"],
    do_not_specialize_on_alignment=["block_tables", "key_ends", *LENGTHS],
)
def _attention_kernel(
    query, key, value, scales, block_tables, query_start_loc, seq_lens, out, plan, partials, counters, by_distance,
    sinks, key_ends, num_tokens, num_seqs, num_partials, query_stride, table_stride, bias_stride, score_scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_P2: tl.constexpr, D: tl.constexpr, D_P2: tl.constexpr,
    V: tl.constexpr, V_P2: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    BY_DISTANCE: tl.constexpr, SINKS: tl.constexpr, AHEAD: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKS_ALL: tl.constexpr, NESTED: tl.constexpr, SEQS: tl.constexpr, SCALED: tl.constexpr,
    PADDING: tl.constexpr,
):  # fmt: skip
    """`partials` holds sums [Q, V] for each (split of a sequence, token), then maxima and sums of weights [Q, 2] for
    each. `counters` are 0 before and after."""
    HEADS: tl.constexpr = KV_HEADS * GROUP
    TILE_TOKENS: tl.constexpr = BLOCK_M // GROUP
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    num_items = tl.load(plan + 1)
    stats = partials + num_partials * (HEADS * V)

    d, v_d = tl.arange(0, D_P2), tl.arange(0, V_P2)

    # Tokens of no sequence pad the batch of a graph. Their results are zeros, because they must not be NaN.
    padding = tl.load(query_start_loc + num_seqs).to(tl.int64)
    for pad in range(padding * HEADS + program, num_tokens.to(tl.int64) * HEADS, num_programs):
        tl.store(out + (padding * 0 + pad) * V + v_d, v_d * 0.0, mask=v_d < V)

    item = program
    while item < num_items:
        seq = sequence_of(item, plan, num_seqs, SEQS)
        partial, kv_head, part, seq_token, seq_tokens = locate(item, seq, plan, query_start_loc, num_seqs, KV_HEADS)

        num_keys = tl.load(seq_lens + seq)
        tile_token, row, is_row = rows_of(partial, part, seq_tokens, GROUP, BLOCK_M)
        first_position = num_keys - seq_tokens + tile_token
        position = num_keys - seq_tokens + row // GROUP
        begin = first_position * 0
        if WINDOW > 0:
            begin = tl.maximum(first_position - WINDOW + 1, 0)
        end = tl.minimum(first_position + TILE_TOKENS, num_keys)
        last = position
        seen_by_all = first_position  # a lower bound of the last key that all rows see
        if AHEAD == "all":
            last = position * 0 + num_keys - 1
            end = num_keys
            seen_by_all = num_keys - 1
            if WINDOW > 0:
                last = tl.minimum(last, position + WINDOW - 1)
                end = tl.minimum(end, first_position + TILE_TOKENS + WINDOW - 1)
                seen_by_all = tl.minimum(seen_by_all, first_position + WINDOW - 1)
        elif AHEAD == "to key_ends":
            key_end = tl.load(key_ends + seq_token + row // GROUP, mask=is_row, other=0)
            last = tl.maximum(position, key_end - 1)
            end = tl.minimum(tl.maximum(end, tl.max(key_end, 0)), num_keys)
        split = split_of(begin, SPLIT)
        if partial >= 0:
            split += part
            begin = tl.maximum(begin, split_begin(split, SPLIT))
            end = tl.minimum(end, split_begin(split + 1, SPLIT))
        begin = begin // BLOCK_N * BLOCK_N

        token = (seq_token + row // GROUP).to(tl.int64)
        head = kv_head * GROUP + row % GROUP
        q = tl.load(
            query + token[:, None] * query_stride + head[:, None] * D + d[None, :],
            mask=is_row[:, None] & (d < D)[None, :], other=0.0,
        )  # fmt: skip

        acc = tl.zeros([BLOCK_M, V_P2], tl.float32)
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        table = block_tables + seq.to(tl.int64) * table_stride
        block = block_of(table, begin, end, BLOCK_SIZE, BLOCK_N)  # one tile ahead
        split_acc, split_max, split_sum = acc, row_max, row_sum
        scale = score_scale * LOG2E
        if (SOFTCAP > 0) or (BY_DISTANCE != ""):
            scale = scale * 0 + LOG2E
        slope = row_max  # a placeholder: read only with BY_DISTANCE
        if BY_DISTANCE == "slopes":
            slope = tl.load(by_distance + head, mask=is_row, other=0.0)
        elif BY_DISTANCE == "biases":  # place of the bias for key 0
            slope = head * bias_stride + (bias_stride - PADDING) // 2 - position
        if NESTED:
            while begin < end:
                split += 1
                split_end = tl.minimum(split_begin(split, SPLIT), end)
                split_acc = tl.zeros([BLOCK_M, V_P2], tl.float32)
                split_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
                split_sum = tl.zeros([BLOCK_M], tl.float32)
                for tile_key in range(begin, split_end, BLOCK_N):
                    k = load_tile(key, block, tile_key, end, kv_head, KV_HEADS, D, D_P2, BLOCK_SIZE, BLOCK_N)
                    v = load_tile(value, block, tile_key, end, kv_head, KV_HEADS, V, V_P2, BLOCK_SIZE, BLOCK_N)
                    pair = load_scales(scales, block, tile_key, end, kv_head, KV_HEADS, BLOCK_SIZE, BLOCK_N, SCALED)
                    block = block_of(table, tile_key + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
                    scores = exact_dot(q, tl.trans(as_query(k, q.dtype)), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
                    scores = scaled(scores, pair, 16, SCALED)
                    weights, before, split_max, split_sum = weigh(
                        scores, split_max, split_sum, tile_key, first_position, seen_by_all, position, last,
                        by_distance, slope, score_scale, scale, TILE_TOKENS, WINDOW, SOFTCAP, BY_DISTANCE, MASKS_ALL,
                        BLOCK_N,
                    )  # fmt: skip
                    # This product may still run while the next tile's scores are computed.
                    weights = scaled(weights, pair, 0, SCALED)
                    split_acc = exact_dot(weights.to(q.dtype), as_query(v, q.dtype), split_acc * before[:, None])
                acc, row_max, row_sum = merged(acc, row_max, row_sum, split_acc, split_max, split_sum)
                begin = split_end
        else:
            split_end = split_begin(split + 1, SPLIT)
            for tile_key in range(begin, end, BLOCK_N):
                k = load_tile(key, block, tile_key, end, kv_head, KV_HEADS, D, D_P2, BLOCK_SIZE, BLOCK_N)
                v = load_tile(value, block, tile_key, end, kv_head, KV_HEADS, V, V_P2, BLOCK_SIZE, BLOCK_N)
                pair = load_scales(scales, block, tile_key, end, kv_head, KV_HEADS, BLOCK_SIZE, BLOCK_N, SCALED)
                block = block_of(table, tile_key + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
                scores = exact_dot(q, tl.trans(as_query(k, q.dtype)), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
                scores = scaled(scores, pair, 16, SCALED)
                if tile_key >= split_end:
                    acc, row_max, row_sum = merged(acc, row_max, row_sum, split_acc, split_max, split_sum)
                    # This clears the split's sums: the next tile multiplies them by 2^(-inf).
                    split_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
                    split += 1
                    split_end = split_begin(split + 1, SPLIT)
                weights, before, split_max, split_sum = weigh(
                    scores, split_max, split_sum, tile_key, first_position, seen_by_all, position, last, by_distance,
                    slope, score_scale, scale, TILE_TOKENS, WINDOW, SOFTCAP, BY_DISTANCE, MASKS_ALL, BLOCK_N,
                )  # fmt: skip
                weights = scaled(weights, pair, 0, SCALED)
                split_acc = exact_dot(weights.to(q.dtype), as_query(v, q.dtype), split_acc * before[:, None])
            acc, row_max, row_sum = merged(acc, row_max, row_sum, split_acc, split_max, split_sum)

        # Computed again, so that these values take no registers during the loops.
        partial, kv_head, part, seq_token, seq_tokens = locate(item, seq, plan, query_start_loc, num_seqs, KV_HEADS)
        tile_token, row, is_row = rows_of(partial, part, seq_tokens, GROUP, BLOCK_M)
        head = kv_head * GROUP + row % GROUP
        if partial >= 0:
            place = (partial + part * seq_tokens + row // GROUP) * HEADS + head
            tl.store(partials + (place[:, None] * V + v_d[None, :]), acc, mask=is_row[:, None] & (v_d < V)[None, :])
            tl.store(stats + place * 2, row_max, mask=is_row)
            tl.store(stats + place * 2 + 1, row_sum, mask=is_row)
            tl.debug_barrier()  # all threads have written before one of them counts
            counter = counters + _NUM_GLOBAL_COUNTERS + partial * KV_HEADS + kv_head
            num_splits = count_splits(tl.load(seq_lens + seq), seq_tokens, SPLIT, WINDOW)
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_splits - 1:
                tl.store(counter, 0)
                for i in range(seq_tokens):
                    _merge_partials(
                        partials, stats, (partial + i) * HEADS + kv_head * GROUP, seq_tokens * HEADS, num_splits,
                        out + ((seq_token.to(tl.int64) + i) * HEADS + kv_head * GROUP) * V,
                        sinks + kv_head * GROUP, GROUP, GROUP_P2, V, V_P2, SINKS,
                    )  # fmt: skip
        else:
            token = (seq_token + row // GROUP).to(tl.int64)
            if SINKS:
                row_sum += sink_weight(sinks, head, row_max, is_row)
            tl.store(
                out + (token * HEADS + head)[:, None] * V + v_d[None, :], normalized(acc, row_sum),
                mask=is_row[:, None] & (v_d < V)[None, :],
            )  # fmt: skip

        # The first items are assigned by program number. The last program to finish resets the counters for the next
        # launch.
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
            # Other programs' results are in the L2 cache (.cg), not in this multiprocessor's cache.
            split_acc = tl.load(
                partials + (rows[:, None] * D + d[None, :]), mask=exists[:, None] & (d < D)[None, :], other=0.0,
                cache_modifier=".cg",
            )  # fmt: skip
            split_max = tl.load(stats + rows * 2, mask=exists, other=float("-inf"), cache_modifier=".cg")
            split_sum = tl.load(stats + rows * 2 + 1, mask=exists, other=0.0, cache_modifier=".cg")
            acc, row_max, row_sum = merged(acc, row_max, row_sum, split_acc, split_max, split_sum)
    if SINKS:
        row_sum += sink_weight(sinks, g, row_max, g < GROUP)
    is_element = (g < GROUP)[:, None] & (d < D)[None, :]
    tl.store(out + g[:, None] * D + d[None, :], normalized(acc, row_sum), mask=is_element)


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a launch is cut: rows and keys of a tile, and what a program takes of its multiprocessor. With `masks_all`
    even fully visible tiles of scores are masked: before Hopper the branch that skips the mask would hide from the
    compiler that one product feeds the other, and warps would also be spread along keys.

    With `nested` there are two loops, over splits and over the tiles of each. So the product of weights and values may
    run while the next tile's scores are computed; in a single loop, merging splits reads its sums. But the pipeline of
    loads drains at the end of each split, which slows decodes, because they wait for memory.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_multiprocessor: int
    masks_all: bool = False
    nested: bool = False


def _tiles(query: Tensor, cache_dtype: torch.dtype, group: int, is_prefill: bool, has_biases: bool = False) -> Tiles:
    """Return the tiles of a launch. Bits depend on block_n and on the layout of warps, so warps lie along rows only, or
    all batches have one layout. Hopper's instructions take at least 64 rows and four warps. Registers decide the rest:
    a thread holds block_m * head_size / (32 * num_warps) sums, as many merged sums, half as many scores, and, with
    biases, as many biases as scores.
    """
    padded = triton.next_power_of_2(query.shape[2])
    major = launch.capability(query.device)[0]
    has_wgmma = major in LARGE_SHARED
    if query.dtype is torch.float32:  # float32 is for comparisons only: it uses no tensor cores
        return Tiles(max(16, triton.next_power_of_2(group)), 16, 4, 1, 2)
    if padded > 128:
        return Tiles(128 if group > 64 else 64, 32, 8, 2, 1)
    block_n = (8192 if major == 9 and not has_biases else 4096) // max(padded, 64)  # 10.0 would spill with 8192
    num_stages = 2 if block_n == 128 else 3
    unpacks_float8 = cache_dtype.itemsize == 1 and not has_wgmma
    if (is_prefill and has_wgmma) or unpacks_float8 or group > 64:
        return Tiles(128, block_n, 8, num_stages, 1, masks_all=not has_wgmma, nested=is_prefill and has_wgmma)
    return Tiles(64, block_n, 4, num_stages, 2, masks_all=not has_wgmma)


@cache
def _workspace(device: torch.device, stream: int) -> tuple[Tensor, Tensor]:
    """Return memory for partial sums, and counters that every launch leaves at zero. Launches of one stream share both,
    because they never overlap."""
    num_counters = _NUM_GLOBAL_COUNTERS.value + _WORKSPACE_FLOATS // _MIN_PARTIAL_FLOATS
    partials = torch.empty(_WORKSPACE_FLOATS, dtype=torch.float32, device=device)
    return partials, torch.zeros(num_counters, dtype=torch.int32, device=device)


def paged_attention(
    query: Tensor, cache: LayerKVCache, block_tables: Tensor, query_start_loc: Tensor, seq_lens: Tensor, scale: float,
    sliding_window: int = 0, softcap: float = 0.0, slopes: Tensor | None = None, sinks: Tensor | None = None,
    bidirectional: bool = False, distance_biases: Tensor | None = None, key_ends: Tensor | None = None,
    value_size: int | None = None,
) -> Tensor:  # fmt: skip
    """`Ops.paged_attention` for caches of `octavo.ops.triton.cache`, in any dtype that the query is in, int8 or float8.

    Rows of sequences without keys and rows after the last sequence's are zeros. Entries of a block table that
    `seq_lens` does not reach may be anything.
    """
    num_tokens, num_heads, head_size = query.shape
    num_blocks, block_size, num_kv_heads, _ = cache.key.shape
    num_seqs, group = len(seq_lens), num_heads // num_kv_heads
    value_size = head_size if value_size is None else value_size
    assert cache.key.shape == (num_blocks, block_size, num_kv_heads, head_size)
    assert cache.value.shape == (num_blocks, block_size, num_kv_heads, value_size) and value_size <= 256
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
    if key_ends is not None:
        assert key_ends.shape == (num_tokens,) and key_ends.dtype is torch.int32
    assert slopes is None or not (bidirectional or key_ends is not None)
    by_distance, bias_stride = slopes, 0
    if distance_biases is not None:
        by_distance, bias_stride = distance_biases, distance_biases.shape[1]
        assert bidirectional and distance_biases.dtype is torch.float32 and distance_biases.is_contiguous()
        assert len(distance_biases) == num_heads
    assert len(query_start_loc) == num_seqs + 1 and len(block_tables) >= num_seqs
    out = torch.empty((num_tokens, num_heads * value_size), dtype=query.dtype, device=query.device)
    if num_tokens == 0:
        return out

    tiles = _tiles(query, cache.key.dtype, group, num_tokens > 2 * num_seqs, distance_biases is not None)
    padded_size = triton.next_power_of_2(head_size)
    num_programs = launch.num_multiprocessors(query.device) * tiles.programs_per_multiprocessor
    partials, counters = _workspace(query.device, launch.stream(query.device))
    num_partials = len(partials) // (num_heads * (value_size + 2))
    plan = plan_of(
        query_start_loc, seq_lens, num_partials, num_programs, num_kv_heads, tiles.block_m // group, tiles.block_n,
        sliding_window,
    )  # fmt: skip
    ahead = "all" if bidirectional else "" if key_ends is None else "to key_ends"
    key, value = cache.key, cache.value
    if key.dtype is torch.float8_e4m3fn and launch.capability(query.device) < (8, 9):
        key, value = key.view(torch.uint8), value.view(torch.uint8)
    _attention_kernel[(num_programs,)](
        query, key, value, key if cache.scales is None else cache.scales.view(torch.int32), block_tables,
        query_start_loc, seq_lens, out, plan, partials, counters,
        partials if by_distance is None else by_distance, partials if sinks is None else sinks,
        seq_lens if key_ends is None else key_ends,
        num_tokens, num_seqs, num_partials, query.stride(0), block_tables.stride(0), bias_stride, float(scale),
        KV_HEADS=num_kv_heads, GROUP=group, GROUP_P2=triton.next_power_of_2(group), D=head_size, D_P2=padded_size,
        V=value_size, V_P2=triton.next_power_of_2(value_size), BLOCK_SIZE=block_size, WINDOW=sliding_window,
        SOFTCAP=float(softcap),
        BY_DISTANCE="slopes" if slopes is not None else "" if distance_biases is None else "biases",
        SINKS=sinks is not None, AHEAD=ahead, SPLIT=attention_plan.SPLIT_KEYS,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, MASKS_ALL=tiles.masks_all, NESTED=tiles.nested,
        SEQS=attention_plan.SEQS_AT_ONCE, SCALED=cache.scales is not None, PADDING=BIAS_PADDING,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, enable_fp_fusion=False,
    )  # fmt: skip
    return out
