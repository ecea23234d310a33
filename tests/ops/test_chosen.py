"""The index that chooses keys, and latent attention to those: against the reference, against the definition, and bit
for bit against themselves."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from octavo import _cpu
from octavo.errors import ConfigError
from tests.ops.index_cases import IndexedBatch, Sizes, assert_the_best_are_chosen
from tests.ops.kernel_cases import DTYPES, assert_near, assert_same_bits
from tests.ops.tensors import cpu, torch_ref

KERNELS = "others"  # of an instruction set that are tested here: conftest.py

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
    assert_the_best_are_chosen(cpu, begin, num_chosen, Sizes(1, 16, 8, 3, 2))


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
