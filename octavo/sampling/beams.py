"""What beams need of the sampler: their log-probabilities as scores, and the best tokens of each."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from octavo.ops.upload import upload
from octavo.request import TokenLogprobs

# (sample, tokens to offer, temperature) of each sample that is a beam's
Beams = list[tuple[int, int, float]]


def score_beams(logits: Tensor, beams: Beams) -> None:
    """Make log-probabilities of the beams' rows of logits [N, V], in place. Penalties and masks come after, as in
    `transformers`."""
    rows = upload(torch.tensor([n for n, _, _ in beams]), logits.device)
    temperatures = upload(torch.tensor([temperature or 1.0 for _, _, temperature in beams]), logits.device)
    logits[rows] = (logits[rows] / temperatures[:, None]).log_softmax(-1)


def best_tokens(scores: Tensor, beams: Beams) -> list[tuple[list[int], Tensor, Tensor]]:
    """(samples, their best tokens [M, K], the scores of those [M, K]) from scores [N, V]."""
    # Which of several equal tokens are in the top depends on how many are asked for: each row gets its own number.
    found = []
    for count in {count for _, count, _ in beams}:
        rows = [n for n, wanted, _ in beams if wanted == count]
        top = scores[upload(torch.tensor(rows), scores.device)].topk(min(count, scores.shape[1]), dim=-1)
        found.append((rows, top.indices, top.values))
    return found


def offers(samples: list[int], best: Tensor, scores: Tensor) -> Iterator[tuple[int, TokenLogprobs]]:
    """(sample, its best tokens after the best of all) of each beam, of one of the `best_tokens`, on the host by now."""
    for n, ids, values in zip(samples, best.tolist(), scores.tolist(), strict=True):
        yield n, TokenLogprobs([ids[0], *ids], [values[0], *values], 1)
