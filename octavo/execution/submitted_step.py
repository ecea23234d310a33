"""A step as it passes from `Runner` to `StepSubmitter` and back: gathered on the host, then submitted to the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.execution.cross_outputs import Alignment, AlignmentPart
from octavo.execution.device import CapturedStep, Event
from octavo.execution.prompt_logprobs import PromptPart
from octavo.execution.step_arrays import StepArrays, StepLayout, StepShape
from octavo.ops import Array
from octavo.sampling.logprobs import MeasuredLogprobs
from octavo.sampling.sampler import SampledTokens
from octavo.sampling.sampling_table import Samples, SamplingBatch
from octavo.step_plan import StepResult


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


class StepMemory(NamedTuple):
    """The arrays of a step, and the captured step that reads them."""

    layout: StepLayout
    host_arrays: StepArrays[NDArray[Any]]  # views of the step's staging buffer
    device_arrays: StepArrays[Array]
    captured: CapturedStep | None  # None: computed call by call


class GatheredStep(NamedTuple):
    """A step that the host has gathered from its tables. The device needs nothing else to compute it."""

    shape: StepShape  # a captured step that it is replayed in may be larger
    staging: StagingBuffer
    memory: StepMemory
    samples: Samples
    row_generation: NDArray[np.int64]  # [N]: how many sequences have had the row of each sample
    sampling_batch: SamplingBatch | None  # None: all samples are greedy, there are none, or the model pools
    prompt_logprob_parts: list[PromptPart]
    alignment_parts: list[AlignmentPart]


class SubmittedStep:
    """A gathered step, and what the device makes of it. `collect` returns its results when it is done."""

    def __init__(self, gathered: GatheredStep, collect: Callable[[SubmittedStep], StepResult]) -> None:
        self.gathered, self._collect = gathered, collect
        # Set by `StepSubmitter.submit`.
        self.number = 0  # steps of a runner are numbered from 1
        self.done: Event | None = None  # reached when the device has computed the step
        # Set in the stream.
        self.sampled: SampledTokens | None = None
        self.vectors: Array | None = None  # [samples, size] float32, from a model that pools
        self.prompt_logprobs: list[tuple[int, MeasuredLogprobs]] = []  # (row, log-probabilities)
        self.alignment: dict[int, Alignment] = {}  # by row
        self.features: Array | None = None  # [T, F], for `StepSubmitter.features_of`
        self.hidden_out: Array | None = None  # [T, bytes]: hidden states for the next stage

    def result(self) -> StepResult:
        """Wait until the device has computed the step."""
        return self._collect(self)

    def take_tokens(self, tokens: NDArray[np.int64]) -> None:
        """Set the tokens [N] to those that the first worker has sampled."""
        sampled: Any = self.gathered.staging.tokens[: len(tokens)]
        sampled[:] = tokens
        self.sampled = SampledTokens(sampled)
