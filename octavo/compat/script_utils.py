"""Functions of vLLM's `utils` that scripts import. Octavo itself does not use them."""

from __future__ import annotations

import socket
import uuid

__all__ = ["get_open_port", "random_uuid"]


def random_uuid() -> str:
    """Return an id for a request: 32 hexadecimal digits."""
    return uuid.uuid4().hex


def get_open_port() -> int:
    """Return a TCP port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
