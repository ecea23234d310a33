"""What the scheduler asks: which guesses a step verifies, or how many a model is to make for it.

Each sequence has at most one guess of what follows its tokens: its request's own prediction's, or that of the method
that is configured. It is made when a step's tokens are known, and compared with the next ones, verified or not.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import Any

from octavo.plan import DRAFT_PLACEHOLDER, PlannedRow
from octavo.sequence import Sequence
from octavo.speculative.acceptance import Acceptance, SequenceAcceptance, compare
from octavo.speculative.draft_length import Candidate, choose_counts, choose_draft_count
from octavo.speculative.ngram import PredictionProposer
from octavo.speculative.proposer import NO_PROPOSAL, Proposal, Proposer
from octavo.stats import EngineStats
from octavo.step_cost import StepCost, StepWork

_MOST_PREDICTED = 32  # guesses of a sequence in a step, from the prediction that came with its request
# So much faster must a step with guesses be for one without them to be followed by it: predictions are not exact.
_LEAST_GAIN = 1.03
# Where a drafter's guesses were not worth their time, one sequence has so many of them again: after so many steps, then
# after as many as have passed, and in the end in every so many. So a bad beginning is soon made good.
_TRIAL_DRAFT_TOKENS, _FIRST_TRIAL, _TRIAL_STEPS = 2, 4, 128


@dataclass(slots=True)
class Speculated:
    """What is known of a sequence."""

    state: Any  # its proposer's
    prediction_state: Any = None
    proposal: Proposal = NO_PROPOSAL  # of what follows its tokens
    is_predicted: bool = False  # the guess is from the prediction that came with the request
    acceptance: SequenceAcceptance = field(default_factory=SequenceAcceptance)


class Speculation:
    """The draft tokens of one engine, up to `max_draft_tokens` a sequence and step. Without a `proposer` only requests
    that bring a prediction are guessed. The proposer may leave its guesses to a drafter, in the worker, which may be
    one that `reads_steps`: what the model has computed in one, before the next. Without a `cost` there are always as
    many guesses as can be."""

    def __init__(
        self, proposer: Proposer | None = None, max_draft_tokens: int = _MOST_PREDICTED, cost: StepCost | None = None,
        reads_steps: bool = False,
    ) -> None:  # fmt: skip
        self.cost, self._reads_steps = cost, reads_steps
        self._proposer = proposer
        self._predictions = PredictionProposer()
        self._max_draft_tokens = max_draft_tokens
        self._acceptance = Acceptance()
        self._num_sequences = 0  # that are guessed
        self._was_worth_it = False  # the last step that could have guesses had some
        self._draft_s = 0.0  # that a token more of all drafts takes
        self._num_idle_steps = 0  # that could have had a drafter's guesses, and had none but for trials
        self._next_trial = _FIRST_TRIAL
        self._was_asked = False  # since the last step was planned, what a drafter should guess

    @property
    def is_idle(self) -> bool:
        """Whether there is nobody to guess for."""
        return not self._num_sequences

    def accept(self, seq: Sequence, tokens: list[int], drafts: tuple[int, ...] | None) -> None:
        """`tokens` have come for a sequence that has not ended; `drafts` are what a drafter had guessed, as far as it
        could: what it could not says nothing of how good it is."""
        about = seq.speculated
        if about is None:
            if self._proposer is None and not seq.request.prediction:
                return
            seq.speculated = about = self._start(seq)
        if drafts is not None:
            about.proposal = about.proposal._replace(tokens=drafts)
        if about.proposal.tokens and about.proposal.tokens[0] != DRAFT_PLACEHOLDER:
            right, wrong = compare(about.proposal, tokens)
            about.acceptance.observe(right, wrong, self._acceptance.rates[about.proposal.level])
            self._acceptance.observe(about.proposal.level, right, wrong)
        elif about.proposal.tokens or drafts is not None:  # which nobody has made
            about.acceptance.forget()
        about.proposal, about.is_predicted = NO_PROPOSAL, False
        if about.prediction_state is not None:
            most = max(0, min(_MOST_PREDICTED, seq.num_remaining_tokens - 1))
            about.proposal = self._predictions.propose(seq, about.prediction_state, most)
            about.is_predicted = bool(about.proposal.tokens)
        if about.is_predicted:
            return
        if self._proposer is not None:
            most = max(0, min(self._max_draft_tokens, seq.num_remaining_tokens - 1))
            about.proposal = self._proposer.propose(seq, about.state, most)
        if not about.proposal.tokens:
            about.acceptance.forget()

    def choose(self, candidates: List[tuple[Sequence, int]], rows: List[PlannedRow]) -> list[tuple[int, ...]]:
        """For each of the sequences, which lack one token, what the step of `rows` verifies; as many as given at
        most."""
        draft_tokens: list[tuple[int, ...]] = [
            seq.speculated.proposal.tokens[:most] if seq.speculated else () for seq, most in candidates
        ]
        if not any(draft_tokens):
            return draft_tokens
        if self.cost is None:
            return draft_tokens
        work = StepWork.of(rows)
        prompts = StepWork.of([row for row in rows if not row.is_decode])
        asked = [i for i, tokens in enumerate(draft_tokens) if tokens]
        found = [
            Candidate(seq.num_computed_tokens, len(tokens), self._rate(seq))
            for (seq, _), tokens in zip(candidates, draft_tokens, strict=True)
            if tokens
        ]
        gain = 1.0 if self._was_worth_it else _LEAST_GAIN
        if all(draft_tokens[i][0] == DRAFT_PLACEHOLDER for i in asked):
            counts = self._draft_counts(self.cost, work, prompts, found, gain)
        else:
            counts = choose_counts(self.cost, work, prompts, found, gain)
        self._was_worth_it = any(counts)
        chosen: list[tuple[int, ...]] = [()] * len(draft_tokens)
        for i, count in zip(asked, counts, strict=True):
            chosen[i] = draft_tokens[i][:count]
        return chosen

    def _draft_counts(
        self, cost: StepCost, work: StepWork, prompts: StepWork, candidates: List[Candidate], gain: float
    ) -> list[int]:
        """How many tokens a drafter guesses for each: what it costs is the same for one as for all. Its guesses are
        known only if it makes them; so where they were not worth it one sequence has some now and then."""
        self._was_asked = True
        count = choose_draft_count(cost, work, prompts, candidates, self._draft_s, gain)
        counts = [min(count, candidate.num_draft_tokens) for candidate in candidates]
        if not count and self._num_idle_steps >= self._next_trial:
            counts[-1] = min(_TRIAL_DRAFT_TOKENS, candidates[-1].num_draft_tokens)
        return counts

    def planned(self, rows: List[PlannedRow]) -> None:
        """A step of `rows` is going to run."""
        was_asked, self._was_asked = self._was_asked, False
        has_drafts = any(row.draft_tokens and row.draft_tokens[0] == DRAFT_PLACEHOLDER for row in rows)
        if has_drafts and self._num_idle_steps < self._next_trial:
            self._num_idle_steps, self._next_trial = 0, _FIRST_TRIAL
        elif was_asked:
            self._num_idle_steps += 1
            if has_drafts:
                self._next_trial = self._num_idle_steps + min(self._num_idle_steps, _TRIAL_STEPS)

    def must_wait(self, seqs: List[Sequence], rows: List[PlannedRow]) -> bool:
        """Whether the step after that of `rows` had better know the tokens of this one: it would verify guesses, or
        what this one computes of prompts is to be read."""
        if any(row.draft_tokens for row in rows):
            return True
        if self._reads_steps and not all(row.is_decode for row in rows):
            return True
        if self.is_idle:
            return False
        speculated = [(seq, seq.speculated) for seq in seqs if seq.speculated is not None]
        found = [(seq, len(about.proposal.tokens)) for seq, about in speculated if about.proposal.tokens]
        return bool(found) and any(self.choose(found, rows))

    @property
    def is_speculating(self) -> bool:
        """Whether guesses have been worth their time lately."""
        return self._num_idle_steps == 0

    def drafted(
        self, rows: List[PlannedRow], draft_tokens: dict[int, tuple[int, ...]], seconds: float, caught_up: bool = False
    ) -> None:
        """Record that the worker drafted `draft_tokens` for a step of `rows` in `seconds`. With `caught_up` that time
        includes older tokens that the drafter had not computed yet."""
        if not draft_tokens:
            return
        if not any(draft_tokens.values()):  # it lacks more than a step computes, or memory: nothing was tried
            self._next_trial = min(self._next_trial, self._num_idle_steps + _FIRST_TRIAL)
        elif not caught_up and all(row.is_decode for row in rows):  # and no parts of prompts
            a_token = seconds / max(map(len, draft_tokens.values()))
            self._draft_s += (a_token - self._draft_s) / (8 if self._draft_s else 1)

    def count(self, seq: Sequence, draft_tokens: tuple[int, ...], num_accepted: int, stats: EngineStats) -> None:
        """A step has verified `draft_tokens`, of which so many stand."""
        stats.num_drafts += 1
        stats.num_draft_tokens += len(draft_tokens)
        stats.num_accepted_tokens += num_accepted
        accepted = stats.num_accepted_by_position
        accepted += [0] * (num_accepted - len(accepted))
        for i in range(num_accepted):
            accepted[i] += 1
        if seq.speculated is not None and seq.speculated.is_predicted:
            seq.num_accepted_prediction_tokens += num_accepted
            seq.num_rejected_prediction_tokens += len(draft_tokens) - num_accepted

    def end(self, seq: Sequence) -> None:
        """A sequence has ended."""
        if seq.speculated is None:
            return
        self._num_sequences -= 1
        if self._proposer is not None:
            self._proposer.end(seq, seq.speculated.state)
        seq.speculated = None

    def _start(self, seq: Sequence) -> Speculated:
        self._num_sequences += 1
        about = Speculated(None if self._proposer is None else self._proposer.start(seq))
        if seq.request.prediction:
            about.prediction_state = self._predictions.start(seq)
        return about

    def _rate(self, seq: Sequence) -> float:
        about: Speculated | None = seq.speculated
        if about is None:
            return self._acceptance.rates[0]
        return about.acceptance.rate(self._acceptance.rates[about.proposal.level])
