"""Prompt log-probabilities: which rows want them, and which of them each step computes. `octavo.sampling.logprobs`
measures them."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.ops import Array, Ops
from octavo.sampling.logprobs import MeasuredLogprobs, measure
from octavo.step_plan import Admission, StepPlan

# Rows computed at a time: 256 x 128k vocabulary entries are 128 MiB of float32.
MAX_ROWS = 256


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Prompt tokens of a row, and the tokens of the step that predict them."""

    row: int
    first: int  # token of the step
    predicted: NDArray[np.int64]
    num_top: int

    def measure(self, ops: Ops, logits: Callable[[int, int], Array]) -> list[tuple[int, MeasuredLogprobs]]:
        """Measure the log-probabilities; `logits(begin, end)` returns those after the tokens begin .. end of the
        step."""
        measured = []
        for start in range(0, len(self.predicted), MAX_ROWS):
            tokens = self.predicted[start : start + MAX_ROWS]
            first = self.first + start
            found = logits(first, first + len(tokens))
            measured.append((self.row, measure(ops, found, ops.place(tokens), np.full(len(tokens), self.num_top))))
        return measured


@dataclass(frozen=True, slots=True)
class _WantedLogprobs:
    num_top: int
    num_prompt_tokens: int


class PromptLogprobs:
    """The rows that want log-probabilities of their prompts."""

    def __init__(self) -> None:
        self._wanted: dict[int, _WantedLogprobs] = {}  # by row

    def admit(self, admission: Admission) -> None:
        """Note a new sequence. If it has output tokens, nothing is left to measure: its prompt was measured before a
        preemption."""
        self._wanted.pop(admission.row, None)
        num_top, num_prompt = admission.params.prompt_logprobs, admission.num_prompt_tokens
        if num_top is not None and len(admission.token_ids) <= num_prompt:
            self._wanted[admission.row] = _WantedLogprobs(num_top, num_prompt)

    def parts(self, plan: StepPlan, tokens: NDArray[np.int32]) -> list[PromptPart]:
        """Return the prompt tokens that a step's tokens predict, for each row that wants them; `tokens` are
        `SequenceTable.tokens`."""
        found: list[PromptPart] = []
        start = 0
        for planned in plan.rows if self._wanted else ():
            row, computed = planned.row, planned.num_computed
            first, start = start, start + planned.num_tokens
            if (wanted := self._wanted.get(row)) is None:
                continue
            end = min(computed + planned.num_tokens, wanted.num_prompt_tokens - 1)
            if end > computed:
                predicted = tokens[row, computed + 1 : end + 1].astype(np.int64)
                found.append(PromptPart(row, first, predicted, wanted.num_top))
        return found

    def forget(self, plan: StepPlan) -> None:
        """Forget the prompts that end with a submitted plan."""
        for planned in plan.rows if self._wanted else ():
            wanted = self._wanted.get(planned.row)
            if wanted is not None and planned.num_computed + planned.num_tokens >= wanted.num_prompt_tokens:
                del self._wanted[planned.row]
