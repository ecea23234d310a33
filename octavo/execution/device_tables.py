"""The tables of a device with memory of its own: block tables, and the last token of each row, which the device knows
before the host does. The runner sends changes with each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from octavo.execution.device import Device
from octavo.execution.sequence_table import GatheredRows, SequenceTable
from octavo.execution.step_arrays import StepArrays
from octavo.ops import Array, DeviceOps, Ops
from octavo.step_plan import PlannedRow, StepPlan

# Changes of block tables: flat places, and their new blocks.
TableUpdates = tuple[NDArray[np.int64], NDArray[np.int32]]

_NO_CHANGES = StepPlan()


class DeviceTables:
    """The device's part of a `SequenceTable`. Tables of state groups are not kept here: the host sends the states'
    blocks with each step."""

    def __init__(self, device: Device, table: SequenceTable) -> None:
        self._table = table
        num_groups, self._num_rows, self._width = table.blocks.shape
        # [groups, rows + 1, width] int32; the last row is padding
        self._blocks = device.zeros([num_groups, self._num_rows + 1, self._width], "int32")
        self._last_tokens = device.zeros([self._num_rows + 1], "int32")  # likewise
        # What the device does not have yet: the changes of one plan, and tables that are sent whole with their rows.
        self._unsent, self._rows_to_resend = _NO_CHANGES, set[int]()
        self._groups = [group for group in range(num_groups) if group not in table.state_groups]

    def note_changes(self, plan: StepPlan) -> None:
        """Have the next step send a plan's changes of block tables, which the `SequenceTable` has by now. Rows with
        older changes that no step has sent will be sent whole."""
        for changes in (self._unsent.admissions, self._unsent.new_blocks):
            self._rows_to_resend.update(entry.row for entry in changes)
        self._unsent = plan

    def updates(self, planned_rows: Sequence[PlannedRow]) -> TableUpdates:
        """Return the changes to send with a step of these rows. `note_sent` must follow once it is submitted."""
        width, num_rows, plan = self._width, self._num_rows + 1, self._unsent
        resent = self._rows_to_resend.intersection(planned.row for planned in planned_rows)
        new = [entry for entry in plan.new_blocks if entry.row not in resent and entry.group in self._groups]
        places = [np.array([(e.group * num_rows + e.row) * width + e.position for e in new], np.int64)]
        blocks = [np.array([entry.block for entry in new], np.int32)]
        lengths = {
            (group, admission.row): len(admission.block_tables[group])
            for admission in plan.admissions
            for group in self._groups
        }
        lengths |= {(group, row): width for row in resent for group in self._groups}
        for (group, row), length in lengths.items():
            first = (group * num_rows + row) * width
            places.append(np.arange(first, first + length))
            blocks.append(self._table.blocks[group, row, :length])
        return np.concatenate(places), np.concatenate(blocks)

    def note_sent(self, planned_rows: Sequence[PlannedRow]) -> None:
        """Note that a step of these rows was submitted with its `updates`."""
        self._unsent = _NO_CHANGES
        if self._rows_to_resend:
            self._rows_to_resend.difference_update(planned.row for planned in planned_rows)

    def fill_table_rows(
        self, plan: StepPlan, arrays: StepArrays[NDArray[Any]], gathered: GatheredRows, updates: TableUpdates
    ) -> None:
        """Fill in the arrays that say which table row each token, sequence and sample belongs to, and the updates of
        block tables."""
        row_of, samples, no_row = gathered.row_of, gathered.samples, self._num_rows
        num_tokens, num_samples = len(row_of), len(samples.rows)
        # The host may not know the last token of a row yet.
        is_unknown = arrays.positions[:num_tokens] + self._table.num_ahead >= self._table.num_known[row_of]
        arrays.pending_token_rows[:num_tokens] = np.where(is_unknown, row_of, no_row)
        arrays.seq_table_rows[: len(plan.rows)] = [planned.row for planned in plan.rows]
        # Forks are admitted with their token, and the host knows accepted draft tokens, so neither needs the device's
        # last token.
        is_kept = (samples.forks == 0) & ~np.isin(samples.rows, list(samples.drafted))
        arrays.sample_table_rows[:num_samples] = np.where(is_kept, samples.rows, no_row)
        places, blocks = updates
        arrays.block_places[: len(places)] = places
        arrays.new_blocks[: len(places)] = blocks

    def resolve(self, ops: Ops, inputs: StepArrays[Array]) -> tuple[Array, Array]:
        """Return the step's token ids [T] and block tables [groups, S, width]."""
        return cast(DeviceOps, ops).resolve_step(
            self._blocks, inputs.block_places, inputs.new_blocks, self._last_tokens, inputs.pending_token_rows,
            inputs.token_ids, inputs.seq_table_rows,
        )  # fmt: skip

    def last_tokens_of(self, table_rows: Array) -> Array:
        """In the stream: return the last tokens of table rows [N]: [N] int32."""
        last_tokens: Any = self._last_tokens
        return cast(Array, last_tokens[table_rows])

    def store_last_tokens(self, ops: Ops, table_rows: Array, tokens: Array) -> None:
        """In the stream: store sampled `tokens` [N] as the last tokens of their table rows [N]."""
        cast(DeviceOps, ops).keep_tokens(self._last_tokens, table_rows, tokens)
