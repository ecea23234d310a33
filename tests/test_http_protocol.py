"""What one connection may do: every state that a client can leave it in ends by itself."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from octavo import http_protocol
from octavo.engine.output_processor import RequestState
from octavo.entrypoints.http.streaming import EventSink
from octavo.http_protocol import HttpProtocol
from octavo.http_server import DrainingServer
from octavo.outputs import RequestOutput
from tests.waiting import Clock, virtual_sleep

WRITE_TIMEOUT_S = 60.0
POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
CHUNKED_POST = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


class Client(asyncio.Transport):
    """The transport of a client that reads nothing unless `reads`."""

    def __init__(
        self, *, reads: bool = True, server: tuple[ServerState, dict[HttpProtocol, float]] | None = None
    ) -> None:
        super().__init__()
        self.reads = reads
        self.server, self.idle = server or (ServerState(), {})
        self.written = b""
        self.is_half_closed = self.is_gone = self._is_closing = self.is_paused = False
        self.protocol: HttpProtocol | None = None

    def connect(self, app: Any) -> None:
        config = uvicorn.Config(
            app,
            lifespan="off",
            timeout_keep_alive=http_protocol.KEEP_ALIVE_S,
            log_config=None,
            server_header=False,
            ws="none",
        )
        config.load()
        self.protocol = HttpProtocol(
            config=config, server_state=self.server, app_state={}, max_connections=8, write_timeout_s=WRITE_TIMEOUT_S,
            idle=self.idle, starts=http_protocol.RequestStarts(), refusal=lambda *_: b"{}",
        )  # fmt: skip
        self.protocol.connection_made(self)

    async def send(self, data: bytes) -> None:
        assert self.protocol is not None
        self.protocol.data_received(data)
        for _ in range(8):  # turns of the loop, in which the answer is written
            await asyncio.sleep(0)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def write(self, data: Any) -> None:
        self.written += data
        if not self.reads:
            assert self.protocol is not None
            self.protocol.pause_writing()

    def get_write_buffer_size(self) -> int:
        return 0 if self.reads else len(self.written)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.is_half_closed = True

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True
        if self.reads:
            self.abort()

    def abort(self) -> None:
        self._is_closing = True
        if not self.is_gone:
            self.is_gone = True
            assert self.protocol is not None
            self.protocol.connection_lost(None)

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer without a look at the body."""
    await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"no"})


