"""Reads bodies of requests within bounds of length and time.

`AuthAndLimits` reads whole bodies. Routes that take files read theirs in pieces, through `BodyReader.limited`.
"""

from __future__ import annotations

import asyncio
import time

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive

from octavo.entrypoints.http.error_responses import error_response
from octavo.entrypoints.http.streaming import go_on
from octavo.errors import RequestError

MAX_BODIES_HELD = 64  # bodies that are still arriving may take this many times the longest body


class BodyReader:
    """Reads request bodies within one server's bounds."""

    def __init__(self, max_bytes: int, timeout_s: float, file_flag: str = "--max-file-bytes") -> None:
        """`file_flag` is the flag that errors about long files name."""
        self._max_bytes, self._file_flag = max_bytes, file_flag
        self._timeout_s = timeout_s
        self._num_held_bytes = 0  # of bodies that are still arriving

    async def read(self, headers: Headers, receive: Receive) -> bytes | Response:
        """Return the body, or the error response to a body that is too long (413), too slow (408) or one too many
        (503). Raises `ClientDisconnect`."""
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._max_bytes:
            return self._too_long(f"{length} bytes")
        deadline = time.monotonic() + self._timeout_s
        parts: list[bytes] = []
        num_bytes = 0
        try:
            while True:
                message = await _received(receive, deadline)
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
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
                f"The body did not arrive within {self._timeout_s:g} s: only {num_bytes} bytes came.",
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
                message = await _received(receive, deadline)
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


async def _received(receive: Receive, deadline: float) -> Message:
    """Return the next message. Raises `TimeoutError` at the deadline. Most messages are there: only others need a
    timer."""
    receiving = receive().__await__()
    try:
        waited_for = receiving.send(None)
    except StopIteration as end:
        message: Message = end.value
        return message
    async with asyncio.timeout(deadline - time.monotonic()):
        return await go_on(receiving, waited_for)


def replay_body(body: bytes, receive: Receive) -> Receive:
    """Return an ASGI `receive` that gives a body that was already read, and then the server's own messages, such as a
    disconnect."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_body() -> Message:
        return messages.pop() if messages else await receive()

    return receive_body
