"""The adapters in the host's memory, on the core's side. Threads read them while their requests wait."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Set
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.errors import RequestError
from octavo.lora.pool import AdapterPool
from octavo.request import AdapterSource

if TYPE_CHECKING:
    from octavo.execution.executor import LocalExecutor


@dataclass(slots=True)
class _Entry:
    source: AdapterSource
    ready: Future[int]
    begin: float
    num_pages: int  # on the host; while it is being read, as many as its file needs
    is_registered: bool = False  # the device's pool knows its size


@dataclass(slots=True)
class AdapterLibrary:
    """At most `max_on_host` adapters; None: as many as the host has pages for. Least recently used adapters make room;
    adapters `in_use` and pinned ones stay."""

    executor: LocalExecutor
    pool: AdapterPool
    max_on_host: int | None
    num_reads: int = 0  # since the last `take_reads`
    read_s: float = 0.0  # seconds that these reads took, waits included
    names: dict[str, str] = field(default_factory=dict)  # by identity: the adapter's last name in a request
    _entries: OrderedDict[str, _Entry] = field(default_factory=OrderedDict)  # least recently used first
    _pinned: set[str] = field(default_factory=set)

    def start_reading(self, source: AdapterSource, in_use: Callable[[], Set[str]]) -> Future[int] | None:
        """Start to read an adapter. Returns a future that is ready when it is on the host; None if there is no room
        now: call again. Raises `RequestError` if all room is pinned. `in_use` returns the adapters that must stay. It
        is called only if room is short, because it looks at every live sequence."""
        entry = self._entries.get(source.identity)
        if entry is not None and entry.ready.done() and entry.ready.exception() is not None:
            self._drop(source.identity)  # read it again: the file may have been repaired
            entry = None
        if entry is None:
            num_pages = -(-source.num_bytes // self.executor.adapter_memory.page_bytes)
            if not self._make_room(1, num_pages, in_use):
                if not self._pinned.issuperset(self._entries):
                    return None
                limit = "" if self.max_on_host is None else " (--max-cpu-loras)"
                raise RequestError(
                    f"there is no room for adapter {source.name!r}: all {len(self._entries)} places{limit} have "
                    "adapters that are pinned. Remove one.",
                    param="model",
                )
            entry = _Entry(source, self.executor.prepare_adapter(source), time.monotonic(), num_pages)
            self._entries[source.identity] = entry
        self.names[source.identity] = source.name
        self._entries.move_to_end(source.identity)
        # Adapters may turn out larger than their files.
        self._make_room(0, 0, lambda: in_use() | {source.identity})
        return entry.ready

    def register(self, identity: str) -> None:
        """Register an adapter that has been read, so that sequences may load it. Raises its error if it has failed."""
        entry = self._entries.get(identity)
        if entry is None or entry.is_registered:
            return
        error = entry.ready.exception()
        if error is not None:
            self._drop(identity)
            raise error
        entry.num_pages = entry.ready.result()
        self.pool.register(identity, entry.num_pages)
        self.num_reads += 1
        self.read_s += time.monotonic() - entry.begin
        entry.is_registered = True

    def pin(self, identity: str) -> bool:
        """Keep an adapter on the host, and on the device while others can be evicted. Returns whether it is there."""
        if identity not in self._entries:
            return False
        self._pinned.add(identity)
        self.pool.keep(identity)
        return True

    def remove(self, identity: str, in_use: Set[str]) -> None:
        """Remove an adapter: now, or if requests use it, when room is needed."""
        self._pinned.discard(identity)
        if identity in self._entries and self._may_go(identity, in_use):
            self._drop(identity)

    def has(self, identity: str) -> bool:
        """Return whether an adapter is on the host or being read."""
        return identity in self._entries

    @property
    def reading(self) -> list[Future[int]]:
        """Futures of the adapters being read."""
        return [entry.ready for entry in self._entries.values() if not entry.ready.done()]

    def __len__(self) -> int:
        return len(self._entries)

    def take_reads(self) -> tuple[int, float]:
        """Return how many adapters were read since the last call, and in how many seconds."""
        taken = self.num_reads, self.read_s
        self.num_reads, self.read_s = 0, 0.0
        return taken

    def _make_room(self, num_adapters: int, num_pages: int, in_use: Callable[[], Set[str]]) -> bool:
        """Evict adapters until `num_adapters` more with `num_pages` fit. An adapter that is too large may come if it is
        the only one: its size is known only when it is read."""
        kept: Set[str] | None = None
        while self._entries and not self._has_room(num_adapters, num_pages):
            kept = in_use() if kept is None else kept
            free = next((identity for identity in self._entries if self._may_go(identity, kept)), None)
            if free is None:
                return False
            self._drop(free)
        return True

    def _has_room(self, num_adapters: int, num_pages: int) -> bool:
        if self.max_on_host is not None:
            return len(self._entries) + num_adapters <= self.max_on_host
        used = sum(entry.num_pages for entry in self._entries.values())
        return used + num_pages <= self.executor.adapter_memory.num_host_pages

    def _may_go(self, identity: str, in_use: Set[str]) -> bool:
        # An adapter that is still being read cannot be evicted: it would come back when its read ends.
        return identity not in in_use and identity not in self._pinned and self._entries[identity].ready.done()

    def _drop(self, identity: str) -> None:
        del self._entries[identity]
        self.names.pop(identity, None)
        self._pinned.discard(identity)
        self.pool.forget(identity)
        self.executor.forget_adapter(identity)
