"""What has become of media, for later requests with the same ones: decoded, and as the model's processor makes them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from threading import Lock
from typing import Any, NamedTuple


class _CachedMedium(NamedTuple):
    value: Any
    num_bytes: int


class MediaCache:
    """The latest used of one model, in so many bytes. Threads may share it."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = Lock()
        self._kept: OrderedDict[Hashable, _CachedMedium] = OrderedDict()  # the latest used last
        self._num_bytes = 0

    def keep(self, key: Hashable, value: Any, num_bytes: int) -> None:
        """In the place of what had the key before. What is larger than all of the room is not kept."""
        with self._lock:
            self._drop(key)
            if num_bytes > self._max_bytes:
                return
            self._kept[key] = _CachedMedium(value, num_bytes)
            self._num_bytes += num_bytes
            while self._num_bytes > self._max_bytes:
                self._drop(next(iter(self._kept)))

    def find(self, key: Hashable) -> Any:
        """None where nothing has the key, or no longer."""
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key].value

    def _drop(self, key: Hashable) -> None:
        if key in self._kept:
            self._num_bytes -= self._kept.pop(key).num_bytes


def medium_bytes(medium: Any) -> int:
    """Of an array, or of a picture in RGB."""
    return int(medium.nbytes) if hasattr(medium, "nbytes") else medium.width * medium.height * 3
