"""The common part of completions and chat completions: it sends a request to the engine, and turns the outputs into one
answer or the chunks of a stream."""

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.off_loop import run_off_loop
from octavo.entrypoints.http import streaming
from octavo.entrypoints.http.resumable import ResumableStream
from octavo.entrypoints.http.server_state import state_of
from octavo.entrypoints.openai.logprobs_format import LogprobsFormatter
from octavo.entrypoints.openai.request_bodies import GenerationRequest, StreamOptions
from octavo.entrypoints.openai.response_bodies import (
    ChatChoice,
    CompletionChoice,
    CompletionTokensDetails,
    PromptTokensDetails,
    Usage,
)
from octavo.errors import EngineDeadError
from octavo.ollama import TRUNCATION_HEADER
from octavo.outputs import CompletionOutput, PositionLogprobs, RequestOutput

RequestT = TypeVar("RequestT", bound=GenerationRequest)
LENGTH_OF_ENTRY = 8  # writing a log-probability takes as long as tokenizing so many characters
ChoiceT = TypeVar("ChoiceT", CompletionChoice, ChatChoice)


class GenerationJob(ABC, Generic[RequestT, ChoiceT]):
    """Takes one request through the engine. When `submit` returns, every check that can refuse the request is done."""

    id_prefix: str
    chunk_kind: str  # the `object` of a stream's chunks
    text_field: tuple[bytes, bytes]  # see `ChunkWriter`

    def __init__(self, body: RequestT, raw: Request, *, only_renders: bool = False) -> None:
        """`only_renders`: the caller uses `render` and not `answer`."""
        self._only_renders = only_renders
        self._state = state = state_of(raw)
        if state.args.enable_force_include_usage and body.stream:
            body.stream_options = StreamOptions(include_usage=True, continuous_usage_stats=True)
        self._body = body
        model = state.resolve_model(body.model)
        self._params = body.to_sampling_params(state.engine.config.model.default_sampling_params)
        # "auto" leaves out old turns, then cuts the prompt; "disabled" refuses. Both lower max_tokens to what fits.
        # Ollama's routes send it.
        self._truncation = raw.headers.get(TRUNCATION_HEADER)
        response_id, self._headers = state.response_id(self.id_prefix, body, raw)
        self._resumable = ResumableStream(
            raw, self._params, body.resume, response_id, int(time.time()), can_be=body.is_resumable
        )
        # The first fields of the answer and of each chunk.
        self._about: dict[str, Any] = {
            "id": self._resumable.id,
            "created": self._resumable.created,
            "model": model,
            "system_fingerprint": state.fingerprint,
        }
        as_ids = body.return_tokens_as_token_ids
        as_ids = state.args.return_tokens_as_token_ids if as_ids is None else as_ids
        self._formatter = LogprobsFormatter(state.engine.tokenizer, as_token_ids=as_ids)
        self._generators: list[AsyncGenerator[RequestOutput, None]] = []  # one for each prompt
        # Log-probabilities may need a thread, which only the generators use.
        wants_logprobs = self._params.wants_logprobs or self._params.prompt_logprobs is not None
        self._sink = streaming.EventSink(self._events_of) if body.stream and not wants_logprobs else None
        self._prompt_logprobs: dict[int, Sequence[PositionLogprobs | None]] = {}  # by prompt
        self._num_prompt = 0  # tokens of all prompts
        self._num_cached: dict[int, int] = {}  # tokens, by prompt
        self._num_completion = 0
        self._num_reasoning = 0  # tokens of reasoning among them
        self._predictions: dict[int, tuple[int, int]] = {}  # accepted and rejected tokens, by prompt

    async def answer(self, raw: Request) -> Response:
        """Return the whole answer, or its stream. Raises `RequestError` for an invalid request."""
        await streaming.run_until_disconnect(self.submit(), raw.receive)
        if self._body.stream:
            wants_usage = self._body.wants_usage
            self._writer = streaming.ChunkWriter(self.chunk_kind, self._about, self.text_field, wants_usage=wants_usage)
            self._has_plain_answer = self._is_plain()
            headers = self._headers | self._resumable.headers(self._num_prompt)
            return streaming.EventStream(self._stream(wants_usage), headers, self._sink)
        return await streaming.respond(self._collect(), raw, self._headers)

    async def render(self) -> list[list[int]]:
        """Check the request, and return the tokens of its prompts. Nothing is computed. Raises `RequestError`."""
        await self.submit()
        for generator in self._generators:
            await generator.aclose()  # before it submits its request to the engine
        return self._all_prompt_token_ids()

    @property
    def response_id(self) -> str:
        return str(self._about["id"])

    @property
    def model(self) -> str:
        return str(self._about["model"])

    def _cut_prompt(self) -> None:
        """Cut the prompt to its last tokens: half of the model's length, or more if the answer may have less."""
        limit = self._state.engine.config.model.max_model_len
        num_kept = limit - min(limit // 2, self._params.max_tokens or limit)
        self._params = copy.copy(self._params)  # other prompts share them
        self._params.truncate_prompt_tokens = num_kept
        self._body = self._body.model_copy(update={"truncate_prompt_tokens": num_kept})

    @abstractmethod
    async def submit(self) -> None:
        """Make the `_generators`. Raises `RequestError` for an invalid prompt."""

    @abstractmethod
    def _all_prompt_token_ids(self) -> list[list[int]]:
        """Return the tokens of each prompt, after `submit`."""

    @abstractmethod
    def _choice(self, prompt_index: int, completion: CompletionOutput) -> ChoiceT:
        """Return a whole choice."""

    @abstractmethod
    def _response(self, choices: list[ChoiceT]) -> BaseModel:
        """Return the whole answer."""

    @abstractmethod
    def _events(
        self, writer: streaming.ChunkWriter, prompt_index: int, output: RequestOutput, is_plain: bool
    ) -> list[bytes]:
        """Return the chunks for `output`. A plain answer (`is_plain`) has only text, like most answers."""

    @abstractmethod
    def _is_plain(self) -> bool:
        """Return whether the request asks only for text."""

    async def _collect(self) -> BaseModel:
        return self._response(await self._choices())

    async def _on_end(self) -> None:
        """Do the work after a complete stream."""

    async def _choices(self) -> list[ChoiceT]:
        choices: list[ChoiceT] = []
        async for prompt_index, output in streaming.merge(self._generators):
            length = self._note(prompt_index, output)
            choices += await run_off_loop(partial(self._made, prompt_index, output), length=length)
        return sorted(choices, key=lambda choice: choice.index)

    def _made(self, prompt_index: int, output: RequestOutput) -> list[ChoiceT]:
        return [self._choice(prompt_index, completion) for completion in output.outputs]

    async def _stream(self, wants_usage: bool) -> AsyncGenerator[bytes, None]:
        outputs = streaming.merge(self._generators)
        try:
            async for prompt_index, output in outputs:
                length = self._note(prompt_index, output)
                events = await run_off_loop(partial(self._encode, prompt_index, output), length=length)
                if events:
                    yield events
        except EngineDeadError as error:
            if comment := self._resumable.before_error(error):
                yield comment
            raise
        finally:
            await outputs.aclose()
        await self._on_end()
        if wants_usage:
            yield self._writer.usage(self._usage().model_dump_json().encode())
        yield streaming.DONE

    def _events_of(self, output: RequestOutput) -> bytes:
        """Return the chunks of an output without log-probabilities. The first output tells how many tokens of the
        prompt were cached, and begins the stream."""
        self._note(0, output)
        if self._sink is not None and self._has_plain_answer and self._params.num_completions == 1:
            self._sink.begin_text(*self._writer.around_text(0), shows_tokens=self._resumable.shows_tokens)
        return self._encode(0, output)

    def _encode(self, prompt_index: int, output: RequestOutput) -> bytes:
        """Return the chunks of an output, and its tokens in a resumable stream."""
        events = b"".join(self._events(self._writer, prompt_index, output, self._has_plain_answer))
        token_ids = output.outputs[0].token_ids if output.outputs else []
        return self._resumable.shown(events, token_ids, is_last=output.finished)

    def _note(self, prompt_index: int, output: RequestOutput) -> int:
        """Record an output's values beside its text. Return the length of a text that takes as long to write as its
        log-probabilities."""
        self._num_cached[prompt_index] = output.num_cached_tokens
        if self._body.prediction is not None:
            self._predictions[prompt_index] = (
                output.num_accepted_prediction_tokens,
                output.num_rejected_prediction_tokens,
            )
        num_entries = 0
        if (found := output.prompt_logprobs) is not None and prompt_index not in self._prompt_logprobs:
            self._prompt_logprobs[prompt_index] = found
            num_entries = len(found) * len(found[-1] or ())
        if (num_top := self._params.num_logprobs) is not None:
            num_top = num_top if num_top >= 0 else len(self._state.engine.tokenizer)
            num_entries += (1 + num_top) * sum(len(one.logprobs or ()) for one in output.outputs)
        return num_entries * LENGTH_OF_ENTRY

    def _usage(self) -> Usage:
        num_completion = self._num_completion + (0 if self._sink is None else self._sink.num_text_tokens)
        return Usage(
            prompt_tokens=self._num_prompt,
            completion_tokens=num_completion,
            total_tokens=self._num_prompt + num_completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._num_cached.values()))
            if self._state.args.enable_prompt_tokens_details
            else None,
            completion_tokens_details=CompletionTokensDetails(
                reasoning_tokens=self._num_reasoning,
                accepted_prediction_tokens=sum(accepted for accepted, _ in self._predictions.values()),
                rejected_prediction_tokens=sum(rejected for _, rejected in self._predictions.values()),
            ),
        )

    def _usage_so_far(self) -> bytes | None:
        """Return the usage so far for each chunk, or None if the request does not want it."""
        return self._usage().model_dump_json().encode() if self._body.wants_continuous_usage else None
