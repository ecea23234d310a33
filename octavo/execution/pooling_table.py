"""Which tokens to pool, for each running sequence, and a step's arrays gathered from this table."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.execution.step_arrays import StepArrays
from octavo.step_plan import Admission, RowColumns, StepPlan

# Which tokens of a text are pooled: each one, the first one, or all of them.
_SINGLE, _FIRST, _WHOLE = range(3)
_CODES = {"ALL": _SINGLE, "LAST": _SINGLE, "CLS": _FIRST}


class PoolingTable:
    """One entry for each row of the runner's tables."""

    def __init__(self, num_rows: int) -> None:
        self._codes = np.zeros(num_rows, np.int64)
        self._num_skipped = np.zeros(num_rows, np.int64)  # number of tokens of an instruction, which are not pooled
        self._second_starts = np.zeros(num_rows, np.int64)  # first position of the second text

    def admit(self, admission: Admission) -> None:
        row, params, num_tokens = admission.row, admission.pooling, len(admission.token_ids)
        assert params is not None
        self._codes[row] = code = _CODES.get(params.kind, _WHOLE)
        self._num_skipped[row] = min(params.num_skipped, num_tokens - 1) if code == _WHOLE else 0
        self._second_starts[row] = num_tokens if admission.second_start is None else admission.second_start

    def gather(self, plan: StepPlan, into: StepArrays[NDArray[Any]]) -> None:
        """Fill `pool_starts` and `token_types`, and set `sample_rows` to the last token of each pooled range. The
        sequence table has gathered the rest."""
        columns = RowColumns.of(plan.rows)
        rows, counts = np.array(columns.row, np.int64), np.array(columns.num_tokens, np.int64)
        positions, num_samples = np.array(columns.num_sampled_positions, np.int64), sum(columns.num_sampled_positions)
        types = into.token_types[: sum(columns.num_tokens)]
        np.greater_equal(into.positions[: len(types)], np.repeat(self._second_starts[rows], counts), out=types)
        into.pool_starts[:num_samples] = into.sample_rows[:num_samples]
        firsts = np.cumsum(positions) - positions  # the first sample of each row
        codes = self._codes[rows]
        is_long = (codes != _SINGLE) & (positions > 0)
        starts = into.query_start_loc[: len(rows)] + self._num_skipped[rows]
        into.pool_starts[firsts[is_long]] = starts[is_long]
        is_first = (codes == _FIRST) & (positions > 0)
        into.sample_rows[firsts[is_first]] = starts[is_first]
