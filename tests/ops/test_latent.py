"""Latent attention and products by head: against the reference, and bit for bit against themselves."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from octavo import _cpu
from tests.ops.kernel_cases import DTYPES, assert_near, assert_same_bits, cos_sin, generated_few, random
from tests.ops.tensors import OverTensors, cpu, torch_ref


@dataclass(frozen=True)
class Sizes:
    heads: int
    latent: int
    rotated: int


class LatentBatch:
    """Sequences written into a backend's cache, whose unused slots hold `poison`. A sequence is the same wherever it
    lies."""

    def __init__(
        self, ops: OverTensors, sizes: Sizes, dtype: torch.dtype, lengths: list[int], block_size: int = 16,
        poison: float = float("nan"), seed: int = 0,
    ) -> None:  # fmt: skip
        self.ops, self.sizes = ops, sizes
        counts = [-(-length // block_size) for length in lengths]
        self.cache = ops.allocate_kv_cache(sum(counts) + 2, block_size, 1, sizes.rotated, dtype, sizes.latent)
        self.cache.key.fill_(poison)
        self.cache.value.fill_(poison)
        blocks = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(seed)).int()
        unused = 0 if ops is torch_ref else 2**30
        self.tables = torch.full((len(lengths), max(counts) + 1), unused, dtype=torch.int32)
        self.rotated, self.queries = [], []
        for i, length in enumerate(lengths):
            self.tables[i, : counts[i]] = blocks[sum(counts[:i]) : sum(counts[: i + 1])]
            positions = torch.arange(length)
            slots = self.tables[i].long()[positions // block_size] * block_size + positions % block_size
            # Queries are in rows that hold more, as they are in the layer.
            query = random(length, length, sizes.heads, sizes.rotated + 6, dtype=dtype)
            both = random(length + 1, length, sizes.latent + sizes.rotated, dtype=dtype)
            latent, key = both[:, None, : sizes.latent], both[:, None, sizes.latent :]
            ops.rotary_and_cache(query, key, latent, positions, cos_sin(sizes.rotated), self.cache, slots)
            self.rotated.append(query[:, :, : sizes.rotated])
            self.queries.append(random(length + 2, length, sizes.heads, sizes.latent, dtype=dtype))

    def attend(self, ranges: list[tuple[int, int, int]]) -> Tensor:
        query, rotated = (torch.cat([x[s][b:e] for s, b, e in ranges]) for x in (self.queries, self.rotated))
        wide = torch.cat([rotated, rotated], 2)  # of which the first half is asked for
        starts = torch.tensor([0] + [end - begin for _, begin, end in ranges]).cumsum(0).int()
        lengths = torch.tensor([end for _, _, end in ranges], dtype=torch.int32)
        out = self.ops.latent_attention(
            query, wide[:, :, : self.sizes.rotated], self.cache, self.tables[[s for s, _, _ in ranges]], starts,
            lengths, 0.2,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out


@pytest.mark.parametrize("dtype", DTYPES)
@generated_few
@given(
    lengths=st.lists(st.tuples(st.sampled_from([1, 9, 63, 130, 513, 600]), st.integers(1, 40)), min_size=1, max_size=3),
    sizes=st.sampled_from([Sizes(5, 24, 8), Sizes(16, 40, 16), Sizes(3, 512, 64), Sizes(40, 256, 32)]),
    block_size=st.sampled_from([8, 16, 32]),
)
def test_mixed_batches_match_the_reference_whatever_unused_slots_hold(
    isa: str, dtype: torch.dtype, lengths: list[tuple[int, int]], sizes: Sizes, block_size: int
) -> None:
    batch = [(i, max(length - rows, 0), length) for i, (length, rows) in enumerate(lengths)]
    all_lengths = [length for length, _ in lengths]
    native = LatentBatch(cpu, sizes, dtype, all_lengths, block_size)
    reference = LatentBatch(torch_ref, sizes, dtype, all_lengths, block_size, poison=0.0)
    assert_near(native.attend(batch), reference.attend(batch), 2**-9)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_however_it_is_batched_chunked_and_paged(
    isa: str, threads: None, dtype: torch.dtype
) -> None:
    sizes = Sizes(20, 64, 16)
    _cpu.set_threads(1)
    whole = LatentBatch(cpu, sizes, dtype, [700]).attend([(0, 0, 700)])
    for num_threads, block_size, seed in [(2, 16, 2), (3, 8, 3)]:
        _cpu.set_threads(num_threads)
        paged = LatentBatch(cpu, sizes, dtype, [3, 700, 200], block_size, seed=seed)
        for begin, end in [(0, 1), (63, 64), (511, 513), (699, 700)]:
            assert_same_bits(paged.attend([(1, begin, end)]), whole[begin:end])
        mixed = paged.attend([(2, 150, 200), (1, 600, 650), (0, 2, 3), (1, 699, 700)])
        assert_same_bits(mixed[50:100], whole[600:650])
        assert_same_bits(mixed[101:], whole[699:])
    edges = [0, 5, 64, 400, 700]
    assert_same_bits(torch.cat([paged.attend([(1, begin, end)]) for begin, end in pairwise(edges)]), whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "num_in", "num_out"), [(1, 32, 64), (5, 24, 40), (20, 128, 96)])
def test_products_by_head_are_those_of_each_matrix(
    isa: str, threads: None, dtype: torch.dtype, heads: int, num_in: int, num_out: int
) -> None:
    x = random(0, 70, heads, num_in + 8, dtype=dtype)[:, :, 8:]
    matrices = random(1, heads, num_out, num_in, dtype=dtype)
    for num_threads in (1, 3):
        _cpu.set_threads(num_threads)
        packed = [cpu.pack_linear([matrix]) for matrix in matrices]
        stack = cpu.stack_experts(packed, heads)
        found = cpu.linear_by_head(x, stack)
        for head in range(heads):
            assert_same_bits(found[:, head], cpu.linear(x[:, head].contiguous(), packed[head]))
        assert_same_bits(cpu.linear_by_head(x[7:8], stack), found[7:8])
