"""Tables of adapters' factors on a device. A table has a row of numbers for each slot, by which kernels find factors.

`pack` cuts one adapter's factors for one matrix into pieces that fit pages, on the host; `put` writes the pieces'
addresses to the table. `octavo.ops.triton.lora` computes with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.ops import ExpertsFactors, Factors, FactorShape, LowRank, Whole
from octavo.ops.torch_arrays import DTYPES, to_torch, upload
from octavo.ops.triton import launch
from octavo.ops.triton.tiles import KIND, REPLACES, SCALES, UNIT

PANEL = 64  # number of outputs that a program expands at a time
RANK_UNIT = 8  # ranks are padded to multiples of 8: 16 bytes of 16-bit elements
_PIECE_BYTES = 64 << 10  # bytes of rows in a piece; pieces are larger if A is larger

# A row of `TritonAdapterTable.entries` has addresses (0: none) and numbers: kind, scales, bias; then for each
# projection its rank (in units); then for each projection the address of A; then the addresses of the pieces of B, one
# projection after the other. Products read `KIND` and `SCALES` (see `tiles`). A slot without factors has kind 0.
BIAS, RANKS = 2, 3
ADDS = 1  # the kind of low-rank factors; `REPLACES` is the kind of a replacement


@dataclass(frozen=True, slots=True)
class PackedFactors:
    """One adapter's factors for one matrix: for each projection a [r, K] and pieces of b [n, r], or pieces [n, K] of
    the matrix's replacement; then scales and bias [columns] float32. fields[i] is the field of a table's row that holds
    the address of pieces[i]."""

    numbers: tuple[tuple[int, int], ...]  # (field, value) of fields that are no addresses
    fields: tuple[int, ...]
    pieces: tuple[NDArray[np.uint8], ...]

    @property
    def constant(self) -> tuple[bool, ...]:
        return (True,) * len(self.pieces)

    def with_pieces(self, pieces: Sequence[NDArray[np.uint8]]) -> PackedFactors:
        return replace(self, pieces=tuple(pieces))


class TritonAdapterTable:
    """`AdapterTable` of a device. The adapters' part of a product has a column for each output, one projection after
    the other. In gated matrices, gate and up are padded to whole units, like the matrix's rows."""

    def __init__(self, shape: FactorShape, num_slots: int, dtype: str) -> None:
        self.shape, self.dtype = shape, DTYPES[dtype]
        assert not shape.replaceable or (len(shape.widths) == 1 and not shape.gated)
        self.max_rank = _padded(shape.max_rank, RANK_UNIT)
        self.stride_a = _padded(shape.num_in, 16)  # elements from one row of K to the next
        size = self.dtype.itemsize
        largest_a = self.max_rank * self.stride_a * size
        self.piece_rows = _rows_of_piece(self.max_rank * size, largest_a)
        self.whole_rows = _rows_of_piece(self.stride_a * size, largest_a)
        unit = UNIT.value if shape.gated else 1
        begins = [0, *accumulate(_padded(width, unit) for width in shape.widths)]
        self.begins, self.num_columns = begins[:-1], begins[-1]
        num_projections = len(shape.widths)
        self.first_a = RANKS + num_projections
        self.first_b = self.first_a + num_projections
        counts = [-(-width // self.piece_rows) for width in shape.widths]
        self._pieces_before = [0, *accumulate(counts)]
        most = self._pieces_before[-1]
        if shape.replaceable:
            most = max(most, -(-shape.widths[0] // self.whole_rows))
        self.entry_size = self.first_b + most
        # [panels, 5] int32: projection, first row in it, first column, number of columns, field of the piece
        panels = [
            (i, row, begin + row, min(PANEL, width - row), self.first_b + before + row // self.piece_rows)
            for i, (width, begin, before) in enumerate(
                zip(shape.widths, self.begins, self._pieces_before[:-1], strict=True)
            )
            for row in range(0, width, PANEL)
        ]
        device = launch.device()
        self.panels = torch.tensor(panels, dtype=torch.int32, device=device)
        self.entries = torch.zeros((num_slots, self.entry_size), dtype=torch.int64, device=device)

    def pack(self, factors: Factors, page_bytes: int) -> PackedFactors:
        numbers: list[tuple[int, int]] = []
        pieces: list[tuple[int, Tensor]] = []
        kind = ADDS
        for i, one in enumerate(factors.projections):
            if isinstance(one, Whole):
                assert self.shape.replaceable
                kind = REPLACES
                pieces += self._cut(one.matrix, self.stride_a, self.whole_rows, self.first_b)
            elif isinstance(one, LowRank):
                rank = _padded(len(one.a), RANK_UNIT)
                assert rank <= self.max_rank, "factors of a larger rank than the table was made for"
                numbers.append((RANKS + i, rank // RANK_UNIT))
                a = np.zeros((rank, self.stride_a), np.float32)
                a[: len(one.a), : self.shape.num_in] = one.a
                pieces.append((self.first_a + i, to_torch(a).to(self.dtype)))
                pieces += self._cut(one.b, rank, self.piece_rows, self.first_b + self._pieces_before[i])
        for field, vector in ((SCALES, factors.scales), (BIAS, factors.bias)):
            if vector is not None:
                pieces.append((field, to_torch(self._in_columns(vector))))
        numbers.append((KIND, kind))
        data = tuple(piece.contiguous().reshape(-1).view(torch.uint8).numpy() for _, piece in pieces)
        return PackedFactors(tuple(numbers), tuple(field for field, _ in pieces), data)

    def least_page_bytes(self) -> int:
        return max(self.largest(0)) if not self.shape.replaceable else max(*self.largest(0), self._whole_bytes())

    def largest(self, page_bytes: int) -> list[int]:
        size, sizes = self.dtype.itemsize, []
        for width in self.shape.widths:
            sizes.append(self.max_rank * self.stride_a * size)
            sizes += [
                min(self.piece_rows, width - row) * self.max_rank * size for row in range(0, width, self.piece_rows)
            ]
        return [*sizes, 4 * self.num_columns, 4 * self.num_columns]

    def put(self, slot: int, packed: PackedFactors, arena: Tensor, places: Sequence[int]) -> None:
        self._write(slot, entry_of(self.entry_size, packed, arena, places))

    def clear(self, slot: int) -> None:
        self._write(slot, np.zeros(self.entry_size, np.int64))

    def _write(self, slot: int, entry: NDArray[np.int64]) -> None:
        self.entries[slot] = upload(entry, self.entries.device)

    def _whole_bytes(self) -> int:
        return min(self.whole_rows, self.shape.widths[0]) * self.stride_a * self.dtype.itemsize

    def _cut(self, matrix: NDArray[Any], stride: int, rows: int, first_field: int) -> list[tuple[int, Tensor]]:
        """Return a matrix [n, m] as (field, piece) with `rows` rows in each piece, padded to `stride` columns."""
        padded = np.zeros((len(matrix), stride), np.float32)
        padded[:, : matrix.shape[1]] = matrix
        whole = to_torch(padded).to(self.dtype)
        return [(first_field + i // rows, whole[i : i + rows]) for i in range(0, len(whole), rows)]

    def _in_columns(self, vector: NDArray[Any]) -> NDArray[np.float32]:
        found, row = np.zeros(self.num_columns, np.float32), 0
        for begin, width in zip(self.begins, self.shape.widths, strict=True):
            found[begin : begin + width] = vector[row : row + width]
            row += width
        return found


def entry_of(size: int, packed: PackedFactors, arena: Tensor, places: Sequence[int]) -> NDArray[np.int64]:
    entry, base = np.zeros(size, np.int64), arena.data_ptr()
    for field, number in packed.numbers:
        entry[field] = number
    for field, place in zip(packed.fields, places, strict=True):
        entry[field] = base + place
    return entry


class TritonExpertsTable:
    """`ExpertsAdapterTable` of a device: a table with a slot for each pair, `slot * num_experts + expert`."""

    def __init__(self, shape: FactorShape, num_experts: int, num_slots: int, dtype: str) -> None:
        # Projections that share an A may have the sum of all their ranks.
        whole = replace(shape, max_rank=shape.max_rank * len(shape.widths))
        self.shape, self.num_experts = shape, num_experts
        self.pairs = TritonAdapterTable(whole, num_slots * num_experts, dtype)

    def pack(self, factors: Mapping[int, Factors], page_bytes: int) -> ExpertsFactors[PackedFactors]:
        return ExpertsFactors(tuple((e, self.pairs.pack(one, page_bytes)) for e, one in factors.items()))

    def least_page_bytes(self) -> int:
        return self.pairs.least_page_bytes()

    def largest(self, page_bytes: int) -> list[int]:
        return self.pairs.largest(page_bytes) * self.num_experts

    def put(self, slot: int, packed: ExpertsFactors[PackedFactors], arena: Tensor, places: Sequence[int]) -> None:
        entries, begin = np.zeros((self.num_experts, self.pairs.entry_size), np.int64), 0
        for e, one in packed.experts:
            end = begin + len(one.pieces)
            entries[e] = entry_of(self.pairs.entry_size, one, arena, places[begin:end])
            begin = end
        self._write(slot, entries)

    def clear(self, slot: int) -> None:
        self._write(slot, np.zeros((self.num_experts, self.pairs.entry_size), np.int64))

    def _write(self, slot: int, entries: NDArray[np.int64]) -> None:
        first, there = slot * self.num_experts, self.pairs.entries
        there[first : first + self.num_experts] = upload(entries, there.device)


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _rows_of_piece(row_bytes: int, at_least: int) -> int:
    """Return the number of rows of a piece: whole panels, about as many bytes as a page must have anyway."""
    return max(1, max(_PIECE_BYTES, at_least) // (row_bytes * PANEL)) * PANEL


def allocate_arena(num_bytes: int) -> Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8, device=launch.device())


def adapter_table(shape: FactorShape, num_slots: int, dtype: str) -> TritonAdapterTable:
    return TritonAdapterTable(shape, num_slots, dtype)


def experts_adapter_table(shape: FactorShape, num_experts: int, num_slots: int, dtype: str) -> TritonExpertsTable:
    return TritonExpertsTable(shape, num_experts, num_slots, dtype)
