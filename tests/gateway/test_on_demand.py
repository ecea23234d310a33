"""Models start when they are asked for, and stop when their time is up or others need the memory."""

from __future__ import annotations

import asyncio
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from octavo.gateway.catalogue import ModelEntry
from octavo.gateway.deployment import HANG_TIMEOUT_S, LAST_CHECK_S
from tests.gateway.fakes import Asked, FakeLaunch, FakeServer, gateway, until
from tests.waiting import Clock, virtual_sleep


def test_one_start_however_many_ask(clock: Clock) -> None:
    async def run() -> None:
        launch = FakeLaunch()
        launch.may_start.clear()
        async with gateway({"a": {}}, launch) as gate:
            assert launch.begun == []
            asking = [asyncio.ensure_future(gate.ask()) for _ in range(8)]
            await until(lambda: gate.deployment("a").num_held == 8)
            launch.may_start.set()
            assert [(await one).status_code for one in asking] == [200] * 8
            assert launch.begun == ["a"]

    clock.run(run())


def test_a_stream_gets_comments_while_its_model_starts(clock: Clock) -> None:
    async def behave(asked: Asked) -> None:
        asked.begin_stream()
        asked.piece(b"data: {}\n\n")
        asked.piece(b"")

    async def run() -> None:
        launch = FakeLaunch(behave)
        launch.may_start.clear()
        async with gateway({"a": {}}, launch) as gate:
            fields = {"model": "a", "stream": True}
            async with gate.http.stream("POST", "/v1/chat/completions", json=fields) as response:
                assert response.headers["content-type"] == "text/event-stream"
                found = b""
                async for piece in response.aiter_raw():
                    found += piece
                    if found.count(b": a is being loaded\n\n") == 2:
                        launch.may_start.set()
            assert found.endswith(b"loaded\n\ndata: {}\n\n")

    clock.run(run())


def test_a_start_that_fails_answers_with_its_error_line_and_is_not_tried_at_once(clock: Clock) -> None:
    async def run() -> None:
        launch = FakeLaunch()
        launch.error = "octavo: error: no weights"
        async with gateway({"a": {}}, launch) as gate:
            response = await gate.ask()
            assert response.status_code == 503 and response.headers["retry-after"] == "1"
            assert "octavo: error: no weights" in response.json()["error"]["message"]
            assert response.json()["error"]["code"] == "start_failed"
            deployment = gate.deployment("a")
            clock.advance(-clock.now() + deployment._retry_at - 0.9)
            assert (await gate.ask()).status_code == 503 and launch.begun == ["a"]
            launch.error = None
            clock.advance(2)
            assert (await gate.ask()).status_code == 200

    clock.run(run())


def test_a_start_that_fails_until_somebody_changes_something_does_not_say_when_to_try_again(clock: Clock) -> None:
    async def run() -> None:
        launch = FakeLaunch()
        launch.error, launch.may_pass = "octavo: error: no weights", False
        async with gateway({"a": {}}, launch) as gate:
            for _ in range(2):
                response = await gate.ask()
                assert response.status_code == 503 and "retry-after" not in response.headers

    clock.run(run())


def test_a_stream_that_has_had_comments_gets_the_error_as_an_event(clock: Clock) -> None:
    async def run() -> None:
        launch = FakeLaunch()
        launch.may_start.clear()
        launch.error = "octavo: error: no weights"
        async with gateway({"a": {}}, launch) as gate:
            fields = {"model": "a", "stream": True}
            async with gate.http.stream("POST", "/v1/chat/completions", json=fields) as response:
                found = b""
                async for piece in response.aiter_raw():
                    found += piece
                    launch.may_start.set()
            assert found.startswith(b": a is being loaded\n\n")
            assert b'data: {"error":{' in found and b"no weights" in found and found.endswith(b"\n\n")

    clock.run(run())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize("body", [b"<html>\n\nBad Gateway</html>", b"", b"[1]"])
