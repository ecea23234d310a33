"""The states of a draft model's layers, where it has such: two for each row of its table.

A state cannot take back what a wrong guess did to it. So one is the state after tokens that are known to be right, and
the other a copy that guesses change. Those that were right are computed again, with the next token, in the step that
brings the next guess: it reads the weights once, whatever it has of them. Blocks of the model that serves say nothing
of these states, so that a sequence that is admitted anew begins without one.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from octavo.execution.block_mover import BlockMover
from octavo.execution.sequence_table import SequenceTable
from octavo.plan import BlockMoves

STATES_PER_ROW = 2


class DraftStates:
    """Which states the rows of a draft's `table` use; `mover` copies them, as blocks of its one pool."""

    def __init__(self, table: SequenceTable, mover: BlockMover) -> None:
        self._table, self._mover = table, mover

    def use_right(self) -> None:
        """What is computed next is known to be right."""
        self._use(0)

    def use_copies(self, rows: Iterable[int]) -> None:
        """What is computed next are guesses, of `rows`."""
        num_rows = self._table.max_num_seqs
        self._mover.move([BlockMoves(copy=[(row, num_rows + row) for row in rows])])
        self._use(num_rows)

    def _use(self, first: int) -> None:
        num_rows = self._table.max_num_seqs
        self._table.blocks[self._table.state_groups, :, 0] = np.arange(first, first + num_rows)
