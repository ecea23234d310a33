"""Files of strangers to the bytes that are in them, by a process that has bounds and may die (`decoder_process`). It is
started with the first file, and again when it is gone. What it refuses is told as it says; of all else that goes wrong,
only that it did.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from threading import Lock
from typing import Any

from octavo.media_kinds import MediaKind
from octavo.multimodal.decoder_process import DECODE_S, DECODERS, DONE, LENGTH, REFUSED

# Isolated from the environment and the working directory.
_SCRIPT = "import sys; sys.path[:] = sys.argv[1:]; from octavo.multimodal.decoder_process import main; main()"
_GRACE_S = 10.0  # beside what it grants itself
_MAX_REASON = 300


class DecoderProcess:
    """Threads may share it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def decode(self, kind: MediaKind, data: bytes, limits: Mapping[str, Any]) -> tuple[dict[str, Any], bytearray]:
        """What is known of the medium of a file, and its bytes, by the decoder of the kind. `memory_bytes` of `limits`
        bounds all that it takes, and `seconds` how long, if that is less than `DECODE_S`. Raises `RequestError`."""
        start, limit_s = time.monotonic(), limits.get("seconds", DECODE_S)
        status, answer = b"", bytearray()
        # It may end before it has read all, or anything.
        with self._connected(DECODERS[kind.name][0]) as connection, contextlib.suppress(OSError):
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
                        status = head[:1]
        if status == DONE:
            end = answer.index(b"\n")
            found = json.loads(answer[:end])
            del answer[: end + 1]
            return found, answer
        if status == REFUSED:
            raise kind.refusal(answer.decode(errors="replace")[-_MAX_REASON:])
        if time.monotonic() - start >= limit_s:
            raise kind.refusal(f"it cannot be decoded within {limit_s:g} s.")
        raise kind.refusal(f"it is not a readable {kind.file}.")

    def close(self) -> None:
        """End the process. A file that is being decoded is decoded to its end."""
        with self._lock:
            self._end()

    def _connected(self, byte: bytes) -> socket.socket:
        """This side of a socket whose other one a child reads that decodes what the byte stands for."""
        ours, theirs = socket.socketpair()
        ours.settimeout(DECODE_S + _GRACE_S)
        with theirs, self._lock:
            try:
                socket.send_fds(self._running(), [byte], [theirs.fileno()])
            except OSError:  # it is gone
                self._end()
                socket.send_fds(self._running(), [byte], [theirs.fileno()])
        return ours

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.wait()
        self._process = self._control = None

    def _running(self) -> socket.socket:
        if self._control is None:
            self._control, theirs = socket.socketpair()
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


_PROCESS = DecoderProcess()
atexit.register(_PROCESS.close)
decode = _PROCESS.decode
