"""POST /v1/completions: one or many prompts, as text or token ids, streamed or not.

Choice `i * n + j` is the `j`-th completion of prompt `i`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request
from starlette.responses import Response

from octavo.engine.off_loop import run_off_loop
from octavo.entrypoints.openai.logprobs import LogprobsFormatter
from octavo.entrypoints.openai.protocol import CompletionRequest
from octavo.entrypoints.openai.responses import CompletionChoice, CompletionLogprobs, CompletionResponse, Usage
from octavo.entrypoints.openai.route import BodyRoute
from octavo.entrypoints.openai.state import Asked, ServerState, json_response, make_usage, state_of
from octavo.entrypoints.openai.streaming import DONE, ChunkWriter, EventStream, encode_json, merge, run_until_disconnect
from octavo.errors import RequestError
from octavo.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from octavo.request import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

router = APIRouter(tags=["OpenAI"], route_class=BodyRoute)

MAX_PROMPTS = 2048  # in one request


@router.post("/v1/completions", response_model=CompletionResponse)
async def create_completion(body: CompletionRequest, raw: Request) -> Response:
    """Continue each prompt."""
    job = _Job(state_of(raw), body, raw)
    await job.submit()
    if body.stream:
        return EventStream(job.stream(), job.headers)
    response = await run_until_disconnect(job.collect(), raw.receive)
    return Response(status_code=499) if response is None else json_response(response, job.headers)


async def prompt_text(tokenizer: PreTrainedTokenizerFast, prompt: Prompt, *, is_cut: bool) -> str:
    """What an answer that repeats its prompt starts with; of a prompt that `is_cut`, what is left of it."""
    if prompt.text is not None and not is_cut:
        return prompt.text
    return await run_off_loop(lambda: str(tokenizer.decode(prompt.token_ids)), length=len(prompt.token_ids))


@dataclass(slots=True)
class _Prompt:
    """One prompt of the request and what is known of it so far."""

    echo: str | None  # its text, when the answer shall start with it
    token_ids: list[int]
    logprobs: list[PositionLogprobs | None] | None = None
    num_cached: int = 0
    offsets: dict[int, int] = field(default_factory=dict)  # by choice that has begun: characters of its tokens so far


class _Job:
    """One request on its way through the engine. When `submit` returns, all that can be refused has been checked."""

    def __init__(self, state: ServerState, body: CompletionRequest, raw: Request) -> None:
        self._body = body
        self._model = state.resolve_model(body.model)
        params = body.to_sampling_params(state.engine.config.model.default_sampling_params)
        self._id, self.headers = state.response_id("cmpl", body, raw)
        self._created = int(time.time())
        self._fingerprint = state.fingerprint
        self._state = state
        self._params = params
        self._formatter = LogprobsFormatter(state.engine.tokenizer, as_token_ids=bool(body.return_tokens_as_token_ids))
        self._prompts: list[_Prompt] = []
        self._generators: list[AsyncGenerator[RequestOutput, None]] = []
        self._num_completion = 0

    async def submit(self) -> None:
        """Raises `RequestError` for whatever is wrong with a prompt, before any of them runs."""
        body = self._body
        if len(body.prompt) > MAX_PROMPTS:
            raise RequestError(f"prompt has {len(body.prompt)} entries; {MAX_PROMPTS} is the most.", param="prompt")
        adds_special = body.add_special_tokens is not False
        for given in body.prompt:
            await asyncio.sleep(0)  # let others go on between two prompts
            prompt, generator = await self._state.submit(
                self._id,
                body,
                self._params,
                partial(Asked, given, adds_special),
                length=len(given),
                num_prompts=len(body.prompt),
            )
            echo = None
            if body.echo:
                is_cut = body.truncate_prompt_tokens is not None
                echo = await prompt_text(self._state.engine.tokenizer, prompt, is_cut=is_cut)
            self._prompts.append(_Prompt(echo, prompt.token_ids))
            self._generators.append(generator)

    async def collect(self) -> CompletionResponse:
        """The whole answer."""
        choices: list[CompletionChoice] = []
        async for prompt_index, output in merge(self._generators):
            prompt = self._note(prompt_index, output)
            for completion in output.outputs:
                text, logprobs = self._take(prompt, completion)
                finish_reason, stop_reason = self._end(completion)
                choice = CompletionChoice(
                    index=prompt_index * self._body.num_choices + completion.index,
                    text=text,
                    logprobs=logprobs,
                    finish_reason=finish_reason or "abort",
                    stop_reason=stop_reason,
                )
                if self._body.return_token_ids:
                    choice.token_ids = [] if self._body.only_prompt else completion.token_ids
                    choice.prompt_token_ids = prompt.token_ids
                if self._body.prompt_logprobs is not None and prompt.logprobs is not None:
                    choice.prompt_logprobs = self._formatter.prompt(prompt.logprobs)
                choices.append(choice)
        return CompletionResponse(
            id=self._id,
            created=self._created,
            model=self._model,
            system_fingerprint=self._fingerprint,
            choices=sorted(choices, key=lambda choice: choice.index),
            usage=self._usage(),
        )

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events."""
        body = self._body
        writer = ChunkWriter(
            response_id=self._id,
            kind="text_completion",
            created=self._created,
            model=self._model,
            fingerprint=self._fingerprint,
            wants_usage=body.wants_usage,
        )
        # Nothing but text, which is what most chunks are.
        plain = (
            body.logprobs is None
            and not body.echo
            and not body.only_prompt
            and not body.wants_continuous_usage
            and not body.return_token_ids
        )
        num_choices = body.num_choices
        outputs = merge(self._generators)
        try:
            async for prompt_index, output in outputs:
                prompt = self._note(prompt_index, output)
                events = []
                for completion in output.outputs:
                    index = prompt_index * num_choices + completion.index
                    if plain and completion.finish_reason is None:
                        self._num_completion += len(completion.token_ids)
                        if completion.text:
                            events.append(writer.text(index, b'"text":' + encode_json(completion.text)))
                    else:
                        events.append(self._event(writer, index, prompt, completion))
                if events:
                    yield b"".join(events)
        finally:
            await outputs.aclose()
        if body.wants_usage:
            yield writer.usage(self._usage().model_dump_json().encode())
        yield DONE

    def _event(self, writer: ChunkWriter, index: int, prompt: _Prompt, completion: CompletionOutput) -> bytes:
        """A chunk with whatever the request asked for; empty if there is nothing new."""
        is_first = completion.index not in prompt.offsets
        text, logprobs = self._take(prompt, completion)
        finish_reason, stop_reason = self._end(completion)
        extra = b""
        if self._body.return_token_ids:
            token_ids = [] if self._body.only_prompt else completion.token_ids
            extra = b',"token_ids":' + encode_json(token_ids)
            if is_first:
                extra += b',"prompt_token_ids":' + encode_json(prompt.token_ids)
        if not text and not extra and finish_reason is None and (logprobs is None or not logprobs.tokens):
            return b""
        return writer.choice(
            index,
            b'"text":' + encode_json(text) + extra,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            logprobs=None if logprobs is None else logprobs.model_dump_json().encode(),
            usage=self._usage().model_dump_json().encode() if self._body.wants_continuous_usage else None,
        )

    def _end(self, completion: CompletionOutput) -> tuple[str | None, int | str | None]:
        """Why a choice ended: a prompt that is only scored has reached its length, whatever came after it."""
        if self._body.only_prompt and completion.finish_reason == "stop":
            return "length", None
        return completion.finish_reason, completion.stop_reason

    def _note(self, prompt_index: int, output: RequestOutput) -> _Prompt:
        prompt = self._prompts[prompt_index]
        if output.prompt_logprobs is not None:
            prompt.logprobs = output.prompt_logprobs
        prompt.num_cached = output.num_cached_tokens
        return prompt

    def _take(self, prompt: _Prompt, completion: CompletionOutput) -> tuple[str, CompletionLogprobs | None]:
        """Text and log-probabilities that `completion` adds to its choice, after the echo if they are the first."""
        text, token_ids, positions = completion.text, completion.token_ids, completion.logprobs or []
        if self._body.only_prompt:
            text, token_ids, positions = "", [], []
        self._num_completion += len(token_ids)
        offset = prompt.offsets.get(completion.index)
        shown: list[PositionLogprobs | None] = [*positions]
        if offset is None and prompt.echo is not None:
            text = prompt.echo + text
            token_ids = prompt.token_ids + token_ids
            shown = [*(prompt.logprobs or [None] * len(prompt.token_ids)), *positions]
        if self._body.logprobs is None:
            prompt.offsets[completion.index] = 0
            return text, None
        logprobs, prompt.offsets[completion.index] = self._formatter.completion(
            token_ids, shown, self._body.logprobs, text_offset=offset or 0
        )
        return text, logprobs

    def _usage(self) -> Usage:
        num_prompt = sum(len(prompt.token_ids) for prompt in self._prompts)
        return make_usage(num_prompt, self._num_completion, sum(prompt.num_cached for prompt in self._prompts))
