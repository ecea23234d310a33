"""What can be asked of a stored weight of any format: its codes, its values, how large it becomes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ConfigError
from octavo.quantization import awq, four_bits, fp8, gguf_blocks, gptq, int4, int8, scaled_integers
from octavo.quantization.array_functions import FLOATS, Array, converted
from octavo.quantization.codes import Codes, rounded
from octavo.quantization.formats import BLOCK_TYPES, KEPT_ON_CPUS, PLAIN
from octavo.quantization.layout import PANEL, Layout
from octavo.quantization.packed_words import PackedWords
from octavo.quantization.stored import StoredWeight


def _given(stored: StoredWeight) -> Codes:
    """Codes that were stored as such by `as_stored`."""
    tensors, num_in = stored.tensors, stored.shape[1]
    bits = 4 if stored.format == "CODES4" else 8
    group = int(tensors["group"].item()) if "group" in tensors else num_in
    return Codes(bits, group, tensors["codes"], tensors["scales"], tensors.get("minima"), tensors.get("order"))


# Formats whose values are not their codes': these are eight bits that were rounded from them.
_VALUES: dict[str, Callable[[StoredWeight], Array]] = {
    "FP8_SCALED": fp8.scaled_values,
    "CODEBOOK4": four_bits.codebook_values,
    gguf_blocks.Q2_K: gguf_blocks.q2_k_values,
}
_WORDS: dict[str, Callable[[StoredWeight], PackedWords]] = {
    "GPTQ": gptq.words,
    "GPTQ_V2": gptq.words,
    "AWQ": awq.words,
    "AWQ_GEMV": awq.words_gemv,
    "INT_PACKED": scaled_integers.words,
}
_UNPACKERS: dict[str, Callable[[StoredWeight], Codes]] = {
    **dict.fromkeys(gguf_blocks.LAYOUTS, gguf_blocks.unpack),
    int8.FORMAT: int8.unpack,
    int4.FORMAT: int4.unpack,
    **dict.fromkeys(_WORDS, lambda stored: _WORDS[stored.format](stored).unpacked()),
    "INT8_SCALED": scaled_integers.unpack_scaled,
    "INT4_SCALED": scaled_integers.unpack_scaled,
    "FP8_SCALED": lambda stored: rounded(fp8.scaled_values(stored)),
    "FP4_SCALED": four_bits.unpack_fp4,
    "CODEBOOK4": lambda stored: rounded(four_bits.codebook_values(stored)),
    "CODES4": _given,
    "CODES8": _given,
}
# Formats of which a matrix is unpacked at once: those of files whose packers read no bytes of theirs.
UNPACKED_WHOLE = frozenset(_UNPACKERS) - frozenset(gguf_blocks.LAYOUTS) - {int8.FORMAT, int4.FORMAT}
# Of these, formats whose values are rounded to eight bits by 32 elements.
ROUNDED = frozenset(_VALUES) - frozenset(gguf_blocks.LAYOUTS)
# Elements unpacked at once, so that what lies between packed bytes and values stays in the processor's cache.
_CHUNK_ELEMENTS = 1 << 16


def unpack(stored: StoredWeight) -> Codes:
    """What a matrix of few bits says: exactly, but for formats whose codes are no integers, which are rounded to eight
    bits. Raises `ConfigError` for formats that have no codes."""
    unpacker = _UNPACKERS.get(stored.format)
    if unpacker is None:
        raise ConfigError(f"{stored.format} matrices have no codes; these have: {', '.join(_UNPACKERS)}.")
    return unpacker(stored)


def words_of(stored: StoredWeight) -> PackedWords | None:
    """The same before codes are unpacked, of formats that have them in words."""
    read = _WORDS.get(stored.format)
    return None if read is None else read(stored)


def as_stored(codes: Codes) -> StoredWeight:
    """Unpacked codes as a matrix whose rows can be cut and ordered one by one."""
    tensors = {"codes": codes.codes, "scales": codes.scales, "minima": codes.minima, "order": codes.order}
    tensors["group"] = np.array([codes.group])
    return StoredWeight(f"CODES{codes.bits}", {k: v for k, v in tensors.items() if v is not None}, codes.shape)


def take_rows(stored: StoredWeight, order: Any) -> StoredWeight:
    """A copy of rows `order`, of whatever format."""
    return (stored if stored.has_single_rows else as_stored(unpack(stored))).take_rows(order)


def dequantize(stored: StoredWeight, dtype: str = "float32") -> NDArray[Any]:
    """The values [N, K] that the matrix stands for, rounded once if `dtype` is not float32. Floats of that type already
    are given back as they are. Only for tensors of numpy's; elsewhere `unpack(stored).dequantize()`."""
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
    """The least layout that holds a matrix of this `StoredWeight.format`. Raises `ConfigError` if none does."""
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
    """Memory of a matrix of this `StoredWeight.format` once it is packed, by itself. Formats of which a checkpoint
    says how many bits they have want the `layout`. CPUs keep superblocks."""
    if plain := PLAIN.get(stored_format):
        return shape[0] * shape[1] * FLOATS[plain].itemsize
    if keeps_superblocks and stored_format in KEPT_ON_CPUS:
        block = BLOCK_TYPES[stored_format]
        return -(-shape[0] // PANEL) * PANEL * shape[1] // block.block_size * block.block_bytes
    # An eight-bit float and its scale take no more than an integer and its.
    return (layout or layout_of(int8.FORMAT if stored_format == fp8.FORMAT else stored_format)).packed_bytes(*shape)
