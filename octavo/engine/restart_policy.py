"""Decides when a dead engine core is started again, and when not. `Supervisor` starts it."""

QUICK_S = 60.0  # a core that dies sooner after it was ready has died quickly
MAX_DELAY_S = 30.0


class RestartPolicy:
    """Allows up to `limit` quick deaths in a row. The first restart is at once, and so is that of a core that has
    computed tokens: its requests wait. The others come after 1, 2, 4, … seconds. A core that serves longer than
    `QUICK_S` resets the count. Times are those of `time.monotonic`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._num_quick = 0
        self._ready_at: float | None = None
        self._has_served = False

    @property
    def count(self) -> tuple[int, int]:
        """(quick deaths in a row, allowed ones)."""
        return self._num_quick, self.limit

    def record_ready(self, now: float) -> None:
        self._ready_at = now

    def record_outputs(self) -> None:
        """Note that the core has computed tokens."""
        self._has_served = True

    def next_delay(self, now: float) -> float | None:
        """Return the seconds to wait before the next start of a core that has just died, or None to give up."""
        if self._ready_at is not None and now - self._ready_at > QUICK_S:
            self._num_quick = 0
        is_at_once, self._has_served = self._has_served or self._num_quick == 0, False
        self._ready_at = None
        self._num_quick += 1
        if self._num_quick > self.limit:
            return None
        return 0.0 if is_at_once else min(2.0 ** (self._num_quick - 2), MAX_DELAY_S)
