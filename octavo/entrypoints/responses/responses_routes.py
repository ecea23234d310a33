"""The routes of the Responses API: create, count tokens, retrieve, delete, cancel, input items."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.off_loop import run_off_loop
from octavo.entrypoints.chat.chat_run import AnswerPart, ChatAnswers, ChatPrompt
from octavo.entrypoints.chat.last_turns import submit_last_turns
from octavo.entrypoints.http.body_fields import ResponseModel
from octavo.entrypoints.http.pagination import Deleted, Page, page_query, read_boolean, read_integer
from octavo.entrypoints.http.resumable import ResumableStream
from octavo.entrypoints.http.router import Router
from octavo.entrypoints.http.server_state import ServerState, num_body_bytes, state_of
from octavo.entrypoints.http.store import Database
from octavo.entrypoints.http.streaming import EventStream, encode_json, encode_off_loop, run_until_disconnect
from octavo.entrypoints.openai.logprobs_format import LogprobsFormatter
from octavo.entrypoints.responses import stored_responses
from octavo.entrypoints.responses.items import Item, read_items, to_messages
from octavo.entrypoints.responses.items_to_chat import NAMES, to_chat
from octavo.entrypoints.responses.response_builder import ResponseBuilder
from octavo.entrypoints.responses.response_run import ACTIVE_STATUSES, BackgroundRun, ResponseRun, stored_events
from octavo.entrypoints.responses.response_tools import ResponsesTool, callable_tools
from octavo.entrypoints.responses.responses_protocol import ResponsesRequest, refuse_include
from octavo.errors import RequestError

router = Router(tags=["Responses"])


class ResponseObject(ResponseModel):
    """A response. `output` has items of type message, reasoning, function_call and custom_tool_call."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: str
    model: str
    output: list[dict[str, Any]]
    conversation: dict[str, Any] | None
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    previous_response_id: str | None
    usage: dict[str, Any] | None


class InputTokens(ResponseModel):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


@router.post("/v1/responses", response_model=ResponseObject)
async def create_response(body: ResponsesRequest, raw: Request) -> Response:
    """Answer, and keep the answer."""
    state = state_of(raw)
    model = state.resolve_model(body.model)
    _, headers = state.response_id("resp", body, raw)
    # Always a new id: the stored response is found by it.
    response_id = f"resp_{uuid.uuid4().hex}" if body.resume is None else body.resume.id
    history, items = await _read(body, state, response_id)
    formatter = LogprobsFormatter(state.engine.tokenizer) if body.wants_logprobs else None
    conversation = [*history, *items]
    tools = callable_tools(body.tools, conversation)
    builder = ResponseBuilder(body, response_id, model, formatter, tools)
    submitting = _submit(body, raw, builder, conversation, tools)
    answers = await (submitting if body.background else run_until_disconnect(submitting, raw.receive))
    if body.background:
        in_background = BackgroundRun(state, builder, items, answers.parts())
        return await _start(in_background, items, state, headers, bool(body.stream))
    run = ResponseRun(state, builder, items, answers.parts())
    if body.stream:
        headers |= answers.resumable.headers(len(answers.prompt.token_ids))
        return EventStream(run.stream(answers.resumable), headers, answers.sink)
    response = await run_until_disconnect(run.collect(), raw.receive)
    return Response(await encode_off_loop(response), headers=headers, media_type="application/json")


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(body: ResponsesRequest, raw: Request) -> InputTokens:
    """Count the tokens that the prompt would have."""
    state = state_of(raw)
    state.resolve_model(body.model)
    history, items = await _read(body, state, "resp_count")
    messages = await run_off_loop(lambda: to_messages([*history, *items], body.instructions), length=num_body_bytes())
    with NAMES.in_errors():
        tools = callable_tools(body.tools, [*history, *items])
        chat = await run_off_loop(lambda: to_chat(body, messages, tools), length=num_body_bytes())
        prompt = ChatPrompt(chat, state, chat.to_sampling_params({}))
        return InputTokens(input_tokens=await prompt.count_tokens(num_body_bytes()))


async def _read(body: ResponsesRequest, state: ServerState, response_id: str) -> tuple[list[Item], list[Item]]:
    """Return the items of the earlier conversation, and the items of the request."""
    items = await run_off_loop(lambda: read_items(body.input, response_id), length=num_body_bytes())
    previous_id, conversation_id = body.previous_response_id, body.conversation_id
    if previous_id is conversation_id is None and not any(item["type"] == "item_reference" for item in items):
        return [], items

    def read(database: Database) -> tuple[list[Item], list[Item]]:
        history, found = stored_responses.with_history(
            database, previous_id, conversation_id, items, 2 * state.args.max_body_bytes
        )
        state.args.refuse_fields({"input": [*history, *found]})
        return history, found

    return await state.store.run(read)


