"""Several engines behind one name, on cores that do what the tests tell them."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from octavo import LLM, AsyncEngineArgs, AsyncLLMEngine, LLMEngine, LoRARequest, RequestOutput, SamplingParams
from octavo.config import CacheConfig, EngineArgs, EngineConfig, EngineHostsConfig
from octavo.engine import restart_policy
from octavo.engine.data_parallel import DataParallelEngine
from octavo.engine.data_parallel_llm import DataParallelLLMEngine
from octavo.engine.engine_calls import GenerateArgs
from octavo.engine.engine_hub import EngineHub
from octavo.engine.wire import UnloadAdapter
from octavo.errors import ConfigError, EngineDeadError, EngineRestartingError, OctavoError, RequestError
from octavo.metrics.prometheus import EngineMetrics
from octavo.metrics.reader import Histogram
from octavo.request import AdapterSource
from tests.engine.stub_engine import ANSWER, EXIT, HANG, THREE_CORES, ask
from tests.waiting import until, within

Engines = Callable[..., EngineMetrics]


def finished(metrics: EngineMetrics, reason: str) -> list[int]:
    """By engine."""
    return [one.num_finished[reason] for one in metrics.of_engines]


def test_a_prompt_goes_where_it_is_cached_and_another_elsewhere(
    with_engine: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    async def use(engine: DataParallelEngine) -> None:
        await engine.wait_ready()
        for _ in range(3):
            assert await ask(engine, ANSWER + [5] * 48) == "length"
        assert finished(engine.metrics, "length") == [3, 0]  # type: ignore[arg-type]
        assert await ask(engine, ANSWER + [6] * 48) == "length"
        assert engine.stats.num_blocks == 20
        for config in (engine.vllm_config, await engine.get_vllm_config()):
            assert config.parallel_config.data_parallel_size == config.parallel_config.world_size_across_dp == 2
            assert config.cache_config.num_gpu_blocks == 10
        caplog.set_level("INFO")
        await engine.do_log_stats()
        assert [line.partition(" tok/s")[0].split()[:3] for line in caplog.messages[-2:]] == [
            ["engine", f"{number}:", "prompt"] for number in (0, 1)
        ]

    metrics = with_engine(use, replicas=2)
    assert finished(metrics, "length") == [3, 1]
    text = metrics.render()[0].decode()
    assert text.count("# HELP vllm:request_success_total") == 1
    for engine, count in enumerate([3, 1]):
        labels = f'engine="{engine}",finished_reason="length",model_name="stub"'
        assert f"vllm:request_success_total{{{labels}}} {count}.0" in text
        assert f'vllm:e2e_request_latency_seconds_count{{engine="{engine}",model_name="stub"}} {count}.0' in text


def test_a_request_goes_to_the_engine_that_it_names(with_engine: Engines) -> None:
    async def use(engine: DataParallelEngine) -> None:
        await engine.wait_ready()
        for number, rank in enumerate([1, 1, 0, 1]):
            params = SamplingParams(max_tokens=1, temperature=0)
            given = engine.generate({"prompt_token_ids": ANSWER}, params, str(number), data_parallel_rank=rank)
            assert [output.finished async for output in given][-1]
        for wrong in (2, -1, "1", True):
            given = engine.generate({"prompt_token_ids": ANSWER}, None, "wrong", data_parallel_rank=wrong)  # type: ignore[arg-type]
            with pytest.raises(RequestError, match="data_parallel_rank must be 0 to 1"):
                await anext(given)

    assert finished(with_engine(use, replicas=2), "length") == [1, 3]


def test_an_adapter_that_a_request_names_is_every_engines(
    with_engine: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: AdapterSource) -> None:
        raise RequestError("it cannot be read")

    async def use(engine: DataParallelEngine) -> None:
        await engine.wait_ready()
        source, asked = AdapterSource("identity", "sql", None, "nowhere"), LoRARequest("sql", 7, "nowhere")
        monkeypatch.setattr(engine.inputs, "find_adapter", lambda _: source)
        told: list[tuple[int, object]] = []
        for number, one in enumerate(engine._engines):
            monkeypatch.setattr(one._supervisor, "tell", lambda message, number=number: told.append((number, message)))
        await engine.prepare(GenerateArgs({"prompt_token_ids": ANSWER}, None, "a", asked))
        assert [await one.list_loras() for one in engine._engines] == [{7}, {7}]
        assert await engine.remove_lora(7) and not await engine.remove_lora(7)
        assert told == [(0, UnloadAdapter("identity")), (1, UnloadAdapter("identity"))]
        for one in engine._engines:
            monkeypatch.setattr(one, "load_adapter", fail)
        with pytest.raises(RequestError, match="cannot be read"):
            await engine.add_lora(asked)
        assert await engine.list_loras() == set(), "which could not be loaded"

    with_engine(use, replicas=2)


def test_the_error_of_a_request_that_was_aborted_is_not_raised() -> None:
    """Both ended before the caller took the first error."""
    engine = DataParallelLLMEngine.__new__(DataParallelLLMEngine)
    engine._failed, engine._outputs = [], queue.SimpleQueue()
    asked: Any = {name: SimpleNamespace(external_id=name) for name in "ab"}
    engine._in_flight = {name: (one, Future()) for name, one in asked.items()}
    for name, one in asked.items():
        engine._outputs.put((one, EngineDeadError(name)))
    with pytest.raises(EngineDeadError, match="a"):
        engine.step()
    engine.abort_request("b")
    assert not engine.has_unfinished_requests()


def test_an_engine_that_dies_takes_its_own_requests_only(with_engine: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart_policy, "MAX_DELAY_S", 0.0)

    async def use(engine: DataParallelEngine) -> None:
        await engine.wait_ready()
        names = [f"hangs {number}" for number in range(4)]
        hanging = [asyncio.create_task(ask(engine, [*HANG, number], name)) for number, name in enumerate(names)]
        await asyncio.sleep(0)
        with pytest.raises(EngineDeadError, match="exit status 7"):
            await ask(engine, EXIT)
        lost = [task for task in hanging if task.done()]
        assert len(lost) == 2
        for task in lost:
            with pytest.raises(EngineDeadError, match="the request is lost"):
                task.result()
        assert engine.is_ready and not engine.has_failed
        await engine.check_health()
        assert await ask(engine, ANSWER) == "length", "the other one, meanwhile"
        await until(lambda: all(one.is_ready for one in engine._engines))
        for task in hanging:
            assert task in lost or not task.done()
        await engine.abort(names)
        assert [await task for task in hanging if task not in lost] == ["abort", "abort"]
        for number in range(6):
            assert await ask(engine, [*ANSWER, 9 + number]) == "length"

    metrics = with_engine(use, replicas=2, on_engine_death="fail", max_restarts=1)
    assert sorted(one.num_restarts for one in metrics.of_engines) == [0, 1]
    assert min(finished(metrics, "length")) > 0


def test_the_others_go_on_with_the_requests_of_an_engine_that_dies(with_engine: Engines) -> None:
    """At once: it is not started again."""

    async def use(engine: DataParallelEngine) -> None:
        await engine.wait_ready()
        params = SamplingParams(max_tokens=3, detokenize=False)
        found: list[list[int]] = []

        async def ask_three() -> None:
            request = engine.inputs.process({"prompt_token_ids": THREE_CORES}, params)
            found.extend([output.outputs[0].token_ids async for output in engine.generate_from(request, "three")])

        asked = asyncio.create_task(ask_three())
        hanging = [asyncio.create_task(ask(engine, [*HANG, number], f"hangs {number}")) for number in range(4)]
        await asked
        assert found[-1] == [70, 71, 72]
        [left] = [one for one in engine._engines if one.is_ready]
        assert {*left._streams} == {f"hangs {number}" for number in range(4)}
        await engine.abort("hangs 0")
        assert await hanging[0] == "abort"
        left._supervisor.core.kill()
        for task in hanging[1:]:
            with pytest.raises(EngineDeadError, match="exit status -9"):
                await task

    metrics = with_engine(use, replicas=3)
    assert sum(one.num_continued for one in metrics.of_engines) >= 2
    assert sum(finished(metrics, "length")) == 1


def test_engines_that_are_left_are_controlled_without_one_that_has_died(with_engine: Engines) -> None:
    async def use(engine: DataParallelEngine) -> None:
        await engine.wait_ready()
        with pytest.raises(EngineDeadError, match="exit status 7"):
            await ask(engine, EXIT)
        await until(lambda: sum(one.has_failed for one in engine._engines) == 1)
        await engine.pause_generation("keep")
        assert await engine.is_paused()
        await engine.resume_generation()
        assert await engine.reset_prefix_cache()
        await engine.sleep()
        assert await engine.is_sleeping()
        await engine.wake_up()
        assert await ask(engine, ANSWER) == "length"

    with_engine(use, replicas=2, on_engine_death="fail")


def test_none_stays_paused_or_asleep_if_one_cannot_follow(with_engine: Engines) -> None:
    """It is started again now, or its core dies meanwhile."""

    async def use(engine: DataParallelEngine) -> None:
        await engine.wait_ready()
        supervisor = engine._engines[1]._supervisor
        supervisor._outage = EngineRestartingError("it is being started again.")
        for refused in (engine.pause_generation(), engine.pause_generation("keep"), engine.sleep(1), engine.sleep(2)):
            with pytest.raises(EngineRestartingError):
                await refused
            assert not await engine.is_paused() and not await engine.is_sleeping()
        supervisor._outage = None
        await engine.pause_generation("keep")
        supervisor._outage = EngineRestartingError("it is being started again.")
        for refused in (engine.pause_generation(), engine.sleep(1)):
            with pytest.raises(EngineRestartingError):
                await refused
        supervisor._outage = None
        assert [await one.is_paused() for one in engine._engines] == [True, True], "as before"
        await engine.resume_generation()
        for number in range(4):
            assert await ask(engine, [*ANSWER, 9 + number]) == "length"

    with_engine(use, replicas=2)


def test_when_none_is_left_the_engine_has_died(with_engine: Engines) -> None:
    async def use(engine: DataParallelEngine) -> None:
        await engine.wait_ready()
        with pytest.raises(EngineDeadError, match="exit status 7"):
            await ask(engine, EXIT)
        assert await ask(engine, ANSWER) == "length"
        assert not engine.has_failed
        with pytest.raises(EngineDeadError, match="exit status 7"):
            await ask(engine, EXIT)
        await engine.wait_failed()
        assert engine.has_failed and not engine.is_ready
        for refused in (engine.check_health(), ask(engine, ANSWER)):
            with pytest.raises(EngineDeadError, match="exit status 7"):
                await refused

    with_engine(use, replicas=2, on_engine_death="fail")


def test_what_is_asked_of_all_is_done_by_all(with_engine: Engines) -> None:
    async def use(engine: DataParallelEngine) -> None:
        await engine.wait_ready()
        assert await ask(engine, ANSWER + [5] * 48) == "length"
        assert await engine.reset_prefix_cache()
        assert engine._router._replicas[0].index.num_found([]) == 0 == len(engine._router._replicas[0].index)
        await engine.pause_generation("wait")
        assert await engine.is_paused() and all([await one.is_paused() for one in engine._engines])
        waiting = asyncio.create_task(ask(engine, ANSWER, "waits"))
        await until(lambda: any("waits" in one._streams for one in engine._engines))
        assert not waiting.done()
        with pytest.raises(RequestError, match="request id 'waits' is in use"):
            await ask(engine, ANSWER, "waits")
        await engine.resume_generation()
        assert await waiting == "length"
        outputs = [
            one async for one in engine.generate({"prompt_token_ids": ANSWER}, SamplingParams(max_tokens=1), "g")
        ]
        assert outputs[-1].finished and outputs[-1].request_id == "g"
        assert engine.config.num_slots == 16

    with_engine(use, replicas=2)


@pytest.mark.parametrize(("given", "own"), [(None, "2,3"), ("4,GPU-5,6,7", "6,7")])
def test_engines_of_a_host_have_gpus_of_their_own(
    with_engine: Engines, cores: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch, given: str | None,
    own: str,
) -> None:  # fmt: skip
    """Those behind the first engine's, whose core is started before it is known how many it has."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)

    def visible() -> set[str | None]:
        return {psutil.Process(core.pid).environ().get("CUDA_VISIBLE_DEVICES") for core in cores if core.poll() is None}

    async def use(engine: DataParallelEngine) -> None:
        await engine.wait_ready()
        assert visible() == {given, own}
        cores[1].kill()
        await until(lambda: len(cores) == 3 and all(one.is_ready for one in engine._engines))
        assert visible() == {given, own}
        assert [one.config.cache.memory_bytes for one in engine._engines] == [1000, 1000], "each has its own"
        await engine.sleep(2)
        await engine.wake_up()
        assert visible() == {given, own}

    cache = CacheConfig(16, None, 0.3, 0.9, 0, True, "bfloat16", memory_bytes=1000)
    changes = {"device": "cuda", "tensor_parallel_size": 2, "cache": cache}
    with_engine(use, replicas=2, changes=changes, max_restarts=1)


