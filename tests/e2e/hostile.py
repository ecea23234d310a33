"""A corpus of hostile requests, always the same ones: what strangers, fuzzers and broken clients send.

Each is the bytes of one HTTP request, so that the wire itself can be abused, and most are one field of an otherwise
good body with a value that does not belong there. Some are refused and some turn out to be fine; none may hurt.
"""

from __future__ import annotations

import itertools
import json
import random
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

CHAT = [{"role": "user", "content": "Hi"}]
# A good body of every route that takes one; answers are short.
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 2},
    "/generate": {"prompt": "Hi", "max_tokens": 2},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [504, 3575]},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
    "/v1/responses/input_tokens": {"input": "Hi"},
    "/v1/messages": {"messages": CHAT, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": CHAT},
    "/v1/batches": {"input_file_id": "file-1", "endpoint": "/v1/responses", "completion_window": "24h"},
}
FIELDS = (
    "prompt", "messages", "tokens", "model", "max_tokens", "max_completion_tokens", "min_tokens", "temperature",
    "top_p", "top_k", "min_p", "n", "best_of", "seed", "stop", "stop_token_ids", "bad_words", "logit_bias",
    "logprobs", "top_logprobs", "prompt_logprobs", "allowed_token_ids", "echo", "suffix", "stream", "stream_options",
    "truncate_prompt_tokens", "priority", "request_id", "cache_salt", "user", "metadata", "chat_template_kwargs",
    "tools", "tool_choice", "response_format", "structured_outputs", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "use_beam_search", "length_penalty", "early_stopping", "return_token_ids", "ignore_eos",
    "skip_special_tokens", "add_special_tokens", "timeout", "return_token_strs", "add_generation_prompt",
    "continue_final_message", "parallel_tool_calls", "include_reasoning", "reasoning_effort", "verbosity", "store",
    "input", "instructions", "previous_response_id", "background", "text", "reasoning", "include", "truncation",
    "max_output_tokens", "system", "thinking", "stop_sequences", "context_management", "output_config",
    "input_file_id", "endpoint",
)  # fmt: skip
VALUES: list[Any] = [
    None, True, -1, 0, 2**31, 2**63, -(2**63) - 1, 2**64, 10**400, 1e308, -1e-320, float("nan"), float("inf"),
    -float("inf"), "", "5", "\ud800", "\x00", "🦜" * 50, "../../etc/passwd", "'; DROP TABLE", [], [[]], [None], [""],
    [-1], [2**70], [[2**70]], ["\udfff"], [[["deep"]]], {}, {"": {}}, {"a": []}, {"9" * 30: 1}, {"-1": 1}, {"0": 1e308},
    {"\ud800": "\ud800"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}},
    {"regex": "(((((a+)+)+)+)+)+$"}, {"include_usage": 1}, [{"role": "user"}], [{"role": "user", "content": "\ud800"}],
    [{"role": "user", "content": [{"type": []}]}], [{"role": [], "content": {}}], [{"role": "tool", "content": "x"}],
    [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "\udfff"}]}],
    [{"type": "function_call", "call_id": "a", "name": "\x00", "arguments": "{"}],
    [{"type": "function_call_output", "call_id": "a", "output": [[]]}], [{"type": "reasoning", "summary": 1}],
    [{"type": "reasoning", "encrypted_content": "!"}], [{"type": "item_reference", "id": "a_b_c"}],
    {"format": {"type": "json_schema", "schema": {"$ref": "#"}}}, {"edits": [{"type": []}]}, {"type": "enabled"},
    [{"type": "function"}], [{"type": "function", "function": {"name": "f", "parameters": {"type": "no such"}}}],
]  # fmt: skip
BODIES: dict[str, bytes] = {
    "nothing": b"",
    "a brace": b"{",
    "a list": b"[]",
    "null": b"null",
    "a string": b'"prompt"',
    "a number": b"1e999",
    "an empty object": b"{}",
    "cut short": b'{"prompt": "Hi", "max_tok',
    "rubbish after it": b'{"prompt": "Hi"} }',
    "invalid UTF-8": b'{"prompt": "\xff\xfe\xc0\x80"}',
    "UTF-16": '{"prompt": "Hi"}'.encode("utf-16"),
    "a byte order mark": b'\xef\xbb\xbf{"prompt": "Hi", "tokens": [1], "messages": []}',
    "control characters": b'{"prompt": "\x00\x01\x1f"}',
    "NaN": b'{"prompt": "Hi", "messages": [], "tokens": [NaN], "temperature": NaN}',
    "Infinity": b'{"prompt": "Hi", "messages": [], "tokens": [Infinity], "top_p": -Infinity}',
    "a number of 5000 digits": b'{"prompt": ' + b"9" * 5000 + b"}",
    "deep lists": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"metadata":' * 20_000 + b"1" + b"}" * 20_000,
    "deep but legal": b'{"prompt": "Hi", "metadata": ' + b'{"a":' * 500 + b"1" + b"}" * 500 + b"}",
    "keys twice": b'{"prompt": "a", "prompt": {"x": 1}, "prompt": "Hi", "max_tokens": 2, "max_tokens": -1}',
    "unknown fields": json.dumps({f"field{i}": i for i in range(1000)}).encode(),
    "a key of a megabyte": b'{"' + b"k" * 1_000_000 + b'": 1}',
}
CONTENT_TYPES = (
    None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/json5",
    "application/json; charset=utf-16",
)  # fmt: skip
_MB = 1_000_000


