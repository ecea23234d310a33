"""The process that decodes files from strangers. It forks a child for each file. The child has bounds on memory and
time, and may crash without harm.

`decoding` starts the process. For each file it sends one end of a socket, with a byte that names the kind of medium.
The child sends `STARTED`, which proves that neither process hangs. It reads a line of JSON with its bounds, then the
file; the bound `seconds` may be less than `DECODE_S`. It answers with `DONE` or `REFUSED`, the number of bytes that
follow, and these bytes. A child that closes the socket without an answer has died.
"""

import contextlib
import importlib
import json
import os
import signal
import socket
import struct
from typing import Any

# By kind: the byte that names it, and the modules that its children need, imported once for all of them. The first
# module has `decode(data, limits)`, which returns a dictionary about the medium and its decoded bytes, or raises
# `Refused`.
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
    """The file is refused. The text tells the sender what is wrong with the file."""


def main() -> None:
    """Serve the socket that is standard input until its other end is closed."""
    modules = dict(DECODERS.values())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are not waited for
    with socket.socket(fileno=0) as control:
        while True:
            byte, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not byte:
                return
            with contextlib.suppress(ImportError, OSError):  # the child meets the same error
                for name in modules[byte]:
                    importlib.import_module(name)
            if os.fork() == 0:
                control.close()
                with contextlib.suppress(BaseException):  # decoders may raise anything on strangers' bytes
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
    import resource  # not on Windows

    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the server may have been started with another action
    signal.setitimer(signal.ITIMER_REAL, seconds)
    for bound, value in {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,  # the child may not write files
        resource.RLIMIT_CPU: DECODE_S,
        resource.RLIMIT_AS: memory_bytes,
    }.items():
        with contextlib.suppress(ValueError, OSError):  # the system's limit may be lower, or absent
            resource.setrlimit(bound, (value, value))
