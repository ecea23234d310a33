"""Node 0 listens until it is closed, whatever becomes of single connections."""

from __future__ import annotations

import errno
import socket
import threading
from typing import Any

import pytest

from octavo.distributed import listener
from octavo.distributed.listener import Listener


class Door:
    """A socket whose first connections cannot be accepted."""

    def __init__(self, errors: list[int]) -> None:
        self.errors = errors
        self.is_waited_at, self.is_closed = threading.Event(), threading.Event()

    def accept(self) -> Any:
        if self.errors:
            raise OSError(self.errors.pop(0), "it was not to be")
        self.is_waited_at.set()
        self.is_closed.wait()
        raise OSError(errno.EINVAL, "closed")

    def shutdown(self, how: int) -> None:
        assert how == socket.SHUT_RDWR
        self.is_closed.set()

    def close(self) -> None:
        pass


def test_a_connection_that_cannot_be_accepted_ends_no_listener(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    door = Door([errno.EMFILE, errno.ECONNABORTED])
    monkeypatch.setattr(listener, "listen", lambda address: door)
    opened = Listener(("127.0.0.1", 1), lambda caller: None, retry_s=0.0)
    assert door.is_waited_at.wait(60), "it goes on"
    assert sum("could not be accepted" in message for message in caplog.messages) == 2
    opened.close()
    opened._thread.join(60)
    assert not opened._thread.is_alive()
