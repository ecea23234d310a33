"""Media that requests have sent under a name of their own (`uuid`), for later requests that say the name only."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Any

from octavo.media_kinds import MediaKind

_Key = tuple[str, str, str]  # kind, salt, uuid


class NamedMedia:
    """The latest used of one model, in so many bytes of decoded media. Threads may share it.

    A name is bound to the kind and to the request's `cache_salt`: under another salt there is another medium or none.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = Lock()
        self._kept: OrderedDict[_Key, Any] = OrderedDict()  # the latest used last
        self._num_bytes = 0

    def keep(self, kind: MediaKind, salt: str | None, uuid: str, medium: Any) -> None:
        """In the place of what had the name before. What is larger than all of the room is not kept."""
        key = kind.name, salt or "", uuid
        with self._lock:
            self._drop(key)
            if _num_bytes(medium) > self._max_bytes:
                return
            self._kept[key] = medium
            self._num_bytes += _num_bytes(medium)
            while self._num_bytes > self._max_bytes:
                self._drop(next(iter(self._kept)))

    def find(self, kind: MediaKind, salt: str | None, uuid: str) -> Any:
        """Raises `RequestError` where nothing has the name, or no longer."""
        key = kind.name, salt or "", uuid
        with self._lock:
            if key not in self._kept:
                raise kind.refusal(
                    "nothing is kept under its uuid: it was not sent here with the same cache_salt, or had to go "
                    "(--mm-processor-cache-gb). Send it again."
                )
            self._kept.move_to_end(key)
            return self._kept[key]

    def _drop(self, key: _Key) -> None:
        if key in self._kept:
            self._num_bytes -= _num_bytes(self._kept.pop(key))


def _num_bytes(medium: Any) -> int:
    """Of an array, or of a picture in RGB."""
    return int(medium.nbytes) if hasattr(medium, "nbytes") else medium.width * medium.height * 3
