"""What every request passes before its route: the API key, whether the server can take it, its content type, its body.

A plain ASGI middleware that wraps nothing of the answer, so that it costs a stream nothing per chunk. Refusals come in
the order of their cost: a server that is too busy does not read what it will not do.
"""

from __future__ import annotations

import hashlib
import hmac
import time

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.entrypoints import ui
from octavo.entrypoints.openai.body import BodyReader, ClientGoneError, read_already
from octavo.entrypoints.openai.description import PAGE_FILES
from octavo.entrypoints.openai.errors import error_response
from octavo.entrypoints.openai.state import ARRIVAL, Arrival, ServerState

OPEN_PATHS = ui.OPEN_PATHS | {"/health", "/ping", "/metrics", "/version", "/openapi.json", "/docs"}
OPEN_PATHS |= {f"/docs/{name}" for name in PAGE_FILES}
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
