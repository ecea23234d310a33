"""Choosing tokens: argmax, and sampling by temperature, top-k, top-p and min-p without sorting.

A row of logits is cut into chunks, and a chunk into pieces, by the vocabulary alone. Three launches sample:

1. `_find_maxima`, one program a chunk: the largest logit of each piece.
2. `_narrow`, one program a chunk. A token's *distance* is (largest logit - its logit) / temperature, so the likeliest
   tokens have distance 0; its weight is exp(-distance). In rows that limit their tokens, the distances of tokens that
   may stay are moved to the front of their chunk, in order. The pieces' largest logits bound the k likeliest tokens,
   and a token whose weight times the vocabulary is less than 1 - top_p is not among the likeliest top_p. In other rows
   the chunk's winner is chosen.
3. `_draw`, one program a row: it bisects the limits over the bits of distances (as integers, positive floats keep
   their order), then finds the token with the smallest sum of distance and logarithm of its exponential number.

Weights are summed as integers, in units of 2^-40 of the likeliest token's weight. Such sums are exact and do not depend
on their order, so a row is reproducible whatever is computed beside it. Rounding a weight down loses less than 2^-40 a
token, and 2^-22 of the mass in a vocabulary of 256k; the weight itself is as precise as a float32 exponential.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 4096  # logits of a program; one program a row would leave most of a GPU idle if there are few rows
_PIECE = 256
_TILE = 4096  # candidates that `_draw` looks at in one turn
_INFINITY = tl.constexpr(0x7F800000)  # the bits of an infinite float


@triton.jit
def _find_maxima(logits, stride, maxima, VOCAB: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr):
    """Program (n, c) writes the largest logit of each of the PIECES pieces of chunk c of row n; infinity if one is
    NaN."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1) * PIECES + tl.arange(0, PIECES)
    column = piece[:, None] * PIECE + tl.arange(0, PIECE)[None, :]
    x = tl.load(logits + row * stride + column, mask=column < VOCAB, other=-float("inf"))
    x = tl.where(x == x, x, float("inf"))
    tl.store(maxima + row * (tl.num_programs(1) * PIECES) + piece, tl.max(x, 1))


@triton.jit
def _first_of_largest(row, maximum, largest, VOCAB: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr):
    """Return the lowest token with the `largest` logit of a row, or -1 if that logit is not finite. `maximum` [PIECES]
    are the largest logits of the row's pieces."""
    piece = tl.min(tl.where(maximum == largest, tl.arange(0, PIECES), PIECES - 1), 0)
    column = piece * PIECE + tl.arange(0, PIECE)
    x = tl.load(row + column, mask=column < VOCAB, other=float("nan"))
    token = tl.min(tl.where(x == largest, column, VOCAB), 0)
    return tl.where((largest > -float("inf")) & (largest < float("inf")), token, -1)


@triton.jit
def _argmax(
    logits, stride, maxima, out,
    VOCAB: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr, NUM_PIECES: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, PIECES)
    maximum = tl.load(maxima + n * NUM_PIECES + piece, mask=piece < NUM_PIECES, other=-float("inf"))
    largest = tl.max(maximum, 0)
    token = _first_of_largest(logits + n * stride, maximum, largest, VOCAB, PIECE, PIECES)
    tl.store(out + n, token.to(tl.int64))


@triton.jit
def _distance(x, largest, temperature):
    """Return the distance of a logit: 0 for the largest one, infinity for -inf and NaN."""
    distance = (largest - x) * (1.0 / tl.maximum(temperature, 1e-30))  # the factor is finite, so that 0 times it is 0
    return tl.where(distance >= 0, distance, float("inf"))


@triton.jit
def _weight(distance):
    """Return exp(-distance) in units of 2^-40, as int64."""
    return (tl.exp2(distance * -1.4426950408889634) * 1099511627776.0).to(tl.int64)


