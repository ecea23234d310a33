"""Packed weights as the products take them: frozen data on one device. `pack` makes and `products` uses them.

Rows of a gated matrix are 8 of the gate, 8 of up, and so on, so that one tile of a product holds both; the last of each
may be padding. `activation_dtype` is that of the codes to which activations are quantized for the matrix, if they are.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

BLOCK_WORDS = 32  # of codes, that lie together


@dataclass(frozen=True, slots=True)
class Workspace:
    """Where programs of one product leave partial sums for each other; products on one stream share it. `tickets` are
    all zero between products."""

    partials: Tensor  # float32
    tickets: Tensor  # int32


@dataclass(frozen=True, slots=True)
class _Weight:
    """What all have."""

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
    bias: Tensor | None  # [N] float32, as in the others


@dataclass(frozen=True, slots=True)
class IntWeight(_Weight):
    """Codes of 4 or 8 bits, with a scale for each `group` (16 or a multiple of 32) elements of a row. An element is

        factor * (scale * code + minimum), or without minima factor * scale * (code - 2 ** (bits - 1))

    `codes` [N, blocks * 32] int32: word j of a block of 32 words holds elements j, 32 + j, ... of 256 (four bits) or
    128 (eight), the lowest first: unpacking a tile of words gives tiles of 32 elements of k without moving anything.
    `scales` is int32 too, [words, N]: with minima a word for each group, which is two float16, scale (low) and minimum;
    without, two groups' scales. The factor is a power of two that takes the scales into float16's range.
    """

    bits: int
    group: int
    minima: bool
    factor: float
    codes: Tensor
    scales: Tensor
    bias: Tensor | None
    workspace: Workspace | None  # of all such matrices
    order: Tensor | None = None  # int64 [K]: input i of the matrix is element order[i] of the rows


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
