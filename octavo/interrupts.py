"""Delays Ctrl-C in a program with an engine in its own process, because an interrupt within a step would leave the step
half done."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_HANGS_S = 5.0  # after the first interrupt: longer than any reasonable step


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay SIGINT until the end of the body. If the body hangs, a SIGINT long after the first one takes effect
    immediately."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield  # Python interrupts only the main thread
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
