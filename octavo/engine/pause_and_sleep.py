"""Pause and sleep of an engine, in vLLM's words, and the calls that the core answers between two steps: reset of the
prefix cache, and a live view of it.

A request that comes during a pause or sleep waits in `PauseAndSleep.wait_open`.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

from octavo.engine.sleep_names import PAUSE_MODES, SLEEP_MODES, SLEEPERS, check_level, check_mode, woken_by
from octavo.engine.supervisor import Supervisor
from octavo.engine.wire import CacheWasReset, DropCacheSession, GetLiveView, LiveView, ResetCache, SetPaused
from octavo.errors import OctavoError

logger = logging.getLogger(__name__)

_LIVE_VIEW_TIMEOUT_S = 5.0  # the page does not wait longer for the step that runs


class PauseAndSleep:
    """Of one engine. `is_idle` returns whether no request is running, `abort_all` ends the running requests."""

    def __init__(self, supervisor: Supervisor, is_idle: Callable[[], bool], abort_all: Callable[[], None]) -> None:
        self._supervisor, self._is_idle, self._abort_all = supervisor, is_idle, abort_all
        self._is_open = asyncio.Event()  # new requests are taken: neither paused nor asleep
        self._is_open.set()
        self._asleep: frozenset[str] = frozenset()  # of `SLEEPERS`
        self.sleep_level = 0  # 0 while awake
        self._is_halted = False  # the core computes nothing
        self._num_halting = 0  # pauses that wait for the core or its requests
        self._falling_asleep_or_waking = asyncio.Lock()
        # Changes of the cache that the core has not answered yet, in order. Result None: the core has ended instead.
        self._changes: list[asyncio.Future[CacheWasReset | None]] = []
        self._views: list[asyncio.Future[LiveView | None]] = []  # live views, likewise

    @property
    def is_paused(self) -> bool:
        return not self._is_open.is_set()

    @property
    def may_compute(self) -> bool:
        """Whether the core may be in a step: the engine is not paused, or a pause still waits for it."""
        return not self.is_paused or self._num_halting > 0

    @property
    def is_sleeping(self) -> bool:
        return bool(self._asleep)

    async def wait_open(self) -> None:
        """Return when a request may go to the core. Raises the errors of `Supervisor.wait_ready`."""
        while True:
            await self._is_open.wait()
            await self._supervisor.wait_ready()
            if self._is_open.is_set():  # not paused meanwhile
                return

    async def pause(self, mode: str, clear_cache: bool) -> None:
        """See `AsyncLLMEngine.pause_generation`."""
        check_mode(mode, PAUSE_MODES)
        await self._supervisor.wait_ready()
        was_open, was_halted = self._is_open.is_set(), self._is_halted
        self._is_open.clear()
        self._num_halting += 1
        try:
            await self._halt(mode, clear_cache)
        except (OctavoError, asyncio.CancelledError):
            if was_open:
                await self.resume()
            elif was_halted and not self._is_halted:
                self._is_halted = True
                self.halt_again()
            raise
        finally:
            self._num_halting -= 1

    async def _halt(self, mode: str, clear_cache: bool) -> None:
        if mode == "keep":
            self._is_halted = True
            self._supervisor.tell(SetPaused(True))
            # The core answers in order: with a view that is asked for now, all earlier outputs have arrived.
            await asyncio.wait((self._ask_for_view(),))
            return
        if mode == "abort":
            self._abort_all()
        elif self._is_halted:  # by an earlier pause that keeps requests: let the core finish them
            self._is_halted = False
            self._supervisor.tell(SetPaused(False))
        while self.is_paused and not self._is_idle():  # noqa: ASYNC110 - nothing tells that the last one has ended
            await asyncio.sleep(0.01)
        if self._supervisor.fatal_error is not None:
            raise self._supervisor.fatal_error
        if self.is_paused and clear_cache:
            await self.reset_prefix_cache()

    async def resume(self) -> None:
        """See `AsyncLLMEngine.resume_generation`."""
        if not self._asleep:
            self._is_halted = False
            self._supervisor.tell(SetPaused(False))
            self._is_open.set()

    def halt_again(self) -> None:
        """Have a new core compute nothing if the last one was to compute nothing."""
        if self._is_halted:
            self._supervisor.tell(SetPaused(True))

    async def reset_prefix_cache(self, *, frees_memory: bool = False) -> bool:
        """See `AsyncLLMEngine.reset_prefix_cache`."""
        return await self._change_cache(ResetCache(frees_memory)) is not None

    async def drop_cache_session(self, session: str, salt: str | None) -> int | None:
        """See `AsyncLLMEngine.drop_cache_session`."""
        answer = None
        while answer is None:  # the core has ended; the next one finds the session on disk
            answer = await self._change_cache(DropCacheSession(session, salt))
        return answer.num_blocks

    async def _change_cache(self, change: ResetCache | DropCacheSession) -> CacheWasReset | None:
        await self._supervisor.wait_ready()
        done: asyncio.Future[CacheWasReset | None] = asyncio.get_running_loop().create_future()
        self._supervisor.send(change)
        self._changes.append(done)
        return await done

    def cache_was_reset(self, answer: CacheWasReset) -> None:
        """Complete the oldest change of the cache, which the core has answered."""
        done = self._changes.pop(0)
        if not done.done():  # its caller was not cancelled
            done.set_result(answer)

    async def sleep(self, level: int, mode: str) -> None:
        """See `AsyncLLMEngine.sleep`."""
        check_level(level)
        check_mode(mode, SLEEP_MODES)
        async with self._falling_asleep_or_waking:
            if self._asleep:
                return
            was_open = self._is_open.is_set()
            await self.pause(mode, clear_cache=False)
            while not self.is_paused:  # resumed before the last request has ended
                await self.pause(mode, clear_cache=False)
            self._asleep, self.sleep_level = SLEEPERS, level
            if level == 1 and self._supervisor.config.device == "cpu":
                try:
                    await self.reset_prefix_cache(frees_memory=True)
                except OctavoError:
                    self._asleep, self.sleep_level = frozenset(), 0
                    if was_open:
                        await self.resume()
                    raise
            else:
                await self._supervisor.end_core()
            logger.info("the engine sleeps (level %d)", level)

    async def wake_up(self, tags: Iterable[str] | None) -> None:
        """See `AsyncLLMEngine.wake_up`."""
        woken = woken_by(tags)
        async with self._falling_asleep_or_waking:
            if not self._asleep:
                return
            self._supervisor.start_core()
            await self._supervisor.wait_ready()
            self._asleep -= woken
            self.sleep_level = self.sleep_level if self._asleep else 0
            await self.resume()

    async def live_view(self) -> LiveView | None:
        """See `AsyncLLMEngine.live_view`."""
        await self._supervisor.wait_ready()
        asked = self._views[-1] if self._views else self._ask_for_view()
        await asyncio.wait((asked,), timeout=_LIVE_VIEW_TIMEOUT_S)
        return asked.result() if asked.done() else None

    def _ask_for_view(self) -> asyncio.Future[LiveView | None]:
        self._supervisor.tell(GetLiveView())
        self._views.append(asyncio.get_running_loop().create_future())
        return self._views[-1]

    def take_live_view(self, found: LiveView) -> None:
        """Complete the oldest view that was asked for with the core's answer."""
        self._views.pop(0).set_result(found)

    def core_ended(self) -> None:
        """Complete the futures that the ended core has not answered."""
        unanswered: list[asyncio.Future[Any]] = [*self._changes, *self._views]
        for done in unanswered:
            if not done.done():
                done.set_result(None)
        self._changes.clear()
        self._views.clear()
        if self._supervisor.fatal_error is not None:
            self._is_open.set()  # waiting requests go on, and raise the failure
