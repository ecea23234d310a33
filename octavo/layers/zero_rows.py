"""Rows of zeros in a recorded step, to which rows of other arrays are added side by side."""

import numpy as np

from octavo.layers.parameters import Parameters
from octavo.ops import Array

_MOST_INPUTS = 32


class ZeroRows:
    """Rows [T, width] beside x [T, N]. A product with a narrow matrix of zeros makes them, as it can be recorded."""

    def __init__(self, num_in: int, width: int, parameters: Parameters) -> None:
        self._ops, self._dtype, self._num_inputs = parameters.ops, parameters.dtype, min(num_in, _MOST_INPUTS)
        self._zeros = parameters.packed(np.zeros((width, self._num_inputs), parameters.dtype))

    def of(self, x: Array) -> Array:
        """Return zeros in the model's type. x must be finite."""
        return self._ops.linear(x[:, : self._num_inputs], self._zeros, self._dtype)

    def with_zeros_before(self, x: Array) -> Array:
        """Return x [T, N] with zeros before it: [T, width]."""
        rows = self.of(x)
        self._ops.add(rows[:, rows.shape[1] - x.shape[1] :], x)
        return rows
