"""The deployments of a catalogue, and their changes when the catalogue changes."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from weakref import WeakValueDictionary

import msgspec

from octavo.errors import RequestError
from octavo.gateway.catalogue import Catalogue, ModelEntry, check_memory
from octavo.gateway.deployment import (
    HANG_TIMEOUT_S,
    LAST_CHECK_S,
    AdapterDeployment,
    Deployment,
    Launch,
    ModelDeployment,
)
from octavo.gateway.memory_budget import MemoryBudget
from octavo.gateway.notes import read_notes
from octavo.gateway.replica import Replica
from octavo.gateway.replica_router import Load

logger = logging.getLogger("octavo.gateway")

FindLocal = Callable[[], dict[str, ModelEntry]]  # returns the models on this machine


class Models:
    """All models that can be asked for."""

    def __init__(
        self, catalogue: Catalogue, budget: MemoryBudget, launch: Launch, *, replica_timeout_s: float,
        find_local: FindLocal | None = None,
    ) -> None:  # fmt: skip
        """With `find_local` the models are those on this machine; it is called again to find new ones."""
        self.budget = budget
        self._find_local = find_local
        self._launch, self._replica_timeout_s = launch, replica_timeout_s
        self._deployments: dict[str, Deployment] = {}
        self._aliases: dict[str, str] = {}
        self._loads = WeakValueDictionary[tuple[str | None, ...], Load]()
        self._looking = asyncio.Lock()
        self._num_begun = self._last_done = 0  # searches for models, and the last complete one
        self._retired: list[Deployment] = []  # no longer in the catalogue, but may still answer
        self._tasks: set[asyncio.Future[None]] = set()
        self._preloads: dict[Deployment, asyncio.Future[None]] = {}  # under way
        self.apply(catalogue)

    def __iter__(self) -> Iterator[Deployment]:
        return iter(self._deployments.values())

    def __len__(self) -> int:
        return len(self._deployments)

    def names(self) -> dict[str, Deployment]:
        """Names and aliases."""
        return self._deployments | {alias: self._deployments[name] for alias, name in self._aliases.items()}

    def replica_names(self) -> set[tuple[str, str]]:
        """Return the name of each replica with its model's, also of models that have left the catalogue but still
        answer."""
        return {(one.name, replica) for one in self._lasting() for replica in one.replica_names}

    @property
    def is_open(self) -> bool:
        """Return whether models come and go with the files on this machine."""
        return self._find_local is not None

    async def look_for_more(self) -> None:
        """Find the models on this machine again, if the gateway serves those. A thread reads the folders."""
        if self._find_local is None:
            return
        num_begun = self._num_begun
        async with self._looking:
            if self._last_done > num_begun:  # a search that began after this request came
                return
            self._num_begun += 1
            number = self._num_begun
            self.apply(Catalogue(await asyncio.to_thread(self._find_local)))
            self._last_done = number

    async def look_for(self, name: str | None) -> None:
        """Find the models on this machine again if a client asks for a name that is not known yet."""
        if self.is_open and name is not None and name not in self.names():
            await self.look_for_more()

    def find(self, name: str) -> Deployment:
        """Return the deployment of a name or alias. Raises `RequestError` (404)."""
        deployment = self._deployments.get(self._aliases.get(name, name))
        if deployment is None:
            raise RequestError(
                f"The model {name:.200} does not exist; GET /v1/models lists those that do.",
                param="model", status=404, code="model_not_found",
            )  # fmt: skip
        return deployment

    def apply(self, catalogue: Catalogue) -> None:
        """Serve the models of this catalogue from now on. Models that it changes stop once their requests have ended;
        the others go on. Raises `ConfigError`, and then nothing has changed."""
        check_memory(catalogue, self.budget.total_gib)
        catalogue = catalogue.with_adapters()
        before, after = dict(self._deployments), dict[str, Deployment]()
        entries = sorted(catalogue.models.items(), key=lambda item: item[1].adapter_of is not None)  # bases first
        for name, entry in entries:
            kept, base = before.get(name), after.get(entry.adapter_of or "")
            is_same = kept is not None and _what_runs(kept.entry) == _what_runs(entry)
            if kept is not None and is_same and kept.base is (base or kept):
                kept.change(entry)
                after[name] = before.pop(name)
            else:
                after[name] = self._made(name, entry) if base is None else AdapterDeployment(name, entry, base.base)
        after = {name: after[name] for name in catalogue.models}  # in the file's order
        self._deployments = after
        self._aliases = {alias: name for name, entry in catalogue.models.items() for alias in entry.aliases}
        for deployment in after.values():
            deployment.stands_in_for = set()
        for name, entry in catalogue.models.items():
            for canary in entry.canaries:
                after[canary].stands_in_for |= {name, *entry.aliases}
        self._retired = [one for one in self._retired if not one.has_ended]
        for gone in before.values():
            if (preload := self._preloads.pop(gone, None)) is not None:
                preload.cancel()  # no client waits for it, and its turn for memory is another model's
            self._retired.append(gone)
            self._spawn(gone.retire())

    def _made(self, name: str, entry: ModelEntry) -> ModelDeployment:
        return ModelDeployment(
            name, entry, self.budget, self._launch, replica_timeout_s=self._replica_timeout_s, load=self._load_of(entry)
        )

    def _load_of(self, entry: ModelEntry) -> Load | None:
        """Return what an entry shares with others that have the same addresses."""
        if entry.is_local:
            return None
        return self._loads.setdefault((entry.discover, *sorted(entry.addresses)), Load())

    def preload(self) -> None:
        """Start the models that are marked `preload`, and begin to discover replicas."""
        for deployment in self:
            deployment.base.begin_discovery()
            if deployment.entry.preload:
                self.start(deployment.base)

    def start(self, deployment: ModelDeployment) -> None:
        """Start a model that has stopped, though no request waits for it."""
        if deployment.may_start and deployment not in self._preloads:
            self._preloads[deployment] = self._spawn(self._preload_one(deployment))

    def start_aside(self, deployment: Deployment) -> None:
        """Start a model that has stopped, if it takes no other model's place in memory."""
        if self.budget.has_room(deployment.base.entry.total_gib):
            self.start(deployment.base)

    async def wait_discovered(self, timeout_s: float) -> None:
        """Wait until every model whose replicas are discovered has addresses, for `timeout_s` at most."""
        waiting = [
            asyncio.ensure_future(one.base.has_addresses.wait()) for one in self if one.entry.discover is not None
        ]
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=timeout_s)
            for one in late:
                one.cancel()

    async def check_health(self, timeout_s: float) -> None:
        """Ask all replicas for their health, and kill servers that hang."""
        models = {one.base: None for one in self._lasting()}
        checks = (self._check(one, timeout_s) for model in models for one in model.replicas)
        await asyncio.gather(read_notes(self, timeout_s), *checks)
        for model in models:
            model.kill_hanging()

    async def read_notes(self, timeout_s: float) -> None:
        """Read the notes of all servers, for `timeout_s` at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await read_notes(self, timeout_s)

    async def close(self) -> None:
        """Stop everything."""
        every = [*self, *self._retired]
        await asyncio.gather(*(deployment.close() for deployment in every), *self._tasks, return_exceptions=True)

    def cut_off_requests(self) -> None:
        """End the requests under way, with errors."""
        for deployment in [*self, *self._retired]:
            deployment.cut_off_requests()

    def _lasting(self) -> list[Deployment]:
        """Return the models of the catalogue, and those that have left it but still answer."""
        return [*self, *(one for one in self._retired if not one.has_ended)]

    def _spawn(self, work: object) -> asyncio.Future[None]:
        task: asyncio.Future[None] = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _preload_one(self, deployment: Deployment) -> None:
        try:
            with deployment.hold():
                await deployment.ready()
        except RequestError as error:
            logger.error("%s", error)
        finally:
            self._preloads.pop(deployment, None)

    async def _check(self, replica: Replica, timeout_s: float) -> None:
        was_healthy = replica.is_healthy
        if replica.is_silent(HANG_TIMEOUT_S - LAST_CHECK_S):  # a busy server may be too slow for a short interval
            timeout_s = max(timeout_s, LAST_CHECK_S)
        await replica.check_health(timeout_s)
        if replica.is_healthy != was_healthy:
            state = "is healthy again" if replica.is_healthy else f"gets no requests: {replica.checks.problem}"
            logger.warning("%s at %s %s", replica.served_name, replica.upstream.address, state)


def _what_runs(entry: ModelEntry) -> ModelEntry:
    """Return an entry without the fields that may change while its replicas run."""
    return msgspec.structs.replace(
        entry, aliases=[], fallbacks=[], canaries={}, keep_alive=None, preload=False, start_timeout=None,
        prefill_model=None, prefill_min_tokens=1,
    )  # fmt: skip
