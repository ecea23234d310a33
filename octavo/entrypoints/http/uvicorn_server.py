"""The HTTP server around the application: uvicorn with our way to stop, and with limits on what a client may do before
its request has begun, which uvicorn has none of. Bodies are limited in `auth_and_limits`.

A signal drains: /health and new requests answer 503 while those under way go on; when they are done, or their time is
up, the server ends. A second signal ends it at once.
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
from collections.abc import Iterator
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from octavo.entrypoints.http.app import build_app
from octavo.entrypoints.http.error_responses import RETRY_AFTER_S, error_body
from octavo.entrypoints.http.server_args import ServerArgs
from octavo.entrypoints.http.server_state import ServerState

if TYPE_CHECKING:
    from octavo.engine.engine_client import EngineClient

logger = logging.getLogger("octavo.server")

HEAD_TIMEOUT_S = 20.0  # from the first byte, or from the connection, to the end of the headers
MAX_HEAD_BYTES = 64 * 1024
KEEP_ALIVE_S = 30  # idle connections; longer than HTTP clients keep theirs, so that it is they who close
FLUSH_TIMEOUT_S = 1.0  # for answers that were cut off to reach their clients, and traces their collector


class HttpServer(uvicorn.Server):
    """`serve` returns when the server has been stopped by a signal or by `should_exit`."""

    def __init__(self, engine: EngineClient, args: ServerArgs) -> None:
        app = build_app(engine, args)
        self._engine = engine
        self._state: ServerState = app.state.octavo
        self._app = app
        self._batches: asyncio.Task[None] | None = None  # of servers that have ended, gone on with
        _ = self._state.formats  # recognised now, so that no chat waits for it
        self._shutdown_timeout_s = args.shutdown_timeout
        self._draining: asyncio.Task[None] | None = None
        options: dict[str, Any] = {
            "loop": "none",
            "http": functools.partial(HttpProtocol, max_connections=args.max_connections),
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
        # uvicorn's own would raise the signal again after a clean stop, which makes the exit code -15.
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.stop)
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._state.args.response_store is not None:
            from octavo.entrypoints.batch.batch_job import take_over

            self._batches = asyncio.ensure_future(take_over(self._app, self._state))

    def stop(self) -> None:
        """Begin to drain; called again, end now."""
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain())
        else:
            self.force_exit = self.should_exit = True

    async def _drain(self) -> None:
        state = self._state
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
        # Polled, so that a request costs no more than the count.
        while self._state.num_in_flight and time.monotonic() < deadline and not self.should_exit:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        return not self._state.num_in_flight

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._state.is_stopping = True
        for listener in self.servers:
            listener.close()
        self._engine.shutdown()  # what is left, after a second signal, ends with an error event
        await super().shutdown(sockets)
        if self._batches is not None:
            self._batches.cancel()
        await self._state.background_ended()
        if (tracer := self._state.tracer) is not None and not self.force_exit:
            await asyncio.to_thread(tracer.flush, FLUSH_TIMEOUT_S)
        self._state.close()


class HttpProtocol(HttpToolsProtocol):
    """Refuses connections beyond `max_connections` and heads that are too long or too slow, as the API words errors."""

    def __init__(self, *args: Any, max_connections: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._max_connections = max_connections
        self._head_timer: asyncio.TimerHandle | None = None  # while a head is awaited
        self._num_head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._max_connections:
            self._refuse(503, f"The server has its --max-connections, {self._max_connections}.", "too_many_connections")
        else:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head_timer is not None:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._refuse(431, f"The request's head is longer than {MAX_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _await_head(self) -> None:
        self._end_head()
        self._num_head_bytes = 0
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._on_slow_head)

    def _end_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_slow_head(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._await_head()  # the next request of a client that still gets an answer
        elif self._num_head_bytes == 0:
            self.transport.close()
        else:
            self._refuse(408, f"The request's head took longer than {HEAD_TIMEOUT_S:g} s.")

    def _refuse(self, status: int, message: str, code: str | None = None) -> None:
        """Answer what is no request yet, and hang up."""
        self._end_head()
        body = error_body(message, status, code=code)
        retry = f"Retry-After: {RETRY_AFTER_S}\r\n" if status == 503 else ""
        self.transport.write(
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n{retry}Connection: close\r\n\r\n".encode()
            + body
        )
        self.transport.close()
