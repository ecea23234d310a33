"""HTTP/1.1 to one address: requests out, answers in as they come, over connections that are kept.

asyncio's own protocol over llhttp (`httptools`, as the server below). Bodies are passed on unchanged but for the
framing of chunks: the callback that receives a piece of a stream sends it to the client, without waking a task.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import os
import re
import socket
import ssl
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import cast
from urllib.parse import urlsplit

import httptools

from octavo.gateway.request_body import PIECE_BYTES, Part

Headers = Sequence[tuple[bytes, bytes]]
Sink = Callable[[bytes], bool]  # takes bytes; returns False if it can take no more yet
CONNECT_TIMEOUT_S = 10.0
_PRIVATE_NAMES = (".local", ".lan", ".internal", ".svc", ".cluster.local")  # ends of names of private networks
IDLE_S = 4.0  # less than uvicorn's 5 s: servers close their idle connections later than we do
MAX_HELD_BYTES = 256 * 1024  # of an answer, not yet passed on; then the replica waits
MAX_HEAD_BYTES = 256 * 1024  # received before an answer's head is complete, interim answers included
# Of one hop: RFC 9110, section 7.6.1.
HOP_BY_HOP = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding",
                        b"upgrade", b"proxy-authorization", b"proxy-authenticate"})  # fmt: skip


def is_encoded(headers: Headers) -> bool:
    """Return whether any Content-Encoding says that the body is compressed."""
    return any(
        name == b"content-encoding" and value.strip().lower() not in (b"", b"identity") for name, value in headers
    )


def end_to_end(headers: Headers, dropped: Collection[bytes]) -> list[tuple[bytes, bytes]]:
    """Return headers without the `dropped` ones and without those that `Connection` names for this hop alone, except
    the client's address: it would let clients hide it."""
    named = {one.strip().lower() for name, value in headers if name == b"connection" for one in value.split(b",")}
    named.discard(b"x-forwarded-for")
    return [header for header in headers if header[0] not in dropped and header[0] not in named]


class UpstreamError(Exception):
    """A replica that could not be reached, hung up, was silent for too long, or spoke no HTTP."""


class UnreachableError(UpstreamError):
    """A replica that could not be connected to: it has not seen the request."""


class Upstream:
    """Connections to one address. An https address needs a certificate of `trusted`, by default of the system's."""

    def __init__(self, address: str, *, timeout_s: float, trusted: ssl.SSLContext | None = None) -> None:
        parts = urlsplit(address)
        self.address = address
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = trusted or ssl.create_default_context() if parts.scheme == "https" else None
        self._host_header = parts.netloc.rpartition("@")[2].encode()
        self._prefix = parts.path.rstrip("/").encode()
        place = re.escape(self._host_header + self._prefix)
        self._own = re.compile(rb"\Ahttps?://" + place + rb"(?=/)", re.IGNORECASE)
        self._timeout_s = timeout_s
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()

    @functools.cached_property
    def is_near(self) -> bool:
        """Whether the address is of this host or of a private network, by its number or its name."""
        try:
            address = ipaddress.ip_address(self._host)
        except ValueError:
            return "." not in self._host or self._host.endswith(_PRIVATE_NAMES)
        return not address.is_global

    @property
    def is_private(self) -> bool:
        """Whether nobody outside reads what is sent: the address is near, or the connection is encrypted."""
        return self.is_near or self._ssl is not None

    async def send(
        self, method: str, target: bytes, headers: Iterable[tuple[bytes, bytes]], body: bytes | list[Part], *,
        may_be_repeated: bool = True,
    ) -> Answer:  # fmt: skip
        """Send a request, whose body may be in parts, and return its answer once the status and headers are here.
        A server may close a kept connection while the request is on its way. Then the request is sent again, so one
        that must not be repeated gets a connection of its own. Raises `UpstreamError`."""
        parts: list[Part] = [body] if isinstance(body, bytes) else body
        num_bytes = sum(map(len, parts))
        lines = [b"%s %s HTTP/1.1" % (method.encode(), self._prefix + target), b"host: " + self._host_header]
        lines += [b"%s: %s" % header for header in headers]
        if num_bytes or method in ("POST", "PUT", "PATCH"):
            lines.append(b"content-length: %d" % num_bytes)
        head = b"\r\n".join(lines) + b"\r\n\r\n"
        message, num_bytes = [head, *parts], len(head) + num_bytes
        was_lost = False
        if may_be_repeated and (connection := self._take_idle()) is not None:
            try:
                return self._seen_from_outside(await connection.ask(message, num_bytes, self._timeout_s))
            except _StaleError:  # closed while it was idle, or by a replica that the request ended
                was_lost = True
        try:
            connection = await self._connect()
        except UnreachableError as error:
            raise UpstreamError(f"the server hung up: {error}") if was_lost else error from None
        return self._seen_from_outside(await connection.ask(message, num_bytes, self._timeout_s))

    def close(self) -> None:
        """Cut all connections; requests under way end with `UpstreamError`."""
        for connection in list(self._open):
            connection.abort()

    def _seen_from_outside(self, answer: Answer) -> Answer:
        """Make a redirect to this address relative: clients cannot reach the address."""
        if answer.header(b"location"):
            answer.headers = [
                (name, self._own.sub(b"", value, count=1) if name == b"location" else value)
                for name, value in answer.headers
            ]
        return answer

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closing and time.monotonic() - connection.idle_since < IDLE_S:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self._idle, self._open), self._host, self._port, ssl=self._ssl
                )
        except TimeoutError:
            raise UnreachableError(f"{self.address} took longer than {CONNECT_TIMEOUT_S:g} s to connect") from None
        except (OSError, UnicodeError) as error:  # UnicodeError: a name's label is empty or too long
            why = (error.strerror if isinstance(error, OSError) else None) or error
            raise UnreachableError(f"{self.address} cannot be reached: {why}") from None
        return connection


