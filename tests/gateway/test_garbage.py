"""Full collections stop all streams, so they are rare, and no request leaves what only they would find."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import socket

import pytest

from octavo.gateway import server as server_module
from octavo.gateway.catalogue import named_models
from octavo.gateway.deployment import MIN_BACKOFF_S
from octavo.gateway.server import GatewayArgs, GatewayServer, _serve, bind
from tests.garbage import counted_garbage
from tests.gateway.fakes import Asked, FakeLaunch, Gateway, fake_servers, gateway, until
from tests.waiting import Clock, virtual_sleep

STREAM = [b"data: {}\n\n", b": tokens [1]\n\n", b"data: [DONE]\n\n", b""]


async def behave(asked: Asked) -> None:
    """Answer plainly, not at all, or as a stream: a whole, resumable, broken or endless one."""
    said = asked.json["messages"][0]
    what = said["content"] if isinstance(said, dict) else said
    if what == "plain":
        asked.reply(b"{}")
        return
    if what == "nothing":
        asked.die()
        return
    about = {"x_octavo_resumable": json.dumps({"id": "chatcmpl-1"})} if what == "resumable" else {}
    asked.head(content_type="text/event-stream", transfer_encoding="chunked", **about)
    if what == "broken":
        asked.piece(STREAM[0])
        await asked.writer.drain()
        asked.die()
        return
    if what == "endless":
        asked.piece(STREAM[0])
        await asked.reader.read()
        return
    for piece in STREAM:
        asked.piece(piece)
        await asyncio.sleep(0)


async def ask_all(gate: Gateway) -> None:
    for what in ("plain", "nothing", "stream", "resumable", "broken"):
        await gate.ask(messages=[what], stream=what != "plain")
    await gate.ask("unknown")
    await gate.ask("b")
    assert "start_failed" in (await gate.ask("d", stream=True)).text
    await virtual_sleep(MIN_BACKOFF_S)
    body = {"model": "a", "messages": ["endless"], "stream": True}
    async with gate.http.stream("POST", "/v1/completions", json=body) as answer:
        await anext(answer.aiter_raw())
    await gate.http.post("/api/chat", json={"model": "a", "messages": [{"role": "user", "content": "stream"}]})


def test_requests_leave_no_cycles(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("octavo.gateway"), "disabled", True)  # pytest would keep the lines' errors

    async def run() -> None:
        async with fake_servers(behave, behave) as (server, other):
            models = {"a": {"addresses": [server.address]}, "b": {"addresses": [other.address], "fallbacks": ["c"]}}
            models |= {"c": {"addresses": [other.address]}, "d": {}}
            other.die()
            launch = FakeLaunch()
            launch.error = "no memory"
            async with gateway(models, launch) as gate:
                await ask_all(gate)  # the first requests fill caches
                await until(lambda: not gate.server.app.num_in_flight)
                with counted_garbage("octavo.") as left:
                    await ask_all(gate)
                    await until(lambda: not gate.server.app.num_in_flight)
                assert not left

    clock.run(run())


def test_the_gateway_collects_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopped(GatewayServer):
        async def serve(self, sockets: list[socket.socket] | None = None) -> None:
            frozen.append(gc.get_freeze_count())

    frozen: list[int] = []
    monkeypatch.setattr(server_module, "GatewayServer", Stopped)
    gc.unfreeze()
    gc.set_threshold(700, 10, 10)
    try:
        with bind("127.0.0.1", 0) as sock:
            asyncio.run(_serve(GatewayArgs(), named_models(["a"]), sock, None, None))
        assert frozen[0] and gc.get_threshold() == (200_000, 1_000, 1_000)
    finally:
        gc.unfreeze()
