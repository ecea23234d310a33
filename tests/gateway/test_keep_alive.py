"""Comments in streams whose replica is silent: between events only, and before the head only if it hangs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.types import Message

from octavo.gateway import client
from octavo.gateway.keep_alive import KeepAlive
from octavo.gateway.replica import HealthChecks
from tests.gateway.fakes import Asked, FakeServer, gateway
from tests.waiting import Clock, virtual_sleep

SILENT = b": the replica is silent\n\n"


def answer_of(clock: Clock, behave: Callable[[Asked], Any], *, streams: bool = True, **args: Any) -> httpx.Response:
    """Ask a server with this behaviour through a gateway."""

    async def run() -> httpx.Response:
        server = await FakeServer(behave).start()
        try:
            async with gateway({"a": {"addresses": [server.address]}}, **args) as gate:
                return await gate.ask(stream=streams)
        finally:
            server.die()

    return clock.run(run())


def stream_with_pauses(*pieces: bytes) -> Callable[[Asked], Any]:
    async def behave(asked: Asked) -> None:
        asked.begin_stream()
        for piece in pieces[:-1]:
            asked.piece(piece)
            await virtual_sleep(12.0)
        asked.piece(pieces[-1])
        asked.piece(b"")

    return behave


def test_comments_come_between_events(clock: Clock) -> None:
    behave = stream_with_pauses(b"data: 1\n\ndata: ", b"2\n\n", b"data: 3\n\n")
    answer = answer_of(clock, behave)
    assert answer.content == b"data: 1\n\n" + 2 * SILENT + b"data: 2\n\n" + 2 * SILENT + b"data: 3\n\n"
    assert answer_of(clock, behave, stream_keep_alive=0.0).content == b"data: 1\n\ndata: 2\n\ndata: 3\n\n"


@pytest.mark.parametrize("header", [b"", b"connection: keep-alive\r\n"])
def test_comments_come_over_http_1_0_too_and_the_stream_ends_with_the_connection(clock: Clock, header: bytes) -> None:
    """HTTP/1.0 has no chunks, so the gateway writes each piece as it is."""
    body = json.dumps({"model": "a", "stream": True}).encode()
    asked = b"POST /v1/chat/completions HTTP/1.0\r\n%scontent-length: %d\r\n\r\n%s" % (header, len(body), body)

    async def run() -> bytes:
        server = await FakeServer(stream_with_pauses(b"data: 1\n\ndata: ", b"2\n\n", b"data: 3\n\n")).start()
        try:
            async with gateway({"a": {"addresses": [server.address]}}) as gate:
                url = gate.http.base_url
                reader, writer = await asyncio.open_connection(url.host, url.port)
                writer.write(asked)
                answer = await reader.read()
                writer.close()
                return answer
        finally:
            server.die()

    head, _, events = clock.run(run()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200") and b"transfer-encoding" not in head.lower()
    assert events == b"data: 1\n\n" + 2 * SILENT + b"data: 2\n\n" + 2 * SILENT + b"data: 3\n\n"


def test_an_event_that_is_too_long_to_be_held_back_has_no_comment_in_it(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_MAX_EVENT_BYTES", 8)
    answer = answer_of(clock, stream_with_pauses(b"data: 1\n\ndata: long long ", b"long", b" end\n\n", b"data: 2\n\n"))
    assert answer.content == b"data: 1\n\ndata: long long long end\n\n" + 2 * SILENT + b"data: 2\n\n"


@pytest.mark.parametrize("streams", [True, False])
def test_an_answer_that_is_no_stream_gets_no_comment(clock: Clock, streams: bool) -> None:
    async def behave(asked: Asked) -> None:
        asked.head(content_type="application/json", transfer_encoding="chunked")
        asked.piece(b'{"a": ')
        await virtual_sleep(12.0)
        asked.piece(b"1}")
        asked.piece(b"")

    assert answer_of(clock, behave, streams=streams).json() == {"a": 1}


@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("is_refused", [False, True])
def test_before_the_head_only_a_server_that_fails_its_health_checks_is_called_silent(
    clock: Clock, hangs: bool, is_refused: bool
) -> None:
    async def run() -> None:
        async def behave(asked: Asked) -> None:
            server.hangs = hangs
            await virtual_sleep(30.0)
            if is_refused:
                asked.reply(b'{"error": {"code": "no"}}', 400)
            else:
                await stream_with_pauses(b"data: 1\n\n")(asked)

        server = await FakeServer(behave).start()
        try:
            async with gateway({"a": {"addresses": [server.address]}}) as gate:
                answer = await gate.ask(stream=True)
        finally:
            server.die()
        assert answer.status_code == (400 if is_refused and not hangs else 200)
        assert (answer.content.count(SILENT) >= 3) == hangs == answer.content.startswith(SILENT)
        events = answer.content.replace(SILENT, b"")
        if is_refused:
            assert json.loads(events.removeprefix(b"data: "))["error"]["code"] == "no"
        else:
            assert events == b"data: 1\n\n"

    clock.run(run())


def events_answer() -> Any:
    """An answer whose head says that it is a stream."""
    headers = {b"content-type": b"text/event-stream"}
    return SimpleNamespace(
        status=200, headers=list(headers.items()), header=lambda name: headers.get(name, b""), heard_at=0.0
    )


def comments_in_silence(clock: Clock, prepare: Callable[[Any], Any]) -> list[bytes]:
    """Return the pieces that a client gets whose replica is silent for 12 s. `prepare` makes the client's `send`."""
    pieces: list[bytes] = []

    async def send(message: Message) -> None:
        await asyncio.sleep(0)
        if "body" in message:
            pieces.append(message["body"])

    async def run() -> None:
        one = client.Client(prepare(send), "/v1/chat/completions")
        one.streams = True
        async with KeepAlive(5.0).watch_silence(one, SimpleNamespace(checks=HealthChecks())):  # type: ignore[arg-type]
            await one.begin(events_answer())
            await virtual_sleep(12.0)

    clock.run(run())
    return pieces


def test_a_stream_without_chunks_gets_comments(clock: Clock) -> None:
    assert comments_in_silence(clock, lambda send: send) == [SILENT] * 2, "a `send` that something wraps"
    assert comments_in_silence(clock, client.ClientSend) == [SILENT] * 2, "HTTP/1.0"


def test_a_client_that_must_read_first_gets_no_comment(clock: Clock) -> None:
    def paused(send: Any) -> client.ClientSend:
        one = client.ClientSend(send)
        one.open(lambda _: None)
        one.pause()
        return one

    assert comments_in_silence(clock, paused) == []


def test_a_stream_that_a_comment_begins_is_one_of_events_before_its_head_is_sent() -> None:
    seen: list[bool] = []

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            await one.begin(events_answer())
            seen.append(one.add(b"data: half"))

    one = client.Client(send, "/v1/chat/completions")
    one.streams = True
    asyncio.run(one.comment("x"))
    assert seen == [True], "half an event is held back"
