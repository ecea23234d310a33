"""A gateway that stops lets requests end for a while, and begins nothing more."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.gateway.fakes import Asked, FakeLaunch, be_silent, gateway, until
from tests.waiting import Clock


def test_draining_lets_requests_end_and_refuses_new_ones(clock: Clock) -> None:
    go_on = asyncio.Event()

    async def behave(asked: Asked) -> None:
        await go_on.wait()
        asked.reply(b'{"done": 1}')

    async def run() -> None:
        launch = FakeLaunch(behave)
        async with gateway({"a": {}}, launch) as gate:
            asking = asyncio.ensure_future(gate.ask())
            await until(lambda: launch.servers and launch.last("a").asked)
            gate.server.stop()
            await until(lambda: gate.server.app.is_stopping)
            late = await gate.ask()
            assert late.status_code == 503 and late.headers["retry-after"] and "stopping" in late.text
            assert (await gate.http.get("/health")).status_code == 503
            go_on.set()
            assert (await asking).json() == {"done": 1}
            await until(lambda: launch.last("a").is_stopped)

    clock.run(run())


def test_a_request_whose_replica_is_lost_while_the_gateway_stops_begins_no_fallback(clock: Clock) -> None:
    async def run() -> None:
        async def stop_and_die(asked: Asked) -> None:
            gate.server.stop()
            await until(lambda: gate.server.app.is_stopping)
            asked.die()

        launch = FakeLaunch(stop_and_die)
        async with gateway({"a": {"fallbacks": ["b"]}, "b": {}}, launch) as gate:
            answer = await gate.ask()
            assert answer.status_code == 503 and "stopping" in answer.text
            assert launch.begun == ["a"]

    clock.run(run())


async def stream_to_its_end(gate: Any) -> bytes:
    """Return a stream of model a, whose first piece stops the gateway."""
    async with gate.http.stream("POST", "/v1/completions", json={"model": "a", "stream": True}) as response:
        found = b""
        async for piece in response.aiter_raw():
            if not found:
                gate.server.stop()
            found += piece
        return found


def test_a_stream_that_outlasts_the_drain_ends_with_an_error_event(clock: Clock) -> None:
    async def behave(asked: Asked) -> None:
        asked.begin_stream()
        asked.piece(b"data: 1\n\n")
        await be_silent(asked)

    async def run() -> None:
        async with gateway({"a": {}}, FakeLaunch(behave), shutdown_timeout=3.0) as gate:
            found = await stream_to_its_end(gate)
            assert b"the gateway is stopping" in found and found.endswith(b"\n\n")

    clock.run(run())


def test_a_catalogue_that_changes_while_the_gateway_stops_starts_nothing(clock: Clock, tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("models: {a: {}}")

    async def run() -> None:
        async with gateway(str(file), FakeLaunch(be_silent), shutdown_timeout=3.0) as gate:
            asking = asyncio.ensure_future(gate.ask())
            await until(lambda: gate.launch.servers and gate.launch.last("a").asked)
            gate.server.stop()
            file.write_text("models: {a: {}, b: {preload: true}}")
            gate.server.reload()
            assert (await asking).status_code == 503
        assert gate.launch.begun == ["a"]

    clock.run(run())


def test_a_stream_that_waits_for_its_model_ends_with_the_drain(clock: Clock) -> None:
    async def run() -> None:
        launch = FakeLaunch()
        launch.may_start.clear()
        async with gateway({"a": {}}, launch, shutdown_timeout=3.0) as gate:
            found = await stream_to_its_end(gate)
            assert b'"code":"stopping"' in found and found.endswith(b"\n\n")

    clock.run(run())
