"""Reads AWQ's tensors (Lin et al. 2023) as packed words. Codes have four bits: in the layout "gemm" a word holds eight
outputs, in the layout "gemv" eight elements of k."""

from octavo.quantization.array_functions import transposed
from octavo.quantization.codes import groups_of
from octavo.quantization.packed_words import PackedWords, unpack_outputs, unpack_words
from octavo.quantization.stored import StoredWeight


def words(stored: StoredWeight) -> PackedWords:
    """Return a matrix of the layout "gemm", exactly as stored."""
    tensors = stored.tensors
    zeros = unpack_outputs(transposed(tensors["qzeros"]))
    groups = groups_of(4, stored.shape[1], tensors["scales"].T, zeros)
    return PackedWords(tensors["qweight"].T, 4, groups, by_outputs=True)


def words_gemv(stored: StoredWeight) -> PackedWords:
    """Return a matrix of the layout "gemv". Its scales and zeros have padding after the last group, which is cut."""
    tensors, k = stored.tensors, stored.shape[1]
    num_groups = k // tensors["group"].item()
    zeros = unpack_words(tensors["qzeros"], 4)[:, :num_groups]
    return PackedWords(tensors["qweight"], 4, groups_of(4, k, tensors["scales"][:, :num_groups], zeros))
