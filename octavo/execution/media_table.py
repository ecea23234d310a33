"""Which rows of media the tokens of a step have in the place of their embeddings.

A prompt's picture is a run of placeholder tokens. The rows that stand there come of a tower, `octavo.multimodal.tower`,
once for each distinct picture; a step that computes any part of the run reads that part of them, so prompts may be cut
within a picture, and computed again after a preemption.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.execution.step_arrays import StepArrays
from octavo.plan import Admission, StepPlan
from octavo.request import MediaItem


class MediaRows(Protocol):
    """Rows of the media of all requests that are under way."""

    def rows(self, content_hash: bytes) -> NDArray[np.float32]:
        """[tokens, H]"""
        ...


class MediaTable:
    """The media of the running sequences, by their row of the runner's tables."""

    def __init__(self, found: MediaRows, width: int) -> None:
        self.width = width  # H
        self._found = found
        self._items: dict[int, tuple[MediaItem, ...]] = {}

    def admit(self, admission: Admission) -> None:
        self._items.pop(admission.row, None)
        if admission.media:
            self._items[admission.row] = admission.media

    def num_rows(self, plan: StepPlan) -> int:
        """How many tokens of a step have such rows."""
        return sum(end - begin for _, _, begin, end in self._parts(plan))

    def gather(self, plan: StepPlan, into: StepArrays[NDArray[Any]]) -> None:
        """Fill in the rows, and which token has which."""
        into.media_indices[: sum(planned.num_tokens for planned in plan.rows)] = -1
        count = 0
        for item, first, begin, end in self._parts(plan):
            size = end - begin
            into.media_rows[count : count + size] = self._found.rows(item.content_hash)[begin:end]
            into.media_indices[first : first + size] = np.arange(count, count + size)
            count += size

    def _parts(self, plan: StepPlan) -> Iterator[tuple[MediaItem, int, int, int]]:
        """Of each medium of which the step computes a part: the token of the step where that begins, and which of the
        medium's rows it is, begin .. end."""
        if not self._items:
            return
        first = 0
        for planned in plan.rows:
            start, stop = planned.num_computed, planned.num_computed + planned.num_tokens
            for item in self._items.get(planned.row, ()):
                begin = max(start, item.position)
                end = min(stop, item.position + item.num_tokens)
                if begin < end:
                    row = item.first_row - item.position
                    yield item, first + begin - start, begin + row, end + row
            first += planned.num_tokens
