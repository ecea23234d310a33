"""The engine core: takes requests, runs steps, returns sequence outputs. It knows tokens; the front end knows text.

`EngineCore` is synchronous and single-threaded. `LLM` calls it in its own process; for servers `core_process` runs it
in another one.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.config import DiskCacheConfig, EngineConfig
from octavo.engine.adapter_library import AdapterLibrary
from octavo.engine.kv_event_publisher import KVEventPublisher
from octavo.engine.pending_requests import LoadingAdapter, PendingRequest
from octavo.engine.wire import AdapterLoaded, LiveView, StepOutputs
from octavo.errors import DeviceMemoryError, RequestError
from octavo.kv_cache.disk_tier import DiskTier
from octavo.kv_cache.host_tier import HostTier
from octavo.kv_cache.manager import KVCacheManager
from octavo.loading.memory import GIB
from octavo.lora.pool import AdapterPool
from octavo.request import AdapterSource, EngineRequest, SequenceOutput
from octavo.scheduling.scheduler import Scheduler
from octavo.sequence import Sequence
from octavo.speculative.methods import make_speculation
from octavo.stats import EngineStats
from octavo.step_cost import StepCostModel
from octavo.step_plan import StepPlan

if TYPE_CHECKING:
    from octavo.execution.executor import LocalExecutor, PendingStep
    from octavo.speculative.speculation import Speculation

logger = logging.getLogger(__name__)

_PREPARE_WAIT_S = 0.01  # longest wait before the core process looks for messages

# Rough bytes and operations per second of a machine, to predict the first steps (`StepCostModel.derived`).
_MACHINES = {"cpu": (10e9, 300e9), "cuda": (2e12, 2e14)}


@dataclass(slots=True)
class _InFlightStep:
    """A step that the device has been given."""

    plan: StepPlan
    pending: PendingStep
    begin: float  # time.monotonic, before it was planned
    predicted_s: float
    tower_running: bool  # a tower computes at the same time


class EngineCore:
    """A scheduler and an executor. On a device that runs ahead the scheduler plans a step while the last one runs."""

    def __init__(
        self,
        config: EngineConfig,
        executor: LocalExecutor | None = None,
        speculation: Speculation | None = None,
        on_loading: Callable[[float], None] | None = None,
    ) -> None:
        """`on_loading` is called with the share of the weights that are loaded. Tests pass an executor and a
        speculation of their own."""
        weights: Future[list[str]] | None = None
        if config.cache.disk is not None:
            from octavo.execution.cache_fingerprint import identify_weights

            weights = identify_weights(config, config.cache.disk)  # while they are loaded
        if executor is None:
            from octavo.execution.executor import make_executor  # late: it imports kernels

            executor = make_executor(config, on_loading)
        self.executor = executor
        cache = KVCacheManager(
            executor.cache_groups, executor.num_blocks, config.cache.block_size, executor.num_host_blocks,
            config.cache.enable_prefix_caching,
        )  # fmt: skip
        num_slots = max(1, sum(executor.num_blocks) * config.cache.block_size)
        self.cost = StepCostModel.derived(
            executor.weight_bytes, executor.cache_bytes // num_slots, *_MACHINES[config.device]
        )
        if speculation is None:
            max_draft_len = config.draft.max_model_len if config.draft is not None else 0
            speculation = make_speculation(config.speculative, self.cost, max_draft_len)
        self.adapters: AdapterLibrary | None = None
        if config.lora is not None:
            memory = executor.adapter_memory
            pool = AdapterPool(memory.num_pages, memory.num_slots, config.lora.max_loras)
            self.adapters = AdapterLibrary(executor, pool, config.lora.max_cpu_loras)
        self.scheduler = Scheduler(
            config.scheduler, cache, executor.runs_ahead, speculation, self.cost,
            None if self.adapters is None else self.adapters.pool, executor.num_stages,
        )  # fmt: skip
        if config.cache.host_bytes:
            self.scheduler.host_tier = HostTier(cache, executor.part_bytes, self.cost)
        self.disk: DiskTier | None = None
        if config.cache.disk is not None and weights is not None:
            self.disk = _open_disk(config, config.cache.disk, weights.result(), executor, self.scheduler, self.cost)
            weakref.finalize(self, self.disk.close)
            self.scheduler.fetches = self.disk.fetches
            self.scheduler.queues.on_end += self._disk_hooks(self.disk)
        self._publisher: KVEventPublisher | None = None
        if config.cache.events is not None and (events := cache.collect_events()) is not None:
            self._publisher = KVEventPublisher(config.cache.events, config.data_parallel_rank, events.take)
            weakref.finalize(self, self._publisher.close)
        self._takes_media = any(one is not None for one in (config.media, config.sound, config.prompt_embeds))
        self.is_paused = False  # nothing is computed; adapters are still read
        self.on_admission: Callable[[list[str]], None] | None = None  # called with the running requests
        self._in_flight: deque[_InFlightStep] = deque()
        self._last_end = 0.0  # time.monotonic, of the last step
        self._refused: list[SequenceOutput] = []
        self._pending: dict[str, PendingRequest] = {}  # in order of arrival
        self._has_adapter_room = self._has_media_room = True  # False: a request found no room; later ones do not look
        self._loading: list[LoadingAdapter] = []  # adapters that no request waits for

    @property
    def has_work(self) -> bool:
        if self.is_paused:  # adapters are read all the same: callers load new ones before they resume
            return bool(self._loading)
        if self.disk is not None and self.disk.saved_prompts.holds_outputs:
            return True
        return self.scheduler.has_work or bool(self._in_flight) or bool(self._refused or self._pending or self._loading)

    def add(self, request: EngineRequest) -> None:
        """Queue a request. If it can never run, the next step's outputs have its error."""
        if self.disk is not None:
            self.disk.saved_prompts.expect(request)
        if request.params.grammar is None and request.adapter is None and not request.media:
            self._queue(request)
            return
        pending = PendingRequest(request)
        if request.params.grammar is not None:
            pending.grammar = self.executor.prepare_grammar(request.params.grammar, request)
        self._pending[request.request_id] = pending
        self._prepare([pending])

    def abort(self, request_id: str, index: int | None = None) -> None:
        if index is None:
            self._pending.pop(request_id, None)
            if self.disk is not None:
                self.disk.saved_prompts.forget(request_id)
        self.scheduler.abort(request_id, index)

    def abort_all(self, prefix: str) -> None:
        """Abort the requests whose ids begin with `prefix`."""
        for request_id in (*self._pending, *self.scheduler.queues.requests):
            if request_id.startswith(prefix):
                self.abort(request_id)

    def reset_prefix_cache(self, *, frees_memory: bool = False) -> None:
        """Empty the prefix cache, also on disk. With `frees_memory` keep the blocks on disk, and give the cache's
        memory back to the system; no request may be running then."""
        if self.disk is not None:
            if frees_memory:
                self.disk.save_all()
            self.disk.forget_pools(removes_files=not frees_memory)
        (self.scheduler.host_tier or self.scheduler.cache).forget_prefixes()
        if self._publisher is not None:
            self._publisher.publish()
        if frees_memory:
            self.executor.release_cache()

    def save_blocks(self) -> bool:
        """Save a cached block on disk while there is nothing to compute. Returns whether unsaved blocks may be left."""
        return self.disk is not None and self.disk.save_while_idle()

    def load_adapter(self, source: AdapterSource, pins: bool = False) -> None:
        """Read an adapter into the host's memory. A later step's outputs say when it is there."""
        self._loading.append(one := LoadingAdapter(source, pins))
        if self.adapters is not None:
            with contextlib.suppress(RequestError):  # the next step reports it
                # Now, before the adapters of later requests.
                one.ready = self.adapters.start_reading(source, self._adapters_in_use)

    def unload_adapter(self, identity: str) -> None:
        """Free an adapter's memory, now or when the requests that use it have ended."""
        if self.adapters is not None:
            self.adapters.remove(identity, self._adapters_in_use())
        for one in self._loading:
            one.pins &= one.source.identity != identity

    def live_view(self) -> LiveView:
        return LiveView(self.scheduler.cache.states_of_blocks(), self.scheduler.progress())

    def step(self) -> StepOutputs:
        """Plan a step, submit it, and account for finished ones: this step, or the one before it on a device that runs
        ahead. Returns at once if there is nothing to run."""
        try:
            return self._step()
        except BaseException:
            if self.disk is not None:
                self._leave_disk(self.disk)
            raise

    def _leave_disk(self, disk: DiskTier) -> None:
        """Close the cache on disk after a broken step. Nothing is saved: a worker that hangs in the step gives no
        blocks."""
        if self.scheduler.fetches is None:
            return
        logger.warning("the cache on disk is not used any more: a step of the engine has failed")
        disk.close(saves=False)
        self.scheduler.fetches = None
        for hook in self._disk_hooks(disk):
            self.scheduler.queues.on_end.remove(hook)

    @staticmethod
    def _disk_hooks(disk: DiskTier) -> list[Callable[[Sequence], None]]:
        """Return the functions to call with each sequence that has ended."""
        return [disk.fetches.forget, disk.sessions.keep, disk.saved_prompts.end]

    def _step(self) -> StepOutputs:
        if self.is_paused:
            self._wait_for_prepared([])
            return StepOutputs([], self._take_stats(StepPlan()), self._finish_loading())
        # 1. Queue the requests whose grammar, adapter and media are ready.
        if self._pending or self._loading:
            if not self.scheduler.has_work and not self._refused:  # nothing else to do
                self._wait_for_prepared(list(self._pending.values()))
            self._queue_prepared()
        loaded = self._finish_loading()
        outputs, self._refused = self._refused, []
        # 2. Plan and submit the next step.
        plan, num_ahead = self._submit_next(outputs)
        # 3. Wait for the steps that the device may not run ahead of, and apply their results.
        step_s = predicted_step_s = 0.0
        while len(self._in_flight) > num_ahead:
            ended = self._in_flight.popleft()
            result = ended.pending.result()
            took_s = self._measure(ended, result.draft_s)
            step_s, predicted_step_s = step_s + took_s, predicted_step_s + ended.predicted_s
            outputs += self.scheduler.apply_result(ended.plan, result)
        # 4. Save blocks, and hold back the outputs that wait for blocks.
        if self.disk is not None:
            self.disk.save_while_busy(step_s)
            outputs = self.disk.saved_prompts.hold(outputs)
        if self._publisher is not None:
            self._publisher.publish()
        stats = self._take_stats(plan)
        stats.step_s, stats.predicted_step_s = step_s, predicted_step_s
        return StepOutputs(outputs, stats, loaded)

    def _submit_next(self, outputs: list[SequenceOutput]) -> tuple[StepPlan, int]:
        """Plan a step, and submit it if it has rows. Returns the plan, and how many steps may stay in flight. If the
        device lacks memory, a request ends: its outputs are added to `outputs`."""
        begin = time.monotonic()
        tower_running = self.cost.tower_running = self._takes_media and self.executor.makes_media()
        plan = self.scheduler.schedule()
        if plan.admissions and self.on_admission is not None:
            self.on_admission([*{seq.request_id: None for seq in self.scheduler.queues.running}])
        if plan.rows:
            predicted_s = self.cost.seconds(plan.work)
            try:
                pending = self.executor.submit(plan)
            except DeviceMemoryError as e:
                outputs += self.scheduler.withdraw(plan, str(e))
            else:
                self._in_flight.append(_InFlightStep(plan, pending, begin, predicted_s, tower_running))
                return plan, max(1, self.executor.num_stages - 1) if plan.runs_ahead else 0
        elif self.disk is not None and not self._in_flight:
            if self.scheduler.has_work:
                self.disk.fetches.wait(_PREPARE_WAIT_S)  # every sequence that could run waits for blocks from disk
            elif self.disk.saved_prompts.holds_outputs:
                self.disk.save_or_wait()
        return plan, max(0, len(self._in_flight) - 1)  # nothing was submitted: wait for the oldest step

    def _take_stats(self, plan: StepPlan) -> EngineStats:
        """Return the gauges, and the increments of the counters since the last call. `plan` is the last step's."""
        stats = self.scheduler.take_stats()
        if plan.work.num_tokens > plan.work.num_samples:  # not a step of decodes alone
            unsampled = [row for row in plan.rows if not row.num_sampled_positions]
            stats.num_chunked_tokens = sum([row.num_computed + row.num_tokens for row in unsampled])
        stats.num_deferred = len(self._pending)
        stats.num_waiting += stats.num_deferred
        if self.adapters is not None:
            self._add_adapter_stats(stats, self.adapters)
        if self.scheduler.host_tier is not None:
            self.scheduler.host_tier.take_stats(stats)
        if self.disk is not None:
            self.disk.take_stats(stats)
        if self._takes_media:
            stats.num_media_queries, stats.num_media_hits, stats.tower_s = self.executor.take_media_stats()
        return stats

    def _measure(self, step: _InFlightStep, draft_s: float) -> float:
        """Return the seconds that a finished step took, and teach the cost model; `draft_s` of them were for drafts.
        A step that ran ahead began when the one before it ended."""
        now = time.monotonic()
        seconds = now - max(step.begin, self._last_end)
        self._last_end = now
        tower_running = step.tower_running or (self._takes_media and self.executor.makes_media())
        self.cost.observe(step.plan.work, seconds - draft_s, tower_running)
        return seconds

    def _queue(self, request: EngineRequest) -> None:
        try:
            self.scheduler.add(request)
        except RequestError as e:
            self._refuse(request, e)

    def _refuse(self, request: EngineRequest, error: RequestError) -> None:
        refused = SequenceOutput(request.request_id, 0, [], finish_reason="error", error=str(error))
        refused.error_status, refused.error_param = error.status, error.param
        self._refused.append(refused)

    def _wait_for_prepared(self, requests: list[PendingRequest]) -> None:
        """Return when another adapter is read, or a grammar or medium of pending `requests` is ready, or after a short
        wait."""
        if any(one.is_ready for one in requests) or any(one.is_ready for one in self._loading):
            return
        left: list[Future[Any]] = [] if self.adapters is None else [*self.adapters.reading]
        for one in requests:
            left += [future for future in one.media or () if not future.done()]
            if one.grammar is not None and not one.grammar.done():
                left.append(one.grammar)
        if left:
            wait(left, timeout=_PREPARE_WAIT_S, return_when=FIRST_COMPLETED)
        else:  # nothing is being read or compiled: adapters or media wait for room
            time.sleep(_PREPARE_WAIT_S)

    def _queue_prepared(self) -> None:
        """Queue the pending requests that are ready, and refuse those whose preparation has failed."""
        self._has_adapter_room = self._has_media_room = True
        self._prepare(list(self._pending.values()))

    def _prepare(self, requests: list[PendingRequest]) -> None:
        """Start missing preparations of pending requests, in order. Queue or refuse the requests that wait for nothing
        any more."""
        if self.adapters is not None:
            self._start_adapters(self.adapters, requests)
        self._start_media(requests)
        for pending in requests:
            request_id = pending.request.request_id
            if self._pending.get(request_id) is not pending or not pending.is_ready:
                continue
            del self._pending[request_id]
            error = pending.error
            if error is None:
                if self.adapters is not None and pending.request.adapter is not None:
                    self.adapters.register(pending.request.adapter.identity)
                pending.request.media = []  # the tower has their rows
                self._queue(pending.request)
            elif isinstance(error, RequestError):
                self._refuse(pending.request, error)
            else:
                logger.error("a request could not be prepared", exc_info=error)
                what = "adapter" if pending.adapter is not None else "a picture or a sound"
                if pending.grammar is not None and pending.grammar.exception() is not None:
                    what = "structured_outputs"
                self._refuse(pending.request, RequestError(f"{what} failed: {type(error).__name__}.", status=500))

    def _start_media(self, requests: list[PendingRequest]) -> None:
        """Start the tower on the media of pending requests, in order, while there is room for their rows."""
        for pending in requests:
            if pending.waits_for_media and self._has_media_room:
                pending.media = self.executor.prepare_media(pending.request.media, self._media_in_use)
                self._has_media_room = pending.media is not None

    def _media_in_use(self) -> set[bytes]:
        """Return the content hashes of media of queued requests, and of those that the tower computes."""
        prompts = [seq.request.prompt for seq in self.scheduler.queues]
        prompts += [one.request.prompt for one in self._pending.values() if one.media is not None]
        return {item.content_hash for prompt in prompts for item in prompt.media}

    def _start_adapters(self, adapters: AdapterLibrary, requests: list[PendingRequest]) -> None:
        """Start to read the adapters of pending requests, in order. If there is no room for one, later requests get no
        room either, unless their adapter is already there."""
        for pending in requests:
            source = pending.request.adapter
            if source is None or not pending.waits_for_adapter_room:
                continue
            if not (self._has_adapter_room or adapters.has(source.identity)):
                continue
            try:
                pending.adapter = adapters.start_reading(source, self._adapters_in_use)
            except RequestError as e:
                del self._pending[pending.request.request_id]
                self._refuse(pending.request, e)
                continue
            if pending.adapter is None:
                self._has_adapter_room = False

    def _adapters_in_use(self) -> set[str]:
        """Return the identities of adapters that must stay on the host: queued requests have them, or pending requests
        or `load_adapter` wait for them."""
        found = {seq.adapter for seq in self.scheduler.queues if seq.adapter is not None}
        found |= {one.source.identity for one in self._loading if one.ready is not None}
        return found | {one.request.prompt.adapter or "" for one in self._pending.values() if one.adapter is not None}

    def _finish_loading(self) -> list[AdapterLoaded]:
        """Try again to read adapters that found no room. Returns the adapters that are ready or have failed."""
        loaded = []
        for adapter in list(self._loading):
            try:
                is_ready = self._load(adapter)
            except RequestError as e:
                loaded.append(AdapterLoaded(adapter.source.identity, str(e)))
            except Exception as e:
                logger.error("an adapter could not be read", exc_info=e)
                loaded.append(AdapterLoaded(adapter.source.identity, f"the adapter failed: {type(e).__name__}."))
            else:
                if not is_ready:
                    continue
                loaded.append(AdapterLoaded(adapter.source.identity))
            self._loading.remove(adapter)
        return loaded

    def _load(self, adapter: LoadingAdapter) -> bool:
        """Begin to read an adapter if there is room now, and register it once it is read. Returns whether it is on the
        host now. Raises its error if it has failed."""
        if self.adapters is None:
            raise RequestError("adapters need --enable-lora.")
        if adapter.ready is None:
            adapter.ready = self.adapters.start_reading(adapter.source, self._adapters_in_use)
        if adapter.ready is None or not adapter.ready.done():
            return False
        adapter.ready.result()
        self.adapters.register(adapter.source.identity)
        if adapter.pins:
            self.adapters.pin(adapter.source.identity)
        return True

    def _add_adapter_stats(self, stats: EngineStats, adapters: AdapterLibrary) -> None:
        pool = adapters.pool
        running = dict.fromkeys(seq.adapter for seq in self.scheduler.queues.running if seq.adapter is not None)
        waiting = [adapter for adapter in self.scheduler.queues.num_waiting if adapter is not None]
        preparing = [one.request.adapter.name for one in self._pending.values() if one.request.adapter is not None]
        stats.running_adapters = [adapters.names.get(identity, identity) for identity in running]
        stats.resident_adapters = [adapters.names.get(identity, identity) for identity in pool.resident]
        stats.waiting_adapters = [*dict.fromkeys([*(adapters.names.get(one, one) for one in waiting), *preparing])]
        stats.num_adapter_loads, pool.num_loads = pool.num_loads, 0
        stats.num_adapter_evictions, pool.num_evictions = pool.num_evictions, 0
        stats.num_adapter_reads, stats.adapter_read_s = adapters.take_reads()
        stats.num_adapters_on_host = len(adapters)


def _open_disk(
    config: EngineConfig, disk: DiskCacheConfig, weights: list[str], executor: LocalExecutor, scheduler: Scheduler,
    cost: StepCostModel,
) -> DiskTier:  # fmt: skip
    """Open the disk tier for blocks that have this engine's fingerprint. Raises `ConfigError` if the folder cannot be
    used."""
    from octavo.execution.cache_fingerprint import cache_fingerprint
    from octavo.kv_cache.block_files import BlockFiles

    fingerprint = cache_fingerprint(
        config, weights, executor.cache_groups, executor.block_bytes, executor.max_model_len, executor.hardware,
        executor.other_nodes,
    )  # fmt: skip
    files = BlockFiles(disk.folder, fingerprint, disk.limit_bytes)
    logger.info(
        "KV cache on disk: %s holds %.2f of %.2f GiB", disk.folder, files.num_bytes / GIB, disk.limit_bytes / GIB
    )
    return DiskTier(files, executor, scheduler.cache, cost, host_tier=scheduler.host_tier)
