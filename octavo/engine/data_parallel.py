"""Several engines behind one name (data parallelism): each has the model, a core and a cache of its own, on a share of
this machine, or on another one (`EngineHosts`). `Router` chooses a request's engine by load and cached prompt tokens,
and the request stays there. While a dead engine is started again, the other engines continue its requests and get all
new ones.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

import msgspec

from octavo.config import EngineConfig
from octavo.engine.async_engine import NO_HOOKS, AsyncLLMEngine, EngineHooks
from octavo.engine.core_client import CoreProcess
from octavo.engine.data_parallel_routing import Router, block_hashes
from octavo.engine.engine_calls import EngineCalls, GenerateArgs
from octavo.engine.engine_hosts import EngineHosts, RemoteCore
from octavo.engine.forecast import FirstTokenForecast
from octavo.engine.off_loop import run_off_loop
from octavo.engine.request_stream import Sink
from octavo.engine.vllm_names import check_reset
from octavo.engine.wire import LiveView, Ready
from octavo.errors import EngineDeadError, OctavoError, RequestError
from octavo.lora.request import LoRARequest
from octavo.metrics.prometheus import EngineMetrics
from octavo.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from octavo.request import AdapterSource, EngineRequest
from octavo.stats import EngineStats

T = TypeVar("T")
Asking: TypeAlias = Callable[[AsyncLLMEngine], Awaitable[T]]
_MAX_BLOCKS = 1 << 16  # assumed number of cached blocks of an engine that is not ready yet


class _Forecasts:
    """The forecast of the engine that would have the first token soonest."""

    def __init__(self, of_engines: Callable[[], list[FirstTokenForecast]]) -> None:
        self._of_engines = of_engines

    def seconds(self, num_tokens: int) -> float:
        return min(one.seconds(num_tokens) for one in self._of_engines())

    def seconds_alone(self, num_tokens: int) -> float:
        return min(one.seconds_alone(num_tokens) for one in self._of_engines())


def _open_to_others(config: EngineConfig, options: dict[str, Any]) -> EngineHosts:
    """Listen for engines of other hosts, and have Ray start them if configured. Raises `ConfigError`."""
    assert config.engine_hosts is not None
    if config.engine_hosts.ray_flags is None:
        return EngineHosts(config)
    from octavo.engine.ray_engines import RayEngines

    told = {name: options[name] for name in ("max_restarts", "ready_timeout_s") if name in options}
    others = RayEngines(config, **told)
    try:
        return EngineHosts(others.config, others)
    except BaseException:
        others.close()
        raise


class DataParallelEngine(EngineCalls):
    """`AsyncLLMEngine` over several engines. See there for its methods."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        metrics: EngineMetrics | None = None,
        core: CoreProcess | None = None,
        hooks: EngineHooks = NO_HOOKS,
        **options: Any,
    ) -> None:
        """`core` and `metrics` are for the first engine, `hooks.make_core` for engines of this host, `options` for
        all. It has its own `on_core_death` and `find_takeover_engine`."""
        ranks = config.served_ranks
        self._router = Router(len(ranks), config.cache.block_size, _MAX_BLOCKS)
        self.metrics = metrics
        if metrics is not None:
            length = config.model.max_model_len
            metrics.of_engines += [EngineMetrics(metrics.model_name, length, rank) for rank in ranks[1:]]
            for one in metrics.of_engines:
                one.counts_steps = metrics.counts_steps
        self._engines: list[AsyncLLMEngine] = []
        self._hosts: EngineHosts | None = None
        try:
            if len(ranks) > len(config.local_ranks):
                self._hosts = _open_to_others(config, options)
            for place, rank in enumerate(ranks):
                own_hooks = replace(
                    hooks,
                    on_core_death=partial(self._router.forget, place),
                    find_takeover_engine=partial(self._find_takeover_engine, place),
                    make_core=hooks.make_core if rank in config.local_ranks else partial(self._join, rank),
                )
                self._engines.append(
                    AsyncLLMEngine(
                        config.replica(rank),
                        metrics=None if metrics is None else metrics.of_engines[place],
                        core=core if place == 0 else None,
                        input_processor=self._engines[0].inputs if place else None,
                        hooks=own_hooks,
                        **options,
                    )
                )
        except BaseException:
            if core is not None and not self._engines:
                core.close()
            self.shutdown()
            raise
        first = self._engines[0]
        self.inputs, self.tokenizer = first.inputs, first.tokenizer
        self.forecast = _Forecasts(lambda: [engine.forecast for engine in self._ready or self._engines])
        self._shown_ids: set[str] = set()
        self._has_started = False

    def _join(self, rank: int, config: EngineConfig, core: CoreProcess | None) -> RemoteCore:
        """Wait for the next core of an engine on another host."""
        assert self._hosts is not None
        return RemoteCore(self._hosts, rank)

    @property
    def config(self) -> EngineConfig:
        return self._engines[0].config

    @property
    def forecasts(self) -> list[FirstTokenForecast]:
        return [engine.forecast for engine in self._engines]

    @property
    def stats(self) -> EngineStats:
        """The sum of all engines' statistics."""
        total = EngineStats()
        for engine in self._engines:
            for name in msgspec.structs.fields(EngineStats):
                value = getattr(total, name.name) + getattr(engine.stats, name.name)
                setattr(total, name.name, value)
        return total

    @property
    def _ready(self) -> list[AsyncLLMEngine]:
        return [engine for engine in self._engines if engine.is_ready and not engine.is_draining]

    @property
    def has_failed(self) -> bool:
        """Whether all engines have died, or one has failed to start."""
        count = all if self._has_started else any
        return count(engine.has_failed for engine in self._engines)

    @property
    def fatal_error(self) -> OctavoError | None:
        """Why the engine has ended for good, once all engines have died."""
        errors = [engine.fatal_error for engine in self._engines]
        return errors[0] if all(errors) else None

    @property
    def is_ready(self) -> bool:
        """Whether at least one engine takes requests, after all have been ready once."""
        self._begin_if_ready()
        return self._has_started and bool(self._ready)

    async def wait_ready(self) -> Ready:
        """Return when all engines have been ready once, with the sizes of one."""
        ready = await asyncio.gather(*(engine.wait_ready() for engine in self._engines))
        self._begin()
        return ready[0]

    def _begin_if_ready(self) -> None:
        if len(self._ready) == len(self._engines):
            self._begin()

    def _begin(self) -> None:
        """Note that all engines have been ready."""
        if not self._has_started and self._hosts is not None:
            self._hosts.begin()
        self._has_started = True

    async def check_health(self) -> None:
        errors = [engine.unavailable_error for engine in self._engines]
        if all(errors) and errors[0] is not None:
            raise errors[0]

    async def wait_failed(self) -> None:
        """Return when all engines have died."""
        await asyncio.gather(*(engine.wait_failed() for engine in self._engines))

    async def do_log_stats(self) -> None:
        await self._all(lambda engine: engine.do_log_stats())

    def stop_restarting(self) -> None:
        for engine in self._engines:
            engine.stop_restarting()

    async def prepare(self, args: GenerateArgs) -> EngineRequest:
        request = await self._engines[0].prepare(args)
        if args.lora_request is not None and request.adapter is not None:  # any engine may get the request
            self.name_adapter(args.lora_request.lora_int_id, request.adapter)
        return request

    def name_adapter(self, lora_id: int, source: AdapterSource) -> None:
        for engine in self._engines:
            engine.name_adapter(lora_id, source)

    async def generate_from(
        self, request: EngineRequest, external_id: str | None = None, sink: Sink | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        answer: list[int] = []  # tokens of the first sequence, which its engine has cached
        async with (
            self._route(request, external_id, answer) as engine,
            contextlib.aclosing(engine.generate_from(request, external_id, sink, answer)) as outputs,
        ):
            async for output in outputs:
                yield output

    async def pool(self, request: EngineRequest, external_id: str | None = None) -> PoolingRequestOutput[PoolingOutput]:
        async with self._route(request, external_id, []) as engine:
            return await engine.pool(request, external_id)

    @contextlib.asynccontextmanager
    async def _route(
        self, request: EngineRequest, external_id: str | None, answer: list[int]
    ) -> AsyncGenerator[AsyncLLMEngine, None]:
        """Choose the engine of a request, and count the request as its load while it runs."""
        external_id = external_id or request.request_id
        if external_id in self._shown_ids:
            raise RequestError(f"request id {external_id!r} is in use.", param="request_id")
        self._shown_ids.add(external_id)
        try:
            size = self.config.cache.block_size
            length = len(request.prompt.token_ids)
            hashes = await run_off_loop(lambda: block_hashes(request, size), length=length)
            self._begin_if_ready()
            # While no engine is ready, a request waits for the engine that the router chooses among those that have not
            # failed for good.
            available = [i for i, engine in enumerate(self._engines) if engine in self._ready]
            if request.data_parallel_rank is not None:  # wait for the named engine, or raise its error
                available = [request.data_parallel_rank]
            available = available or [i for i, engine in enumerate(self._engines) if not engine.has_failed]
            if not available:
                await self.check_health()
                raise EngineDeadError("no engine is left.")
            yield self._engines[self._router.route(request, hashes, available)]
        finally:
            self._router.end(request.request_id, answer)
            self._shown_ids.discard(external_id)

    def _find_takeover_engine(self, place: int, request: EngineRequest) -> AsyncLLMEngine | None:
        """Route a request again because its engine has died. Returns its next engine, or None if it waits for its
        own."""
        others = [] if request.data_parallel_rank is not None else self._ready
        available = [i for i, engine in enumerate(self._engines) if i != place and engine in others]
        hashes = block_hashes(request, self.config.cache.block_size)
        chosen = self._router.route(request, hashes, available or [place])
        return None if chosen == place else self._engines[chosen]

    async def abort(self, request_id: str | Iterable[str]) -> None:
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        await self._all(lambda engine: engine.abort(ids))

    async def abort_all_for_shutdown(self) -> None:
        await self._all(lambda engine: engine.abort_all_for_shutdown())

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        return all(await self._all(lambda engine: engine.add_lora(lora_request)))

    async def remove_lora(self, lora_id: int) -> bool:
        return any(await self._all(lambda engine: engine.remove_lora(lora_id)))

    async def list_loras(self) -> set[int]:
        return set[int]().union(*await self._all(lambda engine: engine.list_loras()))

    async def pin_lora(self, lora_id: int) -> bool:
        return all(await self._all(lambda engine: engine.pin_lora(lora_id)))

    async def load_adapter(self, source: AdapterSource) -> None:
        await self._all(lambda engine: engine.load_adapter(source))

    def unload_adapter(self, identity: str) -> None:
        for engine in self._engines:
            engine.unload_adapter(identity)

    async def live_view(self) -> LiveView | None:
        """The block map of the first engine that is ready."""
        return await (self._ready or self._engines)[0].live_view()

    async def is_paused(self) -> bool:
        return any(await self._all(lambda engine: engine.is_paused()))

    async def is_sleeping(self) -> bool:
        return any(await self._all(lambda engine: engine.is_sleeping()))

    async def pause_generation(
        self, mode: str = "abort", *, wait_for_inflight_requests: bool | None = None, clear_cache: bool = True
    ) -> None:
        mode = "wait" if wait_for_inflight_requests else mode
        await self._all(
            lambda engine: engine.pause_generation(mode, clear_cache=clear_cache),
            (lambda engine: engine.is_paused(), lambda engine: engine.resume_generation()),
        )

    async def resume_generation(self) -> None:
        await self._all(lambda engine: engine.resume_generation())

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = True) -> bool:
        check_reset(self.config, reset_running_requests=reset_running_requests, reset_connector=reset_connector)
        self._router.forget_caches()
        return all(await self._all(lambda engine: engine.reset_prefix_cache()))

    async def drop_cache_session(self, session: str, salt: str | None = None) -> int | None:
        found = [n for n in await self._all(lambda engine: engine.drop_cache_session(session, salt)) if n is not None]
        return sum(found) if found else None

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        paused = [engine for engine in self._engines if await engine.is_paused()]

        async def wake(engine: AsyncLLMEngine) -> None:
            await engine.wake_up()
            if engine in paused:
                await engine.pause_generation(clear_cache=False)

        await self._all(lambda engine: engine.sleep(level, mode), (lambda engine: engine.is_sleeping(), wake))
        self._router.forget_caches()

    async def wake_up(self, tags: Iterable[str] | None = None) -> None:
        chosen = None if tags is None else list(tags)
        await self._all(lambda engine: engine.wake_up(chosen))

    def shutdown(self) -> None:
        for engine in self._engines:  # so that they save their blocks at the same time
            engine.begin_shutdown()
        for engine in self._engines:
            engine.shutdown()
        if self._hosts is not None:
            self._hosts.close()

    async def _all(self, ask: Asking[T], undo: tuple[Asking[bool], Asking[None]] | None = None) -> list[T]:
        """Call every engine that has not ended for good, and return the results in order. Raises the first error when
        all have answered. `undo` is a pair: whether an engine is in the wanted state, and a call that ends this state.
        After an error it is called for each engine that has newly entered the state."""
        asked = [engine for engine in self._engines if engine.fatal_error is None] or self._engines
        free = [] if undo is None else [engine for engine in asked if not await undo[0](engine)]
        results = await asyncio.gather(*map(ask, asked), return_exceptions=True)
        found = [result for result in results if not isinstance(result, BaseException)]
        errors = [
            result
            for engine, result in zip(asked, results, strict=True)
            if isinstance(result, BaseException) and (engine.fatal_error is None or not found)
        ]
        if not errors:
            return found
        if undo is not None:
            await asyncio.gather(*[undo[1](engine) for engine in free if await undo[0](engine)], return_exceptions=True)
        raise errors[0]
