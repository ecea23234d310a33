"""What every request passes before its route: the API key, the body's content type, and whether the engine is ready.

A plain ASGI middleware that looks at the request only, so that it costs a stream nothing per chunk.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.entrypoints.openai.errors import error_response

Unavailable = Callable[[], Awaitable[tuple[str, str] | None]]
OPEN_PATHS = frozenset({"/health", "/ping", "/metrics", "/version"})


class Gate:
    """Answers 401, 415 or 503 itself and lets everything else through.

    `unavailable` gives the status and the reason when the server cannot take requests now, or None. Health, metrics and
    version need neither a key nor an engine.
    """

    def __init__(self, app: ASGIApp, *, api_keys: list[str], root_path: str, unavailable: Unavailable) -> None:
        self._app = app
        self._root_path = root_path.rstrip("/")
        self._key_digests = [_digest(key.encode()) for key in api_keys]
        self._unavailable = unavailable

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            # A proxy may have taken the prefix off or not: the router, too, takes paths with it and without.
            scope["root_path"] = self._root_path
            path: str = scope["path"]
            if path.startswith(self._root_path + "/"):
                path = path[len(self._root_path) :]
            if path not in OPEN_PATHS:
                refusal = await self._refuse(Headers(scope=scope), scope["method"])
                if refusal is not None:
                    await refusal(scope, receive, send)
                    return
        await self._app(scope, receive, send)

    async def _refuse(self, headers: Headers, method: str) -> Response | None:
        if self._key_digests and not self._is_authorized(headers.get("authorization", "")):
            return error_response(
                "Incorrect or missing API key; send it as 'Authorization: Bearer KEY'.",
                401,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        unavailable = await self._unavailable()
        if unavailable is not None:
            status, reason = unavailable
            return error_response(reason, 503, code=f"engine_{status}")
        content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        # A browser sends text/plain across origins without asking; JSON it must ask for (CORS preflight).
        if method == "POST" and content_type != "application/json":
            return error_response(
                f"The body must be sent as Content-Type: application/json, got {content_type or 'none'}.", 415
            )
        return None

    def _is_authorized(self, authorization: str) -> bool:
        scheme, _, key = authorization.partition(" ")
        digest = _digest(key.strip().encode("latin-1"))  # headers are latin-1 to ASGI
        # Digests have one length and every key is compared, so time tells nothing about the keys.
        matches = [hmac.compare_digest(digest, expected) for expected in self._key_digests]
        return scheme.lower() == "bearer" and any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
