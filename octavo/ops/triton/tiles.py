"""What the kernels of all matrix products share: which tile a program computes, the product of two tiles, the epilogue.

Products are computed transposed, W x^T: output channels are the rows of the tensor cores' instruction and tokens its
columns, of which Hopper takes 8 to 256 at a time. So one family of instructions serves one token and thousands. An
output is one chain of sums in float32 over k in ascending steps of 16, whatever the shape of the tile that it is in:
that is why a token's result does not depend on the others.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

# Epilogues: what becomes of a finished sum y.
STORE = tl.constexpr(0)  # out = y
ADD = tl.constexpr(1)  # out += scale * y
ACTIVATED = tl.constexpr(-8)  # out = activation(y); plus the place in `ACTIVATIONS`
GATED = tl.constexpr(2)  # out = activation(y of a gate's row) * y of an up row; plus the place in `ACTIVATIONS`

# Channels come in units of 8, so that the compiler sees that masks change only between them and writes 16 bytes at
# once. A gated matrix has 8 rows of the gate, then 8 of up, and so on.
UNIT = tl.constexpr(8)

# Major capabilities of the machines with 227 KB of shared memory, whose tensor cores take 64 channels at a time.
LARGE_SHARED = (9, 10)

# What the kernels of products read of an adapter's row in `adapter_tables`.
KIND, SCALES = 0, 1
REPLACES = 2
_KIND, _SCALES, _REPLACES = tl.constexpr(KIND), tl.constexpr(SCALES), tl.constexpr(REPLACES)

# The interpreter multiplies bfloat16 as if they were integers (up to Triton 3.9).
_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows in tiles of `block_t`, each of which is multiplied with one matrix of a stack."""

    num_experts: int
    block_t: int
    tile_experts: Tensor  # [tiles] int32; -1: nothing is computed
    factors: Tensor | None = None  # [num_experts] float32, of matrices of codes


@dataclass(frozen=True, slots=True)
class Added:
    """What adapters add to a product, as `octavo.ops.triton.lora` has computed it."""

    slots: Tensor  # [T] int32: the slot of each row's adapter, or -1
    entries: Tensor  # [slots, entry_size] int64, of `adapter_tables.TritonAdapterTable`
    entry_size: int
    sums: Tensor  # [T, columns] float32, of rows with adapters
    is_gated: bool  # the matrix is, whose rows are not in the order of the columns


def adapted_arguments(added: Added | None) -> dict[str, Any]:
    """What kernels take for `add_adapted`. ADAPTED is 0 where nothing is added, 2 of gated matrices."""
    if added is None:
        return {"slots": None, "entries": None, "entry_size": 0, "added": None, "stride_added": 0, "ADAPTED": 0}
    return {
        "slots": added.slots, "entries": added.entries, "entry_size": added.entry_size, "added": added.sums,
        "stride_added": added.sums.stride(0), "ADAPTED": 2 if added.is_gated else 1,
    }  # fmt: skip


@triton.jit
def place(width, num_rows, columns, BLOCK_T: tl.constexpr, GROUP_T: tl.constexpr):
    """-> the first of the `columns` of the output and the first token of this program's tile.

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
    """acc + w [N, K] x [K, T], summed in float32 (int32 for integers)."""
    if _INTERPRETED and w.dtype.is_bf16():
        w, x = w.to(tl.float32), x.to(tl.float32)
    if w.dtype.is_fp8() and PROMOTE > 0:
        # Hopper keeps some 14 bits of sums of 8-bit floats: they are added up elsewhere every PROMOTE elements.
        return tl.dot(w, x, acc, max_num_imprecise_acc=PROMOTE, out_dtype=acc.dtype)
    return tl.dot(w, x, acc, input_precision="ieee", out_dtype=acc.dtype)


@triton.jit
def activate(x, KIND: tl.constexpr):
    """float32 -> float32, by the place of the function in `ACTIVATIONS`."""
    if KIND == 0:  # silu
        return x / (1.0 + tl.exp(-x))
    elif KIND == 1:  # gelu
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == 2:  # gelu_tanh, whose tanh is a logistic function of twice its argument
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
    """Sums y [BLOCK_T, BLOCK_N] float32 of `finish`, and what adapters make of them: y, y times their scales plus what
    they add, or that alone."""
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
    if tl.max(is_scaled.to(tl.int32), 0) > 0:  # seldom; and registers hold one more tile at a time
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
    """Sums y [BLOCK_T, BLOCK_N] float32 -> `columns` columns of `out` [num_rows, width] from `first` on."""
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
