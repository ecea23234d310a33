"""Reads a request's body before its route runs: no longer than allowed, and no slower.

Routes then find the whole body there at once. What was refused is never read to its end: the connection is closed.
"""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Message, Receive

from octavo.entrypoints.openai.errors import error_response

_CLOSE = {"Connection": "close"}


class ClientGoneError(Exception):
    """The client hung up before its request was whole; nobody waits for an answer."""


async def read_body(headers: Headers, receive: Receive, max_bytes: int, timeout_s: float) -> bytes | Response:
    """The body, or the answer (413, 408) to one that is too long or too slow. Raises `ClientGoneError`."""
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes:
        return _too_long(f"{length} bytes", max_bytes)
    parts: list[bytes] = []
    num_bytes = 0
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                part = message.get("body", b"")
                num_bytes += len(part)
                if num_bytes > max_bytes:  # sent in chunks, without a length
                    return _too_long(f"more than {max_bytes} bytes", max_bytes)
                parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        return error_response(
            f"The body did not arrive within {timeout_s:g} s: {num_bytes} bytes of it did.",
            408,
            code="request_timeout",
            headers=_CLOSE,
        )


def _too_long(found: str, max_bytes: int) -> Response:
    return error_response(
        f"The body has {found} and this server takes {max_bytes} (--max-body-bytes).",
        413,
        code="request_too_large",
        headers=_CLOSE,
    )


class ReadBody:
    """An ASGI `receive` that gives a body which has been read, and then what the server says, such as a disconnect."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}
