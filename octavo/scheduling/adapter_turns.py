"""Waiting sequences whose adapters are not on the device: others start before them, up to `MAX_BYPASSES` times."""

from collections import Counter

from octavo.lora.pool import AdapterPool
from octavo.sequence import Sequence

# So many sequences with adapters may overtake a sequence that waits for room for its adapter.
MAX_BYPASSES = 64


class AdapterTurn:
    """Decides, in one walk over the waiting sequences in order, which may start."""

    def __init__(self, pool: AdapterPool | None, num_waiting: Counter[str | None]) -> None:
        """`num_waiting` counts the waiting sequences by adapter."""
        self._pool, self._num_waiting = pool, num_waiting
        self._passed: list[Sequence] = []  # sequences that found no room for their adapters
        self._refused: set[str] = set()  # adapters of `_passed`: they get no room in the rest of this walk
        self._is_blocked = False  # a sequence of `_passed` was bypassed too often

    @property
    def is_over(self) -> bool:
        """Whether no later sequence may start, because each waits for a refused adapter."""
        if self._is_blocked:
            return None not in self._num_waiting
        return len(self._refused) == len(self._num_waiting)

    def consider(self, seq: Sequence) -> bool:
        """Return whether a sequence may start: its adapter is loaded or can be loaded now, and no sequence before this
        one was bypassed too often. Otherwise its adapter is refused for the rest of the walk. Sequences of the base
        model may always start: they take no room for adapters."""
        adapter = seq.adapter
        if adapter is None or self._pool is None:
            return True
        if not (self._is_blocked or adapter in self._refused) and self._pool.can_start(adapter):
            return True
        self._refused.add(adapter)
        self._passed.append(seq)
        self._is_blocked |= seq.num_bypassed >= MAX_BYPASSES
        return False

    def started(self, seq: Sequence) -> None:
        if seq.adapter is not None:
            for other in self._passed:
                other.num_bypassed += 1
                self._is_blocked |= other.num_bypassed >= MAX_BYPASSES
