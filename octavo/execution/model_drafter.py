"""Makes draft tokens with a draft model; the next step of the target model verifies them.

The draft model has its own runner over the same sequences. Its layers keep their keys in the blocks of a group of the
target model's cache, behind the target's own, so that prefix hits, forks, preemption and swapping include them. It
samples with the random numbers that the target model will use at the same positions (common random numbers), so that
its tokens are accepted if the two distributions are close, not only if both are sure.

It computes prompts in the same steps as the target model. If it makes no draft tokens for a while it lags, and catches
up when it is needed again. If its layers keep states (`DraftStates`), which are in no block, it starts from nothing
with each admitted sequence.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Container, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from octavo.errors import DeviceMemoryError
from octavo.execution.draft_states import DraftStates
from octavo.execution.filled_slots import FilledSlots
from octavo.execution.runner import Runner
from octavo.execution.sequence_table import SequenceTable
from octavo.execution.submitted_step import SubmittedStep
from octavo.sampling_params import SamplingParams
from octavo.step_plan import NewBlock, PlannedRow, StepPlan, StepResult

logger = logging.getLogger(__name__)

# Steps in flight whose tokens are not fetched yet. A runner has staging buffers for these, and one to write.
_MOST_IN_FLIGHT = 2


class DraftBatch(NamedTuple):
    """Draft tokens for each row that asked for some, fewer than asked if they cannot be made yet. `caught_up`: the
    drafter has also computed older tokens."""

    of_rows: Mapping[int, list[int]]
    caught_up: bool = False


class ModelDrafter:
    """Makes draft tokens with the draft model's `runner`. Its caches are in the blocks of group `group` of the target
    model's `table`; `pool` is the group's pool. Sequences longer than `max_len` get no draft tokens. `vocab_size` is
    the target model's."""

    def __init__(
        self, runner: Runner, table: SequenceTable, group: int, pool: int, kept: FilledSlots | DraftStates,
        max_len: int, vocab_size: int,
    ) -> None:  # fmt: skip
        self._runner, self._table, self._group, self._pool = runner, table, group, pool
        self._filled = kept if isinstance(kept, FilledSlots) else None
        self._states = kept if isinstance(kept, DraftStates) else None
        self._max_len, self._vocab_size = max_len, vocab_size
        num_rows = table.max_num_seqs
        # Tokens that the draft model has computed; draft tokens included, unless they were computed in copies of
        # states.
        self._num_drafted = np.zeros(num_rows, np.int64)
        self._num_filled = np.zeros(num_rows, np.int64)  # how many of these `filled` has recorded

    def draft(self, plan: StepPlan) -> DraftBatch:
        """Compute the tokens of the plan's rows that the draft model lacks, and make the draft tokens that rows ask
        for, if there is enough memory."""
        # 1. Apply the plan's updates that concern the draft.
        self._apply_updates(plan)
        # 2. Choose the rows that compute what the draft model lacks.
        rows, ready, caught_up = self._choose_rows(plan)
        made: dict[int, list[int]] = {planned.row: [] for planned in ready}
        # 3. Compute these rows, and make the draft tokens.
        try:
            self._run(StepPlan(rows=rows), ready, made)
        except DeviceMemoryError as e:
            numbers = [planned.row for planned in rows]
            self._num_drafted[numbers] = self._num_filled[numbers]
            logger.debug("no draft tokens are made: %s", e)
        else:
            for planned in rows:  # blocks may be saved, or shared, before the next plan
                self._note_filled(planned.row, planned.num_computed + planned.num_tokens)
        return DraftBatch(
            {planned.row: made.get(planned.row, []) for planned in plan.rows if planned.wants_drafts}, caught_up
        )

    def _choose_rows(self, plan: StepPlan) -> tuple[list[PlannedRow], list[PlannedRow], bool]:
        """Return the rows of the draft model's next step, within its token budget; the plan's rows whose first draft
        token this step samples; and whether the draft model catches up."""
        rows: list[PlannedRow] = []
        ready: list[PlannedRow] = []
        caught_up = False
        budget = self._runner.max_step_tokens
        # 1. Rows that ask for draft tokens.
        for planned in plan.rows:
            if not planned.wants_drafts or planned.num_computed + planned.num_tokens > self._max_len:
                continue
            num_lacking = self._num_lacking(planned)
            num_tokens = min(num_lacking, budget)
            budget -= num_tokens
            if num_tokens == num_lacking:
                ready.append(planned)
            caught_up |= num_lacking > len(planned.draft_tokens) + 1  # more than one step can have added
            if num_tokens > 0:
                rows.append(self._next(planned, num_tokens, num_tokens == num_lacking))
        # 2. Parts of prompts.
        for planned in plan.rows if plan.drafts_prompts else ():
            if not planned.draft_tokens and (planned.num_tokens > 1 or not planned.num_sampled_positions):
                num_tokens = max(0, min(self._num_lacking(planned), budget))
                budget -= num_tokens
                if num_tokens:
                    rows.append(self._next(planned, num_tokens, False))
        return rows, ready, caught_up

    def observe(self, plan: StepPlan, step: SubmittedStep, result: StepResult) -> None:
        """Do nothing: the next plan shows which draft tokens were accepted."""

    def _apply_updates(self, plan: StepPlan) -> None:
        table, vocab_size = self._runner.sequence_table, self._runner.model.vocab_size
        self._runner.apply_updates(changes_of(plan, self._group, len(table.blocks), vocab_size, table.state_groups))
        if self._filled is not None:
            self._look_up(plan, self._filled)
            return
        self._num_drafted[[admission.row for admission in plan.admissions]] = 0
        for planned in plan.rows:
            if self._num_drafted[planned.row] > planned.num_computed:  # a step was withdrawn, and states cannot go back
                self._num_drafted[planned.row] = 0

    def _look_up(self, plan: StepPlan, filled: FilledSlots) -> None:
        """Find how many tokens of the plan's rows the draft has computed, from the blocks' filled slots."""
        if plan.moves:
            filled.move(plan.moves[self._pool])
        admitted = {admission.row for admission in plan.admissions}
        for planned in plan.rows:
            row, num_computed = planned.row, planned.num_computed
            blocks = self._table.blocks[self._group, row]
            if row in admitted:
                num_drafted = num_filled = filled.num_filled(blocks, num_computed)
            else:  # rejected draft tokens do not count
                num_drafted = min(int(self._num_drafted[row]), num_computed)
                num_filled = min(int(self._num_filled[row]), num_drafted)
            self._num_drafted[row], self._num_filled[row] = num_drafted, num_filled
            self._note_filled(row, num_drafted)
            filled.overwrite(blocks, num_computed, num_computed + planned.num_tokens)

    def _note_filled(self, row: int, end: int) -> None:
        """Note the tokens of a row up to `end` as computed."""
        begin = int(self._num_filled[row])
        if self._filled is not None and begin < end:
            self._filled.fill(self._table.blocks[self._group, row], begin, end)
            self._num_filled[row] = end

    def _num_lacking(self, planned: PlannedRow) -> int:
        """Return the number of tokens to compute before the first draft token, or up to the end of a prompt's chunk."""
        end = planned.num_computed + planned.num_tokens - len(planned.draft_tokens)
        return min(end, self._max_len) - int(self._num_drafted[planned.row])

    def _next(self, planned: PlannedRow, num_tokens: int, is_sampled: bool) -> PlannedRow:
        num_drafted = int(self._num_drafted[planned.row])
        self._num_drafted[planned.row] = num_drafted + num_tokens
        self._runner.sequence_table.set_known(planned.row, num_drafted + num_tokens)
        return PlannedRow(planned.row, num_drafted, num_tokens, int(is_sampled))

    def _run(self, plan: StepPlan, ready: list[PlannedRow], made: dict[int, list[int]]) -> None:
        """Compute a plan that samples the first draft token of each row of `ready`, then the rows' next draft tokens
        one by one. Appends them to `made`."""
        in_flight: deque[tuple[list[PlannedRow], SubmittedStep]] = deque()

        def collect() -> None:
            rows, step = in_flight.popleft()
            sampled = [planned.row for planned in rows if planned.num_sampled_positions]
            for row, token in zip(sampled, step.result().tokens, strict=True):
                made[row].append(token if token < self._vocab_size else 0)

        num_drafted = 1
        if self._states is not None:
            self._states.use_right()
        while plan.rows:
            in_flight.append((plan.rows, self._runner.submit_rows(plan)))
            while len(in_flight) >= (_MOST_IN_FLIGHT if self._runner.device.runs_ahead else 1):
                collect()
            plan = StepPlan()
            for planned in ready:
                if len(planned.draft_tokens) > num_drafted:
                    if self._states is None:
                        self._num_drafted[planned.row] = planned.num_computed + num_drafted + 1
                    plan.rows.append(PlannedRow(planned.row, planned.num_computed + num_drafted, 1, 1))
            if num_drafted == 1 and self._states is not None and plan.rows:
                self._states.use_copies([planned.row for planned in plan.rows])
            num_drafted += 1
        while in_flight:
            collect()


