"""The plan of paged attention: keys are split at fixed places, and programs fetch items of work.

The plan is made on the device from the lengths, once a step for all layers with the same shapes (`begin_step`). So a
captured graph follows the lengths of the batch that it is replayed with, and wide block tables cost nothing while
sequences are short.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.triton import launch, schedule

SPLIT_KEYS = 256  # keys of the first splits; a multiple of every BLOCK_N
_SPLITS_PER_LEVEL = tl.constexpr(16)  # after this many splits their size doubles
_NUM_LEVELS = tl.constexpr(5)  # sizes up to 4096 keys: with larger splits one program would hold up a long sequence
LENGTHS = ["query_start_loc", "seq_lens"]
SEQS_AT_ONCE = 256  # number of sequences that a plan, or a search in it, reads in one turn
SPLIT_OVERHEAD = schedule.SPLIT_OVERHEAD


@triton.jit
def split_of(key, SPLIT: tl.constexpr):
    """Return the split that a key belongs to."""
    level = key * 0
    for i in tl.static_range(1, _NUM_LEVELS):
        level += (key // (_SPLITS_PER_LEVEL * SPLIT) + 1 >= (1 << i)).to(tl.int32)
    level_begin = _SPLITS_PER_LEVEL * SPLIT * ((1 << level) - 1)
    return _SPLITS_PER_LEVEL * level + ((key - level_begin) // SPLIT >> level)


@triton.jit
def split_begin(split, SPLIT: tl.constexpr):
    """Return the first key of a split."""
    level = tl.minimum(split // _SPLITS_PER_LEVEL, _NUM_LEVELS - 1)
    return (_SPLITS_PER_LEVEL * ((1 << level) - 1) + (split - _SPLITS_PER_LEVEL * level << level)) * SPLIT


@triton.jit
def first_visible_key(keys, tokens, WINDOW: tl.constexpr):
    """Return the first key that any of the last `tokens` positions of `keys` sees."""
    first = keys * 0
    if WINDOW > 0:
        first = tl.maximum(keys - tokens - WINDOW + 1, 0)
    return first


@triton.jit
def count_splits(keys, tokens, SPLIT: tl.constexpr, WINDOW: tl.constexpr):
    return split_of(tl.maximum(keys - 1, 0), SPLIT) - split_of(first_visible_key(keys, tokens, WINDOW), SPLIT) + 1


@triton.jit(do_not_specialize=["num_seqs", "num_partials", "num_programs"], do_not_specialize_on_alignment=LENGTHS)
def _plan_kernel(
    query_start_loc, seq_lens, plan, num_seqs, num_partials, num_programs, KV_HEADS: tl.constexpr,
    TILE_TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr,
    OVERHEAD: tl.constexpr, SEQS: tl.constexpr,
):  # fmt: skip
    """One program writes `plan`: the number of items of split sequences, the number of all items; then for all
    sequences the end of their items among those of split sequences, the end among the other items, and the first place
    among partial sums (-1 if the sequence is not split).

    An item is a key/value head of a tile of query tokens, or of one split of a sequence whose tokens are one tile.
    """
    total, num_items = 0, 0
    for first in range(0, num_seqs, SEQS):
        _, num_tiles, cost, _ = _work(
            first, query_start_loc, seq_lens, num_seqs, TILE_TOKENS, BLOCK_N, SPLIT, WINDOW, SEQS
        )
        total += tl.sum(num_tiles * cost, 0) * KV_HEADS
        num_items += tl.sum(num_tiles, 0) * KV_HEADS
    # A sequence is split if, less what partial sums take, it alone would take twice what a program does on average, or
    # if items like it would leave programs idle in their last turn for half of that.
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
    """Return, for SEQS sequences: tokens, tiles of tokens, the most tiles of keys that such a tile reads, splits."""
    seqs = first + tl.arange(0, SEQS)
    start = tl.load(query_start_loc + seqs, mask=seqs < num_seqs, other=0)
    tokens = tl.load(query_start_loc + seqs + 1, mask=seqs < num_seqs, other=0) - start
    keys = tl.load(seq_lens + seqs, mask=seqs < num_seqs, other=0)
    cost = (keys - first_visible_key(keys, tokens, WINDOW)) // BLOCK_N + 1
    return tokens, (tokens + TILE_TOKENS - 1) // TILE_TOKENS, cost, count_splits(keys, tokens, SPLIT, WINDOW)


@triton.jit
def sequence_of(item, plan, num_seqs, SEQS: tl.constexpr):
    """Return the sequence of an item. Items of split sequences come first, so that short items remain for the end."""
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
def keys_seen(token, query_start_loc, seq_lens, num_seqs, SEQS: tl.constexpr):
    """Return (the sequence of a token, the number of keys that it sees). A token of no sequence sees none."""
    seq = tl.zeros([], tl.int32)
    for first in range(0, num_seqs, SEQS):
        seqs = first + tl.arange(0, SEQS)
        ends = tl.load(query_start_loc + 1 + seqs, mask=seqs < num_seqs, other=0x7FFFFFFF)
        seq += tl.sum((ends <= token).to(tl.int32), 0)
    exists = seq < num_seqs
    end = tl.load(seq_lens + seq, mask=exists, other=0)
    end -= tl.load(query_start_loc + 1 + seq, mask=exists, other=token) - token - 1
    return seq, tl.where(exists, end, 0)


@triton.jit
def locate(item, seq, plan, query_start_loc, num_seqs, KV_HEADS: tl.constexpr):
    """Return (the sequence's place among partial sums, key/value head, split or tile, first token, number of tokens).

    The last items of a sequence come first: late splits are longer, and late tiles have more keys."""
    partial = tl.load(plan + 2 + 2 * num_seqs + seq, volatile=True)
    num_split_items = tl.load(plan, volatile=True)
    is_split = item < num_split_items
    end = tl.load(plan + tl.where(is_split, 2, 2 + num_seqs) + seq, volatile=True)
    from_end = end - 1 - (item - tl.where(is_split, 0, num_split_items))
    token = tl.load(query_start_loc + seq, volatile=True)
    tokens = tl.load(query_start_loc + seq + 1, volatile=True) - token
    return partial, from_end % KV_HEADS, from_end // KV_HEADS, token, tokens


@triton.jit
def rows_of(partial, part, seq_tokens, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return (first token of the item's tile, rows of the sequence [BLOCK_M], whether a row is in this tile [BLOCK_M]).

    A sequence has GROUP rows for each token."""
    TILE_TOKENS: tl.constexpr = BLOCK_M // GROUP
    tile_token = tl.where(partial >= 0, 0, part * TILE_TOKENS)
    row = tile_token * GROUP + tl.arange(0, BLOCK_M)
    return tile_token, row, row < tl.minimum(tile_token + TILE_TOKENS, seq_tokens) * GROUP


@dataclass(frozen=True, slots=True)
class _Step:
    """The lengths of a step, and the plans that layers have made for them so far."""

    query_start_loc: Tensor
    seq_lens: Tensor
    plans: dict[tuple[int, ...], Tensor]


_steps: dict[int, _Step] = {}  # stream -> its current step


def begin_step(query_start_loc: Tensor, seq_lens: Tensor) -> None:
    """`DeviceOps.begin_step`."""
    _steps[launch.stream(seq_lens.device)] = _Step(query_start_loc, seq_lens, {})


def plan_of(query_start_loc: Tensor, seq_lens: Tensor, *key: int) -> Tensor:
    """Return the plan for layers with the same `key`: number of partial sums, programs and key/value heads, tokens and
    keys of a tile, window. It is made once a step if the lengths are the arrays of `begin_step`."""
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
            OVERHEAD=SPLIT_OVERHEAD, SEQS=SEQS_AT_ONCE, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return step.plans[key]
