"""uvicorn's HTTP protocol with limits on clients before their request has begun, which uvicorn lacks, and with right
ends of pipelined requests. The server and the gateway use it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Protocol

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from octavo.errors import RETRY_AFTER_S

HEAD_TIMEOUT_S = 20.0  # from the first byte, or from connecting, to the end of the headers
MAX_HEAD_BYTES = 64 * 1024
LINGER_S = 2.0  # for a client to go on sending and reading after an answer that came before its whole body
STARTS_PER_TURN = 8  # requests; each takes up to some milliseconds before it waits for anything
IDLE_GRACE_S = 1.0  # for a connection to send a request before it may be cut for another one
MAX_PIPELINED = 16  # requests of a connection that wait for the answers before them
PIECE_BYTES = 8192  # data of a client that are parsed at once; they have some hundred requests at most
BODY_PIECE_BYTES = 65536  # the same amid a body, of which uvicorn copies what it has for each piece
MAX_UNPARSED_BYTES = 1 << 20  # behind them; a client that sends more gets the present answer and is hung up on
KEEP_ALIVE_S = 30  # for idle connections; longer than clients keep theirs, so that the clients close them


class DirectWriter(Protocol):
    """Writes an answer's chunks to its connection, past the ASGI application's `send`."""

    def open(self, write: Callable[[bytes], None]) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def close(self) -> None: ...


class RequestStarts:
    """Starts at most `STARTS_PER_TURN` requests in a turn of the event loop, in the order of their arrival. Between
    turns the engine's tokens are passed on, however many requests arrive at once.

    Pipelined requests take one of a turn's starts while others wait: a client that sends fifty requests at once would
    otherwise delay everybody else's.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._pipelined: deque[Callable[[], None]] = deque()
        self._num_started = 0  # requests started in this turn

    def start(self, loop: asyncio.AbstractEventLoop, begin: Callable[[], None], *, is_pipelined: bool = False) -> None:
        if self._num_started == STARTS_PER_TURN:
            (self._pipelined if is_pipelined else self._waiting).append(begin)
            return
        if self._num_started == 0:
            loop.call_soon(self._next_turn, loop)
        self._num_started += 1
        begin()

    def _next_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._num_started = min(len(self._waiting) + len(self._pipelined), STARTS_PER_TURN)
        if self._num_started:
            loop.call_soon(self._next_turn, loop)
        num_first = min(len(self._waiting), STARTS_PER_TURN - bool(self._pipelined))
        for place in range(self._num_started):
            (self._waiting if place < num_first else self._pipelined).popleft()()


