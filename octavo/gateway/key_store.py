"""Clients' keys, with their limits and use, and the interface of the stores that keep them.

`sqlite_keys` keeps them in a file, for one gateway; `shared_keys` in PostgreSQL or Valkey, for several. Only digests of
keys are kept. Each request is counted before a replica gets it, and its tokens before the client gets the end of its
answer: a gateway that is killed loses no count. Windows of limits are minutes and days of UTC.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from octavo.errors import ConfigError, RequestError

logger = logging.getLogger("octavo.gateway")

OnLoss = Literal["refuse", "admit"]  # requests that cannot be counted
MINUTE_S, DAY_S = 60, 86_400
LIMITS = ("requests_per_minute", "tokens_per_minute", "requests_per_day", "tokens_per_day")
_Limit = Annotated[int, Meta(ge=0, le=2**63 - 1)] | None  # msgspec and databases have 64 bits


class KeySettings(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """An operator's settings of a key. Limits of tokens count prompts and answers together."""

    name: Annotated[str, Meta(min_length=1, max_length=100)]
    models: list[str] | None = None  # names or aliases; None: all
    expires_at: float | None = None  # seconds since 1970; None: never
    is_enabled: bool = True
    priority: int | None = None  # passed to replicas, whose --scheduling-policy is priority
    requests_per_minute: _Limit = None
    tokens_per_minute: _Limit = None
    requests_per_day: _Limit = None
    tokens_per_day: _Limit = None


class Key:
    """A key and its use since it was made."""

    def __init__(self, key_id: str, settings: KeySettings) -> None:
        self.id, self.settings = key_id, settings
        self.num_requests = self.num_prompt_tokens = self.num_completion_tokens = 0

    def may_use(self, names: set[str]) -> bool:
        """Return whether the key is for a model with these names."""
        return self.settings.models is None or not names.isdisjoint(self.settings.models)

    def add(self, requests: int, prompt_tokens: int, completion_tokens: int) -> None:
        """Add to the key's use."""
        self.num_requests += requests
        self.num_prompt_tokens += prompt_tokens
        self.num_completion_tokens += completion_tokens


