"""What cross attention reads of a sequence, on its way from the other network's output to the cache.

That output is computed once for each distinct medium (`octavo.multimodal.tower`). When a sequence takes a row of the
runner's tables with nothing computed yet, at first or after a preemption that has given its blocks up, the decoder
makes keys and values of it and writes them to the blocks that the sequence has for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.execution.media_table import MediaRows
from octavo.kv_cache.groups import CacheGroup
from octavo.plan import StepPlan


class CrossOutputs:
    """Of the sequences of a plan; `groups` are the model's, which computes in `dtype` on the host."""

    def __init__(self, found: MediaRows, groups: tuple[CacheGroup, ...], block_size: int, dtype: str) -> None:
        self._found, self._dtype = found, np.dtype(dtype)
        self._group = next(number for number, group in enumerate(groups) if group.spec.kind == "cross")
        self._block_size, num_tokens = block_size, groups[self._group].spec.num_tokens
        self._offsets = np.arange(num_tokens) % block_size
        self._blocks = np.arange(num_tokens) // block_size

    def starting(self, plan: StepPlan) -> Iterator[tuple[NDArray[Any], NDArray[np.int64]]]:
        """Of each sequence that starts: the output [N, H] in the model's type, and the slots [N] of what is made
        of it."""
        starts = {planned.row for planned in plan.rows if not planned.num_computed}
        for admission in plan.admissions:
            if admission.row in starts:
                [item] = admission.media
                blocks = np.array(admission.block_tables[self._group], np.int64)[self._blocks]
                rows = self._found.rows(item.content_hash).astype(self._dtype)
                yield rows, blocks * self._block_size + self._offsets
