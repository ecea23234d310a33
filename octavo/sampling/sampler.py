"""Chooses tokens: greedy, or by inverting the cumulative distribution at a number that the request's seed determines.

Both are row-wise operations of the backend, so a sample is a function of its logits and its request alone.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.ops import Ops
from octavo.request import TokenLogprobs
from octavo.sampling.batch import SamplingBatch
from octavo.sampling.beams import best_tokens, offers, score_beams
from octavo.sampling.logprobs import entries, measure
from octavo.sampling.processors import process_logits
from octavo.sampling.random import uniform

NOTHING_TO_CHOOSE = (
    "no token could be chosen: allowed_token_ids, bad_words, min_tokens, structured_outputs and logits_processors "
    "together leave none with a finite logit."
)


class Sampler:
    """Stateless but for its backend."""

    def __init__(self, ops: Ops) -> None:
        self.ops = ops

    def sample(
        self, logits: Tensor, best: Tensor, batch: SamplingBatch | None
    ) -> tuple[NDArray[np.int64], list[TokenLogprobs | None] | None, dict[int, str]]:
        """logits [N, V] float32, which are overwritten, and their argmax [N] int64 -> tokens [N], their
        log-probabilities if any are asked for, and what went wrong by sample: a caller's processor failed, or nothing
        was left to choose from. Without a batch the tokens are the most likely ones."""
        if batch is None:
            return best.numpy(), None, _nothing_to_choose(logits, best)
        wanted = np.flatnonzero(batch.num_logprobs >= 0)
        raw = logits[torch.from_numpy(wanted)] if len(wanted) else None  # before penalties, as the model said
        errors = batch.errors
        if batch.beams:
            score_beams(logits, batch.beams)
        if batch.masks:
            self._follow_grammars(logits, best, batch)
        if batch.special:
            errors = process_logits(logits, batch.special, self.ops) | errors
            best = self.ops.argmax(logits)
        errors = _nothing_to_choose(logits, best) | errors
        tokens: NDArray[np.int64] = best.numpy()
        rows = np.flatnonzero(batch.temperature > 0)
        if len(rows):
            chosen = logits if len(rows) == len(tokens) else logits[torch.from_numpy(rows)]
            tokens[rows] = self.ops.sample(
                chosen,
                torch.from_numpy(batch.temperature[rows]),
                torch.from_numpy(batch.top_k[rows]),
                torch.from_numpy(batch.top_p[rows]),
                torch.from_numpy(batch.min_p[rows]),
                torch.from_numpy(uniform(batch.seed[rows], batch.index[rows], batch.position[rows])),
            ).numpy()
        if raw is None and not batch.beams:
            return tokens, None, errors
        logprobs: list[TokenLogprobs | None] = [None] * len(tokens)
        if raw is not None:
            measured = token_logprobs(raw, tokens[wanted], batch.num_logprobs[wanted])
            for n, entry in zip(wanted.tolist(), measured, strict=True):
                logprobs[n] = entry
        for found in best_tokens(logits, batch.beams):
            for n, entry in offers(*found):
                logprobs[n] = entry
        return tokens, logprobs, errors

    def _follow_grammars(self, logits: Tensor, best: Tensor, batch: SamplingBatch) -> None:
        """Take the tokens that grammars do not allow out of `logits`, and set `best` right, both in place.

        Where nothing but the most likely token is asked for and it is allowed, there is nothing to do.
        """
        rows, chosen = logits.numpy(), best.numpy()
        special = {n for n, _, _ in batch.special}
        for n, mask in batch.masks:
            is_allowed = mask.allows(int(chosen[n]))
            if is_allowed and n not in special and batch.temperature[n] == 0:
                continue
            mask.apply(rows[n])
            if not is_allowed:
                chosen[n] = self.ops.argmax(logits[n : n + 1])[0]


def _nothing_to_choose(logits: Tensor, best: Tensor) -> dict[int, str]:
    """Masks that leave nothing, and logits that are not numbers, end their own request and nothing else."""
    highest = logits.numpy()[np.arange(len(best)), best.numpy()].tolist()
    if math.isfinite(sum(highest)):
        return {}
    return {n: NOTHING_TO_CHOOSE for n, logit in enumerate(highest) if not math.isfinite(logit)}


def token_logprobs(logits: Tensor, tokens: NDArray[np.int64], num_top: NDArray[np.int64]) -> list[TokenLogprobs]:
    """Log-probabilities of `tokens` [N] and of each row's `num_top` [N] most likely ones under logits [N, V]."""
    return entries(measure(logits, torch.from_numpy(tokens), num_top).tensors, num_top)
