"""How much a step may hold: how long it may take where streams wait for it, and what part of a prompt fits in that.

The scheduler asks; what a step costs is `octavo.step_cost`'s. The budget of tokens is the scheduler's own.
"""

from __future__ import annotations

from bisect import bisect_right

from octavo.plan import StepPlan
from octavo.sampling_params import RequestOutputKind
from octavo.sequence import Sequence
from octavo.step_cost import StepCost, StepWork

# `--target-step-time auto`. A tenth of a second is about what one does not notice (R. B. Miller, "Response time in
# man-computer conversational transactions", 1968); a little less, since steps take longer than predicted as often as
# shorter. Where a single stream waits, a fifth more: every step costs a prompt beside it the same again. Where the
# streams alone take more than a third of it, prompts still get two thirds of the machine, so that many streams do not
# keep everybody else from a first token.
AUTO_STEP_S = 0.09
AUTO_STEP_OF_ONE_S = 0.11
AUTO_TIMES_DECODES = 3.0
# A prompt that is being computed gets so many tokens in each step, whatever they cost.
MIN_CHUNK_TOKENS = 32


class TimeLimit:
    """What is left of the time of one step. Decodes are counted before anything else and always run."""

    def __init__(self, cost: StepCost, decodes: StepWork, target_s: float | None, num_streams: int = 2) -> None:
        """`target_s` is None for `auto`."""
        self._cost = cost
        self._work = decodes
        self._has_prompts = False  # a part of one is in the step
        least_s = AUTO_STEP_OF_ONE_S if num_streams == 1 else AUTO_STEP_S
        self.seconds = target_s or max(least_s, AUTO_TIMES_DECODES * cost.seconds(decodes))

    @property
    def is_spent(self) -> bool:
        """Whether another part of a prompt would be too much, beside one that is there already."""
        return self._has_prompts and self._cost.seconds(self._work.plus(0, MIN_CHUNK_TOKENS, 0)) > self.seconds

    def chunk(self, num_computed: int, most: int) -> int:
        """How many of the next `most` tokens of a prompt fit, the least that it gets included."""
        least = min(most, 1 if self.is_spent else MIN_CHUNK_TOKENS)
        longer = range(least + 1, most + 1)
        return least + bisect_right(
            longer, self.seconds, key=lambda n: self._cost.seconds(self._work.plus(num_computed, n, 1))
        )

    def spend(self, num_computed: int, num_tokens: int) -> None:
        """A part of a prompt is in the step."""
        self._has_prompts = True
        self._work.add(num_computed, num_tokens, 0)

    def spend_on_drafts(self, num_computed: int, num_draft_tokens: int) -> None:
        """A decode brings guesses."""
        for count in range(1, num_draft_tokens + 1):
            self._work.add_draft_token(num_computed, count)


def step_time_limit(
    cost: StepCost | None, target_s: float | None, running: list[Sequence], has_waiting: bool
) -> TimeLimit | None:
    """The limit of the next step; None where no stream would wait for a prompt."""
    if cost is None or target_s == 0.0:
        return None
    decodes = StepWork()
    num_streams, has_prompts = 0, has_waiting
    for seq in running:
        num_lacking = seq.num_lacking_tokens
        if num_lacking == 1:
            decodes.add(seq.num_computed_tokens, 1, 1)
            num_streams += seq.params.output_kind is not RequestOutputKind.FINAL_ONLY
        elif num_lacking > 1:
            has_prompts = True
    return TimeLimit(cost, decodes, target_s, num_streams) if num_streams and has_prompts else None


def prompt_token_s(cost: StepCost, plan: StepPlan, num_tokens: int, limit: TimeLimit | None) -> float:
    """How long a token of a prompt takes while there are others to compute: steps are as full as `num_tokens` and
    `limit` let them be, and decodes have their part of each."""
    decodes = StepWork.of([row for row in plan.rows if row.is_decode])
    decode_s = cost.seconds(decodes)
    token_s = (cost.seconds(plan.work) - decode_s) / (plan.work.num_tokens - decodes.num_tokens)
    if token_s == 0.0:
        return 0.0
    prompts_s = num_tokens * token_s
    if limit is not None:
        prompts_s = min(prompts_s, max(limit.seconds - decode_s, MIN_CHUNK_TOKENS * token_s))
    return token_s * (prompts_s + decode_s) / prompts_s