@dataclass(frozen=True)
class Case:
    """One request. `is_whole` is false if the server cannot know where it ends: it may hang up instead of answering."""

    name: str
    data: bytes
    is_whole: bool = True


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes


def corpus() -> list[Case]:
    """All of them; more than 500."""
    return [*_fields(), *_bodies(), *_huge(), *_wire(), *_uploads()]


def _fields() -> Iterator[Case]:
    chosen = random.Random(500).sample(list(itertools.product(GOOD, FIELDS, VALUES)), 480)
    for route, field, value in chosen:
        body = json.dumps({**GOOD[route], field: value}).encode()
        yield Case(f"{route} {field}={value!r:.60}", request(route, body))


def _bodies() -> Iterator[Case]:
    for route, (name, body) in itertools.product(GOOD, BODIES.items()):
        yield Case(f"{route} {name}", request(route, body))
    for route, kind in itertools.product(GOOD, CONTENT_TYPES):
        yield Case(f"{route} as {kind}", request(route, json.dumps(GOOD[route]).encode(), kind))


def _huge() -> Iterator[Case]:
    """Ten megabytes of whatever fits the field."""
    words = "word " * (2 * _MB)
    for route, fields in {
        "/v1/completions": [
            {"prompt": words}, {"prompt": "x" * 10 * _MB}, {"prompt": [7] * (3 * _MB)}, {"prompt": ["x"] * _MB},
            {"stop": ["s" * 10 * _MB]}, {"stop": ["s"] * _MB}, {"bad_words": ["b"] * 100_000},
            {"logit_bias": {str(i): 1 for i in range(500_000)}}, {"stop_token_ids": [1] * _MB},
        ],
        "/v1/chat/completions": [
            {"messages": [{"role": "user", "content": words}]}, {"messages": CHAT * 100_000},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 100_000}]},
        ],
        "/v1/responses": [
            {"input": words}, {"input": CHAT * 100_000}, {"input": [{"type": "function_call_output", "call_id": "a",
             "output": words}]}, {"metadata": {"k": words}}, {"instructions": words, "truncation": "auto"},
        ],
        "/v1/messages": [
            {"messages": [{"role": "user", "content": words}]}, {"messages": CHAT * 100_000}, {"system": words},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 100_000}]},
        ],
        "/generate": [{"prompt": words}],
        "/tokenize": [{"prompt": words}],
        "/detokenize": [{"tokens": [7] * (3 * _MB)}],
    }.items():  # fmt: skip
        for field in fields:  # type: ignore[attr-defined]
            yield Case(f"{route} ten megabytes of {next(iter(field))}", request(route, _dump({**GOOD[route], **field})))


