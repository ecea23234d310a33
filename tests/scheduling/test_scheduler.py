"""The scheduler's rules, one a test. Random workloads over all of them are in `test_random_workloads`."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from octavo.config import SchedulerConfig
from octavo.errors import RequestError
from octavo.kv_cache.disk_fetches import Readiness
from octavo.kv_cache.groups import CacheGroup, LayerCacheSpec
from octavo.kv_cache.host_tier import HostTier
from octavo.kv_cache.manager import KVCacheManager
from octavo.request import EngineRequest, MediaItem, Prompt, SequenceOutput, TokenLogprobs
from octavo.sampling_params import RequestOutputKind, SamplingParams
from octavo.scheduling.policies import FairTurns
from octavo.scheduling.scheduler import Scheduler
from octavo.scheduling.time_limit import AUTO_STEP_OF_ONE_S, AUTO_STEP_S, MIN_CHUNK_TOKENS, StepCost
from octavo.sequence import Sequence
from octavo.speculative.speculation import Speculation
from octavo.step_cost import StepWork
from octavo.step_plan import StepPlan, StepResult
from tests.scheduling.truth import STEP_COST

EOS = 0
SIZE = 4


def scheduler(
    *,
    num_blocks: int = 100,
    num_host_blocks: int = 0,
    max_num_seqs: int = 8,
    budget: int = 64,
    policy: str = "fcfs",
    preemption_mode: str = "recompute",
    chunked: bool = True,
    caching: bool = True,
    speculation: Speculation | None = None,
    cost: StepCost | None = None,
    target_step_s: float | None = None,
    whole_images: bool = False,
    starts_at_images: bool = False,
    num_stages: int = 1,
) -> Scheduler:
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        enable_chunked_prefill=chunked,
        policy=policy,
        preemption_mode=preemption_mode,
        check_invariants=True,
        target_step_s=target_step_s,
        whole_images=whole_images,
        starts_at_images=starts_at_images,
    )
    full = CacheGroup(LayerCacheSpec("full", num_kv_heads=1, key_size=8, value_size=8), (0,), pool=0)
    cache = KVCacheManager([full], [num_blocks], SIZE, [num_host_blocks], caching)
    return Scheduler(config, cache, speculation=speculation, cost=cost, num_stages=num_stages)


def request(
    name: str,
    prompt: int | list[int],
    max_tokens: int = 8,
    priority: int = 0,
    salt: str | None = None,
    arrival: float = 0.0,
    max_ttft_s: float | None = None,
    deadline: float | None = None,
    **params: Any,
) -> EngineRequest:
    """A request; `prompt` is its tokens, or how many tokens that no other request has."""
    tokens = [hash((name, i)) % 1000 + 1 for i in range(prompt)] if isinstance(prompt, int) else prompt
    sampling = SamplingParams(max_tokens=max_tokens, **params)
    kept = Prompt(tokens, cache_salt=salt)
    return EngineRequest(name, kept, sampling, [EOS], max_tokens, arrival, priority, max_ttft_s, deadline)


def result_of(plan: StepPlan, token: int = 7) -> StepResult:
    return StepResult(tokens=[token] * sum(planned.num_samples for planned in plan.rows))


def step(s: Scheduler, token: int = 7) -> list[SequenceOutput]:
    plan = s.schedule()
    return s.apply_result(plan, result_of(plan, token)) if plan.rows else []


def computed(s: Scheduler) -> dict[str, int]:
    """Schedule and account one step -> tokens that it computes, by request."""
    plan = s.schedule()
    names = {seq.row: f"{seq.request.request_id}" for seq in s.queues.running}
    counts = {names[planned.row]: planned.num_tokens for planned in plan.rows}
    s.apply_result(plan, result_of(plan))
    return counts


def names(sequences: list[Sequence]) -> list[str]:
    return [seq.request.request_id for seq in sequences]


def test_decodes_and_prompts_share_one_budget_and_running_sequences_come_first() -> None:
    s = scheduler(budget=20)
    s.add(request("a", 6))
    s.add(request("b", 7))
    assert computed(s) == {"a": 6, "b": 7}
    s.add(request("c", 50))
    assert computed(s) == {"a": 1, "b": 1, "c": 18}
    assert computed(s) == {"a": 1, "b": 1, "c": 18}
    assert computed(s) == {"a": 1, "b": 1, "c": 14}


def test_a_sequence_that_waits_for_room_to_read_its_blocks_stops_others_only_while_something_runs() -> None:
    s = scheduler()
    readiness = {"first": Readiness.NO_ROOM, "second": Readiness.READING}
    s.fetches = SimpleNamespace(
        prepare=lambda seq, may_wait: readiness.get(seq.request.request_id, Readiness.READY), forget=lambda seq: None
    )  # type: ignore[assignment]
    for name in readiness:
        s.add(request(name, 3))
    assert step(s) == [] and s.queues.running == []
    readiness["second"] = Readiness.READY  # what it has read was in the first one's way
    assert computed(s) == {"second": 3}
    s.add(request("third", 3))
    assert computed(s) == {"second": 1}, "blocks become free when it ends: nobody passes the first one"


def test_copies_for_a_sequence_are_waited_for_only_while_nothing_runs() -> None:
    s = scheduler()
    asked: dict[str, list[bool]] = {"a": [], "b": [], "c": []}

    def prepare(seq: Sequence, may_wait: bool) -> Readiness:
        asked[seq.request_id].append(may_wait)
        return Readiness.READING if seq.request_id == "b" else Readiness.READY

    s.fetches = SimpleNamespace(prepare=prepare, forget=lambda seq: None)  # type: ignore[assignment]
    for name in asked:
        s.add(request(name, 3))
    assert computed(s) == {"a": 3, "c": 3}
    assert asked == {"a": [True], "b": [False], "c": [False]}, "the rows of this step would wait, too"
    plan = s.schedule()
    assert asked["b"] == [False, False]
    s.apply_result(plan, result_of(plan))
    for name in "ac":
        s.abort(name)
    assert step(s) == [] and asked["b"] == [False, False, True]


def test_a_long_prompt_in_front_leaves_one_token_to_each_decode_behind() -> None:
    s = scheduler(budget=10, policy="priority")
    for name in "abc":
        s.add(request(name, 3, priority=5))
    computed(s)
    s.add(request("long", 30, priority=0))
    assert computed(s) == {"a": 1, "b": 1, "c": 1, "long": 7}
    assert names(s.queues.running)[0] == "long"
    assert computed(s) == {"long": 7, "a": 1, "b": 1, "c": 1}


def test_a_prompt_that_gets_its_last_token_is_sampled_and_a_chunk_is_not() -> None:
    s = scheduler(budget=5)
    s.add(request("a", 8))
    for num_samples in (0, 1, 1):
        plan = s.schedule()
        assert [planned.num_samples for planned in plan.rows] == [num_samples]
        s.apply_result(plan, result_of(plan))


def test_without_chunked_prefill_a_prompt_waits_for_a_step_that_holds_all_of_it() -> None:
    s = scheduler(budget=10, chunked=False)
    s.add(request("a", 4))
    s.add(request("b", 7))
    s.add(request("c", 1))
    assert computed(s) == {"a": 4}, "b does not fit, and c does not overtake it"
    assert computed(s) == {"a": 1, "b": 7, "c": 1}


def test_first_come_first_served_ignores_priority_values() -> None:
    s = scheduler(max_num_seqs=1)
    s.add(request("first", 2, max_tokens=1, priority=9))
    s.add(request("second", 2, max_tokens=1, priority=0))
    assert [computed(s), computed(s)] == [{"first": 2}, {"second": 2}]


def test_the_lowest_priority_value_goes_first_and_equals_by_arrival() -> None:
    s = scheduler(max_num_seqs=1, policy="priority")
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", -1)):
        s.add(request(name, 2, max_tokens=1, priority=priority))
    assert [list(computed(s)) for _ in range(4)] == [["d"], ["b"], ["a"], ["c"]]


def test_the_last_in_order_is_preempted_waits_at_its_old_place_and_starts_over() -> None:
    s = scheduler(num_blocks=5, caching=False)
    s.add(request("a", 7))
    s.add(request("b", 8))
    computed(s)
    s.add(request("late", 1))
    # "b" needs a third block of its own: 2 + 3 are all there are, and now "a" needs its third.
    assert computed(s) == {"a": 1, "b": 1}
    assert computed(s) == {"a": 1}
    assert s.take_stats().num_preemptions == 1
    [b] = [seq for seq in s.queues if seq.request.request_id == "b"]
    assert (b.num_computed_tokens, b.block_tables, b.num_output_tokens) == (0, [], 2)
    assert computed(s) == {"a": 1}, "b needs 3 blocks; late, behind it, does not overtake"
    s.abort("a")
    assert computed(s) == {"b": 10, "late": 1}


def test_the_lowest_priority_is_preempted_even_if_it_came_first() -> None:
    s = scheduler(num_blocks=4, policy="priority", caching=False)
    s.add(request("unimportant", 7, priority=1))
    s.add(request("important", 8, priority=0))
    computed(s)
    computed(s)
    assert names(s.queues.running) == ["important"]


def test_nothing_is_admitted_in_a_step_that_preempts() -> None:
    s = scheduler(num_blocks=4, max_num_seqs=2, policy="priority", caching=False)
    s.add(request("first", 8, priority=0))
    s.add(request("last", 7, priority=2))
    computed(s)
    s.add(request("between", 1, priority=1))
    assert computed(s) == {"first": 1}, "last has given up its row and its blocks"
    assert computed(s) == {"first": 1, "between": 1}


def test_swapping_keeps_what_was_computed() -> None:
    s = scheduler(num_blocks=5, num_host_blocks=3, preemption_mode="swap", caching=False)
    s.add(request("a", 7))
    s.add(request("b", 8))
    computed(s)
    computed(s)
    plan = s.schedule()
    assert len(plan.moves[0].swap_out) == 3
    s.apply_result(plan, result_of(plan))
    stats = s.take_stats()
    assert (stats.num_swapped, stats.num_waiting, stats.num_host_blocks_used) == (1, 0, 3)
    s.abort("a")
    plan = s.schedule()
    [planned] = plan.rows
    assert (len(plan.moves[0].swap_in), planned.num_computed, planned.num_tokens) == (3, 9, 1)
    s.apply_result(plan, result_of(plan))
    assert s.take_stats().num_host_blocks_used == 0


def test_a_full_host_tier_falls_back_to_recomputation() -> None:
    s = scheduler(num_blocks=5, num_host_blocks=2, preemption_mode="swap", caching=False)
    s.add(request("a", 7))
    s.add(request("b", 8))
    for _ in range(3):
        computed(s)
    stats = s.take_stats()
    assert (stats.num_waiting, stats.num_swapped, stats.num_host_blocks_used) == (1, 0, 0)


def test_a_prompt_is_admitted_only_when_all_of_it_fits() -> None:
    s = scheduler(num_blocks=6, budget=4, caching=False)
    s.add(request("a", 11))
    for _ in range(3):
        computed(s)
    s.add(request("b", 13))
    assert computed(s) == {"a": 1}, "3 blocks are free and b, though its first chunk is small, needs 4"
    s.abort("a")
    assert computed(s) == {"b": 4}


@pytest.mark.parametrize(("prompt", "max_tokens"), [(60, 5), (64, 1), (1, 64)])
def test_a_request_may_fill_the_cache_as_its_last_token_is_not_computed(prompt: int, max_tokens: int) -> None:
    s = scheduler(num_blocks=16)
    s.add(request("fits", prompt, max_tokens=max_tokens, ignore_eos=True))
    with pytest.raises(RequestError, match=rf"needs 65 tokens of KV cache \({prompt} of prompt"):
        s.add(request("does not", prompt, max_tokens=max_tokens + 1))
    num_tokens = 0
    while s.has_work:
        [output] = step(s)
        num_tokens += len(output.token_ids)
    assert (num_tokens, output.finish_reason) == (max_tokens, "length")


def test_prompts_that_are_not_looked_up_are_no_queries() -> None:
    s = scheduler()
    prompt = list(range(100, 113))
    s.add(request("looked up", prompt))
    s.add(request("scored", prompt, prompt_logprobs=0))
    s.schedule()
    stats = s.take_stats()
    assert (stats.num_prefix_queries, stats.num_prompt_tokens) == (13, 26)


def test_prompt_tokens_are_counted_with_the_steps_that_compute_them() -> None:
    s = scheduler(num_blocks=24, budget=16)
    s.add(request("short", 5, max_tokens=1))
    s.add(request("long", 38, n=2))
    counted = []
    for _ in range(4):
        step(s)
        counted.append(s.take_stats().num_prompt_tokens)
    assert counted == [5 + 11, 16, 11, 0]
    [first, _] = s.queues.running
    s._preempt(first)
    for _ in range(5):
        step(s)
    assert s.take_stats().num_prompt_tokens == 0, "a preempted prompt is computed again and not counted again"


def test_a_part_of_a_prompt_that_another_request_has_computed_meanwhile_is_counted_once() -> None:
    s = scheduler(budget=16)
    prompt = list(range(100, 160))
    s.add(request("first", prompt, max_tokens=20))
    s.add(request("second", [*prompt, *range(20)], max_tokens=20))
    counted = []
    for number in range(8):
        if number == 4:
            s._preempt(s.queues.running[-1])  # after 52 tokens; then it finds 60
        step(s)
        counted.append(s.take_stats().num_prompt_tokens)
    assert counted == [16, 16, 16, 12 + 48 + 4, 8 + 15, 5, 0, 0]


def test_a_cached_prefix_costs_neither_budget_nor_blocks() -> None:
    s = scheduler(num_blocks=6, budget=16)
    prompt = list(range(100, 113))
    s.add(request("a", prompt, max_tokens=3))
    computed(s)
    s.add(request("b", [*prompt[:12], 1, 2]))
    plan = s.schedule()
    assert [planned.num_tokens for planned in plan.rows] == [1, 2]
    _, first = s.apply_result(plan, result_of(plan))
    assert (first.request_id, first.num_cached_tokens) == ("b", 12) and (first.first_scheduled_time or 0) > 0
    assert s.cache.pools[0].num_used == 5
    stats = s.take_stats()
    assert (stats.num_prefix_queries, stats.num_prefix_hits, stats.num_prompt_tokens) == (27, 12, 27)
    later = step(s)
    assert not any(output.num_cached_tokens or output.first_scheduled_time for output in later), "only the first has"
    assert b"first_scheduled_time" not in msgspec.msgpack.encode(later)


def test_requests_without_stop_tokens_of_their_own_share_what_ends_them() -> None:
    s = scheduler()
    for name, own in (("a", []), ("b", []), ("c", [9])):
        s.add(request(name, [1, 2, 3], stop_token_ids=own))
    first, second, third = (seq.stop_reasons for seq in s.queues)
    assert first is second and third == {**first, 9: 9}


def test_salted_requests_share_blocks_with_their_own_salt_only() -> None:
    s = scheduler()
    prompt = list(range(100, 110))
    s.add(request("a", prompt, salt="x"))
    computed(s)
    s.add(request("b", prompt))
    s.add(request("c", prompt, salt="y"))
    s.add(request("d", prompt, salt="x"))
    assert computed(s) == {"a": 1, "b": 10, "c": 10, "d": 2}


def test_forks_share_the_blocks_of_their_prompt_and_run_on_their_own() -> None:
    s = scheduler()
    s.add(request("a", 10, n=3))
    plan = s.schedule()
    assert [(planned.num_tokens, planned.num_sampled_positions, planned.num_last_samples) for planned in plan.rows] == [
        (10, 1, 3)
    ]
    outputs = s.apply_result(plan, StepResult(tokens=[1, 2, 3]))
    assert [(output.index, output.token_ids) for output in outputs] == [(0, [1]), (1, [2]), (2, [3])]
    assert s.cache.pools[0].num_used == 3, "one prompt"
    plan = s.schedule()
    assert len(plan.moves[0].copy) == 2, "the last of the three keeps the half-filled block"
    assert s.cache.pools[0].num_used == 5
    assert [a.index for a in plan.admissions] == [1, 2]
    assert [a.token_ids[-1] for a in plan.admissions] == [2, 3]


def test_rows_are_reserved_for_forks_that_have_not_started() -> None:
    s = scheduler(max_num_seqs=4, budget=8)
    s.add(request("forks", 10, n=3))
    s.add(request("a", 1))
    s.add(request("b", 1))
    assert computed(s) == {"forks": 8}
    assert computed(s) == {"forks": 2, "a": 1}
    assert len(s.schedule().rows) == 4


@pytest.mark.parametrize("state", ["waiting", "running", "mid-prompt", "swapped"])
def test_an_abort_frees_everything_at_once(state: str) -> None:
    s = scheduler(num_blocks=5, num_host_blocks=3, preemption_mode="swap", budget=4 if state == "mid-prompt" else 64)
    s.add(request("a", 7))
    if state != "waiting":
        computed(s)
    if state == "swapped":
        s.add(request("b", 8))
        for _ in range(3):
            computed(s)
        assert s.cache.host_pools[0].num_used == 2
        s.abort("b")
        assert s.cache.host_pools[0].num_used == 0
    s.abort("a")
    assert (s.has_work, s.cache.pools[0].num_used) == (False, 0)
    s.check()
    assert s.schedule().rows == []


def test_unknown_ids_are_not_an_error_to_abort() -> None:
    s = scheduler()
    s.add(request("a", 2))
    s.abort("nobody")
    s.abort("a", 5)
    assert computed(s) == {"a": 2}


def test_one_completion_can_be_aborted_without_its_siblings() -> None:
    s = scheduler()
    s.add(request("a", 6, n=3, max_tokens=3))
    s.abort("a", 0)  # before the forks have started one sequence stands for all
    computed(s)
    s.abort("a", 0)
    assert [output.index for output in step(s)] == [1, 2]
    s.abort("a", 2)
    assert [(output.index, output.finish_reason) for output in step(s)] == [(1, "length")]
    assert not s.has_work


@pytest.mark.parametrize(
    ("token", "params", "finish"),
    [
        (7, {}, (None, None)),
        (EOS, {}, ("stop", None)),
        (EOS, {"ignore_eos": True}, (None, None)),
        (EOS, {"ignore_eos": True, "stop_token_ids": [EOS]}, ("stop", EOS)),
        (7, {"stop_token_ids": [7]}, ("stop", 7)),
        (7, {"stop_token_ids": [7], "max_tokens": 1}, ("stop", 7)),
        (8, {"stop_token_ids": [7], "max_tokens": 1}, ("length", None)),
        (EOS, {"min_tokens": 2}, (None, None)),
    ],
)
def test_what_ends_a_sequence(token: int, params: dict[str, Any], finish: tuple[str | None, int | None]) -> None:
    s = scheduler()
    s.add(request("a", 3, **params))
    [output] = step(s, token)
    assert (output.finish_reason, output.stop_reason) == finish
    assert s.has_work == (finish[0] is None)


def test_a_request_that_fails_leaves_the_others_alone() -> None:
    s = scheduler()
    s.add(request("bad", 5, n=2))
    s.add(request("good", 5))
    plan = s.schedule()
    result = result_of(plan)
    result.errors[plan.rows[0].row] = "its processor raised"
    outputs = {output.request_id: output for output in s.apply_result(plan, result)}
    assert (outputs["bad"].finish_reason, outputs["bad"].error) == ("error", "its processor raised")
    assert outputs["good"].token_ids == [7]
    assert names(s.queues.running) == ["good"]
    s.check()


def test_prompt_logprobs_come_whole_with_the_first_token_only() -> None:
    s = scheduler(budget=4)
    s.add(request("a", [1, 2, 3, 4, 5, 6], prompt_logprobs=0))
    reported = []
    for first, count in ((0, 4), (4, 1), (5, 0)):
        plan = s.schedule()
        result = result_of(plan)
        result.prompt_logprobs[plan.rows[0].row] = [TokenLogprobs([first + i + 2], [0.0], 1) for i in range(count)]
        reported += [output.prompt_logprobs for output in s.apply_result(plan, result)]
    assert [entry.token_ids[0] for entry in reported[0] or []] == [2, 3, 4, 5, 6]
    assert reported[1] is None


def test_a_request_that_can_never_run_is_refused_with_the_numbers() -> None:
    s = scheduler(num_blocks=10, max_num_seqs=4)
    with pytest.raises(RequestError, match=r"needs 41 tokens .*\(33 of prompt and up to 8 of output: .*\).* holds 40"):
        s.add(request("long", 33, max_tokens=9))
    with pytest.raises(RequestError, match="5 sequences at once and --max-num-seqs is 4"):
        s.add(request("wide", 3, n=2, best_of=5))
    s.add(request("a", 32))
    with pytest.raises(RequestError, match="'a' is in use"):
        s.add(request("a", 3))
    computed(s)
    assert s.take_stats().num_running == 1


def test_a_request_as_long_as_the_cache_runs_to_its_end() -> None:
    s = scheduler(num_blocks=4, budget=5)
    s.add(request("a", 9, max_tokens=7))
    s.add(request("b", 9, max_tokens=7))
    finished = []
    for _ in range(40):
        finished += [output.request_id for output in step(s) if output.finish_reason == "length"]
    assert finished == ["a", "b"]


def test_aborted_requests_do_not_pile_up_behind_one_that_waits() -> None:
    s = scheduler(max_num_seqs=1, policy="priority")
    s.add(request("runs", 2))
    computed(s)
    for i in range(1000):
        s.add(request(f"impatient-{i}", 2, priority=1))
        s.abort(f"impatient-{i}")
    assert len(s.queues.waiting) < 100
    assert s.take_stats().num_waiting == 0
    s.add(request("patient", 2, priority=1))
    s.abort("runs")
    assert computed(s) == {"patient": 2}


def test_clients_take_turns_under_the_fair_policy() -> None:
    s = scheduler(max_num_seqs=1, policy="fair")
    order = []

    def ask(name: str) -> None:
        asked = request(name, 2, max_tokens=1)
        asked.client = name[0]
        s.add(asked)

    for i in range(6):
        ask(f"a{i}")
    order += computed(s)
    for name in ("b0", "b1", "c0"):
        ask(name)
    for late in ("", "", "", "d0", "", "", "", "", ""):
        if late:
            ask(late)
        order += computed(s)
    assert order == ["a0", "a1", "b0", "c0", "a2", "b1", "d0", "a3", "a4", "a5"]


def test_new_clients_without_end_do_not_keep_an_old_one_waiting() -> None:
    s = scheduler(max_num_seqs=1, policy="fair")
    ran = []
    for i in range(20):
        for name in (["old0", "old1", "old2"] if i == 0 else []) + [f"new{i}"]:
            asked = request(name, 2, max_tokens=1)
            asked.client = name if name.startswith("new") else "old"
            s.add(asked)
        ran += computed(s)
    assert {"old0", "old1", "old2"} < set(ran)


def test_a_client_that_gives_requests_up_waits_no_longer_for_it() -> None:
    s = scheduler(max_num_seqs=1, policy="fair")
    for name in ("a0", "b0", *(f"a{i}" for i in range(1, 100))):
        asked = request(name, 2, max_tokens=1)
        asked.client = name[0]
        s.add(asked)
    order = [*computed(s)]
    for i in range(1, 100):
        s.abort(f"a{i}")
    for name in ("a100", "b1", "b2"):
        asked = request(name, 2, max_tokens=1)
        asked.client = name[0]
        s.add(asked)
    for _ in range(4):
        order += computed(s)
    assert order == ["a0", "b0", "a100", "b1", "b2"]
    assert isinstance(s._policy, FairTurns) and not s._policy._turns, "clients that are gone are kept"


def test_stats_count_slots_and_take_increments_once() -> None:
    s = scheduler(num_blocks=10)
    s.add(request("a", 6, n=2))
    s.add(request("b", 3))
    step(s)
    stats = s.take_stats()
    assert (stats.num_running, stats.num_blocks, stats.num_blocks_used) == (3, 10, 3)
    assert (stats.num_slots_allocated, stats.num_slots_filled) == (12, 9), "the fork's prompt counts once"
    assert (stats.num_prompt_tokens, stats.num_generation_tokens) == (9, 3)
    again = s.take_stats()
    assert (again.num_running, again.num_prompt_tokens, again.num_generation_tokens) == (3, 0, 0)


class Formula:
    """A millisecond a token, and as much as it says for a thousand pairs of a query and a key."""

    def __init__(self, pairs_ms: float = 0.0) -> None:
        self.pairs_ms = pairs_ms

    def seconds(self, work: StepWork) -> float:
        return 1e-3 * (work.num_tokens + 1e-3 * self.pairs_ms * work.num_chunk_pairs)


def streaming(**options: Any) -> Scheduler:
    """A scheduler with one stream, which has begun."""
    s = scheduler(**{"num_blocks": 1000, "budget": 256, "cost": Formula(), "target_step_s": 0.0501} | options)
    s.add(request("stream", 3, max_tokens=500))
    computed(s)
    return s


def test_a_prompt_is_cut_to_the_time_that_a_stream_may_wait() -> None:
    s = streaming()
    s.add(request("long", 110, max_tokens=1))
    assert [computed(s) for _ in range(4)] == [
        {"stream": 1, "long": 49}, {"stream": 1, "long": 49}, {"stream": 1, "long": 12}, {"stream": 1}
    ]  # fmt: skip


@pytest.mark.parametrize("reason", ["no target", "no stream", "no chunked prefill"])
def test_steps_are_bounded_by_tokens_alone_where_nobody_waits_or_nothing_can_be_cut(reason: str) -> None:
    s = scheduler(
        num_blocks=1000, budget=256, cost=Formula(), target_step_s=0.0 if reason == "no target" else 0.0501,
        chunked=reason != "no chunked prefill",
    )  # fmt: skip
    kind = RequestOutputKind.FINAL_ONLY if reason == "no stream" else RequestOutputKind.DELTA
    s.add(request("other", 3, output_kind=kind))
    assert computed(s) == {"other": 3}
    s.add(request("long", 110))
    assert computed(s) == {"other": 1, "long": 110}


def test_a_prompt_alone_is_not_cut() -> None:
    s = scheduler(num_blocks=1000, budget=256, cost=Formula(), target_step_s=0.0501)
    s.add(request("a", 100))
    s.add(request("b", 100))
    assert computed(s) == {"a": 100, "b": 100}


def test_longer_contexts_make_shorter_chunks_and_never_less_than_the_least() -> None:
    s = streaming(cost=Formula(pairs_ms=3.0))
    s.add(request("long", 800))
    chunks = [computed(s)["long"] for _ in range(15)]
    assert chunks[0] == 45 and chunks == sorted(chunks, reverse=True)
    assert chunks[-1] == MIN_CHUNK_TOKENS


def test_streams_that_take_all_the_time_leave_a_prompt_the_least() -> None:
    s = streaming(target_step_s=0.0005)
    s.add(request("first", 100))
    s.add(request("second", 100))
    assert computed(s) == {"stream": 1, "first": MIN_CHUNK_TOKENS}


def test_a_short_rest_of_a_prompt_leaves_its_time_to_the_next_one() -> None:
    s = streaming(target_step_s=0.1001)
    for name in ("first", "second", "third"):
        s.add(request(name, 60))
    assert computed(s) == {"stream": 1, "first": 60, "second": 39}
    assert computed(s) == {"stream": 1, "first": 1, "second": 21, "third": 60}


def test_the_target_is_by_default_a_time_that_nobody_notices_or_three_times_what_the_streams_take() -> None:
    s = streaming(target_step_s=None)
    s.add(request("long", 1000))
    assert 1 + computed(s)["long"] == pytest.approx(1e3 * AUTO_STEP_OF_ONE_S, abs=1)
    s = scheduler(num_blocks=1000, max_num_seqs=64, budget=256, cost=Formula())
    for i in range(2):
        s.add(request(f"stream {i}", 3, max_tokens=50))
    computed(s)
    s.add(request("long", 1000))
    assert 2 + computed(s)["long"] == pytest.approx(1e3 * AUTO_STEP_S, abs=1)
    s = scheduler(num_blocks=1000, max_num_seqs=64, budget=256, cost=Formula())
    for i in range(50):
        s.add(request(f"stream {i}", 3, max_tokens=50))
    computed(s)
    s.add(request("long", 1000))
    assert computed(s)["long"] == pytest.approx(2 * 50, abs=1)


def test_by_deadline_the_shorter_prompt_goes_first_and_one_that_has_waited_in_proportion_before_it() -> None:
    s = scheduler(max_num_seqs=1, policy="deadline", cost=Formula())
    s.add(request("long", 40, max_tokens=1, arrival=0.0))  # due at 0.4
    s.add(request("short", 5, max_tokens=1, arrival=0.1))  # at 0.15
    s.add(request("late", 5, max_tokens=1, arrival=0.36))  # at 0.41
    assert [list(computed(s)) for _ in range(3)] == [["short"], ["long"], ["late"]]


def test_by_deadline_a_request_says_when_its_first_token_is_due() -> None:
    s = scheduler(max_num_seqs=1, policy="deadline", cost=Formula())
    s.add(request("patient", 5, max_tokens=1, max_ttft_s=60.0))
    s.add(request("usual", 10, max_tokens=1))  # due at 0.1
    s.add(request("urgent", 40, max_tokens=1, max_ttft_s=0.05))
    s.add(request("times out", 40, max_tokens=1, max_ttft_s=60.0, deadline=0.07))
    assert [list(computed(s)) for _ in range(4)] == [["urgent"], ["times out"], ["usual"], ["patient"]]


def test_by_deadline_only_what_is_not_cached_of_a_prompt_counts() -> None:
    s = scheduler(policy="deadline", cost=Formula())
    shared = list(range(1, 33))
    s.add(request("first", shared, max_tokens=1))
    computed(s)
    s.config = dataclasses.replace(s.config, max_num_batched_tokens=8)
    s.add(request("short", 6, max_tokens=1))
    s.add(request("long, but cached", [*shared, 33, 34], max_tokens=1))
    assert next(iter(computed(s))) == "long, but cached"


@pytest.mark.parametrize("policy", ["priority", "deadline"])
def test_who_goes_first_overtakes_a_prompt_that_is_being_computed_which_still_goes_on(policy: str) -> None:
    s = scheduler(num_blocks=1000, budget=64, policy=policy, cost=Formula())
    s.add(request("long", 300, priority=2))
    assert computed(s) == {"long": 64}
    s.add(request("short", 20, priority=1))
    s.add(request("middle", 100, priority=1))
    s.add(request("longest", 400, priority=3))
    assert computed(s) == {"short": 20, "middle": 43, "long": 1}
    assert computed(s) == {"short": 1, "middle": 57, "long": 6}


def test_first_come_first_served_overtakes_nobody() -> None:
    s = scheduler(num_blocks=1000, budget=64, cost=Formula())
    s.add(request("long", 300))
    computed(s)
    s.add(request("short", 20))
    assert computed(s) == {"long": 64}


def test_no_chunk_ends_within_a_picture_whose_tokens_see_each_other() -> None:
    """Beside a decode: a budget of 10 has room for 9 of a prompt's tokens."""
    s = scheduler(budget=10, max_num_seqs=2, whole_images=True)
    s.add(request("decode", 3, max_tokens=20))
    step(s)
    pictures = [MediaItem(4, 6, b"a"), MediaItem(10, 8, b"b"), MediaItem(26, 4, b"c")]
    seen = request("seen", 30, max_tokens=2)
    s.add(msgspec.structs.replace(seen, prompt=msgspec.structs.replace(seen.prompt, media=tuple(pictures))))
    chunks = []
    while len(chunks) < 5:
        plan = s.schedule()
        chunks += [(row.num_computed, row.num_tokens) for row in plan.rows if row.num_tokens > 1]
        assert len(plan.rows) == 2  # the decode goes on
        s.apply_result(plan, result_of(plan))
    assert chunks == [(0, 4), (4, 6), (10, 9), (19, 7), (26, 4)]
    large = msgspec.structs.replace(seen.prompt, media=(MediaItem(0, 9, b"d"),))
    with pytest.raises(RequestError, match="a picture of 9 tokens is computed in one step, which has room for 8"):
        s.add(msgspec.structs.replace(seen, request_id="large", prompt=large))