class HttpProtocol(HttpToolsProtocol):
    """Refuses connections beyond `max_connections`, and heads that are too long or too slow, with the API's error
    bodies. When all connections are taken, one without a request gives way to a new one: clients that only hold
    connections open shut nobody out.

    Every state of a connection has a time limit: `HEAD_TIMEOUT_S` for a head, `KEEP_ALIVE_S` for an idle connection,
    `write_timeout_s` for a client that does not read, and `LINGER_S` for a client that still sends an unread body.
    """

    def __init__(
        self,
        *args: Any,
        max_connections: int,
        write_timeout_s: float,
        idle: dict[HttpProtocol, float],
        starts: RequestStarts,
        refusal: Callable[[int, str, str | None], bytes],
        share: Callable[[float], float] = float,
        **kwargs: Any,
    ) -> None:
        """`idle` (since when each connection has been without a request, oldest first) and `starts` are the server's.
        `refusal` makes an error's body of status, message and code. `share` takes the number of this process's
        connections, and returns that of all front ends."""
        super().__init__(*args, **kwargs)
        self._idle, self._starts = idle, starts
        self._share, self._refusal = share, refusal
        self._max_connections = max_connections
        self._write_timeout_s = write_timeout_s
        self._head_timer: asyncio.TimerHandle | None = None  # runs while waiting for a head
        self._end_timer: asyncio.TimerHandle | None = None  # aborts the connection
        self._writer: DirectWriter | None = None  # of the answer under way
        self._is_lingering = False  # answered; further data is dropped
        self._is_pipelined = False  # the request that starts now was sent before the last answer ended
        self._answering: RequestResponseCycle | None = None  # `cycle` is the last of pipelined requests
        self._unparsed = b""  # what the client sent after many pipelined requests
        self._has_dropped_requests = False  # pipelined ones; later data is dropped too, which may begin amid one
        self._num_head_bytes = 0
        self._num_trailer_bytes = 0
        self._asks_to_upgrade = False  # the request whose head was parsed last
        self._repeats_head = False  # the parser reads the head of the same request again

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._share(len(self.connections)) > self._max_connections and not self._evict_idle():
            self._refuse(503, f"The server has its --max-connections, {self._max_connections}.", "too_many_connections")
        else:
            self._await_head()

    def _evict_idle(self) -> bool:
        """Hang up on the connection that has had no request for the longest time. Returns False if there is none."""
        while self._idle:
            oldest, since = next(iter(self._idle.items()))
            if since > self.loop.time() - IDLE_GRACE_S:
                return False
            del self._idle[oldest]
            # Not while the client still gets an answer: it may read late, or send its next request early.
            is_answered = oldest.cycle is None or oldest.cycle.response_complete
            if is_answered and not oldest.transport.get_write_buffer_size():
                oldest.transport.abort()
                return True
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        self._unset_keepalive_if_required()
        if self._end_timer is not None:
            self._end_timer.cancel()
        self._detach()
        if (answering := self._answering) is not None and not answering.response_complete:
            answering.disconnected = True
            answering.message_event.set()
            if isinstance(answering, ResponseCycle):
                answering.on_disconnect()
        self._answering = None
        self.pipeline.clear()
        self._unparsed = b""
        super().connection_lost(exc)
        self._share(len(self.connections))
        if self.cycle is not None and isinstance(self.cycle.transport, _ClosingTransport):
            self.cycle.transport.let_go()

    def data_received(self, data: bytes) -> None:
        """Parse data until `MAX_PIPELINED` requests wait: the ten thousand that a client can send at once would hold
        the event loop for half a second."""
        data, self._unparsed = self._unparsed + data, b""
        begin = 0
        while begin < len(data) and not (
            self._is_lingering or self._has_dropped_requests or self.transport.is_closing()
        ):
            if len(self.pipeline) >= MAX_PIPELINED:
                self._unparsed = data[begin:]
                if len(self._unparsed) > MAX_UNPARSED_BYTES:  # each request that is answered may resume reading
                    self.shutdown()
                self.flow.pause_reading()  # until `_parse_rest`
                return
            is_in_body = self.cycle is not None and self.cycle.more_body
            end = begin + (BODY_PIECE_BYTES if is_in_body else PIECE_BYTES)
            self._parse(data[begin:end])
            begin = end

    def _parse_rest(self) -> None:
        if not self.transport.is_closing():
            self.flow.resume_reading()
            self.data_received(b"")

    def _parse(self, data: bytes) -> None:
        idle_timer, self.timeout_keep_alive_task = self.timeout_keep_alive_task, None
        num_bytes = len(data)
        while data:
            data = self._parse_request(data)
        if self._head_timer is not None:
            self._num_head_bytes += num_bytes
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._refuse(431, f"The request's head is longer than {MAX_HEAD_BYTES} bytes.")
        elif idle_timer is not None and self.cycle is not None and self.cycle.response_complete:
            self.timeout_keep_alive_task = idle_timer  # blank lines begin no request: still idle
            return
        if idle_timer is not None:
            idle_timer.cancel()

    def _parse_request(self, data: bytes) -> bytes:
        """Parse data up to the head of a request that asks for another protocol, and return the rest. The parser would
        take its body for that protocol. Clients of HTTP/2 ask in a first request with a body, and go on in HTTP/1.1 if
        the answer does: a parser that reads only how long the body is goes on."""
        try:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                length = [
                    b"%b: %b\r\n" % one for one in self.headers if one[0] in (b"content-length", b"transfer-encoding")
                ]
                self.parser = httptools.HttpRequestParser(self)
                self._repeats_head = True
                self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(length))
                return data[upgrade.args[0] :]
        except httptools.HttpParserError:
            self.logger.warning("Invalid HTTP request received.")
            self.send_400_response("Invalid HTTP request received.")
        return b""

    def on_message_begin(self) -> None:
        if self._repeats_head:
            return
        super().on_message_begin()
        self._num_trailer_bytes = 0
        self._await_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_timer is not None:
            super().on_header(name, value)
            return
        # Trailers of a chunked body. No route reads them: they are dropped, and their bytes are limited.
        self._num_trailer_bytes += len(name) + len(value)
        if self._num_trailer_bytes > MAX_HEAD_BYTES:
            self._close()

    def on_headers_complete(self) -> None:
        self._asks_to_upgrade = self.parser.should_upgrade()
        if self._repeats_head:
            self._repeats_head = False
            return
        self._end_head()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self._asks_to_upgrade:  # else the body is still to come
            super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        cycle.__class__ = ResponseCycle
        transport = _ClosingTransport(self.transport, self._close_answered, self._attach)
        cycle.transport = transport  # type: ignore[assignment]

        def begin() -> None:
            if not cycle.disconnected:
                super(HttpProtocol, self)._start_asgi_task(cycle, app)

        self._starts.start(self.loop, begin, is_pipelined=self._is_pipelined)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._writer is not None:
            self._writer.pause()
        self._end_within(self._write_timeout_s)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._writer is not None:
            self._writer.resume()
        if self._end_timer is not None and not self.transport.is_closing() and not self._is_lingering:
            self._end_timer.cancel()
            self._end_timer = None

    def on_response_complete(self) -> None:
        self._detach()
        self._is_pipelined = bool(self.pipeline)
        super().on_response_complete()
        self._is_pipelined = False
        if self._unparsed and not self.transport.is_closing():
            self.flow.pause_reading()  # uvicorn has resumed it
            self.loop.call_soon(self._parse_rest)
        self._idle.pop(self, None)  # removed first, to keep the order of times
        if self.cycle.response_complete and not self.transport.is_closing() and not self._is_lingering:
            self._idle[self] = self.loop.time()

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def shutdown(self) -> None:
        """Hang up after the present answer. The client sends its pipelined requests again, elsewhere."""
        super().shutdown()
        self._has_dropped_requests |= bool(self.pipeline or self._unparsed)
        self.pipeline.clear()
        self._unparsed = b""
        if self._answering is not None:
            self._answering.keep_alive = False
        if self.transport.is_closing():
            self._close()

    def _attach(self, writer: DirectWriter) -> None:
        self._writer = writer
        if self.flow.write_paused:
            writer.pause()

    def _detach(self) -> None:
        """Close the direct writer. It may refer to its answer, which refers to this object: a cycle."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _close(self) -> None:
        """Hang up when the client has read all written data, or nothing for `write_timeout_s`."""
        self.transport.close()
        self._end_within(self._write_timeout_s)

    def _close_answered(self) -> None:
        """Hang up after an answer. If the request's body was not read to its end, the client still sends it, and a
        reset would keep it from reading the answer. So further data is dropped for `LINGER_S`."""
        if self.cycle.more_body and not self._is_lingering and not self.transport.is_closing():
            self._is_lingering = True
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self._end_within(LINGER_S)
        elif not self._is_lingering:
            self._close()

    def _end_within(self, seconds: float) -> None:
        """Reset the connection when its client has read nothing for `seconds`."""
        if self._end_timer is None and seconds > 0:
            num_unread = self.transport.get_write_buffer_size()
            self._end_timer = self.loop.call_later(seconds, self._end_or_wait, seconds, num_unread)

    def _end_or_wait(self, seconds: float, num_unread: int) -> None:
        self._end_timer = None
        if self.transport.get_write_buffer_size() < num_unread:
            self._end_within(seconds)
            return
        if (sock := self.transport.get_extra_info("socket")) is not None:
            with contextlib.suppress(OSError):  # it is closed already
                # Otherwise the kernel would keep the bytes that the client does not read.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _await_head(self) -> None:
        self._end_head()
        self._num_head_bytes = 0
        self._idle[self] = self.loop.time()
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._on_slow_head)

    def _end_head(self) -> None:
        self._idle.pop(self, None)
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_slow_head(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._await_head()  # the client sends its next request while it still gets an answer
        elif self._num_head_bytes == 0:
            self._close()
        else:
            self._refuse(408, f"The request's head took longer than {HEAD_TIMEOUT_S:g} s.")

    def _refuse(self, status: int, message: str, code: str | None = None) -> None:
        """Answer with an error before a request has begun, and hang up."""
        self._end_head()
        body = self._refusal(status, message, code)
        retry = f"Retry-After: {RETRY_AFTER_S}\r\n" if status == 503 else ""
        self.transport.write(
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n{retry}Connection: close\r\n\r\n".encode()
            + body
        )
        self._close()


def _do_nothing(*_: object) -> None:
    """Replace a callback of a connection that has gone."""


class _ClosingTransport:
    """The transport of one answer. Closing it hangs up in the protocol's way."""

    def __init__(
        self, transport: asyncio.Transport, close: Callable[[], None], attach: Callable[[DirectWriter], None]
    ) -> None:
        self.write: Callable[[bytes], None] = transport.write
        self.is_closing, self.close, self.attach = transport.is_closing, close, attach

    def let_go(self) -> None:
        """Forget the connection, which has gone. It refers to this object: a cycle would stay until a full
        collection."""
        self.is_closing = lambda: True
        self.write = self.close = self.attach = _do_nothing


