"""Floats quantized at load to eight bits (`--quantization int8`), with a scale d for each 32 elements of a row.

A code is round(x / d) with d = absmax / 127.

The native packer quantizes (csrc/cpu/pack_int.cpp); this module computes the same in numpy.
"""

import math

import numpy as np

from octavo.quantization.codes import Codes
from octavo.quantization.layout import Layout
from octavo.quantization.stored import StoredWeight

FORMAT = "INT8"
LAYOUT = Layout(8, 32, False)


def unpack(stored: StoredWeight) -> Codes:
    """Return the codes after quantization. If a group holds numbers that are not finite, neither is its scale."""
    num_out, num_in = stored.shape
    padding = ((0, 0), (0, -num_in % LAYOUT.group))
    groups = np.pad(stored.data.astype(np.float32), padding).reshape(num_out, -1, LAYOUT.group)
    scales = np.abs(groups).max(-1, keepdims=True, initial=0) / np.float32(127)
    unit = np.float32(2.0 ** (math.frexp(scales.max(initial=0))[1] - 15))  # scales in this unit fit float16
    with np.errstate(all="ignore"):
        scales = (scales / unit).astype(np.float16).astype(np.float32) * unit
        codes = np.rint(np.where(scales > 0, groups / scales, 0)).clip(-127, 127)
    codes = (np.nan_to_num(codes) + 128).astype(np.uint8)
    return Codes(LAYOUT.bits, LAYOUT.group, codes.reshape(num_out, -1)[:, :num_in], scales.reshape(num_out, -1))
