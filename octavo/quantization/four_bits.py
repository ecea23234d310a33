"""Codes of four bits that are indices into a table of numbers, with separate scales.

"FP4_SCALED" is the OCP's MXFP4 and Nvidia's NVFP4: "codes" uint8 [N, K / 2], low half first, of float4_e2m1fn; "scales"
[N, groups] are powers of two in uint8 (e8m0), or floats; "factor" float32 [1], if present, multiplies all elements.
"CODEBOOK4" is NF4 and FP4 of bitsandbytes (Dettmers et al. 2023): the high half first, "table" float32 [16].
"""

from __future__ import annotations

from octavo.quantization.array_functions import Array, cast, constant, namespace, repeated
from octavo.quantization.codes import Codes
from octavo.quantization.stored import StoredWeight

# The values of the e2m1 codes times two, which makes them integers. The top bit of a code is the sign.
DOUBLED_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def unpack_fp4(stored: StoredWeight) -> Codes:
    """Return the matrix as exact 8-bit codes: doubled e2m1 values are integers of eight bits."""
    packed, scales = stored.tensors["codes"], stored.tensors["scales"]
    table = constant(packed, [number + 128 for number in DOUBLED_E2M1], "uint8")
    codes = table[cast(_halves(packed, high_first=False), "int64")]
    if scales.dtype == packed.dtype:
        scales = powers_of_two(scales)
    scales = cast(scales, "float32") * 0.5
    if "factor" in stored.tensors:
        scales = scales * stored.tensors["factor"]
    return Codes(8, stored.shape[1] // scales.shape[1], codes, scales)


def codebook_values(stored: StoredWeight) -> Array:
    """Return the values of a "CODEBOOK4" matrix, float32 [N, K]."""
    table, scales = stored.tensors["table"], stored.tensors["scales"]
    values = table[cast(_halves(stored.tensors["codes"], high_first=True), "int64")]
    return values * repeated(scales, stored.shape[1] // scales.shape[1], stored.shape[1])


def powers_of_two(exponents: Array) -> Array:
    """Return e8m0 numbers as float32: 2^(e - 127)."""
    return namespace(exponents).exp2(cast(exponents, "float32") - 127)


def _halves(packed: Array, high_first: bool) -> Array:
    """Unpack two codes from each byte: uint8 [N, K / 2] -> [N, K]."""
    low, high = packed & 15, packed >> 4
    pair = [high, low] if high_first else [low, high]
    return namespace(packed).stack(pair, axis=-1).reshape(packed.shape[0], -1)
