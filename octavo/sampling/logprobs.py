"""Log-probabilities as requests see them: measured where the logits are, put into lists once they are on the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from octavo.request import TokenLogprobs
from octavo.sampling_params import MAX_LOGPROBS


@dataclass(frozen=True, slots=True)
class MeasuredLogprobs:
    """Of N rows: of the `tokens` [N] themselves, and of the K most likely ones beside them."""

    tokens: Tensor  # [N] int64
    chosen: Tensor  # [N]
    ranks: Tensor  # [N], 1 for the most likely
    top_tokens: Tensor  # [N, K]
    top_values: Tensor  # [N, K], best first
    num_top: NDArray[np.int64]  # [N]: how many of the K each row asks for

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.tokens, self.chosen, self.ranks, self.top_tokens, self.top_values


def measure(logits: Tensor, tokens: Tensor, num_top: NDArray[np.int64]) -> MeasuredLogprobs:
    """Log-probabilities of `tokens` [N] and of each row's `num_top` [N] most likely ones under logits [N, V]."""
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(1, tokens[:, None])
    ranks = (logprobs > chosen).sum(-1) + 1
    # Which of several equal tokens are in the top depends on how many are asked for: always ask for the same number.
    top = logprobs.topk(min(MAX_LOGPROBS, logprobs.shape[1]) if num_top.max() > 0 else 0, dim=-1)
    return MeasuredLogprobs(tokens, chosen[:, 0], ranks, top.indices, top.values, num_top)


def entries(tensors: tuple[Tensor, ...] | list[Tensor], num_top: NDArray[np.int64]) -> list[TokenLogprobs]:
    """`MeasuredLogprobs.tensors`, on the host by now, as messages."""
    return [
        TokenLogprobs([token, *top_tokens[:k]], [logprob, *top_values[:k]], rank)
        for token, logprob, rank, top_tokens, top_values, k in zip(
            *(tensor.tolist() for tensor in tensors), num_top.tolist(), strict=True
        )
    ]
