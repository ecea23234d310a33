"""A server's engines on other hosts. Each host runs `octavo serve --headless` (`engine_node.py`) and joins here; to
`Supervisor` each of its engines is a core that comes and goes. A host proves that it knows the token, and its version
and settings must equal this one's, as for the nodes of `-pp`. It starts the core's process, and passes messages between
the core and this process. A second connection of each engine carries heartbeats.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from octavo.config import EngineConfig
from octavo.distributed.connection import HANDSHAKE_S, send_message, show_address
from octavo.distributed.heartbeat import Heartbeat
from octavo.distributed.listener import Caller, Listener, Member, has_gone, refuse
from octavo.distributed.messages import Ended, EngineLink, GroupReady, Join, Joined, News, Refused
from octavo.distributed.node_settings import difference, settings_of
from octavo.engine import wire
from octavo.engine.core_client import CoreProcess
from octavo.engine.framing import read_message, write_message
from octavo.errors import ConfigError, EngineDeadError, OctavoError
from octavo.node_token import TOKEN_VARIABLE, check_token, group_token
from octavo.request import EngineRequest
from octavo.version import __version__

if TYPE_CHECKING:
    from octavo.engine.ray_engines import RayEngines

logger = logging.getLogger(__name__)

_FIRST_NOTICE_S, _NOTICE_S = 5.0, 30.0  # log lines about hosts that have not joined
_REASON_S = 1.0  # within this time one connection tells why the other has ended


class _Link(NamedTuple):
    connection: socket.socket
    clock_ahead_s: float  # this host's time minus the other's


class EngineHosts:
    """Where hosts join with their engines. Its methods are thread-safe."""

    def __init__(self, config: EngineConfig, starter: RayEngines | None = None) -> None:
        """Raises `ConfigError` if it cannot listen, or if it needs a token and there is none."""
        assert config.engine_hosts is not None
        hosts, self._starter = config.engine_hosts, starter
        check_token(hosts.address, "--data-parallel-address")
        self._config, self._settings = config, settings_of(config)
        self._lock = threading.Lock()
        self._present: dict[int, Member] = {}  # connected hosts by rank, including those that wait
        self._waiting: dict[int, Member] = {}
        self._awaited: dict[int, Future[Member]] = {}
        self._links: dict[bytes, Future[_Link]] = {}
        self._has_begun = self._is_closed = False
        self._failure: OctavoError | None = None  # a host did not fit or did not join
        self.address = show_address((hosts.address, hosts.port))
        try:
            self._door = Listener((hosts.address, hosts.port), self._take)
        except OSError as error:
            raise ConfigError(
                f"the server of --data-parallel-size cannot listen at {self.address}: {error.strerror or error}. "
                "--data-parallel-address must be an address of this host, and --data-parallel-rpc-port be free."
            ) from None
        secret = f"a token of {TOKEN_VARIABLE}" if group_token() else "no token"
        logger.info("engines of other hosts join at %s, with %s", self.address, secret)
        if starter is not None:
            starter.start(self._fail)

    def begin(self) -> None:
        """Note that all engines have been ready. From now on a host that does not fit is refused, and nothing fails."""
        self._has_begun = True

    def host_of(self, rank: int) -> Future[Member]:
        """Return the next host with an engine of this rank; it may have joined already. Before `begin` this fails if a
        host does not fit or does not join."""
        found: Future[Member] = Future()
        with self._lock:
            waiting = self._waiting.pop(rank, None)
            if self._failure is not None:
                found.set_exception(self._failure)
            elif waiting is not None and not has_gone(waiting.connection):
                found.set_result(waiting)
            else:
                self._awaited[rank] = found
        return found

    def link_of(self, session: bytes) -> Future[_Link]:
        with self._lock:
            return self._links.setdefault(session, Future())

    def forget_link(self, session: bytes) -> None:
        with self._lock:
            self._links.pop(session, None)

    def close(self) -> None:
        """May be called twice."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
            waiting, self._waiting = self._waiting, {}
        if not was_closed:
            self._door.close()
            if self._starter is not None:
                self._starter.close()
            for host in waiting.values():
                refuse(host.connection, Refused("the server has ended"))

    def _take(self, caller: Caller) -> None:
        match caller.message:
            case Join() as join:
                self._take_host(Member("engine", join, caller.connection, caller.host))
            case EngineLink(session, clock_s) if (link := self._links.get(session)) is not None and not link.done():
                link.set_result(_Link(caller.connection, time.monotonic() - clock_s))
            case _:
                caller.connection.close()

    def _take_host(self, host: Member) -> None:
        rank = host.join.rank
        wrong = self._misfit(host.join)
        if wrong is not None:
            refuse(host.connection, Refused(wrong))
            logger.warning("%s cannot join: %s", host, wrong)
            self._fail(ConfigError(f"{host} cannot join: {wrong}."))
            return
        with self._lock:
            other = self._present.get(rank)
            if other is None or has_gone(other.connection):
                self._present[rank] = host
                awaited: Future[Member] | None = self._awaited.pop(rank) if rank in self._awaited else None
                if awaited is None or not awaited.set_running_or_notify_cancel():
                    self._waiting[rank] = host
                else:
                    awaited.set_result(host)
                return
        logger.warning("%s is turned away: there is %s", host, other)
        refuse(host.connection, Refused(f"there is {other} already", may_pass=True))

    def _fail(self, error: OctavoError) -> None:
        """Fail the start, as not all engines have joined."""
        with self._lock:
            if self._has_begun:
                return
            self._failure = error
            for one in self._awaited.values():
                if one.set_running_or_notify_cancel():
                    one.set_exception(error)
            self._awaited.clear()

    def _misfit(self, join: Join) -> str | None:
        own, size = self._config.local_ranks, self._config.data_parallel_size
        if join.version != __version__:
            return f"it is Octavo {join.version}, and node 0 {__version__}"
        if join.rank in own:
            return f"engines {own.start} to {own.stop - 1} are node 0's own, so that --data-parallel-start-rank is more"
        return difference(self._settings, join.settings) or (
            None if 0 <= join.rank < size else f"there are engines 0 to {size - 1}"
        )


