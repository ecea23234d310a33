"""What the server keeps between requests: responses, stored chats, files, batches. One SQLite database, in memory or
in a file that several servers may share.

An object has a kind, an id, a JSON body, and an `extra` that is only read with it. Long contents are chunks beside it.
Work that is under way has an owner, a server that says every few seconds that it still lives; what a dead one has left
behind is known by its silence. All access is in one thread of its own, an operation a transaction.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from octavo.errors import ConfigError, RequestError

T = TypeVar("T")

BEAT_S = 2.0
DEAD_AFTER_S = 30.0  # without a beat
_BUSY_S = 10.0  # that an operation waits for another server's
_VERSION = 1  # of the tables
_PAGE_BYTES = 4096
_EVICTED = ("response", "chat")  # kinds of which the oldest make room
_EVICTED_AT_ONCE = 16
_TABLES = """
CREATE TABLE objects (
  number INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, id TEXT NOT NULL, created REAL NOT NULL,
  body BLOB NOT NULL, extra BLOB, owner TEXT, wants_cancel INTEGER NOT NULL DEFAULT 0
);
CREATE UNIQUE INDEX by_id ON objects (kind, id);
CREATE INDEX by_owner ON objects (owner) WHERE owner IS NOT NULL;
CREATE TABLE chunks (id TEXT NOT NULL, number INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY (id, number))
  WITHOUT ROWID;
CREATE TABLE owners (owner TEXT PRIMARY KEY, beat REAL NOT NULL) WITHOUT ROWID;
"""


class StoreError(RequestError):
    """The store has no room, or its disk has none, or it cannot be read. Nothing of the operation was kept."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=503, code="store_failed")


@dataclass(frozen=True, slots=True)
class Stored:
    """An object as it was read."""

    id: str
    body: bytes
    extra: bytes | None
    is_abandoned: bool  # it was under way, and its server is gone


