"""The arithmetic of attention's kernels: tiles of cached keys and values, scores, and sums of online softmax.

Fused multiply-adds are written out and the compiler forms no others (see `launch`), so that two places that sum the
same give the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def finite(x):
    """The maximum that exponents are taken relative to, also where nothing has been seen yet."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def merged(acc, row_max, row_sum, split_acc, split_max, split_sum):
    """Add a split's sums to those of the splits before it. A split without visible keys changes nothing."""
    new_max = tl.maximum(row_max, split_max)
    before = tl.exp2(row_max - finite(new_max))
    added = tl.exp2(split_max - finite(new_max))
    acc = tl.fma(split_acc, added[:, None], acc * before[:, None])
    return acc, new_max, tl.fma(split_sum, added, row_sum * before)


@triton.jit
def hide(scores, key, position, last, WINDOW: tl.constexpr):
    visible = key[None, :] <= last[:, None]
    if WINDOW > 0:
        visible = visible & (key[None, :] > position[:, None] - WINDOW)
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def normalized(acc, row_sum):
    """Rows that have seen no key are zeros."""
    return acc * tl.where(row_sum > 0, 1.0 / row_sum, 0.0)[:, None]


@triton.jit
def soft_capped(x, CAP: tl.constexpr):
    """CAP * tanh(x / CAP)"""
    e = tl.exp2(x * (2 * LOG2E / CAP))
    return CAP - (2 * CAP) / (e + 1)


@triton.jit
def sink_weight(sinks, head, row_max, mask):
    """The weight of one more key, relative to the maximum of a row."""
    sink = tl.load(sinks + head, mask=mask, other=float("-inf"))
    return tl.exp2(sink * LOG2E - finite(row_max))


@triton.jit
def exact_dot(a, b, acc):
    if _INTERPRETED:  # it takes bfloat16 for integers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def as_query(x, DTYPE: tl.constexpr):
    """Loaded keys or values in the dtype of the query. Bytes are float8_e4m3fn for GPUs that cannot convert it: its
    exponent and mantissa lie in float16 as in a number that is 2^-8 times as large."""
    if x.dtype == tl.uint8:
        bits = x.to(tl.uint16)
        x = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
    return x.to(DTYPE)


@triton.jit
def block_of(table, first_key, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The cache's block of a tile of keys or, where blocks are smaller, of each key."""
    if BLOCK_SIZE < BLOCK_N:
        first_key += tl.arange(0, BLOCK_N)
    return tl.load(table + first_key // BLOCK_SIZE, mask=first_key < end, other=0)


@triton.jit
def load_tile(
    cached, block, first_key, end, kv_head, KV_HEADS: tl.constexpr, D: tl.constexpr, D_P2: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A tile of keys or values. Those from `end` on are zeros: a weight of 0 would not hide a value that is NaN."""
    n = tl.arange(0, BLOCK_N)
    row = (block * BLOCK_SIZE + (first_key + n) % BLOCK_SIZE) * KV_HEADS + kv_head  # numbers below 2^31
    return load_rows(cached, row, first_key + n < end, D, D, D_P2)


@triton.jit
def load_rows(cached, row, exists, STRIDE: tl.constexpr, D: tl.constexpr, D_P2: tl.constexpr):
    """The first D elements of rows, which lie STRIDE apart. Those that do not exist are zeros."""
    d = tl.arange(0, D_P2)
    mask = exists[:, None]
    if D < D_P2:
        mask = mask & (d < D)[None, :]
    return tl.load(cached + (row.to(tl.int64) * STRIDE)[:, None] + d[None, :], mask=mask, other=0.0)


@triton.jit
def load_scales(
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
def scaled(x, scales, LEFT: tl.constexpr, SCALED: tl.constexpr):
    """Scores or weights [rows, keys] times what `load_scales` brought for them, where it did: those of keys are the
    lower half, LEFT by 16, those of values the upper one."""
    if SCALED:
        x = x * ((scales << LEFT) & -0x10000).to(tl.float32, bitcast=True)[None, :]
    return x


@triton.jit
def weigh(
    scores, split_max, split_sum, tile_key, first_position, seen_by_all, position, last, by_distance, slope,
    score_scale, scale, TILE_TOKENS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    BY_DISTANCE: tl.constexpr, MASKS_ALL: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """-> (weights of a tile of keys, what earlier sums are multiplied with, the split's new maximum and sum). The key
    at `last` is the last that a row sees; up to `seen_by_all` all rows see them, as far as windows let them. `slope` is
    that of ALiBi, or where in `by_distance` a row has what is added to the score of key 0."""
    keys = tile_key + tl.arange(0, BLOCK_N)
    if SOFTCAP > 0:
        scores = soft_capped(scores * score_scale, SOFTCAP)
    if (BY_DISTANCE != "") and (SOFTCAP == 0):
        scores = scores * score_scale
    if BY_DISTANCE == "slopes":
        distance = (keys[None, :] - position[:, None]).to(tl.float32)
        scores = tl.fma(tl.broadcast_to(slope[:, None], scores.shape), distance, scores)
    elif BY_DISTANCE == "biases":
        is_seen = (keys[None, :] <= last[:, None]) & (position <= last)[:, None]
        scores += tl.load(by_distance + (slope[:, None] + keys[None, :]), mask=is_seen, other=0.0)
    if not MASKS_ALL:
        hides = tile_key + BLOCK_N > seen_by_all + 1
        if WINDOW > 0:
            hides = hides | (tile_key <= first_position + TILE_TOKENS - 1 - WINDOW)
        if hides:
            scores = hide(scores, keys, position, last, WINDOW)
    else:
        scores = hide(scores, keys, position, last, WINDOW)
    new_max = tl.maximum(split_max, tl.max(scores, 1) * scale)
    weights = tl.exp2(tl.fma(scores, scale, -finite(new_max)[:, None]))
    before = tl.exp2(split_max - finite(new_max))
    return weights, before, new_max, tl.fma(split_sum, before, tl.sum(weights, 1))
