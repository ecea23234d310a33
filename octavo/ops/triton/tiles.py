"""The parts that the kernels of all matrix products share: the choice of a program's tile, the product of two tiles,
the epilogue.

Products are computed transposed, W x^T: output channels are the rows of the tensor cores' instruction and tokens its
columns, of which Hopper takes 8 to 256 at a time. So one family of instructions serves one token and thousands. An
output is one chain of float32 sums over k in ascending steps of 16, whatever its tile's shape, so a token's result does
not depend on other tokens.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

# Epilogues: the use of a finished sum y.
STORE = tl.constexpr(0)  # out = y
ADD = tl.constexpr(1)  # out += scale * y
ACTIVATED = tl.constexpr(-8)  # plus the index in `ACTIVATIONS`: out = activation(y)
GATED = tl.constexpr(2)  # plus the index in `ACTIVATIONS`: out = activation(y of a gate row) * y of an up row

# Channels come in units of 8: the compiler sees that masks change only between units, and writes 16 bytes at once. A
# gated matrix has 8 rows of the gate, then 8 of up, and so on.
UNIT = tl.constexpr(8)

# Major capabilities of the machines with 227 KB of shared memory, whose tensor cores take 64 channels at a time.
LARGE_SHARED = (9, 10)

# The fields of a row of `adapter_tables` that the kernels of products read.
KIND, SCALES = 0, 1
REPLACES = 2
_KIND, _SCALES, _REPLACES = tl.constexpr(KIND), tl.constexpr(SCALES), tl.constexpr(REPLACES)

# Up to Triton 3.9 the interpreter multiplies bfloat16 numbers as integers.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows in tiles of `block_t`, each of which is multiplied with one matrix of a stack."""

    num_experts: int
    block_t: int
    tile_experts: Tensor  # [tiles] int32; -1: the tile is empty
    factors: Tensor | None = None  # [num_experts] float32, for matrices of codes


@dataclass(frozen=True, slots=True)
class Added:
    """The adapters' part of a product, computed by `octavo.ops.triton.lora`."""

    slots: Tensor  # [T] int32: the slot of each row's adapter, or -1
    entries: Tensor  # [slots, entry_size] int64, of `adapter_tables.TritonAdapterTable`
    entry_size: int
    sums: Tensor  # [T, columns] float32, of rows with adapters
    is_gated: bool  # the matrix is gated: its rows are in another order than `sums`' columns


def adapted_arguments(added: Added | None) -> dict[str, Any]:
    """Return the kernels' arguments for `add_adapted`. ADAPTED: 0 adds nothing, 2 is for gated matrices."""
    if added is None:
        return {"slots": None, "entries": None, "entry_size": 0, "added": None, "stride_added": 0, "ADAPTED": 0}
    return {
        "slots": added.slots, "entries": added.entries, "entry_size": added.entry_size, "added": added.sums,
        "stride_added": added.sums.stride(0), "ADAPTED": 2 if added.is_gated else 1,
    }  # fmt: skip


