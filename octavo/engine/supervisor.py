"""Supervises the engine core's process: knows when it is ready, notices when it dies or hangs, and starts it again.

It handles the core's messages about itself; the supervisor's owner handles the others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from octavo.config import EngineConfig
from octavo.engine.core_client import Core, CoreClient, CoreProcess, saving_s
from octavo.engine.restart_policy import RestartPolicy
from octavo.engine.wire import CoreMessage, Failed, FrontendMessage, Leaving, Ready, StepOutputs
from octavo.errors import EngineDeadError, EngineRestartingError, EngineStoppingError, OctavoError

if TYPE_CHECKING:
    from octavo.metrics.prometheus import EngineMetrics

logger = logging.getLogger(__name__)


def record_ready(metrics: EngineMetrics, ready: Ready, config: EngineConfig) -> None:
    """Record a core's start times and memory sizes in the metrics."""
    metrics.record_startup("core", ready.startup)
    metrics.memory_bytes = {"weights": ready.weight_bytes, "kv_cache": ready.cache_bytes}
    metrics.cache_config = {
        "block_size": ready.block_size,
        "num_gpu_blocks": ready.num_blocks,
        "num_cpu_blocks": ready.num_host_blocks,
        "enable_prefix_caching": config.cache.enable_prefix_caching,
    }


