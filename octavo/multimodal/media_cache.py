"""A cache of media for later requests with the same media: decoded, and as the model's processor prepared them."""

from collections import OrderedDict
from collections.abc import Hashable
from threading import Lock
from typing import Any, NamedTuple


class _CachedMedium(NamedTuple):
    value: Any
    num_bytes: int


class MediaCache:
    """The most recently used media of one model, up to `max_bytes`. Threads may share it."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = Lock()
        self._kept: OrderedDict[Hashable, _CachedMedium] = OrderedDict()  # the latest used last
        self._num_bytes = 0

    def keep(self, key: Hashable, value: Any, num_bytes: int) -> None:
        """Keep a value, and drop the previous value of the key. A value larger than the whole cache is not kept."""
        with self._lock:
            self._drop(key)
            if num_bytes > self._max_bytes:
                return
            self._kept[key] = _CachedMedium(value, num_bytes)
            self._num_bytes += num_bytes
            while self._num_bytes > self._max_bytes:
                self._drop(next(iter(self._kept)))

    def find(self, key: Hashable) -> Any:
        """Return the value of a key; None if it is not, or no longer, in the cache."""
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key].value

    def _drop(self, key: Hashable) -> None:
        if key in self._kept:
            self._num_bytes -= self._kept.pop(key).num_bytes


def medium_bytes(medium: Any) -> int:
    """Return the size in bytes of an array, or of a picture in RGB."""
    return int(medium.nbytes) if hasattr(medium, "nbytes") else medium.width * medium.height * 3
