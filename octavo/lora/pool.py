"""Decides which adapters are in the device's pages. The scheduler calls it while it makes a plan. The least recently
used adapters are evicted first; adapters of running sequences stay.

This module only counts pages and slots. `octavo.execution.adapter_store` copies adapters as a plan says.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from octavo.step_plan import AdapterLoad


@dataclass(slots=True)
class _Resident:
    slot: int
    pages: list[int]
    num_pins: int = 0  # running sequences


@dataclass(slots=True)
class AdapterPool:
    """Pages and slots of the device. At most `max_loras` adapters are pinned at the same time. A device without pages
    (`num_pages` 0) reads adapters from host memory and has only slots."""

    num_pages: int
    num_slots: int
    max_loras: int
    num_loads: int = 0  # since the start
    num_evictions: int = 0
    _sizes: dict[str, int] = field(default_factory=dict)  # number of pages of each adapter in host memory
    _residents: OrderedDict[str, _Resident] = field(default_factory=OrderedDict)  # least recently used first
    _free_pages: list[int] = field(default_factory=list)
    _free_slots: list[int] = field(default_factory=list)
    _loads: list[AdapterLoad] = field(default_factory=list)  # for the plan that is being made
    _kept: set[str] = field(default_factory=set)  # evicted only if no other adapter can be

    def __post_init__(self) -> None:
        self._free_pages = list(range(self.num_pages - 1, -1, -1))
        self._free_slots = list(range(self.num_slots - 1, -1, -1))

    @property
    def running(self) -> list[str]:
        """The adapters of running sequences."""
        return [identity for identity, one in self._residents.items() if one.num_pins]

    @property
    def resident(self) -> list[str]:
        return list(self._residents)

    def register(self, identity: str, num_pages: int) -> None:
        """Note that an adapter is in host memory and may be loaded. It needs `num_pages` pages."""
        self._sizes[identity] = num_pages if self.num_pages else 0

    def forget(self, identity: str) -> None:
        """Note that an adapter has left host memory. Its pages on the device are freed, now or when its last running
        sequence ends."""
        self._sizes.pop(identity, None)
        self._kept.discard(identity)
        one = self._residents.get(identity)
        if one is not None and not one.num_pins:
            self._evict(identity)

    def keep(self, identity: str) -> None:
        """Evict this adapter only if no other adapter can be evicted."""
        self._kept.add(identity)

    def can_start(self, identity: str) -> bool:
        """Return True if a sequence with this adapter can start now. On a device with pages, a step copies at most one
        adapter, so that other sequences do not wait for long."""
        one = self._residents.get(identity)
        if one is not None and one.num_pins:
            return True
        if sum(1 for other in self._residents.values() if other.num_pins) >= self.max_loras:
            return False
        if one is not None:
            return True
        free = len(self._free_pages)
        unpinned = [other for other in self._residents.values() if not other.num_pins]
        has_slot = bool(self._free_slots or unpinned)
        is_free = not self._loads or not self.num_pages
        return is_free and has_slot and free + sum(len(o.pages) for o in unpinned) >= self._sizes[identity]

    def pin(self, identity: str) -> int:
        """Note that a sequence starts to run, and return the slot of its adapter. An adapter that is not resident is
        added to the plan's loads."""
        one = self._residents.get(identity)
        if one is None:
            one = self._load(identity)
        one.num_pins += 1
        self._residents.move_to_end(identity)
        return one.slot

    def unpin(self, identity: str) -> None:
        """Note that a sequence has stopped running."""
        one = self._residents[identity]
        one.num_pins -= 1
        if not one.num_pins and identity not in self._sizes:
            self._evict(identity)

    def take_loads(self) -> list[AdapterLoad]:
        """Return the adapters to load before the planned step, and clear the list."""
        loads, self._loads = self._loads, []
        return loads

    def check(self, running: list[str]) -> None:
        """Assert that no page or slot is lost or owned twice, and that `running` sequences have their adapters."""
        pages = [page for one in self._residents.values() for page in one.pages] + self._free_pages
        assert sorted(pages) == list(range(self.num_pages)), "a page is lost or owned twice"
        slots = [one.slot for one in self._residents.values()] + self._free_slots
        assert sorted(slots) == list(range(self.num_slots)), "a slot is lost or owned twice"
        for identity, one in self._residents.items():
            assert one.num_pins == running.count(identity), "an adapter's pins are not its running sequences"
        assert set(running) <= set(self._residents), "a running sequence has no adapter"
        assert len(set(running)) <= self.max_loras, "a step would mix more adapters than --max-loras"

    def _load(self, identity: str) -> _Resident:
        needed = self._sizes[identity]
        while len(self._free_pages) < needed or not self._free_slots:
            unpinned = [other for other, one in self._residents.items() if not one.num_pins]
            self._evict(next((other for other in unpinned if other not in self._kept), unpinned[0]))
            self.num_evictions += 1
        one = _Resident(self._free_slots.pop(), [self._free_pages.pop() for _ in range(needed)])
        self._residents[identity] = one
        self._loads.append(AdapterLoad(identity, one.slot, list(one.pages)))
        self.num_loads += 1
        return one

    def _evict(self, identity: str) -> None:
        one = self._residents.pop(identity)
        self._free_pages += one.pages
        self._free_slots.append(one.slot)
