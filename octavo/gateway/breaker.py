"""A circuit breaker: requests stay away from a replica that has failed several times in a row."""

import time
from dataclasses import dataclass

FAILURES_TO_OPEN = 3  # in a row
MIN_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0


@dataclass
class Breaker:
    """Keeps requests from a replica that fails. Some failures in a row begin a pause, and each further failure begins
    another one of twice the length. A success ends the count."""

    num_failures: int = 0
    open_until: float = 0.0  # time.monotonic
    _pause_s: float = MIN_PAUSE_S

    def is_open(self) -> bool:
        return self.num_failures >= FAILURES_TO_OPEN and time.monotonic() < self.open_until

    def wait_s(self) -> float:
        """Return the seconds until the replica gets requests again."""
        return max(0.0, self.open_until - time.monotonic()) if self.num_failures >= FAILURES_TO_OPEN else 0.0

    def fail(self) -> None:
        if self.is_open():  # the failed request began before the pause
            return
        self.num_failures += 1
        if self.num_failures >= FAILURES_TO_OPEN:
            self.open_until = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)

    def succeed(self) -> None:
        self.num_failures, self._pause_s = 0, MIN_PAUSE_S
