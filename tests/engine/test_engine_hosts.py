"""Engines on other hosts, which here are threads of this process over loopback; cores do what the tests say."""

from __future__ import annotations

import asyncio
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from octavo.config import EngineHostsConfig
from octavo.distributed import joining
from octavo.engine import engine_hosts, engine_node
from octavo.engine.data_parallel import DataParallelEngine
from octavo.engine.engine_node import EngineNode
from octavo.errors import ConfigError, EngineDeadError, LoadError, OctavoError
from octavo.metrics.prometheus import EngineMetrics
from tests.engine.stub_engine import ANSWER, EXIT, HANG, ask
from tests.ports import held_port
from tests.waiting import until, within

Engines = Callable[..., EngineMetrics]


@pytest.fixture
def here() -> EngineHostsConfig:
    """One engine on this host, others elsewhere."""
    return EngineHostsConfig(1, 0, "127.0.0.1", held_port())


def start(
    config: Any, max_restarts: int = 3, shutdown_timeout_s: float | None = None
) -> tuple[EngineNode, Future[None]]:
    """A host with the engines of `config`, in a thread that nobody waits for."""
    timeout_s = within(60) if shutdown_timeout_s is None else shutdown_timeout_s
    node = EngineNode(config, max_restarts=max_restarts, ready_timeout_s=None, shutdown_timeout_s=timeout_s)
    end: Future[None] = Future()

    def run() -> None:
        try:
            end.set_result(node.run())
        except OctavoError as error:
            end.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return node, end


def elsewhere(engine: DataParallelEngine, start_rank: int = 1, num_local: int = 1, **changes: Any) -> Any:
    """What the same flags give on another host."""
    hosts = engine.config.engine_hosts
    assert hosts is not None
    own = replace(hosts, start_rank=start_rank, num_local=num_local)
    return replace(engine.config, engine_hosts=own, **changes)


async def ended(end: Future[None]) -> None:
    await asyncio.wrap_future(end)


async def until_sent(engine: DataParallelEngine, number: int) -> None:
    await until(lambda: sum(len(one._output_processor.requests) for one in engine._engines) == number)


def test_engines_of_other_hosts_answer_and_end_with_the_server(
    with_engine: Engines, here: EngineHostsConfig, cores: list[subprocess.Popen[bytes]]
) -> None:
    ends: list[Future[None]] = []

    async def use(engine: DataParallelEngine) -> None:
        ends.append(start(elsewhere(engine, 1, 2))[1])
        await engine.wait_ready()
        for number in range(6):
            assert await ask(engine, [*ANSWER, 9 + number]) == "length"
        assert engine.stats.num_blocks == 30
        assert await engine.reset_prefix_cache()

    metrics = with_engine(use, replicas=3, engine_hosts=here)
    assert [one.num_finished["length"] for one in metrics.of_engines] == [2, 2, 2]
    ends[0].result(within(60))
    assert len(cores) == 3 and all(core.wait(within(60)) == 0 for core in cores)


def test_a_core_of_another_host_that_dies_takes_its_own_requests_only_and_comes_again(
    with_engine: Engines, here: EngineHostsConfig, cores: list[subprocess.Popen[bytes]]
) -> None:
    async def use(engine: DataParallelEngine) -> None:
        start(elsewhere(engine))
        await engine.wait_ready()
        hanging = [asyncio.create_task(ask(engine, [*HANG, number], f"hangs {number}")) for number in range(4)]
        await until_sent(engine, 4)
        cores[1].kill()
        await until(lambda: sum(task.done() for task in hanging) == 2)
        for task in hanging:
            if task.done():
                with pytest.raises(EngineDeadError, match=r"exit status -9.*the request is lost"):
                    task.result()
        assert engine.is_ready
        await until(lambda: all(one.is_ready for one in engine._engines))
        await engine.abort([f"hangs {number}" for number in range(4)])
        for number in range(6):
            assert await ask(engine, [*ANSWER, 9 + number]) == "length"

    metrics = with_engine(use, replicas=2, engine_hosts=here, on_engine_death="fail")
    assert min(one.num_finished["length"] for one in metrics.of_engines) > 0


