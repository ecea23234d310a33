"""POST /v1/chat/completions: a conversation, its template, and the answer, streamed or not."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.off_loop import run_off_loop
from octavo.entrypoints.chat.answer_reader import Delta, ReasoningDelta, TextDelta
from octavo.entrypoints.chat.chat_run import ChatAnswers, ChatPrompt
from octavo.entrypoints.chat.last_turns import submit_last_turns
from octavo.entrypoints.chat.media_parts import media_of
from octavo.entrypoints.http.router import Router
from octavo.entrypoints.http.streaming import ChunkWriter, encode_json
from octavo.entrypoints.openai.chat_messages import ChatMessage
from octavo.entrypoints.openai.completions import prompt_text
from octavo.entrypoints.openai.generation_job import LENGTH_OF_ENTRY, GenerationJob
from octavo.entrypoints.openai.request_bodies import ChatCompletionRequest
from octavo.entrypoints.openai.response_bodies import (
    AssistantMessage,
    CalledFunction,
    CalledTool,
    ChatChoice,
    ChatCompletionResponse,
    ChatLogprobs,
    ChatTokenLogprob,
    CustomToolCall,
    ToolCall,
)
from octavo.entrypoints.openai.stored_chats import keep_chat
from octavo.entrypoints.openai.tool_choice import NamedToolChoice
from octavo.errors import RequestError
from octavo.outputs import CompletionOutput, RequestOutput

router = Router(tags=["OpenAI"])


@router.post("/v1/chat/completions", response_model=ChatCompletionResponse)
async def create_chat_completion(body: ChatCompletionRequest, raw: Request) -> Response:
    """Answer a conversation."""
    try:
        return await ChatJob(body, raw).answer(raw)
    except RequestError as error:
        raise body.field_names.renamed(error) from None


class ChatJob(GenerationJob[ChatCompletionRequest, ChatChoice]):
    id_prefix = "chatcmpl"
    chunk_kind = "chat.completion.chunk"
    text_field = b'"delta":{"content":', b"}"

    def __init__(self, body: ChatCompletionRequest, raw: Request, *, only_renders: bool = False) -> None:
        super().__init__(body, raw, only_renders=only_renders)
        if body.store:  # always a new id: the stored chat is found by it, so clients may not choose it
            self._about["id"] = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self._role = self._state.args.response_role
        last = body.messages[-1]
        self._echo = last.text if body.echo and last.role == self._role else ""  # text with which answers begin
        self._prompt_text: str | None = None
        self._kept: list[Delta] | None = [TextDelta(self._echo)] if body.store else None  # deltas of a stream to store
        self._kept_logprobs: list[ChatTokenLogprob] = []  # log-probabilities of a stream to store
        self._kept_token_ids: list[int] = []
        self._has_begun = False  # whether the stream has begun
        self._finish_reason = "abort"
        self._stop_reason: int | str | None = None

    async def submit(self) -> None:
        messages: Sequence[ChatMessage] = self._body.messages
        last_kept = messages

        async def submit(kept: Sequence[ChatMessage], is_tried: bool) -> ChatAnswers:
            nonlocal last_kept
            last_kept = kept
            chat = ChatPrompt(
                self._body if kept is messages else self._body.model_copy(update={"messages": kept}),
                self._state,
                self._params,
                clamps_max_tokens=self._truncation is not None,
                only_renders=self._only_renders,
                checks_calls=True,
            )
            return await chat.submit(self._about["id"], self._resumable, None if is_tried else self._sink)

        if self._truncation != "auto":
            self._answers = await submit(messages, False)
        else:
            try:
                self._answers = await submit_last_turns(messages, [one.role for one in messages], submit)
            except RequestError as error:
                if error.code != "context_length_exceeded" or media_of([one.content for one in last_kept]):
                    raise
                self._cut_prompt()
                self._answers = await submit(last_kept, False)
        prompt = self._answers.prompt
        if self._body.return_prompt_text:
            is_cut = self._body.truncate_prompt_tokens is not None
            self._prompt_text = await prompt_text(self._state.engine.tokenizer, prompt, is_cut=is_cut)
        self._num_prompt = len(prompt.token_ids)
        self._generators = [self._answers.outputs]

    def _all_prompt_token_ids(self) -> list[list[int]]:
        return [self._answers.prompt.token_ids]

    async def _collect(self) -> ChatCompletionResponse:
        choices = await self._choices()
        num_tokens = len(self._prompt_logprobs.get(0, ()))
        num_entries = num_tokens * (1 + (self._params.prompt_logprobs or 0))
        response = await run_off_loop(lambda: self._response(choices), length=num_entries * LENGTH_OF_ENTRY)
        if self._body.store:
            await keep_chat(self._state, self._body, response)
        return response

    async def _on_end(self) -> None:
        if self._kept is None or not self._has_begun:
            return
        message = assistant_message(self._role, self._kept)
        choice = ChatChoice(
            index=0,
            message=message,
            logprobs=ChatLogprobs(content=self._kept_logprobs) if self._body.logprobs else None,
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
            token_ids=self._kept_token_ids if self._body.return_token_ids else None,
        )
        await keep_chat(self._state, self._body, self._response([choice]))

    def _choice(self, prompt_index: int, completion: CompletionOutput) -> ChatChoice:
        self._num_completion += len(completion.token_ids)
        deltas, finish_reason, stop_reason = self._answers.read_next(completion)
        self._num_reasoning = self._answers.num_reasoning_tokens
        return ChatChoice(
            index=completion.index,
            message=assistant_message(self._role, [TextDelta(self._echo), *deltas]),
            logprobs=self._logprobs(completion),
            finish_reason=self._end(finish_reason) or "abort",
            stop_reason=stop_reason,
            token_ids=completion.token_ids if self._body.return_token_ids else None,
        )

    def _response(self, choices: list[ChatChoice]) -> ChatCompletionResponse:
        wants_logprobs = self._body.prompt_logprobs is not None and 0 in self._prompt_logprobs
        response = ChatCompletionResponse(
            **self._about,
            choices=choices,
            usage=self._usage(),
            prompt_token_ids=self._answers.prompt.token_ids if self._body.return_token_ids else None,
            prompt_text=self._prompt_text,
        )
        if wants_logprobs:  # set here, so that pydantic does not check each entry
            response.prompt_logprobs = self._formatter.prompt(self._prompt_logprobs[0])
        return response

    def _is_plain(self) -> bool:
        body = self._body
        return self._answers.has_content_only and not (
            body.logprobs or body.wants_continuous_usage or body.return_token_ids or body.store
        )

    def _events(self, writer: ChunkWriter, prompt_index: int, output: RequestOutput, is_plain: bool) -> list[bytes]:
        """Return the chunks of an output: the role of each choice, its text, its end."""
        events = []
        if not self._has_begun:
            self._has_begun = True
            events = [self._begin(writer, index) for index in range(self._body.num_choices)]
        for completion in output.outputs:
            self._num_completion += len(completion.token_ids)
            if not is_plain or completion.finish_reason is not None:
                events.append(self._event(writer, completion))
            elif completion.text:
                events.append(writer.text(completion.index, completion.text))
        return events

    def _begin(self, writer: ChunkWriter, index: int) -> bytes:
        delta = b'"delta":' + encode_json({"role": self._role, "content": self._echo})
        prompt = b""
        if self._body.return_token_ids:
            prompt = b',"prompt_token_ids":' + encode_json(self._answers.prompt.token_ids)
        if self._prompt_text is not None:
            prompt += b',"prompt_text":' + encode_json(self._prompt_text)
        return writer.choice(index, delta, usage=self._usage_so_far(), chunk_fields=prompt)

    def _event(self, writer: ChunkWriter, completion: CompletionOutput) -> bytes:
        """Return a chunk for each delta. The last chunk has the log-probabilities and the finish reason. Empty if there
        is nothing new."""
        logprobs = self._logprobs(completion)
        token_ids = b',"token_ids":' + encode_json(completion.token_ids) if self._body.return_token_ids else b""
        new_deltas, finish_reason, stop_reason = self._answers.read_next(completion)
        finish_reason = self._end(finish_reason)
        self._num_reasoning = self._answers.num_reasoning_tokens
        if self._kept is not None:
            self._kept += new_deltas
            self._kept_logprobs += logprobs.content if logprobs is not None else ()
            self._kept_token_ids += completion.token_ids
            self._finish_reason, self._stop_reason = finish_reason or "abort", stop_reason
        deltas = [_fields(delta) for delta in new_deltas]
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
                finish_reason=finish_reason,
                stop_reason=stop_reason,
                logprobs=None if logprobs is None else logprobs.model_dump_json().encode(),
                usage=usage,
            )
        )
        return b"".join(chunks)

    def _end(self, finish_reason: str | None) -> str | None:
        """Return the finish reason in OpenAI's words: for a named function it is "stop" and not "tool_calls"."""
        is_named = isinstance(self._body.tool_choice, NamedToolChoice)
        return "stop" if finish_reason == "tool_calls" and is_named else finish_reason

    def _logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return self._formatter.chat(
            completion.token_ids, completion.logprobs or [], self._body.num_shown(self._body.top_logprobs)
        )


