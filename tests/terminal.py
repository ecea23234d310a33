"""Commands of Octavo that run in a terminal of their own."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from tests.waiting import wait_until

TIMEOUT_S = 60


def _take_terminal() -> None:
    """In the new process: its input is its controlling terminal, and Ctrl-C a signal whatever the tests run under."""
    os.close(os.open(os.ttyname(0), os.O_RDWR))
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """A command that runs in a pseudo-terminal."""

    def __init__(self, *command: str, **variables: str) -> None:
        self._end, end = pty.openpty()
        words = [sys.executable, "-m", "octavo.entrypoints.cli.main", *command]
        environment = {**os.environ, "TERM": "dumb", "XDG_STATE_HOME": os.devnull, **variables}
        # In a session of its own the terminal is its controlling one, which is what makes Ctrl-C a signal.
        self.process = subprocess.Popen(
            words, stdin=end, stdout=end, stderr=end, env=environment, start_new_session=True,
            preexec_fn=_take_terminal,
        )  # fmt: skip
        os.close(end)
        self._seen = ""

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def interrupt(self, *, until: str) -> None:
        """Type Ctrl-C, and as people do again if nothing comes of it: Python sees a signal that comes just before it
        waits for input only when something else wakes it."""

        def comes() -> bool:
            self.type("\x03")
            return self._comes(until, 10)

        wait_until(comes, lambda: f"{until!r} never came; there is {self._seen!r}", TIMEOUT_S)
        self.expect(until)

    def expect(self, text: str) -> str:
        """Return what is shown up to and with `text`, once it is there."""
        assert self._comes(text, TIMEOUT_S), f"{text!r} never came; there is {self._seen!r}"
        before, _, self._seen = self._seen.partition(text)
        return before + text

    def _comes(self, text: str, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while text not in self._seen:
            if time.monotonic() > deadline:
                return False
            if select.select([self._end], [], [], 0.5)[0]:
                try:
                    self._seen += os.read(self._end, 4096).decode(errors="replace").replace("\r\n", "\n")
                except OSError:  # the command has ended
                    return text in self._seen
        return True

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._end)


@contextlib.contextmanager
def terminal(*command: str, **variables: str) -> Iterator[Terminal]:
    running = Terminal(*command, **variables)
    try:
        yield running
    finally:
        running.close()
