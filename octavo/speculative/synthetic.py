"""`synthetic_acceptance_rates`: measures the speed at given acceptance rates. Answers are wrong then."""

import random
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.sampling.sampling_table import Samples


class SyntheticAcceptance:
    """Replaces sampled tokens by draft tokens or by other tokens. `rates` are by position, as in vLLM: the probability
    that this draft token and all before it are accepted."""

    def __init__(self, rates: Sequence[float], vocab_size: int) -> None:
        before = [1.0, *rates]
        # Probability that a draft token is accepted if those before it are.
        self._chances = [rate / last if last else 0.0 for rate, last in zip(rates, before, strict=False)]
        self._vocab_size = vocab_size
        self._random = random.Random(0)

    def apply(self, samples: Samples, tokens: NDArray[np.int64], may_change: Callable[[int], bool]) -> None:
        """Change the sampled `tokens` [N] of rows with draft tokens, if `may_change` allows it."""
        for row, (first, draft_tokens) in samples.drafted.items():
            if not may_change(row):
                continue
            for i, (draft_token, chance) in enumerate(zip(draft_tokens, self._chances, strict=False), first):
                if self._random.random() >= chance:
                    if tokens[i] == draft_token:
                        tokens[i] = (draft_token + 1) % self._vocab_size
                    break
                tokens[i] = draft_token
