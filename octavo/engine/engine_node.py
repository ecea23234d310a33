"""The other side of `engine_hosts.py`: a host that runs some engines of a server on another host (`octavo serve
--headless --data-parallel-size-local …`). For each engine it joins the server, starts a core process, and passes
messages on, until the server ends for good. This process computes nothing, so that its heartbeats never wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from octavo.config import EngineConfig
from octavo.distributed.connection import HandshakeError, connect, send_message
from octavo.distributed.heartbeat import Heartbeat
from octavo.distributed.joining import join, receive_answer
from octavo.distributed.messages import Answer, Ended, EngineLink, Join, Joined, News
from octavo.distributed.node_settings import settings_of
from octavo.engine.core_client import EXIT_GRACE_S, CoreClient, saving_s
from octavo.engine.framing import read_message, write_message
from octavo.engine.restart_policy import RestartPolicy
from octavo.engine.wire import STOP_S, Leaving, encode_message
from octavo.errors import ConfigError, LoadError, OctavoError
from octavo.node_token import check_token, group_token
from octavo.processes import event_loop_factory
from octavo.version import __version__

logger = logging.getLogger(__name__)

_REASON_S = 1.0  # within this time one connection tells why the other has ended


class _End(NamedTuple):
    """How an engine's connection to the server has ended."""

    reason: str
    is_over: bool = False  # the server has ended for good
    by_core: bool = False


