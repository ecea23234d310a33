"""A held port is there for the program that asks for it, and for nobody by chance."""

import socket
import struct
import sys

import pytest

from tests.ports import held_port

IP_LOCAL_PORT_RANGE = 51  # of Linux 6.3


@pytest.mark.skipif(sys.platform != "linux", reason="ports can be shared on Linux")
def test_a_held_port_can_be_listened_at_and_is_given_to_nobody_else() -> None:
    port = held_port()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    with socket.create_server(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)):
        pass
    with socket.socket() as greedy, pytest.raises(OSError, match="in use"):
        greedy.bind(("127.0.0.1", port))


@pytest.mark.parametrize("reuses", [False, True])
def test_the_kernel_gives_it_to_nobody_who_asks_for_any(reuses: bool) -> None:
    """Not even if there were no other."""
    port = held_port()
    only_this = struct.pack("I", port << 16 | port)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as one, socket.socket() as other:
        try:
            for sock in (one, other):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuses)
                sock.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, only_this)
        except OSError:
            pytest.skip("this kernel cannot be told which ports to give")
        with pytest.raises(OSError, match="in use"):
            one.listen()  # at any port
        with pytest.raises(OSError, match="Cannot assign"):
            other.connect(listener.getsockname())
