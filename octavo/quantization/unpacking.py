"""Functions on stored weights of any format: their codes, their values, their packed size."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ConfigError
from octavo.quantization import awq, four_bits, fp8, gguf_blocks, gptq, int4, int8, scaled_integers, squeezellm
from octavo.quantization.array_functions import FLOATS, Array, converted
from octavo.quantization.codes import Codes, rounded
from octavo.quantization.formats import BLOCK_TYPES, KEPT_ON_CPUS, PLAIN
from octavo.quantization.layout import PANEL, Layout
from octavo.quantization.packed_words import PackedWords
from octavo.quantization.stored import StoredWeight


def _given(stored: StoredWeight) -> Codes:
    """Return the codes of a matrix that `as_stored` has made."""
    tensors, num_in = stored.tensors, stored.shape[1]
    bits = 4 if stored.format == "CODES4" else 8
    group = int(tensors["group"].item()) if "group" in tensors else num_in
    return Codes(bits, group, tensors["codes"], tensors["scales"], tensors.get("minima"), tensors.get("order"))


# Formats whose codes do not give the exact values: `unpack` rounds the values, or the numbers of their table.
_VALUES: dict[str, Callable[[StoredWeight], Array]] = {
    "FP8_SCALED": fp8.scaled_values,
    "CODEBOOK4": four_bits.codebook_values,
    "SQUEEZELLM": squeezellm.values,
    gguf_blocks.Q2_K: gguf_blocks.q2_k_values,
}
_WORDS: dict[str, Callable[[StoredWeight], PackedWords]] = {
    "GPTQ": gptq.words,
    "GPTQ_V2": gptq.words,
    "AWQ": awq.words,
    "AWQ_GEMV": awq.words_gemv,
    "INT_PACKED": scaled_integers.words,
    "FP4_SCALED": four_bits.fp4_words,
    "CODEBOOK4": four_bits.codebook_words,
}
_UNPACKERS: dict[str, Callable[[StoredWeight], Codes]] = {
    **dict.fromkeys(gguf_blocks.LAYOUTS, gguf_blocks.unpack),
    int8.FORMAT: int8.unpack,
    int4.FORMAT: int4.unpack,
    **dict.fromkeys(_WORDS, lambda stored: _WORDS[stored.format](stored).unpacked()),
    "INT8_SCALED": scaled_integers.unpack_scaled,
    "INT4_SCALED": scaled_integers.unpack_scaled,
    "FP8_SCALED": lambda stored: rounded(fp8.scaled_values(stored)),
    "SQUEEZELLM": lambda stored: rounded(squeezellm.values(stored)),
    "CODES4": _given,
    "CODES8": _given,
}
# Formats whose matrices are unpacked at once, because packers do not read their bytes.
UNPACKED_WHOLE = frozenset(_UNPACKERS) - frozenset(gguf_blocks.LAYOUTS) - {int8.FORMAT, int4.FORMAT}
# Formats among these whose values are rounded to eight bits, with a scale for each 32 elements.
ROUNDED = frozenset(_VALUES) - frozenset(gguf_blocks.LAYOUTS) - frozenset(_WORDS)
# Elements to unpack at once, so that intermediate arrays stay in the processor's cache.
_CHUNK_ELEMENTS = 1 << 16


def unpack(stored: StoredWeight) -> Codes:
    """Return the codes of a matrix of few bits. They are exact, but formats whose codes are no integers are rounded to
    eight bits. Raises `ConfigError` for formats that have no codes."""
    unpacker = _UNPACKERS.get(stored.format)
    if unpacker is None:
        raise ConfigError(f"{stored.format} matrices have no codes; these have: {', '.join(_UNPACKERS)}.")
    return unpacker(stored)


def words_of(stored: StoredWeight) -> PackedWords | None:
    """Return the matrix with its codes still in words; None for formats whose codes are not in words."""
    read = _WORDS.get(stored.format)
    return None if read is None else read(stored)


def as_stored(codes: Codes) -> StoredWeight:
    """Return unpacked codes as a stored matrix whose rows can be cut and ordered one by one."""
    assert codes.table is None, "rows of formats with a table lie one by one as they are stored"
    tensors = {"codes": codes.codes, "scales": codes.scales, "minima": codes.minima, "order": codes.order}
    tensors["group"] = np.array([codes.group])
    return StoredWeight(f"CODES{codes.bits}", {k: v for k, v in tensors.items() if v is not None}, codes.shape)


def take_rows(stored: StoredWeight, order: Any) -> StoredWeight:
    """Return a copy of the rows with the numbers `order`. If outputs share words, the matrix is unpacked first."""
    return (stored if stored.has_single_rows else as_stored(unpack(stored))).take_rows(order)


def dequantize(stored: StoredWeight, dtype: str = "float32") -> NDArray[Any]:
    """Return the matrix's values [N, K], rounded once if `dtype` is not float32. Floats that have this type already are
    returned without a copy. Only for numpy arrays; for torch tensors use `unpack(stored).dequantize()`."""
    if stored.format in PLAIN:
        return converted(stored.data, dtype)
    if stored.format == fp8.FORMAT:
        return converted(fp8.dequantize(stored), dtype)
    if stored.format not in BLOCK_TYPES:
        return converted(_values(stored), dtype)
    num_out, num_in = stored.shape
    out = np.empty(stored.shape, FLOATS[dtype])
    step = max(1, _CHUNK_ELEMENTS // num_in)
    for begin in range(0, num_out, step):
        end = min(begin + step, num_out)
        out[begin:end] = converted(_values(stored.rows(begin, end)), dtype)
    return out


def _values(stored: StoredWeight) -> Array:
    values = _VALUES.get(stored.format)
    return unpack(stored).dequantize() if values is None else values(stored)


def layout_of(stored_format: str) -> Layout:
    """Return the smallest layout for a matrix of this `StoredWeight.format`. Raises `ConfigError` if the format alone
    does not determine a layout."""
    if stored_format == fp8.FORMAT:
        raise ConfigError("8-bit floats are multiplied by GPUs only; --quantization int8 is for every device.")
    if stored_format in (int8.FORMAT, int4.FORMAT):
        return int8.LAYOUT if stored_format == int8.FORMAT else int4.LAYOUT
    if stored_format not in gguf_blocks.LAYOUTS:
        raise ConfigError(f"{stored_format} matrices have no layout of their own; those of their codes have one.")
    return gguf_blocks.LAYOUTS[stored_format]


def packed_bytes(
    stored_format: str, shape: tuple[int, int], layout: Layout | None = None, keeps_superblocks: bool = False
) -> int:
    """Return the bytes of a packed matrix of this `StoredWeight.format`. `layout` is required for formats whose number
    of bits depends on the checkpoint. `keeps_superblocks` is True for CPUs."""
    if plain := PLAIN.get(stored_format):
        return shape[0] * shape[1] * FLOATS[plain].itemsize
    if keeps_superblocks and stored_format in KEPT_ON_CPUS:
        block = BLOCK_TYPES[stored_format]
        return -(-shape[0] // PANEL) * PANEL * shape[1] // block.block_size * block.block_bytes
    # Eight-bit floats and their scales take no more memory than int8 and its scales, so int8's layout is the estimate.
    layout = layout or layout_of(int8.FORMAT if stored_format == fp8.FORMAT else stored_format)
    return (layout if keeps_superblocks else layout.on_gpu).packed_bytes(*shape)
