"""Levels and tags of sleep, by vLLM's names. A tag names memory that a sleeping engine has freed."""

from collections.abc import Iterable

from octavo.errors import RequestError

SLEEPERS = frozenset({"weights", "kv_cache"})


def woken_by(tags: Iterable[str] | None) -> frozenset[str]:
    """Return the sleepers that `tags` wake; all of them by default. Raises `RequestError` for an unknown tag."""
    woken = SLEEPERS if tags is None else frozenset(tags)
    if woken - SLEEPERS:
        raise RequestError(f"tags must be among {', '.join(sorted(SLEEPERS))}.", param="tags")
    return woken


PAUSE_MODES = ("abort", "wait", "keep")
SLEEP_MODES = ("abort", "wait")


def check_mode(mode: str, modes: tuple[str, ...]) -> None:
    """Raise `RequestError` for a `mode` that is not in `modes`."""
    if mode not in modes:
        raise RequestError(f"mode must be one of {', '.join(modes)}, got {mode!r}.", param="mode")


def check_level(level: int) -> None:
    if level not in (1, 2):
        raise RequestError(f"level must be 1 or 2, got {level}.", param="level")
