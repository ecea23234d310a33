"""Keys in an SQLite file, of one gateway. All of them are in memory, too.

A write takes microseconds, as none waits for the disk, so the event loop does it. If another process has locked the
file, the write is tried again. Written data outlive the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import msgspec

from octavo.errors import ConfigError, RequestError
from octavo.gateway.key_store import (
    DAY_S,
    LIMITS,
    MINUTE_S,
    Key,
    KeySettings,
    KeyStore,
    OnLoss,
    digest_of,
    limit_error,
    no_key,
    not_counted,
)

logger = logging.getLogger("octavo.gateway")

CHECKPOINT_INTERVAL_S = 1.0  # between two times that the log of writes is moved into the file
LOCK_WAIT_S = 0.2  # for another process that has locked the file
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


# Requests, prompt tokens and completion tokens, by key id and model.
_Uses = dict[tuple[str, str], tuple[int, int, int]]
_T = TypeVar("_T")


class _Window:
    """Requests and tokens of a minute or a day."""

    __slots__ = ("number", "requests", "seconds", "tokens")

    def __init__(self, seconds: int) -> None:
        self.seconds, self.number, self.requests, self.tokens = seconds, -1, 0, 0

    def add(self, now: float, requests: int, tokens: int) -> None:
        self.at(now)
        self.requests = max(0, self.requests + requests)  # a use that is taken back may be of the last window
        self.tokens += tokens

    def at(self, now: float) -> _Window:
        """Return the window itself, empty if the time is another minute or day."""
        if (number := int(now // self.seconds)) != self.number:
            self.number, self.requests, self.tokens = number, 0, 0
        return self


class _Windows:
    """A key's windows."""

    def __init__(self) -> None:
        self.minute, self.day = _Window(MINUTE_S), _Window(DAY_S)


