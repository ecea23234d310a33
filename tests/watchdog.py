"""A process beside each one that runs tests: it names the test in which the other ends, and ends one that hangs.

pytest-timeout ends a test from within the process. That is not enough where the process crashes or is killed, where
a call into native code never comes back, and where Python waits for a thread when all tests are over.
A plugin of pytest: tests/conftest.py registers it. Run as a program, this file is the process beside.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from typing import Any

GRACE_S = float(os.environ.get("OCTAVO_TESTS_GRACE_S", "15"))  # for pytest-timeout, which knows more
EXIT_S = 4 * GRACE_S  # from the last test to the end of the process
ALIVE_S = 0.5  # how often it is looked whether the process is alive


class Reporter:
    """Tells the process beside what this one does, and how long that may take."""

    def __init__(self) -> None:
        self._beside = subprocess.Popen([sys.executable, __file__, str(os.getpid())], stdin=subprocess.PIPE)

    def say(self, doing: str, limit_s: float | None) -> None:
        """An empty `doing` is nothing that anybody would miss."""
        assert self._beside.stdin is not None
        with contextlib.suppress(OSError):
            self._beside.stdin.write(json.dumps([doing, limit_s]).encode() + b"\n")
            self._beside.stdin.flush()


def pytest_configure(config: Any) -> None:
    if getattr(config.option, "maxworkerrestart", "") is None:
        config.option.maxworkerrestart = "0"  # another process would run into the same
    if not config.getoption("usepdb") and not config.getoption("collectonly"):
        config.stash[_reporter] = Reporter()
        config.stash[_reporter].say("", None)


def pytest_runtest_protocol(item: Any, nextitem: Any) -> Generator[None, object, object]:
    reporter = item.config.stash.get(_reporter, None)
    if reporter is None:
        return (yield)
    limit_s = limit_of(item)
    reporter.say(item.nodeid, limit_s + GRACE_S if limit_s else None)
    try:
        return (yield)
    finally:
        reporter.say("", None)


def pytest_unconfigure(config: Any) -> None:
    reporter = config.stash.get(_reporter, None)
    if reporter is not None and not hasattr(config, "workerinput"):  # pytest-xdist ends its workers
        faulthandler.enable(sys.__stderr__)  # which pytest's own plugin has ended
        reporter.say("", EXIT_S)


def limit_of(item: Any) -> float:
    """The seconds that a test may take; 0 for any."""
    marker, config = item.get_closest_marker("timeout"), item.config
    given = marker and (marker.args[0] if marker.args else marker.kwargs["timeout"])
    return float(given or config.getoption("timeout", None) or config.getini("timeout") or 0)


with contextlib.suppress(ImportError):  # the process beside has no use for it
    import pytest

    _reporter = pytest.StashKey[Reporter]()
    pytest_runtest_protocol = pytest.hookimpl(wrapper=True, tryfirst=True)(pytest_runtest_protocol)
    pytest_unconfigure = pytest.hookimpl(trylast=True)(pytest_unconfigure)


def watch(pid: int) -> None:
    """Read what the parent does until it ends or hangs."""
    doing, deadline, received, inputs = "", None, b"", [0]
    while True:
        if select.select(inputs, [], [], ALIVE_S)[0]:
            data = os.read(0, 1 << 16)
            *lines, received = (received + data).split(b"\n")
            if lines:
                doing, limit_s = json.loads(lines[-1])
                deadline = None if limit_s is None else time.monotonic() + limit_s
            if not data:
                inputs.clear()
        if os.getppid() != pid:
            if doing:
                _say(f"process {pid} has ended in {doing}")
            return
        if deadline is not None and time.monotonic() > deadline:
            _say(f"process {pid} hangs in {doing or 'its end, after the last test'}")
            _end(pid)
            return


def _end(pid: int) -> None:
    """First in a way that shows where its threads are. What it has started ends too."""
    pids = [pid]
    with contextlib.suppress(ImportError):
        import psutil

        pids += [child.pid for child in psutil.Process(pid).children(recursive=True) if child.pid != os.getpid()]
    os.kill(pid, signal.SIGABRT)
    for _ in range(10):
        if os.getppid() == pid:
            select.select([], [], [], ALIVE_S)
    for one in pids if os.getppid() == pid else pids[1:]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)


def _say(what: str) -> None:
    print(f"\ntests/watchdog.py: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends in its own way
    watch(int(sys.argv[1]))
