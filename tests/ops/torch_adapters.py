"""LoRA adapters over torch's tensors: factors in plain layout, and tables that hold them by slot.

The reference computes with these directly; `octavo.ops.triton.lora` has kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.ops import Expand, ExpertsFactors, Factors, FactorShape, Lookup, LowRank
from octavo.ops.torch_arrays import DTYPES, to_torch


@dataclass(frozen=True, slots=True)
class TorchFactors:
    """One adapter's factors for one matrix, as bytes: for each projection a [r, K] and b [N, r], its replacement, or
    nothing; then the scales and the bias."""

    ranks: tuple[int, ...]  # by projection: 0 without factors, -1 if it is replaced
    has_scales: bool
    has_bias: bool
    pieces: tuple[NDArray[np.uint8], ...]

    @property
    def constant(self) -> tuple[bool, ...]:
        return (True,) * len(self.pieces)

    def with_pieces(self, pieces: Sequence[NDArray[np.uint8]]) -> TorchFactors:
        return replace(self, pieces=tuple(pieces))


@dataclass(frozen=True, slots=True)
class SlotFactors:
    """`TorchFactors` as tensors on the device."""

    projections: tuple[tuple[Tensor, Tensor] | Tensor | None, ...]  # (a, b); or the replacement; or nothing
    scales: Tensor | None
    bias: Tensor | None


class TorchAdapterTable:
    """`AdapterTable` of tensors."""

    def __init__(self, shape: FactorShape, num_slots: int, dtype: str) -> None:
        self.shape, self.dtype = shape, DTYPES[dtype]
        self.slots: list[SlotFactors | None] = [None] * num_slots
        self.width = max(len(shape.widths) * shape.max_rank, shape.num_in if shape.replaceable else 0)

    def pack(self, factors: Factors, page_bytes: int) -> TorchFactors:
        arrays: list[Tensor] = []
        for one in factors.projections:
            if isinstance(one, LowRank):
                arrays += [to_torch(one.a).to(self.dtype), to_torch(one.b).to(self.dtype)]
            elif one is not None:
                assert self.shape.replaceable and len(self.shape.widths) == 1
                matrix, most = to_torch(one.matrix).to(self.dtype), self._rows_of_page(page_bytes)
                arrays += [matrix[begin : begin + most] for begin in range(0, len(matrix), most)]
        vectors = [vector for vector in (factors.scales, factors.bias) if vector is not None]
        arrays += [to_torch(vector).float() for vector in vectors]
        ranks = tuple(
            0 if one is None else len(one.a) if isinstance(one, LowRank) else -1 for one in factors.projections
        )
        pieces = tuple(array.contiguous().reshape(-1).view(torch.uint8).numpy() for array in arrays)
        return TorchFactors(ranks, factors.scales is not None, factors.bias is not None, pieces)

    def least_page_bytes(self) -> int:
        return max(*self.largest(0), self.shape.num_in * self.dtype.itemsize)

    def largest(self, page_bytes: int) -> list[int]:
        rank, size = self.shape.max_rank, self.dtype.itemsize
        a, bs = rank * self.shape.num_in * size, [width * rank * size for width in self.shape.widths]
        return [size for b in bs for size in (a, b)] + [4 * sum(self.shape.widths)] * 2

    def put(self, slot: int, packed: TorchFactors, arena: Tensor, places: Sequence[int]) -> None:
        left = iter(arena[place : place + piece.nbytes] for place, piece in zip(places, packed.pieces, strict=True))
        projections: list[tuple[Tensor, Tensor] | Tensor | None] = []
        for rank, width in zip(packed.ranks, self.shape.widths, strict=True):
            if rank == 0:
                projections.append(None)
                continue
            if rank < 0:  # a replacement, in pieces that may lie anywhere: copied, as the reference need not be fast
                rows = [next(left).view(self.dtype).view(-1, self.shape.num_in)]
                while sum(map(len, rows)) < width:
                    rows.append(next(left).view(self.dtype).view(-1, self.shape.num_in))
                projections.append(torch.cat(rows))
                continue
            a = next(left).view(self.dtype).view(rank, self.shape.num_in)
            projections.append((a, next(left).view(self.dtype).view(width, rank)))
        scales = next(left).view(torch.float32) if packed.has_scales else None
        bias = next(left).view(torch.float32) if packed.has_bias else None
        self.slots[slot] = SlotFactors(tuple(projections), scales, bias)

    def clear(self, slot: int) -> None:
        self.slots[slot] = None

    def _rows_of_page(self, page_bytes: int) -> int:
        return max(1, page_bytes // (self.shape.num_in * self.dtype.itemsize))

    def rows_by_slot(self, slots: Tensor) -> list[tuple[Tensor, SlotFactors]]:
        """Return, for each adapter in the step, the numbers of its rows and its factors."""
        found = []
        for slot in sorted(set(slots.tolist())):
            factors = self.slots[slot] if slot >= 0 else None
            if factors is not None:
                found.append(((slots == slot).nonzero()[:, 0], factors))
        return found


class TorchExpertsTable:
    """`ExpertsAdapterTable`: a table for each expert."""

    def __init__(self, shape: FactorShape, num_experts: int, num_slots: int, dtype: str) -> None:
        # Projections that share an A may have the sum of all their ranks.
        whole = replace(shape, max_rank=shape.max_rank * len(shape.widths))
        self.shape = shape
        self.experts = [TorchAdapterTable(whole, num_slots, dtype) for _ in range(num_experts)]

    def pack(self, factors: Mapping[int, Factors], page_bytes: int) -> ExpertsFactors[TorchFactors]:
        return ExpertsFactors(tuple((e, self.experts[e].pack(one, page_bytes)) for e, one in factors.items()))

    def least_page_bytes(self) -> int:
        return self.experts[0].least_page_bytes()

    def largest(self, page_bytes: int) -> list[int]:
        return self.experts[0].largest(page_bytes) * len(self.experts)

    def put(self, slot: int, packed: ExpertsFactors[TorchFactors], arena: Tensor, places: Sequence[int]) -> None:
        begin = 0
        for e, one in packed.experts:
            self.experts[e].put(slot, one, arena, places[begin : begin + len(one.pieces)])
            begin += len(one.pieces)

    def clear(self, slot: int) -> None:
        for table in self.experts:
            table.clear(slot)


def experts_adapter_table(shape: FactorShape, num_experts: int, num_slots: int, dtype: str) -> TorchExpertsTable:
    return TorchExpertsTable(shape, num_experts, num_slots, dtype)


def allocate_arena(num_bytes: int) -> Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


def adapter_table(shape: FactorShape, num_slots: int, dtype: str) -> TorchAdapterTable:
    return TorchAdapterTable(shape, num_slots, dtype)


def rows_by_adapter(slots: Tensor) -> Tensor:
    return slots


def shrink_rows(x: Tensor, table: TorchAdapterTable, slots: Tensor) -> Tensor:
    """Return x [T, K] times the A factors of each row's adapter: [T, width], the projections one after the other."""
    out = torch.zeros((len(x), table.width), dtype=table.dtype, device=x.device)
    for rows, factors in table.rows_by_slot(slots):
        parts = [
            x[rows].float() if isinstance(one, Tensor) else x[rows].float() @ one[0].float().T
            for one in factors.projections
            if one is not None
        ]
        if parts:
            both = torch.cat(parts, 1)
            out[rows, : both.shape[1]] = both.to(table.dtype)
    return out


