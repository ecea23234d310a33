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
from torch import Tensor

from octavo.scheduling.plan import Admission, StepPlan


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The model's input for T tokens of S sequences. Tensors are views of persistent buffers."""

    token_ids: Tensor  # [T] int32
    positions: Tensor  # [T] int64
    slot_mapping: Tensor  # [T] int64: block * block_size + offset
    query_start_loc: Tensor  # [S + 1] int32: the tokens of sequence s are query_start_loc[s] .. [s + 1]
    seq_lens: Tensor  # [S] int32: cached tokens, this step's included
    block_tables: Tensor  # [S, max_blocks] int32
    sample_rows: Tensor  # [N] int64: tokens whose logits are sampled; a token that starts forks comes several times

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]


class SequenceTable:
    """Tokens [max_num_seqs, max_model_len] and block tables [max_num_seqs, max_blocks] of the running sequences."""

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        max_blocks = -(-max_model_len // block_size)
        # np.zeros commits no memory until a row is used.
        self.tokens: NDArray[np.int32] = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self.blocks: NDArray[np.int32] = np.zeros((max_num_seqs, max_blocks), np.int32)
        self._token_ids = np.zeros(max_num_batched_tokens, np.int32)
        self._positions = np.zeros(max_num_batched_tokens, np.int64)
        self._slots = np.zeros(max_num_batched_tokens, np.int64)
        self._starts = np.zeros(max_num_seqs + 1, np.int32)
        self._seq_lens = np.zeros(max_num_seqs, np.int32)
        self._tables = np.zeros((max_num_seqs, max_blocks), np.int32)
        self._sample_rows = np.zeros(max_num_seqs, np.int64)

    def full_batch(self) -> StepBatch:
        """The whole buffers that batches are views of: what a step is recorded with."""
        return StepBatch(
            token_ids=torch.from_numpy(self._token_ids),
            positions=torch.from_numpy(self._positions),
            slot_mapping=torch.from_numpy(self._slots),
            query_start_loc=torch.from_numpy(self._starts),
            seq_lens=torch.from_numpy(self._seq_lens),
            block_tables=torch.from_numpy(self._tables),
            sample_rows=torch.from_numpy(self._sample_rows),
        )

    def admit(self, admission: Admission) -> None:
        row = admission.row
        self.tokens[row, : len(admission.token_ids)] = admission.token_ids
        self.blocks[row, : len(admission.block_table)] = admission.block_table

    def build(self, plan: StepPlan) -> StepBatch:
        """Gather the scheduled rows of a plan whose admissions and new blocks have been applied."""
        rows = np.array(plan.rows, np.int64)
        computed = np.array(plan.num_computed, np.int64)
        counts = np.array(plan.num_tokens, np.int64)
        num_seqs, num_tokens = len(rows), int(counts.sum())
        starts = self._starts[: num_seqs + 1]
        np.cumsum(counts, out=starts[1:])
        seq_lens = self._seq_lens[:num_seqs]
        seq_lens[:] = computed + counts
        row_of = np.repeat(rows, counts)
        positions = self._positions[:num_tokens]
        positions[:] = np.arange(num_tokens) + np.repeat(computed - starts[:-1], counts)
        token_ids = self._token_ids[:num_tokens]
        token_ids[:] = self.tokens[row_of, positions]
        slots = self._slots[:num_tokens]
        slots[:] = self.blocks[row_of, positions // self.block_size]
        slots *= self.block_size
        slots += positions % self.block_size
        width = -(-int(seq_lens.max()) // self.block_size)
        tables = self._tables[:num_seqs]
        tables[:, :width] = self.blocks[rows, :width]
        return StepBatch(
            token_ids=torch.from_numpy(token_ids),
            positions=torch.from_numpy(positions),
            slot_mapping=torch.from_numpy(slots),
            query_start_loc=torch.from_numpy(starts),
            seq_lens=torch.from_numpy(seq_lens),
            block_tables=torch.from_numpy(tables),
            sample_rows=torch.from_numpy(np.repeat(starts[1:].astype(np.int64) - 1, plan.num_samples)),
        )
