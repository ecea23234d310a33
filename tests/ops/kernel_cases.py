"""What the kernel tests share: comparing with the reference, comparing bits, building batches over a paged cache."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import settings
from torch import Tensor

from octavo.ops import BIAS_PADDING, LayerKVCache
from tests.ops.tensors import OverTensors, torch_ref

DTYPES = [torch.float32, torch.bfloat16]
BYTES = [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2]  # of caches
MAX_POSITIONS = 2048
# Of activations that have some. xIELU's are those that training starts from.
PARAMETERS = {"xielu": (0.8, 1.3, 0.5, -1e-6), "softcap": (15.0,), "clip": (0.7,)}

# The same cases in every run: a failure in CI is a failure here. Emulations (scripts/test-arm) have fewer.
_MOST = int(os.environ.get("OCTAVO_TEST_EXAMPLES", "25"))
generated = settings(derandomize=True, deadline=None, max_examples=_MOST)
generated_few = settings(derandomize=True, deadline=None, max_examples=min(8, _MOST))


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def sampling_settings(rows: int, width: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def choose(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype)[torch.randint(len(values), (rows,), generator=generator)]

    return {
        "temperature": choose([1e-6, 0.3, 1.0, 2.5, 10.0], torch.float32),
        "top_k": choose([0, 1, 2, 5, 40, width - 1, width, 10**6], torch.int64),
        "top_p": choose([1.0, 1e-6, 0.3, 0.9, 0.999], torch.float32),
        "min_p": choose([0.0, 0.0, 0.05, 0.5, 1.0], torch.float32),
        "uniforms": torch.rand(rows, generator=generator, dtype=torch.float64),
    }


def assert_near(actual: Tensor, expected: Tensor, bfloat16_atol: float = 1e-4) -> None:
    """Equal up to float32 rounding of sums, and to one unit in the last place of bfloat16. In bfloat16 errors may also
    be `bfloat16_atol` times the largest value."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    actual, expected, dtype = actual.float(), expected.float(), actual.dtype
    scale = expected.abs().max().item() if expected.numel() else 0.0
    rtol, atol = (1e-5, 1e-5 * scale) if dtype is torch.float32 else (2**-7, bfloat16_atol * scale)
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    bits = torch.int32 if actual.dtype is torch.float32 else torch.int16
    assert torch.equal(actual.contiguous().view(bits), expected.contiguous().view(bits))


@dataclass(frozen=True)
class Heads:
    kv_heads: int
    ratio: int
    head_size: int
    value_size: int | None = None  # not larger; None: as large

    @property
    def query_heads(self) -> int:
        return self.kv_heads * self.ratio


def split_qkv(qkv: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """[T, (Q + 2G) * D] -> views query [T, Q, D], key [T, G, D], value [T, G, D], or the beginnings of values."""
    q, k, v = qkv.unflatten(1, (-1, heads.head_size)).split([heads.query_heads, heads.kv_heads, heads.kv_heads], 1)
    return q, k, v if heads.value_size is None else v[..., : heads.value_size].contiguous()


def cos_sin(rotary_size: int) -> Tensor:
    angles = torch.outer(torch.arange(MAX_POSITIONS), 10000.0 ** -(torch.arange(0, rotary_size, 2) / rotary_size))
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


@dataclass(frozen=True)
class Sequence:
    """One sequence's projections, from which any backend can fill any cache."""

    qkv: Tensor

    @property
    def length(self) -> int:
        return self.qkv.shape[0]


class PagedBatch:
    """Sequences written into one backend's cache, at blocks drawn by `seed`. Whatever no token was written to holds
    `poison`, and entries of the block table that no key needs are out of range."""

    def __init__(
        self, ops: OverTensors, heads: Heads, dtype: torch.dtype, block_size: int, sequences: list[Sequence],
        seed: int = 0, poison: float = float("nan"), rotary_size: int | None = None,
        cache_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self.ops, self.heads = ops, heads
        counts = [-(-s.length // block_size) for s in sequences]
        spare = 3
        self.cache: LayerKVCache = ops.allocate_kv_cache(
            sum(counts) + spare, block_size, heads.kv_heads, heads.head_size, cache_dtype or dtype, heads.value_size
        )
        for part in self.cache.arrays:
            # Of bytes any, but those that are the scale NaN.
            part.fill_(poison) if part.dtype.itemsize > 1 else part.view(torch.uint8).fill_(255 if poison else 0)
        blocks = torch.randperm(sum(counts) + spare, generator=torch.Generator().manual_seed(seed)).int()
        unused = 0 if ops is torch_ref else 2**30
        self.tables = torch.full((len(sequences), max(counts) + 1), unused, dtype=torch.int32)
        self.queries: list[Tensor] = []
        table_cos_sin = cos_sin(rotary_size or heads.head_size)
        for i, sequence in enumerate(sequences):
            self.tables[i, : counts[i]] = blocks[sum(counts[:i]) : sum(counts[: i + 1])]
            positions = torch.arange(sequence.length)
            slots = self.tables[i].long()[positions // block_size] * block_size + positions % block_size
            query, key, value = split_qkv(sequence.qkv.to(dtype, copy=True), heads)
            ops.rotary_and_cache(query, key, value, positions, table_cos_sin, self.cache, slots)
            self.queries.append(query)

    def attend(self, ranges: list[tuple[int, int, int]], window: int = 0, **settings: Any) -> Tensor:
        """One call over (sequence, first position, end position) -> [T, Q * D]."""
        if self.heads.value_size is not None:
            settings["value_size"] = self.heads.value_size
        query = torch.cat([self.queries[s][begin:end] for s, begin, end in ranges])
        starts = torch.tensor([0] + [end - begin for _, begin, end in ranges]).cumsum(0).int()
        seq_lens = torch.tensor([end for _, _, end in ranges], dtype=torch.int32)
        tables = self.tables[[s for s, _, _ in ranges]]
        out = self.ops.paged_attention(
            query, self.cache, tables, starts, seq_lens, self.heads.head_size**-0.5, sliding_window=window,
            **settings,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out


# What may become of scores, for any number of query heads.
SCORE_SETTINGS = ("softcap", "slopes", "sinks")


def score_settings(names: Collection[str], query_heads: int) -> dict[str, Any]:
    values = {
        "softcap": 0.7,
        "slopes": 2.0 ** -torch.arange(1.0, query_heads + 1),
        "sinks": random(11, query_heads) * 3,
        "distance_biases": random(12, query_heads, 2 * MAX_POSITIONS + BIAS_PADDING),
    }
    return {name: values[name] for name in names}


def reference_batch(
    heads: Heads, dtype: torch.dtype, block_size: int, sequences: list[Sequence], rotary_size: int | None = None,
    cache_dtype: torch.dtype | None = None,
) -> PagedBatch:  # fmt: skip
    # The reference multiplies what it masks by zero, so its unused slots must be finite.
    return PagedBatch(
        torch_ref, heads, dtype, block_size, sequences, poison=0.0, rotary_size=rotary_size, cache_dtype=cache_dtype
    )


def make_sequence(seed: int, length: int, heads: Heads, dtype: torch.dtype) -> Sequence:
    width = (heads.query_heads + 2 * heads.kv_heads) * heads.head_size
    return Sequence(random(seed, length, width, dtype=dtype))