def expand_rows(y: Tensor, bias: Tensor | None, what: Expand) -> Tensor:
    """Return y plus the adapters' parts plus `bias`; y [T, N] float32 is the base product without its bias."""
    table = what.table
    assert isinstance(table, TorchAdapterTable)
    y = y.clone()
    for rows, factors in table.rows_by_slot(what.slots):
        sums, begin, column = y[rows], 0, 0
        for one, width in zip(factors.projections, table.shape.widths, strict=True):
            if isinstance(one, Tensor):
                sums = what.shrunk[rows, : one.shape[1]].float() @ one.float().T
            elif one is not None:
                rank = one[1].shape[1]
                shrunk = what.shrunk[rows, begin : begin + rank].float()
                sums[:, column : column + width] += shrunk @ one[1].float().T
                begin += rank
            column += width
        if factors.scales is not None:
            sums = sums * factors.scales
        y[rows] = sums if factors.bias is None else sums + factors.bias
    return y if bias is None else y + bias


def looked_up(rows: Tensor, token_ids: Tensor, what: Lookup) -> Tensor:
    """Return rows [T, K] float32 of the base, changed by their adapters."""
    table = what.table
    assert isinstance(table, TorchAdapterTable)
    rows = rows.clone()
    for of_slot, factors in table.rows_by_slot(what.slots):
        tokens, [one] = token_ids[of_slot].long(), factors.projections
        if isinstance(one, Tensor):
            rows[of_slot] = one[tokens].float()
        elif one is not None:
            rows[of_slot] += one[1][tokens].float() @ one[0].float()
    return rows
