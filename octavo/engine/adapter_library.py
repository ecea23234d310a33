"""Adapters of the core: which are in the host's memory, read by threads while their requests wait."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Set
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.errors import RequestError
from octavo.lora.pool import AdapterPool
from octavo.request import AdapterSource

if TYPE_CHECKING:
    from octavo.execution.executor import Executor


@dataclass(slots=True)
class _Entry:
    source: AdapterSource
    ready: Future[int]
    begin: float
    num_pages: int  # of the host; while it is read, as many as its file has
    is_registered: bool = False  # the pool knows how large it is


@dataclass(slots=True)
class AdapterLibrary:
    """At most `max_on_host` adapters, or where that is None as many as the host has pages for. The least recently used
    make room. Those `in_use` stay."""

    executor: Executor
    pool: AdapterPool
    max_on_host: int | None
    num_reads: int = 0  # since the last `take_reads`
    read_s: float = 0.0  # from when these adapters were wanted to when they were there
    names: dict[str, str] = field(default_factory=dict)  # by identity: the last name that it was asked for by
    _entries: OrderedDict[str, _Entry] = field(default_factory=OrderedDict)  # least recently used first
    _pinned: set[str] = field(default_factory=set)

    def want(self, source: AdapterSource, in_use: Set[str]) -> Future[int] | None:
        """Ready when the adapter is on the host; None while there is no room for it. Then ask again. Raises
        `RequestError` if there never will be, because all that are there are pinned."""
        entry = self._entries.get(source.identity)
        if entry is not None and entry.ready.done() and entry.ready.exception() is not None:
            self._drop(source.identity)  # once more: its file may have been mended
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
        self._make_room(0, 0, in_use | {source.identity})  # where others turned out to be larger than their files
        return entry.ready

    def take_in(self, identity: str) -> None:
        """An adapter that was wanted is ready: it may be loaded from now on. Raises what kept it from being read."""
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
        """Keep an adapter on the host, and on the device as long as others can go. Whether it is there."""
        if identity not in self._entries:
            return False
        self._pinned.add(identity)
        self.pool.keep(identity)
        return True

    def remove(self, identity: str, in_use: Set[str]) -> None:
        """Make room, at once or, where requests use it, when it is its turn."""
        self._pinned.discard(identity)
        if identity in self._entries and self._may_go(identity, in_use):
            self._drop(identity)

    def has(self, identity: str) -> bool:
        """Whether it is on the host, or on its way there."""
        return identity in self._entries

    @property
    def reading(self) -> list[Future[int]]:
        """Of adapters that are on their way to the host."""
        return [entry.ready for entry in self._entries.values() if not entry.ready.done()]

    def __len__(self) -> int:
        return len(self._entries)

    def take_reads(self) -> tuple[int, float]:
        """How many adapters were read since the last call, and how long that took."""
        taken = self.num_reads, self.read_s
        self.num_reads, self.read_s = 0, 0.0
        return taken

    def _make_room(self, num_adapters: int, num_pages: int, in_use: Set[str]) -> bool:
        """For so many more. An adapter that takes more than there is may come where there is no other: how large it is
        turns out when it is read."""
        while self._entries and not self._has_room(num_adapters, num_pages):
            free = next((identity for identity in self._entries if self._may_go(identity, in_use)), None)
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
        # What a thread still reads would come back once it has been read.
        return identity not in in_use and identity not in self._pinned and self._entries[identity].ready.done()

    def _drop(self, identity: str) -> None:
        del self._entries[identity]
        self.names.pop(identity, None)
        self._pinned.discard(identity)
        self.pool.forget(identity)
        self.executor.forget_adapter(identity)
