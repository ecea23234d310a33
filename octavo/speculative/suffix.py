"""Proposals from suffixes: the tokens that followed earlier occurrences of a sequence's longest suffix, in itself or in
recent answers (SuffixDecoding, Oliaro et al. 2024, arXiv 2411.04975).

A `SuffixAutomaton` knows every piece of the texts that it has read, how often each piece occurs and which tokens follow
it. Adding a token takes constant time on average (Blumer et al. 1985), however long the texts are.
"""

from collections import deque
from dataclasses import dataclass

from octavo.request import Tokens
from octavo.sequence import Sequence
from octavo.speculative.proposer import NO_PROPOSAL, Proposal, ReadingShare

# Tokens of long prompts and of answers that are read at once, in some milliseconds; the others in later steps.
_MOST_READ = 1024
_MOST_REMEMBERED = 4096  # most tokens that are kept of an answer
# Recent answers are kept in two halves; when one is full the older is forgotten. A token takes about 0.8 KB.
_MOST_CACHED_TOKENS = 1 << 17


class SuffixAutomaton:
    """All pieces of some texts. A state stands for the pieces that end at the same places; state 0 is the empty
    piece."""

    __slots__ = ("_max_depth", "counts", "last", "lengths", "links", "nexts", "num_tokens")

    def __init__(self, max_depth: int) -> None:
        """Pieces longer than `max_depth` are counted roughly."""
        self._max_depth = max_depth
        self.nexts: list[dict[int, int]] = [{}]  # by state: {next token: next state}
        self.links = [-1]  # by state: the state of its longest suffix that also ends elsewhere
        self.lengths = [0]  # by state: length of its longest piece
        self.counts = [0]  # by state: number of occurrences
        self.last = 0  # the state of the present text so far
        self.num_tokens = 0

    def begin_text(self) -> None:
        self.last = 0

    def read(self, token: int) -> None:
        """Add the next token of the present text."""
        nexts, links, lengths = self.nexts, self.links, self.lengths
        state = self.last
        self.num_tokens += 1
        if (known := nexts[state].get(token)) is not None:  # the piece was read in an earlier text
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
        """Move the pieces of `known` that consist of a piece of `state` and the token to a new state, and return it."""
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
        """Return the state and length of a text's longest known suffix after one more token; `state` and `length` are
        those before it."""
        nexts = self.nexts
        while state > 0 and token not in nexts[state]:
            state = self.links[state]
            length = min(length, self.lengths[state])
        after = nexts[state].get(token)
        return (0, 0) if after is None else (after, length + 1)

    def continuation(self, state: int, most: int, least_probability: float) -> list[int]:
        """Return the most frequent next tokens, one after the other, up to `most` tokens and while their joint
        probability is at least `least_probability`."""
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
    """The state of a sequence: its own pieces, and its longest suffixes in recent answers."""

    own: SuffixAutomaton
    num_read: int = 0  # its tokens in `own`
    num_matched: int = 0  # its tokens that were compared with recent answers
    match: tuple[int, int] = (0, 0)  # state and length in the younger half of answers
    older_match: tuple[int, int] = (0, 0)
    half: int = 0  # number of the younger half when they were compared


class SuffixProposer:
    """Proposes `spec_factor` tokens for each token that agrees."""

    def __init__(self, max_depth: int, max_requests: int, spec_factor: float, least_probability: float) -> None:
        self._max_depth, self._spec_factor, self._least_probability = max_depth, spec_factor, least_probability
        self._max_requests = max_requests
        self._recent, self._older = SuffixAutomaton(max_depth), SuffixAutomaton(max_depth)
        self._num_recent = 0  # answers in the younger half
        self._answers: deque[Tokens] = deque()  # ended answers that are still to be read; the first may be partly read
        self._num_read = self._num_unread = 0  # read tokens of the first answer; tokens of all queued answers
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
        # The link of the whole text is its longest suffix that also occurs earlier.
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
        """Update the suffixes' states in recent answers with the sequence's new tokens."""
        if not self._max_requests:
            return
        if state.half != self._half:
            is_next = state.half == self._half - 1
            state.older_match = state.match if is_next else (0, 0)
            state.match, state.half = (0, 0), self._half
            if not is_next:
                state.num_matched = 0
        first = max(0, len(tokens) - self._max_depth)
        if state.num_matched < first:  # not called for a while: start again `_max_depth` tokens back
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
        """Queue its answer for the recent answers, unless the request has a cache salt."""
        self._share.end()
        if not self._max_requests or not seq.num_output_tokens or seq.request.prompt.cache_salt is not None:
            return
        first = seq.num_prompt_tokens
        self._answers.append(seq.token_ids[first : first + _MOST_REMEMBERED])
        self._num_unread += len(self._answers[-1])
        while self._num_unread > _MOST_CACHED_TOKENS:
            self._drop_answer()
