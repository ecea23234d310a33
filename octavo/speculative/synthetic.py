"""`synthetic_acceptance_rates`: how fast an engine would be if guesses were right so often. Answers are then wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.sampling.sampling_table import Samples


class SyntheticAcceptance:
    """Puts guesses, or what is none, in the place of sampled tokens. `rates` are by position, the chance that this
    guess and all before it are accepted, as vLLM has them."""

    def __init__(self, rates: Sequence[float], vocab_size: int) -> None:
        before = [1.0, *rates]
        # Of a guess, where those before it are accepted.
        self._chances = [rate / last if last else 0.0 for rate, last in zip(rates, before, strict=False)]
        self._vocab_size = vocab_size
        self._random = random.Random(0)

    def apply(self, samples: Samples, tokens: NDArray[np.int64], may_change: Callable[[int], bool]) -> None:
        """Change `tokens` [N], which were sampled, of the rows with guesses that `may_change`."""
        for row, (first, draft_tokens) in samples.drafted.items():
            if not may_change(row):
                continue
            for i, (draft_token, chance) in enumerate(zip(draft_tokens, self._chances, strict=False), first):
                if self._random.random() >= chance:
                    if tokens[i] == draft_token:
                        tokens[i] = (draft_token + 1) % self._vocab_size
                    break
                tokens[i] = draft_token