async def _submit(
    body: ResponsesRequest, raw: Request, builder: ResponseBuilder, items: list[Item], tools: list[ResponsesTool]
) -> ChatAnswers:
    """Submit the conversation to the engine; with `truncation` "auto" only as many of its last turns as fit."""
    state, response = state_of(raw), builder.response
    messages = await run_off_loop(lambda: to_messages(items, body.instructions), length=num_body_bytes())

    async def submit(kept: Sequence[dict[str, Any]], is_tried: bool) -> ChatAnswers:
        chat = await run_off_loop(lambda: to_chat(body, list(kept), tools), length=num_body_bytes())
        params = chat.to_sampling_params(state.engine.config.model.default_sampling_params)
        builder.set_params(params)
        resumable = ResumableStream(
            raw, params, body.resume, response["id"], response["created_at"], can_be=body.is_resumable
        )
        prompt = ChatPrompt(chat, state, params, clamps_max_tokens=True)

        def write(part: AnswerPart) -> bytes:
            return resumable.shown(builder.write(part), part.token_ids, is_last=part.finish_reason is not None)

        may_write_directly = body.stream and not body.background and not is_tried
        return await prompt.submit(response["id"], resumable, write=write if may_write_directly else None)

    with NAMES.in_errors():
        if body.truncation != "auto":
            return await submit(messages, False)
        return await submit_last_turns(messages, [one["role"] for one in messages], submit)


async def _start(
    run: BackgroundRun, items: list[Item], state: ServerState, headers: dict[str, str], is_streamed: bool
) -> Response:
    """Store a background response before it is complete, and start its run."""
    response = dict(run.response)
    await state.store.run(lambda database: stored_responses.write(database, response, items, is_owned=True))
    state.background.start(response["id"], run, uses_engine=True)
    return EventStream(run.follow(-1), headers) if is_streamed else _json(response, headers)


@router.get(
    "/v1/responses/{response_id}",
    response_model=ResponseObject,
    openapi_extra={
        "parameters": [
            {"name": "stream", "in": "query", "schema": {"type": "boolean"},
             "description": "The events of a background response, as they come."},
            {"name": "starting_after", "in": "query", "schema": {"type": "integer", "minimum": 0},
             "description": "With stream: the number of the event after which to begin."},
        ]
    },
)  # fmt: skip
async def get_response(response_id: str, raw: Request) -> Response:
    """Return a stored response, or its events."""
    refuse_include(raw)
    state = state_of(raw)
    run = state.background.get(response_id)
    if not read_boolean(raw.query_params.get("stream", "false"), "stream"):
        if isinstance(run, BackgroundRun):
            return _json(run.response)
        found = await state.store.run(lambda database: stored_responses.find(database, response_id))
        return _json(stored_responses.read_response(found))
    after = read_integer(raw, "starting_after", -1, least=-1)
    if isinstance(run, BackgroundRun):
        return EventStream(run.follow(after), {})
    response = stored_responses.read_response(
        await state.store.run(lambda database: stored_responses.find(database, response_id))
    )
    if not response["background"]:
        raise RequestError("Only events of background responses are kept.", param="stream")
    return EventStream(stored_events(state, response_id, after), {})


@router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, raw: Request) -> Deleted:
    """Forget a response."""
    state = state_of(raw)
    await state.background.cancel(response_id)
    if not await state.store.run(lambda database: database.delete(stored_responses.KIND, response_id)):
        await state.store.run(lambda database: stored_responses.find(database, response_id))
    return Deleted(id=response_id, object="response")


@router.post("/v1/responses/{response_id}/cancel", response_model=ResponseObject)
async def cancel_response(response_id: str, raw: Request) -> Response:
    """Cancel a background response; an ended one stays as it is."""
    state = state_of(raw)

    async def find() -> dict[str, Any]:
        return stored_responses.read_response(
            await state.store.run(lambda database: stored_responses.find(database, response_id))
        )

    async def is_under_way() -> bool:
        return (await find())["status"] in ACTIVE_STATUSES

    if not (await find())["background"]:
        raise RequestError("Only background responses can be cancelled.", param="response_id")
    if await is_under_way():
        await state.background.cancel_anywhere(stored_responses.KIND, response_id, is_under_way)
    return _json(await find())


@router.get("/v1/responses/{response_id}/input_items", openapi_extra=Page.PARAMETERS)
async def list_input_items(response_id: str, raw: Request) -> Page:
    """List the items of a response's request, the last first."""
    refuse_include(raw)
    items = await state_of(raw).store.run(
        lambda database: stored_responses.read_input(stored_responses.find(database, response_id))
    )
    return Page.of_whole(items, page_query(raw))


def _json(response: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    return Response(encode_json(response), headers=headers, media_type="application/json")
