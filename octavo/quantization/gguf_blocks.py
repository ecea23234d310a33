"""GGUF's block formats, as in ggml-common.h: exact functions from blocks of bytes to codes, scales and minima."""

from collections.abc import Callable

from octavo.quantization import gguf_codebooks as codebooks
from octavo.quantization.array_functions import Array, arange, cast, constant, namespace, reinterpret
from octavo.quantization.codes import Codes, rounded
from octavo.quantization.formats import BLOCK_TYPES
from octavo.quantization.four_bits import powers_of_two
from octavo.quantization.layout import DOUBLED_E2M1, Layout
from octavo.quantization.stored import StoredWeight

Q2_K = "Q2_K"
# The table of numbers to which the codes of IQ4_NL and IQ4_XS are indices.
IQ4_NUMBERS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# The layout of each type. Types of five and six bits take eight bits. So do types with a scale for each 16 elements, if
# they have no table. Signed types need no minima.
LAYOUTS = {
    "Q4_0": Layout(4, 32, False),
    "Q4_1": Layout(4, 32, True),
    "Q5_0": Layout(8, 32, False),
    "Q5_1": Layout(8, 32, True),
    "Q8_0": Layout(8, 32, False),
    "Q4_K": Layout(4, 32, True),
    "Q5_K": Layout(8, 32, True),
    "Q6_K": Layout(8, 16, False),
    "Q2_K": Layout(8, 16, False),
    "Q3_K": Layout(8, 16, False),
    "IQ4_NL": Layout(4, 32, False, IQ4_NUMBERS),
    "IQ4_XS": Layout(4, 32, False, IQ4_NUMBERS),
    "MXFP4": Layout(4, 32, False, DOUBLED_E2M1, scale_bytes=1),
    "NVFP4": Layout(4, 16, False, DOUBLED_E2M1),
    "Q1_0": Layout(4, 32, False),
    "IQ1_S": Layout(4, 32, False, codebooks.IQ1_IQ2_TABLE),
    "IQ1_M": Layout(4, 16, False, codebooks.IQ1_IQ2_TABLE),
    "IQ2_XXS": Layout(4, 32, False, codebooks.IQ1_IQ2_TABLE),
    "IQ2_XS": Layout(4, 16, False, codebooks.IQ1_IQ2_TABLE),
    "IQ2_S": Layout(4, 16, False, codebooks.IQ1_IQ2_TABLE),
    "IQ3_XXS": Layout(4, 32, False, codebooks.IQ3_XXS_TABLE),
    "IQ3_S": Layout(4, 32, False, codebooks.IQ3_S_TABLE),
    "TQ1_0": Layout(4, 32, False),
    "TQ2_0": Layout(4, 32, False),
}


def unpack(stored: StoredWeight) -> Codes:
    """Return the codes of a matrix. They are exact except for Q2_K: it has a minimum for each 16 elements, which no
    layout has, so its values are rounded to eight bits."""
    layout = LAYOUTS[stored.format]
    if stored.format == Q2_K:
        return rounded(q2_k_values(stored), layout.group)
    num_out, num_in = stored.shape
    blocks = stored.data.reshape(num_out, -1, BLOCK_TYPES[stored.format].block_bytes)
    codes, scales, minima = _UNPACKERS[stored.format](blocks)
    codes, scales = codes.reshape(num_out, -1), scales.reshape(num_out, -1)
    assert codes.shape == (num_out, num_in)
    minima = None if minima is None else minima.reshape(num_out, -1)
    return Codes(layout.bits, layout.group, codes, scales, minima, None, layout.table, layout.scale_bytes)


# Unpackers take blocks [N, B, bytes]. They return codes [N, B, ...] uint8, scales [N, B, groups] float32 and minima
# like the scales, or None.
_Unpacked = tuple[Array, Array, Array | None]


def _half(blocks: Array, offset: int) -> Array:
    """Return the float16 at byte `offset` of each block, as float32 [N, B, 1]."""
    return cast(reinterpret(blocks[..., offset : offset + 2], "float16"), "float32")


def _nibbles(packed: Array) -> Array:
    """Unpack 16 bytes to 32 elements: the low halves are elements 0 to 15, the high halves 16 to 31."""
    return namespace(packed).concatenate([packed & 15, packed >> 4], axis=-1)


def _five_bits(packed: Array) -> Array:
    """Unpack 4 + 16 bytes to 32 elements: a fifth bit for each element, lowest bit first, then the nibbles."""
    fifth = (packed[..., :4, None] >> arange(packed, 8, dtype="uint8")) & 1
    return _nibbles(packed[..., 4:]) | fifth.reshape(*packed.shape[:-1], 32) << 4


