"""Cross attention's inputs: brings an encoder's output into the cache of the sequences that attend to it.

The output is computed once for each distinct medium (`octavo.multimodal.tower`). When the token at a medium's place is
computed, for the first time or after a preemption, the decoder computes keys and values from the output and writes them
to the sequence's blocks, over rows that later tokens do not see.

Requests may ask what tokens attend to (`SamplingParams.alignment_heads`). They get the queries and keys of these heads,
and the front end multiplies them, so that no step waits."""

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
from octavo.request import seen_together
from octavo.step_plan import Admission, StepPlan

_NEVER = np.iinfo(np.int64).max


class _WantedAlignment(NamedTuple):
    """The wanted alignment of a row's prompt."""

    heads: list[tuple[int, int]]  # layer and head
    num_prompt_tokens: int
    blocks: list[int]  # rows of the encoder's output


class AlignmentPart(NamedTuple):
    """Tokens first .. end of a step, whose alignment is wanted; `is_last`: the prompt's last token is among them."""

    row: int
    wanted: _WantedAlignment
    first: int
    end: int
    is_last: bool


class Alignment(NamedTuple):
    """For each wanted head: queries [tokens, D], and, with the prompt's last token, the keys [1, rows, D] of the
    encoder's output; on the device, in float32."""

    queries: list[Array]
    keys: list[Array]

    def fetch_bytes(self, fetch: Callable[[Sequence[Array]], list[NDArray[Any]]]) -> list[bytes]:
        """Return the entries of `StepResult.alignment`: the queries [A, D] of each token, then the keys [A, rows,
        D]."""
        found = [one.tobytes() for one in np.stack(fetch(self.queries), 1)]
        return [*found, b"".join(one.tobytes() for one in fetch(self.keys))] if self.keys else found


class _Medium(NamedTuple):
    """One medium of a row: from a position on, tokens see its rows first .. end of the row's blocks. Rows before belong
    to the media just before it."""

    position: int
    first: int
    end: int
    content_hash: bytes


