"""What guesses tokens: a `Proposer` in the core's process, or a model in the worker's.

Both guess what follows a sequence whose tokens are all known. Neither may change anything but its own state, and
neither has to be right. Where a model guesses, the proposer says only how many tokens: the worker replaces them.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from octavo.plan import DRAFT_PLACEHOLDER
from octavo.sequence import Sequence

NUM_LEVELS = 16


class Proposal(NamedTuple):
    """Tokens that may follow a sequence. Guesses of one `level`, a number below `NUM_LEVELS`, are right about equally
    often, as far as the proposer knows; how often that is, is counted."""

    tokens: tuple[int, ...]
    level: int = 0


NO_PROPOSAL = Proposal(())


class Proposer(Protocol):
    """Guesses from what the core knows: the tokens of sequences. Called between steps, so that it must be quick."""

    def start(self, seq: Sequence) -> Any:
        """What is kept of a sequence that is new, or a fork: it lasts through preemption until `end`."""
        ...

    def propose(self, seq: Sequence, state: Any, most: int) -> Proposal:
        """Up to `most` tokens that may follow `seq`, all of whose tokens are known. Called after each step that has
        brought some."""
        ...

    def end(self, seq: Sequence, state: Any) -> None:
        """`seq` has ended and will not be seen again."""
        ...


class ToBeDrafted:
    """Leaves the guesses to a model, for sequences of up to `max_len` tokens: its worker makes them when the step runs
    that verifies them."""

    def __init__(self, max_len: int) -> None:
        self._max_len = max_len

    def start(self, seq: Sequence) -> None:
        """Nothing is kept."""

    def propose(self, seq: Sequence, state: None, most: int) -> Proposal:
        return Proposal((DRAFT_PLACEHOLDER,) * min(most, self._max_len - seq.num_tokens))

    def end(self, seq: Sequence, state: None) -> None:
        """Nothing is kept."""
