"""The layouts of packed integer matrices, as data. Their memory is described in docs/kernels.md."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

PANEL = 32  # outputs that are stored together; matrices are padded to a multiple
BLOCK = 64  # elements of k that are stored together; matrices are padded to a multiple


@dataclass(frozen=True, slots=True)
class Layout:
    """Codes of `bits` (4 or 8), a scale for every `group` (16 or 32) elements of a row and, with `minima`, a minimum
    for every 32 elements."""

    bits: int
    group: int
    minima: bool

    def packed_bytes(self, num_out: int, num_in: int) -> int:
        """Return the bytes of a packed matrix [num_out, num_in]."""
        block = BLOCK * self.bits // 8 + BLOCK // self.group * 2 + (BLOCK // 32 * 2 if self.minima else 0)
        return -(-num_out // PANEL) * PANEL * -(-num_in // BLOCK) * block


def least_layout(bits: int, group: int, minima: bool) -> Layout:
    """Return the smallest layout for codes of `bits` (4 or 8) in groups of `group`, any multiple of 16."""
    return Layout(bits, 32, minima) if group % 32 == 0 else Layout(8, 16, minima)


def common_layout(layouts: Iterable[Layout]) -> Layout:
    """Return the smallest layout that can hold matrices of all `layouts`, for projections that are stacked into one."""
    found = list(layouts)
    return Layout(max(x.bits for x in found), min(x.group for x in found), any(x.minima for x in found))
