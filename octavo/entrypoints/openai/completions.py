"""POST /v1/completions: one or many prompts, as text or token ids, streamed or not.

Choice `i * n + j` is the `j`-th completion of prompt `i`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.detokenizer import make_detokenizer
from octavo.engine.off_loop import run_off_loop
from octavo.entrypoints.http.router import Router
from octavo.entrypoints.http.server_state import PreparedPrompt
from octavo.entrypoints.http.streaming import ChunkWriter, encode_json
from octavo.entrypoints.openai.fill_in_middle import fill_in_prompt
from octavo.entrypoints.openai.generation_job import GenerationJob
from octavo.entrypoints.openai.logprobs_format import TextOffsets, echo_offsets
from octavo.entrypoints.openai.request_bodies import CompletionRequest
from octavo.entrypoints.openai.response_bodies import CompletionChoice, CompletionLogprobs, CompletionResponse
from octavo.errors import RequestError, naming_prompt
from octavo.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from octavo.request import Prompt

if TYPE_CHECKING:
    from octavo.loading.tokenizer import ModelTokenizer

router = Router(tags=["OpenAI"])

MAX_PROMPTS = 2048  # in one request


@router.post("/v1/completions", response_model=CompletionResponse)
async def create_completion(body: CompletionRequest, raw: Request) -> Response:
    """Continue each prompt."""
    return await CompletionJob(body, raw).answer(raw)


async def prompt_text(tokenizer: ModelTokenizer, prompt: Prompt, *, is_cut: bool) -> str:
    """Return the text of a prompt for an answer that repeats it. A prompt that `is_cut` gives the text of its remaining
    tokens."""
    if prompt.is_embedded:
        raise RequestError(
            "a prompt with embeddings has no text; leave return_prompt_text out.", param="return_prompt_text"
        )
    if prompt.text is not None and not is_cut:
        return prompt.text
    return await run_off_loop(lambda: str(tokenizer.decode(prompt.token_ids)), length=len(prompt.token_ids))


@dataclass(slots=True)
class _Prompt:
    """One prompt of the request, and the state of its answers."""

    echo: str | None  # the prompt's text, if answers start with it
    token_ids: list[int]
    shown: str | None  # the prompt's text, if answers have it in a field of its own
    begun: set[int] = field(default_factory=set)  # indices of choices that have begun
    offsets: dict[int, TextOffsets] = field(default_factory=dict)  # by choice, if logprobs are asked for


class CompletionJob(GenerationJob[CompletionRequest, CompletionChoice]):
    id_prefix = "cmpl"
    chunk_kind = "text_completion"
    text_field = b'"text":', b""

    def __init__(self, body: CompletionRequest, raw: Request, *, only_renders: bool = False) -> None:
        super().__init__(body, raw, only_renders=only_renders)
        if body.resume is not None and body.resume.prompt is not None:
            raise RequestError("resume.prompt is for chats; completions send their prompt.", param="resume.prompt")
        if body.max_tokens is None and self._truncation is not None:
            self._params.max_tokens = None
        self._prompts: list[_Prompt] = []

    async def submit(self) -> None:
        body, params = self._body, self._params
        if len(body.prompts) > MAX_PROMPTS:
            raise RequestError(f"prompt has {len(body.prompts)} entries; {MAX_PROMPTS} is the most.", param="prompt")
        adds_special = body.add_special_tokens is not False
        for index, given in enumerate(body.prompts):
            await asyncio.sleep(0)  # let other tasks run between two prompts
            self._body, self._params = body, params  # the last prompt may have been cut
            if body.suffix and isinstance(given, str):
                given = fill_in_prompt(self._state.engine.tokenizer, given, body.suffix)
            with naming_prompt("prompt", index, len(body.prompts)):
                try:
                    prompt, generator = await self._submit_one(PreparedPrompt(given, adds_special))
                except RequestError as error:
                    may_cut = self._truncation == "auto" and not body.suffix  # its marks come first
                    if error.code != "context_length_exceeded" or not may_cut:
                        raise
                    self._cut_prompt()
                    prompt, generator = await self._submit_one(PreparedPrompt(given, adds_special))
            echo = shown = None
            if body.echo or body.return_prompt_text:
                is_cut = self._body.truncate_prompt_tokens is not None
                text = await prompt_text(self._state.engine.tokenizer, prompt, is_cut=is_cut)
                echo, shown = text if body.echo else None, text if body.return_prompt_text else None
            self._prompts.append(_Prompt(echo, prompt.token_ids, shown))
            self._num_prompt += len(prompt.token_ids)
            self._generators.append(generator)

    def _all_prompt_token_ids(self) -> list[list[int]]:
        return [prompt.token_ids for prompt in self._prompts]

    async def _submit_one(self, prepared: PreparedPrompt) -> tuple[Prompt, AsyncGenerator[RequestOutput, None]]:
        body, given = self._body, prepared.prompt
        return await self._state.submit(
            self._about["id"],
            body,
            self._params,
            lambda: prepared,
            length=len(given["prompt_embeds"]) if isinstance(given, dict) else len(given),
            num_prompts=len(body.prompts),
            clamps_max_tokens=body.max_tokens is None or self._truncation is not None,
            scores_prompt=body.only_prompt,
            sink=self._sink if len(body.prompts) == 1 else None,
            only_renders=self._only_renders,
        )

    def _choice(self, prompt_index: int, completion: CompletionOutput) -> CompletionChoice:
        prompt = self._prompts[prompt_index]
        text, logprobs = self._take(prompt_index, completion)
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
        choice.prompt_text = prompt.shown
        if self._body.prompt_logprobs is not None and prompt_index in self._prompt_logprobs:
            choice.prompt_logprobs = self._formatter.prompt(self._prompt_logprobs[prompt_index])
        return choice

    def _response(self, choices: list[CompletionChoice]) -> CompletionResponse:
        return CompletionResponse(**self._about, choices=choices, usage=self._usage())

    def _is_plain(self) -> bool:
        body = self._body
        wants_more = (
            body.echo
            or body.return_prompt_text
            or body.only_prompt
            or body.wants_continuous_usage
            or body.return_token_ids
        )
        return body.logprobs is None and not wants_more

    def _events(self, writer: ChunkWriter, prompt_index: int, output: RequestOutput, is_plain: bool) -> list[bytes]:
        events = []
        for completion in output.outputs:
            index = prompt_index * self._body.num_choices + completion.index
            if not is_plain or completion.finish_reason is not None:
                events.append(self._event(writer, index, prompt_index, completion))
                continue
            self._num_completion += len(completion.token_ids)
            if completion.text:
                events.append(writer.text(index, completion.text))
        return events

    def _event(self, writer: ChunkWriter, index: int, prompt_index: int, completion: CompletionOutput) -> bytes:
        """Return a chunk of a choice, with the fields that the request asks for; empty if there is nothing new."""
        prompt = self._prompts[prompt_index]
        is_first = completion.index not in prompt.begun
        text, logprobs = self._take(prompt_index, completion)
        finish_reason, stop_reason = self._end(completion)
        extra = b""
        if self._body.return_token_ids:
            token_ids = [] if self._body.only_prompt else completion.token_ids
            extra = b',"token_ids":' + encode_json(token_ids)
            if is_first:
                extra += b',"prompt_token_ids":' + encode_json(prompt.token_ids)
        if prompt.shown is not None and is_first:
            extra += b',"prompt_text":' + encode_json(prompt.shown)
        if not text and not extra and finish_reason is None and (logprobs is None or not logprobs.tokens):
            return b""
        return writer.choice(
            index,
            b'"text":' + encode_json(text) + extra,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            logprobs=None if logprobs is None else logprobs.model_dump_json().encode(),
            usage=self._usage_so_far(),
        )

    def _end(self, completion: CompletionOutput) -> tuple[str | None, int | str | None]:
        """Return why a choice ended. A prompt that is only scored always ends with "length"."""
        if self._body.only_prompt and completion.finish_reason == "stop":
            return "length", None
        return completion.finish_reason, completion.stop_reason

    def _take(self, prompt_index: int, completion: CompletionOutput) -> tuple[str, CompletionLogprobs | None]:
        """Return the text and log-probabilities that `completion` adds to its choice. The first ones include the
        echo."""
        prompt = self._prompts[prompt_index]
        text, token_ids, positions = completion.text, completion.token_ids, completion.logprobs or []
        if self._body.only_prompt:
            text, token_ids, positions = "", [], []
        self._num_completion += len(token_ids)
        shown: Iterable[PositionLogprobs | None] = positions
        echoed: list[int] = []
        if prompt.echo is not None and completion.index not in prompt.begun:
            text = prompt.echo + text
            echoed = prompt.token_ids
            # A lazy chain: the entries of a long prompt must not be in memory all together.
            shown = itertools.chain(self._prompt_logprobs.get(prompt_index, [None] * len(echoed)), positions)
        prompt.begun.add(completion.index)
        if self._body.logprobs is None:
            return text, None
        tokenizer = self._state.engine.tokenizer
        offsets = echo_offsets(tokenizer, echoed, prompt.echo or "") + self._offsets(prompt, completion).add(token_ids)
        return text, self._formatter.completion(
            echoed + token_ids, shown, self._body.num_shown(self._body.logprobs), offsets
        )

    def _offsets(self, prompt: _Prompt, completion: CompletionOutput) -> TextOffsets:
        """Return the text offsets of a choice, which begin after its echo."""
        if completion.index not in prompt.offsets:
            detokenizer = make_detokenizer(
                self._state.engine.tokenizer.backend_tokenizer,
                prompt.token_ids,
                self._params.skip_special_tokens,
                self._params.spaces_between_special_tokens,
            )
            prompt.offsets[completion.index] = TextOffsets(detokenizer, len(prompt.echo or ""))
        return prompt.offsets[completion.index]
