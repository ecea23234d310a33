"""How often guesses turn out right, counted for all sequences and for each one lately.

Every guess is compared with the tokens that came, whether a step has verified it or not, so that nothing has to be
tried out to be known.
"""

from __future__ import annotations

from octavo.speculative.proposer import NUM_LEVELS, Proposal

# Before anything is known: by level, which for lookups grows with the logarithm of the tokens that agree.
_FIRST = (0.7, 0.2, 0.35, 0.5, 0.7, 0.85, 0.9, 0.95) * 2
_FIRST_WEIGHT = 8.0  # guessed tokens that this counts for
_MEMORY = 400.0  # guessed tokens of a level: older ones count e times less
_SEQUENCE_MEMORY = 24.0  # of a sequence
_FORGET = 0.98
_MOST = 0.99  # nothing is certain


class Acceptance:
    """Of all sequences, by level."""

    def __init__(self) -> None:
        self.rates = list(_FIRST)
        self._weights = [_FIRST_WEIGHT] * NUM_LEVELS

    def observe(self, level: int, num_right: int, num_wrong: int) -> None:
        weight = self._weights[level]
        total = weight + num_right + num_wrong
        self.rates[level] = (weight * self.rates[level] + num_right) / total
        self._weights[level] = min(total, _MEMORY)


class SequenceAcceptance:
    """Of one sequence lately: how many of its guessed tokens were wrong, for one that was to be expected of their
    levels. So it tells something of levels that the sequence has not had yet."""

    __slots__ = ("num_expected", "num_wrong")

    def __init__(self) -> None:
        self.num_wrong = self.num_expected = 0.0

    def observe(self, num_right: int, num_wrong: int, all_sequences: float) -> None:
        """Tokens of a level that are right as often as `all_sequences` says."""
        count = num_right + num_wrong
        kept = (1 - 1 / _SEQUENCE_MEMORY) ** count
        self.num_wrong = self.num_wrong * kept + num_wrong
        self.num_expected = self.num_expected * kept + count * (1 - all_sequences)

    def forget(self) -> None:
        """A step without guesses: what is known grows old."""
        self.num_wrong *= _FORGET
        self.num_expected *= _FORGET

    def rate(self, all_sequences: float) -> float:
        """How often a token is right whose predecessors were, of a level at which `all_sequences` is usual."""
        ratio = (self.num_wrong + 1) / (self.num_expected + 1)
        return max(0.0, min(1 - ratio * (1 - all_sequences), _MOST))


def compare(proposal: Proposal, tokens: list[int]) -> tuple[int, int]:
    """How many of the guessed tokens turned out right, and (0 or 1) wrong. `tokens` are those that came."""
    for i, (drafted, token) in enumerate(zip(proposal.tokens, tokens, strict=False)):
        if drafted != token:
            return i, 1
    return min(len(proposal.tokens), len(tokens)), 0
