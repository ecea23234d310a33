"""A runner with a `Drafter`, which makes the draft tokens of a plan before the step that verifies them.

The plan says how many draft tokens each row gets, and has blocks for them. The drafter's tokens become part of the
plan, so other code treats them like any draft tokens. With several workers only the first one drafts, and then sends
the plan to the others. The result has the draft tokens.

With pipeline stages the first worker, in the last stage, drafts for a step and sends its plan while earlier stages
still compute another step."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np

from octavo.errors import DeviceMemoryError
from octavo.execution.model_drafter import DraftBatch
from octavo.execution.runner import Runner
from octavo.execution.submitted_step import SubmittedStep
from octavo.execution.worker_group import WorkerGroup
from octavo.step_plan import StepPlan, StepResult


class Drafter(Protocol):
    """Makes draft tokens in the worker."""

    def draft(self, plan: StepPlan) -> DraftBatch:
        """Make the draft tokens that the rows of a plan ask for, or as many as possible. The model's runner has applied
        the plan's updates; the drafter sees every plan once."""

    def observe(self, plan: StepPlan, step: SubmittedStep, result: StepResult) -> None:
        """Read a finished step, whose plan has its draft tokens by now."""


class DraftedStep:
    """A step with its draft tokens. `submit` submits its rows; with earlier pipeline stages it first waits for them,
    and is called when the result is wanted."""

    def __init__(
        self, drafter: Drafter, plan: StepPlan, submit: Callable[[], SubmittedStep], draft_tokens: DraftBatch,
        draft_s: float, waits: bool,
    ) -> None:  # fmt: skip
        self._drafter, self.plan, self._made, self._draft_s = drafter, plan, draft_tokens, draft_s
        self._draft_tokens = {row.row: row.draft_tokens for row in plan.rows if row.row in draft_tokens.of_rows}
        self._submit, self._step = submit, None if waits else submit()
        self._result: StepResult | None = None

    @property
    def is_done(self) -> bool:
        return self._result is not None

    def result(self) -> StepResult:
        """Wait until the device has computed the step."""
        if self._result is None:
            step = self._step or self._submit()
            result = self._result = step.result()
            begin = time.monotonic()
            self._drafter.observe(self.plan, step, result)
            result.draft_tokens, result.draft_s = self._draft_tokens, self._draft_s + time.monotonic() - begin
            result.num_drafted = {row: len(made) for row, made in self._made.of_rows.items()}
            result.caught_up = self._made.caught_up
        return self._result


class DraftingRunner:
    """`Runner.submit` for plans that ask for draft tokens."""

    def __init__(self, runner: Runner, drafter: Drafter, worker_group: WorkerGroup) -> None:
        self._runner, self._drafter, self._worker_group = runner, drafter, worker_group
        self._has_stages = worker_group.worker_rank.num_stages > 1
        self._waiting: deque[DraftedStep] = deque()  # steps that wait for earlier stages, or are done; in order

    def submit(self, plan: StepPlan) -> DraftedStep:
        """Draft, then submit the plan's rows. Raises `DeviceMemoryError`, like `Runner.submit`."""
        while self._waiting and (self._waiting[0].is_done or self._changes_what_waits(plan)):
            self._waiting.popleft().result()
        try:
            self._runner.apply_updates(plan)
        except DeviceMemoryError:
            self._drafter.draft(replace(plan, rows=[]))  # later plans do not repeat its admissions and moves
            raise
        begin = time.monotonic()
        draft_tokens = self._drafter.draft(plan)
        draft_s = time.monotonic() - begin
        if made := draft_tokens.of_rows:  # missing draft tokens are padded with token 0
            rows = [
                p._replace(draft_tokens=(*made[p.row], *[0] * (len(p.draft_tokens) - len(made[p.row]))))
                if p.row in made
                else p
                for p in plan.rows
            ]
            plan = replace(plan, rows=rows)
        self._worker_group.send_plan(plan)
        compute = partial(self._runner.submit_rows, plan)
        step = DraftedStep(self._drafter, plan, compute, draft_tokens, draft_s, self._has_stages)
        if self._has_stages:
            self._waiting.append(step)
        return step

    def _changes_what_waits(self, plan: StepPlan) -> bool:
        """Return whether the plan's updates would change anything that waiting steps still have to read."""
        if plan.adapters or any(plan.moves):
            return True
        rows = {planned.row for step in self._waiting for planned in step.plan.rows}
        changed = {change.row for changes in (plan.admissions, plan.new_blocks) for change in changes}
        return not rows.isdisjoint(changed | {row for row, _, _ in plan.new_tokens})

    def waiting_steps_use(self, groups: Sequence[int], blocks: Sequence[int]) -> bool:
        """Return whether the tables of these groups have any of the blocks for a row of a step that waits."""
        rows = sorted({planned.row for step in self._waiting if not step.is_done for planned in step.plan.rows})
        return bool(np.isin(self._runner.sequence_table.blocks[np.ix_(groups, rows)], blocks).any())

    def waiting_steps_move(self, pool: int, blocks: Sequence[int], of_host: bool) -> bool:
        """Return whether the plan of a step that waits moves any of the blocks of a pool, or of its host blocks
        (`of_host`)."""
        moved = set[int]()
        for moves in (step.plan.moves[pool] for step in self._waiting if not step.is_done and step.plan.moves):
            moved.update(block for move in moves.copy for block in move if not of_host)
            moved.update(move[of_host] for move in moves.swap_out)
            moved.update(move[not of_host] for move in moves.swap_in)
        return not moved.isdisjoint(blocks)
