"""The types of adapters in operations: an adapter's factors, and the tables that hold factors by slot.

Callers import these names from `octavo.ops`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

from octavo.ops.arrays import HostArray


@dataclass(frozen=True, slots=True)
class FactorShape:
    """The shape of adapters' factors for one matrix.

    The matrix consists of projections side by side with `widths` outputs; each projection has its own factors. `gated`
    is true if the matrix is gate and up. Ranks are at most `max_rank`. Adapters may replace a matrix of one projection
    if it is `replaceable`. If the matrix `is_embedding`, the rows that tokens look up are its outputs."""

    num_in: int
    widths: tuple[int, ...]
    gated: bool
    max_rank: int
    replaceable: bool = False
    is_embedding: bool = False


@dataclass(frozen=True, slots=True)
class LowRank:
    """Low-rank factors a [r, K] and b [N, r], float32. A projection becomes x W^T + (x a^T) b^T, a looked-up row W[n] +
    b[n] a."""

    a: HostArray
    b: HostArray


@dataclass(frozen=True, slots=True)
class Whole:
    """A matrix [N, K] float32 that replaces W."""

    matrix: HostArray


@dataclass(frozen=True, slots=True)
class Factors:
    """One adapter's change to one matrix: for each projection low-rank factors, a replacement, or None for no change.

    Then all outputs are multiplied by `scales` [N] float32 (DoRA, Liu et al. 2024), and `bias` [N] float32 is added.
    Matrices that are looked up have neither."""

    projections: tuple[LowRank | Whole | None, ...]
    scales: HostArray | None = None
    bias: HostArray | None = None


class PackedFactors(Protocol):
    """`Factors` in a backend's layout, on the host: pieces of memory that may be placed independently, each at a
    multiple of 64 bytes. `put` does not change pieces that are `constant`: equal constant pieces may share memory."""

    @property
    def pieces(self) -> tuple[HostArray, ...]: ...
    @property
    def constant(self) -> tuple[bool, ...]: ...
    def with_pieces(self, pieces: Sequence[HostArray]) -> Self:
        """Return the same factors with these copies of the pieces."""


_P = TypeVar("_P", bound=PackedFactors)


@dataclass(frozen=True, slots=True)
class ExpertsFactors(Generic[_P]):
    """One adapter's factors for a stack of experts, one expert after the other; experts share no factors."""

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
    """The factors of all loaded adapters for one matrix, by slot. A slot without factors adds nothing."""

    @property
    def shape(self) -> FactorShape: ...
    def pack(self, factors: Factors, page_bytes: int) -> Any:
        """Return `PackedFactors` whose pieces are at most a page. It touches host memory only, so any thread may call
        it."""

    def least_page_bytes(self) -> int:
        """Return the least size of a page in bytes, for factors of the largest rank."""

    def largest(self, page_bytes: int) -> list[int]:
        """Return the bytes of each piece of the largest adapter: all factors of the largest rank, scales and bias, no
        replacements."""

    def put(self, slot: int, packed: Any, arena: Any, places: Sequence[int]) -> None:
        """Give the slot the `packed` factors. They lie in `arena` [bytes] uint8 on the device, pieces[i] at byte
        places[i]."""

    def clear(self, slot: int) -> None: ...


class ExpertsAdapterTable(Protocol):
    """As `AdapterTable`, for a stack of experts whose matrices all have this shape."""

    @property
    def shape(self) -> FactorShape: ...
    def pack(self, factors: Mapping[int, Factors], page_bytes: int) -> Any:
        """Return the packed factors of some experts, by expert number. An A that projections share is packed once."""

    def least_page_bytes(self) -> int: ...
    def largest(self, page_bytes: int) -> list[int]: ...
    def put(self, slot: int, packed: Any, arena: Any, places: Sequence[int]) -> None: ...
    def clear(self, slot: int) -> None: ...


class Expand(NamedTuple):
    """The argument of a product that adds adapters' shrunk rows times their B, in float32 before rounding."""

    table: Any  # `AdapterTable`
    slots: Any  # the result of `AdapterOps.rows_by_adapter`
    shrunk: Any  # the result of `AdapterOps.shrink`


class Lookup(NamedTuple):
    """The argument of `embedding` that changes looked-up rows by adapters, in float32 before scaling and rounding."""

    table: Any  # `AdapterTable`
    slots: Any  # the result of `AdapterOps.rows_by_adapter`


class ExpandExperts(NamedTuple):
    """The argument of `experts` that adds adapters' parts to each product, in float32 before rounding."""

    slots: Any  # the result of `AdapterOps.rows_by_adapter`
    gate_up: Any  # `ExpertsAdapterTable`, or None
    down: Any
