"""What cross attention reads of a sequence, on its way from the other network's output to the cache.

That output is computed once for each distinct medium (`octavo.multimodal.tower`). When the token in a medium's place is
computed, for the first time or after a preemption that has given the sequence's blocks up, the decoder makes keys and
values of it and writes them to the blocks that the sequence has for them: in the place of what no token sees any more.

What tokens attend to there is told of requests that ask for it (`SamplingParams.alignment_heads`), as the queries and
keys of those heads: to multiply them is left to who asks, so that no step waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.execution.media_table import MediaRows
from octavo.execution.step_arrays import StepArrays
from octavo.kv_cache.groups import CacheGroup
from octavo.models.registry import CrossModel
from octavo.ops import Array, LayerKVCache
from octavo.plan import Admission, StepPlan
from octavo.request import seen_together

_NEVER = np.iinfo(np.int64).max


class _Wish(NamedTuple):
    """Of a row whose prompt's cross attention is wanted."""

    heads: list[tuple[int, int]]  # layer and head
    num_prompt_tokens: int
    blocks: list[int]  # of the other network's output


class AlignedPart(NamedTuple):
    """Tokens first .. end of a step, which are such a row's; the prompt's last is among them or not."""

    row: int
    wish: _Wish
    first: int
    end: int
    is_last: bool


class Alignment(NamedTuple):
    """On the device, in float32, of the heads that are wanted: queries [tokens, D], and with the prompt's last token
    keys [1, rows, D] of the other network's output."""

    queries: list[Array]
    keys: list[Array]

    def told(self, fetch: Callable[[Sequence[Array]], list[NDArray[Any]]]) -> list[bytes]:
        """As `StepResult.alignment` has it: the queries [A, D] of each token, and the keys [A, rows, D]."""
        found = [one.tobytes() for one in np.stack(fetch(self.queries), 1)]
        return [*found, b"".join(one.tobytes() for one in fetch(self.keys))] if self.keys else found


class _Seen(NamedTuple):
    """What the tokens of a row see from a position on: rows first .. end of its blocks are of one medium, those before
    are of media whose places are just before its own."""

    position: int
    first: int
    end: int
    content_hash: bytes


