"""Floats quantized at load to four bits (`--quantization int4`), with a scale d for each 32 elements of a row.

A code is round(x / d). d is the element of largest magnitude divided by -8, so this element has exactly the code -8.

The native packer quantizes (csrc/cpu/pack_int.cpp); this module computes the same for numpy arrays and torch tensors.
"""

from octavo.quantization.array_functions import cast, namespace, padded
from octavo.quantization.codes import Codes
from octavo.quantization.layout import Layout
from octavo.quantization.stored import StoredWeight

FORMAT = "INT4"
LAYOUT = Layout(4, 32, False)


def unpack(stored: StoredWeight) -> Codes:
    """Return the codes after quantization."""
    xp, (num_out, num_in) = namespace(stored.data), stored.shape
    values = cast(stored.data, "float32")
    groups = padded(values, LAYOUT.group).reshape(num_out, -1, LAYOUT.group)
    largest, lowest = xp.amax(abs(groups), axis=-1), xp.amin(groups, axis=-1)
    scales = xp.where(lowest == -largest, largest, -largest) / 8
    codes = xp.round(groups / xp.where(scales != 0, scales, xp.ones_like(scales))[..., None])
    codes = cast(xp.clip(codes, -8, 7) + 8, "uint8")
    return Codes(LAYOUT.bits, LAYOUT.group, codes.reshape(num_out, -1)[:, :num_in], scales)
