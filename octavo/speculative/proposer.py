"""The interface of proposers of draft tokens: a `Proposer` in the core's process, or a draft model in the worker's.
Both propose tokens after a sequence whose tokens are all known. They change only their own state, and may be wrong. For
a draft model the proposer only chooses the number of tokens; the worker makes them."""

from typing import Any, NamedTuple, Protocol

from octavo.sequence import Sequence
from octavo.step_plan import DRAFT_PLACEHOLDER

NUM_LEVELS = 16
_LEAST_READ = 32


class Proposal(NamedTuple):
    """Tokens that may follow a sequence. Proposals of one `level`, below `NUM_LEVELS`, are accepted about equally
    often, as far as the proposer knows; `acceptance_rates.py` counts how often."""

    tokens: tuple[int, ...]
    level: int = 0


NO_PROPOSAL = Proposal(())


class ReadingShare:
    """Limits the tokens of long prompts that proposers read between two steps: the more sequences live, the fewer
    tokens of each."""

    def __init__(self, most: int) -> None:
        self._most, self._num_sequences = most, 0

    def start(self) -> None:
        self._num_sequences += 1

    def end(self) -> None:
        self._num_sequences -= 1

    @property
    def num_tokens(self) -> int:
        """Tokens of a sequence that are read at once: more than a step adds to an answer."""
        return max(_LEAST_READ, self.num_other_tokens)

    @property
    def num_other_tokens(self) -> int:
        """Further tokens, of other texts, that are read at the same time; no sequence waits for them."""
        return max(1, self._most // max(1, self._num_sequences))


class Proposer(Protocol):
    """Proposes draft tokens from the tokens of sequences. It is called between steps, so it must be fast."""

    def start(self, seq: Sequence) -> Any:
        """Return the state of a new sequence or fork, which is kept through preemptions until `end`."""

    def propose(self, seq: Sequence, state: Any, most: int) -> Proposal:
        """Return up to `most` tokens that may follow `seq`, whose tokens are all known. Called after each step with new
        tokens."""

    def end(self, seq: Sequence, state: Any) -> None:
        """Drop the state of `seq`, which has ended."""


class ToBeDrafted:
    """Leaves draft tokens to a draft model, for sequences of up to `max_len` tokens: the worker makes them before the
    step that verifies them."""

    def __init__(self, max_len: int) -> None:
        self._max_len = max_len

    def start(self, seq: Sequence) -> None:
        """Do nothing: there is no state."""

    def propose(self, seq: Sequence, state: None, most: int) -> Proposal:
        return Proposal((DRAFT_PLACEHOLDER,) * min(most, self._max_len - seq.num_tokens))

    def end(self, seq: Sequence, state: None) -> None:
        """Do nothing: there is no state."""
