"""The routes of stored chat completions: list, retrieve, change the metadata, delete, messages."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.entrypoints.http.body_fields import Metadata, RequestBody
from octavo.entrypoints.http.pagination import MAX_LIMIT, Deleted, Page, page_query
from octavo.entrypoints.http.piecewise_json import unpack
from octavo.entrypoints.http.router import Router
from octavo.entrypoints.http.server_state import state_of
from octavo.entrypoints.http.store import Database, Stored
from octavo.entrypoints.http.streaming import encode_json
from octavo.entrypoints.openai.stored_chats import KIND
from octavo.errors import RequestError

router = Router(tags=["OpenAI"])
_decode = msgspec.json.Decoder().decode


class ChatUpdate(RequestBody):
    """Body of POST /v1/chat/completions/{completion_id}."""

    metadata: Metadata | None


@router.get("/v1/chat/completions", openapi_extra=Page.PARAMETERS)
async def list_chats(raw: Request) -> Page:
    """List stored chats, the oldest first; `model` and `metadata[KEY]` select some."""
    query = page_query(raw, order="asc")
    model = raw.query_params.get("model")
    wanted = {key[9:-1]: value for key, value in raw.query_params.items() if key.startswith("metadata[")}

    def read(database: Database) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        after = query.after
        while len(found) <= query.limit:
            rows = database.page(KIND, after=after, limit=MAX_LIMIT, is_ascending=query.is_ascending)
            for row in rows:
                chat = _decode(row.body)
                if model in (None, chat["model"]) and wanted.items() <= chat["metadata"].items():
                    found.append(chat)
            if len(rows) < MAX_LIMIT:
                break
            after = rows[-1].id
        return found

    return Page.of(await state_of(raw).store.run(read), query)


@router.get("/v1/chat/completions/{completion_id}", response_model=dict[str, Any])
async def get_chat(completion_id: str, raw: Request) -> Response:
    """Return a stored chat."""
    stored = await state_of(raw).store.run(lambda database: _find(database, completion_id))
    return Response(stored.body, media_type="application/json")


@router.post("/v1/chat/completions/{completion_id}", response_model=dict[str, Any])
async def update_chat(completion_id: str, body: ChatUpdate, raw: Request) -> Response:
    """Change the metadata of a stored chat."""

    def update(database: Database) -> bytes:
        chat: dict[str, Any] = _decode(_find(database, completion_id).body)
        chat["metadata"] = body.metadata or {}
        changed = encode_json(chat)
        database.put(KIND, completion_id, changed)
        return changed

    return Response(await state_of(raw).store.run(update), media_type="application/json")


@router.delete("/v1/chat/completions/{completion_id}")
async def delete_chat(completion_id: str, raw: Request) -> Deleted:
    """Forget a stored chat."""

    def delete(database: Database) -> None:
        _find(database, completion_id)
        database.delete(KIND, completion_id)

    await state_of(raw).store.run(delete)
    return Deleted(id=completion_id, object="chat.completion.deleted")


@router.get("/v1/chat/completions/{completion_id}/messages", openapi_extra=Page.PARAMETERS)
async def list_messages(completion_id: str, raw: Request) -> Page:
    """List the messages in the request of a stored chat, in their order."""
    messages = await state_of(raw).store.run(lambda database: unpack(_find(database, completion_id).extra))
    return Page.of_whole(messages, page_query(raw, order="asc"))


def _find(database: Database, completion_id: str) -> Stored:
    stored = database.get(KIND, completion_id)
    if stored is None:
        raise RequestError(f"There is no stored chat {completion_id!r:.100}.", status=404, code="not_found")
    return stored
