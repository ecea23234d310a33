"""Several front ends over one hub, in one process, with cores that have no model."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import subprocess
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from octavo import SamplingParams
from octavo.config import EngineConfig
from octavo.engine import engine_hub, restart_policy
from octavo.engine.async_engine import AsyncLLMEngine, EngineHooks
from octavo.engine.engine_hub import EngineHub, FrontEnd
from octavo.engine.hub_link import HubLink
from octavo.engine.shared_engine import SharedEngine
from octavo.engine.wire import (
    Abort,
    AbortAll,
    DropCacheSession,
    FrontendMessage,
    GetLiveView,
    ResetCache,
    encode_message,
)
from octavo.errors import EngineDeadError, OctavoError, RequestError
from octavo.metrics.prometheus import EngineMetrics
from octavo.metrics.summed import snapshot
from octavo.request import EngineRequest
from octavo.stats import EngineStats
from tests.engine.stub_engine import ANSWER, EXIT, HANG, THREE_CORES, ask
from tests.waiting import Clock, until


class Front:
    """A front end in this process."""

    def __init__(self, hub: EngineHub, config: EngineConfig) -> None:
        self.hub, self.number = hub, hub.new_number()
        self.is_lost = asyncio.Event()
        self.link = HubLink(self.is_lost.set)
        self.metrics = EngineMetrics("stub", 64)
        self.metrics.counts_steps = False
        hooks = EngineHooks(make_core=self.link.make_core)
        self.engine = AsyncLLMEngine(config.replica(0), metrics=self.metrics, hooks=hooks)
        self.engine.inputs.be_one_of_several(self.number, self.number)
        self.shared = SharedEngine(self.engine, self.link.channels)

        async def tell_counts() -> Any:
            return msgspec.to_builtins(snapshot(self.metrics))

        self.link.channels.answering = {**self.shared.own_parts, "snapshot": tell_counts}
        self.attached: FrontEnd | None = None

    async def join(self) -> Front:
        ours, its = socket.socketpair()
        await self.link.channels.open(its)
        self.attached = await self.hub.attach(ours, self.number)
        await self.engine.wait_ready()
        await self.hub.begin(self.attached)
        return self

    async def leave(self) -> None:
        """End, as a process does that is killed."""
        self.link.channels.close()
        await until(lambda: self.attached not in self.hub.fronts.values())


@contextlib.asynccontextmanager
async def hub_of(config: EngineConfig, **options: Any) -> AsyncGenerator[EngineHub, None]:
    metrics = EngineMetrics("stub", 64)
    more = {"max_restarts": 0, "step_timeout_s": None, "ready_timeout_s": None} | options
    hub = EngineHub(config, metrics=metrics, **more)
    waiting = asyncio.ensure_future(hub.wait_failed())  # it listens to the cores
    try:
        yield hub
    finally:
        hub.shutdown()
        waiting.cancel()


Use = Callable[[EngineHub, Callable[[], Awaitable[Front]]], Awaitable[None]]


@pytest.fixture
def with_hub(stub_config: EngineConfig) -> Callable[..., None]:
    """Calls a function with a hub and what makes front ends."""

    def run(use: Use, **options: Any) -> None:
        async def go() -> None:
            async with hub_of(stub_config, **options) as hub:
                await use(hub, lambda: Front(hub, stub_config).join())

        asyncio.run(go())

    return run


async def counted(front: Front, name: str) -> list[float]:
    text, _ = await front.link.channels.call("metrics")
    return [float(value) for value in re.findall(rf"^{name}{{.*}} (\S+)$", text.decode(), re.MULTILINE)]


def test_answers_find_their_front_end_and_metrics_are_sums(with_hub: Callable[..., None]) -> None:
    async def use(hub: EngineHub, make: Callable[[], Awaitable[Front]]) -> None:
        one, other = await make(), await make()
        asked = [ask(front.engine, ANSWER, str(i)) for i in range(3) for front in (one, other)]
        assert await asyncio.gather(*asked) == ["length"] * 6
        assert not hub._engines[0]._is_busy(), "the watchdog would end the core"
        assert one.metrics.num_finished["length"] == other.metrics.num_finished["length"] == 3
        ended = 'vllm:request_success_total{engine="0",finished_reason="length",model_name="stub"} 6.0'
        for front in (one, other):
            text, _ = await front.link.channels.call("metrics")
            assert ended in text.decode()
        await other.leave()
        text, _ = await one.link.channels.call("metrics")
        assert ended in text.decode(), "what a front end had counted stays"
        assert hub.metrics.num_steps == 6, "steps are counted once"

    with_hub(use)


def test_a_front_end_that_ends_takes_its_requests_with_it_and_no_other_ones(
    with_hub: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(hub: EngineHub, make: Callable[[], Awaitable[Front]]) -> None:
        one, other = await make(), await make()
        told: list[FrontendMessage] = []
        supervisor = hub._engines[0].supervisor
        tell = supervisor.tell
        monkeypatch.setattr(supervisor, "tell", lambda message: (told.append(message), tell(message)))
        hanging = asyncio.create_task(ask(one.engine, HANG))
        await until(lambda: told)
        await one.leave()
        assert told[-1] == AbortAll(f"{one.number}-")
        assert told[0].request_id.startswith(told[-1].prefix)  # type: ignore[union-attr]
        assert one.is_lost.is_set()
        assert await ask(other.engine, ANSWER) == "length"
        assert await ask((await make()).engine, ANSWER) == "length"
        hanging.cancel()

    with_hub(use)


@pytest.mark.long
def test_all_front_ends_go_on_with_the_next_core(
    with_hub: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart_policy, "MAX_DELAY_S", 0.0)

    async def use(hub: EngineHub, make: Callable[[], Awaitable[Front]]) -> None:
        one, other = await make(), await make()
        asked = [ask(front.engine, what) for front, what in ((one, THREE_CORES), (other, THREE_CORES))]
        assert await asyncio.gather(*asked) == ["length", "length"]
        assert await asyncio.gather(ask(one.engine, ANSWER), ask(other.engine, ANSWER)) == ["length", "length"]
        assert await counted(one, "octavo:engine_restarts_total") == [hub.metrics.num_restarts]
        assert hub.metrics.num_restarts >= 2

    with_hub(use, max_restarts=5)


def test_no_front_end_stays_paused_if_one_cannot_pause(
    with_hub: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(**_: Any) -> None:
        raise RequestError("not now")

    async def use(hub: EngineHub, make: Callable[[], Awaitable[Front]]) -> None:
        one, other = await make(), await make()
        parts = other.link.channels.answering
        other.link.channels.answering = {**parts, "pause_generation": fail}
        with pytest.raises(RequestError, match="not now"):
            await one.shared.pause_generation()
        other.link.channels.answering = parts
        with pytest.raises(RequestError, match="mode must be one of abort, wait"):
            await one.shared.sleep(1, "keep")
        assert not await one.engine.is_paused() and not await other.engine.is_paused()
        other.link.channels.answering = {**parts, "sleep": fail}
        with pytest.raises(RequestError, match="not now"):
            await one.shared.sleep(1, "abort")
        for front in (one, other):
            assert not await front.engine.is_paused() and not await front.engine.is_sleeping()
        other.link.channels.answering = parts
        await one.shared.pause_generation()
        with pytest.raises(RequestError, match="mode must be one of"):
            await one.shared.pause_generation("bogus")
        assert await one.engine.is_paused() and await other.engine.is_paused()
        await one.shared.resume_generation()
        assert await ask((await make()).engine, ANSWER) == await ask(one.engine, ANSWER) == "length"

    with_hub(use)


def test_a_front_end_that_hangs_is_waited_for_only_while_it_answers(
    with_hub: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_hub, "_PROBE_S", 0.0)

    async def use(hub: EngineHub, make: Callable[[], Awaitable[Front]]) -> None:
        front, may_pause, probes = await make(), asyncio.Event(), list[str]()
        parts = front.link.channels.answering

        async def pause(**_: Any) -> None:
            await may_pause.wait()

        async def tell_counts() -> Any:
            probes.append("asked")
            if len(probes) == 3:
                may_pause.set()
            return await parts["snapshot"]()

        front.link.channels.answering = {**parts, "pause_generation": pause, "snapshot": tell_counts}
        await hub.tell_all("pause_generation")
        assert len(probes) >= 3 and front.attached in hub.fronts.values(), "it lives"
        may_pause.clear()
        front.link.channels.answering = {"pause_generation": pause, "snapshot": pause}
        monkeypatch.setattr(engine_hub, "_HANGS_S", 0.0)
        assert await hub.tell_all("pause_generation") == []
        await front.is_lost.wait()
        assert "front end 1 does not answer and is given up" in caplog.messages
        may_pause.set()

    with_hub(use)


def test_what_was_under_way_to_a_core_as_it_died_is_left_to_the_next_core(
    with_hub: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart_policy, "MAX_DELAY_S", 0.0)

    async def use(hub: EngineHub, make: Callable[[], Awaitable[Front]]) -> None:
        one, other = await make(), await make()
        engine = hub._engines[0]
        supervisor = engine.supervisor
        on_core_ended, told = supervisor._on_core_ended, list[FrontendMessage]()
        request = one.engine.inputs.process({"prompt_token_ids": ANSWER}, SamplingParams(max_tokens=1))

        def end_as_messages_come(error: OctavoError) -> None:
            on_core_ended(error)
            assert not engine._is_busy(), "the watchdog would end the next core"
            with monkeypatch.context() as patch:
                patch.setattr(supervisor, "tell", told.append)
                for message in (request, ResetCache(False), DropCacheSession("s", None), GetLiveView()):
                    assert one.attached is not None
                    engine.take(one.attached, encode_message(message))

        monkeypatch.setattr(supervisor, "_on_core_ended", end_as_messages_come)
        assert await ask(one.engine, THREE_CORES) == "length"
        assert not (told or engine._resets or engine._views)
        assert await other.shared.reset_prefix_cache()
        assert await other.engine.live_view() is not None
        assert not (one.is_lost.is_set() or other.is_lost.is_set())

    with_hub(use, max_restarts=5)


@pytest.mark.long
def test_requests_that_kill_cores_are_tried_alone_among_those_of_all_front_ends(
    with_hub: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart_policy, "MAX_DELAY_S", 0.0)

    async def use(hub: EngineHub, make: Callable[[], Awaitable[Front]]) -> None:
        fronts = [await make() for _ in range(3)]
        asked = [ask(front.engine, what, str(what)) for front in fronts for what in (EXIT, ANSWER)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert found[1::2] == ["length"] * 3
        for error in found[::2]:
            assert isinstance(error, RequestError) and error.code == "request_kills_engine"
        engine = hub._engines[0]
        assert not (engine._held or engine._without_core or engine._untold or engine._on_trial)

    with_hub(use, max_restarts=20)


def test_a_request_that_is_aborted_while_another_front_end_tries_its_own_never_reaches_the_core(
    with_hub: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[FrontendMessage] = []

    async def use(hub: EngineHub, make: Callable[[], Awaitable[Front]]) -> None:
        one, other = await make(), await make()
        engine = hub._engines[0]
        assert one.attached is not None
        requests = [
            one.engine.inputs.process({"prompt_token_ids": ANSWER}, SamplingParams(max_tokens=1)) for _ in range(2)
        ]
        monkeypatch.setattr(engine.supervisor, "tell", told.append)
        engine._on_trial = other.attached
        for message in (*requests, Abort(requests[0].request_id)):
            engine.take(one.attached, encode_message(message))
        assert not told
        engine._on_trial = None
        engine._give_core()
        assert [message.request_id for message in told if isinstance(message, EngineRequest)] == [
            requests[1].request_id
        ]

    with_hub(use)


def test_a_core_that_has_died_for_good_is_the_end_for_all(with_hub: Callable[..., None]) -> None:
    async def use(hub: EngineHub, make: Callable[[], Awaitable[Front]]) -> None:
        one, other = await make(), await make()
        for front in (one, other):
            with pytest.raises(EngineDeadError, match="exit status 7"):
                await ask(front.engine, EXIT)
            await front.engine.wait_failed()
            assert front.engine.has_failed
        assert hub.has_failed

    with_hub(use)


def test_a_pause_is_seen_by_all_and_by_those_that_come_later(with_hub: Callable[..., None]) -> None:
    async def use(hub: EngineHub, make: Callable[[], Awaitable[Front]]) -> None:
        fronts = [await make(), await make()]
        with pytest.raises(RequestError, match="mode must be one of abort, wait, keep") as refused:
            await fronts[0].shared.pause_generation("never")
        assert refused.value.param == "mode"
        await fronts[0].shared.pause_generation("keep")
        fronts.append(await make())
        assert all([await front.shared.is_paused() for front in fronts])
        asked = [asyncio.create_task(ask(front.engine, ANSWER)) for front in fronts]
        await until(lambda: all(front.engine._streams for front in fronts))
        assert not any(task.done() for task in asked)
        await fronts[1].shared.resume_generation()
        assert await asyncio.gather(*asked) == ["length"] * 3
        assert not await (await make()).shared.is_paused()

    with_hub(use)


def test_a_resume_ends_a_pause_for_all_and_delays_a_sleep(with_hub: Callable[..., None]) -> None:
    async def use(hub: EngineHub, make: Callable[[], Awaitable[Front]]) -> None:
        idle, busy = await make(), await make()
        slow = asyncio.create_task(ask(busy.engine, HANG))
        await until(lambda: busy.engine._output_processor.requests)
        pausing = asyncio.create_task(idle.shared.pause_generation("wait"))
        await until(lambda: busy.engine._pause_and_sleep.is_paused)
        await idle.shared.resume_generation()
        await pausing
        assert not await (await make()).shared.is_paused()

        parts, had_requests = idle.link.channels.answering, list[bool]()

        async def sleep(**args: Any) -> None:
            had_requests.append(bool(busy.engine._output_processor.requests))
            await parts["sleep"](**args)

        idle.link.channels.answering = {**parts, "sleep": sleep}
        falling_asleep = asyncio.create_task(idle.shared.sleep(1, "wait"))
        await until(lambda: busy.engine._pause_and_sleep.is_paused)
        await idle.shared.resume_generation()
        await until(lambda: busy.engine._pause_and_sleep.is_paused)
        await busy.engine.abort("r")
        await asyncio.gather(slow, falling_asleep)
        assert had_requests == [False] and await busy.engine.is_sleeping()

    with_hub(use)


def test_a_front_end_that_cannot_do_one_thing_does_the_others(
    with_hub: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    async def use(hub: EngineHub, make: Callable[[], Awaitable[Front]]) -> None:
        hub._standing["adapter gone"] = "load_lora_adapter", {"lora_name": "gone"}
        hub._standing["pause"] = "pause_generation", {"mode": "keep", "clear_cache": False}
        front = Front(hub, hub.config)

        async def load(lora_name: str) -> None:
            raise RequestError(f"no folder of {lora_name}")

        front.link.channels.answering = {**front.link.channels.answering, "load_lora_adapter": load}
        await front.join()
        assert await front.shared.is_paused()
        assert f"front end {front.number} is without gone: no folder of gone" in caplog.text

    with_hub(use)


def test_metrics_do_not_wait_for_a_front_end_that_says_nothing(
    with_hub: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(hub: EngineHub, make: Callable[[], Awaitable[Front]]) -> None:
        one = await make()
        assert await ask(one.engine, ANSWER) == "length"
        name = r'vllm:request_success_total{engine="0",finished_reason="length",model_name="stub"} 1.0'
        assert name in (await hub._render())[0].decode()
        ours, silent = socket.socketpair()
        await hub.attach(ours, hub.new_number())
        monkeypatch.setattr(engine_hub, "_SNAPSHOT_S", 0.0)
        assert name in (await hub._render())[0].decode(), "what it has said last"
        silent.close()

    with_hub(use)


def test_the_engine_sleeps_and_wakes_for_all(
    with_hub: Callable[..., None], cores: list[subprocess.Popen[bytes]]
) -> None:
    async def use(hub: EngineHub, make: Callable[[], Awaitable[Front]]) -> None:
        fronts = [await make(), await make()]
        await fronts[0].shared.pause_generation("keep")
        await fronts[0].shared.sleep(2)
        assert cores[0].poll() is not None
        fronts.append(await make())
        assert all([await front.shared.is_sleeping() for front in fronts])
        assert hub.metrics.sleep_level == 2
        asked = [asyncio.create_task(ask(front.engine, ANSWER)) for front in fronts]
        await fronts[1].shared.wake_up()
        assert await asyncio.gather(*asked) == ["length"] * 3
        assert hub.metrics.sleep_level == 0 and hub.metrics.num_restarts == 0
        assert await ask((await make()).engine, ANSWER) == "length"

    with_hub(use)


def test_the_engine_sleeps_though_its_core_has_died_after_the_front_ends_fell_asleep(
    with_hub: Callable[..., None], cores: list[subprocess.Popen[bytes]], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(hub: EngineHub, make: Callable[[], Awaitable[Front]]) -> None:
        front, supervisor, tell_all = await make(), hub._engines[0].supervisor, hub.tell_all
        monkeypatch.setattr(supervisor, "_restart_delay", lambda: 50.0)

        async def tell_all_and_die(name: str, **args: Any) -> list[Any]:
            said = await tell_all(name, **args)
            if name == "sleep":
                cores[0].kill()
                await until(lambda: supervisor.unavailable_error)
            return said

        monkeypatch.setattr(hub, "tell_all", tell_all_and_die)
        falling_asleep = asyncio.create_task(front.shared.sleep(2))
        await until(falling_asleep.done)
        await clock.pass_time(60)
        await front.shared.wake_up()
        assert await ask(front.engine, ANSWER) == "length"
        assert supervisor.num_restarts == 1

    with_hub(use, max_restarts=1)


def test_a_front_end_that_starts_while_the_engine_sleeps_does_not_wait_for_an_answer_of_its_core(
    with_hub: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(hub: EngineHub, make: Callable[[], Awaitable[Front]]) -> None:
        front, supervisor = await make(), hub._engines[0].supervisor
        tell, asked = supervisor.tell, list[FrontendMessage]()

        def tell_busy(message: FrontendMessage) -> None:
            """As to a core in a step, which answers after it."""
            (asked.append if isinstance(message, GetLiveView) else tell)(message)

        monkeypatch.setattr(supervisor, "tell", tell_busy)
        pausing = asyncio.create_task(front.shared.pause_generation("keep"))
        await until(lambda: asked)
        await front.shared.sleep(2)
        await pausing
        assert hub._standing["pause"][1]["mode"] == "keep" and len(asked) == 1
        other = await make()
        assert await other.shared.is_sleeping()
        await other.shared.wake_up()
        assert await ask(other.engine, ANSWER) == await ask(front.engine, ANSWER) == "length"

    with_hub(use)


def test_each_engine_of_a_hub_has_its_own_metrics(stub_config: EngineConfig) -> None:
    async def use() -> None:
        async with hub_of(replace(stub_config, data_parallel_size=2)) as hub:
            text, _ = hub.metrics.render()
            assert re.findall(r'vllm:num_requests_running{engine="(\d)"', text.decode()) == ["0", "1"]

    asyncio.run(use())


def test_channels_send_nothing_before_they_open_or_while_they_close() -> None:
    channels = HubLink(lambda: None).channels
    channels.send(1, b"early")
    channels.transport = Mock(is_closing=lambda: True)
    channels.send(1, b"late")
    channels.transport.write.assert_not_called()


def test_a_front_end_that_does_not_read_is_given_up(
    with_hub: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_hub, "_MAX_UNSENT_BYTES", -1)

    async def use(hub: EngineHub, make: Callable[[], Awaitable[Front]]) -> None:
        front = Front(hub, hub.config)
        ours, its = socket.socketpair()
        await front.link.channels.open(its)
        await hub.attach(ours, front.number)
        await front.is_lost.wait()
        assert not hub.fronts

    with_hub(use)


def test_front_ends_share_the_notes_of_gateways(with_hub: Callable[..., None]) -> None:
    async def use(hub: EngineHub, make: Callable[[], Awaitable[Front]]) -> None:
        one, other = (await make()).link.channels, (await make()).link.channels
        for number in range(3):
            await one.call("note_prompt", names=f"a{number}")
        hub.metrics.record_step(EngineStats(resident_adapters=["pirate"]))
        notes, resident = await other.call("read_notes", id="", after=0)
        assert (notes["prompts"], resident) == (["a0", "a1", "a2"], ["pirate"])

    with_hub(use)