class Answer:
    """The answer to one request. `close` it when it is done with, read to its end or not."""

    def __init__(self, connection: _Connection, timeout_s: float) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.is_whole = False
        self._connection = connection
        self._pieces: list[bytes] = []
        self._num_held_bytes = 0  # as received, about
        self._sink: Sink | None = None
        self._sink_error: Exception | None = None
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timeout_s = timeout_s
        self._heard_at = 0.0
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._look)

    @property
    def heard_at(self) -> float:
        """When bytes came last, or the reader began to wait; `time.monotonic`."""
        return self._heard_at

    def header(self, name: bytes) -> bytes:
        """Return the value of a header, whose name is in small letters; empty if there is none."""
        return next((value for own, value in self.headers if own == name), b"")

    async def read(self) -> bytes:
        """Return the bytes that have come and are unread, at least one; none at the end. An `UpstreamError` is raised
        once all bytes before it were read."""
        while not self._pieces:
            if self.is_whole:
                return b""
            await self.wait()
        return self._take()

    async def pass_to(self, sink: Sink) -> bool:
        """Give `sink` the bytes as they come. Returns True when it can take no more: later bytes are held; False at the
        end. Raises errors of `sink`, and once all bytes before it were passed, `UpstreamError`."""
        self._sink = sink
        try:
            self.deliver()
            while self._sink is not None and (self._failure is not None or not self.is_whole):
                await self.wait()
            if self._sink_error is not None:
                raise self._sink_error
            return self._sink is None
        finally:
            self._sink = None

    async def read_all(self, max_bytes: int) -> bytes:
        """Return the body, of which only the beginning if it is longer than `max_bytes`."""
        parts, num_bytes = [], 0
        while num_bytes < max_bytes and (data := await self.read()):
            parts.append(data)
            num_bytes += len(data)
        return b"".join(parts)[:max_bytes]

    def close(self) -> None:
        """Give the connection back, or if the answer is incomplete, cut it: the replica then stops its work."""
        self._connection.end(self)

    async def wait(self) -> None:
        """Wait until bytes or the end have come. Raises the error that ended the answer."""
        if self._failure is not None:
            raise self._failure
        self._heard_at = time.monotonic()
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    @property
    def add(self) -> Callable[[bytes], None]:
        """The function that takes a piece of the body, until `complete`. It is the list's own, as every chunk of a
        stream calls it."""
        return self._pieces.append

    def complete(self) -> None:
        """Note the end. Bytes behind it are another answer, to no request."""
        self._pieces = self._pieces.copy()
        self.is_whole = True
        self.wake()

    def deliver(self, num_received: int = 0) -> None:
        """Give the received bytes to the sink, or wake the reader. `num_received` came with the last ones."""
        if not self._pieces:
            return
        self._heard_at = time.monotonic()
        if self._sink is not None:
            try:
                if self._sink(self._take()):
                    return
            except Exception as error:
                self._sink_error = error
            self._sink = None
        else:
            self._num_held_bytes += num_received
            if self._num_held_bytes > MAX_HELD_BYTES:
                self._connection.pause()
        self.wake()

    def fail(self, failure: Exception) -> None:
        if not self.is_whole and self._failure is None:
            self._failure = failure
            self.wake()

    def forget(self) -> None:
        """Drop the timer and the failure: through them (a traceback) the answer would stay in memory."""
        self._timer.cancel()
        self._failure = None

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _take(self) -> bytes:
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        if self._num_held_bytes:
            if self._num_held_bytes > MAX_HELD_BYTES:
                self._connection.resume()
            self._num_held_bytes = 0
        return data

    def _look(self) -> None:
        """Fail if the reader has waited for too long. An answer has one timer, as a timer for each piece would cost as
        much as the piece."""
        waits = self._waiter is not None and not self._waiter.done()
        silent_s = time.monotonic() - self._heard_at if waits else 0.0
        if silent_s < self._timeout_s:
            self._timer = asyncio.get_running_loop().call_later(self._timeout_s - silent_s, self._look)
        else:
            self.fail(UpstreamError(f"nothing came for {self._timeout_s:g} s"))


