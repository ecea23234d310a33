"""The engine core: requests in, steps, sequence outputs out. It knows tokens only; text is the front end's.

`EngineCore` is synchronous and single-threaded. `LLM` calls it in its own process; `core_process` runs it in one of its
own for servers.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from octavo.config import EngineConfig
from octavo.engine.wire import BlockMap, EngineRequest, SequenceOutput, StepOutputs
from octavo.errors import RequestError
from octavo.kv_cache.manager import KVCacheManager
from octavo.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from octavo.execution.executor import Executor


class EngineCore:
    """A scheduler and an executor in step."""

    def __init__(self, config: EngineConfig, executor: Executor | None = None) -> None:
        if executor is None:
            from octavo.execution.executor import LocalExecutor  # imports torch: not before it is needed

            executor = LocalExecutor(config)
        self.executor = executor
        cache = KVCacheManager(
            executor.num_blocks, config.cache.block_size, executor.num_host_blocks, config.cache.enable_prefix_caching
        )
        self.scheduler = Scheduler(config.scheduler, cache, config.model.seed)
        self._refused: list[SequenceOutput] = []

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._refused)

    def add(self, request: EngineRequest) -> None:
        """Queue a request. One that can never run is answered with an error in the next step's outputs."""
        try:
            self.scheduler.add(request)
        except RequestError as e:
            self._refused.append(SequenceOutput(request.request_id, 0, [], finish_reason="error", error=str(e)))

    def abort(self, request_id: str, index: int | None = None) -> None:
        self.scheduler.abort(request_id, index)

    def block_map(self) -> BlockMap:
        return BlockMap(self.scheduler.cache.pool.states())

    def step(self) -> StepOutputs:
        """Schedule, execute, account. Returns at once when there is nothing to run."""
        started = time.perf_counter()
        outputs, self._refused = self._refused, []
        plan = self.scheduler.schedule()
        if plan.rows:
            outputs += self.scheduler.update(plan, self.executor.execute(plan))
        stats = self.scheduler.take_stats()
        stats.step_s = time.perf_counter() - started
        return StepOutputs(outputs, stats)
