"""Rotary position tables: cosines and sines for every position, with the configured scaling. Also ALiBi slopes,
attention temperatures and buckets of distances."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_POSITIONS_AT_ONCE = 1024  # positions computed together: their float64 angles stay in a processor's cache
_S3, _S5, _S7, _S9 = -0.16666659550425889, 0.008333066245959517, -0.00019809602892553602, 2.6057806182637604e-06


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Settings of rotary positions: the base, the number of rotated elements of a head, the scaling of positions."""

    theta: float
    rotary_dim: int
    interleaved: bool = False  # the checkpoint's pairs are neighbours; Octavo's are `halves`
    reversed: bool = False  # rotates in the other direction
    kind: str = "default"  # one of `ROPE_KINDS`
    factor: float = 1.0
    attention_factor: float = 1.0  # factor of cosines and sines
    original_max_position: int = 8192  # "llama3", "yarn", "longrope", "dynamic"
    low_freq_factor: float = 1.0  # "llama3"
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # "yarn"
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()  # "longrope"
    long_factors: tuple[float, ...] = ()
    num_turning: int = 0  # "proportional": number of elements of rotary_dim that are rotated
    # For each pair, the position that rotates it: time (0), height (1) or width (2). Empty: a token has one position.
    axes: tuple[int, ...] = ()


def halves(rope: RopeConfig | None, size: int) -> NDArray[np.intp]:
    """Return the order of a head's `size` elements that turns the checkpoint's pairs into two halves."""
    order = np.arange(size)
    if rope is not None and rope.interleaved:
        order[: rope.rotary_dim] = order[: rope.rotary_dim].reshape(-1, 2).T.reshape(-1)
    return order


ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")


def rotary_table(rope: RopeConfig, max_positions: int) -> NDArray[np.float32]:
    """Return the table [max_positions, rotary_dim] float32: half of a row cosines, half sines (Su et al. 2021).

    In `transformers`, "dynamic" and "longrope" depend on the length of a sequence. Here they depend on the most
    positions that a sequence may have, so that the table is the same for all sequences.
    """
    frequencies = _frequencies(rope, max_positions)
    half = len(frequencies)
    table = np.empty((max_positions, 2 * half), np.float32)

    def fill(begin: int) -> None:
        rows = slice(begin, min(begin + _POSITIONS_AT_ONCE, max_positions))
        positions = np.arange(rows.start, rows.stop, dtype=np.float32)
        angles = np.outer(positions, frequencies).astype(np.float64)
        table[rows, half:] = _sine(angles, 0.0)
        table[rows, :half] = _sine(angles, 0.5)
        if rope.reversed:
            table[rows, half:] *= -1
        if rope.attention_factor != 1.0:
            table[rows] *= np.float32(rope.attention_factor)

    starts = range(0, max_positions, _POSITIONS_AT_ONCE)
    if len(starts) == 1:
        fill(0)
        return table
    with ThreadPoolExecutor() as pool:  # numpy releases the interpreter's lock
        for _ in pool.map(fill, starts):
            pass
    return table


def _sine(angles: NDArray[np.float64], shift: float) -> NDArray[np.float64]:
    """Return sin(angles + shift * pi) for shifts 0 and 0.5, within 0.61 units in the last place of float32.

    Sines of float32 differ in the last bit between libraries and processors, and so would answers. This function is the
    same everywhere: a polynomial in float64. Its coefficients are fitted to torch's sine on x86. For angles up to
    10,000 about 1 of 100,000 numbers differs from torch, so answers equal those of versions that used torch's sine.
    """
    half_turns = np.rint(angles * (1 / np.pi) - shift)
    rest = angles - half_turns * np.pi - shift * np.pi
    square = rest * rest
    sine = rest + rest * square * (_S3 + square * (_S5 + square * (_S7 + square * _S9)))
    is_odd = half_turns.astype(np.int64) & 1 == 1
    return np.where(is_odd == (shift == 0), -sine, sine)


def identity_table(max_positions: int) -> NDArray[np.float32]:
    """Return the table that rotates no element, for layers without rotary positions: [max_positions, 0]."""
    return np.zeros((max_positions, 0), np.float32)