@triton.jit
def _mixed_coarsely(token, low):
    """Return MurmurHash3's finalizer of a token and the lower bits of its row's uniform number, as uint32."""
    x = token.to(tl.uint32) * 0x9E3779B1 + low
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _mixed(x, high):
    """Return x mixed with the upper bits of the uniform number: the hash lowbias32."""
    x = x + high
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _score(token, distance, uniform):
    """Return the logarithm of a token's exponential number divided by its weight. The token with the smallest score is
    drawn."""
    bits = (uniform * 9007199254740992.0).to(tl.int64)  # 2^53
    low = (bits & 0xFFFFFFFF).to(tl.uint32)
    high = (bits >> 32).to(tl.uint32) * 0x27D4EB2F
    x = _mixed_coarsely(token, low)
    coarse, rest = _mixed(x, high), _mixed(x, high + 0x165667B1)
    u = coarse.to(tl.float32) * 2.3283064365386963e-10 + (rest.to(tl.float32) + 0.5) * 5.421010862427522e-20
    left = ((4294967295 - coarse).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 1 - u, exact if it is small
    series = u * (1 + u * (0.5 + u * (0.33333334 + u * 0.25)))
    number = tl.where(u < 0.015625, series, -tl.log(tl.where(u < 0.5, 1 - u, left)))
    return tl.log(number) + distance


@triton.jit
def _first_of_least(score, token, VOCAB: tl.constexpr):
    """Return the least score of [n], and the lowest token that has it."""
    least = tl.min(score, 0)
    return least, tl.min(tl.where(score == least, token, VOCAB), 0)


@triton.jit
def _min_p_distance(min_p):
    """Return the largest distance that `min_p` allows, plus a little, so that rounding keeps tokens exactly at the
    limit."""
    return tl.where(min_p > 0, 1e-7 - 1.000001 * tl.log(tl.maximum(min_p, 1e-37)), float("inf"))


@triton.jit
def _is_limited(top_k, top_p, min_p, VOCAB: tl.constexpr):
    return ((top_k > 0) & (top_k < VOCAB)) | (top_p < 1) | (min_p > 0)


@triton.jit
def _bound_of_likeliest(distance, k):
    """Return a little more than the k-th smallest of distances [n]: its upper 13 bits, with the lower bits set."""
    bits = distance.to(tl.int32, bitcast=True)
    found = tl.full((), 0, tl.int32)
    for i in range(12):
        half = 1 << (30 - i)
        count = tl.sum((bits < found + half).to(tl.int32), 0)
        found = tl.where(count >= k, found, found + half)
    return tl.minimum(found | 0x7FFFF, _INFINITY).to(tl.float32, bitcast=True)


@triton.jit
def _narrow(
    logits, stride, maxima, temperature, top_k, top_p, min_p, uniforms, counts, masses, scores,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, PIECES: tl.constexpr, NUM_PIECES: tl.constexpr,
):  # fmt: skip
    """Program (n, c), for rows that are drawn: the weight of chunk c, after min_p, to `masses` [N, C].

    If the row limits its tokens the chunk is overwritten, with `counts` [N, C] distances. If these are no more than
    half of its length, their places in the chunk are at its end, as floats; otherwise all are there, in their places.
    If it does not, `counts` has the chunk's winner and `scores` [N, C] its score.
    """
    n = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    piece = tl.arange(0, PIECES)
    maximum = tl.load(maxima + n * NUM_PIECES + piece, mask=piece < NUM_PIECES, other=-float("inf"))
    largest = tl.max(maximum, 0)
    t = tl.load(temperature + n)
    if (t > 0) & (largest > -float("inf")) & (largest < float("inf")):
        k, p, min_p_of_row = tl.load(top_k + n), tl.load(top_p + n), tl.load(min_p + n)
        begin = logits + n * stride + chunk * CHUNK
        length = tl.minimum(CHUNK, VOCAB - chunk * CHUNK)
        offset = tl.arange(0, CHUNK)
        x = tl.load(begin + offset, mask=offset < length, other=-float("inf"))
        distance = _distance(x, largest, t)
        bound = _min_p_distance(min_p_of_row)
        mass = tl.sum(tl.where(distance <= bound, _weight(distance), 0), 0)
        tl.store(masses + n * tl.num_programs(1) + chunk, mass)
        if not _is_limited(k, p, min_p_of_row, VOCAB):
            token = chunk * CHUNK + offset
            score = tl.where(offset < length, _score(token, distance, tl.load(uniforms + n)), float("inf"))
            least, winner = _first_of_least(score, token, VOCAB)
            tl.store(scores + n * tl.num_programs(1) + chunk, least)
            tl.store(counts + n * tl.num_programs(1) + chunk, winner)
        else:
            if (k > 0) & (k < VOCAB):
                if k <= NUM_PIECES:
                    bound = tl.minimum(bound, _bound_of_likeliest(_distance(maximum, largest, t), k))
            elif p < 1:
                bound = tl.minimum(bound, tl.log(VOCAB / (1 - p)) + 0.01)
            kept = (distance <= bound) & (offset < length)
            count = tl.sum(kept.to(tl.int32), 0)
            if 2 * count <= length:
                place = tl.cumsum(kept.to(tl.int32), 0) - 1
                tl.debug_barrier()  # the whole chunk has been read
                tl.store(begin + place, distance, mask=kept)
                tl.store(begin + length - count + place, offset.to(tl.float32), mask=kept)
                tl.store(counts + n * tl.num_programs(1) + chunk, count)
            else:
                tl.store(begin + offset, distance, mask=offset < length)
                tl.store(counts + n * tl.num_programs(1) + chunk, length)


@triton.jit
def _sums(row, count, num_tiles, limit, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, WIDTH: tl.constexpr):
    """Candidates whose distance has bits up to `limit`: their weight in each chunk [CHUNKS] int64, their number, the
    largest bits among them, and the smallest among the others. Chunk c has `count[c]`, of which a turn takes WIDTH."""
    start = tl.arange(0, CHUNKS)[:, None] * CHUNK
    mass = tl.zeros((CHUNKS, WIDTH), tl.int64)
    number = tl.zeros((CHUNKS, WIDTH), tl.int32)
    largest_within = number
    smallest_beyond = number + 0x7FFFFFFF
    for tile in range(0, num_tiles):
        column = tile * WIDTH + tl.arange(0, WIDTH)[None, :]
        exists = column < count[:, None]
        distance = tl.load(row + start + column, mask=exists, other=0.0)
        bits = distance.to(tl.int32, bitcast=True)
        within = exists & (bits <= limit)
        mass += tl.where(within, _weight(distance), 0)
        number += within.to(tl.int32)
        largest_within = tl.maximum(largest_within, tl.where(within, bits, 0))
        smallest_beyond = tl.minimum(smallest_beyond, tl.where(exists & (bits > limit), bits, 0x7FFFFFFF))
    largest, smallest = tl.max(tl.max(largest_within, 1), 0), tl.min(tl.min(smallest_beyond, 1), 0)
    return tl.sum(mass, 1), tl.sum(tl.sum(number, 1), 0), largest, smallest


@triton.jit
def _tighten(
    row, count, num_tiles, limit, mass, number, wanted,
    BY_WEIGHT: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Lower `limit`, within which candidates have `mass` and are `number`, as far as they still have the `wanted`
    weight, or are that many -> the new limit and mass. If they are fewer from the start, nothing changes."""
    has = tl.sum(mass, 0) if BY_WEIGHT else number.to(tl.int64)
    below = tl.full((), -1, tl.int32)  # a limit that is too low
    if has < wanted:
        below = limit
    while limit - below > 1:
        middle = below + (limit - below) // 2
        mass_within, number, largest, smallest = _sums(row, count, num_tiles, middle, CHUNK, CHUNKS, WIDTH)
        has = tl.sum(mass_within, 0) if BY_WEIGHT else number.to(tl.int64)
        # Continue from the candidate next to the middle, so that few candidates take few turns.
        if has >= wanted:
            limit, mass = largest, mass_within
        else:
            below = smallest - 1
    return limit, mass


@triton.jit
def _draw_from(
    row, k, p, min_p, uniform, counts, masses, scores,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, NUM_CHUNKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return the token that is drawn for a row after `_narrow`; `counts`, `masses` and `scores` are the row's."""
    chunks = tl.arange(0, CHUNKS)
    count = tl.load(counts + chunks, mask=chunks < NUM_CHUNKS, other=0)
    token = tl.full((), 0, tl.int32)
    if _is_limited(k, p, min_p, VOCAB):
        mass = tl.load(masses + chunks, mask=chunks < NUM_CHUNKS, other=0)
        num_tiles = (tl.max(count, 0) + WIDTH - 1) // WIDTH
        left = tl.sum(mass, 0)  # the mass after min_p; the candidates' mass may be less
        limit = _min_p_distance(min_p).to(tl.int32, bitcast=True)
        mass, number, limit, _beyond = _sums(row, count, num_tiles, limit, CHUNK, CHUNKS, WIDTH)
        if (k > 0) & (k < VOCAB):
            limit, mass = _tighten(row, count, num_tiles, limit, mass, number, k, False, CHUNK, CHUNKS, WIDTH)
            left = tl.sum(mass, 0)
        if p < 1:
            wanted = tl.ceil(p.to(tl.float64) * left.to(tl.float64)).to(tl.int64)
            limit, mass = _tighten(row, count, num_tiles, limit, mass, number, wanted, True, CHUNK, CHUNKS, WIDTH)
        start = chunks[:, None] * CHUNK
        length = tl.minimum(CHUNK, VOCAB - start)
        best = tl.full((CHUNKS, WIDTH), float("inf"), tl.float32)
        winner = tl.full((CHUNKS, WIDTH), VOCAB, tl.int32)
        for tile in range(0, num_tiles):
            column = tile * WIDTH + tl.arange(0, WIDTH)[None, :]
            exists = column < count[:, None]
            distance = tl.load(row + start + column, mask=exists, other=0.0)
            inside = exists & (distance.to(tl.int32, bitcast=True) <= limit)
            has_places = exists & (2 * count[:, None] <= length)
            place = tl.load(row + start + length - count[:, None] + column, mask=has_places, other=0.0)
            candidate = start + tl.where(has_places, place.to(tl.int32), column)
            score = tl.where(inside, _score(candidate, distance, uniform), float("inf"))
            winner = tl.where(score < best, candidate, winner)
            best = tl.minimum(score, best)
        least = tl.min(tl.min(best, 1), 0)
        token = tl.min(tl.min(tl.where(best == least, winner, VOCAB), 1), 0)
    else:
        score = tl.load(scores + chunks, mask=chunks < NUM_CHUNKS, other=float("inf"))
        _, token = _first_of_least(score, count, VOCAB)
    return token


@triton.jit
def _draw(
    logits, stride, maxima, temperature, top_k, top_p, min_p, uniforms, counts, masses, scores, out,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, NUM_CHUNKS: tl.constexpr, WIDTH: tl.constexpr,
    PIECE: tl.constexpr, PIECES: tl.constexpr, NUM_PIECES: tl.constexpr,
):  # fmt: skip
    """One program for each row."""
    n = tl.program_id(0).to(tl.int64)
    row = logits + n * stride
    piece = tl.arange(0, PIECES)
    maximum = tl.load(maxima + n * NUM_PIECES + piece, mask=piece < NUM_PIECES, other=-float("inf"))
    largest = tl.max(maximum, 0)
    t = tl.load(temperature + n)
    is_finite = (largest > -float("inf")) & (largest < float("inf"))
    token = tl.full((), 0, tl.int32)
    if is_finite & (t > 0):
        token = _draw_from(
            row, tl.load(top_k + n), tl.load(top_p + n), tl.load(min_p + n), tl.load(uniforms + n),
            counts + n * NUM_CHUNKS, masses + n * NUM_CHUNKS, scores + n * NUM_CHUNKS, VOCAB, CHUNK, CHUNKS, NUM_CHUNKS,
            WIDTH,
        )  # fmt: skip
    else:
        token = _first_of_largest(row, maximum, largest, VOCAB, PIECE, PIECES)
    tl.store(out + n, token.to(tl.int64))


def _maxima(logits: Tensor) -> Tensor:
    """Return the largest logit of each piece of logits [S, V]: [S, P] float32; entries after the last piece are
    -inf."""
    rows, vocab = logits.shape
    assert logits.dtype is torch.float32 and logits.stride(1) == 1
    num_chunks = triton.cdiv(vocab, _CHUNK)
    pieces = _CHUNK // _PIECE
    maxima = torch.empty((rows, num_chunks * pieces), dtype=torch.float32, device=logits.device)
    _find_maxima[(rows, num_chunks)](
        logits, logits.stride(0), maxima, VOCAB=vocab, PIECE=_PIECE, PIECES=pieces, num_warps=4, enable_fp_fusion=False
    )
    return maxima


def argmax(logits: Tensor) -> Tensor:
    """`Ops.argmax` of logits [S, V] float32: [S] int64. The lowest index wins a tie; -1: no token could be chosen."""
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        maxima = _maxima(logits)
        num_pieces = maxima.shape[1]
        _argmax[(rows,)](
            logits, logits.stride(0), maxima, out, VOCAB=vocab, PIECE=_PIECE,
            PIECES=triton.next_power_of_2(num_pieces), NUM_PIECES=num_pieces, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniforms: Tensor
) -> Tensor:
    """`Ops.sample` of logits [S, V] float32, which are overwritten: [S] int64."""
    rows, vocab = logits.shape
    dtypes = (torch.float32, torch.int64, torch.float32, torch.float32, torch.float64)
    for tensor, dtype in zip((temperature, top_k, top_p, min_p, uniforms), dtypes, strict=True):
        assert tensor.dtype is dtype and tensor.shape == (rows,) and tensor.is_contiguous()
    assert vocab < 1 << 22, "sums of weights would overflow"
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return out
    maxima = _maxima(logits)
    num_chunks, num_pieces = triton.cdiv(vocab, _CHUNK), maxima.shape[1]
    chunks, pieces = triton.next_power_of_2(num_chunks), triton.next_power_of_2(num_pieces)
    counts = torch.empty((rows, num_chunks), dtype=torch.int32, device=logits.device)
    masses = torch.empty((rows, num_chunks), dtype=torch.int64, device=logits.device)
    scores = torch.empty((rows, num_chunks), dtype=torch.float32, device=logits.device)
    _narrow[(rows, num_chunks)](
        logits, logits.stride(0), maxima, temperature, top_k, top_p, min_p, uniforms, counts, masses, scores,
        VOCAB=vocab, CHUNK=_CHUNK, PIECES=pieces, NUM_PIECES=num_pieces, num_warps=16, enable_fp_fusion=False,
    )  # fmt: skip
    _draw[(rows,)](
        logits, logits.stride(0), maxima, temperature, top_k, top_p, min_p, uniforms, counts, masses, scores, out,
        VOCAB=vocab, CHUNK=_CHUNK, CHUNKS=chunks, NUM_CHUNKS=num_chunks, WIDTH=max(_TILE // chunks, 16),
        PIECE=_PIECE, PIECES=pieces, NUM_PIECES=num_pieces, num_warps=16, enable_fp_fusion=False,
    )  # fmt: skip
    return out
