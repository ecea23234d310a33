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
from octavo.execution.cross_outputs import CrossOutputs
from octavo.execution.device import Device, StepOutputs
from octavo.execution.device_tables import DeviceTables
from octavo.execution.media_table import MediaTable
from octavo.execution.pooling_table import PoolingTable
from octavo.execution.prompt_logprobs import MOST_ROWS, PromptLogprobs
from octavo.execution.sequence_table import SequenceTable
from octavo.execution.step_arrays import UPDATES_PER_DECODE, Padding, StepArrays, StepLayout, StepShape, pad
from octavo.execution.step_computation import StepComputation
from octavo.execution.submitted_step import Captured, StagingBuffer, SubmittedStep
from octavo.execution.worker_group import ALONE, WorkerGroup
from octavo.models.registry import CrossModel, Model, StageModel
from octavo.ops import Array, DeviceOps, LayerKVCache, Ops, ParallelDeviceOps
from octavo.plan import StepPlan, StepResult
from octavo.pooling_params import PoolingConfig
from octavo.sampling.logprobs import entries, measure
from octavo.sampling.sampler import SampledTokens, sample_tokens, write_settings
from octavo.sampling.sampling_table import Samples, SamplingBatch, SamplingTable
from octavo.sampling_params import MAX_LOGPROBS
from octavo.speculative.synthetic import SyntheticAcceptance
from octavo.structured_output.masks import GrammarCompiler

if TYPE_CHECKING:
    from octavo.execution.adapter_store import AdapterStore
    from octavo.lora.ops import AdaptedOps

# Where steps run ahead two may be under way, and a third is written meanwhile.
_NUM_STAGING_BUFFERS_AHEAD = 3


