"""Turns answers of OpenAI's API into Ollama's, as they come: `AnswerTranslator` is an ASGI `send`."""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec
from starlette.types import Message, Send

from octavo.call_arguments import with_whole_pairs
from octavo.ollama import ollama_error
from octavo.ollama.to_openai import Translated
from octavo.sse_reader import EventReader

_encode = msgspec.json.encode
_OWN_HEADERS = (b"content-type", b"content-length", b"cache-control", b"transfer-encoding")
_JSON, _LINES = b"application/json; charset=utf-8", b"application/x-ndjson"


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    index: int | None = 0
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None


class _Logprobs(msgspec.Struct):
    """Of chats, or of completions."""

    content: list[Any] | None = None
    tokens: list[Any] | None = None
    token_logprobs: list[Any] | None = None
    top_logprobs: list[dict[str, Any] | None] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = 0
    completion_tokens: int | None = 0


class _Chunk(msgspec.Struct):
    """An event of OpenAI's streams."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


class _Vector(msgspec.Struct):
    embedding: Any
    index: int = 0


class _Vectors(msgspec.Struct):
    data: list[_Vector]
    usage: _Usage | None = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode
_T = TypeVar("_T")
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # errors of a decoder


def now() -> str:
    """Return the time as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def loaded_answer(request: Translated, reason: str) -> dict[str, Any]:
    """Return the answer to a request without a prompt, which has loaded the model or (`reason` "unload") stopped it."""
    about: dict[str, Any] = {"model": request.name, "created_at": now()}
    if request.kind == "embeddings":
        return {"embedding": []}
    if request.kind == "embed":
        return {"model": request.name, "embeddings": [], "total_duration": 0, "load_duration": 0}
    said = {"message": {"role": "assistant", "content": ""}} if request.kind == "chat" else {"response": ""}
    return {**about, **said, "done": True, "done_reason": reason}


