"""API keys, as the server and the gateway check them."""

import contextlib
import hashlib
import hmac
import ipaddress
import os
from collections.abc import Sequence

from octavo.errors import ConfigError


def with_environment(keys: Sequence[str]) -> list[str]:
    """Return the keys of a flag and of the environment. Raises `ConfigError`."""
    return [*keys, *filter(None, map(key_of, ("OCTAVO_API_KEY", "VLLM_API_KEY")))]


def key_of(variable: str) -> str | None:
    """Return the key in a variable, None if it is unset or empty. Raises `ConfigError` for a key that no header can
    have; its value is not shown."""
    value = os.environ.get(variable, "")
    key = value.strip()  # files often end their keys with a new line
    if value and not _can_be_sent(key):
        raise ConfigError(f"The variable {variable} must be a key of printable ASCII characters; it has others.")
    return key or None


def check_keys(flag: str, keys: Sequence[str]) -> None:
    """Raise `ConfigError` for keys of a flag such as --api-key that no header can have; they are not shown."""
    if not all(keys):  # as of a variable that is not set: anybody could send it
        raise ConfigError(f"{flag} must not be empty.")
    if not all(map(_can_be_sent, keys)):
        raise ConfigError(
            f"{flag} must be keys of printable ASCII characters without spaces around them; it has others."
        )


def _can_be_sent(key: str) -> bool:
    return bool(key) and key.isascii() and key.isprintable() and key == key.strip()


def sent_by_default() -> str | None:
    """Return the key that a client sends which is given none."""
    found = (os.environ.get(name, "").strip() for name in ("OCTAVO_API_KEY", "OPENAI_API_KEY"))
    return next(filter(None, found), None)


class ApiKeys:
    """The keys of a server. A client must send one of them, unless there are none."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def admit(self, authorization: str | None, x_api_key: str | None) -> bool:
        """Return whether one of these headers' values has a key: `Authorization: Bearer KEY`, or Anthropic's
        `x-api-key: KEY`."""
        if not self._digests:
            return True
        digests = [_digest(key) for key in sent_keys(authorization, x_api_key)]
        # Digests have equal lengths and every key is compared, so the time reveals nothing about the keys.
        matches = [hmac.compare_digest(one, expected) for one in digests for expected in self._digests]
        return any(matches)

    def client(self, address: str | None, authorization: str | None, x_api_key: str | None) -> str:
        """Return a name for the sender of an admitted request: its address and, if the server has keys, the number of
        the key that admits it. All addresses of an IPv6 /64 network count as one."""
        if address is not None and ":" in address:
            with contextlib.suppress(ValueError):  # the address may be invalid: a proxy sets it
                found = ipaddress.IPv6Address(address)
                address = str(found.ipv4_mapped or ipaddress.IPv6Network((found.packed, 64), strict=False))
        if not self._digests:
            return str(address)
        digests = [_digest(key) for key in sent_keys(authorization, x_api_key)]
        number = next((self._digests.index(digest) for digest in digests if digest in self._digests), None)
        return f"{address} {number}"


def sent_keys(authorization: str | None, x_api_key: str | None) -> list[bytes]:
    """Return the keys in the values of these headers."""
    scheme, _, bearer = (authorization or "").partition(" ")
    sent = [bearer.strip()] if scheme.lower() == "bearer" else []
    if x_api_key is not None:
        sent.append(x_api_key.strip())
    return [key.encode("latin-1") for key in sent]  # headers are latin-1 to ASGI


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
