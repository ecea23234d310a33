"""One server that answers for a model: its connections, what is under way there, and whether it is to be trusted."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from octavo.gateway.upstream import Upstream, UpstreamError

FAILURES_TO_OPEN = 3  # in a row
FAILED_CHECKS = 3  # in a row, after which a replica is not healthy: a busy one may miss some
MIN_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0


@dataclass
class Breaker:
    """Keeps requests from a replica that fails: after some failures in a row for a pause, which doubles with each
    further one. After it one more failure is enough, and a success forgets them all."""

    num_failures: int = 0
    open_until: float = 0.0  # time.monotonic
    _pause_s: float = MIN_PAUSE_S

    def is_open(self) -> bool:
        return self.num_failures >= FAILURES_TO_OPEN and time.monotonic() < self.open_until

    def wait_s(self) -> float:
        """Return for how long no request is taken."""
        return max(0.0, self.open_until - time.monotonic()) if self.num_failures >= FAILURES_TO_OPEN else 0.0

    def fail(self) -> None:
        if self.is_open():  # a request that was under way before
            return
        self.num_failures += 1
        if self.num_failures >= FAILURES_TO_OPEN:
            self.open_until = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)

    def succeed(self) -> None:
        self.num_failures, self._pause_s = 0, MIN_PAUSE_S


@dataclass(eq=False)
class Replica:
    """`name` is the label of its metrics, `served_name` what the model is called there."""

    name: str
    upstream: Upstream
    served_name: str
    api_key: str | None = None
    health: str = "/health"
    breaker: Breaker = field(default_factory=Breaker)
    num_failed_checks: int = 0  # of its health, in a row
    num_in_flight: int = 0

    @property
    def is_healthy(self) -> bool:
        return self.num_failed_checks < FAILED_CHECKS

    def takes_requests(self) -> bool:
        return self.is_healthy and not self.breaker.is_open()

    def auth_headers(self) -> list[tuple[bytes, bytes]]:
        return [] if self.api_key is None else [(b"authorization", b"Bearer " + self.api_key.encode())]

    async def check_health(self, timeout_s: float) -> None:
        """Ask for the replica's health. Any answer but a server's error will do: foreign servers may have no such
        path."""
        is_well = False
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self.upstream.send("GET", self.health.encode(), self.auth_headers(), b"")
                try:
                    await answer.read_all(1 << 16)
                    is_well = answer.status < 500
                finally:
                    answer.close()
        except (UpstreamError, TimeoutError):
            pass
        self.num_failed_checks = 0 if is_well else self.num_failed_checks + 1
