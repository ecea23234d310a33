"""Runs one chat request: renders its template, submits its prompt, and reads its answers as deltas.

Every API with conversations (chat completions, Responses, Messages) makes a `ChatCompletionRequest` and reads the
answers with `Conversation`. The API then only writes the deltas in its own form.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from octavo.engine.off_loop import run_off_loop
from octavo.entrypoints.chat.answer_memory import (
    MAX_ANSWERS,
    AnswerMemory,
    AnswerReading,
    Recalled,
    message_keys,
    recall,
    remembered,
    text_digest,
)
from octavo.entrypoints.chat.answer_reader import (
    AnswerFormat,
    AnswerReader,
    Delta,
    ReasoningDelta,
    answer_format,
    check_tool_choice,
    may_want_grammar,
    wanted_grammar,
)
from octavo.entrypoints.chat.chat_template import render_chat
from octavo.entrypoints.chat.media_parts import content_for_template, embeds_of, media_of, with_embeds
from octavo.entrypoints.chat.reasoning_effort import effort_options
from octavo.entrypoints.http.error_responses import validation_error
from octavo.entrypoints.http.server_state import ARRIVAL, PreparedPrompt, ServerState
from octavo.entrypoints.http.streaming import Push
from octavo.entrypoints.openai.request_bodies import ChatCompletionRequest, ChatMessage, TemplateRequest, Tool
from octavo.errors import RequestError, naming_prompt
from octavo.media_kinds import SentMedium
from octavo.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from octavo.request import Prompt
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.engine.request_stream import Sink
    from octavo.entrypoints.chat.tools.tool_formats import ToolFormat
    from octavo.loading.tokenizer import ModelTokenizer

logger = logging.getLogger("octavo.server")

_KEPT_IN_A_TIME = 16  # tokens that are remembered in the time in which one is made of text


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
    num_tokens: int  # tokens of the answer so far
    num_reasoning_tokens: int  # tokens of the reasoning so far


class Conversation:
    """One chat request. Call `submit` first. Then read its outputs in one of three ways: `progress` (with one choice;
    `push` beside it), `read` for each output, or `read_whole` for each choice. `count_tokens` stands alone.

    With `clamps_max_tokens`, a `max_tokens` that does not fit is lowered; otherwise it is an error. If the model's
    template has no variable for `reasoning_effort` or `verbosity`, they are an error where the server's
    `unknown_fields` is "error", unless `ignores_unknown_effort`; otherwise they have no effect."""

    def __init__(
        self,
        body: ChatCompletionRequest,
        state: ServerState,
        params: SamplingParams,
        *,
        clamps_max_tokens: bool = False,
        ignores_unknown_effort: bool = False,
    ) -> None:
        check_template_is_trusted(body, state.args.trust_request_chat_template)
        check_tool_choice(body, state.formats)
        self._body = body
        self._state = state
        self._params = params
        self._clamps_max_tokens = clamps_max_tokens
        self._refuses_unknown_effort = state.args.unknown_fields == "error" and not ignores_unknown_effort
        self._files: dict[str, bytes] = {}  # fetched media files, by URL; only inside `_fetched`
        self._answer_format: AnswerFormat | None = None  # set by `prepare`
        self._num_tokens = 0  # of the outputs in `progress` and `push`
        self.num_reasoning_tokens = 0  # over all choices and outputs read so far
        self._readers: dict[int, AnswerReader] = {}  # by index of the choice
        self._answers = state.answers if _can_recall(body) else None
        self._keys: list[bytes] = []  # of the beginnings of the conversation
        self._text = (0, b"")  # length and digest of the rendered prompt
        self._recalled: Recalled | None = None  # the prompt, with the tokens of an earlier answer

    @property
    def _format(self) -> AnswerFormat:
        assert self._answer_format is not None, "`submit` comes first"
        return self._answer_format

    @property
    def is_plain(self) -> bool:
        """Whether answers have content only: no reasoning and no calls. Valid after `submit`."""
        return self._format.is_plain

    def read(self, completion: CompletionOutput) -> tuple[list[Delta], str | None]:
        """Return the deltas of a choice's next output, and its finish reason. All tokens of an output in which
        reasoning begins or ends count as reasoning."""
        reader = self._readers.get(completion.index)
        if reader is None:
            reader = self._readers[completion.index] = AnswerReader(self._format)
        was_reasoning = reader.is_reasoning
        deltas = reader.add(completion.text, is_end=completion.finish_reason is not None)
        if was_reasoning or reader.is_reasoning:
            self.num_reasoning_tokens += len(completion.token_ids)
        return deltas, reader.finish_reason(completion.finish_reason)

    def read_whole(self, completion: CompletionOutput) -> tuple[list[Delta], str | None]:
        """Return the deltas of a whole choice, and the finish reason."""
        reader = AnswerReader(self._format)
        deltas = reader.add(completion.text, is_end=True)
        self.num_reasoning_tokens += self._count_reasoning_tokens(completion.token_ids, deltas)
        return deltas, reader.finish_reason(completion.finish_reason)

    def _count_reasoning_tokens(self, token_ids: list[int], deltas: list[Delta]) -> int:
        """Return the number of reasoning tokens of a whole choice: those up to the end mark, if it is one token; all
        tokens, if nothing follows the reasoning; otherwise those of the reasoning text, tokenized again."""
        if self._format.reasoning is None:
            return 0
        marks = self._state.thinking_tokens
        if marks is not None and (end_mark := marks[1]) in token_ids:
            return token_ids.index(end_mark) + 1
        reasoning_text = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
        if reasoning_text and all(isinstance(delta, ReasoningDelta) for delta in deltas):
            return len(token_ids)
        return len(self._state.engine.inputs.encode(reasoning_text, add_special_tokens=False)) if reasoning_text else 0

    async def submit(
        self, response_id: str, sink: Sink | None = None
    ) -> tuple[Prompt, AsyncGenerator[RequestOutput, None]]:
        """Check the request. Returns the prompt, and the generator of the outputs, like `ServerState.submit`. Raises
        `RequestError`."""
        await self._load_answers()
        async with self._fetched():
            with naming_prompt("messages"):
                prompt, outputs = await self._state.submit(
                    response_id,
                    self._body,
                    self._params,
                    self.prepare,
                    has_grammar=may_want_grammar(self._body),
                    media=self._media_kinds(),
                    clamps_max_tokens=self._clamps_max_tokens,
                    sink=sink,
                )
        return prompt, outputs if self._answers is None else self._remembering(self._answers, prompt, outputs)

    async def _load_answers(self) -> None:
        """Read the answers in the history that only the store has. If that fails, the prompt is the template's."""
        if self._answers is None:
            return
        body, arrival = self._body, ARRIVAL.get()
        length = 0 if arrival is None else arrival.num_bytes
        self._keys = await run_off_loop(lambda: message_keys(body.messages, body.cache_salt), length=length)
        if self._answers.is_kept:
            before = [self._keys[i - 1] for i, one in enumerate(body.messages) if i and one.role == "assistant"]
            try:
                await self._answers.load(before)
            except RequestError as error:
                logger.warning("answers in a history are not recalled: %s", error)

    async def _remembering(
        self, answers: AnswerMemory, prompt: Prompt, outputs: AsyncGenerator[RequestOutput, None]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield `outputs`; remember the first choices, as many as are kept, when they end."""
        num_known = 0 if self._recalled is None else self._recalled.num_known
        try:
            async for output in outputs:
                for one in output.outputs:
                    if one.index < MAX_ANSWERS and one.finish_reason in ("stop", "length") and one.all_token_ids:
                        num_new = len(prompt.token_ids) - num_known + len(one.all_token_ids)
                        work = partial(self._remember, answers, prompt.token_ids, one.all_token_ids)
                        await run_off_loop(work, length=num_new // _KEPT_IN_A_TIME)
                yield output
        finally:
            await outputs.aclose()

    def _remember(self, answers: AnswerMemory, prompt: Sequence[int], answer: list[int]) -> None:
        ends = self._state.engine.inputs.eos_token_ids
        answers.add(remembered(self._keys[-1], self._recalled, prompt, answer, ends, self._text))

    async def count_tokens(self, length: int) -> int:
        """Return the number of the prompt's tokens. `length` is the length of the request's body."""

        def count() -> int:
            prepared = self.prepare()
            if self._recalled is not None:
                return len(self._recalled.token_ids)
            if not isinstance(prepared.prompt, str):
                raise RequestError("the tokens of a prompt with prompt_embeds cannot be counted.", param="messages")
            return self._state.engine.inputs.count(prepared.prompt, prepared.media, prepared.add_special_tokens)

        await self._load_answers()
        async with self._fetched():
            return await run_off_loop(count, length=length, media=self._media_kinds())

    @asynccontextmanager
    async def _fetched(self) -> AsyncIterator[None]:
        """Fetch the media files; inside the block `prepare` can read them. `fetched_held` limits the number of requests
        with files, so that the files fit into memory. Raises `RequestError`."""
        media = self._media()
        processor = self._state.engine.inputs.media_processor_of(media) if media else None
        if processor is None or not processor.needs_fetching(media):
            yield
            return
        async with self._state.fetched_held:
            self._files = await processor.fetch(media)
            try:
                yield
            finally:
                self._files = {}

    async def progress(self, outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[Progress, None]:
        """Yield the progress of a request with one choice. `outputs` come from `submit`. Closing the generator aborts
        the request."""
        try:
            async for output in outputs:
                for part in self._parts(output):
                    yield part
        finally:
            await outputs.aclose()

    def push(self, write: Callable[[Progress], bytes]) -> Push:
        """Return a sink for `submit`. While it is open it writes each output's progress; `progress` yields the rest."""
        return Push(lambda output: b"".join([write(part) for part in self._parts(output)]))

    def _parts(self, output: RequestOutput) -> Iterator[Progress]:
        """Yield the progress that an output adds."""
        for completion in output.outputs:
            deltas, finish_reason = self.read(completion)
            self._num_tokens += len(completion.token_ids)
            yield Progress(
                deltas=deltas,
                token_ids=completion.token_ids,
                logprobs=completion.logprobs,
                finish_reason=finish_reason,
                stop_reason=completion.stop_reason,
                num_prompt_tokens=len(output.prompt_token_ids),
                num_cached_tokens=output.num_cached_tokens,
                num_tokens=self._num_tokens,
                num_reasoning_tokens=self.num_reasoning_tokens,
            )

    def prepare(self) -> PreparedPrompt:
        """Render the prompt, choose the format of the answers, and say what their grammar must be. Sets
        `_answer_format`, and may clear `skip_special_tokens` of the caller's `params`, which are read after this. May
        run in a thread. Raises `RequestError`."""
        body, state, params = self._body, self._state, self._params
        media, placeholders = self._decode_media()
        prompt = self._render(placeholders)
        self._answer_format = answer_format(body, state.formats, prompt)
        special_tokens = state.engine.inputs.special_tokens
        if any(token in mark for mark in self._format.marks for token in special_tokens):
            params.skip_special_tokens = False  # they are in marks, which the reader must find
        budget = state.thinking_budget(body.thinking_token_budget, self._format.reasoning)
        grammar = wanted_grammar(body, self._format, state.formats, params.structured_outputs, special_tokens, budget)
        embeds = embeds_of([message.content for message in body.messages])
        prompt_with_embeds = with_embeds(prompt, embeds) if embeds else prompt
        if self._answers is not None:
            self._recalled = recall(self._answers, self._keys, body.messages, prompt, self._reading())
            self._text = len(prompt), text_digest(prompt)
            if self._recalled is not None:
                tokens = {"prompt": prompt, "prompt_token_ids": self._recalled.token_ids}
                return PreparedPrompt(tokens, False, grammar)
        # By default no special tokens are added: the template has written them.
        return PreparedPrompt(prompt_with_embeds, bool(body.add_special_tokens), grammar, media)

    def _render(self, placeholders: Mapping[str, str] | None) -> str:
        body, state = self._body, self._state
        effort = effort_options(state.engine.tokenizer, body, is_strict=self._refuses_unknown_effort)
        return render_messages(
            state.engine.tokenizer,
            body,
            body.messages,
            body.tools if body.chosen_tools else None,  # none with tool_choice "none"
            {**(state.args.default_chat_template_kwargs or {}), **effort},
            trusts_template=state.args.trust_request_chat_template,
            content_format=state.args.chat_template_content_format,
            placeholders=placeholders,
            takes_embeds=True,
            tool_format=state.formats.tools if body.tools or any(m.tool_calls for m in body.messages) else None,
        )

    def _reading(self) -> AnswerReading:
        state = self._state
        schemas = {tool.function.name: tool.function.schema_of_arguments for tool in self._body.tools or ()}
        encode = partial(state.engine.inputs.encode, add_special_tokens=False)
        return AnswerReading(state.engine.tokenizer, state.formats, schemas, encode)

    def _media_kinds(self) -> set[str]:
        """Return the kinds of the conversation's media."""
        return {medium.kind.name for medium in self._media()}

    def _media(self) -> list[SentMedium]:
        return media_of([message.content for message in self._body.messages])

    def _decode_media(self) -> tuple[dict[str, list[Any]] | None, Mapping[str, str] | None]:
        """Return the decoded media by kind, and the placeholder text of each kind; None and None without media. Raises
        `RequestError`."""
        if not (media := self._media()):
            return None, None
        processor = self._state.engine.inputs.media_processor_of(media)
        return processor.decode(media, self._files, self._body.cache_salt), processor.placeholders


def _can_recall(body: ChatCompletionRequest) -> bool:
    """Return whether a prompt may have tokens of earlier answers, and its answers be remembered: it is text, whole, and
    a new answer to the messages, all of which the client sees."""
    contents = [message.content for message in body.messages]
    return (
        body.reuse_answers is not False
        and body.messages[-1].role != "assistant"
        and body.add_generation_prompt is not False
        and body.include_reasoning is not False
        and not body.continue_final_message
        and not body.add_special_tokens
        and body.truncate_prompt_tokens is None
        and not media_of(contents)
        and not embeds_of(contents)
    )


def make_chat(fields: Mapping[str, Any]) -> ChatCompletionRequest:
    """Make a chat request from the fields of another API's request. Raises `RequestError`."""
    try:
        return ChatCompletionRequest.model_validate(fields)
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False)) from None


