"""One chat request: `ChatPrompt` renders and submits its prompt, and `ChatAnswers` reads its answers as deltas.

Every API with conversations (chat completions, Responses, Messages) makes a `ChatCompletionRequest`. The API then only
writes the deltas in its own form.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import msgspec
from pydantic import ValidationError

from octavo.engine.detokenizer import make_detokenizer
from octavo.engine.off_loop import MAX_INLINE_LENGTH, run_off_loop
from octavo.entrypoints.chat.answer_reader import (
    AnswerFormat,
    AnswerReader,
    Delta,
    answer_format,
    check_tool_choice,
    may_want_grammar,
    wanted_grammar,
)
from octavo.entrypoints.chat.answer_recall import AnswerRecall, can_recall
from octavo.entrypoints.chat.media_parts import embeds_of, media_of, with_embeds
from octavo.entrypoints.chat.message_rendering import check_template_is_trusted, render_messages
from octavo.entrypoints.chat.reasoning_count import ReasoningCounter
from octavo.entrypoints.chat.reasoning_effort import effort_options
from octavo.entrypoints.http.error_responses import validation_error
from octavo.entrypoints.http.resumable import ResumableStream
from octavo.entrypoints.http.server_state import PreparedPrompt, ServerState
from octavo.entrypoints.http.streaming import EventSink
from octavo.entrypoints.openai.request_bodies import ChatCompletionRequest
from octavo.errors import RequestError, naming_prompt
from octavo.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from octavo.request import Prompt
from octavo.sampling_params import SamplingParams
from octavo.structured_output.grammar_builder import WantedGrammar


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """What one engine output adds to an answer, and the totals so far."""

    deltas: list[Delta]
    token_ids: list[int]
    logprobs: Sequence[PositionLogprobs] | None  # one entry for each of `token_ids`
    finish_reason: str | None  # stop, length, tool_calls or abort; None while the answer goes on
    stop_reason: int | str | None  # the stop text or token, or the reason of an abort
    num_prompt_tokens: int
    num_cached_tokens: int  # prompt tokens from the prefix cache
    num_tokens: int  # tokens of the answer so far
    num_reasoning_tokens: int  # tokens of the reasoning so far


class ReadOutput(NamedTuple):
    """What an output adds to a choice. `stop_reason`: the stop text or token, or the reason of an abort."""

    deltas: list[Delta]
    finish_reason: str | None
    stop_reason: int | str | None


class ChatPrompt:
    """The prompt of one chat request. `submit` and `count_tokens` both

    1. load earlier answers of the server and fetch media files (`_history_and_media`),
    2. render the prompt and choose the answers' format and grammar (`_render_and_choose_format`), in a thread if this
       takes long.

    No field changes after `__init__`."""

    def __init__(
        self,
        body: ChatCompletionRequest,
        state: ServerState,
        params: SamplingParams,
        *,
        clamps_max_tokens: bool = False,
        ignores_unknown_effort: bool = False,
        only_renders: bool = False,
        checks_calls: bool = False,
    ) -> None:
        """Raises `RequestError` for a template that is not trusted, and for a tool choice that is not possible.

        `clamps_max_tokens`: lower a `max_tokens` that does not fit; otherwise it is refused.
        `ignores_unknown_effort`: never refuse a `reasoning_effort` or `verbosity` that the template has no variable
        for; otherwise it is refused if the server's `unknown_fields` is "error".
        `only_renders`: render the prompt, and generate nothing (`ServerState.submit`).
        `checks_calls`: an answer's stop reason says whether its calls satisfy their schemas."""
        check_template_is_trusted(body, state.args.trust_request_chat_template)
        check_tool_choice(body, state.formats)
        self._body = body
        self._state = state
        self._params = params
        self._clamps_max_tokens = clamps_max_tokens
        self._only_renders = only_renders
        self._checks_calls = checks_calls
        self._refuses_unknown_effort = state.args.unknown_fields == "error" and not ignores_unknown_effort
        self._media_parts = media_of([message.content for message in body.messages])
        self._media_kinds = {medium.kind.name for medium in self._media_parts}

    async def submit(
        self,
        response_id: str,
        resumable: ResumableStream,
        sink: EventSink | None = None,
        write: Callable[[AnswerPart], bytes] | None = None,
    ) -> ChatAnswers:
        """Check the request, and return its answers. The engine gets it only when their first output is read. Give
        `sink`, or `write`, which makes one: `write` turns each part into the bytes that are sent. If earlier answers
        gave tokens for the prompt, `resumable.recalled_prompt` gets them. Raises `RequestError`."""
        assert sink is None or write is None
        if write is not None:  # no output comes before `answers` are there
            sink = EventSink(lambda output: b"".join(map(write, answers.parts_of(output))))
        chosen_format: AnswerFormat | None = None

        def make_prompt() -> PreparedPrompt:
            nonlocal chosen_format
            prepared, chosen_format = self._render_and_choose_format(history, media_files)
            return prepared

        with naming_prompt("messages"):
            async with self._history_and_media() as (history, media_files):
                prompt, outputs = await self._state.submit(
                    response_id,
                    self._body,
                    self._params,
                    make_prompt,
                    has_grammar=may_want_grammar(self._body),
                    media=self._media_kinds,
                    clamps_max_tokens=self._clamps_max_tokens,
                    sink=sink,
                    only_renders=self._only_renders,
                )
        assert chosen_format is not None, "`ServerState.submit` makes the prompt"
        recalled = None if history is None else history.recalled
        # Also if it is None: a retry with fewer turns (`truncation` "auto") must not keep the last try's prompt.
        resumable.recalled_prompt = None if recalled is None else recalled.token_ids
        if history is not None:
            outputs = history.remember_outputs(prompt, outputs)
        answers = ChatAnswers(self._state, self._params, resumable, sink, response_id, prompt, chosen_format, outputs)
        return answers

    async def count_tokens(self, length: int) -> int:
        """Return the number of the prompt's tokens. `length` is the size of the body in bytes: a thread counts long
        bodies. Raises `RequestError`, also for `prompt_embeds`."""
        async with self._history_and_media() as (history, media_files):
            count = partial(self._count, history, media_files)
            return await run_off_loop(count, length=length, media=self._media_kinds)

    def _count(self, history: AnswerRecall | None, media_files: Mapping[str, bytes]) -> int:
        prepared, _ = self._render_and_choose_format(history, media_files)
        if not isinstance(prepared.prompt, str):
            assert isinstance(prepared.prompt, dict)
            if "prompt_token_ids" in prepared.prompt:  # with earlier answers, or of a resumed stream
                return len(prepared.prompt["prompt_token_ids"])
            raise RequestError("the tokens of a prompt with prompt_embeds cannot be counted.", param="messages")
        return self._state.engine.inputs.count(prepared.prompt, prepared.media, prepared.add_special_tokens)

    @asynccontextmanager
    async def _history_and_media(self) -> AsyncGenerator[tuple[AnswerRecall | None, Mapping[str, bytes]], None]:
        """Load the server's earlier answers and fetch the media files. Yields the answers, or None if they are no use
        for this prompt, and the files by URL. Use the files only in this context: it holds one of `media_fetch_slots`,
        which limit how many requests have files in memory. Raises `RequestError`."""
        media, history = self._media_parts, None
        if not media and (memory := self._state.answers) is not None and can_recall(self._body):
            history = await AnswerRecall.load(memory, self._body, self._state)
        processor = self._state.engine.inputs.media_processor_of(media) if media else None
        if processor is None or not processor.needs_fetching(media):
            yield history, {}
            return
        async with self._state.media_fetch_slots:
            yield history, await processor.fetch(media)

    def _render_and_choose_format(
        self, history: AnswerRecall | None, media_files: Mapping[str, bytes]
    ) -> tuple[PreparedPrompt, AnswerFormat]:
        """Return the prompt and the answers' format. May run in a thread. Raises `RequestError`."""
        body, state = self._body, self._state
        # 1. Decode the media.
        media, placeholders = self._decode_media(media_files)
        # 2. Render the prompt.
        prompt = self._render(placeholders)
        # 3. Choose the format of the answers. If its marks are special tokens, these stay in the text for the reader.
        chosen_format = answer_format(body, state.formats, prompt, checks_calls=self._checks_calls)
        shows_special_tokens = any(map(state.engine.inputs.has_special_token, chosen_format.marks))
        # 4. Choose the grammar of the answers.
        budget = state.thinking_budget(body.thinking_token_budget, chosen_format.reasoning, chosen_format.call_marks)
        grammar = wanted_grammar(
            body,
            chosen_format,
            state.formats,
            self._params.structured_outputs,
            state.engine.inputs.special_tokens,
            budget,
        )
        # 5. Take the prompt's tokens from where they are known; else leave its text to the tokenizer.
        prepared = self._with_known_tokens(prompt, grammar, media, history)
        return msgspec.structs.replace(prepared, shows_special_tokens=shows_special_tokens), chosen_format

    def _with_known_tokens(
        self,
        prompt: str,
        grammar: WantedGrammar | None,
        media: dict[str, list[Any]] | None,
        history: AnswerRecall | None,
    ) -> PreparedPrompt:
        """Return the prompt, with the tokens that earlier answers or a resumed stream have for it. Raises
        `RequestError`."""
        body = self._body
        # 1. Reuse the tokens of earlier answers, if any are found. Such a prompt has neither media nor embeddings. Call
        #    `recall` in any case: it notes the prompt's text for `remember_outputs`. It returns None if `resume` has
        #    tokens or a prompt: those come from another server.
        if history is not None and (recalled := history.recall(prompt)) is not None:
            tokens = {"prompt": prompt, "prompt_token_ids": recalled.token_ids}
            return PreparedPrompt(tokens, add_special_tokens=False, grammar=grammar)
        # 2. Or take the prompt of a stream that is resumed.
        embeds = embeds_of([message.content for message in body.messages])
        if body.resume is not None and body.resume.prompt is not None:
            if media or embeds:
                raise RequestError(
                    "resume.prompt is not for messages with media or prompt_embeds.", param="resume.prompt"
                )
            tokens = {"prompt": prompt, "prompt_token_ids": body.resume.prompt}
            return PreparedPrompt(tokens, add_special_tokens=False, grammar=grammar)
        # 3. Otherwise have the text tokenized, with its embeddings and media.
        prompt_with_embeds = with_embeds(prompt, embeds) if embeds else prompt
        # By default no special tokens are added: the template has written them.
        return PreparedPrompt(prompt_with_embeds, bool(body.add_special_tokens), grammar, media)

    def _render(self, placeholders: Mapping[str, str] | None) -> str:
        """Return the prompt text. Raises `RequestError`."""
        body, state = self._body, self._state
        effort = effort_options(state.engine.tokenizer, body, is_strict=self._refuses_unknown_effort)
        return render_messages(
            state.engine.tokenizer,
            body,
            body.messages,
            body.tools if body.tools and body.chosen_tools else None,  # `chosen_tools` is empty with tool_choice "none"
            {**(state.args.default_chat_template_kwargs or {}), **effort},
            trusts_template=state.args.trust_request_chat_template,
            content_format=state.args.chat_template_content_format,
            placeholders=placeholders,
            takes_embeds=True,
            tool_format=state.formats.tools if body.tools or any(m.tool_calls for m in body.messages) else None,
        )

    def _decode_media(
        self, media_files: Mapping[str, bytes]
    ) -> tuple[dict[str, list[Any]] | None, Mapping[str, str] | None]:
        """Return the decoded media by kind, and the placeholder text of each kind; None and None without media. Raises
        `RequestError`."""
        if not (media := self._media_parts):
            return None, None
        processor = self._state.engine.inputs.media_processor_of(media)
        return processor.decode(media, media_files, self._body.cache_salt), processor.placeholders