def _wire() -> Iterator[Case]:
    """Requests that are broken below JSON."""
    good = _dump(GOOD["/v1/completions"])
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n"
    size = b"%x\r\n" % len(good)
    yield Case("chunked, one byte each", chunked + b"".join(b"1\r\n%c\r\n" % byte for byte in good) + b"0\r\n\r\n")
    yield Case("chunked, with extensions", chunked + size[:-2] + b";a=b\r\n" + good + b"\r\n0\r\nTrailer: x\r\n\r\n")
    for name, rest in {
        "no size": b"zz\r\n" + good,
        "a negative size": b"-5\r\n" + good,
        "a size beyond all bounds": b"ffffffffffffffffff\r\n" + good,
        "a size too small": b"3\r\n" + good + b"\r\n0\r\n\r\n",
        "nothing after the size": size,
        "no end": size + good + b"\r\n",
    }.items():
        yield Case(f"chunked, {name}", chunked + rest, is_whole=False)
    for name, headers in {
        "a negative length": b"Content-Length: -1\r\n",
        "a length that is no number": b"Content-Length: ten\r\n",
        "a length of 10**30": b"Content-Length: 1" + b"0" * 30 + b"\r\n",
        "two lengths": b"Content-Length: 5\r\nContent-Length: 6\r\n",
        "a length and chunks": b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        "a length too long": b"Content-Length: 5000\r\n",
        "a length too short": b"Content-Length: 5\r\n",
        "an unknown coding": b"Transfer-Encoding: gzip\r\n",
        "a header without a name": b": x\r\nContent-Length: 0\r\n",
        "a header with a null byte": b"X: a\x00b\r\nContent-Length: 0\r\n",
        "a header of 200 kB": b"X: " + b"x" * 200_000 + b"\r\nContent-Length: 0\r\n",
        "20000 headers": b"".join(b"X-%d: y\r\n" % i for i in range(20_000)) + b"Content-Length: 0\r\n",
        "an id that is no id": b"X-Request-Id: a b\xff\r\nContent-Length: %d\r\n" % len(good),
    }.items():
        yield Case(name, head + headers + b"\r\n" + good, is_whole=False)
    for line in (
        b"NONSENSE",
        b"POST",
        b"POST /v1/completions HTTP/9.9",
        b"\x16\x03\x01\x02\x00",
        b"GET  HTTP/1.1",
        b"",
    ):
        yield Case(f"the first line {line!r}", line + b"\r\nHost: x\r\n\r\n", is_whole=False)
    for method, path in (
        ("DELETE", "/v1/completions"), ("PATCH", "/generate"), ("GET", "/tokenize"), ("PUT", "/v1/models"),
        ("POST", "/v1/models"), ("POST", "/v1/../v1/completions"), ("POST", "/%2e%2e/%00"), ("POST", "/generate/"),
        ("DELETE", "/v1/responses"), ("GET", "/v1/responses/%00"), ("DELETE", "/v1/responses/" + "r" * 5000),
        ("GET", "/v1/responses/x?stream=true&starting_after=99999999999999999999"), ("POST", "/v1/responses/x/cancel"),
        ("GET", "/v1/responses/%F0/input_items?limit=-1"), ("GET", "/v1/files?limit=1e9"), ("PUT", "/v1/files/x"),
        ("GET", "/v1/files/'%3B--/content"), ("GET", "/v1/batches?order[]=x"), ("POST", "/v1/batches/x/cancel"),
        ("GET", "/v1/chat/completions?metadata[=x&metadata[a]=b"), ("POST", "/v1/chat/completions/x"),
        ("POST", "//generate"), ("GET", "/v1/models/%FF%FE"), ("GET", "/v1/models/" + "m" * 5000),
    ):  # fmt: skip
        yield Case(f"{method} {path:.40}", request(path, good, method=method))


def _uploads() -> Iterator[Case]:
    """Files as broken clients send them."""
    part = 'Content-Disposition: form-data; name="{}"\r\n\r\n{}\r\n'
    purpose = "--x\r\n" + part.format("purpose", "batch")
    for name, body in {
        "nothing": "",
        "no end": purpose + "--x\r\n" + part.format("file", "{}"),
        "no file": purpose + "--x--\r\n",
        "a file that is a field": purpose + "--x\r\n" + part.format("file", "{}") + "--x--\r\n",
        "many fields": ("--x\r\n" + part.format("a", "b")) * 2000 + "--x--\r\n",
        "a header of a megabyte": "--x\r\nContent-Disposition: form-data; name=" + "n" * _MB + "\r\n\r\n",
        "rubbish": "\x00\r\n--x" * 50,
        "a field of two megabytes": "--x\r\n" + part.format("purpose", "p" * 2 * _MB) + "--x--\r\n",
    }.items():
        yield Case(f"an upload, {name}", request("/v1/files", body.encode(), "multipart/form-data; boundary=x"))


def request(route: str, body: bytes, content_type: str | None = "application/json", method: str = "POST") -> bytes:
    """The bytes of a well-formed request, after which the server is to hang up."""
    kind = f"Content-Type: {content_type}\r\n" if content_type else ""
    head = f"{method} {route} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{kind}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def send(address: tuple[str, int], case: Case, timeout_s: float) -> Answer | None:
    """The server's answer, or None if it hung up without one. Raises `TimeoutError` if it does neither in time."""
    data = bytearray()
    with socket.create_connection(address, timeout_s) as sock:
        try:
            sock.sendall(case.data)
            if not case.is_whole:
                sock.shutdown(socket.SHUT_WR)
            while received := sock.recv(1 << 16):
                data += received
        except (ConnectionResetError, BrokenPipeError):
            pass  # it answered, or not, before it had read everything
    head, _, body = bytes(data).partition(b"\r\n\r\n")
    if not head:
        return None
    if b"transfer-encoding: chunked" in head.lower():
        body = _unchunk(body)
    return Answer(int(head.split(b" ", 2)[1]), body)


def _unchunk(data: bytes) -> bytes:
    body = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        body += data[: int(size, 16)]
        data = data[int(size, 16) + 2 :]
    return body


def _dump(body: Any) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()
