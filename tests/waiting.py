"""Waiting for what a test has begun, and clocks that a test moves.

A wait ends when its condition holds. Its limit only ends a test of something broken: it is generous, and longer on a
slow or busy machine. No test says how fast something has to be.
"""

from __future__ import annotations

import asyncio
import functools
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

_USUAL_S = 0.04  # what `_work` takes on one core of 2024


def _work() -> int:
    return sum(number * number % 7 for number in range(500_000))


@functools.cache
def slowness() -> float:
    """How many times longer than usual this machine takes for a bit of work, as measured once; at least 1."""
    begin = time.perf_counter()
    _work()
    return max(1.0, (time.perf_counter() - begin) / _USUAL_S)


def within(seconds: float) -> float:
    """A limit for something that takes far less than `seconds` on a usual machine, for this one."""
    return seconds * slowness()


def wait_until(condition: Callable[[], T], of_what: Callable[[], object] = lambda: "", timeout_s: float = 60) -> T:
    """Return what `condition` returns once that is true; fail, and say `of_what()`, if it never is."""
    deadline = time.perf_counter() + within(timeout_s)
    while not (found := condition()):
        if time.perf_counter() > deadline:
            raise AssertionError(f"the condition did not come true in {within(timeout_s):.0f} s: {of_what()}")
        time.sleep(0.005)
    return found


async def until(condition: Callable[[], object], every_s: float = 0.001) -> None:
    """`wait_until` in an event loop."""
    deadline = time.perf_counter() + within(60)
    while not condition():
        if time.perf_counter() > deadline:
            raise AssertionError("the condition did not come true")
        await asyncio.sleep(every_s)


async def virtual_sleep(seconds: float) -> None:
    """In `Clock.run`: something takes so long."""
    await asyncio.sleep(seconds)


class Clock:
    """`time.monotonic` of this process, event loops included, which a test moves forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, grace_s: float = 0.0) -> None:
        """In `run`, what one socket of this process sends to another has `grace_s` to arrive before time jumps: a busy
        kernel takes a while."""
        self._real, self._shift_s, self._grace_s = time.monotonic, 0.0, grace_s
        monkeypatch.setattr(time, "monotonic", self.now)

    def now(self) -> float:
        return self._real() + self._shift_s

    def advance(self, seconds: float) -> None:
        self._shift_s += seconds

    async def pass_time(self, seconds: float) -> None:
        """`advance`, and have those whose time has come go on."""
        self.advance(seconds)
        for _ in range(5):
            await asyncio.sleep(0)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """`asyncio.run` in a loop that waits for no timer: when nothing else is ready, it is the next timer's time."""
        clock = self

        class Jumping(selectors.DefaultSelector):
            def select(self, timeout: float | None = None) -> Any:
                ready = super().select(timeout if timeout is None else min(timeout, clock._grace_s))
                if not ready and timeout:
                    clock.advance(timeout)
                return ready

        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(Jumping())) as runner:
            return runner.run(work)
