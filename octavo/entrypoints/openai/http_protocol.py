"""One HTTP connection: uvicorn's protocol with limits on what a client may do before its request has begun.

uvicorn alone limits neither the time nor the length of a request's head. Bodies are limited in `body`.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from octavo.entrypoints.openai.errors import RETRY_AFTER_S, error_body

HEAD_TIMEOUT_S = 20.0  # from the first byte, or from the connection, to the end of the headers
MAX_HEAD_BYTES = 64 * 1024


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
