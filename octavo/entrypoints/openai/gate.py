"""What every request passes before its route: the API key, whether the server can take it, its content type, its body.

A plain ASGI middleware that wraps nothing of the answer, so that it costs a stream nothing per chunk. Refusals come in
the order of their cost: a server that is too busy does not read what it will not do. Bodies are read no longer than
allowed, and no slower, and routes find them whole; what was refused is never read to its end: its connection is closed.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.entrypoints import ui
from octavo.entrypoints.openai.description import PAGE_FILES
from octavo.entrypoints.openai.errors import error_response
from octavo.entrypoints.openai.state import ARRIVAL, Arrival, ServerState

OPEN_PATHS = ui.OPEN_PATHS | {"/health", "/ping", "/metrics", "/version", "/openapi.json", "/docs"}
OPEN_PATHS |= {f"/docs/{name}" for name in PAGE_FILES}
MAX_BODIES_HELD = 64  # times the longest body: as much memory may bodies take that have not arrived whole
_CLOSE = {"Connection": "close"}
LIGHT_PATHS = frozenset({"/tokenize", "/detokenize"})  # POST, but nothing waits in the engine's queue


class Gate:
    """Answers 401, 408, 413, 415, 429 or 503 itself and passes all other requests on.

    Health, metrics, version, the API's description and the page's own files need neither a key nor an engine.
    """

    def __init__(self, app: ASGIApp, *, state: ServerState) -> None:
        self._app = app
        self._state = state
        self._root_path = state.args.root_path.rstrip("/")
        self._bodies = BodyReader(state.args.max_body_bytes, state.args.body_timeout)
        self._key_digests = [_digest(key.encode()) for key in state.args.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # A proxy may have taken the prefix off or not: the router, too, takes paths with it and without.
        scope["root_path"] = self._root_path
        path: str = scope["path"]
        if path.startswith(self._root_path + "/"):
            path = path[len(self._root_path) :]
        if path in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        headers, method = Headers(scope=scope), scope["method"]
        is_queued = method == "POST" and path not in LIGHT_PATHS
        answer: Response | bytes | None = await self._refuse(headers, method, is_queued)
        self._state.num_in_flight += 1
        try:
            if answer is None and method == "POST":
                answer = await self._bodies.read(headers, receive)
                if isinstance(answer, bytes) and is_queued:
                    answer = self._queue_full() or answer  # others may have come meanwhile
            if isinstance(answer, Response):
                await answer(scope, receive, send)
                return
            ARRIVAL.set(Arrival(time.monotonic(), headers, 0 if answer is None else len(answer)))
            self._state.num_queued += is_queued
            try:
                await self._app(scope, receive if answer is None else read_already(answer, receive), send)
            finally:
                self._state.num_queued -= is_queued
        except ClientGoneError:
            pass
        finally:
            self._state.num_in_flight -= 1

    async def _refuse(self, headers: Headers, method: str, is_queued: bool) -> Response | None:
        if self._key_digests and not self._is_authorized(headers.get("authorization", "")):
            return error_response(
                "Incorrect or missing API key; send it as 'Authorization: Bearer KEY'.",
                401,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        unavailable = await self._state.unavailable()
        if unavailable is not None:
            status, reason = unavailable
            # A client that keeps its connection would not find the server that takes over.
            close = {"Connection": "close"} if status == "stopping" else None
            return error_response(reason, 503, code=f"engine_{status}", headers=close)
        if method != "POST":
            return None
        if is_queued and (full := self._queue_full()) is not None:
            return full
        content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        # A browser sends text/plain across origins without asking; JSON it must ask for (CORS preflight).
        if content_type != "application/json":
            return error_response(
                f"The body must be sent as Content-Type: application/json, got {content_type or 'none'}.", 415
            )
        return None

    def _queue_full(self) -> Response | None:
        if (retry_after_s := self._state.queue_full()) is None:
            return None
        return error_response(
            f"The queue is full (--max-queue-len {self._state.args.max_queue_len}); try again in about "
            f"{retry_after_s} s.",
            429,
            code="queue_full",
            headers={"Retry-After": str(retry_after_s)},
        )

    def _is_authorized(self, authorization: str) -> bool:
        scheme, _, key = authorization.partition(" ")
        digest = _digest(key.strip().encode("latin-1"))  # headers are latin-1 to ASGI
        # Digests have one length and every key is compared, so time tells nothing about the keys.
        matches = [hmac.compare_digest(digest, expected) for expected in self._key_digests]
        return scheme.lower() == "bearer" and any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class ClientGoneError(Exception):
    """The client hung up before its request was whole."""


class BodyReader:
    """Reads the bodies of one server."""

    def __init__(self, max_bytes: int, timeout_s: float) -> None:
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._num_held_bytes = 0  # of bodies that have not arrived whole

    async def read(self, headers: Headers, receive: Receive) -> bytes | Response:
        """The body, or the answer to one that is too long (413), too slow (408) or one too many (503). Raises
        `ClientGoneError`."""
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._max_bytes:
            return self._too_long(f"{length} bytes")
        parts: list[bytes] = []
        num_bytes = 0
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    part = message.get("body", b"")
                    num_bytes += len(part)
                    self._num_held_bytes += len(part)
                    if num_bytes > self._max_bytes:  # sent in chunks, without a length
                        return self._too_long(f"more than {self._max_bytes} bytes")
                    parts.append(part)
                    if not message.get("more_body", False):
                        return b"".join(parts)
                    if self._num_held_bytes > MAX_BODIES_HELD * self._max_bytes:
                        return error_response(
                            "Too many long bodies are on their way to this server.",
                            503,
                            code="too_many_uploads",
                            headers=_CLOSE,
                        )
        except TimeoutError:
            return error_response(
                f"The body did not arrive within {self._timeout_s:g} s: {num_bytes} bytes of it did.",
                408,
                code="request_timeout",
                headers=_CLOSE,
            )
        finally:
            self._num_held_bytes -= num_bytes

    def _too_long(self, found: str) -> Response:
        return error_response(
            f"The body has {found} and this server takes {self._max_bytes} (--max-body-bytes).",
            413,
            code="request_too_large",
            headers=_CLOSE,
        )


def read_already(body: bytes, receive: Receive) -> Receive:
    """An ASGI `receive` that gives a body which has been read, and then what the server says, such as a disconnect."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_body() -> Message:
        return messages.pop() if messages else await receive()

    return receive_body
