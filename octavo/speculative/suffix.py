"""Proposals from suffixes: what followed the longest suffix of a sequence that was seen before, in itself or in recent
answers (SuffixDecoding, Oliaro et al. 2024, arXiv 2411.04975).

A `SuffixAutomaton` knows every piece of the texts that it has read, how often each occurs and what follows it. It grows
by a token in constant time on average (Blumer et al. 1985), however long the texts are.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from octavo.request import Tokens
from octavo.sequence import Sequence
from octavo.speculative.proposer import NO_PROPOSAL, Proposal, ReadingShare

# Tokens of long prompts and of answers that are read at once, in some milliseconds; the others in later steps.
_MOST_READ = 1024
_MOST_REMEMBERED = 4096  # of an answer
# Recent answers are kept in two halves; when one is full the older is forgotten. A token takes about 0.8 KB.
_MOST_CACHED_TOKENS = 1 << 17


class SuffixAutomaton:
    """The pieces of some texts. A state stands for pieces that end at the same places; 0 is the empty one."""

    __slots__ = ("_max_depth", "counts", "last", "lengths", "links", "nexts", "num_tokens")

    def __init__(self, max_depth: int) -> None:
        """Pieces that are longer than `max_depth` are counted roughly."""
        self._max_depth = max_depth
        self.nexts: list[dict[int, int]] = [{}]  # by state: what may follow, and the state then
        self.links = [-1]  # by state: that of its longest end which occurs elsewhere too
        self.lengths = [0]  # by state: of its longest piece
        self.counts = [0]  # by state: how often it occurs
        self.last = 0  # the state of all that was read of the present text
        self.num_tokens = 0

    def begin_text(self) -> None:
        self.last = 0

    def read(self, token: int) -> None:
        """The present text goes on."""
        nexts, links, lengths = self.nexts, self.links, self.lengths
        state = self.last
        self.num_tokens += 1
        if (known := nexts[state].get(token)) is not None:  # of an earlier text
            self.last = known if lengths[known] == lengths[state] + 1 else self._split(state, token, known)
        else:
            self.last = new = self._add({}, lengths[state] + 1, 0)
            while state >= 0 and token not in nexts[state]:
                nexts[state][token] = new
                state = links[state]
            if state < 0:
                links[new] = 0
            else:
                known = nexts[state][token]
                if lengths[known] != lengths[state] + 1:
                    known = self._split(state, token, known)
                links[new] = known
        counted, counts = self.last, self.counts
        for _ in range(self._max_depth):
            if counted <= 0:
                break
            counts[counted] += 1
            counted = links[counted]

    def _split(self, state: int, token: int, known: int) -> int:
        """Give those pieces of `known` a state of their own that are those of `state` and the token."""
        nexts, links = self.nexts, self.links
        copy = self._add(dict(nexts[known]), self.lengths[state] + 1, links[known])
        self.counts[copy] = self.counts[known]
        links[known] = copy
        while state >= 0 and nexts[state].get(token) == known:
            nexts[state][token] = copy
            state = links[state]
        return copy

    def _add(self, nexts: dict[int, int], length: int, link: int) -> int:
        self.nexts.append(nexts)
        self.links.append(link)
        self.lengths.append(length)
        self.counts.append(0)
        return len(self.links) - 1

    def advance(self, state: int, length: int, token: int) -> tuple[int, int]:
        """The longest end of a text that is known here has a `state` and a length -> those with a token more."""
        nexts = self.nexts
        while state > 0 and token not in nexts[state]:
            state = self.links[state]
            length = min(length, self.lengths[state])
        after = nexts[state].get(token)
        return (0, 0) if after is None else (after, length + 1)

    def continuation(self, state: int, most: int, least_probability: float) -> list[int]:
        """What has followed most often, as long as it followed so often by its share of all times."""
        found: list[int] = []
        nexts, counts = self.nexts, self.counts
        count = sum([counts[after] for after in nexts[state].values()])
        probability = 1.0
        while len(found) < most and nexts[state]:
            token, after = max(nexts[state].items(), key=lambda item: counts[item[1]])
            probability *= counts[after] / max(count, 1)
            if probability < least_probability:
                break
            found.append(token)
            state, count = after, counts[after]
        return found


@dataclass(slots=True)
class _State:
    """A sequence: its own pieces, and where it is in recent answers."""

    own: SuffixAutomaton
    num_read: int = 0  # tokens of it in `own`
    num_matched: int = 0  # tokens of it that were compared with recent answers
    match: tuple[int, int] = (0, 0)  # in the younger half: state, length
    older_match: tuple[int, int] = (0, 0)
    half: int = 0  # number of the younger half


class SuffixProposer:
    """Proposes `spec_factor` tokens for each token that agrees."""

    def __init__(self, max_depth: int, max_requests: int, spec_factor: float, least_probability: float) -> None:
        self._max_depth, self._spec_factor, self._least_probability = max_depth, spec_factor, least_probability
        self._max_requests = max_requests
        self._recent, self._older = SuffixAutomaton(max_depth), SuffixAutomaton(max_depth)
        self._num_recent = 0  # answers in the younger half
        self._answers: deque[Tokens] = deque()  # that have ended and are not in it yet; of the first a part may be
        self._num_read = self._num_unread = 0  # tokens of the first that are in it; of all
        self._half = 0
        self._share = ReadingShare(_MOST_READ)

    def start(self, seq: Sequence) -> _State:
        self._share.start()
        return _State(SuffixAutomaton(self._max_depth), num_matched=max(0, seq.num_tokens - self._max_depth))

    def propose(self, seq: Sequence, state: _State, most: int) -> Proposal:
        tokens, own = seq.token_ids, state.own
        end = min(len(tokens), state.num_read + self._share.num_tokens)
        for token in tokens[state.num_read : end]:
            own.read(token)
        state.num_read = end
        self._read_answers(self._share.num_other_tokens)
        self._match(state, tokens)
        if end < len(tokens):
            return NO_PROPOSAL
        # The longest end that occurs before, too, is the link of the whole.
        place = max(own.links[own.last], 0)
        found = [(own.lengths[place], own, place)]
        for automaton, (match, length) in ((self._recent, state.match), (self._older, state.older_match)):
            found.append((length, automaton, match))
        length, automaton, place = max(found, key=lambda one: one[0])
        length = min(length, self._max_depth)
        most = min(most, int(self._spec_factor * length), self._max_depth)
        drafted = tuple(automaton.continuation(place, most, self._least_probability)) if most else ()
        return Proposal(drafted, min(length.bit_length(), 7))

    def _match(self, state: _State, tokens: Tokens) -> None:
        """Bring the places in recent answers up to date."""
        if not self._max_requests:
            return
        if state.half != self._half:
            is_next = state.half == self._half - 1
            state.older_match = state.match if is_next else (0, 0)
            state.match, state.half = (0, 0), self._half
            if not is_next:
                state.num_matched = 0
        first = max(0, len(tokens) - self._max_depth)
        if state.num_matched < first:  # not followed for a while: longer matches count as `_max_depth` tokens
            state.match = state.older_match = (0, 0)
            state.num_matched = first
        for token in tokens[state.num_matched :]:
            state.match = self._recent.advance(*state.match, token)
            state.older_match = self._older.advance(*state.older_match, token)
        state.num_matched = len(tokens)

    def _read_answers(self, most: int) -> None:
        """Add the next `most` tokens of ended answers to the recent ones."""
        while self._answers and most > 0:
            answer, recent = self._answers[0], self._recent
            if not self._num_read:
                recent.begin_text()
            end = min(len(answer), self._num_read + most)
            for token in answer[self._num_read : end]:
                recent.read(token)
            most -= end - self._num_read
            self._num_read = end
            if end < len(answer):
                return
            self._drop_answer()
            self._num_recent += 1
            if 2 * self._num_recent >= self._max_requests or 2 * recent.num_tokens >= _MOST_CACHED_TOKENS:
                self._older, self._recent = recent, SuffixAutomaton(self._max_depth)
                self._num_recent, self._half = 0, self._half + 1

    def _drop_answer(self) -> None:
        self._num_unread -= len(self._answers.popleft())
        self._num_read = 0

    def end(self, seq: Sequence, state: _State) -> None:
        """Queue its answer for the recent ones, unless its salt keeps it apart from others."""
        self._share.end()
        if not self._max_requests or not seq.num_output_tokens or seq.request.prompt.cache_salt is not None:
            return
        first = seq.num_prompt_tokens
        self._answers.append(seq.token_ids[first : first + _MOST_REMEMBERED])
        self._num_unread += len(self._answers[-1])
        while self._num_unread > _MOST_CACHED_TOKENS:
            self._drop_answer()
