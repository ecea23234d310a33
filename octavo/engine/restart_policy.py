"""Decides when a dead engine core is started again, and when not. `Supervisor` starts it."""

from __future__ import annotations

QUICK_S = 60.0  # a core that dies sooner after it was ready has died quickly
MAX_DELAY_S = 30.0


class RestartPolicy:
    """Allows up to `limit` quick deaths in a row: a restart at once after the first, after 1, 2, 4, … seconds after the
    next ones. A core that serves longer than `QUICK_S` resets the count. Times are those of `time.monotonic`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._num_quick = 0
        self._ready_at: float | None = None

    @property
    def count(self) -> tuple[int, int]:
        """(quick deaths in a row, allowed ones)."""
        return self._num_quick, self.limit

    def record_ready(self, now: float) -> None:
        self._ready_at = now

    def next_delay(self, now: float) -> float | None:
        """Return the seconds to wait before the next start of a core that has just died, or None to give up."""
        if self._ready_at is not None and now - self._ready_at > QUICK_S:
            self._num_quick = 0
        self._ready_at = None
        self._num_quick += 1
        if self._num_quick > self.limit:
            return None
        return min(2.0 ** (self._num_quick - 2), MAX_DELAY_S) if self._num_quick > 1 else 0.0
