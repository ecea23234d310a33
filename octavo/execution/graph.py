"""The model's step, recorded once at full size and replayed for the rows of each step.

The model stays ordinary Python over `octavo.ops`; what it calls is noted as a program over fixed buffers, the inputs of
which are the step table's own arrays. The model runner asks for a step and gets logits and the best tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.batch import StepBatch
from octavo.execution.step_batch import SequenceTable
from octavo.models.decoder import Decoder
from octavo.ops import LayerKVCache, Ops


class StepGraph:
    """One model over the buffers of one `SequenceTable`."""

    def __init__(self, model: Decoder, ops: Ops, table: SequenceTable, caches: list[LayerKVCache]) -> None:
        self._model = model
        self._program = ops.new_program()
        largest = table.full_batch()
        with torch.inference_mode():
            with self._program.record(per_sample=False):
                self._hidden = model.forward(largest, caches)
            with self._program.record(per_sample=True):
                self._logits = model.logits(ops.take_rows(self._hidden, largest.sample_rows))
                self._best = ops.argmax(self._logits)

    def run(self, batch: StepBatch) -> tuple[Tensor, Tensor]:
        """-> logits [N, V] float32 and their argmax [N] int64 for the N sample rows; valid until the next step."""
        num_samples = len(batch.sample_rows)
        self._program.run(batch.num_tokens, len(batch.seq_lens), num_samples)
        return self._logits[:num_samples], self._best[:num_samples]

    def logits_of(self, first: int, count: int) -> Tensor:
        """Logits [count, V] of the step's tokens first .. first + count - 1."""
        return self._model.logits(self._hidden[first : first + count])

    def profile(self, num_tokens: int, num_seqs: int, num_samples: int) -> list[tuple[str, float]]:
        """The step that is in the buffers, call by call: (operation, nanoseconds)."""
        return self._program.profile(num_tokens, num_seqs, num_samples)


class EagerStep:
    """The same step, run call by call (`--enforce-eager`): for finding out which operation does what."""

    def __init__(self, model: Decoder, ops: Ops, caches: list[LayerKVCache]) -> None:
        self._model, self._ops, self._caches = model, ops, caches
        self._hidden: Tensor

    def run(self, batch: StepBatch) -> tuple[Tensor, Tensor]:
        """As `StepGraph.run`."""
        self._hidden = self._model.forward(batch, self._caches)
        logits = self._model.logits(self._ops.take_rows(self._hidden, batch.sample_rows))
        return logits, self._ops.argmax(logits)

    def logits_of(self, first: int, count: int) -> Tensor:
        """As `StepGraph.logits_of`."""
        return self._model.logits(self._hidden[first : first + count])
