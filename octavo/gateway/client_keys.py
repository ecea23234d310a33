"""Clients' keys, with their limits and use. Windows of limits are minutes and days of UTC. `key_store` finds keys and
counts what they use. The databases compare the counts with the limits: `sqlite_keys`, `valkey_keys`, `postgresql_keys`.
"""

import hashlib
from datetime import UTC, datetime
from typing import Annotated

import msgspec
from msgspec import Meta

from octavo.errors import RequestError

MINUTE_S, DAY_S = 60, 86_400
WITHOUT_LIMITS = "the operator's keys of --api-key (OCTAVO_API_KEY) may do it"  # the advice where a key may not
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
    more = f"in {rest_s} s" if per == "minute" else "at 00:00 UTC"
    message = f"The API key {name} has used {used} of {limit} {what} ({limit_name}); more {more}."
    return LimitError(message, limit_name, rest_s)


def no_key(key_id: str) -> RequestError:
    return RequestError(
        f"there is no key with the id {key_id:.100}; GET /keys lists the ids.", status=404, code="not_found"
    )


def name_taken(name: str) -> RequestError:
    """Return the refusal of a name that another key has: errors, logs and metrics tell keys apart by it."""
    return RequestError(
        f"another key has the name {name}; choose another one.", param="name", status=409, code="name_taken"
    )


def digest_of(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()  # secrets are random: nothing slower is needed


def day_text(day: int) -> str:
    """Return a day, counted from 1970, as 2026-11-27."""
    return datetime.fromtimestamp(day * DAY_S, UTC).strftime("%Y-%m-%d")


def day_number(text: str) -> int:
    """Return the number of a day such as 2026-11-27. Raises `ValueError`."""
    return int(datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC).timestamp() // DAY_S)
