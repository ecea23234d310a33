"""Streams: server-sent events, merged generators, and the end of a stream when its client hangs up.

Every token of every stream makes a chunk. So chunks are joined from bytes that are encoded once a request
(`ChunkWriter`); only the parts that change are encoded for each chunk.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
from types import coroutine
from typing import Any, Protocol, TypeVar

import msgspec
from pydantic import BaseModel
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.engine.off_loop import MAX_INLINE_LENGTH, run_off_loop
from octavo.engine.output_processor import RequestState
from octavo.entrypoints.http.error_responses import stream_error_event
from octavo.entrypoints.http.piecewise_json import encode_in_pieces, is_large
from octavo.outputs import RequestOutput

T = TypeVar("T")

encode_json = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"
STARTED_AT_ONCE = 16  # requests of one body that start at once
SERVER_SEND = "octavo.server_send"  # scope key of the `send` that no middleware has wrapped


class ChunkWriter:
    """Writes the chunks of one response as server-sent events.

    `wants_usage` puts the usage (or null) into every chunk, as OpenAI does when the client asked for the usage.
    """

    def __init__(
        self, kind: str, about: Mapping[str, Any], text_field: tuple[bytes, bytes], *, wants_usage: bool
    ) -> None:
        """`text_field` has the JSON before and after the text of a plain chunk."""
        self._head = b"data: " + encode_json({"id": about["id"], "object": kind, **about})[:-1] + b',"choices":['
        self._choice_heads: dict[int, bytes] = {}
        self._text_begin, text_end = text_field
        self._tail = b',"usage":null}\n\n' if wants_usage else b"}\n\n"
        self._text_tail = text_end + b',"logprobs":null,"finish_reason":null}]' + self._tail

    def text(self, index: int, text: str) -> bytes:
        """Return the plain chunk of an unfinished choice."""
        before, after = self.around_text(index)
        return before + encode_json(text) + after

    def around_text(self, index: int) -> tuple[bytes, bytes]:
        """Return what a plain chunk has before and after the text."""
        return self._choice_head(index) + self._text_begin, self._text_tail

    def choice(
        self,
        index: int,
        field: bytes,
        *,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
        logprobs: bytes | None = None,
        usage: bytes | None = None,
        chunk_fields: bytes = b"",
    ) -> bytes:
        """Return any chunk of a choice. `logprobs` and `usage` are JSON; `chunk_fields` are fields beside the choices,
        each with a comma before it."""
        rest = b',"logprobs":%b,"finish_reason":%b' % (logprobs or b"null", encode_json(finish_reason))
        if finish_reason is not None:
            rest += b',"stop_reason":' + encode_json(stop_reason)
        tail = self._tail if usage is None else b',"usage":' + usage + b"}\n\n"
        return b"".join((self._choice_head(index), field, rest, b"}]", chunk_fields, tail))

    def usage(self, usage: bytes) -> bytes:
        """Return the last chunk, which has the usage and no choices."""
        return self._head + b'],"usage":' + usage + b"}\n\n"

    def _choice_head(self, index: int) -> bytes:
        head = self._choice_heads.get(index)
        if head is None:
            head = self._choice_heads[index] = self._head + b'{"index":%d,' % index
        return head


def tokens_comment(token_ids: list[int]) -> bytes:
    """Return the comment of a resumable stream that follows the events of these tokens."""
    return b": tokens %b\n\n" % encode_json(token_ids)


def named_event(event: Mapping[str, Any]) -> bytes:
    """Return a server-sent event whose name is its `type`."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode_json(event))


class Connection(Protocol):
    """The server's side of an answer (`http_protocol.ResponseCycle`)."""

    def attach(self, sink: EventSink) -> None:
        """Open `sink`, if the answer has chunks, and close it while the client is late."""

    def watch(self, on_disconnect: Callable[[], object] | None) -> None:
        """Call `on_disconnect` if the client hangs up before the answer is complete. None: watch no longer."""


def _encode_nothing(output: RequestOutput) -> bytes:
    return b""


