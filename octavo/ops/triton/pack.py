"""Packing of matrices into the layouts of `packed_weights`, at load, part by part.

A part's tensors are first moved to the device as stored; all conversions run on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.errors import ConfigError
from octavo.ops.torch_arrays import DTYPES, to_torch, upload
from octavo.ops.triton import launch
from octavo.ops.triton.launch import capability
from octavo.ops.triton.linear_int import workspace_for
from octavo.ops.triton.packed_weights import BLOCK_WORDS, FloatWeight, IntWeight, PackedWeight, ScaledWeight
from octavo.ops.triton.tiles import UNIT
from octavo.quantization import (
    StoredWeight,
    common_layout,
    common_order,
    dequantize,
    fp8,
    gguf_blocks,
    int4,
    int8,
    layout_of,
    unpack,
)
from octavo.quantization.codes import Codes
from octavo.quantization.layout import Layout
from octavo.quantization.unpacking import UNPACKED_WHOLE

_PLAIN = ("F32", "F16", "BF16")  # formats of floats that stay floats
_INTEGERS = frozenset(gguf_blocks.LAYOUTS) | UNPACKED_WHOLE | {int4.FORMAT}
# Formats whose codes are multiplied unchanged if a row has one scale -> the codes' type.
_ROW_SCALED = {"FP8_SCALED": torch.float8_e4m3fn, "INT8_SCALED": torch.int8}


def pack_linear(
    parts: Sequence[StoredWeight], bias: NDArray[Any] | None = None, gated: bool = False, is_embedding: bool = False,
    sixteen_bit_inputs: bool = False,
) -> PackedWeight:  # fmt: skip
    """`Ops.pack_linear`."""
    device = launch.device()
    rows = RowOrder([part.shape for part in parts], gated)
    moved = [_on_device(part, device) for part in parts]
    bias_there = None if bias is None else to_torch(bias).to(device)
    formats = {part.format for part in parts}
    if len(formats) == 1 and all(_is_row_scaled(part, device) for part in parts):
        return _pack_row_scaled(moved, rows, bias_there, device)
    if formats <= _INTEGERS:
        return _pack_integers(moved, rows, bias_there, device)
    if len(formats) == 1 and formats <= _SCALED.keys() and rows.num_in % 16 == 0:
        return _pack_scaled([part.tensors["data"] for part in moved], _SCALED[formats.pop()], rows, bias_there, device)
    name = next((part.tensors["data"].dtype.name for part in parts if part.format in _PLAIN), "bfloat16")
    dtype, k = DTYPES[name], rows.num_in
    data = torch.zeros(rows.num_padded, _rounded_up(k, 16), dtype=dtype, device=device)[:, :k]
    for side, (part, there) in enumerate(zip(parts, moved, strict=True)):
        # If a file has some of these matrices as floats, the quantized ones become floats too.
        is_plain = part.format in _PLAIN
        tensor = there.tensors["data"] if is_plain else to_torch(dequantize(part, name)).to(device)
        if tensor.dtype is not dtype:
            raise TypeError(f"pack_linear wants parts of one dtype, not {dtype} and {tensor.dtype}.")
        rows.place(data, side, tensor)
    return FloatWeight(rows.num_rows, k, gated, data, pack_bias(bias_there, rows, device))


def _on_device(part: StoredWeight, device: torch.device) -> StoredWeight:
    tensors = {name: upload(array, device) for name, array in part.tensors.items()}
    return StoredWeight(part.format, tensors, part.shape)


def _is_row_scaled(part: StoredWeight, device: torch.device) -> bool:
    if part.format not in _ROW_SCALED or part.tensors["scales"].shape[1] != 1 or "zeros" in part.tensors:
        return False
    return part.shape[1] % 16 == 0 and (part.format != "FP8_SCALED" or capability(device) >= (8, 9))


def _pack_row_scaled(
    parts: list[StoredWeight], rows: RowOrder, bias: Tensor | None, device: torch.device
) -> ScaledWeight:
    dtype = _ROW_SCALED[parts[0].format]
    codes = torch.zeros(rows.num_padded, rows.num_in, dtype=torch.uint8, device=device)
    scales = torch.zeros(rows.num_padded, dtype=torch.float32, device=device)
    for side, part in enumerate(parts):
        rows.place(codes, side, part.tensors["codes"].view(torch.uint8))
        rows.place(scales, side, part.tensors["scales"][:, 0].float())
    return ScaledWeight(
        rows.num_rows, rows.num_in, rows.gated, codes.view(dtype), scales, pack_bias(bias, rows, device)
    )  # fmt: skip


def _quantize_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes [N, K] int8 and the scales [N] float32 (absmax / 127) of rows [N, K]."""
    values = rows.float()
    scales = values.abs().amax(1) / 127
    return (values / torch.where(scales > 0, scales, 1.0)[:, None]).round().to(torch.int8), scales


