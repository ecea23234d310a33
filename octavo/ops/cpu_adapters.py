"""LoRA adapters of the native backend: packing of factors A and B for the kernels, and the product x A^T (`shrink`).

The product with B is part of the base product's epilogue (csrc/cpu/epilogue.h): `linear` and its kin take an `Expand`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

import octavo._cpu as _cpu
from octavo.ops import AdapterTable, Expand, ExpandExperts, Factors, FactorShape, LinearWeight, Lookup, LowRank, Whole
from octavo.ops.cpu_arrays import CODES, DTYPES, FLOAT32, INT32, UINT8, address, code_of, is_dense, require, stride
from octavo.ops.cpu_memory import empty_pages
from octavo.ops.cpu_program import check_inputs, empty

_ADDRESSES = ("a", "b", "panels", "scales", "bias")
_FACTORS = np.dtype([*((name, "u8") for name in _ADDRESSES), ("rank", "i4"), ("replaces", "i4")])
_LANE = np.dtype(np.uint32)  # one float32, or two bfloat16 that are neighbours
_ALIGNMENT = 64
_PANEL = np.dtype([("offset", "i8"), ("first", "i4"), ("count", "i4")])


@dataclass(frozen=True, slots=True)
class PackedFactors:
    """One adapter's factors for one matrix, as the kernels read them. fields[i] names the field of AdapterFactors that
    points to pieces[i]. B may have several pieces, each of whole panels."""

    rank: int  # of all projections together, padded
    replaces: bool
    fields: tuple[str, ...]
    pieces: tuple[NDArray[np.uint8], ...]
    owners: NDArray[np.intp]  # for each panel of B: the index of its piece
    offsets: NDArray[np.int64]  # for each panel of B: its offset within the piece, in elements

    @property
    def constant(self) -> tuple[bool, ...]:
        return tuple(name != "panels" for name in self.fields)  # the panel table changes: `put` writes where B lies

    def with_pieces(self, pieces: Sequence[NDArray[np.uint8]]) -> PackedFactors:
        return replace(self, pieces=tuple(pieces))


class CpuAdapterTable:
    """`AdapterTable` in memory that the kernels read: csrc/cpu/lora_args.h's AdapterFactors, by slot."""

    def __init__(self, shape: FactorShape, num_slots: int, dtype: str) -> None:
        self.shape, self.num_slots = shape, num_slots
        self.dtype = DTYPES[dtype]
        self.code = CODES[self.dtype]
        self._step = 1 if self.dtype == FLOAT32 else 2  # elements of a lane
        self.factors = np.zeros(num_slots, _FACTORS)
        self._from_column = {0: self.factors}
        self.width = len(shape.widths) * self._padded(shape.max_rank)
        if shape.replaceable:
            require(len(shape.widths) == 1 and not shape.gated)
            self.width = max(self.width, self._padded(shape.num_in))
        self._outputs = _packed_outputs(shape)
        first, last = _projections(shape, self._outputs)
        self._shares_panels = bool((first != last).any())

    def _padded(self, rank: int) -> int:
        return -(-rank // self._step) * self._step

    def pack(self, factors: Factors, page_bytes: int) -> PackedFactors:
        if isinstance(factors.projections[0], Whole):
            return self._pack_whole(factors.projections[0].matrix, factors.bias, page_bytes)
        found = [one if isinstance(one, LowRank) else None for one in factors.projections]
        ranks = tuple(0 if one is None else len(one.a) for one in found)
        # Fused projections may share one A, which is packed once.
        is_shared = len(found) > 1 and all(one is not None and _is_same(one, found[0]) for one in found)
        layout = _layout(self.shape, self._step, ranks, is_shared, page_bytes)
        require(layout.rank <= self.width, "factors of larger ranks than the table was made for")
        pieces: list[tuple[str, NDArray[Any]]] = []
        if layout.rank:
            pieces.append(("a", self._pack_a(found[: 1 if is_shared else None], layout)))
        owners = layout.owners + len(pieces)
        parts = [np.zeros(words, _LANE) for words in layout.part_words]
        for one, places in zip(found, layout.places, strict=True):
            if one is not None:
                for number, of_part in places:
                    self._deal_out(one.b, of_part, parts[number], _cpu.PANEL)
        pieces += [("b", part) for part in parts]
        pieces.append(("panels", layout.panels))
        for name, vector in (("scales", factors.scales), ("bias", factors.bias)):
            if vector is not None:
                pieces.append((name, self._packed_vector(vector, np.float32(name == "scales"))))
        return _packed(layout.rank, False, pieces, owners, layout.offsets)

    def _pack_a(self, factors: Sequence[LowRank | None], layout: _Layout) -> NDArray[Any]:
        """Return the A factors of all projections, stacked: [panel][K / step][FACTOR_PANEL][step], padded with zeros.
        For a matrix whose rows are looked up, A stays [R, K]."""
        k, lanes = self.shape.num_in, _cpu.FACTOR_PANEL
        words = -(-k // self._step)
        is_plain = self.shape.is_embedding
        plain = np.zeros((layout.rank if is_plain else 0, k), self.dtype)
        out = np.zeros(0 if is_plain else -(-layout.rank // lanes) * lanes * words, _LANE)
        for one, start in zip(factors, layout.starts, strict=False):
            if one is None:
                continue
            if is_plain:
                plain[start : start + len(one.a)] = one.a
            else:
                rows = np.arange(start, start + len(one.a))
                self._deal_out(one.a, rows // lanes * (words * lanes) + rows % lanes, out, lanes)
        return plain if is_plain else out

    def _deal_out(self, rows: NDArray[np.float32], places: NDArray[np.int64], out: NDArray[Any], lanes: int) -> None:
        rows = np.ascontiguousarray(rows, np.float32)
        _cpu.pack_factor_rows(
            source=rows, stride=rows.shape[1], rows=rows.shape[0], columns=rows.shape[1], places=places, out=out,
            lanes=lanes, dtype=self.code,
        )  # fmt: skip

    def _pack_whole(self, matrix: NDArray[Any], bias: NDArray[Any] | None, page_bytes: int) -> PackedFactors:
        """Pack matrix [N, K], which replaces the base's matrix, as a B without A. A piece has as many panels as fit in
        a page, at least one."""
        require(self.shape.replaceable and matrix.shape == (sum(self.shape.widths), self.shape.num_in))
        count = self._padded(self.shape.num_in)
        outputs = self._outputs.reshape(-1, _cpu.PANEL)
        panels = np.zeros(len(outputs), _PANEL)
        panels["count"] = count
        panels["offset"] = np.arange(len(outputs)) * (_cpu.PANEL * count)
        most = max(1, page_bytes // (_cpu.PANEL * count * self.dtype.itemsize))
        pieces: list[tuple[str, NDArray[Any]]] = []
        for begin in range(0, len(outputs), most):
            rows = outputs[begin : begin + most]
            block = np.zeros((*rows.shape, count), self.dtype)
            block[..., : matrix.shape[1]] = matrix[rows]
            block[rows < 0] = 0
            pieces.append(("b", _as_lanes(block)))
        numbers = np.arange(len(outputs))
        owners, offsets = numbers // most, numbers % most * (_cpu.PANEL * count)
        pieces.append(("panels", panels))
        if bias is not None:
            pieces.append(("bias", self._packed_vector(bias, np.float32(0))))
        return _packed(count, True, pieces, owners, offsets)

    def _packed_vector(self, vector: NDArray[Any], filler: np.float32) -> NDArray[Any]:
        return np.where(self._outputs < 0, filler, vector.astype(np.float32)[self._outputs])

    def least_page_bytes(self) -> int:
        _, panels, vector = self._sizes()
        shared = len(self.shape.widths) if self._shares_panels else 1
        panel = _cpu.PANEL * self._padded(self.shape.max_rank) * shared * self.dtype.itemsize
        whole = _cpu.PANEL * self._padded(self.shape.num_in) * self.dtype.itemsize if self.shape.replaceable else 0
        return int(max(self._sizes()[0], panels, vector, panel, whole))

    def largest(self, page_bytes: int) -> list[int]:
        a, panels, vector = self._sizes()
        shared = len(self.shape.widths) if self._shares_panels else 1
        panel = _cpu.PANEL * self._padded(self.shape.max_rank) * shared * self.dtype.itemsize
        most, count = max(1, page_bytes // panel), panels // _PANEL.itemsize
        b = [panel * min(most, count - begin) for begin in range(0, count, most)]
        return [a, *b, panels, vector, vector]

    def _sizes(self) -> tuple[int, int, int]:
        """Return the largest number of bytes of A, of the panel table, and of a vector over outputs."""
        outputs, words = len(self._outputs), -(-self.shape.num_in // self._step) * self._step
        a = -(-self.width // _cpu.FACTOR_PANEL) * _cpu.FACTOR_PANEL * words * self.dtype.itemsize
        return a, outputs // _cpu.PANEL * _PANEL.itemsize, outputs * 4

    def put(self, slot: int, packed: PackedFactors, arena: NDArray[np.uint8], places: Sequence[int]) -> None:
        base = address(arena)
        entry = {name: base + place for name, place in zip(reversed(packed.fields), reversed(places), strict=True)}
        if packed.fields.count("b") > 1:  # the pieces of B may lie anywhere: offsets count from the first piece
            number, at = packed.fields.index("panels"), np.array(places, np.int64)
            table = arena[places[number] : places[number] + packed.pieces[number].nbytes].view(_PANEL)
            offsets = (at[packed.owners] - at[packed.fields.index("b")]) // self.dtype.itemsize + packed.offsets
            table["offset"] = np.where(table["count"] > 0, offsets, 0)
        for column, factors in self._from_column.items():
            moved = {name: at + int(column * _OUTPUT_BYTES.get(name, 0)) for name, at in entry.items()}
            factors[slot] = (*(moved.get(name, 0) for name in _ADDRESSES), packed.rank, packed.replaces)

    def clear(self, slot: int) -> None:
        for factors in self._from_column.values():
            factors[slot] = np.zeros((), _FACTORS)

    def factors_from(self, column: int) -> NDArray[Any]:
        """Return the factors by slot for a part of a stack whose first output is output `column` of the whole.
        `column` must be the first output of a panel."""
        if column not in self._from_column:
            require(column % _cpu.PANEL == 0)
            self._from_column[column] = _moved(self.factors, column)
        return self._from_column[column]


@dataclass(frozen=True, slots=True)
class _Layout:
    """The positions of packed factors. All adapters with the same ranks share one layout."""

    rank: int  # of all projections together, padded
    starts: tuple[int, ...]  # for each projection: its first row of A
    panels: NDArray[Any]  # the panel table of B; offsets count within a piece
    part_words: tuple[int, ...]  # for each piece of B: its size in words
    owners: NDArray[np.intp]  # for each panel: the index of its piece
    offsets: NDArray[np.int64]  # for each panel: its offset within the piece, in elements
    # For each projection, (piece, words): the first word of each output in this piece, -1 for outputs in other pieces.
    places: tuple[tuple[tuple[int, NDArray[np.int64]], ...], ...]


@lru_cache(256)
def _layout(shape: FactorShape, step: int, ranks: tuple[int, ...], is_shared: bool, page_bytes: int) -> _Layout:
    """Return the layout for projections of these `ranks`. With `is_shared` all projections have the same A.

    B is cut into pieces of at most `page_bytes` (one panel at least). A word of 32 bits holds `step` elements."""
    padded = [-(-rank // step) * step for rank in ranks]
    if is_shared:
        padded = [padded[0], *[0] * (len(ranks) - 1)]
    starts = [0, *accumulate(padded)]
    # The columns of the stacked A that belong to each projection.
    begins, ends = np.array(starts[:-1], np.intp), np.array(starts[1:], np.intp)
    if is_shared:
        begins, ends = np.zeros_like(begins), np.full_like(ends, starts[-1])
    outputs = _packed_outputs(shape)
    first, last = _projections(shape, outputs)
    panels = np.zeros(len(first), _PANEL)
    panels["first"], panels["count"] = begins[first], ends[last] - begins[first]
    words = panels["count"].astype(np.int64) // step * _cpu.PANEL
    owners, offsets = np.zeros(len(panels), np.intp), np.zeros(len(panels), np.int64)
    part_words: list[int] = []
    begin = 0
    while begin < len(panels):
        room = page_bytes // _LANE.itemsize
        end = begin + max(1, int(np.searchsorted(np.cumsum(words[begin:]), room, "right")))
        owners[begin:end] = len(part_words)
        offsets[begin:end] = (np.cumsum(words[begin:end]) - words[begin:end]) * step
        part_words.append(int(words[begin:end].sum()))
        begin = end
    columns = np.empty(sum(shape.widths), np.int64)  # for each output: its column of the packed matrix
    columns[outputs[outputs >= 0]] = np.flatnonzero(outputs >= 0)
    places = []
    for i, of_one in enumerate(np.split(columns, np.cumsum(shape.widths)[:-1])):
        panel = of_one // _cpu.PANEL
        at = offsets[panel] // step + (begins[i] - panels["first"][panel]) // step * _cpu.PANEL + of_one % _cpu.PANEL
        by_part = [(number, np.where(owners[panel] == number, at, -1)) for number in np.unique(owners[panel])]
        places.append(tuple((int(number), of_part) for number, of_part in by_part))
    panels["offset"] = np.where(panels["count"] > 0, offsets, 0)
    if not starts[-1]:
        part_words = []
    for array in (panels, owners, offsets):
        array.flags.writeable = False
    return _Layout(starts[-1], tuple(starts[:-1]), panels, tuple(part_words), owners, offsets, tuple(places))


def _packed(
    rank: int, replaces: bool, pieces: Sequence[tuple[str, NDArray[Any]]], owners: NDArray[Any], offsets: NDArray[Any]
) -> PackedFactors:
    data = tuple(np.ascontiguousarray(piece).reshape(-1).view(UINT8) for _, piece in pieces)
    return PackedFactors(rank, replaces, tuple(name for name, _ in pieces), data, owners, offsets)


def _as_lanes(panels: NDArray[Any]) -> NDArray[Any]:
    """Return panels [panels, PANEL, K] as [panels, PANEL * K], with the words of neighbouring outputs side by side."""
    lanes = panels.view(_LANE).swapaxes(1, 2)
    return np.ascontiguousarray(lanes).reshape(len(panels), -1).view(panels.dtype)


def _is_same(one: LowRank, other: LowRank | None) -> bool:
    """Return whether both have the same A in the same memory."""
    return other is not None and one.a.shape == other.a.shape and np.shares_memory(one.a, other.a)


@dataclass(frozen=True, slots=True)
class PackedExpertFactors:
    """One adapter's factors for a stack of experts. The experts' arrays are joined into pieces of up to a page each.

    owners[field][e] is the piece that holds this field of expert e, or -1; offsets[field][e] is its offset there, in
    bytes."""

    ranks: NDArray[np.int32]  # [experts]
    owners: dict[str, NDArray[np.intp]]
    offsets: dict[str, NDArray[np.int64]]
    pieces: tuple[NDArray[np.uint8], ...]

    @property
    def constant(self) -> tuple[bool, ...]:
        return (False,) * len(self.pieces)  # sharing gains nothing: no two pieces are equal

    def with_pieces(self, pieces: Sequence[NDArray[np.uint8]]) -> PackedExpertFactors:
        return replace(self, pieces=tuple(pieces))


class CpuExpertsTable:
    """`ExpertsAdapterTable` in memory that the kernels read: AdapterFactors by expert and slot."""

    def __init__(self, shape: FactorShape, num_experts: int, num_slots: int, dtype: str) -> None:
        self.shape, self.num_experts, self.num_slots = shape, num_experts, num_slots
        self._one = CpuAdapterTable(shape, 1, dtype)
        self.width, self.dtype, self.code = self._one.width, self._one.dtype, self._one.code
        self.factors = np.zeros((num_experts, num_slots), _FACTORS)

    def pack(self, factors: Mapping[int, Factors], page_bytes: int) -> PackedExpertFactors:
        ranks = np.zeros(self.num_experts, np.int32)
        owners = {name: np.full(self.num_experts, -1, np.intp) for name in _ADDRESSES}
        offsets = {name: np.zeros(self.num_experts, np.int64) for name in _ADDRESSES}
        tables: dict[bytes, int] = {}  # panel table -> its index in `arrays`; most experts share one table
        arrays: list[NDArray[np.uint8]] = []
        wanted: list[tuple[str, int, int]] = []  # field, expert, index of its array
        for e, one in factors.items():
            packed = self._one.pack(one, 1 << 62)
            ranks[e] = packed.rank
            fields: dict[str, list[NDArray[np.uint8]]] = {}
            begins = np.zeros(len(packed.pieces), np.int64)  # for each piece of B: its first element in the joined B
            end = 0
            for i, (name, one_piece) in enumerate(zip(packed.fields, packed.pieces, strict=True)):
                fields.setdefault(name, []).append(one_piece)
                if name == "b":
                    begins[i] = end // self.dtype.itemsize
                    end += one_piece.nbytes
            panels = fields["panels"][0].view(_PANEL).copy()
            panels["offset"] = np.where(panels["count"] > 0, begins[packed.owners] + packed.offsets, 0)
            for name, of_field in fields.items():
                number = len(arrays)
                if name == "panels":
                    number = tables.setdefault(panels.tobytes(), number)
                if number == len(arrays):
                    arrays.append(panels.view(UINT8) if name == "panels" else np.concatenate(of_field))
                wanted.append((name, e, number))
        in_piece, at, sizes = _filled([array.nbytes for array in arrays], page_bytes)
        pieces = tuple(np.zeros(size, UINT8) for size in sizes)
        for array, piece, offset in zip(arrays, in_piece, at, strict=True):
            pieces[piece][offset : offset + array.nbytes] = array
        for name, e, number in wanted:
            owners[name][e], offsets[name][e] = in_piece[number], at[number]
        return PackedExpertFactors(ranks, owners, offsets, pieces)

    def least_page_bytes(self) -> int:
        return max(self._sizes())

    def largest(self, page_bytes: int) -> list[int]:
        panels, *of_expert = self._sizes()
        return _filled([panels, *of_expert * self.num_experts], page_bytes)[2]

    def _sizes(self) -> list[int]:
        """Return the largest number of bytes of the panel table, and of an expert's A and B. A panel of B may have the
        columns of all projections."""
        a, panels, _ = self._one._sizes()
        return [panels, a, panels // _PANEL.itemsize * _cpu.PANEL * self.width * self.dtype.itemsize]

    def put(self, slot: int, packed: PackedExpertFactors, arena: NDArray[np.uint8], places: Sequence[int]) -> None:
        at = np.array([*places, 0], np.int64) + address(arena)
        entries = np.zeros(self.num_experts, _FACTORS)
        for name, owners in packed.owners.items():
            entries[name] = np.where(owners >= 0, at[owners] + packed.offsets[name], 0)
        entries["rank"] = packed.ranks
        self.factors[:, slot] = entries

    def clear(self, slot: int) -> None:
        self.factors[:, slot] = np.zeros((), _FACTORS)


def _filled(sizes: Sequence[int], page_bytes: int) -> tuple[list[int], list[int], list[int]]:
    """Place arrays of these `sizes` one after the other in pieces of up to a page. Return the piece of each array, its
    offset in the piece, and the size of each piece, in bytes."""
    pieces: list[int] = []
    offsets: list[int] = []
    filled: list[int] = []
    for size in sizes:
        if not filled or filled[-1] + size > page_bytes:
            filled.append(0)
        pieces.append(len(filled) - 1)
        offsets.append(filled[-1])
        filled[-1] += -(-size // _ALIGNMENT) * _ALIGNMENT
    return pieces, offsets, filled


def experts_adapter_table(shape: FactorShape, num_experts: int, num_slots: int, dtype: str) -> CpuExpertsTable:
    return CpuExpertsTable(shape, num_experts, num_slots, dtype)


def experts_arguments(expand: ExpandExperts | None) -> dict[str, Any]:
    """Return the adapters' arguments of the native function `experts`."""
    names = ("slots", "num_slots", "factor_dtype", "up_factors", "up_width", "down_factors", "down_width")
    arguments: dict[str, Any] = {name: None if name in ("slots", "up_factors", "down_factors") else 0 for name in names}
    if expand is None or (expand.gate_up is None and expand.down is None):
        return arguments
    tables = {"up": expand.gate_up, "down": expand.down}
    found = [table for table in tables.values() if table is not None]
    require(all(isinstance(table, CpuExpertsTable) for table in found) and len({table.code for table in found}) == 1)
    check_inputs("experts", slots=expand.slots)
    arguments |= {"slots": expand.slots, "num_slots": found[0].num_slots, "factor_dtype": found[0].code}
    for name, table in tables.items():
        if table is not None:
            arguments |= {f"{name}_factors": table.factors, f"{name}_width": table.width}
    return arguments


def _packed_outputs(shape: FactorShape) -> NDArray[np.intp]:
    """Return the output in each column of the packed matrix, -1 for the padding of last panels."""
    total, sides = sum(shape.widths), 2 if shape.gated else 1
    num_panels = -(-(total // sides) // _cpu.PANEL)
    columns = np.full((sides, num_panels * _cpu.PANEL), -1, np.intp)
    columns[:, : total // sides] = np.arange(total).reshape(sides, -1)
    return columns.reshape(sides, num_panels, _cpu.PANEL).swapaxes(0, 1).reshape(-1)


def _projections(shape: FactorShape, outputs: NDArray[np.intp]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return, for each panel, the first and the last projection that have outputs in the panel."""
    panels = np.repeat(np.arange(len(shape.widths)), shape.widths)[outputs].reshape(-1, _cpu.PANEL)
    is_padding = outputs.reshape(-1, _cpu.PANEL) < 0
    return np.where(is_padding, len(shape.widths), panels).min(1), np.where(is_padding, -1, panels).max(1)


def allocate_arena(num_bytes: int) -> NDArray[np.uint8]:
    return empty_pages(num_bytes)


def adapter_table(shape: FactorShape, num_slots: int, dtype: str) -> CpuAdapterTable:
    return CpuAdapterTable(shape, num_slots, dtype)


def rows_by_adapter(slots: NDArray[Any]) -> NDArray[Any]:
    return slots


def shrink(x: NDArray[Any], table: AdapterTable, slots: NDArray[Any], weight: LinearWeight) -> NDArray[Any]:
    assert isinstance(table, CpuAdapterTable)
    require(table.shape.num_in == weight.in_features)
    require(slots.dtype == INT32 and is_dense(slots) and is_dense(x))
    check_inputs("shrink", x=x, slots=slots)
    num_rows, num_in = x.shape[0], table.shape.num_in
    if x.dtype == UINT8:
        x_code, x_stride = _cpu.Q8, x.strides[0] // _cpu.QBLOCK_BYTES
    else:
        require(x.shape[1] == num_in, f"shrink: {x.shape[1]} inputs for factors of {num_in}")
        x_code, x_stride = code_of("shrink", x), stride(x)
    out = empty((num_rows, table.width), table.dtype)
    scratch = empty((_cpu.shrink_scratch_rows(num_rows), num_in), table.dtype)
    _cpu.shrink(
        x=x, x_stride=x_stride, x_dtype=x_code, rows=num_rows, slots=slots, num_slots=table.num_slots,
        factors=table.factors, out=out, out_stride=table.width, scratch=scratch, k=num_in, dtype=table.code,
    )  # fmt: skip
    return out


_NO_FACTORS = {"slots": None, "num_slots": 0, "factors": None, "factor_dtype": 0}


def expand_arguments(expand: Expand | None, column: int) -> dict[str, Any]:
    """Return the adapters' arguments of the native function `linear`. The matrix's first output is output `column` of
    `expand`'s table."""
    if expand is None:
        return _NO_FACTORS | {"shrunk": None, "shrunk_stride": 0}
    table = expand.table
    assert isinstance(table, CpuAdapterTable)
    return {
        "slots": expand.slots, "num_slots": table.num_slots, "factors": table.factors_from(column),
        "factor_dtype": table.code, "shrunk": expand.shrunk, "shrunk_stride": table.width,
    }  # fmt: skip


def lookup_arguments(adapted: Lookup | None) -> dict[str, Any]:
    """Return the adapters' arguments of the native function `embedding`."""
    if adapted is None:
        return _NO_FACTORS
    table, slots = adapted.table, adapted.slots
    assert isinstance(table, CpuAdapterTable)
    require(table.shape.is_embedding)
    require(slots.dtype == INT32 and is_dense(slots))
    check_inputs("embedding", slots=slots)
    return {"slots": slots, "num_slots": table.num_slots, "factors": table.factors, "factor_dtype": table.code}


# For each field that points to an array over outputs: the array's bytes for one output.
_OUTPUT_BYTES = {"panels": _PANEL.itemsize / _cpu.PANEL, "scales": 4, "bias": 4}


def _moved(entries: NDArray[Any], column: int) -> NDArray[Any]:
    moved = entries.copy()
    for name, num_bytes in _OUTPUT_BYTES.items():
        moved[name] = np.where(moved[name] != 0, moved[name] + np.uint64(column * num_bytes), 0)
    return moved
