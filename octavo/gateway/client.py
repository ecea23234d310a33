"""The client's side of a request: sends it the answer over ASGI. Knows whether an error can still be a status, or has
to be an event of a stream."""

import re
import time
import uuid
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.types import Message, Send

from octavo.errors import RequestError
from octavo.gateway.error_bodies import error_body, error_event
from octavo.gateway.stream_progress import CUT_OFF, RESUMABLE, StreamProgress
from octavo.gateway.upstream import HOP_BY_HOP, Answer, end_to_end
from octavo.gateway.usage_counter import PROMPT_TOKENS, UsageCounter
from octavo.http_protocol import ResponseCycle
from octavo.messages_errors import MESSAGES_PREFIX
from octavo.ollama.answers import AnswerTranslator

_NOT_PASSED_ON = HOP_BY_HOP | {b"date", RESUMABLE, CUT_OFF, PROMPT_TOKENS}
_NO_BODY = (204, 304)  # their Content-Length would tell the length of another answer's body
_EVENTS = b"text/event-stream"
_EVENT_END = re.compile(rb"(?<=\n\n)|(?<=\r\n\r\n)")
_MAX_EVENT_BYTES = 1 << 20  # of an incomplete event that is held back


class BrokenAnswerError(Exception):
    """The answer cannot be completed, or its client does not read it: the connection has to be cut."""


def _is_events(answer: Answer) -> bool:
    return answer.header(b"content-type").startswith(_EVENTS) and not answer.header(b"content-encoding")


