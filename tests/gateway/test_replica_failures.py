"""Replicas that die, refuse or talk nonsense; clients that leave; faults of the gateway's own."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from octavo.errors import RequestError
from octavo.gateway.client import Client
from octavo.gateway.error_bodies import error_body
from tests.gateway.fakes import (
    Asked,
    Behave,
    FakeLaunch,
    FakeServer,
    answer_plainly,
    be_busy,
    be_silent,
    fake_servers,
    gateway,
    until,
)
from tests.waiting import Clock


def at(servers: list[FakeServer]) -> dict[str, Any]:
    """A model at the addresses of these."""
    return {"a": {"addresses": [one.address for one in servers]}}


async def die(asked: Asked) -> None:
    asked.die()


async def die_after_the_head(asked: Asked) -> None:
    asked.begin_stream()
    await asked.writer.drain()
    asked.die()


async def talk_nonsense(asked: Asked) -> None:
    asked.writer.write(b"220 smtp ready\r\n\r\n")


async def have_an_odd_status(asked: Asked) -> None:
    asked.reply(b"{}", 799)


async def change_the_protocol(asked: Asked) -> None:
    asked.head(101, connection="upgrade", upgrade="x")


async def have_no_engine(asked: Asked) -> None:
    asked.reply(b"{}", 500, x_octavo_cut_off="1")


async def have_no_server_behind(asked: Asked) -> None:
    asked.reply(b"{}", 502)


async def be_starting(asked: Asked) -> None:
    asked.reply(b"{}", 503)


@pytest.mark.parametrize(
    "bad",
    [
        die,
        die_after_the_head,
        talk_nonsense,
        have_an_odd_status,
        change_the_protocol,
        be_silent,
        be_busy,
        be_starting,
        have_no_engine,
    ],
)
def test_a_replica_that_fails_before_the_first_byte_costs_the_client_nothing(clock: Clock, bad: Behave) -> None:
    async def run() -> None:
        async with fake_servers(bad, answer_plainly) as servers, gateway(at(servers), replica_timeout=30.0) as gate:
            for number in range(12):
                response = await gate.ask(messages=[number])
                assert response.status_code == 200, response.text
            assert len(servers[1].asked) == 12 and servers[0].asked

    clock.run(run())


@pytest.mark.parametrize("end", [die, have_no_engine])
def test_a_request_that_ends_replicas_is_refused_after_two(clock: Clock, end: Behave) -> None:
    async def run() -> None:
        async with fake_servers(end, end, end) as servers, gateway(at(servers)) as gate:
            response = await gate.ask(messages=["poison"])
            assert response.status_code == 500 and response.json()["error"]["code"] == "request_kills_replicas"
            assert sorted(len(one.asked) for one in servers) == [0, 1, 1]

    clock.run(run())


def test_a_request_that_ends_replicas_over_kept_connections_ends_two_at_most(clock: Clock) -> None:
    async def behave(asked: Asked) -> None:
        if asked.json["messages"] == ["poison"]:
            next(one for one in servers if asked in one.asked).die()
        else:
            await answer_plainly(asked)

    servers: list[FakeServer] = []

    async def run() -> None:
        async with fake_servers(behave, behave, behave) as found, gateway(at(found)) as gate:
            servers.extend(found)
            for replica in gate.deployment("a").replicas:
                (await replica.upstream.send("POST", b"/", [], b'{"messages": []}')).close()
                answer = await replica.upstream.send("POST", b"/", [], b'{"messages": []}')
                await answer.read_all(99)
                answer.close()
            response = await gate.ask(messages=["poison"])
            assert response.json()["error"]["code"] == "request_kills_replicas"
            assert sum(one.exited.done() for one in servers) == 2

    clock.run(run())


@pytest.mark.parametrize("end", [b"\r\n", b"\r", b"", b' of it"}\n', b"\r\n2", b"\r\n20\r\n"], ids=repr)
def test_a_stream_that_breaks_ends_with_an_error_event(clock: Clock, end: bytes) -> None:
    """It ends between two chunks, amid a chunk or its size."""
    part = b'data: {"x": 1}\n\ndata: {"half'
    size = len(part) + (40 if b"of it" in end else 0)

    async def behave(asked: Asked) -> None:
        asked.begin_stream()
        asked.writer.write(b"%x\r\n%b%b" % (size, part, end))
        await asked.writer.drain()
        await go_on.wait()
        asked.die()

    go_on = asyncio.Event()

    async def run() -> None:
        async with fake_servers(behave, behave) as servers, gateway(at(servers)) as gate:
            fields = {"model": "a", "stream": True}
            async with gate.http.stream("POST", "/v1/messages", json=fields) as response:
                found = b""
                async for piece in response.aiter_raw():
                    found += piece
                    go_on.set()
            assert found.startswith(b'data: {"x": 1}\n\nevent: error\ndata: {"type":"error"')
            assert b"half" not in found and found.endswith(b"\n\n")
            assert sum(len(server.asked) for server in servers) == 1, "it is not tried again"
            metrics = (await gate.http.get("/metrics")).text
            assert "octavo_gateway_broken_answers_total{" in metrics

    clock.run(run())


def test_an_answer_that_a_server_has_sent_before_its_end_reaches_the_client(clock: Clock) -> None:
    async def behave(asked: Asked) -> None:
        asked.head(content_length=str(len(body)))
        asked.writer.write(body[:1000])
        await asked.writer.drain()
        await has_begun.wait()
        asked.writer.write(body[1000:])
        asked.writer.close()
        launch.last("a").exited.set_result(None)

    body, has_begun = b"x" * (1 << 20), asyncio.Event()
    launch = FakeLaunch(behave)

    async def run() -> None:
        async with gateway({"a": {}}, launch) as gate, gate.http.stream("POST", "/v1/x", json={"model": "a"}) as answer:
            num_bytes = 0
            async for piece in answer.aiter_raw():
                num_bytes += len(piece)
                has_begun.set()
            assert num_bytes == len(body)

    clock.run(run())


def test_a_client_that_does_not_read_holds_no_replica(clock: Clock) -> None:
    async def behave(asked: Asked) -> None:
        asked.begin_stream()
        while True:
            asked.piece(b"data: " + b"x" * 65536 + b"\n\n")
            await asked.writer.drain()

    async def run() -> None:
        async with fake_servers(behave) as servers, gateway(at(servers)) as gate:
            url = gate.http.base_url
            _reader, writer = await asyncio.open_connection(url.host, url.port, limit=1)
            body = b'{"model": "a", "stream": true}'
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            await until(lambda: servers[0].num_hung_up)
            await until(lambda: not gate.server.app.num_in_flight)
            (replica,) = gate.deployment("a").replicas
            assert replica.breaker.num_failures == replica.num_in_flight == 0
            writer.transport.abort()

    clock.run(run())


def test_refusals_of_messages_have_the_types_of_the_api() -> None:
    for status, kind in ((503, "overloaded_error"), (403, "permission_error"), (413, "request_too_large")):
        body = json.loads(error_body(RequestError("no", status=status), "/v1/messages/count_tokens", "req_1"))
        assert body == {"type": "error", "error": {"type": kind, "message": "no"}, "request_id": "req_1"}


@pytest.mark.parametrize("fail", [die, have_no_engine, have_no_server_behind])
def test_a_breaker_opens_and_a_replica_that_is_well_again_is_asked_again(clock: Clock, fail: Behave) -> None:
    async def behave(asked: Asked) -> None:
        await (fail if broken else answer_plainly)(asked)

    broken = True

    async def run() -> None:
        nonlocal broken
        async with fake_servers(behave) as (server,), gateway({"a": {"addresses": [server.address]}}) as gate:
            answers = [await gate.ask() for _ in range(6)]
            assert [one.status_code for one in answers[3:]] == [503] * 3
            assert len(server.asked) == 3, "the breaker is open"
            assert int(answers[-1].headers["retry-after"]) >= 1
            broken = False
            clock.advance(2)
            assert (await gate.ask()).status_code == 200

    clock.run(run())


@pytest.mark.parametrize("busy", [be_busy, be_starting])
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_busy_answer_is_neither_a_failure_nor_a_success(clock: Clock, busy: Behave, num_replicas: int) -> None:
    """Neither for the last replica, whose answer the client gets, nor for one with another beside it."""
    script = [die, die, *[busy] * 5, die]

    async def behave(asked: Asked) -> None:
        await script[len(servers[0].asked) - 1](asked)

    servers: list[FakeServer] = []

    async def run() -> None:
        async with fake_servers(behave, *[answer_plainly] * (num_replicas - 1)) as found, gateway(at(found)) as gate:
            servers.extend(found)
            breaker = gate.deployment("a").replicas[0].breaker
            number = 0
            while len(servers[0].asked) < len(script):  # another one may be chosen
                number += 1
                assert not breaker.is_open()
                await gate.ask(messages=[number])
            assert breaker.is_open()

    clock.run(run())


def test_a_replica_that_is_healthy_again_is_asked_again_whatever_failed_before(clock: Clock) -> None:
    async def behave(asked: Asked) -> None:
        await (answer_plainly if is_well else die)(asked)

    is_well = False

    async def run() -> None:
        nonlocal is_well
        async with fake_servers(behave) as (server,), gateway(at([server])) as gate:
            (replica,) = gate.deployment("a").replicas
            while replica.breaker.wait_s() < 50:
                clock.advance(replica.breaker.wait_s())
                assert (await gate.ask()).status_code == 503
            server.health = 500
            await until(lambda: not replica.is_healthy)
            server.health, is_well = 200, True
            await until(lambda: replica.is_healthy)
            assert (await gate.ask()).status_code == 200

    clock.run(run())


def test_a_replica_that_is_not_healthy_gets_no_requests(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with fake_servers(answer_plainly, answer_plainly) as servers, gateway(at(servers)) as gate:
            servers[0].health = 500
            sick, well = gate.deployment("a").replicas
            await until(lambda: not sick.is_healthy)
            for _ in range(8):
                assert (await gate.ask()).status_code == 200
            assert not servers[0].asked and len(servers[1].asked) == 8 and well.is_healthy
            servers[0].health = 404
            await until(lambda: sick.is_healthy)

    clock.run(run())
    assert " gets no requests: GET /health is answered 500" in caplog.text


@pytest.mark.parametrize(
    ("method", "path", "num_asked"),
    [
        ("POST", "/v1/chat/completions", 2), ("POST", "/v1/responses/resp_1/cancel", 2), ("POST", "/v1/files", 1),
        ("POST", "/v1/conversations/conv_1/items", 1), ("POST", "/unknown", 1), ("DELETE", "/unknown", 2),
    ],
)  # fmt: skip
def test_a_replica_that_is_lost_with_a_request_that_makes_something_is_not_replaced(
    clock: Clock, method: str, path: str, num_asked: int
) -> None:
    async def run() -> None:
        async with fake_servers(die, die) as servers, gateway(at(servers) | {"b": {}}) as gate:
            headers = {"x-octavo-model": "a"}
            answer = await gate.http.request(method, path, json={}, headers=headers)
            assert sum(len(one.asked) for one in servers) == num_asked
            is_repeated = num_asked == 2
            expected = (500, "request_kills_replicas") if is_repeated else (502, "replica_lost")
            assert (answer.status_code, answer.json()["error"]["code"]) == expected
            for one in servers:
                one.behave = have_no_engine
                gate.deployment("a").replicas[servers.index(one)].breaker.succeed()
            assert (await gate.http.request(method, path, json={}, headers=headers)).status_code == 500
            assert sum(len(one.asked) for one in servers) == 2 * num_asked
            servers[0].die()  # nobody there has seen the next one
            servers[1].behave = answer_plainly
            await gate.deployment("a").replicas[1].check_health(1)
            for _ in range(3):
                gate.deployment("a").replicas[1].breaker.succeed()
                assert (await gate.http.request(method, path, json={}, headers=headers)).status_code == 200

    clock.run(run())


def test_an_address_where_nobody_listens_is_named_in_the_log(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with fake_servers(answer_plainly) as (server,):
            models = at([server])
        async with gateway(models) as gate:
            (gone,) = gate.deployment("a").replicas
            await until(lambda: not gone.is_healthy)

    clock.run(run())
    assert " cannot be reached: " in caplog.text


def test_a_fallback_answers_where_the_model_cannot(clock: Clock) -> None:
    async def run() -> None:
        async with fake_servers(answer_plainly) as (server,):
            models: dict[str, Any] = {"a": {"fallbacks": ["b"]}, "b": {"addresses": [server.address]}}
            launch = FakeLaunch()
            launch.error = "octavo: error: no memory"
            async with gateway(models, launch) as gate:
                assert (await gate.ask("a")).status_code == 200
                assert server.asked[0].json["model"] == "b"
                server.die()
                response = await gate.ask("a")
                assert response.status_code == 503 and "no memory" in response.text, "the model's own error"

    clock.run(run())


def test_a_fallback_goes_on_with_what_it_has_kept(clock: Clock) -> None:
    async def keep(asked: Asked) -> None:
        asked.reply(b'{"id": "resp_1"}')

    async def run() -> None:
        async with fake_servers(answer_plainly, keep) as (server, other):
            models = {"a": {"addresses": [server.address], "fallbacks": ["b"]}, "b": {"addresses": [other.address]}}
            async with gateway(models) as gate:
                server.die()
                assert (await gate.ask("a", "/v1/responses", input="x")).json()["id"] == "resp_1"
                await server.start()
                await gate.ask("a", "/v1/responses", previous_response_id="resp_1", input="y")
                assert len(other.asked) == 2 and not server.asked

    clock.run(run())


def test_a_client_that_hangs_up_ends_the_work_of_its_replica(clock: Clock) -> None:
    async def run() -> None:
        async with gateway({"a": {}}, FakeLaunch(be_silent)) as gate:
            asking = asyncio.ensure_future(gate.ask())
            await until(lambda: gate.launch.servers and gate.launch.last("a").asked)
            asking.cancel()
            await until(lambda: gate.launch.last("a").num_hung_up)
            await until(lambda: gate.server.app.num_in_flight == 0)
            assert gate.deployment("a").replicas[0].num_in_flight == 0
            assert await gate.metric("octavo_gateway_disconnects_total") == 1

    clock.run(run())


def test_a_client_that_leaves_the_line_is_not_started_for(clock: Clock) -> None:
    async def run() -> None:
        models: dict[str, Any] = {"a": {"memory_gib": 1}, "b": {"memory_gib": 1}}
        async with gateway(models, FakeLaunch(be_silent), memory_gib=1) as gate:
            first = asyncio.ensure_future(gate.ask("a"))
            await until(lambda: gate.launch.servers)
            second = asyncio.ensure_future(gate.ask("b"))
            await until(lambda: gate.deployment("b").state == "waiting")
            second.cancel()
            await until(lambda: gate.deployment("b").state == "stopped")
            first.cancel()
            await until(lambda: gate.deployment("a").is_idle)
            assert gate.launch.begun == ["a"] and gate.launch.running("a") == 1

    clock.run(run())


def test_each_request_is_counted_as_one_answer(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with fake_servers(die_after_the_head) as servers, gateway(at(servers)) as gate:
            servers[0].behave = stream_and_die
            assert b"replica_lost" in (await gate.ask(stream=True)).content
            servers[0].behave = stream
            with monkeypatch.context() as fault:
                fault.setattr(Client, "end", None)
                assert b"internal_error" in (await gate.ask(stream=True)).content
            monkeypatch.setattr(gate.server.app._proxy, "_next_replica", None)
            assert (await gate.ask()).status_code == 500
            text = (await gate.http.get("/metrics")).text
            counts = [
                line.rpartition(" ")[2]
                for line in text.splitlines()
                if line.startswith("octavo_gateway_requests_total")
            ]
            assert sorted(counts) == ["1.0", "2.0"] and 'replica="none",status="500"' in text

    async def stream(asked: Asked) -> None:
        asked.begin_stream()
        asked.piece(b"data: {}\n\n")
        asked.piece(b"")

    async def stream_and_die(asked: Asked) -> None:
        asked.begin_stream()
        asked.piece(b"data: {}\n\n")
        await asked.writer.drain()
        asked.die()

    clock.run(run())


def test_a_fault_of_the_gateways_own_is_an_answer_too(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with gateway({"a": {}}) as gate:
            monkeypatch.setattr(gate.server.app._proxy, "_next_replica", None)
            response = await gate.ask()
            assert response.status_code == 500 and response.json()["error"]["message"] == "Internal error."
            assert "TypeError" in caplog.text and gate.deployment("a").is_idle

    clock.run(run())
