"""Packed weights: frozen data on one device. `pack` makes them, `products` uses them.

The rows of a gated matrix alternate: 8 rows of gate, 8 rows of up, and so on, so that one tile of a product holds both.
The last rows of gate and of up may be padding. `activation_dtype` is the type of codes to which activations are
quantized for the matrix; None if they are not quantized.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

BLOCK_WORDS = 32  # number of words in a block of codes


@dataclass(frozen=True, slots=True)
class Workspace:
    """Memory for partial sums that programs of one product exchange; products on one stream share it. All `tickets` are
    zero between products."""

    partials: Tensor  # float32
    tickets: Tensor  # int32


@dataclass(frozen=True, slots=True)
class _Weight:
    """The fields that all packed weights have."""

    out_features: int
    in_features: int
    gated: bool

    @property
    def takes_float32(self) -> bool:
        return False

    @property
    def num_bytes(self) -> int:
        values = (getattr(self, field.name) for field in fields(self))
        return sum(value.nbytes for value in values if isinstance(value, Tensor))

    @property
    def activation_dtype(self) -> torch.dtype | None:
        return None


@dataclass(frozen=True, slots=True)
class FloatWeight(_Weight):
    """Floats [N, K] of one dtype. Rows start at multiples of 16 bytes."""

    data: Tensor
    bias: Tensor | None  # [N] float32


@dataclass(frozen=True, slots=True)
class IntWeight(_Weight):
    """Codes of 4 or 8 bits, with a scale for each `group` of elements (16 or a multiple of 32) of a row. An element is

        factor * (scale * code + minimum), or without minima factor * scale * (code - 2 ** (bits - 1)),
        or with a table factor * scale * (table[code] - 128)

    `codes` is [N, blocks * 32] int32. Word j of a block of 32 words holds elements j, 32 + j, ... of 256 elements (four
    bits) or 128 elements (eight bits), the first in the lowest bits. So unpacking a tile of words gives tiles of 32
    neighbouring elements of k without moving data between threads. `scales` is [words, N] int32. With minima a word is
    one group's scale (low half) and minimum, both float16; without minima it is two groups' scales. The factor is a
    power of two that brings the scales into float16's range. `table` is [4] int32: sixteen entries of a byte, the first
    in the lowest bits; codes of four bits without minima may have one.
    """

    bits: int
    group: int
    minima: bool
    factor: float
    codes: Tensor
    scales: Tensor
    bias: Tensor | None
    workspace: Workspace | None  # shared with other matrices
    order: Tensor | None = None  # int64 [K]: input i of the matrix is element order[i] of the rows
    table: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ScaledWeight(_Weight):
    """Codes [N, K], int8 or float8_e4m3fn, and a scale [N] float32 for each row; K is a multiple of 16."""

    codes: Tensor
    scales: Tensor
    bias: Tensor | None

    @property
    def activation_dtype(self) -> torch.dtype:
        return self.codes.dtype


PackedWeight = FloatWeight | IntWeight | ScaledWeight