class Supervisor:
    """Supervises one core after another. All coroutines belong to the event loop of the first `listen`.

    A core that has been ready once and dies is started again, up to `max_restarts` quick deaths in a row
    (`RestartPolicy`); after that, and by default at once, it has failed for good. A core that is `busy` and finishes no
    step for `step_timeout_s`, or that loads for longer than `ready_timeout_s`, counts as dead, and is killed.

    `handle` is called with each message that is not a failure, `on_core_ended` with the reason whenever a core
    has ended. `make_core` starts a core. A core on another host is started by its host, however often it dies.
    """

    def __init__(
        self,
        config: EngineConfig,
        core: CoreProcess | None,
        *,
        handle: Callable[[CoreMessage], None],
        on_core_ended: Callable[[OctavoError], None],
        is_busy: Callable[[], bool],
        max_restarts: int,
        step_timeout_s: float | None,
        ready_timeout_s: float | None,
        make_core: Callable[[EngineConfig, CoreProcess | None], Core] | None = None,
    ) -> None:
        self.config = config
        self.ready: Ready | None = None  # message of the last core that was ready
        self.fatal_error: OctavoError | None = None  # for good
        self.num_restarts = 0
        self.end_reason = ""  # why the last core has ended
        self.restart_policy = RestartPolicy(max_restarts)
        self._make_core = make_core or CoreClient
        self.core: Core = self._make_core(config, core)
        self.is_draining = False  # the core's host takes no more requests
        self._letting_go: asyncio.Task[None] | None = None
        self.ready_timeout_s, self._step_timeout_s = ready_timeout_s, step_timeout_s
        self._handle_message, self._on_core_ended, self._is_busy = handle, on_core_ended, is_busy
        self._outage: EngineRestartingError | None = None  # while the core is started again
        self._ready_event = asyncio.Event()  # ready, or failed for good
        self._failure_event = asyncio.Event()
        self._kill_reason: str | None = None  # why this process has killed the core, if it has
        self._wake: asyncio.Event | None = None  # while the core sleeps (has ended); set to start the next one
        self._next_core: CoreProcess | None = None  # while it sleeps: a process that has only done its imports
        self._start_timer: asyncio.TimerHandle | None = None
        self._num_messages = 0
        self._following: asyncio.Task[None] | None = None
        self._watchdog: asyncio.Task[None] | None = None
        self._stopping_since: float | None = None
        self._is_closed = False

    @property
    def is_ready(self) -> bool:
        return self.ready is not None and self.fatal_error is None and self._outage is None

    @property
    def unavailable_error(self) -> OctavoError | None:
        """Why no request is taken now, or None."""
        return self.fatal_error or self._outage

    async def wait_ready(self) -> Ready:
        """Return when the core takes requests, with its sizes. Raises the error that kept it from starting, and
        `EngineRestartingError` while it is started again."""
        self.listen()
        await self._ready_event.wait()
        if self.unavailable_error is not None:
            raise self.unavailable_error
        assert self.ready is not None
        return self.ready

    async def wait_failed(self) -> None:
        """Return when the core has died and will not be started again."""
        self.listen()
        await self._failure_event.wait()

    def send(self, message: FrontendMessage) -> None:
        """Send a message. Raises `EngineDeadError` if there is no core."""
        self.core.send(message)

    def tell(self, message: FrontendMessage) -> None:
        """Send a message that may be lost. If the core has just died, `listen` notices it."""
        try:
            self.core.send(message)
        except EngineDeadError:
            return

    def listen(self) -> None:
        """Start to receive messages. Raises `RuntimeError` in another event loop than the first."""
        loop = asyncio.get_running_loop()
        if self._following is None:
            self._following = loop.create_task(self._supervise())
            if self._step_timeout_s is not None:
                self._watchdog = loop.create_task(self._watch_steps(self._step_timeout_s))
        elif self._following.get_loop() is not loop:
            raise RuntimeError("this AsyncLLMEngine belongs to another event loop; make one engine for each loop.")

    async def end_core(self) -> None:
        """End the core's process, with its memory, until `start_core`."""
        self._wake = asyncio.Event()
        self._ready_event.clear()
        self.core.end()
        await asyncio.to_thread(self.core.wait)
        if not self._is_closed:
            self._next_core = self.core.successor()

    def start_core(self) -> None:
        """Start a core again, if `end_core` has ended the last one."""
        if self._wake is not None:
            self._wake.set()

    def stop_restarting(self) -> None:
        """Start no other core after a death: the server stops."""
        self.restart_policy.limit = 0
        self._stopping_since = self._stopping_since or time.monotonic()

    def begin_shutdown(self) -> None:
        """Tell the core's process to end, without a wait. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        for task in (self._following, self._watchdog, self._letting_go):
            if task is not None and not task.get_loop().is_closed():
                task.cancel()
        self._fail(EngineStoppingError("the engine has been shut down."))
        self.core.begin_close(saving_s(self._stopping_since))

    def shutdown(self) -> None:
        """End the core's process. May be called twice."""
        self.begin_shutdown()
        self.core.close()
        if self._next_core is not None:
            self._next_core.close()

    async def _supervise(self) -> None:
        """Receive the core's messages, and start it again when it dies, until its restarts are used up."""
        try:
            while True:
                reason = self.end_reason = await self._follow_core()
                self.core.close()
                if self._wake is None:
                    delay_s = self._restart_delay() if self.ready is not None else None
                    if delay_s is None:
                        self._fail(EngineDeadError(f"{reason}."))
                        return
                    self._suspend(reason)
                    await asyncio.sleep(delay_s)
                else:
                    self._on_core_ended(EngineDeadError("the engine core has ended to sleep; the request is lost."))
                if self._wake is not None:  # perhaps only since the core has died
                    self._outage = None
                    await self._wake.wait()
                    self._wake = None
                self.core, self._next_core = self._make_core(self.config, self._next_core), None
        except asyncio.CancelledError:
            raise
        except Exception as e:
            logger.exception("the engine core cannot be started again")
            self._fail(EngineDeadError(f"the engine core cannot be started again: {type(e).__name__}."))

    def _restart_delay(self) -> float | None:
        return 0.0 if self.core.comes_again else self.restart_policy.next_delay(time.monotonic())

    async def _follow_core(self) -> str:
        """Receive the messages of one core until it has ended. Returns the reason."""
        self._kill_reason, self.is_draining = None, False
        if self.ready_timeout_s is not None:
            self._check_start(self.ready_timeout_s, time.monotonic())
        try:
            await self.core.receive(self._handle)
        except Exception as e:
            logger.exception("the engine's front end failed")
            self.core.kill()
            self._kill_reason = f"the engine's front end failed ({type(e).__name__})"
        finally:
            if self._start_timer is not None:
                self._start_timer.cancel()
        await asyncio.to_thread(self.core.wait)  # a killed process may take long to end
        return self._kill_reason or self.core.end_reason()

    def _check_start(self, timeout_s: float, begin: float) -> None:
        """Kill a core that has loaded for too long, or check again later. At the first start its wait before loading
        counts too."""
        if self.is_ready and self._ready_event.is_set():
            return
        now = time.monotonic()
        since = begin if self.ready is None else self.core.loading_since
        left_s = timeout_s if since is None else since + timeout_s - now
        if left_s > 0:
            later = asyncio.get_running_loop().call_later
            self._start_timer = later(left_s, self._check_start, timeout_s, begin)
        elif self._kill_reason is None:
            self._kill_reason = f"the engine core was not ready after {timeout_s:g} s and was killed"
            self.core.kill()

    async def _let_go(self) -> None:
        """End a core whose host will stop, once its requests have ended."""
        while self._is_busy():  # noqa: ASYNC110 - nothing tells that the last one has ended
            await asyncio.sleep(0.02)
        self.core.end()

    async def _watch_steps(self, timeout_s: float) -> None:
        """Kill a core that has work and has sent nothing for `timeout_s`."""
        seen, since = self._num_messages, time.monotonic()
        while True:
            await asyncio.sleep(min(1.0, timeout_s / 4))
            now = time.monotonic()
            if not self._is_busy() or not self.is_ready or self._num_messages != seen:
                seen, since = self._num_messages, now
            elif now - since > timeout_s:
                self._kill_reason = f"the engine core has finished no step for {timeout_s:g} s and was killed"
                self.core.kill()
                since = now

    def _handle(self, message: CoreMessage) -> None:
        self._num_messages += 1
        match message:
            case Failed(text, expected=True) if self.ready is None:
                self._fail(OctavoError(text))
                return
            case Failed(text):
                # Clients only learn that the core failed; the log has the details.
                logger.error("the engine core failed: %s", text)
                self._kill_reason = "the engine core has failed"
                self._outage = EngineRestartingError("the engine core has failed.")  # until its process ends
                self.core.kill()  # it sends nothing more, and may not be able to end by itself
                return
            case StepOutputs(outputs=outputs) if outputs:
                self.restart_policy.record_outputs()
            case Leaving():
                self.is_draining = True
                self._letting_go = asyncio.get_running_loop().create_task(self._let_go())
                return
            case Ready():
                if self._outage is not None:
                    logger.info(
                        "the engine core takes requests again, %.1f s after its start", sum(message.startup.values())
                    )
                self.ready, self._outage = message, None
                self.config = self.config.when_ready(message.max_model_len, message.num_blocks, message.num_host_blocks)
                self.restart_policy.record_ready(time.monotonic())
                self._ready_event.set()
        self._handle_message(message)

    def _suspend(self, reason: str) -> None:
        """Report that the core has ended and will be started again."""
        if self.core.comes_again:
            self._outage = EngineRestartingError(f"{reason}; it is awaited.")
            logger.error("%s", self._outage)
        else:
            self._outage = EngineRestartingError(f"{reason}; it is being started again.")
            logger.error("%s (%d of %d quick deaths in a row are allowed)", self._outage, *self.restart_policy.count)
        self.num_restarts += 1
        self._on_core_ended(EngineDeadError(f"{reason}; the request is lost."))

    def _fail(self, error: OctavoError) -> None:
        """Give the core up for good, with `error` as the reason."""
        if self.fatal_error is not None:
            return
        self.fatal_error = error
        self._ready_event.set()
        self._failure_event.set()
        # Whoever waits for the first start raises its error.
        if self.ready is not None and not isinstance(error, EngineStoppingError):
            logger.error("%s", error)
        self._on_core_ended(error)
