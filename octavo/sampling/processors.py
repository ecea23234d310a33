"""Changes logits before tokens are chosen: masks, biases, penalties, and the caller's own processors.

A step costs in proportion to the tokens that it touches. Values that need computing only once are kept in the row's
`RowSettings`.
"""

from collections.abc import Iterable
from typing import cast

import numpy as np
from numpy.typing import NDArray

from octavo.ops import Array, DeviceOps, Ops
from octavo.sampling.sampling_table import SpecialSample

_MASKED = float("-inf")


def process_logits(
    ops: Ops, logits: Array, special: list[SpecialSample], last_tokens: Array | None = None
) -> dict[int, str]:
    """Apply everything that `special` samples ask for to logits [N, V] float32, in place. `last_tokens` [N] int32, on
    the device, are the tokens before the samples: penalties read those of samples that await theirs.

    Order: biases and allowed tokens, bad words, minimum length, penalties, then the request's own processors. Returns
    the errors of callers' processors, by sample.
    """
    _add_biases(ops, logits, special)
    masked = [(one.sample, _forbidden(one)) for one in special]
    samples, tokens = _flatten(masked)
    if len(samples):
        ops.add_bias(logits, samples, tokens, np.full(len(samples), _MASKED, np.float32))
    _penalize(ops, logits, [one for one in special if one.settings.params.has_penalties], last_tokens)
    return _run_callers_processors(ops, logits, special)


def _forbidden(one: SpecialSample) -> list[int]:
    """Return the tokens that would complete a bad word, and the tokens that would end an output before its minimum
    length."""
    settings = one.settings
    output = one.tokens[settings.num_prompt_tokens :]
    found = [
        word[-1]
        for word in settings.params.bad_words_token_ids or ()
        if len(word) == 1 or (len(word) - 1 <= len(output) and output[1 - len(word) :].tolist() == word[:-1])
    ]
    # A grammar's masks enforce the minimum length themselves, but let a sequence end if the grammar allows nothing
    # else.
    if one.num_output_tokens < settings.params.min_tokens and settings.params.grammar is None:
        found += settings.stop_token_ids
    return found


def _add_biases(ops: Ops, logits: Array, special: list[SpecialSample]) -> None:
    vocab_size = logits.shape[1]
    allowed = [(one.sample, words) for one in special if (words := one.settings.allowed_words(vocab_size)) is not None]
    if allowed:
        ops.mask_tokens(logits, np.stack([words for _, words in allowed]), np.array([n for n, _ in allowed]))
    biased = [(one.sample, one.settings.bias) for one in special if one.settings.bias is not None]
    if biased:
        samples, tokens = _flatten((n, tokens) for n, (tokens, _) in biased)
        ops.add_bias(logits, samples, tokens, np.concatenate([values for _, (_, values) in biased]))


def _penalize(ops: Ops, logits: Array, penalized: list[SpecialSample], last_tokens: Array | None) -> None:
    if not penalized:
        return
    seen = [_seen(one) for one in penalized]
    samples, tokens = _flatten((one.sample, distinct) for one, (distinct, _) in zip(penalized, seen, strict=True))
    penalties = np.zeros((3, len(logits)), np.float32)
    for one in penalized:
        params = one.settings.params
        penalties[:, one.sample] = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
    given = samples, tokens, np.concatenate([count for _, count in seen]), penalties[0], penalties[1], penalties[2]
    if last_tokens is None:
        ops.penalize(logits, *given)
    else:
        cast(DeviceOps, ops).penalize(logits, *given, last_tokens)


def _seen(one: SpecialSample) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the distinct tokens before a sample, and how often each occurs in the output. An awaited token is the last
    entry, as -1."""
    tokens, counts = one.settings.seen.of(one.tokens, one.num_settled)
    if one.awaits_token:
        return np.append(tokens, -1), np.append(counts, np.float32(1))
    return tokens, counts


def _run_callers_processors(ops: Ops, logits: Array, special: list[SpecialSample]) -> dict[int, str]:
    errors = {}
    for one in special:
        has_nan = False
        for processor in one.settings.processors:
            prompt, output = np.split(one.tokens, [one.settings.num_prompt_tokens])
            try:
                has_nan = ops.process_row(
                    logits,
                    one.sample,
                    lambda row, call=processor, prompt=prompt, output=output: _given_back(  # type: ignore[misc]
                        call(prompt.tolist(), output.tolist(), row)
                    ),
                )
            except Exception as e:  # an error in the caller's code fails only its request
                errors[one.sample] = f"logits processor {processor!r} failed: {type(e).__name__}: {e}"
                break
        if has_nan and one.sample not in errors:
            errors[one.sample] = "the request's logits processors gave logits that are not numbers (NaN)"
    return errors


def _given_back(logits: Array) -> Array:
    if logits is None:
        raise TypeError("it returned None; it must return the logits, also if it changed them in place")
    return logits


def _flatten(pairs: Iterable[tuple[int, list[int] | NDArray[np.int64]]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Turn [(sample, tokens)] into two int64 arrays of the same length: the sample of each token, and the token."""
    pairs = list(pairs)
    samples = np.repeat(np.array([n for n, _ in pairs], np.int64), [len(tokens) for _, tokens in pairs])
    tokens = np.concatenate([np.asarray(tokens, np.int64) for _, tokens in pairs]) if pairs else samples
    return samples, tokens
