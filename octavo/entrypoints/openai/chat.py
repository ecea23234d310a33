"""POST /v1/chat/completions: a conversation, its template, and the answer, streamed or not."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from octavo.entrypoints.chat_template import render_chat
from octavo.entrypoints.openai.answer import AnswerFormat, AnswerReader
from octavo.entrypoints.openai.answer_format import answer_format, check_tool_choice, wanted_grammar
from octavo.entrypoints.openai.logprobs import LogprobsFormatter
from octavo.entrypoints.openai.protocol import ChatCompletionRequest, ChatMessage, TokenizeRequest, Tool
from octavo.entrypoints.openai.responses import ChatChoice, ChatCompletionResponse, ChatLogprobs, Usage
from octavo.entrypoints.openai.route import BodyRoute
from octavo.entrypoints.openai.state import Asked, ServerState, json_response, make_usage, state_of
from octavo.entrypoints.openai.streaming import DONE, ChunkWriter, EventStream, encode_json, run_until_disconnect
from octavo.outputs import CompletionOutput, RequestOutput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

router = APIRouter(tags=["OpenAI"], route_class=BodyRoute)


@router.post("/v1/chat/completions", response_model=ChatCompletionResponse)
async def create_chat_completion(body: ChatCompletionRequest, raw: Request) -> Response:
    """Answer a conversation."""
    job = _Job(state_of(raw), body, raw)
    await job.submit()
    if body.stream:
        return EventStream(job.stream(), job.headers)
    response = await run_until_disconnect(job.collect(), raw.receive)
    return Response(status_code=499) if response is None else json_response(response, job.headers)


class _Job:
    """One request on its way through the engine. When `submit` returns, all that can be refused has been checked."""

    def __init__(self, state: ServerState, body: ChatCompletionRequest, raw: Request) -> None:
        self._body = body
        self._model = state.resolve_model(body.model)
        params = body.to_sampling_params(state.engine.config.model.default_sampling_params)
        self._id, self.headers = state.response_id("chatcmpl", body, raw)
        self._created = int(time.time())
        self._fingerprint = state.fingerprint
        self._role = state.args.response_role
        self._state = state
        self._params = params
        check_tool_choice(body, state.args)
        self._formatter = LogprobsFormatter(state.engine.tokenizer, as_token_ids=bool(body.return_tokens_as_token_ids))
        self._format = AnswerFormat()  # known when the prompt is
        self._readers: dict[int, AnswerReader] = {}
        self._prompt_token_ids: list[int] = []
        self._num_completion = 0
        self._num_cached = 0

    async def submit(self) -> None:
        """Raises `RequestError` for whatever is wrong with the prompt."""
        prompt, self._generator = await self._state.submit(
            self._id, self._body, self._params, self._prepare, has_grammar=self._body.forces_calls
        )
        self._prompt_token_ids = prompt.token_ids

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

    async def collect(self) -> ChatCompletionResponse:
        """The whole answer."""
        final: RequestOutput | None = None
        async for output in self._generator:
            final = output
        assert final is not None, "a generator that ends without an error has given its final output"
        self._num_cached = final.num_cached_tokens
        self._num_completion = sum(len(completion.token_ids) for completion in final.outputs)
        wants_prompt = self._body.prompt_logprobs is not None and final.prompt_logprobs is not None
        return ChatCompletionResponse(
            id=self._id,
            created=self._created,
            model=self._model,
            system_fingerprint=self._fingerprint,
            choices=[
                self._choice(completion)
                for completion in sorted(final.outputs, key=lambda completion: completion.index)
            ],
            usage=self._usage(),
            prompt_logprobs=self._formatter.prompt(final.prompt_logprobs or []) if wants_prompt else None,
            prompt_token_ids=self._prompt_token_ids if self._body.return_token_ids else None,
        )

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events: the role of each choice, its text, its end."""
        body = self._body
        writer = ChunkWriter(
            response_id=self._id,
            kind="chat.completion.chunk",
            created=self._created,
            model=self._model,
            fingerprint=self._fingerprint,
            wants_usage=body.wants_usage,
        )
        # Nothing but text, which is what most chunks are.
        plain = (
            not body.logprobs
            and not body.wants_continuous_usage
            and not body.return_token_ids
            and self._format.is_plain
        )
        begun = False
        try:
            async for output in self._generator:
                events = []
                if not begun:
                    begun = True
                    self._num_cached = output.num_cached_tokens
                    events = [self._begin(writer, index) for index in range(body.num_choices)]
                for completion in output.outputs:
                    self._num_completion += len(completion.token_ids)
                    if not plain or completion.finish_reason is not None:
                        events.append(self._event(writer, completion))
                    elif completion.text:
                        field = b'"delta":{"content":' + encode_json(completion.text) + b"}"
                        events.append(writer.text(completion.index, field))
                if events:
                    yield b"".join(events)
        finally:
            await self._generator.aclose()
        if body.wants_usage:
            yield writer.usage(self._usage().model_dump_json().encode())
        yield DONE

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
        reader = self._readers.setdefault(completion.index, AnswerReader(self._format))
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

    def _choice(self, completion: CompletionOutput) -> ChatChoice:
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

    def _logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return self._formatter.chat(completion.token_ids, completion.logprobs or [], self._body.top_logprobs or 0)

    def _usage_so_far(self) -> bytes | None:
        return self._usage().model_dump_json().encode() if self._body.wants_continuous_usage else None

    def _usage(self) -> Usage:
        return make_usage(len(self._prompt_token_ids), self._num_completion, self._num_cached)


def render_messages(
    tokenizer: PreTrainedTokenizerFast,
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
