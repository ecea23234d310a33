"""`generate` and `encode` of asynchronous engines, and `add_request` of engines that are stepped: they check a request
and hand it to methods that each engine, be it one or several behind one name, implements."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from octavo.config import ModelConfig
from octavo.engine.input_processor import InputProcessor, PromptInput
from octavo.engine.off_loop import MAX_INLINE_LENGTH, run_off_loop
from octavo.engine.vllm_names import AsyncConfigNames, ConfigNames, refuse_kwargs
from octavo.errors import EngineDeadError, OctavoError, RequestError
from octavo.lora.request import LoRARequest
from octavo.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from octavo.pooling_params import PoolingParams
from octavo.request import AdapterSource, EngineRequest
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.engine.request_stream import Sink
    from octavo.loading.tokenizer import ModelTokenizer
    from octavo.metrics.prometheus import EngineMetrics


def length_of(prompt: PromptInput) -> int:
    """Return the length of an unchecked prompt and its prediction, in characters or tokens; 0 if it is not known."""
    if isinstance(prompt, Mapping) and prompt.get("prompt_embeds") is not None:
        return MAX_INLINE_LENGTH + 1  # embeddings count as long: each token is thousands of numbers
    parts: tuple[object, ...] = (prompt,)
    if isinstance(prompt, Mapping):
        parts = prompt.get("prompt_token_ids") or prompt.get("prompt"), prompt.get("prediction")
    return sum([len(part) for part in parts if isinstance(part, str | list | tuple)])


class GenerateArgs(NamedTuple):
    prompt: PromptInput
    sampling_params: SamplingParams | None
    request_id: str
    lora_request: LoRARequest | None = None
    priority: int = 0
    data_parallel_rank: int | None = None


class EngineCalls(AsyncConfigNames, ABC):
    """Closing a generator, or cancelling the task that iterates it, aborts the request and frees its blocks."""

    inputs: InputProcessor
    tokenizer: ModelTokenizer

    @property
    @abstractmethod
    def fatal_error(self) -> OctavoError | None:
        """Why the engine has ended for good, or None."""

    @property
    def errored(self) -> bool:
        """Whether the engine has ended for good; vLLM's name. `dead_error` says why."""
        return self.fatal_error is not None

    @property
    def dead_error(self) -> OctavoError:
        return self.fatal_error or EngineDeadError("the engine is not dead.")

    @property
    def is_running(self) -> bool:
        return not self.errored

    @property
    def is_stopped(self) -> bool:
        return self.errored

    async def is_tracing_enabled(self) -> bool:
        return False  # spans are the server's

    async def get_tokenizer(self) -> ModelTokenizer:
        return self.tokenizer

    @abstractmethod
    async def prepare(self, args: GenerateArgs) -> EngineRequest:
        """Return the checked request, for `generate_from`. Raises `RequestError`."""

    @abstractmethod
    def generate_from(
        self, request: EngineRequest, external_id: str | None = None, sink: Sink | None = None
    ) -> AsyncGenerator[RequestOutput, None]: ...

    @abstractmethod
    async def pool(
        self, request: EngineRequest, external_id: str | None = None
    ) -> PoolingRequestOutput[PoolingOutput]: ...

    async def generate(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams | None,
        request_id: str,
        lora_request: LoRARequest | None = None,
        *,
        prompt_text: str | None = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield a request's outputs as they come; `SamplingParams.output_kind` says what each holds. `lora_request`
        names an adapter. `data_parallel_rank` chooses one of several engines. `prompt_text` is the text that outputs
        show for a prompt of token ids.

        Raises `RequestError` for a request that cannot run, `EngineDeadError` if the core has died.
        """
        refuse_kwargs(tokenization_kwargs=tokenization_kwargs, trace_headers=trace_headers)
        params = _checked(sampling_params)
        request = await self.prepare(
            GenerateArgs(prompt, params, request_id, lora_request, priority, data_parallel_rank)
        )
        if prompt_text is not None:
            request = msgspec.structs.replace(request, prompt=msgspec.structs.replace(request.prompt, text=prompt_text))
        async with contextlib.aclosing(self.generate_from(request, request_id)) as outputs:
            async for output in outputs:
                output.lora_request = lora_request
                for completion in output.outputs if request.params.logprobs is not None else ():
                    completion.logprobs = list(completion.logprobs or ())
                yield output

    async def encode(
        self,
        prompt: PromptInput,
        pooling_params: PoolingParams | None,
        request_id: str,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        tokenization_kwargs: Mapping[str, object] | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """Yield the one result of a model that pools. Raises the same errors as `generate`."""
        from octavo.engine.pooling_input import PoolingInput, Text

        refuse_kwargs(lora_request=lora_request, tokenization_kwargs=tokenization_kwargs, trace_headers=trace_headers)
        inputs, text = PoolingInput(self.inputs), Text.of(prompt)
        [request] = await run_off_loop(
            lambda: inputs.process([text], pooling_params, priority=priority), length=length_of(prompt)
        )
        yield await self.pool(request, request_id)


def _checked(params: SamplingParams | None) -> SamplingParams | None:
    """Return a caller's parameters, checked again. `InputProcessor.process` refuses what are none."""
    return params.checked() if isinstance(params, SamplingParams) else params


class StepCalls(ConfigNames, ABC):
    """Calls of `LLMEngine`, and of several engines behind its names, that check a request and `add` it."""

    config: EngineConfig
    inputs: InputProcessor
    tokenizer: ModelTokenizer
    metrics: EngineMetrics

    def get_model_config(self) -> ModelConfig:
        return self.config.model

    def get_vllm_config(self) -> EngineConfig:
        return self.config

    def get_supported_tasks(self) -> tuple[str, ...]:
        return self.config.supported_tasks

    def get_tokenizer(self) -> ModelTokenizer:
        return self.tokenizer

    def add_request(
        self,
        request_id: str,
        prompt: PromptInput,
        params: SamplingParams | PoolingParams | None = None,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, object] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> str:
        """Queue a request and return its id. `lora_request` names an adapter; models that pool take `PoolingParams`;
        `arrival_time` is `time.monotonic`'s. Raises `RequestError` for a request that cannot run."""
        refuse_kwargs(tokenization_kwargs=tokenization_kwargs, trace_headers=trace_headers)
        if self.is_under_way(request_id):
            raise RequestError(f"request id {request_id!r} is in use.", param="request_id")
        if isinstance(params, PoolingParams) or (params is None and self.config.model.pooling is not None):
            from octavo.engine.pooling_input import PoolingInput, Text

            refuse_kwargs(lora_request=lora_request)
            [request] = PoolingInput(self.inputs).process([Text.of(prompt)], params, priority=priority)
        else:
            adapter = None if lora_request is None else self.find_adapter(lora_request)
            request = self.inputs.process(
                prompt, _checked(params), priority=priority, arrival_time=arrival_time, adapter=adapter
            )
        self.add(request, request_id, lora_request)
        return request_id

    def find_adapter(self, asked: LoRARequest) -> AdapterSource:
        """Return the adapter that a request names, and list it. Raises `RequestError`."""
        found = self.inputs.find_adapter(asked)
        self.name_adapter(asked.lora_int_id, found)
        return found

    @abstractmethod
    def add(
        self, request: EngineRequest, external_id: str | None = None, lora_request: LoRARequest | None = None
    ) -> None:
        """Queue a request that `inputs` has made. Its outputs have the `external_id`, if given, instead of the
        request's own id, and the `lora_request`."""

    @abstractmethod
    def is_under_way(self, request_id: str) -> bool:
        """Return whether a request with this external id was added and has not ended."""

    @abstractmethod
    def name_adapter(self, lora_id: int, source: AdapterSource) -> None:
        """List an adapter under its `lora_int_id` until it is removed."""
