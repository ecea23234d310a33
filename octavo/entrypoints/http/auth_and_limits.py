"""Checks that every request passes before its route: the API key, whether the server can take it, its content type, its
body.

This is a plain ASGI middleware that does not wrap the answer, so it adds no cost to a stream's chunks. Cheap checks
come first: a server that is too busy does not read bodies that it will refuse. Bodies are bounded in length and time,
and routes get them whole. A refused body is never read to its end: `http_protocol` closes its connection.
"""

import re
import time
from collections.abc import Sequence
from functools import partial

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.api_keys import ApiKeys
from octavo.entrypoints import ui
from octavo.entrypoints.anthropic.anthropic_errors import anthropic_error
from octavo.entrypoints.http.body_reader import BodyReader, replay_body
from octavo.entrypoints.http.error_responses import (
    DEV_MODE_PATHS,
    ERROR_FORM,
    UNBUILT_PATHS,
    error_response,
    method_not_allowed_message,
)
from octavo.entrypoints.http.openapi import PAGE_FILES
from octavo.entrypoints.http.request_headers import HEADERS, RequestHeaders
from octavo.entrypoints.http.router import methods_of
from octavo.entrypoints.http.server_state import ARRIVAL, Arrival, ServerState
from octavo.messages_errors import MESSAGES_PREFIX, VERSION_HEADER
from octavo.ollama import PREFIX as OLLAMA_PREFIX
from octavo.ollama import ollama_error

