"""Lets the application answer the lines of a batch, several at a time, as if they came over HTTP.

The routes check the requests, so batches support every feature of the routes.
"""

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
from octavo.entrypoints.http.streaming import encode_json

MAX_TRIES = 20  # of a request while the engine restarts or its queue is full
MAX_WAIT_S = 15.0  # between two tries
_RETRIED_STATUSES = (429, 503)

# Takes the number of a line, whether its answer is a success, and the line of the output.
Write = Callable[[int, bool, bytes], Awaitable[None]]


class BatchStopped(Exception):
    """The engine takes no more requests. Finished answers are kept, and the batch can be continued later."""


async def answer_lines(
    app: Starlette, lines: AsyncIterable[tuple[int, bytes]], write: Write, *, at_once: int, endpoint: str | None = None,
    is_expired: bool = False,
) -> None:  # fmt: skip
    """Answer numbered lines, `at_once` at a time, and `write` each answer when it is ready: an error if the batch
    `is_expired`. Of a line that is too long only the beginning is given, without a line break. Raises `BatchStopped`,
    and the errors of `write`."""
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
            task = asyncio.ensure_future(_answer(app, number, text, write, endpoint, is_expired))
            tasks.add(task)
            task.add_done_callback(end)
        while tasks:
            await asyncio.wait(tasks)
            await asyncio.sleep(0)  # let the tasks' callbacks run
        if failures:
            raise failures[0]
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


async def _answer(
    app: Starlette, number: int, text: bytes, write: Write, endpoint: str | None, is_expired: bool
) -> None:
    sum = await run_off_loop(lambda: checksum(text), length=len(text) if is_large(text) else 0)
    try:
        if not text.endswith(b"\n"):
            raise LineError("The line is too long.")
        if is_large(text):  # parse it like a large body of a request
            decode = app.state.octavo.json_worker.parse
            line = await run_off_loop(lambda: read_line(text, endpoint, decode), length=len(text), is_json=True)
        else:
            line = read_line(text, endpoint)
        if is_expired:
            raise LineError("It was not answered before the batch's time was up.", line.custom_id, "batch_expired")
    except LineError as error:
        await write(number, False, error_line(number, sum, error))
        return
    status, body = await _ask(app, line)
    await write(number, 200 <= status < 300, answer_line(number, sum, line.custom_id, status, body))


async def _ask(app: ASGIApp, line: Line) -> tuple[int, bytes]:
    """Return the status and body of a line's answer. Waits and tries again while the application cannot answer."""
    for _ in range(MAX_TRIES):
        status, headers, body = await call_app(app, line.url, line.body)
        is_lost = status == 500 and b'"engine_dead"' in body  # the engine died with it, and is started again
        if status not in _RETRIED_STATUSES and not is_lost:
            is_json = headers.get("content-type", "").startswith("application/json")
            return status, body if is_json else encode_json(body.decode(errors="replace"))
        if b'"engine_stopping"' in body:
            break
        await asyncio.sleep(min(float(headers.get("retry-after", "1")), MAX_WAIT_S))
    raise BatchStopped(body.decode(errors="replace"))


async def call_app(app: ASGIApp, path: str, body: bytes) -> tuple[int, Headers, bytes]:
    """Send `app` a POST from within the server, and return the status, headers and body of the answer."""
    raw_headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    scope: dict[str, Any] = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"", "headers": raw_headers,
        "client": None, "server": None, INTERNAL_BODY: body,
    }  # fmt: skip
    status, headers, parts = 500, Headers(), list[bytes]()

    async def receive() -> Message:
        await asyncio.Event().wait()  # never: there is no client that could hang up
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], Headers(raw=message["headers"])
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, headers, b"".join(parts)
