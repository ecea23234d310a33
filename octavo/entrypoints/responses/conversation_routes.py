"""The routes of OpenAI's Conversations API. `POST /v1/responses` reads and extends a conversation that it names."""

from __future__ import annotations

import uuid
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator
from starlette.requests import Request

from octavo.engine.off_loop import run_off_loop
from octavo.entrypoints.http.body_fields import Metadata, RequestBody, ResponseModel, described
from octavo.entrypoints.http.pagination import Deleted, Page, page_query
from octavo.entrypoints.http.router import Router
from octavo.entrypoints.http.server_state import num_body_bytes, state_of
from octavo.entrypoints.http.store import Database
from octavo.entrypoints.responses import stored_conversations
from octavo.entrypoints.responses.items import KINDS, Item, read_items
from octavo.entrypoints.responses.responses_protocol import refuse_include
from octavo.entrypoints.responses.stored_responses import resolved

router = Router(tags=["Responses"])


def _check_items(value: Any) -> Any:
    if not isinstance(value, list):
        raise ValueError("should be a list of items")
    return value


Items = Annotated[list[Any], PlainValidator(_check_items, json_schema_input_type=list[dict[str, Any]])]
_ITEMS = f"{', '.join(KINDS)}, as in /v1/responses."


class ConversationRequest(RequestBody):
    """Body of POST /v1/conversations."""

    items: Items | None = described(_ITEMS)
    metadata: Metadata | None = described("Comes back with the conversation.")


class ConversationUpdate(RequestBody):
    """Body of POST /v1/conversations/{conversation_id}."""

    metadata: Metadata | None = Field(description="Replaces the earlier metadata.")


class NewItems(RequestBody):
    """Body of POST /v1/conversations/{conversation_id}/items."""

    items: Items = Field(description=_ITEMS)


class ConversationObject(ResponseModel):
    """A conversation, without its items."""

    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: dict[str, str]


@router.post("/v1/conversations")
async def create_conversation(body: ConversationRequest, raw: Request) -> ConversationObject:
    """Begin a conversation, with items or without."""
    state = state_of(raw)
    given = await _read(body.items or [])

    def create(database: Database) -> dict[str, Any]:
        items = resolved(database, given, field="items")
        state.args.refuse_fields({"items": items})  # again, because the items of references may have many parts
        return stored_conversations.create(database, body.metadata or {}, items, 2 * state.args.max_body_bytes)

    return ConversationObject(**await state.store.run(create))


@router.get("/v1/conversations/{conversation_id}")
async def get_conversation(conversation_id: str, raw: Request) -> ConversationObject:
    """Return a conversation, without its items."""
    found, _ = await state_of(raw).store.run(lambda database: stored_conversations.find(database, conversation_id))
    return ConversationObject(**found)


@router.post("/v1/conversations/{conversation_id}")
async def update_conversation(conversation_id: str, body: ConversationUpdate, raw: Request) -> ConversationObject:
    """Change the metadata of a conversation."""
    metadata = body.metadata or {}
    found = await state_of(raw).store.run(
        lambda database: stored_conversations.set_metadata(database, conversation_id, metadata)
    )
    return ConversationObject(**found)


@router.delete("/v1/conversations/{conversation_id}")
async def delete_conversation(conversation_id: str, raw: Request) -> Deleted:
    """Forget a conversation and its items. Responses that were made in it stay."""

    def delete(database: Database) -> None:
        stored_conversations.find(database, conversation_id)
        database.delete(stored_conversations.KIND, conversation_id)

    await state_of(raw).store.run(delete)
    return Deleted(id=conversation_id, object="conversation.deleted")


@router.get("/v1/conversations/{conversation_id}/items", openapi_extra=Page.PARAMETERS)
async def list_items(conversation_id: str, raw: Request) -> Page:
    """List the items of a conversation, the newest first."""
    refuse_include(raw)
    query = page_query(raw)
    _, items = await state_of(raw).store.run(lambda database: stored_conversations.find(database, conversation_id))
    return Page.of_whole(items, query)


@router.post("/v1/conversations/{conversation_id}/items")
async def create_items(conversation_id: str, body: NewItems, raw: Request) -> Page:
    """Add items at the end of a conversation."""
    refuse_include(raw)
    state = state_of(raw)
    given = await _read(body.items)

    def add(database: Database) -> list[Item]:
        _, earlier = stored_conversations.find(database, conversation_id)
        items = resolved(database, given, earlier, "items")
        state.args.refuse_fields({"items": [*earlier, *items]})
        stored_conversations.append(database, conversation_id, items, 2 * state.args.max_body_bytes)
        return items

    return Page.whole(await state.store.run(add))


@router.get("/v1/conversations/{conversation_id}/items/{item_id}")
async def get_item(conversation_id: str, item_id: str, raw: Request) -> dict[str, Any]:
    """Return an item of a conversation."""
    refuse_include(raw)
    return await state_of(raw).store.run(
        lambda database: stored_conversations.find_item(database, conversation_id, item_id)
    )


@router.delete("/v1/conversations/{conversation_id}/items/{item_id}")
async def delete_item(conversation_id: str, item_id: str, raw: Request) -> ConversationObject:
    """Remove an item from a conversation."""
    found = await state_of(raw).store.run(
        lambda database: stored_conversations.remove(database, conversation_id, item_id)
    )
    return ConversationObject(**found)


async def _read(items: list[Any]) -> list[Item]:
    """Return the items of a body, each with an id."""
    return await run_off_loop(lambda: read_items(items, uuid.uuid4().hex, "items"), length=num_body_bytes())
