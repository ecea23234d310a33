"""SqueezeLLM's matrices (Kim et al. 2024): each output has its own table, and a few elements are stored apart.

"SQUEEZELLM": "qweight" int32 [K * bits / 32, N], indices of 3 or 4 bits, lowest bits first, as GPTQ packs its codes;
"table" [N, 2^bits]; and, if the checkpoint has a sparse part, "places" int32 and "added" [N, most], the columns and the
numbers that are added there. Shorter rows are filled up with places of -1.
"""

import numpy as np
from numpy.typing import NDArray

from octavo.quantization.array_functions import Array, arange, cast, transposed
from octavo.quantization.packed_words import unpack_words
from octavo.quantization.stored import StoredWeight


def values(stored: StoredWeight) -> Array:
    """Return the values of a matrix, float32 [N, K]."""
    table, words = stored.tensors["table"], stored.tensors["qweight"]
    codes = unpack_words(transposed(words), 32 * words.shape[0] // stored.shape[1])
    rows = arange(codes, stored.shape[0])[:, None]
    found = cast(table, "float32")[rows, cast(codes, "int64")]
    if "places" in stored.tensors:
        places, added = cast(stored.tensors["places"], "int64"), cast(stored.tensors["added"], "float32")
        there = places >= 0  # no place occurs twice in a row
        found[(rows + 0 * places)[there], places[there]] += added[there]
    return found


def by_output(
    starts: NDArray[np.int32], columns: NDArray[np.int32], numbers: NDArray[np.float32]
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return compressed sparse rows, as files have them, as "places" and "added". Row i has entries starts[i] to
    starts[i + 1] - 1 of `columns` and `numbers`."""
    counts = np.diff(starts)
    shape = (len(counts), int(counts.max(initial=0)))
    places, added = np.full(shape, -1, np.int32), np.zeros(shape, np.float32)
    there = np.arange(shape[1]) < counts[:, None]
    places[there], added[there] = columns, numbers
    return places, added