def test_hosts_with_servers_of_their_own_have_their_own_engines_numbers(
    with_engine: Engines, cores: list[subprocess.Popen[bytes]]
) -> None:
    async def use(engine: DataParallelEngine) -> None:
        await engine.wait_ready()
        for number in range(4):
            assert await ask(engine, [*ANSWER, 9 + number]) == "length"
        assert engine.config.num_slots == 16

    metrics = with_engine(use, replicas=6, engine_hosts=EngineHostsConfig(2, 3, "", 0, have_servers=True))
    assert len(cores) == 2
    assert finished(metrics, "length") == [2, 2]
    shown = metrics.render()[0].decode()
    for engine, expected in ((2, False), (3, True), (4, True), (5, False)):
        assert (f'vllm:request_success_total{{engine="{engine}"' in shown) == expected


def test_an_engine_with_a_server_of_its_own_is_alone_there(
    with_engine: Engines, cores: list[subprocess.Popen[bytes]]
) -> None:
    async def use(engine: AsyncLLMEngine) -> None:
        assert isinstance(engine, AsyncLLMEngine)
        await engine.wait_ready()
        assert await ask(engine, ANSWER) == "length"
        assert engine.config.num_slots == 8 and engine.config.data_parallel_rank == 5
        assert engine.config.cache.cpu_memory_utilization == 0.3, "this host has no other"

    metrics = with_engine(use, replicas=6, engine_hosts=EngineHostsConfig(1, 5, "", 0, have_servers=True))
    assert len(cores) == 1
    counted = 'vllm:request_success_total{engine="5",finished_reason="length",model_name="stub"} 1.0'
    assert counted in metrics.render()[0].decode()


