"""Responses in the store: the response object, and the items of the request."""

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec

from octavo.entrypoints.http.piecewise_json import pack, unpack
from octavo.entrypoints.http.store import Database, Stored
from octavo.entrypoints.http.streaming import encode_json
from octavo.entrypoints.responses import stored_conversations
from octavo.entrypoints.responses.items import Item, response_of
from octavo.errors import RequestError

KIND = "response"
_decode = msgspec.json.Decoder().decode


def read_response(stored: Stored) -> dict[str, Any]:
    """Return the response object; failed if its server has died."""
    response: dict[str, Any] = _decode(stored.body)
    if stored.is_abandoned:
        message = "The server that worked on this response has ended."
        response |= {"status": "failed", "error": {"code": "server_error", "message": message}}
    return response


def read_input(stored: Stored) -> list[Item]:
    """Return the items of the request."""
    return unpack(stored.extra)


def find(database: Database, response_id: str) -> Stored:
    """Return a stored response. Raises `RequestError` (404)."""
    stored = database.get(KIND, response_id)
    if stored is None:
        raise RequestError(f"Response with id {response_id!r:.100} not found.", status=404, code="not_found")
    return stored


def write(
    database: Database, response: dict[str, Any], items: list[Item], *, is_owned: bool = False, needs_room: bool = True
) -> None:
    """Store a response. `is_owned` says that it is unfinished."""
    fields = encode_json(response), pack(items)
    database.put(KIND, response["id"], *fields, is_owned=is_owned, needs_room=needs_room)


def with_history(
    database: Database, previous_id: str | None, conversation_id: str | None, items: list[Item], max_bytes: int
) -> tuple[list[Item], list[Item]]:
    """Return the items of the earlier conversation, and `items` with references replaced by their items; references to
    items of the earlier conversation are dropped. Raises `RequestError`, also for items that the conversation cannot
    take, and for a conversation, or requests of earlier responses, of more than `max_bytes`."""
    if conversation_id is not None:
        packed = stored_conversations.get(database, conversation_id).extra or b""
        stored_conversations.refuse_too_long(len(packed), max_bytes, "conversation")
        earlier = unpack(packed)
        found = resolved(database, items, earlier)
        stored_conversations.refuse_repeated(earlier, found, "input")
        return earlier, found
    chain: list[Stored] = []
    num_bytes = 0
    response_id = previous_id
    while response_id is not None:
        stored = database.get(KIND, response_id)
        if stored is None:
            which = "" if response_id == previous_id else f", which {previous_id!r:.100} goes on from,"
            raise RequestError(
                f"Previous response with id {response_id!r:.100}{which} not found.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        response = read_response(stored)
        if response["status"] in ("queued", "in_progress"):
            raise RequestError(f"The response {response_id!r:.100} has not ended yet.", param="previous_response_id")
        chain.append(stored)
        num_bytes += len(stored.extra or b"")
        stored_conversations.refuse_too_long(num_bytes, max_bytes, "previous_response_id")
        response_id = response["previous_response_id"]
    history = _before(database, chain[-1]) if chain else []
    for stored in reversed(chain):
        history += [*read_input(stored), *_decode(stored.body)["output"]]
    return history, resolved(database, items, history)


def _before(database: Database, stored: Stored) -> list[Item]:
    """Return the items of a response's conversation before those of its request. Raises `RequestError`."""
    home = _decode(stored.body).get("conversation")
    if home is None:
        return []
    _, items = stored_conversations.find(database, home["id"])
    # References in the answer too: the client may have deleted the request's.
    own = {item["id"] for item in [*read_input(stored), *_decode(stored.body)["output"]]}
    return list(itertools.takewhile(lambda item: item["id"] not in own, items))


def resolved(database: Database, items: list[Item], earlier: Sequence[Item] = (), field: str = "input") -> list[Item]:
    """Return `items`, a request's `field`, with references replaced by their items. References to items that are there
    already, in `earlier` or before them, are dropped. Raises `RequestError`."""
    known = {item["id"] for item in earlier}
    referred = _referred(database, {item["id"] for item in items if item["type"] == "item_reference"} - known)
    found = list[Item]()
    for item in items:
        if item["type"] == "item_reference":
            if item["id"] in known:
                continue
            if item["id"] not in referred:
                raise RequestError(
                    f"Item with id {item['id']!r:.100} not found.", param=field, status=404, code="not_found"
                )
            item = referred[item["id"]]
        known.add(item["id"])
        found.append(item)
    return found


def _referred(database: Database, ids: set[str]) -> dict[str, Item]:
    """Return the stored items of responses that have one of `ids`. Each response is read once."""
    by_response: dict[str, set[str]] = {}
    for id in ids:
        if (response_id := response_of(id)) is not None:
            by_response.setdefault(response_id, set()).add(id)
    found: dict[str, Item] = {}
    for response_id, wanted in by_response.items():
        if (stored := database.get(KIND, response_id)) is not None:
            for item in [*read_input(stored), *_decode(stored.body)["output"]]:
                if item["id"] in wanted:
                    found.setdefault(item["id"], item)
    return found
