"""The sampling settings of each running sequence, by row of the runner's tables, gathered for each step.

Settings that every request has are arrays, so that a step gathers each with one call. Settings that only some requests
use (penalties, biases, masks) are behind one flag a row, so that a plain batch pays nothing for them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial, wraps
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.sampling.beam_scores import Beams
from octavo.sampling.draft_verification import count_valid_tokens
from octavo.sampling.processor_classes import PerSequence
from octavo.sampling_params import LogitsProcessor, SamplingParams
from octavo.step_plan import Admission
from octavo.structured_output.grammar_matching import GrammarCompiler, GrammarTable, TokenMask

# The settings that every request has, each an array.
_SETTINGS: dict[str, type[np.generic]] = {
    "temperature": np.float32,
    "top_p": np.float32,
    "top_k": np.int64,  # 0: all tokens
    "min_p": np.float32,
    "seed": np.uint64,
    "index": np.uint64,
    "num_prompt_tokens": np.int64,
    "num_logprobs": np.int64,  # -1: none
}
# Beyond these bounds temperatures, and logits divided by them, become 0 or infinite in float32; so does top_p.
_LEAST, _MOST = 1e-30, float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class Samples:
    """The N samples that a step draws. Fork 0 of a row continues the row."""

    rows: NDArray[np.int64]
    forks: NDArray[np.int64]
    lengths: NDArray[np.int64]  # tokens of the row before the sample, draft tokens included
    # For each row with draft tokens: the index of its first sample, and the draft tokens.
    drafted: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)

    def valid(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which of the sampled `tokens` [N] are valid: tokens after a rejected draft token are not."""
        is_valid = np.ones(len(tokens), bool)
        for first, draft_tokens in self.drafted.values():
            sampled = tokens[first : first + len(draft_tokens) + 1].tolist()
            is_valid[first + count_valid_tokens(draft_tokens, sampled) : first + len(sampled)] = False
        return is_valid


