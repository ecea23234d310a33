"""`LLM`: the engine for scripts. It takes many prompts and returns all answers in order. It runs in the caller's
process, unless there are several engines."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, cast

from octavo.config import EngineArgs, ModelConfig
from octavo.engine.core import EngineCore
from octavo.engine.input_processor import PromptInput, as_prompts
from octavo.engine.llm_engine import LLMEngine
from octavo.engine.sleep_names import SLEEP_MODES, check_mode
from octavo.engine.vllm_names import ABSENT, refuse_kwargs
from octavo.entrypoints.chat.chat_template import render_chat
from octavo.entrypoints.chat.media_parts import embeds_of, media_of, message_for_template, read_message, with_embeds
from octavo.entrypoints.pooling.llm_pooling import PoolingMethods, UseTqdm
from octavo.errors import RequestError, naming_prompt
from octavo.logs import configure_logging
from octavo.lora.request import LoRARequest
from octavo.metrics.reader import Metric, snapshot
from octavo.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
)
from octavo.request import AdapterSource, EngineRequest
from octavo.sampling.processor_classes import LogitsProcessor, check_classes
from octavo.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from octavo.unknown_flags import known_arguments

if TYPE_CHECKING:
    from octavo.entrypoints.chat.tools.format_detection import ModelFormats
    from octavo.entrypoints.openai.request_bodies import ChatCompletionRequest
    from octavo.structured_output.grammar_builder import WantedGrammar


class LLM(PoolingMethods):
    """A model that answers lists of prompts.

    Every field of `EngineArgs` is a keyword: `LLM(model="org/name", max_model_len=2048, dtype="bfloat16")`.
    `logits_processors` are subclasses of `octavo.v1.sample.logits_processor.LogitsProcessor`; they change the logits of
    all requests, and read their `SamplingParams.extra_args`. Raises `ConfigError` or `LoadError` if the model cannot be
    served that way.
    """

    def __init__(
        self, model: str = "", *, logits_processors: Sequence[type[LogitsProcessor]] | None = None, **engine_args: Any
    ) -> None:
        classes = check_classes(logits_processors or ())
        # The caller's logits processors may use torch, whose waiting threads would spin and take cores from the native
        # kernels. Torch reads this when it starts its threads.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        configure_logging("engine")
        engine_args = known_arguments("LLM", engine_args, EngineArgs.__dataclass_fields__)
        self.llm_engine = LLMEngine.from_engine_args(EngineArgs(model=model, **engine_args))
        self.config, self.tokenizer = self.llm_engine.config, self.llm_engine.tokenizer
        self.inputs = self.llm_engine.inputs
        self.inputs.processor_classes = classes
        self._runs = threading.RLock()  # one call at a time, because each call steps the engine itself

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLM:
        """Make an `LLM` from existing engine arguments."""
        return cls(**{field.name: getattr(engine_args, field.name) for field in fields(engine_args)})

    def __getattr__(self, name: str) -> Any:
        """Raise `AttributeError` for an unknown name, with advice. Python calls this only for missing names."""
        advice = f": {ABSENT[name]}" if name in ABSENT else ""
        raise AttributeError(f"LLM has no {name}{advice}.", name=name, obj=self)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the memory of the model and the cache. The object cannot be used any more."""
        with self._runs:
            self.llm_engine.close()

    @property
    def core(self) -> EngineCore:
        return self.llm_engine.core

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Free memory until `wake_up`. Level 1 frees the KV cache and keeps the weights, level 2 frees both; on GPUs
        both levels do. `mode` is that of `AsyncLLMEngine.sleep`; between calls no request runs, so both do the same."""
        check_mode(mode, SLEEP_MODES)
        with self._runs:
            self.llm_engine.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Restore the memory that `sleep` freed, for "weights", the "kv_cache", or both."""
        with self._runs:
            self.llm_engine.wake_up(tags)

    def is_sleeping(self) -> bool:
        return self.llm_engine.is_sleeping()

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = True) -> bool:
        """Empty the prefix cache, also on disk. Return whether it was emptied. Between calls no request runs, so
        `reset_running_requests` changes nothing. Raises `RequestError` for `reset_connector=False` if there is a cache
        on disk."""
        with self._runs:
            return self.llm_engine.reset_prefix_cache(reset_connector=reset_connector)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters that `generate` and `chat` use by default: the model's own recommendations."""
        return SamplingParams(**self.config.model.default_sampling_params)

    @property
    def model_config(self) -> ModelConfig:
        return self.config.model

    @cached_property
    def _formats(self) -> ModelFormats:
        """The formats of the model's calls and reasoning, as its server recognises them."""
        from octavo.entrypoints.chat.tools.format_detection import model_formats  # not needed by chats without calls

        return model_formats(
            self.tokenizer,
            model_type=self.config.model.checkpoint.config.get("model_type"),
            response_template=getattr(self.tokenizer, "response_template", None),
        )

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """Return the model's tasks: "generate", or the tasks of a model that pools."""
        return self.config.supported_tasks

    def get_metrics(self) -> list[Metric]:
        """Return the current metrics under vLLM's names: counters, gauges, histograms and vectors of
        `octavo.v1.metrics.reader`. They are those of a server's `/metrics`."""
        return snapshot(self.llm_engine.metrics)

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer, with `transformers`' names: `encode`, `decode`, `apply_chat_template`."""
        return self.tokenizer

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        *,
        prompt_token_ids: list[int] | list[list[int]] | None = None,
        priority: Sequence[int] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts: text, token ids, `{"prompt": …}`, `{"prompt_token_ids": […]}`, `{"prompt_embeds": …}`, or a
        list of them.

        `prompt_token_ids`, as in earlier versions of vLLM, are the prompts' tokens, instead of texts or in addition to
        them. `sampling_params` is one for all prompts or one for each; so is `lora_request`, the adapter. `use_tqdm`
        switches the progress bar on or off, or makes it (`functools.partial(tqdm, ...)`). Raises `RequestError` before
        anything runs if a request is refused, and while it runs if its adapter cannot be read, or one of its logits
        processors fails or leaves no token to choose.
        """
        refuse_kwargs(tokenization_kwargs=tokenization_kwargs, mm_processor_kwargs=mm_processor_kwargs)
        prompts = as_prompts(prompts) if prompt_token_ids is None else _with_ids(prompts, prompt_token_ids)
        params = self._params_for(prompts, sampling_params)
        loras = _one_each(prompts, lora_request)
        requests = []
        asked = zip(prompts, params, _priorities(prompts, priority), self._adapters_for(loras), strict=True)
        for index, (prompt, one, its, adapter) in enumerate(asked):
            with naming_prompt("prompts", index, len(prompts)):
                requests.append(self.inputs.process(prompt, one, priority=its, adapter=adapter))
        return self._run_generation(requests, loras, use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: Literal["auto", "string", "openai"] = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        *,
        priority: Sequence[int] | None = None,
        tool_choice: str | dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several: lists of `{"role": …, "content": …}`. The template describes `tools` to
        the model. `tool_choice` is as in OpenAI's API: with "required" or a function the answers are calls, with "auto"
        calls of strict functions follow their schemas, with "none" there are no tools. The text is as the model writes
        it; marks of calls may be special tokens, which `skip_special_tokens=False` shows.

        A message's content is text, or a list of parts: `{"type": "text", "text": …}`, and for models that see
        `{"type": "image_pil", "image_pil": PIL.Image}` and `{"type": "image_url", "image_url": {"url": …}}`, for those
        that hear `{"type": "audio_url", "audio_url": {"url": …}}` and
        `{"type": "input_audio", "input_audio": {"data": base64, "format": "wav"}}`; with `enable_prompt_embeds`
        `{"type": "prompt_embeds", "data": tensor or base64}`.
        """
        refuse_kwargs(tokenization_kwargs=tokenization_kwargs, mm_processor_kwargs=mm_processor_kwargs)
        conversations: Sequence[Any] = [messages] if messages and isinstance(messages[0], Mapping) else messages
        for conversation in conversations:
            if not isinstance(conversation, Sequence) or not all(isinstance(one, Mapping) for one in conversation):
                raise RequestError(
                    'messages must be a list of {"role": ..., "content": ...}, or of such lists, '
                    f"got {conversation!r:.100}.",
                    param="messages",
                )
        if tools is not None and not (isinstance(tools, list) and all(isinstance(one, Mapping) for one in tools)):
            raise RequestError(f"tools must be a list of dictionaries, got {tools!r:.100}.", param="tools")
        taken = [[read_message(message) for message in conversation] for conversation in conversations]
        media = [media_of([message.get("content") for message in conversation]) for conversation in taken]
        all_embeds = [embeds_of([message.get("content") for message in conversation]) for conversation in taken]
        processors = [self.inputs.media_processor_of(given) if given else None for given in media]
        shown = tools
        if tool_choice is not None or any(tool.get("type") == "custom" for tool in tools or ()):
            body = self._request_of_calls(tools, tool_choice, [])
            known = {tool.function.name: tool for tool in body.tools or ()}
            tools = [tool for tool in tools or () if tool[tool["type"]]["name"] in body.chosen_tools]
            shown = [
                known[tool["custom"]["name"]].for_template() if tool["type"] == "custom" else tool for tool in tools
            ]
        texts = [
            render_chat(
                self.tokenizer,
                [message_for_template(message) for message in conversation],
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template_options=chat_template_kwargs,
                tools=shown,
                content_format=chat_template_content_format,
                placeholders=processor.placeholders if processor else None,
                tool_format=self._formats.tools
                if tools or any(one.get("tool_calls") for one in conversation)
                else None,
            )
            for conversation, processor in zip(taken, processors, strict=True)
        ]
        prompts: list[PromptInput] = []
        for text, processor, given, embeds in zip(texts, processors, media, all_embeds, strict=True):
            prompt: dict[str, Any] = with_embeds(text, embeds) if embeds else {"prompt": text}
            if processor is not None:
                prompt["multi_modal_data"] = processor.open(given)
            prompts.append(cast(PromptInput, prompt))
        params, loras = self._params_for(prompts, sampling_params), _one_each(prompts, lora_request)
        requests = []
        asked = zip(prompts, params, _priorities(prompts, priority), self._adapters_for(loras), strict=True)
        for index, (filled, one, its, adapter) in enumerate(asked):
            with naming_prompt("messages", index, len(prompts)):  # the template has added special tokens
                calls = None
                if tools and tool_choice is not None:
                    calls = self._grammar_of_calls(tools, tool_choice, taken[index], texts[index], one)
                requests.append(
                    self.inputs.process(
                        filled, one, priority=its, add_special_tokens=False, adapter=adapter, grammar=calls
                    )
                )
        return self._run_generation(requests, loras, use_tqdm)

    def _request_of_calls(
        self,
        tools: list[dict[str, Any]] | None,
        tool_choice: str | dict[str, Any] | None,
        messages: Sequence[Mapping[str, Any]],
    ) -> ChatCompletionRequest:
        """Return the part of a server's request that decides on calls."""
        from octavo.entrypoints.chat.chat_run import make_chat

        calls = [{"role": "assistant", "tool_calls": one["tool_calls"]} for one in messages if one.get("tool_calls")]
        asked = [{"role": "user", "content": ""}, *calls]
        return make_chat({"messages": asked, "tools": tools, "tool_choice": tool_choice})

    def _grammar_of_calls(
        self,
        tools: list[dict[str, Any]],
        tool_choice: str | dict[str, Any],
        messages: Sequence[Mapping[str, Any]],
        prompt: str,
        params: SamplingParams,
    ) -> WantedGrammar | None:
        """Return the grammar of the answers to `prompt`, as a server makes it."""
        from octavo.entrypoints.chat.answer_reader import answer_format, check_tool_choice, wanted_grammar

        body, formats = self._request_of_calls(tools, tool_choice, messages), self._formats
        check_tool_choice(body, formats)
        structure = params.structured_outputs
        if body.forces_calls and structure is not None:
            raise RequestError("structured_outputs and tool_choice exclude each other.", param="structured_outputs")
        form = answer_format(body, formats, prompt, checks_calls=False)
        return wanted_grammar(body, form, formats, structure, self.inputs.special_tokens, None)

    def beam_search(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        params: BeamSearchParams,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: UseTqdm = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Return the most likely continuations of each prompt, by `transformers`' rules (`generate(num_beams=...)`).
        Search `concurrency_limit` prompts at a time."""
        if not isinstance(params, BeamSearchParams):
            raise TypeError(f"params must be BeamSearchParams, got {type(params).__name__}.")
        given, asked = as_prompts(prompts), params.to_sampling_params()
        loras = _one_each(given, lora_request)
        if concurrency_limit is not None and concurrency_limit < 1:
            raise RequestError(f"concurrency_limit must be 1 or more, got {concurrency_limit}.")
        size = concurrency_limit or max(1, len(given))
        outputs = [
            output
            for begin in range(0, len(given), size)
            for output in self.generate(
                given[begin : begin + size], asked, use_tqdm, lora_request=loras[begin : begin + size]
            )
        ]
        return [
            BeamSearchOutput([self._beam(output, completion, params) for completion in output.outputs])
            for output in outputs
        ]

    def _beam(
        self, output: RequestOutput, completion: CompletionOutput, params: BeamSearchParams
    ) -> BeamSearchSequence:
        assert completion.logprobs is not None and completion.cumulative_logprob is not None
        is_stopped = completion.finish_reason == "stop" and not params.include_stop_str_in_output
        token_ids = completion.token_ids[:-1] if is_stopped else completion.token_ids
        tokens = output.prompt_token_ids + token_ids
        return BeamSearchSequence(
            tokens=tokens,
            logprobs=list(completion.logprobs),
            cum_logprob=completion.cumulative_logprob,
            text=str(self.tokenizer.decode(tokens)),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            score=completion.cumulative_logprob / len(completion.token_ids) ** params.length_penalty,
        )

    def _params_for(
        self, prompts: Sequence[PromptInput], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params.checked()] * len(prompts)
        if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
            raise TypeError(f"sampling_params must be SamplingParams or a list of them, got {type(params).__name__}.")
        if len(params) != len(prompts):
            raise RequestError(f"{len(params)} sampling_params for {len(prompts)} prompts.", param="sampling_params")
        return [one.checked() for one in params]

    def _adapters_for(self, asked: Sequence[LoRARequest | None]) -> list[AdapterSource | None]:
        found = {one: self.llm_engine.find_adapter(one) for one in asked if one is not None}
        return [None if one is None else found[one] for one in asked]

    def _run_generation(
        self, requests: list[EngineRequest], loras: Sequence[LoRARequest | None], use_tqdm: UseTqdm
    ) -> list[RequestOutput]:
        for request in requests:
            # Only the last output of each request is returned, so earlier outputs need not be made.
            request.params.output_kind = RequestOutputKind.FINAL_ONLY
        outputs = [output for output in self.run(requests, use_tqdm) if isinstance(output, RequestOutput)]
        for output, lora in zip(outputs, loras, strict=True):
            output.lora_request = lora
        return outputs

    def run(
        self, requests: list[EngineRequest], use_tqdm: UseTqdm
    ) -> list[RequestOutput | PoolingRequestOutput[PoolingOutput]]:
        """Run requests in the engine, and return their outputs in order. Calls of other threads wait."""
        with self._runs:
            return self._run(requests, use_tqdm)

    def _run(
        self, requests: list[EngineRequest], use_tqdm: UseTqdm
    ) -> list[RequestOutput | PoolingRequestOutput[PoolingOutput]]:
        from tqdm import tqdm

        engine = self.llm_engine
        finished: dict[str, RequestOutput | PoolingRequestOutput[PoolingOutput]] = {}
        num_prompt = num_output = 0
        make_bar = use_tqdm if callable(use_tqdm) else partial(tqdm, disable=not use_tqdm)
        bar = make_bar(total=len(requests), desc="Requests", unit="req", dynamic_ncols=True)
        try:
            for request in requests:
                engine.add(request)
            while engine.has_unfinished_requests():
                for result in engine.step():
                    finished[result.request_id] = result
                    num_prompt += len(result.prompt_token_ids)
                    if isinstance(result, RequestOutput):
                        num_output += sum(len(completion.token_ids) for completion in result.outputs)
                    elapsed = max(bar.format_dict["elapsed"], 1e-9)
                    rates = f"in {num_prompt / elapsed:.0f} tok/s, out {num_output / elapsed:.0f} tok/s"
                    bar.set_postfix_str(rates, refresh=False)
                    bar.update()
        finally:
            engine.abort_request(request.request_id for request in requests)
            bar.close()
        return [finished[request.request_id] for request in requests]


def _one_each(
    prompts: Sequence[PromptInput], asked: LoRARequest | Sequence[LoRARequest | None] | None
) -> Sequence[LoRARequest | None]:
    if asked is None or isinstance(asked, LoRARequest):
        return [asked] * len(prompts)
    if not isinstance(asked, Sequence) or not all(one is None or isinstance(one, LoRARequest) for one in asked):
        raise TypeError(f"lora_request must be a LoRARequest or a list of them, got {asked!r:.100}.")
    if len(asked) != len(prompts):
        raise RequestError(f"{len(asked)} lora_requests for {len(prompts)} prompts.", param="lora_request")
    return asked


def _priorities(prompts: Sequence[PromptInput], asked: Sequence[int] | None) -> Sequence[int]:
    if asked is None:
        return [0] * len(prompts)
    if not isinstance(asked, Sequence) or len(asked) != len(prompts):
        raise RequestError(
            f"priority must be a list with a number for each of {len(prompts)} prompts, got {asked!r:.100}.",
            param="priority",
        )
    return asked


def _with_ids(
    texts: PromptInput | Sequence[PromptInput] | None, ids: list[int] | list[list[int]]
) -> Sequence[PromptInput]:
    """Return prompts of token ids, each with the text to show, if texts are given."""
    prompts = as_prompts(ids)
    if texts is None:
        return prompts
    texts = as_prompts(texts)
    if len(texts) != len(prompts):
        raise RequestError(f"{len(prompts)} prompt_token_ids for {len(texts)} prompts.", param="prompt_token_ids")
    return [{"prompt": text, "prompt_token_ids": one} for text, one in zip(texts, prompts, strict=True)]
