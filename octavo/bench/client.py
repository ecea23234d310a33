"""Streaming requests of benchmarks: one HTTP connection each. The time is taken as soon as bytes arrive, before they
are parsed.

The client shares its machine with the server under test, so a chunk may cost only microseconds: this is an asyncio
protocol over llhttp (`httptools`) with typed JSON (`msgspec`). The caller decides when a request is sent.
"""

import asyncio
import http.client
import ssl
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from octavo.errors import ConfigError, OctavoError
from octavo.sse_reader import EventReader

TIMEOUT_S = 60  # of requests that are not measured


@dataclass(slots=True)
class RequestResult:
    """The outcome of one request. Times are seconds; `error` is None if the answer is complete."""

    start: float  # time.perf_counter, when it was sent
    ttft_s: float = 0.0  # sent to first token
    itls_s: list[float] = field(default_factory=list)  # between chunks with tokens
    latency_s: float = 0.0  # sent to last token
    text: str = ""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    error: str | None = None


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: msgspec.Raw | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None


class _Error(msgspec.Struct):
    message: str = "an error without a message"


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode
_encode = msgspec.json.Encoder().encode


class Target:
    """The target of requests: an HTTP or HTTPS address, and the headers of every request."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url} is no HTTP address, such as http://127.0.0.1:8000.")
        self.url = url
        self.host = parts.hostname
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self.headers = dict(headers)
        lines = {"Host": parts.netloc, "Accept": "text/event-stream", "Connection": "close", **headers}
        self._path = parts.path or "/"
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in lines.items())

    def message(self, body: Mapping[str, Any]) -> bytes:
        """Return the bytes of a POST request."""
        data = _encode(body)
        length = f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        return f"POST {self._path} HTTP/1.1\r\n{self._headers}{length}\r\n".encode() + data

    def get_json(self, path: str) -> Any:
        """Return the JSON body of a GET. Blocks. Raises `OctavoError` for a wrong key, and `OSError` for every other
        failure."""
        kind = http.client.HTTPConnection if self.ssl is None else http.client.HTTPSConnection
        with closing(kind(self.host, self.port, timeout=TIMEOUT_S)) as connection:
            try:
                connection.request("GET", path, headers=self.headers)
                response = connection.getresponse()
                body = response.read()
                if response.status == 401:
                    raise OctavoError(f"{self.url} needs an API key, or a different one: --api-key, or OCTAVO_API_KEY.")
                if response.status != 200:
                    raise OSError(f"{path} answered {response.status}: {_error_message(body)}")
                return msgspec.json.decode(body)
            except (http.client.HTTPException, msgspec.DecodeError) as error:
                raise OSError(f"{path} gave no JSON: {error}") from None


async def stream(target: Target, body: Mapping[str, Any]) -> RequestResult:
    """Send one streaming request and read its answer to the end. Failures are the answer's `error`."""
    message = target.message(body)
    answer = RequestResult(time.perf_counter())
    loop = asyncio.get_running_loop()
    transport = None
    try:
        transport, reader = await loop.create_connection(
            lambda: _EventReader(answer, message, loop), target.host, target.port, ssl=target.ssl
        )
        await reader.ended
    except OSError as error:
        answer.error = f"no server answers at {target.url} ({error.strerror or error})."
    finally:
        if transport is not None:
            transport.close()
    if not answer.num_output_tokens:  # the server sent no usage: count each chunk as a token
        answer.num_output_tokens = len(answer.itls_s) + bool(answer.ttft_s)
    return answer


class _EventReader(asyncio.Protocol):
    """Sends one request as soon as it is connected, and notes when each token of the answer arrives."""

    def __init__(self, answer: RequestResult, message: bytes, loop: asyncio.AbstractEventLoop) -> None:
        self.ended: asyncio.Future[None] = loop.create_future()
        self._answer = answer
        self._message = message
        self._parser = httptools.HttpResponseParser(self)
        self._events = EventReader()
        self._error = b""  # the body of an error response
        self._texts: list[str] = []
        self._now = 0.0
        self._last = 0.0
        self._is_done = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.WriteTransport, transport).write(self._message)

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"the answer is not HTTP: {error}")

    def on_body(self, body: bytes) -> None:
        if self._parser.get_status_code() != 200:
            self._error += body
            return
        for event in self._events.feed(body):
            self._on_event(event)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status != 200:
            self._end(f"HTTP {status}: {_error_message(self._error)}")
        elif not self._is_done:
            self._end("the stream ended without [DONE]")
        else:
            self._end(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(None if self._is_done else f"the connection was lost: {error or 'closed by the server'}")

    def _on_event(self, data: bytes) -> None:
        if data.strip() == b"[DONE]":
            self._is_done = True
            return
        try:
            chunk = _decode_chunk(data)
        except msgspec.DecodeError as error:
            self._end(f"a chunk does not have OpenAI's form: {error}")
            return
        answer = self._answer
        if chunk.error is not None:
            self._end(chunk.error.message)
        if chunk.usage is not None:
            answer.num_prompt_tokens = chunk.usage.prompt_tokens
            answer.num_output_tokens = chunk.usage.completion_tokens or 0
        if not chunk.choices:
            return
        choice = chunk.choices[0]
        text = choice.text
        if choice.delta is not None:
            delta = choice.delta
            text = delta.content or delta.reasoning_content
            if delta.role is not None and not text and delta.tool_calls is None:
                return  # the first chunk has a role and no token
        if text:
            self._texts.append(text)
        if answer.ttft_s:
            answer.itls_s.append(self._now - self._last)
        else:
            answer.ttft_s = self._now - answer.start
        self._last = self._now

    def _end(self, error: str | None) -> None:
        if self.ended.done():
            return
        answer = self._answer
        answer.error = error
        answer.text = "".join(self._texts)
        answer.latency_s = self._last - answer.start if self._last else 0.0
        if error is None and not answer.ttft_s:
            answer.error = "the answer holds no token"
        self.ended.set_result(None)


def _error_message(body: bytes) -> str:
    try:
        error = _decode_chunk(body).error
    except msgspec.DecodeError:
        error = None
    return error.message if error is not None else body.decode(errors="replace")[:200].strip()
