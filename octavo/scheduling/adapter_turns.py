"""Waiting sequences whose adapters are not on the device: others start before them, up to `MAX_BYPASSES` times."""

from __future__ import annotations

from octavo.lora.pool import AdapterPool
from octavo.sequence import Sequence

# Later sequences with adapters that may start while one waits for room for its own.
MAX_BYPASSES = 64


class AdapterTurn:
    """One walk over the waiting sequences, in order."""

    def __init__(self, pool: AdapterPool | None) -> None:
        self._pool = pool
        self._passed: list[Sequence] = []  # no room for their adapters

    def may_start(self, seq: Sequence) -> bool:
        """Return whether its adapter is loaded or can be loaded now, and no sequence before it was bypassed too often.
        Sequences of the base model may always start: they take no room for adapters."""
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