def _k_scales(blocks: Array) -> tuple[Array, Array]:
    """Return the eight scales and eight minima of a 256-element block: six-bit numbers times a float16 for the scales,
    and times another float16 for the minima.

    The six-bit numbers take twelve bytes from byte 4 on. Bytes 0-3 hold the first four scales in their low six bits,
    and bytes 4-7 the first four minima. The last four scales and minima have their low four bits in bytes 8-11 (scales
    in the low halves, minima in the high halves) and their top two bits in the top bits of bytes 0-7.
    """
    low, mid, high = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    concatenate = namespace(blocks).concatenate
    scales = concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=-1)
    minima = concatenate([mid & 63, (high >> 4) | (mid >> 6 << 4)], axis=-1)
    return _half(blocks, 0) * scales, -(_half(blocks, 2) * minima)


def _q4_k(blocks: Array) -> _Unpacked:
    pairs = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32)
    return namespace(blocks).stack([pairs & 15, pairs >> 4], axis=-2), *_k_scales(blocks)


def _q5_k(blocks: Array) -> _Unpacked:
    pairs = blocks[..., 48:].reshape(*blocks.shape[:2], 4, 32)
    groups = namespace(blocks).stack([pairs & 15, pairs >> 4], axis=-2).reshape(*blocks.shape[:2], 8, 32)
    bits = arange(blocks, 8, dtype="uint8")[:, None]
    fifth = (blocks[..., None, 16:48] >> bits) & 1  # bit g of byte i belongs to element i of group g
    return groups | fifth << 4, *_k_scales(blocks)


def _q6_k(blocks: Array) -> _Unpacked:
    # Two halves of 128 elements; in each, four runs of 32 that share 64 bytes of nibbles and 32 bytes of top bits.
    low = blocks[..., :128].reshape(*blocks.shape[:2], 2, 2, 32)
    runs = namespace(blocks).concatenate([low & 15, low >> 4], axis=-2)
    bits = arange(blocks, 8, 2, dtype="uint8")[:, None]
    top = (blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32) >> bits) & 3
    codes = runs | top << 4
    # 16 scales, each for 16 elements.
    return codes + (128 - 32), _half(blocks, 208) * reinterpret(blocks[..., 192:208], "int8"), None


def _q3_k(blocks: Array) -> _Unpacked:
    # 32 bytes hold the third bit of each element (bit g of byte i is element i of run g). 64 bytes hold the low two
    # bits, in the order of Q6_K's top bits. Then come 16 scales of six bits, stored with 32 added.
    concatenate = namespace(blocks).concatenate
    bits = arange(blocks, 8, 2, dtype="uint8")[:, None]
    low = ((blocks[..., 32:96].reshape(*blocks.shape[:2], 2, 1, 32) >> bits) & 3).reshape(*blocks.shape[:2], 8, 32)
    third = (blocks[..., None, :32] >> arange(blocks, 8, dtype="uint8")[:, None]) & 1
    nibbles, top = blocks[..., 96:104], blocks[..., 104:108]
    six = concatenate([nibbles & 15, nibbles >> 4], axis=-1) | (
        concatenate([top & 3, (top >> 2) & 3, (top >> 4) & 3, top >> 6], axis=-1) << 4
    )
    return (low | third << 2) + (128 - 4), _half(blocks, 108) * (cast(six, "float32") - 32), None


def q2_k_values(stored: StoredWeight) -> Array:
    """Return the values of a Q2_K matrix, float32 [N, K].

    Sixteen bytes hold a scale (low half) and a minimum (high half) for each 16 elements. 64 bytes hold the two-bit
    codes, in the order of Q6_K's top bits. Then come a float16 for the scales and a float16 for the minima.
    """
    blocks = stored.data.reshape(stored.shape[0], -1, BLOCK_TYPES[Q2_K].block_bytes)
    bits = arange(blocks, 8, 2, dtype="uint8")[:, None]
    codes = ((blocks[..., 16:80].reshape(*blocks.shape[:2], 2, 1, 32) >> bits) & 3).reshape(*blocks.shape[:2], 16, 16)
    scales, minima = _half(blocks, 80) * (blocks[..., :16] & 15), _half(blocks, 82) * (blocks[..., :16] >> 4)
    return (scales[..., None] * codes - minima[..., None]).reshape(stored.shape)