def _pieces(message: Sequence[Part], num_bytes: int) -> Iterator[Part]:
    """Yield a short message whole, and a longer one in pieces: one write takes all that it is given, and would hold the
    event loop while it copies or encrypts that."""
    if num_bytes <= PIECE_BYTES:
        yield b"".join(message)
        return
    for part in message:
        for begin in range(0, len(part), PIECE_BYTES):
            yield memoryview(part)[begin : begin + PIECE_BYTES]


def _long_head() -> UpstreamError:
    return UpstreamError(f"the head of the server's answer has more than {MAX_HEAD_BYTES} bytes")


class _StaleError(UpstreamError):
    """A kept connection that the other side had closed."""


class _Connection(asyncio.Protocol):
    """One connection, which answers one request at a time. Its methods `on_…` are httptools' callbacks."""

    def __init__(self, idle: list[_Connection], others: set[_Connection]) -> None:
        self._idle, self._others = idle, others
        self._answer: Answer | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._num_head_bytes = 0  # received before the answer's head was complete
        self._has_head = False
        self._ends_with_connection = self._keeps_alive = False
        self._num_requests = 0
        self._unsent: Iterator[Part] = iter(())  # of the request
        self._is_sent = True
        self._may_write = True
        self._socket: socket.socket | None = None  # a second handle, while a long request is sent
        self.idle_since = 0.0

    @property
    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports have no class of asyncio as a base
        self._others.add(self)

    async def ask(self, message: Sequence[Part], num_bytes: int, timeout_s: float) -> Answer:
        """Send a request of `num_bytes`, and return the answer once its head has come, even before all bytes are sent.
        Raises `UpstreamError`."""
        answer = self._answer = Answer(self, timeout_s)
        self.on_body = answer.add
        self._parser = httptools.HttpResponseParser(self)
        self._has_head = self._ends_with_connection = self._keeps_alive = False
        self._num_head_bytes = 0
        self._num_requests += 1
        try:
            self._unsent, self._is_sent = _pieces(message, num_bytes), False
            self._socket = self._second_handle(num_bytes)
            self._send()
            while not self._has_head:
                await answer.wait()
        except BaseException:
            self.end(answer)
            raise
        return answer

    def _second_handle(self, num_bytes: int) -> socket.socket | None:
        """Return another handle of the connection for a request of so many bytes, if one write does not take it. A
        server may answer before it has read the body, and hang up. Then the next write fails, and the transport closes
        its own handle although the answer is there."""
        sock = self._transport.get_extra_info("socket")
        if num_bytes <= PIECE_BYTES or sock is None or self._transport.get_extra_info("ssl_object") is not None:
            return None
        try:
            handle = socket.socket(fileno=os.dup(sock.fileno()))
        except OSError:  # too many open files: the request goes on without
            return None
        handle.setblocking(False)
        return handle

    def _read_rest(self) -> None:
        """Take what came before the connection was lost."""
        if (handle := self._socket) is not None:
            with contextlib.suppress(OSError):
                while data := handle.recv(PIECE_BYTES):
                    self.data_received(data)
            self._close_handle()

    def _close_handle(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def end(self, answer: Answer) -> None:
        answer.forget()
        if self._answer is not answer:
            return
        self._answer = None
        self._close_handle()
        if answer.is_whole and self._is_sent and self._keeps_alive and not self._transport.is_closing():
            self.idle_since = time.monotonic()
            self._transport.resume_reading()
            self._idle.append(self)
        else:
            self.abort()

    def _send(self) -> None:
        """Write pieces of the request while the server keeps up."""
        while self._may_write and not self._is_sent:
            if (piece := next(self._unsent, None)) is None:
                self._is_sent = True
            else:
                self._transport.write(piece)

    def pause_writing(self) -> None:
        self._may_write = False

    def resume_writing(self) -> None:
        self._may_write = True
        if not self._transport.is_closing():
            self._send()

    def abort(self) -> None:
        self._unsent = iter(())
        self._close_handle()  # nothing more is read
        self._transport.abort()
        if self._answer is not None:
            self._answer.fail(UpstreamError("the connection was cut"))

    def pause(self) -> None:
        self._transport.pause_reading()

    def resume(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None or answer.is_whole or self._parser is None:
            self.abort()  # bytes without a request
            return
        if not self._has_head:
            self._num_head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            why = "it changed to another protocol" if isinstance(error, httptools.HttpParserUpgrade) else error
            answer.fail(UpstreamError(f"the server spoke no HTTP: {why}"))
            self.abort()
        if not self._has_head and self._num_head_bytes > MAX_HEAD_BYTES:
            answer.fail(_long_head())
            self.abort()
        answer.deliver(len(data))

    def connection_lost(self, exc: Exception | None) -> None:
        self._others.discard(self)
        self._read_rest()
        self._parser = None  # it refers to this object
        if self in self._idle:
            self._idle.remove(self)
        if (answer := self._answer) is None or answer.is_whole:
            return
        if self._ends_with_connection and exc is None:
            answer.complete()
        elif self._num_requests > 1 and not self._num_head_bytes:
            answer.fail(_StaleError("the connection had been closed"))
        else:
            answer.fail(UpstreamError("the server hung up"))

    def on_header(self, name: bytes, value: bytes) -> None:
        if (answer := self._open_answer()) is not None and not self._has_head:  # later ones are trailers
            answer.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        status = self._parser.get_status_code()
        if (answer := self._open_answer()) is None:
            return
        if not 100 <= status < 600:
            answer.fail(UpstreamError(f"the server spoke no HTTP: status {status}"))
            return
        if status < 200:  # interim
            answer.headers.clear()
            return
        if sum(len(name) + len(value) for name, value in answer.headers) > MAX_HEAD_BYTES:
            answer.fail(_long_head())  # its end came with the bytes that are too many
            return
        if is_encoded(answer.headers) or any(
            name == b"transfer-encoding" and value.strip().lower() != b"chunked" for name, value in answer.headers
        ):
            # Neither its events and usage could be read, nor could every client.
            answer.fail(UpstreamError("the server has compressed its answer, although it was asked not to"))
            return
        answer.status = status
        self._has_head = True
        names = {name for name, _ in answer.headers}
        self._ends_with_connection = not names & {b"content-length", b"transfer-encoding"}
        answer.wake()

    def on_message_complete(self) -> None:
        if (answer := self._open_answer()) is not None and self._has_head:
            assert self._parser is not None
            self._keeps_alive = self._parser.should_keep_alive()
            answer.complete()

    def _open_answer(self) -> Answer | None:
        """Return the answer that is being received. Bytes behind its end are another answer, to no request: they end
        the connection once this answer is done with."""
        if self._answer is None or not self._answer.is_whole:
            return self._answer
        self._keeps_alive = False
        return None
