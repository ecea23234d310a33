"""What operations know of adapters: their factors, and the tables that hold these by slot. Callers have these names
from `octavo.ops`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

from octavo.ops.arrays import HostArray


@dataclass(frozen=True, slots=True)
class FactorShape:
    """Of what adapters may add to one product: projections of `widths` outputs side by side, each of its own factors;
    `gated` as the matrix is. No rank is above `max_rank`. Adapters may replace a matrix of one projection that is
    `replaceable`. Of a matrix whose rows are `looked_up` by token the rows are the outputs."""

    num_in: int
    widths: tuple[int, ...]
    gated: bool
    max_rank: int
    replaceable: bool = False
    looked_up: bool = False


@dataclass(frozen=True, slots=True)
class LowRank:
    """a [r, K] and b [N, r] float32: a projection becomes x W^T + (x a^T) b^T, a row looked up W[n] + b[n] a."""

    a: HostArray
    b: HostArray


@dataclass(frozen=True, slots=True)
class Whole:
    """A matrix [N, K] float32 in the place of W."""

    matrix: HostArray


@dataclass(frozen=True, slots=True)
class Factors:
    """What one adapter does to one matrix: low-rank factors of its projections, or others in their place, None for what
    it leaves alone; then, over all outputs [N] float32, what the sum is multiplied with (DoRA, Liu et al. 2024),
    and what is added. Rows that are looked up have neither of these."""

    projections: tuple[LowRank | Whole | None, ...]
    scales: HostArray | None = None
    bias: HostArray | None = None


class PackedFactors(Protocol):
    """`Factors` as a backend reads them, on the host: pieces that may lie anywhere, each at a multiple of 64 bytes.
    Those that are `constant` stay as they are there, so that several that are equal may be one."""

    @property
    def pieces(self) -> tuple[HostArray, ...]: ...
    @property
    def constant(self) -> tuple[bool, ...]: ...
    def with_pieces(self, pieces: Sequence[HostArray]) -> Self:
        """The same, whose pieces are these copies."""


_P = TypeVar("_P", bound=PackedFactors)


@dataclass(frozen=True, slots=True)
class ExpertsFactors(Generic[_P]):
    """One adapter's factors for a stack, one expert after the other, none of which share any."""

    experts: tuple[tuple[int, _P], ...]

    @property
    def pieces(self) -> tuple[HostArray, ...]:
        return tuple(piece for _, one in self.experts for piece in one.pieces)

    @property
    def constant(self) -> tuple[bool, ...]:
        return tuple(is_constant for _, one in self.experts for is_constant in one.constant)

    def with_pieces(self, pieces: Sequence[HostArray]) -> ExpertsFactors[_P]:
        left = iter(pieces)
        return ExpertsFactors(tuple((e, one.with_pieces([*islice(left, len(one.pieces))])) for e, one in self.experts))


class AdapterTable(Protocol):
    """The factors that adapters have for one product, by slot; a slot without any adds nothing."""

    @property
    def shape(self) -> FactorShape: ...
    def pack(self, factors: Factors, page_bytes: int) -> Any:
        """-> `PackedFactors` whose pieces take a page at most. Only host memory is touched: any thread may."""

    def least_page_bytes(self) -> int:
        """Bytes that a page must have, for the largest rank."""

    def largest(self, page_bytes: int) -> list[int]:
        """Bytes of the pieces of an adapter of the largest rank that has everything, but replaces nothing."""

    def put(self, slot: int, packed: Any, arena: Any, places: Sequence[int]) -> None:
        """The slot's factors are those that lie in `arena` [bytes] uint8 of the device, each piece at its place."""

    def clear(self, slot: int) -> None: ...


class ExpertsAdapterTable(Protocol):
    """As `AdapterTable`, of a stack of experts whose matrices are all of the shape."""

    @property
    def shape(self) -> FactorShape: ...
    def pack(self, factors: Mapping[int, Factors], page_bytes: int) -> Any:
        """Of some of the experts. Projections that share an A have it once."""

    def least_page_bytes(self) -> int: ...
    def largest(self, page_bytes: int) -> list[int]: ...
    def put(self, slot: int, packed: Any, arena: Any, places: Sequence[int]) -> None: ...
    def clear(self, slot: int) -> None: ...


class Expand(NamedTuple):
    """The second half of what adapters add to a product, in float32 before anything is rounded."""

    table: Any  # `AdapterTable`
    slots: Any  # of `AdapterOps.rows_by_adapter`
    shrunk: Any  # of `Ops.shrink`


class Lookup(NamedTuple):
    """What adapters make of rows that are looked up, in float32 before these are scaled and rounded."""

    table: Any  # `AdapterTable`
    slots: Any  # of `AdapterOps.rows_by_adapter`


class ExpandExperts(NamedTuple):
    """What adapters add to the products of experts, to each in float32 before anything is rounded."""

    slots: Any  # of `AdapterOps.rows_by_adapter`
    gate_up: Any  # `ExpertsAdapterTable`, or None
    down: Any
