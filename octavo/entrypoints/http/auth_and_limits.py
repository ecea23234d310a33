"""Checks that every request passes before its route: the API key, whether the server can take it, its content type, its
body.

This is a plain ASGI middleware that does not wrap the answer, so it adds no cost to a stream's chunks. Cheap checks
come first: a server that is too busy does not read bodies that it will refuse. Bodies are bounded in length and time,
and routes get them whole. A refused body is never read to its end: `uvicorn_server` closes its connection.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.api_keys import ApiKeys
from octavo.entrypoints import ui
from octavo.entrypoints.anthropic.anthropic_errors import PREFIX as ANTHROPIC_PREFIX
from octavo.entrypoints.anthropic.anthropic_errors import anthropic_error
from octavo.entrypoints.http.error_responses import (
    DEV_MODE_PATHS,
    ERROR_FORM,
    error_response,
    method_not_allowed_message,
)
from octavo.entrypoints.http.openapi import PAGE_FILES
from octavo.entrypoints.http.router import methods_of
from octavo.entrypoints.http.server_state import ARRIVAL, Arrival, ServerState
from octavo.errors import RequestError
from octavo.ollama import PREFIX as OLLAMA_PREFIX
from octavo.ollama import ollama_error

OPEN_PATHS = ui.OPEN_PATHS | {"/health", "/ping", "/metrics", "/version", "/load", "/openapi.json", "/docs"}
OPEN_PATHS |= {f"/docs/{name}" for name in PAGE_FILES}
MAX_BODIES_HELD = 64  # bodies that are still arriving may take this many times the longest body
_UNQUEUED_PREFIXES = ("/v1/chat/completions/", "/v1/files", "/v1/batches")
UPLOAD_PATH = "/v1/files"
AUDIO_PATHS = {"/v1/audio/transcriptions", "/v1/audio/translations"}
_FORM_BYTES = 1 << 20  # bytes of a form in addition to its file
# Scope key of the body of a request from within the server. No client can set it.
INTERNAL_BODY = "octavo.internal_body"
# POST routes whose requests do not wait in the engine's queue
UNQUEUED_PATHS = DEV_MODE_PATHS | {
    "/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/responses/input_tokens", "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter", "/api/show",
}  # fmt: skip


class AuthAndLimits:
    """Answers a refused request itself, with 401, 405, 408, 413, 415, 429 or 503, and passes all others on.

    Health, metrics, load, version, the API's description and the page's own files need neither a key nor an engine.
    """

    def __init__(self, app: ASGIApp, *, state: ServerState, routes: Sequence[Route]) -> None:
        self._app = app
        self._routes = routes
        self._methods = {route.path: route.methods for route in routes}
        self._state = state
        self._root_path = state.args.root_path.rstrip("/")
        self._files = BodyReader(state.args.max_file_bytes, state.args.body_timeout)
        self._bodies = BodyReader(state.args.max_body_bytes, state.args.body_timeout)
        sound = state.engine.config.sound
        max_sound = state.args.max_body_bytes if sound is None else sound.max_bytes + _FORM_BYTES
        self._sounds = BodyReader(max_sound, state.args.body_timeout, "--max-audio-bytes")
        self._keys = ApiKeys(state.args.api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # A proxy may or may not have removed the prefix; the router accepts both.
        scope["root_path"] = self._root_path
        path: str = scope["path"]
        if path.startswith(self._root_path + "/"):
            path = path[len(self._root_path) :]
        if path.startswith(ANTHROPIC_PREFIX):
            ERROR_FORM.set(anthropic_error)
        elif path.startswith(OLLAMA_PREFIX):
            ERROR_FORM.set(lambda message, *_: ollama_error(message))
        if path in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        headers, method = Headers(scope=scope), scope["method"]
        if scope.get(INTERNAL_BODY) is not None:
            num_bytes = len(scope[INTERNAL_BODY])
            await self._handle_internal(scope, replay_body(scope.pop(INTERNAL_BODY), receive), send, num_bytes)
            return
        uses_engine = method == "POST" and not _is_unqueued(path)
        answer: Response | bytes | None = await self._refuse(headers, method, path, uses_engine)
        self._state.num_in_flight += 1
        try:
            if answer is None and method == "POST" and path == UPLOAD_PATH:
                receive = self._files.limited(receive)  # the route stores the file as it arrives
            elif answer is None and method == "POST" and path in AUDIO_PATHS:
                receive = self._sounds.limited(receive)
            elif answer is None and method == "POST":
                answer = await self._bodies.read(headers, receive)
                if isinstance(answer, bytes) and uses_engine:
                    answer = self._queue_full() or answer  # the queue may have filled while the body arrived
            if isinstance(answer, Response):
                await answer(scope, receive, send)
                return
            num_bytes = 0
            if answer is not None:
                num_bytes, receive = len(answer), replay_body(answer, receive)
                del answer  # do not keep the body while the answer streams
            ARRIVAL.set(Arrival(time.monotonic(), headers, num_bytes))
            self._state.num_engine_requests += uses_engine
            try:
                await self._app(scope, receive, send)
            finally:
                self._state.num_engine_requests -= uses_engine
        except ClientGoneError:
            pass
        finally:
            self._state.num_in_flight -= 1

    async def _handle_internal(self, scope: Scope, receive: Receive, send: Send, num_bytes: int) -> None:
        """Handle a request from within the server. Its original request has passed the checks already."""
        unavailable = await self._state.unavailable()
        if unavailable is not None:
            status, reason = unavailable
            await error_response(reason, 503, code=f"engine_{status}")(scope, receive, send)
            return
        ARRIVAL.set(Arrival(time.monotonic(), Headers(scope=scope), num_bytes))
        self._state.num_in_flight += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._state.num_in_flight -= 1

    async def _refuse(self, headers: Headers, method: str, path: str, uses_engine: bool) -> Response | None:
        if self._keys and not self._keys.admit(headers.get("authorization"), headers.get("x-api-key")):
            return error_response(
                "Incorrect or missing API key; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
                401,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        allowed = self._methods.get(path) or methods_of(path, self._routes)
        if allowed is not None and method not in allowed:
            allow = {"Allow": ", ".join(sorted(allowed))}
            return error_response(method_not_allowed_message(method, path), 405, headers=allow)
        unavailable = await self._state.unavailable()
        if unavailable is not None:
            status, reason = unavailable
            # Close the connection, so that the client connects to the server that takes over.
            close = {"Connection": "close"} if status == "stopping" else None
            return error_response(reason, 503, code=f"engine_{status}", headers=close)
        if method != "POST":
            return None
        if uses_engine and (full := self._queue_full()) is not None:
            return full
        if path in DEV_MODE_PATHS and headers.get("content-length", "0") == "0":
            return None  # no body, so no content type is needed
        encoding = headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            return error_response(
                f"The body must be sent as it is, got Content-Encoding: {encoding:.40}.", 415,
                headers={"Accept-Encoding": "identity"},
            )  # fmt: skip
        content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if path == UPLOAD_PATH or path in AUDIO_PATHS:
            if content_type == "multipart/form-data":
                return None
            return error_response("A file must be sent as Content-Type: multipart/form-data.", 415)
        # A browser sends text/plain across origins without asking; for JSON it must ask first (CORS preflight).
        is_empty = not content_type and headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
        if content_type != "application/json" and not is_empty:
            return error_response(
                f"The body must be sent as Content-Type: application/json, got {content_type or 'none'}.", 415
            )
        return None

    def _queue_full(self) -> Response | None:
        if (retry_after_s := self._state.queue_retry_after_s()) is None:
            return None
        self._state.count_rejection("queue_full")
        return error_response(
            f"The queue is full (--max-queue-len {self._state.args.max_queue_len}); try again in about "
            f"{retry_after_s} s.",
            429,
            code="queue_full",
            headers={"Retry-After": str(retry_after_s)},
        )


def _is_unqueued(path: str) -> bool:
    """Return whether a POST to this path gives the engine nothing to do."""
    return path in UNQUEUED_PATHS or path.endswith("/cancel") or path.startswith(_UNQUEUED_PREFIXES)


class ClientGoneError(Exception):
    """The client hung up before its request was complete."""


class BodyReader:
    """Reads request bodies within one server's bounds."""

    def __init__(self, max_bytes: int, timeout_s: float, file_flag: str = "--max-file-bytes") -> None:
        """`file_flag` is the flag that errors about long files name."""
        self._max_bytes, self._file_flag = max_bytes, file_flag
        self._timeout_s = timeout_s
        self._num_held_bytes = 0  # of bodies that are still arriving

    async def read(self, headers: Headers, receive: Receive) -> bytes | Response:
        """Return the body, or the error response to a body that is too long (413), too slow (408) or one too many
        (503). Raises `ClientGoneError`."""
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
                    if num_bytes > self._max_bytes:  # a chunked body has no length
                        return self._too_long(f"more than {self._max_bytes} bytes")
                    parts.append(part)
                    if not message.get("more_body", False):
                        return b"".join(parts)
                    if self._num_held_bytes > MAX_BODIES_HELD * self._max_bytes:
                        return error_response(
                            "Too many long bodies are on their way to this server.", 503, code="too_many_uploads"
                        )
        except TimeoutError:
            return error_response(
                f"The body did not arrive within {self._timeout_s:g} s: {num_bytes} bytes of it did.",
                408,
                code="request_timeout",
            )
        finally:
            self._num_held_bytes -= num_bytes

    def limited(self, receive: Receive) -> Receive:
        """Return an ASGI `receive` for a body that the route reads. It raises `RequestError` if the body is too long or
        too slow."""
        deadline = time.monotonic() + self._timeout_s
        num_bytes = 0

        async def receive_some() -> Message:
            nonlocal num_bytes
            if num_bytes < 0:  # the body is complete: only a disconnect can follow
                return await receive()
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    message = await receive()
            except TimeoutError:
                raise RequestError(
                    f"The file did not arrive within {self._timeout_s:g} s.", status=408, code="request_timeout"
                ) from None
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise RequestError(
                    f"The file is longer than {self._max_bytes} bytes ({self._file_flag}).",
                    status=413,
                    code="request_too_large",
                )
            if not message.get("more_body", False):
                num_bytes = -1
            return message

        return receive_some

    def _too_long(self, found: str) -> Response:
        return error_response(
            f"The body has {found} and this server takes {self._max_bytes} (--max-body-bytes).",
            413,
            code="request_too_large",
        )


def replay_body(body: bytes, receive: Receive) -> Receive:
    """Return an ASGI `receive` that gives a body that was already read, and then the server's own messages, such as a
    disconnect."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_body() -> Message:
        return messages.pop() if messages else await receive()

    return receive_body
