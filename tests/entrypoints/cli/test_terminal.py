"""`octavo chat` and `octavo complete` in a terminal of their own: what a person sees, and what Ctrl-C does."""

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

import pytest

from tests.entrypoints.fake_engine import FakeEngine
from tests.waiting import wait_until

TIMEOUT_S = 60


def _take_terminal() -> None:
    """In the new process: its input is its controlling terminal, and Ctrl-C a signal whatever the tests run under."""
    os.close(os.open(os.ttyname(0), os.O_RDWR))
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """A command that runs in a pseudo-terminal."""

    def __init__(self, *command: str) -> None:
        self._end, end = pty.openpty()
        words = [sys.executable, "-m", "octavo.entrypoints.cli.main", *command]
        environment = {**os.environ, "TERM": "dumb"}
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
def terminal(*command: str) -> Iterator[Terminal]:
    running = Terminal(*command)
    try:
        yield running
    finally:
        running.close()


def test_chat_streams_stops_and_remembers(address: str, engine: FakeEngine) -> None:
    with terminal("chat", "--url", address + "/v1", "--system-prompt", "Be kind") as chat:
        chat.expect("Ctrl-C stops an answer, Ctrl-D ends.")
        chat.expect("> ")
        engine.is_paused = True
        chat.type("one\n")
        chat.expect("\nH")  # the first token is shown while the others are still to come
        chat.interrupt(until="> ")
        wait_until(lambda: not engine.active)  # the server was told
        engine.is_paused = False
        chat.type("forget this")
        chat.expect("forget this")
        chat.interrupt(until="> ")
        chat.type("two\n")
        chat.expect("Hello there\n")
        chat.expect("> ")
        assert engine.tokenizer.decode(engine.seen[-1][0]) == (
            "system: Be kind\nuser: one\nassistant: H\nuser: two\nassistant:"
        )
        chat.type("refuse me\n")
        chat.expect("octavo: error: ")
        chat.expect("No such talk.")
        chat.expect("> ")
        chat.type("three\n")
        chat.expect("Hello there\n")
        assert "refuse me" not in engine.tokenizer.decode(engine.seen[-1][0])
        chat.expect("> ")
        chat.type("\x04")
        assert chat.process.wait(TIMEOUT_S) == 0


def test_complete_goes_on_after_a_stop(address: str, engine: FakeEngine) -> None:
    with terminal("complete", "--url", address + "/v1") as complete:
        complete.expect("> ")
        engine.is_paused = True
        complete.type("Once\n")
        complete.expect("\nH")
        complete.interrupt(until="> ")
        engine.is_paused = False
        complete.type("Twice\n")
        complete.expect("Hello there\n")
        complete.expect("> ")
        complete.type("\x04")
        assert complete.process.wait(TIMEOUT_S) == 0


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_no_server_is_one_line(command: str) -> None:
    with terminal(command, "--url", "http://127.0.0.1:1/v1") as none:
        shown = none.expect("or give --url.\n")
        assert shown.startswith("octavo: error: no server answers at http://127.0.0.1:1/v1")
        assert none.process.wait(TIMEOUT_S) == 1


def test_pipes_get_answers_and_nothing_else(address: str, engine: FakeEngine) -> None:
    command = [sys.executable, "-m", "octavo.entrypoints.cli.main"]
    for name in ("chat", "complete"):
        asked = subprocess.run(
            [*command, name, "--url", address + "/v1"], input="one\n\ntwo\n", capture_output=True, text=True, check=True
        )
        assert (asked.stdout, asked.stderr) == ("Hello there\nHello there\n", "")
