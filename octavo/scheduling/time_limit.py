"""How long a step may take while streams wait for it, and how many prompt tokens fit in that time.

The scheduler asks here; `octavo.step_cost` predicts how long a step takes. The scheduler itself keeps the budget of
tokens.
"""

from bisect import bisect_right

from octavo.sampling_params import RequestOutputKind
from octavo.sequence import Sequence
from octavo.step_cost import StepCost, StepWork
from octavo.step_plan import StepPlan

# `--target-step-time auto`. People do not notice a tenth of a second (R. B. Miller, "Response time in man-computer
# conversational transactions", 1968); the target is a little less, as steps are sometimes slower than predicted. With a
# single stream the target is a fifth longer, because each step that a prompt shares also costs the decode's time. If
# the streams alone take more than a third of the target, prompts still get two thirds of the machine, so that first
# tokens are not kept waiting by many streams.
AUTO_STEP_S = 0.09
AUTO_STEP_OF_ONE_S = 0.11
AUTO_TIMES_DECODES = 3.0
MIN_CHUNK_TOKENS = 32  # that a running prompt gets in each step


class TimeLimit:
    """The time that one step has left. Decodes are counted first and always run."""

    def __init__(self, cost: StepCost, decodes: StepWork, target_s: float | None, num_streams: int = 2) -> None:
        """`target_s` None is `auto`."""
        self._cost = cost
        self._work = decodes
        self._has_prompts = False  # the step has a part of a prompt
        least_s = AUTO_STEP_OF_ONE_S if num_streams == 1 else AUTO_STEP_S
        self.seconds = target_s or max(least_s, AUTO_TIMES_DECODES * cost.seconds(decodes))

    @property
    def is_spent(self) -> bool:
        """Whether the step has a part of a prompt and no time for another one."""
        return self._has_prompts and self._cost.seconds(self._work.plus(0, MIN_CHUNK_TOKENS, 0)) > self.seconds

    def chunk(self, num_computed: int, most: int) -> int:
        """Return how many of the next `most` tokens of a prompt to compute: those that fit, but at least
        `MIN_CHUNK_TOKENS`, or one if the time is spent."""
        least = min(most, 1 if self.is_spent else MIN_CHUNK_TOKENS)
        longer = range(least + 1, most + 1)
        return least + bisect_right(
            longer, self.seconds, key=lambda n: self._cost.seconds(self._work.plus(num_computed, n, 1))
        )

    def spend(self, num_computed: int, num_tokens: int) -> None:
        """Count a part of a prompt."""
        self._has_prompts = True
        self._work.add(num_computed, num_tokens, 0)

    def spend_on_drafts(self, num_computed: int, num_draft_tokens: int) -> None:
        """Count the draft tokens of a decode."""
        for count in range(1, num_draft_tokens + 1):
            self._work.add_draft_token(num_computed, count)


def step_time_limit(
    cost: StepCost | None, target_s: float | None, running: list[Sequence], has_waiting: bool
) -> TimeLimit | None:
    """Return the time limit of the next step; None if no stream would wait for a prompt."""
    if cost is None or target_s == 0.0:
        return None
    decodes = StepWork()
    num_streams, has_prompts = 0, has_waiting
    for seq in running:
        num_lacking = seq.num_uncomputed_tokens
        if num_lacking == 1:
            decodes.add(seq.num_computed_tokens, 1, 1)
            num_streams += seq.params.output_kind is not RequestOutputKind.FINAL_ONLY
        elif num_lacking > 1:
            has_prompts = True
    return TimeLimit(cost, decodes, target_s, num_streams) if num_streams and has_prompts else None


def prompt_token_s(cost: StepCost, plan: StepPlan, num_tokens: int, limit: TimeLimit | None) -> float:
    """Return the seconds that a prompt token takes while other prompts wait: steps are as full as `num_tokens` and
    `limit` allow, and decodes take their part of each."""
    decodes = StepWork.of([row for row in plan.rows if row.is_decode])
    decode_s = cost.seconds(decodes)
    token_s = (cost.seconds(plan.work) - decode_s) / (plan.work.num_tokens - decodes.num_tokens)
    if token_s == 0.0:
        return 0.0
    prompts_s = num_tokens * token_s
    if limit is not None:
        prompts_s = min(prompts_s, max(limit.seconds - decode_s, MIN_CHUNK_TOKENS * token_s))
    return token_s * (prompts_s + decode_s) / prompts_s