def refusing_after(wait: Callable[[], Awaitable[object]]) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """Return an application that refuses a request when `wait` has returned."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await wait()
        await refuse(scope, receive, send)

    return app


async def stream(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for text in (b"a", b"bc"):
        await send({"type": "http.response.body", "body": text, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def stream_for_ever(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await receive()
    watcher = asyncio.ensure_future(receive())  # a disconnect
    while not watcher.done():
        await send({"type": "http.response.body", "body": b"more", "more_body": True})
        await virtual_sleep(1)


def run(monkeypatch: pytest.MonkeyPatch, act: Callable[[Clock], Awaitable[None]]) -> None:
    """`act` in a loop whose timers pass at once when nothing else is to be done."""
    clock = Clock(monkeypatch)

    async def begin() -> None:
        await act(clock)

    clock.run(begin())


@pytest.mark.parametrize("rest", [b"x", b"\r\n", b""])
@pytest.mark.parametrize("head", [POST, CHUNKED_POST])
def test_an_answer_before_the_body_closes_the_connection_whatever_comes_then(
    monkeypatch: pytest.MonkeyPatch, head: bytes, rest: bytes
) -> None:
    async def act(clock: Clock) -> None:
        client = Client()
        client.connect(refuse)
        await client.send(head)
        assert b"connection: close" in client.written
        assert client.is_half_closed, "the client sees the end of the answer"
        begin = clock.now()
        while not client.is_gone:
            assert clock.now() - begin < 10 * http_protocol.LINGER_S, "what comes keeps it open"
            await client.send(rest)
            await virtual_sleep(0.5)

    run(monkeypatch, act)


def test_an_answer_after_the_body_keeps_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(clock: Clock) -> None:
        client = Client()
        client.connect(refuse)
        for _ in range(2):
            await client.send(POST + b"x" * 100)
            assert not client.is_closing()
        assert client.written.count(b"401") == 2 and b"close" not in client.written

    run(monkeypatch, act)


def test_blank_lines_do_not_keep_an_idle_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(clock: Clock) -> None:
        client = Client()
        client.connect(refuse)
        await client.send(GET)
        begin = clock.now()
        while not client.is_gone:
            assert clock.now() - begin < 3 * http_protocol.KEEP_ALIVE_S
            await client.send(b"\r\n")
            await virtual_sleep(5)

    run(monkeypatch, act)


@pytest.mark.parametrize("is_answered", [False, True])
def test_trailers_are_dropped_and_bounded(monkeypatch: pytest.MonkeyPatch, is_answered: bool) -> None:
    async def answer_at_the_end(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        await refuse(scope, receive, send)

    async def act(clock: Clock) -> None:
        client = Client()
        client.connect(refuse if is_answered else answer_at_the_end)
        await client.send(CHUNKED_POST)
        await client.send(b"0\r\n")
        assert client.protocol is not None
        num_headers, num_sent = len(client.protocol.headers), 0
        while not client.is_closing() and not client.is_half_closed:
            assert num_sent < 3 * http_protocol.MAX_HEAD_BYTES, "any number of trailers is read"
            await client.send(b"a: b\r\n" * 1000)
            num_sent += 2000
        assert len(client.protocol.headers) == num_headers

    run(monkeypatch, act)


@pytest.mark.parametrize("app", [refuse, stream, stream_for_ever])
def test_a_client_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch, app: Any) -> None:
    async def act(clock: Clock) -> None:
        client = Client(reads=False)
        client.connect(app)
        begin = clock.now()
        await client.send(GET)
        while not client.is_gone:
            assert clock.now() - begin < 3 * WRITE_TIMEOUT_S
            await virtual_sleep(5)
        assert clock.now() - begin >= WRITE_TIMEOUT_S, "it has its time"

    run(monkeypatch, act)


@pytest.mark.parametrize("app", [stream, stream_for_ever])
def test_a_client_that_reads_slowly_is_not_cut_off(monkeypatch: pytest.MonkeyPatch, app: Any) -> None:
    async def act(clock: Clock) -> None:
        client, sizes = Client(reads=False), itertools.chain((100,), itertools.repeat(90))
        monkeypatch.setattr(client, "get_write_buffer_size", lambda: next(sizes))
        client.connect(app)
        begin = clock.now()
        await client.send(GET)
        await virtual_sleep(WRITE_TIMEOUT_S + 1)
        assert not client.is_gone, "it has read something"
        while not client.is_gone:
            await virtual_sleep(1)
        assert WRITE_TIMEOUT_S * 2 <= clock.now() - begin < WRITE_TIMEOUT_S * 2.1, "and then nothing"

    run(monkeypatch, act)


def test_a_client_that_reads_again_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(clock: Clock) -> None:
        client = Client(reads=False)
        client.connect(stream_for_ever)
        await client.send(GET)
        client.reads = True
        assert client.protocol is not None
        client.protocol.resume_writing()
        await virtual_sleep(3 * WRITE_TIMEOUT_S)
        assert not client.is_gone
        client.abort()
        await virtual_sleep(2)

    run(monkeypatch, act)


def test_a_sink_is_open_while_its_client_is_there_and_keeps_up(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = EventSink(lambda output: b"pushed")
    output = RequestOutput("a", None, [1], [], False)
    state = cast(RequestState, SimpleNamespace(take=lambda: output))

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        connection = send.__self__  # type: ignore[attr-defined]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        connection.attach(sink)
        await receive()
        await receive()

    async def act(clock: Clock) -> None:
        client = Client()
        client.connect(app)
        await client.send(GET)
        assert sink.is_open
        sink.take(state)
        assert client.written.endswith(b"\r\n6\r\npushed\r\n")
        client.reads = False
        sink.take(state)
        assert not sink.is_open
        assert client.protocol is not None
        client.protocol.resume_writing()
        assert sink.is_open
        client.abort()
        assert not sink.is_open
        old = Client()
        old.connect(app)
        await old.send(b"GET / HTTP/1.0\r\n\r\n")
        assert not sink.is_open, "there are no chunks"

    run(monkeypatch, act)


@pytest.mark.parametrize("leaves", ["before", "while watched", "afterwards"])
def test_a_connection_tells_that_its_client_has_hung_up(monkeypatch: pytest.MonkeyPatch, leaves: str) -> None:
    """Also while further requests wait, for which reading was paused."""
    told: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        connection = send.__self__  # type: ignore[attr-defined]
        if leaves == "before":
            client.abort()
        connection.watch(lambda: told.append(leaves))
        assert not client.is_paused
        if leaves == "while watched":
            client.abort()
            return
        connection.watch(None)
        client.abort()

    async def act(clock: Clock) -> None:
        client.connect(app)
        await client.send(GET + GET)
        assert client.is_gone and told == ([] if leaves == "afterwards" else [leaves])

    client = Client()
    run(monkeypatch, act)


def test_a_client_of_http_1_0_gets_no_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(clock: Clock) -> None:
        client = Client()
        client.connect(stream)
        await client.send(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        head, _, body = client.written.partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head.lower() and b"connection: close" in head
        assert body == b"abc" and client.is_gone, "the end of the connection is that of the answer"

    run(monkeypatch, act)


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    ("framing", "body"),
    [
        (b"Content-Length: 4\r\n", b"body"), (b"Transfer-Encoding: chunked\r\n", b"4\r\nbody\r\n0\r\n\r\n"),
        (b"Content-Length: 0\r\n", b""), (b"", b""),
    ],
)  # fmt: skip
def test_a_request_that_asks_for_another_protocol_is_answered_in_http_1_1(
    monkeypatch: pytest.MonkeyPatch, framing: bytes, body: bytes, size: int
) -> None:
    """Java's HTTP client asks for HTTP/2 in its first request, curl does with --http2."""
    seen: list[tuple[str, str, bytes]] = []

    async def note(scope: Scope, receive: Receive, send: Send) -> None:
        read, is_whole = b"", False
        while not is_whole:
            message = await receive()
            read, is_whole = read + message["body"], not message["more_body"]
        seen.append((scope["method"], scope["path"], read))
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    asks = b"Host: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAM\r\n"
    sent = (b"POST /a HTTP/1.1\r\n" + asks + framing + b"\r\n" + body) * 2 + GET

    async def act(clock: Clock) -> None:
        client = Client()
        client.connect(note)
        for begin in range(0, len(sent), size):
            await client.send(sent[begin : begin + size])
        for _ in range(100):
            await asyncio.sleep(0)
        assert seen == [("POST", "/a", b"body" if body else b"")] * 2 + [("GET", "/", b"")]
        assert client.written.count(b"HTTP/1.1 204") == 3 and not client.is_gone
        client.abort()

    run(monkeypatch, act)


