"""Objects that the server keeps between requests: responses, conversations, stored chats, files, batches, and
tokens of answers. They are in one SQLite database, in memory or in a file that several servers may share.

An object has a kind, an id, a JSON body, and an optional `extra`. Long contents are separate chunks. Unfinished work
has an owner, a server that reports every few seconds that it is alive; work of a silent server is abandoned. All access
is in one separate thread; each operation is a transaction.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from octavo.errors import ConfigError, RequestError

T = TypeVar("T")
logger = logging.getLogger("octavo.server")

BEAT_S = 2.0
DEAD_AFTER_S = 30.0  # seconds without a beat
_BUSY_S = 10.0  # time that an operation waits for another server's operation
_VERSION = 1  # version of the tables
_PAGE_BYTES = 4096
_EVICTED = "kind IN ('response', 'chat', 'conversation') AND owner IS NULL"  # the oldest are deleted to make room
_EVICTED_AT_ONCE = 16
_MAX_POSTED_BYTES = 64 << 20  # of posted work that waits
_TABLES = """
CREATE TABLE objects (
  number INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, id TEXT NOT NULL, created REAL NOT NULL,
  body BLOB NOT NULL, extra BLOB, owner TEXT, wants_cancel INTEGER NOT NULL DEFAULT 0
);
CREATE UNIQUE INDEX by_id ON objects (kind, id);
CREATE INDEX answers ON objects (kind) WHERE kind = 'answer';
CREATE INDEX by_owner ON objects (owner) WHERE owner IS NOT NULL;
CREATE TABLE chunks (id TEXT NOT NULL, number INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY (id, number))
  WITHOUT ROWID;
CREATE TABLE owners (owner TEXT PRIMARY KEY, beat REAL NOT NULL) WITHOUT ROWID;
"""


class StoreError(RequestError):
    """The store or its disk is full, or the store cannot be read. The operation had no effect."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=503, code="store_failed")


class StoreFullError(StoreError):
    """The store has no room, and will have none until something is deleted."""


@dataclass(frozen=True, slots=True)
class Stored:
    """An object read from the store."""

    id: str
    body: bytes
    extra: bytes | None
    is_abandoned: bool  # unfinished, and its server is dead