class CrossOutputs:
    """The encoder outputs of the running sequences. The runner's tables have `num_rows` rows; `groups` are the model's
    cache groups, and `dtype` is its type. From the place of a medium to that of the next, tokens see it and the media
    right before it; steps start at these places."""

    def __init__(
        self, media_rows: MediaRows, groups: tuple[CacheGroup, ...], block_size: int, dtype: str, num_rows: int,
        most_exchanged: int,
    ) -> None:  # fmt: skip
        self._media_rows, self._dtype = media_rows, np.dtype(dtype)
        self._group = next(number for number, group in enumerate(groups) if group.spec.kind == "cross")
        self._block_size, num_tokens = block_size, groups[self._group].spec.num_tokens
        self._most_exchanged = most_exchanged  # rows of one exchange between workers
        self.num_tokens = num_tokens  # the most rows that a token sees
        self._lens = np.ones(num_rows, np.int32)  # number of rows that a row's tokens attend to
        self._starts = np.full(num_rows, _NEVER)  # position of its first token that sees something
        self._ahead: dict[
            int, tuple[list[_Medium], list[int]]
        ] = {}  # by table row: media still to come, and their blocks
        self._wanted: dict[int, _WantedAlignment] = {}  # by row
        self._begun: StepPlan | None = None  # the last plan of `begin_media`
        self._offsets = np.arange(num_tokens) % block_size
        self._blocks = np.arange(num_tokens) // block_size

    @property
    def content_hashes(self) -> set[bytes]:
        """Return the content hashes of media that sequences may still need."""
        return {seen.content_hash for media, _ in self._ahead.values() for seen in media}

    def begin_media(self, plan: StepPlan) -> Iterator[tuple[int, NDArray[Any], NDArray[np.int64]]]:
        """Yield, for each medium at whose place a row of the step starts: the table row, the encoder's output [N, H] in
        the model's type, and the slots [N] int64 of its keys and values. Call this before `gather`, because the step's
        tokens see the output."""
        self._begun = plan
        for planned in plan.rows if self._ahead else ():
            if (ahead := self._ahead.get(planned.row)) is None:
                continue
            media, table = ahead
            if not (passed := [one for one in media if one.position <= planned.num_computed]):
                continue
            seen = passed[-1]
            self._lens[planned.row] = seen.end
            if seen.position == planned.num_computed:
                rows = self._media_rows.rows(seen.content_hash)
                blocks = np.array(table, np.int64)[self._blocks[seen.first : seen.end]]
                slots = blocks * self._block_size + self._offsets[seen.first : seen.end]
                yield planned.row, rows.reshape(-1, rows.shape[-1]).astype(self._dtype), slots

    def no_output(self, hidden_size: int, num_rows: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return an output of `num_rows` rows and its slots, as `begin_media` yields them; the slots are -1, so that
        nothing is written."""
        return np.zeros((num_rows, hidden_size), self._dtype), np.full(num_rows, -1)

    def admit(self, admission: Admission) -> None:
        row = admission.row
        self._lens[row], self._starts[row] = (1, _NEVER)  # no medium yet: the output is zeroed
        self._ahead.pop(row, None)
        if admission.media:
            media = []
            for run in seen_together(admission.media):
                end = 0
                for item in run:
                    first, end = end, end + item.num_rows
                    media.append(_Medium(item.position, first, end, item.content_hash))
            self._ahead[row] = media, admission.block_tables[self._group]
            self._starts[row] = media[0].position
        self._wanted.pop(admission.row, None)
        num_prompt, heads = admission.num_prompt_tokens, admission.params.alignment_heads
        if heads and len(admission.token_ids) == num_prompt:
            self._wanted[admission.row] = _WantedAlignment(heads, num_prompt, admission.block_tables[self._group])

    def gather(self, plan: StepPlan, row_of: NDArray[np.int64], into: StepArrays[NDArray[Any]]) -> None:
        """Fill in the cross-attention arrays of a step whose positions are gathered; `row_of` are the table rows of its
        tokens [T]."""
        assert self._begun is plan, "`begin_media` comes first"
        rows = [planned.row for planned in plan.rows]
        into.cross_lens[: len(rows)] = self._lens[rows]
        positions = into.positions[: len(row_of)]
        into.cross_mask[: len(row_of)] = np.where(positions < self._starts[row_of], 0, -1)

    def alignment_parts(self, plan: StepPlan) -> list[AlignmentPart]:
        """Return the prompt tokens of a step whose alignment is wanted."""
        found = []
        end = 0
        for planned in plan.rows if self._wanted else ():
            first, end = end, end + planned.num_tokens
            if (wanted := self._wanted.get(planned.row)) is not None:
                is_last = planned.num_computed + planned.num_tokens >= wanted.num_prompt_tokens
                found.append(AlignmentPart(planned.row, wanted, first, end, is_last))
        return found

    def note_submitted(self, plan: StepPlan, parts: Sequence[AlignmentPart]) -> None:
        """Note that a plan's step was submitted, with these `alignment_parts`: its media are written, and prompts that
        end with it need no more alignment."""
        for planned in plan.rows if self._ahead else ():
            if (ahead := self._ahead.get(planned.row)) and ahead[0][-1].position <= planned.num_computed:
                del self._ahead[planned.row]
        for part in parts:
            if part.is_last:
                del self._wanted[part.row]

    @contextmanager
    def keeping_queries(self, model: CrossModel) -> Iterator[None]:
        """A context in which the model keeps the queries of a step, for `alignment`."""
        layers = [layer for layer, _ in model.cross_layers]
        for layer in layers:
            layer.keeps_query = True
        try:
            yield
        finally:
            for layer in layers:
                layer.keeps_query = False

    @contextmanager
    def warm_up_alignment(self, model: CrossModel) -> Iterator[None]:
        """A context in which the model computes everything that `alignment` may need, in layers with as many key heads
        as query heads."""
        described = [layer.description for layer, _ in model.cross_layers]
        may_align = all(one.num_heads == one.num_kv_heads for one in described)
        with self.keeping_queries(model) if may_align else nullcontext():
            yield
        for layer, _ in model.cross_layers:
            layer.query = None

    def alignment(
        self, model: CrossModel, parts: Sequence[AlignmentPart], caches: Sequence[LayerKVCache]
    ) -> dict[int, Alignment]:
        """Return, by row, the alignment of the step's tokens. All workers call it, with the same parts."""
        layers = model.cross_layers
        found: dict[int, Alignment] = {}
        for row, wanted, first, end, is_last in parts:
            queries: list[Any] = [layers[layer][0].query for layer, _ in wanted.heads]
            keys: list[Any] = []
            if is_last:
                found_keys: dict[tuple[int, int], Any] = {}
                for number in dict.fromkeys(number for number, _ in wanted.heads):
                    (cross, cache), heads = layers[number], [head for other, head in wanted.heads if other == number]
                    of_layer: Any = cross.keys(caches[cache], wanted.blocks, heads, self._most_exchanged)
                    found_keys |= {(number, head): of_layer[i : i + 1] for i, head in enumerate(heads)}
                keys = [found_keys[pair] for pair in wanted.heads]
            pairs = zip(queries, wanted.heads, strict=True)
            found[row] = Alignment(
                [query[first:end, head] for query, (_, head) in pairs], [one[:, : self.num_tokens] for one in keys]
            )
        for layer, _ in layers:
            layer.query = None
        return found
