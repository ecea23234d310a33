"""Packed weights as the products take them: frozen data on one device. `pack` makes and `products` uses them.

Rows of a gated matrix are 8 of the gate, 8 of up, and so on, so that one tile of a product holds both; the last of each
may be padding. `activation_dtype` is that of the codes to which activations are quantized for the matrix, if they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_WORDS = 32  # of codes, that lie together


@dataclass(frozen=True, slots=True)
class Workspace:
    """Where programs of one product leave partial sums for each other; products on one stream share it. `tickets` are
    all zero between products."""

    partials: Tensor  # float32
    tickets: Tensor  # int32


def _num_bytes(*tensors: Tensor | None) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


@dataclass(frozen=True, slots=True)
class FloatWeight:
    """Floats [N, K] of one dtype. Rows start at multiples of 16 bytes."""

    out_features: int
    in_features: int
    gated: bool
    data: Tensor
    bias: Tensor | None  # [N] float32, as in the others

    @property
    def num_bytes(self) -> int:
        return _num_bytes(self.data, self.bias)

    @property
    def activation_dtype(self) -> None:
        return None


@dataclass(frozen=True, slots=True)
class IntWeight:
    """Codes of 4 or 8 bits, with a scale for each `group` (16 or a multiple of 32) elements of a row. An element is

        factor * (scale * code + minimum), or without minima factor * scale * (code - 2 ** (bits - 1))

    `codes` [N, blocks * 32] int32: word j of a block of 32 words holds elements j, 32 + j, ... of 256 (four bits) or
    128 (eight), the lowest first: unpacking a tile of words gives tiles of 32 elements of k without moving anything.
    `scales` is int32 too, [words, N]: with minima a word for each group, which is two float16, scale (low) and minimum;
    without, two groups' scales. The factor is a power of two that takes the scales into float16's range.
    """

    out_features: int
    in_features: int
    gated: bool
    bits: int
    group: int
    minima: bool
    factor: float
    codes: Tensor
    scales: Tensor
    bias: Tensor | None
    workspace: Workspace | None  # of all such matrices

    @property
    def num_bytes(self) -> int:
        return _num_bytes(self.codes, self.scales, self.bias)

    @property
    def activation_dtype(self) -> None:
        return None


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """Codes [N, K], int8 or float8_e4m3fn, and a scale [N] float32 for each row; K is a multiple of 16."""

    out_features: int
    in_features: int
    gated: bool
    codes: Tensor
    scales: Tensor
    bias: Tensor | None

    @property
    def num_bytes(self) -> int:
        return _num_bytes(self.codes, self.scales, self.bias)

    @property
    def activation_dtype(self) -> torch.dtype:
        return self.codes.dtype


PackedWeight = FloatWeight | IntWeight | ScaledWeight