def test_a_stream_that_has_had_comments_gets_json_though_the_replicas_error_has_none(
    clock: Clock, path: str, body: bytes
) -> None:
    async def behave(asked: Asked) -> None:
        asked.reply(body, 504, "text/html")

    async def run() -> None:
        launch = FakeLaunch(behave)
        launch.may_start.clear()
        async with gateway({"a": {}}, launch) as gate:
            async with gate.http.stream("POST", path, json={"model": "a", "stream": True}) as response:
                found = b""
                async for piece in response.aiter_raw():
                    found += piece
                    launch.may_start.set()
            (data,) = [line for line in found.splitlines() if line.startswith(b"data: ")]
            said = json.loads(data.removeprefix(b"data: "))["error"]
            assert said["message"] == "A replica answered 504." and said["type"] in ("api_error", "server_error")

    clock.run(run())


def test_an_idle_model_stops_when_its_time_is_up_and_starts_again(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with gateway({"a": {"keep_alive": 60}, "b": {"keep_alive": None}}) as gate:
            await gate.ask("a")
            await gate.ask("b")
            begin = clock.now()
            await until(lambda: gate.deployment("a").state == "stopped")
            assert clock.now() - begin > 55
            assert gate.launch.last("a").is_stopped and gate.deployment("b").state == "ready"
            assert (await gate.ask("a")).status_code == 200
            assert gate.launch.begun == ["a", "b", "a"]

    with caplog.at_level("INFO", "octavo.gateway"):
        clock.run(run())
    assert "a: stops, as its keep_alive of 60 s is over" in caplog.messages


def test_a_model_under_way_does_not_stop(clock: Clock) -> None:
    go_on = asyncio.Event()

    async def behave(asked: Asked) -> None:
        await go_on.wait()
        asked.reply(b"{}")

    async def run() -> None:
        async with gateway({"a": {"keep_alive": 10}}, FakeLaunch(behave)) as gate:
            asking = asyncio.ensure_future(gate.ask("a"))
            await until(lambda: gate.launch.servers and gate.launch.last("a").asked)
            clock.advance(50)
            await clock.pass_time(50)
            assert gate.launch.running("a") == 1
            go_on.set()
            assert (await asking).status_code == 200

    clock.run(run())


def test_the_least_recently_used_idle_model_makes_room(clock: Clock) -> None:
    async def run() -> None:
        models = {name: {"memory_gib": 2, "keep_alive": None} for name in "abc"}
        async with gateway(models, memory_gib=4) as gate:
            for name in "abac":
                assert (await gate.ask(name)).status_code == 200
                assert gate.server.models.budget.held_gib <= 4
            assert [gate.launch.running(name) for name in "abc"] == [1, 0, 1]
            assert await gate.metric("octavo_gateway_evictions_total") == 1

    clock.run(run())


def test_a_request_waits_for_memory_that_is_in_use_and_not_for_ever(clock: Clock) -> None:
    go_on = asyncio.Event()

    async def behave(asked: Asked) -> None:
        if asked.json["model"] == "a":
            await go_on.wait()
        asked.reply(b"{}")

    async def run() -> None:
        models = {name: {"memory_gib": 3} for name in "ab"}
        async with gateway(models, FakeLaunch(behave), memory_gib=4, max_wait=20.0, max_waiting=1) as gate:
            first = asyncio.ensure_future(gate.ask("a"))
            await until(lambda: gate.launch.servers and gate.launch.last("a").asked)
            late = asyncio.ensure_future(gate.ask("b"))
            await until(lambda: gate.deployment("b").state == "waiting")
            full = await gate.ask("b")
            assert full.status_code == 429 and "--max-waiting" in full.text and full.headers["retry-after"]
            response = await late
            assert response.status_code == 503 and "memory" in response.text and response.headers["retry-after"]
            assert gate.launch.begun == ["a"] and gate.deployment("b").state == "stopped"
            late = asyncio.ensure_future(gate.ask("b"))
            await until(lambda: gate.deployment("b").state == "waiting")
            go_on.set()
            assert (await first).status_code == 200 and (await late).status_code == 200
            assert gate.launch.running("a") == 0 and gate.launch.last("a").is_stopped

    clock.run(run())


def test_a_model_that_is_preloaded_is_there_before_anyone_asks(clock: Clock) -> None:
    async def run() -> None:
        async with gateway({"a": {"preload": True, "replicas": 2}, "b": {}}) as gate:
            await until(lambda: gate.deployment("a").state == "ready")
            assert gate.launch.begun == ["a", "a"]

    clock.run(run())


def test_a_dead_replica_is_started_again(clock: Clock) -> None:
    async def run() -> None:
        async with gateway({"a": {"replicas": 2}}) as gate:
            await gate.ask()
            gate.launch.servers["a"][0].die()
            await until(lambda: gate.launch.running("a") == 2 and len(gate.deployment("a").replicas) == 2)
            for server in gate.launch.servers["a"]:
                server.die()
            assert (await gate.ask()).status_code == 200, "all are dead: the model is started again"

    clock.run(run())


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_replica_that_hangs_is_ended_and_started_again(
    clock: Clock, caplog: pytest.LogCaptureFixture, num_replicas: int
) -> None:
    async def run() -> None:
        async with gateway({"a": {"replicas": num_replicas, "keep_alive": None}}) as gate:
            await gate.ask()
            hanging = gate.launch.servers["a"][0]
            hanging.hangs = True
            begin = clock.now()
            await until(lambda: hanging.exited.done())
            assert HANG_TIMEOUT_S <= clock.now() - begin < 2 * HANG_TIMEOUT_S
            assert (await gate.ask()).status_code == 200
            await until(lambda: gate.launch.running("a") == num_replicas)
            assert len(gate.launch.begun) == num_replicas + 1

    clock.run(run())
    assert "hangs and is killed: GET /health had no answer within 5 s" in caplog.text


@pytest.mark.parametrize("answers_after_s", [2.0, 8.0])
def test_a_server_that_is_slower_than_the_interval_is_killed_only_if_it_takes_too_long(
    clock: Clock, answers_after_s: float
) -> None:
    async def run() -> None:
        async with gateway({"a": {"keep_alive": None}}, health_interval=1.0) as gate:
            await gate.ask()
            slow = gate.launch.last("a")
            slow.health_after_s = answers_after_s
            begin = clock.now()
            await until(lambda: slow.exited.done() or clock.now() - begin > 3 * HANG_TIMEOUT_S)
            assert slow.exited.done() == (answers_after_s > LAST_CHECK_S)

    clock.run(run())


def test_a_replica_that_hangs_lets_a_model_that_has_left_the_catalogue_end(clock: Clock, tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("models: {a: {}}")

    async def hang_at_first(asked: Asked) -> None:
        if len(launch.begun) > 1:
            asked.reply(b"{}")
            return
        launch.last("a").hangs = True
        file.write_text("models: {b: {}}")
        await asked.reader.read()

    launch = FakeLaunch(hang_at_first)

    async def run() -> None:
        async with gateway(str(file), launch) as gate:
            assert (await gate.ask()).status_code == 200
            await until(lambda: not launch.running("a"))
            assert launch.begun == ["a", "a"] and "a" not in gate.server.models.names()

    clock.run(run())


def test_a_replica_that_says_it_is_not_healthy_is_not_ended(clock: Clock) -> None:
    async def run() -> None:
        async with gateway({"a": {"keep_alive": None}}) as gate:
            await gate.ask()
            gate.launch.last("a").health = 503
            begin = clock.now()
            await until(lambda: clock.now() - begin > 3 * HANG_TIMEOUT_S)
            assert gate.launch.begun == ["a"] and gate.launch.running("a") == 1

    clock.run(run())


def test_a_replica_whose_restarts_fail_is_seen(clock: Clock) -> None:
    async def run() -> None:
        async with gateway({"a": {"replicas": 2}}) as gate:
            await gate.ask()
            gate.launch.error = "no memory"
            gate.launch.servers["a"][0].die()
            await until(lambda: gate.deployment("a").num_failed_starts == 2)
            text = (await gate.http.get("/metrics")).text
            ups = re.findall(r'octavo_gateway_replica_up{model="a",replica="(\d)"} (\S+)', text)
            assert sorted(value for _, value in ups) == ["0.0", "1.0"] and len(dict(ups)) == 2
            assert 'octavo_gateway_failed_starts_total{model="a"} 2.0' in text
            gate.launch.error = None
            await until(lambda: len(gate.deployment("a").replicas) == 2)
            assert not gate.deployment("a").restarting

    clock.run(run())


def test_a_start_that_the_end_interrupts_is_not_begun_again(clock: Clock) -> None:
    async def run() -> None:
        launch = FakeLaunch()
        launch.may_start.clear()
        async with gateway({"a": {"preload": True}}, launch):
            await until(lambda: launch.begun)
        assert launch.begun == ["a"] and not launch.servers

    clock.run(run())


def test_no_server_is_left_when_the_gateway_has_ended(clock: Clock) -> None:
    async def run() -> None:
        launch = FakeLaunch()
        models: dict[str, Any] = {"a": {"replicas": 2}, "b": {}}
        async with gateway(models, launch) as gate:
            await gate.ask("a")
            await gate.ask("b")
            launch.may_start.clear()
        assert launch.running("a") == launch.running("b") == 0

    clock.run(run())


def test_five_models_in_the_memory_of_two_answer_all_requests(clock: Clock) -> None:
    """Eight clients ask by Zipf's law; each answer and each start takes some time."""
    source = random.Random("zipf")
    names = "abcde"

    async def behave(asked: Asked) -> None:
        await virtual_sleep(source.uniform(0.1, 2))
        asked.reply(b"{}")

    class SlowLaunch(FakeLaunch):
        async def __call__(self, name: str, entry: ModelEntry) -> FakeServer:
            await virtual_sleep(source.uniform(0.5, 3))
            server = await super().__call__(name, entry)
            assert sum(self.running(one) for one in names) <= 2, "the budget holds for processes, not for numbers alone"
            return server

    wanted = iter([*names, *source.choices(names, [1, 1 / 2, 1 / 3, 1 / 4, 1 / 5], k=91)])  # shared by the clients

    async def run() -> None:
        models = {name: {"memory_gib": 2, "keep_alive": 5} for name in names}
        async with gateway(models, SlowLaunch(behave), memory_gib=4.0) as gate:

            async def ask_often() -> None:
                for name in wanted:
                    response = await gate.ask(name)
                    assert response.status_code == 200, response.text
                    assert gate.server.models.budget.held_gib <= 4

            await asyncio.gather(*(ask_often() for _ in range(8)))
            starts = [await gate.metric(f'octavo_gateway_starts_total{{model="{name}"}}') for name in names]
            assert starts == [gate.launch.begun.count(name) for name in names] and min(starts) >= 1

    clock.run(run())


def test_the_end_interrupts_no_start_that_is_being_undone(clock: Clock) -> None:
    class SlowToEnd(FakeLaunch):
        async def __call__(self, name: str, entry: ModelEntry) -> FakeServer:
            try:
                return await super().__call__(name, entry)
            except asyncio.CancelledError:
                if len(self.begun) > len(ended) + 1:
                    ended.append(name)
                    raise
                await virtual_sleep(20)
                ended.append(name)
                raise

    ended: list[str] = []

    async def run() -> None:
        launch = SlowToEnd()
        launch.may_start.clear()
        async with gateway({"a": {"replicas": 2}}, launch, shutdown_timeout=3.0) as gate:
            asking = asyncio.ensure_future(gate.ask())
            await until(lambda: len(launch.begun) == 2)
            gate.server.stop()
            assert (await asking).status_code == 503
        assert ended == ["a", "a"], "memory is free only when the processes have ended"

    clock.run(run())


def test_a_keep_alive_that_changes_holds_for_a_model_that_is_idle(clock: Clock, tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("models: {a: {keep_alive: null}}")

    async def run() -> None:
        async with gateway(str(file)) as gate:
            await gate.ask()
            clock.advance(600)
            assert gate.launch.running("a") == 1
            file.write_text("models: {a: {keep_alive: 7}}")
            gate.server.reload()
            await until(lambda: not gate.launch.running("a"))

    clock.run(run())
