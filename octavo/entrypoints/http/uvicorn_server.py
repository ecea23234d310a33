"""The HTTP server around the application, with its own way to stop. `http_protocol` limits clients before their request
has begun, and `body_reader` limits bodies.

While the server drains, /health and new requests get 503. When the running requests are done, or their time is up, the
server ends.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from typing import TYPE_CHECKING, Any

from octavo.entrypoints.http.app import build_app
from octavo.entrypoints.http.error_responses import error_body
from octavo.entrypoints.http.server_args import ServerArgs
from octavo.entrypoints.http.server_state import ServerState
from octavo.entrypoints.http.shared_counts import CONNECTIONS, SharedCounts
from octavo.http_server import DrainingServer

if TYPE_CHECKING:
    from octavo.engine.engine_client import EngineClient

logger = logging.getLogger("octavo.server")

FLUSH_TIMEOUT_S = 1.0  # for aborted answers to reach their clients, and traces their collector


class HttpServer(DrainingServer):
    """The server. `serve` returns when a signal or `should_exit` has stopped it."""

    def __init__(
        self, engine: EngineClient, args: ServerArgs, counts: SharedCounts | None = None, *, takes_signals: bool = True
    ) -> None:
        """Without `takes_signals` only `stop` stops it. `counts` are shared with other front ends."""
        app = build_app(engine, args, counts)
        self._engine = engine
        self.state: ServerState = app.state.octavo
        self._app = app
        self._batches: asyncio.Task[None] | None = None  # continues the batches of servers that have ended
        _ = self.state.formats  # recognise the formats now, so that no chat waits
        self._shutdown_timeout_s = args.shutdown_timeout
        more: dict[str, Any] = {} if takes_signals else {"signals": ()}
        if args.ssl_ciphers is not None:
            more["ssl_ciphers"] = args.ssl_ciphers
        super().__init__(
            app,
            lambda: self.state.num_in_flight,
            lambda status, message, code: error_body(message, status, code=code),
            max_connections=args.max_connections,
            write_timeout_s=args.write_timeout,
            share=self.state.counts.sharing(CONNECTIONS),
            log_level=args.uvicorn_log_level,
            access_log=args.access_log,
            ssl_keyfile=args.ssl_keyfile,
            ssl_certfile=args.ssl_certfile,
            ssl_ca_certs=args.ssl_ca_certs,
            ssl_cert_reqs=ssl.CERT_NONE if args.ssl_ca_certs is None else ssl.CERT_REQUIRED,
            **more,
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.state.args.response_store is not None:
            from octavo.entrypoints.batch.batch_job import take_over

            self._batches = asyncio.ensure_future(take_over(self._app, self.state))

    async def drain(self) -> None:
        state = self.state
        state.is_stopping = True
        self._engine.stop_restarting()
        if state.num_in_flight:
            logger.info("stopping: %d requests have %g s to end", state.num_in_flight, self._shutdown_timeout_s)
        if await self.is_idle_within(self._shutdown_timeout_s):
            logger.info("stopping: no request is under way")
        elif not self.should_exit:
            logger.warning("stopping: %d requests are cut off", state.num_in_flight)
            state.has_cut_off = True
            await self._engine.abort_all_for_shutdown()
            await self.is_idle_within(FLUSH_TIMEOUT_S)
        self.should_exit = True

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
