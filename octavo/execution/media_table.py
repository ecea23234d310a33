"""The media of a step's tokens: rows that replace embeddings, positions in a picture's grid, and how far tokens see
ahead.

A picture in a prompt is a run of placeholder tokens. Their rows come from a tower (`octavo.multimodal.tower`), once for
each distinct picture. A step that computes a part of the run reads that part of the rows, so that prompts may be cut
within a picture, and computed again after a preemption.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.execution.step_arrays import StepArrays
from octavo.models.description import ModelDescription
from octavo.request import MediaItem
from octavo.step_plan import Admission, StepPlan

_AXES = 3  # time, height and width


class MediaRows(Protocol):
    """The media rows of all running requests."""

    def rows(self, content_hash: bytes) -> NDArray[np.float32]:
        """[parts, tokens, H]"""


class MediaTable:
    """The media of the running sequences, by table row."""

    def __init__(self, media_rows: MediaRows, description: ModelDescription, num_rows: int) -> None:
        self._media_rows, self._has_axes, self._sees_ahead = media_rows, description.has_axes, description.sees_ahead
        self._stand_in = description.media_stand_in
        self._items: dict[int, tuple[MediaItem, ...]] = {}
        self._positions: dict[int, NDArray[np.int64]] = {}  # [3, tokens up to the end of the last picture]
        self._shifts = np.zeros(num_rows, np.int64)  # offset of later tokens' positions
        self._prompt_ends: dict[int, int] = {}  # prompt lengths, if tokens see all of their prompt
        # The fields of `StepLimits` that depend on the model.
        self.extents: dict[str, Any] = {
            "media_width": description.hidden_size, "media_parts": 1 + description.num_media_layers,
            "axes": _AXES if description.has_axes else 0, "sees_ahead": bool(description.sees_ahead),
        }  # fmt: skip

    def admit(self, admission: Admission) -> None:
        row, items = admission.row, admission.media
        self._items.pop(row, None)
        self._positions.pop(row, None)
        self._shifts[row] = 0
        if items:
            self._items[row] = items
            if self._has_axes:
                self._positions[row], self._shifts[row] = grid_positions(items)
        if self._sees_ahead == "prompt":
            self._prompt_ends[row] = admission.num_prompt_tokens

    @property
    def content_hashes(self) -> set[bytes]:
        """The content hashes of all sequences' media."""
        return {item.content_hash for items in self._items.values() for item in items}

    def num_rows(self, plan: StepPlan) -> int:
        """Return the number of a step's tokens that have media rows."""
        return sum(end - begin for _, _, begin, end in self._parts(plan))

    def gather(self, plan: StepPlan, row_of: NDArray[np.int64], into: StepArrays[NDArray[Any]]) -> None:
        """Fill in the media arrays of a step whose positions are gathered; `row_of` are the table rows of its tokens
        [T]."""
        num_tokens = len(row_of)
        into.media_indices[:num_tokens] = -1
        count = 0
        for item, first, begin, end in self._parts(plan):
            size = end - begin
            into.media_rows[:, count : count + size] = self._media_rows.rows(item.content_hash)[:, begin:end]
            into.media_indices[first : first + size] = np.arange(count, count + size)
            if self._stand_in is not None:
                into.token_ids[first : first + size] = self._stand_in
            count += size
        if self._has_axes:
            self._gather_positions(plan, row_of, into)
        if self._sees_ahead:
            self._gather_key_ends(plan, num_tokens, into)

    def _gather_positions(self, plan: StepPlan, row_of: NDArray[np.int64], into: StepArrays[NDArray[Any]]) -> None:
        num_tokens = len(row_of)
        into.axis_positions[:, :num_tokens] = into.positions[:num_tokens] + self._shifts[row_of]
        if not self._positions:
            return
        first = 0
        for planned in plan.rows:
            found, start = self._positions.get(planned.row), planned.num_computed
            if found is not None and start < found.shape[1]:
                part = found[:, start : start + planned.num_tokens]
                into.axis_positions[:, first : first + part.shape[1]] = part
            first += planned.num_tokens

    def _gather_key_ends(self, plan: StepPlan, num_tokens: int, into: StepArrays[NDArray[Any]]) -> None:
        into.key_ends[:num_tokens] = 0
        if self._sees_ahead == "picture":
            for item, first, begin, end in self._parts(plan):
                into.key_ends[first : first + end - begin] = item.position + item.num_tokens
            return
        first = 0
        for planned in plan.rows:
            prompt_end = self._prompt_ends[planned.row]
            size = min(planned.num_tokens, max(prompt_end - planned.num_computed, 0))
            into.key_ends[first : first + size] = prompt_end
            first += planned.num_tokens

    def _parts(self, plan: StepPlan) -> Iterator[tuple[MediaItem, int, int, int]]:
        """Yield, for each medium that the step computes a part of: the step's first token of it, and the rows begin ..
        end of the medium."""
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


def grid_positions(items: Sequence[MediaItem]) -> tuple[NDArray[np.int64], int]:
    """Return the positions in time, height and width of a prompt's tokens up to the end of its last picture, [3,
    tokens], and the offset of later tokens' positions (Wang et al. 2024, arXiv 2409.12191, section 2.1).

    A text token has the same position three times, one more than the largest before it. A picture's tokens count from
    there on along each axis.
    """
    last = items[-1]
    found = np.empty((_AXES, last.position + last.num_tokens), np.int64)
    place = position = 0  # of the next token
    for item in items:
        assert item.grid is not None
        num_text, end = item.position - place, item.position + item.num_tokens
        found[:, place : item.position] = position + np.arange(num_text)
        position += num_text
        places = np.indices(item.grid).reshape(_AXES, -1)
        places[0] = (places[0].astype(np.float32) * np.float32(item.time_step)).astype(np.int64)  # rounded down
        found[:, item.position : end] = position + places
        position += int(places.max()) + 1
        place = end
    return found, position - place
