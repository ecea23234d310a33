"""Where the time of a start goes: a stopwatch that names what it has seen. Servers show the result in their metrics."""

from __future__ import annotations

import time


class Phases:
    """Seconds by phase, in order. Each call of `end` closes the phase that began where the one before it ended."""

    def __init__(self, begun_at: float | None = None) -> None:
        self.begun_at = time.monotonic() if begun_at is None else begun_at
        self.seconds: dict[str, float] = {}
        self._last = self.begun_at

    def end(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    @property
    def total(self) -> float:
        """From the beginning to the end of the last phase."""
        return self._last - self.begun_at
