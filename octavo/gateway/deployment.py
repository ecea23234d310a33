"""The entries of the catalogue: models and their replicas, from the first request to the end of the idle time, and
adapters of models.

States of a model that the gateway starts: stopped -> waiting (for memory) -> starting -> ready -> stopping -> stopped.
A model at addresses is always ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, Literal

from octavo.api_keys import key_of
from octavo.errors import RequestError
from octavo.gateway.catalogue import ModelEntry
from octavo.gateway.client_keys import Key
from octavo.gateway.discovery import follow, read_source
from octavo.gateway.memory_budget import MemoryBudget
from octavo.gateway.replica import Replica
from octavo.gateway.replica_router import Load, ReplicaRouter
from octavo.gateway.serve_process import RunningServer, StartError
from octavo.gateway.upstream import Upstream

logger = logging.getLogger("octavo.gateway")

Launch = Callable[[str, ModelEntry], Awaitable[RunningServer]]
State = Literal["stopped", "waiting", "starting", "ready", "stopping"]
DISCOVERY_WAIT_S = 5.0  # for the first addresses of replicas
HANG_TIMEOUT_S = 60.0  # without an answer to health checks: then a server is killed
LAST_CHECK_S = 5.0  # at least, for the check after which it is killed
EXIT_WAIT_S = 1.0  # a process that was killed hangs up before the system says that it has ended
MIN_BACKOFF_S, MAX_BACKOFF_S = 1.0, 60.0  # between starts that fail


class Deployment(ABC):
    """One entry of the catalogue; texts call it the model."""

    def __init__(self, name: str, entry: ModelEntry, load: Load | None) -> None:
        """`load` is shared by the entries with these servers."""
        self.name, self.entry = name, entry
        self.stands_in_for: set[str] = set()  # names and aliases of models whose canary it is
        self.router = ReplicaRouter(load=load)
        self.last_used = time.monotonic()
        self.num_starts, self.num_failed_starts = 0, 0
        self.num_held = 0  # requests that wait or are being answered
        self.has_cut_off_requests = False  # so none sends anything more to a replica
        self._is_retired = self._is_closed = False
        self._closing: asyncio.Future[None] | None = None

    @property
    @abstractmethod
    def base(self) -> ModelDeployment:
        """The model whose servers answer."""

    @property
    @abstractmethod
    def state(self) -> State: ...

    @property
    @abstractmethod
    def replicas(self) -> list[Replica]: ...

    @property
    @abstractmethod
    def num_requests(self) -> int:
        """The requests for this name that wait or are being answered."""

    @property
    def has_ended(self) -> bool:
        """Whether nothing is left of an entry that was retired."""
        return self._is_closed and not self.num_held

    @property
    def restarting(self) -> list[str]:
        """The names of replicas that have ended and are started again."""
        return [] if self.state != "ready" else [task.get_name() for task in self.base._restarts if not task.done()]

    @property
    def replica_names(self) -> set[str]:
        """The names of the replicas that there are or may be again."""
        base = self.base
        places = range(base.entry.num_replicas) if base.entry.is_local else ()
        return {*map(str, places), *(one.name for one in (*base.replicas, *base._gone))}

    @property
    def served_name(self) -> str:
        """The model's name at its replicas."""
        return self.entry.served_model_name or self.name

    @property
    def answering_names(self) -> set[str]:
        """The names of the entries that may answer a request for this one."""
        return {self.name, *self.entry.fallbacks, *self.entry.canaries}

    def may_be_used_by(self, key: Key | None) -> bool:
        """Return whether a client's key is for this model."""
        return key is None or key.may_use({self.name, *self.entry.aliases, *self.stands_in_for})

    def canary_of(self, conversation: bytes | None) -> str | None:
        """Return the name of the entry that answers a conversation in this one's place, if there is one. All turns of a
        conversation, of which `conversation` is a digest, have the same; None: a request without any."""
        if not self.entry.canaries:
            return None
        seed = os.urandom(8) if conversation is None else conversation
        drawn = int.from_bytes(hashlib.blake2b(b"canary " + seed, digest_size=4).digest()) / 2**32 * 100
        for name, percentage in self.entry.canaries.items():
            if (drawn := drawn - percentage) < 0:
                return name
        return None

    @abstractmethod
    def change(self, entry: ModelEntry) -> None:
        """Take a new entry, which asks for the same replicas."""

    @abstractmethod
    async def ready(self) -> None:
        """Return when the model has replicas; start it if it is not being started. Raises `RequestError` if it does not
        start."""

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Keep the model from being stopped while a request needs it."""
        self.num_held += 1
        try:
            yield
        finally:
            self.num_held -= 1
            self.last_used = time.monotonic()
            if not self.num_held:
                self._on_idle()

    @contextlib.contextmanager
    def in_flight(self, replica: Replica) -> Iterator[None]:
        """Count a request as in flight at a replica, and close the replica after it if the model has it no longer."""
        self.router.begin(replica)
        try:
            yield
        finally:
            self.router.end(replica)
            self.base.close_if_gone(replica)

    async def wait_for_addresses(self) -> None:
        """Wait for the first addresses of replicas that are discovered, for some seconds at most."""
        base = self.base
        if base.entry.discover is not None and not base.has_addresses.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DISCOVERY_WAIT_S):
                    await base.has_addresses.wait()

    def cut_off_requests(self) -> None:
        """End all requests, waiting or being answered, with errors."""
        self._is_closed = self.has_cut_off_requests = True

    async def retire(self) -> None:
        """Stop for good, once the requests under way have ended."""
        self._is_retired = True
        if not self.num_held:
            await self.close()

    @abstractmethod
    async def close(self) -> None:
        """Stop now, in whatever state."""

    def _on_idle(self) -> None:
        if self._is_retired:
            self._closing = asyncio.ensure_future(self.close())


class AdapterDeployment(Deployment):
    """An adapter: a further name of the servers of `base`, which starts and stops with it."""

    def __init__(self, name: str, entry: ModelEntry, base: ModelDeployment) -> None:
        super().__init__(name, entry, base.router.load)
        self._base = base
        self._views: dict[Replica, Replica] = {}  # the replicas of `base` under the adapter's name
        self.router.is_for_adapter = True
        base.adapters.append(self)

    @property
    def base(self) -> ModelDeployment:
        return self._base

    @property
    def state(self) -> State:
        return self.base.state

    @property
    def replicas(self) -> list[Replica]:
        for one in self.base.replicas:
            if one not in self._views:
                self._views[one] = one.serving(self.name)
        return [self._views[one] for one in self.base.replicas]

    @property
    def num_requests(self) -> int:
        return self.num_held

    def change(self, entry: ModelEntry) -> None:
        self.entry = entry

    async def ready(self) -> None:
        await self.base.ready()

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        with super().hold(), self.base.hold():
            yield

    def forget(self, replica: Replica) -> None:
        """Forget a server of `base` that has ended."""
        if (view := self._views.pop(replica, None)) is not None:
            self.router.forget(view)

    async def close(self) -> None:
        self._is_closed = True


class ModelDeployment(Deployment):
    """A model with servers of its own: `launch` starts them, or they are at addresses."""

    def __init__(
        self, name: str, entry: ModelEntry, budget: MemoryBudget, launch: Launch, *, replica_timeout_s: float,
        load: Load | None = None,
    ) -> None:  # fmt: skip
        super().__init__(name, entry, load)
        self._replicas: list[Replica] = []
        self._state: State = "stopped"
        self.start_s = 5.0  # what the last start took
        self._budget, self._launch, self._timeout_s = budget, launch, replica_timeout_s
        self._servers: dict[Replica, RunningServer] = {}
        self.adapters: list[AdapterDeployment] = []
        self._starting: asyncio.Task[None] | None = None
        self._waits: set[asyncio.Future[None]] = set()  # one for each request that waits for the start
        self._stopping: asyncio.Task[None] | None = None
        self._restarts: set[asyncio.Task[None]] = set()
        self._idle_timer: asyncio.TimerHandle | None = None
        self._failure: StartError | None = None
        self._asked_keep_alive: float | None = None
        self._backoff_s, self._retry_at = MIN_BACKOFF_S, 0.0
        self._discovering: asyncio.Task[None] | None = None
        self.has_addresses = asyncio.Event()  # for a model whose replicas are discovered
        self._gone: set[Replica] = set()  # no longer discovered, but still answering
        if not entry.is_local:
            self._replicas = [self._replica_at(address) for address in entry.addresses]
            self._state = "ready"

    @property
    def base(self) -> ModelDeployment:
        return self

    @property
    def state(self) -> State:
        return self._state

    @property
    def replicas(self) -> list[Replica]:
        return self._replicas

    def begin_discovery(self) -> None:
        """Begin to follow the replicas' addresses, if the entry names a source of them."""
        if self.entry.discover is not None and self._discovering is None and not self._is_closed:
            self._discovering = asyncio.ensure_future(follow(read_source(self.entry.discover), self._move_to))

    @property
    def num_requests(self) -> int:
        """The requests for this name alone; `num_held` counts those for the adapters too."""
        return self.num_held - sum(one.num_held for one in self.adapters)

    @property
    def is_idle(self) -> bool:
        return self.state == "ready" and not self.num_held

    @property
    def may_start(self) -> bool:
        """Whether the model has stopped, and no pause after a failed start is under way."""
        return self.state == "stopped" and not self._is_pausing

    @property
    def _is_pausing(self) -> bool:
        """Whether a start has failed, and the next one is not due yet."""
        return self._failure is not None and time.monotonic() < self._retry_at

    @property
    def is_stopping(self) -> bool:
        return self.state == "stopping"

    @property
    def keep_alive(self) -> float | None:
        """Return the seconds without a request after which the model stops; None: never. A client's wish holds until
        the model stops."""
        asked = self.entry.keep_alive if self._asked_keep_alive is None else self._asked_keep_alive
        return None if asked is None or math.isinf(asked) else asked

    @property
    def has_ended(self) -> bool:
        return super().has_ended and (self.state == "stopped" or not self.entry.is_local)

    def change(self, entry: ModelEntry) -> None:
        before, self.entry = self.keep_alive, entry
        if self.is_idle and self.keep_alive != before:
            self._on_idle()

    def ask_to_keep(self, seconds: float | None) -> None:
        """Have the model stop after this time without a request; None changes nothing."""
        if seconds is not None:
            self._asked_keep_alive = seconds
            if self.is_idle:
                self._on_idle()

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        self._cancel_idle_timer()
        with super().hold():
            yield

    async def ready(self) -> None:
        while self.state != "ready":
            if self._is_closed:
                raise RequestError(f"The model {self.name} is being stopped.", status=503, code="stopping")
            if self._starting is None or self._starting.done():
                if self._failure is not None and self._is_pausing:
                    raise self._refusal(self._failure, self._retry_at - time.monotonic())
                self._starting = asyncio.ensure_future(self._start())
                self._starting.add_done_callback(lambda task: task.cancelled() or task.exception())
            starting = self._starting
            wait = asyncio.shield(starting)
            self._waits.add(wait)
            try:
                await wait
            except StartError as error:
                raise self._refusal(error, self._retry_at - time.monotonic()) from None
            except asyncio.CancelledError:
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    raise
                # The request that began the start was cancelled, so this one begins it again; or all requests are cut
                # off.
            finally:
                self._waits.discard(wait)
                del wait, starting  # their error's traceback has this frame, so the variables would make a cycle

    async def wait_for_exits(self, replicas: Iterable[Replica]) -> None:
        """Wait until the processes of replicas that hung up have ended, for `EXIT_WAIT_S` at most."""
        failed = {one.upstream for one in replicas if one.breaker.num_failures}
        ends = {server.exited for one, server in self._servers.items() if one.upstream in failed}
        if ends:
            await asyncio.wait(ends, timeout=EXIT_WAIT_S)

    def kill_hanging(self) -> None:
        """Kill servers that have not answered health checks for `HANG_TIMEOUT_S`. What follows is as after a crash."""
        for replica, server in self._servers.items():
            if replica.is_silent(HANG_TIMEOUT_S):
                replica.checks.silent_since = None
                logger.error("%s: replica %s hangs and is killed: %s", self.name, replica.name, replica.checks.problem)
                server.kill()

    def begin_stop(self) -> None:
        """Stop the replicas; the memory is released when their processes have ended."""
        if self._stopping is None and self.state == "ready" and self.entry.is_local:
            self._state = "stopping"
            self._stopping = asyncio.ensure_future(self._stop())

    def cut_off_requests(self) -> None:
        super().cut_off_requests()
        _cancel(self._starting)
        for wait in self._waits:
            wait.cancel()
        for replica in (*self.replicas, *self._gone):
            replica.upstream.close()

    def close_if_gone(self, replica: Replica) -> None:
        """Close the connections to a replica that is no longer discovered, once it has no request."""
        if replica in self._gone and not replica.num_in_flight:
            self._gone.discard(replica)
            replica.upstream.close()

    async def close(self) -> None:
        self._is_closed = True
        self._cancel_idle_timer()
        tasks = [*self._restarts, *filter(None, (self._starting, self._discovering))]
        _cancel(*tasks)
        await asyncio.gather(*tasks, return_exceptions=True)
        self.begin_stop()
        if self._stopping is not None:
            await asyncio.shield(self._stopping)
        for replica in (*self.replicas, *self._gone):
            replica.upstream.close()

    def _replica_at(self, address: str) -> Replica:
        key = None if self.entry.api_key_env is None else key_of(self.entry.api_key_env)
        upstream = Upstream(address, timeout_s=self._timeout_s)
        return Replica(address, upstream, self.served_name, key, self.entry.health)

    def _move_to(self, addresses: list[str]) -> None:
        """Have replicas at these addresses only. Replicas that have gone may still end the answers that they have
        begun."""
        before = {replica.name: replica for replica in self.replicas}
        self._replicas = [
            before.pop(address) if address in before else self._replica_at(address) for address in addresses
        ]
        for gone in before.values():
            self.router.forget(gone)
            self._gone.add(gone)
            self.close_if_gone(gone)
        logger.info("%s: the replicas are at %s", self.name, ", ".join(addresses) or "no address")
        self.has_addresses.set()

    def _refusal(self, error: StartError, wait_s: float) -> RequestError:
        message = f"The model {self.name} did not start: {error}"
        retry_after_s = max(1, round(wait_s)) if error.may_pass else None
        return RequestError(message, status=503, code="start_failed", retry_after_s=retry_after_s)

    async def _start(self) -> None:
        begin = time.monotonic()
        try:
            if self._stopping is not None:
                await asyncio.shield(self._stopping)
            self._state = "waiting"
            await self._budget.reserve(self, self.entry.total_gib)
            try:
                self._state = "starting"
                self.num_starts += 1
                logger.info("%s: starts", self.name)
                await self._start_servers()
            except BaseException:
                self._budget.release(self)
                raise
        except StartError as error:
            self.num_failed_starts += 1
            self._failure, self._retry_at = error, time.monotonic() + self._backoff_s
            self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)
            logger.error("%s: did not start: %s", self.name, error)
            raise
        else:
            self._failure, self._backoff_s = None, MIN_BACKOFF_S
            self.start_s = time.monotonic() - begin
            self._state = "ready"
            if not self.num_held:
                self._on_idle()
        finally:
            if self.state != "ready":
                self._state = "stopped"
            self._starting = None

    async def _start_servers(self) -> None:
        """Start all replicas beside each other. If one does not start, none is left."""
        launches = [asyncio.ensure_future(self._launch_one(str(i))) for i in range(self.entry.num_replicas)]
        try:
            self._replicas = list(await asyncio.gather(*launches))
            if not all(replica in self._servers for replica in self.replicas):
                raise StartError("a replica ended right after its start")
        except BaseException:
            _cancel(*launches)
            await asyncio.gather(*launches, return_exceptions=True)
            self._replicas = []
            await self._stop_servers()
            raise
        finally:
            del launches  # the same cycle as in `ready`

    async def _launch_one(self, name: str) -> Replica:
        server = await self._launch(self.name, self.entry)
        upstream = Upstream(server.address, timeout_s=self._timeout_s)
        replica = Replica(name, upstream, self.served_name, server.api_key)
        self._servers[replica] = server
        server.exited.add_done_callback(lambda _: self._on_exit(replica))
        return replica

    def _on_exit(self, replica: Replica) -> None:
        """Note that a process has ended. If it was not told to, another one takes its place. Its connections end by
        themselves, once what it has sent before its end is read."""
        self._servers.pop(replica, None)
        if replica not in self.replicas:
            return
        self._replicas.remove(replica)
        self._forget(replica)
        if self.state != "ready":
            return
        logger.error("%s: replica %s has ended by itself", self.name, replica.name)
        if not self.replicas:  # the next request starts the model again
            self.begin_stop()
            return
        restart = asyncio.create_task(self._restart(replica.name), name=replica.name)
        self._restarts.add(restart)
        restart.add_done_callback(self._restarts.discard)

    def _forget(self, replica: Replica) -> None:
        """Forget a server that has ended, under all of its names."""
        self.router.forget(replica)
        for adapter in self.adapters:
            adapter.forget(replica)

    async def _restart(self, name: str) -> None:
        pause_s = MIN_BACKOFF_S
        while True:
            self.num_starts += 1
            try:
                self._replicas.append(await self._launch_one(name))
                return
            except StartError as error:
                self.num_failed_starts += 1
                logger.error("%s: replica %s did not start: %s; next try in %g s", self.name, name, error, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_BACKOFF_S)

    def _on_idle(self) -> None:
        super()._on_idle()
        if self._is_retired:
            return
        if self._starting is not None and self.state == "waiting":
            _cancel(self._starting)  # no request waits for it any more
        elif self.state == "ready" and self.entry.is_local:
            self._cancel_idle_timer()
            if self.keep_alive is not None:
                loop = asyncio.get_running_loop()
                self._idle_timer = loop.call_later(self.keep_alive, self._on_idle_end)
            self._budget.look()

    def _cancel_idle_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

    def _on_idle_end(self) -> None:
        if self.is_idle:
            if self._asked_keep_alive == 0:
                logger.info("%s: stops, as a client has asked for it", self.name)
            else:
                logger.info("%s: stops, as its keep_alive of %g s is over", self.name, self.keep_alive or 0.0)
            self.begin_stop()

    async def _stop(self) -> None:
        restarts = list(self._restarts)
        _cancel(*restarts)
        await asyncio.gather(*restarts, return_exceptions=True)
        for replica in self.replicas:
            self._forget(replica)
            replica.upstream.close()
        self._replicas = []
        await self._stop_servers()
        self._state, self._stopping, self._asked_keep_alive = "stopped", None, None
        self._budget.release(self)

    async def _stop_servers(self) -> None:
        await asyncio.gather(*(server.stop() for server in list(self._servers.values())))
        self._servers.clear()


def _cancel(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel tasks once: a second time would interrupt their clean-up, and leave processes."""
    for task in tasks:
        if task is not None and not task.cancelling():
            task.cancel()
