"""Clients' keys in an SQLite file, with their limits and what they have used.

Only digests of keys are kept. Each request is in the file before a replica gets it, and its tokens before the client
gets the end of its answer: a process that is killed loses no count. Windows of limits are minutes and days of UTC.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from octavo.errors import ConfigError, RequestError

logger = logging.getLogger("octavo.gateway")

MINUTE_S, DAY_S = 60, 86_400
_Limit = Annotated[int, Meta(ge=0)] | None
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


class KeySettings(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What an operator says about a key. Limits are of requests and of tokens, prompts and answers together."""

    name: Annotated[str, Meta(min_length=1, max_length=100)]
    models: list[str] | None = None  # names or aliases; None: all
    expires_at: float | None = None  # seconds since 1970; None: never
    is_enabled: bool = True
    priority: int | None = None  # passed to replicas, whose --scheduling-policy is priority
    requests_per_minute: _Limit = None
    tokens_per_minute: _Limit = None
    requests_per_day: _Limit = None
    tokens_per_day: _Limit = None


class _Window:
    """Requests and tokens of a minute or a day."""

    __slots__ = ("number", "requests", "seconds", "tokens")

    def __init__(self, seconds: int) -> None:
        self.seconds, self.number, self.requests, self.tokens = seconds, -1, 0, 0

    def add(self, now: float, requests: int, tokens: int) -> None:
        self.at(now)
        self.requests += requests
        self.tokens += tokens

    def at(self, now: float) -> _Window:
        """Return the window itself, empty if the time is another minute or day."""
        if (number := int(now // self.seconds)) != self.number:
            self.number, self.requests, self.tokens = number, 0, 0
        return self

    def rest_s(self, now: float) -> int:
        """Return the seconds until the next one."""
        return max(1, int((self.number + 1) * self.seconds - now) + 1)


class Key:
    """A key and what it has used."""

    def __init__(self, key_id: str, settings: KeySettings) -> None:
        self.id, self.settings = key_id, settings
        self.minute, self.day = _Window(MINUTE_S), _Window(DAY_S)
        self.num_requests = self.num_prompt_tokens = self.num_completion_tokens = 0  # ever

    def may_use(self, names: set[str]) -> bool:
        """Return whether the key is for a model with these names."""
        return self.settings.models is None or not names.isdisjoint(self.settings.models)


class KeyStore:
    """The keys of a file. `now` is the time in seconds since 1970."""

    def __init__(self, path: str, now: Callable[[], float] = time.time) -> None:
        """Raises `ConfigError`."""
        self._path, self._now = path, now
        self.has_news = False  # uses were written since the last `checkpoint`
        self._unwritten: list[tuple[Key, str, int, int, int]] = []  # uses, from the last writes that failed
        try:
            # Of one thread, the event loop's: a write takes microseconds, as none waits for the disk.
            self._database = sqlite3.connect(path, isolation_level=None, timeout=0.2)
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=NORMAL")  # what is written outlives the process
            self._database.execute("PRAGMA wal_autocheckpoint=0")  # `checkpoint` does it
            self._database.executescript(_SCHEMA)
            self._keys = {bytes(digest): key for digest, key in self._read()}
        except (sqlite3.Error, msgspec.DecodeError) as error:
            raise ConfigError(f"--keys {path} cannot be used: {error}.") from None

    def close(self) -> None:
        self._database.close()

    def checkpoint(self) -> None:
        """Move the log of writes into the file, in a thread: it waits for the disk."""
        self.has_news = False
        with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(self._path)) as database:
            database.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys.values())

    def find(self, secret: bytes) -> Key | None:
        """Return the key that a client has sent, or None."""
        return self._keys.get(_digest(secret))

    def get(self, key_id: str) -> Key:
        """Return the key with an id. Raises `RequestError`."""
        found = next((key for key in self if key.id == key_id), None)
        if found is None:
            raise RequestError(f"there is no key {key_id:.100}.", status=404, code="not_found")
        return found

    def create(self, settings: KeySettings) -> tuple[Key, str]:
        """Return a new key, and the secret that its client sends. Raises `RequestError`."""
        key = Key("key_" + secrets.token_hex(8), settings)
        secret = "sk-octavo-" + secrets.token_urlsafe(32)
        digest = _digest(secret.encode())
        self._execute("INSERT INTO keys (id, digest, settings) VALUES (?, ?, ?)", (key.id, digest, _written(settings)))
        self._keys[digest] = key
        return key, secret

    def change(self, key: Key, settings: KeySettings) -> None:
        """Raises `RequestError`."""
        self._execute("UPDATE keys SET settings = ? WHERE id = ?", (_written(settings), key.id))
        key.settings = settings

    def delete(self, key: Key) -> None:
        """Delete a key. What it has used stays. Raises `RequestError`."""
        self._execute("DELETE FROM keys WHERE id = ?", (key.id,))
        self._keys = {digest: other for digest, other in self._keys.items() if other is not key}

    def check(self, key: Key) -> None:
        """Raise `RequestError` for a key that takes no requests at any model."""
        expires_at = key.settings.expires_at
        if not key.settings.is_enabled or (expires_at is not None and self._now() >= expires_at):
            why = "is disabled" if not key.settings.is_enabled else "has expired"
            raise RequestError(f"The API key {key.settings.name} {why}.", status=401, code="invalid_api_key")

    def admit(self, key: Key, model: str) -> None:
        """Count a request. Raises `RequestError` (429) if a limit of the key is used up, and 503 if it cannot be
        counted."""
        now, settings = self._now(), key.settings
        limits = (
            (key.minute, "requests", settings.requests_per_minute, "requests_per_minute"),
            (key.minute, "tokens", settings.tokens_per_minute, "tokens_per_minute"),
            (key.day, "requests", settings.requests_per_day, "requests_per_day"),
            (key.day, "tokens", settings.tokens_per_day, "tokens_per_day"),
        )
        for window, what, limit, name in limits:
            if limit is not None and (used := getattr(window.at(now), what)) >= limit:
                rest_s = window.rest_s(now)
                raise RequestError(
                    f"The API key {settings.name} has used {used} of {limit} {what} ({name}); more in {rest_s} s.",
                    status=429, code="rate_limit_exceeded", retry_after_s=rest_s,
                )  # fmt: skip
        try:
            self._write_uses([(key, model, 1, 0, 0)])
        except sqlite3.Error as error:
            logger.error("a request of the key %s is refused, as it cannot be counted: %s", settings.name, error)
            raise RequestError(
                "The gateway cannot count requests now; try again.", status=503, code="keys_unavailable"
            ) from None

    def add_tokens(self, key: Key, model: str, prompt_tokens: int, completion_tokens: int) -> None:
        """Count the tokens of a request. What cannot be written is written with the next use."""
        use = (key, model, 0, prompt_tokens, completion_tokens)
        try:
            self._write_uses([use])
        except sqlite3.Error as error:
            logger.error("tokens of the key %s are written later: %s", key.settings.name, error)
            self._count(*use)
            self._unwritten.append(use)

    def usage(self, first_day: int, last_day: int) -> list[dict[str, Any]]:
        """Return what was used, by key, day and model. Days are counted from 1970. Raises `RequestError`."""
        names = {key.id: key.settings.name for key in self}
        rows = self._execute("SELECT * FROM usage WHERE day BETWEEN ? AND ? ORDER BY day, key, model",
                             (first_day, last_day))  # fmt: skip
        return [
            {"key": key, "name": names.get(key), "day": day_text(day), "model": model, "requests": requests,
             "prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
            for key, day, model, requests, prompt_tokens, completion_tokens in rows
        ]  # fmt: skip

    def _write_uses(self, uses: list[tuple[Key, str, int, int, int]]) -> None:
        """Write uses and those that were not written before, all or none, and count the new ones."""
        now = self._now()
        day, minute = int(now // DAY_S), int(now // MINUTE_S)
        self._database.execute("BEGIN")
        try:
            for key, model, requests, prompt_tokens, completion_tokens in [*self._unwritten, *uses]:
                self._database.execute(
                    "INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
                    "requests = requests + excluded.requests, prompt_tokens = prompt_tokens + excluded.prompt_tokens, "
                    "completion_tokens = completion_tokens + excluded.completion_tokens",
                    (key.id, day, model, requests, prompt_tokens, completion_tokens),
                )
                self._database.execute(
                    "INSERT INTO minutes VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
                    "requests = excluded.requests + CASE minute WHEN excluded.minute THEN requests ELSE 0 END, "
                    "tokens = excluded.tokens + CASE minute WHEN excluded.minute THEN tokens ELSE 0 END, "
                    "minute = excluded.minute",
                    (key.id, minute, requests, prompt_tokens + completion_tokens),
                )
            self._database.execute("COMMIT")
        except sqlite3.Error:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise
        self.has_news = True
        self._unwritten.clear()
        for use in uses:
            self._count(*use)

    def _count(self, key: Key, model: str, requests: int, prompt_tokens: int, completion_tokens: int) -> None:
        now, tokens = self._now(), prompt_tokens + completion_tokens
        key.minute.add(now, requests, tokens)
        key.day.add(now, requests, tokens)
        key.num_requests += requests
        key.num_prompt_tokens += prompt_tokens
        key.num_completion_tokens += completion_tokens

    def _read(self) -> Iterator[tuple[bytes, Key]]:
        """Yield the keys of the file and their digests."""
        now = self._now()
        today = int(now // DAY_S)
        for key_id, digest, settings in self._database.execute("SELECT id, digest, settings FROM keys").fetchall():
            key = Key(key_id, msgspec.json.decode(settings, type=KeySettings))
            totals = "SELECT sum(requests), sum(prompt_tokens), sum(completion_tokens) FROM usage WHERE key = ?"
            found = self._database.execute(totals, (key_id,)).fetchone()
            key.num_requests, key.num_prompt_tokens, key.num_completion_tokens = (one or 0 for one in found)
            requests, *tokens = self._database.execute(totals + " AND day = ?", (key_id, today)).fetchone()
            key.day.add(now, requests or 0, sum(one or 0 for one in tokens))
            minute = "SELECT requests, tokens FROM minutes WHERE key = ? AND minute = ?"
            row = self._database.execute(minute, (key_id, int(now // MINUTE_S))).fetchone()
            key.minute.add(now, *(row or (0, 0)))
            yield digest, key

    def _execute(self, statement: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        try:
            return self._database.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise RequestError(f"the file of keys failed: {error}.", status=503, code="keys_unavailable") from None


def day_text(day: int) -> str:
    """Return a day, counted from 1970, as 2026-11-27."""
    return datetime.fromtimestamp(day * DAY_S, UTC).strftime("%Y-%m-%d")


def day_number(text: str) -> int:
    """Return the number of a day such as 2026-11-27. Raises `ValueError`."""
    return int(datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC).timestamp() // DAY_S)


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()  # secrets are random: nothing slower is needed


def _written(settings: KeySettings) -> str:
    return msgspec.json.encode(settings).decode()
