"""`LLM`: the engine for scripts. Many prompts in, all answers out, in order, all of it in the caller's process."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.config import EngineArgs
from octavo.engine.core import EngineCore
from octavo.engine.input_processor import InputProcessor, PromptInput
from octavo.engine.output_processor import OutputProcessor, RequestFailed
from octavo.entrypoints.chat_template import render_chat
from octavo.errors import RequestError
from octavo.loading.tokenizer import load_tokenizer
from octavo.logs import configure_logging
from octavo.outputs import BeamSearchOutput, BeamSearchSequence, CompletionOutput, RequestOutput
from octavo.request import EngineRequest
from octavo.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams


class LLM:
    """A model that answers lists of prompts.

    Every field of `EngineArgs` is a keyword: `LLM(model="org/name", max_model_len=2048, dtype="bfloat16")`. Raises
    `ConfigError` or `LoadError` if the model cannot be served that way.
    """

    def __init__(self, model: str = "", **engine_args: Any) -> None:
        # A logits processor of the caller's may compute with torch, whose threads would wait by spinning and take the
        # cores from the native kernels'. It reads this when it starts its pool.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        configure_logging("engine")
        unknown = set(engine_args) - set(EngineArgs.__dataclass_fields__)
        if unknown:
            raise TypeError(f"LLM() got unknown or not yet built arguments: {', '.join(sorted(unknown))}")
        self.config = EngineArgs(model=model, **engine_args).create_engine_config()
        self.tokenizer = load_tokenizer(self.config.model.checkpoint, self.config.model.chat_template)
        self.core = EngineCore(self.config)
        self.config = self.config.with_max_model_len(self.core.executor.max_model_len)
        self.inputs = InputProcessor(self.config, self.tokenizer)

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` and `chat` use when they are given no parameters: the model's own recommendations."""
        return SamplingParams(**self.config.model.default_sampling_params)

    def get_tokenizer(self) -> Any:
        """The tokenizer of the model, with `transformers`' names: `encode`, `decode`, `apply_chat_template`."""
        return self.tokenizer

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts: text, `{"prompt": …}`, `{"prompt_token_ids": […]}`, or a list of them.

        `sampling_params` is one for all or one a prompt. Raises `RequestError` before anything runs if a request is
        refused, and while it runs if one of its logits processors fails or leaves no token to choose.
        """
        if isinstance(prompts, str | Mapping):
            prompts = [prompts]
        params = self._params_for(prompts, sampling_params)
        if priority is None:
            priority = [0] * len(prompts)
        elif len(priority) != len(prompts):
            raise RequestError(f"{len(priority)} priorities for {len(prompts)} prompts.", param="priority")
        asked = zip(prompts, params, priority, strict=True)
        requests = [self.inputs.process(prompt, one, priority=its) for prompt, one, its in asked]
        return self._run(requests, use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several: lists of `{"role": …, "content": …}`. `tools` are told to the model."""
        conversations: Sequence[Any] = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [
            render_chat(
                self.tokenizer,
                conversation,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template_options=chat_template_kwargs,
                tools=tools,
            )
            for conversation in conversations
        ]
        params = self._params_for(prompts, sampling_params)
        requests = [
            self.inputs.process(prompt, one, add_special_tokens=False)  # the template has put them in
            for prompt, one in zip(prompts, params, strict=True)
        ]
        return self._run(requests, use_tqdm)

    def beam_search(
        self, prompts: PromptInput | Sequence[PromptInput], params: BeamSearchParams, use_tqdm: bool = False
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of each prompt, by `transformers`' rules (`generate(num_beams=...)`)."""
        outputs = self.generate(prompts, params.to_sampling_params(), use_tqdm)
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
            logprobs=completion.logprobs,
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
            return [params] * len(prompts)
        if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
            raise TypeError(f"sampling_params must be SamplingParams or a list of them, got {type(params).__name__}.")
        if len(params) != len(prompts):
            raise RequestError(f"{len(params)} sampling_params for {len(prompts)} prompts.", param="sampling_params")
        return list(params)

    def _run(self, requests: list[EngineRequest], use_tqdm: bool) -> list[RequestOutput]:
        from tqdm import tqdm

        outputs = OutputProcessor(self.tokenizer)
        finished: dict[str, RequestOutput] = {}
        num_prompt = num_output = 0
        bar = tqdm(total=len(requests), desc="Requests", unit="req", dynamic_ncols=True, disable=not use_tqdm)
        try:
            for request in requests:
                # Only the last output of each is returned: what comes between need not be put together.
                request.params.output_kind = RequestOutputKind.FINAL_ONLY
                outputs.add(request)
                self.core.add(request)
            while outputs.requests:
                results, aborts = outputs.process(self.core.step().outputs)
                for abort in aborts:
                    self.core.abort(abort.request_id, abort.index)
                for result in results:
                    if isinstance(result, RequestFailed):
                        raise result.error
                    finished[result.request_id] = result
                    num_prompt += len(result.prompt_token_ids)
                    num_output += sum(len(completion.token_ids) for completion in result.outputs)
                    elapsed = max(bar.format_dict["elapsed"], 1e-9)
                    rates = f"in {num_prompt / elapsed:.0f} tok/s, out {num_output / elapsed:.0f} tok/s"
                    bar.set_postfix_str(rates, refresh=False)
                    bar.update()
        finally:
            for request in requests:
                self.core.abort(request.request_id)
            bar.close()
        return [finished[request.request_id] for request in requests]