@pytest.mark.parametrize("asks", [b"", b"Connection: Upgrade\r\nUpgrade: h2c\r\n"])
def test_a_body_whose_end_nothing_tells_is_refused(monkeypatch: pytest.MonkeyPatch, asks: bytes) -> None:
    async def act(clock: Clock) -> None:
        client = Client()
        client.connect(stream)
        await client.send(b"POST / HTTP/1.1\r\n" + asks + b"Transfer-Encoding: gzip\r\n\r\nbody")
        assert client.written.startswith(b"HTTP/1.1 400 ") and client.written.count(b"HTTP/") == 1 and client.is_gone

    run(monkeypatch, act)


def test_connections_without_a_request_give_way_and_those_with_one_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(clock: Clock) -> None:
        server = (ServerState(), dict[HttpProtocol, float]())

        async def client(app: Any, data: bytes) -> Client:
            found = Client(server=server)
            found.connect(app)
            await found.send(data)
            return found

        early = [await client(stream_for_ever, GET + GET[:9]), await client(stream_for_ever, GET)]
        answered = await client(stream, GET)
        silent, slow = await client(stream, b""), await client(stream, GET[:9])
        busy = [*early, *[await client(stream_for_ever, GET) for _ in range(3)]]
        assert len(server[0].connections) == 8
        assert b"503" in (await client(stream, GET)).written, "each has its second"
        await virtual_sleep(http_protocol.IDLE_GRACE_S)
        for given_up in (answered, silent, slow):  # the one that is idle for the longest first
            busy.append(await client(stream_for_ever, GET))
            assert given_up.is_gone
        assert not any(one.is_gone for one in busy)
        for one in busy[-2:]:
            one.abort()
        refusing = await client(refuse, POST)  # lingers: its client still sends the body
        unread = Client(reads=False, server=server)
        unread.connect(stream)
        await unread.send(GET)
        await virtual_sleep(http_protocol.IDLE_GRACE_S)
        refused = await client(stream, GET)
        assert b"503" in refused.written and refused.is_gone
        assert not unread.is_gone and not refusing.is_gone
        assert all(b"more" in one.written and not one.is_gone for one in busy[:-2])
        for one in [*busy, unread, refusing]:
            one.abort()
        assert not server[1]

    run(monkeypatch, act)


