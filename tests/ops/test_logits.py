"""What changes logits and measures them, on the native backend and in the reference, against plain definitions."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.ops import LayerKVCache, cpu, cpu_logits
from octavo.ops.torch_arrays import to_torch
from tests.ops import torch_ref
from tests.ops.kernel_cases import generated
from tests.ops.tensors import to_numpy

KERNELS = "others"  # of an instruction set that are tested here: conftest.py

BACKENDS = [cpu, torch_ref]
ROWS, VOCAB = 5, 700


def placed(ops: ModuleType, array: np.ndarray) -> Any:
    return array.copy() if ops is cpu else to_torch(array.copy())


def on_host(x: Any) -> np.ndarray:
    return to_numpy(x) if isinstance(x, torch.Tensor) else x


def logits_of(seed: int, rows: int = ROWS, vocab: int = VOCAB) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, vocab), np.float32) * 4


@pytest.mark.parametrize("ops", BACKENDS)
@generated
@given(vocab=st.integers(1, 200), missing=st.integers(0, 2), seed=st.integers(0, 99))
def test_masks_take_out_the_tokens_whose_bit_is_zero(ops: ModuleType, vocab: int, missing: int, seed: int) -> None:
    rng, num_words = np.random.default_rng(seed), max(1, -(-vocab // 32) - missing)
    words = rng.choice(np.array([0, 2**32 - 1, 0x80000001, 0x7FFF1234], np.uint32), (3, num_words)).view(np.int32)
    samples = np.array([4, 0, 2])
    before = logits_of(seed, ROWS, vocab)
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").astype(bool)
    allowed = np.zeros((3, vocab), bool)
    allowed[:, : min(vocab, bits.shape[1])] = bits[:, :vocab]
    expected = before.copy()
    expected[samples] = np.where(allowed, before[samples], -np.inf)
    logits = placed(ops, before)
    ops.mask_tokens(logits, words, samples)
    assert np.array_equal(on_host(logits), expected)


def test_masks_of_samples_that_do_not_exist_are_refused() -> None:
    with pytest.raises(IndexError, match="sample 5 at index 1"):
        cpu.mask_tokens(logits_of(0), np.zeros((2, 22), np.int32), np.array([0, 5]))


@pytest.mark.parametrize("ops", BACKENDS)
def test_biases_are_added(ops: ModuleType) -> None:
    logits, expected = placed(ops, logits_of(1)), logits_of(1)
    values = np.array([2.5, -np.inf, -1.0], np.float32)
    ops.add_bias(logits, np.array([0, 0, 3]), np.array([5, 6, 5]), values)
    expected[[0, 0, 3], [5, 6, 5]] += values
    assert np.array_equal(on_host(logits), expected)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@pytest.mark.parametrize("ops", BACKENDS)
@generated
@given(
    vocab=st.one_of(st.integers(1, 40), st.integers(500, 700)),
    count=st.integers(0, 45),
    has_ties=st.booleans(),
    has_masked=st.booleans(),
    seed=st.integers(0, 99),
)
def test_log_probabilities_ranks_and_the_likeliest_equal_a_sort_of_each_row(
    ops: ModuleType, vocab: int, count: int, has_ties: bool, has_masked: bool, seed: int
) -> None:
    rng, logits = np.random.default_rng(seed), logits_of(seed, ROWS, vocab)
    logits = np.round(logits) if has_ties else logits
    if has_masked:
        logits[:, rng.permutation(vocab)[1:5]] = -np.inf
    tokens = rng.integers(-1, vocab, ROWS)
    given = placed(ops, logits)
    values, ranks, ids, top = found = [on_host(x) for x in ops.logprobs(given, placed(ops, tokens), count)]
    assert [x.dtype.name for x in found] == ["float32", "int64", "int64", "float32"]
    assert np.array_equal(on_host(given), logits)
    exact, rows = log_softmax(logits), np.arange(ROWS)
    chosen = np.maximum(tokens, 0)
    np.testing.assert_allclose(values, exact[rows, chosen], rtol=3e-7, atol=1e-6)
    assert np.array_equal(ranks, (logits > logits[rows, chosen][:, None]).sum(1) + 1)
    assert np.array_equal(ids, np.argsort(-logits, 1, kind="stable")[:, :count])
    np.testing.assert_allclose(top, np.take_along_axis(exact, ids, 1), rtol=3e-7, atol=1e-6)


def test_every_instruction_set_measures_rows(isa: str) -> None:
    logits, tokens = logits_of(7, 3, 4_001), np.array([4_000, 0, 17])
    values, ranks, ids, _ = cpu.logprobs(logits, tokens, 21)
    exact = log_softmax(logits)
    np.testing.assert_allclose(values, exact[np.arange(3), tokens], rtol=3e-7, atol=1e-6)
    assert np.array_equal(ranks, (exact > exact[np.arange(3), tokens][:, None]).sum(1) + 1)
    assert np.array_equal(ids, np.argsort(-logits, 1)[:, :21])


def test_ranks_of_tokens_that_do_not_exist_are_refused() -> None:
    with pytest.raises(IndexError, match="token id 700 at index 1"):
        cpu.logprobs(logits_of(0, 2), np.array([0, VOCAB]), 1)


@pytest.mark.parametrize("ops", BACKENDS)
def test_log_probabilities_of_given_tokens_have_the_bits_of_chosen_ones(ops: ModuleType) -> None:
    rng, logits = np.random.default_rng(3), logits_of(3)
    samples, tokens = np.array([3, 0, 3]), rng.integers(0, VOCAB, (3, 7))
    found = on_host(ops.logprobs_of(placed(ops, logits), samples, tokens))
    assert found.shape == (3, 7) and found.dtype == np.float32
    for k in range(7):
        rows = placed(ops, np.ascontiguousarray(logits[samples]))
        chosen = on_host(ops.logprobs(rows, placed(ops, np.ascontiguousarray(tokens[:, k])), 0)[0])
        assert np.array_equal(found[:, k], chosen)


@pytest.mark.parametrize("ops", BACKENDS)
def test_rows_are_normalized_ranked_copied_and_processed(ops: ModuleType) -> None:
    logits, samples = placed(ops, logits_of(3)), np.array([3, 1])
    ops.normalize(logits, samples, np.array([2.0, 1.0]))
    expected = logits_of(3)
    exact = log_softmax(expected[samples] / np.array([[2.0], [1.0]], np.float32))
    normalized = on_host(logits)
    np.testing.assert_allclose(normalized[samples], exact, rtol=3e-7, atol=1e-6)
    expected[samples] = normalized[samples]
    assert np.array_equal(normalized, expected)
    ids, values = (on_host(x) for x in ops.top_tokens(logits, samples, 6))
    assert np.array_equal(ids, np.argsort(-expected[samples], 1)[:, :6])
    assert np.array_equal(values, np.take_along_axis(expected[samples], ids, 1))
    copied = ops.rows_of(logits, samples)
    assert not ops.process_row(logits, 1, lambda row: row * 2)
    assert np.array_equal(on_host(copied), expected[samples])
    assert np.array_equal(on_host(logits)[1], expected[1] * 2)
    assert ops.process_row(logits, 0, lambda row: row * float("nan"))


def test_callers_get_torch_tensors_where_torch_is_installed_and_numpys_arrays_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits, seen = logits_of(4), []
    for is_installed in (True, False):
        monkeypatch.setattr(cpu_logits, "_torch_is_installed", lambda answer=is_installed: answer)
        cpu_logits.process_row(logits, 2, lambda row: seen.append(type(row)) or row + 1)
    assert seen == [torch.Tensor, np.ndarray]
    assert np.array_equal(logits[2], logits_of(4)[2] + 1 + 1)


@pytest.mark.parametrize("ops", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_are_copied_gathered_and_scattered(ops: ModuleType, dtype: str) -> None:
    def filled() -> list[LayerKVCache]:
        caches = [ops.allocate_kv_cache(6, 8, 2, 40, dtype) for _ in range(2)]
        for i, part in enumerate(part for cache in caches for part in (cache.key, cache.value)):
            for block in range(6):
                part[block] = 10 * i + block
        return caches

    def blocks(caches: list[LayerKVCache]) -> list[list[float]]:
        return [[float(p[b].reshape(-1)[0]) - 10 * i for b in range(6)]
                for i, p in enumerate(p for c in caches for p in (c.key, c.value))]  # fmt: skip

    caches = filled()
    ops.copy_blocks([(0, 3), (3, 1)], caches)
    assert blocks(caches) == [[0, 0, 2, 0, 4, 5]] * 4
    staged = ops.gather_blocks(np.array([5, 2]), filled())
    assert staged.shape == (2, sum(on_host(p)[0].nbytes for c in caches for p in (c.key, c.value)))
    ops.scatter_blocks(staged, np.array([0, 4]), caches)
    assert blocks(caches) == [[5, 0, 2, 0, 2, 5]] * 4


def test_the_reference_resolves_steps_and_keeps_tokens() -> None:
    tables = torch.zeros(4, 3, dtype=torch.int32)
    ints = {"dtype": torch.int32}
    last = torch.tensor([70, 71, 72, 0], **ints)
    tokens, rows = torch_ref.resolve_step(
        tables, torch.tensor([4, 0]), torch.tensor([8, 9], **ints), last, torch.tensor([2, 3, 0]),
        torch.tensor([5, 6, 7], **ints), torch.tensor([1, 3]),
    )  # fmt: skip
    assert tokens.tolist() == [72, 6, 70]
    assert rows.tolist() == [[0, 8, 0], [0, 0, 0]]
    torch_ref.keep_tokens(last, torch.tensor([1, 0]), torch.tensor([-1, 33]))
    assert last.tolist() == [33, 0, 72, 0]