def changes_of(
    plan: StepPlan, group: int, num_groups: int, num_shared_tokens: int, state_groups: Container[int] = ()
) -> StepPlan:
    """Return a plan's admissions and new blocks for a draft's runner: all its `num_groups` groups, except state groups,
    use the blocks of `group`. `num_shared_tokens`: as for `draft_params`."""
    copies = [number for number in range(num_groups) if number not in state_groups]
    admissions = [
        replace(
            admission, params=draft_params(admission.params, num_shared_tokens),
            block_tables=[admission.block_tables[group] if n in copies else [] for n in range(num_groups)],
        )
        for admission in plan.admissions
    ]  # fmt: skip
    new_blocks = [
        NewBlock(entry.row, copy, entry.position, entry.block)
        for entry in plan.new_blocks
        if entry.group == group
        for copy in copies
    ]
    return StepPlan(admissions=admissions, new_blocks=new_blocks)


def draft_params(params: SamplingParams, num_shared_tokens: int) -> SamplingParams:
    """Return the sampling parameters that a draft model follows: those that do not depend on earlier draft tokens, nor
    on token ids from `num_shared_tokens` on. The ids below are of the same tokens in the target model."""
    bias, allowed = params.logit_bias or {}, params.allowed_token_ids or ()
    return SamplingParams(
        temperature=params.temperature, top_p=params.top_p, top_k=params.top_k, min_p=params.min_p,
        logit_bias={token: value for token, value in bias.items() if token < num_shared_tokens} or None,
        allowed_token_ids=[token for token in allowed if token < num_shared_tokens] or None,
    )  # fmt: skip
