"""Log-probabilities for requests: measured on the device of the logits, and turned into lists once they are on the
host."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.ops import Array, Ops
from octavo.request import TokenLogprobs


@dataclass(frozen=True, slots=True)
class MeasuredLogprobs:
    """Log-probabilities of N rows. `arrays` has the tokens [N], their log-probabilities [N] and ranks [N], then the K
    most likely tokens [N, K] and their log-probabilities [N, K]."""

    arrays: tuple[Array, Array, Array, Array, Array]
    num_top: NDArray[np.int64]  # [N]: how many of the K each row asks for


def measure(ops: Ops, logits: Array, tokens: Array, num_top: NDArray[np.int64]) -> MeasuredLogprobs:
    """Return the log-probabilities under logits [N, V] of `tokens` [N], and of each row's `num_top` [N] most likely
    tokens."""
    return MeasuredLogprobs((tokens, *ops.logprobs(logits, tokens, int(num_top.max()))), num_top)


def measure_of(ops: Ops, logits: Array, samples: NDArray[np.int64], tokens: Sequence[Sequence[int]]) -> Array:
    """Return the log-probabilities of `tokens` of each of the rows `samples` [M] of logits [N, V]: [M, K], where K is
    the length of the longest list. Entries after a row's own tokens are meaningless."""
    asked = np.zeros((len(tokens), max(map(len, tokens))), np.int64)
    for row, own in zip(asked, tokens, strict=True):
        row[: len(own)] = own
    return ops.logprobs_of(logits, samples, asked)


def entries(arrays: Sequence[NDArray[Any]], num_top: NDArray[np.int64]) -> list[TokenLogprobs]:
    """Return `MeasuredLogprobs.arrays` as messages. The arrays are on the host by now."""
    return [
        TokenLogprobs([max(token, 0), *top_tokens[:k]], [logprob, *top_values[:k]], rank)
        for token, logprob, rank, top_tokens, top_values, k in zip(
            *(array.tolist() for array in arrays), num_top.tolist(), strict=True
        )
    ]
