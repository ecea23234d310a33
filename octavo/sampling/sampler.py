"""Chooses tokens: the most likely one, or one drawn from the distribution with a random number from the request's seed.

Sampling consists of row-wise operations of the backend, so a sample depends on its logits and its request alone.
Nothing here waits for a device. `sample_tokens` starts the choice of a step's tokens and the measurement of their
log-probabilities; `SampledTokens.results` turns the outcome into lists once it is on the host. Penalties, biases and
masks are in `processors.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.ops import NO_TOKEN, Array, Ops
from octavo.request import TokenLogprobs
from octavo.sampling.beam_scores import best_tokens, offers, score_beams
from octavo.sampling.logprobs import MeasuredLogprobs, entries, measure, measure_of
from octavo.sampling.processors import process_logits
from octavo.sampling.random import uniform
from octavo.sampling.sampling_table import SamplingBatch
from octavo.sampling.timestamp_rules import follow_rules
from octavo.structured_output.grammar_matching import TokenMask

NOTHING_TO_CHOOSE = (
    "no token could be chosen: allowed_token_ids, bad_words, min_tokens, structured_outputs and logits_processors "
    "together leave none, or the logits are not finite because weights of the model or of an adapter are wrong."
)


@dataclass(slots=True)
class SampledTokens:
    """A step's samples on the device. `tokens` [N] int64 is `NO_TOKEN` for a sample that had no token to choose."""

    tokens: Array
    errors: dict[int, str] = field(default_factory=dict)
    wanted: list[int] = field(default_factory=list)  # samples of the rows of `logprobs`
    logprobs: MeasuredLogprobs | None = None
    logprob_tokens: list[tuple[int, list[int]]] = field(default_factory=list)  # (sample, its wanted tokens)
    of_tokens: Array | None = None  # log-probabilities of these tokens, a row for each entry of `logprob_tokens`
    offers: list[tuple[list[int], Array, Array]] = field(default_factory=list)

    def results(
        self, tokens: NDArray[np.int64], fetch: Callable[[Sequence[Array]], list[NDArray[Any]]]
    ) -> tuple[list[TokenLogprobs | None] | None, dict[int, str]]:
        """Return the log-probabilities by sample, or None if none are asked for, and the errors by sample. `tokens` [N]
        are on the host by now; `NO_TOKEN` in them is replaced by 0, in place. `fetch` brings other arrays to the
        host."""
        errors = self.errors
        if tokens.min() < 0:
            errors = dict.fromkeys(np.flatnonzero(tokens == NO_TOKEN).tolist(), NOTHING_TO_CHOOSE) | errors
            tokens[tokens == NO_TOKEN] = 0
        if self.logprobs is None and not self.offers:
            return None, errors
        found: list[TokenLogprobs | None] = [None] * len(tokens)
        if self.logprobs is not None:
            for n, entry in zip(self.wanted, entries(fetch(self.logprobs.arrays), self.logprobs.num_top), strict=True):
                found[n] = entry
        if self.of_tokens is not None:
            [values] = fetch([self.of_tokens])
            for (n, asked), of_asked in zip(self.logprob_tokens, values.tolist(), strict=True):
                of_sample = found[n]
                assert of_sample is not None
                of_sample.token_ids += asked
                of_sample.logprobs += of_asked[: len(asked)]
        for samples, best, scores in self.offers:
            for n, entry in offers(samples, *fetch([best, scores])):
                found[n] = entry
        return found, errors


def write_settings(arrays: Any, batch: SamplingBatch) -> None:
    """Write the batch's settings for `sample_tokens` (`temperature` and so on) into a step's arrays on the host."""
    settings, count = batch.settings, len(batch.position)
    for name in ("temperature", "top_k", "top_p", "min_p"):
        getattr(arrays, name)[:count] = settings[name]
    arrays.uniforms[:count] = uniform(settings["seed"], settings["index"], batch.position)


def sample_tokens(
    ops: Ops, logits: Array, best: Array, arrays: Any, batch: SamplingBatch | None, is_known: bool,
    last_tokens: Array | None = None,
) -> SampledTokens:  # fmt: skip
    """Return the step's samples. `logits` [N, V] float32 may be overwritten; `best` [N] int64 is their argmax. Without
    a batch the samples are the most likely tokens. `is_known` says that the host can read `best`. `last_tokens`: as for
    `process_logits`."""
    if batch is None:
        return SampledTokens(best)
    masks, mask_errors = batch.masks()
    sampled = SampledTokens(best, mask_errors)
    num_logprobs = batch.settings["num_logprobs"]
    wanted = np.flatnonzero(num_logprobs >= 0)
    if batch.special and follow_rules(ops, logits, batch.special):
        best = ops.argmax(logits)
    raw = ops.rows_of(logits, wanted) if len(wanted) else None  # the model's own logits, before penalties
    if batch.beams:
        score_beams(ops, logits, batch.beams)
    if is_known:
        masks = _effective(masks, best, batch)
    if masks:
        words = np.stack([mask.words for _, mask in masks]).view(np.int32)
        ops.mask_tokens(logits, words, np.array([n for n, _ in masks], np.int64))
    if batch.special:
        sampled.errors = process_logits(ops, logits, batch.special, last_tokens) | sampled.errors
    if masks or batch.special:
        best = ops.argmax(logits)
    if batch.beams:
        sampled.offers = best_tokens(ops, logits, batch.beams)
    sampled.tokens = best
    if (batch.settings["temperature"] > 0).any():  # done last, because it overwrites the logits
        settings = arrays.temperature, arrays.top_k, arrays.top_p, arrays.min_p, arrays.uniforms
        sampled.tokens = ops.sample(logits, *(setting[: len(best)] for setting in settings))
    if raw is not None:
        sampled.wanted = wanted.tolist()
        sampled.logprobs = measure(ops, raw, ops.rows_of(sampled.tokens, wanted), num_logprobs[wanted])
        if batch.logprob_tokens:
            samples, asked = zip(*batch.logprob_tokens, strict=True)
            sampled.logprob_tokens = batch.logprob_tokens
            sampled.of_tokens = measure_of(ops, raw, np.searchsorted(wanted, samples), asked)
    return sampled


def _effective(masks: list[tuple[int, TokenMask]], best: Any, batch: SamplingBatch) -> list[tuple[int, TokenMask]]:
    """Return the masks that can change the outcome. A mask changes nothing if the request takes the most likely token
    and the mask allows this token."""
    temperature = batch.settings["temperature"]
    special = {one.sample for one in batch.special} | {n for n, _, _ in batch.beams}
    return [
        (n, mask)
        for n, mask in masks
        if n in special or temperature[n] > 0 or best[n] < 0 or not mask.allows(int(best[n]))
    ]
