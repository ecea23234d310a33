"""Unpacked matrices of few bits: codes, scales and minima as separate arrays, the same for all formats.

`octavo.quantization.unpack` makes them. A backend without its own packer for a format packs from these arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.errors import ConfigError
from octavo.quantization.array_functions import Array, arange, cast, namespace, padded, repeated, taken
from octavo.quantization.layout import Layout, least_layout


@dataclass(frozen=True, slots=True)
class Codes:
    """A matrix [N, K]. An element is scale * code + minimum, or without minima scale * (code - 2^(bits-1)), or with a
    table scale * table[code].

    `codes` uint8 [N, K]; `scales` and `minima` float32 [N, ceil(K / group)], all exact. With `order` int64 [K], column
    j belongs to input order[j]. All are numpy arrays or torch tensors. `table` and `scale_bytes` are those of the
    layout; a matrix with a table has four bits and no minima.
    """

    bits: int
    group: int
    codes: Array
    scales: Array
    minima: Array | None = None
    order: Array | None = None
    table: tuple[int, ...] | None = None
    scale_bytes: int = 2

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def layout(self) -> Layout:
        return least_layout(self.bits, self.group, self.minima is not None, self.table, self.scale_bytes)

    def widened(self, layout: Layout) -> Codes:
        """Return the same matrix in the form of `layout`: its bits (at least as many as now), its groups (whose size
        divides the present one), and its minima and table, if any."""
        if self.table is not None and layout.table is None:
            codes = taken(self.codes, [number + 128 for number in self.table], "uint8")
            return Codes(8, self.group, codes, self.scales, order=self.order).widened(layout)
        bits, group, minima = layout.bits, layout.group, layout.minima
        assert bits >= self.bits and self.group % group == 0 and (minima or self.minima is None)
        assert layout.table == self.table
        codes, repeats = self.codes, self.group // group
        num_groups = -(-codes.shape[1] // group)
        scales = repeated(self.scales, repeats, num_groups)
        if self.minima is not None:
            return Codes(bits, group, codes, scales, repeated(self.minima, repeats, num_groups), self.order)
        if minima:
            return Codes(bits, group, codes, scales, scales * -float(1 << self.bits >> 1), self.order)
        codes = codes + ((1 << bits >> 1) - (1 << self.bits >> 1))
        return Codes(bits, group, codes, scales, None, self.order, self.table, self.scale_bytes)

    def dequantize(self) -> Array:
        """Return the matrix as float32 [N, K], with columns in the order of the inputs."""
        num_out, k = self.shape
        scales, minima, group = self.scales, self.minima, self.group
        if k % group:  # the last group is shorter
            scales = repeated(scales, group, k)
            minima = None if minima is None else repeated(minima, group, k)
            group = 1
        if self.table is not None:
            values = taken(self.codes, self.table, "float32")
        else:
            values = cast(self.codes, "float32")
            if minima is None:
                values -= 1 << self.bits >> 1
        values = values.reshape(num_out, -1, group)
        values *= scales[:, :, None]
        if minima is not None:
            values += minima[:, :, None]
        values = values.reshape(num_out, k)
        return values if self.order is None else values[:, namespace(self.order).argsort(self.order)]


@dataclass(frozen=True, slots=True)
class Groups:
    """The scales and minima of a matrix, as in `Codes`, without its codes. `shifts`, int16 [N, ceil(K / group)] or one
    number, are added to a file's codes; the sums have `bits` bits."""

    bits: int
    group: int
    scales: Array
    minima: Array | None = None
    shifts: Array | int | None = None
    table: tuple[int, ...] | None = None
    scale_bytes: int = 2

    @property
    def layout(self) -> Layout:
        return least_layout(self.bits, self.group, self.minima is not None, self.table, self.scale_bytes)

    def of(self, codes: Array, order: Array | None = None) -> Codes:
        """Return the matrix with these `codes` uint8 [N, K]."""
        shifts = self.shifts
        if shifts is not None:
            shifts = shifts if isinstance(shifts, int) else repeated(shifts, self.group, codes.shape[1])
            codes = cast(cast(codes, "int16") + shifts, "uint8")
        return Codes(self.bits, self.group, codes, self.scales, self.minima, order, self.table, self.scale_bytes)


def groups_of(bits: int, k: int, scales: Array, zeros: Array | None) -> Groups:
    """Return the groups of a matrix [N, K] of scale * (code - zero), with scales and zeros [N, groups].

    The groups have no minima if all zeros are the middle of the codes' range, which is also the default for `zeros`
    None. A single group for a whole row becomes groups of 128.
    """
    num_groups = scales.shape[1]
    group = -(-k // num_groups)
    if num_groups == 1:
        group = 128
        scales = repeated(scales, -(-k // group), -(-k // group))
        zeros = None if zeros is None else repeated(zeros, -(-k // group), -(-k // group))
    scales, middle = cast(scales, "float32"), 1 << bits >> 1
    if zeros is not None and bool(namespace(zeros).all(zeros == middle)):
        zeros = None
    if bits < 4:
        # The difference of a 2- or 3-bit code and its zero fits the range of a 4-bit code around its middle.
        return Groups(4, group, scales, shifts=8 - (middle if zeros is None else cast(zeros, "int16")))
    return Groups(bits, group, scales, None if zeros is None else -scales * cast(zeros, "float32"))


def common_order(orders: Sequence[Array | None]) -> Array | None:
    """Return the common column order of stacked matrices, int32; None if all are in the model's order. In `orders` None
    is the model's order. Raises `ConfigError` if the orders differ."""
    first = next((order for order in orders if order is not None), None)
    if first is None:
        return None
    if any(order is None or not bool(namespace(order).all(order == first)) for order in orders):
        raise ConfigError(
            "matrices with the same input but different column orders (desc_act) cannot be stacked; use --dtype "
            "float32."
        )
    return cast(first, "int32")


def in_order_of_groups(g_idx: Array | None, num_groups: int) -> Array | None:
    """Return the column numbers sorted by group, int64 [K]; None if the columns are sorted already. g_idx [K] is the
    group of each column. Raises `ConfigError` if the groups do not have the same size."""
    if g_idx is None or num_groups == 1:
        return None
    xp, k = namespace(g_idx), g_idx.shape[0]
    g_idx = cast(g_idx, "int64")
    if bool(xp.all(g_idx == arange(g_idx, k) // (k // num_groups))):
        return None
    order = xp.argsort(g_idx, stable=True)
    if not bool(xp.all(g_idx[order] == arange(g_idx, k) // (k // num_groups))):
        raise ConfigError(f"g_idx does not divide {k} columns into {num_groups} groups of {k // num_groups}.")
    return order


def rounded(values: Array, group: int = 32) -> Codes:
    """Return values [N, K] as 8-bit codes, rounded to nearest, with a scale of absmax / 127 for each `group` elements.
    For formats whose own codes are no integers."""
    xp, (num_out, k) = namespace(values), values.shape
    groups = padded(values, group).reshape(num_out, -1, group)
    scales = xp.amax(abs(groups), axis=-1) / 127
    codes = xp.round(groups / xp.where(scales > 0, scales, xp.ones_like(scales))[..., None])
    return Codes(8, group, cast(codes + 128, "uint8").reshape(num_out, -1)[:, :k], scales)
