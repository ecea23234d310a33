"""The native backend's cache of keys and values: its layout, and copies of whole blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import octavo._cpu as _cpu
from octavo.errors import ConfigError
from octavo.ops import LayerKVCache
from octavo.ops.cpu_arrays import CODES, DTYPES, FLOAT32, UINT8
from octavo.ops.cpu_memory import empty_pages
from octavo.ops.cpu_program import check_runs_now


def allocate_kv_cache(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, dtype: str) -> LayerKVCache:
    """Keys lie as [block, kv_head, D / step, block_size, step] so that keys are the lanes of a score vector; `step` is
    1 in float32 and 2 in bfloat16. Values lie as [block, kv_head, block_size / step, D rounded up to 16, step]."""
    element = DTYPES.get(dtype)
    if element not in CODES:
        raise TypeError(f"the KV cache holds float32 or bfloat16, not {dtype}.")
    if block_size not in (8, 16, 32):
        raise ConfigError(f"block size {block_size} is not supported by the CPU kernels; use 8, 16 or 32.")
    if not 0 < head_size <= _cpu.MAX_HEAD_SIZE or head_size % 2:
        raise ConfigError(f"head size {head_size} is not supported; it must be even and at most {_cpu.MAX_HEAD_SIZE}.")
    padded = -(-head_size // _cpu.VALUE_PAD) * _cpu.VALUE_PAD
    step = 1 if element == FLOAT32 else 2
    shapes = (
        (num_blocks, num_kv_heads, head_size // step, block_size, step),
        (num_blocks, num_kv_heads, block_size // step, padded, step),
    )
    key, value = (empty_pages(math.prod(shape) * element.itemsize).view(element).reshape(shape) for shape in shapes)
    return LayerKVCache(key, value)


def _pieces(caches: Sequence[LayerKVCache]) -> list[NDArray[np.uint8]]:
    """The bytes of all layers' keys and values, [blocks, bytes of a block] each. A state has no values."""
    parts = [part for cache in caches for part in (cache.key, cache.value) if part.nbytes]
    return [part.view(UINT8).reshape(len(part), -1) for part in parts]


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
