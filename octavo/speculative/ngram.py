"""Proposals by lookup of the last tokens in a text: prompt lookup (`ngram`), and predicted outputs.

The method is Saxena's prompt lookup decoding (2023), which compares the end of a text with every place in it. Here a
table keeps the last place of each n-gram, so a token costs one entry for each n, however long the text is. A found
place is kept while the text continues as it did there: the longer both agree, the likelier the next token is right.
"""

from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from octavo.request import Tokens
from octavo.sequence import Sequence
from octavo.speculative.proposer import NO_PROPOSAL, Proposal, ReadingShare

# Tokens of long prompts that are indexed at once, in a few milliseconds; the others in later steps.
_MOST_READ = 4096
_FEW = 16  # n-grams that are hashed faster one by one
_FACTOR, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1  # for hashes, which are polynomials modulo 2^64
_PLACE_BITS = 24  # predictions are shorter than 2^24 tokens
_PREDICTION_LEVELS = 8  # the first level of proposals from a predicted output
# Lengths of n-grams that bring a text back to its prediction after it has differed, and back to a place that it was
# quoting, within `_QUOTE_GAP` tokens in both.
_RETURN_LENGTHS = (3, 2, 1)
_QUOTE_LENGTHS = (3, 2)
_QUOTE_GAP = 24


class NgramIndex:
    """The last place of each n-gram in a growing text. It stores only hashes of n-grams, so a hit may be wrong."""

    def __init__(self, least: int, most: int) -> None:
        self.lengths = range(most, least - 1, -1)
        self.num_read = 0
        self._ends: list[dict[int, int]] = [{} for _ in self.lengths]  # hash of an n-gram -> the place behind it

    def read(self, tokens: Tokens, end: int, most: int) -> None:
        """Index the n-grams that end at the next places up to `end`, `most` places at most."""
        begin, self.num_read = self.num_read, min(end, self.num_read + most)
        for n, ends in zip(self.lengths, self._ends, strict=True):
            first = max(begin + 1, n)
            if self.num_read - first < _FEW:
                for i in range(first, self.num_read + 1):
                    ends[_hash(tokens[i - n : i])] = i
            else:
                hashes = _hashes(tokens[first - n : self.num_read], n)
                ends.update(zip(hashes.tolist(), range(first, self.num_read + 1), strict=True))

    def find(self, tokens: Tokens) -> tuple[int, int] | None:
        """Return (place, n): n is the length of the longest n-gram at the end of `tokens` that the index has, and place
        is the position behind its last occurrence. None if there is none."""
        for n, ends in zip(self.lengths, self._ends, strict=True):
            if len(tokens) >= n and (place := ends.get(_hash(tokens[-n:]))) is not None:
                return place, n
        return None


def _hash(ngram: Tokens) -> int:
    found = 0
    for token in ngram:
        found = (found * _FACTOR + token) & _MASK
    return found


def _hashes(tokens: Tokens, n: int) -> NDArray[np.uint64]:
    """Return `_hash` of each n-gram."""
    values = np.array(tokens, np.int64).astype(np.uint64)
    found = np.zeros(len(values) - n + 1, np.uint64)
    for i in range(n):
        found = found * np.uint64(_FACTOR) + values[i : i + len(found)]
    return found


class LookupState:
    """The state of a sequence: the place in the source where its next token is looked up."""

    __slots__ = ("index", "left", "length", "num_seen", "place", "prediction")

    def __init__(self, index: NgramIndex | None = None) -> None:
        self.index = index
        self.prediction: PlacesIndex | None = None  # of the predicted output, once the answer has differed
        self.num_seen = 0  # tokens of the sequence
        self.place = -1  # place of the proposal's first token in the source; -1: none
        self.length = 0  # number of tokens before `place` that agree
        self.left = (-1, 0)  # the place that was left last, and the sequence's number of tokens then

    def follow(self, tokens: Tokens, source: Tokens) -> bool:
        """Advance over the new tokens of the sequence. Returns False if the source continues differently."""
        if self.place < 0:
            return False
        new = list(tokens[self.num_seen :])
        if list(source[self.place : self.place + len(new)]) != new:
            return False
        self.place += len(new)
        self.length += len(new)
        return True


def _level(length: int) -> int:
    """Return the level: 1 for one token that agrees, 2 for two or three, 3 for four to seven, …"""
    return min(length.bit_length(), 7)