class RunnerAdapters(NamedTuple):
    """Where the runner says whose adapters rows take, and has them loaded."""

    ops: AdaptedOps
    store: AdapterStore


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
        """With `pooling` the model's vectors are the result in the place of tokens; `media` is of one that takes them,
        `cross` of one with cross attention."""
        self.model, self.ops, self.device = model, ops, device
        self._adapters, self._worker_group = adapters, worker_group
        self._links = worker_group.links
        self.table, self.max_num_tokens = table, max_num_tokens
        self.caches: Sequence[LayerKVCache]
        self._mover: BlockMover
        num_groups, num_rows, max_blocks = table.blocks.shape
        self.sampling = SamplingTable(num_rows, grammars)
        self.pooling = PoolingTable(num_rows) if pooling is not None else None
        self._result_size = model.vocab_size if pooling is None else pooling.size  # numbers of a sample
        self._media, self._cross = media, cross
        self.row_generation = np.zeros(num_rows, np.int64)  # how many sequences have had each row
        self._prompt_logprobs = PromptLogprobs()
        self._stale: set[int] = set()  # rows whose block tables the device may not have got
        self._tables: DeviceTables | None = None
        self._padding = Padding(0, num_rows, num_rows * max_blocks)
        num_updates = 0
        if not device.shares_memory:
            self._tables = DeviceTables(device, table)
            num_updates = num_groups * num_rows * (max_blocks + UPDATES_PER_DECODE)
        # Of T tokens each is sampled after once at most, but for forks, which have a row each.
        self._largest = StepShape(
            max_num_tokens, num_rows, max(max_num_tokens, num_rows), num_updates, num_groups,
            max_blocks if device.shares_memory else 0, adapted=adapters is not None,
            pools="" if pooling is None else "texts" if pooling.whole_prompts else "parts",
        )  # fmt: skip
        if media is not None:
            self._largest = replace(self._largest, media=max_num_tokens, **media.extents)
        self._largest = replace(self._largest, crosses=cross is not None)
        if self._links.before is not None:
            of_stage = cast(StageModel, model)
            item_bytes = 4 if of_stage.stream_dtype == "float32" else 2
            self._largest = replace(self._largest, hidden_in_bytes=of_stage.stage_width * item_bytes)
        self.computation = StepComputation(
            model, ops, device, self._largest, self._tables, self._links, None if adapters is None else adapters.ops
        )
        # What goes to the stage behind, on its way from a device with memory of its own.
        self._hidden_out: NDArray[np.uint8] | None = None
        if self._links.behind is not None and not device.shares_memory:
            row_bytes = cast(StageModel, model).stage_width * 4
            self._hidden_out = device.pinned([max_num_tokens * row_bytes], "uint8")
        num_bytes = StepLayout(self._largest).num_bytes
        self._staging_buffers = [
            StagingBuffer(i, device.pinned([num_bytes], "uint8"), device.pinned([self._largest.samples], "int64"))
            for i in range(_NUM_STAGING_BUFFERS_AHEAD if device.runs_ahead else 1)
        ]
        self._buffer = device.upload_target(self._staging_buffers[0].inputs)  # what the stages are uploaded to
        self.captured_steps: list[Captured] = []
        self.keeps_features = False  # whether steps have their `features`
        self.read_features: Callable[[Array], None] | None = None  # what reads those launches what it may, at the start
        self.target_ids: Array | None = None  # [vocab_size, 1] int64: what its tokens are to others, if not the same
        self.synthetic: SyntheticAcceptance | None = None  # for benchmarks

    def use_caches(self, caches: Sequence[LayerKVCache], mover: BlockMover) -> None:
        """Where keys and values are kept, by layer. To be called before anything runs; captured steps stay with what
        they were captured with."""
        self.caches = self.computation.caches = caches
        self._mover = mover

    def capture(self) -> None:
        """Capture the steps that are worth it, the largest first: the smaller ones find their memory already there."""
        if not self.device.shares_memory:
            gc.collect()  # garbage may hold the device's memory; once, and not before each, as captures leave none
        for shape in reversed(self.device.capture_shapes(self._largest)):
            layout = StepLayout(shape)
            staged = [layout.on_host(staging.inputs) for staging in self._staging_buffers]
            # Padding through and through: a step that changes nothing.
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
        """What `capture` is going to take: the results of the largest captured step, and its own memory of as much. All
        share the memory of the rest, which is less than the largest step's."""
        if self.device.shares_memory:
            return 0
        largest = max((shape.samples for shape in self.device.capture_shapes(self._largest)), default=0)
        return 2 * largest * self._result_size * 4

    def run_largest_step(self) -> None:
        """The step that takes the most memory: as many tokens and samples as there may be, stored nowhere."""
        num_samples = self._largest.seqs if self.pooling is None else self._most_vectors
        self._dummy_run(self._largest.tokens, self._largest.seqs, num_samples, self._largest.adapted)

    @property
    def _most_vectors(self) -> int:
        """Of a step: of whole texts each token may have one."""
        return self._largest.samples if self._largest.pools == "texts" else self._largest.seqs

    def warm_up(self) -> None:
        """Have the device launch once whatever a step of any size may launch, so that nothing is compiled later."""
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
        # Of prompts. Views of one row may have other strides than those of several.
        for num_tokens in sorted({1, *ops.row_classes(self._largest.tokens)}):
            self._dummy_run(num_tokens, max(1, min(num_tokens // 4, num_rows)), 1, adapted)
        classes = ops.row_classes(self._most_vectors)
        if self.pooling is None:  # guesses, and prompts' log-probabilities: any token of a step may be sampled after
            classes = ops.row_classes(self._largest.samples, exactly=False)
        for num_samples in classes:
            try:
                self._dummy_run(min(num_samples, num_rows), min(num_samples, num_rows), num_samples, adapted)
            except self.device.memory_errors:
                # More samples than rows are guesses' or a prompt's, which may find no memory later either.
                if (
                    num_samples <= num_rows or self._worker_group.connections
                ):  # others wait for what this one has not computed
                    raise
                self.device.release_memory()

    def _dummy_run(self, num_tokens: int, num_rows: int, num_samples: int, adapted: bool) -> None:
        """A step of sequences that are as long as each other, stored nowhere, with all that requests may ask for."""
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
        arrays.slot_mapping[self.table.state_groups] = 0  # a state has to be somewhere, and nobody has one yet
        arrays.temperature[:] = arrays.top_p[:] = arrays.min_p[:] = 1
        self._upload(staging, layout.num_bytes)
        inputs = layout.on_device(self._buffer, self.device.view)

        num_told = min(num_samples, max(self._largest.seqs, MOST_ROWS))  # of whose tokens more is asked

        def work() -> None:
            with self._telling_all():
                hidden, features = self.computation.hidden(inputs)
            logits, best = self.computation.logits(inputs, hidden)
            if self.read_features is not None:
                self.read_features(features)
            if self.pooling is not None or self._links.behind is not None:
                return
            raw = self.ops.rows_of(logits, np.arange(num_told))  # as if all asked what they were before
            measure(self.ops, raw, best[:num_told], np.full(num_told, MAX_LOGPROBS))
            one, neutral = np.zeros(1, np.int64), np.ones(num_samples, np.float32)
            self.ops.penalize(logits, one, one, one.astype(np.float32), neutral, neutral - 1, neutral - 1)
            self.ops.mask_tokens(logits, np.full((1, -(-self.model.vocab_size // 32)), -1, np.int32), one)
            settings = inputs.temperature, inputs.top_k, inputs.top_p, inputs.min_p, inputs.uniforms
            self._as_targets(self.ops.sample(logits, *settings))

        self.device.compute.run(work)
        self.device.compute.record().wait()

    def _telling_all(self) -> AbstractContextManager[None]:
        """Meanwhile steps compute what requests may want to be told of cross attention, where they may."""
        return nullcontext() if self._cross is None else self._cross.trying_alignment(cast(CrossModel, self.model))

    def submit(self, plan: StepPlan) -> SubmittedStep:
        """Have the device compute a plan, which must have at least one row, after those submitted before.

        Raises `DeviceMemoryError`; blocks were moved and rows admitted by then, but no token was computed."""
        self.apply_updates(plan)
        return self.launch(plan)

    def apply_updates(self, plan: StepPlan) -> None:
        """The part of a plan that comes before its rows: admissions, block tables, moves of blocks."""
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
            if self._worker_group.connections:  # others wait for what this one has not computed: all start again
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
        """Wait for a step, and append its tokens to the rows that are still the same sequences'."""
        assert step.done is not None
        step.done.wait()
        self._worker_group.check()
        sampled, samples, done = step.sampled, step.samples, step.done

        def fetch(arrays: Sequence[Array]) -> list[NDArray[Any]]:
            return self.device.fetch(arrays, done)

        result = StepResult(tokens=[])
        if step.vectors is not None:
            [vectors] = fetch([step.vectors])
            result.vectors = vectors.copy() if self.device.shares_memory else vectors  # the next step overwrites them
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
        """Whether any token may stand in the place of a row's own: a grammar could not be followed any further."""
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
        if self._cross is not None:
            for row, rows, slots in self._cross.starting(plan):
                adapter_slots = None
                if (slot := self.table.adapter_slots[row]) >= 0:
                    adapter_slots = np.full(len(slots), slot, np.int32)
                self.device.compute.run(partial(self.computation.write_encoder_kv, rows, slots, adapter_slots))
        updates = None if self._tables is None else self._tables.updates(plan, self._stale)
        has_logits = self._links.behind is None
        prompts = self._prompt_logprobs.parts(plan, self.table.tokens) if has_logits else []
        used = self._shape_of(plan, 0 if updates is None else len(updates[0]))
        aligned = [] if self._cross is None else self._cross.aligned(plan)
        captured = None if aligned else self._captured_for(used)  # a captured step keeps no queries
        if captured is None:
            layout = StepLayout(used)
            arrays, inputs = layout.on_host(staging.inputs), layout.on_device(self._buffer, self.device.view)
        else:
            layout, arrays, inputs = captured.layout, captured.staged[staging.number], captured.inputs
        row_of = self.table.gather(plan, arrays)
        samples = self.table.samples
        num_samples = used.samples
        if layout.shape.adapted:
            self.table.gather_adapters(row_of, arrays)
        if self._media is not None:
            self._media.gather(plan, row_of, arrays)
        if self._cross is not None:
            self._cross.gather(plan, row_of, arrays)
        if self._tables is not None and updates is not None:
            self._tables.fill_owners(plan, arrays, row_of, samples, updates)
            pad(arrays, used, self._padding_of(used))
        settings = None
        if self.pooling is not None:
            self.pooling.gather(plan, arrays)
        elif num_samples:
            settings = self.sampling.build(samples, self.table.tokens)
            if settings is not None:
                write_settings(arrays, settings)
        if self._links.before is not None:
            self._links.before.receive(arrays.hidden_in[: used.tokens])
        self._upload(staging, layout.num_bytes)
        step = SubmittedStep(self, plan, staging, samples)
        if captured is not None:
            self.device.compute.run(lambda: captured.step.replay(used))

        def finish() -> None:
            def prompt_logits(begin: int, end: int) -> Array:
                return self.computation.logits_after(inputs, outputs.hidden, begin, end)

            if captured is not None:
                outputs = captured.step.outputs
            elif self._cross is not None and aligned:
                crossing = cast(CrossModel, self.model)
                with self._cross.keeping_queries(crossing):
                    outputs = self.computation.outputs(inputs, num_samples)
                step.alignment = self._cross.alignment(crossing, aligned, self.caches)
            else:
                outputs = self.computation.outputs(inputs, num_samples)
            if self.keeps_features:
                step.features = outputs.features[: used.tokens]
            if self._links.behind is not None:
                step.hidden_out = self.device.view(outputs.hidden[: used.tokens], "uint8")
            elif self.pooling is not None:
                step.vectors = outputs.logits[:num_samples]
                if captured is not None and self.device.runs_ahead:  # before the next replay overwrites them
                    step.vectors = self.ops.rows_of(step.vectors, np.arange(num_samples))
            elif num_samples:
                tokens = outputs.best[:num_samples]
                if self._worker_group.is_leader:
                    step.sampled = self._sample(outputs, num_samples, inputs, settings)
                    tokens = step.sampled.tokens
                if self._tables is not None:
                    if (
                        not self._worker_group.shard.is_whole
                    ):  # the others' devices need them before their hosts are told
                        cast(ParallelDeviceOps, self.ops).from_first(tokens)
                    self._tables.keep(self.ops, inputs.sample_table_rows[:num_samples], tokens)
            # Only now: on a device without a captured step they need as much memory as the logits had.
            step.prompts = [measured for part in prompts for measured in part.measure(self.ops, prompt_logits)]

        def download() -> None:
            if step.sampled is not None:
                self.device.copy(step.sampled.tokens, staging.tokens[:num_samples])
            if self._hidden_out is not None and step.hidden_out is not None:
                self.device.copy(step.hidden_out.reshape(-1), self._hidden_out[: step.hidden_out.nbytes])

        self.device.compute.run(finish)
        self.device.compute.run(download, writes=[staging.tokens] if self._hidden_out is None else [self._hidden_out])
        step.done = self.device.compute.record()
        if self._links.behind is not None:
            self._send(step, used.tokens)
        self._prompt_logprobs.forget(plan)
        if self._cross is not None:
            self._cross.submitted(plan, aligned)
        return step

    def _send(self, step: SubmittedStep, num_tokens: int) -> None:
        """Wait until the device has computed the step, and hand what has come of it to the stage behind."""
        assert self._links.behind is not None and step.done is not None
        step.done.wait()
        rows: Any = step.hidden_out
        if self._hidden_out is not None:
            rows = self._hidden_out[: rows.nbytes].reshape(num_tokens, -1)
        self._links.behind.send(rows)

    def _sample(
        self, outputs: StepOutputs, num_samples: int, inputs: StepArrays[Array], settings: SamplingBatch | None
    ) -> SampledTokens:
        """What the first worker of the team samples; the others get its tokens, and nothing else."""
        sampled = sample_tokens(
            self.ops, outputs.logits[:num_samples], outputs.best[:num_samples], inputs, settings,
            self.device.shares_memory,
        )  # fmt: skip
        sampled.tokens = self._as_targets(sampled.tokens)
        return sampled

    def _as_targets(self, tokens: Array) -> Array:
        """What tokens [N] of the model are to others."""
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
    return cast(DeviceOps, ops)  # a device with memory of its own comes with them
