"""Eight-bit floats (float8_e4m3fn), for GPUs that multiply them and for files that hold them.

"FP8": floats quantized at load, with a scale d = absmax / 448 for each row; a code is x / d. "FP8_SCALED": "codes"
[N, K] of a file, with "scales" float32 [N, groups of columns]. On GPUs activations are quantized too, row by row
(octavo/ops/triton/quantize.py).
"""

from octavo.quantization.array_functions import Array, cast, namespace, repeated
from octavo.quantization.stored import StoredWeight

FORMAT = "FP8"
_LARGEST = 448.0


def quantize(rows: Array) -> tuple[Array, Array]:
    """Quantize floats [N, K]; return codes [N, K] and scales [N] float32."""
    xp = namespace(rows)
    values = cast(rows, "float32")
    scales = xp.amax(abs(values), axis=1) / _LARGEST
    codes = values / xp.where(scales > 0, scales, 1.0)[:, None]
    return cast(xp.clip(codes, -_LARGEST, _LARGEST), "float8_e4m3fn"), scales


def dequantize(stored: StoredWeight) -> Array:
    """Return the values of an "FP8" matrix after quantization, float32 [N, K]."""
    codes, scales = quantize(stored.data)
    return cast(codes, "float32") * scales[:, None]


def scaled_values(stored: StoredWeight) -> Array:
    """Return the values of an "FP8_SCALED" matrix, float32 [N, K]."""
    codes, scales = stored.tensors["codes"], stored.tensors["scales"]
    num_in, num_groups = stored.shape[1], scales.shape[1]
    if num_groups > 1:  # groups have "group" columns; the last group may have fewer
        scales = repeated(scales, int(stored.tensors["group"].item()), num_in)
    return cast(codes, "float32") * cast(scales, "float32")
