"""`LLMEngine` over several engines of this machine (`LLM(data_parallel_size=…)`), each in a process of its own. A
`DataParallelEngine` runs them, in an event loop in a thread, because the caller may have an event loop of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Coroutine, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from octavo.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.engine.data_parallel import DataParallelEngine
from octavo.engine.engine_calls import StepCalls
from octavo.engine.sleep_names import check_level
from octavo.errors import ConfigError, OctavoError, RequestError
from octavo.lora.request import LoRARequest
from octavo.metrics.prometheus import EngineMetrics
from octavo.outputs import Output, RequestOutput
from octavo.processes import event_loop_factory
from octavo.request import AdapterSource, EngineRequest

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """A running request. Outputs of an earlier request with the same id do not belong to it."""

    request: EngineRequest
    external_id: str
    lora_request: LoRARequest | None


class DataParallelLLMEngine(StepCalls):
    """`LLMEngine` over several engines. See there for its methods."""

    def __init__(self, config: EngineConfig) -> None:
        if len(config.served_ranks) > len(config.local_ranks):
            raise ConfigError("LLM and LLMEngine run engines on this machine: leave --data-parallel-size-local out.")
        self._in_flight: dict[str, tuple[_Asked, Future[None]]] = {}  # by the caller's ids
        self._outputs = queue.SimpleQueue[tuple[_Asked, Output | Exception]]()
        self._failed: list[tuple[str, Exception]] = []  # to be raised, with the caller's ids
        self._is_closed = self._is_asleep = False
        self._loop = event_loop_factory()()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engines", daemon=True)
        model = config.model
        self.metrics = EngineMetrics(model.served_model_names[0], model.max_model_len, config.served_ranks.start)
        self._engine = DataParallelEngine(config, metrics=self.metrics, on_engine_death="fail")
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

    def do_log_stats(self) -> None:
        self._await(self._engine.do_log_stats())

    def add(
        self, request: EngineRequest, external_id: str | None = None, lora_request: LoRARequest | None = None
    ) -> None:
        self._check_awake()
        asked = _Asked(request, external_id or request.request_id, lora_request)
        answer = asyncio.run_coroutine_threadsafe(self._answer(asked), self._loop)
        self._in_flight[asked.external_id] = (asked, answer)

    def is_under_way(self, request_id: str) -> bool:
        return request_id in self._in_flight

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        for one in [request_id] if isinstance(request_id, str) else list(request_id):
            if (found := self._in_flight.pop(one, None)) is not None:
                found[1].cancel()
            self._failed = [failed for failed in self._failed if failed[0] != one]

    def get_num_unfinished_requests(self) -> int:
        return len(self._in_flight)

    def has_unfinished_requests(self) -> bool:
        return bool(self._in_flight or self._failed)

    def step(self) -> list[Output]:
        """Return the outputs since the last call, and wait for at least one."""
        if self._failed:
            raise self._failed.pop(0)[1]
        outputs: list[Output] = []
        while self._in_flight and not ((outputs or self._failed) and self._outputs.empty()):
            asked, found = self._outputs.get()
            if self._in_flight.get(asked.external_id, (None,))[0] is not asked:  # it was aborted
                continue
            if isinstance(found, Exception):
                self._failed.append((asked.external_id, found))
            else:
                outputs.append(found)
            if isinstance(found, Exception) or found.finished:
                del self._in_flight[asked.external_id]
        if self._failed and not outputs:
            raise self._failed.pop(0)[1]
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

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = True) -> bool:
        self._check_awake()
        return self._await(self._engine.reset_prefix_cache(reset_running_requests, reset_connector))

    def add_lora(self, lora_request: LoRARequest) -> bool:
        self._check_awake()
        return self._await(self._engine.add_lora(lora_request))

    def name_adapter(self, lora_id: int, source: AdapterSource) -> None:
        self._check_awake()
        self._loop.call_soon_threadsafe(self._engine.name_adapter, lora_id, source)

    def remove_lora(self, lora_id: int) -> bool:
        return self._await(self._engine.remove_lora(lora_id))

    def list_loras(self) -> set[int]:
        return self._await(self._engine.list_loras())

    def pin_lora(self, lora_id: int) -> bool:
        self._check_awake()
        return self._await(self._engine.pin_lora(lora_id))

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

    def _check_awake(self) -> None:
        """Raise `OctavoError` if the engines sleep, as the caller would wait until they are woken."""
        if self._is_closed or self._is_asleep:
            raise OctavoError("these engines sleep, or have been closed; wake_up() loads the model again.")

    def _await(self, asked: Coroutine[Any, Any, T]) -> T:
        if not self._thread.is_alive():
            asked.close()
            raise OctavoError("these engines have been closed.")
        return asyncio.run_coroutine_threadsafe(asked, self._loop).result()

    async def _answer(self, asked: _Asked) -> None:
        """Run a request under its own id, as the caller's id may still belong to an aborted request."""
        try:
            if asked.request.pooling is not None:
                self._give(asked, await self._engine.pool(asked.request))
                return
            async with contextlib.aclosing(self._engine.generate_from(asked.request)) as outputs:
                async for output in outputs:
                    self._give(asked, output)
        except Exception as error:
            self._outputs.put((asked, error))

    def _give(self, asked: _Asked, output: Output) -> None:
        output.request_id = asked.external_id
        if isinstance(output, RequestOutput):
            output.lora_request = asked.lora_request
        self._outputs.put((asked, output))
