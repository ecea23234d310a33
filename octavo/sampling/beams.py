"""What beams need of the sampler: their log-probabilities as scores, and the best tokens of each."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from octavo.engine.wire import TokenLogprobs

# (sample, tokens to offer, temperature) of each sample that is a beam's
Beams = list[tuple[int, int, float]]


def score_beams(logits: Tensor, beams: Beams) -> None:
    """Make log-probabilities of the beams' rows of logits [N, V], in place. Penalties and masks come after, as in
    `transformers`."""
    rows = torch.tensor([n for n, _, _ in beams])
    temperatures = torch.tensor([temperature or 1.0 for _, _, temperature in beams])
    logits[rows] = (logits[rows] / temperatures[:, None]).log_softmax(-1)


def offers(scores: Tensor, tokens: list[int], beams: Beams) -> Iterator[tuple[int, TokenLogprobs]]:
    """(sample, its best tokens after the sampled one) of each beam, from scores [N, V] and the tokens sampled [N]."""
    # Which of several equal tokens are in the top depends on how many are asked for: each row gets its own number.
    for count in {count for _, count, _ in beams}:
        rows = [n for n, wanted, _ in beams if wanted == count]
        top = scores[torch.tensor(rows)].topk(min(count, scores.shape[1]), dim=-1)
        for n, ids, values in zip(rows, top.indices.tolist(), top.values.tolist(), strict=True):
            yield n, TokenLogprobs([tokens[n], *ids], [values[0], *values], 1)
