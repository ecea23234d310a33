"""Files of strangers to the bytes that are in them, by a process that has bounds and may die (`decoder_process`). It is
started with the first file, and again when it is gone or hangs. What it refuses is told as it says; of all else that
goes wrong, only that it did.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from threading import Lock
from typing import Any

from octavo.errors import RequestError
from octavo.media_kinds import MediaKind
from octavo.multimodal.decoder_process import DECODE_S, DECODERS, DONE, LENGTH, REFUSED, STARTED

# Isolated from the environment and the working directory.
_SCRIPT = "import sys; sys.path[:] = sys.argv[1:]; from octavo.multimodal.decoder_process import main; main()"
_GRACE_S = 10.0  # beside what it grants itself
# Until a child says that it has been forked. The first of a kind waits for imports, of a second or so.
_START_S = 30.0
_TRIES = 2  # of a file whose process hung, or was ended as others found that it hangs
_MAX_REASON = 300


class DecoderProcess:
    """Threads may share it."""

    def __init__(self) -> None:
        self._start_s = _START_S
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def decode(self, kind: MediaKind, data: bytes, limits: Mapping[str, Any]) -> tuple[dict[str, Any], bytearray]:
        """What is known of the medium of a file, and its bytes, by the decoder of the kind. `memory_bytes` of `limits`
        bounds all that it takes, and `seconds` how long, if that is less than `DECODE_S`. Raises `RequestError`."""
        for _ in range(_TRIES):
            connection, process = self._connected(DECODERS[kind.name][0])
            with connection:
                try:
                    connection.settimeout(self._start_s)
                    has_started = connection.recv(1) == STARTED
                except TimeoutError:
                    self._end_hung(process)
                    continue
                except OSError:
                    has_started = False
                begin = time.monotonic()
                status, answer = _exchanged(connection, data, limits) if has_started else (b"", bytearray())
            if status == DONE:
                end = answer.index(b"\n")
                found = json.loads(answer[:end])
                del answer[: end + 1]
                return found, answer
            if status == REFUSED:
                raise kind.refusal(answer.decode(errors="replace")[-_MAX_REASON:])
            if process is self._process:  # else it may have been ended with the child in it
                limit_s = limits.get("seconds", DECODE_S)
                if time.monotonic() - begin >= limit_s:
                    raise kind.refusal(f"it cannot be decoded within {limit_s:g} s.")
                raise kind.refusal(f"it is not a readable {kind.file}.")
        raise RequestError(
            f"This {kind.noun} cannot be decoded now: a process that does it started {_TRIES} times and hung.",
            param=kind.part,
            status=503,
            code="decoder_hangs",
        )

    def close(self) -> None:
        """End the process. A file that is being decoded is decoded to its end, unless the process hangs."""
        with self._lock:
            self._end()

    def _connected(self, byte: bytes) -> tuple[socket.socket, subprocess.Popen[bytes] | None]:
        """This side of a socket whose other one a child reads that decodes what the byte stands for, and the process
        that is to fork the child."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            try:
                socket.send_fds(self._running(), [byte], [theirs.fileno()])
            except OSError:  # it is gone, or has long read nothing
                self._end()
                socket.send_fds(self._running(), [byte], [theirs.fileno()])
            return ours, self._process

    def _end_hung(self, process: subprocess.Popen[bytes] | None) -> None:
        """End a process that does not fork, and what it has forked, where another thread has not done so."""
        with self._lock:
            if process is not None and process is self._process:
                _kill(process)
                self._end()

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            try:
                self._process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                _kill(self._process)
                self._process.wait()
        self._process = self._control = None

    def _running(self) -> socket.socket:
        if self._control is None:
            self._control, theirs = socket.socketpair()
            self._control.settimeout(self._start_s)  # to write: what a process that hangs does not read
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-c", _SCRIPT, *sys.path],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # a process with threads is not to be forked
                    start_new_session=True,  # a terminal's signals are for whoever decides when it ends
                )
        return self._control


def _exchanged(connection: socket.socket, data: bytes, limits: Mapping[str, Any]) -> tuple[bytes, bytearray]:
    """What a child says of a file: how it went, which is nothing if the child has died, and its answer."""
    answer = bytearray()
    connection.settimeout(DECODE_S + _GRACE_S)
    with contextlib.suppress(OSError):  # it may end before it has read all, or anything
        with contextlib.suppress(BrokenPipeError):
            connection.sendall(json.dumps(limits).encode() + b"\n")
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as file:
            head = file.read(1 + LENGTH.size)
            length = LENGTH.unpack(head[1:])[0] if len(head) == 1 + LENGTH.size else 0
            if 0 < length <= limits["memory_bytes"]:  # what has taken the child over may say anything
                answer = bytearray(length)
                if file.readinto(answer) == length:
                    return head[:1], answer
    return b"", answer


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process with its children, which are in a group of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


_PROCESS = DecoderProcess()
atexit.register(_PROCESS.close)
decode = _PROCESS.decode