def _iq4_xs(blocks: Array) -> _Unpacked:
    # A float16 unit, then eight scales of six bits: the top two bits in bytes 2 and 3, the low four in bytes 4 to 7.
    pairs = blocks[..., 8:].reshape(*blocks.shape[:2], 8, 16)
    low = namespace(blocks).stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], axis=-1).reshape(*blocks.shape[:2], 8)
    top = ((blocks[..., 2:4, None] >> arange(blocks, 8, 2, dtype="uint8")) & 3).reshape(*blocks.shape[:2], 8)
    return _nibbles(pairs), _half(blocks, 0) * (cast(low | top << 4, "float32") - 32), None


def _tq1_0(blocks: Array) -> _Unpacked:
    # A byte holds five digits of base 3: digit n is floor(3 * (byte * 3^n mod 256) / 256). The last four bytes hold
    # four digits each.
    def digits(packed: Array, count: int) -> Array:
        powers = constant(packed, [3**n for n in range(count)], "uint8")[:, None]
        shifted = cast(packed[..., None, :] * powers, "int32") * 3 >> 8
        return cast(shifted, "uint8").reshape(*packed.shape[:2], -1)

    parts = [digits(blocks[..., :32], 5), digits(blocks[..., 32:48], 5), digits(blocks[..., 48:52], 4)]
    return namespace(blocks).concatenate(parts, axis=-1) + 7, _of_all(_half(blocks, 52)), None


def _tq2_0(blocks: Array) -> _Unpacked:
    bits = arange(blocks, 8, 2, dtype="uint8")[:, None]
    codes = (blocks[..., :64].reshape(*blocks.shape[:2], 2, 1, 32) >> bits) & 3
    return codes + 7, _of_all(_half(blocks, 64)), None


def _of_all(scale: Array) -> Array:
    """Return the one scale of 256 elements [N, B, 1] as eight scales of 32 elements [N, B, 8]."""
    return scale + cast(arange(scale, 8), "float32") * 0


def _mxfp4(blocks: Array) -> _Unpacked:
    return _nibbles(blocks[..., 1:]), powers_of_two(blocks[..., :1]) * 0.5, None


# Half the value of each byte as an e4m3 float without its sign; half, because `DOUBLED_E2M1` is doubled. 0x7F is not a
# number and gives 0.
_HALF_E4M3 = [
    0.0 if byte == 0x7F else 2.0 ** (max(byte >> 3 & 15, 1) - 11) * (8 * (byte & 0x78 > 0) + (byte & 7))
    for byte in range(256)
]


def _nvfp4(blocks: Array) -> _Unpacked:
    # Four scales, then eight bytes for each sixteen elements: the low halves are the first eight elements.
    packed = blocks[..., 4:].reshape(*blocks.shape[:2], 4, 8)
    scales = constant(blocks, _HALF_E4M3, "float32")[cast(blocks[..., :4], "int64")]
    return _nibbles(packed), scales, None


def _q1_0(blocks: Array) -> _Unpacked:
    # A float16, then a bit for each of 128 elements, lowest first: 1 means plus the float16, 0 minus the float16.
    bits = (blocks[..., 2:, None] >> arange(blocks, 8, dtype="uint8")) & 1
    scales = _half(blocks, 0) + cast(arange(blocks, 4), "float32") * 0
    return 2 * bits.reshape(*blocks.shape[:2], 128) + 7, scales, None


_UNPACKERS: dict[str, Callable[[Array], _Unpacked]] = {
    "Q4_0": lambda blocks: (_nibbles(blocks[..., 2:]), _half(blocks, 0), None),
    "Q4_1": lambda blocks: (_nibbles(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2)),
    "Q5_0": lambda blocks: (_five_bits(blocks[..., 2:]) + (128 - 16), _half(blocks, 0), None),
    "Q5_1": lambda blocks: (_five_bits(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2)),
    # ^ 128 adds 128 to a number in two's complement.
    "Q8_0": lambda blocks: (blocks[..., 2:] ^ 128, _half(blocks, 0), None),
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q3_K": _q3_k,
    "IQ4_NL": lambda blocks: (_nibbles(blocks[..., 2:]), _half(blocks, 0), None),
    "IQ4_XS": _iq4_xs,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
    "Q1_0": _q1_0,
    "IQ1_S": codebooks.iq1_s,
    "IQ1_M": codebooks.iq1_m,
    "IQ2_XXS": codebooks.iq2_xxs,
    "IQ2_XS": codebooks.iq2_xs,
    "IQ2_S": codebooks.iq2_s,
    "IQ3_XXS": codebooks.iq3_xxs,
    "IQ3_S": codebooks.iq3_s,
}
