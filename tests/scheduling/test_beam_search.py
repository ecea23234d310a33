"""Beam search in the scheduler: forks, ends, blocks, and what happens to beams that wait for others."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from octavo.errors import RequestError
from octavo.kv_cache import disk_fetches
from octavo.kv_cache.block_files import BlockFiles
from octavo.kv_cache.disk_tier import DiskTier
from octavo.request import SequenceOutput, TokenLogprobs
from octavo.scheduling.scheduler import Scheduler
from octavo.step_cost import StepCostModel
from octavo.step_plan import StepPlan, StepResult
from tests.kv_cache.disk_engine import Memory, held
from tests.scheduling.test_scheduler import EOS, names, request, scheduler

Offer = dict[int, float]  # token -> its probability


def offered(plan: StepPlan, *offers: Offer) -> StepResult:
    """The result of a step in which the sampled rows offer these tokens."""
    entries: list[TokenLogprobs | None] = []
    for offer in offers:
        best = sorted(offer.items(), key=lambda item: -item[1])
        logprobs = [math.log(p) for _, p in best]
        entries.append(TokenLogprobs([best[0][0], *(t for t, _ in best)], [logprobs[0], *logprobs], 1))
    return StepResult(tokens=[0] * len(offers), logprobs=entries)


def step(s: Scheduler, *offers: Offer) -> list[SequenceOutput]:
    plan = s.schedule()
    return s.apply_result(plan, offered(plan, *offers))


def outputs_of(s: Scheduler) -> list[list[int]]:
    return sorted(seq.token_ids[seq.num_prompt_tokens :].tolist() for seq in s.queues)


def test_the_best_continuations_live_on_whatever_beam_they_come_from() -> None:
    s = scheduler()
    s.add(request("a", 6, n=2, use_beam_search=True))
    assert step(s, {1: 0.5, 2: 0.4, 3: 0.1}) == []
    assert outputs_of(s) == [[1], [2]]
    step(s, {1: 0.4, 2: 0.3}, {3: 0.9, 4: 0.1})
    assert outputs_of(s) == [[1, 1], [2, 3]]
    # 0.2 * 0.1 and 0.2 * 0.1 against 0.36 * 0.6 and 0.36 * 0.4: one beam dies and the other one forks.
    step(s, {1: 0.1, 2: 0.1}, {5: 0.6, 6: 0.4})
    assert outputs_of(s) == [[2, 3, 5], [2, 3, 6]]


def test_forks_share_their_blocks_and_copy_the_one_that_they_write_to() -> None:
    s = scheduler(max_num_seqs=3)
    s.add(request("a", 6, n=3, use_beam_search=True))
    plan = s.schedule()
    assert ([planned.num_samples for planned in plan.rows], s.queues.num_rows_left) == ([1], 0)
    s.apply_result(plan, offered(plan, {1: 0.5, 2: 0.3, 3: 0.2}))
    assert s.cache.pools[0].num_used == 2
    plan = s.schedule()
    assert len(plan.moves[0].copy) == 2
    assert plan.new_tokens == [(plan.rows[0].row, 6, 1)], "the runner is told what was chosen"
    assert [admission.token_ids[-1] for admission in plan.admissions] == [2, 3]
    assert s.cache.pools[0].num_used == 4
    s.apply_result(plan, offered(plan, {1: 0.9}, {1: 0.01, 2: 0.01}, {1: 0.01, 2: 0.01}))
    assert s.cache.pools[0].num_used == 3, "the beam that died has given its block back, and the new one shares"


def test_answers_come_at_the_end_best_first_with_their_logprobs() -> None:
    s = scheduler()
    s.add(request("a", 3, n=2, best_of=2, max_tokens=2, use_beam_search=True, logprobs=1, prompt_logprobs=0))
    plan = s.schedule()
    result = offered(plan, {1: 0.6, 2: 0.4})
    result.prompt_logprobs[plan.rows[0].row] = [TokenLogprobs([9], [-1.0], 1), TokenLogprobs([8], [-1.0], 1)]
    assert s.apply_result(plan, result) == []
    first, second = step(s, {3: 0.5, 4: 0.5}, {5: 0.9, EOS: 0.1})
    assert ([first.index, second.index], first.token_ids, second.token_ids) == ([0, 1], [2, 5], [1, 3])
    assert (first.finish_reason, second.finish_reason) == ("length", "length")
    assert first.logprobs is not None
    assert [entry.token_ids for entry in first.logprobs] == [[2, 1], [5, 5]]
    assert [entry.chosen_rank for entry in first.logprobs] == [2, 1]
    assert [entry.logprobs[0] for entry in first.logprobs] == [math.log(0.4), math.log(0.9)]
    assert [entry.token_ids for entry in first.prompt_logprobs or []] == [[9], [8]]
    assert second.prompt_logprobs is None
    assert not s.has_work
    assert s.cache.pools[0].num_used == 0


@pytest.mark.parametrize(("early_stopping", "num_steps"), [(True, 2), (False, 3), ("never", 4)])
def test_a_search_ends_when_nothing_better_is_expected(early_stopping: bool | str, num_steps: int) -> None:
    s = scheduler()
    s.add(request("a", 3, n=2, max_tokens=8, use_beam_search=True, early_stopping=early_stopping))
    step(s, {1: 0.5, EOS: 0.45, 2: 0.05})
    # Two answers have finished now, the worse one with log(0.15) / 2, and a beam goes on with log(0.3) / 2.
    outputs = step(s, {1: 0.6, EOS: 0.3, 2: 0.1}, {3: 0.1, 4: 0.1, 5: 0.1})
    steps = 2
    while not outputs:  # log(0.003) / 3 is less, log(0.003) / 8 would not be
        outputs = step(s, {1: 0.01, 2: 0.01}, {3: 0.01, 4: 0.01})
        steps += 1
    assert steps == num_steps
    assert [output.token_ids for output in outputs] == [[EOS], [1, EOS]]


def test_stop_tokens_end_an_answer_and_are_the_reason() -> None:
    s = scheduler()
    s.add(request("a", 3, n=1, best_of=2, stop_token_ids=[7], early_stopping=True, use_beam_search=True))
    assert step(s, {7: 0.6, EOS: 0.3, 1: 0.1})[0].stop_reason == 7
    assert not s.has_work


def test_a_beam_without_a_row_does_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sibling has the row, and waits for it."""
    monkeypatch.setattr(disk_fetches, "_LOOKUP_GRACE_S", 0.0)
    s = scheduler(max_num_seqs=2, num_host_blocks=20, preemption_mode="swap")
    files, cost = BlockFiles(str(tmp_path), b"f" * 16, 1 << 20), StepCostModel.derived(10**9, 1000, 1e10, 1e11)
    tier = DiskTier(files, Memory([100]), s.cache, cost, lambda: 0.0)
    files.has, _, may_go = held(files.has)  # type: ignore[method-assign]
    s.add(request("search", 6, n=2, use_beam_search=True))
    step(s, {EOS: 0.5, 1: 0.1})  # one beam goes on, and leaves the other's row
    s.add(request("other", 6, max_tokens=1))
    plan = s.schedule()
    result = offered(plan, {3: 0.5, 4: 0.4}, {9: 1.0})
    assert result.logprobs is not None
    result.logprobs[1] = None
    s.apply_result(plan, result)
    assert len(s.queues.waiting) == 1
    s.cache.forget_prefixes()
    s.fetches = tier.fetches
    for _ in range(2):
        plan = s.schedule()
        s.apply_result(plan, offered(plan, *[{5: 0.6, 6: 0.3}] * len(plan.rows)))
    assert [len(output) for output in outputs_of(s)] == [4, 4]
    may_go.set()
    tier.close()


