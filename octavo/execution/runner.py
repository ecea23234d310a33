"""Carries out plans on one device: a plan becomes arrays, the model runs on them, tokens come back.

`submit` writes what the step needs into pinned memory, has it uploaded at once, and appends forward pass, sampling and
the download of the tokens to the device's stream. Where the device computes on its own nothing here waits for it:
sampled tokens stay there as well, and a row of the next step takes its own from there, so that step can be submitted
before anybody on the host knows them. A step that fits a captured one is its replay; others run call by call.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from octavo.errors import DeviceMemoryError
from octavo.execution.block_mover import BlockMover
from octavo.execution.cross_outputs import AlignedPart, CrossOutputs
from octavo.execution.device import Device, StepOutputs
from octavo.execution.device_tables import DeviceTables, TableUpdates
from octavo.execution.media_table import MediaTable
from octavo.execution.pooling_table import PoolingTable
from octavo.execution.prompt_logprobs import MOST_ROWS, PromptLogprobs, PromptPart
from octavo.execution.sequence_table import SequenceTable
from octavo.execution.step_arrays import UPDATES_PER_DECODE, Padding, StepArrays, StepLayout, StepShape, pad
from octavo.execution.step_computation import StepComputation
from octavo.execution.submitted_step import Captured, StagingBuffer, SubmittedStep
from octavo.execution.worker_group import ALONE, WorkerGroup
from octavo.models.registry import CrossModel, Model, StageModel
from octavo.ops import Array, DeviceOps, LayerKVCache, Ops, ParallelDeviceOps
from octavo.pooling_params import PoolingConfig
from octavo.sampling.logprobs import entries, measure
from octavo.sampling.sampler import sample_tokens, write_settings
from octavo.sampling.sampling_table import Samples, SamplingBatch, SamplingTable
from octavo.sampling_params import MAX_LOGPROBS
from octavo.speculative.synthetic import SyntheticAcceptance
from octavo.step_plan import StepPlan, StepResult
from octavo.structured_output.masks import GrammarCompiler

if TYPE_CHECKING:
    from octavo.execution.adapter_store import AdapterStore
    from octavo.lora.ops import AdaptedOps

# On a device that runs ahead two steps may be in flight while a third is written.
_NUM_STAGING_BUFFERS_AHEAD = 3


class RunnerAdapters(NamedTuple):
    """The operations that add adapters, and the store that loads them."""

    ops: AdaptedOps
    store: AdapterStore


class _Launched(NamedTuple):
    """A step on its way through the device's stream."""

    step: SubmittedStep
    used: StepShape
    inputs: StepArrays[Array]
    captured: Captured | None  # which is replayed
    sampling: SamplingBatch | None
    prompts: list[PromptPart]  # whose log-probabilities are wanted
    aligned: list[AlignedPart]  # whose cross attention is wanted


