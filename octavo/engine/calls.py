"""What programs call of an asynchronous engine, be it one or several behind one name: `generate` and `encode`, made of
what the engine does with requests that have been checked."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from typing import NamedTuple

import msgspec

from octavo.engine.input_processor import InputProcessor, PromptInput
from octavo.engine.off_loop import MAX_INLINE_LENGTH, run_off_loop
from octavo.engine.vllm_names import AsyncConfigNames, refuse_kwargs
from octavo.lora.request import LoRARequest
from octavo.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from octavo.pooling_params import PoolingParams
from octavo.request import EngineRequest
from octavo.sampling_params import SamplingParams


def length_of(prompt: PromptInput) -> int:
    """Characters or tokens, as far as that is known before it is looked at."""
    if isinstance(prompt, Mapping) and prompt.get("prompt_embeds") is not None:
        return MAX_INLINE_LENGTH + 1  # thousands of numbers each
    given = prompt.get("prompt_token_ids") or prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return len(given) if isinstance(given, str | list | tuple) else 0


class Wanted(NamedTuple):
    """What `generate` is asked for."""

    prompt: PromptInput
    sampling_params: SamplingParams | None
    request_id: str
    lora_request: LoRARequest | None = None
    priority: int = 0
    data_parallel_rank: int | None = None


class EngineCalls(AsyncConfigNames, ABC):
    """Closing a generator, or cancelling the task that iterates it, aborts the request and frees its blocks."""

    inputs: InputProcessor

    @abstractmethod
    async def prepare(self, wanted: Wanted) -> EngineRequest:
        """What is wanted, for `generate_from`. Raises `RequestError`."""

    @abstractmethod
    def generate_from(
        self, request: EngineRequest, shown_id: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]: ...

    @abstractmethod
    async def pool(
        self, request: EngineRequest, shown_id: str | None = None
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
        """Yield a request's outputs as they come (`SamplingParams.output_kind` says how much each holds), computed with
        an adapter if one is named. `data_parallel_rank` is the engine that is to do it, of several. `prompt_text` is
        what outputs show of a prompt of token ids.

        Raises `RequestError` for a request that cannot run, `EngineDeadError` when the core has gone.
        """
        refuse_kwargs(tokenization_kwargs=tokenization_kwargs, trace_headers=trace_headers)
        request = await self.prepare(
            Wanted(prompt, sampling_params, request_id, lora_request, priority, data_parallel_rank)
        )
        if prompt_text is not None:
            request = msgspec.structs.replace(request, prompt=msgspec.structs.replace(request.prompt, text=prompt_text))
        async with contextlib.aclosing(self.generate_from(request, request_id)) as outputs:
            async for output in outputs:
                output.lora_request = lora_request
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
        """Yield what a model that pools makes of a text, once. Raises as `generate` does."""
        from octavo.engine.pooling_input import PoolingInput, Text

        refuse_kwargs(lora_request=lora_request, tokenization_kwargs=tokenization_kwargs, trace_headers=trace_headers)
        salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
        inputs, text = PoolingInput(self.inputs), Text.of(prompt)
        [request] = await run_off_loop(
            lambda: inputs.process([text], pooling_params, priority=priority, cache_salt=salt), length=length_of(prompt)
        )
        yield await self.pool(request, request_id)
