"""How `AsyncLLMEngine` stands by its core, with a core that fails as the test tells it to."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo import SamplingParams
from octavo.config import EngineConfig
from octavo.engine import async_engine, restart_policy
from octavo.engine.async_engine import AsyncLLMEngine
from octavo.engine.core_client import CoreClient
from octavo.engine.wire import FrontendMessage, SetPaused
from octavo.errors import EngineDeadError, EngineRestartingError, EngineStoppingError, LoadError, RequestError
from octavo.metrics.prometheus import EngineMetrics
from octavo.request import EngineRequest
from tests.engine.stub_engine import ANSWER, EXIT, FAIL, HANG, THREE_CORES, ask, until_ready
from tests.waiting import Clock, until


def let_hang(hang: Path, hangs: bool = True) -> None:
    if hangs:
        hang.touch()
    else:
        hang.unlink()


def test_a_core_that_fails_is_replaced_and_how_it_failed_is_for_the_log_only(
    with_engine: Callable[..., EngineMetrics], caplog: pytest.LogCaptureFixture
) -> None:
    async def use(engine: AsyncLLMEngine) -> None:
        assert await ask(engine, ANSWER) == "length"
        others = [asyncio.create_task(ask(engine, HANG, str(i))) for i in range(3)]
        await asyncio.sleep(0)
        for request in [ask(engine, FAIL), *others]:
            with pytest.raises(EngineDeadError) as failed:
                await request
            assert "secret" not in str(failed.value)
        await until_ready(engine)
        assert await ask(engine, ANSWER) == "length"

    metrics = with_engine(use, on_engine_death="fail", max_restarts=1)
    assert "/secret/path" in caplog.text
    assert metrics.num_restarts == 1
    assert metrics.num_finished == {"stop": 0, "length": 2, "abort": 0, "error": 4}


def test_requests_during_the_outage_are_told_so_and_the_engine_gives_up_after_the_last_restart(
    with_engine: Callable[..., EngineMetrics], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart_policy, "MAX_DELAY_S", 0.0)

    async def use(engine: AsyncLLMEngine) -> None:
        await engine.wait_ready()
        for _ in range(3):
            await until_ready(engine)
            with pytest.raises(EngineDeadError, match="exit status 7"):
                await ask(engine, EXIT)
            if not engine.has_failed:
                with pytest.raises(EngineRestartingError, match="exit status 7"):
                    await ask(engine, ANSWER)
        await engine.wait_failed()
        assert engine.has_failed
        with pytest.raises(EngineDeadError, match="exit status 7"):
            await engine.check_health()

    assert with_engine(use, on_engine_death="fail", max_restarts=2).num_restarts == 2


def test_an_engine_that_cannot_be_made_leaves_no_core(
    stub_config: EngineConfig, cores: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(config: EngineConfig, tokenizer: object) -> None:
        raise LoadError("the checkpoint has no preprocessor_config.json.")

    monkeypatch.setattr(async_engine, "InputProcessor", fail)
    with pytest.raises(LoadError):
        AsyncLLMEngine(stub_config)
    [core] = cores
    assert core.poll() is not None


def test_a_core_that_hangs_is_killed_and_an_idle_one_is_not(
    with_engine: Callable[..., EngineMetrics], clock: Clock
) -> None:
    async def use(engine: AsyncLLMEngine) -> None:
        assert await ask(engine, ANSWER) == "length"
        for _ in range(20):
            await clock.pass_time(60)
        assert engine.is_ready, "idle for longer than a step may take"
        hanging = asyncio.create_task(ask(engine, HANG))
        await until(lambda: engine._output_processor.requests)
        core = engine._supervisor.core.process
        for _ in range(5):
            await clock.pass_time(60)
        assert core.poll() is None
        for _ in range(5):
            await clock.pass_time(60)
        await until(lambda: core.poll() is not None)
        with pytest.raises(EngineDeadError, match=r"no step for 400 s"):
            await hanging
        await until_ready(engine)
        assert await ask(engine, ANSWER) == "length"

    assert with_engine(use, on_engine_death="fail", max_restarts=1, step_timeout_s=400).num_restarts == 1


def test_a_core_that_hangs_while_it_loads_is_the_end_of_the_first_start(
    with_engine: Callable[..., EngineMetrics], hang: Path, caplog: pytest.LogCaptureFixture
) -> None:
    let_hang(hang)

    async def use(engine: AsyncLLMEngine) -> None:
        with pytest.raises(EngineDeadError, match=r"not ready after 0\.3 s and was killed"):
            await engine.wait_ready()
        assert engine.has_failed
        assert engine._supervisor.core.process.wait() == -signal.SIGKILL

    assert with_engine(use, max_restarts=3, ready_timeout_s=0.3).num_restarts == 0
    assert not caplog.messages, "who waits for the start reports its error"


def test_a_core_that_hangs_while_it_starts_again_has_died_once_more(
    with_engine: Callable[..., EngineMetrics],
    hang: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(restart_policy, "MAX_DELAY_S", 0.0)

    async def use(engine: AsyncLLMEngine) -> None:
        assert await ask(engine, ANSWER) == "length"
        let_hang(hang)
        engine._supervisor.ready_timeout_s = 0.3
        with pytest.raises(EngineDeadError):
            await ask(engine, EXIT)
        while "not ready after 0.3 s" not in caplog.text:
            with pytest.raises(EngineRestartingError):
                await engine.check_health()
            await asyncio.sleep(0)
        let_hang(hang, False)
        engine._supervisor.ready_timeout_s = None
        await until_ready(engine)
        assert await ask(engine, ANSWER) == "length"

    assert with_engine(use, on_engine_death="fail", max_restarts=20).num_restarts >= 2


def test_a_deadline_ends_what_the_core_does_not(with_engine: Callable[..., EngineMetrics], clock: Clock) -> None:
    async def use(engine: AsyncLLMEngine) -> None:
        hanging = asyncio.create_task(ask(engine, HANG, deadline=clock.now() + 500))
        await until(lambda: engine._output_processor.requests)
        await clock.pass_time(400)
        assert not hanging.done()
        await clock.pass_time(101)
        assert await hanging == "abort"
        assert await ask(engine, HANG, deadline=clock.now() - 5) == "abort", "it was over before it began"
        assert await ask(engine, ANSWER, deadline=clock.now() + 1000) == "length"

    assert with_engine(use).num_finished["abort"] == 2


def test_ending_all_gives_those_that_have_not_begun_an_error(with_engine: Callable[..., EngineMetrics]) -> None:
    async def use(engine: AsyncLLMEngine) -> None:
        waiting = asyncio.create_task(ask(engine, HANG))
        await until(lambda: engine._output_processor.requests)
        await engine.abort_all_for_shutdown()
        with pytest.raises(EngineStoppingError):
            await waiting

    with_engine(use)


@pytest.mark.parametrize("what", [EXIT, FAIL])
def test_nothing_waits_for_a_process_on_the_event_loop(
    what: list[int], with_engine: Callable[..., EngineMetrics], monkeypatch: pytest.MonkeyPatch
) -> None:
    wait, is_on_loop = CoreClient.wait, list[bool]()

    def note(core: CoreClient) -> None:
        is_on_loop.append(threading.current_thread() is threading.main_thread())
        wait(core)

    monkeypatch.setattr(CoreClient, "wait", note)

    async def use(engine: AsyncLLMEngine) -> None:
        with pytest.raises(EngineDeadError):
            await ask(engine, what)
        await until_ready(engine)

    with_engine(use, on_engine_death="fail", max_restarts=1)
    assert is_on_loop == [False]


def test_requests_go_on_with_the_next_core_and_one_that_kills_cores_is_refused(
    with_engine: Callable[..., EngineMetrics], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart_policy, "MAX_DELAY_S", 0.0)

    async def use(engine: AsyncLLMEngine) -> None:
        await engine.wait_ready()
        hanging = asyncio.create_task(ask(engine, HANG, "hangs"))
        assert await ask(engine, THREE_CORES) == "length"
        late = asyncio.create_task(ask(engine, HANG, "late"))
        with pytest.raises(RequestError, match="a third time while it computed the request alone") as refused:
            await ask(engine, EXIT, "kills")
        assert (refused.value.status, refused.value.code) == (500, "request_kills_engine")
        await until_ready(engine)
        assert await ask(engine, ANSWER) == "length"
        await engine.abort(["hangs", "late"])
        assert [await hanging, await late] == ["abort", "abort"]

    metrics = with_engine(use, max_restarts=9)
    assert metrics.num_restarts == 5 and metrics.num_continued >= 5
    assert metrics.num_finished == {"stop": 0, "length": 2, "abort": 2, "error": 1}


def test_a_request_can_be_ended_while_there_is_no_core(
    with_engine: Callable[..., EngineMetrics], hang: Path, clock: Clock
) -> None:
    async def use(engine: AsyncLLMEngine) -> None:
        await engine.wait_ready()
        tasks = [asyncio.create_task(ask(engine, HANG, "aborted"))]
        tasks += [asyncio.create_task(ask(engine, HANG, "late", deadline=clock.now() + 500))]
        await until(lambda: len(engine._output_processor.requests) == 2)
        let_hang(hang)
        engine._supervisor.core.kill()
        await until(lambda: not engine.is_ready)
        await engine.abort("aborted")
        await clock.pass_time(501)
        assert [await task for task in tasks] == ["abort", "abort"]

    with_engine(use, max_restarts=1)


def test_a_halted_engine_stays_halted_with_its_next_core(
    with_engine: Callable[..., EngineMetrics], sent: list[FrontendMessage]
) -> None:
    async def use(engine: AsyncLLMEngine) -> None:
        await engine.pause_generation("keep")
        engine._supervisor.core.kill()
        await until(lambda: not engine.is_ready)
        await until_ready(engine)
        assert [one for one in sent if isinstance(one, SetPaused)] == [SetPaused(True)] * 2
        await engine.resume_generation()

    with_engine(use, max_restarts=1)


def test_a_pause_that_waits_for_kept_requests_has_the_core_finish_them(
    with_engine: Callable[..., EngineMetrics], sent: list[FrontendMessage]
) -> None:
    async def use(engine: AsyncLLMEngine) -> None:
        for mode in ("keep", "wait", "wait"):
            await engine.pause_generation(mode)
            assert await engine.is_paused()
        assert [one for one in sent if isinstance(one, SetPaused)] == [SetPaused(True), SetPaused(False)]

    with_engine(use)


def test_a_request_that_another_server_began_is_with_the_core_before_its_caller_has_read(
    with_engine: Callable[..., EngineMetrics], sent: list[FrontendMessage]
) -> None:
    """Otherwise a slow caller's request would pass for a hang, or go to a core that is started again twice."""

    async def use(engine: AsyncLLMEngine) -> None:
        params = SamplingParams(max_tokens=9, detokenize=False)
        request = engine.inputs.process({"prompt_token_ids": HANG}, params)
        request.already_sent_token_ids = [[70, 71], [72]]
        outputs = engine.generate_from(request)
        assert (await anext(outputs)).outputs[0].token_ids[:2] == [70, 71]
        assert [one.output_token_ids for one in sent if isinstance(one, EngineRequest)] == [{0: [70, 71, 72]}]
        await outputs.aclose()

    with_engine(use)
