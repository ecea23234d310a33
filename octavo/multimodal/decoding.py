"""Decode strangers' files in a process that has bounds and may die (`decoder_process`). The process starts with the
first file, and again when it has died or hangs. A refusal passes on the decoder's own reason; any other failure is told
without details.
"""

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
_GRACE_S = 10.0  # added to the child's own time limit
# How long to wait until a child says `STARTED`. The first child of a kind waits for imports, about a second.
_START_S = 30.0
_TRIES = 2  # for a file whose process hung, or was killed because another thread found it hanging
_MAX_REASON = 300


class DecoderProcess:
    """Starts the decoder process and sends files to it. Threads may share it."""

    def __init__(self) -> None:
        self._start_s = _START_S
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def decode(self, kind: MediaKind, data: bytes, limits: Mapping[str, Any]) -> tuple[dict[str, Any], bytearray]:
        """Return a dictionary about the decoded medium, and its decoded bytes. `memory_bytes` of `limits` bounds the
        child's whole memory; `seconds` of `limits` bounds its time, if less than `DECODE_S`. Raises `RequestError`."""
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
            if process is self._process:  # otherwise another thread may have killed this child with its process
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
        """End the process. It finishes the file that it is decoding, unless it hangs."""
        with self._lock:
            self._end()

    def _connected(self, byte: bytes) -> tuple[socket.socket, subprocess.Popen[bytes] | None]:
        """Return our end of a socket, and the process that forks the child reading the other end. `byte` names the kind
        of medium."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            try:
                socket.send_fds(self._running(), [byte], [theirs.fileno()])
            except OSError:  # the process has died, or no longer reads
                self._end()
                socket.send_fds(self._running(), [byte], [theirs.fileno()])
            return ours, self._process

    def _end_hung(self, process: subprocess.Popen[bytes] | None) -> None:
        """Kill a hanging process and its children, unless another thread already has."""
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
            self._control.settimeout(self._start_s)  # for writing to a process that hangs and does not read
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-c", _SCRIPT, *sys.path],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # a process with threads must not fork
                    start_new_session=True,  # signals of the terminal must not reach the process
                )
        return self._control


def _exchanged(connection: socket.socket, data: bytes, limits: Mapping[str, Any]) -> tuple[bytes, bytearray]:
    """Send a file to a child and return its status and its answer. The status is empty if the child has died."""
    answer = bytearray()
    connection.settimeout(DECODE_S + _GRACE_S)
    with contextlib.suppress(OSError):  # the child may end before it has read everything
        with contextlib.suppress(BrokenPipeError):
            connection.sendall(json.dumps(limits).encode() + b"\n")
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as file:
            head = file.read(1 + LENGTH.size)
            length = LENGTH.unpack(head[1:])[0] if len(head) == 1 + LENGTH.size else 0
            if 0 < length <= limits["memory_bytes"]:  # a file that has taken over the child may send any length
                answer = bytearray(length)
                if file.readinto(answer) == length:
                    return head[:1], answer
    return b"", answer


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its children, which form a process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


_PROCESS = DecoderProcess()
atexit.register(_PROCESS.close)
decode = _PROCESS.decode
