"""Codes of four bits that are numbers of a table, with scales beside them.

"FP4_SCALED" is the OCP's MXFP4 and Nvidia's NVFP4: "codes" uint8 [N, K / 2], low half first, of float4_e2m1fn; "scales"
[N, groups] are powers of two in uint8 (e8m0), or floats. "CODEBOOK4" is NF4 and FP4 of bitsandbytes (Dettmers et al.
2023): the high half first, "table" float32 [16]. A "factor" float32 [1] multiplies all.
"""

from __future__ import annotations

from octavo.quantization.array_functions import Array, cast, constant, namespace, repeated
from octavo.quantization.codes import Codes
from octavo.quantization.stored import StoredWeight

# Twice what e2m1 stands for, sign in the top bit; halves are integers then.
DOUBLED_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def unpack_fp4(stored: StoredWeight) -> Codes:
    """Exactly: twice the numbers are integers of eight bits."""
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
    """float32 [N, K]."""
    table, scales = stored.tensors["table"], stored.tensors["scales"]
    values = table[cast(_halves(stored.tensors["codes"], high_first=True), "int64")]
    return values * repeated(scales, stored.shape[1] // scales.shape[1], stored.shape[1])


def powers_of_two(exponents: Array) -> Array:
    """e8m0 -> float32 2^(e - 127)."""
    return namespace(exponents).exp2(cast(exponents, "float32") - 127)


def _halves(packed: Array, high_first: bool) -> Array:
    """uint8 [N, K / 2] -> [N, K]."""
    low, high = packed & 15, packed >> 4
    pair = [high, low] if high_first else [low, high]
    return namespace(packed).stack(pair, axis=-1).reshape(packed.shape[0], -1)
