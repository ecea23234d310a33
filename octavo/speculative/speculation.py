"""Chooses which draft tokens a step verifies (`Scheduler._add_draft_tokens` adds them), or how many a draft model makes
for it.

A sequence has at most one proposal of what follows its tokens: from its request's own prediction, or by the configured
method. A proposal is made when a step's tokens are known, and is compared with the next tokens even if no step verified
it.
"""

from dataclasses import dataclass, field
from typing import Any

from octavo.sequence import Sequence
from octavo.speculative.acceptance_rates import Acceptance, SequenceAcceptance, compare
from octavo.speculative.draft_length import Candidate, choose_counts, choose_draft_count
from octavo.speculative.ngram import PredictionProposer
from octavo.speculative.proposer import NO_PROPOSAL, Proposal, Proposer
from octavo.stats import EngineStats
from octavo.step_cost import StepCost, StepWork
from octavo.step_plan import DRAFT_PLACEHOLDER, PlannedRow

_MOST_PREDICTED = 32  # draft tokens of a sequence in a step, from its request's prediction
# After a step without draft tokens, draft tokens must promise this gain in speed, because predictions are not exact.
_LEAST_GAIN = 1.03
# If a drafter's tokens were not worth their time, one sequence tries this number of them again: first after a few
# steps, then after twice as many each time, up to a maximum. So a bad start is soon corrected.
_TRIAL_DRAFT_TOKENS, _FIRST_TRIAL, _TRIAL_STEPS = 2, 4, 128


@dataclass(slots=True)
class Speculated:
    """The speculation's state of a sequence."""

    state: Any  # of the proposer
    prediction_state: Any = None
    proposal: Proposal = NO_PROPOSAL  # for the tokens after the first `num_tokens`
    num_tokens: int = 0
    is_predicted: bool = False  # the proposal is from the request's prediction
    acceptance: SequenceAcceptance = field(default_factory=SequenceAcceptance)


