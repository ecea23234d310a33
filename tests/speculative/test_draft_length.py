"""How many guesses are verified: what they bring against what they cost."""

from __future__ import annotations

import pytest

from octavo.speculative.acceptance_rates import Acceptance, SequenceAcceptance, compare
from octavo.speculative.draft_length import Candidate, choose_counts, choose_draft_count
from octavo.speculative.proposer import Proposal
from octavo.step_cost import StepCostModel, StepWork

# Seconds for each of `StepWork.features`: SmolLM2-135M on two cores (benchmarks/scheduling.py).
COST = StepCostModel((3.3e-3, 0.25e-3, 0.45e-3, 0.48e-3, 0.12e-3, 0.5e-3, 0.8e-6, 0.05e-6))


def decodes(num: int, num_keys: int = 500) -> StepWork:
    work = StepWork()
    for _ in range(num):
        work.add(num_keys, 1, 1)
    return work


def counts(num: int, rate: float, most: int = 16, gain: float = 1.0, prompts: StepWork | None = None) -> list[int]:
    """For `num` sequences that are guessed alike, beside `prompts`."""
    work, prompts = decodes(num), prompts or StepWork()
    if prompts.num_tokens:
        work.add(0, prompts.num_tokens, prompts.num_samples)
    return choose_counts(COST, work, prompts, [Candidate(500, most, rate)] * num, gain)


def test_one_stream_guesses_much_where_guesses_are_right_and_nothing_where_they_are_wrong() -> None:
    assert counts(1, 0.95)[0] >= 7
    assert 1 <= counts(1, 0.6)[0] <= 4
    assert counts(1, 0.1) == [0]
    assert counts(1, 0.95, most=3) == [3]


def test_a_full_step_guesses_nothing_that_is_not_nearly_sure() -> None:
    assert sum(counts(64, 0.5)) == 0
    assert sum(counts(64, 0.7)) == 0
    totals = [sum(counts(num, 0.8)) / num for num in (1, 4, 16, 64)]
    assert totals == sorted(totals, reverse=True), "the more streams, the less each"


def test_a_prompt_beside_them_makes_no_guess_cheap() -> None:
    prompt = StepWork().plus(0, 300, 0)
    assert sum(counts(4, 0.3, prompts=prompt)) == 0


def test_the_likelier_guess_goes_first() -> None:
    candidates = [Candidate(500, 8, 0.2), Candidate(500, 8, 0.97), Candidate(500, 8, 0.3)]
    few, many, some = choose_counts(COST, decodes(3), StepWork(), candidates, 1.0)
    assert many > max(few, some)


def test_a_small_gain_does_not_end_a_time_without_guesses() -> None:
    rates = [rate / 100 for rate in range(100)]
    first = next(rate for rate in rates if counts(1, rate) != [0])
    assert counts(1, first, gain=1.03) == [0]
    assert counts(1, first + 0.15, gain=1.03) != [0]


@pytest.mark.parametrize(("draft_s", "least", "most"), [(0.0, 5, 16), (1e-3, 2, 6), (1.0, 0, 0)])
def test_drafts_that_take_time_are_fewer(draft_s: float, least: int, most: int) -> None:
    found = choose_draft_count(COST, decodes(1), StepWork(), [Candidate(500, 16, 0.85)], draft_s, gain=1.0)
    assert least <= found <= most


def test_a_guess_is_compared_with_the_tokens_that_come() -> None:
    guess = Proposal((1, 2, 3))
    found = [compare(guess, tokens) for tokens in ([1], [1, 2, 3, 4], [9], [1, 9, 3], [1, 2])]
    assert found == [(1, 0), (3, 0), (0, 1), (1, 1), (2, 0)]


def test_a_sequence_is_known_by_its_own_guesses_after_a_few_and_by_all_others_before() -> None:
    every, one = Acceptance(), SequenceAcceptance()
    every.observe(3, 60, 40)
    before = every.rates[3]
    assert one.rate(before) == pytest.approx(before)
    assert 0.5 < before < 0.62
    for _ in range(6):
        one.observe(0, 1, before)
    assert one.rate(before) < 0.25
    for _ in range(4):
        one.observe(8, 0, before)
    assert one.rate(before) > 0.85
    assert one.rate(0.9) > 0.95, "a level that it has not had yet"
    for _ in range(300):
        one.forget()
    assert one.rate(before) == pytest.approx(before, abs=0.01)
