"""Packing of weight matrices into the panels of the native kernels, once, at load: layouts, memory, native calls.

csrc/cpu/pack.cpp and pack_int.cpp do the packing. They read the file's bytes (blocks, floats, or codes in words) and
write panels, so a matrix is never in memory twice. Other formats are first unpacked to codes here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

import octavo._cpu as _cpu
from octavo.errors import ConfigError
from octavo.ops import LinearWeight
from octavo.ops.cpu_arrays import UINT8, code_of, is_dense, require, stride
from octavo.ops.cpu_memory import zeros
from octavo.quantization import Codes, Layout, StoredWeight, common_layout, common_order, dequantize, layout_of, unpack
from octavo.quantization.array_functions import transposed
from octavo.quantization.formats import BLOCK_TYPES, KEPT_ON_CPUS
from octavo.quantization.packed_words import PackedWords
from octavo.quantization.unpacking import ROUNDED, words_of

_PLAIN = ("F32", "F16", "BF16")  # formats of floats that stay floats
_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_QUANTIZED = {"INT8": "", "INT4": " 4"}  # formats that the packer quantizes floats to -> suffix of its source format
# Formats whose superblocks are packed with the file's own bits and scales.
_KEPT: dict[str, int] = {name: getattr(_cpu, f"WEIGHT_{name}") for name in KEPT_ON_CPUS}
# Formats whose scales are single float16 numbers in the file, not products of two numbers.
_PLAIN_SCALES = frozenset({"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL"})


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A matrix in panels of 32 output channels (docs/kernels.md), or in rows if it is only looked up. A bias is float32
    and padded like the panels.

    `matrix` is the kernels' view of these fields; it points into `data` and `bias`. With an `order` [in_features]
    int32, input i of the panels is element order[i] of the rows that are multiplied.
    """

    out_features: int
    in_features: int
    gated: bool
    format: int
    data: NDArray[np.uint8]
    bias: NDArray[np.float32] | None
    matrix: _cpu.Matrix = field(repr=False)
    order: NDArray[np.int32] | None = None
    sixteen_bit_inputs: bool = False  # an integer matrix takes each input row as a pair of rows (kernel_types.h: kQ16)

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes + sum(0 if array is None else array.nbytes for array in (self.bias, self.order))

    @property
    def is_quantized(self) -> bool:
        return self.format not in (_cpu.WEIGHT_F32, _cpu.WEIGHT_BF16, _cpu.ROWS_F32, _cpu.ROWS_BF16)

    @property
    def takes_float32(self) -> bool:
        return self.is_quantized

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks of a quantized row of inputs."""
        return int(-(-self.in_features // _cpu.QBLOCK))

    @property
    def row_bytes(self) -> int:
        """Return the bytes of a quantized row of inputs; of both rows of the pair with `sixteen_bit_inputs`."""
        return (1 + self.sixteen_bit_inputs) * self.num_blocks * int(_cpu.QBLOCK_BYTES)

    @property
    def row_code(self) -> int:
        """Return the kernels' code of the type of quantized input rows."""
        return int(_cpu.Q16 if self.sixteen_bit_inputs else _cpu.Q8)


@dataclass(frozen=True, slots=True)
class PackedStack:
    """Integer matrices of the same input, each in its own layout, whose outputs are side by side.

    A product multiplies each part into its own columns. All parts but the last have whole panels, because adapters'
    factors are cut at panels."""

    parts: tuple[PackedWeight, ...]

    @property
    def out_features(self) -> int:
        return sum(part.out_features for part in self.parts)

    @property
    def in_features(self) -> int:
        return self.parts[0].in_features

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def takes_float32(self) -> bool:
        return True


def first_part(weight: LinearWeight) -> PackedWeight:
    """Return the matrix itself, or the first matrix of a stack: all matrices of a stack take the same input rows."""
    part = weight.parts[0] if isinstance(weight, PackedStack) else weight
    assert isinstance(part, PackedWeight)
    return part