class CrossOutputs:
    """Of the sequences of a plan, in the runner's tables of `num_rows`; `groups` are the model's, which computes in
    `dtype`. The tokens from a medium's place on see it, and those that stand right before it, up to the next one's
    place; steps start at these places."""

    def __init__(
        self, found: MediaRows, groups: tuple[CacheGroup, ...], block_size: int, dtype: str, num_rows: int,
        most_exchanged: int,
    ) -> None:  # fmt: skip
        self._found, self._dtype = found, np.dtype(dtype)
        self._group = next(number for number, group in enumerate(groups) if group.spec.kind == "cross")
        self._block_size, num_tokens = block_size, groups[self._group].spec.num_tokens
        self._most_exchanged = most_exchanged  # rows that workers bring each other at once
        self.num_tokens = num_tokens  # of what a token sees, at most
        self._lens = np.ones(num_rows, np.int32)  # what a row's tokens attend to
        self._starts = np.full(num_rows, _NEVER)  # the first of them that sees something
        self._ahead: dict[int, tuple[list[_Seen], list[int]]] = {}  # of rows that may come to media, and their blocks
        self._wishes: dict[int, _Wish] = {}  # by row
        self._offsets = np.arange(num_tokens) % block_size
        self._blocks = np.arange(num_tokens) // block_size

    @property
    def content_hashes(self) -> set[bytes]:
        """Of the media that sequences may still come to."""
        return {seen.content_hash for media, _ in self._ahead.values() for seen in media}

    def starting(self, plan: StepPlan) -> Iterator[tuple[int, NDArray[Any], NDArray[np.int64]]]:
        """Of each medium at whose place a sequence's part of the step starts: the sequence's row of the tables, the
        output [N, H] in the model's type, and the slots [N] int64 of what is made of it. The step's tokens see what
        there is then: `gather` comes after."""
        for planned in plan.rows if self._ahead else ():
            if (ahead := self._ahead.get(planned.row)) is None:
                continue
            media, table = ahead
            if not (passed := [one for one in media if one.position <= planned.num_computed]):
                continue
            seen = passed[-1]
            self._lens[planned.row] = seen.end
            if seen.position == planned.num_computed:
                rows = self._found.rows(seen.content_hash)
                blocks = np.array(table, np.int64)[self._blocks[seen.first : seen.end]]
                slots = blocks * self._block_size + self._offsets[seen.first : seen.end]
                yield planned.row, rows.reshape(-1, rows.shape[-1]).astype(self._dtype), slots

    def nothing(self, hidden_size: int, num_rows: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """An output of so many rows that is written nowhere, and its slots, as `starting` has them."""
        return np.zeros((num_rows, hidden_size), self._dtype), np.full(num_rows, -1)

    def admit(self, admission: Admission) -> None:
        row = admission.row
        self._lens[row], self._starts[row] = (1, _NEVER)  # without an image: the output is zeroed
        self._ahead.pop(row, None)
        if admission.media:
            media = []
            for run in seen_together(admission.media):
                end = 0
                for item in run:
                    first, end = end, end + item.num_rows
                    media.append(_Seen(item.position, first, end, item.content_hash))
            self._ahead[row] = media, admission.block_tables[self._group]
            self._starts[row] = media[0].position
        self._wishes.pop(admission.row, None)
        num_prompt, heads = admission.num_prompt_tokens, admission.params.alignment_heads
        if heads and len(admission.token_ids) == num_prompt:
            self._wishes[admission.row] = _Wish(heads, num_prompt, admission.block_tables[self._group])

    def gather(self, plan: StepPlan, row_of: NDArray[np.int64], into: StepArrays[NDArray[Any]]) -> None:
        """Fill in a step whose tokens' positions and rows of the runner's tables [T] are known."""
        rows = [planned.row for planned in plan.rows]
        into.cross_lens[: len(rows)] = self._lens[rows]
        positions = into.positions[: len(row_of)]
        into.cross_mask[: len(row_of)] = np.where(positions < self._starts[row_of], 0, -1)

    def aligned(self, plan: StepPlan) -> list[AlignedPart]:
        """The prompt tokens of a step whose cross attention is wanted."""
        found = []
        end = 0
        for planned in plan.rows if self._wishes else ():
            first, end = end, end + planned.num_tokens
            if (wish := self._wishes.get(planned.row)) is not None:
                is_last = planned.num_computed + planned.num_tokens >= wish.num_prompt_tokens
                found.append(AlignedPart(planned.row, wish, first, end, is_last))
        return found

    def submitted(self, plan: StepPlan, parts: Sequence[AlignedPart]) -> None:
        """The device has been given the step of a plan, of which `aligned` has told these parts: what has started has
        its output, and of prompts that end with it nothing more is wanted."""
        for planned in plan.rows if self._ahead else ():
            if (ahead := self._ahead.get(planned.row)) and ahead[0][-1].position <= planned.num_computed:
                del self._ahead[planned.row]
        for part in parts:
            if part.is_last:
                del self._wishes[part.row]

    @contextmanager
    def keeping_queries(self, model: CrossModel) -> Iterator[None]:
        """Meanwhile the model computes a step, after which `alignment` is to be called."""
        layers = [layer for layer, _ in model.cross_layers]
        for layer in layers:
            layer.keeps_query = True
        try:
            yield
        finally:
            for layer in layers:
                layer.keeps_query = False

    @contextmanager
    def trying_alignment(self, model: CrossModel) -> Iterator[None]:
        """Meanwhile the model computes all that `alignment` may ask for: of layers with as many heads of keys as of
        queries."""
        described = [layer.description for layer, _ in model.cross_layers]
        may_align = all(one.num_heads == one.num_kv_heads for one in described)
        with self.keeping_queries(model) if may_align else nullcontext():
            yield
        for layer, _ in model.cross_layers:
            layer.query = None

    def alignment(
        self, model: CrossModel, parts: Sequence[AlignedPart], caches: Sequence[LayerKVCache]
    ) -> dict[int, Alignment]:
        """By row, what its tokens of the step attend to. All workers call it, for the same parts."""
        layers = model.cross_layers
        found: dict[int, Alignment] = {}
        for row, wish, first, end, is_last in parts:
            queries: list[Any] = [layers[layer][0].query for layer, _ in wish.heads]
            keys: list[Any] = []
            if is_last:
                found_keys: dict[tuple[int, int], Any] = {}
                for number in dict.fromkeys(number for number, _ in wish.heads):
                    (cross, cache), heads = layers[number], [head for other, head in wish.heads if other == number]
                    of_layer: Any = cross.keys(caches[cache], wish.blocks, heads, self._most_exchanged)
                    found_keys |= {(number, head): of_layer[i : i + 1] for i, head in enumerate(heads)}
                keys = [found_keys[wished] for wished in wish.heads]
            pairs = zip(queries, wish.heads, strict=True)
            found[row] = Alignment(
                [query[first:end, head] for query, (_, head) in pairs], [one[:, : self.num_tokens] for one in keys]
            )
        for layer, _ in layers:
            layer.query = None
        return found
