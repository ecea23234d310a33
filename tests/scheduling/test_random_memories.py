"""The random workloads over every kind of memory, and with guesses."""

from __future__ import annotations

import pytest

from tests.scheduling.random_runs import run
from tests.scheduling.truth import MODELS

pytestmark = pytest.mark.usefixtures("small_chunks")

NUM_OPERATIONS = 275

# Every kind of memory, and guesses, which no step runs ahead of while there are some.
KINDS = [(model, "none", mode, ahead) for model in MODELS if model != "full" for mode, ahead in [
    ("recompute", True), ("swap", True), ("swap", False)
]]  # fmt: skip
GUESSES = [(model, "right", "recompute", True) for model in ("state", "full and state")]
GUESSES += [
    ("full", draft_tokens, mode, ahead)
    for draft_tokens, ahead in (
        ("right", False),
        ("right", True),
        ("wrong", False),
        ("random", False),
        ("random", True),
    )
    for mode in ("recompute", "swap")
]
GUESSES += [(model, "random", "swap", False) for model in MODELS if model != "full"]


# One; the others are in the long tier. Hypothesis draws all of them (test_random_workloads.py).
SHORT = ("full and state", "right", "recompute", True)
CASES = [pytest.param(*case, marks=() if case == SHORT else pytest.mark.long) for case in KINDS + GUESSES]


@pytest.mark.parametrize(("model", "draft_tokens", "preemption_mode", "ahead"), CASES)
def test_every_answer_is_that_of_a_standalone_run(
    model: str, draft_tokens: str, preemption_mode: str, ahead: bool
) -> None:
    run("fcfs", preemption_mode, True, True, ahead, NUM_OPERATIONS, model, draft_tokens)
    run("priority", preemption_mode, True, False, ahead, NUM_OPERATIONS // 2, model, draft_tokens)


@pytest.mark.parametrize("model", [pytest.param(model, marks=pytest.mark.long) for model in MODELS if model != "full"])
@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
def test_blocks_that_come_back_from_the_host_change_no_answer(model: str, preemption_mode: str) -> None:
    run("fcfs", preemption_mode, True, True, True, 2 * NUM_OPERATIONS, model, keeps_on_host=True)
