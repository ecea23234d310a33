"""Streams of Octavo's replicas outlive them: another replica goes on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from octavo.gateway.stream_progress import StreamProgress
from tests.gateway.fakes import Asked, Behave, FakeLaunch, FakeServer, answer_plainly, fake_servers, gateway, until
from tests.ports import held_port
from tests.waiting import Clock, virtual_sleep

ABOUT = {"id": "chatcmpl-1", "created": 5, "seed": 2**63}
# Events with the tokens that they stand for; the last has none, as it ends the stream.
SCRIPT: list[tuple[bytes, list[int]]] = [
    (b'data: {"role": 1}\n\ndata: {"a": "\\n\\n"}', [1]), (b'data: {"b": 2}', [2, 3]), (b"", [4]),
    (b'data: {"c": 3}', [5]),
    (b'data: {"end": 1}\n\ndata: {"usage": 1}\n\ndata: [DONE]', []),
]  # fmt: skip
WHOLE = b"".join(events + b"\n\n" for events, _ in SCRIPT if events)
SILENT = b": the replica is silent\n\n"


_PIECES = st.sampled_from((
    b'data: {"a": 1}\n\n', b'data: {"x": ": tokens [5]"}\n\n', b": tokens [1]\n\n", b": tokens [2,3]\n\n",
    b": ping\n\n", b": prompt [7]\n\n", b'event: x\ndata: {"b": 2}\n\n', b"data: [DONE]\n\n", b"\n\n", b"\n",
    b": tokens [4]\nx\n\n", b'data: {"a": 1}\nx: tokens [1]\n\n', b'data: {"a": 1}\n\n: tokens [1]\n\n' * 2,
))  # fmt: skip


@given(st.lists(st.lists(_PIECES, max_size=4).map(b"".join), max_size=5))
@example(
    [b'data: {"a": 1}\n\n: tokens [1]\n\n', b'data: {"a": 1}\n\n: tokens [2,3]\n\ndata: {"a": 1}\n\n: tokens [1]\n\n']
)
def test_a_client_gets_the_same_events_however_a_stream_arrives(pieces: list[bytes]) -> None:
    def read(pieces: Iterable[bytes]) -> tuple[object, ...]:
        progress = StreamProgress()
        progress.begin(json.dumps(ABOUT).encode())
        sent = b"".join(map(progress.add, pieces))
        return sent, progress.resume_fields(), progress.num_tokens, progress.flush(), progress.has_ended

    whole = b"".join(pieces)
    singly = read(whole[at : at + 1] for at in range(len(whole)))
    assert read(pieces) == read([whole]) == singly


def begin(asked: Asked, data: bytes = b"") -> None:
    """Begin a stream that may be continued elsewhere."""
    asked.head(content_type="text/event-stream", transfer_encoding="chunked", x_octavo_resumable=json.dumps(ABOUT))
    if data:
        asked.piece(data)


def lost_at(event: asyncio.Event, lose: Callable[[Asked], None]) -> Behave:
    """A server that continues streams, and loses one that it has begun, by `lose`, when `event` is set."""

    async def behave(asked: Asked) -> None:
        if "resume" in asked.json:
            await replica()(asked)
            return
        begin(asked, SCRIPT[0][0] + b"\n\n: tokens [1]\n\n")
        await event.wait()
        lose(asked)

    return behave


def replica(dies_after: int | None = None, cut: int = 0, *, is_amid_chunk: bool = False) -> Behave:
    """A server that dies after so many entries of the script, and `cut` bytes of the next one: behind a chunk or amid
    one."""

    async def behave(asked: Asked) -> None:
        if asked.method == "GET":
            asked.reply(b'{"kept": true}')
            return
        assert asked.headers["x-octavo-resumable"] == "1"
        begin(asked)
        resume = asked.json.get("resume", {"tokens": []})
        data = b""
        for number, (events, tokens) in enumerate(SCRIPT):
            piece = events + b"\n\n" if events else b""
            piece += b": tokens " + json.dumps(tokens).encode() + b"\n\n" if tokens else b""
            if number == dies_after:
                sent = data + piece[:cut] or b": keep-alive\n\n"
                if is_amid_chunk:
                    asked.writer.write(b"%x\r\n%s" % (len(sent) + 40, sent))
                else:
                    asked.piece(sent)
                await asked.writer.drain()
                asked.die()
                return
            data += piece if number >= len(resume["tokens"]) else b""
        asked.piece(data)
        if dies_after == len(SCRIPT):
            await asked.writer.drain()
            asked.die()
            return
        asked.piece(b"")

    return behave


def at(servers: list[FakeServer]) -> dict[str, Any]:
    return {"a": {"addresses": [one.address for one in servers]}}


@pytest.mark.parametrize("dies_after", range(len(SCRIPT)))
@pytest.mark.parametrize(("cut", "is_amid_chunk"), [(0, False), (9, True), (20, False), (30, True)])
def test_no_byte_is_lost_and_none_comes_twice(clock: Clock, dies_after: int, cut: int, is_amid_chunk: bool) -> None:
    async def run() -> None:
        first = replica(dies_after, cut, is_amid_chunk=is_amid_chunk)
        async with fake_servers(first, replica()) as servers, gateway(at(servers)) as gate:
            number = 0
            while not servers[0].asked:  # either may be chosen
                number += 1
                answer = await gate.ask(stream=True, messages=[number])
                assert answer.content.replace(b": keep-alive\n\n", b"") == WHOLE
                assert "x-octavo-resumable" not in answer.headers
            resume = servers[1].asked[-1].json["resume"]
            tokens = [tokens for _, tokens in SCRIPT][: len(resume["tokens"])]
            assert resume == {**ABOUT, "tokens": tokens} and len(tokens) >= dies_after
            sample = f'octavo_gateway_resumed_streams_total{{model="a",replica="{servers[1].address}"}}'
            assert await gate.metric(sample) == 1

    clock.run(run())


def test_a_prompt_whose_tokens_only_its_replica_knows_goes_with_the_stream(clock: Clock) -> None:
    async def behave(asked: Asked) -> None:
        begin(asked)
        if "resume" in asked.json:
            assert asked.json["resume"] == {**ABOUT, "tokens": [[1]], "prompt": [7, 8]}
            asked.piece(b'data: {"b": 2}\n\ndata: [DONE]\n\n')
            asked.piece(b"")
            return
        asked.piece(b': prompt [7,8]\n\ndata: {"a": 1}\n\n: tokens [1]\n\n')
        await asked.writer.drain()
        asked.die()

    async def run() -> None:
        async with fake_servers(behave, behave) as servers, gateway(at(servers)) as gate:
            answer = await gate.ask(stream=True)
            assert answer.content == b'data: {"a": 1}\n\ndata: {"b": 2}\n\ndata: [DONE]\n\n'

    clock.run(run())


def test_the_last_events_do_not_come_twice_if_the_replica_is_lost_after_them(clock: Clock) -> None:
    async def run() -> None:
        async with fake_servers(*[replica(len(SCRIPT))] * 2) as servers, gateway(at(servers)) as gate:
            assert (await gate.ask(stream=True)).content == WHOLE
            assert sum(len(server.asked) for server in servers) == 1
            assert sum(one.breaker.num_failures for one in gate.deployment("a").replicas) == 1
            assert "octavo_gateway_broken_answers_total{" not in (await gate.http.get("/metrics")).text

    clock.run(run())


@pytest.mark.parametrize("is_alone", [False, True])
def test_a_stream_that_a_replica_gives_up_goes_on_elsewhere_or_ends_as_it_says(clock: Clock, is_alone: bool) -> None:
    end = b'data: {"finish_reason": "abort"}\n\ndata: [DONE]\n\n'

    async def give_up(asked: Asked) -> None:
        begin(asked, SCRIPT[0][0] + b"\n\n: tokens [1]\n\n" + SCRIPT[1][0] + b"\n\n: given up\n\n" + end)
        asked.piece(b"")

    async def run() -> None:
        behaves = [give_up] if is_alone else [give_up, replica()]
        async with fake_servers(*behaves) as servers, gateway(at(servers)) as gate:
            number = 0
            while not servers[0].asked:  # either may be chosen
                number += 1
                answer = await gate.ask(stream=True, messages=[number])
            assert answer.content == (SCRIPT[0][0] + b"\n\n" + SCRIPT[1][0] + b"\n\n" + end if is_alone else WHOLE)

    clock.run(run())


def test_no_half_event_is_sent_of_a_replica_that_dies_after_it_has_given_a_stream_up(clock: Clock) -> None:
    async def give_up_and_die(asked: Asked) -> None:
        begin(asked, b'data: 1\n\n: tokens [1]\n\n: given up\n\ndata: {"half')
        await asked.writer.drain()
        asked.die()

    async def run() -> None:
        async with fake_servers(give_up_and_die) as servers, gateway(at(servers), max_wait=3.0) as gate:
            servers[0].health = 500
            answer = await gate.ask(stream=True)
            assert answer.content.startswith(b'data: 1\n\ndata: {"error":{') and answer.content.endswith(b"}\n\n")
            assert b"half" not in answer.content

    clock.run(run())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/invocations", "/generate"])
def test_an_answer_that_a_replica_has_cut_off_is_made_by_another_one(clock: Clock, path: str) -> None:
    async def cut_off(asked: Asked) -> None:
        asked.reply(b'{"finish_reason": "abort"}', x_octavo_cut_off="1")

    async def run() -> None:
        async with fake_servers(cut_off, answer_plainly) as servers, gateway(at(servers)) as gate:
            number = 0
            while not servers[0].asked:  # either may be chosen
                number += 1
                assert "abort" not in (await gate.ask(path=path, messages=[number])).text
            servers[1].die()
            await until(lambda: not gate.deployment("a").replicas[1].is_healthy)
            alone = await gate.ask(path=path, messages=[number])
            assert "abort" in alone.text and "x-octavo-cut-off" not in alone.headers

    clock.run(run())


@pytest.mark.parametrize("ends", [True, False])
def test_a_stream_that_has_lost_its_replica_waits_for_busy_ones_and_not_for_ever(clock: Clock, ends: bool) -> None:
    busy: list[int] = []

    async def be_busy_at_first(asked: Asked) -> None:
        if "resume" in asked.json and (not ends or len(busy) < 3):
            busy.append((503, 429, 502)[len(busy) % 3])  # 502: of a proxy before the replica
            asked.reply(b'{"error": {"message": "busy"}}', busy[-1])
        else:
            await replica()(asked)

    async def run() -> None:
        async with fake_servers(replica(3), be_busy_at_first) as servers, gateway(at(servers), max_wait=60.0) as gate:
            servers[0].health = 500  # it does not come back
            number = 0
            while not servers[0].asked:  # either may be chosen
                number += 1
                answer = await gate.ask(stream=True, messages=[number])
            if ends:
                assert answer.content == WHOLE and len(busy) == 3
            else:
                assert b"busy" in answer.content and 50 < len(busy) < 70
                assert answer.content.count(b": no replica can go on yet\n\n") >= 10, "one in 5 s"

    clock.run(run())


async def lose_and_come_back(asked: Asked, server: FakeServer) -> None:
    """Begin a stream and die, and come back at the same address."""
    await replica(3)(asked)
    server.die()
    await virtual_sleep(30)
    server.behave = replica()
    await server.start()


@pytest.mark.parametrize("max_wait", [300.0, 20.0])
def test_a_stream_whose_only_replica_dies_goes_on_there_when_it_is_back(clock: Clock, max_wait: float) -> None:
    async def behave(asked: Asked) -> None:
        dying.append(asyncio.ensure_future(lose_and_come_back(asked, server)))

    dying: list[asyncio.Future[None]] = []
    server = FakeServer(behave, address=f"http://127.0.0.1:{held_port()}")

    async def run() -> None:
        await server.start()
        async with gateway(at([server]), max_wait=max_wait) as gate:
            answer = await gate.ask(stream=True)
            comment = b": no replica can go on yet\n\n"
            if max_wait == 300.0:
                assert answer.content.replace(comment, b"") == WHOLE and answer.content.count(comment) >= 4
                labels = f'{{model="a",replica="{server.address}"}}'
                assert await gate.metric("octavo_gateway_broken_answers_total" + labels) == 1
                assert (await gate.ask(stream=True)).content == WHOLE, "nothing is kept from it"
            else:
                assert answer.content.endswith(b"}\n\n") and b"was lost amid the answer" in answer.content
            await dying[0]
        server.die()

    clock.run(run())


def test_a_stream_whose_replicas_start_again_waits_for_them_though_a_start_fails(clock: Clock) -> None:
    def lose(asked: Asked) -> None:
        launch.error = "the memory is not free yet"
        for server in launch.servers["a"]:
            server.die()

    has_begun = asyncio.Event()
    launch = FakeLaunch(lost_at(has_begun, lose))

    async def run() -> None:
        async with gateway({"a": {"replicas": 2}}, launch) as gate:
            asked = {"model": "a", "stream": True}
            async with gate.http.stream("POST", "/v1/chat/completions", json=asked) as answer:
                content = b""
                async for piece in answer.aiter_raw():
                    content += piece
                    if not has_begun.is_set():
                        has_begun.set()
                        await until(lambda: gate.deployment("a").num_failed_starts == 3)
                        launch.error = None
            assert content.replace(b": no replica can go on yet\n\n", b"") == WHOLE

    clock.run(run())


@pytest.mark.parametrize("num_waiting", [0, 1])
def test_a_stream_whose_time_to_be_resumed_ends_between_two_starts_waits_for_no_other(
    clock: Clock, num_waiting: int
) -> None:
    """Neither does it hear that too many wait: it has lost a replica."""

    def lose(asked: Asked) -> None:
        launch.error = "the memory is not free yet"
        launch.last("a").die()

    has_begun = asyncio.Event()
    has_begun.set()
    launch = FakeLaunch(lost_at(has_begun, lose))

    async def run() -> None:
        async with gateway({"a": {}}, launch, max_wait=20.0, max_waiting=1) as gate:
            proxy = gate.server.app._proxy

            async def pause_until_it_is_late(*args: Any) -> None:
                launch.may_start.clear()
                proxy._num_waiting += num_waiting
                await virtual_sleep(21.0)

            proxy._pause = pause_until_it_is_late
            answer = await gate.ask(stream=True)
            assert b"the memory is not free yet" in answer.content and b'"code":"no_replica"' in answer.content
            assert launch.begun == ["a", "a"], "nothing starts for it any more"

    clock.run(run())


@pytest.mark.parametrize("shutdown_timeout", [0.1, 100.0])
def test_a_stream_that_waits_for_a_busy_replica_does_not_ask_it_again_once_the_gateway_stops(
    clock: Clock, shutdown_timeout: float
) -> None:
    async def run() -> None:
        async def be_busy(asked: Asked) -> None:
            asked.reply(b"{}", 503)
            asyncio.get_running_loop().call_later(0.5, gate.server.stop)  # amid the pause

        async def lose(asked: Asked) -> None:
            for one in servers:
                one.behave = be_busy
            await replica(3)(asked)

        options = {"shutdown_timeout": shutdown_timeout}
        async with fake_servers(lose, lose) as servers, gateway(at(servers), **options) as gate:
            answer = await gate.ask(stream=True)
            assert b'"code":"stopping"' in answer.content
            assert [len(one.asked) for one in servers] == [1, 1]

    clock.run(run())


def test_a_stream_that_ends_replicas_ends_two_at_most(clock: Clock) -> None:
    async def run() -> None:
        async with fake_servers(*(replica(2) for _ in range(4))) as servers, gateway(at(servers)) as gate:
            answer = await gate.ask(stream=True)
            begin = b"".join(events + b"\n\n" for events, _ in SCRIPT[:2])
            assert answer.content.startswith(begin) and b"replica_lost" in answer.content[len(begin) :]
            assert sum(len(server.asked) for server in servers) == 2

    clock.run(run())


@pytest.mark.parametrize("dies_after", [0, 3])
def test_a_stream_whose_next_replica_is_lost_before_its_first_byte_has_lost_two(clock: Clock, dies_after: int) -> None:
    async def hang_up(asked: Asked) -> None:
        asked.die()

    async def run() -> None:
        async def lose(asked: Asked) -> None:
            for one in servers:
                one.behave = hang_up
            await replica(dies_after)(asked)

        async with fake_servers(lose, lose, lose) as servers, gateway(at(servers)) as gate:
            answer = await gate.ask(stream=True)
            assert sum(len(server.asked) for server in servers) == 2
            assert b"request_kills_replicas" in answer.content

    clock.run(run())


def test_a_model_whose_only_replica_dies_is_started_again_for_its_streams(clock: Clock) -> None:
    behaves = [replica(3), replica()]

    async def behave(asked: Asked) -> None:
        if len(behaves) == 2:
            behaves.pop(0)
            await replica(3)(asked)
            launch.last("a").die()
        else:
            await behaves[0](asked)

    launch = FakeLaunch(behave)

    async def run() -> None:
        async with gateway({"a": {}}, launch) as gate:
            assert (await gate.ask(stream=True)).content == WHOLE
            assert launch.begun == ["a", "a"]

    clock.run(run())


def test_streams_that_have_lost_their_replica_are_not_refused_as_too_many_wait(clock: Clock) -> None:
    def lose(asked: Asked) -> None:
        asked.die()
        launch.last("a").die()

    are_lost = asyncio.Event()
    launch = FakeLaunch(lost_at(are_lost, lose))

    async def run() -> None:
        async with gateway({"a": {}}, launch, max_waiting=1) as gate:
            first = asyncio.ensure_future(gate.ask(stream=True))
            await until(lambda: launch.servers and launch.last("a").asked)
            second = asyncio.ensure_future(gate.ask(stream=True))
            await until(lambda: len(launch.last("a").asked) == 2)
            are_lost.set()
            for one in (first, second):
                assert (await one).content == WHOLE

    clock.run(run())


def test_a_stream_of_a_replica_that_hangs_goes_on_at_the_one_that_takes_its_place(clock: Clock) -> None:
    async def behave(asked: Asked) -> None:
        if len(launch.begun) > 1:
            await replica()(asked)
            return
        begin(asked, SCRIPT[0][0] + b"\n\n: tokens [1]\n\n")
        launch.last("a").hangs = True
        await asked.reader.read()

    launch = FakeLaunch(behave)

    async def run() -> None:
        async with gateway({"a": {}}, launch) as gate:
            content = (await gate.ask(stream=True)).content
            assert content.replace(SILENT, b"") == WHOLE and launch.begun == ["a", "a"]
            assert content.count(SILENT) >= 10, "a comment every 5 s in the 60 s before it is killed"

    clock.run(run())


def test_a_stream_gets_comments_while_a_replica_starts_that_goes_on_with_it(clock: Clock) -> None:
    async def behave(asked: Asked) -> None:
        if len(launch.begun) > 1:
            await replica()(asked)
            return
        launch.may_start.clear()
        await replica(3)(asked)
        launch.last("a").die()

    launch = FakeLaunch(behave)

    async def run() -> None:
        async with gateway({"a": {}}, launch) as gate:
            asked = {"model": "a", "stream": True}
            async with gate.http.stream("POST", "/v1/chat/completions", json=asked) as answer:
                found = b""
                async for piece in answer.aiter_raw():
                    found += piece
                    if found.count(b": a is being loaded\n\n") == 2:
                        launch.may_start.set()
            assert found.replace(b": a is being loaded\n\n", b"") == WHOLE

    clock.run(run())


def test_the_stream_of_a_client_that_resumes_it_itself_does_not_begin_again(clock: Clock) -> None:
    async def behave(asked: Asked) -> None:
        assert "x-octavo-resumable" not in asked.headers, "the gateway has not seen the tokens before"
        asked.begin_stream()
        asked.piece(b"data: {}\n\n")
        await asked.writer.drain()
        asked.die()

    async def run() -> None:
        async with fake_servers(behave, behave) as servers, gateway(at(servers)) as gate:
            answer = await gate.ask(stream=True, resume={**ABOUT, "tokens": [[1]]})
            assert b"replica_lost" in answer.content and sum(len(server.asked) for server in servers) == 1

    clock.run(run())


def test_a_replica_that_cannot_go_on_says_why(clock: Clock) -> None:
    async def refuse(asked: Asked) -> None:
        if "resume" in asked.json:
            asked.reply(b'{"error": {"message": "resume is unknown"}}', 400)
        else:
            await replica(1)(asked)

    async def run() -> None:
        async with fake_servers(refuse, refuse) as servers, gateway(at(servers)) as gate:
            answer = await gate.ask(stream=True)
            assert answer.content.endswith(b'data: {"error": {"message": "resume is unknown"}}\n\n')
            for server in servers:
                sample = f'octavo_gateway_resumed_streams_total{{model="a",replica="{server.address}"}}'
                assert await gate.metric(sample) == 0

    clock.run(run())


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_response_begins_before_its_first_token(clock: Clock, is_lost: bool) -> None:
    first = b'event: response.created\ndata: {"n": 0}\n\nevent: response.in_progress\ndata: {"n": 1}\n\n'
    end = b'event: response.completed\ndata: {"n": 3}\n\n'
    has_begun = asyncio.Event()

    async def behave(asked: Asked) -> None:
        begin(asked, first)
        await asked.writer.drain()
        if "resume" in asked.json:
            assert asked.json["resume"] == {**ABOUT, "tokens": []}
        else:
            await has_begun.wait()
            if is_lost:
                asked.die()
                return
        asked.piece(b'event: response.delta\ndata: {"n": 2}\n\n: tokens [1]\n\n' + end)
        asked.piece(b"")

    async def run() -> None:
        async with fake_servers(behave, behave) as servers, gateway(at(servers)) as gate:
            asked = {"model": "a", "stream": True, "input": "Hi"}
            async with gate.http.stream("POST", "/v1/responses", json=asked) as answer:
                found = b""
                async for piece in answer.aiter_raw():
                    found += piece
                    if found == first:
                        has_begun.set()
            assert found == first + b'event: response.delta\ndata: {"n": 2}\n\n' + end

    clock.run(run())


def test_a_response_is_kept_where_its_stream_ended(clock: Clock) -> None:
    async def run() -> None:
        async with fake_servers(replica(2), replica()) as servers, gateway(at(servers)) as gate:
            number = 0
            while not servers[0].asked:  # either may be chosen
                number += 1
                answer = await gate.ask(path="/v1/responses", stream=True, input=f"{number}")
                assert answer.content == WHOLE
            kept = await gate.http.get(f"/v1/responses/{ABOUT['id']}")
            assert kept.json() == {"kept": True} and servers[1].asked[-1].method == "GET"

    clock.run(run())


@pytest.mark.parametrize("others_go_on", [False, True])
def test_a_server_that_does_not_go_on_does_not_begin_anew(clock: Clock, others_go_on: bool) -> None:
    num_resumed = 0

    async def begin_anew(asked: Asked) -> None:
        nonlocal num_resumed
        if "resume" not in asked.json:
            await replica(2)(asked)
            return
        num_resumed += 1
        if others_go_on and num_resumed == 2:
            await replica()(asked)
            return
        asked.begin_stream()
        asked.piece(WHOLE)
        asked.piece(b"")

    async def run() -> None:
        async with fake_servers(begin_anew, begin_anew, begin_anew) as servers, gateway(at(servers)) as gate:
            answer = await gate.ask(stream=True)
            begin = b"".join(events + b"\n\n" for events, _ in SCRIPT[:2])
            assert answer.content.count(b'{"b": 2}') == 1
            if others_go_on:
                assert answer.content == WHOLE
            else:
                assert answer.content.startswith(begin) and b"cannot continue" in answer.content[len(begin) :]

    clock.run(run())
