"""What the sampler knows of each running sequence, held by row of the runner's tables, and gathered for a step.

Numbers that every request has are arrays, so that a step gathers them with one call each. Whatever only some requests
ask for (penalties, biases, masks) hides behind one flag a row, so that a plain batch pays nothing for it.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.ops.upload import upload
from octavo.plan import Admission
from octavo.sampling.beams import Beams
from octavo.sampling.structured import GrammarCompiler, GrammarTable, TokenMask
from octavo.sampling_params import LogitsProcessor, SamplingParams

_MAX_FLOAT32 = float(np.finfo(np.float32).max)  # beyond it a temperature would be infinite and its row NaN


class RowSettings:
    """The settings of one sequence that arrays do not hold, and what is worked out of them only once."""

    def __init__(self, params: SamplingParams, num_prompt_tokens: int, stop_token_ids: list[int]) -> None:
        self.params = params
        self.num_prompt_tokens = num_prompt_tokens
        self.stop_token_ids = stop_token_ids
        self.processors = [_with_prompt(processor) for processor in params.logits_processors or ()]
        self._bias: Tensor | None = None
        self._seen = _SeenTokens(num_prompt_tokens)

    @property
    def has_penalties(self) -> bool:
        params = self.params
        return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)

    def bias(self, vocab_size: int, device: torch.device) -> Tensor | None:
        """[vocab_size] float32, always on the same `device`, to add to the logits: the request's biases, and -inf for
        tokens that are not allowed."""
        params = self.params
        if self._bias is None and (params.logit_bias or params.allowed_token_ids is not None):
            bias = torch.zeros(vocab_size)
            if params.allowed_token_ids is not None:
                bias.fill_(float("-inf"))[params.allowed_token_ids] = 0.0
            if params.logit_bias:
                bias[list(params.logit_bias)] += torch.tensor(list(params.logit_bias.values()))
            self._bias = upload(bias, device)
        return self._bias

    def seen_tokens(self, tokens: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The distinct tokens of prompt and output [K], and how often each is in the output [K]."""
        return self._seen.update(tokens)


class _SeenTokens:
    """Counts the tokens of a growing sequence, reading each of them once."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._num_read = 0
        self._place: dict[int, int] = {}
        self._tokens = np.empty(256, np.int64)
        self._counts = np.zeros(256, np.float32)

    def update(self, tokens: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        for position in range(self._num_read, len(tokens)):
            token = int(tokens[position])
            place = self._place.setdefault(token, len(self._place))
            if place == len(self._tokens):
                self._tokens = np.concatenate([self._tokens, np.empty_like(self._tokens)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._tokens[place] = token
            self._counts[place] += position >= self._num_prompt_tokens
        self._num_read = len(tokens)
        return self._tokens[: len(self._place)], self._counts[: len(self._place)]


def _with_prompt(processor: LogitsProcessor) -> LogitsProcessor:
    """vLLM's older form takes (output_token_ids, logits), without the prompt."""
    try:
        num_parameters = len(inspect.signature(processor).parameters)
    except (TypeError, ValueError):  # some builtins do not say
        return processor
    if num_parameters != 2:
        return processor
    short: Any = processor
    return lambda prompt, output, logits: short(output, logits)


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
    masks: list[tuple[int, TokenMask]] = field(default_factory=list)  # samples that follow a grammar
    errors: dict[int, str] = field(default_factory=dict)  # samples whose grammar cannot be followed any further
    beams: Beams = field(default_factory=list)


class SamplingTable:
    """The sampling settings of the running sequences, by row."""

    def __init__(self, max_num_seqs: int, compiler: GrammarCompiler | None = None) -> None:
        self.settings: list[RowSettings | None] = [None] * max_num_seqs
        self._grammars = None if compiler is None else GrammarTable(compiler, max_num_seqs)
        self._is_special = np.zeros(max_num_seqs, bool)
        self._temperature = np.zeros(max_num_seqs, np.float32)
        self._top_p = np.ones(max_num_seqs, np.float32)
        self._top_k = np.zeros(max_num_seqs, np.int64)
        self._min_p = np.zeros(max_num_seqs, np.float32)
        self._seed = np.zeros(max_num_seqs, np.uint64)
        self._index = np.zeros(max_num_seqs, np.uint64)
        self._num_prompt_tokens = np.zeros(max_num_seqs, np.int64)
        self._num_logprobs = np.zeros(max_num_seqs, np.int64)
        self._beams: dict[int, tuple[int, float]] = {}  # rows of beams: tokens to offer, temperature
        self._demanding: set[int] = set()  # rows that ask for more than the most likely token

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
        self._beams.pop(row, None)
        if params.use_beam_search:
            # As many as could be chosen from this beam alone, were its likeliest tokens those that end it.
            num_offered = max(params.num_sequences + len(admission.stop_token_ids), params.logprobs or 0)
            self._beams[row] = num_offered, params.temperature
            self._temperature[row] = 0.0
            self._num_logprobs[row] = -1  # they have their own
        if self._grammars is not None:
            output = admission.token_ids[admission.num_prompt_tokens :]
            self._grammars.admit(row, params, output, admission.stop_token_ids)
        is_demanding = (
            params.temperature > 0 or params.wants_logprobs or self._is_special[row] or params.grammar is not None
        )
        (self._demanding.add if is_demanding else self._demanding.discard)(row)

    def build(
        self, rows: NDArray[np.int64], forks: NDArray[np.int64], lengths: NDArray[np.int64], tokens: NDArray[np.int32]
    ) -> SamplingBatch | None:
        """Gather the samples of `rows` [N]: `forks` counts the samples drawn from one row, `lengths` are the tokens
        that each row has, `tokens` [max_num_seqs, max_model_len + 1] the table of them. None when all that they ask for
        is the most likely token."""
        if self._demanding.isdisjoint(rows.tolist()):
            return None
        masks, errors = ([], {}) if self._grammars is None else self._grammars.masks(rows)
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
            beams=[(n, *self._beams[row]) for n, row in enumerate(rows.tolist()) if row in self._beams]
            if self._beams
            else [],
            masks=masks,
            errors=errors,
        )

    def advance(self, rows: NDArray[np.int64], forks: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        """`tokens` [N] were drawn for `rows` [N]; fork 0 of a row continues it."""
        if self._grammars is None or self._grammars.is_empty:
            return
        if forks.any():
            continues = forks == 0
            rows, tokens = rows[continues], tokens[continues]
        self._grammars.advance(rows, tokens)


def _is_special(params: SamplingParams) -> bool:
    return bool(params.follows_output or params.logit_bias or params.allowed_token_ids is not None)
