"""Ctrl-C in a program that has an engine in its own process: within a step it would leave half of that behind."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_HANGS_S = 5.0  # after the first interrupt: more than a step takes that somebody waits for


@contextmanager
def uninterrupted() -> Iterator[None]:
    """SIGINT waits for the end of the body, unless that hangs: one that comes long after the first comes at once."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield  # no other thread is interrupted
        return
    waiting: list[FrameType | None] = []
    first = 0.0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if not waiting:
            waiting.append(frame)
            first = time.monotonic()
        elif time.monotonic() - first > _HANGS_S:
            waiting.clear()
            handler(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if waiting:
            handler(signal.SIGINT, waiting[0])