def test_a_beam_that_is_preempted_leaves_the_others_waiting_for_it() -> None:
    s = scheduler(num_blocks=8, caching=False)
    s.add(request("other", 14, max_tokens=10, ignore_eos=True))  # four blocks, and soon five
    s.add(request("search", 7, n=2, max_tokens=8, use_beam_search=True))
    plan = s.schedule()
    result = offered(plan, {1: 1.0}, {1: 0.5, 2: 0.5})
    result.tokens, result.logprobs = [7, 0], [None, *(result.logprobs or [])[1:]]
    s.apply_result(plan, result)
    held = []
    for _ in range(30):
        plan = s.schedule()
        held += [seq for seq in s.queues if seq.is_held]
        sampled = [planned for planned in plan.rows if planned.num_samples]
        result = offered(plan, *[{3: 0.6, 4: 0.3}] * len(sampled))
        s.apply_result(plan, result)
        if not s.has_work:
            break
    assert held, "the test is of beams that wait"
    assert not s.has_work
    assert s.cache.pools[0].num_used == 0


def test_an_abort_or_an_error_ends_all_beams() -> None:
    s = scheduler()
    s.add(request("a", 6, n=3, use_beam_search=True))
    step(s, {1: 0.5, 2: 0.3, 3: 0.2})
    s.abort("a", 1)  # a beam is not a completion, and its index means nothing outside
    assert len(list(s.queues)) == 3
    s.abort("a")
    assert (s.has_work, s.cache.pools[0].num_used) == (False, 0)
    s.add(request("b", 6, n=3, use_beam_search=True))
    s.add(request("good", 5, ignore_eos=True))
    plan = s.schedule()
    s.apply_result(plan, offered(plan, {1: 0.5, 2: 0.3, 3: 0.2}, {7: 1.0}))
    plan = s.schedule()
    result = offered(plan, *[{1: 0.5, 2: 0.5}] * 4)
    result.errors[plan.rows[1].row] = "its processor raised"
    (failed, fine) = s.apply_result(plan, result)
    assert (failed.request_id, failed.finish_reason, failed.error) == ("b", "error", "its processor raised")
    assert fine.request_id == "good"
    assert names(s.queues.running) == ["good"]


def test_masks_that_leave_too_few_answers_are_an_error() -> None:
    s = scheduler()
    s.add(request("a", 6, n=3, max_tokens=1, use_beam_search=True))
    plan = s.schedule()
    result = offered(plan, {5: 1.0})
    assert result.logprobs is not None and result.logprobs[0] is not None
    result.logprobs[0].token_ids += [6, 7]
    result.logprobs[0].logprobs += [-math.inf, -math.inf]
    (failed,) = s.apply_result(plan, result)
    assert failed.error == "beam search found 1 of 3 completions: no other token is allowed."
    assert (s.has_work, s.cache.pools[0].num_used) == (False, 0)


def test_beams_that_do_not_fit_side_by_side_are_refused_with_the_numbers() -> None:
    s = scheduler(num_blocks=10)
    with pytest.raises(
        RequestError, match="4 beams of up to 12 tokens need 12 blocks of KV cache at once and it has 10"
    ):
        s.add(request("wide", 4, max_tokens=9, n=1, best_of=4, use_beam_search=True))
    s.add(request("narrow", 4, max_tokens=9, n=3, use_beam_search=True))
