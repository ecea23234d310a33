"""Accepts connections to node 0. A caller is accepted after it has proved that it knows the token and has sent its
first message. `NodeGroup` handles callers for stages, `EngineHosts` callers for engines."""

import logging
import socket
import threading
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from octavo.distributed.connection import HANDSHAKE_S, HandshakeError, accept, listen, receive_message, send_message
from octavo.distributed.messages import FirstMessage, Join, Refused, Version
from octavo.node_token import group_token

logger = logging.getLogger(__name__)

_MAX_CALLERS = 64  # handshakes at once

_decode = msgspec.msgpack.Decoder(FirstMessage).decode


class Caller(NamedTuple):
    """A connection that knows the token, with its first message."""

    message: FirstMessage
    connection: socket.socket
    host: str  # address of the other end


class Member(NamedTuple):
    """A node, or an engine on another host, that asks to join or has joined."""

    kind: str  # "node" or "engine"
    join: Join
    connection: socket.socket
    host: str  # address of the other end

    def __str__(self) -> str:
        return f"{self.kind} {self.join.rank} ({self.join.host}, {self.host})"


class Listener:
    """Listens until `close`. Many threads call `take`, each with one caller."""

    def __init__(self, address: tuple[str, int], take: Callable[[Caller], None], retry_s: float = 1.0) -> None:
        """After a connection that could not be accepted it waits `retry_s`. Raises `OSError` if this host cannot listen
        at the address."""
        self._retry_s = retry_s
        self._is_closed = threading.Event()
        self._take = take
        self._handshakes = threading.BoundedSemaphore(_MAX_CALLERS)
        self._listener = listen(address)
        self._thread = threading.Thread(target=self._listen, name="nodes", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closed.set()
        # Closing alone would not wake the accepting thread.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _listen(self) -> None:
        while True:
            try:
                connection, address = self._listener.accept()
            except OSError as error:
                if self._is_closed.is_set():
                    return
                # The caller has hung up already, or this process has too many files open for now.
                logger.warning("a connection could not be accepted: %s", error)
                self._is_closed.wait(self._retry_s)
                continue
            if not self._handshakes.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._greet, args=(connection, address[0]), name="handshake", daemon=True).start()

    def _greet(self, connection: socket.socket, host: str) -> None:
        try:
            accept(connection, group_token())
            message = _first_message(receive_message(connection, HANDSHAKE_S))
            connection.settimeout(None)
            self._take(Caller(message, connection, host))
        except (HandshakeError, EOFError, OSError, msgspec.MsgspecError) as error:
            logger.warning("a connection from %s was closed: it %s", host, str(error) or "has hung up")
            connection.close()
        finally:
            self._handshakes.release()


def _first_message(data: bytes) -> FirstMessage:
    """Return the first message of a caller. Of a `Join` of another version only the version is read. Raises
    `MsgspecError`."""
    try:
        message: FirstMessage = _decode(data)
        return message
    except msgspec.ValidationError:
        return Join(msgspec.msgpack.decode(data, type=Version).version, 0, 0, "", {}, 0)


def refuse(connection: socket.socket, answer: Refused) -> None:
    try:
        send_message(connection, answer)
        connection.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # the other node notices by itself
    connection.close()


def has_gone(connection: socket.socket) -> bool:
    """Return whether the other end of an idle connection has closed it or cannot be reached any more."""
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