def alibi_slopes(num_heads: int, largest: float) -> NDArray[np.float32]:
    """Return ALiBi's slopes [num_heads]: a head's scores fall by its slope with each position of distance. Slopes are
    powers of two down to 2^-largest (Press et al. 2022)."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-largest * (i + 1) / power) for i in range(power)]
    between = [2.0 ** (-largest / 2 * (i + 1) / power) for i in range(0, 2 * power, 2)]
    return np.array((slopes + between)[:num_heads], np.float32)


@dataclass(frozen=True, slots=True)
class AttentionTemperature:
    """Factors of queries that keep attention as sharp among more keys (Nakanishi 2025).

    The factor at position p is 1 + rate * log(1 + p // length), or (1 + p / length)^rate if it `is_power`. Positions
    count from `first`."""

    rate: float
    length: int
    first: int = 0
    is_power: bool = False

    def table(self, max_positions: int) -> NDArray[np.float32]:
        """Return the factors by position: [max_positions] float32."""
        positions = np.arange(max_positions) + self.first
        if self.is_power:
            return ((1 + positions / self.length) ** self.rate).astype(np.float32)
        return (1 + self.rate * np.log1p(positions // self.length)).astype(np.float32)


def _frequencies(rope: RopeConfig, max_positions: int) -> NDArray[np.float32]:
    """Return the angles from one position to the next: [rotary_dim / 2], in float32 as `transformers` computes them."""
    theta, size, factor = np.float64(rope.theta), rope.rotary_dim, np.float32(rope.factor)
    if rope.kind == "dynamic":
        longer = max(max_positions, rope.original_max_position) / rope.original_max_position
        theta *= (rope.factor * longer - (rope.factor - 1)) ** (size / (size - 2))
    exponents = np.arange(0, size, 2).astype(np.float32) / np.float32(size)
    powers = np.power(theta, exponents.astype(np.float64)).astype(np.float32)
    if rope.kind == "longrope":
        is_long = max_positions > rope.original_max_position
        powers *= np.array(rope.long_factors if is_long else rope.short_factors, np.float32)
    frequencies = np.float32(1.0) / powers
    if rope.kind in ("linear", "proportional"):
        frequencies = frequencies / factor
    if rope.kind == "proportional":
        frequencies[rope.num_turning // 2 :] = 0
    if rope.kind == "llama3":
        # Llama 3.1's rule: low frequencies are divided by the factor, high frequencies are kept, frequencies in between
        # are interpolated.
        wavelengths = np.float32(1.0) / frequencies * np.float32(2 * math.pi)
        turns = np.float32(1.0) / wavelengths * np.float32(rope.original_max_position)
        low, high = rope.low_freq_factor, rope.high_freq_factor
        keep = np.clip((turns - np.float32(low)) / np.float32(high - low), np.float32(0.0), np.float32(1.0))
        frequencies = frequencies * keep + frequencies / factor * (1 - keep)
    if rope.kind == "yarn":
        # The same, but the bounds are numbers of turns and the interpolation goes by dimension (Peng et al. 2023).
        low, high = (_dimension_of(turns, rope) for turns in (rope.beta_fast, rope.beta_slow))
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        high += 0.001 * (low == high)
        ramp = (np.arange(size // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
        keep = 1 - np.clip(ramp, np.float32(0.0), np.float32(1.0))
        frequencies = np.float32(1.0) / (factor * powers) * (1 - keep) + frequencies * keep
    return frequencies


def _dimension_of(turns: float, rope: RopeConfig) -> float:
    """Return the dimension that makes `turns` turns over the original length."""
    return rope.rotary_dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def distance_buckets(distances: NDArray[np.int64], num_buckets: int, longest: int = 128) -> NDArray[np.int64]:
    """Return the buckets of distances from queries to keys (Raffel et al. 2020).

    Half of the buckets are for earlier keys, half for later keys. In each half, each short distance has a bucket; the
    other buckets are logarithmic steps up to `longest`."""
    half = num_buckets // 2
    exact, size = half // 2, np.abs(distances)
    # In float32, as in training: rounding decides the bucket at the borders.
    steps = np.log(np.maximum(size, 1).astype(np.float32) / np.float32(exact)) / np.float32(math.log(longest / exact))
    far = np.minimum(exact + (steps * np.float32(half - exact)).astype(np.int64), half - 1)
    return np.where(size < exact, size, far) + np.where(distances > 0, half, 0)
