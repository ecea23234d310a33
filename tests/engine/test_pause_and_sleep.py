"""Pause, sleep and what they do to those who wait, with a core that has no model."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Callable

import pytest

from octavo.engine import pause_and_sleep
from octavo.engine.async_engine import AsyncLLMEngine
from octavo.engine.wire import FrontendMessage, GetLiveView, SetPaused, Trials
from octavo.errors import EngineDeadError, EngineRestartingError, EngineStoppingError
from octavo.request import AdapterSource
from tests.engine.stub_engine import ANSWER, HANG, Use, ask, until_ready
from tests.waiting import Clock, until

WithEngine = Callable[[Use], object]


async def held(engine: AsyncLLMEngine, name: str = "r", deadline: float | None = None) -> asyncio.Task[str | None]:
    """A request that waits because the engine is paused."""
    task = asyncio.create_task(ask(engine, ANSWER, name, deadline))
    await until(lambda: name in engine._streams)
    return task


def test_whoever_waits_for_a_paused_engine_can_still_be_ended(with_engine: WithEngine, clock: Clock) -> None:
    async def use(engine: AsyncLLMEngine) -> None:
        await engine.pause_generation("keep")
        late = await held(engine, "late", clock.now() + 500)
        aborted, cancelled, patient = await held(engine, "a"), await held(engine, "c"), await held(engine, "p")
        await engine.abort("a")
        cancelled.cancel()
        clock.advance(501)
        assert await asyncio.gather(late, aborted) == ["abort", "abort"]
        await engine.pause_generation("abort")
        assert not patient.done(), "it is not under way"
        await engine.resume_generation()
        assert await patient == "length"
        assert cancelled.cancelled()
        assert not engine._streams and not engine._output_processor.requests

    with_engine(use)


def test_nothing_comes_after_a_pause_that_keeps_requests(with_engine: WithEngine) -> None:
    async def use(engine: AsyncLLMEngine) -> None:
        asking = asyncio.create_task(ask(engine, ANSWER, "r"))
        await until(lambda: asking.done() or engine._output_processor.requests)
        await engine.pause_generation("keep")
        assert not engine._output_processor.requests, "the core had answered before it paused"
        assert await asking == "length"

    with_engine(use)


def test_a_pause_does_not_take_an_earlier_view_for_the_answer_to_it(
    with_engine: WithEngine, sent: list[FrontendMessage]
) -> None:
    async def use(engine: AsyncLLMEngine) -> None:
        await engine.wait_ready()
        await asyncio.gather(engine.live_view(), engine.pause_generation("keep"))
        assert [one for one in sent if not isinstance(one, Trials)] == [GetLiveView(), SetPaused(True), GetLiveView()]

    with_engine(use)


def test_a_pause_that_keeps_requests_waits_for_a_slow_step(
    with_engine: WithEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pause_and_sleep, "_LIVE_VIEW_TIMEOUT_S", 0)

    async def use(engine: AsyncLLMEngine) -> None:
        await engine.wait_ready()
        core = engine._supervisor.core.process
        core.send_signal(signal.SIGSTOP)
        assert await engine.live_view() is None
        pausing = asyncio.create_task(engine.pause_generation("keep"))
        for _ in range(9):
            assert await engine.live_view() is None
        assert not pausing.done()
        assert engine._pause_and_sleep.may_compute, "the watchdog ends a core whose step hangs"
        core.send_signal(signal.SIGCONT)
        await pausing
        assert not engine._pause_and_sleep.may_compute

    with_engine(use)


@pytest.mark.parametrize("how", ["server stops", "shutdown", "core dies"])
def test_whoever_waits_for_a_paused_engine_is_told_of_its_end(with_engine: WithEngine, how: str) -> None:
    async def use(engine: AsyncLLMEngine) -> None:
        await engine.pause_generation("keep")
        waiting = await held(engine)
        if how == "server stops":
            await engine.abort_all_for_shutdown()
        elif how == "shutdown":
            engine.shutdown()
        else:
            engine._supervisor.core.process.kill()
        with pytest.raises(EngineDeadError if how == "core dies" else EngineStoppingError):
            await waiting

    with_engine(use)


def test_a_pause_that_fails_halfway_holds_no_requests(with_engine: WithEngine) -> None:
    """As the core ends before it answers."""

    async def use(engine: AsyncLLMEngine) -> None:
        await engine.wait_ready()
        control, supervisor = engine._pause_and_sleep, engine._supervisor

        def suspend() -> bool:
            supervisor._outage = EngineRestartingError("it is being started again.")
            return True

        control._is_idle = suspend
        for refused in (engine.pause_generation(), engine.sleep(1)):
            with pytest.raises(EngineRestartingError):
                await refused
            supervisor._outage = None
            assert not await engine.is_paused() and not await engine.is_sleeping()
        control._is_idle = lambda: True
        await engine.pause_generation()
        control._is_idle = suspend
        with pytest.raises(EngineRestartingError):
            await engine.sleep(1)
        supervisor._outage = None
        assert await engine.is_paused() and control.sleep_level == 0, "as before"
        await engine.resume_generation()
        assert await ask(engine, ANSWER) == "length"

    with_engine(use)


def test_falling_asleep_twice_at_once_is_falling_asleep(
    with_engine: WithEngine, cores: list[subprocess.Popen[bytes]]
) -> None:
    async def use(engine: AsyncLLMEngine) -> None:
        assert engine.metrics is not None and engine.metrics.sleep_level == 0
        await asyncio.gather(engine.sleep(2), engine.sleep(2, "wait"))
        assert await engine.is_sleeping()
        assert engine.metrics.sleep_level == 2
        assert 'vllm:engine_sleep_state{engine="0",model_name="stub",sleep_state="discard_all"} 1.0' in (
            engine.metrics.render()[0].decode()
        )
        await engine.wake_up(["weights"])
        assert engine.metrics.sleep_level == 2, "half of it sleeps"
        await engine.wake_up()
        assert engine.metrics.sleep_level == 0
        assert await ask(engine, ANSWER) == "length"

    with_engine(use)
    assert len(cores) == 2


def test_who_is_woken_while_falling_asleep_wakes_with_one_core(
    with_engine: WithEngine, cores: list[subprocess.Popen[bytes]]
) -> None:
    async def use(engine: AsyncLLMEngine) -> None:
        falling_asleep = asyncio.create_task(engine.sleep(2))
        while not await engine.is_sleeping():  # noqa: ASYNC110
            await asyncio.sleep(0)
        await engine.wake_up()
        await falling_asleep
        assert await ask(engine, ANSWER) == "length"

    with_engine(use)
    assert len(cores) == 2, "none is left that nobody uses"


@pytest.mark.parametrize(("delay_s", "num_dead"), [(0.0, 2), (50.0, 1)])
def test_an_engine_whose_core_dies_while_it_falls_asleep_has_no_core_while_it_sleeps(
    with_engine: WithEngine, cores: list[subprocess.Popen[bytes]], clock: Clock, monkeypatch: pytest.MonkeyPatch,
    delay_s: float, num_dead: int,
) -> None:  # fmt: skip
    """The request that it waits for has gone before the next core was ready, or even started."""

    async def use(engine: AsyncLLMEngine) -> None:
        monkeypatch.setattr(engine._supervisor, "_restart_delay", lambda: delay_s)
        slow = asyncio.create_task(ask(engine, HANG, "slow"))
        await until(lambda: engine._output_processor.requests)
        falling_asleep = asyncio.create_task(engine.sleep(2, "wait"))
        await until(lambda: engine._pause_and_sleep.is_paused)
        cores[0].kill()
        await until(lambda: engine.unavailable_error)
        await until(lambda: delay_s or len(cores) == num_dead)
        await engine.abort("slow")
        await asyncio.gather(slow, falling_asleep)
        await clock.pass_time(60)
        await until(lambda: engine.unavailable_error is None)
        assert len(cores) == num_dead + 1, "the last one waits for the end of sleep"
        await engine.wake_up()
        assert await ask(engine, ANSWER) == "length"
        await engine.sleep(2)
        await engine.wake_up()
        assert await ask(engine, ANSWER) == "length"

    with_engine(use, max_restarts=1)
    assert len(cores) == num_dead + 2


def test_an_engine_that_is_resumed_while_it_waits_to_sleep_sleeps_closed(with_engine: WithEngine) -> None:
    async def use(engine: AsyncLLMEngine) -> None:
        slow = asyncio.create_task(ask(engine, HANG, "slow"))
        while not engine._output_processor.requests:  # noqa: ASYNC110
            await asyncio.sleep(0)
        falling_asleep = asyncio.create_task(engine.sleep(1, "wait"))
        while not await engine.is_paused():  # noqa: ASYNC110
            await asyncio.sleep(0)
        await engine.resume_generation()
        await engine.abort("slow")
        await asyncio.gather(slow, falling_asleep)
        assert await engine.is_sleeping() and await engine.is_paused()

    with_engine(use)


def test_a_pause_that_waits_for_requests_ends_when_it_is_resumed(with_engine: WithEngine) -> None:
    async def use(engine: AsyncLLMEngine) -> None:
        slow = asyncio.create_task(ask(engine, HANG, "slow"))
        await until(lambda: engine._output_processor.requests)
        pausing = asyncio.create_task(engine.pause_generation("wait"))
        await until(lambda: engine._pause_and_sleep.is_paused)
        await engine.resume_generation()
        await until(pausing.done)
        assert not slow.done() and not await engine.is_paused()
        await engine.abort("slow")
        await slow

    with_engine(use)


def test_an_adapter_that_is_being_read_is_lost_with_a_core_that_sleeps(with_engine: WithEngine) -> None:
    async def use(engine: AsyncLLMEngine) -> None:
        await engine.wait_ready()
        loading = asyncio.create_task(engine.load_adapter(AdapterSource("a" * 32, "a", None, "a.gguf")))
        await asyncio.sleep(0)
        await engine.sleep(2)
        with pytest.raises(EngineDeadError, match="lost"):
            await loading

    with_engine(use)


def test_a_live_view_that_a_core_has_not_answered_ends_with_the_core(with_engine: WithEngine) -> None:
    async def use(engine: AsyncLLMEngine) -> None:
        await engine.wait_ready()
        core = engine._supervisor.core.process
        core.send_signal(signal.SIGSTOP)
        asked = asyncio.create_task(engine.live_view())
        await until(lambda: engine._pause_and_sleep._views)
        core.kill()
        await until(lambda: not engine.is_ready)
        await until_ready(engine)
        assert asked.done() and await asked is None
        assert await engine.live_view() is not None, "asked of the new core, not awaited from the old one"

    with_engine(use, max_restarts=1)
