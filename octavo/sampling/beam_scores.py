"""What beams need of the sampler: their log-probabilities as scores, and the best tokens of each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.ops import Array, Ops
from octavo.request import TokenLogprobs

# (sample, tokens to offer, temperature) of each sample that is a beam's
Beams = list[tuple[int, int, float]]


def score_beams(ops: Ops, logits: Array, beams: Beams) -> None:
    """Make log-probabilities of the beams' rows of logits [N, V], in place. Penalties and masks come after, as in
    `transformers`."""
    samples = np.array([n for n, _, _ in beams])
    ops.normalize(logits, samples, np.array([temperature or 1.0 for _, _, temperature in beams], np.float32))


def best_tokens(ops: Ops, scores: Array, beams: Beams) -> list[tuple[list[int], Array, Array]]:
    """(samples, their best tokens [M, K], the scores of those [M, K]) from scores [N, V]."""
    # Which of several equal tokens are in the top depends on how many are asked for: each row gets its own number.
    found = []
    for count in {count for _, count, _ in beams}:
        samples = [n for n, wanted, _ in beams if wanted == count]
        found.append((samples, *ops.top_tokens(scores, np.array(samples), count)))
    return found


def offers(samples: list[int], best: NDArray[Any], scores: NDArray[Any]) -> Iterator[tuple[int, TokenLogprobs]]:
    """(sample, its best tokens after the best of all) of each beam, of one of the `best_tokens`, on the host by now."""
    for n, ids, values in zip(samples, best.tolist(), scores.tolist(), strict=True):
        yield n, TokenLogprobs([ids[0], *ids], [values[0], *values], 1)
