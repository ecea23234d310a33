"""What changes logits before a token is chosen: masks, biases, penalties, and the caller's own processors.

The cost of a step follows the tokens that it touches: what can be worked out once is kept in the row's `RowSettings`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.ops import Ops
from octavo.ops.upload import upload
from octavo.sampling.batch import RowSettings

Special = list[tuple[int, RowSettings, NDArray[np.int32]]]
_MASKED = float("-inf")


def process_logits(logits: Tensor, special: Special, ops: Ops) -> dict[int, str]:
    """Apply everything that `special` samples ask for to logits [N, V] float32, in place.

    Order: biases and allowed tokens, bad words, minimum length, penalties, then the request's own processors. Returns
    what went wrong in a caller's processor, by sample.
    """
    _add_bias(logits, special)
    _mask(logits, special, _bad_word_ends)
    _mask(logits, special, _early_stops)
    _penalize(logits, special, ops)
    return _run_callers_processors(logits, special)


def _mask(logits: Tensor, special: Special, tokens_of: Callable[[RowSettings, NDArray[np.int32]], list[int]]) -> None:
    samples, masked = _flatten((n, tokens_of(settings, tokens)) for n, settings, tokens in special)
    if len(samples):
        logits[upload(samples, logits.device), upload(masked, logits.device)] = _MASKED


def _bad_word_ends(settings: RowSettings, tokens: NDArray[np.int32]) -> list[int]:
    """Tokens that would complete a bad word, given the output so far."""
    output = tokens[settings.num_prompt_tokens :]
    return [
        word[-1]
        for word in settings.params.bad_words_token_ids or ()
        if len(word) == 1 or (len(word) - 1 <= len(output) and output[1 - len(word) :].tolist() == word[:-1])
    ]


def _early_stops(settings: RowSettings, tokens: NDArray[np.int32]) -> list[int]:
    if settings.params.grammar is not None:
        return []  # its masks see to it, and let a sequence end that has nowhere else to go
    too_short = len(tokens) - settings.num_prompt_tokens < settings.params.min_tokens
    return settings.stop_token_ids if too_short else []


def _add_bias(logits: Tensor, special: Special) -> None:
    for n, settings, _ in special:
        if (bias := settings.bias(logits.shape[1], logits.device)) is not None:
            logits[n] += bias


def _penalize(logits: Tensor, special: Special, ops: Ops) -> None:
    penalized = [(n, settings, tokens) for n, settings, tokens in special if settings.has_penalties]
    if not penalized:
        return
    seen = [settings.seen_tokens(tokens) for _, settings, tokens in penalized]
    samples, tokens = _flatten((n, distinct) for (n, _, _), (distinct, _) in zip(penalized, seen, strict=True))
    penalties = np.zeros((3, len(logits)), np.float32)
    for n, settings, _ in penalized:
        params = settings.params
        penalties[:, n] = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
    counts = torch.from_numpy(np.concatenate([count for _, count in seen]))
    ops.penalize(logits, samples, tokens, counts, *torch.from_numpy(penalties))


def _run_callers_processors(logits: Tensor, special: Special) -> dict[int, str]:
    errors = {}
    for n, settings, tokens in special:
        for processor in settings.processors:
            prompt, output = np.split(tokens, [settings.num_prompt_tokens])
            try:
                logits[n] = processor(prompt.tolist(), output.tolist(), logits[n])
            except Exception as e:  # the caller's code: its request fails, the others go on
                errors[n] = f"logits processor {processor!r} failed: {type(e).__name__}: {e}"
                break
        if settings.processors and n not in errors and logits[n].isnan().any():
            errors[n] = "the request's logits processors gave logits that are not numbers (NaN)"
    return errors


def _flatten(pairs: Iterable[tuple[int, list[int] | NDArray[np.int64]]]) -> tuple[Tensor, Tensor]:
    """[(sample, tokens)] -> sample of each token, token: two int64 tensors of the same length."""
    pairs = list(pairs)
    samples = np.repeat(np.array([n for n, _ in pairs], np.int64), [len(tokens) for _, tokens in pairs])
    tokens = np.concatenate([np.asarray(tokens, np.int64) for _, tokens in pairs]) if pairs else samples
    return torch.from_numpy(samples), torch.from_numpy(tokens)
