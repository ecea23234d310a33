"""The running sequences as tables, and a step's arrays gathered from them.

`SequenceTable` holds one row for each running sequence: its tokens and its blocks. It lives as long as the engine and
is updated in place; `gather` collects the rows of a plan with a few numpy calls, never token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ConfigError
from octavo.execution.step_arrays import StepArrays
from octavo.kv_cache.groups import CacheGroup
from octavo.kv_cache.state_blocks import MAX_DRAFT_TOKENS
from octavo.sampling.sampling_table import Samples
from octavo.step_plan import PlannedRow, RowColumns, StepPlan


class GatheredRows(NamedTuple):
    row_of: NDArray[np.int64]  # [T]: the table row of each token
    samples: Samples


class SequenceTable:
    """Tokens [max_num_seqs, max_model_len + 1] and blocks [groups, max_num_seqs, max_blocks] of the running sequences.
    They never move."""

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        groups: Sequence[CacheGroup],
        tokens_of: SequenceTable | None = None,
        num_ahead: int = 0,
        vocab_size: int | None = None,
    ) -> None:
        """A draft model's table shares the tokens of the target model's, `tokens_of`. A draft head reads, at each
        position, the token `num_ahead` positions later. If `vocab_size` is smaller than the target's, its last token
        replaces the missing ones."""
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.num_cross = max((group.spec.num_tokens for group in groups), default=0)  # rows of an encoder's output
        self._kinds = [group.spec.kind for group in groups]
        self.state_groups = [number for number, kind in enumerate(self._kinds) if kind == "state"]
        self.max_blocks = -(-max(max_model_len, self.num_cross) // block_size)
        if self.state_groups:
            self.max_blocks = max(self.max_blocks, 1 + MAX_DRAFT_TOKENS)
        # np.zeros commits no memory until a row is used.
        self.tokens: NDArray[np.int32]
        self.blocks: NDArray[np.int32]
        try:
            shape = max_num_seqs, max_model_len + 1
            self.tokens = np.zeros(shape, np.int32) if tokens_of is None else tokens_of.tokens
            self.blocks = np.zeros((len(groups), max_num_seqs, self.max_blocks), np.int32)
        except (MemoryError, ValueError):
            raise ConfigError(
                f"the tables of {max_num_seqs} sequences of {max_model_len} tokens do not fit into the memory; lower "
                "--max-model-len or --max-num-seqs."
            ) from None
        self.num_ahead, self._vocab_size = num_ahead, vocab_size
        self.adapter_slots: NDArray[np.int32] = np.full(max_num_seqs, -1, np.int32)
        self.num_known = np.zeros(max_num_seqs, np.int64)  # leading tokens of each row that `tokens` holds
        self._numbers = np.arange(max_num_seqs + 1)
        self._no_forks = np.zeros(max_num_seqs, np.int64)

    def update(self, plan: StepPlan) -> None:
        """Apply the plan's admissions, new blocks and new tokens."""
        for admission in plan.admissions:
            row, num_tokens = admission.row, len(admission.token_ids)
            self.tokens[row, :num_tokens] = admission.token_ids
            for group, table in enumerate(admission.block_tables):
                self.blocks[group, row, : len(table)] = table
            self.num_known[row] = num_tokens
            self.adapter_slots[row] = admission.adapter_slot
        for row, group, position, block in plan.new_blocks:
            self.blocks[group, row, position] = block
        for row, position, token in plan.new_tokens:
            self.tokens[row, position] = token
            self.num_known[row] = position + 1

    def gather(self, plan: StepPlan, into: StepArrays[NDArray[Any]]) -> GatheredRows:
        """Fill the first entries of `into` with the rows of a plan, after `update`. Draft tokens are written to the
        table."""
        columns = RowColumns.of(plan.rows)
        rows = np.array(columns.row, np.int64)
        computed = np.array(columns.num_computed, np.int64)
        num_seqs = len(rows)
        is_decode = columns.num_tokens.count(1) == num_seqs
        state_entries: NDArray[np.int64] | int = 0  # of each token: the entry of state tables for the state after it
        starts = into.query_start_loc[: num_seqs + 1]
        if is_decode:
            starts[:] = self._numbers[: num_seqs + 1]
            seq_lens, row_of, positions = computed + 1, rows, computed
            into.positions[:num_seqs] = positions
        else:
            counts = np.array(columns.num_tokens, np.int64)
            starts[0] = 0
            np.cumsum(counts, out=starts[1:])
            seq_lens = computed + counts
            row_of = np.repeat(rows, counts)
            positions = into.positions[: len(row_of)]
            np.subtract(np.arange(len(row_of)), np.repeat(starts[:-1] - computed, counts), out=positions)
        if any(columns.draft_tokens):
            self._write_draft_tokens(plan.rows)
            if self.state_groups:
                before_drafts = seq_lens - [len(of_row) for of_row in columns.draft_tokens] - 1
                state_entries = np.maximum(positions - np.repeat(before_drafts, counts), 0)
        into.seq_lens[:num_seqs] = seq_lens
        tokens = into.token_ids[: len(row_of)]
        tokens[:] = self.tokens[row_of, positions + self.num_ahead]
        if self._vocab_size is not None:
            np.minimum(tokens, self._vocab_size - 1, out=tokens)
        self._gather_slots(into, row_of, positions, state_entries)
        if into.block_tables.size:
            width = -(-max(int(seq_lens.max()), self.num_cross) // self.block_size)
            for group, blocks in enumerate(self.blocks):
                into.block_tables[group, :num_seqs, :width] = blocks[:, :width].take(rows, 0)
        if is_decode and columns.each_row_samples_once:
            into.sample_rows[:num_seqs] = self._numbers[:num_seqs]
            samples = Samples(rows, self._no_forks[:num_seqs], seq_lens + self.num_ahead, {})
        else:
            samples = self._gather_samples(plan.rows, into, starts, seq_lens)
        return GatheredRows(row_of, samples)

    def has_adapters(self, rows: Sequence[int]) -> bool:
        return bool((self.adapter_slots[list(rows)] >= 0).any())  # a tuple would index several dimensions

    def gather_adapters(self, gathered: GatheredRows, into: StepArrays[NDArray[Any]]) -> None:
        """Fill in the adapter slots of a step's tokens and samples."""
        row_of, rows = gathered.row_of, gathered.samples.rows
        into.adapter_slots[: len(row_of)] = self.adapter_slots[row_of]
        into.sample_adapter_slots[: len(rows)] = self.adapter_slots[rows]

    def append(self, samples: Samples, tokens: NDArray[np.int64]) -> None:
        """Append the valid sampled `tokens` [N] to their rows. Forks are admitted with their tokens."""
        rows, lengths = samples.rows, samples.lengths
        if samples.forks.any():
            continues = samples.forks == 0
            rows, lengths, tokens = rows[continues], lengths[continues], tokens[continues]
        self.tokens[rows, lengths] = tokens
        self.num_known[rows] = lengths + 1  # with several tokens of a row, numpy keeps the last length

    def _gather_slots(
        self, into: StepArrays[NDArray[Any]], row_of: NDArray[np.int64], positions: NDArray[np.int64],
        state_entries: NDArray[np.int64] | int,
    ) -> None:  # fmt: skip
        places, offsets = np.divmod(positions, self.block_size)
        for group, kind in enumerate(self._kinds):
            slots = into.slot_mapping[group, : len(row_of)]
            if kind == "state":
                slots[:] = self.blocks[group, row_of, state_entries]
                continue
            if kind == "cross":  # a step's tokens write nothing to these groups
                slots[:] = -1
                continue
            np.multiply(self.blocks[group, row_of, places], self.block_size, out=slots)
            slots += offsets

    def set_known(self, row: int, count: int) -> None:
        """Have steps read a row's first `count` tokens from `tokens`, and a later token from the device's memory."""
        self.num_known[row] = count

    def _write_draft_tokens(self, rows: Sequence[PlannedRow]) -> None:
        for planned in rows:
            if planned.draft_tokens:
                end = planned.num_computed + planned.num_tokens
                self.tokens[planned.row, end - len(planned.draft_tokens) : end] = planned.draft_tokens
                self.num_known[planned.row] = end

    def forget_draft_tokens(self, rows: Sequence[PlannedRow]) -> None:
        """Undo `_write_draft_tokens`, because no step computes these rows."""
        for planned in rows:
            if planned.draft_tokens:
                self.num_known[planned.row] = planned.num_computed + planned.num_tokens - len(planned.draft_tokens)

    def _gather_samples(
        self,
        rows: Sequence[PlannedRow],
        into: StepArrays[NDArray[Any]],
        starts: NDArray[np.int32],
        seq_lens: NDArray[np.int64],
    ) -> Samples:
        """Return the samples of a plan, and fill `sample_rows`: one sample after each of a row's last
        `num_sampled_positions` tokens, but `num_last_samples` after the last one."""
        num_samples = np.array([planned.num_samples for planned in rows], np.int64)
        num_sampled_positions = np.array([planned.num_sampled_positions for planned in rows], np.int64)
        firsts = np.cumsum(num_samples) - num_samples
        # From sample to sample of a row the position advances; at the last position the fork number does.
        numbers = np.arange(int(num_samples.sum())) - np.repeat(firsts, num_samples)
        last = np.repeat(num_sampled_positions - 1, num_samples)
        forks = np.maximum(numbers - last, 0)
        behind = last - np.minimum(numbers, last)  # tokens between the sampled position and the row's last one
        into.sample_rows[: len(numbers)] = np.repeat(starts[1:] - 1, num_samples) - behind
        return Samples(
            np.repeat(np.array([planned.row for planned in rows], np.int64), num_samples),
            forks,
            np.repeat(seq_lens + self.num_ahead, num_samples) - behind,
            {
                planned.row: (int(first), planned.draft_tokens)
                for planned, first in zip(rows, firsts, strict=True)
                if planned.draft_tokens
            },
        )
