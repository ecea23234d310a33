"""Codes of few bits in 32-bit words, as in files of GPTQ, AWQ and compressed-tensors, and functions that unpack
them."""

from dataclasses import dataclass

from octavo.quantization.array_functions import Array, arange, cast, namespace, transposed
from octavo.quantization.codes import Codes, Groups
from octavo.quantization.layout import Layout

# The nibble of each of the eight outputs in a word of AWQ: from the lowest nibble on, the outputs are 0 2 4 6 1 3 5 7.
_NIBBLE_OF_OUTPUT = [0, 4, 1, 5, 2, 6, 3, 7]


@dataclass(frozen=True, slots=True)
class PackedWords:
    """A matrix [N, K] whose codes of `bits` bits are still in words.

    `words` are int32 [N, K * bits / 32] along k, lowest bits first; with `by_outputs` [N / 8, K], AWQ's nibbles of
    eight outputs. They are often a transposed view of the file's tensor. `order` is as in `Codes`.
    """

    words: Array
    bits: int
    groups: Groups
    order: Array | None = None
    by_outputs: bool = False

    @property
    def scales(self) -> Array:
        return self.groups.scales

    @property
    def shape(self) -> tuple[int, int]:
        """The size (N, K) of the matrix."""
        num_rows, num_columns = self.words.shape
        return (8 * num_rows, num_columns) if self.by_outputs else (num_rows, num_columns * 32 // self.bits)

    @property
    def layout(self) -> Layout:
        return self.groups.layout

    def unpacked(self) -> Codes:
        words = transposed(self.words.T)
        codes = unpack_outputs(words) if self.by_outputs else unpack_words(words, self.bits)
        return self.groups.of(codes if self.order is None else codes[:, self.order], self.order)


def unpack_words(words: Array, bits: int) -> Array:
    """Unpack int32 [R, W] -> uint8 [R, W * 32 / bits], lowest bits first. 3-bit codes may cross from word to word."""
    xp, mask, num_rows = namespace(words), (1 << bits) - 1, words.shape[0]
    if bits != 3:
        planes = [cast((words >> shift) & mask, "uint8") for shift in range(0, 32, bits)]
        return xp.stack(planes, axis=-1).reshape(num_rows, -1)
    three = cast(words.reshape(num_rows, -1, 3), "int64") & 0xFFFFFFFF
    begins = arange(words, 96, 3)
    first = begins // 32
    pairs = three[..., first] | three[..., xp.where(first < 2, first + 1, first)] << 32
    return cast((pairs >> begins % 32) & mask, "uint8").reshape(num_rows, -1)


def unpack_outputs(words: Array) -> Array:
    """Unpack AWQ's words int32 [W, C] -> uint8 [8 * W, C], a row for each output."""
    rows = [cast((words >> 4 * nibble) & 15, "uint8") for nibble in _NIBBLE_OF_OUTPUT]
    return namespace(words).stack(rows, axis=1).reshape(-1, words.shape[1])
