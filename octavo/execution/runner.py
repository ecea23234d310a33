"""Runs steps on one device: a plan becomes input arrays, the model computes, and the sampled tokens come back.

The states of a step, and the methods that move it there:

    applied    the tables have its sequences and blocks      `apply_updates`, the first part of `submit`
    submitted  work in the device's compute stream           `submit_rows`, the second part of `submit`
    done       its tokens are on the host                    the stream, when it reaches `SubmittedStep.done`
    collected  its valid tokens are in the tables            `collect`
    withdrawn  not computed: the device lacks memory         `submit` raises `DeviceMemoryError`

The work of a step in the stream:

- the forward pass: a step that fits a captured step is replayed, other steps are computed call by call
- sampling: a device with its own memory keeps each row's last token there. So the next step can be submitted before the
  host knows it
- the copy of the tokens to the host

What differs between devices and between workers:

    upload         none if the device `shares_memory`; otherwise in the stream, from one of its staging buffers
    sampling       only by the last stage's leader; its followers get the tokens from it
    `submit_rows`  waits for (1) a free staging buffer (of three if the device `runs_ahead`, else one)
                             (2) the previous stage's hidden states, if there is a previous stage
                             (3) its own step, if there is a next stage
                   If the device `shares_memory`, the stream computes at once: the step is done on return
    `collect`      waits for the step. A follower calls it when it has the leader's tokens
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from octavo.errors import DeviceMemoryError
from octavo.execution.block_mover import BlockMover
from octavo.execution.cross_outputs import Alignment, AlignmentPart, CrossOutputs
from octavo.execution.device import Device, ModelOutputs
from octavo.execution.device_tables import DeviceTables, TableUpdates
from octavo.execution.media_table import MediaTable
from octavo.execution.pooling_table import PoolingTable
from octavo.execution.prompt_logprobs import PromptLogprobs, PromptPart
from octavo.execution.sequence_table import SequenceTable
from octavo.execution.step_arrays import (
    UPDATES_PER_DECODE,
    Padding,
    StepArrays,
    StepLayout,
    StepLimits,
    StepShape,
    clear,
    pad,
)
from octavo.execution.step_buffers import StepBuffers
from octavo.execution.step_computation import StepComputation
from octavo.execution.submitted_step import CapturedShape, StagingBuffer, SubmittedStep
from octavo.execution.worker_group import ALONE, WorkerGroup
from octavo.models.registry import CrossModel, Model, StageModel
from octavo.ops import Array, LayerKVCache, Ops, ParallelDeviceOps
from octavo.pooling_params import PoolingConfig
from octavo.sampling.logprobs import entries
from octavo.sampling.sampler import SampledTokens, sample_tokens, write_settings
from octavo.sampling.sampling_table import Samples, SamplingBatch, SamplingTable
from octavo.speculative.synthetic import SyntheticAcceptance
from octavo.step_plan import RowColumns, StepPlan, StepResult
from octavo.structured_output.grammar_matching import GrammarCompiler

if TYPE_CHECKING:
    from octavo.execution.adapter_store import AdapterStore
    from octavo.lora.ops import AdaptedOps

# Copies arrays of a finished step to the host.
_Fetch = Callable[[Sequence[Array]], list[NDArray[Any]]]


class RunnerAdapters(NamedTuple):
    """The operations that add adapters, and the store that loads them."""

    ops: AdaptedOps
    store: AdapterStore


@dataclass(slots=True)
class DraftHooks:
    """Set by speculative decoding (`Draft`, its heads, and `Worker`) after the runner is built and before `capture`."""

    keeps_features: bool = False  # steps keep `SubmittedStep.features` for a draft head
    warm_up_drafter: Callable[[Array], None] | None = None  # launches every kernel that reads features [T, F]
    target_token_ids: Array | None = None  # [vocab_size, 1] int64: the target model's ids of a draft model's tokens
    synthetic_acceptance: SyntheticAcceptance | None = None  # for benchmarks


class _StreamWork(NamedTuple):
    """A step as the stream computes it."""

    step: SubmittedStep
    shape: StepShape  # of the step; a captured step that it is replayed in may be larger
    device_arrays: StepArrays[Array]
    captured: CapturedShape | None  # None: computed call by call
    sampling_batch: SamplingBatch | None  # None: all samples are greedy, or there are none
    prompt_logprob_parts: list[PromptPart]
    alignment_parts: list[AlignmentPart]


class Runner:
    """One model on one device, its KV cache, and the tables of the running sequences.

    Methods run on the host; a docstring that begins with "In the stream" marks work of the device's compute stream."""

    def __init__(
        self,
        model: Model,
        ops: Ops,
        device: Device,
        sequence_table: SequenceTable,
        max_step_tokens: int,
        grammars: GrammarCompiler | None = None,
        adapters: RunnerAdapters | None = None,
        pooling: PoolingConfig | None = None,
        worker_group: WorkerGroup = ALONE,
        media_table: MediaTable | None = None,
        cross_outputs: CrossOutputs | None = None,
    ) -> None:
        """`sequence_table` has the sequences, and a step has at most `max_step_tokens` tokens.

        - `grammars`: compile the masks
        - `adapters`: None if none are served
        - `pooling`: results are vectors instead of tokens
        - `media_table`: for models that take media
        - `cross_outputs`: for models with cross attention

        Call `use_caches` next: until then `caches` and `block_mover` are not set."""
        self.model, self.ops, self.device = model, ops, device
        self.sequence_table, self.max_step_tokens = sequence_table, max_step_tokens
        self.worker_group, self.stage_links = worker_group, worker_group.stage_links
        self._adapters, self.media_table, self.cross_outputs = adapters, media_table, cross_outputs
        self.draft_hooks = DraftHooks()
        self.captured_steps: list[CapturedShape] = []
        self._num_submitted = self._last_collected = 0  # steps are numbered from 1
        self.caches: Sequence[LayerKVCache]  # set by `use_caches`, like `block_mover`
        self.block_mover: BlockMover
        self._build_tables(grammars, pooling)
        # Number of elements of a sample's output: logits or a vector.
        self._output_size = model.vocab_size if pooling is None else pooling.size
        self.limits = self._compute_limits(pooling)
        self.computation = StepComputation(
            model, ops, device, self.limits, self._device_tables, self.stage_links,
            None if adapters is None else adapters.ops,
        )  # fmt: skip
        self.buffers = StepBuffers(device, self.limits)
        # Pinned memory for hidden states on their way to the next stage.
        self._hidden_staging: NDArray[np.uint8] | None = None
        if self.stage_links.next is not None and not device.shares_memory:
            row_bytes = cast(StageModel, model).stage_width * 4  # upper bound: rows in float32
            self._hidden_staging = device.pinned([max_step_tokens * row_bytes], "uint8")

    def _build_tables(self, grammars: GrammarCompiler | None, pooling: PoolingConfig | None) -> None:
        """Build the tables that have a row for each running sequence, besides `SequenceTable`."""
        _, num_rows, max_blocks = self.sequence_table.blocks.shape
        self.sampling_table = SamplingTable(num_rows, grammars)
        self.pooling_table = PoolingTable(num_rows) if pooling is not None else None
        self._prompt_logprobs = PromptLogprobs()
        self._row_generation = np.zeros(num_rows, np.int64)  # how many sequences have had each row
        self._rows_to_resend: set[int] = set()  # their block tables are sent whole with their next step
        self._device_tables = None if self.device.shares_memory else DeviceTables(self.device, self.sequence_table)
        # `DeviceTables` has one row more, for padding.
        self.padding = Padding(num_tokens=0, no_row=num_rows, no_place=num_rows * max_blocks)

    def _compute_limits(self, pooling: PoolingConfig | None) -> StepLimits:
        num_groups, num_rows, max_blocks = self.sequence_table.blocks.shape
        largest = StepShape(
            tokens=self.max_step_tokens,
            seqs=num_rows,
            # At most one sample for each token (draft tokens), and one more for each other row (forks of a last token).
            samples=self.max_step_tokens + num_rows - 1,
            updates=0 if self._device_tables is None else num_groups * num_rows * (max_blocks + UPDATES_PER_DECODE),
            media=0 if self.media_table is None else self.max_step_tokens,
            adapted=self._adapters is not None,
        )
        limits = StepLimits(
            largest=largest,
            groups=num_groups,
            blocks=max_blocks if self._device_tables is None else 0,
            crosses=self.cross_outputs is not None,
            pools="" if pooling is None else "texts" if pooling.whole_prompts else "parts",
        )
        if self.media_table is not None:
            limits = replace(limits, **self.media_table.extents)
        if self.stage_links.previous is not None:
            stage = cast(StageModel, self.model)
            item_bytes = 4 if stage.residual_dtype == "float32" else 2
            limits = replace(limits, hidden_in_bytes=stage.stage_width * item_bytes)
        return limits

    def use_caches(self, caches: Sequence[LayerKVCache], block_mover: BlockMover) -> None:
        """Set the caches, by layer. Call this before anything runs: captured graphs hold the caches' addresses."""
        assert not self.captured_steps
        self.caches = self.computation.caches = caches
        self.block_mover = block_mover

    def capture(self) -> None:
        """Capture steps (CUDA graphs, or the CPU's program), the largest first: smaller ones reuse its memory. Call
        `use_caches` first, and `capture` once."""
        assert not self.captured_steps
        if not self.device.shares_memory:
            gc.collect()  # free the device memory that garbage holds; capturing makes no new garbage
        for shape in reversed(self.device.capture_shapes(self.limits)):
            layout = StepLayout(self.limits, shape)
            host_arrays = [layout.on_host(staging.input_bytes) for staging in self.buffers.staging]
            clear(host_arrays[0], self.padding)
            self.buffers.upload(self.buffers.staging[0], layout.num_bytes)
            self.device.compute.record().wait()
            device_arrays = self.buffers.on_device(layout)
            step = self.device.capture(self.computation, device_arrays)
            # The smallest first: `_captured_for` takes the first that fits.
            self.captured_steps.insert(0, CapturedShape(layout, device_arrays, host_arrays, step))

    @property
    def capture_memory_bytes(self) -> int:
        """An estimate of the memory that `capture` will take: the logits of the largest captured step, and as much
        again for its intermediate arrays. Smaller captured steps reuse both. Stages before the last make no logits."""
        if self.device.shares_memory or self.stage_links.next is not None:
            return 0
        max_samples = max((shape.samples for shape in self.device.capture_shapes(self.limits)), default=0)
        return 2 * max_samples * self._output_size * 4

    # A step on its way to the device. `SubmittedStep.result` calls `collect`.

    def submit(self, plan: StepPlan) -> SubmittedStep:
        """Have the device compute a plan of at least one row, after all plans submitted before.

        Raises `DeviceMemoryError` if the device lacks memory: no token is computed. The scheduler then withdraws the
        plan; the tables keep its admissions and blocks, so later plans do not repeat them. Moves and loads that failed
        are made before the next plan."""
        self.apply_updates(plan)
        return self.submit_rows(plan)

    def apply_updates(self, plan: StepPlan) -> None:
        """Apply what comes before a plan's rows: admissions, block tables, moves of blocks, loads of adapters. Raises
        `DeviceMemoryError` as `submit` does."""
        self.sequence_table.update(plan)
        self._admit(plan)
        try:
            try:
                self.block_mover.move(plan.moves)
            finally:  # also if the moves failed: later plans do not repeat the loads, the store keeps those that fail
                if self._adapters is not None:
                    self._adapters.store.load(plan.adapters)
        except self.device.memory_errors as e:
            raise self._recover_from_memory_error(plan, e) from None

    def _admit(self, plan: StepPlan) -> None:
        for admission in plan.admissions:
            self._row_generation[admission.row] += 1
            if self.media_table is not None:
                self.media_table.admit(admission)
            if self.pooling_table is not None:
                self.pooling_table.admit(admission)
                continue
            self.sampling_table.admit(admission)
            if self.cross_outputs is not None:
                self.cross_outputs.admit(admission)
            self._prompt_logprobs.admit(admission)

    def submit_rows(self, plan: StepPlan) -> SubmittedStep:
        """Have the device compute a plan's rows. `apply_updates` comes first. A caller that does not compute the rows
        calls `resend_block_tables_later` instead. Raises `DeviceMemoryError` as `submit` does."""
        staging = self.buffers.take()
        try:
            return self._gather_and_submit(plan, staging)
        except self.device.memory_errors as e:
            raise self._recover_from_memory_error(plan, e) from None
        finally:
            staging.free_event = self.device.compute.record()

    def _gather_and_submit(self, plan: StepPlan, staging: StagingBuffer) -> SubmittedStep:
        """Gather the arrays of a plan's rows, upload them, and append the step's work to the stream.

        A step that fails for lack of memory is planned again. What a failed submission leaves:

            step  changes                                      undone by
            1     keys and values of encoder outputs           the next submission, which writes them
            2     takes rows from `_rows_to_resend`            `_recover_from_memory_error`
            4     draft tokens count as known tokens           `_recover_from_memory_error`
            4, 6  the arrays of the step                       the next submission, which writes them
            5, 8  hidden states of pipeline stages             nothing: with several workers the error is fatal
            7     outputs, and last tokens on the device       the next submission, which writes them
            9     forgets what another submission would need   not needed: nothing fails from here on
        """
        # 1. Write the encoder outputs that the step's tokens are the first to see.
        self._write_encoder_kv(plan)
        # 2. Find the block-table entries that the device does not have yet.
        updates = None if self._device_tables is None else self._device_tables.updates(plan, self._rows_to_resend)
        # 3. Choose the captured step, if one fits, and lay out the arrays.
        shape = self._shape_of(plan, 0 if updates is None else len(updates[0]))
        prompt_logprob_parts: list[PromptPart] = []
        if self.stage_links.next is None:
            prompt_logprob_parts = self._prompt_logprobs.parts(plan, self.sequence_table.tokens)
        alignment_parts = [] if self.cross_outputs is None else self.cross_outputs.alignment_parts(plan)
        # A replay does not keep the queries that the alignment reads.
        captured = None if alignment_parts else self._captured_for(shape)
        if captured is not None:
            layout, device_arrays = captured.layout, captured.device_arrays
            host_arrays = captured.host_arrays[staging.number]
        else:
            layout = StepLayout(self.limits, shape)
            host_arrays, device_arrays = layout.on_host(staging.input_bytes), self.buffers.on_device(layout)
        # 4. Gather the arrays from the tables.
        samples, sampling_batch = self._gather(plan, host_arrays, shape, updates, layout.shape.adapted)
        # 5. Wait for the previous stage.
        if self.stage_links.previous is not None:
            self.stage_links.previous.receive(host_arrays.hidden_in[: shape.tokens])
        # 6. Upload the arrays.
        self.buffers.upload(staging, layout.num_bytes)
        # 7. Append the step's work to the stream. The number of a step that fails here is never collected.
        self._num_submitted += 1
        step = SubmittedStep(self, self._num_submitted, plan, staging, samples, self._row_generation[samples.rows])
        self._give_to_stream(
            _StreamWork(step, shape, device_arrays, captured, sampling_batch, prompt_logprob_parts, alignment_parts)
        )
        # 8. Wait for the step if a next stage needs its hidden states.
        if self.stage_links.next is not None:
            self._send_hidden_states(step, shape.tokens)
        # 9. Forget the prompts whose log-probabilities, encoder outputs or alignment this step completes.
        self._prompt_logprobs.forget(plan)
        if self.cross_outputs is not None:
            self.cross_outputs.note_submitted(plan, alignment_parts)
        return step

    def _write_encoder_kv(self, plan: StepPlan) -> None:
        """Write the keys and values of encoder outputs that tokens of the step are the first to see."""
        for row, encoded, slots in () if self.cross_outputs is None else self.cross_outputs.begin_media(plan):
            slot = self.sequence_table.adapter_slots[row]
            adapter_slots = None if slot < 0 else np.full(len(slots), slot, np.int32)
            self.device.compute.run(partial(self.computation.write_encoder_kv, encoded, slots, adapter_slots))

    def _shape_of(self, plan: StepPlan, num_updates: int) -> StepShape:
        """Return the shape of a plan's step."""
        num_seqs, columns = len(plan.rows), RowColumns.of(plan.rows)
        return StepShape(
            tokens=sum(columns.num_tokens),
            seqs=num_seqs,
            samples=num_seqs if columns.each_row_samples_once else sum([planned.num_samples for planned in plan.rows]),
            updates=num_updates,
            media=0 if self.media_table is None else self.media_table.num_rows(plan),
            adapted=self._adapters is not None and self.sequence_table.has_adapters(columns.row),
        )

    def _captured_for(self, shape: StepShape) -> CapturedShape | None:
        """Return the smallest captured step that a step fits in, if there is one."""
        for captured in self.captured_steps:
            if self.device.can_replay(captured.layout.shape, shape):
                return captured
        return None

    def _gather(
        self, plan: StepPlan, arrays: StepArrays[NDArray[Any]], shape: StepShape, updates: TableUpdates | None,
        has_adapters: bool,
    ) -> tuple[Samples, SamplingBatch | None]:  # fmt: skip
        """Fill the step's arrays from the tables. Returns the samples and the sampler's settings: None if all samples
        are greedy, if there are none, or if the model pools."""
        gathered = self.sequence_table.gather(plan, arrays)
        samples = gathered.samples
        if has_adapters:
            self.sequence_table.gather_adapters(gathered, arrays)
        if self.media_table is not None:
            self.media_table.gather(plan, gathered.row_of, arrays)
        if self.cross_outputs is not None:
            self.cross_outputs.gather(plan, gathered.row_of, arrays)
        if self._device_tables is not None:
            assert updates is not None
            self._device_tables.fill_table_rows(plan, arrays, gathered, updates)
            pad(arrays, self.limits, shape, replace(self.padding, num_tokens=shape.tokens))
        if self.pooling_table is not None:
            self.pooling_table.gather(plan, arrays)
            return samples, None
        if not shape.samples:
            return samples, None
        num_known = None if self._device_tables is None else self.sequence_table.num_known
        batch = self.sampling_table.build(samples, self.sequence_table.tokens, num_known)
        if batch is not None:
            write_settings(arrays, batch)
        return samples, batch

    def _give_to_stream(self, work: _StreamWork) -> None:
        """Append a step's work to the stream, and set its `done` event."""
        step, shape, compute = work.step, work.shape, self.device.compute
        if work.captured is not None:
            compute.run(partial(work.captured.step.replay, shape))
        compute.run(partial(self._compute_and_sample, work))
        to_host = step.staging.tokens if self._hidden_staging is None else self._hidden_staging
        compute.run(partial(self._download, step, shape.samples), writes=[to_host])
        step.done = compute.record()

    def _send_hidden_states(self, step: SubmittedStep, num_tokens: int) -> None:
        """Wait until the device has computed the step, and send its hidden states to the next stage."""
        assert self.stage_links.next is not None and step.done is not None
        step.done.wait()
        rows: Any = step.hidden_out
        if self._hidden_staging is not None:
            rows = self._hidden_staging[: rows.nbytes].reshape(num_tokens, -1)
        self.stage_links.next.send(rows)

    # In the stream.

    def _compute_and_sample(self, work: _StreamWork) -> None:
        """In the stream: compute the step unless it was replayed, and sample its tokens."""
        step, shape = work.step, work.shape
        outputs, step.alignment = self._model_outputs(work)
        if self.draft_hooks.keeps_features:
            step.features = outputs.features[: shape.tokens]
        if self.stage_links.next is not None:
            step.hidden_out = self.device.view(outputs.hidden[: shape.tokens], "uint8")
        elif self.pooling_table is not None:
            step.vectors = outputs.logits[: shape.samples]
            if work.captured is not None and self.device.runs_ahead:  # the next replay overwrites the outputs
                step.vectors = self.ops.rows_of(step.vectors, np.arange(shape.samples))
        elif shape.samples:
            self._sample(work, outputs)
        # After sampling, so that sampling's memory is free again.
        logits_of = partial(self.computation.logits_after, work.device_arrays, outputs.hidden)
        step.prompt_logprobs = [
            measured for part in work.prompt_logprob_parts for measured in part.measure(self.ops, logits_of)
        ]

    def _model_outputs(self, work: _StreamWork) -> tuple[ModelOutputs, dict[int, Alignment]]:
        """In the stream: return the outputs of the replay, or compute them. The second result is the alignment of the
        prompts that want it, by row."""
        if work.captured is not None:
            return work.captured.step.outputs, {}
        if self.cross_outputs is None or not work.alignment_parts:
            return self.computation.outputs(work.device_arrays, work.shape.samples), {}
        model = cast(CrossModel, self.model)
        with self.cross_outputs.keeping_queries(model):
            outputs = self.computation.outputs(work.device_arrays, work.shape.samples)
        return outputs, self.cross_outputs.alignment(model, work.alignment_parts, self.caches)

    def _sample(self, work: _StreamWork, outputs: ModelOutputs) -> None:
        """In the stream: sample on the leader. A device with its own memory stores the tokens for its next step."""
        step, inputs, batch, num_samples = work.step, work.device_arrays, work.sampling_batch, work.shape.samples
        argmax, table_rows = outputs.argmax_tokens[:num_samples], inputs.sample_table_rows[:num_samples]
        sampled = argmax
        if self.worker_group.is_leader:
            last_tokens = None
            if self._device_tables is not None and batch is not None and batch.penalizes_awaited:
                last_tokens = self._device_tables.last_tokens_of(table_rows)
            step.sampled = sample_tokens(
                self.ops, outputs.logits[:num_samples], argmax, inputs, batch, self.device.shares_memory, last_tokens
            )
            step.sampled.tokens = sampled = self.to_target_token_ids(step.sampled.tokens)
        if self._device_tables is not None:
            if not self.worker_group.shard.is_whole:
                # Overwrite `sampled` on followers with the leader's tokens. Their hosts get the tokens later
                # (`SubmittedStep.take_tokens`).
                cast(ParallelDeviceOps, self.ops).from_first(sampled)
            self._device_tables.store_last_tokens(self.ops, table_rows, sampled)

    def to_target_token_ids(self, tokens: Array) -> Array:
        """In the stream: return tokens [N] int64 of a draft model as the target model's ids."""
        if self.draft_hooks.target_token_ids is None:
            return tokens
        own_ids: Any = tokens
        # `NO_TOKEN`, of a row that failed, becomes 0 to stay in bounds; a wrong draft token does no harm.
        own_ids = own_ids * (own_ids > 0)
        ids: Any = self.ops.take_rows(self.draft_hooks.target_token_ids, own_ids)
        return cast(Array, ids.reshape(-1))

    def _download(self, step: SubmittedStep, num_samples: int) -> None:
        """In the stream: copy the tokens, or the hidden states for the next stage, to the host."""
        if step.sampled is not None:
            self.device.copy(step.sampled.tokens, step.staging.tokens[:num_samples])
        if self._hidden_staging is not None and step.hidden_out is not None:
            self.device.copy(step.hidden_out.reshape(-1), self._hidden_staging[: step.hidden_out.nbytes])

    # A step that is done, or that is not computed.

    def collect(self, step: SubmittedStep) -> StepResult:
        """Wait for a step, append its valid tokens to their rows, and return its results. Call this at most once for
        each step, in the order of submission; a step whose tokens nobody needs is not collected."""
        assert step.number > self._last_collected, "steps are collected at most once, in the order of submission"
        self._last_collected = step.number
        # 1. Wait for the device.
        assert step.done is not None
        step.done.wait()
        self.worker_group.check()
        fetch = partial(self.device.fetch, after=step.done)
        result = StepResult(tokens=[])
        # 2. Fetch vectors, or tokens, which the tables need for the next step.
        if step.vectors is not None:
            [result.vectors] = fetch([step.vectors])
            if self.device.shares_memory:  # the next step overwrites the device's array
                result.vectors = result.vectors.copy()
        if step.sampled is not None:
            tokens, errors_by_sample = self._fetch_tokens(step, step.sampled, fetch, result)
            result.errors = self._append_valid_tokens(step, tokens, errors_by_sample)
        # 3. Fetch what requests ask for besides.
        for row, measured in step.prompt_logprobs:
            of_row = result.prompt_logprobs.setdefault(row, [])
            of_row += entries(fetch(measured.arrays), measured.num_top)
        if self.worker_group.is_leader:
            result.alignment = {row: alignment.fetch_bytes(fetch) for row, alignment in step.alignment.items()}
        return result

    def _fetch_tokens(
        self, step: SubmittedStep, sampled: SampledTokens, fetch: _Fetch, result: StepResult
    ) -> tuple[NDArray[np.int64], dict[int, str]]:
        """Return the sampled tokens [N] int64, and the errors by sample. Also sends the tokens to the followers, and
        writes tokens and log-probabilities to `result`."""
        tokens = step.staging.tokens[: len(step.samples.rows)].copy()
        self.worker_group.send_tokens(tokens)
        result.logprobs, errors_by_sample = sampled.results(tokens, fetch)
        if self.draft_hooks.synthetic_acceptance is not None:
            self.draft_hooks.synthetic_acceptance.apply(step.samples, tokens, self._may_replace_tokens)
        result.tokens = tokens.tolist()
        return tokens, errors_by_sample

    def _append_valid_tokens(
        self, step: SubmittedStep, tokens: NDArray[np.int64], errors_by_sample: dict[int, str]
    ) -> dict[int, str]:
        """Append the valid tokens to the rows that still have the same sequence. Returns the errors of valid tokens,
        by row."""
        samples = step.samples
        is_kept = self._row_generation[samples.rows] == step.row_generation
        if samples.drafted:
            is_valid = samples.valid(tokens)
            is_kept &= is_valid
            errors_by_sample = {n: message for n, message in errors_by_sample.items() if is_valid[n]}
        if not is_kept.all():
            samples = Samples(samples.rows[is_kept], samples.forks[is_kept], samples.lengths[is_kept], {})
            tokens = tokens[is_kept]
        self.sequence_table.append(samples, tokens)
        self.sampling_table.advance(samples.rows, samples.forks, tokens)
        return {int(step.samples.rows[n]): message for n, message in errors_by_sample.items()}

    def _may_replace_tokens(self, row: int) -> bool:
        """Return whether any token may replace a row's sampled tokens: not if the row follows a grammar."""
        settings = self.sampling_table.settings[row]
        return settings is not None and settings.params.grammar is None

    def _recover_from_memory_error(self, plan: StepPlan, error: Exception) -> Exception:
        """Forget the plan's draft tokens, free reserved memory, and have a later step upload the plan's block tables.
        Returns the error to raise: `DeviceMemoryError`. With several workers the error is fatal: returns `error`
        itself."""
        if self.worker_group.connections:
            return error
        self.sequence_table.forget_draft_tokens(plan.rows)
        self.resend_block_tables_later(plan)
        self.device.release_memory()
        reason = (str(error) or type(error).__name__).splitlines()[0]
        return DeviceMemoryError(
            f"the step ran out of device memory ({reason}); lower --max-num-batched-tokens, "
            "--max-num-seqs or --gpu-memory-utilization."
        )

    def resend_block_tables_later(self, plan: StepPlan) -> None:
        """Have a later step upload the block tables of a plan's rows, because no step computes this plan."""
        for changes in (plan.rows, plan.admissions, plan.new_blocks):
            self._rows_to_resend.update(entry.row for entry in changes)
