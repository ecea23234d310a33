"""The arithmetic of attention's kernels: tiles of cached keys and values, scores, and sums of online softmax.

Fused multiply-adds are written out, and the compiler adds no others (see `launch`). So the same sum in two places of
the code has the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.ops.triton.tiles import INTERPRETED

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def finite(x):
    """Return the maximum that is subtracted from exponents: x, or 0 if no key has been seen yet."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def merged(acc, row_max, row_sum, split_acc, split_max, split_sum):
    """Return the sums of the earlier splits with a split's sums added. A split without visible keys changes nothing."""
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
    """Return sums divided by the sum of weights; rows that have seen no key are zeros."""
    return acc * tl.where(row_sum > 0, 1.0 / row_sum, 0.0)[:, None]


@triton.jit
def soft_capped(x, CAP: tl.constexpr):
    """Return CAP * tanh(x / CAP)."""
    e = tl.exp2(x * (2 * LOG2E / CAP))
    return CAP - (2 * CAP) / (e + 1)


@triton.jit
def sink_weight(sinks, head, row_max, mask):
    """Return the weight of the sink, one more key, relative to the maximum of a row."""
    sink = tl.load(sinks + head, mask=mask, other=float("-inf"))
    return tl.exp2(sink * LOG2E - finite(row_max))


@triton.jit
def exact_dot(a, b, acc):
    if INTERPRETED:  # the interpreter multiplies bfloat16 as integers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def as_query(x, DTYPE: tl.constexpr):
    """Return loaded keys or values in the dtype of the query. Bytes are float8_e4m3fn on GPUs that cannot convert it:
    its exponent and mantissa, moved to their places in float16, make a number 2^-8 times as large."""
    if x.dtype == tl.uint8:
        bits = x.to(tl.uint16)
        x = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
    return x.to(DTYPE)


@triton.jit
def block_of(table, first_key, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the cache's block of a tile of keys; if blocks are smaller than tiles, the block of each key."""
    if BLOCK_SIZE < BLOCK_N:
        first_key += tl.arange(0, BLOCK_N)
    return tl.load(table + first_key // BLOCK_SIZE, mask=first_key < end, other=0)


@triton.jit
def load_tile(
    cached, block, first_key, end, kv_head, KV_HEADS: tl.constexpr, D: tl.constexpr, D_P2: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return a tile of keys or values. Rows from `end` on are zeros, because 0 times NaN is NaN."""
    n = tl.arange(0, BLOCK_N)
    row = (block * BLOCK_SIZE + (first_key + n) % BLOCK_SIZE) * KV_HEADS + kv_head  # numbers below 2^31
    return load_rows(cached, row, first_key + n < end, D, D, D_P2)


@triton.jit
def load_rows(cached, row, exists, STRIDE: tl.constexpr, D: tl.constexpr, D_P2: tl.constexpr):
    """Return the first D elements of rows, which lie STRIDE apart. Rows that do not exist are zeros."""
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
    """Return the scales of a tile's keys and values [BLOCK_N]: two bfloat16 in an int32 each. Without SCALED the result
    has no meaning. The two stay packed until they are used, to save registers."""
    n = tl.arange(0, BLOCK_N)
    if SCALED:
        row = (block * BLOCK_SIZE + (first_key + n) % BLOCK_SIZE) * KV_HEADS + kv_head
        n = tl.load(scales + row, mask=first_key + n < end, other=0)
    return n


@triton.jit
def scaled(x, scales, LEFT: tl.constexpr, SCALED: tl.constexpr):
    """Return scores or weights [rows, keys] times the scales of `load_scales`, if SCALED. Scales of keys are the lower
    half of each int32 (LEFT = 16), scales of values the upper half (LEFT = 0)."""
    if SCALED:
        x = x * ((scales << LEFT) & -0x10000).to(tl.float32, bitcast=True)[None, :]
    return x


@triton.jit
def weigh(
    scores, split_max, split_sum, tile_key, first_position, seen_by_all, position, last, by_distance, slope,
    score_scale, scale, TILE_TOKENS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    BY_DISTANCE: tl.constexpr, MASKS_ALL: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return (weights of a tile of keys, factor of earlier sums, the split's new maximum, its new sum).

    A row sees keys up to `last`; all rows see keys up to `seen_by_all`, except for windows. `slope` is ALiBi's slope,
    or the place in `by_distance` of a row's bias for key 0."""
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