class SqliteKeys(KeyStore):
    """The keys of a file."""

    def __init__(self, path: str, on_loss: OnLoss = "refuse", now: Callable[[], float] = time.time) -> None:
        super().__init__(on_loss, now)
        self._path = path
        self._has_news = False  # whether uses were written since the last `checkpoint`
        self._unwritten: _Uses = {}  # from the last writes that failed; a new one after each write
        self._keys: dict[bytes, Key] = {}  # by digest
        self._windows: dict[str, _Windows] = {}  # by id
        self._moving: asyncio.Task[None] | None = None

    async def open(self) -> None:
        try:
            self._database = sqlite3.connect(self._path, isolation_level=None, timeout=LOCK_WAIT_S)
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=NORMAL")  # written data outlive the process
            self._database.execute("PRAGMA wal_autocheckpoint=0")  # `checkpoint` does it
            self._database.executescript(_SCHEMA)
            self._keys = {bytes(digest): key for digest, key in self._read()}
            self._database.execute("PRAGMA busy_timeout=0")  # `_unlocked` waits
        except (sqlite3.Error, msgspec.DecodeError) as error:
            raise ConfigError(f"--keys {self._path} cannot be used: {error}.") from None
        self._moving = asyncio.ensure_future(self._move_log())

    async def close(self) -> None:
        if self._moving is not None:
            self._moving.cancel()
        with contextlib.suppress(sqlite3.Error):
            await _unlocked(self._write_uses)
        if self._unwritten:
            logger.error("%s cannot be written: uses that were to be written are lost", self._path)
        self._database.close()

    async def _move_log(self) -> None:
        while True:
            await asyncio.sleep(CHECKPOINT_INTERVAL_S)
            with contextlib.suppress(sqlite3.Error):
                self._write_uses()
            if self._has_news:
                await asyncio.to_thread(self.checkpoint)

    def checkpoint(self) -> None:
        """Move the log of writes into the file, in a thread: it waits for the disk."""
        self._has_news = False
        with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(self._path)) as database:
            database.execute("PRAGMA wal_checkpoint(PASSIVE)")

    async def find(self, secret: bytes) -> Key | None:
        return self._keys.get(digest_of(secret))

    async def get(self, key_id: str) -> Key:
        found = next((key for key in self._keys.values() if key.id == key_id), None)
        if found is None:
            raise no_key(key_id)
        return found

    async def keys(self) -> list[Key]:
        return list(self._keys.values())

    def counted(self) -> Iterable[Key]:
        return self._keys.values()

    async def add(self, key: Key, digest: bytes) -> None:
        await self._execute(
            "INSERT INTO keys (id, digest, settings) VALUES (?, ?, ?)", (key.id, digest, _written(key.settings))
        )
        self._keys[digest] = key

    async def change(self, key: Key, settings: KeySettings) -> bool:
        before = key.settings

        def write() -> bool | None:  # None: there is no such key
            if key.settings != before:  # another request changed it while this one waited
                return False
            statement = "UPDATE keys SET settings = ? WHERE id = ?"
            if not self._database.execute(statement, (_written(settings), key.id)).rowcount:
                return None
            key.settings = settings
            return True

        is_changed = await self._answer(write)
        if is_changed is None:
            raise no_key(key.id)
        return is_changed

    async def delete(self, key: Key) -> None:
        await self._execute("DELETE FROM keys WHERE id = ?", (key.id,))
        self._keys = {digest: other for digest, other in self._keys.items() if other is not key}
        self._windows.pop(key.id, None)

    async def admit(self, key: Key, model: str) -> None:
        now, windows = self._now(), self._windows_of(key)
        for name in LIMITS:
            what, _, per = name.partition("_per_")
            limit, used = getattr(key.settings, name), getattr(getattr(windows, per).at(now), what)
            if limit is not None and used >= limit:
                raise limit_error(key.settings.name, name, used, limit, now)
        if not await self._use(key, model, 1, 0, 0, is_sure=self.on_loss == "admit"):
            raise not_counted()

    async def add_tokens(self, key: Key, model: str, prompt_tokens: int, completion_tokens: int) -> None:
        await self._use(key, model, 0, prompt_tokens, completion_tokens, is_sure=True)

    async def used(self, first_day: int, last_day: int) -> list[tuple[str, int, str, int, int, int]]:
        def read() -> list[tuple[str, int, str, int, int, int]]:
            """Return the rows. Runs in a thread, with a connection of its own: there may be millions."""
            with contextlib.closing(sqlite3.connect(self._path, timeout=LOCK_WAIT_S)) as database:
                return database.execute("SELECT * FROM usage WHERE day BETWEEN ? AND ?", days).fetchall()

        days = first_day, last_day
        try:
            return await asyncio.to_thread(read)
        except sqlite3.Error as error:
            raise _failed(error) from None

    async def _use(
        self, key: Key, model: str, requests: int, prompt_tokens: int, completion_tokens: int, *, is_sure: bool
    ) -> bool:
        """Count a use at once, so that limits hold while the write waits. Return whether it stays counted. A use that
        cannot be written is taken back; with `is_sure` it is written later."""
        self._count(key, model, requests, prompt_tokens, completion_tokens)
        uses, is_kept = self._unwritten, True

        def write() -> None:
            if uses is self._unwritten:  # else another request has written this one's use
                self._write_uses()

        try:
            await _unlocked(write)
        except sqlite3.Error as error:
            then = "is written later" if is_sure else "is refused"
            logger.error("what the key %s uses cannot be written, and %s: %s", key.settings.name, then, error)
            if not is_sure:
                self._count(key, model, -requests, -prompt_tokens, -completion_tokens)
                is_kept = False
        finally:  # a use whose client leaves meanwhile is written too
            if is_kept:
                key.add(requests, prompt_tokens, completion_tokens)  # only now, as counters of Prometheus never go down
        return is_kept

    def _count(self, key: Key, model: str, requests: int, prompt_tokens: int, completion_tokens: int) -> None:
        """Add a use to the key's windows and to the next write."""
        before = self._unwritten.pop((key.id, model), (0, 0, 0))
        use = before[0] + requests, before[1] + prompt_tokens, before[2] + completion_tokens
        if any(use):
            self._unwritten[key.id, model] = use
        now, windows = self._now(), self._windows_of(key)
        for window in (windows.minute, windows.day):
            window.add(now, requests, prompt_tokens + completion_tokens)

    def _write_uses(self) -> None:
        """Write all unwritten uses, or none on an error."""
        if not self._unwritten:
            return
        now = self._now()
        day, minute = int(now // DAY_S), int(now // MINUTE_S)
        self._database.execute("BEGIN")
        try:
            for (key_id, model), (requests, prompt_tokens, completion_tokens) in self._unwritten.items():
                self._database.execute(
                    "INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
                    "requests = requests + excluded.requests, prompt_tokens = prompt_tokens + excluded.prompt_tokens, "
                    "completion_tokens = completion_tokens + excluded.completion_tokens",
                    (key_id, day, model, requests, prompt_tokens, completion_tokens),
                )
                self._database.execute(
                    "INSERT INTO minutes VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
                    "requests = excluded.requests + CASE minute WHEN excluded.minute THEN requests ELSE 0 END, "
                    "tokens = excluded.tokens + CASE minute WHEN excluded.minute THEN tokens ELSE 0 END, "
                    "minute = excluded.minute",
                    (key_id, minute, requests, prompt_tokens + completion_tokens),
                )
            self._database.execute("COMMIT")
        except sqlite3.Error:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise
        self._has_news = True
        self._unwritten = {}

    def _windows_of(self, key: Key) -> _Windows:
        return self._windows.setdefault(key.id, _Windows())

    def _read(self) -> Iterator[tuple[bytes, Key]]:
        """Yield the keys of the file and their digests."""
        now = self._now()
        today = int(now // DAY_S)
        for key_id, digest, settings in self._database.execute("SELECT id, digest, settings FROM keys").fetchall():
            key = Key(key_id, msgspec.json.decode(settings, type=KeySettings))
            windows = self._windows_of(key)
            totals = "SELECT sum(requests), sum(prompt_tokens), sum(completion_tokens) FROM usage WHERE key = ?"
            found = self._database.execute(totals, (key_id,)).fetchone()
            key.num_requests, key.num_prompt_tokens, key.num_completion_tokens = (one or 0 for one in found)
            requests, *tokens = self._database.execute(totals + " AND day = ?", (key_id, today)).fetchone()
            windows.day.add(now, requests or 0, sum(one or 0 for one in tokens))
            minute = "SELECT requests, tokens FROM minutes WHERE key = ? AND minute = ?"
            row = self._database.execute(minute, (key_id, int(now // MINUTE_S))).fetchone()
            windows.minute.add(now, *(row or (0, 0)))
            yield digest, key

    async def _execute(self, statement: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        return await self._answer(lambda: self._database.execute(statement, values).fetchall())

    async def _answer(self, work: Callable[[], _T]) -> _T:
        try:
            return await _unlocked(work)
        except sqlite3.Error as error:
            raise _failed(error) from None


def _failed(error: sqlite3.Error) -> RequestError:
    return RequestError(f"the file of keys failed: {error}.", status=503, code="keys_unavailable")


async def _unlocked(work: Callable[[], _T]) -> _T:
    """Return the result of work on the file, which is done again while another process has locked the file. Raises
    `sqlite3.Error`, for a lock after `LOCK_WAIT_S`."""
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            return work()
        except sqlite3.OperationalError as error:
            # Errors that the module itself raises have no code.
            if getattr(error, "sqlite_errorcode", 0) & 0xFF not in _LOCKED or time.monotonic() >= deadline:
                raise
        await asyncio.sleep(_TRY_INTERVAL_S)


def _written(settings: KeySettings) -> str:
    return msgspec.json.encode(settings).decode()
