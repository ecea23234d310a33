"""The adapters that callers have named by `lora_int_id`, and the pinned ones."""

import logging
from collections.abc import Collection

from octavo.engine.wire import AdapterLoaded
from octavo.errors import RequestError
from octavo.request import AdapterSource

logger = logging.getLogger(__name__)


class NamedAdapters:
    """Several ids may name one adapter, whose identity is its content."""

    def __init__(self) -> None:
        self._by_id: dict[int, AdapterSource] = {}  # by `lora_int_id`
        self._pinned: dict[str, AdapterSource] = {}  # by identity

    @property
    def ids(self) -> set[int]:
        """The `lora_int_id`s that were named and not removed."""
        return set(self._by_id)

    @property
    def pinned(self) -> Collection[AdapterSource]:
        """The pinned adapters, which a new core has to read."""
        return self._pinned.values()

    def name(self, lora_id: int, source: AdapterSource) -> None:
        """List an adapter under its `lora_int_id` until it is removed."""
        self._by_id[lora_id] = source

    def named(self, lora_id: int) -> AdapterSource:
        """Return the adapter of a `lora_int_id`. Raises `RequestError` if there is none."""
        if (found := self._by_id.get(lora_id)) is None:
            raise RequestError(f"there is no adapter {lora_id}; add it first.", param="lora_id")
        return found

    def remove(self, lora_id: int) -> tuple[bool, str | None]:
        """Remove a `lora_int_id`. Returns whether there was one, and the adapter's identity if no other id names it."""
        found = self._by_id.pop(lora_id, None)
        if found is None or any(one.identity == found.identity for one in self._by_id.values()):
            return found is not None, None
        self.unpin(found.identity)
        return True, found.identity

    def pin(self, source: AdapterSource) -> None:
        """Record that the core has pinned an adapter, unless it was removed meanwhile."""
        if source in self._by_id.values():
            self._pinned[source.identity] = source

    def unpin(self, identity: str) -> None:
        self._pinned.pop(identity, None)

    def note_loaded(self, result: AdapterLoaded) -> None:
        """Record that a core has read an adapter, or failed to: then it is no longer pinned."""
        if result.error is not None and self._pinned.pop(result.identity, None) is not None:
            logger.warning("an adapter is not pinned any more: %s", result.error)
