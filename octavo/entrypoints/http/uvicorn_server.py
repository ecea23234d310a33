"""The HTTP server around the application. It adds to uvicorn its own way to stop, and limits on clients before their
request has begun, which uvicorn lacks. Bodies are limited in `body_reader`.

A signal drains the server: /health and new requests get 503, while running requests go on. When they are done, or their
time is up, the server ends. A second signal ends it immediately.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from octavo.entrypoints.http.app import build_app
from octavo.entrypoints.http.error_responses import RETRY_AFTER_S, error_body
from octavo.entrypoints.http.server_args import ServerArgs
from octavo.entrypoints.http.server_state import ServerState
from octavo.entrypoints.http.shared_counts import CONNECTIONS, SharedCounts
from octavo.entrypoints.http.streaming import Push
from octavo.processes import accepting_several

if TYPE_CHECKING:
    from octavo.engine.engine_client import EngineClient

logger = logging.getLogger("octavo.server")

HEAD_TIMEOUT_S = 20.0  # from the first byte, or from connecting, to the end of the headers
MAX_HEAD_BYTES = 64 * 1024
LINGER_S = 2.0  # for a client to go on sending and reading after an answer that came before its whole body
STARTS_PER_TURN = 8  # requests; each takes up to some milliseconds before it waits for anything
IDLE_GRACE_S = 1.0  # for a connection to send a request before it may be cut for another one
KEEP_ALIVE_S = 30  # for idle connections; longer than clients keep theirs, so that the clients close them
FLUSH_TIMEOUT_S = 1.0  # for aborted answers to reach their clients, and traces their collector


class HttpServer(uvicorn.Server):
    """The server. `serve` returns when a signal or `should_exit` has stopped it."""

    def __init__(
        self, engine: EngineClient, args: ServerArgs, counts: SharedCounts | None = None, *, takes_signals: bool = True
    ) -> None:
        """Without `takes_signals` only `stop` stops it. `counts` are shared with other front ends."""
        app = build_app(engine, args, counts)
        self._takes_signals = takes_signals
        self._engine = engine
        self.state: ServerState = app.state.octavo
        self._app = app
        self._batches: asyncio.Task[None] | None = None  # continues the batches of servers that have ended
        _ = self.state.formats  # recognise the formats now, so that no chat waits
        self._shutdown_timeout_s = args.shutdown_timeout
        self._draining: asyncio.Task[None] | None = None
        options: dict[str, Any] = {
            "loop": "none",
            "http": functools.partial(
                HttpProtocol,
                max_connections=args.max_connections,
                write_timeout_s=args.write_timeout,
                idle={},
                starts=RequestStarts(),
                share=self.state.counts.sharing(CONNECTIONS),
            ),
            "ws": "none",
            "lifespan": "off",
            "interface": "asgi3",
            "log_config": None,
            "server_header": False,
        }
        super().__init__(
            uvicorn.Config(
                app,
                log_level=args.uvicorn_log_level,
                access_log=args.access_log,
                ssl_keyfile=args.ssl_keyfile,
                ssl_certfile=args.ssl_certfile,
                ssl_ca_certs=args.ssl_ca_certs,
                ssl_cert_reqs=ssl.CERT_NONE if args.ssl_ca_certs is None else ssl.CERT_REQUIRED,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=2,
                **options,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn's own handlers would raise the signal again after a clean stop, which makes the exit code -15.
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM) if self._takes_signals else ():
            loop.add_signal_handler(number, self.stop)
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(accepting_several(sockets))
        if self.state.args.response_store is not None:
            from octavo.entrypoints.batch.batch_job import take_over

            self._batches = asyncio.ensure_future(take_over(self._app, self.state))

    def stop(self) -> None:
        """Begin to drain; a second call ends the server immediately."""
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain())
        else:
            self.force_exit = self.should_exit = True

    async def _drain(self) -> None:
        state = self.state
        state.is_stopping = True
        self._engine.stop_restarting()
        if state.num_in_flight:
            logger.info("stopping: %d requests have %g s to end", state.num_in_flight, self._shutdown_timeout_s)
        if await self._is_idle_within(self._shutdown_timeout_s):
            logger.info("stopping: no request is under way")
        elif not self.should_exit:
            logger.warning("stopping: %d requests are cut off", state.num_in_flight)
            await self._engine.abort_all_for_shutdown()
            await self._is_idle_within(FLUSH_TIMEOUT_S)
        self.should_exit = True

    async def _is_idle_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        # Polling costs each request only the update of a counter.
        while self.state.num_in_flight and time.monotonic() < deadline and not self.should_exit:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        return not self.state.num_in_flight

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.state.is_stopping = True
        for listener in self.servers:
            listener.close()
        self._engine.shutdown()  # after a second signal, the remaining requests end with an error event
        await super().shutdown(sockets)
        if self._batches is not None:
            self._batches.cancel()
        await self.state.background_ended()
        if (tracer := self.state.tracer) is not None and not self.force_exit:
            await asyncio.to_thread(tracer.flush, FLUSH_TIMEOUT_S)
        self.state.close()


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
        share: Callable[[float], float] = float,
        **kwargs: Any,
    ) -> None:
        """`idle` (since when each connection has been without a request, oldest first) and `starts` are the server's.
        `share` takes the number of this process's connections, and returns that of all front ends."""
        super().__init__(*args, **kwargs)
        self._idle, self._starts = idle, starts
        self._share = share
        self._max_connections = max_connections
        self._write_timeout_s = write_timeout_s
        self._head_timer: asyncio.TimerHandle | None = None  # runs while waiting for a head
        self._end_timer: asyncio.TimerHandle | None = None  # aborts the connection
        self._push: Push | None = None  # of the answer under way
        self._is_lingering = False  # answered; further data is dropped
        self._is_pipelined = False  # the request that starts now was sent before the last answer ended
        self._answering: RequestResponseCycle | None = None  # `cycle` is the last of pipelined requests
        self._num_head_bytes = 0
        self._num_trailer_bytes = 0

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
        if self._push is not None:
            self._push.close()
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()
        self._answering = None
        self.pipeline.clear()
        super().connection_lost(exc)
        self._share(len(self.connections))
        if self.cycle is not None and isinstance(self.cycle.transport, _ClosingTransport):
            self.cycle.transport.let_go()

    def data_received(self, data: bytes) -> None:
        if self._is_lingering or self.transport.is_closing():
            return
        idle_timer, self.timeout_keep_alive_task = self.timeout_keep_alive_task, None
        super().data_received(data)
        if self._head_timer is not None:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._refuse(431, f"The request's head is longer than {MAX_HEAD_BYTES} bytes.")
        elif idle_timer is not None and self.cycle is not None and self.cycle.response_complete:
            self.timeout_keep_alive_task = idle_timer  # blank lines begin no request: still idle
            return
        if idle_timer is not None:
            idle_timer.cancel()

    def on_message_begin(self) -> None:
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
        self._end_head()
        super().on_headers_complete()
        self.cycle.__class__ = ResponseCycle
        transport = _ClosingTransport(self.transport, self._close_answered, self._attach)
        self.cycle.transport = transport  # type: ignore[assignment]

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle

        def begin() -> None:
            if not cycle.disconnected:
                super(HttpProtocol, self)._start_asgi_task(cycle, app)

        self._starts.start(self.loop, begin, is_pipelined=self._is_pipelined)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._push is not None:
            self._push.pause()
        self._end_within(self._write_timeout_s)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._push is not None:
            self._push.resume()
        if self._end_timer is not None and not self.transport.is_closing() and not self._is_lingering:
            self._end_timer.cancel()
            self._end_timer = None

    def on_response_complete(self) -> None:
        self._is_pipelined = bool(self.pipeline)
        super().on_response_complete()
        self._is_pipelined = False
        self._idle.pop(self, None)  # removed first, to keep the order of times
        if self.cycle.response_complete and not self.transport.is_closing() and not self._is_lingering:
            self._idle[self] = self.loop.time()

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def shutdown(self) -> None:
        super().shutdown()
        if self.transport.is_closing():
            self._close()

    def _attach(self, push: Push) -> None:
        self._push = push
        if self.flow.write_paused:
            push.pause()

    def _close(self) -> None:
        """Hang up when the client has read all written data, or after `write_timeout_s`."""
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
        if self._end_timer is None and seconds > 0:
            self._end_timer = self.loop.call_later(seconds, self.transport.abort)

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
        body = error_body(message, status, code=code)
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

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None], attach: Callable[[Push], None]) -> None:
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

    def attach(self, push: Push) -> None:
        """Open `push`, if the answer has chunks and its client is there, and close it while the client is late."""
        if self.chunked_encoding and not self._ends_with_connection and not self.disconnected:
            push.open(self.transport.write)
            self.transport.attach(push)  # type: ignore[attr-defined]

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
