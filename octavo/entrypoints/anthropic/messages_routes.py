"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from octavo.engine.off_loop import run_off_loop
from octavo.entrypoints.anthropic.answer_blocks import MessageBuilder
from octavo.entrypoints.anthropic.messages_protocol import CountTokensRequest, MessagesRequest
from octavo.entrypoints.anthropic.to_chat import NAMES, to_chat
from octavo.entrypoints.chat.chat_run import AnswerPart, ChatPrompt
from octavo.entrypoints.http.body_fields import ResponseModel
from octavo.entrypoints.http.error_responses import error_body, error_fields
from octavo.entrypoints.http.request_headers import HEADERS
from octavo.entrypoints.http.resumable import ResumableStream
from octavo.entrypoints.http.router import Router
from octavo.entrypoints.http.server_state import num_body_bytes, state_of
from octavo.entrypoints.http.streaming import EventStream, named_event, run_until_disconnect
from octavo.errors import RequestError

router = Router(tags=["Anthropic"])


class MessageBody(ResponseModel):
    """An answer. Its blocks are text, thinking and tool_use."""

    id: str
    type: str
    role: str
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: dict[str, Any]


class TokenCount(ResponseModel):
    input_tokens: int


class _MessageStream(EventStream):
    keep_alive = named_event({"type": "ping"})


@router.post("/v1/messages", response_model=MessageBody)
async def create_message(body: MessagesRequest, raw: Request) -> Response:
    """Answer a conversation, in the form of Anthropic's API."""
    with NAMES.in_errors():
        return await _answer(body, raw)


async def _answer(body: MessagesRequest, raw: Request) -> Response:
    state = state_of(raw)
    chat = await run_off_loop(lambda: to_chat(body), length=num_body_bytes())
    if state.thinking_tokens is not None and body.thinking is not None:  # clients send `thinking` to any model
        chat.thinking_token_budget = body.thinking.budget_tokens
    model = state.resolve_model(body.model)
    params = chat.to_sampling_params(state.engine.config.model.default_sampling_params)
    # Agents send an effort to any model, as they do `thinking`.
    prompt = ChatPrompt(chat, state, params, clamps_max_tokens=True, ignores_unknown_effort=True)
    message_id = f"msg_{raw.scope[HEADERS].request_id}"
    resumable = ResumableStream(raw, params, body.resume, message_id, int(time.time()), can_be=bool(body.stream))
    builder = MessageBuilder(body, resumable.id, model)

    def write(part: AnswerPart) -> bytes:
        events = b"".join(map(named_event, builder.add(part)))
        return resumable.shown(events, part.token_ids, is_last=part.finish_reason is not None)

    submitting = prompt.submit(resumable.id, resumable, write=write if body.stream else None)
    answers = await run_until_disconnect(submitting, raw.receive)
    if body.stream:
        headers = resumable.headers(len(answers.prompt.token_ids))
        return _MessageStream(_stream(write, answers.parts(), resumable), headers, answers.sink)
    return JSONResponse(await run_until_disconnect(_collect(builder, answers.parts()), raw.receive))


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountTokensRequest, raw: Request) -> TokenCount:
    """Count the tokens that the prompt would have."""
    state = state_of(raw)
    state.resolve_model(body.model)
    with NAMES.in_errors():
        chat = await run_off_loop(lambda: to_chat(body), length=num_body_bytes())
        prompt = ChatPrompt(chat, state, chat.to_sampling_params({}), ignores_unknown_effort=True)
        return TokenCount(input_tokens=await prompt.count_tokens(num_body_bytes()))


async def _collect(builder: MessageBuilder, parts: AsyncGenerator[AnswerPart, None]) -> dict[str, Any]:
    async for part in parts:
        builder.add(part)
    return builder.message


async def _stream(
    write: Callable[[AnswerPart], bytes], parts: AsyncGenerator[AnswerPart, None], resumable: ResumableStream
) -> AsyncGenerator[bytes, None]:
    try:
        async for part in parts:
            if shown := write(part):
                yield shown
    except Exception as error:
        if isinstance(error, RequestError):
            NAMES.renamed(error)
        event = b"event: error\ndata: " + error_body(**error_fields(error)) + b"\n\n"
        yield resumable.before_error(error) + event
    finally:
        await parts.aclose()
