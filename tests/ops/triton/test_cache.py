"""The GPU backend's cache: what a step writes into it against the reference, and copies of blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.errors import ConfigError
from octavo.ops import LayerKVCache
from octavo.ops.torch_ops import gather_blocks, scatter_blocks
from octavo.ops.triton.cache import allocate_kv_cache, copy_blocks, rotary_and_cache, rotate
from tests.ops.tensors import dtype_name, torch_ref
from tests.ops.triton.conftest import DEVICE

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
BYTES = [torch.int8, *FP8]


@pytest.mark.parametrize(
    ("heads", "rotary_size", "dtype", "cache_dtype"),
    [
        ((1, 1, 64), 64, torch.float32, torch.float32),
        ((9, 3, 64), 32, torch.float32, torch.float32),
        ((9, 3, 64), 0, torch.float32, torch.float32),
        ((8, 2, 96), 0, torch.bfloat16, FP8[0]),
        ((32, 2, 80), 20, torch.float16, torch.float16),
        ((8, 4, 256), 256, torch.bfloat16, torch.bfloat16),
        ((8, 2, 128), 128, torch.float16, FP8[0]),
        ((8, 2, 96), 96, torch.float32, FP8[1]),
        ((8, 2, 96), 64, torch.float32, torch.int8),
    ],
)
def test_rotated_rows_and_the_cache_match_the_reference(
    heads: tuple[int, int, int], rotary_size: int, dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    num_heads, num_kv_heads, head_size = heads
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(6, num_heads + 2 * num_kv_heads, head_size, generator=generator).to(dtype).to(DEVICE)
    positions = torch.tensor([0, 7, 63, 8, 1, 2**40], device=DEVICE)  # the last is a padded token's
    slots = torch.tensor([5, 31, 16, 0, 47, -1], device=DEVICE)
    angles = torch.randn(64, rotary_size // 2, generator=generator).to(DEVICE)
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
    results = []
    for module, rows in ((rotary_and_cache, slice(None)), (torch_ref.rotary_and_cache, slice(0, 5))):
        query, key, value = qkv.clone().split([num_heads, num_kv_heads, num_kv_heads], 1)
        cache = allocate_kv_cache(3, 16, num_kv_heads, head_size, dtype_name(cache_dtype))
        for part in cache.arrays:
            part.view(torch.uint8).zero_()
        module(query[rows], key[rows], value[rows], positions[rows], cos_sin, cache, slots[rows])
        results.append([query[:5].float(), *(part.float() for part in cache.arrays)])
    (query, *written), (expected_query, *expected) = results
    # The interpreter cuts bfloat16 off; a GPU rounds a * cos - b * sin once less, perhaps to float8's next number.
    tolerance = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(query, expected_query, rtol=tolerance, atol=tolerance)
    tolerance = {FP8[0]: 2**-3, FP8[1]: 2**-2, torch.int8: 2**-6}.get(cache_dtype, tolerance)
    for actual, wanted in zip(written, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=tolerance, atol=tolerance)
    if DEVICE.type == "cpu" and cache_dtype in BYTES:
        assert torch.equal(written[1], expected[1]) and torch.equal(written[2][..., 1], expected[2][..., 1])


@pytest.mark.parametrize("rotary_size", [64, 24])
def test_queries_are_rotated_alone_and_scaled_by_position(rotary_size: int) -> None:
    qkv, angles = torch.randn(5, 5, 64).to(DEVICE), torch.randn(32, rotary_size // 2).to(DEVICE)
    positions, cos_sin = torch.tensor([0, 7, 31, 8, 1], device=DEVICE), torch.cat([angles.cos(), angles.sin()], 1)
    scales, slots = torch.rand(32, device=DEVICE) + 0.5, torch.full((5,), -1, device=DEVICE)
    found, expected, scaled, expected_scaled = (qkv.clone() for _ in range(4))
    rotate(found[:, :3], positions, cos_sin)
    torch_ref.rotate(expected[:, :3], positions, cos_sin)
    cache = allocate_kv_cache(1, 16, 1, 64, "float32")
    for module, x in ((rotary_and_cache, scaled), (torch_ref.rotary_and_cache, expected_scaled)):
        module(x[:, :3], x[:, 3:4], x[:, 4:], positions, cos_sin, cache, slots, scales)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(scaled, expected_scaled, rtol=1e-6, atol=1e-6)


def test_each_pair_is_rotated_by_the_position_of_its_axis() -> None:
    qkv, angles = torch.randn(4, 5, 64).to(DEVICE), torch.randn(32, 8).to(DEVICE)
    axes = torch.tensor([0, 1, 2, 2, 1, 0, 0, 2], dtype=torch.int32, device=DEVICE)
    positions = torch.tensor([[5, 31, 0, 2**40], [5, 2, 30, 2**40], [5, 1, 3, 2**40]], device=DEVICE)
    slots, cos_sin = torch.tensor([3, 0, 9, -1], device=DEVICE), torch.cat([angles.cos(), angles.sin()], 1)
    results = []
    for module, count in ((rotary_and_cache, 4), (torch_ref.rotary_and_cache, 3)):
        query, key, value = qkv[:count].clone().split([3, 1, 1], 1)
        cache = allocate_kv_cache(1, 16, 1, 64, "float32")
        for part in cache.arrays:
            part.zero_()
        module(query, key, value, positions[:, :count], cos_sin, cache, slots[:count], axes=axes)
        results.append([query[:3], *cache.arrays])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    for pair, axis in enumerate(axes.tolist()):
        alone = qkv[:3].clone()
        rotate(alone[:, :3], positions[axis, :3].contiguous(), cos_sin)
        assert torch.equal(alone[:, :3, [pair, pair + 8]], results[0][0][..., [pair, pair + 8]])


@pytest.mark.parametrize("dtype", FP8)
def test_float8_is_rounded_as_torch_rounds_it(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    numbers = codes[codes.isfinite()].sort().values
    between = (numbers[1:] + numbers[:-1]) / 2
    x = torch.cat([numbers, between, between * (1 + 2**-20), between * (1 - 2**-20), numbers * 3, numbers / 3])
    largest = torch.finfo(dtype).max
    x = x.clamp(-largest, largest)
    # The largest of each row makes its scale 1.
    x = torch.nn.functional.pad(x, (0, -len(x) % 63)).view(-1, 1, 63)
    x = torch.nn.functional.pad(x, (0, 1), value=largest).to(DEVICE)
    cache = allocate_kv_cache(len(x), 8, 1, 64, dtype_name(dtype))
    zeros, slots = torch.zeros(len(x), dtype=torch.int64, device=DEVICE), torch.arange(len(x), device=DEVICE)
    cos_sin = torch.tensor([[1.0, 0.0]], device=DEVICE)
    rotary_and_cache(x.clone(), x, x, zeros, cos_sin, cache, slots)
    written = cache.value.view(torch.uint8).view(-1, 64)[: len(x)]
    expected = x.view(-1, 64).to(dtype).view(torch.uint8)
    assert torch.equal(written, expected)


def caches(num_layers: int, num_blocks: int, seed: int) -> list[LayerKVCache]:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_blocks, 8, 3, 48)  # more than a program copies at a time, and not a multiple of it
    return [
        LayerKVCache(*(torch.randn(shape, generator=generator).to(DEVICE) for _ in range(2))) for _ in range(num_layers)
    ]


@pytest.mark.parametrize(
    "pairs",
    [
        [(0, 5)],
        [(0, 3), (1, 4), (2, 5)],
        [(0, 3), (4, 0)],  # read before it is overwritten
        [(0, 3), (3, 4)],  # read after it was written
        [(0, 3), (1, 3), (3, 2), (5, 1)],
    ],
)
def test_blocks_are_copied_as_if_one_after_the_other(pairs: list[tuple[int, int]]) -> None:
    actual, expected = ([*caches(2, 6, 0), *caches(1, 6, 1)] for _ in range(2))
    actual[2], expected[2] = (LayerKVCache(of[2].key[:, :4].contiguous(), of[2].value) for of in (actual, expected))
    copy_blocks(pairs, actual)
    for layer in expected:
        for tensor in (layer.key, layer.value):
            for source, destination in pairs:
                tensor[destination] = tensor[source]
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a.key, e.key) and torch.equal(a.value, e.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *FP8])
def test_gathered_blocks_are_scattered_to_where_they_are_wanted(dtype: torch.dtype) -> None:
    original = [LayerKVCache(layer.key.to(dtype), layer.value.to(dtype)) for layer in caches(2, 6, 0)]
    staged = gather_blocks(np.array([4, 1]), original)
    assert staged.dtype is torch.uint8 and staged.shape == (2, 4 * original[0].key[0].nbytes)
    other = [LayerKVCache(torch.zeros_like(layer.key), torch.zeros_like(layer.value)) for layer in original]
    scatter_blocks(staged, np.array([0, 5]), other)
    for before, after in zip(original, other, strict=True):
        for source, found in ((before.key, after.key), (before.value, after.value)):
            source, found = source.view(torch.uint8), found.view(torch.uint8)
            assert torch.equal(found[[0, 5]], source[[4, 1]])
            assert not found[1:5].any()


def test_impossible_caches_are_refused() -> None:
    with pytest.raises(TypeError, match="int4"):
        allocate_kv_cache(4, 16, 1, 64, "int4")
    with pytest.raises(ConfigError, match="block size 12"):
        allocate_kv_cache(4, 12, 1, 64, "float16")
    with pytest.raises(ConfigError, match="head size 72"):
        allocate_kv_cache(4, 16, 1, 72, "float16")