class EventSink:
    """A request's `Sink`: writes to the connection at once, while the client keeps up. What it cannot write comes
    through the stream's generator."""

    __slots__ = ("_encode", "_shows_tokens", "_text_chunk", "_write", "has_sent", "is_open", "num_text_tokens")

    def __init__(self, encode: Callable[[RequestOutput], bytes]) -> None:
        """`encode` returns the events of an output."""
        self.is_open = False
        self.has_sent = False  # since the last look of `_KeepAliveTimer`
        self.num_text_tokens = 0  # tokens written without `encode`
        self._encode = encode
        self._text_chunk: tuple[int, bytes, bytes] | None = None
        self._shows_tokens = False
        self._write: Callable[[bytes], None] | None = None

    def open(self, write: Callable[[bytes], None]) -> None:
        self._write, self.is_open = write, True

    def pause(self) -> None:
        self.is_open = False

    def resume(self) -> None:
        self.is_open = self._write is not None

    def close(self) -> None:
        self._write, self.is_open = None, False
        self._encode = _encode_nothing  # the old one may refer to this object: a cycle waits for a full collection

    def begin_text(self, before: bytes, after: bytes, *, shows_tokens: bool) -> None:
        """From now on write the text of the only completion between `before` and `after`, without `encode`. With
        `shows_tokens` a comment with its tokens follows."""
        self._shows_tokens = shows_tokens
        self._text_chunk = (len(before) + len(after), before, after + b"\r\n")

    def take(self, state: RequestState) -> None:
        assert self._write is not None
        if self._text_chunk is None:
            output = state.take()
            assert isinstance(output, RequestOutput)
            if events := self._encode(output):
                self.has_sent = True
                self._write(b"%x\r\n%b\r\n" % (len(events), events))
            return
        text, num_tokens = state.take_text()
        self.num_text_tokens += num_tokens
        written = b""
        if text:
            (length, before, after), shown = self._text_chunk, encode_json(text)
            written = b"%x\r\n%b%b%b" % (length + len(shown), before, shown, after)
        if self._shows_tokens:
            comment = tokens_comment(state.completions[0].token_ids[-num_tokens:])
            written += b"%x\r\n%b\r\n" % (len(comment), comment)
        if written:
            self.has_sent = True
            self._write(written)


