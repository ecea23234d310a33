"""Reads the lines of a batch, and writes the lines of its answers (https://platform.openai.com/docs/guides/batch).

The id of an answer contains the number and the checksum of its line, so that an interrupted batch can find which lines
have been answered, and whether the lines are unchanged.
"""

import hashlib
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from octavo.engine.off_loop import run_off_loop
from octavo.entrypoints.http.json_worker import is_large as is_large_json
from octavo.entrypoints.http.piecewise_json import encode_in_pieces, is_large
from octavo.entrypoints.http.streaming import encode_json
from octavo.errors import RequestError

# URLs that a line may have. The application decides which of them exist.
URLS = frozenset(
    (
        "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v2/embed",
        "/v1/audio/transcriptions",
        "/v1/audio/translations", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank",
    )
)  # fmt: skip
_ID = re.compile(rb'\{"id":"batch_req_(\d{8,12})_([0-9a-f]{8})"')
_decode = msgspec.json.Decoder().decode


class _Named(msgspec.Struct):
    custom_id: Any = None


_decode_id = msgspec.json.Decoder(_Named).decode


class LineError(ValueError):
    """A line is invalid, or another error of OpenAI's `code`. It has the line's `custom_id` if that is known."""

    def __init__(self, message: str, custom_id: str | None = None, code: str = "invalid_line") -> None:
        super().__init__(message)
        self.custom_id, self.code = custom_id, code


@dataclass(frozen=True, slots=True)
class Line:
    """A request of a batch."""

    custom_id: str
    url: str
    body: bytes


def checksum(line: bytes) -> int:
    """Return the checksum of a line's text."""
    return zlib.crc32(line.strip())


def read_line(line: bytes, endpoint: str | None = None, decode: Callable[[bytes], Any] = _decode) -> Line:
    """Return the request in a line, which must be for `endpoint` if one is given. `decode` parses the JSON. Raises
    `LineError`."""
    try:
        value = decode(line)
    except RequestError as error:
        raise LineError(str(error)) from None
    except (ValueError, RecursionError) as error:
        raise LineError(f"The line is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise LineError("The line should be a JSON object.")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str):
        raise LineError("custom_id should be a string.")
    if value.get("method") != "POST":
        raise LineError("method should be POST.", custom_id)
    url, body = value.get("url"), value.get("body")
    if not isinstance(url, str) or url not in URLS:
        raise LineError(f"url should be one of {', '.join(sorted(URLS))}, got {url!r:.100}.", custom_id)
    if endpoint is not None and url != endpoint:
        raise LineError(f"url should be the batch's endpoint, {endpoint}, got {url}.", custom_id)
    if not isinstance(body, dict):
        raise LineError("body should be a JSON object.", custom_id)
    if body.get("stream") or body.get("background"):
        raise LineError("A request of a batch has neither stream nor background.", custom_id)
    return Line(custom_id, url, encode_in_pieces(body) if is_large(body) else encode_json(body))


class CustomIds:
    """Finds the `custom_id`s that a batch has twice, in a few bytes for each."""

    def __init__(self) -> None:
        self._seen = set[bytes]()

    def repeated(self, custom_id: str | None) -> str | None:
        """Return what is wrong with the next line's id if an earlier line has it; otherwise None."""
        if custom_id is None:  # the answer to the line says so
            return None
        digest = hashlib.blake2b(encode_json(custom_id), digest_size=16).digest()
        if digest in self._seen:
            return f"custom_id {custom_id!r:.100} is in an earlier line too; each must be unique in a batch."
        self._seen.add(digest)
        return None


async def custom_id_of(line: bytes, decode: Callable[[bytes], Any]) -> str | None:
    """Return the `custom_id` of a line, or None if it has none. `decode` parses large lines, in another process."""
    try:
        if not is_large_json(line):
            return read_custom_id(line)
        found = await run_off_loop(lambda: decode(line), length=len(line), is_json=True)
    except (RecursionError, RequestError, ValueError):  # it is no request
        return None
    custom_id = found.get("custom_id") if isinstance(found, dict) else None
    return custom_id if isinstance(custom_id, str) else None


def read_custom_id(line: bytes) -> str | None:
    """Return the `custom_id` of a line, or None if it has none."""
    try:
        custom_id = _decode_id(line).custom_id
    except (RecursionError, ValueError):  # it is no request
        return None
    return custom_id if isinstance(custom_id, str) else None


def answer_line(number: int, sum: int, custom_id: str, status: int, body: bytes) -> bytes:
    """Return the output line of an answer of any status. `body` is JSON."""
    if b"\n" in body:
        body = encode_json(_decode(body))
    return b'%b,"custom_id":%b,"response":{"status_code":%d,"request_id":"%b","body":%b},"error":null}\n' % (
        _head(number, sum), encode_json(custom_id), status, _id(number, sum), body
    )  # fmt: skip


def error_line(number: int, sum: int, error: LineError) -> bytes:
    """Return the output line of a line that is not answered."""
    said = encode_json({"code": error.code, "message": f"Request {number + 1}: {error}"})
    custom_id = encode_json(error.custom_id)
    return b'%b,"custom_id":%b,"response":null,"error":%b}\n' % (_head(number, sum), custom_id, said)


def read_answered(line: bytes) -> tuple[int, int] | None:
    """Return the number and checksum of the line that an output line answers; None if Octavo did not write it."""
    found = _ID.match(line)
    return None if found is None else (int(found[1]), int(found[2], 16))


def is_success(line: bytes) -> bool:
    """Return whether an output line has an answer with a status of success."""
    return b'"response":{"status_code":2' in line  # not within a text, where quotes have backslashes


def failure(line: bytes) -> str:
    """Return which request an output line without success is about, and the reason."""
    found = _decode(line)
    body = (found["response"] or {"body": found})["body"]
    error = body.get("error") if isinstance(body, dict) else None
    reason = error["message"] if isinstance(error, dict) and "message" in error else body
    return f"custom_id {found['custom_id']!r:.100}: {reason!s:.1000}"


def _head(number: int, sum: int) -> bytes:
    return b'{"id":"%b"' % _id(number, sum)


def _id(number: int, sum: int) -> bytes:
    return b"batch_req_%08d_%08x" % (number, sum)
