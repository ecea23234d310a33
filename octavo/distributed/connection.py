"""TCP connections between the nodes of a group. Both ends prove to each other that they know the group's token.

The listener sends a greeting and a nonce. The caller answers with its own nonce and an HMAC of both. The listener
answers with another HMAC of both. Before that, neither end reads more than these few bytes. Later messages are
MessagePack, each with its length in front, neither encrypted nor signed.
"""

import hmac
import os
import socket
import struct
import time
from typing import Any

import msgspec

from octavo.errors import ConfigError
from octavo.node_token import TOKEN_VARIABLE

HANDSHAKE_S = 5.0

_GREETING = b"octavo nodes 1\r\n"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_LENGTH = struct.Struct("<I")
_MAX_MESSAGE_BYTES = 1 << 20


class HandshakeError(ConfigError):
    """The other end of a connection is no node of this group. The text continues a sentence that begins with its
    address."""


def show_address(address: tuple[str, int]) -> str:
    """Return an address as host:port."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(address: tuple[str, int]) -> socket.socket:
    """Return a socket that listens at the address. Raises `OSError`."""
    family, _, _, _, found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(found)
        listener.listen(128)
    except BaseException:
        listener.close()
        raise
    return listener


def connect(address: tuple[str, int], token: bytes) -> socket.socket:
    """Return a connection to a node, after both ends have proved that they know the token. Raises `OSError` if no node
    answers, and `HandshakeError` if the other end fails the handshake."""
    connection = socket.create_connection(address, HANDSHAKE_S)
    try:
        _set_up(connection)
        deadline = time.monotonic() + HANDSHAKE_S
        greeting = _receive(connection, len(_GREETING) + _NONCE_BYTES, deadline)
        if not greeting.startswith(_GREETING):
            raise HandshakeError("is no node of Octavo's")
        theirs, own = greeting[len(_GREETING) :], os.urandom(_NONCE_BYTES)
        connection.sendall(own + _proof(token, b"joins", theirs, own))
        try:
            proof = _receive(connection, _PROOF_BYTES, deadline)
        except (EOFError, ConnectionError):
            proof = b""
        if not hmac.compare_digest(proof, _proof(token, b"takes", theirs, own)):
            raise HandshakeError(f"has another token; {TOKEN_VARIABLE} must be the same on all nodes")
    except EOFError:
        connection.close()
        raise ConnectionError("it hangs up at once") from None
    except TimeoutError:
        connection.close()
        raise TimeoutError(f"it does not answer as a node within {HANDSHAKE_S:g} s") from None
    except BaseException:
        connection.close()
        raise
    return connection


def accept(connection: socket.socket, token: bytes) -> None:
    """Do the listener's part of the handshake of `connect` on an accepted connection. Raises `HandshakeError` and
    `OSError`."""
    _set_up(connection)
    deadline = time.monotonic() + HANDSHAKE_S
    own = os.urandom(_NONCE_BYTES)
    connection.settimeout(HANDSHAKE_S)
    connection.sendall(_GREETING + own)
    try:
        answer = _receive(connection, _NONCE_BYTES + _PROOF_BYTES, deadline)
    except EOFError:
        raise HandshakeError("has hung up") from None
    theirs, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(token, b"joins", own, theirs)):
        raise HandshakeError(f"has another token, or none; {TOKEN_VARIABLE} must be the same on all nodes")
    connection.sendall(_proof(token, b"takes", own, theirs))


def send_message(connection: socket.socket, message: msgspec.Struct) -> None:
    """Send a message with its length in front. Raises `OSError`."""
    connection.sendall(framed(message))


def framed(message: msgspec.Struct) -> bytes:
    data = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(data)) + data


def receive_message(connection: socket.socket, timeout_s: float) -> bytes:
    """Return the next message. Raises `EOFError`, `OSError`, and `HandshakeError` for a message that no node would
    send."""
    deadline = time.monotonic() + timeout_s
    (length,) = _LENGTH.unpack(_receive(connection, _LENGTH.size, deadline))
    if length > _MAX_MESSAGE_BYTES:
        raise HandshakeError(f"sends a message of {length} bytes")
    return _receive(connection, length, deadline)


def split_messages(data: bytearray) -> list[bytes]:
    """Remove the complete messages from the received bytes of a stream, and return them. Raises `ValueError` for a
    message that no node would send."""
    found = []
    while len(data) >= _LENGTH.size:
        (length,) = _LENGTH.unpack_from(data)
        if length > _MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {length} bytes")
        if len(data) < _LENGTH.size + length:
            break
        found.append(bytes(data[_LENGTH.size : _LENGTH.size + length]))
        del data[: _LENGTH.size + length]
    return found


def release(connection: socket.socket) -> int:
    """Return the connection's descriptor to its next owner, without a timeout."""
    connection.settimeout(None)
    return connection.detach()


def _set_up(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # For nodes that still wait for others; once all have joined, heartbeats notice a loss sooner.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options: dict[str, Any] = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3}
    for name, value in options.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _receive(connection: socket.socket, num_bytes: int, deadline: float) -> bytes:
    """Return exactly `num_bytes` bytes. Raises `EOFError` if the connection ends first, `TimeoutError` and other
    `OSError`s."""
    found = bytearray()
    while len(found) < num_bytes:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        connection.settimeout(left_s)
        part = connection.recv(num_bytes - len(found))
        if not part:
            raise EOFError
        found += part
    return bytes(found)


def _proof(token: bytes, purpose: bytes, of_listener: bytes, of_caller: bytes) -> bytes:
    return hmac.digest(token, purpose + of_listener + of_caller, "sha256")
