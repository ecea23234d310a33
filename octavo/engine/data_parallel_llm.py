"""`LLMEngine` over several engines of this machine (`LLM(data_parallel_size=…)`), each in a process of its own. They
are `DataParallelEngine`'s, in an event loop that a thread of this process runs, as the caller may have one of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Coroutine, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

from octavo.config import EngineConfig, ModelConfig
from octavo.engine.core import EngineCore
from octavo.engine.data_parallel import DataParallelEngine
from octavo.engine.sleeping import check_level
from octavo.engine.vllm_names import ConfigNames
from octavo.errors import ConfigError, OctavoError, RequestError
from octavo.metrics.prometheus import EngineMetrics
from octavo.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from octavo.processes import event_loop_factory
from octavo.request import EngineRequest

T = TypeVar("T")
Output = RequestOutput | PoolingRequestOutput[PoolingOutput]


class DataParallelLLMEngine(ConfigNames):
    """What `LLM` asks of `LLMEngine`. See there what each method does, and raises."""

    config: EngineConfig

    def __init__(self, config: EngineConfig) -> None:
        if len(config.served_ranks) > len(config.local_ranks):
            raise ConfigError("LLM runs engines on this machine: leave --data-parallel-size-local out.")
        self._under_way: dict[str, Future[None]] = {}  # by the caller's ids
        self._outputs = queue.SimpleQueue[tuple[str, Output | Exception]]()
        self._failed: list[Exception] = []  # to be raised
        self._is_closed = self._is_asleep = False
        self._loop = event_loop_factory()()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engines", daemon=True)
        model = config.model
        self.metrics = EngineMetrics(model.served_model_names[0], model.max_model_len, config.served_ranks.start)
        self._engine = DataParallelEngine(config, metrics=self.metrics)
        self._thread.start()
        try:
            self._await(self._engine.wait_ready())
        except BaseException:
            self.close()
            raise
        self.config, self.inputs, self.tokenizer = self._engine.config, self._engine.inputs, self._engine.tokenizer

    @property
    def core(self) -> EngineCore:
        raise OctavoError("the engines of data_parallel_size are processes of their own; none has its core here.")

    def get_model_config(self) -> ModelConfig:
        return self.config.model

    def get_vllm_config(self) -> EngineConfig:
        return self.config

    def get_supported_tasks(self) -> tuple[str, ...]:
        return self.config.supported_tasks

    def do_log_stats(self) -> None:
        self._await(self._engine.do_log_stats())

    def add(self, request: EngineRequest, shown_id: str | None = None) -> None:
        if self._is_closed or self._is_asleep:
            raise OctavoError("these engines sleep, or have been closed; wake_up() loads the model again.")
        name = shown_id or request.request_id
        self._under_way[name] = asyncio.run_coroutine_threadsafe(self._answer(request, name), self._loop)

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        for one in [request_id] if isinstance(request_id, str) else list(request_id):
            if (asked := self._under_way.pop(one, None)) is not None:
                asked.cancel()

    def has_unfinished_requests(self) -> bool:
        return bool(self._under_way or self._failed)

    def step(self) -> list[Output]:
        """What has come since the last call, and at least one output."""
        if self._failed:
            raise self._failed.pop(0)
        outputs: list[Output] = []
        while self._under_way and not ((outputs or self._failed) and self._outputs.empty()):
            name, found = self._outputs.get()
            if name not in self._under_way:  # which has been aborted
                continue
            if isinstance(found, Exception):
                self._failed.append(found)
            else:
                outputs.append(found)
            if isinstance(found, Exception) or found.finished:
                del self._under_way[name]
        if self._failed and not outputs:
            raise self._failed.pop(0)
        return outputs

    def sleep(self, level: int = 1) -> None:
        check_level(level)
        if self.has_unfinished_requests():
            raise RequestError("requests are under way; step until none is left, or abort them.")
        self._await(self._engine.sleep(level))
        self._is_asleep = True

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        self._await(self._engine.wake_up(tags))
        self._is_asleep = self._await(self._engine.is_sleeping())

    def is_sleeping(self) -> bool:
        return self._is_asleep

    def reset_prefix_cache(self) -> bool:
        return self._await(self._engine.reset_prefix_cache())

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True

        async def end() -> None:
            self._engine.shutdown()

        self._await(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _await(self, asked: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(asked, self._loop).result()

    async def _answer(self, request: EngineRequest, name: str) -> None:
        try:
            if request.pooling is not None:
                self._outputs.put((name, await self._engine.pool(request)))
                return
            async with contextlib.aclosing(self._engine.generate_from(request, name)) as outputs:
                async for output in outputs:
                    self._outputs.put((name, output))
        except Exception as error:
            self._outputs.put((name, error))
