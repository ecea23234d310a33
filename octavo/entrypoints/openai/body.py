"""Reads a request's body before its route runs: no longer than allowed, and no slower.

Routes then find the whole body there at once. What was refused is never read to its end: the connection is closed.
"""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Message, Receive

from octavo.entrypoints.openai.errors import error_response

MAX_BODIES_HELD = 64  # times the longest body: as much memory may bodies take that have not arrived whole
_CLOSE = {"Connection": "close"}


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