class Runner:
    """One model on one device, its KV cache, and the tables of the running sequences."""

    def __init__(
        self,
        model: Model,
        ops: Ops,
        device: Device,
        table: SequenceTable,
        max_num_tokens: int,
        grammars: GrammarCompiler | None = None,
        adapters: RunnerAdapters | None = None,
        pooling: PoolingConfig | None = None,
        worker_group: WorkerGroup = ALONE,
        media: MediaTable | None = None,
        cross: CrossOutputs | None = None,
    ) -> None:
        """With `pooling` the model's vectors are the result instead of tokens. `media` is for models that take media,
        `cross` for those with cross attention."""
        self.model, self.ops, self.device = model, ops, device
        self.table, self.max_num_tokens = table, max_num_tokens
        self._adapters, self._worker_group, self._links = adapters, worker_group, worker_group.links
        self._media, self._cross = media, cross
        self.caches: Sequence[LayerKVCache]
        self._mover: BlockMover
        _, num_rows, max_blocks = table.blocks.shape
        self.sampling = SamplingTable(num_rows, grammars)
        self.pooling = PoolingTable(num_rows) if pooling is not None else None
        self._result_size = model.vocab_size if pooling is None else pooling.size  # elements of a sample
        self._prompt_logprobs = PromptLogprobs()
        self.row_generation = np.zeros(num_rows, np.int64)  # how many sequences have had each row
        self._stale: set[int] = set()  # rows whose block tables the device may not have got
        self._tables = None if device.shares_memory else DeviceTables(device, table)
        self._padding = Padding(0, num_rows, num_rows * max_blocks)
        self._largest = self._largest_shape(pooling)
        self.computation = StepComputation(
            model, ops, device, self._largest, self._tables, self._links, None if adapters is None else adapters.ops
        )
        self._staging_buffers = self._allocate_staging_buffers()
        self._buffer = device.upload_target(self._staging_buffers[0].inputs)  # what they are uploaded to
        self._hidden_out = self._allocate_hidden_out()
        self.captured_steps: list[Captured] = []
        self.keeps_features = False  # whether steps have their `features`
        self.read_features: Callable[[Array], None] | None = None  # launches all that reads them, for `warm_up`
        self.target_ids: Array | None = None  # [vocab_size, 1] int64: the target model's ids of a draft model's tokens
        self.synthetic: SyntheticAcceptance | None = None  # for benchmarks

    def _largest_shape(self, pooling: PoolingConfig | None) -> StepShape:
        """Return the shape that every step fits in."""
        num_groups, num_rows, max_blocks = self.table.blocks.shape
        shape = StepShape(
            tokens=self.max_num_tokens,
            seqs=num_rows,
            samples=max(self.max_num_tokens, num_rows),  # at most one a token, and one a row for forks
            updates=0 if self._tables is None else num_groups * num_rows * (max_blocks + UPDATES_PER_DECODE),
            groups=num_groups,
            blocks=max_blocks if self._tables is None else 0,
            crosses=self._cross is not None,
            adapted=self._adapters is not None,
            pools="" if pooling is None else "texts" if pooling.whole_prompts else "parts",
        )
        if self._media is not None:
            shape = replace(shape, media=self.max_num_tokens, **self._media.extents)
        if self._links.before is not None:
            stage = cast(StageModel, self.model)
            item_bytes = 4 if stage.stream_dtype == "float32" else 2
            shape = replace(shape, hidden_in_bytes=stage.stage_width * item_bytes)
        return shape

    def _allocate_staging_buffers(self) -> list[StagingBuffer]:
        num_bytes, num_samples = StepLayout(self._largest).num_bytes, self._largest.samples
        return [
            StagingBuffer(i, self.device.pinned([num_bytes], "uint8"), self.device.pinned([num_samples], "int64"))
            for i in range(_NUM_STAGING_BUFFERS_AHEAD if self.device.runs_ahead else 1)
        ]

    def _allocate_hidden_out(self) -> NDArray[np.uint8] | None:
        """Pinned memory for hidden states on their way to the next stage, if the device has memory of its own."""
        if self._links.behind is None or self.device.shares_memory:
            return None
        row_bytes = cast(StageModel, self.model).stage_width * 4
        return self.device.pinned([self.max_num_tokens * row_bytes], "uint8")

    def use_caches(self, caches: Sequence[LayerKVCache], mover: BlockMover) -> None:
        """Set the caches, by layer. To be called before anything runs: captured steps keep their caches."""
        self.caches = self.computation.caches = caches
        self._mover = mover

    def capture(self) -> None:
        """Capture steps, the largest first: smaller ones reuse its memory."""
        if not self.device.shares_memory:
            gc.collect()  # garbage may hold device memory; captures leave none, so once is enough
        for shape in reversed(self.device.capture_shapes(self._largest)):
            layout = StepLayout(shape)
            staged = [layout.on_host(staging.inputs) for staging in self._staging_buffers]
            # All padding: a step that changes nothing.
            staged[0].query_start_loc[0] = 0
            pad(staged[0], StepShape(0, 0, 0, 0, shape.groups), self._padding)
            self._upload(self._staging_buffers[0], layout.num_bytes)
            self.device.compute.record().wait()
            inputs = layout.on_device(self._buffer, self.device.view)
            self.captured_steps.insert(
                0, Captured(layout, inputs, staged, self.device.capture(self.computation, inputs))
            )

    @property
    def captured_bytes(self) -> int:
        """Memory that `capture` will take: the results of the largest captured step, and as much again for its own
        memory. Smaller steps share both."""
        if self.device.shares_memory:
            return 0
        largest = max((shape.samples for shape in self.device.capture_shapes(self._largest)), default=0)
        return 2 * largest * self._result_size * 4

    def run_largest_step(self) -> None:
        """Run the step that takes the most memory: the most tokens and samples, stored nowhere."""
        num_samples = self._largest.seqs if self.pooling is None else self._most_vectors
        self._dummy_run(self._largest.tokens, self._largest.seqs, num_samples, self._largest.adapted)

    @property
    def _most_vectors(self) -> int:
        """The most vectors of a step: one a token if prompts are whole, otherwise one a sequence."""
        return self._largest.samples if self._largest.pools == "texts" else self._largest.seqs

    def warm_up(self) -> None:
        """Launch every kernel that a step of any size may launch, so that nothing is compiled later."""
        for adapted in {False, self._largest.adapted}:
            self._warm_up(adapted)
        if self._cross is not None:
            for num_rows in _device_ops(self.ops).row_classes(self._cross.num_tokens):
                nothing = self._cross.nothing(cast(CrossModel, self.model).hidden_size, num_rows)
                self.device.compute.run(partial(self.computation.write_encoder_kv, *nothing))
                if self._largest.adapted:
                    no_adapters = np.full(num_rows, -1, np.int32)
                    self.device.compute.run(partial(self.computation.write_encoder_kv, *nothing, no_adapters))
        self._mover.warm_up()

    def _warm_up(self, adapted: bool) -> None:
        ops, num_rows = _device_ops(self.ops), self._largest.seqs
        # Prompts. Views of one row may have other strides than views of several.
        for num_tokens in sorted({1, *ops.row_classes(self._largest.tokens)}):
            self._dummy_run(num_tokens, max(1, min(num_tokens // 4, num_rows)), 1, adapted)
        classes = ops.row_classes(self._most_vectors)
        if self.pooling is None:  # draft tokens and prompt log-probabilities: a step may sample after any token
            classes = ops.row_classes(self._largest.samples, exactly=False)
        for num_samples in classes:
            try:
                self._dummy_run(min(num_samples, num_rows), min(num_samples, num_rows), num_samples, adapted)
            except self.device.memory_errors:
                # More samples than rows come from drafts or prompts, which may find no memory later either.
                if (
                    num_samples <= num_rows or self._worker_group.connections
                ):  # others wait for what this one has not computed
                    raise
                self.device.release_memory()

    def _dummy_run(self, num_tokens: int, num_rows: int, num_samples: int, adapted: bool) -> None:
        """Run a step of equally long sequences, stored nowhere, with everything that requests may ask for."""
        num_media = num_tokens if self._media is not None else 0
        shape = replace(
            self._largest, tokens=num_tokens, seqs=num_rows, samples=num_samples, updates=0, media=num_media,
            adapted=adapted,
        )  # fmt: skip
        layout = StepLayout(shape)
        staging = self._staging_buffers[0]
        arrays = layout.on_host(staging.inputs)
        pad(arrays, StepShape(0, 0, 0, 0, self._largest.groups), self._padding)
        arrays.query_start_loc[:] = np.linspace(0, num_tokens, num_rows + 1).astype(np.int32)
        arrays.seq_lens[:] = np.diff(arrays.query_start_loc)
        arrays.slot_mapping[self.table.state_groups] = 0  # a state needs a block, and none is in use yet
        arrays.temperature[:] = arrays.top_p[:] = arrays.min_p[:] = 1
        self._upload(staging, layout.num_bytes)
        inputs = layout.on_device(self._buffer, self.device.view)

        num_told = min(num_samples, max(self._largest.seqs, MOST_ROWS))  # samples with log-probabilities

        def work() -> None:
            with self._telling_all():
                hidden, features = self.computation.hidden(inputs)
            logits, best = self.computation.logits(inputs, hidden)
            if self.read_features is not None:
                self.read_features(features)
            if self.pooling is not None or self._links.behind is not None:
                return
            raw = self.ops.rows_of(logits, np.arange(num_told))  # as if all asked for log-probabilities
            measure(self.ops, raw, best[:num_told], np.full(num_told, MAX_LOGPROBS))
            one, neutral = np.zeros(1, np.int64), np.ones(num_samples, np.float32)
            self.ops.penalize(logits, one, one, one.astype(np.float32), neutral, neutral - 1, neutral - 1)
            self.ops.mask_tokens(logits, np.full((1, -(-self.model.vocab_size // 32)), -1, np.int32), one)
            settings = inputs.temperature, inputs.top_k, inputs.top_p, inputs.min_p, inputs.uniforms
            self._as_targets(self.ops.sample(logits, *settings))

        self.device.compute.run(work)
        self.device.compute.record().wait()

    def _telling_all(self) -> AbstractContextManager[None]:
        """While it is entered, steps compute the alignment of cross attention, if the model has one."""
        return nullcontext() if self._cross is None else self._cross.trying_alignment(cast(CrossModel, self.model))

    def submit(self, plan: StepPlan) -> SubmittedStep:
        """Have the device compute a plan, which must have at least one row, after those submitted before.

        Raises `DeviceMemoryError`; blocks were moved and rows admitted by then, but no token was computed."""
        self.apply_updates(plan)
        return self.launch(plan)

    def apply_updates(self, plan: StepPlan) -> None:
        """Apply what comes before a plan's rows: admissions, block tables, moves of blocks, loads of adapters."""
        self.table.update(plan)
        self._admit(plan)
        self._mover.move(plan.moves)
        if self._adapters is not None:
            self._adapters.store.load(plan.adapters)

    def launch(self, plan: StepPlan) -> SubmittedStep:
        """Have the device compute the rows of a plan after `apply_updates`. Raises as `submit`. A caller that computes
        no rows now calls `defer_updates` instead."""
        staging = self._staging_buffers.pop(0)
        self._staging_buffers.append(staging)
        if staging.is_free is not None:
            staging.is_free.wait()
        try:
            return self._start(plan, staging)
        except self.device.memory_errors as e:
            if self._worker_group.connections:  # others wait for this worker's part: all have to start again
                raise
            self._stale.update(planned.row for planned in plan.rows)
            self.device.release_memory()
            reason = str(e).splitlines()[0]
            raise DeviceMemoryError(
                f"the step ran out of device memory ({reason}); lower --max-num-batched-tokens, "
                "--max-num-seqs or --gpu-memory-utilization."
            ) from None
        finally:
            staging.is_free = self.device.compute.record()

    def defer_updates(self, plan: StepPlan) -> None:
        """Upload the block tables of a plan later, as none of its rows is computed now."""
        self._stale.update(admission.row for admission in plan.admissions)
        self._stale.update(entry.row for entry in plan.new_blocks)

    def collect(self, step: SubmittedStep) -> StepResult:
        """Wait for a step. Its tokens are appended to the rows that still belong to the same sequences."""
        assert step.done is not None
        step.done.wait()
        self._worker_group.check()
        sampled, samples, done = step.sampled, step.samples, step.done

        def fetch(arrays: Sequence[Array]) -> list[NDArray[Any]]:
            return self.device.fetch(arrays, done)

        result = StepResult(tokens=[])
        if step.vectors is not None:
            [vectors] = fetch([step.vectors])
            result.vectors = (
                vectors.copy() if self.device.shares_memory else vectors
            )  # a copy: the next step overwrites them
        if sampled is not None:
            tokens = step.staging.tokens[: len(samples.rows)].copy()
            self._worker_group.tell_tokens(tokens)
            result.logprobs, errors = sampled.results(tokens, fetch)
            if self.synthetic is not None:
                self.synthetic.apply(samples, tokens, self._may_change)
            result.tokens = tokens.tolist()
            is_kept = self.row_generation[samples.rows] == step.row_generation
            if samples.drafted:
                is_valid = samples.valid(tokens)
                is_kept &= is_valid
                errors = {n: message for n, message in errors.items() if is_valid[n]}
            result.errors = {int(samples.rows[n]): message for n, message in errors.items()}
            if not is_kept.all():
                samples = Samples(samples.rows[is_kept], samples.forks[is_kept], samples.lengths[is_kept], {})
                tokens = tokens[is_kept]
            self.table.append(samples, tokens)
            self.sampling.advance(samples.rows, samples.forks, tokens)
        for row, measured in step.prompts:
            found = result.prompt_logprobs.setdefault(row, [])
            found += entries(fetch(measured.arrays), measured.num_top)
        if self._worker_group.is_leader:
            result.alignment = {row: found.told(fetch) for row, found in step.alignment.items()}
        return result

    def _may_change(self, row: int) -> bool:
        """Return whether any token may replace a row's own: not if the row follows a grammar."""
        settings = self.sampling.settings[row]
        return settings is not None and settings.params.grammar is None

    def _admit(self, plan: StepPlan) -> None:
        for admission in plan.admissions:
            self.row_generation[admission.row] += 1
            if self._media is not None:
                self._media.admit(admission)
            if self.pooling is not None:
                self.pooling.admit(admission)
                continue
            self.sampling.admit(admission)
            if self._cross is not None:
                self._cross.admit(admission)
            self._prompt_logprobs.admit(admission)

    def _start(self, plan: StepPlan, staging: StagingBuffer) -> SubmittedStep:
        """Gather the step's arrays, upload them, and append the step to the device's stream."""
        self._write_encoder_kv(plan)
        updates = None if self._tables is None else self._tables.updates(plan, self._stale)
        used = self._shape_of(plan, 0 if updates is None else len(updates[0]))
        prompts = self._prompt_logprobs.parts(plan, self.table.tokens) if self._links.behind is None else []
        aligned = [] if self._cross is None else self._cross.aligned(plan)
        captured = None if aligned else self._captured_for(used)  # a captured step keeps no queries
        if captured is None:
            layout = StepLayout(used)
            arrays, inputs = layout.on_host(staging.inputs), layout.on_device(self._buffer, self.device.view)
        else:
            layout, arrays, inputs = captured.layout, captured.staged[staging.number], captured.inputs
        sampling = self._gather(plan, arrays, used, updates, layout.shape.adapted)
        if self._links.before is not None:
            self._links.before.receive(arrays.hidden_in[: used.tokens])
        self._upload(staging, layout.num_bytes)
        step = SubmittedStep(self, plan, staging, self.table.samples)
        launched = _Launched(step, used, inputs, captured, sampling, prompts, aligned)
        if captured is not None:
            self.device.compute.run(partial(captured.step.replay, used))
        self.device.compute.run(partial(self._finish, launched))
        to_host = staging.tokens if self._hidden_out is None else self._hidden_out
        self.device.compute.run(partial(self._download, step, used.samples), writes=[to_host])
        step.done = self.device.compute.record()
        if self._links.behind is not None:
            self._send(step, used.tokens)
        self._prompt_logprobs.forget(plan)
        if self._cross is not None:
            self._cross.submitted(plan, aligned)
        return step

    def _write_encoder_kv(self, plan: StepPlan) -> None:
        """Write the keys and values of encoder outputs that tokens of the step are the first to see."""
        for row, rows, slots in () if self._cross is None else self._cross.starting(plan):
            adapter_slots = None
            if (slot := self.table.adapter_slots[row]) >= 0:
                adapter_slots = np.full(len(slots), slot, np.int32)
            self.device.compute.run(partial(self.computation.write_encoder_kv, rows, slots, adapter_slots))

    def _gather(
        self, plan: StepPlan, arrays: StepArrays[NDArray[Any]], used: StepShape, updates: TableUpdates | None,
        adapted: bool,
    ) -> SamplingBatch | None:  # fmt: skip
        """Fill the step's arrays from the tables. Returns what the sampler has to know beyond them, if anything."""
        row_of = self.table.gather(plan, arrays)
        if adapted:
            self.table.gather_adapters(row_of, arrays)
        if self._media is not None:
            self._media.gather(plan, row_of, arrays)
        if self._cross is not None:
            self._cross.gather(plan, row_of, arrays)
        if self._tables is not None and updates is not None:
            self._tables.fill_table_rows(plan, arrays, row_of, self.table.samples, updates)
            pad(arrays, used, self._padding_of(used))
        if self.pooling is not None:
            self.pooling.gather(plan, arrays)
            return None
        sampling = self.sampling.build(self.table.samples, self.table.tokens) if used.samples else None
        if sampling is not None:
            write_settings(arrays, sampling)
        return sampling

    def _finish(self, launched: _Launched) -> None:
        """Compute the step unless it was replayed, and choose its tokens; in the device's stream."""
        step, used, outputs = launched.step, launched.used, self._outputs(launched)
        if self.keeps_features:
            step.features = outputs.features[: used.tokens]
        if self._links.behind is not None:
            step.hidden_out = self.device.view(outputs.hidden[: used.tokens], "uint8")
        elif self.pooling is not None:
            step.vectors = outputs.logits[: used.samples]
            if launched.captured is not None and self.device.runs_ahead:  # before the next replay overwrites them
                step.vectors = self.ops.rows_of(step.vectors, np.arange(used.samples))
        elif used.samples:
            self._choose_tokens(launched, outputs)
        # Only now: on a device without a captured step they need as much memory as the logits had.
        logits_of = partial(self.computation.logits_after, launched.inputs, outputs.hidden)
        step.prompts = [measured for part in launched.prompts for measured in part.measure(self.ops, logits_of)]

    def _outputs(self, launched: _Launched) -> StepOutputs:
        if launched.captured is not None:
            return launched.captured.step.outputs
        if self._cross is None or not launched.aligned:
            return self.computation.outputs(launched.inputs, launched.used.samples)
        model = cast(CrossModel, self.model)
        with self._cross.keeping_queries(model):
            outputs = self.computation.outputs(launched.inputs, launched.used.samples)
        launched.step.alignment = self._cross.alignment(model, launched.aligned, self.caches)
        return outputs

    def _choose_tokens(self, launched: _Launched, outputs: StepOutputs) -> None:
        """Sample, on the first worker; the others get its tokens. A device keeps them for its next step."""
        step, inputs, num_samples = launched.step, launched.inputs, launched.used.samples
        tokens = outputs.best[:num_samples]
        if self._worker_group.is_leader:
            step.sampled = sample_tokens(
                self.ops, outputs.logits[:num_samples], tokens, inputs, launched.sampling, self.device.shares_memory
            )
            step.sampled.tokens = tokens = self._as_targets(step.sampled.tokens)
        if self._tables is not None:
            if not self._worker_group.shard.is_whole:  # other devices need them before their hosts are told
                cast(ParallelDeviceOps, self.ops).from_first(tokens)
            self._tables.keep(self.ops, inputs.sample_table_rows[:num_samples], tokens)

    def _download(self, step: SubmittedStep, num_samples: int) -> None:
        """Copy the tokens, or the hidden states for the next stage, to the host; in the device's stream."""
        if step.sampled is not None:
            self.device.copy(step.sampled.tokens, step.staging.tokens[:num_samples])
        if self._hidden_out is not None and step.hidden_out is not None:
            self.device.copy(step.hidden_out.reshape(-1), self._hidden_out[: step.hidden_out.nbytes])

    def _send(self, step: SubmittedStep, num_tokens: int) -> None:
        """Wait until the device has computed the step, and send its hidden states to the next stage."""
        assert self._links.behind is not None and step.done is not None
        step.done.wait()
        rows: Any = step.hidden_out
        if self._hidden_out is not None:
            rows = self._hidden_out[: rows.nbytes].reshape(num_tokens, -1)
        self._links.behind.send(rows)

    def _as_targets(self, tokens: Array) -> Array:
        """Return tokens [N] of a draft model as the target model's ids."""
        if self.target_ids is None:
            return tokens
        known: Any = tokens
        found: Any = self.ops.take_rows(self.target_ids, known * (known > 0))
        return cast(Array, found.reshape(-1))

    def _shape_of(self, plan: StepPlan, num_updates: int) -> StepShape:
        _, _, num_tokens, num_sampled_positions, num_forks, _ = zip(*plan.rows, strict=True)
        num_seqs, largest = len(plan.rows), self._largest
        num_samples = num_seqs
        if num_sampled_positions.count(1) < num_seqs or num_forks.count(1) < num_seqs:
            num_samples = sum([planned.num_samples for planned in plan.rows])
        used = StepShape(
            sum(num_tokens), num_seqs, num_samples, num_updates, largest.groups, largest.blocks,
            hidden_in_bytes=largest.hidden_in_bytes, crosses=largest.crosses,
            adapted=largest.adapted and self.table.has_adapters([planned.row for planned in plan.rows]),
        )  # fmt: skip
        if self._media is None:
            return used
        return replace(used, media=self._media.num_rows(plan), **self._media.extents)

    def _captured_for(self, used: StepShape) -> Captured | None:
        for captured in self.captured_steps:
            if self.device.can_replay(captured.layout.shape, used):
                return captured
        return None

    def _padding_of(self, used: StepShape) -> Padding:
        return Padding(used.tokens, self._padding.no_row, self._padding.no_place)

    def _upload(self, staging: StagingBuffer, num_bytes: int) -> None:
        if self.device.shares_memory:
            return

        def work() -> None:
            self.device.copy(staging.inputs[:num_bytes], self._buffer[:num_bytes])

        self.device.compute.run(work, reads=[staging.inputs])


def _device_ops(ops: Ops) -> DeviceOps:
    return cast(DeviceOps, ops)  # devices with memory of their own have them
