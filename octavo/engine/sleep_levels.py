"""What a sleeping engine has freed, as vLLM calls it."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.errors import RequestError

SLEEPERS = frozenset({"weights", "kv_cache"})


def woken_by(tags: Iterable[str] | None) -> frozenset[str]:
    """What `tags` wake; all by default. Raises `RequestError` for what is no part of an engine."""
    woken = SLEEPERS if tags is None else frozenset(tags)
    if woken - SLEEPERS:
        raise RequestError(f"tags must be of {', '.join(sorted(SLEEPERS))}.", param="tags")
    return woken


def check_level(level: int) -> None:
    """Raise `RequestError` for a level that there is not."""
    if level not in (1, 2):
        raise RequestError(f"level must be 1 or 2, got {level}.", param="level")