class Database:
    """The objects. Of one thread; `Store` is for the event loop. `max_bytes` bounds what it holds."""

    def __init__(self, path: str | None, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.owner = uuid.uuid4().hex
        try:
            if path is not None:  # SQLite's own would be readable to all; its side files have the mode of this one
                os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            self._db = sqlite3.connect(
                path or ":memory:", timeout=_BUSY_S, isolation_level=None, check_same_thread=False
            )
            self._db.execute("PRAGMA journal_mode = WAL")  # readers and a writer at once; a kill loses nothing written
            self._db.execute("PRAGMA synchronous = NORMAL")
            with self.transaction():
                (version,) = self._db.execute("PRAGMA user_version").fetchone()
                if version == 0:
                    for statement in _TABLES.split(";"):
                        self._db.execute(statement)
                    self._db.execute(f"PRAGMA user_version = {_VERSION}")
                elif version != _VERSION:
                    raise ConfigError(f"--response-store {path} is of another version of Octavo; give another file.")
        except (sqlite3.Error, OSError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"--response-store {path} cannot be used: {why}.") from None

    def close(self) -> None:
        """Give the file back."""
        self._db.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """All of it or nothing. Raises `StoreError`."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # SQLite itself may have rolled it back
                    self._db.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise StoreError(f"The server's store of responses failed: {error}.") from None

    def put(self, kind: str, id: str, body: bytes, extra: bytes | None = None, *, is_owned: bool = False) -> None:
        """A new object, or another body for one that is there; `extra` stays if none is given."""
        self._make_room(len(body) + len(extra or b""))
        self._db.execute(
            "INSERT INTO objects (kind, id, created, body, extra, owner) VALUES (?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (kind, id) DO UPDATE SET body = excluded.body, extra = coalesce(excluded.extra, extra), "
            "owner = excluded.owner",
            (kind, id, time.time(), body, extra, self.owner if is_owned else None),
        )
        if is_owned:
            self.beat()

    def get(self, kind: str, id: str) -> Stored | None:
        """The object, if it is there."""
        found = self._db.execute(f"{_SELECT} WHERE kind = ? AND id = ?", (time.time(), kind, id)).fetchone()
        return None if found is None else _stored(found)

    def page(self, kind: str, *, after: str | None, limit: int, is_ascending: bool) -> list[Stored]:
        """Up to `limit` objects in the order of their making, those after the one with the id `after`."""
        sign, order = (">", "ASC") if is_ascending else ("<", "DESC")
        where, values = "kind = ?", [kind]
        if after is not None:
            where += f" AND number {sign} (SELECT number FROM objects WHERE kind = ? AND id = ?)"
            values += [kind, after]
        rows = self._db.execute(
            f"{_SELECT} WHERE {where} ORDER BY number {order} LIMIT ?", (time.time(), *values, limit)
        ).fetchall()
        return [_stored(row) for row in rows]

    def delete(self, kind: str, id: str) -> bool:
        """Whether there was one."""
        self._db.execute("DELETE FROM chunks WHERE id = ?", (id,))
        return self.forget(kind, id)

    def forget(self, kind: str, id: str) -> bool:
        """Delete an object and leave its content, which another one has. Whether there was one."""
        return self._db.execute("DELETE FROM objects WHERE kind = ? AND id = ?", (kind, id)).rowcount > 0

    def take(self, kind: str, id: str) -> bool:
        """Make this server the owner of work that a dead one has left behind; False if another has been quicker."""
        changed = self._db.execute(
            "UPDATE objects SET owner = ? WHERE kind = ? AND id = ? AND owner IS NOT NULL AND owner NOT IN "
            "(SELECT owner FROM owners WHERE beat > ?)",
            (self.owner, kind, id, time.time() - DEAD_AFTER_S),
        ).rowcount
        self.beat()
        return changed > 0

    def ask_to_cancel(self, kind: str, id: str) -> None:
        """Let the owner know, with its next beat."""
        self._db.execute("UPDATE objects SET wants_cancel = 1 WHERE kind = ? AND id = ?", (kind, id))

    def beat(self) -> list[str]:
        """This server lives. Returns the ids of its work that somebody wants to be cancelled."""
        now = time.time()
        self._db.execute("INSERT OR REPLACE INTO owners VALUES (?, ?)", (self.owner, now))
        self._db.execute("DELETE FROM owners WHERE beat < ?", (now - 100 * DEAD_AFTER_S,))
        rows = self._db.execute("SELECT id FROM objects WHERE owner = ? AND wants_cancel", (self.owner,)).fetchall()
        return [row[0] for row in rows]

    def add_chunks(self, id: str, chunks: Iterable[tuple[int, bytes]]) -> None:
        """Numbered parts of an object's content; one that is there stays."""
        for number, data in chunks:
            self._make_room(len(data))
            self._db.execute("INSERT OR IGNORE INTO chunks VALUES (?, ?, ?)", (id, number, data))

    def chunks(self, id: str, after: int, limit: int) -> list[tuple[int, bytes]]:
        """Up to `limit` of the chunks whose numbers are greater than `after`, in their order."""
        return self._db.execute(
            "SELECT number, data FROM chunks WHERE id = ? AND number > ? ORDER BY number LIMIT ?", (id, after, limit)
        ).fetchall()

    def chunk_numbers(self, id: str) -> list[int]:
        """Of the chunks that are there."""
        return [row[0] for row in self._db.execute("SELECT number FROM chunks WHERE id = ?", (id,))]

    def num_chunk_bytes(self, id: str) -> int:
        """Of all chunks together."""
        (found,) = self._db.execute("SELECT coalesce(sum(length(data)), 0) FROM chunks WHERE id = ?", (id,)).fetchone()
        return int(found)

    def abandoned(self, kind: str) -> list[Stored]:
        """Work of servers that have ended."""
        since = time.time() - DEAD_AFTER_S
        rows = self._db.execute(
            f"{_SELECT} WHERE kind = ? AND owner IS NOT NULL AND owner NOT IN "
            "(SELECT owner FROM owners WHERE beat > ?)",
            (time.time(), kind, since),
        ).fetchall()
        return [_stored(row) for row in rows]

    def under_way(self, kind: str) -> list[Stored]:
        """Work that has an owner, dead or alive."""
        rows = self._db.execute(f"{_SELECT} WHERE kind = ? AND owner IS NOT NULL", (time.time(), kind)).fetchall()
        return [_stored(row) for row in rows]

    def leave(self) -> None:
        """This server ends: others may take over what it was at."""
        self._db.execute("DELETE FROM owners WHERE owner = ?", (self.owner,))

    def _make_room(self, num_bytes: int) -> None:
        """Raises `StoreError` if the oldest responses and chats are not enough."""
        while self._num_bytes() + num_bytes > self._max_bytes:
            marks = ", ".join("?" * len(_EVICTED))
            rows = self._db.execute(
                f"SELECT kind, id FROM objects WHERE kind IN ({marks}) AND owner IS NULL ORDER BY number LIMIT ?",
                (*_EVICTED, _EVICTED_AT_ONCE),
            ).fetchall()
            if not rows:
                raise StoreError(
                    f"The server's store has no room for {num_bytes} bytes more; it holds {self._max_bytes} at most "
                    "(--response-store-bytes). Delete files and batches."
                )
            for kind, id in rows:
                self.delete(kind, id)

    def _num_bytes(self) -> int:
        (num_pages,) = self._db.execute("PRAGMA page_count").fetchone()
        (num_free,) = self._db.execute("PRAGMA freelist_count").fetchone()
        return int((num_pages - num_free) * _PAGE_BYTES)


_SELECT = (
    "SELECT id, body, extra, owner IS NOT NULL AND owner NOT IN "
    f"(SELECT owner FROM owners WHERE beat > ? - {DEAD_AFTER_S}) FROM objects"
)


def _stored(row: Sequence[Any]) -> Stored:
    id, body, extra, is_abandoned = row
    return Stored(id, body, extra, bool(is_abandoned))


class Store:
    """A database for the event loop."""

    def __init__(self, path: str | None, max_bytes: int) -> None:
        self.database = Database(path, max_bytes)
        self._thread = ThreadPoolExecutor(1, "octavo-store")

    async def run(self, work: Callable[[Database], T]) -> T:
        """The result of `work`, which is one transaction. Raises `StoreError`, and whatever `work` does."""

        def transact() -> T:
            with self.database.transaction():
                return work(self.database)

        # Shielded: a client that hangs up does not stop it half-way, and the thread's next work finds it ended.
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, transact))

    def close(self) -> None:
        """Wait for what is under way, and give the file back."""
        with contextlib.suppress(StoreError):
            self._thread.submit(self._leave).result()
        self._thread.shutdown()
        self.database.close()

    def _leave(self) -> None:
        with self.database.transaction():
            self.database.leave()


def check_store(path: str, max_bytes: int) -> None:
    """Raise `ConfigError` if there can be no store at `path`."""
    Database(path, max_bytes).close()
