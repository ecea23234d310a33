"""One server that answers for a model: its connections, what is under way there, and whether it is to be trusted."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from octavo.gateway.breaker import Breaker
from octavo.gateway.upstream import Upstream, UpstreamError

FAILED_CHECKS = 3  # in a row, after which a replica is not healthy: a busy one may miss some


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
