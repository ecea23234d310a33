"""Reads GPTQ's tensors (Frantar et al. 2022), as AutoGPTQ and its successors write them, as packed words."""

from octavo.errors import ConfigError
from octavo.quantization.array_functions import cast
from octavo.quantization.codes import groups_of, in_order_of_groups
from octavo.quantization.packed_words import PackedWords, unpack_words
from octavo.quantization.stored import StoredWeight


def words(stored: StoredWeight) -> PackedWords:
    """Return the matrix as packed words. A word of qweight holds consecutive elements of k, a word of qzeros holds
    consecutive outputs, both with the lowest bits first.

    Files of `checkpoint_format` "gptq" ("GPTQ" here) store zero points minus one; files of "gptq_v2" ("GPTQ_V2") store
    them unchanged. If a matrix was quantized in the order of activations (`desc_act`), its columns are sorted by group.
    Raises `ConfigError` for other bits than 2, 3, 4 and 8.
    """
    tensors, (num_out, k) = stored.tensors, stored.shape
    bits = 32 * tensors["qweight"].shape[0] // k
    if bits not in (2, 3, 4, 8):
        raise ConfigError(f"GPTQ with {bits} bits is not built; 2, 3, 4 and 8 are.")
    zeros = cast(unpack_words(tensors["qzeros"], bits).T, "int16")[:num_out]
    if stored.format == "GPTQ":
        zeros = zeros + 1
    order = in_order_of_groups(tensors.get("g_idx"), tensors["scales"].shape[0])
    return PackedWords(tensors["qweight"].T, bits, groups_of(bits, k, tensors["scales"].T, zeros), order)