_SCALED: dict[str, tuple[torch.dtype, Callable[[Tensor], tuple[Tensor, Tensor]]]] = {
    int8.FORMAT: (torch.int8, _quantize_int8),
    fp8.FORMAT: (torch.float8_e4m3fn, fp8.quantize),
}


def _pack_scaled(
    parts: list[Tensor], target: tuple[torch.dtype, Callable[[Tensor], tuple[Tensor, Tensor]]], rows: RowOrder,
    bias: Tensor | None, device: torch.device,
) -> ScaledWeight:  # fmt: skip
    dtype, quantize = target
    if dtype is torch.float8_e4m3fn and capability(device) < (8, 9):
        major, minor = capability(device)
        raise ConfigError(
            f"This GPU (compute capability {major}.{minor}) does not multiply 8-bit floats, as those from 8.9 on do; "
            "use --quantization int8."
        )
    codes = torch.zeros(rows.num_padded, rows.num_in, dtype=torch.uint8, device=device).view(dtype)
    scales = torch.zeros(rows.num_padded, dtype=torch.float32, device=device)
    for side, part in enumerate(parts):
        for start, end in rows.pieces(part.shape[0]):
            piece, piece_scales = quantize(part[start:end].to(device))
            # As bytes, because not every device can index 8-bit floats.
            rows.place(codes.view(torch.uint8), side, piece.view(torch.uint8), start)
            rows.place(scales, side, piece_scales, start)
    return ScaledWeight(
        rows.num_rows, rows.num_in, rows.gated, codes, scales, pack_bias(bias, rows, device)
    )  # fmt: skip


def pack_codes(parts: Sequence[Codes], bias: Tensor | None = None, gated: bool = False) -> IntWeight:
    """Return a packed matrix of parts that are already unpacked to codes."""
    return _pack_integers(parts, RowOrder([part.shape for part in parts], gated), bias, launch.device())