class EventStream(Response):
    """Sends the events of a generator, and those that `sink` takes beside it. When the client hangs up, it closes the
    generator, which aborts the request."""

    media_type = "text/event-stream"
    keep_alive = b": keep-alive\n\n"  # a comment, sent when nothing else has been sent for a while
    shows_errors = True  # as a last event; else an error breaks the answer off, so that it does not look complete

    def __init__(
        self, events: AsyncGenerator[bytes, None], headers: dict[str, str], sink: EventSink | None = None
    ) -> None:
        self._events = events
        self._sink = sink or EventSink(_encode_nothing)
        self.status_code = 200
        self.background: BackgroundTask | None = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        idle_s = scope["app"].state.octavo.args.stream_keep_alive
        send_body = scope.get(SERVER_SEND, send)
        connection: Connection | None = getattr(send_body, "__self__", None)
        if not hasattr(connection, "attach"):  # of a middleware
            connection = None
        with contextlib.suppress(ClientDisconnect):
            await run_until_disconnect(self._send(send, send_body, idle_s, connection), receive, connection)

    async def _send(self, send: Send, send_body: Send, idle_s: float, connection: Connection | None) -> None:
        """Send the headers through the middlewares. Bodies bypass them, because each middleware would add a coroutine
        to every chunk."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        sink = self._sink
        timer = _KeepAliveTimer(self.keep_alive, send_body, idle_s, sink) if idle_s and self.keep_alive else None
        if connection is not None:
            connection.attach(sink)
        try:
            async for events in self._events:
                sink.has_sent = True
                await send_body({"type": "http.response.body", "body": events, "more_body": True})
        except Exception as error:
            if not self.shows_errors:
                raise
            await send_body({"type": "http.response.body", "body": stream_error_event(error), "more_body": True})
        finally:
            sink.close()
            if timer is not None:
                timer.stop()
            await self._events.aclose()
        await send_body({"type": "http.response.body", "body": b"", "more_body": False})


class _KeepAliveTimer:
    """Sends a comment when nothing else has been sent for a while. Proxies end silent connections, and a stream is
    silent while its request is queued. It is a timer, with a task only while there is something to send."""

    def __init__(self, comment: bytes, send_body: Send, idle_s: float, sink: EventSink) -> None:
        self._comment, self._send_body, self._idle_s, self._sink = comment, send_body, idle_s, sink
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._timer = self._loop.call_later(idle_s, self._look)

    def stop(self) -> None:
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _look(self) -> None:
        if not self._sink.has_sent and (self._task is None or self._task.done()):
            self._task = self._loop.create_task(self._send())
        self._sink.has_sent = False
        self._timer = self._loop.call_later(self._idle_s, self._look)

    async def _send(self) -> None:
        await self._send_body({"type": "http.response.body", "body": self._comment, "more_body": True})


async def respond(work: Coroutine[Any, Any, BaseModel], raw: Request, headers: dict[str, str]) -> Response:
    """Return a response with the result of `work` as JSON. Pydantic writes the JSON directly, which is several times
    faster than through Python objects; a thread writes a large result. Raises `ClientDisconnect`."""
    body = await run_until_disconnect(work, raw.receive)
    return Response(await encode_off_loop(body), headers=headers, media_type="application/json")


async def encode_off_loop(value: Any) -> bytes:
    """Return `value` as JSON. A thread writes a large value."""
    return await run_off_loop(lambda: encode_in_pieces(value), length=MAX_INLINE_LENGTH + 1 if is_large(value) else 0)


@coroutine
def run_until_disconnect(
    work: Coroutine[Any, Any, T], receive: Receive, connection: Connection | None = None
) -> Generator[Any, Any, T]:
    """Return the result of `work`. Raises `ClientDisconnect` if the client hung up first and `work` was cancelled. The
    client is watched only once `work` waits, because most work ends before that: by the `connection` if there is one,
    otherwise by a task that asks `receive`."""
    try:
        waited_for = work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    task = asyncio.current_task()
    assert task is not None
    has_gone = False

    def hang_up() -> None:
        nonlocal has_gone
        has_gone = True
        task.cancel()

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        hang_up()

    watcher: asyncio.Task[None] | None = None
    if connection is None:
        watcher = task.get_loop().create_task(watch())
    else:
        connection.watch(hang_up)
    try:
        return (yield from go_on(work, waited_for))
    except asyncio.CancelledError:
        if not has_gone or task.uncancel():  # cancelled by others
            raise
        raise ClientDisconnect from None
    finally:
        if watcher is not None:
            watcher.cancel()
        elif connection is not None:
            connection.watch(None)


@coroutine
def go_on(work: Coroutine[Any, Any, T] | Generator[Any, Any, T], waited_for: Any) -> Generator[Any, Any, T]:
    """Return the result of `work`, which has begun and waits for `waited_for`, the result of its last `send`."""
    try:
        while True:
            try:
                sent = yield waited_for
            except BaseException as error:
                waited_for = work.throw(error)
            else:
                waited_for = work.send(sent)
    except StopIteration as end:
        result: T = end.value
        return result


async def spread(items: Sequence[T]) -> AsyncGenerator[T, None]:
    """Yield the items, and let other tasks run between groups of them. The caller starts a request for each, which
    takes about 0.1 ms, and a body may have thousands."""
    for number, item in enumerate(items):
        if number and number % STARTED_AT_ONCE == 0:
            await asyncio.sleep(0)
        yield item


async def merge(
    generators: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield the outputs of several generators as they come, each with its generator's index. Closing this generator
    closes all of them."""
    if len(generators) == 1:
        try:
            async for output in generators[0]:
                yield 0, output
        finally:
            await generators[0].aclose()
        return
    queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue()

    async def drain(index: int, generator: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async for output in generator:
                queue.put_nowait((index, output))
            queue.put_nowait((index, None))
        except Exception as error:
            queue.put_nowait((index, error))
        finally:
            await generator.aclose()

    tasks: list[asyncio.Task[None]] = []
    try:
        async for index, generator in spread(list(enumerate(generators))):
            tasks.append(asyncio.ensure_future(drain(index, generator)))
        running = len(tasks)
        while running:
            index, item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                try:
                    raise item
                finally:
                    del item  # its traceback has this function's variables: a cycle
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while not queue.empty():  # an error's traceback has the queue
            queue.get_nowait()
