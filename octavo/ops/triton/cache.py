"""The cache of keys and values: its memory, the writes of a step, and copies of whole blocks.

Keys and values are [num_blocks, block_size, kv_heads, head_size]. One-byte elements have scales in an array of their
own, [num_blocks, block_size, kv_heads, 2] bfloat16: the key's scale, then the value's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.errors import ConfigError
from octavo.ops import LayerKVCache
from octavo.ops.torch_arrays import DTYPES, upload
from octavo.ops.triton import launch

_ELEMENTS_PER_PROGRAM = 1024  # elements of the heads that a program rotates
_COPY_WORDS = 2048  # number of 8-byte words that a program copies at a time


def allocate_kv_cache(
    num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, dtype: str, value_size: int | None = None
) -> LayerKVCache:
    """`Ops.allocate_kv_cache`."""
    if dtype not in ("float32", "float16", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2"):
        raise TypeError(
            f"the KV cache holds float32, float16, bfloat16, int8, float8_e4m3fn or float8_e5m2, not {dtype}."
        )
    if block_size not in (8, 16, 32, 64, 128, 256):
        raise ConfigError(
            f"block size {block_size} is not supported by the GPU kernels; use 8, 16, 32, 64, 128 or 256."
        )
    value_size = value_size or head_size
    for size, most in ((head_size, 256), (value_size, 256 if value_size == head_size else 512)):
        if not 16 <= size <= most or size % 16:
            raise ConfigError(f"head size {size} is not supported; it must be a multiple of 16, at most {most}.")
    shape = (num_blocks, block_size, num_kv_heads)
    element, device = DTYPES[dtype], launch.device()
    key, value = (torch.empty(*shape, size, dtype=element, device=device) for size in (head_size, value_size))
    if element.itemsize > 1:
        return LayerKVCache(key, value)
    return LayerKVCache(key, value, torch.empty((*shape, 2), dtype=torch.bfloat16, device=device))


@triton.jit
def _to_float8(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr):
    """Return x as bytes of an eight-bit float, clamped to its range, rounded to nearest even. Some GPUs have no
    instruction for this."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = tl.minimum(tl.abs(x), LARGEST)
    shift: tl.constexpr = 23 - MANTISSA
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + ((1 << (shift - 1)) - 1) + ((bits >> shift) & 1)) >> shift) - ((127 - BIAS) << MANTISSA)
    # Adding 2^23 rounds multiples of the smallest number to integers, which are then in the low bits.
    least = size * (2.0 ** (BIAS - 1 + MANTISSA)) + 8388608.0
    subnormal = least.to(tl.int32, bitcast=True) - 0x4B000000
    code = tl.where(size < 2.0 ** (1 - BIAS), subnormal, normal)
    code = tl.where(x == x, code, 0x7F)
    return (sign | code).to(tl.uint8)


@triton.jit
def _largest(x):
    """Return the largest magnitude of each row; infinity if the row has a NaN."""
    return tl.max(tl.where(x == x, tl.abs(x), float("inf")), 1)