class AnswerTranslator:
    """Sends an answer of OpenAI's API as Ollama's, by an ASGI `send`. `begin` is the arrival of the request
    (`time.monotonic`). Where `send` has a method `at_once`, as the gateway's has, this object's method may be used."""

    def __init__(self, send: Send, request: Translated, begin: float) -> None:
        self._send, self._request, self._begin = send, request, begin
        self.load_s: Callable[[], float] = lambda: 0.0  # seconds that the request has waited for its model
        self._late: tuple[bytes, bytes] | None = None  # a piece that `at_once` has not sent, and its lines
        self._status = 200
        self._headers: list[tuple[bytes, bytes]] = []
        self._events: EventReader | None = None  # None: the answer is no stream
        self._body: list[bytes] = []
        self._is_begun = self._is_done = False
        self._first_at: float | None = None  # when the answer's first event came
        self._calls: dict[int, dict[str, str]] = {}
        # Text, thinking, calls and log-probabilities of an answer that is not streamed.
        self._whole: dict[str, Any] = {}
        self._finish_reason: str | None = None
        self._usage = _Usage()

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            kinds = [value for name, value in message["headers"] if name.lower() == b"content-type"]
            self._headers = [one for one in message["headers"] if one[0].lower() not in _OWN_HEADERS]
            if self._status == 200 and any(kind.startswith(b"text/event-stream") for kind in kinds):
                self._events = EventReader()
            return
        if message["type"] != "http.response.body":
            await self._send(message)
            return
        data, is_end = message.get("body", b""), not message.get("more_body", False)
        if self._late is not None:
            (piece, written), self._late = self._late, None
            await self._send_part(_LINES, written, False)
            if piece is data:
                return
        if self._events is None:
            self._body.append(data)
            if is_end:
                await self._finish_whole(b"".join(self._body))
            return
        lines = self._lines_of(self._events, data)
        if is_end and not self._is_done:
            self._is_done = True
            lines.append(ollama_error("the answer broke off"))
        await self._write(lines, is_end)

    def at_once(self, data: bytes) -> bool:
        """Send a piece of a stream without waiting. Returns False if the stream has not begun, or if the client has to
        read first: then call this object with the same piece."""
        if self._events is None or (self._request.streams and not self._is_begun):
            return False
        lines = self._lines_of(self._events, data)
        if not self._request.streams:
            self._keep(lines)
        elif lines and not self._send.at_once(written := self._written(lines)):  # type: ignore[attr-defined]
            self._late = data, written
            return False
        return True

    async def fail(self, status: int, message: str) -> bool:
        """Answer with an error in place of an answer that has broken off. Returns False if a part of it was sent."""
        if self._is_begun:
            return False
        self._status = status
        await self._send_part(_JSON, _encode(ollama_error(message)), True)
        return True

    def _lines_of(self, reader: EventReader, data: bytes) -> list[dict[str, Any]]:
        """Return the lines for a piece of a stream."""
        lines: list[dict[str, Any]] = []
        for event in reader.feed(data):
            if not self._is_done:
                self._add(event, lines)
        return lines

    def _written(self, lines: list[dict[str, Any]]) -> bytes:
        return b"".join(_encode(self._shown(line)) + b"\n" for line in lines)

    def _add(self, event: bytes, lines: list[dict[str, Any]]) -> None:
        """Add the lines for an event."""
        if event.strip() == b"[DONE]":
            self._is_done = True
            lines.append(self._last_line())
            return
        try:
            chunk = _decode_chunk(event)
        except _UNREADABLE as error:
            chunk = _Chunk(error=f"the model's server sent an event that cannot be read: {error}")
        if chunk.error is not None:
            self._is_done = True
            lines.append(ollama_error(_message_of({"error": chunk.error})))
            return
        self._usage = chunk.usage or self._usage
        for choice in (chunk.choices or ())[:1]:
            if self._first_at is None:
                self._first_at = time.monotonic()
            said = self._said(choice)
            self._finish_reason = choice.finish_reason or self._finish_reason
            if self._finish_reason is not None:
                said |= self._tool_calls()
            if said:
                lines.append(said)

    def _said(self, choice: _Choice) -> dict[str, Any]:
        """Return the fields that an event adds: text, thinking and log-probabilities."""
        delta = choice.delta or _Delta()
        for call in delta.tool_calls or ():
            kept = self._calls.setdefault(call.index or 0, {"name": "", "arguments": ""})
            function = call.function or _Function()
            kept["name"] += function.name or ""
            kept["arguments"] += function.arguments or ""
        fields = {
            "text": choice.text or delta.content or "",
            "thinking": delta.reasoning_content or delta.reasoning or "",
            "logprobs": [] if choice.logprobs is None else _listed(choice.logprobs),
        }
        return {name: value for name, value in fields.items() if value}

    def _tool_calls(self) -> dict[str, Any]:
        """Return the calls, once they are complete. A call that was cut off has no arguments, and is left out."""
        calls = []
        for _, call in sorted(self._calls.items()):
            try:
                arguments = msgspec.json.decode(with_whole_pairs(call["arguments"] or "{}"))
            except msgspec.DecodeError:
                continue
            calls.append({"function": {"name": call["name"], "arguments": arguments}})
        self._calls.clear()
        return {"calls": calls} if calls else {}

    def _line(self, said: dict[str, Any]) -> dict[str, Any]:
        line: dict[str, Any] = {"model": self._request.name, "created_at": now()}
        thinking = {"thinking": said["thinking"]} if "thinking" in said else {}
        if self._request.kind == "chat":
            calls = {"tool_calls": said["calls"]} if "calls" in said else {}
            line["message"] = {"role": "assistant", "content": said.get("text", ""), **thinking, **calls}
        else:
            line |= {"response": said.get("text", ""), **thinking}
        if "logprobs" in said:
            line["logprobs"] = said["logprobs"]
        return {**line, "done": False}

    def _last_line(self) -> dict[str, Any]:
        end = time.monotonic()
        load_s, first_at = self.load_s(), self._first_at or end
        reason = "length" if self._finish_reason == "length" else "stop"
        durations = {
            "total_duration": end - self._begin,
            "load_duration": load_s,
            "prompt_eval_duration": max(0.0, first_at - self._begin - load_s),
            "eval_duration": end - first_at,
        }
        return {
            "done": True, "done_reason": reason, **{name: round(1e9 * value) for name, value in durations.items()},
            "prompt_eval_count": self._usage.prompt_tokens or 0,
            "eval_count": self._usage.completion_tokens or 0,
        }  # fmt: skip

    async def _write(self, lines: list[dict[str, Any]], is_end: bool) -> None:
        if self._request.streams:
            data = self._written(lines)
            if lines and "error" in lines[0] and not self._is_begun:
                self._status = 500
            if data or is_end:
                await self._send_part(_LINES, data, is_end)
            return
        self._keep(lines)
        if is_end:
            await self._send_part(_JSON, _encode(self._whole), is_end)

    def _keep(self, lines: list[dict[str, Any]]) -> None:
        """Add lines to an answer that is not streamed."""
        for line in lines:
            if "error" in line:
                self._status, self._whole = 500, line
            elif "done" in line:
                self._whole = self._shown(self._whole) | line
            else:
                for name, value in line.items():
                    self._whole[name] = self._whole[name] + value if name in self._whole else value

    def _shown(self, line: dict[str, Any]) -> dict[str, Any]:
        if "error" in line:
            return line
        return self._line(line) | ({} if "done" not in line else line)

    async def _finish_whole(self, body: bytes) -> None:
        """Send the answer to a request for embeddings, or an error."""
        found = _decoded(body, _Vectors) if self._status < 300 else None
        if found is None:
            message = _message_of(_decoded(body, dict[str, Any]))
            message = message or body.decode(errors="replace")[:200] or f"status {self._status}"
            self._status = self._status if self._status >= 400 else 502  # others may have no body
            await self._send_part(_JSON, _encode(ollama_error(message)), True)
            return
        vectors = [one.embedding for one in sorted(found.data, key=lambda one: one.index)]
        answer: dict[str, Any] = {"embedding": vectors[0] if vectors else []}
        if self._request.kind == "embed":
            answer = {
                "model": self._request.name, "embeddings": vectors,
                "total_duration": round(1e9 * (time.monotonic() - self._begin)),
                "load_duration": round(1e9 * self.load_s()),
                "prompt_eval_count": (found.usage or _Usage()).prompt_tokens or 0,
            }  # fmt: skip
        await self._send_part(_JSON, _encode(answer), True)

    async def _send_part(self, content_type: bytes, data: bytes, is_end: bool) -> None:
        if not self._is_begun:
            self._is_begun = True
            kind = _JSON if self._status >= 300 else content_type
            headers = [*self._headers, (b"content-type", kind)]
            await self._send({"type": "http.response.start", "status": self._status, "headers": headers})
        await self._send({"type": "http.response.body", "body": data, "more_body": not is_end})


def _decoded(body: bytes, kind: type[_T]) -> _T | None:
    """Return a body as an object of this kind; None if it is none."""
    try:
        return msgspec.json.decode(body, type=kind)
    except _UNREADABLE:
        return None


def _listed(found: _Logprobs) -> list[Any]:
    """Return the log-probabilities of chats or completions, in the form of chats."""
    if found.content is not None:
        return found.content
    listed = []
    tops = found.top_logprobs or [None] * len(found.tokens or ())
    for token, logprob, top in zip(found.tokens or (), found.token_logprobs or (), tops, strict=False):
        others = [{"token": other, "logprob": value} for other, value in (top or {}).items()]
        listed.append({"token": token, "logprob": logprob, "top_logprobs": others})
    return listed


def _message_of(body: Any) -> str:
    """Return the message of an error of OpenAI's, Octavo's or another server's form; empty if there is none."""
    error = body.get("error", body) if isinstance(body, dict) else None
    message = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    return message if isinstance(message, str) else ""
