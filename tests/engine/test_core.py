"""The engine core without a model: requests whose grammars are being compiled, and what is said of them."""

from __future__ import annotations

import queue
from collections import deque
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from octavo.config import SchedulerConfig
from octavo.engine import core_process
from octavo.engine.core import _MACHINES, EngineCore
from octavo.engine.wire import (
    Abort,
    CacheWasReset,
    DropCacheSession,
    LoadAdapter,
    ResetCache,
    SetPaused,
    Trials,
    decode_core_message,
    encode_message,
)
from octavo.errors import RequestError
from octavo.kv_cache.groups import LayerCacheSpec, group_layers
from octavo.request import AdapterSource, EngineRequest, Prompt
from octavo.sampling_params import SamplingParams
from octavo.step_cost import StepCostModel, StepWork
from octavo.step_plan import AdapterMemory, StepPlan, StepResult


class StubExecutor:
    """Samples the token 7 everywhere. What becomes of a grammar is in `grammars`, and of an adapter in `adapters`."""

    runs_ahead, num_stages = False, 1
    cache_groups = group_layers([LayerCacheSpec("full", num_kv_heads=1, key_size=8, value_size=8)])

    def __init__(self) -> None:
        self.num_blocks, self.num_host_blocks = [20], [0]
        self.weight_bytes = self.cache_bytes = 1 << 20
        self.grammars: dict[str, Future[None]] = {}
        self.adapters: dict[str, Future[int]] = {}
        self.adapter_memory = AdapterMemory(2, 2, 2, 1 << 10)

    def prepare_grammar(self, grammar: str, holder: object) -> Future[None]:
        return self.grammars.setdefault(grammar, Future())

    def prepare_adapter(self, source: AdapterSource) -> Future[int]:
        return self.adapters.setdefault(source.identity, Future())

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        done: Future[StepResult] = Future()
        done.set_result(StepResult([7] * sum(planned.num_samples for planned in plan.rows)))
        return done


def core(**given: Any) -> tuple[EngineCore, dict[str, Future[None]]]:
    """Made of `given` settings and of plain ones; the second result are its executor's grammars."""
    scheduler = SchedulerConfig(
        max_num_seqs=4, max_num_batched_tokens=64, enable_chunked_prefill=True, policy="fcfs",
        preemption_mode="recompute", check_invariants=True,
    )  # fmt: skip
    cache = SimpleNamespace(block_size=4, enable_prefix_caching=True, disk=None, host_bytes=0, events=None)
    config = SimpleNamespace(
        scheduler=scheduler,
        cache=cache,
        model=SimpleNamespace(seed=0),
        device="cpu",
        speculative=None,
        draft=None,
        media=None,
        sound=None,
        prompt_embeds=None,
        **{"lora": None, **given},
    )
    executor = StubExecutor()
    return EngineCore(cast(Any, config), cast(Any, executor)), executor.grammars


def request(name: str, grammar: str | None = None) -> EngineRequest:
    return EngineRequest(name, Prompt([1, 2, 3]), SamplingParams(max_tokens=2, grammar=grammar), [0], 2, 0.0)


def failed(error: Exception) -> Future[None]:
    ready: Future[None] = Future()
    ready.set_exception(error)
    return ready


def test_a_request_whose_grammar_is_being_compiled_waits_and_is_counted() -> None:
    engine, grammars = core()
    engine.add(request("plain"))
    engine.add(request("structured", "root ::= x"))
    outputs = engine.step()
    assert [output.request_id for output in outputs.outputs] == ["plain"]
    assert (outputs.stats.num_running, outputs.stats.num_waiting) == (1, 1)
    grammars["root ::= x"].set_result(None)
    outputs = engine.step()
    assert {output.request_id for output in outputs.outputs} == {"plain", "structured"}
    assert outputs.stats.num_waiting == 0


def test_a_request_whose_grammar_is_ready_runs_in_the_next_step() -> None:
    engine, grammars = core()
    grammars["root ::= x"] = Future()
    grammars["root ::= x"].set_result(None)
    engine.add(request("structured", "root ::= x"))
    assert [output.token_ids for output in engine.step().outputs] == [[7]]


@pytest.mark.parametrize(
    ("error", "said", "status"),
    [
        (RequestError("the grammar has no rule 'root'."), "the grammar has no rule 'root'.", 400),
        (ValueError("a secret path"), "structured_outputs failed: ValueError.", 500),
    ],
)
@pytest.mark.parametrize("fails_before", [True, False])
def test_a_request_whose_grammar_cannot_be_compiled_is_refused(
    error: Exception, said: str, status: int, fails_before: bool
) -> None:
    engine, grammars = core()
    if fails_before:
        grammars["bad"] = failed(error)
    engine.add(request("structured", "bad"))
    if not fails_before:
        assert engine.step().outputs == []
        grammars["bad"].set_exception(error)
    [output] = engine.step().outputs
    assert (output.request_id, output.finish_reason, output.error) == ("structured", "error", said)
    assert output.error_status == status
    assert not engine.has_work


def test_a_request_that_is_aborted_while_its_grammar_is_compiled_never_runs() -> None:
    engine, grammars = core()
    engine.add(request("structured", "root ::= x"))
    engine.abort("structured")
    grammars["root ::= x"].set_result(None)
    assert not engine.has_work
    assert engine.step().outputs == []


def test_the_requests_of_a_front_end_that_has_ended_are_aborted_running_waiting_or_prepared() -> None:
    engine, _ = core()
    for name in ("1-0", "11-0", "1-1", "2-0", "1-2"):
        engine.add(request(name))
    engine.add(request("1-3", "root ::= x"))
    engine.step()
    engine.abort_all("1-")
    assert [*engine.scheduler.queues.requests] == ["11-0", "2-0"]
    assert not engine._pending


