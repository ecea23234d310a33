"""A step as arrays, and the tables that they are gathered from.

`SequenceTable` holds one row for each running sequence: its tokens, its blocks, its sampling settings. It lives as long
as the engine and is updated in place; `build` gathers the rows that a plan schedules into a `StepBatch` with a handful
of numpy calls, never token by token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.batch import StepBatch
from octavo.plan import StepPlan


@dataclass(frozen=True, slots=True)
class Samples:
    """The N samples that a step draws, parallel to `StepBatch.sample_rows`. Fork 0 of a row continues the row."""

    rows: NDArray[np.int64]
    forks: NDArray[np.int64]
    lengths: NDArray[np.int64]  # tokens of the row before the sample


@dataclass(frozen=True, slots=True)
class StepArrays:
    """The arrays that `SequenceTable.gather` fills the beginnings of: `StepBatch`'s, as the host writes them."""

    token_ids: NDArray[np.int32]  # [T]
    positions: NDArray[np.int64]  # [T]
    slot_mapping: NDArray[np.int64]  # [T]
    query_start_loc: NDArray[np.int32]  # [S + 1]
    seq_lens: NDArray[np.int32]  # [S]
    sample_rows: NDArray[np.int64]  # [N]


class SequenceTable:
    """Tokens [max_num_seqs, max_model_len + 1] and blocks [max_num_seqs, max_blocks] of the running sequences.

    `arrays` and `block_tables` are a step's where the device reads the host's memory: `build` fills their beginnings.
    They never move.
    """

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        max_blocks = -(-max_model_len // block_size)
        # np.zeros commits no memory until a row is used.
        self.tokens: NDArray[np.int32] = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self.blocks: NDArray[np.int32] = np.zeros((max_num_seqs, max_blocks), np.int32)
        self.num_known = np.zeros(max_num_seqs, np.int64)  # leading tokens of each row that `tokens` holds
        self.arrays = StepArrays(
            token_ids=np.zeros(max_num_batched_tokens, np.int32),
            positions=np.zeros(max_num_batched_tokens, np.int64),
            slot_mapping=np.zeros(max_num_batched_tokens, np.int64),
            query_start_loc=np.zeros(max_num_seqs + 1, np.int32),
            seq_lens=np.zeros(max_num_seqs, np.int32),
            sample_rows=np.zeros(max_num_seqs, np.int64),
        )
        self.block_tables = np.zeros((max_num_seqs, max_blocks), np.int32)
        self._numbers = np.arange(max(max_num_batched_tokens, max_num_seqs) + 1)
        self._no_forks = np.zeros(max_num_seqs, np.int64)
        self._sizes: tuple[int, int, int] | None = None  # of the last batch; most steps have those of the step before
        self._batch: StepBatch
        self.samples: Samples  # of the last batch

    def full_batch(self) -> StepBatch:
        """The whole arrays that batches are the beginnings of: what a step is recorded with."""
        arrays = self.arrays
        return self._views(len(arrays.token_ids), len(arrays.seq_lens), len(arrays.sample_rows))

    def update(self, plan: StepPlan) -> None:
        """Take in the plan's admissions, new blocks and new tokens."""
        for admission in plan.admissions:
            row, num_tokens = admission.row, len(admission.token_ids)
            self.tokens[row, :num_tokens] = admission.token_ids
            self.blocks[row, : len(admission.block_table)] = admission.block_table
            self.num_known[row] = num_tokens
        for row, position, block in plan.new_blocks:
            self.blocks[row, position] = block
        for row, position, token in plan.new_tokens:
            self.tokens[row, position] = token
            self.num_known[row] = position + 1

    def build(self, plan: StepPlan) -> StepBatch:
        """Gather the scheduled rows of a plan that `update` has seen."""
        self.gather(plan, self.arrays)
        most_tokens = max(plan.num_computed) + max(plan.num_tokens)  # of the longest sequence, or a little more
        width = -(-most_tokens // self.block_size)
        num_seqs = len(plan.rows)
        self.block_tables[:num_seqs, :width] = self.blocks[:, :width].take(plan.rows, 0)
        return self._views(plan.total_tokens, num_seqs, len(self.samples.rows))

    def gather(self, plan: StepPlan, into: StepArrays) -> NDArray[np.int64]:
        """Fill the beginnings of `into` and set `samples`. Returns the row of each token [T]."""
        rows = np.array(plan.rows, np.int64)
        computed = np.array(plan.num_computed, np.int64)
        num_seqs, num_tokens = len(rows), plan.total_tokens
        starts = into.query_start_loc[: num_seqs + 1]
        positions = into.positions[:num_tokens]
        if num_tokens == num_seqs:  # one token each
            starts[:] = self._numbers[: num_seqs + 1]
            seq_lens = computed + 1
            row_of = rows
            positions[:] = computed
        else:
            counts = np.array(plan.num_tokens, np.int64)
            starts[0] = 0
            np.cumsum(counts, out=starts[1:])
            seq_lens = computed + counts
            row_of = np.repeat(rows, counts)
            positions[:] = self._numbers[:num_tokens] + np.repeat(computed - starts[:-1], counts)
        into.seq_lens[:num_seqs] = seq_lens
        into.token_ids[:num_tokens] = self.tokens[row_of, positions]
        places, offsets = np.divmod(positions, self.block_size)
        slots = into.slot_mapping[:num_tokens]
        np.multiply(self.blocks[row_of, places], self.block_size, out=slots)
        slots += offsets
        last_tokens = starts[1:] - 1
        if plan.num_samples.count(1) == num_seqs:
            self.samples = Samples(rows, self._no_forks[:num_seqs], seq_lens)
        else:
            num_samples = np.array(plan.num_samples, np.int64)
            last_tokens = np.repeat(last_tokens, num_samples)
            firsts = np.repeat(np.cumsum(num_samples) - num_samples, num_samples)
            forks = self._numbers[: len(firsts)] - firsts
            self.samples = Samples(np.repeat(rows, num_samples), forks, np.repeat(seq_lens, num_samples))
        into.sample_rows[: len(last_tokens)] = last_tokens
        return row_of

    def append(self, samples: Samples, tokens: NDArray[np.int64]) -> None:
        """Continue the rows that `tokens` [N] were sampled for. Forks bring their tokens when they are admitted."""
        rows, lengths = samples.rows, samples.lengths
        if samples.forks.any():
            continues = samples.forks == 0
            rows, lengths, tokens = rows[continues], lengths[continues], tokens[continues]
        self.tokens[rows, lengths] = tokens
        self.num_known[rows] = lengths + 1

    def _views(self, num_tokens: int, num_seqs: int, num_samples: int) -> StepBatch:
        sizes = num_tokens, num_seqs, num_samples
        if sizes != self._sizes:
            self._sizes = sizes
            arrays = self.arrays
            self._batch = StepBatch(
                token_ids=torch.from_numpy(arrays.token_ids[:num_tokens]),
                positions=torch.from_numpy(arrays.positions[:num_tokens]),
                slot_mapping=torch.from_numpy(arrays.slot_mapping[:num_tokens]),
                query_start_loc=torch.from_numpy(arrays.query_start_loc[: num_seqs + 1]),
                seq_lens=torch.from_numpy(arrays.seq_lens[:num_seqs]),
                block_tables=torch.from_numpy(self.block_tables[:num_seqs]),
                sample_rows=torch.from_numpy(arrays.sample_rows[:num_samples]),
            )
        return self._batch