def check_template_is_trusted(body: TemplateRequest, trusts_template: bool) -> None:
    """Raise `RequestError` if the request brings its own template and the server does not trust it. It must run
    before any code reads the template."""
    if body.chat_template is not None and not trusts_template:
        raise RequestError(
            "this server takes no chat_template from requests: start it with --trust-request-chat-template, or leave "
            "chat_template out.",
            param="chat_template",
        )


def render_messages(
    tokenizer: ModelTokenizer,
    body: TemplateRequest,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool] | None,
    options: Mapping[str, Any] | None = None,
    *,
    trusts_template: bool,
    generates: bool = True,
    content_format: str = "auto",
    placeholders: Mapping[str, str] | None = None,
    takes_embeds: bool = False,
    tool_format: ToolFormat | None = None,
) -> str:
    """Return the prompt text of `messages` and `tools`. `options` and the options of `body` go to the template; those
    of `body` win. The prompt ends with the generation prompt if the model `generates`, unless `body` says otherwise or
    continues the last message. A template that does not know a kind of media gets the kind's text from `placeholders`
    in its place. Raises `RequestError` for media without `placeholders`, for embeddings unless the caller
    `takes_embeds`, and for a template in `body` unless the caller `trusts_template`."""
    check_template_is_trusted(body, trusts_template)
    if not takes_embeds and embeds_of([message.content for message in messages]):
        raise RequestError(
            "parts of type prompt_embeds are supported only in chat completions and LLM.chat.", param="messages"
        )
    continues = bool(body.continue_final_message)
    adds_prompt = body.add_generation_prompt
    if adds_prompt is None:
        adds_prompt = generates and not continues
    return render_chat(
        tokenizer,
        [_template_message(message) for message in messages],
        chat_template=body.chat_template,
        add_generation_prompt=adds_prompt,
        continue_final_message=continues,
        template_options={**(options or {}), **(body.chat_template_kwargs or {})},
        tools=[tool.model_dump(exclude_none=True) for tool in tools or ()],
        content_format=content_format,
        placeholders=placeholders,
        tool_format=tool_format,
    )


def _template_message(message: ChatMessage) -> dict[str, Any]:
    """Return a message for the template: without null fields, and with `reasoning` renamed to `reasoning_content`."""
    fields = message.model_dump(exclude={"content"}, exclude_none=True)
    if (reasoning := fields.pop("reasoning", None)) is not None:
        fields.setdefault("reasoning_content", reasoning)
    fields["content"] = content_for_template(message.content)
    return fields