class ResponseCycle(RequestResponseCycle):
    """One request and its answer. An answer that begins before the request's body has arrived closes the connection. An
    answer without a length to HTTP/1.0, which has no chunks, ends with the connection."""

    _ends_with_connection = False
    on_disconnect: Callable[..., object] = staticmethod(_do_nothing)

    async def run_asgi(self, app: Any) -> None:
        """Answer with `app`, and log its errors. The end of the server cancels requests: it logs their number, where
        uvicorn's `run_asgi` would log a traceback of each."""
        try:
            await app(self.scope, self.receive, self.send)
            if not (self.response_complete or self.disconnected):
                self.logger.error("The application did not complete an answer.")
        except asyncio.CancelledError:
            pass
        except BaseException as error:  # a panic of Rust is no Exception
            self.logger.error("Exception in ASGI application", exc_info=error)
        if not self.response_started:
            await self.send_500_response()
        elif not self.response_complete:
            self.transport.close()
        self.on_response = _do_nothing

    def attach(self, writer: DirectWriter) -> None:
        """Open `writer`, if the answer has chunks and its client is there, and close it while the client is late."""
        if self.chunked_encoding and not self._ends_with_connection and not self.disconnected:
            writer.open(self.transport.write)
            self.transport.attach(writer)  # type: ignore[attr-defined]

    def watch(self, on_disconnect: Callable[[], object] | None) -> None:
        """Call `on_disconnect` if the client hangs up before the answer is complete. None: watch no longer."""
        self.on_disconnect = on_disconnect or _do_nothing
        if on_disconnect is None:
            return
        if self.disconnected:
            on_disconnect()
        else:
            self.flow.resume_reading()  # a pipelined request has paused it, and its end would not be noticed

    def send(self, message: Any) -> Any:
        """Send a message without a coroutine of its own, because streams call this for every chunk."""
        if message["type"] == "http.response.start":
            if self.more_body:
                self.keep_alive = False
            if self.scope["http_version"] == "1.0" and not any(
                name.lower() == b"content-length" for name, _ in message.get("headers", ())
            ):
                self._ends_with_connection = self.chunked_encoding = True
        elif self._ends_with_connection:
            self.chunked_encoding, self.expected_content_length = False, len(message.get("body", b""))
        return super().send(message)