class Database:
    """The database of objects, of up to `max_bytes`. Only one thread may use it; `Store` is for the event loop."""

    def __init__(self, path: str | None, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.owner = uuid.uuid4().hex
        try:
            if path is not None:  # SQLite would create it readable for all; its side files get the mode of this file
                os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            self._db = sqlite3.connect(
                path or ":memory:", timeout=_BUSY_S, isolation_level=None, check_same_thread=False
            )
            self._use_write_ahead_log()
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

    def _use_write_ahead_log(self) -> None:
        """Let readers and a writer work at once; a kill loses no written data. SQLite itself does not wait here while
        another process opens the file."""
        end = time.monotonic() + _BUSY_S
        while True:
            try:
                self._db.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > end:
                    raise
            time.sleep(0.01)

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Run the block as one transaction: all of its changes or none. Raises `StoreError`."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # SQLite itself may have rolled back already
                    self._db.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise StoreError(f"The server's store of responses failed: {error}.") from None

    def put(
        self, kind: str, id: str, body: bytes, extra: bytes | None = None, *, is_owned: bool = False,
        needs_room: bool = True,
    ) -> None:  # fmt: skip
        """Store a new object, or replace the body of an existing one, and its `extra` if one is given. With
        `needs_room` false even a full store takes the object."""
        if needs_room:
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
        """Return the object, or None."""
        found = self._db.execute(f"{_SELECT} WHERE kind = ? AND id = ?", (time.time(), kind, id)).fetchone()
        return None if found is None else _stored(found)

    def page(
        self, kind: str, *, after: str | None, limit: int, is_ascending: bool, fields: Mapping[str, str] | None = None
    ) -> list[Stored]:
        """Return up to `limit` objects in the order of creation, beginning after the object with the id `after`; only
        those whose bodies have these `fields`. Raises `RequestError` if there is no such object: an empty page would
        look like the end of the list."""
        sign, order = (">", "ASC") if is_ascending else ("<", "DESC")
        where, values = "kind = ?", [kind]
        for name, value in (fields or {}).items():
            where += f" AND {_FIELD} = ?"
            values += [f"$.{name}", value]
        if after is not None:
            if self.get(kind, after) is None:
                raise RequestError(f"There is no {after!r:.100} in this list.", param="after")
            where += f" AND number {sign} (SELECT number FROM objects WHERE kind = ? AND id = ?)"
            values += [kind, after]
        rows = self._db.execute(
            f"{_SELECT} WHERE {where} ORDER BY number {order} LIMIT ?", (time.time(), *values, limit)
        ).fetchall()
        return [_stored(row) for row in rows]

    def expired(self, kind: str) -> list[Stored]:
        """Return the objects whose field `expires_at` is over."""
        now = time.time()
        where = f"kind = ? AND {_FIELD} <= ?"
        return [
            _stored(row)
            for row in self._db.execute(f"{_SELECT} WHERE {where}", (now, kind, "$.expires_at", now)).fetchall()
        ]

    def delete(self, kind: str, id: str) -> bool:
        """Delete an object and its content. Return whether it existed."""
        self._db.execute("DELETE FROM chunks WHERE id = ?", (id,))
        return self.forget(kind, id)

    def forget(self, kind: str, id: str) -> bool:
        """Delete an object but not its content, which another object has too. Return whether it existed."""
        return self._db.execute("DELETE FROM objects WHERE kind = ? AND id = ?", (kind, id)).rowcount > 0

    def take(self, kind: str, id: str) -> bool:
        """Make this server the owner of a dead server's work. Return False if another server was quicker."""
        changed = self._db.execute(
            "UPDATE objects SET owner = ? WHERE kind = ? AND id = ? AND owner IS NOT NULL AND owner NOT IN "
            "(SELECT owner FROM owners WHERE beat > ?)",
            (self.owner, kind, id, time.time() - DEAD_AFTER_S),
        ).rowcount
        self.beat()
        return changed > 0

    def owns(self, kind: str, id: str) -> bool:
        """Return whether an object is this server's unfinished work."""
        row = self._db.execute("SELECT owner FROM objects WHERE kind = ? AND id = ?", (kind, id)).fetchone()
        return row is not None and row[0] == self.owner

    def ask_to_cancel(self, kind: str, id: str) -> None:
        """Ask the owner to cancel its work; the owner sees it with its next beat."""
        self._db.execute("UPDATE objects SET wants_cancel = 1 WHERE kind = ? AND id = ?", (kind, id))

    def beat(self) -> list[str]:
        """Record that this server is alive. Return the ids of its work that should be cancelled."""
        now = time.time()
        self._db.execute("INSERT OR REPLACE INTO owners VALUES (?, ?)", (self.owner, now))
        self._db.execute("DELETE FROM owners WHERE beat < ?", (now - 100 * DEAD_AFTER_S,))
        rows = self._db.execute("SELECT id FROM objects WHERE owner = ? AND wants_cancel", (self.owner,)).fetchall()
        return [row[0] for row in rows]

    def add_chunks(self, id: str, chunks: Iterable[tuple[int, bytes]]) -> None:
        """Add numbered chunks to an object's content. Existing chunks stay as they are."""
        for number, data in chunks:
            self._make_room(len(data))
            self._db.execute("INSERT OR IGNORE INTO chunks VALUES (?, ?, ?)", (id, number, data))

    def chunks(self, id: str, after: int, limit: int) -> list[tuple[int, bytes]]:
        """Return up to `limit` chunks with numbers above `after`, in order."""
        return self._db.execute(
            "SELECT number, data FROM chunks WHERE id = ? AND number > ? ORDER BY number LIMIT ?", (id, after, limit)
        ).fetchall()

    def chunk_numbers(self, id: str) -> list[int]:
        """Return the numbers of an object's chunks."""
        return [row[0] for row in self._db.execute("SELECT number FROM chunks WHERE id = ?", (id,))]

    def num_chunk_bytes(self, id: str) -> int:
        """Return the bytes of an object's chunks together."""
        (found,) = self._db.execute("SELECT coalesce(sum(length(data)), 0) FROM chunks WHERE id = ?", (id,)).fetchone()
        return int(found)

    def abandoned(self, kind: str) -> list[Stored]:
        """Return the unfinished work of dead servers."""
        since = time.time() - DEAD_AFTER_S
        rows = self._db.execute(
            f"{_SELECT} WHERE kind = ? AND owner IS NOT NULL AND owner NOT IN "
            "(SELECT owner FROM owners WHERE beat > ?)",
            (time.time(), kind, since),
        ).fetchall()
        return [_stored(row) for row in rows]

    def under_way(self, kind: str) -> list[Stored]:
        """Return the unfinished work of all servers, dead or alive."""
        rows = self._db.execute(f"{_SELECT} WHERE kind = ? AND owner IS NOT NULL", (time.time(), kind)).fetchall()
        return [_stored(row) for row in rows]

    def leave(self) -> None:
        """Record that this server ends, so that others may take over its work."""
        self._db.execute("DELETE FROM owners WHERE owner = ?", (self.owner,))

    def _make_room(self, num_bytes: int) -> None:
        """Delete the oldest tokens of answers, then the oldest responses, conversations and chats, until `num_bytes`
        fit. Raises `StoreFullError` if they are not enough."""
        while self._num_bytes() + num_bytes > self._max_bytes:
            rows = self._oldest("kind = 'answer'") or self._oldest(_EVICTED)
            if not rows:
                raise StoreFullError(
                    f"The server's store has no room for {num_bytes} bytes more; it holds {self._max_bytes} at most "
                    "(--response-store-bytes). Delete files and batches."
                )
            for kind, id in rows:
                self.delete(kind, id)

    def _oldest(self, which: str) -> list[tuple[str, str]]:
        """Return kinds and ids of the oldest objects that the SQL condition `which` chooses."""
        return self._db.execute(
            f"SELECT kind, id FROM objects WHERE {which} ORDER BY number LIMIT {_EVICTED_AT_ONCE}"
        ).fetchall()

    def _num_bytes(self) -> int:
        (num_pages,) = self._db.execute("PRAGMA page_count").fetchone()
        (num_free,) = self._db.execute("PRAGMA freelist_count").fetchone()
        return int((num_pages - num_free) * _PAGE_BYTES)


_FIELD = "json_extract(CAST(body AS TEXT), ?)"
_SELECT = (
    "SELECT id, body, extra, owner IS NOT NULL AND owner NOT IN "
    f"(SELECT owner FROM owners WHERE beat > ? - {DEAD_AFTER_S}) FROM objects"
)


def _stored(row: Sequence[Any]) -> Stored:
    id, body, extra, is_abandoned = row
    return Stored(id, body, extra, bool(is_abandoned))


class Store:
    """Gives the event loop access to a database, which has its own thread."""

    def __init__(self, path: str | None, max_bytes: int) -> None:
        self.database = Database(path, max_bytes)
        self._thread = ThreadPoolExecutor(1, "octavo-store")
        self._lock = threading.Lock()  # of the two below
        self._num_posted_bytes, self._has_dropped = 0, False

    async def run(self, work: Callable[[Database], T]) -> T:
        """Run `work` as one transaction and return its result. Raises `StoreError`, and the errors of `work`."""

        # Shielded: a client that hangs up does not stop a transaction half-way, and the thread's next work finds it
        # complete.
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, self._transact, work))

    def post(self, work: Callable[[Database], None], num_bytes: int) -> None:
        """Run `work`, which writes `num_bytes`, as one transaction later, or never if too much waits already. Its
        errors go to the log. Any thread may call it."""
        with self._lock:
            had_dropped, self._has_dropped = self._has_dropped, self._num_posted_bytes + num_bytes > _MAX_POSTED_BYTES
            if self._has_dropped:
                if not had_dropped:
                    logger.warning("the store is slow; tokens of answers are not written to it until it has caught up")
                return
            self._num_posted_bytes += num_bytes

        def transact() -> None:
            try:
                self._transact(work)
            except StoreError as error:
                logger.warning("%s", error)
            finally:
                with self._lock:
                    self._num_posted_bytes -= num_bytes

        self._thread.submit(transact)

    def _transact(self, work: Callable[[Database], T]) -> T:
        with self.database.transaction():
            return work(self.database)

    def close(self) -> None:
        """Wait for running operations and close the database."""
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
