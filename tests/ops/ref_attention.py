"""The reference's attention over a paged cache [blocks, offset, heads, elements], rotation, and the cache itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.ops import BIAS_PADDING, LayerKVCache
from octavo.ops.torch_arrays import DTYPES


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [T, heads, D] with the first R elements of each head rotated as two halves; cos, sin [T, 1, R/2]."""
    half = cos.shape[-1]
    x32 = x.float()
    a, b, rest = x32[..., :half], x32[..., half : 2 * half], x32[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1).to(x.dtype)


def rotate(x: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    x.copy_(_rotate(x, *cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)))


def rotary_and_cache(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, cos_sin: Tensor, cache: LayerKVCache,
    slot_mapping: Tensor, query_scales: Tensor | None = None, axes: Tensor | None = None,
    index_key: Tensor | None = None,
) -> None:  # fmt: skip
    rows = cos_sin[positions]
    if axes is not None:  # [3, T, R] -> [T, R]
        pairs = torch.cat([axes, axes]).long()
        rows = rows.gather(0, pairs.expand(1, rows.shape[1], -1))[0]
    cos, sin = rows.unsqueeze(1).chunk(2, dim=-1)
    query.copy_(_rotate(query, cos, sin))
    if query_scales is not None:
        query.copy_(query.float() * query_scales[positions][:, None, None])
    block_size = cache.key.shape[1]
    has_slot = slot_mapping >= 0
    block, offset = slot_mapping[has_slot] // block_size, slot_mapping[has_slot] % block_size
    rotated = _rotate(key, cos, sin)
    if index_key is not None:
        rotated = torch.cat([rotated, index_key], -1)
    for i, (part, rows) in enumerate(((cache.key, rotated), (cache.value, value))):
        elements, scales = to_cache(rows[has_slot], part.dtype)
        _bytes_of(part)[block, offset] = _bytes_of(elements)
        if cache.scales is not None:
            cache.scales[block, offset, :, i] = scales.to(cache.scales.dtype)


def _bytes_of(x: Tensor) -> Tensor:
    """Return a view of eight-bit elements as bytes: not every device can index eight-bit floats."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def to_cache(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return rows x [..., D] as the cache holds them, and their scales [...] (see `LayerKVCache`). The scale of a row
    that is not finite is NaN."""
    largest = x.float().abs().amax(-1, keepdim=True)
    if dtype.itemsize > 1:
        return x.to(dtype), largest[..., 0]
    if dtype is torch.int8:
        bits = (largest / 127).view(torch.int32)
        scale = ((bits + 0xFFFF) & -0x10000).view(torch.float32)
    else:
        bits = (largest / torch.finfo(dtype).max).view(torch.int32)
        scale = ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    # Quotients of the smallest numbers are not finite.
    is_zero = largest < 2.0**-100
    scale = torch.where(is_zero, 0.0, torch.where(largest.isfinite(), scale, float("nan")))
    quotients = torch.where(is_zero | ~largest.isfinite(), 0.0, x.float() / scale)
    return (quotients.round() if dtype is torch.int8 else quotients).to(dtype), scale[..., 0]


def paged_attention(
    query: Tensor, cache: LayerKVCache, block_tables: Tensor, query_start_loc: Tensor, seq_lens: Tensor, scale: float,
    sliding_window: int = 0, softcap: float = 0.0, slopes: Tensor | None = None, sinks: Tensor | None = None,
    bidirectional: bool = False, distance_biases: Tensor | None = None, key_ends: Tensor | None = None,
    value_size: int | None = None,
) -> Tensor:  # fmt: skip
    return _attend(
        query, cache, block_tables, query_start_loc, seq_lens, scale, sliding_window, softcap, slopes, sinks,
        bidirectional, distance_biases, key_ends, value_size,
    )  # fmt: skip


