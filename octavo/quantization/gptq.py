"""GPTQ's tensors (Frantar et al. 2022) as AutoGPTQ and its successors write them, as codes, scales and minima."""

from __future__ import annotations

from octavo.errors import ConfigError
from octavo.quantization.arrays import Array, arange, cast, namespace, transposed
from octavo.quantization.codes import Codes, grouped, in_order_of_groups
from octavo.quantization.stored import StoredWeight


def unpack(stored: StoredWeight) -> Codes:
    """A word of qweight holds consecutive elements of k, one of qzeros consecutive outputs, lowest bits first.

    Files of `checkpoint_format` "gptq" ("GPTQ" here) hold zero points less one, those of "gptq_v2" ("GPTQ_V2") hold
    them as they are. Columns of matrices that were quantized in the order of activations (`desc_act`) are put in the
    order of their groups. Raises `ConfigError` for other bits than 2, 3, 4 and 8.
    """
    tensors, (num_out, k) = stored.tensors, stored.shape
    bits = 32 * tensors["qweight"].shape[0] // k
    if bits not in (2, 3, 4, 8):
        raise ConfigError(f"GPTQ with {bits} bits is not built; 2, 3, 4 and 8 are.")
    codes = unpack_words(transposed(tensors["qweight"]), bits)
    zeros = cast(unpack_words(tensors["qzeros"], bits).T, "int16")[:num_out]
    if stored.format == "GPTQ":
        zeros = zeros + 1
    order = in_order_of_groups(tensors.get("g_idx"), tensors["scales"].shape[0])
    if order is not None:
        codes = codes[:, order]
    return grouped(bits, codes, tensors["scales"].T, zeros, order)


def unpack_words(words: Array, bits: int) -> Array:
    """int32 [R, W] -> uint8 [R, W * 32 / bits], lowest bits first. Those of three bits go across words."""
    xp, mask, num_rows = namespace(words), (1 << bits) - 1, words.shape[0]
    if bits != 3:
        planes = [cast((words >> shift) & mask, "uint8") for shift in range(0, 32, bits)]
        return xp.stack(planes, axis=-1).reshape(num_rows, -1)
    three = cast(words.reshape(num_rows, -1, 3), "int64") & 0xFFFFFFFF
    begins = arange(words, 96, 3)
    first = begins // 32
    pairs = three[..., first] | three[..., xp.where(first < 2, first + 1, first)] << 32
    return cast((pairs >> begins % 32) & mask, "uint8").reshape(num_rows, -1)
