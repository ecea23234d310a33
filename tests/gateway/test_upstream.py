"""HTTP to one address: kept connections, every way to end a body, and what goes wrong."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Awaitable, Callable

import pytest

from octavo.gateway import request_body
from octavo.gateway import upstream as upstream_module
from octavo.gateway.upstream import Sink, Upstream, UpstreamError
from tests.gateway.fakes import Asked, Behave, fake_servers, until
from tests.waiting import Clock, virtual_sleep


async def in_chunks(asked: Asked) -> None:
    asked.writer.write(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n")
    asked.head(transfer_encoding="chunked")
    asked.writer.write(b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\ntrailer: x\r\n\r\n")


async def with_length(asked: Asked) -> None:
    asked.reply(b"abcde")


async def until_close(asked: Asked) -> None:
    asked.head()
    asked.writer.write(b"abcde")
    asked.writer.close()


async def without_body(asked: Asked) -> None:
    asked.head(204)


async def too_short(asked: Asked) -> None:
    asked.head(content_length="9")
    asked.writer.write(b"abcde")
    asked.writer.close()


async def never_ending(asked: Asked) -> None:
    asked.head(content_length="9")
    asked.writer.write(b"abcde")


def sink_into(given: list[bytes], *, takes_more: bool) -> Sink:
    def sink(data: bytes) -> bool:
        given.append(data)
        return takes_more

    return sink


def run_with(clock: Clock, behave: Behave, work: Callable[..., Awaitable[None]], timeout_s: float = 30) -> None:
    async def run() -> None:
        async with fake_servers(behave) as (server,):
            upstream = Upstream(server.address, timeout_s=timeout_s)
            await work(upstream, server)
            upstream.close()

    clock.run(run())


@pytest.mark.parametrize(
    ("behave", "body", "num_connections"),
    [(in_chunks, b"abcde", 1), (with_length, b"abcde", 1), (until_close, b"abcde", 3), (without_body, b"", 1)],
)
def test_a_body_ends_where_it_says(clock: Clock, behave: Behave, body: bytes, num_connections: int) -> None:
    async def work(upstream, server) -> None:  # type: ignore[no-untyped-def]
        for _ in range(3):
            answer = await upstream.send("POST", b"/x", [(b"a", b"b")], b"{}")
            assert await answer.read_all(100) == body and await answer.read() == b""
            assert not answer.header(b"link")
            answer.close()
        assert server.num_connections == num_connections, "connections are kept where they can be"

    run_with(clock, behave, work)


@pytest.mark.parametrize("behave", [too_short, never_ending])
def test_a_body_that_breaks_off_is_an_error_after_what_had_come(clock: Clock, behave: Behave) -> None:
    async def work(upstream, server) -> None:  # type: ignore[no-untyped-def]
        answer = await upstream.send("GET", b"/x", [], b"")
        assert await answer.read() == b"abcde"
        with pytest.raises(UpstreamError):
            await answer.read()
        answer.close()
        await until(lambda: server.num_hung_up)

    run_with(clock, behave, work)


def test_a_second_answer_to_one_request_is_no_part_of_the_first(clock: Clock) -> None:
    whole = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n"

    async def behave(asked: Asked) -> None:
        asked.writer.write(whole + b"HTTP/1.1 404 X\r\nx: y\r\ncontent-length: 5\r\n\r\nOTHER")

    async def work(upstream, server) -> None:  # type: ignore[no-untyped-def]
        for number in (1, 2):
            answer = await upstream.send("GET", b"/x", [], b"")
            assert await answer.read_all(100) == b"abcde" and await answer.read() == b""
            assert (answer.status, answer.header(b"x")) == (200, b"")
            answer.close()
            assert server.num_connections == number, "its connection is not kept"

    run_with(clock, behave, work)


@pytest.mark.parametrize("num_lines", [16000, 300])
@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nx: ", b"HTTP/1.1 200 OK\r\n", b""])
def test_a_head_is_bounded_with_and_without_an_end(clock: Clock, head: bytes, num_lines: int) -> None:
    async def behave(asked: Asked) -> None:
        line = b"y" * 1000 + (b"" if head.endswith(b" ") else b": z\r\n")
        lines = (line if head else b"HTTP/1.1 102 X\r\n\r\n" * 50) * num_lines
        asked.writer.write(head + lines + (b"\r\n\r\n" if num_lines < 1000 else b""))

    async def work(upstream, server) -> None:  # type: ignore[no-untyped-def]
        with pytest.raises(UpstreamError, match="more than 262144 bytes"):
            await upstream.send("GET", b"/x", [], b"")

    run_with(clock, behave, work)


@pytest.mark.parametrize(
    ("content", "transfer"),
    [
        ("gzip", "chunked"), ("identity", "Chunked"), ("identity\r\ncontent-encoding: gzip", "chunked"),
        ("identity", "gzip, chunked"), ("identity", "gzip\r\ntransfer-encoding: chunked"),
    ],
)  # fmt: skip
def test_an_answer_that_is_compressed_unasked_is_a_fault(clock: Clock, content: str, transfer: str) -> None:
    async def behave(asked: Asked) -> None:
        asked.head(content_encoding=content, transfer_encoding=transfer)
        asked.writer.write(b"5\r\nabcde\r\n0\r\n\r\n")

    async def work(upstream, server) -> None:  # type: ignore[no-untyped-def]
        if (content, transfer) == ("identity", "Chunked"):
            (await upstream.send("GET", b"/x", [], b"")).close()
            return
        with pytest.raises(UpstreamError, match="compressed"):
            await upstream.send("GET", b"/x", [], b"")

    run_with(clock, behave, work)


def test_a_kept_connection_that_was_closed_is_replaced(clock: Clock) -> None:
    closing = asyncio.Event()

    async def behave(asked: Asked) -> None:
        if closing.is_set():
            closing.clear()
            asked.die()
        else:
            await with_length(asked)

    async def work(upstream, server) -> None:  # type: ignore[no-untyped-def]
        (await upstream.send("GET", b"/x", [], b"")).close()
        await (first := await upstream.send("GET", b"/x", [], b"")).read_all(9)
        first.close()
        closing.set()
        answer = await upstream.send("GET", b"/x", [], b"")
        assert await answer.read_all(9) == b"abcde"
        answer.close()

    run_with(clock, behave, work)


def test_a_replica_waits_for_a_client_that_does_not_read(clock: Clock) -> None:
    size = 64 * upstream_module.MAX_HELD_BYTES

    async def behave(asked: Asked) -> None:
        asked.head(content_length=str(size))
        asked.writer.write(b"x" * size)

    async def work(upstream, server) -> None:  # type: ignore[no-untyped-def]
        answer = await upstream.send("GET", b"/x", [], b"")
        await until(lambda: answer._num_held_bytes > upstream_module.MAX_HELD_BYTES)
        for _ in range(100):
            await asyncio.sleep(0)
        assert answer._num_held_bytes < 4 * upstream_module.MAX_HELD_BYTES
        num_bytes = 0
        while data := await answer.read():
            num_bytes += len(data)
        assert num_bytes == size
        answer.close()

    run_with(clock, behave, work)


def test_a_piece_of_a_stream_wakes_no_task(clock: Clock) -> None:
    go_on = asyncio.Event()

    async def behave(asked: Asked) -> None:
        asked.begin_stream()
        asked.piece(b"a")
        for piece in (b"b", b"c", b""):
            await go_on.wait()
            go_on.clear()
            asked.piece(piece)

    async def work(upstream, server) -> None:  # type: ignore[no-untyped-def]
        answer = await upstream.send("GET", b"/x", [], b"")
        assert await answer.read() == b"a"
        given: list[tuple[bytes, object]] = []

        def sink(data: bytes) -> bool:
            given.append((data, asyncio.current_task()))
            go_on.set()
            return True

        go_on.set()
        assert not await answer.pass_to(sink)
        assert given == [(b"b", None), (b"c", None)]
        answer.close()

    run_with(clock, behave, work)


def test_what_a_sink_cannot_take_yet_is_held_and_comes_before_the_loss(clock: Clock) -> None:
    async def behave(asked: Asked) -> None:
        asked.begin_stream()
        asked.piece(b"a")
        await go_on.wait()
        asked.piece(b"b")
        await asked.writer.drain()
        asked.writer.close()

    go_on = asyncio.Event()

    async def work(upstream, server) -> None:  # type: ignore[no-untyped-def]
        answer = await upstream.send("GET", b"/x", [], b"")
        given: list[bytes] = []
        full = sink_into(given, takes_more=False)
        assert await answer.pass_to(full) and given == [b"a"]
        go_on.set()
        await until(lambda: answer._failure)
        assert given == [b"a"], "b is held"
        assert await answer.pass_to(full) and given == [b"a", b"b"]
        with pytest.raises(UpstreamError, match="hung up"):
            await answer.pass_to(full)
        answer.close()

    run_with(clock, behave, work)


def test_a_loss_does_not_hide_that_the_sink_has_to_go_on(clock: Clock) -> None:
    async def work(upstream, server) -> None:  # type: ignore[no-untyped-def]
        answer = await upstream.send("GET", b"/x", [], b"")

        def full(data: bytes) -> bool:
            answer.fail(UpstreamError("lost in the same moment"))
            return False

        assert await answer.pass_to(full), "what the sink has taken is sent first"
        with pytest.raises(UpstreamError, match="same moment"):
            await answer.pass_to(full)
        answer.close()

    run_with(clock, never_ending, work)


def test_a_fault_of_the_sink_is_not_the_replicas(clock: Clock) -> None:
    async def work(upstream, server) -> None:  # type: ignore[no-untyped-def]
        answer = await upstream.send("GET", b"/x", [], b"")

        def broken(data: bytes) -> bool:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await answer.pass_to(broken)
        answer.close()

    run_with(clock, with_length, work)


def test_a_stream_is_lost_when_nothing_came_for_its_time_and_not_before(clock: Clock) -> None:
    async def behave(asked: Asked) -> None:
        asked.begin_stream()
        for _ in range(5):
            asked.piece(b"a")
            await virtual_sleep(20)

    async def work(upstream, server) -> None:  # type: ignore[no-untyped-def]
        begin, given = clock.now(), list[bytes]()
        answer = await upstream.send("GET", b"/x", [], b"")
        with pytest.raises(UpstreamError, match="nothing came for 30 s"):
            await answer.pass_to(sink_into(given, takes_more=True))
        assert given == [b"a"] * 5 and 110 <= clock.now() - begin < 120
        answer.close()

    run_with(clock, behave, work, timeout_s=30)


@pytest.mark.parametrize("was_cut", [False, True])
def test_an_answer_that_came_before_a_write_failed_is_read_unless_the_connection_was_cut(was_cut: bool) -> None:
    """The server has answered before it read the body, and hung up."""

    class Failing(asyncio.Transport):
        """Its kernel takes one piece."""

        def write(self, data: object) -> None:
            connection.pause_writing()

        def get_extra_info(self, name: str, default: object = None) -> object:
            return ours if name == "socket" else None

        def is_closing(self) -> bool:
            return True

        def abort(self) -> None:
            pass

    async def run() -> None:
        num_bytes = request_body.PIECE_BYTES + 1
        asking = asyncio.ensure_future(connection.ask([b"x" * num_bytes], num_bytes, 30))
        await asyncio.sleep(0)
        theirs.sendall(b"HTTP/1.1 413 X\r\ncontent-length: 5\r\n\r\nabcde")
        if was_cut:
            connection.abort()
        ours.close()
        connection.connection_lost(BrokenPipeError())
        if was_cut:
            with pytest.raises(UpstreamError, match="was cut"):
                await asking
            return
        answer = await asking
        assert (answer.status, await answer.read_all(9)) == (413, b"abcde")
        answer.close()
        assert theirs.recv(1) == b"", "no handle is left open"

    ours, theirs = socket.socketpair()
    connection = upstream_module._Connection([], set())
    connection.connection_made(Failing())
    asyncio.run(run())
    theirs.close()


def test_a_long_request_is_sent_when_no_file_can_be_opened(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    async def work(upstream, server) -> None:  # type: ignore[no-untyped-def]
        monkeypatch.setattr(os, "dup", refuse)
        answer = await upstream.send("POST", b"/x", [], b"x" * (request_body.PIECE_BYTES + 1))
        assert (answer.status, await answer.read_all(9)) == (200, b"abcde")
        answer.close()
        assert [len(asked.body) for asked in server.asked] == [request_body.PIECE_BYTES + 1]

    run_with(clock, with_length, work)


def test_a_request_that_must_not_be_repeated_gets_a_new_connection(clock: Clock) -> None:
    async def work(upstream, server) -> None:  # type: ignore[no-untyped-def]
        for may_be_repeated, number in ((True, 1), (True, 1), (False, 2), (True, 2)):
            answer = await upstream.send("POST", b"/x", [], b"{}", may_be_repeated=may_be_repeated)
            await answer.read_all(9)
            answer.close()
            assert server.num_connections == number

    run_with(clock, with_length, work)


def test_a_redirection_within_the_address_has_only_a_path(clock: Clock) -> None:
    async def behave(asked: Asked) -> None:
        asked.reply(b"", 307, location=asked.target[1:])

    async def work(upstream, server) -> None:  # type: ignore[no-untyped-def]
        for said, seen in (
            (f"{server.address}/v1/files", "/v1/files"),
            (f"{server.address}1/v1/files", f"{server.address}1/v1/files"),
            ("https://other/x", "https://other/x"),
        ):
            answer = await upstream.send("GET", f"/{said}".encode(), [], b"")
            assert answer.header(b"location").decode() == seen
            await answer.read()
            answer.close()

    run_with(clock, behave, work)


def test_nobody_at_the_address_is_an_error_that_says_so(clock: Clock) -> None:
    async def work(upstream, server) -> None:  # type: ignore[no-untyped-def]
        server.die()
        with pytest.raises(UpstreamError, match="cannot be reached"):
            await upstream.send("GET", b"/x", [], b"")
        with pytest.raises(UpstreamError, match="cannot be reached"):
            await Upstream("http://no..name", timeout_s=30).send("GET", b"/x", [], b"")

    run_with(clock, with_length, work)
