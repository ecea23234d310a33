"""The reference's operations from logits to tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.ops import NO_TOKEN
from octavo.ops.torch_arrays import to_torch


def argmax(logits: Tensor) -> Tensor:
    # amax returns NaN if a logit is NaN.
    return torch.where(logits.amax(-1).isfinite(), logits.argmax(-1), NO_TOKEN)


def penalize(
    logits: Tensor, samples: NDArray[Any], tokens: NDArray[Any], counts: NDArray[Any], repetition: NDArray[Any],
    frequency: NDArray[Any], presence: NDArray[Any], last_tokens: Tensor | None = None,
) -> None:  # fmt: skip
    seen: dict[tuple[int, int], float] = {}
    for s, t, count in zip(samples.tolist(), tokens.tolist(), counts.tolist(), strict=True):
        if t < 0:
            assert last_tokens is not None
            t = int(last_tokens[s])
        seen[s, t] = seen.get((s, t), 0.0) + count
    for (s, t), count in seen.items():
        logit = logits[s, t]
        logits[s, t] = logit / repetition[s] if logit > 0 else logit * repetition[s]
        logits[s, t] -= frequency[s] * count + presence[s] * (count > 0)


def mask_tokens(logits: Tensor, words: NDArray[Any], samples: NDArray[Any]) -> None:
    bits = (to_torch(words)[:, :, None] >> torch.arange(32, dtype=torch.int32)) & 1
    is_allowed = torch.zeros(len(samples), logits.shape[1], dtype=torch.bool)
    known = bits.flatten(1)[:, : logits.shape[1]].bool()
    is_allowed[:, : known.shape[1]] = known
    rows = to_torch(samples)
    logits[rows] = logits[rows].masked_fill(~is_allowed, float("-inf"))


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniforms: Tensor
) -> Tensor:
    best = argmax(logits).tolist()
    tokens = []
    for r in range(len(logits)):
        if temperature[r] == 0 or best[r] == NO_TOKEN:
            tokens.append(best[r])
            continue
        probs = ((logits[r] - logits[r].max()) / temperature[r]).double().softmax(-1)
        probs[probs < min_p[r] * probs.max()] = 0
        if 0 < top_k[r] < len(probs):
            probs[probs < probs.topk(int(top_k[r])).values[-1]] = 0
        if top_p[r] < 1:
            ranked = probs.sort(descending=True).values
            last = int((ranked.cumsum(-1) < top_p[r] * probs.sum()).sum())
            probs[probs < ranked[min(last, len(ranked) - 1)]] = 0
        times = exponentials(float(uniforms[r]), len(probs)) / probs.cpu()
        tokens.append(int(times.nan_to_num(torch.inf).argmin()))
    return torch.tensor(tokens, device=logits.device)


def exponentials(uniform: float, count: int) -> Tensor:
    """Return the exponential random number of each token, as `Ops.sample` defines it: [count] float64."""
    bits = int(uniform * 2**53)
    low, high = bits & 0xFFFFFFFF, (bits >> 32) * 0x27D4EB2F
    tokens = np.arange(count, dtype=np.uint32)

    def mixed(x: NDArray[np.uint32], *steps: int) -> NDArray[np.uint32]:
        for shift, factor in zip(steps[::2], (*steps[1::2], 1), strict=True):
            x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
        return x

    x = mixed(tokens * np.uint32(0x9E3779B1) + np.uint32(low), 16, 0x85EBCA6B, 13, 0xC2B2AE35, 16)
    parts = [
        mixed(x + np.uint32((high + more) & 0xFFFFFFFF), 16, 0x7FEB352D, 15, 0x846CA68B, 16) for more in (0, 0x165667B1)
    ]
    coarse, rest = (torch.from_numpy(part.astype(np.float64)) for part in parts)
    return -torch.log1p(-(coarse + (rest + 0.5) * 2**-32) * 2**-32)
