"""Rotary position embedding tables: cosines and sines for every position, with the configured stretching."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

RopeKind = Literal["default", "linear", "llama3"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: its base, how many elements of a head turn, and how positions are stretched."""

    theta: float
    rotary_dim: int
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


def rotary_table(rope: RopeConfig, max_positions: int) -> NDArray[np.float32]:
    """[max_positions, rotary_dim] float32: half of it cosines, half sines (Su et al. 2021).

    Angles are float32, as models were trained with. Powers, cosines and sines are computed in float64 and rounded once:
    float32 functions differ between libraries and processors in the last bit, and answers with them.
    """
    exponents = np.arange(0, rope.rotary_dim, 2).astype(np.float32) / np.float32(rope.rotary_dim)
    powers = np.power(np.float64(rope.theta), exponents.astype(np.float64)).astype(np.float32)
    frequencies = _stretched(np.float32(1.0) / powers, rope)
    half = len(frequencies)
    table = np.empty((max_positions, 2 * half), np.float32)
    for begin in range(0, max_positions, 4096):  # in float64 a long table would be large
        positions = np.arange(begin, min(begin + 4096, max_positions), dtype=np.float32)
        angles = np.outer(positions, frequencies).astype(np.float64)
        table[begin : begin + 4096, :half] = np.cos(angles)
        table[begin : begin + 4096, half:] = np.sin(angles)
    return table


def identity_table(rotary_dim: int, max_positions: int) -> NDArray[np.float32]:
    """The table that rotates nothing, for layers without rotary positions."""
    table = np.zeros((max_positions, rotary_dim), np.float32)
    table[:, : rotary_dim // 2] = 1.0
    return table


def _stretched(frequencies: NDArray[np.float32], rope: RopeConfig) -> NDArray[np.float32]:
    if rope.kind == "linear":
        return frequencies / np.float32(rope.factor)
    if rope.kind == "llama3":
        # Llama 3.1's rule: low frequencies are divided by the factor, high ones kept, those between interpolated.
        wavelengths = np.float32(2 * math.pi) / frequencies
        turns = np.float32(rope.original_max_position) / wavelengths
        low, high = np.float32(rope.low_freq_factor), np.float32(rope.high_freq_factor)
        keep = np.clip((turns - low) / (high - low), np.float32(0.0), np.float32(1.0))
        return frequencies * keep + frequencies / np.float32(rope.factor) * (1 - keep)
    return frequencies
