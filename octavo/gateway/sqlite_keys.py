"""Keys in an SQLite file.

A write takes microseconds, as none waits for the disk, so the event loop does it. If another process has locked the
file, the write is tried again. Written data outlive the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from octavo.gateway.client_keys import DAY_S, LIMITS, MINUTE_S, name_taken
from octavo.gateway.key_store import Answer, KeyDatabase, KeyRow, LostError, Operation, UsageRow

CHECKPOINT_INTERVAL_S = 1.0  # between two times that the log of writes is moved into the file
_TRY_INTERVAL_S = 0.01
_LOCKED = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)
_SCHEMA = """
CREATE TABLE IF NOT EXISTS keys (id TEXT PRIMARY KEY, digest BLOB UNIQUE NOT NULL, settings TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS usage (
    key TEXT NOT NULL, day INTEGER NOT NULL, model TEXT NOT NULL, requests INTEGER NOT NULL DEFAULT 0,
    prompt_tokens INTEGER NOT NULL DEFAULT 0, completion_tokens INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (key, day, model)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS minutes (
    key TEXT PRIMARY KEY, minute INTEGER NOT NULL, requests INTEGER NOT NULL, tokens INTEGER NOT NULL
) WITHOUT ROWID;
"""
_KEY = """
SELECT id, settings, ifnull(sum(requests), 0), ifnull(sum(prompt_tokens), 0), ifnull(sum(completion_tokens), 0)
FROM keys LEFT JOIN usage ON usage.key = id WHERE {} GROUP BY id ORDER BY keys.rowid
"""
_FIND = "SELECT id, settings, 0, 0, 0 FROM keys WHERE digest = ?"  # each second for each key that is in use
_HAS_NAME = "SELECT 1 FROM keys WHERE json_extract(settings, '$.name') = ? AND id <> ?"
_OF_MINUTE = "SELECT requests, tokens FROM minutes WHERE key = ? AND minute = ?"
_OF_DAY = "SELECT ifnull(sum(requests), 0), ifnull(sum(prompt_tokens + completion_tokens), 0) FROM usage " \
          "WHERE key = ? AND day = ?"  # fmt: skip
_ADD_TO_DAY = """
INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET
    requests = requests + excluded.requests, prompt_tokens = prompt_tokens + excluded.prompt_tokens,
    completion_tokens = completion_tokens + excluded.completion_tokens
"""
# A request that is taken back may be of the minute before.
_ADD_TO_MINUTE = """
INSERT INTO minutes VALUES (?, ?, max(0, ?), ?) ON CONFLICT DO UPDATE SET
    requests = CASE minute WHEN excluded.minute THEN max(0, requests + ?) ELSE excluded.requests END,
    tokens = excluded.tokens + CASE minute WHEN excluded.minute THEN tokens ELSE 0 END,
    minute = excluded.minute
"""
_T = TypeVar("_T")


class SqliteKeys(KeyDatabase):
    """The database in a file, of one gateway."""

    is_shared = False

    def __init__(self, path: str) -> None:
        self.address = path
        self._database: sqlite3.Connection | None = None
        self._has_news = False  # whether the log has writes that are not in the file
        self._moving: asyncio.Task[None] | None = None

    async def prepare(self) -> None:
        await self._done(lambda _: None)

    async def close(self) -> None:
        if self._moving is not None:
            self._moving.cancel()
        if self._database is not None:
            self._database.close()
            self._database = None

    async def count(self, writer: str, number: int, now: float | None, operations: list[Operation]) -> list[Answer]:
        """As `KeyDatabase.count`. A batch without an answer was not counted, so numbers are not needed."""
        moment = time.time() if now is None else now

        def count_all(database: sqlite3.Connection) -> list[Answer]:
            database.execute("BEGIN IMMEDIATE")
            return [_count(database, moment, *operation) for operation in operations]

        answers = await self._done(count_all)
        self._has_news = True
        if self._moving is None or self._moving.done():
            self._moving = asyncio.ensure_future(self._move_log())
        return answers

    async def find(self, digest: bytes) -> KeyRow | None:
        return next(iter(await self._rows(_FIND, digest)), None)

    async def get(self, key_id: str) -> KeyRow | None:
        return next(iter(await self._rows(_KEY.format("id = ?"), key_id)), None)

    async def keys(self) -> list[KeyRow]:
        return await self._rows(_KEY.format("TRUE"))

    async def add(self, key_id: str, digest: bytes, settings: str, name: str) -> None:
        statement = "INSERT INTO keys (id, digest, settings) VALUES (?, ?, ?)"
        await self._changed(statement, (key_id, digest, settings), key_id, name)

    async def change(self, key_id: str, before: str, settings: str, new_name: str | None = None) -> bool:
        statement = "UPDATE keys SET settings = ? WHERE id = ? AND settings = ?"
        return bool(await self._changed(statement, (settings, key_id, before), key_id, new_name))

    async def delete(self, key_id: str) -> None:
        await self._rows("DELETE FROM keys WHERE id = ?", key_id)

    async def used(self, first_day: int, last_day: int) -> list[UsageRow]:
        def read() -> list[UsageRow]:
            """Return the rows. Runs in a thread, with a connection of its own: there may be millions."""
            with contextlib.closing(sqlite3.connect(self.address)) as database:
                statement = "SELECT * FROM usage WHERE day BETWEEN ? AND ?"
                return database.execute(statement, (first_day, last_day)).fetchall()

        try:
            return await asyncio.to_thread(read)
        except sqlite3.Error as error:
            raise LostError(str(error)) from None

    async def _changed(self, statement: str, values: tuple[Any, ...], key_id: str, name: str | None) -> int:
        """Return how many rows a statement has changed. Raises `RequestError` if the `name` is another key's."""

        def change(database: sqlite3.Connection) -> int:
            database.execute("BEGIN IMMEDIATE")
            if name is not None and database.execute(_HAS_NAME, (name, key_id)).fetchone():
                raise name_taken(name)
            return database.execute(statement, values).rowcount

        return await self._done(change)

    async def _rows(self, statement: str, *values: Any) -> list[Any]:
        return await self._done(lambda database: database.execute(statement, values).fetchall())

    async def _done(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        """Return the result of work on the file. It is done again while another process has locked the file."""
        while True:
            try:
                self._database = self._database or _connect(self.address)
                with self._database:  # ends a transaction
                    return work(self._database)
            except sqlite3.Error as error:
                # Errors that the module itself raises have no code.
                if getattr(error, "sqlite_errorcode", 0) & 0xFF not in _LOCKED:
                    raise LostError(str(error)) from None
            await asyncio.sleep(_TRY_INTERVAL_S)

    async def _move_log(self) -> None:
        while self._has_news:
            await asyncio.sleep(CHECKPOINT_INTERVAL_S)
            self._has_news = False
            await asyncio.to_thread(self.checkpoint)

    def checkpoint(self) -> None:
        """Move the log of writes into the file, in a thread: it waits for the disk."""
        with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(self.address)) as database:
            database.execute("PRAGMA wal_checkpoint(PASSIVE)")


def _connect(path: str) -> sqlite3.Connection:
    database = sqlite3.connect(path, isolation_level=None, timeout=0)  # `SqliteKeys` waits
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA synchronous=NORMAL")  # written data outlive the process
    database.execute("PRAGMA wal_autocheckpoint=0")  # `SqliteKeys.checkpoint` does it
    database.executescript(_SCHEMA)
    return database


def _count(
    database: sqlite3.Connection, moment: float, key_id: str, model: str, requests: int, prompt_tokens: int,
    completion_tokens: int, is_admission: bool,
) -> Answer:  # fmt: skip
    """Count an operation, or return why it is refused."""
    minute, day = int(moment // MINUTE_S), int(moment // DAY_S)
    if is_admission:
        row = database.execute("SELECT settings FROM keys WHERE id = ?", (key_id,)).fetchone()
        settings = {"is_enabled": False} if row is None else msgspec.json.decode(row[0])
        ends = settings.get("expires_at")
        if not settings.get("is_enabled", True) or (ends is not None and ends <= moment):
            return []
        of_minute = database.execute(_OF_MINUTE, (key_id, minute)).fetchone() or (0, 0)
        of_day = database.execute(_OF_DAY, (key_id, day)).fetchone()
        for name, used in zip(LIMITS, (*of_minute, *of_day), strict=True):
            limit = settings.get(name)
            if limit is not None and used >= limit:
                return [name, used, limit, moment]
    database.execute(_ADD_TO_DAY, (key_id, day, model, requests, prompt_tokens, completion_tokens))
    tokens = prompt_tokens + completion_tokens
    database.execute(_ADD_TO_MINUTE, (key_id, minute, requests, tokens, requests))
    return None