class ClientSend:
    """uvicorn's `send`, and a way past it for the chunks of a body while the client keeps up. `send` waits before it
    writes: if it is cut off while it waits, it has written nothing, and can be called again."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._write: Callable[[bytes], None] | None = None  # None while `at_once` may not write
        self._connection: Callable[[bytes], None] | None = None

    def at_once(self, data: bytes) -> bool:
        """Write a chunk of the body without waiting. Returns False, and has written nothing, if the client has to read
        first, or the body has no chunks."""
        if self._write is None:
            return False
        self._write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    async def __call__(self, message: Message) -> None:
        await self._send(message)
        if message["type"] == "http.response.start":
            connection = getattr(self._send, "__self__", None)
            if isinstance(connection, ResponseCycle):
                connection.attach(self)

    @property
    def has_writer(self) -> bool:
        """Whether `at_once` can write whenever the client keeps up."""
        return self._connection is not None

    def open(self, write: Callable[[bytes], None]) -> None:
        self._write = self._connection = write

    def pause(self) -> None:
        self._write = None

    def resume(self) -> None:
        self._write = self._connection

    def close(self) -> None:
        self._write = self._connection = None


class Client:
    """One request's client."""

    def __init__(self, send: Send, path: str, *, request_id: str | None = None) -> None:
        """`path` says whose API's form errors have. `request_id` is the client's id of the request, or None; the
        gateway's own errors repeat it."""
        self.send, self._path = send, path
        self._send_at_once = send.at_once if isinstance(send, ClientSend | AnswerTranslator) else None
        self._num_sends = 0  # calls of `send` under way
        self.request_id = request_id or uuid.uuid4().hex
        self.streams = False  # the client asked for events
        self._has_head = False
        self._is_events = self._is_lines = False
        self._rest = b""  # the part of an event that has come
        self._is_amid_event = False  # the client has part of an event that was too long to be held back
        self._is_plain = False  # the client gets all events, and nothing reads them but `progress`
        self._unsent = b""  # bytes that `flush` sends
        self._failed_status = 0  # the status of an error that came after comments had been sent
        self.status = 0  # that the client has got; 0 before it has one
        self.has_failed = False  # the answer ends with an error, whatever its status
        self.has_answer = False  # a replica's answer has begun
        self.answered_by: tuple[str, str] | None = None  # the names of the model and the replica
        self.refusal: tuple[int, str] | None = None  # the status and request id of a replica's answer with a 4xx
        self.progress = StreamProgress()
        self.usage_counter: UsageCounter | None = None  # for a client whose tokens are counted
        self.hides_usage = False  # drops the usage that only the gateway asked the stream for
        # `time.monotonic` since when the client has got nothing while it waits.
        self.silent_since: float | None = None
        self.loads_s: list[float] = []  # seconds of each wait for a model

    @property
    def has_begun(self) -> bool:
        """Whether the client has got a status."""
        return self._has_head

    @property
    def takes_comments(self) -> bool:
        """Whether a comment may be sent now: before the answer, or between two events of a stream."""
        return self.streams and (not self._has_head or (self._is_events and not self._is_amid_event))

    async def comment(self, text: str) -> None:
        """Send a comment of a stream, which begins the stream."""
        if not self._has_head:
            self._is_events = True  # at once: the answer may begin while the head is being sent
            await self._begin(200, [(b"content-type", _EVENTS), (b"cache-control", b"no-cache")])
        await self._write(f": {text}\n\n".encode())
        self.silent_since = time.monotonic()

    def comment_at_once(self, text: str) -> bool:
        """Send a comment, if the client has begun to get a stream, is between two events, and need not read first.
        Returns False if only `comment` can send it now, as over HTTP/1.0."""
        if not self.takes_comments or self._num_sends:
            return True
        if self._send_at_once is None or (isinstance(self.send, ClientSend) and not self.send.has_writer):
            return False
        self._send_at_once(f": {text}\n\n".encode())
        return True

    def can_take(self, answer: Answer, is_last: bool) -> bool:
        """Return whether an answer continues the stream that the client has, if it has one: other servers than Octavo
        begin it again, or refuse to. The client gets the error of the last one."""
        if not self.progress.is_resumable or answer.header(RESUMABLE):
            return True
        return is_last and not _is_events(answer)

    async def begin(self, answer: Answer) -> None:
        """Send an answer's status and headers."""
        self.has_answer = True
        is_refused = 400 <= answer.status < 500
        self.refusal = (answer.status, answer.header(b"x-request-id").decode("latin-1")) if is_refused else None
        is_events = _is_events(answer)
        self._rest = b""
        self.progress.begin(answer.header(RESUMABLE) if is_events else b"")
        if self.usage_counter is not None:
            self.usage_counter.see_headers(answer.header(PROMPT_TOKENS), answer.header(b"metadata"))
        self._is_plain = is_events and self.usage_counter is None and not self.hides_usage
        if self._has_head:
            self._failed_status = 0 if is_events else answer.status
            return
        self._is_events = is_events
        # A stream that breaks off gets a further event, the error, so it has no fixed length.
        has_length = not is_events and answer.status not in _NO_BODY
        dropped = _NOT_PASSED_ON if has_length else _NOT_PASSED_ON | {b"content-length"}
        await self._begin(answer.status, end_to_end(answer.headers, dropped))

    def add(self, data: bytes) -> bool:
        """Take bytes of the answer, and send the part that the client may have now. Returns False if the client has to
        read first: then `flush` before the next call."""
        if self._is_plain and not self._rest and data.endswith(b"\n\n"):  # most pieces
            due = self.progress.add(data) if self.progress.is_resumable else data
            self._is_amid_event = False
        else:
            due = self._due(data)
        if not due:
            return True
        # A stream's tokens are written before its end is sent.
        send = None if self.usage_counter is not None and self.usage_counter.is_at_end else self._send_at_once
        if send is not None and send(due):
            return True
        self._unsent = due
        return False

    async def flush(self) -> None:
        """Send what `add` has left."""
        if self.usage_counter is not None and self.usage_counter.is_at_end:
            await self.usage_counter.finish()
        data, self._unsent = self._unsent, b""
        await self._write(data)

    def _due(self, data: bytes) -> bytes:
        """Return the bytes that the client may have now. In a stream they are whole events: a part of one would be no
        JSON."""
        if not self._is_events:
            if self.usage_counter is not None:  # the last piece waits until the tokens are written
                self.usage_counter.see(data)
                data, self._rest = self._rest, data
            return data
        if self._failed_status:
            self._rest += data
            return b""
        if self.progress.is_resumable:
            return self._seen(self.progress.add(data))
        data = self._rest + data if self._rest else data
        end = len(data) if data.endswith(b"\n\n") else max(_after(data, b"\n\n"), _after(data, b"\r\n\r\n"))
        if len(data) - end > _MAX_EVENT_BYTES:
            end, self._is_amid_event = len(data), True
        elif end:
            self._is_amid_event = False
        self._rest = data[end:]
        return self._seen(data[:end])

    def _seen(self, events: bytes) -> bytes:
        """Count events, and return those that the client is to get."""
        if self.usage_counter is not None:
            self.usage_counter.see_events(events)
        if not self.hides_usage:
            return events
        events = events.replace(b',"usage":null}\n\n', b"}\n\n")
        if b'"choices":[]' in events:
            parts = _EVENT_END.split(events)
            return b"".join(one for one in parts if b'"choices":[]' not in one or b'"usage":{' not in one)
        return events

    async def end(self) -> None:
        """Complete the answer."""
        if self._failed_status:  # the replica's error, which becomes an event
            self.has_failed = True
            await self._finish(error_event(self._replicas_error(), self._path))
        else:
            rest = self._seen(self.progress.flush() or self._rest) if self._is_events else self._rest
            if self.usage_counter is not None:
                await self.usage_counter.finish(self.progress.num_tokens)
            await self._finish(rest)

    def _replicas_error(self) -> bytes:
        """Return the body of a replica's error in one line; another one if it is no JSON object, such as a proxy's
        page."""
        body = b" ".join(self._rest.split())
        try:
            msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            error = RequestError(f"A replica answered {self._failed_status}.", status=502, code="replica_error")
            return error_body(error, self._path, f"req_{self.request_id}")
        return body

    async def fail(self, error: RequestError) -> None:
        """Answer with an error. Raises `BrokenAnswerError` if part of another answer has been sent."""
        self.has_failed = self._has_head
        request_id = f"req_{self.request_id}"
        body = error_body(error, self._path, request_id)
        if not self._has_head:
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
            if self._path.startswith(MESSAGES_PREFIX):
                headers.append((b"request-id", request_id.encode()))
            wait_s = error.retry_after_s
            if error.status in (429, 503) and (wait_s is not None or error.code != "start_failed"):
                headers.append((b"retry-after", b"%d" % (wait_s or 1)))
            if error.code == "stopping":
                headers.append((b"connection", b"close"))
            if error.allow is not None:
                headers.append((b"allow", error.allow.encode()))
            headers.append((b"x-request-id", self.request_id.encode()))
            if error.status == 401:
                headers.append((b"www-authenticate", b"Bearer"))
            await self._begin(error.status, headers)
            await self._finish(body)
        elif self._is_events:
            await self._finish(error_event(body, self._path))
        elif self._is_lines:
            await self._finish(body + b"\n")
        elif not (isinstance(self.send, AnswerTranslator) and await self.send.fail(error.status, str(error))):
            raise BrokenAnswerError

    async def reply(self, status: int, content_type: bytes, body: bytes) -> None:
        """Send an answer of the gateway's own."""
        await self._begin(status, [(b"content-type", content_type), (b"content-length", b"%d" % len(body))])
        await self._finish(body)

    async def line(self, line: dict[str, Any]) -> None:
        """Send a line of JSON as a part of the gateway's own answer. The first line begins the answer."""
        if not self._has_head:
            await self._begin(200, [(b"content-type", b"application/x-ndjson")])
            self._is_lines = True
        await self._write(msgspec.json.encode(line) + b"\n")

    async def finish(self, line: dict[str, Any], *, streams: bool) -> None:
        """Send the last line of the gateway's own answer, or the whole answer if it is not streamed."""
        if not streams:
            await self.reply(200, b"application/json; charset=utf-8", msgspec.json.encode(line))
            return
        await self.line(line)
        await self._finish(b"")

    async def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._has_head, self.status = True, status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _write(self, data: bytes, *, is_last: bool = False) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})

    async def _send(self, message: Message) -> None:
        self._num_sends += 1
        try:
            await self.send(message)
        finally:
            self._num_sends -= 1

    async def _finish(self, data: bytes) -> None:
        await self._write(data, is_last=True)


def _after(data: bytes, end: bytes) -> int:
    at = data.rfind(end)
    return 0 if at < 0 else at + len(end)