def test_a_turn_of_the_loop_starts_few_requests_and_none_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(clock: Clock) -> None:
        loop, starts = asyncio.get_running_loop(), http_protocol.RequestStarts()
        begun: list[int] = []
        turns: list[int] = []  # requests that had begun after each turn

        def turn() -> None:
            turns.append(len(begun))
            if len(begun) < 30:
                loop.call_soon(turn)

        for number in range(29):
            starts.start(loop, functools.partial(begun.append, number))
        turn()
        await asyncio.sleep(0)
        starts.start(loop, functools.partial(begun.append, 29))
        for _ in range(30):
            await asyncio.sleep(0)
        assert begun == [*range(30)]
        assert max(b - a for a, b in itertools.pairwise([0, *turns])) <= http_protocol.STARTS_PER_TURN
        starts.start(loop, functools.partial(begun.append, 30))
        assert begun[-1] == 30, "nothing waits: it begins at once"

    run(monkeypatch, act)


def test_pipelined_requests_delay_others_by_one_start_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(clock: Clock) -> None:
        loop, starts = asyncio.get_running_loop(), http_protocol.RequestStarts()
        begun: list[str] = []
        for _ in range(40):
            starts.start(loop, functools.partial(begun.append, "pipelined"), is_pipelined=True)
        for _ in range(14):
            starts.start(loop, functools.partial(begun.append, "first"))
        for _ in range(10):
            await asyncio.sleep(0)
        num = http_protocol.STARTS_PER_TURN
        assert begun[:num] == ["pipelined"] * num, "nothing else had arrived"
        assert begun[num : 3 * num] == [*["first"] * 7, "pipelined", *["first"] * 7, "pipelined"]
        assert begun[3 * num :] == ["pipelined"] * 30

    run(monkeypatch, act)