@pytest.mark.parametrize("chunked", [True, False])
def test_a_chunk_starts_at_each_picture_that_layers_attend_to(chunked: bool) -> None:
    s = scheduler(budget=10, starts_at_images=True, chunked=chunked)
    seen = request("seen", 10, max_tokens=3)
    pictures = tuple(MediaItem(place, 0, b"%d" % place, num_rows=3) for place in (0, 4, 5, 9))
    s.add(msgspec.structs.replace(seen, prompt=msgspec.structs.replace(seen.prompt, media=pictures)))
    assert [computed(s) for _ in range(5)] == [{"seen": count} for count in (4, 1, 4, 1, 1)]


def test_the_host_is_not_asked_for_a_prompt_that_gets_no_row() -> None:
    s, asked = scheduler(max_num_seqs=1), list[str]()
    s.host_tier = HostTier(s.cache, [1], STEP_COST)
    s.host_tier.load = lambda seq, *_: (asked.append(seq.request_id), True)[1]  # type: ignore[method-assign]
    s.add(request("a", 4))
    s.add(request("b", 4))
    for _ in range(3):
        step(s)
    assert asked == ["a"]


def test_a_plan_is_not_withdrawn_after_one_of_its_sequences_was_preempted() -> None:
    s = scheduler()
    s.add(request("a", 8))
    s.add(request("b", 8))
    s.withdraw(s.schedule(), "no memory")
    assert [one.num_step_tokens for one in s.progress()] == [0], "nothing was computed in the last step"
    plan = s.schedule()
    s._preempt(s.queues.running[-1])
    with pytest.raises(AssertionError, match="preempted since"):
        s.withdraw(plan, "no memory")
