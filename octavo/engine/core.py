"""The engine core: requests in, steps, sequence outputs out. It knows tokens only; text is the front end's.

`EngineCore` is synchronous and single-threaded. `LLM` calls it in its own process; `core_process` runs it in one of its
own for servers.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.config import EngineConfig
from octavo.engine.wire import BlockMap, StepOutputs
from octavo.errors import DeviceMemoryError, RequestError
from octavo.kv_cache.manager import KVCacheManager
from octavo.plan import StepPlan
from octavo.request import EngineRequest, SequenceOutput
from octavo.scheduling.scheduler import Proposer, Scheduler
from octavo.step_cost import StepCostModel

if TYPE_CHECKING:
    from octavo.execution.executor import Executor, PendingStep

logger = logging.getLogger(__name__)

_PREPARE_WAIT_S = 0.01  # messages are looked for between two waits


# What devices read and compute in a second: roughly, for the time of the first steps (`StepCostModel.derived`).
_MACHINES = {"cpu": (10e9, 300e9), "cuda": (2e12, 2e14)}


@dataclass(slots=True)
class _UnderWay:
    """A step that the device has been given."""

    plan: StepPlan
    pending: PendingStep
    begin: float  # time.monotonic, before it was planned
    predicted_s: float


class EngineCore:
    """A scheduler and an executor in step, or the scheduler one step ahead of a device that need not wait for it."""

    def __init__(
        self, config: EngineConfig, executor: Executor | None = None, proposer: Proposer | None = None
    ) -> None:
        if executor is None:
            from octavo.execution.executor import LocalExecutor  # imports kernels: not before they are needed

            executor = LocalExecutor(config)
        self.executor = executor
        cache = KVCacheManager(
            executor.cache_groups, executor.num_blocks, config.cache.block_size, executor.num_host_blocks,
            config.cache.enable_prefix_caching,
        )  # fmt: skip
        num_slots = max(1, sum(executor.num_blocks) * config.cache.block_size)
        self.cost = StepCostModel.derived(
            executor.weight_bytes, executor.cache_bytes // num_slots, *_MACHINES[config.device]
        )
        self.scheduler = Scheduler(config.scheduler, cache, config.model.seed, executor.runs_ahead, proposer, self.cost)
        self._under_way: deque[_UnderWay] = deque()
        self._last_end = 0.0  # time.monotonic, of the last step
        self._refused: list[SequenceOutput] = []
        self._preparing: dict[str, tuple[EngineRequest, Future[None]]] = {}  # their grammars are being compiled

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._under_way) or bool(self._refused) or bool(self._preparing)

    def add(self, request: EngineRequest) -> None:
        """Queue a request. One that can never run is answered with an error in the next step's outputs."""
        if request.params.grammar is not None:
            ready = self.executor.prepare_grammar(request.params.grammar, request.eos_token_ids)
            self._preparing[request.request_id] = request, ready
            self._queue_prepared()
        else:
            self._queue(request)

    def abort(self, request_id: str, index: int | None = None) -> None:
        if index is None:
            self._preparing.pop(request_id, None)
        self.scheduler.abort(request_id, index)

    def block_map(self) -> BlockMap:
        return BlockMap(self.scheduler.cache.states_of_blocks())

    def step(self) -> StepOutputs:
        """Schedule, execute, account; or, while the device computes what was scheduled, account for the step before.
        Returns at once when there is nothing to run."""
        if self._preparing:
            if not self.scheduler.has_work and not self._refused:  # nothing else to do
                futures = [ready for _, ready in self._preparing.values()]
                wait(futures, timeout=_PREPARE_WAIT_S, return_when=FIRST_COMPLETED)
            self._queue_prepared()
        outputs, self._refused = self._refused, []
        begin = time.monotonic()
        plan = self.scheduler.schedule()
        num_ahead = 0
        if plan.rows:
            predicted_s = self.cost.seconds(plan.work)
            try:
                self._under_way.append(_UnderWay(plan, self.executor.submit(plan), begin, predicted_s))
                num_ahead = 1 if plan.runs_ahead else 0
            except DeviceMemoryError as e:
                outputs += self.scheduler.withdraw(plan, str(e))
        step_s = predicted_step_s = 0.0
        while len(self._under_way) > num_ahead:
            ended = self._under_way.popleft()
            result = ended.pending.result()
            took_s = self._measure(ended)
            step_s, predicted_step_s = step_s + took_s, predicted_step_s + ended.predicted_s
            outputs += self.scheduler.update(ended.plan, result)
        stats = self.scheduler.take_stats()
        stats.step_s, stats.predicted_step_s = step_s, predicted_step_s
        stats.num_chunked_tokens = sum(
            [row.num_computed + row.num_tokens for row in plan.rows if not row.num_positions]
        )
        stats.num_waiting += len(self._preparing)
        return StepOutputs(outputs, stats)

    def _measure(self, step: _UnderWay) -> float:
        """Seconds of a step that has just ended, from which the next ones are predicted. While steps run ahead, one
        begins when the one before ends."""
        now = time.monotonic()
        seconds = now - max(step.begin, self._last_end)
        self._last_end = now
        self.cost.observe(step.plan.work, seconds)
        return seconds

    def _queue(self, request: EngineRequest) -> None:
        try:
            self.scheduler.add(request)
        except RequestError as e:
            self._refuse(request, e)

    def _refuse(self, request: EngineRequest, error: RequestError) -> None:
        self._refused.append(SequenceOutput(request.request_id, 0, [], finish_reason="error", error=str(error)))

    def _queue_prepared(self) -> None:
        """Queue the requests whose grammars are compiled, and refuse those whose grammars cannot be."""
        for request_id, (request, ready) in list(self._preparing.items()):
            if not ready.done():
                continue
            del self._preparing[request_id]
            error = ready.exception()
            if error is None:
                self._queue(request)
            elif isinstance(error, RequestError):
                self._refuse(request, error)
            else:
                logger.error("a grammar could not be compiled", exc_info=error)
                self._refuse(request, RequestError(f"structured_outputs failed: {type(error).__name__}."))
