"""Steps before the first request, stored nowhere. The largest one shows how much memory a step takes; the others have
the device compile each kernel."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from octavo.execution.prompt_logprobs import MAX_ROWS
from octavo.execution.step_arrays import StepArrays, StepLayout, StepShape, clear
from octavo.models.registry import CrossModel
from octavo.ops import Array, DeviceOps
from octavo.sampling.logprobs import measure
from octavo.sampling_params import MAX_LOGPROBS

if TYPE_CHECKING:
    from octavo.execution.runner import Runner


class DummySteps:
    def __init__(self, runner: Runner) -> None:
        self._runner, self._device = runner, runner.device
        self._limits, self._largest = runner.limits, runner.limits.largest

    @property
    def _ops(self) -> DeviceOps:
        return cast(DeviceOps, self._runner.ops)  # only devices with memory of their own warm up

    @property
    def _max_vectors(self) -> int:
        """The most vectors of a step: one a token if prompts are whole, otherwise one a sequence."""
        return self._largest.samples if self._limits.pools == "texts" else self._largest.seqs

    def run_largest(self) -> None:
        """Run the largest step that must fit: the most tokens and sequences, with one sample a sequence, or the most
        vectors if the model pools. Steps with more samples are tried in `_warm_up_steps`."""
        num_samples = self._largest.seqs if self._runner.pooling_table is None else self._max_vectors
        self.run(self._largest.tokens, self._largest.seqs, num_samples, self._largest.adapted)

    def warm_up(self) -> None:
        """Launch every kernel that a step of any size may launch, so that nothing is compiled later."""
        for adapted in {False, self._largest.adapted}:
            self._warm_up_steps(adapted)
        self._warm_up_encoder_kv()
        self._runner.block_mover.warm_up()

    def _warm_up_steps(self, adapted: bool) -> None:
        ops, num_rows = self._ops, self._largest.seqs
        # 1. Prompts. Views of one row may have other strides than views of several.
        for num_tokens in sorted({1, *ops.row_classes(self._largest.tokens)}):
            self.run(num_tokens, max(1, min(num_tokens // 4, num_rows)), 1, adapted)
        # 2. Samples. With draft tokens and prompt log-probabilities a step may sample after any token.
        classes = ops.row_classes(self._max_vectors)
        if self._runner.pooling_table is None:
            classes = ops.row_classes(self._largest.samples, exactly=False)
        for num_samples in classes:
            try:
                self.run(min(num_samples, num_rows), min(num_samples, num_rows), num_samples, adapted)
            except self._device.memory_errors:
                # Such a step may also run out of memory later, and then fails alone. With other workers the error is
                # final, because they wait for this worker's part of the step.
                if num_samples <= num_rows or self._runner.worker_group.connections:
                    raise
                self._device.release_memory()

    def _warm_up_encoder_kv(self) -> None:
        runner, compute = self._runner, self._device.compute
        if (cross := runner.cross_outputs) is None:
            return
        for num_rows in self._ops.row_classes(cross.num_tokens):
            output = cross.no_output(cast(CrossModel, runner.model).hidden_size, num_rows)
            compute.run(partial(runner.submitter.computation.write_encoder_kv, *output))
            if self._largest.adapted:
                no_adapters = np.full(num_rows, -1, np.int32)
                compute.run(partial(runner.submitter.computation.write_encoder_kv, *output, no_adapters))

    def run(self, num_tokens: int, num_rows: int, num_samples: int, adapted: bool) -> None:
        """Run a step of equally long sequences, with everything that requests may ask for, and wait for it."""
        num_media = num_tokens if self._runner.media_table is not None else 0
        shape = StepShape(num_tokens, num_rows, num_samples, updates=0, media=num_media, adapted=adapted)
        layout, buffers = StepLayout(self._limits, shape), self._runner.submitter.buffers
        self._fill(layout.on_host(buffers.staging[0].input_bytes), shape)
        buffers.upload(buffers.staging[0], layout.num_bytes)
        self._device.compute.run(partial(self._compute, buffers.on_device(layout), num_samples))
        self._device.compute.record().wait()

    def _fill(self, arrays: StepArrays[NDArray[Any]], shape: StepShape) -> None:
        clear(arrays, self._runner.submitter.padding)
        arrays.query_start_loc[:] = np.linspace(0, shape.tokens, shape.seqs + 1).astype(np.int32)
        arrays.seq_lens[:] = np.diff(arrays.query_start_loc)
        # A state needs a block, and none is in use yet.
        arrays.slot_mapping[self._runner.sequence_table.state_groups] = 0
        arrays.temperature[:] = arrays.top_p[:] = arrays.min_p[:] = 1

    def _compute(self, inputs: StepArrays[Array], num_samples: int) -> None:
        """In the stream: compute a step with draft features, alignment, log-probabilities, penalties and masks."""
        runner, ops = self._runner, self._ops
        with self._with_alignment():
            hidden, features = runner.submitter.computation.hidden(inputs)
        logits, argmax_tokens = runner.submitter.computation.logits(inputs, hidden)
        if (warm_up := runner.submitter.draft_hooks.warm_up_drafter) is not None:
            warm_up(features)
        if runner.pooling_table is not None or runner.stage_links.next is not None:
            return
        # The most log-probabilities that a step measures in one call: one for each row, or MAX_ROWS of a prompt.
        num_with_logprobs = min(num_samples, max(self._largest.seqs, MAX_ROWS))
        raw = ops.rows_of(logits, np.arange(num_with_logprobs))
        measure(ops, raw, argmax_tokens[:num_with_logprobs], np.full(num_with_logprobs, MAX_LOGPROBS))
        zero, ones, zeros = np.zeros(1, np.int64), np.ones(num_samples, np.float32), np.zeros(num_samples, np.float32)
        # Sample 0 saw token 0 in its prompt, and then a token that only the device knows.
        counts, last_tokens = np.array([0, 1], np.float32), ops.place(np.zeros(num_samples, np.int32))
        ops.penalize(logits, np.zeros(2, np.int64), np.array([0, -1]), counts, ones, zeros, zeros, last_tokens)
        ops.mask_tokens(logits, np.full((1, -(-runner.model.vocab_size // 32)), -1, np.int32), zero)
        settings = inputs.temperature, inputs.top_k, inputs.top_p, inputs.min_p, inputs.uniforms
        runner.submitter.to_target_token_ids(ops.sample(logits, *settings))

    def _with_alignment(self) -> AbstractContextManager[None]:
        """Return a context in which steps compute the alignment of cross attention, if the model has some."""
        cross, model = self._runner.cross_outputs, cast(CrossModel, self._runner.model)
        return nullcontext() if cross is None else cross.warm_up_alignment(model)