class KeyStore(ABC):
    """Finds keys by the secret that clients send or by id, and counts their use. Every `async` method raises
    `RequestError` (503) if the store does not answer."""

    def __init__(self, on_loss: OnLoss, now: Callable[[], float]) -> None:
        """`on_loss` says whether requests that cannot be counted are refused. `now` returns the seconds since 1970."""
        self.on_loss, self._now = on_loss, now

    @abstractmethod
    async def open(self) -> None:
        """Open the store. Raises `ConfigError` if it cannot be used."""

    @abstractmethod
    async def close(self) -> None:
        """Write the counts that are not written yet, if the store answers, and close the store."""

    @abstractmethod
    async def find(self, secret: bytes) -> Key | None:
        """Return the key with a client's secret, or None."""

    @abstractmethod
    async def get(self, key_id: str) -> Key:
        """Return the key with an id. Raises `RequestError` (404) if there is none."""

    @abstractmethod
    async def keys(self) -> list[Key]:
        """Return all keys, the oldest first."""

    @abstractmethod
    def counted(self) -> Iterable[Key]:
        """Return the keys with their use for metrics: only the use through this gateway, if several share the store."""

    @abstractmethod
    async def add(self, key: Key, digest: bytes) -> None:
        """Keep a new key."""

    @abstractmethod
    async def change(self, key: Key, settings: KeySettings) -> bool:
        """Give a key these settings. Returns False, and changes nothing, if its settings are no longer `key.settings`.
        Raises `RequestError` (404) if there is no such key."""

    @abstractmethod
    async def delete(self, key: Key) -> None:
        """Delete a key. Its use stays recorded."""

    @abstractmethod
    async def admit(self, key: Key, model: str) -> None:
        """Count a request. Raises `RequestError` (429) if a limit of the key is used up."""

    @abstractmethod
    async def add_tokens(self, key: Key, model: str, prompt_tokens: int, completion_tokens: int) -> None:
        """Count the tokens of a request. If they cannot be written now, they are written later."""

    @abstractmethod
    async def used(self, first_day: int, last_day: int) -> list[tuple[str, int, str, int, int, int]]:
        """Return key id, day, model, requests, prompt tokens and completion tokens; days count from 1970."""

    async def create(self, settings: KeySettings) -> tuple[Key, str]:
        """Return a new key, and the secret that its client sends."""
        key = Key("key_" + secrets.token_hex(8), settings)
        secret = "sk-octavo-" + secrets.token_urlsafe(32)
        await self.add(key, digest_of(secret.encode()))
        return key, secret

    def check(self, key: Key) -> None:
        """Raise `RequestError` for a key that no model may answer."""
        expires_at = key.settings.expires_at
        if not key.settings.is_enabled or (expires_at is not None and self._now() >= expires_at):
            why = "is disabled" if not key.settings.is_enabled else "has expired"
            raise RequestError(f"The API key {key.settings.name} {why}.", status=401, code="invalid_api_key")

    async def usage(self, first_day: int, last_day: int) -> list[dict[str, Any]]:
        """Return the use by day, key and model. Days are counted from 1970."""
        names = {key.id: key.settings.name for key in await self.keys()}
        rows = await self.used(first_day, last_day)

        def named() -> list[dict[str, Any]]:
            return [
                {"key": key, "name": names.get(key), "day": day_text(day), "model": model, "requests": requests,
                 "prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
                for key, day, model, requests, prompt_tokens, completion_tokens in sorted(rows, key=_in_order)
            ]  # fmt: skip

        return await asyncio.to_thread(named)  # a thread, as there may be millions of rows


def _in_order(row: tuple[str, int, str, int, int, int]) -> tuple[int, str, str]:
    key, day, model, *_ = row
    return day, key, model


def open_keys(address: str, on_loss: OnLoss = "refuse", now: Callable[[], float] | None = None) -> KeyStore:
    """Return the store at an address: a file, postgresql://... or valkey://.... Without `now` a shared database uses
    its own clock, so that all gateways agree. Raises `ConfigError`."""
    scheme = address.partition("://")[0] if "://" in address else ""
    if scheme in ("postgresql", "postgres"):
        from octavo.gateway.postgresql_keys import PostgresqlKeys
        from octavo.gateway.shared_keys import SharedKeys

        return SharedKeys(PostgresqlKeys(address), on_loss, now)
    if scheme in ("valkey", "valkeys", "valkey+unix", "redis", "rediss", "redis+unix"):
        from octavo.gateway.shared_keys import SharedKeys
        from octavo.gateway.valkey_keys import ValkeyKeys

        return SharedKeys(ValkeyKeys(address), on_loss, now)
    if scheme:
        raise ConfigError(f"--keys {scheme}://...: a file, postgresql://... or valkey://... is needed.")
    from octavo.gateway.sqlite_keys import SqliteKeys

    return SqliteKeys(address, on_loss, now or time.time)


class LimitError(RequestError):
    """The refusal of a request whose key has used up `limit`, one of `LIMITS`."""

    def __init__(self, message: str, limit: str, retry_after_s: int) -> None:
        super().__init__(message, status=429, code="rate_limit_exceeded", retry_after_s=retry_after_s)
        self.limit = limit


def limit_error(name: str, limit_name: str, used: int, limit: int, now: float) -> LimitError:
    """Return the refusal of a request of the key `name`, which has used up one of `LIMITS`."""
    what, _, per = limit_name.partition("_per_")
    seconds = MINUTE_S if per == "minute" else DAY_S
    rest_s = max(1, int((now // seconds + 1) * seconds - now) + 1)
    message = f"The API key {name} has used {used} of {limit} {what} ({limit_name}); more in {rest_s} s."
    return LimitError(message, limit_name, rest_s)


def no_key(key_id: str) -> RequestError:
    return RequestError(f"there is no key {key_id:.100}.", status=404, code="not_found")


def not_counted() -> RequestError:
    """Return the refusal of a request that cannot be counted."""
    message = "The gateway cannot count requests now; try again."
    return RequestError(message, status=503, code="keys_unavailable")


def digest_of(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()  # secrets are random: nothing slower is needed


def day_text(day: int) -> str:
    """Return a day, counted from 1970, as 2026-11-27."""
    return datetime.fromtimestamp(day * DAY_S, UTC).strftime("%Y-%m-%d")


def day_number(text: str) -> int:
    """Return the number of a day such as 2026-11-27. Raises `ValueError`."""
    return int(datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC).timestamp() // DAY_S)
