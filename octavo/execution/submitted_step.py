"""A submitted step, until its results are collected. The runner sets its fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from octavo.execution.cross_outputs import Alignment
from octavo.execution.device import CapturedStep, Event
from octavo.execution.step_arrays import StepArrays, StepLayout
from octavo.ops import Array
from octavo.sampling.logprobs import MeasuredLogprobs
from octavo.sampling.sampler import SampledTokens
from octavo.sampling.sampling_table import Samples
from octavo.step_plan import StepPlan, StepResult

if TYPE_CHECKING:
    from octavo.execution.runner import Runner


@dataclass(slots=True)
class StagingBuffer:
    """Pinned memory of one step: its arrays, and the tokens that come back."""

    number: int
    input_bytes: NDArray[np.uint8]
    tokens: NDArray[np.int64]  # [max_num_samples]
    free_event: Event | None = None  # reached when the device no longer uses the buffer


@dataclass(frozen=True, slots=True)
class CapturedShape:
    """A captured step, and the arrays that it reads."""

    layout: StepLayout
    device_arrays: StepArrays[Array]
    host_arrays: list[StepArrays[NDArray[Any]]]  # views of each staging buffer, by its number
    step: CapturedStep  # a CUDA graph, or the CPU's program


class SubmittedStep:
    def __init__(
        self,
        runner: Runner,
        number: int,
        plan: StepPlan,
        staging: StagingBuffer,
        samples: Samples,
        row_generation: NDArray[np.int64],
    ) -> None:
        """`number` counts the steps of the runner. `row_generation` [N]: how many sequences have had the row of each
        sample."""
        self._runner, self.number = runner, number
        self.plan = plan
        self.staging = staging
        self.samples = samples
        self.row_generation = row_generation
        self.done: Event | None = None  # reached when the device has computed the step
        # Set in the stream.
        self.sampled: SampledTokens | None = None
        self.vectors: Array | None = None  # [samples, size] float32, from a model that pools
        self.prompt_logprobs: list[tuple[int, MeasuredLogprobs]] = []  # (row, log-probabilities)
        self.alignment: dict[int, Alignment] = {}  # by row
        self.features: Array | None = None  # [T, F]; valid until the next replay of a captured step
        self.hidden_out: Array | None = None  # [T, bytes]: hidden states for the next stage

    def result(self) -> StepResult:
        """Wait until the device has computed the step."""
        return self._runner.collect(self)

    def take_tokens(self, tokens: NDArray[np.int64]) -> None:
        """Set the tokens [N] to those that the first worker has sampled."""
        sampled: Any = self.staging.tokens[: len(tokens)]
        sampled[:] = tokens
        self.sampled = SampledTokens(sampled)
