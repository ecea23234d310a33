"""Several engines behind one name, on cores that do what the tests tell them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from octavo import LLM, AsyncEngineArgs, AsyncLLMEngine, SamplingParams
from octavo.engine import restarts
from octavo.engine.data_parallel import DataParallelEngine
from octavo.errors import ConfigError, EngineDeadError, RequestError
from octavo.metrics.prometheus import EngineMetrics
from tests.engine.stub_engine import ANSWER, EXIT, HANG, ask

Engines = Callable[..., EngineMetrics]


def finished(metrics: EngineMetrics, reason: str) -> list[int]:
    """By engine."""
    return [one.num_finished[reason] for one in metrics.of_engines]


def test_a_prompt_goes_where_it_is_cached_and_another_elsewhere(with_engine: Engines) -> None:
    async def use(engine: DataParallelEngine) -> None:
        await engine.wait_ready()
        for _ in range(3):
            assert await ask(engine, ANSWER + [5] * 48) == "length"
        assert finished(engine.metrics, "length") == [3, 0]  # type: ignore[arg-type]
        assert await ask(engine, ANSWER + [6] * 48) == "length"
        assert engine.stats.num_blocks == 20

    metrics = with_engine(use, replicas=2)
    assert finished(metrics, "length") == [3, 1]
    text = metrics.render()[0].decode()
    assert text.count("# HELP vllm:request_success_total") == 1
    for engine, count in enumerate([3, 1]):
        labels = f'engine="{engine}",finished_reason="length",model_name="stub"'
        assert f"vllm:request_success_total{{{labels}}} {count}.0" in text
        assert f'vllm:e2e_request_latency_seconds_count{{engine="{engine}",model_name="stub"}} {count}.0' in text


def test_an_engine_that_dies_takes_its_own_requests_only(with_engine: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "MAX_DELAY_S", 0.2)

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
        assert engine.is_ready and not engine.has_died
        await engine.check_health()
        assert await ask(engine, ANSWER) == "length", "the other one, meanwhile"
        while not all(one.is_ready for one in engine._engines):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for task in hanging:
            assert task in lost or not task.done()
        await engine.abort(names)
        assert [await task for task in hanging if task not in lost] == ["abort", "abort"]
        for number in range(6):
            assert await ask(engine, [*ANSWER, 9 + number]) == "length"

    metrics = with_engine(use, replicas=2, max_restarts=1)
    assert sorted(one.num_restarts for one in metrics.of_engines) == [0, 1]
    assert min(finished(metrics, "length")) > 0


def test_when_none_is_left_the_engine_has_died(with_engine: Engines) -> None:
    async def use(engine: DataParallelEngine) -> None:
        await engine.wait_ready()
        with pytest.raises(EngineDeadError, match="exit status 7"):
            await ask(engine, EXIT)
        assert await ask(engine, ANSWER) == "length"
        assert not engine.has_died
        with pytest.raises(EngineDeadError, match="exit status 7"):
            await ask(engine, EXIT)
        await asyncio.wait_for(engine.wait_failed(), 10)
        assert engine.has_died and not engine.is_ready
        for refused in (engine.check_health(), ask(engine, ANSWER)):
            with pytest.raises(EngineDeadError, match="exit status 7"):
                await refused

    with_engine(use, replicas=2)


def test_what_is_asked_of_all_is_done_by_all(with_engine: Engines) -> None:
    async def use(engine: DataParallelEngine) -> None:
        await engine.wait_ready()
        assert await ask(engine, ANSWER + [5] * 48) == "length"
        assert await engine.reset_prefix_cache()
        assert engine._router._replicas[0].index.num_found([]) == 0 == len(engine._router._replicas[0].index)
        await engine.pause_generation("wait")
        assert engine.is_paused and all(one.is_paused for one in engine._engines)
        waiting = asyncio.create_task(ask(engine, ANSWER, "waits"))
        await asyncio.sleep(0.05)
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


def test_engines_of_scripts_are_one() -> None:
    with pytest.raises(ConfigError, match="this is one engine; octavo serve runs several"):
        LLM(data_parallel_size=2)
    with pytest.raises(ConfigError, match="this is one engine; octavo serve runs several"):
        AsyncLLMEngine.from_engine_args(AsyncEngineArgs(data_parallel_size=2))