def _attend(
    query: Tensor, cache: LayerKVCache, block_tables: Tensor, query_start_loc: Tensor, seq_lens: Tensor, scale: float,
    sliding_window: int = 0, softcap: float = 0.0, slopes: Tensor | None = None, sinks: Tensor | None = None,
    bidirectional: bool = False, distance_biases: Tensor | None = None, key_ends: Tensor | None = None,
    value_size: int | None = None, chosen: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return `paged_attention`; if `chosen` [T, ...] positions of keys are given, over these keys only."""
    num_tokens, num_heads, head_size = query.shape
    assert cache.value.shape[3] == (value_size or head_size)
    group = num_heads // cache.key.shape[2]
    out = query.new_zeros(num_tokens, num_heads, cache.value.shape[3])
    for s, seq_len in enumerate(seq_lens.tolist()):
        start, end = int(query_start_loc[s]), int(query_start_loc[s + 1])
        blocks = block_tables[s, : -(-seq_len // cache.key.shape[1])].long()
        keys, values = (
            _bytes_of(part)[blocks].view(part.dtype).flatten(0, 1)[:seq_len].float().repeat_interleave(group, dim=1)
            for part in (cache.key, cache.value)
        )
        if cache.scales is not None:
            scales = cache.scales[blocks].flatten(0, 1)[:seq_len].float().repeat_interleave(group, dim=1)
            keys, values = keys * scales[..., :1], values * scales[..., 1:]
        scores = torch.einsum("qhd,khd->hqk", query[start:end].float(), keys) * scale
        if softcap > 0:
            scores = softcap * (scores / softcap).tanh()
        positions = torch.arange(seq_len, device=query.device)
        own = torch.arange(seq_len - (end - start), seq_len, device=query.device)
        distance = own[:, None] - positions[None, :]
        if slopes is not None:
            scores = scores - slopes[:, None, None] * distance
        if distance_biases is not None:
            reach = (distance_biases.shape[1] - BIAS_PADDING) // 2
            scores = scores + distance_biases[:, reach - distance]
        hidden = distance < 0 if not bidirectional else torch.zeros_like(distance, dtype=torch.bool)
        if key_ends is not None:
            hidden &= positions[None, :] >= key_ends[start:end, None]
        if chosen is not None:
            hidden |= ~(chosen[start:end, :, None] == positions).any(1)
        if sliding_window > 0:
            hidden |= (distance.abs() if bidirectional else distance) >= sliding_window
        scores.masked_fill_(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, end - start, 1)], -1)
        weights = scores.softmax(-1)[..., :seq_len]
        out[start:end] = torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)
    return out.view(num_tokens, -1)


def latent_attention(
    query: Tensor, rotated: Tensor, cache: LayerKVCache, block_tables: Tensor, query_start_loc: Tensor,
    seq_lens: Tensor, scale: float, chosen: Tensor | None = None,
) -> Tensor:  # fmt: skip
    (num_tokens, num_heads, size), rotated_size = query.shape, rotated.shape[2]
    key, value = cache.key.float(), cache.value.float()
    if cache.scales is not None:
        scales = cache.scales.float()
        key, value = key * scales[..., :1], value * scales[..., 1:]
    key = key[..., :rotated_size]  # the index's keys follow the rotated elements
    joint = LayerKVCache(torch.cat([key, value], -1), torch.cat([key * 0, value], -1))
    both = torch.cat([rotated, query], -1)
    attended = _attend(both, joint, block_tables, query_start_loc, seq_lens, scale, chosen=chosen)
    return attended.view(num_tokens, num_heads, rotated_size + size)[..., rotated_size:]


def choose_keys(
    query: Tensor, weights: Tensor, cache: LayerKVCache, block_tables: Tensor, query_start_loc: Tensor,
    seq_lens: Tensor, num_chosen: int,
) -> Tensor:  # fmt: skip
    num_tokens, _, size = query.shape
    out = torch.full((num_tokens, num_chosen), -1, dtype=torch.int32, device=query.device)
    for s, seq_len in enumerate(seq_lens.tolist()):
        start, end = int(query_start_loc[s]), int(query_start_loc[s + 1])
        blocks = block_tables[s, : -(-seq_len // cache.key.shape[1])].long()
        keys = cache.key[blocks].flatten(0, 2)[:seq_len, -size:].float()
        products = torch.einsum("qhd,kd->qhk", query[start:end].float(), keys).relu()
        scores = torch.einsum("qh,qhk->qk", weights[start:end].float(), products)
        for row in range(start, end):
            num_seen = seq_len - (end - row) + 1
            best = scores[row - start, :num_seen].sort(descending=True, stable=True).indices[:num_chosen]
            out[row, : len(best)] = best.sort().values.int()
    return out


def copy_blocks(pairs: Sequence[tuple[int, int]], caches: Sequence[LayerKVCache]) -> None:
    for source, destination in pairs:
        for cache in caches:
            for part in cache.arrays:
                part[destination] = part[source]


def allocate_kv_cache(
    num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, dtype: str, value_size: int | None = None
) -> LayerKVCache:
    shape, element = (num_blocks, block_size, num_kv_heads), DTYPES[dtype]
    key, value = (torch.empty(*shape, size, dtype=element) for size in (head_size, value_size or head_size))
    scales = torch.empty((*shape, 2), dtype=torch.bfloat16) if element.itemsize == 1 else None
    return LayerKVCache(key, value, scales)
