"""Files and batches in the store.

A file's content is in numbered chunks: pieces of an upload, or lines of a batch's output.
"""

import asyncio
import re
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from octavo.entrypoints.http.store import Database, Store, Stored
from octavo.entrypoints.http.streaming import encode_json
from octavo.errors import RequestError

FILE = "file"
BATCH = "batch"
UPLOAD = "upload"  # a file that is still being uploaded
PIECE_BYTES = 1 << 18
_PIECES_AT_ONCE = 4
_BEGINNING_BYTES = 1024  # of a line that is too long
_LINES_A_TURN = 64  # read in a turn of the event loop: a piece may have 100,000
_BLANK_LINES = re.compile(rb"\s*\n")
_decode = msgspec.json.Decoder().decode


def new_file(filename: str, purpose: str, num_bytes: int, life_s: int | None = None) -> dict[str, Any]:
    """Return a new file object, which is deleted after `life_s` seconds if that is not None."""
    return {
        "id": f"file-{uuid.uuid4().hex}",
        "object": "file",
        "bytes": num_bytes,
        **lifetime(life_s),
        "filename": filename,
        "purpose": purpose,
        "status": "processed",
    }


def lifetime(life_s: int | None) -> dict[str, Any]:
    """Return the times of a file that is created now."""
    now = int(time.time())
    return {"created_at": now, "expires_at": None if life_s is None else now + life_s}


def find(database: Database, kind: str, id: str) -> Stored:
    """Return a stored object. Raises `RequestError` (404)."""
    stored = database.get(kind, id)
    if stored is None or (kind == FILE and _is_over(database, read(stored))):
        raise RequestError(f"There is no {kind} {id!r:.100}.", status=404, code="not_found")
    return stored


def read(stored: Stored) -> dict[str, Any]:
    found: dict[str, Any] = _decode(stored.body)
    return found


def write(
    database: Database, kind: str, value: dict[str, Any], *, is_owned: bool = False, needs_room: bool = True
) -> None:
    database.put(kind, value["id"], encode_json(value), is_owned=is_owned, needs_room=needs_room)


def _is_over(database: Database, file: dict[str, Any]) -> bool:
    """Return whether a file has expired. A file that a batch needs expires after the batch."""
    expires_at = file.get("expires_at")
    return expires_at is not None and expires_at <= time.time() and _user_of(database, file["id"]) is None


def _user_of(database: Database, file_id: str) -> str | None:
    """Return the id of a batch under way that needs a file; None if there is none."""
    batches = map(read, database.under_way(BATCH))
    files = ("input_file_id", "output_file_id", "error_file_id")
    return next((batch["id"] for batch in batches if file_id in [batch[name] for name in files]), None)


def delete_expired(database: Database) -> None:
    for stored in database.expired(FILE):
        if _is_over(database, read(stored)):
            database.delete(FILE, stored.id)


def begin_upload(database: Database, file: dict[str, Any]) -> None:
    """Begin to store an upload. Delete expired files, and unfinished uploads of dead servers, first."""
    delete_expired(database)
    for left in database.abandoned(UPLOAD):
        database.delete(UPLOAD, left.id)
    write(database, UPLOAD, file, is_owned=True)


def add_piece(database: Database, file_id: str, number: int, piece: bytes) -> None:
    database.beat()
    database.add_chunks(file_id, [(number, piece)])


def end_upload(database: Database, file: dict[str, Any]) -> None:
    """Store a file whose upload is complete."""
    database.forget(UPLOAD, file["id"])
    write(database, FILE, file)


def delete(database: Database, file_id: str) -> None:
    """Delete a file. Raises `RequestError` (404), and (409) while a batch needs the file."""
    find(database, FILE, file_id)
    if (batch_id := _user_of(database, file_id)) is not None:
        raise RequestError(
            f"{batch_id} is under way and needs this file; cancel it first.", status=409, code="file_in_use"
        )
    database.delete(FILE, file_id)


async def read_content(store: Store, file_id: str) -> AsyncIterator[bytes]:
    """Yield the content of a file in pieces. Raises `RequestError` (404), also if the file is deleted meanwhile."""
    after = -1

    def read(database: Database) -> list[tuple[int, bytes]]:
        find(database, FILE, file_id)  # the rest of a deleted file must not look like its end
        return database.chunks(file_id, after, _PIECES_AT_ONCE)

    while chunks := await store.run(read):
        after = chunks[-1][0]
        for _, data in chunks:
            yield data


async def read_lines(store: Store, file_id: str, max_bytes: int) -> AsyncIterator[tuple[int, bytes]]:
    """Yield the numbered lines of a file that are not blank; of a line longer than `max_bytes` only the beginning."""
    number, is_too_long = 0, False
    parts, num_bytes = list[bytes](), 0  # of the line that is being read
    async for piece in read_content(store, file_id):
        begin = 0
        while begin < len(piece):
            if not parts and not is_too_long and (blank := _BLANK_LINES.match(piece, begin)):
                begin = blank.end()
                continue
            end = piece.find(b"\n", begin) + 1 or len(piece)
            parts.append(piece[begin:end])
            num_bytes, begin = num_bytes + end - begin, end
            is_whole = parts[-1].endswith(b"\n")
            if num_bytes - is_whole > max_bytes and not is_too_long:
                yield number, b"".join(parts)[: min(max_bytes, _BEGINNING_BYTES)]
                number, is_too_long = number + 1, True
            if is_whole and not is_too_long and (line := b"".join(parts)).strip():
                yield number, line
                number += 1
                if number % _LINES_A_TURN == 0:
                    await asyncio.sleep(0)
            if is_whole or is_too_long:
                parts = []
            if is_whole:
                num_bytes, is_too_long = 0, False
    if (line := b"".join(parts)).strip():
        yield number, line + b"\n"
