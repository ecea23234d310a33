"""Ports for programs that are told where to listen."""

from __future__ import annotations

import socket
import sys

_held: list[socket.socket] = []


def held_port() -> int:
    """A port of 127.0.0.1 that nobody else can get by chance while this process lives.

    A socket is bound to it and never listens. On Linux a program that asks for this very port can share it, as all
    servers set SO_REUSEADDR; the kernel gives it to nobody who asks for any port, and until somebody listens
    connections are refused.
    """
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", 0))
    port: int = sock.getsockname()[1]
    if sys.platform == "linux":
        _held.append(sock)
    else:  # nobody could share it
        sock.close()
    return port