class ChatAnswers:
    """The answers to a prompt that was submitted. Read them with `parts` if the request has one choice; otherwise read
    `outputs`, and give each output of a choice to `read_next`."""

    def __init__(
        self,
        state: ServerState,
        params: SamplingParams,
        resumable: ResumableStream,
        sink: EventSink | None,
        response_id: str,
        prompt: Prompt,
        chosen_format: AnswerFormat,
        outputs: AsyncGenerator[RequestOutput, None],
    ) -> None:
        """`params` are those of the engine's request: `ServerState.submit` may have changed them. `resumable` and
        `sink` are only for the stream that sends the answers."""
        self._state, self._params, self._response_id, self._format = state, params, response_id, chosen_format
        self.resumable, self.sink, self.prompt = resumable, sink, prompt
        has_reasoning = chosen_format.reasoning is not None
        self.outputs = self._count_long_outputs_in_thread(outputs) if has_reasoning else outputs
        self._readers: dict[int, AnswerReader] = {}  # by index of the choice
        self._counters: dict[int, ReasoningCounter] = {}  # by index of the choice; none if answers have no reasoning
        self._num_tokens = 0  # of the outputs read by `parts_of`

    @property
    def has_content_only(self) -> bool:
        """Whether answers have content only: no reasoning and no calls."""
        return self._format.is_plain

    @property
    def num_reasoning_tokens(self) -> int:
        """Reasoning tokens of all choices and outputs read so far."""
        return sum(counter.num_tokens for counter in self._counters.values())

    async def parts(self) -> AsyncGenerator[AnswerPart, None]:
        """Yield the parts of the answer to a request with one choice. Closing the generator aborts the request."""
        try:
            async for output in self.outputs:
                for part in self.parts_of(output):
                    yield part
        finally:
            await self.outputs.aclose()

    def parts_of(self, output: RequestOutput) -> Iterator[AnswerPart]:
        """Yield what an output adds. A sink gives each output here that it takes; `parts` yields the rest."""
        assert self._params.num_completions == 1, "the totals are of one answer"
        for completion in output.outputs:
            read = self.read_next(completion)
            self._num_tokens += len(completion.token_ids)
            yield AnswerPart(
                deltas=read.deltas,
                token_ids=completion.token_ids,
                logprobs=completion.logprobs,
                finish_reason=read.finish_reason,
                stop_reason=read.stop_reason,
                num_prompt_tokens=len(output.prompt_token_ids),
                num_cached_tokens=output.num_cached_tokens,
                num_tokens=self._num_tokens,
                num_reasoning_tokens=self.num_reasoning_tokens,
            )

    def read_next(self, completion: CompletionOutput) -> ReadOutput:
        """Read a choice's next output, or its whole answer. Give each output once, in order."""
        index, is_end = completion.index, completion.finish_reason is not None
        if index not in self._readers:
            self._readers[index] = AnswerReader(self._format, f"{self._response_id} {index}")
        self._count_reasoning(completion)
        reader = self._readers[index]
        reason, stop_reason = completion.finish_reason, completion.stop_reason
        is_cut = reason != "stop" or isinstance(stop_reason, str)  # read at the end only; str: a stop string
        deltas = reader.add(completion.text, is_end=is_end, is_cut=is_cut)
        return ReadOutput(deltas, reader.finish_reason(reason), reader.stop_reason(reason, stop_reason))

    async def _count_long_outputs_in_thread(
        self, outputs: AsyncGenerator[RequestOutput, None]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield `outputs`. Before an output with many tokens is yielded, a thread counts its reasoning tokens;
        `read_next` then skips it. All others, and those that a sink takes, `read_next` counts in the event loop."""
        try:
            async for output in outputs:
                for completion in output.outputs:
                    if (length := len(completion.token_ids)) > MAX_INLINE_LENGTH:
                        await run_off_loop(partial(self._count_reasoning, completion), length=length)
                yield output
        finally:
            await outputs.aclose()

    def _count_reasoning(self, completion: CompletionOutput) -> None:
        """Count the reasoning tokens of a choice's next output, unless they are counted: `ReasoningCounter.count` knows
        the last output by its identity. So pass on the objects of the engine, not copies."""
        params = self._params
        if (counter := self._counters.get(completion.index)) is None:
            if (splitter := self._format.new_splitter()) is None:
                return
            detokenizer = make_detokenizer(
                self._state.engine.tokenizer.backend_tokenizer, self.prompt.token_ids, params.skip_special_tokens,
                params.spaces_between_special_tokens,
            )  # fmt: skip
            counter = self._counters[completion.index] = ReasoningCounter(splitter, detokenizer)
        counter.count(completion, shows_stop=params.include_stop_str_in_output)


def make_chat(fields: Mapping[str, Any]) -> ChatCompletionRequest:
    """Make a chat request from the fields of another API's request. Raises `RequestError`."""
    try:
        return ChatCompletionRequest.model_validate(fields)
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False)) from None
