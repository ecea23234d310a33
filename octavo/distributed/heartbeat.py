"""A connection over which two nodes tell each other that they are alive, each from a thread of its own."""

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from octavo.distributed.connection import framed, split_messages
from octavo.distributed.messages import Beat, Ended, GroupReady, News

INTERVAL_S = 0.25
# Together with an interval until the next check, less than 2 s. TCP resends lost packets after 0.2, 0.6 and 1.4 s.
SILENCE_S = 1.5
# Loading reads files under Python's lock, which delays beats.
SILENCE_OF_START_S = 60.0

_decode = msgspec.msgpack.Decoder(News).decode


class Heartbeat:
    """One end of the connection. Its thread calls `hear` with the other node's messages except beats. It calls `lose`
    once if the other node has ended, closed the connection or been silent for too long; the argument says what the node
    did, without its name."""

    def __init__(self, connection: socket.socket, name: str, hear: Callable[[News], None], lose: Callable[[str], None]):
        self._connection, self._hear, self._lose = connection, hear, lose
        self._silence_s = SILENCE_OF_START_S
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        connection.setblocking(False)
        self._thread = threading.Thread(target=self._run, name=f"heartbeat of {name}", daemon=True)
        self._thread.start()

    def be_strict(self) -> None:
        """Shorten the allowed silence: all nodes have loaded."""
        self._silence_s = SILENCE_S

    def say(self, news: News) -> None:
        """Send news to the other node, if the connection still works."""
        with self._lock, contextlib.suppress(OSError):
            self._connection.send(framed(news))

    def close(self, last: Ended | None = None, grace_s: float = 1.0) -> None:
        """Send `last`, close the connection, and wait up to `grace_s` for the other node to read it."""
        if self._is_closed.is_set():
            return
        if last is not None:
            self.say(last)
        self._is_closed.set()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
        if threading.current_thread() is not self._thread:
            self._thread.join(grace_s)  # the thread reads until the other end closes
        self._connection.close()

    def _run(self) -> None:
        why = self._listen()
        if not self._is_closed.is_set():
            self._lose(why)

    def _listen(self) -> str:
        """Send beats and read messages until the connection ends. Return why it ended."""
        poll = select.poll()
        poll.register(self._connection.fileno(), select.POLLIN)
        received = bytearray()
        heard = looked = time.monotonic()
        while True:
            try:
                data = self._receive() if poll.poll(INTERVAL_S * 1000) else None
                if data == b"":
                    return "has closed its connection"
                received += data or b""
                messages = [_decode(one) for one in split_messages(received)]
            except OSError as e:
                return f"cannot be reached any more ({e.strerror or e})"
            except (ValueError, msgspec.MsgspecError) as e:
                return f"sends bytes that no node would send ({e})"
            now = time.monotonic()
            if data is not None or now - looked > 3 * INTERVAL_S:  # or this process itself was stopped
                heard = now
            if now - heard > self._silence_s:
                return f"has not been heard of for {self._silence_s:g} s"
            looked = now
            for news in messages:
                match news:
                    case Ended(reason):
                        self._hear(news)
                        return f"has ended: {reason}"
                    case GroupReady():
                        self._hear(news)
            if not self._is_closed.is_set():
                self.say(Beat())

    def _receive(self) -> bytes | None:
        try:
            return self._connection.recv(1 << 16)
        except BlockingIOError:
            return None
