"""`get_open_port` under the name of vLLM's module."""

from __future__ import annotations

import socket

__all__ = ["get_open_port"]


def get_open_port() -> int:
    """A TCP port that nothing listens at now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