class RowSettings:
    """The settings of one sequence that are not in arrays, and values computed from them once."""

    def __init__(
        self, params: SamplingParams, num_prompt_tokens: int, stop_token_ids: list[int], is_embedded: bool = False
    ) -> None:
        self.params = params
        self.num_prompt_tokens = num_prompt_tokens
        self.stop_token_ids = stop_token_ids
        self.processors = [
            _with_prompt(one.for_sequence() if isinstance(one, PerSequence) else one)
            for one in params.logits_processors or ()
        ]
        self._allowed_words: NDArray[np.int32] | None = None
        self.seen = SeenTokens(num_prompt_tokens, is_embedded)

    @cached_property
    def bias(self) -> tuple[NDArray[np.int64], NDArray[np.float32]] | None:
        """Return the biased tokens, and the values to add to their logits; None without biases."""
        bias = self.params.logit_bias
        return (np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32)) if bias else None

    def allowed_words(self, vocab_size: int) -> NDArray[np.int32] | None:
        """Return the allowed tokens as bits, [W] int32, or None if all tokens are allowed."""
        allowed = self.params.allowed_token_ids
        if self._allowed_words is None and allowed is not None:
            bits = np.zeros(-(-vocab_size // 32) * 32, bool)
            bits[allowed] = True
            self._allowed_words = np.packbits(bits, bitorder="little").view(np.int32)
        return self._allowed_words


class SeenTokens:
    """Counts the tokens of a growing sequence, reading each token once."""

    def __init__(self, num_prompt_tokens: int, is_embedded: bool = False) -> None:
        """A prompt that `is_embedded` has no tokens, so penalties ignore it."""
        self._num_prompt_tokens, self._is_embedded = num_prompt_tokens, is_embedded
        self._num_read = 0
        self._place: dict[int, int] = {}
        self._tokens = np.empty(0, np.int64)
        self._counts = np.empty(0, np.float32)

    def of(self, tokens: NDArray[np.int32], num_settled: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the distinct tokens of prompt and output [K], and how often each occurs in the output [K]. Tokens from
        `num_settled` on are draft tokens; they are counted for this call only."""
        if not self._num_read:
            self._read_prompt(tokens[: self._num_prompt_tokens])
        for token in tokens[self._num_read : num_settled].tolist():
            self._count(token, 1)
        self._num_read = num_settled
        num_settled_places = len(self._place)
        draft_tokens = tokens[num_settled:].tolist()
        for token in draft_tokens:
            self._count(token, 1)
        found = self._tokens[: len(self._place)].copy(), self._counts[: len(self._place)].copy()
        for token in draft_tokens:
            self._count(token, -1)
        while len(self._place) > num_settled_places:
            self._place.popitem()
        return found

    def _read_prompt(self, prompt: NDArray[np.int32]) -> None:
        distinct = np.unique(prompt[: 0 if self._is_embedded else None]).astype(np.int64)
        self._num_read = len(prompt)
        self._place = {token: place for place, token in enumerate(distinct.tolist())}
        self._tokens = np.concatenate([distinct, np.empty(256, np.int64)])
        self._counts = np.zeros(len(self._tokens), np.float32)

    def _count(self, token: int, number: int) -> None:
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty_like(self._tokens)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._tokens[place] = token
        self._counts[place] += number


def _with_prompt(processor: LogitsProcessor) -> LogitsProcessor:
    """Return the processor in the form (prompt, output, logits). vLLM's older form takes (output_token_ids, logits)
    only."""
    try:
        num_parameters = len(inspect.signature(processor).parameters)
    except (TypeError, ValueError):  # some builtins have no signature
        return processor
    if num_parameters != 2:
        return processor
    short: Any = processor

    @wraps(processor)  # errors name the caller's processor
    def with_prompt(prompt: list[int], output: list[int], logits: Any) -> Any:
        return short(output, logits)

    return with_prompt


class SpecialSample(NamedTuple):
    """A sample whose logits are processed."""

    sample: int
    settings: RowSettings
    tokens: NDArray[np.int32]  # tokens of its row before the sample, without an awaited one
    num_settled: int  # number of `tokens` before the draft tokens
    awaits_token: bool = False  # only the device knows the last token before the sample

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) + self.awaits_token - self.settings.num_prompt_tokens


Masks = tuple[list[tuple[int, TokenMask]], dict[int, str]]


def _no_masks() -> Masks:
    return [], {}


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """N samples to draw."""

    settings: dict[str, NDArray[Any]]  # by name of `_SETTINGS`, [N]
    position: NDArray[np.uint64]  # [N]: output tokens before this one
    special: list[SpecialSample]
    # Waits for the masks of samples that follow a grammar. Returns the masks, and by sample the reason if its grammar
    # cannot be followed any further.
    masks: Callable[[], Masks] = _no_masks
    # Samples with wanted tokens (`logprob_token_ids`), and these tokens.
    logprob_tokens: list[tuple[int, list[int]]] = field(default_factory=list)
    beams: Beams = field(default_factory=list)

    @property
    def penalizes_awaited(self) -> bool:
        """Whether penalties count a token that only the device knows."""
        return any(one.awaits_token and one.settings.params.has_penalties for one in self.special)


class SamplingTable:
    """The sampling settings of the running sequences, by row."""

    def __init__(self, max_num_seqs: int, compiler: GrammarCompiler | None = None) -> None:
        self.settings: list[RowSettings | None] = [None] * max_num_seqs
        self._grammars = None if compiler is None else GrammarTable(compiler, max_num_seqs)
        self._is_special = np.zeros(max_num_seqs, bool)
        self._values = {name: np.zeros(max_num_seqs, dtype) for name, dtype in _SETTINGS.items()}
        self._logprob_tokens: dict[int, list[int]] = {}  # by row
        self._beams: dict[int, tuple[int, float]] = {}  # by row of a beam: number of tokens to offer, temperature
        self._needs_settings: set[int] = set()  # rows that ask for more than the most likely token

    def admit(self, admission: Admission) -> None:
        row, params = admission.row, admission.params
        self.settings[row] = RowSettings(
            params, admission.num_prompt_tokens, admission.stop_token_ids, admission.is_embedded
        )
        is_special = bool(params.follows_output or params.logit_bias or params.allowed_token_ids is not None)
        self._is_special[row] = is_special
        temperature = min(max(params.temperature, _LEAST), _MOST) if params.temperature else 0.0
        num_logprobs = (params.logprobs or 0) if params.wants_logprobs else -1
        self._logprob_tokens.pop(row, None)
        if params.logprob_token_ids:
            self._logprob_tokens[row] = params.logprob_token_ids
        self._beams.pop(row, None)
        if params.use_beam_search:
            # Enough tokens for all sequences to continue this beam, even if all of its most likely tokens end it.
            num_offered = max(params.num_sequences + len(admission.stop_token_ids), params.logprobs or 0)
            self._beams[row] = num_offered, temperature
            temperature, num_logprobs = 0.0, -1  # beams have log-probabilities of their own
        values = (
            temperature, max(params.top_p, _LEAST), max(params.top_k, 0), params.min_p, admission.seed, admission.index,
            admission.num_prompt_tokens, num_logprobs,
        )  # fmt: skip
        for array, value in zip(self._values.values(), values, strict=True):
            array[row] = value
        if self._grammars is not None:
            output = admission.token_ids[admission.num_prompt_tokens :].tolist()
            self._grammars.admit(row, params, output, admission.stop_token_ids)
        needs_settings = params.temperature > 0 or params.wants_logprobs or is_special or params.grammar is not None
        (self._needs_settings.add if needs_settings else self._needs_settings.discard)(row)

    def build(
        self, samples: Samples, tokens: NDArray[np.int32], num_known: NDArray[np.int64] | None = None
    ) -> SamplingBatch | None:
        """Gather the settings of `samples`. `tokens` [max_num_seqs, max_model_len + 1] is the table of all rows'
        tokens, of which the host knows the first `num_known` [max_num_seqs]; None: all. Return None if all samples ask
        only for the most likely token."""
        rows, lengths = samples.rows, samples.lengths
        if not self._needs_settings or self._needs_settings.isdisjoint(rows.tolist()):
            return None
        masks: Callable[[], Masks] = _no_masks
        if (grammars := self._grammars) is not None and grammars.has_any(rows.tolist()):
            for row, (_, draft_tokens) in samples.drafted.items():
                grammars.look_ahead(row, draft_tokens)
            firsts = {row: first for row, (first, _) in samples.drafted.items()}
            masks = partial(grammars.masks, rows, firsts)

        settings = {name: values[rows] for name, values in self._values.items()}
        settings["index"] += samples.forks.astype(np.uint64)
        return SamplingBatch(
            settings=settings,
            position=(lengths - settings["num_prompt_tokens"]).astype(np.uint64),
            special=self._special(samples, tokens, num_known),
            masks=masks,
            logprob_tokens=[
                (n, self._logprob_tokens[row]) for n, row in enumerate(rows.tolist()) if row in self._logprob_tokens
            ],
            beams=[(n, *self._beams[row]) for n, row in enumerate(rows.tolist()) if row in self._beams],
        )

    def advance(self, rows: NDArray[np.int64], forks: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        """Advance the grammars by the valid `tokens` [N] that were drawn for `rows` [N]. Only fork 0 of a row continues
        the row."""
        if self._grammars is None or not self._grammars.has_any(rows.tolist()):
            return
        if forks.any():
            continues = forks == 0
            rows, tokens = rows[continues], tokens[continues]
        self._grammars.advance(rows, tokens)

    def _special(
        self, samples: Samples, tokens: NDArray[np.int32], num_known: NDArray[np.int64] | None
    ) -> list[SpecialSample]:
        found = []
        for n in np.flatnonzero(self._is_special[samples.rows]).tolist():
            row, length = int(samples.rows[n]), int(samples.lengths[n])
            first, _ = samples.drafted.get(row, (n, ()))
            settings = self.settings[row]
            assert settings is not None
            known = length if num_known is None else min(length, int(num_known[row]))
            num_settled = min(known, int(samples.lengths[first]))
            found.append(SpecialSample(n, settings, tokens[row, :known], num_settled, known < length))
        return found
