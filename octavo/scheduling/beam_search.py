"""Beam search: chooses the continuations of a request's beams, and its answers.

Beams are sequences like any others: forks that share blocks, each scheduled and preempted on its own. A beam that is
computed to its end proposes its most likely tokens and is held until all beams have done so. Then `BeamSearch` chooses
among all proposals, forks beams with several good continuations and drops beams with none. The rules are those of
`transformers`' `generate(num_beams=...)`: a score is the sum of log-probabilities divided by
(output tokens ** length_penalty), tokens that end a sequence count, and only the best `width` continuations may end.
"""

import math
from dataclasses import dataclass, field
from typing import Protocol

from octavo.request import SequenceOutput, TokenLogprobs
from octavo.sequence import Sequence


class Siblings(Protocol):
    """The changes that a search makes to the sequences of its request. `SequenceQueues` implements them."""

    def fork(self, parent: Sequence, index: int) -> Sequence: ...

    def append(self, seq: Sequence, token: int) -> None: ...

    def drop(self, seq: Sequence) -> None: ...


@dataclass(slots=True)
class Beam:
    """A running sequence and its score. The first beam has the index 0 and the score 0."""

    seq: Sequence
    score: float = 0.0  # sum of the log-probabilities of its output
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of each output token and its alternatives
    top_tokens: TokenLogprobs | None = None  # the most likely next tokens; None until they are known


@dataclass(slots=True)
class Continuation:
    """A beam and one token after it."""

    parent: Sequence
    token: int
    score: float
    logprobs: list[TokenLogprobs]


@dataclass(slots=True)
class Hypothesis:
    """A finished answer. Answers are ranked by `score`, which the length penalty has adjusted."""

    score: float
    token_ids: list[int]  # of the output
    logprobs: list[TokenLogprobs]
    finish_reason: str
    stop_reason: int | None


class BeamSearch:
    """The search of one request, whose first sequence is `root`; the `Chooser` of all its sequences."""

    def __init__(self, root: Sequence, siblings: Siblings) -> None:
        self.params = root.params
        self.width = root.params.num_sequences
        self.max_tokens = root.request.max_tokens
        self.beams = {root.index: Beam(root)}  # by index
        self.finished: list[Hypothesis] = []  # best first
        self.prompt_logprobs: list[TokenLogprobs] = []  # kept here, as the first beam may be dropped
        self._siblings = siblings

    def propose(self, seq: Sequence, found: TokenLogprobs) -> list[SequenceOutput]:
        """Take a beam's most likely next tokens. Once all beams have given theirs, go on with the best continuations,
        or end the search. Returns the request's outputs at the end."""
        self.beams[seq.index].top_tokens = found
        self.prompt_logprobs = self.prompt_logprobs or seq.prompt_logprobs
        if any(beam.top_tokens is None for beam in self.beams.values()):
            return []
        continuations = self._choose()
        if not continuations:
            return self._end()
        self._continue(continuations)
        return []

    def _choose(self) -> list[Continuation]:
        """Choose among all proposals. Returns the continuations to compute, best first; an empty list ends the
        search."""
        candidates = [
            (beam.score + logprob, beam, beam.top_tokens, place)
            for _, beam in sorted(self.beams.items())
            if beam.top_tokens is not None
            for place, logprob in enumerate(beam.top_tokens.logprobs[1:], start=1)
            if math.isfinite(logprob)
        ]
        candidates.sort(key=lambda candidate: -candidate[0])  # stable: equal candidates keep the order of their beams
        continuations: list[Continuation] = []
        num_output = 0
        for rank, (total, beam, top, place) in enumerate(candidates):
            num_output = beam.seq.num_output_tokens + 1
            token = top.token_ids[place]
            ends = token in beam.seq.stop_reasons and num_output >= self.params.min_tokens
            if ends or num_output >= self.max_tokens:
                if rank < self.width:
                    self._finish(total, beam, self._entry(top, place), ends)
            elif len(continuations) < self.width:
                logprobs = [*beam.logprobs, self._entry(top, place)]
                continuations.append(Continuation(beam.seq, token, total, logprobs))
        self.finished = sorted(self.finished, key=lambda hypothesis: -hypothesis.score)[: self.width]
        if continuations and self._is_over(continuations[0].score, num_output):
            return []
        return continuations

    def _continue(self, continuations: list[Continuation]) -> None:
        """Give each beam its first continuation, and fork it for the others."""
        in_place: dict[int, Continuation] = {}
        forks = [one for one in continuations if in_place.setdefault(one.parent.index, one) is not one]
        for index, beam in self.beams.items():
            if index not in in_place:
                self._siblings.drop(beam.seq)
        free_indices = [index for index in range(self.width) if index not in in_place]
        sequences = [
            (self._siblings.fork(one.parent, index), one) for one, index in zip(forks, free_indices, strict=False)
        ]
        sequences += [(one.parent, one) for one in in_place.values()]
        for seq, one in sequences:
            self._siblings.append(seq, one.token)
        self.beams = {seq.index: Beam(seq, one.score, one.logprobs) for seq, one in sequences}

    def _end(self) -> list[SequenceOutput]:
        """End the request. Returns its answers, best first, each as one output."""
        num_wanted = self.params.n
        seq = self.beams[min(self.beams)].seq
        outputs = []
        if len(self.finished) < num_wanted:
            error = f"beam search found {len(self.finished)} of {num_wanted} completions: no other token is allowed."
            outputs.append(seq.output([], "error", error=error))
        else:
            for index, found in enumerate(self.finished[:num_wanted]):
                output = seq.output(found.token_ids, found.finish_reason, found.stop_reason, found.logprobs)
                output.index, output.prompt_logprobs = index, None
                outputs.append(output)
            outputs[0].prompt_logprobs = self.prompt_logprobs or None
        for beam in self.beams.values():
            self._siblings.drop(beam.seq)
        return outputs

    def _entry(self, found: TokenLogprobs, place: int) -> TokenLogprobs:
        """Return the log-probabilities to report for a chosen token: its own, then of the `logprobs` best."""
        num_top = self.params.logprobs or 0
        return TokenLogprobs(
            [found.token_ids[place], *found.token_ids[1 : 1 + num_top]],
            [found.logprobs[place], *found.logprobs[1 : 1 + num_top]],
            place,
        )

    def _finish(self, total: float, beam: Beam, entry: TokenLogprobs, is_stopped: bool) -> None:
        token = entry.token_ids[0]
        token_ids = [*beam.seq.token_ids[beam.seq.num_prompt_tokens :], token]
        self.finished.append(
            Hypothesis(
                score=self._score(total, len(token_ids)),
                token_ids=token_ids,
                logprobs=[*beam.logprobs, entry],
                finish_reason="stop" if is_stopped else "length",
                stop_reason=beam.seq.stop_reasons[token] if is_stopped else None,
            )
        )

    def _is_over(self, best_running: float, num_output: int) -> bool:
        """Return whether no beam can beat the finished answers, in the sense of `early_stopping`."""
        if len(self.finished) < self.width:
            return False
        if self.params.early_stopping is True:
            return True
        # "never" stops only when it is impossible: longer answers may score better, the longest ones best.
        may_grow = self.params.early_stopping == "never" and self.params.length_penalty > 0
        return self._score(best_running, self.max_tokens if may_grow else num_output) <= self.finished[-1].score

    def _score(self, total: float, num_output: int) -> float:
        return float(total / num_output**self.params.length_penalty)
