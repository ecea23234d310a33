"""The HTTP server around the application: uvicorn with our way to stop.

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
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import uvicorn

from octavo.entrypoints.openai.app import build_app
from octavo.entrypoints.openai.http_protocol import HttpProtocol
from octavo.entrypoints.openai.server_args import ServerArgs
from octavo.entrypoints.openai.state import ServerState

if TYPE_CHECKING:
    from octavo.engine.async_engine import AsyncLLMEngine

logger = logging.getLogger("octavo.server")

KEEP_ALIVE_S = 30  # idle connections; longer than HTTP clients keep theirs, so that it is they who close
FLUSH_TIMEOUT_S = 1.0  # for answers that were cut off to reach their clients, and traces their collector


class HttpServer(uvicorn.Server):
    """`serve` returns when the server has been stopped by a signal or by `should_exit`."""

    def __init__(self, engine: AsyncLLMEngine, args: ServerArgs) -> None:
        app = build_app(engine, args)
        self._engine = engine
        self._state: ServerState = app.state.octavo
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
                access_log=args.uvicorn_log_level in ("info", "debug", "trace"),
                ssl_keyfile=args.ssl_keyfile,
                ssl_certfile=args.ssl_certfile,
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
            await self._engine.end_all()
            await self._is_idle_within(FLUSH_TIMEOUT_S)
        self.should_exit = True

    async def _is_idle_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        # Polled, so that a request costs no more than the count.
        while self._state.num_in_flight and time.monotonic() < deadline and not self.should_exit:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        return not self._state.num_in_flight

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in self.servers:
            listener.close()
        self._engine.shutdown()  # what is left, after a second signal, ends with an error event
        await super().shutdown(sockets)
        if (tracer := self._state.tracer) is not None and not self.force_exit:
            await asyncio.to_thread(tracer.flush, FLUSH_TIMEOUT_S)
