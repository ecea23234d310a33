"""The process that decodes what strangers send: for each file it forks a child, which has bounds on its memory and its
time, and may die of the file.

`decoding` starts it, and sends it one end of a socket for each file, with the byte that stands for its kind. The child
says `STARTED`, by which `decoding` knows that neither hangs. It reads a line of JSON with its bounds, of which
`seconds` may be less than `DECODE_S`, and the file; it answers with `DONE` or `REFUSED`, how many bytes follow, and
these. A child that says nothing has died.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import struct
from typing import Any

# By kind: the byte that stands for it, and what its children need, imported once for all of them. The first of the
# modules has `decode(data, limits)`, which gives what is known of the medium and its bytes, or raises `Refused`.
DECODERS = {
    "image": (
        b"i",
        (
            "octavo.multimodal.picture_decoder",
            "PIL.PngImagePlugin",
            "PIL.JpegImagePlugin",
            "PIL.WebPImagePlugin",
            "PIL.GifImagePlugin",
        ),
    ),
    "audio": (b"a", ("octavo.multimodal.sound_decoder", "numpy", "soundfile", "soxr")),
    "video": (b"v", ("octavo.multimodal.video_decoder", "numpy", "av")),
}
STARTED, DONE, REFUSED = b"s", b"d", b"r"
LENGTH = struct.Struct("<Q")
DECODE_S = 60


class Refused(Exception):
    """What is wrong with the file, in words for whoever has sent it."""


def main() -> None:
    """Serve the socket that is standard input until its other end is closed."""
    modules = dict(DECODERS.values())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    with socket.socket(fileno=0) as control:
        while True:
            byte, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not byte:
                return
            with contextlib.suppress(ImportError, OSError):  # the child finds the same
                for name in modules[byte]:
                    importlib.import_module(name)
            if os.fork() == 0:
                control.close()
                with contextlib.suppress(BaseException):  # decoders of strangers' bytes raise what they like
                    _answer(socket.socket(fileno=descriptors[0]), modules[byte][0])
                os._exit(0)
            os.close(descriptors[0])


def _answer(connection: socket.socket, decoder: str) -> None:
    connection.sendall(STARTED)
    with connection.makefile("rb") as file:
        limits: dict[str, Any] = json.loads(file.readline())
        _set_bounds(limits["memory_bytes"], limits.get("seconds", DECODE_S))
        data = file.read()
    try:
        found, parts = importlib.import_module(decoder).decode(data, limits)
    except Refused as e:
        status, parts = REFUSED, [str(e).encode()]
    else:
        status, parts = DONE, [json.dumps(found).encode() + b"\n", *parts]
    connection.sendall(status + LENGTH.pack(sum(map(len, parts))))
    for part in parts:
        connection.sendall(part)


def _set_bounds(memory_bytes: int, seconds: float) -> None:
    import resource  # which Windows has not

    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # whatever the server was started with
    signal.setitimer(signal.ITIMER_REAL, seconds)
    for bound, value in {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,  # of files that it may write
        resource.RLIMIT_CPU: DECODE_S,
        resource.RLIMIT_AS: memory_bytes,
    }.items():
        with contextlib.suppress(ValueError, OSError):  # a system may have lower bounds, or none
            resource.setrlimit(bound, (value, value))
