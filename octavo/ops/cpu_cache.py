"""The native backend's cache of keys and values: its layout, and copies of whole blocks."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import octavo._cpu as _cpu
from octavo.errors import ConfigError
from octavo.ops import LayerKVCache
from octavo.ops.cpu_arrays import CACHE_CODES, CODES, DTYPES, FLOAT32, UINT8, code_of
from octavo.ops.cpu_memory import empty_pages, get_first_page
from octavo.ops.cpu_program import check_runs_now


def allocate_kv_cache(
    num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, dtype: str, value_size: int | None = None
) -> LayerKVCache:
    """Return an uninitialised cache of the native layout. Raises `ConfigError` or `TypeError` for unsupported settings.

    Keys are [block, kv_head, D / step, block_size, step]: the lanes of a score vector are different keys. `step` is 1
    in float32, 2 in bfloat16 and 4 for one-byte elements. Values are [block, kv_head, block_size / step, D rounded up
    to 16, step]. With one-byte elements, keys have one more step: for each token the scale of its key and of its value,
    as two bfloat16."""
    element = DTYPES.get(dtype)
    has_scales = element in CACHE_CODES
    if element is None or not (has_scales or element in CODES):
        raise TypeError(f"the KV cache holds float32, bfloat16, int8, float8_e4m3fn or float8_e5m2, not {dtype}.")
    if block_size not in (8, 16, 32):
        raise ConfigError(f"block size {block_size} is not supported by the CPU kernels; use 8, 16 or 32.")
    value_size = value_size or head_size
    if has_scales and value_size != head_size:
        raise ConfigError(
            f"--kv-cache-dtype {dtype} is not built yet for keys and values of different sizes on CPUs; use auto."
        )
    for size in (head_size, value_size):
        if not 0 < size <= _cpu.MAX_HEAD_SIZE or size % 2:
            raise ConfigError(f"head size {size} is not supported; it must be even and at most {_cpu.MAX_HEAD_SIZE}.")
    if has_scales and head_size % 4:
        raise ConfigError(f"head size {head_size} is not supported with --kv-cache-dtype {dtype}: 4 must divide it.")
    padded = -(-value_size // _cpu.VALUE_PAD) * _cpu.VALUE_PAD
    step = 4 if has_scales else 1 if element == FLOAT32 else 2
    shapes = (
        (num_blocks, num_kv_heads, head_size // step + has_scales, block_size, step),
        (num_blocks, num_kv_heads, block_size // step, padded, step),
    )
    key, value = (empty_pages(math.prod(shape) * element.itemsize) for shape in shapes)
    get_first_page(key)
    get_first_page(value)
    return LayerKVCache(key.view(element).reshape(shapes[0]), value.view(element).reshape(shapes[1]))


def keys_of(cache: LayerKVCache, blocks: Sequence[int], heads: Sequence[int]) -> NDArray[np.float32]:
    """Return the keys of `heads` in `blocks`, the blocks one after the other: [heads, blocks * block_size, D]."""
    check_runs_now("keys_of")
    found = cache.key[np.asarray(blocks)[None], np.asarray(heads)[:, None]]  # [heads, blocks, D / step, tokens, step]
    num_heads, num_blocks, num_steps, block_size, step = found.shape
    scales = None
    if found.dtype in CACHE_CODES:
        pairs = np.ascontiguousarray(found[:, :, -1]).view(np.uint16)  # for each token: the scales of key and value
        scales = (pairs[..., :1].astype(np.uint32) << 16).view(np.float32)
        found, num_steps = found[:, :, :-1], num_steps - 1
        if found.dtype != np.int8:
            found = found[..., [0, 2, 1, 3]]  # in the cache, even elements of a step come first, as kernels unpack them
    is_int8 = found.dtype == np.int8
    values = found.view(UINT8).astype(np.float32) - 128 if is_int8 else found.astype(np.float32)
    keys = values.transpose(0, 1, 3, 2, 4).reshape(num_heads, num_blocks, block_size, num_steps * step)
    if scales is not None:
        keys = keys * scales
    return np.asarray(keys.reshape(num_heads, num_blocks * block_size, -1), np.float32)


def key_size_of(cache: LayerKVCache) -> int:
    """Return the number of elements of a token's key in a head of the cache."""
    _, _, steps, _, width = cache.key.shape
    return int(steps - (cache.key.dtype in CACHE_CODES)) * int(width)  # without the step that holds scales


def cache_code(op: str, cache: LayerKVCache, *arrays: NDArray[Any]) -> int:
    """Return the kernels' code of the cache's elements: a one-byte type, or the type of the step's `arrays`."""
    code = CACHE_CODES.get(cache.key.dtype)
    return code_of(op, *arrays, cache.key, cache.value) if code is None else code


def _pieces(caches: Sequence[LayerKVCache]) -> list[NDArray[np.uint8]]:
    """Return the bytes of all layers' keys and values, [blocks, bytes of a block] each."""
    return [part.view(UINT8).reshape(len(part), -1) for cache in caches for part in cache.arrays]


def copy_blocks(pairs: Sequence[tuple[int, int]], caches: Sequence[LayerKVCache]) -> None:
    check_runs_now("copy_blocks")
    for piece in _pieces(caches):
        for source, destination in pairs:
            piece[destination] = piece[source]


def gather_blocks(blocks: NDArray[Any], caches: Sequence[LayerKVCache]) -> NDArray[Any]:
    check_runs_now("gather_blocks")
    pieces = _pieces(caches)
    staged = np.empty((len(blocks), sum(piece.shape[1] for piece in pieces)), UINT8)
    begin = 0
    for piece in pieces:
        np.take(piece, blocks, 0, staged[:, begin : begin + piece.shape[1]])
        begin += piece.shape[1]
    return staged


def scatter_blocks(staged: NDArray[Any], blocks: NDArray[Any], caches: Sequence[LayerKVCache]) -> None:
    check_runs_now("scatter_blocks")
    begin = 0
    for piece in _pieces(caches):
        piece[blocks] = staged[:, begin : begin + piece.shape[1]]
        begin += piece.shape[1]
