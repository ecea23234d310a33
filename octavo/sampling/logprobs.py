"""Log-probabilities as requests see them: measured where the logits are, put into lists once they are on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.ops import Array, Ops
from octavo.request import TokenLogprobs


@dataclass(frozen=True, slots=True)
class MeasuredLogprobs:
    """Of N rows: tokens [N], their log-probabilities [N] and ranks [N], and of the K likeliest ones the tokens [N, K]
    and log-probabilities [N, K]."""

    arrays: tuple[Array, Array, Array, Array, Array]
    num_top: NDArray[np.int64]  # [N]: how many of the K each row asks for


def measure(ops: Ops, logits: Array, tokens: Array, num_top: NDArray[np.int64]) -> MeasuredLogprobs:
    """Log-probabilities of `tokens` [N] and of each row's `num_top` [N] most likely ones under logits [N, V]."""
    return MeasuredLogprobs((tokens, *ops.logprobs(logits, tokens, int(num_top.max()))), num_top)


def entries(arrays: Sequence[NDArray[Any]], num_top: NDArray[np.int64]) -> list[TokenLogprobs]:
    """`MeasuredLogprobs.arrays`, on the host by now, as messages."""
    return [
        TokenLogprobs([max(token, 0), *top_tokens[:k]], [logprob, *top_values[:k]], rank)
        for token, logprob, rank, top_tokens, top_values, k in zip(
            *(array.tolist() for array in arrays), num_top.tolist(), strict=True
        )
    ]