def packed_weight(
    data: NDArray[np.uint8], shape: tuple[int, int], format: int, bias: NDArray[Any] | None = None, gated: bool = False,
    group: int = 0, minima: bool = False, factor: float = 1.0, order: NDArray[np.int32] | None = None,
    sixteen_bit_inputs: bool = False, table: bytes = b"",
) -> PackedWeight:  # fmt: skip
    """Return a packed matrix of `shape` [N, K] with its bias [N], which is packed here. With `gated`, N counts gate
    and up."""
    n, k = shape
    padded: NDArray[np.float32] | None = None
    if bias is not None:
        require(bias.shape == (n,), f"bias {bias.shape} of a matrix with {n} outputs")
        # A row of panels for a plain matrix, two that alternate for a gated one.
        sides = 2 if gated else 1
        panels = _num_panels(n // sides)
        padded = zeros(sides * panels * _cpu.PANEL * 4).view(np.float32)
        rows = np.zeros((sides, panels * _cpu.PANEL), np.float32)
        rows[:, : n // sides] = bias.reshape(sides, -1)
        padded[:] = rows.reshape(sides, panels, _cpu.PANEL).swapaxes(0, 1).reshape(-1)
    matrix = _cpu.Matrix(data, 0 if padded is None else padded, n, k, factor, format, group, minima, gated, table)
    return PackedWeight(n, k, gated, format, data, padded, matrix, order, sixteen_bit_inputs)


def _num_panels(n: int) -> int:
    return int(-(-n // _cpu.PANEL))


def sum_by_segments(weight: LinearWeight, segments: int) -> int:
    """`SegmentOps.sum_by_segments`."""
    assert isinstance(weight, PackedWeight)
    block: int = weight.matrix.block
    if weight.order is not None:  # a matrix with an order is not divided among workers
        return block
    while segments > 1 and weight.in_features % (segments * block):
        segments = segments // 2 if segments % 2 == 0 else 1
    weight.matrix.segments = segments
    return block


def pack_linear(
    parts: Sequence[StoredWeight], bias: NDArray[Any] | None = None, gated: bool = False, is_embedding: bool = False,
    sixteen_bit_inputs: bool = False,
) -> PackedWeight | PackedStack:  # fmt: skip
    """`Ops.pack_linear`. Raises `ConfigError` for formats that these kernels do not multiply."""
    require(not gated or (len(parts) == 2 and parts[0].shape == parts[1].shape), "gated parts are gate and up")
    if is_embedding and bias is None and [part.format in _PLAIN for part in parts] == [True]:
        return _as_rows(parts[0].tensors["data"])
    floats = [part for part in parts if part.format in _PLAIN]
    if not floats:
        return _pack_runs(parts, bias, gated, sixteen_bit_inputs)
    dtype = floats[0].tensors["data"].dtype.name
    # If a file has some of these matrices as floats, the quantized ones become floats too.
    arrays = [part.tensors["data"] if part.format in _PLAIN else dequantize(part, dtype) for part in parts]
    return _pack_floats(arrays, bias, gated)


def _as_rows(table: NDArray[Any]) -> PackedWeight:
    """Return a copy of table [N, K], float32 or bfloat16, in rows."""
    format = _cpu.ROWS_F32 if code_of("pack_linear", table) == _cpu.F32 else _cpu.ROWS_BF16
    data = zeros(table.nbytes)
    data[:] = np.ascontiguousarray(table).view(np.uint8).reshape(-1)
    return packed_weight(data, (table.shape[0], table.shape[1]), format)


def _pack_runs(
    parts: Sequence[StoredWeight], bias: NDArray[Any] | None, gated: bool, sixteen_bit_inputs: bool
) -> PackedWeight | PackedStack:
    """Return `parts` as one matrix, or as a stack of matrices if neighbours have different layouts.

    Neighbours of the same layout become one matrix. All parts share one layout if they are gate and up, if a part has
    an order of columns, or if a matrix other than the last would end within a panel."""
    sources = [_source(part) for part in parts]
    runs = [list(run) for _, run in groupby(sources, lambda source: (source.kept, source.layout))]
    rows = [sum(source.num_rows for source in run) for run in runs]
    is_ordered = any(source.order is not None for source in sources)
    if gated or is_ordered or any(n % _cpu.PANEL for n in rows[:-1]):
        runs, rows = [sources], [sum(rows)]
    biases = [None] * len(runs) if bias is None else np.split(bias, list(accumulate(rows[:-1])))
    matrices = [_pack_integers(run, one, gated, sixteen_bit_inputs) for run, one in zip(runs, biases, strict=True)]
    return matrices[0] if len(matrices) == 1 else PackedStack(tuple(matrices))


def _pack_integers(
    sources: Sequence[_Source], bias: NDArray[Any] | None, gated: bool, sixteen_bit_inputs: bool
) -> PackedWeight:
    packed = _pack_sources(sources, gated)
    layout, shape = packed.layout, (packed.num_out, packed.num_in)
    return packed_weight(
        packed.data, shape, packed.format, bias, gated, layout.group, layout.minima, packed.factor, packed.order,
        sixteen_bit_inputs, _table_of(layout),
    )  # fmt: skip


def _table_of(layout: Layout) -> bytes:
    """Return the table of a layout as a `_cpu.Matrix` takes it: the codes of eight bits that indices stand for."""
    return b"" if layout.table is None else bytes(number + 128 for number in layout.table)


def _pack_floats(parts: list[NDArray[Any]], bias: NDArray[Any] | None, gated: bool) -> PackedWeight:
    code = code_of("pack_linear", *parts)
    if not gated and any(part.shape[0] % _cpu.PANEL for part in parts[:-1]):
        parts = [np.concatenate(parts)]
    k = parts[0].shape[1]
    words = k if code == _cpu.F32 else -(-k // 2)  # of 32 bits, in a row
    panels = [_num_panels(part.shape[0]) for part in parts]
    panel_bytes = words * _cpu.PANEL * 4
    data = zeros(sum(panels) * panel_bytes)
    first_panel = 0
    for part, num_panels in zip(parts, panels, strict=True):
        require(part.shape[1] == k, f"parts of {k} and {part.shape[1]} inputs")
        part = _dense(part)
        target = data[first_panel * panel_bytes :]
        _cpu.pack_linear(
            weight=part, stride=stride(part), n=part.shape[0], k=k, dtype=code, out=target,
            panel_step=2 if gated else 1,
        )  # fmt: skip
        first_panel += 1 if gated else num_panels
    format = _cpu.WEIGHT_F32 if code == _cpu.F32 else _cpu.WEIGHT_BF16
    return packed_weight(data, (sum(part.shape[0] for part in parts), k), format, bias, gated)


@dataclass(frozen=True, slots=True)
class PackedIntegers:
    """A packed integer matrix (csrc/cpu/kernel_types.h: Matrix) without its bias. If `format` keeps superblocks,
    `layout` is the layout that products see."""

    data: NDArray[np.uint8]
    num_out: int  # of all parts; gate and up together
    num_in: int
    layout: Layout
    format: int  # WEIGHT_*
    factor: float
    gated: bool
    order: NDArray[np.int32] | None = None


def pack_quantized(parts: Sequence[StoredWeight], gated: bool = False) -> PackedIntegers:
    """Return `parts` stacked in one layout that can hold all of them; with `gated`, panels of gate and up alternate.

    Raises `ConfigError` for formats that these kernels do not multiply, and for rows that are too long."""
    return _pack_sources([_source(part) for part in parts], gated)


def _pack_sources(sources: Sequence[_Source], gated: bool) -> PackedIntegers:
    num_in, num_out = sources[0].num_in, sum(source.num_rows for source in sources)
    require(all(source.num_in == num_in for source in sources), f"parts of {[s.num_in for s in sources]} inputs")
    require(not gated or (len(sources) == 2 and sources[0].num_rows == sources[1].num_rows))
    order = common_order([source.order for source in sources])
    layout = common_layout(source.layout for source in sources)
    sources = [source.fitted(layout) for source in sources]
    factor = _factor(sources)
    kept = {source.kept for source in sources}
    format = kept.pop() if len(kept) == 1 else None
    if format is None and layout.table is not None:
        format = _cpu.WEIGHT_POWERS if layout.scale_bytes == 1 else _cpu.WEIGHT_TABLE
    format = format or (_cpu.WEIGHT_INT4 if layout.bits == 4 else _cpu.WEIGHT_INT8)
    what = (num_out, num_in, factor, format, layout.group, layout.minima, gated, _table_of(layout))
    # Places that no part writes must stay 0: a weight of 0.
    data = zeros(_cpu.packed_bytes(_cpu.Matrix(0, 0, *what)))
    matrix = _cpu.Matrix(data, 0, *what)
    first_row = 0
    for source in sources:
        if isinstance(source.unpacked, PackedWords):
            require(source.unpacked.shape == (source.num_rows, num_in))
            _pack_words(matrix, first_row, source.unpacked, order)
        else:
            array = source.rows()
            _cpu.pack_part(
                to=matrix, first_row=first_row, source=array, source_format=source.format,
                stride=_stride_bytes(array), rows=source.num_rows,
            )  # fmt: skip
        first_row += 1 if gated else source.num_rows
    return PackedIntegers(data, num_out, num_in, layout, format, factor, gated, order)


@dataclass(frozen=True, slots=True)
class _Source:
    """A part as the native packer takes it: either `data` in a format that the packer reads, or `unpacked`, which is
    words, or codes that `rows` brings into such a format."""

    layout: Layout
    num_rows: int
    num_in: int
    format: int = -1  # a value of SOURCE_FORMATS; -1 for words
    kept: int | None = None  # the WEIGHT_* format that keeps this part's superblocks, if there is one
    has_half_scales: bool = False
    data: NDArray[Any] | None = None
    unpacked: Codes | PackedWords | None = None
    part: StoredWeight | None = None

    @property
    def order(self) -> NDArray[Any] | None:
        return None if self.unpacked is None else self.unpacked.order

    def fitted(self, layout: Layout) -> _Source:
        """Return this part as the packer can read it into `layout`: words only into one of the same number of bits,
        and indices into a table only into one with the same table; others become codes."""
        is_read = self.layout.bits == layout.bits or not isinstance(self.unpacked, PackedWords)
        if is_read and self.layout.table == layout.table:
            return self
        if self.part is None:
            raise ValueError("only a part that is stored can become codes.")
        codes = unpack(self.part)
        return _of_codes(codes if layout.table == codes.table else codes.widened(codes.layout.without_table))

    def rows(self) -> NDArray[Any]:
        """Return the rows for the packer: [num_rows, bytes or elements]."""
        if self.data is not None:
            return self.data
        assert isinstance(self.unpacked, Codes)
        return _staged(self.unpacked)


def _source(part: StoredWeight) -> _Source:
    name, (num_rows, num_in) = part.format, part.shape

    def read(format: str, layout: Layout, data: NDArray[Any]) -> _Source:
        require(data.shape[0] == num_rows, f"{data.shape[0]} rows in a matrix {part.shape}")
        source_format, has_half_scales = _cpu.SOURCE_FORMATS[format], name in _PLAIN_SCALES
        return _Source(
            layout, num_rows, num_in, source_format, _KEPT.get(name), has_half_scales, data, part=part
        )  # fmt: skip

    if name in _QUANTIZED:
        data = _dense(part.data)
        require(data.shape == part.shape)
        return read(f"{_NAMES[data.dtype.name]}{_QUANTIZED[name]}", layout_of(name), data)
    if name in ROUNDED:  # read as floats, which the native packer quantizes
        return read("F32", layout_of("INT8"), dequantize(part))
    if name in BLOCK_TYPES and name in _cpu.SOURCE_FORMATS:
        data = _dense(part.data)
        require(data.dtype == UINT8)
        return read(name, layout_of(name), data)
    if name == "FP8":
        layout_of(name)  # raises the error for FP8
    words = words_of(part)
    if words is None or words.groups.group % 32:
        return _of_codes(unpack(part), name, part)
    has_half_scales = _are_halves(words.scales)
    return _Source(words.layout, num_rows, num_in, has_half_scales=has_half_scales, unpacked=words, part=part)


def _of_codes(codes: Codes, name: str = "", part: StoredWeight | None = None) -> _Source:
    layout, (num_rows, num_in) = codes.layout, codes.shape
    if codes.group % layout.group or (layout.minima and layout.group != 32):
        raise ConfigError(
            f"{name} matrices with groups of {codes.group} are not built for CPUs; multiples of 32 are, and without "
            "zero points of 16."
        )
    format = _cpu.SOURCE_FORMATS[
        f"CODES{layout.bits}{' TABLE' if layout.table else ''}"
        f"{' MINIMA' if layout.minima else ' BY 16' if layout.group == 16 else ''}"
    ]
    codes = codes.widened(layout)
    has_half_scales = _are_halves(codes.scales)
    return _Source(layout, num_rows, num_in, format, has_half_scales=has_half_scales, unpacked=codes, part=part)


def _are_halves(scales: NDArray[np.float32]) -> bool:
    with np.errstate(over="ignore"):
        return bool((scales.astype(np.float16) == scales).all())


def _pack_words(matrix: _cpu.Matrix, first_row: int, words: PackedWords, order: NDArray[np.int32] | None) -> None:
    groups, strides = words.groups, words.words.strides
    scales, minima, shifts = (
        None if x is None else np.ascontiguousarray(np.broadcast_to(x, groups.scales.shape).T.astype(dtype, copy=False))
        for x, dtype in ((groups.scales, np.float32), (groups.minima, np.float32), (groups.shifts, np.uint8))
    )
    num_rows = groups.scales.shape[0]
    _cpu.pack_words(
        to=matrix, first_row=first_row, words=words.words, output_stride=strides[0], word_stride=strides[1],
        rows=num_rows, bits=words.bits, by_outputs=words.by_outputs, scales=scales, minima=minima, shifts=shifts,
        group=groups.group, order=order,
    )  # fmt: skip


def _stride_bytes(rows: NDArray[Any]) -> int:
    # numpy's stride of a single row is arbitrary; return the bytes of the row.
    return rows.strides[0] if len(rows) > 1 else rows.shape[1] * rows.itemsize


def _dense(data: NDArray[Any]) -> NDArray[Any]:
    require(data.ndim == 2)
    return data if is_dense(data) else transposed(data.T)


def _staged(codes: Codes) -> NDArray[np.uint8]:
    """Return `codes` as rows of blocks, as `Codes` in csrc/cpu/pack_int.cpp reads them. A block of 32 elements has the
    scales of both halves and the minimum, all float32, then the codes."""
    num_rows, num_in = codes.shape
    num_blocks = -(-num_in // 32)
    staged = np.zeros((num_rows, num_blocks), _BLOCK_OF_CODES)
    padded = codes.codes if num_in % 32 == 0 else np.pad(codes.codes, ((0, 0), (0, -num_in % 32)))
    staged["codes"] = padded.reshape(num_rows, num_blocks, 32)
    scales = codes.scales if codes.group == 16 else codes.scales.repeat(2, 1)
    staged["scales"] = np.pad(scales, ((0, 0), (0, scales.shape[1] % 2))).reshape(num_rows, num_blocks, 2)
    if codes.minima is not None:
        staged["minimum"] = codes.minima
    return staged.view(np.uint8)


_BLOCK_OF_CODES = np.dtype([("scales", np.float32, 2), ("minimum", np.float32), ("codes", np.uint8, 32)])


def _factor(sources: Sequence[_Source]) -> float:
    """Return the power of two that scales are divided by to fit into float16: 1 if all are float16 numbers already.

    Otherwise the largest scale becomes 2^14 or more, so scales down to 2^-28 of the largest keep full precision."""
    if all(source.has_half_scales for source in sources):
        return 1.0
    largest = 0.0
    for source in sources:
        if source.unpacked is not None:
            scales = np.abs(source.unpacked.scales)
            found = float(scales[np.isfinite(scales)].max(initial=0))
        else:
            array = source.rows()
            found = _cpu.max_scale(array, source.format, _stride_bytes(array), source.num_rows, source.num_in)
        largest = max(largest, found)
    if largest == 0.0:
        return 1.0
    _, exponent = math.frexp(largest)  # largest < 2^exponent
    return math.ldexp(1.0, max(-126, exponent - 15))
