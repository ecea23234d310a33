"""Rotary position embedding tables: cosines and sines for every position, with the configured stretching."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from octavo.models.decoder_config import RopeConfig


def rotary_table(rope: RopeConfig, max_positions: int) -> Tensor:
    """[max_positions, rotary_dim] float32: half of it cosines, half sines (Su et al. 2021)."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim
    frequencies = _stretched(1.0 / rope.theta**exponents, rope)
    angles = torch.outer(torch.arange(max_positions).float(), frequencies)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def identity_table(rotary_dim: int, max_positions: int) -> Tensor:
    """The table that rotates nothing, for layers without positions."""
    table = torch.zeros(max_positions, rotary_dim)
    table[:, : rotary_dim // 2] = 1.0
    return table


def _stretched(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        # Llama 3.1's rule: low frequencies are divided by the factor, high ones kept, those between interpolated.
        wavelengths = 2 * math.pi / frequencies
        turns = rope.original_max_position / wavelengths
        keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep = keep.clamp(0.0, 1.0)
        return frequencies * keep + frequencies / rope.factor * (1 - keep)
    return frequencies
