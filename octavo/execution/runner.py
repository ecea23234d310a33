"""Runs steps on one device: a plan becomes input arrays, the model computes, and the sampled tokens come back.

The states of a step, and the methods that move it there:

    applied    the tables have its sequences and blocks      `apply_updates`, the first part of `submit`
    gathered   arrays in a staging buffer                    `submit_rows`, the second part of `submit`
    submitted  work in the device's compute stream           `StepSubmitter.submit`, called by `submit_rows`
    done       its tokens are on the host                    the stream, when it reaches `SubmittedStep.done`
    collected  its valid tokens are in the tables            `collect`
    withdrawn  not computed: the device lacks memory         `submit` raises `DeviceMemoryError`

This module has the tables, and works on the host. `StepSubmitter` has the model, and gives work to the device.
`submit_rows` waits until the next staging buffer is free: there are three if the device `runs_ahead`, otherwise one.
`collect` waits for the step; a follower calls it when it has the leader's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from octavo.errors import DeviceMemoryError
from octavo.execution.block_mover import BlockMover
from octavo.execution.cross_outputs import CrossOutputs
from octavo.execution.device import Device
from octavo.execution.device_tables import DeviceTables, TableUpdates
from octavo.execution.media_table import MediaTable
from octavo.execution.pooling_table import PoolingTable
from octavo.execution.prompt_logprobs import PromptLogprobs
from octavo.execution.sequence_table import SequenceTable
from octavo.execution.step_arrays import UPDATES_PER_DECODE, Padding, StepArrays, StepLimits, StepShape, pad
from octavo.execution.step_submitter import StepSubmitter
from octavo.execution.submitted_step import GatheredStep, StagingBuffer, SubmittedStep
from octavo.execution.worker_group import ALONE, WorkerGroup
from octavo.models.registry import Model, StageModel
from octavo.ops import Array, LayerKVCache, Ops
from octavo.pooling_params import PoolingConfig
from octavo.sampling.logprobs import entries
from octavo.sampling.sampler import SampledTokens, write_settings
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


class Runner:
    """One model on one device, its KV cache, and the tables of the running sequences."""

    def __init__(
        self, model: Model, ops: Ops, device: Device, sequence_table: SequenceTable, max_step_tokens: int,
        grammars: GrammarCompiler | None = None, adapters: RunnerAdapters | None = None,
        pooling: PoolingConfig | None = None, worker_group: WorkerGroup = ALONE, media_table: MediaTable | None = None,
        cross_outputs: CrossOutputs | None = None,
    ) -> None:  # fmt: skip
        """`sequence_table` has the sequences, and a step has at most `max_step_tokens` tokens.

        - `grammars`: compile the masks
        - `adapters`: None if none are served
        - `pooling`: results are vectors instead of tokens
        - `media_table`: for models that take media
        - `cross_outputs`: for models with cross attention

        Call `use_caches` next: until then `block_mover` and the submitter's `caches` are not set."""
        self.model, self.ops, self.device = model, ops, device
        self.sequence_table, self.max_step_tokens = sequence_table, max_step_tokens
        self.worker_group, self.stage_links = worker_group, worker_group.stage_links
        self._adapters, self.media_table, self.cross_outputs = adapters, media_table, cross_outputs
        self.synthetic_acceptance: SyntheticAcceptance | None = None  # for benchmarks
        self._last_collected = 0  # `SubmittedStep.number` of the step that was collected last
        self.block_mover: BlockMover  # set by `use_caches`
        self._build_tables(grammars, pooling)
        # Number of elements of a sample's output: logits or a vector.
        self._output_size = model.vocab_size if pooling is None else pooling.size
        self.limits = self._compute_limits(pooling)
        _, num_rows, max_blocks = sequence_table.blocks.shape
        # `DeviceTables` has one row more, for padding.
        padding = Padding(num_tokens=0, no_row=num_rows, no_place=num_rows * max_blocks)
        self.submitter = StepSubmitter(
            model, ops, device, self.limits, self._device_tables, padding, worker_group, cross_outputs,
            None if adapters is None else adapters.ops,
        )  # fmt: skip

    def _build_tables(self, grammars: GrammarCompiler | None, pooling: PoolingConfig | None) -> None:
        """Build the tables that have a row for each running sequence, besides `SequenceTable`."""
        num_rows = self.sequence_table.max_num_seqs
        self.sampling_table = SamplingTable(num_rows, grammars)
        self.pooling_table = PoolingTable(num_rows) if pooling is not None else None
        self._prompt_logprobs = PromptLogprobs()
        # How many sequences have had each row: `_append_valid_tokens` drops tokens of a row's former sequence.
        self._row_generation = np.zeros(num_rows, np.int64)
        self._device_tables = None if self.device.shares_memory else DeviceTables(self.device, self.sequence_table)

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
        """Set the caches, by layer. Call this before anything runs."""
        self.submitter.use_caches(caches)
        self.block_mover = block_mover

    @property
    def capture_memory_bytes(self) -> int:
        """An estimate of the memory that captured steps will take: the logits of the largest one, and as much again for
        its intermediate arrays. Smaller ones reuse both. Stages before the last make no logits."""
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
        if self._device_tables is not None:
            self._device_tables.note_changes(plan)
        self._admit(plan)
        try:
            try:
                self.block_mover.move(plan.moves)
            finally:  # even if the moves failed: no later plan has these loads; the store retries those that fail
                if self._adapters is not None:
                    self._adapters.store.load(plan.adapters)
        except self.device.memory_errors as e:
            raise self._recover_from_memory_error(e) from None

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
        """Have the device compute a plan's rows; `apply_updates` has applied the updates of their sequences. Raises
        `DeviceMemoryError` as `submit` does.

        A step that fails for lack of memory is planned again. What a failed submission leaves:

            step  changes                                      undone by
            1     keys and values of encoder outputs           the next submission, which writes them
            2     draft tokens count as known tokens           `forget_draft_tokens`
            2, 3  the arrays of the step                       the next submission, which writes them
            3     outputs, and last tokens on the device       the next submission, which writes them
            3     hidden states of pipeline stages             nothing: with several workers the error is fatal
            4     updates and prompts are forgotten            nothing: a step that failed never comes here
        """
        self.worker_group.begin_step()
        staging = self.submitter.buffers.take()
        try:
            # 1. Write the encoder outputs that the step's tokens are the first to see.
            self._write_encoder_kv(plan)
            # 2. Gather the step from the tables.
            gathered = self._gather(plan, staging)
            # 3. Have the device compute it.
            step = SubmittedStep(gathered, self.collect)
            self.submitter.submit(step)
        except self.device.memory_errors as e:
            self.sequence_table.forget_draft_tokens(plan.rows)
            raise self._recover_from_memory_error(e) from None
        finally:
            staging.free_event = self.device.compute.record()
        # 4. Forget the updates of block tables, which are on their way, and prompts whose log-probabilities, encoder
        # outputs or alignment this step completes.
        if self._device_tables is not None:
            self._device_tables.note_sent(plan.rows)
        self._prompt_logprobs.forget(plan)
        if self.cross_outputs is not None:
            self.cross_outputs.note_submitted(plan, gathered.alignment_parts)
        return step

    def _write_encoder_kv(self, plan: StepPlan) -> None:
        """Write the keys and values of encoder outputs that tokens of the step are the first to see."""
        for row, encoded, slots in () if self.cross_outputs is None else self.cross_outputs.begin_media(plan):
            slot = self.sequence_table.adapter_slots[row]
            adapter_slots = None if slot < 0 else np.full(len(slots), slot, np.int32)
            self.device.compute.run(partial(self.submitter.computation.write_encoder_kv, encoded, slots, adapter_slots))

    def _gather(self, plan: StepPlan, staging: StagingBuffer) -> GatheredStep:
        """Gather a plan's rows from the tables."""
        # 1. Find the block-table entries that the device does not have yet.
        updates = None if self._device_tables is None else self._device_tables.updates(plan.rows)
        # 2. Find what requests ask for besides tokens.
        prompt_logprob_parts, alignment_parts = [], []
        if self.stage_links.next is None:
            prompt_logprob_parts = self._prompt_logprobs.parts(plan, self.sequence_table.tokens)
        if self.cross_outputs is not None:
            alignment_parts = self.cross_outputs.alignment_parts(plan)
        # 3. Lay out the arrays. A replay does not keep the queries that the alignment reads.
        shape = self._shape_of(plan, 0 if updates is None else len(updates[0]))
        memory = self.submitter.lay_out(shape, staging, may_replay=not alignment_parts)
        # 4. Fill the arrays.
        samples, batch = self._fill(plan, memory.host_arrays, shape, updates, memory.layout.shape.adapted)
        return GatheredStep(
            shape, staging, memory, samples, self._row_generation[samples.rows], batch, prompt_logprob_parts,
            alignment_parts,
        )  # fmt: skip

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

    def _fill(
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
            pad(arrays, self.limits, shape, replace(self.submitter.padding, num_tokens=shape.tokens))
        batch = None
        if self.pooling_table is not None:
            self.pooling_table.gather(plan, arrays)
        elif shape.samples:
            num_known = None if self._device_tables is None else self.sequence_table.num_known
            batch = self.sampling_table.build(samples, self.sequence_table.tokens, num_known)
            if batch is not None:
                write_settings(arrays, batch)
        return samples, batch

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
            result.errors = self._append_valid_tokens(step.gathered, tokens, errors_by_sample)
        # 3. Fetch what requests ask for besides tokens: log-probabilities of prompts, and alignments.
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
        tokens = step.gathered.staging.tokens[: step.gathered.shape.samples].copy()
        self.worker_group.send_tokens(tokens)
        result.logprobs, errors_by_sample = sampled.results(tokens, fetch)
        if self.synthetic_acceptance is not None:
            self.synthetic_acceptance.apply(step.gathered.samples, tokens, self._may_replace_tokens)
        result.tokens = tokens.tolist()
        return tokens, errors_by_sample

    def _append_valid_tokens(
        self, gathered: GatheredStep, tokens: NDArray[np.int64], errors_by_sample: dict[int, str]
    ) -> dict[int, str]:
        """Append the valid tokens to the rows that still have the same sequence. Returns the errors of valid tokens,
        by row."""
        samples = gathered.samples
        is_kept = self._row_generation[samples.rows] == gathered.row_generation
        if samples.drafted:
            is_valid = samples.valid(tokens)
            is_kept &= is_valid
            errors_by_sample = {n: message for n, message in errors_by_sample.items() if is_valid[n]}
        if not is_kept.all():
            samples = Samples(samples.rows[is_kept], samples.forks[is_kept], samples.lengths[is_kept], {})
            tokens = tokens[is_kept]
        self.sequence_table.append(samples, tokens)
        self.sampling_table.advance(samples.rows, samples.forks, tokens)
        return {int(gathered.samples.rows[n]): message for n, message in errors_by_sample.items()}

    def _may_replace_tokens(self, row: int) -> bool:
        """Return whether any token may replace a row's sampled tokens: not if the row follows a grammar."""
        settings = self.sampling_table.settings[row]
        return settings is not None and settings.params.grammar is None

    def _recover_from_memory_error(self, error: Exception) -> Exception:
        """Free reserved memory. Returns the error to raise: `DeviceMemoryError`. With several workers the error is
        fatal: returns `error` itself."""
        if self.worker_group.connections:
            return error
        self.device.release_memory()
        reason = (str(error) or type(error).__name__).splitlines()[0]
        return DeviceMemoryError(
            f"the step ran out of device memory ({reason}); lower --max-num-batched-tokens, "
            "--max-num-seqs or --gpu-memory-utilization."
        )
