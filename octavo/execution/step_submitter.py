"""The device's part of a step. `Runner` gathers a step on the host; here it becomes work in the compute stream.

    upload    from the step's staging buffer. None if the device `shares_memory`
    forward   a step that fits a captured step is replayed, other steps are computed call by call
    sampling  by the last stage's leader; its followers get the tokens from it. A device with its own memory keeps each
              row's last token there, so that the next step can be submitted before the host knows the token
    download  of the tokens, or of the hidden states for the next stage

If the device `shares_memory`, the stream computes at once: the step is done when `submit` returns.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from octavo.execution.cross_outputs import Alignment, CrossOutputs
from octavo.execution.device import Device, ModelOutputs
from octavo.execution.device_tables import DeviceTables
from octavo.execution.step_arrays import Padding, StepLayout, StepLimits, StepShape, clear
from octavo.execution.step_buffers import StepBuffers
from octavo.execution.step_computation import StepComputation
from octavo.execution.submitted_step import CapturedShape, GatheredStep, StagingBuffer, StepMemory, SubmittedStep
from octavo.execution.worker_group import WorkerGroup
from octavo.models.registry import CrossModel, Model, StageModel
from octavo.ops import Array, LayerKVCache, Ops, ParallelDeviceOps
from octavo.sampling.sampler import sample_tokens

if TYPE_CHECKING:
    from octavo.lora.ops import AdaptedOps


@dataclass(frozen=True, slots=True)
class DraftHooks:
    """What speculative decoding adds to steps."""

    keeps_features: bool = False  # for a draft head: see `StepSubmitter.features_of`
    warm_up_drafter: Callable[[Array], None] | None = None  # launches every kernel that reads features [T, F]
    target_token_ids: Array | None = None  # [vocab_size, 1] int64: the target model's ids of a draft model's tokens


class StepSubmitter:
    """Computes a model's steps on one device. It reads and writes no table of the host.

    Methods run on the host; a docstring that begins with "In the stream" marks work of the device's compute stream."""

    def __init__(
        self, model: Model, ops: Ops, device: Device, limits: StepLimits, device_tables: DeviceTables | None,
        padding: Padding, worker_group: WorkerGroup, cross_outputs: CrossOutputs | None,
        adapted_ops: AdaptedOps | None,
    ) -> None:  # fmt: skip
        self._model, self._ops, self._device, self._limits, self.padding = model, ops, device, limits, padding
        self._device_tables, self._worker_group, self._cross_outputs = device_tables, worker_group, cross_outputs
        self._stage_links = worker_group.stage_links
        self.draft_hooks = DraftHooks()
        self.captured_steps: list[CapturedShape] = []  # the smallest first
        self._num_submitted = 0  # number of the last step; one that failed has a number too
        self.computation = StepComputation(model, ops, device, limits, device_tables, self._stage_links, adapted_ops)
        self.buffers = StepBuffers(device, limits)
        # Pinned memory for hidden states on their way to the next stage.
        self._hidden_staging: NDArray[np.uint8] | None = None
        if self._stage_links.next is not None and not device.shares_memory:
            row_bytes = cast(StageModel, model).stage_width * 4  # upper bound: rows in float32
            self._hidden_staging = device.pinned([limits.largest.tokens * row_bytes], "uint8")

    def use_caches(self, caches: Sequence[LayerKVCache]) -> None:
        """Set the caches, by layer. Captured steps hold their addresses."""
        assert not self.captured_steps, "caches are set before steps are captured"
        self.caches = self.computation.caches = caches

    def set_draft_hooks(self, **hooks: Any) -> None:
        """Set fields of `draft_hooks`."""
        assert not self.captured_steps, "drafters are made before steps are captured"
        self.draft_hooks = replace(self.draft_hooks, **hooks)

    def capture(self) -> None:
        """Capture steps (CUDA graphs, or the CPU's program), the largest first: smaller ones reuse its memory."""
        assert not self.captured_steps, "steps are captured once"
        if not self._device.shares_memory:
            gc.collect()  # free the device memory that garbage holds; capturing makes no new garbage
        for shape in reversed(self._device.capture_shapes(self._limits)):
            layout = StepLayout(self._limits, shape)
            host_arrays = [layout.on_host(staging.input_bytes) for staging in self.buffers.staging]
            clear(host_arrays[0], self.padding)
            self.buffers.upload(self.buffers.staging[0], layout.num_bytes)
            self._device.compute.record().wait()
            device_arrays = self.buffers.on_device(layout)
            step = self._device.capture(self.computation, device_arrays)
            self.captured_steps.insert(0, CapturedShape(layout, device_arrays, host_arrays, step))

    def lay_out(self, shape: StepShape, staging: StagingBuffer, may_replay: bool) -> StepMemory:
        """Return the arrays of a step: those of the smallest captured step that it fits in, if there is one."""
        for captured in self.captured_steps if may_replay else ():
            if self._device.can_replay(captured.layout.shape, shape):
                host_arrays = captured.host_arrays[staging.number]
                return StepMemory(captured.layout, host_arrays, captured.device_arrays, captured.step)
        layout = StepLayout(self._limits, shape)
        return StepMemory(layout, layout.on_host(staging.input_bytes), self.buffers.on_device(layout), None)

    def submit(self, step: SubmittedStep) -> None:
        """Append a gathered step's work to the stream. Raises the device's memory errors (see `Runner.submit_rows`)."""
        gathered, compute = step.gathered, self._device.compute
        memory, num_tokens = gathered.memory, gathered.shape.tokens
        # 1. Wait for the previous stage.
        if self._stage_links.previous is not None:
            self._stage_links.previous.receive(memory.host_arrays.hidden_in[:num_tokens])
        # 2. Upload the arrays.
        self.buffers.upload(gathered.staging, memory.layout.num_bytes)
        # 3. Replay the step or compute it, sample, and copy tokens or hidden states to the host.
        step.number = self._num_submitted = self._num_submitted + 1
        if memory.captured is not None:
            compute.run(partial(memory.captured.replay, gathered.shape))
        compute.run(partial(self._compute_and_sample, step))
        to_host = gathered.staging.tokens if self._hidden_staging is None else self._hidden_staging
        compute.run(partial(self._download, step), writes=[to_host])
        step.done = compute.record()
        # 4. If there is a next stage, wait for the step, and send its hidden states.
        if self._stage_links.next is not None:
            step.done.wait()
            rows: Any = step.hidden_out
            if self._hidden_staging is not None:
                rows = self._hidden_staging[: rows.nbytes].reshape(num_tokens, -1)
            self._stage_links.next.send(rows)

    def features_of(self, step: SubmittedStep) -> Array:
        """Return what a draft head reads of the last submitted step: features [T, F]. The next step overwrites them."""
        assert step.number == self._num_submitted, "a later step has overwritten the features"
        assert step.features is not None
        return step.features

    # In the stream.

    def _compute_and_sample(self, step: SubmittedStep) -> None:
        """In the stream: compute the step unless it was replayed, and sample its tokens."""
        gathered, shape = step.gathered, step.gathered.shape
        outputs, step.alignment = self._model_outputs(gathered)
        if self.draft_hooks.keeps_features:
            step.features = outputs.features[: shape.tokens]
        if self._stage_links.next is not None:
            step.hidden_out = self._device.view(outputs.hidden[: shape.tokens], "uint8")
        elif self._limits.pools:
            step.vectors = outputs.logits[: shape.samples]
            if gathered.memory.captured is not None and self._device.runs_ahead:  # the next replay overwrites them
                step.vectors = self._ops.rows_of(step.vectors, np.arange(shape.samples))
        elif shape.samples:
            self._sample(step, outputs)
        # After sampling, so that sampling's memory is free again.
        logits_of = partial(self.computation.logits_after, gathered.memory.device_arrays, outputs.hidden)
        step.prompt_logprobs = [
            measured for part in gathered.prompt_logprob_parts for measured in part.measure(self._ops, logits_of)
        ]

    def _model_outputs(self, gathered: GatheredStep) -> tuple[ModelOutputs, dict[int, Alignment]]:
        """In the stream: return the outputs of the replay, or compute them. The second result is the alignment of the
        prompts that want it, by row."""
        memory, num_samples, cross = gathered.memory, gathered.shape.samples, self._cross_outputs
        if memory.captured is not None:
            return memory.captured.outputs, {}
        if cross is None or not gathered.alignment_parts:
            return self.computation.outputs(memory.device_arrays, num_samples), {}
        model = cast(CrossModel, self._model)
        with cross.keeping_queries(model):
            outputs = self.computation.outputs(memory.device_arrays, num_samples)
        return outputs, cross.alignment(model, gathered.alignment_parts, self.caches)

    def _sample(self, step: SubmittedStep, outputs: ModelOutputs) -> None:
        """In the stream: sample on the leader. A device with its own memory passes the tokens to the followers' devices
        and to the next step."""
        inputs, batch, tables = step.gathered.memory.device_arrays, step.gathered.sampling_batch, self._device_tables
        num_samples = step.gathered.shape.samples
        sampled, table_rows = outputs.argmax_tokens[:num_samples], inputs.sample_table_rows[:num_samples]
        if self._worker_group.is_leader:
            last_tokens = None
            if tables is not None and batch is not None and batch.penalizes_awaited:
                last_tokens = tables.last_tokens_of(table_rows)
            step.sampled = sample_tokens(
                self._ops, outputs.logits[:num_samples], sampled, inputs, batch, self._device.shares_memory, last_tokens
            )
            step.sampled.tokens = sampled = self.to_target_token_ids(step.sampled.tokens)
        if tables is not None:
            if not self._worker_group.shard.is_whole:
                # Overwrite `sampled` on followers with the leader's tokens. Their hosts get the tokens later
                # (`SubmittedStep.take_tokens`).
                cast(ParallelDeviceOps, self._ops).from_first(sampled)
            tables.store_last_tokens(self._ops, table_rows, sampled)

    def to_target_token_ids(self, tokens: Array) -> Array:
        """In the stream: return tokens [N] int64 of a draft model as the target model's ids."""
        if self.draft_hooks.target_token_ids is None:
            return tokens
        own_ids: Any = tokens
        # `NO_TOKEN`, of a row that failed, becomes 0 to stay in bounds; a wrong draft token does no harm.
        own_ids = own_ids * (own_ids > 0)
        ids: Any = self._ops.take_rows(self.draft_hooks.target_token_ids, own_ids)
        return cast(Array, ids.reshape(-1))

    def _download(self, step: SubmittedStep) -> None:
        """In the stream: copy the tokens, or the hidden states for the next stage, to the host."""
        if step.sampled is not None:
            self._device.copy(step.sampled.tokens, step.gathered.staging.tokens[: step.gathered.shape.samples])
        if self._hidden_staging is not None and step.hidden_out is not None:
            self._device.copy(step.hidden_out.reshape(-1), self._hidden_staging[: step.hidden_out.nbytes])
