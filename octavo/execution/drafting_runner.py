"""A runner whose plans leave guesses to be made: a `Drafter` makes them before the step that verifies them runs.

The plan says how many tokens are to be guessed for each of its rows, and has blocks for them; the guesses become part
of it, so that nothing else knows where they came from: neither the workers that share the model with the first one,
which alone guesses and tells them the plan only then. The result says what they were.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Protocol

from octavo.execution.model_drafter import Guesses
from octavo.execution.runner import Runner
from octavo.execution.submitted_step import SubmittedStep
from octavo.execution.team import Team
from octavo.plan import StepPlan, StepResult


class Drafter(Protocol):
    """Guesses with a model, in the worker."""

    def draft(self, plan: StepPlan) -> Guesses:
        """Guess for the rows of a plan that have guesses to be made, as many as each has. The model's runner has taken
        in the plan; the drafter sees every plan, once."""
        ...

    def observe(self, plan: StepPlan, step: SubmittedStep, result: StepResult) -> None:
        """The step has been computed, with the guesses that its plan now has."""
        ...


class DraftedStep:
    """A step that the device has been given, with what it guesses."""

    def __init__(self, drafter: Drafter, plan: StepPlan, step: SubmittedStep, guesses: Guesses, draft_s: float) -> None:
        self._drafter, self._plan, self._step = drafter, plan, step
        self._guesses, self._draft_s = guesses, draft_s

    def result(self) -> StepResult:
        """Wait until the device has computed the step."""
        result = self._step.result()
        begin = time.monotonic()
        self._drafter.observe(self._plan, self._step, result)
        result.guesses, result.draft_s = dict(self._guesses), self._draft_s + time.monotonic() - begin
        return result


class DraftingRunner:
    """`Runner.submit` for plans with guesses to be made."""

    def __init__(self, runner: Runner, drafter: Drafter, team: Team) -> None:
        self._runner, self._drafter, self._team = runner, drafter, team

    def submit(self, plan: StepPlan) -> DraftedStep:
        """Guess, then have the device compute the plan. Raises `DeviceMemoryError` as `Runner.submit`."""
        self._runner.take_in(plan)
        begin = time.monotonic()
        guesses = self._drafter.draft(plan)
        draft_s = time.monotonic() - begin
        rows = plan.rows
        if guesses:
            rows = [p._replace(guesses=guesses.get(p.row, p.guesses)) for p in rows]
        plan = replace(plan, rows=rows)
        self._team.tell_plan(plan)
        return DraftedStep(self._drafter, plan, self._runner.compute(plan), guesses, draft_s)