def _fields(delta: Delta) -> dict[str, Any]:
    """Return the fields of a delta in a chunk."""
    if isinstance(delta, TextDelta):
        return {"content": delta.text}
    if isinstance(delta, ReasoningDelta):
        return {"reasoning_content": delta.text, "reasoning": delta.text}
    kind = "custom" if delta.is_custom else "function"
    called = {"input" if delta.is_custom else "arguments": delta.arguments}
    if not delta.name:
        return {"tool_calls": [{"index": delta.index, kind: called}]}
    call = {"index": delta.index, "id": delta.id, "type": kind, kind: {"name": delta.name, **called}}
    return {"tool_calls": [call]}


def assistant_message(role: str, deltas: Iterable[Delta]) -> AssistantMessage:
    """Return the message that is the sum of `deltas`."""
    reasoning, content, calls = list[str](), list[str](), list[ToolCall | CustomToolCall]()
    for delta in deltas:
        if isinstance(delta, ReasoningDelta):
            reasoning.append(delta.text)
        elif isinstance(delta, TextDelta):
            content.append(delta.text)
        else:
            if delta.is_custom and delta.name:
                calls.append(CustomToolCall(id=delta.id, custom=CalledTool(name=delta.name, input="")))
            elif delta.name:
                calls.append(ToolCall(id=delta.id, function=CalledFunction(name=delta.name, arguments="")))
            if isinstance(last := calls[-1], CustomToolCall):
                last.custom.input += delta.arguments
            else:
                last.function.arguments += delta.arguments
    thought = "".join(reasoning) or None
    return AssistantMessage(
        role=role,
        content="".join(content) or (None if thought or calls else ""),
        reasoning_content=thought,
        reasoning=thought,
        tool_calls=calls or None,
    )
