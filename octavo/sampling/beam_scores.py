"""Scores for beam search: log-probabilities of the beams' tokens, and the best tokens of each beam."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.ops import Array, Ops
from octavo.request import TokenLogprobs

# (sample, number of tokens to offer, temperature) for each sample that belongs to a beam
Beams = list[tuple[int, int, float]]


def score_beams(ops: Ops, logits: Array, beams: Beams) -> None:
    """Turn the beams' rows of logits [N, V] into log-probabilities, in place. Penalties and masks come later, as in
    `transformers`."""
    samples = np.array([n for n, _, _ in beams])
    ops.normalize(logits, samples, np.array([temperature or 1.0 for _, _, temperature in beams], np.float32))


def best_tokens(ops: Ops, scores: Array, beams: Beams) -> list[tuple[list[int], Array, Array]]:
    """Return groups of (M samples, their best tokens [M, K], the scores of these tokens [M, K]) from scores [N, V]."""
    # The choice among tokens with equal scores depends on K, so each row is computed with its own K.
    found = []
    for count in {count for _, count, _ in beams}:
        samples = [n for n, wanted, _ in beams if wanted == count]
        found.append((samples, *ops.top_tokens(scores, np.array(samples), count)))
    return found


def offers(samples: list[int], best: NDArray[Any], scores: NDArray[Any]) -> Iterator[tuple[int, TokenLogprobs]]:
    """Yield (sample, its best tokens) for each beam in one group of `best_tokens`, whose arrays are on the host by now.
    Each entry begins with the best token, and the list of best tokens that follows repeats it."""
    for n, ids, values in zip(samples, best.tolist(), scores.tolist(), strict=True):
        yield n, TokenLogprobs([ids[0], *ids], [values[0], *values], 1)
