"""Runs work that outlives its request: background responses and batches.

While there is such work, this server regularly tells the store that it is alive, and learns from the store which work
clients of other servers want to cancel.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

from octavo.entrypoints.http.server_state import ServerState
from octavo.entrypoints.http.store import BEAT_S, Database, StoreError

_END_S = 3.0
_CANCEL_S = 3 * BEAT_S
_CANCEL_POLL_S = 0.2
logger = logging.getLogger("octavo.server")


class Job(Protocol):
    """Work to run in the background. It stores its own results."""

    async def run(self) -> None: ...


async def to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Wait until `work` is done, despite cancellations: clients may cancel a job, even repeatedly, while it stores its
    end."""
    task = asyncio.ensure_future(work)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(task)
    task.result()


class BackgroundJobs:
    """The background tasks of one server, by the ids of their objects."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._jobs: dict[str, Job] = {}
        self._beats: asyncio.Task[None] | None = None

    def get(self, id: str) -> Job | None:
        """Return this server's job with the id, or None."""
        return self._jobs.get(id)

    def start(self, id: str, job: Job, *, uses_engine: bool, is_awaited: bool = True) -> None:
        """Run `job` in the background. `uses_engine` counts it as one request to the engine. With `is_awaited` a
        stopping server waits for it, as for a request."""
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
        """Cancel a job and wait until it has stopped, for some seconds at most: its end may have to wait for the store.
        Return False if the job is not this server's."""
        task = self._tasks.get(id)
        if task is None:
            return False
        task.cancel()
        await asyncio.wait((task,), timeout=_CANCEL_S)
        return True

    async def cancel_anywhere(self, kind: str, id: str, is_under_way: Callable[[], Awaitable[bool]]) -> None:
        """Cancel a job of this server or of another one that shares the store. Another server gets some seconds to
        record that the job has stopped."""
        if await self.cancel(id):
            return
        await self._state.store.run(lambda database: database.ask_to_cancel(kind, id))
        deadline = time.monotonic() + _CANCEL_S
        while await is_under_way() and time.monotonic() < deadline:  # noqa: ASYNC110 - the file tells, when it is asked
            await asyncio.sleep(_CANCEL_POLL_S)

    async def wait_ended(self) -> None:
        """Wait until all jobs have ended, for a few seconds at most."""
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