class Speculation:
    """The draft tokens of one engine, up to `max_draft_tokens` a sequence and step. Without a `proposer`, and while
    more than `max_running` sequences run, only requests with a prediction have draft tokens. A proposer may leave
    drafting to a drafter in the worker; a drafter that `reads_steps` reads the model's results of a step before the
    next one. Without a `cost` model every step verifies as many draft tokens as it can."""

    def __init__(
        self, proposer: Proposer | None = None, max_draft_tokens: int = _MOST_PREDICTED, cost: StepCost | None = None,
        reads_steps: bool = False, max_running: int | None = None,
    ) -> None:  # fmt: skip
        self.cost, self._reads_steps = cost, reads_steps
        self._proposer, self._max_running = proposer, max_running
        self.needs_every_token = proposer is not None  # all sequences may have proposals now
        self._predictions = PredictionProposer()
        self._max_draft_tokens = max_draft_tokens
        self._acceptance = Acceptance()
        self._num_sequences = self._num_predicted = 0  # sequences with proposals; those with a request's prediction
        self._was_worth_it = False  # the last step that could have draft tokens had some
        self._draft_s = 0.0  # seconds of one more draft token for all sequences
        self._num_idle_steps = 0  # steps without a drafter's tokens, except trials
        self._next_trial = _FIRST_TRIAL
        self._was_asked = False  # the drafter was considered since the last step was planned

    @property
    def is_idle(self) -> bool:
        return not (self._num_sequences if self.needs_every_token else self._num_predicted)

    def count_running(self, num_running: int) -> None:
        """Set `needs_every_token`, before the tokens of a step are accepted."""
        if self._max_running is not None:
            self.needs_every_token = self._proposer is not None and num_running <= self._max_running

    def accept(self, seq: Sequence, tokens: list[int], drafts: tuple[int, ...] | None) -> None:
        """Record the new `tokens` of a sequence, compare the last proposal with them, and make the next one. `drafts`
        are the tokens that a drafter has made; tokens that it could not make do not lower its rate."""
        speculated = seq.speculated
        if speculated is None:
            if not self.needs_every_token and not seq.request.prediction:
                return
            seq.speculated = speculated = self._start(seq)
        num_tokens = len(seq.token_ids)
        if speculated.num_tokens != num_tokens - len(tokens):  # not called for a while: the proposal is out of date
            speculated.proposal = NO_PROPOSAL
        speculated.num_tokens = num_tokens
        if drafts is not None:
            speculated.proposal = speculated.proposal._replace(tokens=drafts)
        if speculated.proposal.tokens and speculated.proposal.tokens[0] != DRAFT_PLACEHOLDER:
            right, wrong = compare(speculated.proposal, tokens)
            speculated.acceptance.observe(right, wrong, self._acceptance.rates[speculated.proposal.level])
            self._acceptance.observe(speculated.proposal.level, right, wrong)
        elif speculated.proposal.tokens or drafts is not None:  # a drafter's proposal counts only if it made tokens
            speculated.acceptance.forget()
        speculated.proposal, speculated.is_predicted = NO_PROPOSAL, False
        if speculated.prediction_state is not None:
            most = max(0, min(_MOST_PREDICTED, seq.num_tokens_left_to_sample - 1))
            speculated.proposal = self._predictions.propose(seq, speculated.prediction_state, most)
            speculated.is_predicted = bool(speculated.proposal.tokens)
        if speculated.is_predicted:
            return
        if self._proposer is not None and self.needs_every_token:
            most = max(0, min(self._max_draft_tokens, seq.num_tokens_left_to_sample - 1))
            speculated.proposal = self._proposer.propose(seq, speculated.state, most)
        if not speculated.proposal.tokens:
            speculated.acceptance.forget()

    def choose(self, candidates: list[tuple[Sequence, int]], rows: list[PlannedRow]) -> list[tuple[int, ...]]:
        """Return, for each candidate (a sequence that lacks one token, and its most draft tokens), the draft tokens
        that the step of `rows` verifies."""
        draft_tokens: list[tuple[int, ...]] = [_proposal(seq).tokens[:most] for seq, most in candidates]
        if not any(draft_tokens):
            return draft_tokens
        if self.cost is None:
            return draft_tokens
        work = StepWork.of(rows)
        prompts = StepWork.of([row for row in rows if not row.is_decode])
        known, by_drafter = dict[int, Candidate](), dict[int, Candidate]()  # by index
        for i, tokens in enumerate(draft_tokens):
            if tokens:
                seq, rate = candidates[i][0], self._rate(candidates[i][0])
                is_made = tokens[0] == DRAFT_PLACEHOLDER
                (by_drafter if is_made else known)[i] = Candidate(
                    seq.num_computed_tokens, len(tokens), rate if is_made else _cautious(rate)
                )
        gain = 1.0 if self._was_worth_it else _LEAST_GAIN
        counts, num_wrong = dict[int, int](), 0.0
        if known:
            found = choose_counts(self.cost, work, prompts, [*known.values()], gain)
            counts.update(zip(known, found, strict=True))
        if by_drafter:
            for i, candidate in known.items():
                for count in range(1, counts[i] + 1):
                    work.add_draft_token(candidate.num_computed, count)
                    num_wrong += 1.0 - candidate.rate**count
            found = self._draft_counts(self.cost, work, prompts, [*by_drafter.values()], gain, num_wrong)
            counts.update(zip(by_drafter, found, strict=True))
        self._was_worth_it = any(counts.values())
        return [tokens[: counts.get(i, 0)] for i, tokens in enumerate(draft_tokens)]

    def _draft_counts(
        self, cost: StepCost, work: StepWork, prompts: StepWork, candidates: list[Candidate], gain: float,
        num_wrong: float,
    ) -> list[int]:  # fmt: skip
        """Return how many tokens a drafter makes for each candidate; it costs the same for one sequence as for all.
        Rates are known only for tokens that it makes, so if they were not worth their time, one sequence tries some now
        and then. `num_wrong`: draft tokens of other sequences that are expected to be wrong (`choose_draft_count`)."""
        self._was_asked = True
        count = choose_draft_count(cost, work, prompts, candidates, self._draft_s, gain, num_wrong)
        counts = [min(count, candidate.num_draft_tokens) for candidate in candidates]
        if not count and self._num_idle_steps >= self._next_trial:
            counts[-1] = min(_TRIAL_DRAFT_TOKENS, candidates[-1].num_draft_tokens)
        return counts

    def note_planned(self, rows: list[PlannedRow]) -> None:
        was_asked, self._was_asked = self._was_asked, False
        has_drafts = not self.is_idle and any(row.wants_drafts for row in rows)
        if has_drafts and self._num_idle_steps < self._next_trial:
            self._num_idle_steps, self._next_trial = 0, _FIRST_TRIAL
        elif was_asked:
            self._num_idle_steps += 1
            if has_drafts:
                self._next_trial = self._num_idle_steps + min(self._num_idle_steps, _TRIAL_STEPS)

    def must_wait(self, seqs: list[Sequence], rows: list[PlannedRow]) -> bool:
        """Return whether the next step should wait for the tokens of this one, of `rows`: because the next step
        verifies draft tokens, or because a drafter reads this step's results of prompts."""
        if any(row.draft_tokens for row in rows):
            return True
        if self._reads_steps and not all(row.is_decode for row in rows):
            return True
        if self.is_idle:
            return False
        found = [(seq, len(tokens)) for seq in seqs if (tokens := _proposal(seq).tokens)]
        return bool(found) and any(self.choose(found, rows))

    @property
    def is_speculating(self) -> bool:
        """Whether draft tokens have been worth their time lately."""
        return self._num_idle_steps == 0

    def note_drafted(
        self, rows: list[PlannedRow], draft_tokens: dict[int, tuple[int, ...]], seconds: float, caught_up: bool = False
    ) -> None:
        """Record that the worker drafted `draft_tokens` for a step of `rows` in `seconds`. With `caught_up` that time
        includes older tokens that the drafter had not computed yet."""
        if not draft_tokens:
            return
        if not any(draft_tokens.values()):  # the drafter lacks too many tokens, or memory: nothing was tried
            self._next_trial = min(self._next_trial, self._num_idle_steps + _FIRST_TRIAL)
        elif not caught_up and all(row.is_decode for row in rows):  # the step has no chunks of prompts
            a_token = seconds / max(map(len, draft_tokens.values()))
            self._draft_s += (a_token - self._draft_s) / (8 if self._draft_s else 1)

    def count(self, seq: Sequence, draft_tokens: tuple[int, ...], num_accepted: int, stats: EngineStats) -> None:
        """Count the draft tokens that a step has verified, and the `num_accepted` among them."""
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
        """Drop the state of a sequence that has ended."""
        if seq.speculated is None:
            return
        self._num_sequences -= 1
        self._num_predicted -= bool(seq.request.prediction)
        if self._proposer is not None:
            self._proposer.end(seq, seq.speculated.state)
        seq.speculated = None

    def _start(self, seq: Sequence) -> Speculated:
        self._num_sequences += 1
        speculated = Speculated(None if self._proposer is None else self._proposer.start(seq))
        if seq.request.prediction:
            self._num_predicted += 1
            speculated.prediction_state = self._predictions.start(seq)
        return speculated

    def _rate(self, seq: Sequence) -> float:
        speculated: Speculated | None = seq.speculated
        if speculated is None:
            return self._acceptance.rates[0]
        return speculated.acceptance.rate(self._acceptance.rates[speculated.proposal.level])


def _proposal(seq: Sequence) -> Proposal:
    """Return the proposal for the next tokens of a sequence."""
    speculated: Speculated | None = seq.speculated
    return NO_PROPOSAL if speculated is None or speculated.num_tokens != len(seq.token_ids) else speculated.proposal


def _cautious(rate: float) -> float:
    """Return the rate with half the odds of `rate`. Draft tokens are tried where counts are high, and the highest of
    many counts are higher than the true rates."""
    return rate / (2 - rate)
