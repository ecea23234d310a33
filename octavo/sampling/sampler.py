"""Chooses tokens: greedy, or by inverting the cumulative distribution at a number that the request's seed determines.

Each row is computed on its own, with thresholds that do not depend on how many candidates other rows asked for, so that
a sample is a function of its logits and its request alone.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.engine.wire import TokenLogprobs
from octavo.ops import Ops
from octavo.sampling.batch import SamplingBatch
from octavo.sampling.processors import process_logits
from octavo.sampling.random import uniform
from octavo.sampling_params import MAX_LOGPROBS

# Most nuclei are smaller than this; rows whose nucleus is not are sorted whole.
_NUCLEUS_CANDIDATES = 512

_NOTHING_TO_CHOOSE = (
    "no token could be chosen: allowed_token_ids, bad_words, min_tokens and logits_processors together leave none with a "
    "finite logit."
)


class Sampler:
    """Stateless but for its backend."""

    def __init__(self, ops: Ops) -> None:
        self.ops = ops

    def sample(
        self, logits: Tensor, batch: SamplingBatch
    ) -> tuple[NDArray[np.int64], list[TokenLogprobs | None], dict[int, str]]:
        """logits [N, V] float32, which are overwritten -> tokens [N], their log-probabilities where asked for, and what
        went wrong by sample: a caller's processor failed, or nothing was left to choose from."""
        wanted = np.flatnonzero(batch.num_logprobs >= 0)
        raw = logits[torch.from_numpy(wanted)] if len(wanted) else None  # before penalties, as the model said
        errors = process_logits(logits, batch.special) if batch.special else {}
        is_random = batch.temperature > 0
        if is_random.all():
            tokens, best = self._draw(logits, batch, np.arange(len(is_random)))
        else:
            greedy = self.ops.argmax(logits)
            tokens, best = greedy.numpy(), logits.gather(1, greedy[:, None])[:, 0].numpy()
            if is_random.any():
                rows = np.flatnonzero(is_random)
                tokens[rows], best[rows] = self._draw(logits[torch.from_numpy(rows)], batch, rows)
        # Masks that leave nothing, and logits that are not numbers, end their own request and nothing else.
        for n in np.flatnonzero(~np.isfinite(best)).tolist():
            errors.setdefault(n, _NOTHING_TO_CHOOSE)
        logprobs: list[TokenLogprobs | None] = [None] * len(tokens)
        if raw is not None:
            found = token_logprobs(raw, tokens[wanted], batch.num_logprobs[wanted])
            for n, entry in zip(wanted.tolist(), found, strict=True):
                logprobs[n] = entry
        return tokens, logprobs, errors

    def _draw(
        self, logits: Tensor, batch: SamplingBatch, rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Draw from `logits` [R, V], whose settings are those of `rows` [R] of the batch -> tokens [R] and the largest
        logit [R] of each row; a token whose row has no finite largest logit is meaningless."""
        best = logits.amax(-1, keepdim=True)
        # Dividing by a tiny temperature must not overflow: the largest logit becomes 0 first.
        logits = (logits - best) / torch.from_numpy(batch.temperature[rows])[:, None]
        probs = logits.softmax(-1)
        min_p = batch.min_p[rows]
        if (min_p > 0).any():
            floor = probs.amax(-1, keepdim=True) * torch.from_numpy(min_p)[:, None]
            probs.masked_fill_(probs < floor, 0.0)
        top_k, top_p = batch.top_k[rows], batch.top_p[rows]
        narrowed = np.flatnonzero(((top_k > 0) & (top_k < probs.shape[1])) | (top_p < 1))
        if len(narrowed):
            chosen = torch.from_numpy(narrowed)
            kept = probs[chosen]
            floor = _nucleus_floor(kept, top_k[narrowed], top_p[narrowed])
            probs[chosen] = kept.masked_fill_(kept < floor[:, None], 0.0)
        cumulative = probs.double().cumsum(-1)
        total = cumulative[:, -1:]
        dice = torch.from_numpy(uniform(batch.seed[rows], batch.index[rows], batch.position[rows]))[:, None]
        target = torch.minimum(dice * total, torch.nextafter(total, torch.zeros(1, dtype=total.dtype)))
        tokens = torch.searchsorted(cumulative, target, right=True).clamp_(max=probs.shape[1] - 1)  # NaN is nowhere
        return tokens[:, 0].numpy(), best[:, 0].numpy()


def _nucleus_floor(probs: Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float32]) -> Tensor:
    """The least probability [R] that a token of probs [R, V] needs: that of the k-th most likely token, or of the last
    one of the smallest set, among those k, that has `top_p` of their mass. Equal probabilities stay or go together."""
    vocab = probs.shape[1]
    top_k = np.where((top_k > 0) & (top_k < vocab), top_k, vocab)
    nucleus = top_p < 1
    candidates = int(np.max(np.where(nucleus, np.minimum(top_k, _NUCLEUS_CANDIDATES), top_k % vocab)))
    values = probs.topk(max(candidates, 1), dim=-1).values
    floor = torch.zeros(len(probs))
    for r in range(len(probs)):
        k = int(top_k[r])
        if not nucleus[r]:
            floor[r] = values[r, k - 1]
            continue
        ranked = values[r, : min(k, _NUCLEUS_CANDIDATES)]
        if k == vocab:
            mass = probs[r].sum(dtype=torch.float64)
        elif k <= len(ranked):
            mass = ranked[:k].sum(dtype=torch.float64)
        else:
            mass = probs[r].topk(k).values.sum(dtype=torch.float64)
        wanted = mass * float(top_p[r])
        cumulative = ranked.double().cumsum(-1)
        if len(ranked) < k and cumulative[-1] < wanted:
            # The k tokens below this hold less than the rest of the mass together: they need no sorting.
            negligible = 0.5 * (mass - wanted) / k
            ranked = probs[r][probs[r] >= negligible].sort(descending=True).values[:k]
            cumulative = ranked.double().cumsum(-1)
        last = int(torch.searchsorted(cumulative, wanted))
        floor[r] = ranked[min(last, len(ranked) - 1)]
    return floor


def token_logprobs(logits: Tensor, tokens: NDArray[np.int64], num_top: NDArray[np.int64]) -> list[TokenLogprobs]:
    """Log-probabilities of `tokens` [N] and of each row's `num_top` [N] most likely ones under logits [N, V]."""
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(1, torch.from_numpy(tokens)[:, None])
    ranks = (logprobs > chosen).sum(-1) + 1
    # Which of several equal tokens are in the top depends on how many are asked for: always ask for the same number.
    top = logprobs.topk(min(MAX_LOGPROBS, logprobs.shape[1]) if num_top.max() > 0 else 0, dim=-1)
    return [
        TokenLogprobs([token, *top_ids[:k]], [logprob, *top_values[:k]], rank)
        for token, logprob, rank, top_ids, top_values, k in zip(
            tokens.tolist(),
            chosen[:, 0].tolist(),
            ranks.tolist(),
            top.indices.tolist(),
            top.values.tolist(),
            num_top.tolist(),
            strict=True,
        )
    ]
