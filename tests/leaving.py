"""A client that hangs up once the server has its request."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from tests.waiting import wait_until, within


def connect(url: str) -> socket.socket:
    address = urlsplit(url)
    assert address.hostname and address.port
    return socket.create_connection((address.hostname, address.port), timeout=within(60))


def ask_and_leave(url: str, route: str, body: dict[str, Any], once: Callable[[], object]) -> None:
    """Send a request, and hang up as soon as `once()` holds."""
    content = json.dumps(body).encode()
    head = f"POST {route} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    with connect(url) as sock:
        sock.sendall(f"{head}\r\n\r\n".encode() + content)
        wait_until(once)
