"""POST /v1/chat/completions: a conversation, its template, and the answer, streamed or not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.entrypoints.chat_template import render_chat
from octavo.entrypoints.openai.answer import (
    AnswerFormat,
    AnswerReader,
    answer_format,
    check_tool_choice,
    wanted_grammar,
)
from octavo.entrypoints.openai.job import Job
from octavo.entrypoints.openai.protocol import ChatCompletionRequest, ChatMessage, TokenizeRequest, Tool
from octavo.entrypoints.openai.responses import ChatChoice, ChatCompletionResponse, ChatLogprobs
from octavo.entrypoints.openai.routes import Router
from octavo.entrypoints.openai.state import Asked
from octavo.entrypoints.openai.streaming import ChunkWriter, encode_json
from octavo.outputs import CompletionOutput, RequestOutput

if TYPE_CHECKING:
    from octavo.loading.tokenizer import ModelTokenizer

router = Router(tags=["OpenAI"])


@router.post("/v1/chat/completions", response_model=ChatCompletionResponse)
async def create_chat_completion(body: ChatCompletionRequest, raw: Request) -> Response:
    """Answer a conversation."""
    return await _Job(body, raw).answer(raw)


class _Job(Job[ChatCompletionRequest, ChatChoice]):
    id_prefix = "chatcmpl"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, body: ChatCompletionRequest, raw: Request) -> None:
        super().__init__(body, raw)
        check_tool_choice(body, self._state.args)
        self._role = self._state.args.response_role
        self._format = AnswerFormat()  # known when the prompt is
        self._readers = defaultdict[int, AnswerReader](lambda: AnswerReader(self._format))  # by choice
        self._prompt_token_ids: list[int] = []
        self._has_begun = False  # a stream

    async def submit(self) -> None:
        prompt, generator = await self._state.submit(
            self._about["id"], self._body, self._params, self._prepare, has_grammar=self._body.forces_calls
        )
        self._prompt_token_ids = prompt.token_ids
        self._num_prompt = len(prompt.token_ids)
        self._generators = [generator]

    def _prepare(self) -> Asked:
        """Render the conversation, which says how its answers are to be read and what they must be."""
        body, state, params = self._body, self._state, self._params
        tools = body.tools if body.chosen_tools else None
        prompt = render_messages(state.engine.tokenizer, body, body.messages, tools)
        self._format = answer_format(body, state.args, prompt)
        if any(text in state.special_tokens for text in self._format.marks):
            params.skip_special_tokens = False  # they must be read
        grammar = wanted_grammar(body, self._format, params.structured_outputs, state.special_tokens)
        # The template has put the special tokens in already.
        return Asked(prompt, bool(body.add_special_tokens), grammar)

    def _choice(self, prompt_index: int, completion: CompletionOutput) -> ChatChoice:
        self._num_completion += len(completion.token_ids)
        reader = AnswerReader(self._format)
        message = reader.message(self._role, completion.text)
        return ChatChoice(
            index=completion.index,
            message=message,
            logprobs=self._logprobs(completion),
            finish_reason=reader.finish_reason(completion.finish_reason) or "abort",
            stop_reason=completion.stop_reason,
            token_ids=completion.token_ids if self._body.return_token_ids else None,
        )

    def _response(self, choices: list[ChatChoice]) -> ChatCompletionResponse:
        wants_logprobs = self._body.prompt_logprobs is not None and 0 in self._prompt_logprobs
        return ChatCompletionResponse(
            **self._about,
            choices=choices,
            usage=self._usage(),
            prompt_logprobs=self._formatter.prompt(self._prompt_logprobs[0]) if wants_logprobs else None,
            prompt_token_ids=self._prompt_token_ids if self._body.return_token_ids else None,
        )

    def _is_plain(self) -> bool:
        body = self._body
        return self._format.is_plain and not (body.logprobs or body.wants_continuous_usage or body.return_token_ids)

    def _events(self, writer: ChunkWriter, prompt_index: int, output: RequestOutput, is_plain: bool) -> list[bytes]:
        """The role of each choice, its text, its end."""
        events = []
        if not self._has_begun:
            self._has_begun = True
            events = [self._begin(writer, index) for index in range(self._body.num_choices)]
        for completion in output.outputs:
            self._num_completion += len(completion.token_ids)
            if not is_plain or completion.finish_reason is not None:
                events.append(self._event(writer, completion))
            elif completion.text:
                field = b'"delta":{"content":' + encode_json(completion.text) + b"}"
                events.append(writer.text(completion.index, field))
        return events

    def _begin(self, writer: ChunkWriter, index: int) -> bytes:
        delta = b'"delta":' + encode_json({"role": self._role, "content": ""})
        prompt = b""
        if self._body.return_token_ids:
            prompt = b',"prompt_token_ids":' + encode_json(self._prompt_token_ids)
        return writer.choice(index, delta, usage=self._usage_so_far(), chunk_fields=prompt)

    def _event(self, writer: ChunkWriter, completion: CompletionOutput) -> bytes:
        """Chunks with whatever the request asked for, one a delta, the last with log-probabilities and the end; empty
        if there is nothing new."""
        logprobs = self._logprobs(completion)
        token_ids = b',"token_ids":' + encode_json(completion.token_ids) if self._body.return_token_ids else b""
        reader = self._readers[completion.index]
        deltas = reader.add(completion.text, is_end=completion.finish_reason is not None)
        if not deltas:
            if completion.finish_reason is None and not token_ids and (logprobs is None or not logprobs.content):
                return b""
            deltas = [{}]
        *first, last = deltas
        usage = self._usage_so_far()
        chunks = [writer.choice(completion.index, b'"delta":' + encode_json(delta), usage=usage) for delta in first]
        chunks.append(
            writer.choice(
                completion.index,
                b'"delta":' + encode_json(last) + token_ids,
                finish_reason=reader.finish_reason(completion.finish_reason),
                stop_reason=completion.stop_reason,
                logprobs=None if logprobs is None else logprobs.model_dump_json().encode(),
                usage=usage,
            )
        )
        return b"".join(chunks)

    def _logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return self._formatter.chat(completion.token_ids, completion.logprobs or [], self._body.top_logprobs or 0)


def render_messages(
    tokenizer: ModelTokenizer,
    body: ChatCompletionRequest | TokenizeRequest,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool] | None,
) -> str:
    """The prompt that `messages` and `tools` make with the template's options of `body`. Raises `RequestError`."""
    continues = bool(body.continue_final_message)
    return render_chat(
        tokenizer,
        [_for_template(message) for message in messages],
        add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continues,
        template_options=body.chat_template_kwargs,
        tools=[tool.model_dump(exclude_none=True) for tool in tools or ()],
    )


def _for_template(message: ChatMessage) -> dict[str, Any]:
    """A message as templates know it: without what is null, and with reasoning under its older name."""
    fields = message.model_dump(exclude_none=True)
    if (reasoning := fields.pop("reasoning", None)) is not None:
        fields.setdefault("reasoning_content", reasoning)
    return fields