@triton.jit
def _scale(largest, KIND: tl.constexpr):
    """Return the scales of rows (`LayerKVCache`): exact in bfloat16, 0 for rows of zeros."""
    if KIND == 0:
        return largest
    else:
        if KIND == 8:
            bits = ((largest / 127.0).to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000
        else:
            greatest: tl.constexpr = 448.0 if KIND == 3 else 57344.0
            bits = ((largest / greatest).to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scale = tl.where(largest < 2.0**-100, 0.0, bits.to(tl.float32, bitcast=True))
        return tl.where(largest < float("inf"), scale, float("nan"))


@triton.jit
def _cached(x, scale, pointer, KIND: tl.constexpr):
    """Return rows x [.., ..] float32 as the cache holds them. KIND is 0 for the step's float type, 8 for int8, or the
    number of mantissa bits of an eight-bit float."""
    if KIND == 0:
        return x.to(pointer.dtype.element_ty)
    else:
        quotient = tl.where((scale > 0)[:, None], x / tl.where(scale > 0, scale, 1.0)[:, None], 0.0)
        if KIND == 8:
            # 1.5 * 2^23: adding it rounds to an integer.
            return ((quotient + 12582912.0) - 12582912.0).to(tl.int8)
        elif KIND == 3:
            return _to_float8(quotient, 3, 7, 448.0)
        else:
            return _to_float8(quotient, 2, 15, 57344.0)


@triton.jit(
    do_not_specialize=["axis_stride", "max_positions"], do_not_specialize_on_alignment=["positions", "slot_mapping"]
)
def _rotary_and_cache_kernel(
    query, key, value, index_key, positions, cos_sin, key_cache, value_cache, cache_scales, slot_mapping, query_scales,
    axes, query_stride, key_stride, value_stride, index_stride, axis_stride, max_positions,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, KEY_D: tl.constexpr, VALUE_D: tl.constexpr,
    INDEX_D: tl.constexpr, R: tl.constexpr, HALF_P2: tl.constexpr, REST_P2: tl.constexpr, VALUE_P2: tl.constexpr,
    INDEX_P2: tl.constexpr, HEADS_PER_PROGRAM: tl.constexpr, KIND: tl.constexpr, SCALED: tl.constexpr,
    AXES: tl.constexpr,
):  # fmt: skip
    """Programs (token, heads): the first of a token's programs rotate its query, the others write to the cache."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    QUERY_PARTS: tl.constexpr = (HEADS + HEADS_PER_PROGRAM - 1) // HEADS_PER_PROGRAM
    slot = tl.load(slot_mapping + token)
    position = tl.load(positions + token)
    h = tl.arange(0, HEADS_PER_PROGRAM)
    r = tl.arange(0, HALF_P2)
    at = position + r * 0  # a padded token may have any position
    if AXES:
        axis = tl.load(axes + r, mask=r < R // 2, other=0)
        at = tl.load(positions + axis * axis_stride + token)
    is_pair = (r < R // 2) & (at >= 0) & (at < max_positions)
    cos = tl.load(cos_sin + at * R + r, mask=is_pair, other=0.0)[None, :]
    sin = tl.load(cos_sin + at * R + R // 2 + r, mask=is_pair, other=0.0)[None, :]
    if part < QUERY_PARTS:
        head = part * HEADS_PER_PROGRAM + h
        mask = (head < HEADS)[:, None] & (r < R // 2)[None, :]
        first = query + token * query_stride + head[:, None] * D + r[None, :]
        a = tl.load(first, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(first + R // 2, mask=mask, other=0.0).to(tl.float32)
        turned_a, turned_b = a * cos - b * sin, b * cos + a * sin
        if SCALED:
            is_position = (position >= 0) & (position < max_positions)
            scale = tl.load(query_scales + position, mask=is_position, other=0.0)
            turned_a, turned_b = turned_a * scale, turned_b * scale
            if R < D:
                rest = R + tl.arange(0, REST_P2)
                others = query + token * query_stride + head[:, None] * D + rest[None, :]
                is_other = (head < HEADS)[:, None] & (rest < D)[None, :]
                tl.store(others, tl.load(others, mask=is_other, other=0.0).to(tl.float32) * scale, mask=is_other)
        tl.store(first, turned_a, mask=mask)
        tl.store(first + R // 2, turned_b, mask=mask)
    elif slot >= 0:
        head = (part - QUERY_PARTS) * HEADS_PER_PROGRAM + h
        mask = (head < KV_HEADS)[:, None] & (r < R // 2)[None, :]
        first = key + token * key_stride + head[:, None] * KEY_D + r[None, :]
        a = tl.load(first, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(first + R // 2, mask=mask, other=0.0).to(tl.float32)
        turned_a, turned_b = a * cos - b * sin, b * cos + a * sin
        rest = R + tl.arange(0, REST_P2)
        is_rest = (head < KV_HEADS)[:, None] & (rest < KEY_D)[None, :]
        others = turned_a
        largest = tl.maximum(_largest(turned_a), _largest(turned_b))
        if R < KEY_D:
            others = tl.load(key + token * key_stride + head[:, None] * KEY_D + rest[None, :], mask=is_rest, other=0.0)
            others = others.to(tl.float32)
            largest = tl.maximum(largest, _largest(others))
        key_scale = _scale(largest, KIND)
        cached = key_cache + (slot * KV_HEADS + head)[:, None] * (KEY_D + INDEX_D) + r[None, :]
        tl.store(cached, _cached(turned_a, key_scale, key_cache, KIND), mask=mask)
        tl.store(cached + R // 2, _cached(turned_b, key_scale, key_cache, KIND), mask=mask)
        if R < KEY_D:
            cached = key_cache + (slot * KV_HEADS + head)[:, None] * (KEY_D + INDEX_D) + rest[None, :]
            tl.store(cached, _cached(others, key_scale, key_cache, KIND), mask=is_rest)
        if INDEX_D > 0:  # there is only one head
            i = tl.arange(0, INDEX_P2)
            x = tl.load(index_key + token * index_stride + i, mask=i < INDEX_D, other=0.0)
            tl.store(key_cache + slot * (KEY_D + INDEX_D) + KEY_D + i, x, mask=i < INDEX_D)
        d = tl.arange(0, VALUE_P2)
        mask = (head < KV_HEADS)[:, None] & (d < VALUE_D)[None, :]
        x = tl.load(value + token * value_stride + head[:, None] * VALUE_D + d[None, :], mask=mask, other=0.0)
        x = x.to(tl.float32)
        value_scale = _scale(_largest(x), KIND)
        cached = value_cache + (slot * KV_HEADS + head)[:, None] * VALUE_D + d[None, :]
        tl.store(cached, _cached(x, value_scale, value_cache, KIND), mask=mask)
        if KIND > 0:
            pair = cache_scales + (slot * KV_HEADS + head) * 2
            tl.store(pair, key_scale.to(tl.bfloat16), mask=head < KV_HEADS)
            tl.store(pair + 1, value_scale.to(tl.bfloat16), mask=head < KV_HEADS)


def rotate(x: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """`Ops.rotate`: the part of `rotary_and_cache` that rotates queries."""
    num_tokens, num_heads, head_size = x.shape
    rotary_size = cos_sin.shape[1]
    assert x.stride()[1:] == (head_size, 1), "the heads of a token must be contiguous"
    assert rotary_size <= head_size and rotary_size % 2 == 0
    assert positions.dtype is torch.int64 and positions.is_contiguous()
    assert cos_sin.dtype is torch.float32 and cos_sin.is_contiguous()
    if num_tokens == 0:
        return
    padded = triton.next_power_of_2(head_size)
    heads = min(_ELEMENTS_PER_PROGRAM // padded, triton.next_power_of_2(num_heads))
    _rotary_and_cache_kernel[(num_tokens, triton.cdiv(num_heads, heads))](
        x, x, x, x, positions, cos_sin, x, x, x, positions, cos_sin, cos_sin, x.stride(0), 0, 0, 0, 0, len(cos_sin),
        HEADS=num_heads, KV_HEADS=1, D=head_size, KEY_D=head_size, VALUE_D=head_size, INDEX_D=0, R=rotary_size,
        HALF_P2=triton.next_power_of_2(max(rotary_size // 2, 1)), REST_P2=1, VALUE_P2=padded, INDEX_P2=1,
        HEADS_PER_PROGRAM=heads, KIND=0, SCALED=False, AXES=False, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


_KINDS = {torch.int8: 8, torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}


def rotary_and_cache(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, cos_sin: Tensor, cache: LayerKVCache,
    slot_mapping: Tensor, query_scales: Tensor | None = None, axes: Tensor | None = None,
    index_key: Tensor | None = None,
) -> None:  # fmt: skip
    """`IndexOps.rotary_and_cache`. `key` is not changed. Tokens whose slot is -1 write nothing to the cache, whatever
    their position."""
    num_tokens, num_heads, head_size = query.shape
    index_size = 0 if index_key is None else index_key.shape[2]
    num_kv_heads, key_size, value_size = *key.shape[1:], value.shape[2]
    rotary_size = cos_sin.shape[1]
    for x in (query, key, value):
        assert x.shape[0] == num_tokens and x.dtype is query.dtype
        assert x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2]), "heads of a token are contiguous"
    assert value.shape[1] == num_kv_heads
    assert cache.key.shape[2:] == (num_kv_heads, key_size + index_size)
    assert cache.value.shape[2:] == (num_kv_heads, value_size)
    assert cache.key.is_contiguous() and cache.value.is_contiguous()
    if index_key is not None:
        assert index_key.shape[:2] == (num_tokens, 1) and num_kv_heads == 1 and cache.scales is None
        assert index_key.dtype is query.dtype and index_key.stride(2) == 1
    assert rotary_size <= min(head_size, key_size) and rotary_size % 2 == 0
    assert positions.dtype is slot_mapping.dtype is torch.int64
    assert positions.stride(-1) == 1 and slot_mapping.is_contiguous()
    assert cos_sin.dtype is torch.float32 and cos_sin.is_contiguous()
    if axes is not None:
        assert query_scales is None and positions.shape == (3, num_tokens)
        assert axes.shape == (rotary_size // 2,) and axes.dtype is torch.int32 and axes.is_contiguous()
    if num_tokens == 0:
        return
    key_cache, value_cache = cache.key, cache.value
    kind = _KINDS.get(key_cache.dtype, 0)
    if kind and key_cache.dtype.is_floating_point:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    padded = triton.next_power_of_2(max(head_size, key_size, value_size))
    heads = min(_ELEMENTS_PER_PROGRAM // padded, triton.next_power_of_2(max(num_heads, num_kv_heads)))
    grid = (num_tokens, triton.cdiv(num_heads, heads) + triton.cdiv(num_kv_heads, heads))
    _rotary_and_cache_kernel[grid](
        query, key, value, key if index_key is None else index_key, positions, cos_sin, key_cache, value_cache,
        cache.scales if kind else key_cache, slot_mapping, cos_sin if query_scales is None else query_scales,
        cos_sin if axes is None else axes, query.stride(0), key.stride(0), value.stride(0),
        0 if index_key is None else index_key.stride(0), 0 if axes is None else positions.stride(0), len(cos_sin),
        HEADS=num_heads, KV_HEADS=num_kv_heads, D=head_size, KEY_D=key_size, VALUE_D=value_size, INDEX_D=index_size,
        R=rotary_size, HALF_P2=triton.next_power_of_2(max(rotary_size // 2, 1)),
        REST_P2=triton.next_power_of_2(max(key_size - rotary_size, 1)), VALUE_P2=triton.next_power_of_2(value_size),
        INDEX_P2=triton.next_power_of_2(max(index_size, 1)), HEADS_PER_PROGRAM=heads, KIND=kind,
        SCALED=query_scales is not None, AXES=axes is not None, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_pairs", "num_caches", "num_words"])
def _copy_kernel(addresses, pairs, num_pairs, num_caches, num_words, WORDS: tl.constexpr):
    """Copy blocks of `num_words` 8-byte words by `pairs` [num_pairs, 2] in the tensors at `addresses` [num_caches]."""
    parts = (num_words + WORDS - 1) // WORDS
    w = tl.arange(0, WORDS)
    for piece in range(tl.program_id(0), num_pairs * num_caches * parts, tl.num_programs(0)):
        cache = piece // parts % num_caches
        pair = pairs + piece // parts // num_caches * 2
        word = piece % parts * WORDS + w
        blocks = tl.load(addresses + cache).to(tl.pointer_type(tl.int64))
        mask = word < num_words
        words = tl.load(blocks + tl.load(pair) * num_words + word, mask=mask)
        tl.store(blocks + tl.load(pair + 1) * num_words + word, words, mask=mask)


def copy_blocks(pairs: Sequence[tuple[int, int]], caches: Sequence[LayerKVCache]) -> None:
    """`DeviceOps.copy_blocks`. One launch copies all layers with blocks of equal size: a copy-on-write is a few blocks,
    and a launch for each layer would make it a hundred times as expensive. Scales and a draft model's layers, whose
    blocks have other sizes, get launches of their own."""
    parts = [part for cache in caches for part in cache.arrays]
    for num_bytes in {part[0].nbytes: None for part in parts}:
        _copy_parts(pairs, [part for part in parts if part[0].nbytes == num_bytes], num_bytes)


def _copy_parts(pairs: Sequence[tuple[int, int]], tensors: Sequence[Tensor], num_bytes: int) -> None:
    """Copy blocks in tensors whose blocks have `num_bytes` each."""
    device = tensors[0].device
    num_words, rest = divmod(num_bytes, 8)
    assert rest == 0 and all(tensor.is_contiguous() for tensor in tensors)
    addresses = upload(torch.tensor([tensor.data_ptr() for tensor in tensors]), device)
    for batch in _independent(pairs):
        blocks = upload(torch.tensor(batch), device)
        pieces = len(batch) * len(tensors) * triton.cdiv(num_words, _COPY_WORDS)
        _copy_kernel[(min(pieces, 8 * launch.num_multiprocessors(device)),)](
            addresses, blocks, len(batch), len(tensors), num_words, WORDS=_COPY_WORDS, num_warps=8,
            enable_fp_fusion=False,
        )  # fmt: skip


def _independent(pairs: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Yield runs of pairs whose copies may happen in any order; usually there is one run."""
    run: list[tuple[int, int]] = []
    read: set[int] = set()
    written: set[int] = set()
    for source, destination in pairs:
        if source in written or destination in read or destination in written:
            yield run
            run, read, written = [], set(), set()
        run.append((source, destination))
        read.add(source)
        written.add(destination)
    if run:
        yield run
