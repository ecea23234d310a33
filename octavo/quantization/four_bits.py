"""Codes of four bits that are indices into a table of numbers, with separate scales.

"FP4_SCALED" is the OCP's MXFP4 and Nvidia's NVFP4: "codes" uint8 [N, K / 2], low half first, of float4_e2m1fn; "scales"
[N, groups] are powers of two in uint8 (e8m0), or floats; "factor" float32 [1], if present, multiplies all elements.
"CODEBOOK4" is NF4 and FP4 of bitsandbytes (Dettmers et al. 2023): the high half first, "table" float32 [16].
"""

import numpy as np
from numpy.typing import NDArray

from octavo.quantization.array_functions import Array, cast, namespace, reinterpret, repeated
from octavo.quantization.codes import Groups
from octavo.quantization.layout import DOUBLED_E2M1
from octavo.quantization.packed_words import PackedWords
from octavo.quantization.stored import StoredWeight


def fp4_words(stored: StoredWeight) -> PackedWords:
    """Return an "FP4_SCALED" matrix, exactly as stored."""
    codes, scales = stored.tensors["codes"], stored.tensors["scales"]
    are_powers = scales.dtype == codes.dtype
    scales = cast(powers_of_two(scales) if are_powers else scales, "float32") * 0.5
    if "factor" in stored.tensors:
        scales = scales * stored.tensors["factor"]
    group = stored.shape[1] // scales.shape[1]
    groups = Groups(4, group, scales, table=DOUBLED_E2M1, scale_bytes=1 if are_powers else 2)
    return PackedWords(reinterpret(codes, "int32"), 4, groups)


def codebook_words(stored: StoredWeight) -> PackedWords:
    """Return a "CODEBOOK4" matrix. Its table is rounded to integers."""
    codes, scales = stored.tensors["codes"], stored.tensors["scales"]
    integers, unit = integers_near(np.array(stored.tensors["table"].tolist()))
    groups = Groups(4, stored.shape[1] // scales.shape[1], cast(scales, "float32") * unit, table=integers)
    return PackedWords(reinterpret(codes >> 4 | codes << 4, "int32"), 4, groups)


def integers_near(table: NDArray[np.float64]) -> tuple[tuple[int, ...], float]:
    """Return integers, at most 127 in magnitude, and their unit, so that integers times unit have the least mean square
    distance to the numbers of `table`. For NF4's table, whose largest number is 1, the root of this mean is 0.0017. It
    adds 0.0049 to NF4's error for normal numbers, 0.092; rounding each 32 elements to 8 bits would add 0.0055."""
    largest = float(np.abs(table).max()) or 1.0
    units = largest / np.arange(127, 63, -1)
    rounded = np.rint(table / units[:, None])
    best = int(np.square(rounded * units[:, None] - table).sum(1).argmin())
    return tuple(int(number) for number in rounded[best]), float(units[best])


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