class RemoteCore:
    """A core on another host, from the wait for it until its end. See `CoreClient` for its methods."""

    comes_again = True

    def __init__(self, hosts: EngineHosts, rank: int) -> None:
        self.loading_since: float | None = None  # when a host joined with it
        self._hosts, self._rank = hosts, rank
        self._heartbeat: Heartbeat | None = None
        self._is_closing = False
        self._writer: asyncio.StreamWriter | None = None
        self._clock_ahead_s = 0.0
        self._ended: asyncio.Future[None] | None = None
        self._why: str | None = None

    def send(self, message: wire.FrontendMessage) -> None:
        if self._writer is None or self._why is not None:
            raise EngineDeadError(f"engine {self._rank} cannot be reached.")
        if isinstance(message, EngineRequest):
            deadline = None if message.deadline is None else message.deadline - self._clock_ahead_s
            message = msgspec.structs.replace(
                message, arrival_time=message.arrival_time - self._clock_ahead_s, deadline=deadline
            )
        write_message(self._writer, wire.encode_message(message))

    async def receive(self, handle: Callable[[wire.CoreMessage], None]) -> None:
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        if self._why is not None:
            return
        serving = asyncio.ensure_future(self._serve(handle, loop))
        try:
            await asyncio.wait((serving, self._ended), return_when=asyncio.FIRST_COMPLETED)
            if serving.done():  # the connection has ended; the other connection tells why
                await asyncio.wait((self._ended,), timeout=_REASON_S)
            else:
                await asyncio.wait((serving,), timeout=0.1)  # wait for the last message
            if serving.done():
                serving.result()
            self._end(f"the host of engine {self._rank} has hung up")
        except asyncio.CancelledError:  # the owner calls `close`
            raise
        except BaseException:
            self._close("the server's front end has failed")
            raise
        else:
            self._close("the server has left")
        finally:
            serving.cancel()
            if self._writer is not None:
                self._writer.transport.abort()

    async def _serve(self, handle: Callable[[wire.CoreMessage], None], loop: asyncio.AbstractEventLoop) -> None:
        """Pass messages to `handle` until the connection ends or `handle` raises."""
        try:
            host = await self._arrival()
        except OctavoError as error:
            handle(wire.Failed(str(error), expected=True))
            self._end(str(error))
            return
        logger.info("%s has joined", host)
        self.loading_since = time.monotonic()

        def later(why: str) -> None:
            with contextlib.suppress(RuntimeError):  # the server has ended, and its event loop
                loop.call_soon_threadsafe(self._end, why)

        def lose(why: str) -> None:
            logger.error("%s %s", host, why)
            later(f"the host of engine {self._rank} {why}")

        def hear(news: News) -> None:
            if isinstance(news, Ended):
                if self._why is None:
                    logger.error("%s: %s", host, news.reason)
                later(news.reason)

        reader = await self._connect(host, hear, lose)
        while reader is not None:
            try:
                message = self._with_own_clock(wire.decode_core_message(await read_message(reader)))
            except (OSError, EOFError, msgspec.MsgspecError) as error:
                logger.debug("the connection of %s has ended: %r", host, error)
                return
            if isinstance(message, wire.Ready) and self._heartbeat is not None:
                self._heartbeat.be_strict()
                self._heartbeat.say(GroupReady())
            handle(message)

    async def _connect(
        self, host: Member, hear: Callable[[News], None], lose: Callable[[str], None]
    ) -> asyncio.StreamReader | None:
        session = os.urandom(16)
        found = self._hosts.link_of(session)
        try:
            send_message(host.connection, Joined(session, None))
            self._heartbeat = Heartbeat(host.connection, str(host), hear, lose)
            link = await asyncio.wait_for(asyncio.wrap_future(found), 2 * HANDSHAKE_S)
            self._clock_ahead_s = link.clock_ahead_s
            link.connection.setblocking(False)
            reader, self._writer = await asyncio.open_connection(sock=link.connection)
            return reader
        except (OSError, TimeoutError) as error:
            logger.error("%s cannot be reached: %s", host, error or "it does not connect")
            return None
        finally:
            self._hosts.forget_link(session)

    async def _arrival(self) -> Member:
        """Wait for the host. Raises the error of `EngineHosts.host_of`."""
        coming = asyncio.wrap_future(self._hosts.host_of(self._rank))
        wait_s = _FIRST_NOTICE_S
        while True:
            await asyncio.wait((coming,), timeout=wait_s)
            if coming.done():
                return coming.result()
            wait_s = _NOTICE_S
            logger.warning("the server waits for engine %d to join at %s", self._rank, self._hosts.address)

    def _with_own_clock(self, message: wire.CoreMessage) -> wire.CoreMessage:
        if isinstance(message, wire.StepOutputs):
            for output in message.outputs:
                if output.first_scheduled_time:
                    output.first_scheduled_time += self._clock_ahead_s
        return message

    def _end(self, why: str) -> None:
        if self._why is None:
            self._why = why
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def _close(self, reason: str, is_over: bool = False) -> None:
        """Release the connection in a thread, as the other host may be slow or gone."""
        if self._heartbeat is not None and not self._is_closing:
            self._is_closing = True
            closing = partial(self._heartbeat.close, Ended(reason, is_over))
            threading.Thread(target=closing, name="end of an engine", daemon=not is_over).start()

    def end(self) -> None:
        self._close("the server has let it go")
        self._end(f"the host of engine {self._rank} has left")

    def kill(self) -> None:
        self._close("the server has given it up")
        self._end(f"engine {self._rank} was given up")

    def wait(self) -> None:
        """Do nothing: the other host watches the process."""

    def end_reason(self) -> str:
        return self._why or f"the host of engine {self._rank} is gone"

    def successor(self) -> CoreProcess | None:
        return None

    def begin_close(self, saving_s: float) -> None:
        """End as `close` does, which does not wait. The other host says how long its core may save blocks."""
        self.close()

    def close(self) -> None:
        self._close("the server has ended", is_over=True)
        self._end(f"the host of engine {self._rank} has left")
        if self._writer is not None:
            with contextlib.suppress(RuntimeError):  # its event loop has ended
                self._writer.transport.abort()
