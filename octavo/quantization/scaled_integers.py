"""Integers with separate scales, as compressed-tensors and bitsandbytes write them.

"INT_PACKED": "qweight" int32 [N, K * bits / 32], lowest bits first, with half their range added to the codes; "scales"
[N, groups]; and "qzeros" [N, groups], packed along N in the same way. "INT8_SCALED" and "INT4_SCALED": "codes" int8
[N, K], "scales" and "zeros" [N, groups].
"""

from octavo.quantization.array_functions import Array, cast
from octavo.quantization.codes import Codes, groups_of, in_order_of_groups
from octavo.quantization.packed_words import PackedWords, unpack_words
from octavo.quantization.stored import StoredWeight


def words(stored: StoredWeight) -> PackedWords:
    tensors, (num_out, k) = stored.tensors, stored.shape
    bits = 32 * tensors["qweight"].shape[1] // k
    zeros = tensors.get("qzeros")
    if zeros is not None:
        zeros = cast(unpack_words(zeros.T, bits).T[:num_out], "int16")
    order = in_order_of_groups(tensors.get("g_idx"), tensors["scales"].shape[1])
    return PackedWords(tensors["qweight"], bits, groups_of(bits, k, tensors["scales"], zeros), order)


def unpack_scaled(stored: StoredWeight) -> Codes:
    bits = 4 if stored.format == "INT4_SCALED" else 8
    groups = groups_of(bits, stored.shape[1], stored.tensors["scales"], _zeros(stored, bits))
    return groups.of(_above(stored.tensors["codes"], bits))


def _zeros(stored: StoredWeight, bits: int) -> Array | None:
    zeros = stored.tensors.get("zeros")
    return None if zeros is None else cast(zeros, "int16") + (1 << bits >> 1)


def _above(codes: Array, bits: int) -> Array:
    return cast(cast(codes, "int16") + (1 << bits >> 1), "uint8")
