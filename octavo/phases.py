"""A stopwatch for the phases of a start. Servers show its result in their metrics."""

import time


class Phases:
    """Seconds by phase, in order. Each call of `end` closes the current phase, which began when the previous one
    ended."""

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
        """Return the seconds from the beginning to the end of the last phase."""
        return self._last - self.begun_at