def test_the_next_of_requests_sent_at_once_counts_as_pipelined(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[bool] = []
    start = http_protocol.RequestStarts.start

    def noted(self: Any, loop: Any, begin: Any, *, is_pipelined: bool) -> None:
        kinds.append(is_pipelined)
        start(self, loop, begin, is_pipelined=is_pipelined)

    monkeypatch.setattr(http_protocol.RequestStarts, "start", noted)

    async def act(clock: Clock) -> None:
        client = Client()
        client.connect(stream)
        await client.send(GET * 3)
        await client.send(GET)
        assert kinds == [False, True, True, False]
        client.abort()

    run(monkeypatch, act)


def test_a_client_that_leaves_ends_the_first_of_its_pipelined_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[str] = []

    async def wait(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        ends.append((await receive())["type"])
        await send({"type": "http.response.start", "status": 200, "headers": []})  # nobody is there: not an error

    async def act(clock: Clock) -> None:
        client = Client()
        client.connect(wait)
        await client.send(GET * 3)
        client.abort()
        await virtual_sleep(1)
        assert ends == ["http.disconnect"]
        assert not client.written

    run(monkeypatch, act)


def test_few_of_the_requests_that_a_client_sends_at_once_are_parsed_until_they_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = asyncio.Event()
    wait = refusing_after(gate.wait)

    async def act(clock: Clock) -> None:
        client = Client()
        client.connect(wait)
        await client.send(GET * 2000 + GET[:5])
        assert client.protocol is not None
        assert len(client.protocol.pipeline) < http_protocol.PIECE_BYTES / len(GET) + http_protocol.MAX_PIPELINED
        await client.send(GET[5:])
        gate.set()
        await virtual_sleep(1)
        assert client.written.count(b"HTTP/1.1 401 ") == 2001
        assert not client.is_closing()
        client.abort()

    run(monkeypatch, act)


def test_a_client_is_not_read_while_requests_that_it_sent_at_once_wait_to_be_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gates = asyncio.Semaphore(0)
    wait = refusing_after(gates.acquire)

    async def act(clock: Clock) -> None:
        client = Client()
        client.connect(wait)
        await client.send(GET * 2000)
        for num_answers in range(1, 400):
            assert client.is_paused
            gates.release()
            await virtual_sleep(1)
            assert client.written.count(b"HTTP/1.1 401 ") == num_answers
        for _ in range(1601):
            gates.release()
        await virtual_sleep(1)
        assert client.written.count(b"HTTP/1.1 401 ") == 2000 and not client.is_paused
        client.abort()

    run(monkeypatch, act)


def test_a_client_that_sends_ever_more_requests_before_it_is_answered_is_hung_up_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = asyncio.Event()
    wait = refusing_after(gate.wait)

    async def act(clock: Clock) -> None:
        client = Client()
        client.connect(wait)
        assert client.protocol is not None
        for _ in range(40):
            await client.send(GET * 2000)  # as it can after each `receive`
            assert len(client.protocol._unparsed) <= http_protocol.MAX_UNPARSED_BYTES
        gate.set()
        await virtual_sleep(1)
        assert client.written.count(b"HTTP/1.1 401 ") == 1
        assert b"connection: close" in client.written and client.is_closing()

    run(monkeypatch, act)


def test_a_server_that_stops_answers_one_request_of_a_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = asyncio.Event()
    wait = refusing_after(gate.wait)

    async def act(clock: Clock) -> None:
        client = Client()
        client.connect(wait)
        await client.send(GET * 1000)
        assert client.protocol is not None
        client.protocol.shutdown()
        await client.send(GET[5:] + GET)  # begins amid a request that was dropped
        gate.set()
        await virtual_sleep(1)
        assert client.written.count(b"HTTP/1.1 401 ") == 1
        assert b"connection: close" in client.written and client.is_closing()

    run(monkeypatch, act)


def test_a_server_that_stops_logs_one_line_about_the_requests_that_it_cuts_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def hang(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.Event().wait()

    async def act(clock: Clock) -> None:
        server = DrainingServer(hang, lambda: 0, lambda *_: b"{}", max_connections=8, write_timeout_s=WRITE_TIMEOUT_S)
        server.config.load()
        server.lifespan, server.servers = server.config.lifespan_class(server.config), []
        clients = [Client(server=(server.server_state, {})) for _ in range(3)]
        for client in clients:
            client.connect(hang)
            await client.send(GET)
        await server.shutdown()
        await virtual_sleep(1)
        assert not server.server_state.tasks
        assert all(client.written.startswith(b"HTTP/1.1 500 ") and client.is_closing() for client in clients)

    run(monkeypatch, act)
    (line,) = (record for record in caplog.records if record.levelno >= logging.WARNING)
    assert "Cancel 3 " in line.getMessage() and line.exc_info is None


def test_a_second_stop_says_how_many_requests_it_cuts_off(caplog: pytest.LogCaptureFixture) -> None:
    async def act() -> None:
        server = DrainingServer(refuse, lambda: 3, lambda *_: b"{}", max_connections=8, write_timeout_s=WRITE_TIMEOUT_S)
        for _ in range(3):
            server.stop()

    asyncio.run(act())
    assert [record.getMessage() for record in caplog.records] == ["stopping at once: 3 requests are cut off"]


def test_an_error_of_the_application_is_logged_and_closes_an_answer_that_has_begun(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST":
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ValueError("of the application")

    async def act(clock: Clock) -> None:
        for request, status in ((GET, b"500"), (POST + b"x" * 100, b"200")):
            client = Client()
            client.connect(fail)
            await client.send(request)
            assert client.written.startswith(b"HTTP/1.1 " + status)
            assert client.is_closing()

    run(monkeypatch, act)
    assert [type(record.exc_info[1]) for record in caplog.records if record.exc_info] == [ValueError] * 2


def test_an_answer_that_has_ended_is_not_kept_by_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sink may refer to it, and it refers to the connection."""
    opened: list[bool] = []

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        one = EventSink(lambda output: b"")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        cast(Any, send).__self__.attach(one)
        opened.append(one.is_open)
        await send({"type": "http.response.body", "body": b""})

    async def act(clock: Clock) -> None:
        client = Client()
        client.connect(answer)
        await client.send(GET)
        assert client.protocol is not None and opened == [True] and client.protocol._writer is None
        client.abort()

    run(monkeypatch, act)
