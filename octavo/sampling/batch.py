"""What the sampler knows of each running sequence, held by row of the runner's tables, and gathered for a step.

Numbers that every request has are arrays, so that a step gathers them with one call each. Whatever only some requests
ask for (penalties, biases, masks) hides behind one flag a row, so that a plain batch pays nothing for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.sampling_params import SamplingParams
from octavo.scheduling.plan import Admission

_MAX_FLOAT32 = float(np.finfo(np.float32).max)  # beyond it a temperature would be infinite and its row NaN


@dataclass(frozen=True, slots=True)
class RowSettings:
    """The settings of one sequence that arrays do not hold."""

    params: SamplingParams
    num_prompt_tokens: int
    stop_token_ids: list[int]


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """N samples to draw. Arrays are [N]."""

    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    top_k: NDArray[np.int64]  # 0 is all
    min_p: NDArray[np.float32]
    seed: NDArray[np.uint64]
    index: NDArray[np.uint64]
    position: NDArray[np.uint64]  # output tokens before this one
    num_logprobs: NDArray[np.int64]  # -1 is none
    special: list[
        tuple[int, RowSettings, NDArray[np.int32]]
    ]  # samples whose logits are processed: (n, settings, tokens)


class SamplingTable:
    """The sampling settings of the running sequences, by row."""

    def __init__(self, max_num_seqs: int) -> None:
        self.settings: list[RowSettings | None] = [None] * max_num_seqs
        self._is_special = np.zeros(max_num_seqs, bool)
        self._temperature = np.zeros(max_num_seqs, np.float32)
        self._top_p = np.ones(max_num_seqs, np.float32)
        self._top_k = np.zeros(max_num_seqs, np.int64)
        self._min_p = np.zeros(max_num_seqs, np.float32)
        self._seed = np.zeros(max_num_seqs, np.uint64)
        self._index = np.zeros(max_num_seqs, np.uint64)
        self._num_prompt_tokens = np.zeros(max_num_seqs, np.int64)
        self._num_logprobs = np.zeros(max_num_seqs, np.int64)

    def admit(self, admission: Admission) -> None:
        row, params = admission.row, admission.params
        self.settings[row] = RowSettings(params, admission.num_prompt_tokens, admission.stop_token_ids)
        self._is_special[row] = _is_special(params)
        self._temperature[row] = min(params.temperature, _MAX_FLOAT32)
        self._top_p[row] = params.top_p
        self._top_k[row] = max(params.top_k, 0)
        self._min_p[row] = params.min_p
        self._seed[row] = admission.seed
        self._index[row] = admission.index
        self._num_prompt_tokens[row] = admission.num_prompt_tokens
        self._num_logprobs[row] = (params.logprobs or 0) if params.wants_logprobs else -1

    def build(
        self, rows: NDArray[np.int64], forks: NDArray[np.int64], lengths: NDArray[np.int64], tokens: NDArray[np.int32]
    ) -> SamplingBatch:
        """Gather the samples of `rows` [N]: `forks` counts the samples drawn from one row, `lengths` are the tokens
        that each row has, `tokens` [max_num_seqs, max_model_len + 1] the table of them."""
        return SamplingBatch(
            temperature=self._temperature[rows],
            top_p=self._top_p[rows],
            top_k=self._top_k[rows],
            min_p=self._min_p[rows],
            seed=self._seed[rows],
            index=self._index[rows] + forks.astype(np.uint64),
            position=(lengths - self._num_prompt_tokens[rows]).astype(np.uint64),
            num_logprobs=self._num_logprobs[rows],
            special=[
                (int(n), settings, tokens[rows[n], : lengths[n]])
                for n in np.flatnonzero(self._is_special[rows])
                if (settings := self.settings[rows[n]]) is not None
            ],
        )


def _is_special(params: SamplingParams) -> bool:
    return bool(
        params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
        or params.min_tokens
        or params.logit_bias
        or params.allowed_token_ids is not None
        or params.bad_words_token_ids
        or params.logits_processors
    )
