"""Parses large JSON bodies in a separate process. A parser holds the interpreter's lock while it parses a body, which
may take seconds and would stop the event loop.

The process first counts a body's values (`request_limits`), then parses it and sends the value in pieces. The server
adds each piece in a moment, and its event loop runs between pieces.
"""

import contextlib
import dataclasses
import gc
import json
import marshal
import os
import selectors
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, BinaryIO

import msgspec

from octavo.entrypoints.http.request_limits import RequestLimits
from octavo.errors import RequestError
from octavo.processes import child_command

MIN_BYTES = 1 << 20  # smaller bodies parse in a few milliseconds
MIN_NODES = 10_000  # bodies with fewer values parse in a few milliseconds
TIME_LIMIT_S = 60.0  # for one body; the longest take 2 s
_PIECE_NODES = 2000
_LENGTH = struct.Struct("<Q")
_decode_strict = msgspec.json.Decoder().decode
_CHUNK_BYTES = 1 << 20

# Kinds of pieces. A complete value is added to the innermost open list or object, or is the whole body.
_VALUE, _LIST, _OBJECT, _ITEMS, _KEY, _END, _ERROR = range(7)


def is_large(body: bytes) -> bool:
    """Return whether the process should parse this body."""
    if len(body) > MIN_BYTES:
        return True
    return body.count(b",") + body.count(b"[") + body.count(b"{") > MIN_NODES


def parse_json(body: bytes, limits: RequestLimits) -> Any:
    """Parse a body in the calling process. Raises `RequestError` for invalid JSON, and for a body beyond the limits."""
    limits.refuse_json(body)
    # msgspec takes a sixth of the time. It refuses more, such as NaN, 1e400 and lone surrogates.
    with contextlib.suppress(ValueError, RecursionError):
        return _decode_strict(body)
    try:
        return json.loads(body)
    except json.JSONDecodeError as error:
        raise RequestError(
            f"The body is not valid JSON: {error.msg} at character {error.pos}.", code="invalid_body"
        ) from None
    except UnicodeDecodeError:
        raise RequestError("The body is not valid UTF-8.", code="invalid_body") from None
    except RecursionError:
        raise RequestError("The body is nested too deeply.", code="invalid_body") from None
    except ValueError:
        raise RequestError("The body is not valid JSON: a number has too many digits.", code="invalid_body") from None


