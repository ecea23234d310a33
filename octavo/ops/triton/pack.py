"""Matrices into the layouts of `weights`, once, at load: part by part, on the device that will multiply them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.ops import QuantizedMatrix
from octavo.ops.triton.tiles import UNIT
from octavo.ops.triton.weights import FloatWeight, PackedWeight
from octavo.quantization import dequantize


def pack_linear(
    parts: Sequence[Tensor | QuantizedMatrix],
    bias: Tensor | None = None,
    gated: bool = False,
    device: torch.device | None = None,
) -> PackedWeight:
    """`Ops.pack_linear`, on `device` or where the first part is."""
    assert not gated or (len(parts) == 2 and parts[0].shape == parts[1].shape), "gated parts are gate and up"
    k = parts[0].shape[1]
    assert all(part.shape[1] == k for part in parts), f"parts of {[tuple(part.shape) for part in parts]}"
    device = device or _device_of(parts[0])
    rows = RowOrder([part.shape[0] for part in parts], gated)
    floats = [part for part in parts if isinstance(part, Tensor)]
    dtype = floats[0].dtype if floats else torch.bfloat16
    # Some of a file's matrices were not worth fewer bits: those next to them follow.
    tensors = (dequantize(part, dtype) if isinstance(part, QuantizedMatrix) else part for part in parts)
    data = torch.zeros(rows.num_padded, _rounded_up(k, 16), dtype=dtype, device=device)[:, :k]
    for side, part in enumerate(tensors):
        if part.dtype is not dtype:
            raise TypeError(f"pack_linear wants parts of one dtype, not {dtype} and {part.dtype}.")
        rows.place(data, side, part.to(device))
    return FloatWeight(rows.num_rows, k, gated, data, pack_bias(bias, rows, device))


def pack_bias(bias: Tensor | None, rows: RowOrder, device: torch.device) -> Tensor | None:
    if bias is None:
        return None
    assert bias.shape == (rows.num_rows,), f"bias {tuple(bias.shape)} of a matrix with {rows.num_rows} outputs"
    out = torch.zeros(rows.num_padded, dtype=torch.float32, device=device)
    for side, part in enumerate(bias.to(device).float().split(rows.sizes)):
        rows.place(out, side, part)
    return out


class RowOrder:
    """Where the rows of a matrix's parts go: one part after the other, or gate and up alternating by `UNIT` rows."""

    def __init__(self, sizes: list[int], gated: bool) -> None:
        self.sizes, self.gated = sizes, gated
        self.num_rows = sum(sizes)
        self.num_padded = sum(_rounded_up(size, UNIT.value) for size in sizes) if gated else self.num_rows

    def place(self, out: Tensor, side: int, part: Tensor) -> None:
        """Copy a part's rows to theirs in `out`, whose first dimension is all rows."""
        if not self.gated:
            first = sum(self.sizes[:side])
            out[first : first + self.sizes[side]] = part
            return
        unit = UNIT.value
        alternating = out.unflatten(0, (-1, 2, unit))
        whole = len(part) // unit
        alternating[:whole, side] = part[: whole * unit].unflatten(0, (whole, unit))
        if rest := len(part) - whole * unit:
            alternating[whole, side, :rest] = part[whole * unit :]


def _device_of(part: Tensor | QuantizedMatrix) -> torch.device:
    return part.data.device if isinstance(part, QuantizedMatrix) else part.device


def _rounded_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
