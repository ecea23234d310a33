"""Drawing tokens, against a plain reference that handles one row at a time in float64 (`tests.sampling.rows`)."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.request import pack_tokens
from octavo.sampling.random import uniform
from octavo.sampling.sampling_table import Samples, SamplingTable
from octavo.sampling_params import SamplingParams
from octavo.step_plan import Admission
from tests.sampling.rows import Row, is_right_draw, probabilities, sample, sample_from

INF = float("inf")
NAN = float("nan")


def random_logits(vocab_size: int, seed: int, scale: float = 3.0, is_rounded: bool = False) -> torch.Tensor:
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * scale
    return logits.round() if is_rounded else logits


def drawn_tokens(logits: torch.Tensor, params: SamplingParams, count: int) -> list[int]:
    return sample([Row(logits, params, seed=seed) for seed in range(count)]).tokens


@st.composite
def random_params(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        temperature=draw(st.sampled_from([0.3, 0.7, 1.0, 1.0, 2.5])),
        top_k=draw(st.sampled_from([0, 0, -1, 1, 2, 7, 40, 600, 100_000])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.01, 0.5, 0.9, 0.95, 0.999])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0])),
    )


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    vocab_size=st.sampled_from([1, 2, 37, 600, 3000]),
    is_rounded=st.booleans(),
    scale=st.sampled_from([0.1, 1.0, 5.0]),
    params=st.lists(random_params(), min_size=1, max_size=12),
    seed=st.integers(0, 2**64 - 1),
)
def test_every_combination_of_settings_draws_what_the_reference_draws(
    vocab_size: int, is_rounded: bool, scale: float, params: list[SamplingParams], seed: int
) -> None:
    rows = [
        Row(random_logits(vocab_size, i, scale, is_rounded), one, output=[0] * i, seed=(seed + i) % 2**64, index=i % 3)
        for i, one in enumerate(params)
    ]
    for row, token in zip(rows, sample(rows).tokens, strict=True):
        assert is_right_draw(row, token)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=3.0),
        SamplingParams(top_k=4),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.2),
        SamplingParams(temperature=1.3, top_k=12, top_p=0.9, min_p=0.02),
    ],
    ids=["plain", "cold", "hot", "top_k", "top_p", "min_p", "all"],
)
def test_frequencies_follow_the_distribution(params: SamplingParams) -> None:
    logits = random_logits(20, seed=5, scale=1.5)
    count = 20_000
    # Half of the randomness comes from seeds, half from positions.
    rows = [Row(logits, params, output=[0] * (i % 100), seed=i // 100) for i in range(count)]
    observed = np.bincount(sample(rows).tokens, minlength=20)
    expected = probabilities(logits.numpy(), params) * count
    assert (observed[expected == 0] == 0).all()
    kept = expected > 0
    chi_square = ((observed - expected)[kept] ** 2 / expected[kept]).sum()
    freedom = kept.sum() - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom)


def test_temperature_zero_takes_the_most_likely_token_and_the_lowest_of_equals() -> None:
    logits = random_logits(1000, seed=1, is_rounded=True)
    best = int((logits == logits.max()).nonzero()[0])
    greedy = SamplingParams(temperature=0.0, top_p=0.1, min_p=0.5, top_k=3)
    assert drawn_tokens(logits, greedy, 5) == [best] * 5


def test_greedy_and_random_rows_mix_in_one_batch() -> None:
    rows = [Row(random_logits(100, i), SamplingParams(temperature=float(i % 2)), seed=i) for i in range(10)]
    for i, token in enumerate(sample(rows).tokens):
        if i % 2:
            assert is_right_draw(rows[i], token)
        else:
            assert token == int(rows[i].logits.argmax())


def test_top_k_keeps_tokens_that_tie_with_the_last_one() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 2.0, 2.0, 2.0, -1.0])
    assert set(drawn_tokens(logits, SamplingParams(top_k=2, temperature=5.0), 300)) == {1, 3, 4, 5}


def test_top_k_of_one_is_greedy() -> None:
    logits = random_logits(500, seed=2)
    assert set(drawn_tokens(logits, SamplingParams(top_k=1, temperature=10.0), 50)) == {int(logits.argmax())}


def test_top_p_keeps_the_smallest_set_that_has_enough_mass() -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    assert set(drawn_tokens(logits, SamplingParams(top_p=0.39), 200)) == {1}
    assert set(drawn_tokens(logits, SamplingParams(top_p=0.41), 200)) == {1, 3}
    assert set(drawn_tokens(logits, SamplingParams(top_p=0.71), 200)) == {1, 2, 3}
    assert set(drawn_tokens(logits, SamplingParams(top_p=0.91), 400)) == {0, 1, 2, 3}


@pytest.mark.parametrize("top_k", [0, 1500])
def test_a_nucleus_of_more_than_512_tokens_is_neither_cut_nor_widened(top_k: int) -> None:
    vocab_size = 3000
    logits = torch.linspace(0, 2, vocab_size)[torch.randperm(vocab_size, generator=torch.Generator().manual_seed(0))]
    params = SamplingParams(top_p=0.7, top_k=top_k)
    nucleus = set(np.flatnonzero(probabilities(logits.numpy(), params)).tolist())
    assert 512 < len(nucleus) < 2000
    drawn = set(drawn_tokens(logits, params, 8000))
    inner = set(np.flatnonzero(probabilities(logits.numpy(), params, slack=-0.01)).tolist())
    assert drawn <= nucleus
    assert len(drawn & inner) > 0.9 * len(inner)
    assert min(logits[list(drawn)]) < min(logits[list(nucleus)]) + 0.01, "tokens at its edge are drawn too"


@pytest.mark.parametrize("top_p", [1e-9, 1e-300])
def test_a_tiny_nucleus_is_the_most_likely_token(top_p: float) -> None:
    logits = random_logits(1000, seed=3, scale=0.1)
    assert set(drawn_tokens(logits, SamplingParams(top_p=top_p), 20)) == {int(logits.argmax())}


def test_min_p_is_relative_to_the_most_likely_token() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert set(drawn_tokens(logits, SamplingParams(min_p=0.25), 300)) == {0, 1, 2}
    assert set(drawn_tokens(logits, SamplingParams(min_p=1.0), 100)) == {0}


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-300])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = random_logits(1000, seed=3, scale=50)
    assert set(drawn_tokens(logits, SamplingParams(temperature=temperature), 20)) == {int(logits.argmax())}


@pytest.mark.parametrize("temperature", [1e6, 1e300])
def test_a_huge_temperature_is_uniform_over_what_is_not_masked(temperature: float) -> None:
    logits = random_logits(8, seed=4, scale=10)
    logits[5] = -INF
    tokens = drawn_tokens(logits, SamplingParams(temperature=temperature), 2000)
    assert set(tokens) == {0, 1, 2, 3, 4, 6, 7}
    assert max(tokens.count(t) for t in set(tokens)) < 1.25 * 2000 / 7


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1.0, 1e6])
def test_a_single_unmasked_token_is_always_drawn(temperature: float) -> None:
    logits = torch.full((5000,), -INF)
    logits[4321] = -77.0
    for params in (
        SamplingParams(temperature=temperature),
        SamplingParams(temperature=temperature, top_p=0.5, top_k=50, min_p=0.1),
        SamplingParams(temperature=temperature, top_p=0.999, logprobs=0),
    ):
        assert set(drawn_tokens(logits, params, 20)) == {4321}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", [[-INF] * 4, [NAN] * 4, [1.0, INF, 2.0, 3.0]], ids=str)
def test_a_row_without_a_finite_best_logit_fails_alone(broken: list[float], temperature: float) -> None:
    good = torch.tensor([0.0, 9.0, 1.0, 2.0])
    params = SamplingParams(temperature=temperature, logprobs=2, top_p=0.9)
    found = sample([Row(good, params), Row(torch.tensor(broken), params), Row(good, params, seed=1)])
    assert list(found.errors) == [1]
    assert "no token could be chosen" in found.errors[1]
    assert (found.tokens[0], found.tokens[2]) == (1, 1)
    assert 0 <= found.tokens[1] < 4


def mixed_rows(count: int, vocab_size: int) -> list[Row]:
    """Rows of all kinds: greedy, every threshold, large nuclei, penalties, biases, masks and log-probabilities."""
    rng = random.Random(count * vocab_size)
    rows = []
    for i in range(count):
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.7, 1.0, 1.0, 1.5]),
            top_p=rng.choice([1.0, 0.5, 0.95, 0.999]),
            top_k=rng.choice([0, 0, 5, 50, 700]),
            min_p=rng.choice([0.0, 0.0, 0.05]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
            frequency_penalty=rng.choice([0.0, 0.7]),
            presence_penalty=rng.choice([0.0, -0.4]),
            logit_bias={rng.randrange(vocab_size): 3.5} if rng.random() < 0.2 else None,
            min_tokens=rng.choice([0, 8]),
            logprobs=rng.choice([None, None, 0, 3, 20]),
        )
        output = [rng.randrange(vocab_size) for _ in range(rng.randrange(12))]
        logits = random_logits(vocab_size, i, scale=rng.choice([0.5, 2.0, 4.0]), is_rounded=i % 3 == 0)
        rows.append(Row(logits, params, [3, 4, 3], output, [2], seed=rng.getrandbits(64), index=i % 2))
    return rows


@pytest.fixture(scope="module")
def alone() -> list[tuple[Row, int, object]]:
    """Rows with the token and the log-probabilities that each gets when it is the whole batch."""
    found = [(row, sample([row])) for row in mixed_rows(24, 3000)]
    return [(row, one.tokens[0], one.logprobs[0]) for row, one in found]


@settings(max_examples=60, derandomize=True, deadline=None)
@given(chosen=st.lists(st.integers(0, 23), min_size=1, max_size=30))
def test_a_row_draws_the_same_in_any_company_and_order(alone: list[tuple[Row, int, object]], chosen: list[int]) -> None:
    found = sample([alone[i][0] for i in chosen])
    assert found.errors == {}
    assert found.tokens == [alone[i][1] for i in chosen]
    assert found.logprobs == [alone[i][2] for i in chosen]


def test_a_row_of_a_real_vocabulary_draws_the_same_bits_alone_and_among_64() -> None:
    rows = mixed_rows(64, 49152)
    together = sample(rows)
    for i, row in enumerate(rows):
        single = sample([row])
        assert (single.tokens, single.logprobs) == ([together.tokens[i]], [together.logprobs[i]])


@pytest.mark.parametrize("vocab_size", [49152, 49157, 128_256])
def test_torch_computes_the_logprobs_of_a_row_independently_of_the_batch(vocab_size: int) -> None:
    """The promise of equal log-probabilities rests on this, and torch's documentation does not make it."""
    logits = torch.randn(64, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 4
    logits[7, 100:] = -INF
    for compute in (lambda x: x.log_softmax(-1), lambda x: x.round().topk(20, dim=-1).indices):
        whole = compute(logits)
        for rows in ([0], [7], [63], [5, 6, 7], list(range(63, 30, -1))):
            part = compute(logits[rows])
            assert all(torch.equal(part[i], whole[row]) for i, row in enumerate(rows))


def test_the_first_tokens_of_forks_are_those_that_their_own_rows_would_draw() -> None:
    logits = random_logits(1000, seed=8)
    count = 8
    table = SamplingTable(2)
    table.admit(Admission(1, pack_tokens([3, 4]), 2, [[]], SamplingParams(n=count), [], 9, 0))
    rows = np.full(count, 1, np.int64)
    samples = Samples(rows, np.arange(count), np.full(count, 2, np.int64))
    batch = table.build(samples, np.zeros((2, 4), np.int32))
    drawn, _, _ = sample_from(logits.repeat(count, 1).numpy(), batch)
    assert drawn.tolist() == [sample([Row(logits, seed=9, index=index)]).tokens[0] for index in range(count)]
    assert len(set(drawn.tolist())) > count // 2


def uniforms(seeds: object, indices: object, positions: object) -> np.ndarray:
    return uniform(*(np.atleast_1d(np.array(x, np.uint64)) for x in np.broadcast_arrays(seeds, indices, positions)))


def test_uniform_numbers_depend_on_each_counter_and_on_nothing_else() -> None:
    counters = list(itertools.product((0, 1, 2**63, 2**64 - 1), (0, 1, 127), (0, 1, 4095)))
    together = uniforms(*(np.array([c[i] for c in counters], np.uint64) for i in range(3)))
    assert len(set(together.tolist())) == len(counters)
    for counter, value in zip(counters, together.tolist(), strict=True):
        assert uniforms(*counter).tolist() == [value]


@pytest.mark.parametrize("varied", ["seed", "index", "position"])
def test_uniform_numbers_are_uniform_and_uncorrelated_along_each_counter(varied: str) -> None:
    count = np.arange(100_000)
    values = uniforms(*(count if name == varied else 5 for name in ("seed", "index", "position")))
    assert ((values >= 0) & (values < 1)).all()
    bins = np.bincount((values * 256).astype(int), minlength=256)
    assert ((bins - 100_000 / 256) ** 2 / (100_000 / 256)).sum() < 255 + 4 * np.sqrt(2 * 255)
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.015
