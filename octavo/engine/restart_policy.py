"""When an engine core that has died is started again, and when it is given up."""

from __future__ import annotations

QUICK_S = 60.0  # a death sooner than this after the core was ready is a quick one
MAX_DELAY_S = 30.0


class RestartPolicy:
    """Up to `limit` quick deaths in a row are answered with a new start: the first at once, the next after 1, 2, 4, …
    seconds. A core that serves longer than `QUICK_S` sets the count back to 0. Times are those of `time.monotonic`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._num_quick = 0
        self._ready_at: float | None = None

    @property
    def count(self) -> tuple[int, int]:
        """(quick deaths so far, how many are allowed)."""
        return self._num_quick, self.limit

    def record_ready(self, now: float) -> None:
        self._ready_at = now

    def next_delay(self, now: float) -> float | None:
        """A core has died: the seconds to wait before the next start, or None to give up."""
        if self._ready_at is not None and now - self._ready_at > QUICK_S:
            self._num_quick = 0
        self._ready_at = None
        self._num_quick += 1
        if self._num_quick > self.limit:
            return None
        return min(2.0 ** (self._num_quick - 2), MAX_DELAY_S) if self._num_quick > 1 else 0.0
