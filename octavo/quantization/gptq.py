"""GPTQ's tensors (Frantar et al. 2022) as AutoGPTQ and its successors write them, as codes, scales and minima."""

from __future__ import annotations

from octavo.errors import ConfigError
from octavo.quantization.arrays import Array, arange, cast, namespace
from octavo.quantization.codes import Codes, grouped
from octavo.quantization.stored import StoredWeight


def unpack(stored: StoredWeight) -> Codes:
    """A word of qweight holds consecutive elements of k, one of qzeros consecutive outputs, lowest bits first.

    Files of `checkpoint_format` "gptq" ("GPTQ" here) hold zero points less one, those of "gptq_v2" ("GPTQ_V2") hold
    them as they are. Raises `ConfigError` for matrices whose groups are not runs of k (`desc_act`), and for other bits
    than 4 and 8.
    """
    tensors, (num_out, k) = stored.tensors, stored.shape
    bits = 32 * tensors["qweight"].shape[0] // k
    if bits not in (4, 8):
        raise ConfigError(f"GPTQ with {bits} bits is not built; 4 and 8 are.")
    codes = unpack_words(tensors["qweight"].T, bits)
    zeros = cast(unpack_words(tensors["qzeros"], bits).T, "int16") + (1 if stored.format == "GPTQ" else 0)
    num_groups = tensors["scales"].shape[0]
    if (g_idx := tensors.get("g_idx")) is not None and num_groups > 1:
        runs = arange(g_idx, k) // (k // num_groups)
        if not bool(namespace(g_idx).all(g_idx == runs)):
            raise ConfigError("GPTQ matrices quantized in the order of activations (desc_act) are not built.")
    return grouped(bits, codes, tensors["scales"].T, zeros[:num_out])


def unpack_words(words: Array, bits: int) -> Array:
    """int32 [R, W] -> uint8 [R, W * 32 / bits], lowest bits first."""
    shifts = arange(words, 32, bits, dtype="int32")
    elements = cast((words[..., None] >> shifts) & ((1 << bits) - 1), "uint8")
    return elements.reshape(words.shape[0], -1)
