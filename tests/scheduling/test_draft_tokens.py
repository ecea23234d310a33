"""Guesses in the scheduler: when they are asked for, what they may take, and what stays of them."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.request import SequenceOutput, TokenLogprobs
from octavo.sampling.draft_verification import count_valid_tokens
from octavo.scheduling.scheduler import Scheduler
from octavo.sequence import Sequence
from octavo.step_plan import PlannedRow, StepResult
from tests.scheduling.test_scheduler import EOS, SIZE, computed, request, scheduler
from tests.speculation import guessing as speculation


def guessing(*draft_tokens: int, **settings: Any) -> Scheduler:
    """A scheduler whose proposer always guesses the same."""

    def propose(seq: Sequence, most: int) -> tuple[int, ...]:
        assert seq.num_uncomputed_tokens == 1
        return draft_tokens

    return scheduler(speculation=speculation(propose), **settings)


def step(s: Scheduler, *tokens: int, logprobs: bool = False) -> tuple[PlannedRow, SequenceOutput]:
    """One step of the only sequence, which samples these tokens, one after each position."""
    plan = s.schedule()
    [planned] = plan.rows
    entries: list[TokenLogprobs | None] = [TokenLogprobs([token], [-1.0], 1) for token in tokens]
    [output] = s.apply_result(plan, StepResult(list(tokens), entries if logprobs else None))
    return planned, output


def test_how_many_sampled_tokens_stand() -> None:
    assert [
        count_valid_tokens((), (1,)),
        count_valid_tokens((1, 2), (1, 2, 3)),
        count_valid_tokens((1, 2), (9, 2, 3)),
    ] == [1, 3, 1]
    assert count_valid_tokens((1, 2), (1, 9, 3)) == 2, "the token after a right guess is not wasted"


def test_guesses_are_computed_behind_the_last_token_and_sampled_after_each() -> None:
    s = guessing(11, 12)
    s.add(request("a", 6))
    planned, _ = step(s, 10)
    assert (planned.num_tokens, planned.draft_tokens) == (6, ()), "a prompt is not guessed"
    planned, output = step(s, 11, 12, 13, logprobs=True)
    assert (planned.num_computed, planned.num_tokens, planned.num_sampled_positions, planned.num_samples) == (
        6,
        3,
        3,
        3,
    )
    assert (output.token_ids, output.finish_reason) == ([11, 12, 13], None)
    assert [entry.token_ids for entry in output.logprobs or []] == [[11], [12], [13]], "one a token"
    [seq] = s.queues
    assert (seq.num_computed_tokens, seq.num_uncomputed_tokens) == (9, 1)


def test_what_was_computed_of_wrong_guesses_is_undone() -> None:
    s = guessing(*range(11, 19))
    s.add(request("a", 6, max_tokens=30))
    step(s, 10)
    planned, output = step(s, 11, 99, *range(13, 20))
    assert planned.num_tokens == 9
    assert output.token_ids == [11, 99]
    [seq] = s.queues
    assert (seq.token_ids[6:].tolist(), seq.num_computed_tokens) == ([10, 11, 99], 8)
    assert len(seq.block_tables[0]) == s.cache.pools[0].num_used == 2, "blocks for guesses that were wrong are free"
    assert sum(key is not None for key in s.cache.pools[0].hashes) == 2, "full blocks of tokens that stand are indexed"
    stats = s.take_stats()
    assert (stats.num_generation_tokens, stats.num_computed_tokens) == (3, 15)
    planned, _ = step(s, 1, *[0] * 8)
    assert planned.num_computed == 8


@pytest.mark.parametrize(
    ("params", "sampled", "token_ids", "finish"),
    [
        ({}, [11, EOS, 13], [11, EOS], ("stop", None)),
        ({"stop_token_ids": [11]}, [11, 12, 13], [11], ("stop", 11)),
        ({"min_tokens": 4}, [11, EOS, 13], [11, EOS], (None, None)),
        ({"max_tokens": 4}, [11, 12, 13], [11, 12, 13], ("length", None)),
    ],
)
def test_a_sequence_may_end_among_its_guesses(
    params: dict[str, Any], sampled: list[int], token_ids: list[int], finish: tuple[str | None, int | None]
) -> None:
    s = guessing(11, EOS if EOS in sampled else 12)
    s.add(request("a", 6, **params))
    step(s, 10)
    _, output = step(s, *sampled)
    if finish[0] is None:
        token_ids = sampled
    assert (output.token_ids, output.finish_reason, output.stop_reason) == (token_ids, *finish)
    assert s.has_work == (finish[0] is None)


def test_guesses_never_reach_beyond_max_tokens() -> None:
    s = guessing(1, 2, 3, 4)
    s.add(request("a", 6, max_tokens=3))
    step(s, 9)
    planned, output = step(s, 1, 2)
    assert planned.draft_tokens == (1,)
    assert output.finish_reason == "length"


def test_guesses_take_what_budget_the_running_sequences_leave() -> None:
    s = guessing(1, 2, 3, 4, budget=8)
    for name in ("a", "b", "c"):
        s.add(request(name, 2))
    computed(s)
    plan = s.schedule()
    assert [(planned.num_tokens, planned.draft_tokens) for planned in plan.rows] == [
        (5, (1, 2, 3, 4)),
        (2, (1,)),
        (1, ()),
    ]
    s.apply_result(plan, StepResult([7] * 8))


def test_guesses_are_dropped_where_blocks_are_short_and_nobody_is_preempted_for_them() -> None:
    s = guessing(*range(1, 9), num_blocks=4, caching=False)
    s.add(request("a", SIZE))
    s.add(request("b", SIZE))
    computed(s)
    plan = s.schedule()
    assert [planned.draft_tokens for planned in plan.rows] == [(), ()], (
        "each has taken a block for the token that it has"
    )
    s.apply_result(plan, StepResult([7, 7]))
    assert s.take_stats().num_preemptions == 0


def test_forks_and_beams_and_the_chunks_of_a_prompt_are_not_guessed() -> None:
    s = guessing(1, 2, budget=32)
    s.add(request("forks", 5, n=2))
    s.add(request("beams", 5, n=2, use_beam_search=True))
    s.add(request("long", 40))
    plan = s.schedule()
    assert all(planned.draft_tokens == () for planned in plan.rows)
    best: list[TokenLogprobs | None] = [None, None, TokenLogprobs([5, 5, 6], [-1.0, -1.0, -2.0], 1)]
    s.apply_result(plan, StepResult([3, 4, 5], best))
    plan = s.schedule()
    draft_tokens = {
        (seq.request.request_id, p.draft_tokens) for seq in s.queues.running for p in plan.rows if p.row == seq.row
    }
    assert draft_tokens == {("forks", (1, 2)), ("beams", ()), ("long", ())}, (
        "forks that have started are like any others"
    )


def test_steps_run_ahead_until_there_are_guesses_to_verify() -> None:
    plain = scheduler()
    s = Scheduler(plain.config, plain.cache, device_runs_ahead=True, speculation=speculation(lambda seq, most: (7,)))
    s.add(request("a", 3))
    first, second = s.schedule(), s.schedule()
    assert first.runs_ahead and second.runs_ahead, "nothing was guessed yet"
    s.apply_result(first, StepResult([7]))
    third = s.schedule()
    assert not third.runs_ahead and third.rows[0].draft_tokens == (), "a guess is there, but of the token before"
    s.apply_result(second, StepResult([7]))
    s.apply_result(third, StepResult([7]))
    assert s.schedule().rows[0].draft_tokens == (7,)