OPEN_PATHS = ui.OPEN_PATHS | {"/", "/health", "/ping", "/metrics", "/version", "/load", "/openapi.json", "/docs"}
OPEN_PATHS |= {f"/docs/{name}" for name in PAGE_FILES}
_UNQUEUED_PREFIXES = (
    "/v1/chat/completions/", "/v1/conversations", "/v1/files", "/v1/batches", "/v1/cache/blocks/",
)  # fmt: skip
UPLOAD_PATH = "/v1/files"
FORM_TYPE = "application/x-www-form-urlencoded"
AUDIO_PATHS = {"/v1/audio/transcriptions", "/v1/audio/translations"}
_CHARSET = re.compile(r"charset(.*)", re.IGNORECASE)  # the rest of the header, also of `charset*0="utf-"; charset*1`
_UTF_8 = re.compile(r"""\s*=\s*"?(utf-?8|us-ascii)"?\s*(?!.*charset)(;|$)""", re.IGNORECASE)
_FORM_BYTES = 1 << 20  # bytes of a form in addition to its file
# Scope key of the `request-id` of an answer of Anthropic's API
REQUEST_ID = "octavo.request_id"
# Scope key of the body of a request from within the server. No client can set it.
INTERNAL_BODY = "octavo.internal_body"
NAMES_HEADER = "x-octavo-prompt-names"  # of a gateway: see `PromptNotes`
# POST routes whose requests only need the server's tokenizer, not the engine
TOKENIZING_PATHS = frozenset({
    "/tokenize", "/detokenize", "/v1/completions/render", "/v1/chat/completions/render", "/v1/messages/count_tokens",
    "/v1/responses/input_tokens",
})  # fmt: skip
# POST routes whose requests do not wait in the engine's queue
UNQUEUED_PATHS = (
    DEV_MODE_PATHS
    | UNBUILT_PATHS.keys()
    | TOKENIZING_PATHS
    | {"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/api/show"}
)


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
        if path.startswith(MESSAGES_PREFIX) or VERSION_HEADER in scope[HEADERS]:
            scope[REQUEST_ID] = request_id = f"req_{scope[HEADERS].request_id}"
            ERROR_FORM.set(partial(anthropic_error, request_id=request_id))
        elif path.startswith(OLLAMA_PREFIX):
            ERROR_FORM.set(lambda message, *_: ollama_error(message))
        if path in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        headers, method = scope[HEADERS], scope["method"]
        if scope.get(INTERNAL_BODY) is not None:
            num_bytes = len(scope[INTERNAL_BODY])
            await self._handle_internal(scope, replay_body(scope.pop(INTERNAL_BODY), receive), send, num_bytes)
            return
        uses_engine = method == "POST" and not _is_unqueued(path) and self._methods_of(path) is not None
        tokenizes = method == "POST" and path in TOKENIZING_PATHS
        answer: Response | bytes | None = await self._refuse(headers, method, path, uses_engine)
        self._state.num_in_flight += 1
        try:
            if answer is None and method == "POST" and path == UPLOAD_PATH:
                receive = self._files.limited(receive)  # the route stores the file as it arrives
            elif answer is None and method == "POST" and path in AUDIO_PATHS:
                receive = self._sounds.limited(receive)
            elif answer is None and method == "POST":
                answer = await self._bodies.read(headers, receive)
                if isinstance(answer, bytes):  # the queue may have filled while the body arrived
                    answer = self._queue_full(path, uses_engine) or answer
            if isinstance(answer, Response):
                await answer(scope, receive, send)
                return
            num_bytes = 0
            if answer is not None:
                num_bytes, receive = len(answer), replay_body(answer, receive)
                del answer  # do not keep the body while the answer streams
            ARRIVAL.set(Arrival(time.monotonic(), headers, num_bytes, self._client(scope, headers)))
            if (names := headers.get(NAMES_HEADER)) is not None:
                self._state.note_prompt(names)
            self._state.num_engine_requests += uses_engine
            self._state.num_tokenizing += tokenizes
            try:
                await self._app(scope, receive, send)
            finally:
                self._state.num_engine_requests -= uses_engine
                self._state.num_tokenizing -= tokenizes
        except ClientDisconnect:
            await Response(status_code=499)(scope, receive, send)  # no client sees it, but metrics count it
        finally:
            self._state.num_in_flight -= 1

    def _client(self, scope: Scope, headers: RequestHeaders) -> str:
        address, _ = scope["client"] or (None, 0)
        return self._keys.client(address, headers.get("authorization"), headers.get("x-api-key"))

    def _methods_of(self, path: str) -> set[str] | None:
        """Return the methods that a path has; None if there is no such path."""
        return self._methods.get(path) or methods_of(path, self._routes)

    async def _handle_internal(self, scope: Scope, receive: Receive, send: Send, num_bytes: int) -> None:
        """Handle a request from within the server. Its original request has passed the checks already."""
        unavailable = await self._state.unavailable()
        if unavailable is not None:
            status, reason = unavailable
            await error_response(reason, 503, code=f"engine_{status}")(scope, receive, send)
            return
        ARRIVAL.set(Arrival(time.monotonic(), scope[HEADERS], num_bytes))
        self._state.num_in_flight += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._state.num_in_flight -= 1

    async def _refuse(self, headers: RequestHeaders, method: str, path: str, uses_engine: bool) -> Response | None:
        if self._keys and not self._keys.admit(headers.get("authorization"), headers.get("x-api-key")):
            return error_response(
                "Incorrect or missing API key; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
                401,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        allowed = self._methods_of(path)
        if allowed is not None and method not in allowed:
            allow = {"Allow": ", ".join(sorted(allowed))}
            return error_response(method_not_allowed_message(method, path, allow["Allow"]), 405, headers=allow)
        unavailable = await self._state.unavailable()
        if unavailable is not None:
            status, reason = unavailable
            # Close the connection, so that the client connects to the server that takes over.
            close = {"Connection": "close"} if status == "stopping" else None
            return error_response(reason, 503, code=f"engine_{status}", headers=close)
        if method != "POST":
            return None
        if (full := self._queue_full(path, uses_engine)) is not None:
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
            if content_type != "multipart/form-data":
                return error_response("A file must be sent as Content-Type: multipart/form-data.", 415)
            # Starlette reads texts with any codec of Python. Some take hours for a megabyte.
            if (named := _CHARSET.search(headers["content-type"])) and not _UTF_8.match(named[1]):
                return error_response("The texts of a form must be in UTF-8: leave charset out.", 415)
            return None
        if path.startswith(OLLAMA_PREFIX) and content_type in ("", FORM_TYPE) and "origin" not in headers:
            return None  # curl -d sends a form's type; a page in a browser sends its origin with every POST
        # A browser sends text/plain across origins without asking; for JSON it must ask first (CORS preflight).
        is_empty = not content_type and headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
        if content_type != "application/json" and not is_empty:
            return error_response(
                f"The body must be sent as Content-Type: application/json, got {content_type or 'none'}.", 415
            )
        return None

    def _queue_full(self, path: str, uses_engine: bool) -> Response | None:
        state = self._state
        if path in TOKENIZING_PATHS:
            retry_after_s = state.tokenizing_retry_after_s()
        else:
            retry_after_s = state.queue_retry_after_s() if uses_engine else None
        if retry_after_s is None:
            return None
        state.count_rejection("queue_full")
        return error_response(
            f"The queue is full (--max-queue-len {state.args.max_queue_len}); try again in about {retry_after_s} s.",
            429,
            code="queue_full",
            headers={"Retry-After": str(retry_after_s)},
        )


def _is_unqueued(path: str) -> bool:
    """Return whether a POST to this path gives the engine no work."""
    return path in UNQUEUED_PATHS or path.endswith("/cancel") or path.startswith(_UNQUEUED_PREFIXES)
