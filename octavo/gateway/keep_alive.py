"""Comments in streams that are silent, so that no proxy ends them: while a request waits for a replica, and while its
replica sends nothing."""

import asyncio
import time
from collections.abc import Awaitable
from typing import Self, TypeVar

from octavo.gateway.client import Client
from octavo.gateway.replica import Replica
from octavo.gateway.upstream import Answer

_SILENT = "the replica is silent"

T = TypeVar("T")


class SilenceTimer:
    """Sends comments to a client while its replica sends nothing, every `interval_s`; 0: none. One timer serves the
    whole answer, and its bytes do not touch it."""

    def __init__(self, client: Client, replica: Replica, interval_s: float) -> None:
        self.answer: Answer | None = None  # None before its head has come
        self._client, self._replica, self._interval_s = client, replica, interval_s
        self._since = time.monotonic()  # when the client last got something, as far as known
        self._timer = asyncio.get_running_loop().call_later(interval_s, self._look) if interval_s else None
        self._sending: asyncio.Task[None] | None = None  # sends a comment, and the stream's head before the first one
        self._has_ended = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._has_ended = True
        if self._sending is not None:  # not cancelled: it would leave half a head
            await asyncio.wait({self._sending})

    def _look(self) -> None:
        if self.answer is not None:
            self._since = max(self._since, self.answer.heard_at)
        now = time.monotonic()
        if now - self._since >= self._interval_s:
            self._since = now
            self._comment()
        self._timer = asyncio.get_running_loop().call_later(self._since + self._interval_s - now, self._look)

    def _comment(self) -> None:
        """Send a comment, unless the client must read first. Before the answer's head the status is still open, so the
        stream begins only if the replica's health checks have no answer either."""
        has_begun = self._client.has_begun
        is_sent = self._client.comment_at_once(_SILENT) if has_begun else self._replica.checks.silent_since is None
        if not is_sent and (self._sending is None or self._sending.done()):
            self._sending = asyncio.ensure_future(self._send(has_begun))

    async def _send(self, has_begun: bool) -> None:
        if not self._has_ended and self._client.has_begun == has_begun:  # the head may have come since
            await self._client.comment(_SILENT)


class KeepAlive:
    """Sends comments to clients that stream."""

    def __init__(self, interval_s: float) -> None:
        """A silent stream gets one every `interval_s`; 0: none."""
        self._interval_s = interval_s

    async def during(self, work: Awaitable[T], comment: str, client: Client) -> T:
        """Return the result of `work`, with comments meanwhile."""
        task = asyncio.ensure_future(work)
        if client.silent_since is None:
            client.silent_since = time.monotonic()
        try:
            while client.takes_comments and self._interval_s:
                rest_s = client.silent_since + self._interval_s - time.monotonic()
                if (await asyncio.wait({task}, timeout=max(0.0, rest_s)))[0]:
                    break
                await client.comment(comment)
            return await task
        finally:
            task.cancel()
            del task  # its error's traceback has this frame, so the variable would make a cycle

    def watch_silence(self, client: Client, replica: Replica) -> SilenceTimer:
        """Send comments while a replica has the request and sends nothing, until the context ends."""
        return SilenceTimer(client, replica, self._interval_s if client.streams else 0.0)
