"""The index that chooses keys in Triton, and latent attention to those: against the reference, against the definition,
and bit for bit against themselves."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.ops import cuda
from octavo.ops.triton import choose_keys, mla_attention
from tests.ops.index_cases import IndexedBatch, Sizes, assert_the_best_are_chosen
from tests.ops.kernel_cases import assert_near, assert_same_bits
from tests.ops.tensors import OverTensors, torch_ref
from tests.ops.triton.conftest import DEVICE

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(DEVICE.type != "cpu", reason="batches are made in the host's memory"),
]
triton = OverTensors(cuda, takes_numpy=False)
SMALL = Sizes(5, 32, 16, 7, 16)
LENGTHS = [1, 9, 40, 200]
BATCH = [(0, 0, 1), (1, 0, 9), (3, 190, 200), (2, 38, 40)]


@pytest.mark.parametrize(
    ("sizes", "num_chosen", "dtype"),
    [
        (SMALL, 8, torch.float32), (Sizes(3, 512, 64, 64, 128), 96, torch.float16),
        (Sizes(20, 48, 8, 1, 24), 33, torch.float32),
    ],
)  # fmt: skip
def test_mixed_batches_match_the_reference_whatever_unused_slots_hold(
    sizes: Sizes, num_chosen: int, dtype: torch.dtype
) -> None:
    batch = IndexedBatch(triton, sizes, dtype, LENGTHS)
    reference = IndexedBatch(torch_ref, sizes, dtype, LENGTHS, poison=0.0)
    chosen, found = batch.run(BATCH, num_chosen)
    expected, attended = reference.run(BATCH, num_chosen)
    # Sums in another order may exchange keys whose scores are all but equal.
    same = (chosen == expected).all(1)
    assert same.float().mean() > 0.9
    assert_near(found[same], attended[same], 2**-9)


@pytest.mark.parametrize(("num_chosen", "begin"), [(1, 297), (40, 296), (130, 297), (130, 128), (512, 298)])
def test_chosen_are_the_best_and_of_equals_the_first(
    num_chosen: int, begin: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose_keys, "_TILE", 64)
    assert_the_best_are_chosen(triton, begin, num_chosen, Sizes(1, 16, 8, 3, 8), 300)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_row_has_the_same_bits_however_it_is_batched_chunked_and_paged(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is computed in other parts, beside fewer rows. The interpreter sums products of these types as
    tensor cores do."""
    length, num_chosen = 80, 24

    def both(batch: IndexedBatch, ranges: list[tuple[int, int, int]]) -> Tensor:
        chosen, attended = batch.run(ranges, num_chosen)
        return torch.cat([chosen.float(), attended.float().flatten(1)], 1)

    whole = both(IndexedBatch(triton, SMALL, dtype, [length], num_keys=30), [(0, 0, length)])
    monkeypatch.setattr(choose_keys, "_TILE", 32)
    monkeypatch.setattr(choose_keys, "_SCRATCH_BYTES", 4 * 88 * 7)  # seven rows at a time
    paged = IndexedBatch(triton, SMALL, dtype, [3, length, 40], 8, seed=2, num_keys=30)
    for begin, end in [(0, 1), (23, 25), (length - 1, length)]:
        assert_same_bits(both(paged, [(1, begin, end)]), whole[begin:end])
    mixed = both(paged, [(2, 35, 40), (1, 60, 65), (0, 2, 3), (1, length - 1, length)])
    assert_same_bits(mixed[5:10], whole[60:65])
    assert_same_bits(mixed[11:], whole[length - 1 :])
    chunks = [both(paged, [(1, begin, end)]) for begin, end in pairwise([0, 5, 32, length])]
    assert_same_bits(torch.cat(chunks), whole)


def test_attention_to_all_keys_has_the_bits_of_attention_that_chooses_none_and_padding_is_nothing() -> None:
    n = 50
    batch = IndexedBatch(triton, SMALL, torch.float32, [n])
    query, rotated, both = (torch.cat([x, x[:2]]) for x in batch.inputs[0])  # two tokens of no sequence
    where = batch.tables, torch.tensor([0, n]).int(), torch.tensor([n]).int()
    index_query = both[:, : 7 * 16].reshape(n + 2, 7, 16)
    chosen = triton.choose_keys(index_query, both[:, 7 * 16 :], batch.cache, *where, n)
    everything = torch.arange(n).int().expand(n, -1).tril() - torch.ones(n, n).int().triu(1)
    assert torch.equal(chosen, torch.cat([everything, torch.full((2, n), -1).int()]))
    attended = batch.attend(query, rotated, where, chosen)
    assert_same_bits(attended, mla_attention.latent_attention(query, rotated, batch.cache, *where, 0.2))
    assert not attended[n:].any()


def test_more_heads_than_a_program_has_room_for_are_refused() -> None:
    with pytest.raises(ConfigError, match="an index of 129 heads is not built for GPUs: 128 are the most"):
        IndexedBatch(triton, Sizes(1, 16, 8, 129, 8), torch.float32, [1]).run([(0, 0, 1)], 4)
