"""The index that chooses keys, and latent attention to those: against the reference, against the definition, and bit
for bit against themselves."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo import _cpu
from octavo.errors import ConfigError
from tests.ops.kernel_cases import DTYPES, assert_near, assert_same_bits, cos_sin, random
from tests.ops.tensors import OverTensors, cpu, torch_ref


@dataclass(frozen=True)
class Sizes:
    heads: int = 5
    latent: int = 40
    rotated: int = 8
    index_heads: int = 7
    index: int = 16


class IndexedBatch:
    """Sequences written into a backend's cache, whose unused slots hold `poison`. A sequence is the same wherever it
    lies."""

    def __init__(
        self, ops: OverTensors, sizes: Sizes, dtype: torch.dtype, lengths: list[int], block_size: int = 16,
        poison: float = float("nan"), seed: int = 0, num_keys: int = 10**6,
    ) -> None:  # fmt: skip
        self.ops, self.sizes = ops, sizes
        counts = [-(-length // block_size) for length in lengths]
        self.cache = ops.allocate_kv_cache(
            sum(counts) + 2, block_size, 1, sizes.rotated + sizes.index, dtype, sizes.latent
        )
        self.cache.key.fill_(poison)
        self.cache.value.fill_(poison)
        blocks = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(seed)).int()
        unused = 0 if ops is torch_ref else 2**30
        self.tables = torch.full((len(lengths), max(counts) + 1), unused, dtype=torch.int32)
        self.inputs = []
        for i, n in enumerate(lengths):
            self.tables[i, : counts[i]] = blocks[sum(counts[:i]) : sum(counts[: i + 1])]
            positions = torch.arange(n)
            slots = self.tables[i].long()[positions // block_size] * block_size + positions % block_size
            key, latent, index_key = (
                random(n + k, n, 1, size, dtype=dtype)
                for k, size in enumerate((sizes.rotated, sizes.latent, sizes.index))
            )
            index_key = index_key[positions % num_keys]  # every key comes again after so many
            rotated = random(n + 3, n, sizes.heads, sizes.rotated, dtype=dtype)
            ops.rotary_and_cache(
                rotated, key, latent, positions, cos_sin(sizes.rotated), self.cache, slots, index_key=index_key
            )
            query = random(n + 4, n, sizes.heads, sizes.latent, dtype=dtype)
            # Of the index, side by side as they are in the layer.
            both = random(n + 5, n, sizes.index_heads * (sizes.index + 1), dtype=dtype)
            self.inputs.append((query, rotated, both))

    def run(self, ranges: list[tuple[int, int, int]], num_chosen: int) -> tuple[Tensor, Tensor]:
        """-> what was chosen, and attention to that"""
        query, rotated, both = (torch.cat([self.inputs[s][k][b:e] for s, b, e in ranges]) for k in range(3))
        size = self.sizes.index_heads * self.sizes.index
        starts = torch.tensor([0] + [end - begin for _, begin, end in ranges]).cumsum(0).int()
        lengths = torch.tensor([end for _, _, end in ranges], dtype=torch.int32)
        where = self.tables[[s for s, _, _ in ranges]], starts, lengths
        index_query = both[:, :size].reshape(len(both), self.sizes.index_heads, self.sizes.index)
        chosen = self.ops.choose_keys(index_query, both[:, size:], self.cache, *where, num_chosen)
        return chosen, self.attend(query, rotated, where, chosen)

    def attend(self, query: Tensor, rotated: Tensor, where: tuple[Tensor, ...], chosen: Tensor) -> Tensor:
        out = self.ops.latent_attention(query, rotated, self.cache, *where, 0.2, chosen=chosen)
        assert isinstance(out, Tensor)
        return out


LENGTHS = [1, 9, 63, 130, 700]
BATCH = [(0, 0, 1), (1, 0, 9), (2, 60, 63), (4, 650, 700), (3, 129, 130)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("sizes", "num_chosen"),
    [(Sizes(), 8), (Sizes(3, 512, 64, 64, 128), 96), (Sizes(40, 256, 32, 1, 24), 65), (Sizes(16, 24, 16, 13, 2), 3)],
)
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_mixed_batches_match_the_reference_whatever_unused_slots_hold(
    isa: str, dtype: torch.dtype, sizes: Sizes, num_chosen: int, block_size: int
) -> None:
    native = IndexedBatch(cpu, sizes, dtype, LENGTHS, block_size)
    reference = IndexedBatch(torch_ref, sizes, dtype, LENGTHS, block_size, poison=0.0)
    chosen, found = native.run(BATCH, num_chosen)
    expected, attended = reference.run(BATCH, num_chosen)
    # Sums in another order may exchange keys whose scores are all but equal.
    same = (chosen == expected).all(1)
    assert same.float().mean() > 0.9
    assert_near(found[same], attended[same], 2**-9)


@pytest.mark.parametrize("num_chosen", [1, 8, 64, 100, 4096])
@pytest.mark.parametrize("begin", [900, 1497])  # of few rows the keys are shared out
def test_chosen_are_the_best_and_of_equals_the_first(isa: str, begin: int, num_chosen: int) -> None:
    """Sums of small integers are exact, and most scores are those of other keys too."""
    sizes, n = Sizes(1, 16, 8, 3, 2), 1500
    batch = IndexedBatch(cpu, sizes, torch.float32, [n])
    generator = np.random.default_rng(0)
    keys, query = (generator.integers(-3, 4, shape).astype(np.float32) for shape in ((n, 1, 2), (n, 3, 2)))
    weights = generator.integers(-2, 3, (n, 3)).astype(np.float32)
    slots = batch.tables[0].long()[torch.arange(n) // 16] * 16 + torch.arange(n) % 16
    row = torch.zeros(n, 1, 16)
    cpu.rotary_and_cache(
        row[:, :, :8].clone(), row[:, :, :8].clone(), row, torch.arange(n), cos_sin(8), batch.cache, slots,
        index_key=torch.from_numpy(keys),
    )  # fmt: skip
    starts, lengths = torch.tensor([0, n - begin]).int(), torch.tensor([n]).int()
    chosen = cpu.choose_keys(
        torch.from_numpy(query[begin:]), torch.from_numpy(weights[begin:]), batch.cache, batch.tables, starts, lengths,
        num_chosen,
    )  # fmt: skip
    products = np.maximum(np.einsum("tid,kd->tik", query[begin:], keys[:, 0]), 0)
    scores = np.einsum("ti,tik->tk", weights[begin:], products)
    for i, found in enumerate(chosen.numpy()):
        seen = begin + i + 1
        best = np.sort(np.argsort(-scores[i, :seen], kind="stable")[:num_chosen])
        np.testing.assert_array_equal(found, np.pad(best, (0, num_chosen - len(best)), constant_values=-1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_however_it_is_batched_chunked_and_paged(
    isa: str, threads: None, dtype: torch.dtype
) -> None:
    sizes, length, num_chosen = Sizes(20, 64, 16), 900, 600

    def both(batch: IndexedBatch, ranges: list[tuple[int, int, int]]) -> Tensor:
        chosen, attended = batch.run(ranges, num_chosen)
        return torch.cat([chosen.float(), attended.float().flatten(1)], 1)

    _cpu.set_threads(1)
    whole = both(IndexedBatch(cpu, sizes, dtype, [length], num_keys=150), [(0, 0, length)])
    for num_threads, block_size, seed in [(2, 16, 2), (3, 8, 3)]:
        _cpu.set_threads(num_threads)
        paged = IndexedBatch(cpu, sizes, dtype, [3, length, 200], block_size, seed=seed, num_keys=150)
        for begin, end in [(0, 1), (63, 64), (599, 602), (length - 1, length)]:
            assert_same_bits(both(paged, [(1, begin, end)]), whole[begin:end])
        mixed = both(paged, [(2, 150, 200), (1, 700, 750), (0, 2, 3), (1, length - 1, length)])
        assert_same_bits(mixed[50:100], whole[700:750])
        assert_same_bits(mixed[101:], whole[length - 1 :])
        edges = [0, 5, 64, 500, length]
        chunks = [both(paged, [(1, begin, end)]) for begin, end in pairwise(edges)]
        assert_same_bits(torch.cat(chunks), whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_to_all_keys_has_the_bits_of_attention_that_chooses_none(isa: str, dtype: torch.dtype) -> None:
    batch = IndexedBatch(cpu, Sizes(20, 64, 16), dtype, [700])
    query, rotated, _ = batch.inputs[0]
    where = batch.tables, torch.tensor([0, 700]).int(), torch.tensor([700]).int()
    chosen = torch.arange(700).int().expand(700, -1).tril() - torch.ones(700, 700).int().triu(1)
    everything = cpu.latent_attention(query, rotated, batch.cache, *where, 0.2)
    assert_same_bits(batch.attend(query, rotated, where, chosen.contiguous()), everything)


def test_more_chosen_keys_than_there_is_room_for_are_refused() -> None:
    batch = IndexedBatch(cpu, Sizes(), torch.float32, [9])
    with pytest.raises(ConfigError, match="chooses 4097 keys is not built: 4096 are the most"):
        batch.run([(0, 0, 9)], 4097)
