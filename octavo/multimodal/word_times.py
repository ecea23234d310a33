"""Finds when each word was said. Dynamic time warping orders the places in the sound that Whisper's tokens attend to,
and tokens are joined into words. The transcriber calls this module for requests that ask for word times.

The method is that of the paper's code (Radford et al. 2022); the times are those of `transformers`.
"""

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.multimodal.transcript import TIMESTAMP_S

_OPENING, _CLOSING = "\"'“¡¿([{-", "\"'.。,，!！?？:：”)]}、"
# Languages that write no spaces between words, by code.
_WITHOUT_SPACES = {"zh", "ja", "th", "lo", "my", "yue"}
_DIAGONAL, _DOWN, _RIGHT = range(3)


@dataclass(frozen=True, slots=True)
class Word:
    """A word that is said from `start` to `end`, in seconds from the beginning of the sound."""

    text: str  # with the space before it
    start: float
    end: float


def attention(alignment: bytes, num_tokens: int, num_heads: int, num_rows: int) -> NDArray[np.float32]:
    """Return the attention weights [A, T, rows] of A heads and T tokens, from the bytes of
    `RequestOutput.alignment`."""
    values = np.frombuffer(alignment, np.float32)
    size = len(values) // (num_heads * (num_tokens + num_rows))
    queries = values[: num_tokens * num_heads * size].reshape(num_tokens, num_heads, size).transpose(1, 0, 2)
    keys = values[num_tokens * num_heads * size :].reshape(num_heads, num_rows, size)
    scores = queries * np.float32(size**-0.5) @ keys.transpose(0, 2, 1)
    scores -= scores.max(-1, keepdims=True)
    powers = np.exp(scores, out=scores)
    return np.asarray(powers / powers.sum(-1, keepdims=True))


def token_times(weights: NDArray[np.float32], filter_width: int) -> NDArray[np.float64]:
    """Return when each of T tokens ends, [T], in seconds from the beginning of the window. `weights` [A, T, rows] is
    their attention; each row is 0.02 s of the sound. `filter_width` is the width of the median filter, an odd
    number."""
    deviation = weights.std(-2, keepdims=True)
    # A row that all tokens attend to equally says nothing about any token.
    weights = (weights - weights.mean(-2, keepdims=True)) / np.where(deviation == 0, 1, deviation)
    mean = np.mean([_median(one, filter_width) for one in weights], 0)
    return np.asarray(warp(-mean.astype(np.float64)) * TIMESTAMP_S, np.float64)


def _median(x: NDArray[np.float32], width: int) -> NDArray[np.float32]:
    """Return the running median along rows, [T, rows]. Each element is the median of the `width` elements around it;
    ends are mirrored."""
    beside = width // 2
    if x.shape[-1] <= beside:
        return x
    padded = np.pad(x, ((0, 0), (beside, beside)), mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, width, -1)
    return np.asarray(np.sort(windows, -1)[..., beside])


def warp(costs: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the column, [T], at which each row of costs [T, N] begins on the cheapest path from the first corner to
    the last. Steps go right, down, or both at once (Sakoe & Chiba 1978). Sums are float32, as in `transformers`."""
    num_rows, num_columns = costs.shape
    flipped = costs[:, ::-1]
    steps = np.empty((num_rows + num_columns + 1, num_rows + 1), np.int8)  # by diagonal and row
    before, last = np.full((2, num_rows + 1), np.inf, np.float32)  # sums of two diagonals, by row
    before[0] = 0
    for diagonal in range(2, num_rows + num_columns + 1):  # a diagonal depends only on the two before
        first, end = max(1, diagonal - num_columns), min(num_rows, diagonal - 1) + 1
        both, down, right = before[first - 1 : end - 1], last[first - 1 : end - 1], last[first:end]
        by_both, by_down = (both < down) & (both < right), (down < both) & (down < right)
        steps[diagonal, first:end] = np.where(by_both, _DIAGONAL, np.where(by_down, _DOWN, _RIGHT))
        sums = np.full(num_rows + 1, np.inf, np.float32)
        sums[first:end] = flipped.diagonal(num_columns - diagonal + 1) + np.where(
            by_both, both, np.where(by_down, down, right)
        )
        before, last = last, sums
    begins = np.zeros(num_rows, np.int64)
    i, j = num_rows, num_columns
    while i > 0 and j > 0:
        begins[i - 1] = j - 1
        step = steps[i + j, i]
        i -= step != _RIGHT
        j -= step != _DOWN
    return begins


def words_of(tokens: Sequence[int], decode: Callable[[list[int]], str], language: str) -> list[tuple[str, list[int]]]:
    """Return the words of text tokens, each with the positions of its tokens. Punctuation belongs to the word beside
    it. In languages without spaces every character is a word. `language` is a code."""
    found: list[tuple[str, list[int]]] = []
    for text, places in _characters(tokens, decode):
        begins = text.startswith(" ") or text.strip() in string.punctuation
        if found and not begins and language not in _WITHOUT_SPACES:
            found[-1] = found[-1][0] + text, found[-1][1] + places
        else:
            found.append((text, places))
    return _with_closing(_with_opening(found))


def _characters(tokens: Sequence[int], decode: Callable[[list[int]], str]) -> list[tuple[str, list[int]]]:
    """Return the shortest runs of tokens that decode to whole characters, each with its text and the positions of its
    tokens."""
    replacement = "\N{REPLACEMENT CHARACTER}"
    whole = decode(list(tokens))
    found: list[tuple[str, list[int]]] = []
    places: list[int] = []
    num_characters = 0
    for place in range(len(tokens)):
        places.append(place)
        text = decode([tokens[i] for i in places])
        at = num_characters + text.find(replacement)
        # If the whole text has the replacement character here too, the model wrote it, and the character is complete.
        if replacement not in text or at >= len(whole) or whole[at] == replacement:
            found.append((text, places))
            places = []
            num_characters += len(text)
    return found


def _with_opening(words: list[tuple[str, list[int]]]) -> list[tuple[str, list[int]]]:
    found: list[tuple[str, list[int]]] = []
    for text, places in reversed(words):
        if found and text.startswith(" ") and text.strip() in _OPENING:
            found[-1] = text + found[-1][0], places + found[-1][1]
        else:
            found.append((text, places))
    return found[::-1]


def _with_closing(words: list[tuple[str, list[int]]]) -> list[tuple[str, list[int]]]:
    found: list[tuple[str, list[int]]] = []
    for text, places in words:
        if found and not found[-1][0].endswith(" ") and text in _CLOSING:
            found[-1] = found[-1][0] + text, found[-1][1] + places
        else:
            found.append((text, places))
    return found
