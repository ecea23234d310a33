"""Has the lines of a batch answered by the application, some at a time, as if they came over HTTP.

Which requests there are and what is wrong with them is the routes' to say, so whatever they learn, batches can do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message

from octavo.engine.off_loop import run_off_loop
from octavo.entrypoints.batch.batch_lines import Line, LineError, answer_line, checksum, error_line, read_line
from octavo.entrypoints.http.auth_and_limits import INTERNAL_BODY
from octavo.entrypoints.http.json_worker import is_large

MAX_TRIES = 20  # of a request while the engine is started again or its queue is full
MAX_WAIT_S = 15.0  # between two
_RETRIED_STATUSES = (429, 503)

# Number of a line, whether it was answered with success, and the line of the output.
Write = Callable[[int, bool, bytes], Awaitable[None]]


class BatchStopped(Exception):
    """The engine takes no requests any more. What has been answered stands, and the rest can be gone on with."""


async def answer_lines(
    app: Starlette, lines: AsyncIterable[tuple[int, bytes]], write: Write, *, at_once: int, endpoint: str | None = None
) -> None:
    """Answer numbered lines, `at_once` at a time, and `write` each answer when it is there. A line that is too long is
    given as it begins, without its line break. Raises `BatchStopped`, and what `write` raises."""
    slots = asyncio.Semaphore(at_once)
    tasks: set[asyncio.Task[None]] = set()
    failures: list[BaseException] = []

    def end(task: asyncio.Task[None]) -> None:
        slots.release()
        tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            failures.append(error)

    try:
        async for number, text in lines:
            await slots.acquire()
            if failures:
                break
            task = asyncio.ensure_future(_answer(app, number, text, write, endpoint))
            tasks.add(task)
            task.add_done_callback(end)
        while tasks:
            await asyncio.wait(tasks)
            await asyncio.sleep(0)  # their callbacks
        if failures:
            raise failures[0]
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


async def _answer(app: Starlette, number: int, text: bytes, write: Write, endpoint: str | None) -> None:
    sum = checksum(text)
    try:
        if not text.endswith(b"\n"):
            raise LineError("The line is too long.")
        if is_large(text):  # it is read as the body of a request is
            decode = app.state.octavo.json_worker.parse
            line = await run_off_loop(lambda: read_line(text, endpoint, decode), length=len(text), is_json=True)
        else:
            line = read_line(text, endpoint)
    except LineError as error:
        await write(number, False, error_line(number, sum, error))
        return
    status, body = await _ask(app, line)
    await write(number, 200 <= status < 300, answer_line(number, sum, line.custom_id, status, body))


async def _ask(app: ASGIApp, line: Line) -> tuple[int, bytes]:
    """Status and body of the answer. Waits while the application says that it cannot answer now."""
    for _ in range(MAX_TRIES):
        status, headers, body = await call_app(app, line.url, line.body)
        if status not in _RETRIED_STATUSES:
            return status, body
        if b'"engine_stopping"' in body:
            break
        await asyncio.sleep(min(float(headers.get("retry-after", "1")), MAX_WAIT_S))
    raise BatchStopped(body.decode(errors="replace"))


async def call_app(app: ASGIApp, path: str, body: bytes) -> tuple[int, Headers, bytes]:
    """Status, headers and body of what `app` answers to a POST from within the server."""
    raw_headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    scope: dict[str, Any] = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"", "headers": raw_headers,
        "client": None, "server": None, INTERNAL_BODY: body,
    }  # fmt: skip
    status, headers, parts = 500, Headers(), list[bytes]()

    async def receive() -> Message:
        await asyncio.Event().wait()  # nobody hangs up
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], Headers(raw=message["headers"])
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, headers, b"".join(parts)
