"""One server that answers for a model: its connections, its requests under way, and its health."""

import asyncio
import contextlib
import time
from dataclasses import dataclass, field, replace
from typing import Self
from urllib.parse import urlencode

import msgspec

from octavo.gateway.breaker import Breaker
from octavo.gateway.stream_progress import CUT_OFF
from octavo.gateway.upstream import Answer, Upstream, UpstreamError

FAILED_CHECKS = 3  # in a row make a replica unhealthy: a busy one may miss some

BUSY_STATUSES = (429, 503)  # the replica is alive, but does not take this request now
GATEWAY_STATUSES = (502, 504)  # of a proxy in front of a replica that does not answer

NOTES_PATH = "/v1/routing_notes"  # for gateways alone
_MAX_BYTES = 1 << 20  # of an answer for the gateway itself


def has_lost_engine(answer: Answer) -> bool:
    """Return whether an Octavo server says that its engine died while it had the request."""
    return answer.status == 500 and bool(answer.header(CUT_OFF))


class Listed(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    parent: str | None = None  # an adapter's base model


class _ModelList(msgspec.Struct):
    data: list[Listed]


class Notes(msgspec.Struct):
    """What an Octavo server tells gateways: the names of prompts that gateways gave it, the oldest first, which of its
    adapters are on its device, and how many tokens its cache holds, 0 if unknown. `id` and `next` say where the next
    reading begins."""

    id: str
    next: int
    has_more: bool
    prompts: list[str]
    adapters: dict[str, bool]
    cache_tokens: int = 0


@dataclass
class HealthChecks:
    """What the checks of a server's health have found."""

    num_failed: int = 0  # in a row
    problem: str = ""  # why the last one failed
    last_passed_at: float = 0.0  # time.monotonic when that check began
    silent_since: float | None = None  # time.monotonic when the first of the checks began that had no answer, in a row


@dataclass(eq=False)
class Replica:
    """`name` labels its metrics, `served_name` is the model's name at the server."""

    name: str
    upstream: Upstream
    served_name: str
    api_key: str | None = None
    health: str = "/health"
    breaker: Breaker = field(default_factory=Breaker)
    checks: HealthChecks = field(default_factory=HealthChecks)
    num_in_flight: int = 0
    has_notes: bool | None = None  # None: it has not been asked since it was last ill
    notes_at: str = "id=&after=0"  # where the next reading begins

    @property
    def is_healthy(self) -> bool:
        return self.checks.num_failed < FAILED_CHECKS

    def serving(self, name: str) -> Self:
        """Return the same server, whose health is checked once, under the name of another of its models."""
        return replace(self, served_name=name, num_in_flight=0)

    def takes_requests(self) -> bool:
        return self.is_healthy and not self.breaker.is_open()

    def is_silent(self, seconds: float) -> bool:
        """Return whether several health checks in a row, over at least so many seconds, had no answer."""
        since = self.checks.silent_since
        return since is not None and not self.is_healthy and time.monotonic() - since >= seconds

    def auth_headers(self) -> list[tuple[bytes, bytes]]:
        return [] if self.api_key is None else [(b"authorization", b"Bearer " + self.api_key.encode())]

    def record_in_breaker(self, answer: Answer) -> None:
        """Count the answer to a request as a failure or a success. A busy answer is neither: servers also refuse single
        requests with 503, and a pause would close a model that is overloaded. Health checks see a server that starts.
        """
        if has_lost_engine(answer) or answer.status in GATEWAY_STATUSES:
            self.breaker.fail()
        elif answer.status not in BUSY_STATUSES:
            self.breaker.succeed()

    async def check_health(self, timeout_s: float) -> None:
        """Ask for the replica's health. Any answer but a server's error (5xx) counts as healthy: foreign servers may
        not have the path."""
        begin, is_silent, checks = time.monotonic(), True, self.checks
        try:
            status, _ = await self._get(self.health, timeout_s)
            is_silent = False
            checks.problem = f"GET {self.health} is answered {status}" if status >= 500 else ""
        except UpstreamError as error:
            checks.problem = str(error)
        except TimeoutError:
            checks.problem = f"GET {self.health} had no answer within {timeout_s:g} s"
        if checks.problem:
            checks.num_failed += 1
            self.has_notes = None  # another version may come back
        else:
            if not self.is_healthy:  # what failed before is over
                self.breaker.succeed()
            checks.num_failed, checks.last_passed_at = 0, begin
        if not is_silent:
            checks.silent_since = None
        elif checks.silent_since is None:
            checks.silent_since = begin

    async def listed(self, timeout_s: float) -> list[Listed]:
        """Return the replica's list of models; nothing if it gives none."""
        with contextlib.suppress(UpstreamError, TimeoutError, msgspec.DecodeError, UnicodeDecodeError):
            status, body = await self._get("/v1/models", timeout_s)
            return msgspec.json.decode(body, type=_ModelList).data if status == 200 else []
        return []

    async def read_notes(self, timeout_s: float) -> Notes | None:
        """Return the notes since the last reading; None if the server keeps none."""
        with contextlib.suppress(UpstreamError, TimeoutError, msgspec.DecodeError, UnicodeDecodeError):
            status, body = await self._get(f"{NOTES_PATH}?{self.notes_at}", timeout_s)
            if status < 500:  # else it may still be starting
                self.has_notes = False
            if status == 200:
                notes = msgspec.json.decode(body, type=Notes)
                self.has_notes, self.notes_at = True, urlencode({"id": notes.id, "after": notes.next})
                return notes
        return None

    async def _get(self, path: str, timeout_s: float) -> tuple[int, bytes]:
        """Return the status and body of the answer to a GET. Raises `UpstreamError` or `TimeoutError` if there is
        none."""
        async with asyncio.timeout(timeout_s):
            answer = await self.upstream.send("GET", path.encode(), self.auth_headers(), b"")
            try:
                return answer.status, await answer.read_all(_MAX_BYTES)
            finally:
                answer.close()
