"""AWQ's tensors (Lin et al. 2023), as codes, scales and minima."""

from __future__ import annotations

from torch import Tensor

from octavo.quantization.codes import Codes, grouped
from octavo.quantization.gptq import unpack_words

# Of the eight outputs that a word has nibbles of, where each lies. Lowest nibble first they are 0 2 4 6 1 3 5 7.
_NIBBLE_OF_OUTPUT = [0, 4, 1, 5, 2, 6, 3, 7]


def unpack(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> Codes:
    """qweight int32 [K, N / 8], qzeros int32 [groups, N / 8], scales [groups, N]; four bits."""
    return grouped(4, _nibbles(qweight).T, scales.T, _nibbles(qzeros).T)


def _nibbles(words: Tensor) -> Tensor:
    """int32 [R, W] -> uint8 [R, 8 * W] in the order of outputs."""
    return unpack_words(words, 4).view(len(words), -1, 8)[..., _NIBBLE_OF_OUTPUT].flatten(-2)
