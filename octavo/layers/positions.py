"""Tables of positions that are added to the embedding: learned tables, or sines and cosines (Vaswani et al. 2017)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.layers.parameters import Parameters
from octavo.ops import Array


@dataclass(frozen=True, slots=True)
class PositionsDescription:
    """A table of positions: position p has row p + offset. A learned table has the `name` of the checkpoint's tensor,
    and `rows`. Without a name the table is sines and cosines, whose frequencies fall from 1 to 1 / 10,000 in `steps`
    steps."""

    name: str | None = None
    rows: int = 0
    offset: int = 0
    steps: int = 0


def position_table(positions: PositionsDescription, parameters: Parameters, size: int) -> Array:
    """Return the table [positions, size], beginning with position 0."""
    if positions.name is not None:
        table = parameters.weights.take(positions.name, (positions.rows, size))
    else:
        table = _sinusoids(parameters.max_positions + positions.offset, size, positions.steps)
    return parameters.ops.place(table[positions.offset :])


def _sinusoids(num_positions: int, size: int, steps: int) -> NDArray[np.float32]:
    """Return the table [num_positions, size]: the first half of a row is sines, the second half cosines."""
    frequencies = np.power(10000.0, -np.arange(size // 2) / steps)
    angles = np.outer(np.arange(num_positions), frequencies)
    return np.concatenate([np.sin(angles), np.cos(angles)], 1).astype(np.float32)
