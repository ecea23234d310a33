"""Counter-based random numbers: one uniform number for each (seed, completion index, position), independent of other
requests.

A request with a seed therefore gets the same tokens alone, in any batch and after any preemption. There is no generator
state to keep, to copy at a fork or to restore.
"""

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniform(
    seeds: NDArray[np.uint64], indices: NDArray[np.uint64], positions: NDArray[np.uint64]
) -> NDArray[np.float64]:
    """Return [N] numbers in [0, 1) with 53 random bits: SplitMix64's finalizer (Steele et al. 2014) over three
    counters."""
    with np.errstate(over="ignore"):
        bits = _mix(_mix(_mix(seeds + _GOLDEN) + indices) + positions) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) + _GOLDEN