def test_steps_are_measured_and_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0

    def monotonic() -> float:
        nonlocal now
        now += 0.125  # from the beginning of a step to its end
        return now

    engine, _ = core()
    monkeypatch.setattr("octavo.engine.core.time", SimpleNamespace(monotonic=monotonic))
    engine.add(request("a"))
    first, second = engine.step().stats, engine.step().stats
    assert (first.step_s, second.step_s) == (0.125, 0.125)
    assert first.predicted_step_s > 0
    derived = StepCostModel.derived(1 << 20, (1 << 20) // (20 * 4), *_MACHINES["cpu"])  # of the executor's bytes
    work = StepWork().plus(8, 1, 1)
    assert core()[0].cost.seconds(work) == derived.seconds(work)
    assert abs(second.predicted_step_s / 0.125 - 1) < abs(first.predicted_step_s / 0.125 - 1), "it learns"
    assert first.prompt_token_s > 0
    assert engine.step().stats.step_s == 0, "nothing ran"


def test_tokens_of_prompts_that_go_on_in_the_next_step_are_counted() -> None:
    engine, _ = core()
    prompt = Prompt(list(range(70)))  # a step takes 64
    engine.add(EngineRequest("long", prompt, SamplingParams(max_tokens=2), [0], 2, 0.0))
    assert [engine.step().stats.num_chunked_tokens for _ in range(3)] == [64, 0, 0]


def test_a_paused_core_reads_adapters_and_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers pause, load the weights of their next round, and resume."""
    engine, _ = core(lora=SimpleNamespace(max_loras=1, max_cpu_loras=1))
    messages: deque[Any] = deque([SetPaused(True), request("a"), LoadAdapter(AdapterSource("one", "one", None, ""))])
    sent: list[Any] = []

    def send(data: bytes) -> None:
        sent.append(decode_core_message(data))
        if sent[-1].adapters:
            messages.append(SetPaused(False))
        elif len(sent) == 1:
            cast(StubExecutor, engine.executor).adapters["one"].set_result(1)

    def receive() -> bytes:
        if not messages:
            raise EOFError
        return encode_message(messages.popleft())

    monkeypatch.setattr(core_process.wire, "is_readable", lambda _: bool(messages))
    with pytest.raises(EOFError):
        core_process._serve(engine, Mock(recv=receive), Mock(send=send), lacks_vocabulary=False)
    assert [[one.identity for one in step.adapters] for step in sent] == [[], ["one"], [], []]
    assert [[one.request_id for one in step.outputs] for step in sent] == [[], [], ["a"], ["a"]]


def test_a_step_follows_messages_that_bring_work_or_end_it() -> None:
    engine, _ = core()
    sender = Mock()
    for message, is_followed in (
        (request("a"), True), (Abort("a"), True), (SetPaused(False), True), (ResetCache(False), False),
        (DropCacheSession("s", None), False), (Trials(0), False),
    ):  # fmt: skip
        assert core_process._handle(engine, sender, encode_message(message)) == is_followed
    assert [decode_core_message(call.args[0]) for call in sender.send.call_args_list] == [CacheWasReset()] * 2


@pytest.mark.parametrize(("has_message", "num_saved"), [(False, 3), (True, 0)])
def test_an_idle_core_saves_blocks_until_a_message_comes(
    monkeypatch: pytest.MonkeyPatch, has_message: bool, num_saved: int
) -> None:
    monkeypatch.setattr(core_process.wire, "is_readable", lambda _: has_message)
    engine = Mock(has_work=False, save_blocks=Mock(side_effect=[True, True, False]))
    with pytest.raises(EOFError):
        core_process._serve(engine, Mock(recv=Mock(side_effect=EOFError)), Mock(), lacks_vocabulary=False)
    assert engine.save_blocks.call_count == num_saved


@pytest.mark.parametrize("lacks_vocabulary", [True, False])
def test_a_core_that_has_nothing_to_do_makes_the_vocabulary_for_grammars_once(lacks_vocabulary: bool) -> None:
    engine = Mock(has_work=False, save_blocks=Mock(return_value=False))
    load, counts = engine.executor.load_vocabulary, list[int]()

    def next_message() -> bytes:
        counts.append(load.call_count)
        if len(counts) == 4:
            raise EOFError
        return encode_message(Trials(0))

    # A message comes before a second is over; then none does.
    receiver = Mock(get=Mock(return_value=0), poll=Mock(side_effect=[1, 0]), recv=next_message)
    with pytest.raises(EOFError):
        core_process._serve(engine, receiver, Mock(), lacks_vocabulary=lacks_vocabulary)
    assert counts == ([0, 1, 1, 1] if lacks_vocabulary else [0, 0, 0, 0])


@pytest.mark.parametrize(("last_line", "seconds"), [([b"7.5"], 7.5), ([], core_process._ORPHAN_SAVING_S)])
def test_blocks_are_saved_at_the_end_for_longer_while_somebody_waits(
    last_line: list[bytes], seconds: float, caplog: pytest.LogCaptureFixture
) -> None:
    for is_saved in (True, False):
        disk = Mock(num_unwritten=2, wait_until_saved=Mock(return_value=is_saved))
        lines = queue.SimpleQueue[bytes]()
        for line in last_line:
            lines.put(line)
        core_process._save_blocks(disk, lines)
        disk.wait_until_saved.assert_called_once_with(seconds)
        assert ("2 blocks of the KV cache were not saved on disk within" in caplog.text) != is_saved
