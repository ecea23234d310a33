"""Waiting sequences whose adapters are not on the device: others pass them, but not for ever."""

from __future__ import annotations

from octavo.lora.pool import AdapterPool
from octavo.sequence import Sequence

# Later sequences with adapters that may start while one waits for room for its own.
MAX_BYPASSES = 64


class AdapterTurn:
    """One walk over the waiting sequences, in their order."""

    def __init__(self, pool: AdapterPool | None) -> None:
        self._pool = pool
        self._passed: list[Sequence] = []  # that found no room

    def may_start(self, seq: Sequence) -> bool:
        """Whether its adapter is there or can be loaded now, and nobody before it has been passed too often. Sequences
        of the base model take nothing that the others wait for."""
        if seq.adapter is None or self._pool is None:
            return True
        if not any(other.num_bypassed >= MAX_BYPASSES for other in self._passed) and self._pool.can_start(seq.adapter):
            return True
        self._passed.append(seq)
        return False

    def started(self, seq: Sequence) -> None:
        if seq.adapter is not None:
            for other in self._passed:
                other.num_bypassed += 1
