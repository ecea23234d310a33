"""Functions of vLLM's `utils` that scripts import. Octavo itself does not use them."""

import socket
import uuid

__all__ = ["ExternalBlockHash", "get_ip", "get_open_port", "random_uuid"]

ExternalBlockHash = bytes | int  # a block in the events of --kv-events-config


def random_uuid() -> str:
    """Return an id for a request: 32 hexadecimal digits."""
    return uuid.uuid4().hex


def get_open_port() -> int:
    """Return a TCP port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def get_ip() -> str:
    """Return this host's address in its network, or that of the loopback if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent; the system chooses the address to send from
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])
