"""`LLMEngine`: an engine in the caller's process that the caller steps. `LLM` generates with it. `add_lora` steps it
until the adapter is loaded."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

from octavo.config import EngineArgs, EngineConfig
from octavo.engine.core import EngineCore
from octavo.engine.engine_calls import StepCalls
from octavo.engine.input_processor import InputProcessor
from octavo.engine.named_adapters import NamedAdapters
from octavo.engine.output_processor import OutputProcessor, RequestFailed
from octavo.engine.sleep_names import SLEEPERS, check_level, woken_by
from octavo.engine.vllm_names import check_reset, refuse_kwargs
from octavo.engine.wire import AdapterLoaded
from octavo.errors import OctavoError, RequestError
from octavo.interrupts import uninterrupted
from octavo.loading.tokenizer import load_tokenizer
from octavo.lora.request import LoRARequest
from octavo.metrics.log_line import LogLine
from octavo.metrics.prometheus import EngineMetrics
from octavo.outputs import Output, RequestOutput
from octavo.request import AdapterSource, EngineRequest

if TYPE_CHECKING:
    from octavo.compat.usage import UsageContext


class LLMEngine(StepCalls):
    """Requests are added; each `step` returns their new outputs."""

    def __init__(self, config: EngineConfig) -> None:
        self.tokenizer = load_tokenizer(config.model.checkpoint, config.model.chat_template)
        self._core: EngineCore | None = EngineCore(config)
        self._asleep: frozenset[str] = frozenset()  # of `SLEEPERS`
        executor = self._core.executor
        self.config = config.when_ready(executor.max_model_len, sum(executor.num_blocks), sum(executor.num_host_blocks))
        self.inputs = InputProcessor(self.config, self.tokenizer)
        self.metrics = EngineMetrics(config.model.served_model_names[0], self.config.model.max_model_len)
        self._log_line = LogLine(self.metrics, time.monotonic())
        self._output_processor = OutputProcessor(
            self.tokenizer, self.metrics, stream_interval=config.scheduler.stream_interval
        )
        self._failed: list[RequestFailed] = []  # failed requests whose errors `step` has not raised yet
        self._ids: dict[str, str] = {}  # the core's ids by the caller's
        self._lora_requests: dict[str, LoRARequest] = {}  # by the caller's ids
        self._arrived: list[Output] = []  # outputs for the next `step`
        self._adapters = NamedAdapters()

    @classmethod
    def from_engine_args(
        cls, engine_args: EngineArgs, usage_context: UsageContext | None = None, stat_loggers: object = None
    ) -> LLMEngine:
        """Raises `ConfigError` or `LoadError` if the model cannot be served with these arguments. With
        `data_parallel_size` the result is a `DataParallelLLMEngine`, which has the same methods. `usage_context` has no
        effect: it is vLLM's, and no use is reported."""
        refuse_kwargs(stat_loggers=stat_loggers)
        return cls.from_vllm_config(engine_args.create_engine_config())

    @classmethod
    def from_vllm_config(cls, vllm_config: EngineConfig, usage_context: UsageContext | None = None) -> LLMEngine:
        """Like `from_engine_args`, with the result of `create_engine_config`."""
        config = vllm_config
        if len(config.served_ranks) == 1:
            return cls(config.replica(config.served_ranks.start))
        from octavo.engine.data_parallel_llm import DataParallelLLMEngine

        return cast(LLMEngine, DataParallelLLMEngine(config))

    @property
    def core(self) -> EngineCore:
        if self._core is None or self._asleep:
            raise OctavoError("this engine sleeps, or has been closed; wake_up() loads the model again.")
        return self._core

    def do_log_stats(self) -> None:
        """Log a line of throughput and use since the last one, if anything ran."""
        self._log_line.log(time.monotonic())

    def add(
        self, request: EngineRequest, external_id: str | None = None, lora_request: LoRARequest | None = None
    ) -> None:
        core, name = self.core, external_id or request.request_id
        with uninterrupted():
            self._ids[name] = request.request_id
            self._output_processor.add(request, name)
            core.add(request)
            if lora_request is not None:
                self._lora_requests[name] = lora_request

    def is_under_way(self, request_id: str) -> bool:
        return request_id in self._ids

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """End requests without further outputs. Unknown ids are ignored."""
        with uninterrupted():
            for one in [request_id] if isinstance(request_id, str) else list(request_id):
                self._failed = [failed for failed in self._failed if failed.request_id != one]
                self._arrived = [output for output in self._arrived if output.request_id != one]
                self._lora_requests.pop(one, None)
                if (own_id := self._ids.pop(one, None)) is not None:
                    self._output_processor.drop(own_id, RequestError("aborted."))
                    self.core.abort(own_id)

    def get_num_unfinished_requests(self) -> int:
        return len(self._output_processor.requests) + sum(output.finished for output in self._arrived)

    def has_unfinished_requests(self) -> bool:
        """Return whether `step` will return more outputs."""
        return bool(self._output_processor.requests or self._failed or self._arrived)

    def step(self) -> list[Output]:
        """Run a step and return its outputs. A failed request's error is raised once there is nothing else to
        return."""
        if not self._arrived and not self._failed:
            self._advance()
        outputs, self._arrived = self._arrived, []
        if self._failed and not outputs:
            raise self._failed.pop(0).error
        return outputs

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Read an adapter into the host's memory and check it, before a request needs it. Raises `RequestError` if it
        cannot be served."""
        source = self.inputs.find_adapter(lora_request)
        self._load(source)
        self.name_adapter(lora_request.lora_int_id, source)
        return True

    def name_adapter(self, lora_id: int, source: AdapterSource) -> None:
        self._adapters.name(lora_id, source)

    def remove_lora(self, lora_id: int) -> bool:
        """Remove the adapter of a `lora_int_id`. Returns whether there was one."""
        was_named, identity = self._adapters.remove(lora_id)
        if identity is not None and self._core is not None:  # the core has the adapter even while the engine sleeps
            self._core.unload_adapter(identity)
        return was_named

    def list_loras(self) -> set[int]:
        """Return the `lora_int_id`s that were named and not removed."""
        return self._adapters.ids

    def pin_lora(self, lora_id: int) -> bool:
        """Keep the adapter of a `lora_int_id` on the host, and on the device while others can be evicted. Raises
        `RequestError` for an unknown id."""
        source = self._adapters.named(lora_id)
        self._load(source, pins=True)
        self._adapters.pin(source)
        return True

    def _load(self, source: AdapterSource, pins: bool = False) -> None:
        """Step until an adapter is on the host. The next `step` returns the outputs of these steps."""
        self.core.load_adapter(source, pins)
        while True:
            for one in self._advance():
                if one.identity != source.identity:  # an adapter of an earlier call that was interrupted
                    continue
                if one.error is not None:
                    raise RequestError(one.error, param="lora_path")
                return

    def _advance(self) -> list[AdapterLoaded]:
        """Run a step of the core and keep its outputs. Returns the adapters that it has loaded."""
        with uninterrupted():
            return self._advance_core()

    def _advance_core(self) -> list[AdapterLoaded]:
        step = self.core.step()
        self.metrics.record_step(step.stats)
        results, aborts = self._output_processor.process(step.outputs)
        for abort in aborts:
            self.core.abort(abort.request_id, abort.index)
        self._failed += [result for result in results if isinstance(result, RequestFailed)]
        outputs: list[Output] = [result for result in results if not isinstance(result, RequestFailed)]
        for output in outputs if self._lora_requests else ():
            if isinstance(output, RequestOutput):
                output.lora_request = self._lora_requests.get(output.request_id)
        for result in results:
            if isinstance(result, RequestFailed) or result.finished:
                self._ids.pop(result.request_id, None)
                self._lora_requests.pop(result.request_id, None)
        for one in step.adapters:
            self._adapters.note_loaded(one)
        self._arrived += outputs
        return step.adapters

    def sleep(self, level: int = 1) -> None:
        """Free memory until `wake_up`. Level 1 frees the KV cache and keeps the weights; level 2 frees both. On GPUs
        both levels free both. No request may be running."""
        check_level(level)
        if self._asleep:
            return
        if self.has_unfinished_requests():
            raise RequestError("requests are under way; step until none is left, or abort them.")
        if level == 1 and self.config.device == "cpu":
            self.core.reset_prefix_cache(frees_memory=True)
        else:
            self.close()
        self._asleep, self.metrics.sleep_level = SLEEPERS, level

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Allocate again what `sleep` freed: "weights", the "kv_cache", or both."""
        woken = woken_by(tags)
        if not self._asleep:
            return
        self._asleep -= woken
        self.metrics.sleep_level = self.metrics.sleep_level if self._asleep else 0
        if self._core is None:
            self._core = EngineCore(self.config)
            for source in self._adapters.pinned:  # this core does not have them yet
                self._core.load_adapter(source, pins=True)

    def is_sleeping(self) -> bool:
        return bool(self._asleep)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = True) -> bool:
        """Empty the prefix cache, also on disk. Running requests keep their blocks; `reset_running_requests` raises
        `RequestError`, and so does `reset_connector=False` if there is a cache on disk."""
        check_reset(self.config, reset_running_requests=reset_running_requests, reset_connector=reset_connector)
        self.core.reset_prefix_cache()
        return True

    def close(self) -> None:
        """Free the memory of model and cache."""
        if self._core is not None and self._core.disk is not None:
            self._core.disk.close()
        self._core, self._asleep = None, frozenset()
        gc.collect()  # the runner and its program refer to each other
