"""How many draft tokens a step verifies: as many as give the most tokens a second.

A draft token is worth the probability that it and those before it are accepted, and costs what `StepCostModel`
predicts. Draft tokens are added while they raise the step's tokens by more than its time. The time of prompts in the
same step does not count, because it is spent anyway."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from octavo.step_cost import StepCost, StepWork


class Candidate(NamedTuple):
    """A sequence that lacks one token, and its proposal."""

    num_computed: int
    num_draft_tokens: int  # the most draft tokens
    rate: float  # probability that a token is accepted if those before it are


def choose_counts(
    cost: StepCost, work: StepWork, prompts: StepWork, candidates: Sequence[Candidate], gain: float
) -> list[int]:
    """Return, for each candidate, the number of draft tokens that the step of `work` verifies. `work` includes the
    candidates' single tokens and `prompts`. All are 0 unless draft tokens raise the tokens a second by a factor of
    `gain`."""
    counts = [0] * len(candidates)
    prompts_s = cost.seconds(prompts) if prompts.num_tokens else 0.0
    num_tokens = float(work.num_samples - prompts.num_samples)
    first = num_tokens / max(cost.seconds(work) - prompts_s, 1e-9)
    best = first
    for i in sorted(range(len(candidates)), key=lambda i: -candidates[i].rate):
        candidate = candidates[i]
        tried = replace(work)
        expected, chance = num_tokens, 1.0
        kept: tuple[StepWork, float] | None = None
        last = 0.0
        for count in range(1, candidate.num_draft_tokens + 1):
            tried.add_draft_token(candidate.num_computed, count)
            chance *= candidate.rate
            expected += chance
            rate = expected / max(cost.seconds(tried) - prompts_s, 1e-9)
            if rate > best:
                best, counts[i], kept = rate, count, (replace(tried), expected)
            elif count > 2 and rate < last:
                break
            last = rate
        if kept is None:
            break
        work, num_tokens = kept
    return counts if best >= gain * first else [0] * len(candidates)


def choose_draft_count(
    cost: StepCost, work: StepWork, prompts: StepWork, candidates: Sequence[Candidate], draft_s: float, gain: float,
    num_wrong: float = 0.0,
) -> int:  # fmt: skip
    """Return how many tokens a drafter makes for each of the `candidates`. `work`, `prompts` and `gain` are as in
    `choose_counts`; one more token for all of them takes the drafter `draft_s`. `work` may have draft tokens of other
    sequences, of which `num_wrong` are expected to be wrong."""
    prompts_s = cost.seconds(prompts) if prompts.num_tokens else 0.0
    expected = work.num_samples - prompts.num_samples - num_wrong
    best = first = expected / max(cost.seconds(work) - prompts_s, 1e-9)
    chosen, tried, chances = 0, replace(work), [1.0] * len(candidates)
    for count in range(1, max(candidate.num_draft_tokens for candidate in candidates) + 1):
        for i, candidate in enumerate(candidates):
            if count <= candidate.num_draft_tokens:
                tried.add_draft_token(candidate.num_computed, count)
                chances[i] *= candidate.rate
                expected += chances[i]
        rate = expected / max(cost.seconds(tried) - prompts_s + count * draft_s, 1e-9)
        if rate > best:
            best, chosen = rate, count
        elif count > chosen + 2:
            break
    return chosen if best >= gain * first else 0
