"""Latent attention: products by head, and attention over the compressed cache that all heads share.

A program has as many heads of one token as fill a tensor-core tile, and reads all of the token's keys. Each loaded row
serves all of these heads as key and as value: 2 * (2 * L + R) operations for each head and 2 * (L + R) bytes. The tiles
of keys lie at fixed positions and are summed in order, so a token's bits depend on its position alone. Keys that an
index has chosen (`octavo.ops.triton.choose_keys`) form tiles in the order of the list. Because one program reads all of
a token's keys, a few long sequences do not fill a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops import ExpertsWeight, LayerKVCache
from octavo.ops.triton import launch
from octavo.ops.triton.attention_math import (
    LOG2E,
    as_query,
    block_of,
    exact_dot,
    finite,
    hide,
    load_rows,
    normalized,
    scaled,
)
from octavo.ops.triton.attention_plan import LENGTHS, SEQS_AT_ONCE, keys_seen
from octavo.ops.triton.expert_kernels import StackedWeight
from octavo.ops.triton.packed_weights import FloatWeight
from octavo.ops.triton.tiles import LARGE_SHARED, dot


@triton.jit(do_not_specialize=["num_rows"])
def _by_head_kernel(
    x, w, out, num_rows, num_out, num_in, stride_x, stride_head, stride_w, stride_out, BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Programs (tokens, channels, head). The product is computed transposed, as all products are (see `tiles`)."""
    head = tl.program_id(2).to(tl.int64)
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    channels = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_at = x + head * stride_head + tokens[None, :] * stride_x + k[:, None]
    w_at = w + (head * num_out + channels)[:, None] * stride_w + k[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for first_k in range(0, num_in, BLOCK_K):
        inside = first_k + k < num_in
        w_tile = tl.load(w_at + first_k, mask=(channels < num_out)[:, None] & inside[None, :], other=0.0)
        x_tile = tl.load(x_at + first_k, mask=(tokens < num_rows)[None, :] & inside[:, None], other=0.0)
        acc = dot(w_tile, x_tile, acc)
    at = out + tokens[:, None] * stride_out + head * num_out + channels[None, :]
    tl.store(at, tl.trans(acc), mask=(tokens < num_rows)[:, None] & (channels < num_out)[None, :])


def linear_by_head(x: Tensor, weight: ExpertsWeight) -> Tensor:
    """`Ops.linear_by_head`."""
    assert isinstance(weight, StackedWeight) and isinstance(weight.weight, FloatWeight)
    matrix, (num_tokens, num_heads, num_in) = weight.weight, x.shape
    assert matrix.bias is None and matrix.data.dtype is x.dtype and not matrix.gated
    assert num_heads == weight.num_experts and num_in == matrix.in_features and x.stride(2) == 1
    num_out = weight.out_features
    out = torch.empty((num_tokens, num_heads, num_out), dtype=x.dtype, device=x.device)
    if num_tokens:
        block_t, block_n = 16 if num_tokens <= 16 else 64, 64
        _by_head_kernel[(triton.cdiv(num_tokens, block_t), triton.cdiv(num_out, block_n), num_heads)](
            x, matrix.data, out, num_tokens, num_out, num_in, x.stride(0), x.stride(1), matrix.data.stride(0),
            out.stride(0), BLOCK_T=block_t, BLOCK_N=block_n, BLOCK_K=64, num_warps=4, num_stages=3,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out


@triton.jit
def _rows_of(
    table, chosen, tile_key, end, BLOCK_SIZE: tl.constexpr, NUM_CHOSEN: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Return the rows of the cache that hold a tile of the sequence's keys; of its `chosen` keys if NUM_CHOSEN > 0."""
    n = tile_key + tl.arange(0, BLOCK_N)
    if NUM_CHOSEN > 0:
        key = tl.load(chosen + n, mask=n < end, other=0)
        block = tl.load(table + key // BLOCK_SIZE, mask=n < end, other=0)
        n = key
    else:
        block = block_of(table, tile_key, end, BLOCK_SIZE, BLOCK_N)
    return block * BLOCK_SIZE + n % BLOCK_SIZE  # numbers below 2^31


@triton.jit(do_not_specialize=["num_seqs", "table_stride"], do_not_specialize_on_alignment=["block_tables", *LENGTHS])
def _latent_kernel(
    query, rotated, key, value, scales, block_tables, query_start_loc, seq_lens, chosen, out, num_seqs, rotated_stride,
    rotated_head_stride, table_stride, score_scale, HEADS: tl.constexpr, D: tl.constexpr, D_P2: tl.constexpr,
    R: tl.constexpr, R_P2: tl.constexpr, KEY_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_CHOSEN: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, SEQS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Programs (token, heads). The results of tokens of no sequence are zeros. If NUM_CHOSEN > 0, a token reads its
    keys in `chosen` [T, NUM_CHOSEN] only, in tiles side by side as if they were all keys."""
    token = tl.program_id(0)
    first_row = token.to(tl.int64) * HEADS
    seq, end = keys_seen(token, query_start_loc, seq_lens, num_seqs, SEQS)
    if NUM_CHOSEN > 0:
        end = tl.minimum(end, NUM_CHOSEN)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d, r = tl.arange(0, D_P2), tl.arange(0, R_P2)
    row = first_row + head
    is_head = head < HEADS
    q = tl.load(query + row[:, None] * D + d[None, :], mask=is_head[:, None] & (d < D)[None, :], other=0.0)
    rotated_at = rotated + token.to(tl.int64) * rotated_stride + head * rotated_head_stride
    q_rotated = tl.load(rotated_at[:, None] + r[None, :], mask=is_head[:, None] & (r < R)[None, :], other=0.0)
    table = block_tables + seq.to(tl.int64) * table_stride
    acc = tl.zeros([BLOCK_H, D_P2], tl.float32)
    row_max = tl.full([BLOCK_H], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_H], tl.float32)
    position = tl.zeros([BLOCK_H], tl.int32) + end - 1
    listed = chosen + token.to(tl.int64) * NUM_CHOSEN
    at = _rows_of(table, listed, 0, end, BLOCK_SIZE, NUM_CHOSEN, BLOCK_N)  # one tile ahead
    for tile_key in range(0, end, BLOCK_N):
        n = tile_key + tl.arange(0, BLOCK_N)
        k = as_query(load_rows(key, at, n < end, KEY_D, R, R_P2), q.dtype)
        v = as_query(load_rows(value, at, n < end, D, D, D_P2), q.dtype)
        pair = at
        if SCALED:
            pair = tl.load(scales + at, mask=n < end, other=0)
        at = _rows_of(table, listed, tile_key + BLOCK_N, end, BLOCK_SIZE, NUM_CHOSEN, BLOCK_N)
        scores = scaled(exact_dot(q, tl.trans(v), tl.zeros([BLOCK_H, BLOCK_N], tl.float32)), pair, 0, SCALED)
        rotated_scores = exact_dot(q_rotated, tl.trans(k), tl.zeros([BLOCK_H, BLOCK_N], tl.float32))
        scores += scaled(rotated_scores, pair, 16, SCALED)
        scores = hide(scores * (score_scale * LOG2E), n, position, position, 0)
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        weights = tl.exp2(scores - finite(new_max)[:, None])
        before = tl.exp2(row_max - finite(new_max))
        row_sum = tl.fma(row_sum, before, tl.sum(weights, 1))
        weights = scaled(weights, pair, 0, SCALED)
        acc = exact_dot(weights.to(q.dtype), v, acc * before[:, None])
        row_max = new_max
    at = out + row[:, None] * D + d[None, :]
    tl.store(at, normalized(acc, row_sum), mask=is_head[:, None] & (d < D)[None, :])


def latent_attention(
    query: Tensor, rotated: Tensor, cache: LayerKVCache, block_tables: Tensor, query_start_loc: Tensor,
    seq_lens: Tensor, scale: float, chosen: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`IndexOps.latent_attention` for the same caches as `paged_attention`. In caches without scales, an index's keys
    may follow the keys."""
    num_tokens, num_heads, size = query.shape
    num_blocks, block_size = cache.key.shape[:2]
    rotated_size, num_seqs = rotated.shape[2], len(seq_lens)
    key_size = cache.key.shape[3]
    assert cache.value.shape == (num_blocks, block_size, 1, size) and cache.key.shape[2] == 1
    assert key_size == rotated_size or (key_size > rotated_size and cache.scales is None)
    assert cache.key.is_contiguous() and cache.value.is_contiguous() and query.is_contiguous()
    assert cache.key.dtype is cache.value.dtype and (cache.key.dtype is query.dtype or cache.key.dtype.itemsize == 1)
    assert rotated.shape[:2] == (num_tokens, num_heads) and rotated.stride(2) == 1 and rotated.dtype is query.dtype
    assert block_tables.dtype is query_start_loc.dtype is seq_lens.dtype is torch.int32 and block_tables.stride(1) == 1
    if chosen is not None:
        assert len(chosen) == num_tokens and chosen.dtype is torch.int32 and chosen.is_contiguous()
    out = torch.empty_like(query)
    if num_tokens == 0:
        return out
    key, value = cache.key, cache.value
    if key.dtype is torch.float8_e4m3fn and launch.capability(query.device) < (8, 9):
        key, value = key.view(torch.uint8), value.view(torch.uint8)
    # The sums of more than 32 heads, of 512 values each, do not fit into registers beside a tile that is being loaded.
    # Multiprocessors of 8.6 and 8.9 have shared memory for 16 heads.
    fits_32 = launch.capability(query.device)[0] in LARGE_SHARED or launch.capability(query.device) == (8, 0)
    most = 32 if fits_32 and query.dtype is not torch.float32 else 16
    block_h = min(most, max(16, triton.next_power_of_2(num_heads)))
    _latent_kernel[(num_tokens, triton.cdiv(num_heads, block_h))](
        query, rotated, key, value, key if cache.scales is None else cache.scales.view(torch.int32), block_tables,
        query_start_loc, seq_lens, out if chosen is None else chosen, out, num_seqs, rotated.stride(0),
        rotated.stride(1), block_tables.stride(0), scale, HEADS=num_heads, D=size, D_P2=triton.next_power_of_2(size),
        R=rotated_size, R_P2=triton.next_power_of_2(rotated_size), KEY_D=key_size, BLOCK_SIZE=block_size,
        NUM_CHOSEN=0 if chosen is None else chosen.shape[1], BLOCK_H=block_h,
        BLOCK_N=16 if query.dtype is torch.float32 else 32, SEQS=SEQS_AT_ONCE, num_warps=8, num_stages=3,
        SCALED=cache.scales is not None, enable_fp_fusion=False,
    )  # fmt: skip
    return out