@pytest.fixture
def llm(stub_config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    """Of two engines, each with a core that is the stub."""
    config = replace(stub_config, data_parallel_size=2)
    monkeypatch.setattr(EngineArgs, "create_engine_config", lambda args: config)
    with LLM() as found:
        yield found


def generate(llm: LLM, *beginnings: list[int], params: SamplingParams | None = None) -> list[RequestOutput]:
    prompts: list[Any] = [{"prompt_token_ids": [*beginning, 9 + number]} for number, beginning in enumerate(beginnings)]
    return llm.generate(prompts, params or SamplingParams(max_tokens=1), use_tqdm=False)


def test_metrics_of_a_script_are_those_of_each_engine(llm: LLM) -> None:
    generate(llm, *[ANSWER] * 6)
    counted = {one.labels["engine"]: one for one in llm.get_metrics() if one.name == "vllm:request_prompt_tokens"}
    assert sorted(counted) == ["0", "1"]
    counts = [one.count for one in counted.values() if isinstance(one, Histogram)]
    assert len(counts) == 2 and sum(counts) >= 6 and llm.llm_engine.model_config is llm.model_config


def test_a_script_has_several_engines_too(llm: LLM, cores: list[subprocess.Popen[bytes]]) -> None:
    """Also where an event loop runs already, as in notebooks."""
    with_processor = SamplingParams(max_tokens=1, logits_processors=[lambda tokens, logits: logits])

    async def in_a_loop() -> None:
        outputs = generate(llm, *[ANSWER] * 6)
        assert [output.prompt_token_ids for output in outputs] == [[1, 9 + number] for number in range(6)]
        assert all(output.finished and output.outputs[0].token_ids == [70] for output in outputs)
        assert isinstance(llm.llm_engine, DataParallelLLMEngine)
        replicas = llm.llm_engine._engine._router._replicas
        assert all(replica.num_recent_tokens > 0 for replica in replicas), "both have served"
        assert llm.reset_prefix_cache()
        adapter = LoRARequest("sql", 7, "nowhere")
        for level in (1, 2):
            llm.sleep(level)
            for call in (
                lambda: generate(llm, ANSWER), llm.reset_prefix_cache, lambda: llm.llm_engine.add_lora(adapter),
                lambda: llm.llm_engine.pin_lora(7),
            ):  # fmt: skip
                with pytest.raises(OctavoError, match="these engines sleep"):
                    call()
            assert not llm.llm_engine.remove_lora(7) and llm.llm_engine.list_loras() == set()
            llm.wake_up()
        assert generate(llm, ANSWER)[0].finished
        with pytest.raises(RequestError, match="logits_processors are Python callables"):
            generate(llm, ANSWER, params=with_processor)
        with pytest.raises(OctavoError, match="none has its core here"):
            _ = llm.core
        llm.close()
        with pytest.raises(OctavoError, match="or have been closed"):
            generate(llm, ANSWER)
        for call in (llm.llm_engine.list_loras, lambda: llm.llm_engine.remove_lora(7)):
            with pytest.raises(OctavoError, match="these engines have been closed"):
                call()

    asyncio.run(in_a_loop())
    assert [core.wait(within(10)) for core in cores] == [0] * 4, "two before level 2, and two after it"


def test_an_adapter_that_a_scripts_request_names_is_listed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    source, asked = AdapterSource("identity", "sql", None, "nowhere"), LoRARequest("sql", 7, "nowhere")
    monkeypatch.setattr(llm.llm_engine.inputs, "find_adapter", lambda _: source)
    once = SamplingParams(max_tokens=1)
    llm.llm_engine.add_request("a", {"prompt_token_ids": ANSWER}, once, lora_request=asked)
    assert llm.llm_engine.list_loras() == {7}
    assert llm.llm_engine.remove_lora(7) and llm.llm_engine.list_loras() == set()
    assert llm.generate({"prompt_token_ids": ANSWER}, once, use_tqdm=False, lora_request=asked)[0].finished
    assert llm.llm_engine.list_loras() == {7}


def test_a_scripts_engine_that_dies_costs_the_call_and_others_go_on(llm: LLM) -> None:
    with pytest.raises(EngineDeadError, match="exit status 7"):
        generate(llm, ANSWER, EXIT, HANG)
    assert not llm.llm_engine.has_unfinished_requests()
    assert [output.outputs[0].finish_reason for output in generate(llm, *[ANSWER] * 3)] == ["length"] * 3


def test_an_id_is_free_again_once_its_request_has_been_aborted(llm: LLM) -> None:
    """What the earlier one had brought is not the later one's."""
    engine = llm.llm_engine
    greedy = SamplingParams(max_tokens=1, temperature=0)
    for number in range(20):
        engine.add_request("a", {"prompt_token_ids": [*(HANG if number % 2 else ANSWER), number]}, greedy)
        with pytest.raises(RequestError, match="request id 'a' is in use"):
            engine.add_request("a", "text")
        engine.abort_request("a")
        engine.add_request("a", {"prompt_token_ids": [*ANSWER, 200, number]}, greedy)
        assert engine.get_num_unfinished_requests() == 1
        outputs = [output for _ in iter(engine.has_unfinished_requests, False) for output in engine.step()]
        assert [(output.request_id, output.prompt_token_ids) for output in outputs] == [("a", [*ANSWER, 200, number])]


def test_engines_of_programs_are_as_many_as_they_say(
    stub_config: EngineConfig, cores: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    create = AsyncEngineArgs.create_engine_config
    config = replace(stub_config, data_parallel_size=2, log_stats=True)
    monkeypatch.setattr(EngineArgs, "create_engine_config", lambda args: config)

    async def use(engine: AsyncLLMEngine) -> None:
        assert await ask(engine, ANSWER) == "length", "which waits"
        await engine.wait_ready()
        assert [await ask(engine, [*ANSWER, 9 + number], str(number)) for number in range(6)] == ["length"] * 6
        assert engine.is_running and not engine.is_stopped and not engine.errored
        assert await engine.get_tokenizer() is engine.tokenizer and not await engine.is_tracing_enabled()
        metrics = engine.metrics
        assert metrics is not None and sum(finished(metrics, "length")) == 7 and min(finished(metrics, "length")) > 0

    with contextlib.closing(LLMEngine.from_vllm_config(config)) as steps:
        assert isinstance(steps, DataParallelLLMEngine)
    quiet = AsyncLLMEngine.from_vllm_config(config, disable_log_stats=True)
    assert isinstance(quiet, DataParallelEngine) and quiet.metrics is None
    quiet.shutdown()
    cores.clear()
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs())
    try:
        asyncio.run(asyncio.wait_for(use(engine), within(60)))
    finally:
        engine.shutdown()
    assert engine.errored and "shut down" in str(engine.dead_error)
    with contextlib.closing(LLMEngine.from_engine_args(EngineArgs())) as steps:
        assert isinstance(steps, DataParallelLLMEngine)
        assert steps.add_request("a", {"prompt_token_ids": ANSWER}, SamplingParams(max_tokens=1)) == "a"
        assert steps.get_tokenizer() is steps.tokenizer
        assert steps.get_num_unfinished_requests() == 1 and steps.list_loras() == set()
        assert [output.finished for output in steps.step()] == [True]
        with pytest.raises(RequestError, match="'sql' needs --enable-lora"):
            steps.add_lora(LoRARequest("sql", 1, "nowhere"))
    assert len(cores) == 4
    monkeypatch.setattr(EngineArgs, "create_engine_config", create)
    monkeypatch.setenv("OCTAVO_NODES_TOKEN", "secret")
    with pytest.raises(ConfigError, match="LLMEngine run engines on this machine: leave --data-parallel-size-local"):
        LLM(data_parallel_size=2, data_parallel_size_local=1)


@pytest.mark.parametrize("is_hub", [False, True])
def test_all_cores_are_told_to_end_before_one_is_waited_for(is_hub: bool) -> None:
    calls = list[str]()
    engines = [
        Mock(begin_shutdown=lambda: calls.append("begin"), shutdown=lambda: calls.append("wait")) for _ in range(3)
    ]
    if is_hub:
        EngineHub.shutdown(Mock(_engines={i: Mock(supervisor=engine) for i, engine in enumerate(engines)}, fronts={}))
    else:
        DataParallelEngine.shutdown(Mock(_engines=engines))
    assert calls == ["begin"] * 3 + ["wait"] * 3