class _Engine:
    """One engine of this host, in a thread of its own."""

    def __init__(
        self,
        config: EngineConfig,
        rank: int,
        settings: dict[str, str],
        max_restarts: int,
        ready_timeout_s: float | None,
    ) -> None:
        assert config.engine_hosts is not None
        self._config, self._rank, self._settings = config.replica(rank), rank, settings
        self._address = config.engine_hosts.address, config.engine_hosts.port
        self._host = socket.gethostname()
        self._ready_timeout_s = ready_timeout_s
        self._restarts = RestartPolicy(max_restarts)
        self._connection: socket.socket | None = None
        self._was_ready = self._is_ready = self.is_draining = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end_soon: Callable[[_End], None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._leaving_since: float | None = None

    def __str__(self) -> str:
        return f"engine {self._rank} ({self._host})"

    def run(self) -> None:
        """Return when the server has ended for good, or this engine has left. Raises `ConfigError` or `LoadError` if it
        cannot join, does not become ready, or dies too often."""
        while not self.is_draining:
            # Once ready, there is no timeout: the server may sleep, or wait for other engines.
            timeout_s = None if self._was_ready else self._ready_timeout_s
            joined = join(str(self), self._address, self._ask, timeout_s)
            with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
                end = runner.run(self._serve(joined))
            if end.is_over or self.is_draining:
                logger.info("%s ends: %s", self, end.reason)
                return
            if not self._was_ready:
                raise LoadError(f"{self} has not got ready: {end.reason}.")
            delay_s = self._restarts.next_delay(time.monotonic()) if end.by_core else 0.0
            if delay_s is None:
                raise LoadError(f"{self} has died too often: {end.reason}.")
            logger.error("%s has left the server: %s; it joins again", self, end.reason)
            time.sleep(delay_s)

    def leave(self) -> bool:
        """Ask the server to finish running requests and send no new ones. Returns False if this engine has none."""
        self.is_draining, self._leaving_since = True, time.monotonic()
        if self._loop is None or not self._is_ready:
            return False
        self._loop.call_soon_threadsafe(self._say_leaving)
        return True

    def end(self) -> None:
        """Have the core and the connection to the server end, without a wait."""
        if self._end_soon is not None:
            self._end_soon(_End("it was told to stop"))

    def _say_leaving(self) -> None:
        if self._writer is not None:
            write_message(self._writer, encode_message(Leaving()))

    def _ask(self, deadline: float | None) -> Answer:
        if self._connection is not None:  # left from the last attempt
            self._connection.close()
        self._connection = connect(self._address, group_token())
        size = self._config.data_parallel_size
        send_message(self._connection, Join(__version__, size, self._rank, self._host, self._settings, 0))
        return receive_answer(self._connection, deadline)

    async def _serve(self, joined: Joined) -> _End:
        """Run a core and pass messages between it and the server, until one of them ends."""
        assert self._connection is not None
        loop = self._loop = asyncio.get_running_loop()
        end: asyncio.Future[_End] = loop.create_future()

        def finish(why: _End) -> None:
            if not end.done():
                end.set_result(why)

        def end_soon(why: _End) -> None:
            """Called by any thread."""
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(finish, why)

        self._end_soon = end_soon

        def hear(news: News) -> None:
            if isinstance(news, Ended):
                end_soon(_End(news.reason, news.is_over))
                return
            heartbeat.be_strict()
            self._was_ready = self._is_ready = True
            self._restarts.record_ready(time.monotonic())
            logger.info("%s takes requests", self)

        def lose(why: str) -> None:
            end_soon(_End(f"the server {why}"))

        heartbeat = Heartbeat(self._connection, "the server", hear, lose)
        core: CoreClient | None = None
        found = _End("it was told to stop")
        try:
            try:
                link = await asyncio.to_thread(connect, self._address, group_token())
                send_message(link, EngineLink(joined.session, time.monotonic()))
            except (OSError, HandshakeError) as error:
                found = _End(f"the server cannot be reached: {error}")
                return found
            link.setblocking(False)
            reader, self._writer = await asyncio.open_connection(sock=link)
            core = CoreClient(self._config)
            found = await self._relay(core, reader, self._writer, end)
            return found
        finally:
            self._is_ready = False
            if self._writer is not None:
                self._writer.close()
                self._writer = None
                await asyncio.sleep(0.05)  # so that the core's last message arrives before the reason of its end
            heartbeat.close(Ended(found.reason))
            if core is not None:
                core.begin_close(saving_s(self._leaving_since))
                core.close()

    async def _relay(
        self, core: CoreClient, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, end: asyncio.Future[_End]
    ) -> _End:
        async def pass_to_core() -> None:
            while True:
                core.send_data(await read_message(reader))

        to_core = asyncio.ensure_future(pass_to_core())
        to_server = asyncio.ensure_future(core.receive_data(lambda data: write_message(writer, data)))
        try:
            await asyncio.wait((to_core, to_server, end), return_when=asyncio.FIRST_COMPLETED)
            if to_core.done():  # the server has hung up, or the core takes no messages: the code below finds out which
                await asyncio.wait((to_server, end), timeout=_REASON_S, return_when=asyncio.FIRST_COMPLETED)
            if to_server.done() and not end.done():
                to_server.result()
                core.wait()
                return _End(core.end_reason(), by_core=True)
            return end.result() if end.done() else _End("the server has closed its connection")
        finally:
            for task in (to_core, to_server):
                task.cancel()
            await asyncio.wait((to_core, to_server))
            if not to_core.cancelled():
                to_core.exception()  # read the exception, so that asyncio does not log it: the end is noticed elsewhere


class EngineNode:
    def __init__(
        self, config: EngineConfig, *, max_restarts: int, ready_timeout_s: float | None, shutdown_timeout_s: float
    ) -> None:
        """Raises `ConfigError` if a token is needed and there is none, and `LoadError` for files that cannot be
        read."""
        if config.engine_hosts is None:
            raise ConfigError("--headless is for a part of the engines: --data-parallel-size-local says how many.")
        check_token(config.engine_hosts.address, "--data-parallel-address")
        settings = settings_of(config)
        self._shutdown_timeout_s = shutdown_timeout_s
        self._engines = [_Engine(config, rank, settings, max_restarts, ready_timeout_s) for rank in config.local_ranks]
        self._ends: queue.SimpleQueue[OctavoError | None] = queue.SimpleQueue()
        self._num_running = len(self._engines)

    def run(self) -> None:
        """Return when the server has ended for good, or after `KeyboardInterrupt`, when running requests have ended.
        Raises the error of the first engine that fails for good."""
        threads = [threading.Thread(target=self._run, args=(one,), name=str(one), daemon=True) for one in self._engines]
        for thread in threads:
            thread.start()
        try:
            try:
                self._wait(None)
            except KeyboardInterrupt:
                num_leaving = sum([engine.leave() for engine in self._engines])
                if num_leaving:
                    logger.info("stopping: requests under way have %g s to end", self._shutdown_timeout_s)
                    if not self._wait(self._shutdown_timeout_s):
                        logger.warning("stopping: running requests are cut off")
                        for engine in self._engines:
                            engine.end()
                        self._wait(STOP_S + EXIT_GRACE_S)  # a core may save blocks until `CoreClient.close` kills it
        except KeyboardInterrupt:
            logger.info("stopping at once")

    def _wait(self, timeout_s: float | None) -> bool:
        """Wait for the running engines, at most `timeout_s`. Returns whether all have ended."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._num_running:
            left_s = None if deadline is None else deadline - time.monotonic()
            try:
                error = self._ends.get(timeout=None if left_s is None else max(0.0, left_s))
            except queue.Empty:
                return False
            self._num_running -= 1
            if error is not None:
                raise error
        return True

    def _run(self, engine: _Engine) -> None:
        error: OctavoError | None = None
        try:
            engine.run()
        except OctavoError as found:
            error = found
        except Exception as found:
            logger.exception("%s failed", engine)
            error = LoadError(f"{engine} failed: {type(found).__name__}.")
        self._ends.put(error)
