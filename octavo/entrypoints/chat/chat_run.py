"""One chat request: renders its prompt, submits it, and reads its answers as deltas.

Every API with conversations (chat completions, Responses, Messages) makes a `ChatCompletionRequest` and reads the
answers with `ChatRun`. The API then only writes the deltas in its own form.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

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

if TYPE_CHECKING:
    from octavo.engine.request_stream import Sink

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Progress:
    """What one engine output adds to an answer, and the totals so far."""

    deltas: list[Delta]
    token_ids: list[int]
    logprobs: Sequence[PositionLogprobs] | None  # one entry for each of `token_ids`
    finish_reason: str | None  # stop, length, tool_calls or abort; None while the answer goes on
    stop_reason: int | str | None  # the stop text or token, or the reason of an abort
    num_prompt_tokens: int
    num_cached_tokens: int  # prompt tokens from the prefix cache
    num_tokens: int  # tokens of the answer so far, without tokens that `EventSink.begin_text` writes
    num_reasoning_tokens: int  # tokens of the reasoning so far


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What `prepare_outputs` finds out, for readers of the answers."""

    response_id: str
    prompt_token_ids: list[int]
    format: AnswerFormat


class ChatRun:
    """One chat request. Call only `count_tokens`, or call in this order:

    1. Optional: `make_sink`, to write chunks without waking the reader task.
    2. `prepare_outputs`. It loads earlier answers of the server and fetches media files
       (`_with_history_and_media`). A thread renders the prompt and chooses the answers' format and grammar
       (`_prepare`). The request goes to the engine when the first output is read.
    3. One of: `progress`, for one choice; `read_next`, for each output of each choice.

    The answers are remembered as they end (`AnswerRecall`).
    """

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
        `clamps_max_tokens`: lower a `max_tokens` that does not fit; without it, that is an error. A `reasoning_effort`
        or `verbosity` that the template has no variable for is ignored; with the server's `unknown_fields` "error" it
        is refused, unless `ignores_unknown_effort`. `only_renders`: only render the prompt; never generate
        (`ServerState.submit`). `checks_calls`: an answer's stop reason says whether its calls satisfy their schemas."""
        check_template_is_trusted(body, state.args.trust_request_chat_template)
        check_tool_choice(body, state.formats)
        self._body = body
        self._state = state
        self._params = params
        self._clamps_max_tokens = clamps_max_tokens
        self._only_renders = only_renders
        self._checks_calls = checks_calls
        self._refuses_unknown_effort = state.args.unknown_fields == "error" and not ignores_unknown_effort
        self._sent_media = media_of([message.content for message in body.messages])
        answers = state.answers if not self._sent_media and can_recall(body) else None
        self._answer_recall = None if answers is None else AnswerRecall(answers, body, state)
        self._media_files: dict[str, bytes] = {}  # media files by URL; filled only inside `_with_history_and_media`
        self._prepared: _Prepared | None = None
        self._readers: dict[int, AnswerReader] = {}  # by index of the choice
        self._counters: dict[int, ReasoningCounter] = {}  # by index of the choice; none if answers have no reasoning
        self._num_tokens = 0  # of the outputs read by `progress` and the sink

    async def prepare_outputs(
        self, response_id: str, sink: Sink | None, resumable: ResumableStream
    ) -> tuple[Prompt, AsyncGenerator[RequestOutput, None]]:
        """Check the request. Returns the prompt, and a generator of outputs, which submits the request when it is first
        read. `sink` is from `make_sink`. `resumable` gets the tokens of a prompt with earlier answers. Raises
        `RequestError`."""
        formats = list[AnswerFormat]()

        def prepare() -> PreparedPrompt:
            prepared_prompt, answer_format = self._prepare()
            formats.append(answer_format)
            return prepared_prompt

        # A retry with fewer turns (`truncation` "auto") must not keep the last try's prompt.
        resumable.recalled_prompt = None
        with naming_prompt("messages"):
            prompt, outputs = await self._with_history_and_media(
                lambda: self._state.submit(
                    response_id,
                    self._body,
                    self._params,
                    prepare,
                    has_grammar=may_want_grammar(self._body),
                    media=self._media_kinds(),
                    clamps_max_tokens=self._clamps_max_tokens,
                    sink=sink,
                    only_renders=self._only_renders,
                )
            )
        self._prepared = _Prepared(response_id, prompt.token_ids, formats[-1])
        if formats[-1].reasoning is not None:
            outputs = self._count_long_outputs_in_thread(outputs)
        if self._answer_recall is not None:
            if (recalled := self._answer_recall.recalled) is not None:
                resumable.recalled_prompt = recalled.token_ids
            outputs = self._answer_recall.remember_outputs(prompt, outputs)
        return prompt, outputs

    async def _count_long_outputs_in_thread(
        self, outputs: AsyncGenerator[RequestOutput, None]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield `outputs`. A thread counts the reasoning of outputs with many tokens, which `read_next` would count in
        the event loop, as it does for outputs that the sink takes."""
        try:
            async for output in outputs:
                for completion in output.outputs:
                    if (length := len(completion.token_ids)) > MAX_INLINE_LENGTH:
                        await run_off_loop(partial(self._count_reasoning, completion), length=length)
                yield output
        finally:
            await outputs.aclose()

    async def count_tokens(self, length: int) -> int:
        """Return the number of the prompt's tokens. `length` is the size of the body in bytes: a thread counts long
        bodies. Do not call `prepare_outputs` afterwards. Raises `RequestError`, also for `prompt_embeds`."""

        def count() -> int:
            prepared, _ = self._prepare()
            if self._answer_recall is not None and self._answer_recall.recalled is not None:
                return len(self._answer_recall.recalled.token_ids)
            if not isinstance(prepared.prompt, str):
                raise RequestError("the tokens of a prompt with prompt_embeds cannot be counted.", param="messages")
            return self._state.engine.inputs.count(prepared.prompt, prepared.media, prepared.add_special_tokens)

        return await self._with_history_and_media(lambda: run_off_loop(count, length=length, media=self._media_kinds()))

    async def _with_history_and_media(self, work: Callable[[], Awaitable[T]]) -> T:
        """Load the server's earlier answers and fetch the media files, for `_prepare`; then run `work` and return its
        result. `media_fetch_slots` limits how many requests hold files in memory. Raises `RequestError`."""
        if self._answer_recall is not None:
            await self._answer_recall.load()
        media = self._sent_media
        processor = self._state.engine.inputs.media_processor_of(media) if media else None
        if processor is None or not processor.needs_fetching(media):
            return await work()
        async with self._state.media_fetch_slots:
            self._media_files = await processor.fetch(media)
            try:
                return await work()
            finally:
                self._media_files = {}

    def _prepare(self) -> tuple[PreparedPrompt, AnswerFormat]:
        """Return the prompt and the answers' format. May run in a thread. Raises `RequestError`.

        Side effect: sets `params.skip_special_tokens` to False if a mark of the format is a special token, so read
        `params` afterwards."""
        body, state, params = self._body, self._state, self._params
        # 1. Decode the media.
        media, placeholders = self._decode_media()
        # 2. Render the prompt.
        prompt = self._render(placeholders)
        # 3. Choose the format of the answers. The reader must see its marks, even if they are special tokens.
        chosen = answer_format(body, state.formats, prompt, checks_calls=self._checks_calls)
        if any(map(state.engine.inputs.has_special_token, chosen.marks)):
            params.skip_special_tokens = False
        # 4. Choose the grammar of the answers.
        budget = state.thinking_budget(body.thinking_token_budget, chosen.reasoning, chosen.call_marks)
        grammar = wanted_grammar(
            body, chosen, state.formats, params.structured_outputs, state.engine.inputs.special_tokens, budget
        )
        # 5. Find the tokens of the prompt.
        return self._with_known_tokens(prompt, grammar, media), chosen

    def _with_known_tokens(
        self, prompt: str, grammar: WantedGrammar | None, media: dict[str, list[Any]] | None
    ) -> PreparedPrompt:
        """Return the prompt, with the tokens that earlier answers or a resumed stream have for it. Raises
        `RequestError`."""
        body = self._body
        # 1. Reuse the tokens of earlier answers, if any are found. Such a prompt has neither media nor embeddings.
        #    For a body with `resume.prompt`, `recall` only notes the prompt's text, and returns None.
        if self._answer_recall is not None and (recalled := self._answer_recall.recall(prompt)) is not None:
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

    def _media_kinds(self) -> set[str]:
        """Return the kinds of the conversation's media."""
        return {medium.kind.name for medium in self._sent_media}

    def _decode_media(self) -> tuple[dict[str, list[Any]] | None, Mapping[str, str] | None]:
        """Return the decoded media by kind, and the placeholder text of each kind; None and None without media. Raises
        `RequestError`."""
        if not (media := self._sent_media):
            return None, None
        processor = self._state.engine.inputs.media_processor_of(media)
        return processor.decode(media, self._media_files, self._body.cache_salt), processor.placeholders

    def _after_prepare(self) -> _Prepared:
        assert self._prepared is not None, "`prepare_outputs` comes first"
        return self._prepared

    @property
    def has_content_only(self) -> bool:
        """Whether answers have content only: no reasoning and no calls. Valid after `prepare_outputs`."""
        return self._after_prepare().format.is_plain

    async def progress(self, outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[Progress, None]:
        """Yield the progress of a request with one choice. `outputs` come from `prepare_outputs`. Closing the generator
        aborts the request."""
        try:
            async for output in outputs:
                for part in self._progress_of(output):
                    yield part
        finally:
            await outputs.aclose()

    def make_sink(self, write: Callable[[Progress], bytes]) -> EventSink:
        """Return a sink for `prepare_outputs` that writes the progress of each output it takes. `progress` yields the
        rest."""
        return EventSink(lambda output: b"".join([write(part) for part in self._progress_of(output)]))

    def _progress_of(self, output: RequestOutput) -> Iterator[Progress]:
        """Yield what an output adds."""
        for completion in output.outputs:
            deltas, finish_reason, stop_reason = self.read_next(completion)
            self._num_tokens += len(completion.token_ids)
            yield Progress(
                deltas=deltas,
                token_ids=completion.token_ids,
                logprobs=completion.logprobs,
                finish_reason=finish_reason,
                stop_reason=stop_reason,
                num_prompt_tokens=len(output.prompt_token_ids),
                num_cached_tokens=output.num_cached_tokens,
                num_tokens=self._num_tokens,
                num_reasoning_tokens=self.num_reasoning_tokens,
            )

    def read_next(self, completion: CompletionOutput) -> tuple[list[Delta], str | None, int | str | None]:
        """Return the new deltas of a choice, its finish reason and its stop reason. `completion` is the choice's next
        output, or its only one; each may be given once."""
        index, is_end = completion.index, completion.finish_reason is not None
        if index not in self._readers:
            prepared = self._after_prepare()
            self._readers[index] = AnswerReader(prepared.format, f"{prepared.response_id} {index}")
        self._count_reasoning(completion)
        reader = self._readers[index]
        deltas, reason = reader.add(completion.text, is_end=is_end), completion.finish_reason
        return deltas, reader.finish_reason(reason), reader.stop_reason(reason, completion.stop_reason)

    def _count_reasoning(self, completion: CompletionOutput) -> None:
        """Count the reasoning tokens of a choice's next output. `_count_long_outputs_in_thread` and `read_next` both
        call this: `ReasoningCounter.count` skips an output object that it had last, and would count a copy again."""
        params = self._params
        if (counter := self._counters.get(completion.index)) is None:
            prepared = self._after_prepare()
            if (splitter := prepared.format.new_splitter()) is None:
                return
            detokenizer = make_detokenizer(
                self._state.engine.tokenizer.backend_tokenizer, prepared.prompt_token_ids, params.skip_special_tokens,
                params.spaces_between_special_tokens,
            )  # fmt: skip
            counter = self._counters[completion.index] = ReasoningCounter(splitter, detokenizer)
        counter.count(completion, shows_stop=params.include_stop_str_in_output)

    @property
    def num_reasoning_tokens(self) -> int:
        """Reasoning tokens of all choices and outputs read so far."""
        return sum(counter.num_tokens for counter in self._counters.values())


def make_chat(fields: Mapping[str, Any]) -> ChatCompletionRequest:
    """Make a chat request from the fields of another API's request. Raises `RequestError`."""
    try:
        return ChatCompletionRequest.model_validate(fields)
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False)) from None
