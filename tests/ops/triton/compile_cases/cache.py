"""What a step writes into the cache, and copies of its blocks."""

from __future__ import annotations

from functools import partial

import torch

from octavo.ops.triton.cache import allocate_kv_cache, copy_blocks, rotary_and_cache
from octavo.ops.triton.cache import rotate as in_place
from tests.ops.tensors import dtype_name
from tests.ops.triton.compiling import Case


def rotate(cache_dtype: torch.dtype, rotary_size: int = 128) -> None:
    qkv = torch.empty(64, 48, 128, dtype=torch.bfloat16)
    cache = allocate_kv_cache(8, 16, 8, 128, dtype_name(cache_dtype))
    numbers = torch.zeros(64, dtype=torch.int64)
    rotary_and_cache(qkv[:, :32], qkv[:, 32:40], qkv[:, 40:], numbers, torch.empty(8192, rotary_size), cache, numbers)


def rotate_by_axes() -> None:
    qkv, cache = torch.empty(64, 48, 128, dtype=torch.bfloat16), allocate_kv_cache(8, 16, 8, 128, "bfloat16")
    positions, slots = torch.zeros(3, 64, dtype=torch.int64), torch.zeros(64, dtype=torch.int64)
    table, axes = torch.empty(8192, 128), torch.zeros(64, dtype=torch.int32)
    rotary_and_cache(qkv[:, :32], qkv[:, 32:40], qkv[:, 40:], positions, table, cache, slots, axes=axes)


def rotate_alone() -> None:
    qkv, numbers = torch.empty(64, 48, 128, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.int64)
    table, scales, cache = torch.empty(8192, 64), torch.empty(8192), allocate_kv_cache(8, 16, 8, 128, "bfloat16")
    in_place(qkv[:, :40], numbers, table)
    rotary_and_cache(qkv[:, :32], qkv[:, 32:40], qkv[:, 40:], numbers, table, cache, numbers, scales)


def rotate_with_index() -> None:
    """As DeepSeek V3.2: what is rotated lies beside the latent, keys of the index are by themselves."""
    both, query = torch.empty(64, 576, dtype=torch.bfloat16), torch.empty(64, 128, 192, dtype=torch.bfloat16)
    cache = allocate_kv_cache(8, 16, 1, 192, "bfloat16", 512)
    key, index_key = (torch.empty(64, 1, size, dtype=torch.bfloat16) for size in (64, 128))
    numbers, table = torch.zeros(64, dtype=torch.int64), torch.empty(8192, 64)
    rotary_and_cache(query, key, both[:, None, :512], numbers, table, cache, numbers, index_key=index_key)


def copy() -> None:
    copy_blocks([(0, 1)], [allocate_kv_cache(8, 16, 8, 128, "bfloat16")])


CASES = {
    "rotary": Case(partial(rotate, torch.bfloat16)),
    "rotary_in_part": Case(partial(rotate, torch.bfloat16, 32)),
    "rotary_fp8": Case(partial(rotate, torch.float8_e4m3fn)),
    "rotary_int8": Case(partial(rotate, torch.int8)),
    "rotary_by_axes": Case(rotate_by_axes),
    "rotary_alone_and_scaled": Case(rotate_alone),
    "rotary_with_index": Case(rotate_with_index),
    "copy_blocks": Case(copy),
}
