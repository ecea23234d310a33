"""Work that outlives the request which asked for it: background responses and batches.

While there is some, the store is told that this server lives, and tells what other servers' clients want to be
cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from octavo.entrypoints.http.server_state import ServerState
from octavo.entrypoints.http.store import BEAT_S, Database, StoreError

_END_S = 3.0
_CANCEL_POLL_S = 0.2
logger = logging.getLogger("octavo.server")


class Job(Protocol):
    """Something to be done. It notes itself what comes of it."""

    async def run(self) -> None: ...


class BackgroundJobs:
    """The tasks of one server, by the ids of their objects."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._jobs: dict[str, Job] = {}
        self._beats: asyncio.Task[None] | None = None

    def get(self, id: str) -> Job | None:
        """What this server is at."""
        return self._jobs.get(id)

    def start(self, id: str, job: Job, *, uses_engine: bool, is_awaited: bool = True) -> None:
        """Have `job` done. `uses_engine`: it is one request to the engine. `is_awaited`: a server that stops waits for
        it, as for a request."""
        self._state.num_in_flight += is_awaited
        self._state.num_engine_requests += uses_engine
        task = self._tasks[id] = asyncio.ensure_future(job.run())
        self._jobs[id] = job

        def end(ended: asyncio.Task[None]) -> None:
            self._state.num_in_flight -= is_awaited
            self._state.num_engine_requests -= uses_engine
            del self._tasks[id], self._jobs[id]
            if not ended.cancelled() and (error := ended.exception()) is not None:
                logger.error("work in the background failed", exc_info=error)

        task.add_done_callback(end)
        if self._beats is None:
            self._beats = asyncio.ensure_future(self._beat())

    async def cancel(self, id: str) -> bool:
        """Stop work and wait until it has; False if it is not this server's."""
        task = self._tasks.get(id)
        if task is None:
            return False
        task.cancel()
        await asyncio.wait((task,))
        return True

    async def cancel_anywhere(self, kind: str, id: str, is_under_way: Callable[[], Awaitable[bool]]) -> None:
        """Stop work, also that of a server that shares the store, which gets some seconds to note that it has."""
        if await self.cancel(id):
            return
        await self._state.store.run(lambda database: database.ask_to_cancel(kind, id))
        deadline = time.monotonic() + 3 * BEAT_S
        while await is_under_way() and time.monotonic() < deadline:  # noqa: ASYNC110 - the file tells, when it is asked
            await asyncio.sleep(_CANCEL_POLL_S)

    async def ended(self) -> None:
        """Return when there is nothing left, or in a few seconds."""
        if self._tasks:
            await asyncio.wait([*self._tasks.values()], timeout=_END_S)
        if self._beats is not None:
            self._beats.cancel()

    async def _beat(self) -> None:
        while self._tasks:
            try:
                for id in await self._state.store.run(Database.beat):
                    if (task := self._tasks.get(id)) is not None:
                        task.cancel()
            except StoreError as error:
                logger.error("%s", error)
            await asyncio.sleep(BEAT_S)
        self._beats = None