def _pack_integers(
    parts: Sequence[StoredWeight | Codes], rows: RowOrder, bias: Tensor | None, device: torch.device
) -> IntWeight:
    opened = [
        unpack(part) if isinstance(part, StoredWeight) and part.format in UNPACKED_WHOLE else part for part in parts
    ]
    layout = common_layout(
        Layout(part.bits, part.group, part.minima is not None, part.table)
        if isinstance(part, Codes)
        else layout_of(part.format)
        for part in opened
    ).on_gpu

    def pieces(part: StoredWeight | Codes) -> Iterator[tuple[int, Codes]]:
        """Yield the part in pieces of `layout`, each with its first row."""
        if isinstance(part, Codes):
            yield 0, part.widened(layout)
            return
        for start, end in rows.pieces(part.shape[0]):
            yield start, unpack(part.rows(start, end)).widened(layout)

    order = common_order([part.order if isinstance(part, Codes) else None for part in opened])
    block = BLOCK_WORDS * 32 // layout.bits
    num_blocks = -(-rows.num_in // block)
    num_groups = _rounded_up(num_blocks * block // layout.group, 2)
    factor = _factor((codes for part in opened for _, codes in pieces(part)))
    codes = torch.zeros(rows.num_padded, num_blocks * BLOCK_WORDS, dtype=torch.int32, device=device)
    halves = torch.zeros(rows.num_padded, num_groups, 2 if layout.minima else 1, dtype=torch.float16, device=device)
    for side, part in enumerate(opened):
        for start, piece in pieces(part):
            rows.place(codes, side, pack_words(piece.codes.to(device), layout.bits), start)
            numbers = [piece.scales] if piece.minima is None else [piece.scales, piece.minima]
            stacked = torch.stack([(x.to(device) / factor).half() for x in numbers], -1)
            rows.place(halves[:, : stacked.shape[1]], side, stacked, start)
    scales = halves.flatten(1).view(torch.int32).T.contiguous()
    workspace = workspace_for(rows.num_padded, num_blocks, device)
    table = None
    if layout.table is not None:
        entries = torch.tensor([number + 128 for number in layout.table], dtype=torch.uint8)
        table = entries.view(torch.int32).to(device)
    return IntWeight(
        rows.num_rows, rows.num_in, rows.gated, layout.bits, layout.group, layout.minima, factor, codes, scales,
        pack_bias(bias, rows, device), workspace, None if order is None else order.long(), table,
    )  # fmt: skip


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Return codes uint8 [N, K] as words int32 [N, blocks * BLOCK_WORDS], in the layout of `IntWeight`."""
    planes = 32 // bits
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % (planes * BLOCK_WORDS)))
    split = codes.reshape(len(codes), -1, planes, BLOCK_WORDS)
    words: Tensor = split[:, :, 0].int()
    for plane in range(1, planes):
        words |= split[:, :, plane].int() << (bits * plane)
    return words.flatten(1)


def _factor(pieces: Iterable[Codes]) -> float:
    """Return the power of two that scales are divided by to fit into float16; 1 if all are float16 numbers already.

    The largest scale becomes 2^4 or more, so that elements stay in float16's range too; scales down to 2^-18 of the
    largest keep full precision."""
    largest, exact = 0.0, True
    for piece in pieces:
        if piece.scales.device.type == "meta":
            return 1.0
        largest = max(largest, float(piece.scales.abs().max()))
        exact = exact and torch.equal(piece.scales.half().float(), piece.scales)
        if piece.minima is not None:
            largest = max(largest, float(piece.minima.abs().max()) / 32)
    if largest == 0 or (exact and largest < 1024):
        return 1.0
    return math.ldexp(1.0, math.frexp(largest)[1] - 5)


def pack_bias(bias: Tensor | None, rows: RowOrder, device: torch.device) -> Tensor | None:
    if bias is None:
        return None
    assert bias.shape == (rows.num_rows,), f"bias {tuple(bias.shape)} of a matrix with {rows.num_rows} outputs"
    out = torch.zeros(rows.num_padded, dtype=torch.float32, device=device)
    for side, part in enumerate(bias.to(device).float().split(rows.sizes)):
        rows.place(out, side, part)
    return out


_PIECE_ELEMENTS = 1 << 26  # a piece is 64 MB of codes, and takes a few times as much while it is unpacked


class RowOrder:
    """The order of rows of a matrix's parts [N, K]: one part after the other, or gate and up alternating by `UNIT`."""

    def __init__(self, shapes: Sequence[tuple[int, int]], gated: bool) -> None:
        assert not gated or (len(shapes) == 2 and shapes[0] == shapes[1]), "gated parts are gate and up"
        self.sizes, self.gated, self.num_in = [n for n, _ in shapes], gated, shapes[0][1]
        assert all(k == self.num_in for _, k in shapes), f"parts of {shapes}"
        self.num_rows = sum(self.sizes)
        self.num_padded = sum(_rounded_up(size, UNIT.value) for size in self.sizes) if gated else self.num_rows

    def pieces(self, num_rows: int) -> Iterator[tuple[int, int]]:
        """Yield the first row and the end of each piece of a part; a piece is unpacked at once."""
        step = max(1, _PIECE_ELEMENTS // (UNIT.value * self.num_in)) * UNIT.value
        for start in range(0, num_rows, step):
            yield start, min(start + step, num_rows)

    def place(self, out: Tensor, side: int, part: Tensor, start: int = 0) -> None:
        """Copy rows of a part, the first of which is its row `start`, to their places in `out` [all rows, ...]."""
        if not self.gated:
            first = sum(self.sizes[:side]) + start
            out[first : first + len(part)] = part
            return
        unit = UNIT.value
        assert start % unit == 0
        alternating = out.unflatten(0, (-1, 2, unit))[start // unit :]
        whole = len(part) // unit
        alternating[:whole, side] = part[: whole * unit].unflatten(0, (whole, unit))
        if rest := len(part) - whole * unit:
            alternating[whole, side, :rest] = part[whole * unit :]


def _rounded_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
