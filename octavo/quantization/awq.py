"""AWQ's tensors (Lin et al. 2023), as codes, scales and minima. Four bits: in the layout "gemm" a word holds eight
outputs, in the layout "gemv" eight elements of k."""

from __future__ import annotations

from octavo.quantization.arrays import Array, cast, namespace, transposed
from octavo.quantization.codes import Codes, grouped
from octavo.quantization.gptq import unpack_words
from octavo.quantization.stored import StoredWeight

# Of the eight outputs that a word has nibbles of, where each lies. Lowest nibble first they are 0 2 4 6 1 3 5 7.
_NIBBLE_OF_OUTPUT = [0, 4, 1, 5, 2, 6, 3, 7]


def unpack(stored: StoredWeight) -> Codes:
    """Exactly what the file's tensors say."""
    tensors = stored.tensors
    return grouped(4, _nibbles(tensors["qweight"]), tensors["scales"].T, _nibbles(tensors["qzeros"]))


def unpack_gemv(stored: StoredWeight) -> Codes:
    """Scales and zeros go on beyond the last group."""
    tensors, num_groups = stored.tensors, stored.shape[1] // stored.tensors["group"].item()
    zeros = unpack_words(tensors["qzeros"], 4)[:, :num_groups]
    return grouped(4, unpack_words(tensors["qweight"], 4), tensors["scales"][:, :num_groups], zeros)


def _nibbles(words: Array) -> Array:
    """int32 [R, W] -> uint8 [8 * W, R], a row for each output."""
    words, num_columns = transposed(words), words.shape[0]
    rows = [cast((words >> 4 * nibble) & 15, "uint8") for nibble in _NIBBLE_OF_OUTPUT]
    return namespace(words).stack(rows, axis=1).reshape(-1, num_columns)
