"""Rotary position embedding tables: cosines and sines for every position, with the configured stretching."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_POSITIONS_AT_ONCE = 1024  # in float64: what is computed at once stays in a processor's cache
_S3, _S5, _S7, _S9 = -0.16666659550425889, 0.008333066245959517, -0.00019809602892553602, 2.6057806182637604e-06


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: its base, how many elements of a head turn, and how positions are stretched."""

    theta: float
    rotary_dim: int
    kind: str = "default"  # "default", "linear" or "llama3"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


def rotary_table(rope: RopeConfig, max_positions: int) -> NDArray[np.float32]:
    """[max_positions, rotary_dim] float32: half of it cosines, half sines (Su et al. 2021)."""
    exponents = np.arange(0, rope.rotary_dim, 2).astype(np.float32) / np.float32(rope.rotary_dim)
    powers = np.power(np.float64(rope.theta), exponents.astype(np.float64)).astype(np.float32)
    frequencies = _stretched(np.float32(1.0) / powers, rope)
    half = len(frequencies)
    table = np.empty((max_positions, 2 * half), np.float32)
    for begin in range(0, max_positions, _POSITIONS_AT_ONCE):
        rows = slice(begin, min(begin + _POSITIONS_AT_ONCE, max_positions))
        positions = np.arange(rows.start, rows.stop, dtype=np.float32)
        angles = np.outer(positions, frequencies).astype(np.float64)
        table[rows, half:] = _sine(angles, 0.0)
        table[rows, :half] = _sine(angles, 0.5)
    return table


def _sine(angles: NDArray[np.float64], shift: float) -> NDArray[np.float64]:
    """sin(angles + shift * pi) for shifts 0 and 0.5, within 0.61 units in the last place of float32.

    Sines of float32 differ between libraries and processors in the last bit, and answers with them. This one is the
    same everywhere: a polynomial in float64. Its coefficients were fitted to torch's sine on x86, which for angles up
    to 10,000 differs in some 1 of 100,000 numbers; so answers are those of the versions that computed this in torch.
    """
    half_turns = np.rint(angles * (1 / np.pi) - shift)
    rest = angles - half_turns * np.pi - shift * np.pi
    square = rest * rest
    sine = rest + rest * square * (_S3 + square * (_S5 + square * (_S7 + square * _S9)))
    is_odd = half_turns.astype(np.int64) & 1 == 1
    return np.where(is_odd == (shift == 0), -sine, sine)


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
        wavelengths = np.float32(1.0) / frequencies * np.float32(2 * math.pi)
        turns = np.float32(1.0) / wavelengths * np.float32(rope.original_max_position)
        low, high = rope.low_freq_factor, rope.high_freq_factor
        keep = np.clip((turns - np.float32(low)) / np.float32(high - low), np.float32(0.0), np.float32(1.0))
        frequencies = frequencies * keep + frequencies / np.float32(rope.factor) * (1 - keep)
    return frequencies
