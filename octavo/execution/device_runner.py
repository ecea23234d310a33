"""Carries out plans on a device that computes while Python goes on: `ModelRunner`'s work without its waiting.

`submit` writes what the step needs into pinned memory, has it uploaded at once, and appends forward pass, sampling and
the download of the tokens to the device's stream. Sampled tokens stay on the device as well: a row of the next step
takes its own from there, so that step can be submitted before anybody on the host knows them. A step of decodes only is
the replay of a captured graph of the next larger size; others run call by call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.batch import StepBatch
from octavo.errors import DeviceMemoryError
from octavo.execution.block_mover import BlockMover
from octavo.execution.device import Device, Event, Graph
from octavo.execution.step_batch import Samples, SequenceTable
from octavo.execution.step_inputs import StepInputs, StepLayout, StepShape, pad, step_arrays
from octavo.models.decoder import Decoder
from octavo.ops import DeviceOps, LayerKVCache
from octavo.ops.upload import upload
from octavo.plan import StepPlan, StepResult
from octavo.sampling.batch import SamplingTable
from octavo.sampling.device_sampler import Drawn, draw, fill
from octavo.sampling.logprobs import MeasuredLogprobs, entries, measure
from octavo.sampling.structured import GrammarCompiler
from octavo.sampling_params import MAX_LOGPROBS

# Rows of prompt log-probabilities computed at a time: 256 x 128k vocabulary entries are 128 MiB of float32.
_PROMPT_LOGPROB_ROWS = 256
# Two steps may be under way, and a third is written meanwhile.
_NUM_STAGES = 3
_UPDATES_PER_SEQUENCE = 2  # of a decode: a new block, and a copied one


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Sequences of the steps that are captured. A step is padded to the next larger one; what the padding costs stays
    under a third up to 512, and below 16 the weights' traffic, which is the same for all."""
    sizes = [1, 2, 4, 8, *range(16, 64, 8), *range(64, 128, 16), *range(128, 513, 32)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


@dataclass(slots=True)
class _Stage:
    """Pinned memory of one step: what the device is told, and the tokens that come back."""

    number: int
    inputs: Tensor  # uint8
    tokens: Tensor  # [max_num_seqs] int64
    is_free: Event | None = None  # the device is done with it


@dataclass(frozen=True, slots=True)
class _Captured:
    """A graph, and the arrays that it reads: on the device, and on the host in each stage, by the stage's number."""

    layout: StepLayout
    inputs: StepInputs[Tensor]
    staged: list[StepInputs[NDArray[Any]]]
    graph: Graph
    logits: Tensor
    best: Tensor


@dataclass(slots=True)
class _PromptRows:
    """Log-probabilities of some of a row's prompt tokens."""

    row: int
    logprobs: MeasuredLogprobs


class DeviceStep:
    """A step that the device has been given."""

    def __init__(self, runner: DeviceRunner, stage: _Stage, samples: Samples) -> None:
        self._runner = runner
        self.stage = stage
        self.samples = samples
        self.occupants = runner.occupants[samples.rows]
        self.drawn: Drawn | None = None  # set when the device's turn has come
        self.prompts: list[_PromptRows] = []
        self.done: Event | None = None

    def result(self) -> StepResult:
        """Wait until the device has computed the step."""
        return self._runner.collect(self)


class DeviceRunner:
    """One model on one device, its KV cache, and the tables of the running sequences."""

    def __init__(
        self,
        model: Decoder,
        ops: DeviceOps,
        device: Device,
        table: SequenceTable,
        sizes: Sequence[int],
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self.model, self.ops, self.device = model, ops, device
        self.table = table
        self.caches: list[LayerKVCache]
        self._mover: BlockMover
        num_rows, max_blocks = table.blocks.shape
        self.sampling = SamplingTable(num_rows, grammars)
        self.occupants = np.zeros(num_rows, np.int64)  # how many sequences have had each row
        self._wants_prompt_logprobs: dict[int, int] = {}  # row -> how many
        self._stale: set[int] = set()  # rows whose block tables the device may not have got
        self._nobody = num_rows
        self._nowhere = num_rows * max_blocks
        place = device.torch_device
        # One row more than there are, for nobody.
        self._last_tokens = torch.zeros(num_rows + 1, dtype=torch.int32, device=place)
        self._block_tables = torch.zeros(num_rows + 1, max_blocks, dtype=torch.int32, device=place)
        num_tokens = len(table.arrays.token_ids)
        largest = StepLayout(StepShape(num_tokens, num_rows, num_rows, num_rows * (max_blocks + _UPDATES_PER_SEQUENCE)))
        self._inputs = torch.zeros(largest.num_bytes, dtype=torch.uint8, device=place)
        self._tokens = torch.zeros(num_rows, dtype=torch.int64, device=place)
        self._stages = [
            _Stage(i, device.pinned([largest.num_bytes], torch.uint8), device.pinned([num_rows], torch.int64))
            for i in range(_NUM_STAGES)
        ]
        self._sizes = sorted(sizes)
        self._captured: dict[int, _Captured] = {}

    def use_caches(self, caches: list[LayerKVCache], mover: BlockMover) -> None:
        """Where keys and values are kept. To be called before anything runs; graphs stay with what they were captured
        with."""
        self.caches, self._mover = caches, mover

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture the graphs, largest first: the smaller ones find their memory already there."""
        for size in reversed(self._sizes):
            layout = StepLayout(StepShape(size, size, size, _UPDATES_PER_SEQUENCE * size))
            # Padding through and through: a step that changes nothing.
            stage = self._stages[0]
            nothing = StepShape(0, 0, 0, 0)
            arrays = layout.on_host(stage.inputs.numpy())
            arrays.query_start_loc[0] = 0
            pad(arrays, nothing, self._nobody, self._nowhere)
            self._upload(stage, layout.num_bytes)
            self.device.compute.record().wait()
            inputs = layout.on_device(self._inputs)
            graph, (_, logits, best) = self.device.capture(lambda inputs=inputs: self._forward(inputs))  # type: ignore[misc]
            staged = [layout.on_host(stage.inputs.numpy()) for stage in sorted(self._stages, key=attrgetter("number"))]
            self._captured[size] = _Captured(layout, inputs, staged, graph, logits, best)

    @property
    def graph_bytes(self) -> int:
        """What `capture` is going to take: each graph keeps its logits, and all share the memory of the rest, which is
        less than the largest step's."""
        return sum(self._sizes) * self.model.config.vocab_size * 4

    @torch.inference_mode()
    def run_largest_step(self) -> None:
        """The step that takes the most memory: as many tokens and samples as there may be, stored nowhere."""
        num_tokens, num_rows = len(self.table.arrays.token_ids), self._nobody
        layout = StepLayout(StepShape(num_tokens, num_rows, num_rows, 0))
        stage = self._stages[0]
        arrays = layout.on_host(stage.inputs.numpy())
        arrays.query_start_loc[0] = 0
        pad(arrays, StepShape(0, 0, 0, 0), self._nobody, self._nowhere)
        arrays.query_start_loc[1:] = np.linspace(0, num_tokens, num_rows + 1).astype(np.int32)[1:]
        arrays.seq_lens[:] = np.diff(arrays.query_start_loc)
        self._upload(stage, layout.num_bytes)
        inputs = layout.on_device(self._inputs)

        def work() -> None:
            _, logits, best = self._forward(inputs)
            ones = torch.ones(num_rows, device=logits.device)
            measure(logits.clone(), best, np.full(num_rows, MAX_LOGPROBS))  # as if all asked what they were before
            self.ops.sample(logits, ones, inputs.top_k, ones, ones, inputs.dice)

        self.device.compute.run(work)
        self.device.compute.record().wait()

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> DeviceStep:
        """Have the device compute a plan, which must have at least one row, after those submitted before.

        Raises `DeviceMemoryError`; blocks were moved and rows admitted by then, but no token was computed."""
        self.table.update(plan)
        self._admit(plan)
        self._mover.move(plan.moves)
        stage = self._stages.pop(0)
        self._stages.append(stage)
        if stage.is_free is not None:
            stage.is_free.wait()
        try:
            return self._start(plan, stage)
        except torch.OutOfMemoryError as e:
            self._stale.update(plan.rows)
            torch.cuda.empty_cache()
            reason = str(e).splitlines()[0]
            raise DeviceMemoryError(
                f"the step ran out of device memory ({reason}); lower --max-num-batched-tokens, "
                "--max-num-seqs or --gpu-memory-utilization."
            ) from None
        finally:
            stage.is_free = self.device.compute.record()

    def collect(self, step: DeviceStep) -> StepResult:
        """Wait for a step, and append its tokens to the rows that are still the same sequences'."""
        assert step.done is not None
        step.done.wait()
        drawn, samples, done = step.drawn, step.samples, step.done

        def fetch(tensors: Sequence[Tensor]) -> list[Tensor]:
            return self.device.fetch(tensors, done)

        result = StepResult(tokens=[])
        if drawn is not None:
            tokens = step.stage.tokens.numpy()[: len(samples.rows)].copy()
            result.logprobs, errors = drawn.finish(tokens, fetch)
            result.errors = {int(samples.rows[n]): message for n, message in errors.items()}
            is_same = self.occupants[samples.rows] == step.occupants
            kept = Samples(samples.rows[is_same], samples.forks[is_same], samples.lengths[is_same])
            self.table.append(kept, tokens[is_same])
            self.sampling.advance(kept.rows, kept.forks, tokens[is_same])
            result.tokens = tokens.tolist()
        for part in step.prompts:
            found = result.prompt_logprobs.setdefault(part.row, [])
            found += entries(fetch(part.logprobs.tensors), part.logprobs.num_top)
        return result

    def _admit(self, plan: StepPlan) -> None:
        for admission in plan.admissions:
            self.occupants[admission.row] += 1
            self.sampling.admit(admission)
            self._wants_prompt_logprobs.pop(admission.row, None)
            has_output = len(admission.token_ids) > admission.num_prompt_tokens
            if admission.params.prompt_logprobs is not None and not has_output:
                self._wants_prompt_logprobs[admission.row] = admission.params.prompt_logprobs

    def _start(self, plan: StepPlan, stage: _Stage) -> DeviceStep:
        places, blocks = self._table_updates(plan)
        num_tokens, num_seqs, num_samples = plan.total_tokens, len(plan.rows), sum(plan.num_samples)
        used = StepShape(num_tokens, num_seqs, num_samples, len(places))
        prompts = self._prompt_rows(plan) if self._wants_prompt_logprobs else []
        captured = None if prompts else self._graph_for(used, plan)
        if captured is None:
            layout = StepLayout(used)
            arrays, inputs = layout.on_host(stage.inputs.numpy()), layout.on_device(self._inputs)
        else:
            layout, arrays, inputs = captured.layout, captured.staged[stage.number], captured.inputs
        row_of = self.table.gather(plan, step_arrays(arrays))
        samples = self.table.samples
        # The last token of a row may be one that only the device knows.
        is_unknown = arrays.positions[:num_tokens] >= self.table.num_known[row_of]
        arrays.token_owners[:num_tokens] = np.where(is_unknown, row_of, self._nobody)
        arrays.seq_owners[:num_seqs] = plan.rows
        arrays.sample_owners[:num_samples] = np.where(samples.forks == 0, samples.rows, self._nobody)
        arrays.block_places[: len(places)] = places
        arrays.new_blocks[: len(places)] = blocks
        pad(arrays, used, self._nobody, self._nowhere)
        settings = None
        if num_samples:
            settings = self.sampling.build(samples.rows, samples.forks, samples.lengths, self.table.tokens)
            if settings is not None:
                fill(arrays, settings)
        self._upload(stage, layout.num_bytes)
        step = DeviceStep(self, stage, samples)
        compute = self.device.compute
        if captured is not None:
            compute.run(captured.graph.replay)

        def finish() -> None:
            if captured is not None:
                logits, best = captured.logits[:num_samples], captured.best[:num_samples]
            else:
                hidden, logits, best = self._forward(inputs)
                step.prompts = [measured for part in prompts for measured in self._measure_prompt(hidden, *part)]
            if num_samples:
                drawn = draw(self.ops, logits, best, inputs, settings)
                self._last_tokens[inputs.sample_owners[:num_samples]] = drawn.tokens.clamp(min=0).int()
                self._tokens[:num_samples] = drawn.tokens
                step.drawn = drawn

        compute.run(finish)
        tokens = stage.tokens[:num_samples]

        def download() -> None:
            tokens.copy_(self._tokens[:num_samples], non_blocking=True)

        compute.run(download, writes=[stage.tokens])
        step.done = compute.record()
        return step

    def _upload(self, stage: _Stage, num_bytes: int) -> None:
        def work() -> None:
            self._inputs[:num_bytes].copy_(stage.inputs[:num_bytes], non_blocking=True)

        self.device.compute.run(work, reads=[stage.inputs])

    def _graph_for(self, used: StepShape, plan: StepPlan) -> _Captured | None:
        """The graph to replay, if all that the plan has is one token and one sample for each sequence."""
        if not used.num_tokens == used.num_seqs == used.num_samples or plan.num_samples.count(1) < used.num_seqs:
            return None
        size = next((size for size in self._sizes if size >= used.num_seqs), None)
        captured = None if size is None else self._captured.get(size)
        if captured is None or used.num_updates > captured.layout.shape.num_updates:
            return None
        return captured

    def _table_updates(self, plan: StepPlan) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Flat places in the device's block tables that change, and their blocks."""
        width = self.table.blocks.shape[1]
        stale = self._stale.intersection(plan.rows)
        self._stale -= stale
        new_blocks = [entry for entry in plan.new_blocks if entry[0] not in stale] if stale else plan.new_blocks
        parts = [np.array([row * width + position for row, position, _ in new_blocks], np.int64)]
        blocks = [np.array([block for _, _, block in new_blocks], np.int32)]
        lengths = {admission.row: len(admission.block_table) for admission in plan.admissions}
        for row, length in (lengths | dict.fromkeys(stale, width)).items():
            parts.append(np.arange(row * width, row * width + length))
            blocks.append(self.table.blocks[row, :length])
        return np.concatenate(parts), np.concatenate(blocks)

    def _forward(self, inputs: StepInputs[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """The model on what was uploaded -> hidden [T, H] before the final norm, logits [N, V], their argmax [N]."""
        self._block_tables.view(-1)[inputs.block_places] = inputs.new_blocks
        last_tokens = self._last_tokens[inputs.token_owners]
        batch = StepBatch(
            token_ids=torch.where(inputs.token_owners < self._nobody, last_tokens, inputs.token_ids),
            positions=inputs.positions,
            slot_mapping=inputs.slot_mapping,
            query_start_loc=inputs.query_start_loc,
            seq_lens=inputs.seq_lens,
            block_tables=self._block_tables[inputs.seq_owners],
            sample_rows=inputs.sample_rows,
        )
        hidden = self.model.forward(batch, self.caches)
        logits = self.model.logits(self.ops.take_rows(hidden, batch.sample_rows))
        return hidden, logits, self.ops.argmax(logits)

    def _prompt_rows(self, plan: StepPlan) -> list[tuple[int, int, NDArray[np.int64], int]]:
        """(row, its first token of the step, the prompt tokens that those predict, how many others to report) of each
        row that asks for log-probabilities of its prompt and has some of it in this step."""
        found = []
        start = 0
        for row, computed, num_tokens in zip(plan.rows, plan.num_computed, plan.num_tokens, strict=True):
            first, start = start, start + num_tokens
            settings = self.sampling.settings[row]
            if row not in self._wants_prompt_logprobs or settings is None:
                continue
            end = min(computed + num_tokens, settings.num_prompt_tokens - 1)
            if end > computed:
                predicted = self.table.tokens[row, computed + 1 : end + 1].astype(np.int64)
                found.append((row, first, predicted, self._wants_prompt_logprobs[row]))
        return found

    def _measure_prompt(
        self, hidden: Tensor, row: int, first: int, predicted: NDArray[np.int64], num_top: int
    ) -> list[_PromptRows]:
        parts = []
        for start in range(0, len(predicted), _PROMPT_LOGPROB_ROWS):
            tokens = predicted[start : start + _PROMPT_LOGPROB_ROWS]
            logits = self.model.logits(hidden[first + start : first + start + len(tokens)])
            measured = measure(logits, upload(tokens, hidden.device), np.full(len(tokens), num_top))
            parts.append(_PromptRows(row, measured))
        return parts