class JsonWorker:
    """The separate process. It starts with the first body, ends with its parent, and is replaced after a body that took
    too long or too much memory. Any thread may call it; calls wait for each other."""

    def __init__(self, limits: RequestLimits, time_limit_s: float = TIME_LIMIT_S) -> None:
        self._limits = {field.name: getattr(limits, field.name) for field in dataclasses.fields(RequestLimits)}
        self._time_limit_s = time_limit_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def parse(self, body: bytes) -> Any:
        """Parse a body in the process. Returns and raises like `parse_json`."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._end()
                command = child_command("octavo.entrypoints.http.json_worker", json.dumps(self._limits))
                self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
            try:
                return self._ask(self._process, body)
            except OSError:
                self._end()
                raise RequestError("The body takes too long to read, or too much memory.", status=503) from None
            except BaseException as error:
                if not isinstance(error, RequestError):
                    self._end()
                raise

    def close(self) -> None:
        """End the process, if it runs."""
        with self._lock:
            self._end()

    def _ask(self, process: subprocess.Popen[bytes], body: bytes) -> Any:
        """Send a body and put the pieces of its value together. Raises `OSError` if no answer comes in time."""
        assert process.stdin is not None and process.stdout is not None
        deadline = time.monotonic() + self._time_limit_s
        for part in (_LENGTH.pack(len(body)), body):
            self._write(process.stdin.fileno(), part, deadline)
        value: Any = None
        inner: list[Any] = []  # open lists and objects, the innermost last
        keys: list[str] = []
        while True:
            kind, data = self._read_piece(process, deadline)
            if kind == _ERROR:
                message, param, code = marshal.loads(data)
                raise RequestError(message, param=param, code=code)
            if kind == _KEY:
                keys.append(marshal.loads(data))
                continue
            if kind == _ITEMS:
                items = marshal.loads(data)
                inner[-1].update(items) if isinstance(items, dict) else inner[-1].extend(items)
                continue
            if kind in (_LIST, _OBJECT):
                inner.append([] if kind == _LIST else {})
                continue
            value = inner.pop() if kind == _END else marshal.loads(data)
            if not inner:
                return value
            if isinstance(inner[-1], dict):
                inner[-1][keys.pop()] = value
            else:
                inner[-1].append(value)

    def _read_piece(self, process: subprocess.Popen[bytes], deadline: float) -> tuple[int, bytes]:
        (length,) = _LENGTH.unpack(self._read(process, _LENGTH.size, deadline))
        piece = self._read(process, length, deadline)
        return piece[0], piece[1:]

    @staticmethod
    def _write(stream: int, data: bytes, deadline: float) -> None:
        os.set_blocking(stream, False)
        left = memoryview(data)
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_WRITE)
            while left:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
                left = left[os.write(stream, left[:_CHUNK_BYTES]) :]

    @staticmethod
    def _read(process: subprocess.Popen[bytes], num_bytes: int, deadline: float) -> bytes:
        assert process.stdout is not None
        parts = []
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while num_bytes:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
                if not (part := os.read(process.stdout.fileno(), min(num_bytes, _CHUNK_BYTES))):
                    raise BrokenPipeError
                parts.append(part)
                num_bytes -= len(part)
        return b"".join(parts)

    def _end(self) -> None:
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.kill()
        with contextlib.suppress(OSError):
            self._process.communicate()
        self._process = None


def pieces(value: Any) -> Iterator[tuple[int, bytes]]:
    """Yield a value in pieces of about `_PIECE_NODES` values each. A text is one piece, however long."""
    sizes: dict[int, int] = {}  # by id: sizes of lists and objects that need several pieces
    _size(value, sizes)
    yield from _split(value, sizes)


def _size(value: Any, sizes: dict[int, int]) -> int:
    """Return the number of values in a value, and note large ones in `sizes`."""
    if not isinstance(value, list | dict):
        return 1
    size = 1 + sum(_size(one, sizes) for one in (value if isinstance(value, list) else value.values()))
    if size > _PIECE_NODES:
        sizes[id(value)] = size
    return size


def _split(value: Any, sizes: dict[int, int]) -> Iterator[tuple[int, bytes]]:
    if id(value) not in sizes:
        yield _VALUE, marshal.dumps(value)
        return
    yield (_LIST if isinstance(value, list) else _OBJECT), b""
    items: Any = [] if isinstance(value, list) else {}  # small values for the next piece
    num_nodes = 0
    for key, one in enumerate(value) if isinstance(value, list) else value.items():
        is_large = id(one) in sizes
        if items and (is_large or num_nodes >= _PIECE_NODES):
            yield _ITEMS, marshal.dumps(items)
            items, num_nodes = type(items)(), 0
        if is_large:
            if isinstance(value, dict):
                yield _KEY, marshal.dumps(key)
            yield from _split(one, sizes)
            continue
        if isinstance(items, list):
            items.append(one)
        else:
            items[key] = one
        num_nodes += _size(one, {})
    if items:
        yield _ITEMS, marshal.dumps(items)
    yield _END, b""


def _read_whole(file: BinaryIO, num_bytes: int) -> bytes:
    data = file.read(num_bytes)
    if len(data) < num_bytes:
        sys.exit()  # the parent has ended
    return data


def main() -> None:
    """Parse bodies from standard input, one after the other, and write their pieces to standard output."""
    gc.disable()  # JSON has no cycles
    limits = RequestLimits(**json.loads(sys.argv[1]))
    given, answers = sys.stdin.buffer, sys.stdout.buffer
    while True:
        (length,) = _LENGTH.unpack(_read_whole(given, _LENGTH.size))
        try:
            value = parse_json(_read_whole(given, length), limits)
            for kind, data in pieces(value):
                answers.write(_LENGTH.pack(1 + len(data)) + bytes([kind]) + data)
        except RequestError as error:
            data = marshal.dumps((str(error), error.param, error.code))
            answers.write(_LENGTH.pack(1 + len(data)) + bytes([_ERROR]) + data)
        value = None
        answers.flush()


if __name__ == "__main__":
    main()