class NgramProposer:
    """Proposes what followed the last tokens earlier in the sequence; `least` to `most` of them must agree."""

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._share = ReadingShare(_MOST_READ)

    def start(self, seq: Sequence) -> LookupState:
        self._share.start()
        return LookupState(NgramIndex(self._least, self._most))

    def propose(self, seq: Sequence, state: LookupState, most: int) -> Proposal:
        tokens, index = seq.token_ids, state.index
        assert index is not None
        # The n-gram at the end is indexed with the next token, because nothing follows it yet.
        index.read(tokens, len(tokens) - 1, self._share.num_tokens)
        if not state.follow(tokens, tokens):
            if state.length >= self._least:
                state.left = state.place, len(tokens)
            state.place, state.length = index.find(tokens) or self._return(state, tokens) or (-1, 0)
        state.num_seen = len(tokens)
        if state.place < 0:
            return NO_PROPOSAL
        return Proposal(tuple(tokens[state.place : state.place + most]), _level(state.length))

    def _return(self, state: LookupState, tokens: Tokens) -> tuple[int, int] | None:
        """Return (place, n) if the text continues a quote near the place where it was left; n tokens agree before
        `place`."""
        place, num_tokens = state.left
        if place < 0 or len(tokens) > num_tokens + _QUOTE_GAP:
            return None
        near = tokens[place : min(place + _QUOTE_GAP, len(tokens) - 1)]
        found = _find_next(tokens[-_QUOTE_LENGTHS[0] :], near, 0, _QUOTE_LENGTHS)
        return None if found is None else (place + found[0], found[1])

    def end(self, seq: Sequence, state: LookupState) -> None:
        self._share.end()


class PlacesIndex:
    """All places of each n-gram in a text that does not grow. Like `NgramIndex` it keeps hashes. Places are sorted when
    the first n-gram of a length is looked up."""

    def __init__(self, text: Tokens) -> None:
        self._text = text
        # By n, sorted numbers: the low bits of an n-gram's hash, then the place behind the n-gram in `_PLACE_BITS`
        # bits.
        self._places: dict[int, NDArray[np.uint64]] = {}

    def find_next(self, end: Tokens, begin: int) -> tuple[int, int] | None:
        """Return (place, n) for the longest n-gram of `_RETURN_LENGTHS` at the `end` of another text that occurs here
        after `begin`: the place behind the next occurrence. None if there is none."""
        for n in _RETURN_LENGTHS:
            if min(len(end), len(self._text)) < n:
                continue
            if n not in self._places:
                hashes = _hashes(self._text, n) << np.uint64(_PLACE_BITS)
                self._places[n] = np.sort(hashes + np.arange(n, n + len(hashes), dtype=np.uint64))
            places = self._places[n]
            wanted = (_hash(end[-n:]) << _PLACE_BITS) & _MASK
            at = int(np.searchsorted(places, np.uint64(wanted + begin + 1)))
            if at < len(places) and (place := int(places[at]) - wanted) >> _PLACE_BITS == 0:
                return place, n
        return None


class PredictionProposer:
    """Proposes the request's predicted output from its beginning. If the answer differs, proposals go on after the next
    occurrence of the last tokens."""

    def __init__(self) -> None:
        # By request: completions of a request share the index, which is freed with the last of them.
        self._indexes = WeakValueDictionary[str, PlacesIndex]()

    def start(self, seq: Sequence) -> LookupState:
        state = LookupState()
        state.num_seen, state.place = seq.num_prompt_tokens, 0
        return state

    def propose(self, seq: Sequence, state: LookupState, most: int) -> Proposal:
        prediction = seq.request.prediction
        if not state.follow(seq.token_ids, prediction):
            if state.prediction is None:
                state.prediction = self._indexes.setdefault(seq.request_id, PlacesIndex(prediction))
            begin = max(state.place, 0)
            output = seq.token_ids[-min(_RETURN_LENGTHS[0], seq.num_output_tokens) :]
            state.place, state.length = state.prediction.find_next(output, begin) or (begin, 0)
        state.num_seen = len(seq.token_ids)
        return Proposal(tuple(prediction[state.place : state.place + most]), _PREDICTION_LEVELS + _level(state.length))

    def end(self, seq: Sequence, state: LookupState) -> None:
        """Do nothing: no state outlives the sequence."""


def _find_next(end: Tokens, text: Tokens, begin: int, lengths: tuple[int, ...]) -> tuple[int, int] | None:
    """Return (place, n): the place in `text` behind the next occurrence, after `begin`, of the longest n-gram at the
    `end` of another text. `lengths` are the values of n, the largest first."""
    for n in lengths:
        wanted, place = list(end[-n:]), begin
        while len(wanted) == n:
            try:
                place = text.index(wanted[-1], place) + 1
            except ValueError:
                break
            if list(text[max(place - n, 0) : place]) == wanted:
                return place, n
    return None
