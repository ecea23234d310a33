"""Guesses that tests make up, in the place of what `--speculative-config` makes."""

from __future__ import annotations

from collections.abc import Callable

from octavo.sequence import Sequence
from octavo.speculative.proposer import NO_PROPOSAL, Proposal
from octavo.speculative.speculation import Speculation


class Guessing:
    """Proposes what a function of (sequence, most) returns."""

    def __init__(self, propose: Callable[[Sequence, int], tuple[int, ...]]) -> None:
        self._propose = propose
        self._num_known = 0

    def start(self, seq: Sequence) -> object:
        self._num_known += 1
        return self

    def propose(self, seq: Sequence, state: object, most: int) -> Proposal:
        assert state is self and most >= 0
        return Proposal(self._propose(seq, most)) if most else NO_PROPOSAL

    def end(self, seq: Sequence, state: object) -> None:
        assert state is self and seq.has_ended
        self._num_known -= 1
        assert self._num_known >= 0


def guessing(propose: Callable[[Sequence, int], tuple[int, ...]]) -> Speculation:
    """Whatever the function returns is verified."""
    return Speculation(Guessing(propose), 100)