def test_a_core_that_dies_too_often_ends_its_host_and_not_the_server(
    with_engine: Engines, here: EngineHostsConfig
) -> None:
    async def use(engine: DataParallelEngine) -> None:
        _, end = start(elsewhere(engine), max_restarts=0)
        await engine.wait_ready()
        holding = asyncio.create_task(ask(engine, HANG * 40, "holds the first"))
        await asyncio.sleep(0)
        with pytest.raises(EngineDeadError, match=r"exit status 7"):
            await ask(engine, EXIT)
        with pytest.raises(LoadError, match=r"engine 1 .* has died too often: .*exit status 7"):
            await ended(end)
        assert await ask(engine, ANSWER) == "length"
        assert not holding.done()
        start(elsewhere(engine))
        await until(lambda: all(one.is_ready for one in engine._engines))
        await engine.abort("holds the first")
        await holding

    with_engine(use, replicas=2, engine_hosts=here, on_engine_death="fail")


def test_a_host_that_is_told_to_stop_ends_what_it_has(with_engine: Engines, here: EngineHostsConfig) -> None:
    async def use(engine: DataParallelEngine) -> None:
        node, end = start(elsewhere(engine))
        await engine.wait_ready()
        hanging = [asyncio.create_task(ask(engine, [*HANG, number], f"hangs {number}")) for number in range(2)]
        await until_sent(engine, 2)
        await until(node._engines[0].leave)  # the server can hear first that the engine is ready
        await until(lambda: engine._engines[1].is_draining)
        for number in range(4):
            assert await ask(engine, [*ANSWER, 9 + number]) == "length"
        assert not end.done()
        await engine.abort(["hangs 0", "hangs 1"])
        await ended(end)
        assert [await task for task in hanging] == ["abort", "abort"]
        assert await ask(engine, ANSWER) == "length"

    metrics = with_engine(use, replicas=2, engine_hosts=here)
    assert [one.num_finished["length"] for one in metrics.of_engines] == [5, 0]


