"""How often draft tokens are accepted: counted for all sequences, and recently for each sequence. Every proposal is
compared with the tokens that followed, even if no step verified it, so that rates are known without trials.
"""

from octavo.speculative.proposer import NUM_LEVELS, Proposal

# The prior rates, by level; for lookups the level grows with the logarithm of the number of tokens that agree.
_FIRST = (0.7, 0.2, 0.35, 0.5, 0.7, 0.85, 0.9, 0.95) * 2
_FIRST_WEIGHT = 8.0  # draft tokens that the prior counts for
_MEMORY = 400.0  # draft tokens of a level after which older ones count e times less
_SEQUENCE_MEMORY = 24.0  # the same, for a sequence
_FORGET = 0.98
_MOST = 0.99  # upper bound of a rate


class Acceptance:
    """The acceptance rates of all sequences, by level."""

    def __init__(self) -> None:
        self.rates = list(_FIRST)
        self._weights = [_FIRST_WEIGHT] * NUM_LEVELS

    def observe(self, level: int, num_right: int, num_wrong: int) -> None:
        weight = self._weights[level]
        total = weight + num_right + num_wrong
        self.rates[level] = (weight * self.rates[level] + num_right) / total
        self._weights[level] = min(total, _MEMORY)


class SequenceAcceptance:
    """The recent acceptance of one sequence: rejected draft tokens, relative to those expected from their levels. So
    the ratio also predicts levels that the sequence has not had yet."""

    __slots__ = ("num_expected", "num_wrong")

    def __init__(self) -> None:
        self.num_wrong = self.num_expected = 0.0

    def observe(self, num_right: int, num_wrong: int, all_sequences: float) -> None:
        """Count accepted and rejected tokens of a level whose usual rate is `all_sequences`."""
        count = num_right + num_wrong
        kept = (1 - 1 / _SEQUENCE_MEMORY) ** count
        self.num_wrong = self.num_wrong * kept + num_wrong
        self.num_expected = self.num_expected * kept + count * (1 - all_sequences)

    def forget(self) -> None:
        """Let the counts age by a step without draft tokens."""
        self.num_wrong *= _FORGET
        self.num_expected *= _FORGET

    def rate(self, all_sequences: float) -> float:
        """Return the rate at which a token is accepted if those before it are, at a level whose usual rate is
        `all_sequences`."""
        ratio = (self.num_wrong + 1) / (self.num_expected + 1)
        return max(0.0, min(1 - ratio * (1 - all_sequences), _MOST))


def compare(proposal: Proposal, tokens: list[int]) -> tuple[int, int]:
    """Return how many tokens of a proposal agree with `tokens`, which followed, and how many (0 or 1) do not."""
    for i, (drafted, token) in enumerate(zip(proposal.tokens, tokens, strict=False)):
        if drafted != token:
            return i, 1
    return min(len(proposal.tokens), len(tokens)), 0