@triton.jit
def place(width, num_rows, columns, BLOCK_T: tl.constexpr, GROUP_T: tl.constexpr):
    """Return the first of the `columns` output columns and the first token of this program's tile.

    Programs that run at the same time take GROUP_T tiles of tokens for each tile of channels, so that both are read
    from the L2 cache by most of them."""
    program = tl.program_id(0)
    tiles_n = tl.cdiv(width, columns)
    tiles_t = tl.cdiv(num_rows, BLOCK_T)
    group = program // (GROUP_T * tiles_n)
    first_t = group * GROUP_T
    group_size = tl.minimum(tiles_t - first_t, GROUP_T)
    within = program % (GROUP_T * tiles_n)
    return (within // group_size) * columns, (first_t + within % group_size) * BLOCK_T


@triton.jit
def dot(w, x, acc, PROMOTE: tl.constexpr = 0):
    """Return acc + w [N, K] x [K, T], summed in float32 (int32 for integers)."""
    if INTERPRETED and w.dtype.is_bf16():
        w, x = w.to(tl.float32), x.to(tl.float32)
    if w.dtype.is_fp8() and PROMOTE > 0:
        # Hopper keeps about 14 bits of sums of 8-bit floats, so every PROMOTE elements a sum is added to a float32 one.
        return tl.dot(w, x, acc, max_num_imprecise_acc=PROMOTE, out_dtype=acc.dtype)
    return tl.dot(w, x, acc, input_precision="ieee", out_dtype=acc.dtype)


@triton.jit
def activate(x, KIND: tl.constexpr):
    """Return activation number KIND of `ACTIVATIONS` of x, float32."""
    if KIND == 0:  # silu
        return x / (1.0 + tl.exp(-x))
    elif KIND == 1:  # gelu
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == 2:  # gelu_tanh: (1 + tanh(z)) / 2 is the logistic function of 2 z
        return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        positive = tl.where(x < 0, 0.0, x)  # NaN for NaN
        if KIND == 3:  # relu
            return positive
        else:  # relu2
            return positive * positive


@triton.jit
def add_adapted(
    y, first, first_t, width, num_rows, slots, entries, entry_size, sums, stride_sums,
    ADAPTED: tl.constexpr, EPILOGUE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Return sums y [BLOCK_T, BLOCK_N] float32 with the adapters' change: y without an adapter; otherwise y times the
    adapter's scales plus its sums, or, for a replacement, the sums alone."""
    SIDES: tl.constexpr = 2 if EPILOGUE >= GATED else 1
    token = first_t + tl.arange(0, BLOCK_T)
    slot = tl.load(slots + token, mask=token < num_rows, other=-1)
    entry = entries + tl.maximum(slot, 0).to(tl.int64) * entry_size
    kind = tl.load(entry + _KIND, mask=slot >= 0, other=0)
    channel = first * SIDES + tl.arange(0, BLOCK_N)
    column = channel
    if ADAPTED == 2:
        column = channel // (2 * UNIT) * UNIT + channel % UNIT + channel // UNIT % 2 * (width * SIDES // 2)
    in_n = (channel < width * SIDES)[None, :]
    scales = tl.load(entry + _SCALES, mask=slot >= 0, other=0)
    is_scaled = (scales != 0) | (kind == _REPLACES)
    if tl.max(is_scaled.to(tl.int32), 0) > 0:  # rare, and it takes registers for one more tile
        at = scales.to(tl.pointer_type(tl.float32))[:, None] + column[None, :]
        scale = tl.load(at, mask=(scales != 0)[:, None] & in_n, other=0.0)
        y = tl.where(is_scaled[:, None], y * scale, y)
    at = sums + token.to(tl.int64)[:, None] * stride_sums + column[None, :]
    adapted = (kind > 0)[:, None]
    return tl.where(adapted, y + tl.load(at, mask=adapted & in_n, other=0.0), y)


@triton.jit
def finish(
    y, first, first_t, columns, width, num_rows, bias, out, stride_out, scale,
    EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Apply bias and epilogue to sums y [BLOCK_T, BLOCK_N] float32, and write `columns` columns of `out` [num_rows,
    width] from `first` on."""
    SIDES: tl.constexpr = 2 if EPILOGUE >= GATED else 1
    if HAS_BIAS:
        channels = first * SIDES + tl.arange(0, BLOCK_N)
        y += tl.load(bias + channels, mask=channels < width * SIDES, other=0.0)[None, :]
    if EPILOGUE >= GATED:
        pairs = tl.reshape(y, (BLOCK_T, BLOCK_N // (2 * UNIT), 2, UNIT))
        gate, up = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        gate = tl.reshape(gate, (BLOCK_T, BLOCK_N // 2))
        up = tl.reshape(up, (BLOCK_T, BLOCK_N // 2))
        y = activate(gate, EPILOGUE - GATED) * up
    if EPILOGUE < 0:
        y = activate(y, EPILOGUE - ACTIVATED)
    n = tl.arange(0, BLOCK_N // SIDES)
    tokens = first_t + tl.arange(0, BLOCK_T)
    mask = (tokens < num_rows)[:, None] & ((n < columns) & (first + n < width))[None, :]
    at = out + tokens.to(tl.int64)[:, None] * stride_out + (first + n)[None, :]
    if EPILOGUE == ADD:
        y = tl.fma(y, scale, tl.load(at, mask=mask, other=0.0).to(tl.float32))
    tl.store(at, y.to(out.dtype.element_ty), mask=mask)
