"""`LLMEngine`: the engine in the caller's process, a step at a time. `LLM` runs its lists of prompts with it."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from octavo.config import EngineArgs, EngineConfig, ModelConfig
from octavo.engine.core import EngineCore
from octavo.engine.input_processor import InputProcessor, PromptInput
from octavo.engine.output_processor import OutputProcessor, RequestFailed
from octavo.engine.sleeping import SLEEPERS, check_level, woken_by
from octavo.engine.vllm_names import ConfigNames
from octavo.errors import OctavoError, RequestError
from octavo.loading.tokenizer import load_tokenizer
from octavo.lora.request import LoRARequest
from octavo.metrics.log_line import LogLine
from octavo.metrics.prometheus import EngineMetrics
from octavo.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from octavo.request import EngineRequest
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.loading.tokenizer import ModelTokenizer
    from octavo.usage.usage_lib import UsageContext


class LLMEngine(ConfigNames):
    """Requests are added, and each `step` brings what it has computed of them."""

    config: EngineConfig

    def __init__(self, config: EngineConfig) -> None:
        self.tokenizer: ModelTokenizer = load_tokenizer(config.model.checkpoint, config.model.chat_template)
        self._core: EngineCore | None = EngineCore(config)
        self._asleep: frozenset[str] = frozenset()  # of `SLEEPERS`
        executor = self._core.executor
        self.config = config.when_ready(executor.max_model_len, sum(executor.num_blocks), sum(executor.num_host_blocks))
        self.inputs = InputProcessor(self.config, self.tokenizer)
        self.metrics = EngineMetrics(config.model.served_model_names[0], self.config.model.max_model_len)
        self._log_line = LogLine(self.metrics, time.monotonic())
        self._outputs = OutputProcessor(self.tokenizer, self.metrics)
        self._failed: list[RequestFailed] = []  # whose errors are to be raised
        self._ids: dict[str, str] = {}  # the core's, by the caller's
        self._lora_requests: dict[str, LoRARequest] = {}  # by the caller's ids

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, usage_context: UsageContext | None = None) -> LLMEngine:
        """Raises `ConfigError` or `LoadError` if the model cannot be served that way. `usage_context` is for vLLM's
        statistics of use, of which there are none."""
        return cls(engine_args.create_engine_config().one_engine())

    @property
    def core(self) -> EngineCore:
        if self._core is None or self._asleep:
            raise OctavoError("this engine sleeps, or has been closed; wake_up() loads the model again.")
        return self._core

    def get_model_config(self) -> ModelConfig:
        return self.config.model

    def get_vllm_config(self) -> EngineConfig:
        return self.config

    def get_supported_tasks(self) -> tuple[str, ...]:
        return self.config.supported_tasks

    def do_log_stats(self) -> None:
        """Log a line of throughput and use since the last one, if anything ran."""
        self._log_line.log(time.monotonic())

    def get_tokenizer(self) -> ModelTokenizer:
        return self.tokenizer

    def add_request(
        self,
        request_id: str,
        prompt: PromptInput,
        params: SamplingParams | None = None,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        *,
        priority: int = 0,
    ) -> None:
        """Queue a request, to be computed with an adapter if one is named. `arrival_time` is `time.monotonic`'s. Raises
        `RequestError` for one that cannot run."""
        if request_id in self._ids:
            raise RequestError(f"request id {request_id!r} is in use.", param="request_id")
        adapter = None if lora_request is None else self.inputs.find_adapter(lora_request)
        request = self.inputs.process(prompt, params, priority=priority, arrival_time=arrival_time, adapter=adapter)
        self.add(request, request_id)
        if lora_request is not None:
            self._lora_requests[request_id] = lora_request

    def add(self, request: EngineRequest, shown_id: str | None = None) -> None:
        """Queue a request that `inputs.process` has made. Its outputs bear `shown_id`, if that is not its own."""
        core = self.core
        self._ids[shown_id or request.request_id] = request.request_id
        self._outputs.add(request, shown_id or request.request_id)
        core.add(request)

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """End requests, which bring no more outputs. Unknown ids are ignored."""
        for one in [request_id] if isinstance(request_id, str) else list(request_id):
            self._failed = [failed for failed in self._failed if failed.request_id != one]
            self._lora_requests.pop(one, None)
            if (own_id := self._ids.pop(one, None)) is not None:
                self._outputs.drop(own_id)
                self.core.abort(own_id)

    def get_num_unfinished_requests(self) -> int:
        return len(self._outputs.requests)

    def has_unfinished_requests(self) -> bool:
        return bool(self._outputs.requests or self._failed)

    def step(self) -> list[RequestOutput | PoolingRequestOutput[PoolingOutput]]:
        """What one step has brought. A request that failed on its way raises its error, once nothing else is to be
        returned."""
        if self._failed:
            raise self._failed.pop(0).error
        step = self.core.step()
        self.metrics.record_step(step.stats)
        results, aborts = self._outputs.process(step.outputs)
        for abort in aborts:
            self.core.abort(abort.request_id, abort.index)
        self._failed += [result for result in results if isinstance(result, RequestFailed)]
        outputs = [result for result in results if not isinstance(result, RequestFailed)]
        for output in outputs if self._lora_requests else ():
            if isinstance(output, RequestOutput):
                output.lora_request = self._lora_requests.get(output.request_id)
        if len(self._ids) > len(self._outputs.requests):
            self._ids = {shown: own for shown, own in self._ids.items() if own in self._outputs.requests}
            self._lora_requests = {name: lora for name, lora in self._lora_requests.items() if name in self._ids}
        if self._failed and not outputs:
            raise self._failed.pop(0).error
        return outputs

    def sleep(self, level: int = 1) -> None:
        """Free memory until `wake_up`. Level 1 frees the KV cache and keeps the weights, level 2 frees both; on GPUs
        both levels do. No request may be under way."""
        check_level(level)
        if self._asleep:
            return
        if self.has_unfinished_requests():
            raise RequestError("requests are under way; step until none is left, or abort them.")
        if level == 1 and self.config.device == "cpu":
            self.core.reset_prefix_cache(frees_memory=True)
        else:
            self.close()
        self._asleep = SLEEPERS

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Have the memory again that `sleep` freed, for "weights", the "kv_cache", or both."""
        self._asleep -= woken_by(tags)
        if self._core is None:
            self._core = EngineCore(self.config)

    def is_sleeping(self) -> bool:
        return bool(self._asleep)

    def reset_prefix_cache(self) -> bool:
        """Forget what has been computed for others to share."""
        self.core.reset_prefix_cache()
        return True

    def close(self) -> None:
        """Give the memory of model and cache back."""
        self._core = None
        gc.collect()  # the runner and what it records hold each other
