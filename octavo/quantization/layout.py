"""The layouts of packed integer matrices, as data. Their memory is described in docs/kernels.md."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

PANEL = 32  # outputs that are stored together; matrices are padded to a multiple
BLOCK = 64  # elements of k that are stored together; matrices are padded to a multiple
# The values of the e2m1 codes times two, which makes them integers. The top bit of a code is the sign.
DOUBLED_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@dataclass(frozen=True, slots=True)
class Layout:
    """Codes of `bits` (4 or 8), a scale for every `group` (16 or 32) elements of a row and, with `minima`, a minimum
    for every 32 elements. With `table`, codes of four bits are indices into its sixteen integers, from -128 to 127.
    `scale_bytes` is 2, for float16, or 1, for powers of two, which only groups of 32 with a table have."""

    bits: int
    group: int
    minima: bool
    table: tuple[int, ...] | None = None
    scale_bytes: int = 2

    def packed_bytes(self, num_out: int, num_in: int) -> int:
        """Return the bytes of a packed matrix [num_out, num_in]."""
        scales, minima = BLOCK // self.group * self.scale_bytes, BLOCK // 32 * 2 if self.minima else 0
        block = BLOCK * self.bits // 8 + scales + minima
        return -(-num_out // PANEL) * PANEL * -(-num_in // BLOCK) * block

    @property
    def without_table(self) -> Layout:
        """The layout of the same matrix with the integers themselves as codes of eight bits."""
        return self if self.table is None else Layout(8, self.group, self.minima)

    @property
    def on_gpu(self) -> Layout:
        """The layout of the same matrix on GPUs, where scales have two bytes."""
        return Layout(self.bits, self.group, self.minima, self.table)


def least_layout(
    bits: int, group: int, minima: bool, table: tuple[int, ...] | None = None, scale_bytes: int = 2
) -> Layout:
    """Return the smallest layout for codes of `bits` (4 or 8) in groups of `group`, any multiple of 16."""
    if group % 32 == 0:
        return Layout(bits, 32, minima, table, scale_bytes)
    return Layout(8 if table is None else bits, 16, minima, table)


def common_layout(layouts: Iterable[Layout]) -> Layout:
    """Return the smallest layout that can hold matrices of all `layouts`, for projections that are stacked into one."""
    found = list(layouts)
    if len({x.table for x in found}) > 1:
        found = [x.without_table for x in found]
    return Layout(
        max(x.bits for x in found), min(x.group for x in found), any(x.minima for x in found), found[0].table,
        max(x.scale_bytes for x in found),
    )  # fmt: skip
