"""The states of a draft model with recurrent layers: two for each row of its table.

A state cannot be undone after a rejected draft token. So one is the state after valid tokens, and the other a copy that
draft tokens change. Accepted draft tokens are computed again, with the next token, in the step that makes the next
draft token. This step reads the weights once, however many tokens it computes. The target model's blocks do not hold
these states, so a sequence that is admitted again begins without a state.
"""

from collections.abc import Iterable

import numpy as np

from octavo.execution.block_mover import BlockMover
from octavo.execution.sequence_table import SequenceTable
from octavo.step_plan import BlockMoves

STATES_PER_ROW = 2


class DraftStates:
    """Chooses the states that the rows of a draft's `table` use; `mover` copies states as blocks of its only pool."""

    def __init__(self, table: SequenceTable, mover: BlockMover) -> None:
        self._table, self._mover = table, mover

    def use_right(self) -> None:
        """Use the states of valid tokens: the next step computes valid tokens."""
        self._use(0)

    def use_copies(self, rows: Iterable[int]) -> None:
        """Use the copies for `rows`: the next step computes draft tokens."""
        num_rows = self._table.max_num_seqs
        self._mover.move([BlockMoves(copy=[(row, num_rows + row) for row in rows])])
        self._use(num_rows)

    def _use(self, first: int) -> None:
        num_rows = self._table.max_num_seqs
        self._table.blocks[self._table.state_groups, :, 0] = np.arange(first, first + num_rows)
