"""Beam search: which continuations of a request's beams live on, and which are among its answers.

The beams of a request are sequences like any others: forks that share their blocks, scheduled and preempted each on
its own. One that has been computed up to its end offers its most likely tokens and is held until all the others have
done so; then `BeamGroup.advance` chooses among all offers, and the scheduler forks and drops beams accordingly. The
rules are those of `transformers`' `generate(num_beams=...)`: a score is the sum of log-probabilities over (output
tokens ** length_penalty), tokens that end a sequence count, and only continuations among the best `width` may end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.request import TokenLogprobs

if TYPE_CHECKING:
    from octavo.sampling_params import SamplingParams
    from octavo.sequence import Sequence


@dataclass(slots=True)
class Beam:
    """What a sequence carries if it is a beam. Its first beam has the index 0 and score 0."""

    group: BeamGroup
    score: float = 0.0  # sum of the log-probabilities of its output
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of each output token, and of the best beside it


@dataclass(slots=True)
class Continuation:
    """A beam and one token after it."""

    parent: Sequence
    token: int
    beam: Beam


@dataclass(slots=True)
class Hypothesis:
    """A finished answer. `score` is what answers are ranked by, longer ones made comparable by the length penalty."""

    score: float
    token_ids: list[int]  # of the output
    logprobs: list[TokenLogprobs]
    finish_reason: str
    stop_reason: int | None


class BeamGroup:
    """The search of one request."""

    def __init__(self, params: SamplingParams, max_tokens: int) -> None:
        self.params = params
        self.width = params.num_sequences
        self.max_tokens = max_tokens
        self.offers: dict[int, tuple[Sequence, TokenLogprobs]] = {}  # by index: beams that wait for the others
        self.finished: list[Hypothesis] = []  # best first
        self.prompt_logprobs: list[TokenLogprobs] = []  # the beam that has computed the prompt may be gone at the end

    def offer(self, seq: Sequence, found: TokenLogprobs) -> None:
        """`found` is `TokenLogprobs` of any token and the best ones, best first."""
        self.offers[seq.index] = seq, found

    def is_held(self, seq: Sequence) -> bool:
        return seq.index in self.offers

    def advance(self) -> list[Continuation]:
        """Choose among the offers, all of which must have come. Returns the beams to go on with, best first, or nothing
        when the search is over."""
        candidates = [
            (seq.beam.score + logprob, seq, place)
            for _, (seq, found) in sorted(self.offers.items())
            for place, logprob in enumerate(found.logprobs[1:], start=1)
            if seq.beam is not None and math.isfinite(logprob)
        ]
        candidates.sort(key=lambda candidate: -candidate[0])  # stable: equal ones in the order of their beams
        going_on: list[Continuation] = []
        num_output = 0
        for rank, (total, seq, place) in enumerate(candidates):
            num_output = seq.num_output_tokens + 1
            found = self.offers[seq.index][1]
            token = found.token_ids[place]
            ends = token in seq.stop_reasons and num_output >= self.params.min_tokens
            if ends or num_output >= self.max_tokens:
                if rank < self.width:
                    self._finish(total, seq, self._entry(found, place), ends)
            elif len(going_on) < self.width:
                assert seq.beam is not None
                beam = Beam(self, total, [*seq.beam.logprobs, self._entry(found, place)])
                going_on.append(Continuation(seq, token, beam))
        self.finished = sorted(self.finished, key=lambda hypothesis: -hypothesis.score)[: self.width]
        self.offers.clear()
        if going_on and self._is_over(going_on[0].beam.score, num_output):
            return []
        return going_on

    def _entry(self, found: TokenLogprobs, place: int) -> TokenLogprobs:
        """What is reported of the chosen token: itself, then as many of the best as the request wants."""
        num_top = self.params.logprobs or 0
        return TokenLogprobs(
            [found.token_ids[place], *found.token_ids[1 : 1 + num_top]],
            [found.logprobs[place], *found.logprobs[1 : 1 + num_top]],
            place,
        )

    def _finish(self, total: float, seq: Sequence, entry: TokenLogprobs, is_stopped: bool) -> None:
        assert seq.beam is not None
        token_ids = [*seq.token_ids[seq.num_prompt_tokens :], entry.token_ids[0]]
        self.finished.append(
            Hypothesis(
                score=self._score(total, len(token_ids)),
                token_ids=token_ids,
                logprobs=[*seq.beam.logprobs, entry],
                finish_reason="stop" if is_stopped else "length",
                stop_reason=seq.stop_reasons[entry.token_ids[0]] if is_stopped else None,
            )
        )

    def _is_over(self, best_running: float, num_output: int) -> bool:
        """Whether no beam can be expected to do better than what has finished (`early_stopping` says who expects)."""
        if len(self.finished) < self.width:
            return False
        if self.params.early_stopping is True:
            return True
        # "never" stops only when it is impossible: longer answers may score better, the longest ones best.
        may_grow = self.params.early_stopping == "never" and self.params.length_penalty > 0
        return self._score(best_running, self.max_tokens if may_grow else num_output) <= self.finished[-1].score

    def _score(self, total: float, num_output: int) -> float:
        return float(total / num_output**self.params.length_penalty)
