"""Conversations in the store: an object with metadata, and the items that were said in it, in order.

A conversation that gets items counts as new: a full store first drops the ones that were not used for longest.
"""

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from octavo.entrypoints.http.piecewise_json import pack, unpack
from octavo.entrypoints.http.store import Database, Stored
from octavo.entrypoints.http.streaming import encode_json
from octavo.entrypoints.responses.items import Item
from octavo.errors import RequestError

KIND = "conversation"
_decode = msgspec.json.Decoder().decode


def refuse_too_long(num_bytes: int, max_bytes: int, param: str) -> None:
    """Raise `RequestError` if a conversation has more than `max_bytes`."""
    if num_bytes > max_bytes:
        raise RequestError(
            f"The conversation has {num_bytes} bytes, and {max_bytes} is the most here (twice --max-body-bytes): "
            "delete items, or begin another one.",
            param=param, status=413, code="request_too_large",
        )  # fmt: skip


def create(
    database: Database, metadata: Mapping[str, str], items: Sequence[Item], max_bytes: int | None = None
) -> dict[str, Any]:
    """Store a new conversation and return it, without its items. Raises `RequestError` for items with one id, or of
    more than `max_bytes`."""
    conversation = {
        "id": f"conv_{uuid.uuid4().hex}",
        "object": "conversation",
        "created_at": int(time.time()),
        "metadata": dict(metadata),
    }
    refuse_repeated([], items)
    _write(database, conversation, items, max_bytes)
    return conversation


def find(database: Database, conversation_id: str) -> tuple[dict[str, Any], list[Item]]:
    """Return a conversation and its items. Raises `RequestError` (404)."""
    stored = get(database, conversation_id)
    return _decode(stored.body), unpack(stored.extra)


def get(database: Database, conversation_id: str) -> Stored:
    """Return a conversation as it is stored. Raises `RequestError` (404)."""
    stored = database.get(KIND, conversation_id)
    if stored is None:
        raise RequestError(
            f"Conversation with id {conversation_id!r:.100} not found.",
            param="conversation",
            status=404,
            code="not_found",
        )
    return stored


def find_item(database: Database, conversation_id: str, item_id: str) -> Item:
    """Return an item of a conversation. Raises `RequestError` (404)."""
    for item in find(database, conversation_id)[1]:
        if item["id"] == item_id:
            return item
    raise RequestError(f"Item with id {item_id!r:.100} not found.", param="item_id", status=404, code="not_found")


def set_metadata(database: Database, conversation_id: str, metadata: Mapping[str, str]) -> dict[str, Any]:
    """Replace the metadata of a conversation and return it. Raises `RequestError` (404)."""
    conversation: dict[str, Any] = _decode(get(database, conversation_id).body)
    conversation["metadata"] = dict(metadata)
    database.put(KIND, conversation_id, encode_json(conversation))
    return conversation


def append(database: Database, conversation_id: str, items: Sequence[Item], max_bytes: int | None = None) -> None:
    """Add items at the end of a conversation. Raises `RequestError` if there is no such conversation, if it has an
    item already, or if it would have more than `max_bytes`."""
    conversation, earlier = find(database, conversation_id)
    refuse_repeated(earlier, items)
    _write(database, conversation, [*earlier, *items], max_bytes)


def remove(database: Database, conversation_id: str, item_id: str) -> dict[str, Any]:
    """Delete an item and return its conversation. Raises `RequestError` (404)."""
    find_item(database, conversation_id, item_id)
    conversation, items = find(database, conversation_id)
    _write(database, conversation, [item for item in items if item["id"] != item_id])
    return conversation


def _write(
    database: Database, conversation: Mapping[str, Any], items: Sequence[Item], max_bytes: int | None = None
) -> None:
    id, packed = conversation["id"], pack(items)
    if max_bytes is not None:
        refuse_too_long(len(packed), max_bytes, "items")
    database.forget(KIND, id)  # it becomes the newest
    database.put(KIND, id, encode_json(conversation), packed)


def refuse_repeated(earlier: Sequence[Item], items: Sequence[Item], field: str = "items") -> None:
    """Raise `RequestError` if an item of `items`, a request's `field`, has the id of another or of an earlier one."""
    known = {item["id"] for item in earlier}
    for item in items:
        if item["id"] in known:
            raise RequestError(
                f"The conversation already has an item with the id {item['id']!r:.100}; send only what is new.",
                param=field,
            )
        known.add(item["id"])