def test_a_host_waits_for_its_engine_to_end_when_the_time_of_requests_is_over(
    with_engine: Engines, here: EngineHostsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that has a disk saves its blocks meanwhile."""

    async def use(engine: DataParallelEngine) -> None:
        is_interrupted = threading.Event()
        wait = EngineNode._wait

        def interrupted_wait(self: EngineNode, timeout_s: float | None) -> bool:
            if timeout_s is None:
                is_interrupted.wait(within(60))
                raise KeyboardInterrupt
            return wait(self, timeout_s)

        monkeypatch.setattr(EngineNode, "_wait", interrupted_wait)
        node, end = start(elsewhere(engine), shutdown_timeout_s=0.0)
        await engine.wait_ready()
        hanging = [asyncio.create_task(ask(engine, [*HANG, number], f"hangs {number}")) for number in range(2)]
        await until_sent(engine, 2)
        await until(lambda: node._engines[0]._is_ready)
        is_interrupted.set()
        await ended(end)
        assert node._num_running == 0
        await engine.abort(["hangs 0", "hangs 1"])
        assert [await task for task in hanging] == ["abort", "abort"]

    with_engine(use, replicas=2, engine_hosts=here)


def test_a_host_whose_engine_sleeps_ends_with_the_server(with_engine: Engines, here: EngineHostsConfig) -> None:
    ends: list[Future[None]] = []

    async def use(engine: DataParallelEngine) -> None:
        node, end = start(elsewhere(engine))
        ends.append(end)
        await engine.wait_ready()
        await engine.sleep(2)
        hosts = engine._hosts
        assert hosts is not None
        await until(lambda: hosts._waiting)
        assert not node._engines[0].leave(), "it has no requests to finish"

    with_engine(use, replicas=2, engine_hosts=here)
    with pytest.raises(ConfigError, match="the server has ended"):
        ends[0].result(within(60))


@pytest.mark.long
def test_a_host_that_falls_silent_is_lost(
    with_engine: Engines, here: EngineHostsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connections stay open, and nothing comes over them."""

    async def use(engine: DataParallelEngine) -> None:
        say = engine_node.Heartbeat.say
        _, end = start(elsewhere(engine))
        await engine.wait_ready()
        hanging = [asyncio.create_task(ask(engine, [*HANG, number], f"hangs {number}")) for number in range(2)]
        await until_sent(engine, 2)

        def say_nothing(self: Any, news: Any) -> None:
            if self._thread.name != "heartbeat of the server":
                say(self, news)

        monkeypatch.setattr(engine_node.Heartbeat, "say", say_nothing)
        await until(lambda: any(task.done() for task in hanging))
        monkeypatch.setattr(engine_node.Heartbeat, "say", say)
        [lost] = [task for task in hanging if task.done()]
        with pytest.raises(EngineDeadError, match=r"engine 1 has not been heard of for 1.5 s; the request is lost"):
            lost.result()
        await until(lambda: all(one.is_ready for one in engine._engines))
        assert not end.done()
        await engine.abort(["hangs 0", "hangs 1"])

    with_engine(use, replicas=2, engine_hosts=here, on_engine_death="fail")


@pytest.mark.parametrize(
    ("start_rank", "changes", "message"),
    [
        (1, {"data_parallel_size": 4}, "its data_parallel_size is 4, and node 0's 2"),
        (1, {"enforce_eager": True}, "its enforce_eager is true, and node 0's false"),
        (1, {"version": "0.0.9"}, "it is Octavo 0.0.9, and node 0 "),
        (0, {}, "engines 0 to 0 are node 0's own"),
    ],
)
def test_a_host_that_does_not_fit_ends_the_start_of_both(
    with_engine: Engines, here: EngineHostsConfig, monkeypatch: pytest.MonkeyPatch, start_rank: int,
    changes: dict[str, Any], message: str,
) -> None:  # fmt: skip
    if (version := changes.pop("version", None)) is not None:
        monkeypatch.setattr(engine_node, "__version__", version)

    async def use(engine: DataParallelEngine) -> None:
        _, end = start(elsewhere(engine, start_rank, **changes))
        with pytest.raises(OctavoError, match=rf"engine {start_rank} \(.*, 127.0.0.1\) cannot join: {message}"):
            await engine.wait_ready()
        assert engine.has_failed
        with pytest.raises(ConfigError, match=rf"engine {start_rank} \(.*\) cannot join node 0 at .*: {message}"):
            await ended(end)

    with_engine(use, replicas=2, engine_hosts=here)


def test_hosts_that_do_not_fit_are_turned_away_from_a_server_that_has_started(
    with_engine: Engines, here: EngineHostsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "_NOTICE_S", 0.0)

    async def use(engine: DataParallelEngine) -> None:
        start(elsewhere(engine))
        await engine.wait_ready()
        with pytest.raises(ConfigError, match=r"there is engine 1 \(.*, 127.0.0.1\) already"):
            await ended(start(elsewhere(engine))[1])
        with pytest.raises(ConfigError, match=r"its enforce_eager is true"):
            await ended(start(elsewhere(engine, enforce_eager=True))[1])
        with monkeypatch.context() as changed:
            changed.setattr(engine_node, "group_token", lambda: b"other")
            with pytest.raises(ConfigError, match=r"has another token; OCTAVO_NODES_TOKEN must be the same"):
                await ended(start(elsewhere(engine))[1])
        with pytest.raises(ConfigError, match=r"the server of --data-parallel-size cannot listen at 127.0.0.1"):
            engine_hosts.EngineHosts(engine.config)
        for number in range(4):
            assert await ask(engine, [*ANSWER, 9 + number]) == "length"

    with_engine(use, replicas=2, engine_hosts=here)


def test_times_are_those_of_each_hosts_own_clock(
    with_engine: Engines, here: EngineHostsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as the server tells: a host whose clock is ahead by an hour is asked in its own time."""
    link = engine_node.EngineLink
    monkeypatch.setattr(engine_node, "EngineLink", lambda session, clock_s: link(session, clock_s + 3600))
    sent: list[Any] = []
    write = engine_hosts.write_message
    monkeypatch.setattr(engine_hosts, "write_message", lambda writer, data: (sent.append(data), write(writer, data)))

    async def use(engine: DataParallelEngine) -> None:
        start(elsewhere(engine))
        await engine.wait_ready()
        now = time.monotonic()
        for number in range(2):
            await ask(engine, [*ANSWER, number], deadline=now + 50)
        messages = [engine_hosts.msgspec.msgpack.decode(data) for data in sent]
        [request] = [message for message in messages if message["type"] == "request"]
        assert request["arrival_time"] == pytest.approx(now + 3600, abs=10)
        assert request["deadline"] == pytest.approx(now + 3650, abs=10)

    with_engine(use, replicas=2, engine_hosts=here)
