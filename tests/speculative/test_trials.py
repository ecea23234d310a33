"""A drafter's guesses are known only if it makes them: how often it is tried where they have been wrong."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from octavo.request import EngineRequest, Prompt
from octavo.sampling_params import SamplingParams
from octavo.sequence import Sequence
from octavo.speculative.proposer import ToBeDrafted
from octavo.speculative.speculation import Speculation
from octavo.step_cost import StepCostModel
from octavo.step_plan import DRAFT_PLACEHOLDER, PlannedRow

COST = StepCostModel((40e-3, 1e-3, 1e-3, 1e-3, 1e-4, 0, 0, 0))
MOST, A_GUESS_S = 4, 5e-3


def guessed_steps(
    is_right: Callable[[int], bool], num_tokens: int, can_guess: Callable[[int], bool] = lambda _: True
) -> tuple[list[int], int]:
    """Of one sequence that gets `num_tokens`: the numbers of its steps that had guesses, and how many steps it took.
    `is_right` says of each token's place whether it would be guessed, `can_guess` of the number of times that guesses
    were wanted whether the drafter had caught up by then."""
    speculation = Speculation(ToBeDrafted(100_000), MOST, COST)
    request = EngineRequest("a", Prompt([1]), SamplingParams(), [], num_tokens + MOST + 2, 0.0)
    seq = Sequence(request, (0.0, 0), 0)
    speculation.accept(seq, [0], None)
    place, step, found = 0, 0, []
    while place < num_tokens:
        (draft_tokens,) = speculation.choose([(seq, MOST)], [PlannedRow(0, 10, 1, 1)])
        assert all(guess == DRAFT_PLACEHOLDER for guess in draft_tokens)
        rows = [PlannedRow(0, 10, 1 + len(draft_tokens), 1 + len(draft_tokens), 1, draft_tokens)]
        speculation.note_planned(rows)
        # The token of a place is its number; a wrong guess is none of them.
        drafts = tuple(place + i if is_right(place + i) else -7 for i in range(len(draft_tokens)))
        if not can_guess(len(found)):
            drafts = ()
        right = next((i for i, token in enumerate(drafts) if token < 0), len(drafts))
        if draft_tokens:
            found.append(step)
            lags = not can_guess(len(found) - 2)
            speculation.note_drafted(rows, {0: drafts}, len(drafts) * A_GUESS_S * (20 if lags else 1), lags)
        speculation.accept(seq, [place + i for i in range(right + 1)], drafts if draft_tokens else None)
        place, step = place + right + 1, step + 1
    return found, step


@pytest.mark.parametrize("num_wrong", [3, 20, 60])
def test_a_bad_beginning_is_made_good_in_about_as_many_tokens(num_wrong: int) -> None:
    found, num_steps = guessed_steps(lambda place: place >= num_wrong, num_wrong + 600)
    without = [step for step in range(num_steps) if step not in found]
    assert without[-1] < 3 * num_wrong + 16
    assert num_steps < 3 * num_wrong + 16 + 600 / (MOST + 1) + 10


def test_guesses_that_are_never_right_are_tried_in_fewer_than_two_steps_of_a_hundred() -> None:
    found, num_steps = guessed_steps(lambda _: False, 4000)
    assert num_steps == 4000
    assert len(found) < 80
    assert max(after - before for before, after in itertools.pairwise(found)) <= 130
    assert sum(step > 400 for step in found) <= 72


def beside_a_prediction(speculation: Speculation) -> list[tuple[int, ...]]:
    """Return the draft tokens of two sequences: one without a prediction, and one with."""
    seqs = []
    for i, prediction in enumerate(([], [5, 6, 7, 8])):
        request = EngineRequest(f"r{i}", Prompt([1]), SamplingParams(), [], 100, 0.0, prediction=prediction)
        seqs.append(Sequence(request, (0.0, i), 0))
        speculation.accept(seqs[-1], [0], None)
    return speculation.choose([(seq, MOST) for seq in seqs], [PlannedRow(i, 10, 1, 1) for i in range(2)])


def test_a_prediction_beside_it_makes_a_drafter_no_worse() -> None:
    """Counts of found draft tokens are the best of many, those of a drafter are not."""
    cost = StepCostModel((40e-3, 10e-3, 10e-3, 10e-3, 1e-4, 0, 0, 0))
    made, found = beside_a_prediction(Speculation(ToBeDrafted(100_000), MOST, cost))
    assert set(made) == {DRAFT_PLACEHOLDER} and found
    assert len(made) == 2


def test_a_drafter_that_lags_is_not_judged_by_what_it_has_not_guessed() -> None:
    """After a bad beginning it needs five steps to catch up, in which it guesses nothing, and the next takes long."""
    of_beginning, _ = guessed_steps(lambda place: place >= 20, 21)
    late = range(len(of_beginning), len(of_beginning) + 5)
    found, num_steps = guessed_steps(lambda place: place >= 20, 620, lambda asked: asked not in late)
    first = found[late.stop]
    assert first - found[late.start] < 5 * 6
    assert num_steps - first < 600 / (MOST + 1) + 20


@pytest.mark.parametrize(("draft_s", "is_made"), [(1e-3, True), (1.0, False)])
def test_a_drafter_is_asked_for_what_its_time_is_worth_beside_a_prediction_too(draft_s: float, is_made: bool) -> None:
    speculation = Speculation(ToBeDrafted(100_000), MOST, COST)
    speculation.note_drafted([PlannedRow(0, 10, 3, 3, 1, (DRAFT_PLACEHOLDER,) * 2)], {0: (5, 6)}, 2 * draft_s)
    made, found = beside_a_prediction(speculation)
    assert bool(made) == is_made and found
