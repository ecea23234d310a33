"""Blocks of every GGUF format made by hand, and a reader of packed matrices that shares no code with the packer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from octavo import _cpu
from octavo.quantization import StoredWeight

if TYPE_CHECKING:
    from octavo.ops.cpu_pack import PackedIntegers

# Bytes of a block, its elements, and where its float16 numbers lie.
BLOCKS = {
    "Q4_0": (18, 32, (0,)),
    "Q4_1": (20, 32, (0, 2)),
    "Q5_0": (22, 32, (0,)),
    "Q5_1": (24, 32, (0, 2)),
    "Q8_0": (34, 32, (0,)),
    "Q4_K": (144, 256, (0, 2)),
    "Q5_K": (176, 256, (0, 2)),
    "Q6_K": (210, 256, (208,)),
    "Q2_K": (84, 256, (80, 82)),
    "Q3_K": (110, 256, (108,)),
    "IQ1_S": (50, 256, (0,)),
    "IQ1_M": (56, 256, ()),
    "IQ2_XXS": (66, 256, (0,)),
    "IQ2_XS": (74, 256, (0,)),
    "IQ2_S": (82, 256, (0,)),
    "IQ3_XXS": (98, 256, (0,)),
    "IQ3_S": (110, 256, (0,)),
    "IQ4_NL": (18, 32, (0,)),
    "IQ4_XS": (136, 256, (0,)),
    "TQ1_0": (54, 256, (52,)),
    "TQ2_0": (66, 256, (64,)),
    "MXFP4": (17, 32, ()),
    "NVFP4": (36, 64, ()),
    "Q1_0": (18, 128, (0,)),
}
# Bits of a weight in layouts that keep superblocks, by their number (csrc/cpu/kernel_types.h: WeightFormat).
KEPT_BITS = {
    _cpu.WEIGHT_Q4_K: 4.5, _cpu.WEIGHT_Q6_K: 6.5625, _cpu.WEIGHT_Q5_K: 5.5, _cpu.WEIGHT_Q3_K: 3.4375,
    _cpu.WEIGHT_Q2_K: 2.625, _cpu.WEIGHT_IQ4_XS: 4.25,
}  # fmt: skip
# What a float16 can be at its worst.
EXTREMES = np.array(
    [0.0, -0.0, 65504.0, -65504.0, 2.0**-14, -(2.0**-14), 2.0**-24, -(2.0**-24), 1023 * 2.0**-24, 1.0, -1.0, 2.0**-15],
    np.float16,
)


def random_matrix(name: str, rows: int, num_in: int, seed: int = 0, extreme: bool = False) -> StoredWeight:
    """Blocks of random bytes, whose float16 numbers are of the size of weights, or `extreme`."""
    rng = np.random.default_rng([seed, rows, num_in, *name.encode()])
    block_bytes, elements, halves = BLOCKS[name]
    assert num_in % elements == 0
    packed = rng.integers(0, 256, (rows * num_in // elements, block_bytes), dtype=np.uint8)

    def units() -> np.ndarray:
        if extreme:
            return rng.choice(EXTREMES, len(packed))
        return rng.standard_normal(len(packed)).astype(np.float16) * np.float16(0.01)

    for offset in halves:
        packed[:, offset : offset + 2] = units().view(np.uint8).reshape(-1, 2)
    if name == "IQ1_M":  # whose unit lies in the high bits of four words
        words = packed[:, 48:].view(np.uint16)
        unit = units().view(np.uint16)[:, None] >> np.arange(0, 16, 4, dtype=np.uint16)
        words[:] = words & 0xFFF | (unit & 15) << 12
    if name == "MXFP4":  # scales are powers of two: of the size of weights, or as far apart as a float16 allows
        packed[:, 0] = rng.integers(*((105, 142) if extreme else (117, 122)), len(packed))
    return StoredWeight(name, {"data": packed.reshape(rows, -1)}, (rows, num_in))


def values_of(matrix: StoredWeight) -> np.ndarray:
    """The matrix according to the gguf package, which knows of Q1_0 only the size: a float16, then a bit for each
    element, lowest first, of which 0 is minus that."""
    import gguf

    if matrix.format == "Q1_0":
        blocks = np.ascontiguousarray(matrix.data).reshape(-1, 18)
        signs = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little").astype(np.float32) * 2 - 1
        return (signs * blocks[:, :2].copy().view(np.float16).astype(np.float32)).reshape(matrix.shape)
    return gguf.dequantize(matrix.data, gguf.GGMLQuantizationType[matrix.format])


def read_packed(packed: PackedIntegers) -> tuple[np.ndarray, np.ndarray]:
    """-> (products, minima): scale * (code - z) and minimum of each element, times the factor.

    Written after the description of the layout: [panel][64 elements][codes, scales, minima]. Float64 throughout.
    """
    if packed.format in KEPT_BITS:
        readers = [_read_q4_k, _read_q6_k, _read_q5_k, _read_q3_k, _read_q2_k, _read_iq4_xs]
        found = dict(zip(KEPT_BITS, readers, strict=True))[packed.format](packed)
        return _outputs(packed, found[0]), _outputs(packed, found[1])
    layout = packed.layout
    blocks = -(-packed.num_in // 64)
    code_bytes, zero = (1024, 8) if layout.bits == 4 else (2048, 128)
    groups = 64 // layout.group
    scale_bytes = groups * 32 * layout.scale_bytes
    block_bytes = code_bytes + scale_bytes + (128 if layout.minima else 0)
    memory = np.asarray(packed.data).reshape(-1, blocks, block_bytes)
    panels = len(memory)
    raw = memory[:, :, :code_bytes]
    codes = np.zeros((panels, 32, blocks, 64), np.int64)
    for lane in range(32):
        vector, place = divmod(lane, 16)
        for k in range(64):
            if layout.bits == 4:
                step, i = divmod(k, 4)
                byte = raw[:, :, (step // 2 * 2 + vector) * 64 + place * 4 + i]
                codes[:, lane, :, k] = byte >> 4 if step % 2 else byte & 15
            else:
                step, i = divmod(k, 4)
                codes[:, lane, :, k] = raw[:, :, (step * 2 + vector) * 64 + place * 4 + i]
    stored_scales = np.ascontiguousarray(memory[:, :, code_bytes : code_bytes + scale_bytes])
    if layout.scale_bytes == 1:  # exponents of float32 numbers
        scales = (stored_scales.astype(np.uint32) << 23).view(np.float32).astype(np.float64)
    else:
        scales = stored_scales.view(np.float16).astype(np.float64)
    scales = scales.reshape(panels, blocks, groups, 32)
    scales = scales.transpose(0, 3, 1, 2).repeat(layout.group, axis=3)
    minima = np.zeros((panels, 32, blocks, 64))
    if layout.minima:
        stored = np.ascontiguousarray(memory[:, :, -128:]).view(np.uint16).astype(np.uint32) << 16
        halves = stored.view(np.float32).reshape(panels, blocks, 32, 2).transpose(0, 2, 1, 3)
        minima[:] = halves.repeat(32, axis=3)
    numbers = codes - zero if layout.table is None else np.array(layout.table)[codes]
    products = packed.factor * scales * numbers
    minima *= packed.factor
    return _outputs(packed, products), _outputs(packed, minima)


def _fourth(three: np.ndarray, width: int) -> np.ndarray:
    """The number of six bits that the highest two of `width` bits make, over three neighbours on axis 0."""
    tops = (three >> (width - 2)).astype(np.int64)
    return tops[0] | tops[1] << 2 | tops[2] << 4


def _read_q4_k(packed: PackedIntegers) -> tuple[np.ndarray, np.ndarray]:
    """[panel][256 elements][64 of them][1024 bytes of codes, 128 bytes]: units, then three words for each output."""
    supers = packed.num_in // 256
    memory = np.asarray(packed.data).reshape(-1, supers, 4, 1152)
    scales, minima = _scales_and_minima(memory[..., 1024:])
    minima += 8 * scales
    spread = [x.transpose(0, 2, 1, 3).repeat(32, -1) for x in (scales, minima)]
    return spread[0] * (_read_nibbles(memory[..., :1024]) - 8), spread[1]


def _scales_and_minima(pieces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Four pieces of 128 bytes [panel, superblock, 4, 128] -> both [panel, superblock, output, 8]."""
    pieces = np.ascontiguousarray(pieces)
    panels, supers = pieces.shape[:2]
    units = pieces[:, :, 0].view(np.float16).reshape(panels, supers, 2, 32).astype(np.float64)
    each = _six_bits(pieces[:, :, 1:].view(np.uint32).reshape(panels, supers, 3, 32))
    return units[:, :, 0, :, None] * each[..., :8], -units[:, :, 1, :, None] * each[..., 8:]


def _six_bits(words: np.ndarray) -> np.ndarray:
    """[panel, superblock, 3, output] -> float64 [panel, superblock, output, 16]."""
    numbers = [(words[:, :, n // 5] >> (6 * (n % 5))) & 63 for n in range(15)]
    numbers.append(_fourth(words.transpose(2, 0, 1, 3), 32))
    return np.stack(numbers, -1).astype(np.float64)


def _read_nibbles(codes: np.ndarray) -> np.ndarray:
    """[panel, superblock, 4, 1024] bytes -> int64 [panel, output, superblock, 256]."""
    panels, supers = codes.shape[:2]
    steps = codes.reshape(panels, supers, 4, 8, 32, 4)
    codes = np.stack([steps & 15, steps >> 4], 4).astype(np.int64)  # [panel, superblock, block, step, half, output, 4]
    return codes.transpose(0, 5, 1, 2, 3, 4, 6).reshape(panels, 32, supers, 256)


def _read_q5_k(packed: PackedIntegers) -> tuple[np.ndarray, np.ndarray]:
    """As Q4_K with 256 bytes of fifth bits after the nibbles: two words, of which bit j of byte i is element 4j + i."""
    supers = packed.num_in // 256
    memory = np.asarray(packed.data).reshape(-1, supers, 4, 1408)
    scales, minima = _scales_and_minima(memory[..., 1280:])
    words = memory[..., 1024:1280].reshape(-1, supers, 4, 2, 32, 4)
    bits = np.stack([words >> j & 1 for j in range(8)], -2).astype(np.int64)  # [.., block, half, output, 8, 4]
    fifth = bits.transpose(0, 4, 1, 2, 3, 5, 6).reshape(len(memory), 32, supers, 256)
    codes = _read_nibbles(memory[..., :1024]) + 16 * fifth
    spread = [x.transpose(0, 2, 1, 3).repeat(32, -1) for x in (scales, minima)]
    return spread[0] * codes, spread[1]


def _read_q3_k(packed: PackedIntegers) -> tuple[np.ndarray, np.ndarray]:
    """[panel][256 elements][units, three words of scales by 16, then of 64 elements four words of low bits, two of high
    ones]. Codes of eight elements are low and high halves of four bytes; two or four such share a word."""
    supers = packed.num_in // 256
    memory = np.asarray(packed.data).reshape(-1, supers, 3520)
    units = np.ascontiguousarray(memory[..., :64]).view(np.float16).astype(np.float64)
    words = np.ascontiguousarray(memory[..., 64:448]).view(np.uint32).reshape(-1, supers, 3, 32)
    scales = (units[..., None] * (_six_bits(words) - 32)).transpose(0, 2, 1, 3).repeat(16, -1)
    rest = memory[..., 448:].reshape(-1, supers, 4, 6, 32, 4)
    low = np.stack([rest[:, :, :, :4] >> 2 * i & 0x33 for i in range(2)], 4)  # [.., block, 4, 2, output, 4]
    high = np.stack([rest[:, :, :, 4:] >> i & 0x11 for i in range(4)], 4)  # [.., block, 2, 4, output, 4]
    eight = [x.reshape(-1, supers, 4, 8, 32, 4) for x in (low, high)]
    both = eight[0] | eight[1] << 2
    codes = _read_nibbles(both.reshape(-1, supers, 4, 1024))
    products = scales * (codes - 4)
    return products, np.zeros_like(products)


def _read_q2_k(packed: PackedIntegers) -> tuple[np.ndarray, np.ndarray]:
    """[panel][256 elements][units of scales and of minima, sixteen bytes of both, a word of codes for each 16]. Bits of
    byte i, from the lowest on, are elements i, 8 + i, 4 + i and 12 + i."""
    supers = packed.num_in // 256
    memory = np.asarray(packed.data).reshape(-1, supers, 2688)
    units = np.ascontiguousarray(memory[..., :128]).view(np.float16).reshape(-1, supers, 2, 32).astype(np.float64)
    each = memory[..., 128:640].reshape(-1, supers, 4, 32, 4).transpose(0, 1, 3, 2, 4).reshape(-1, supers, 32, 16)
    scales, minima = units[:, :, 0, :, None] * (each & 15), -units[:, :, 1, :, None] * (each >> 4)
    words = memory[..., 640:].reshape(-1, supers, 16, 32, 4)
    codes = np.stack([words >> shift & 3 for shift in (0, 4, 2, 6)], 4).astype(np.int64)  # [.., group, output, 4, 4]
    codes = codes.transpose(0, 3, 1, 2, 4, 5).reshape(len(memory), 32, supers, 256)
    spread = [x.transpose(0, 2, 1, 3).repeat(16, -1) for x in (scales, minima)]
    return spread[0] * codes, spread[1]


def _read_q6_k(packed: PackedIntegers) -> tuple[np.ndarray, np.ndarray]:
    """[panel][256 elements][units, scales by 16, then for 16 elements three vectors of codes and in them a fourth]."""
    supers = packed.num_in // 256
    memory = np.asarray(packed.data).reshape(-1, supers, 6720)
    units = np.ascontiguousarray(memory[..., :64]).view(np.float16).astype(np.float64)
    each = memory[..., 64:576].reshape(-1, supers, 16, 32).astype(np.float64) - 128
    scales = (units[:, :, None] * each).transpose(0, 3, 1, 2).repeat(16, -1)
    three = memory[..., 576:].reshape(-1, supers, 16, 3, 32, 4)
    fourth = _fourth(three.transpose(3, 0, 1, 2, 4, 5), 8)
    codes = np.concatenate([three & 63, fourth[:, :, :, None].astype(np.uint8)], 3).astype(np.int64)
    codes = codes.transpose(0, 4, 1, 2, 3, 5).reshape(len(memory), 32, supers, 256)
    products = scales * (codes - 32)
    return products, np.zeros_like(products)


def _read_iq4_xs(packed: PackedIntegers) -> tuple[np.ndarray, np.ndarray]:
    """[panel][256 elements][64 of them][1024 bytes of codes, 64 bytes]: units, then bytes of four high parts of scales,
    then, after two blocks, bytes of two low parts."""
    supers = packed.num_in // 256
    memory = np.asarray(packed.data).reshape(-1, supers, 4, 1088)
    units = np.ascontiguousarray(memory[:, :, 0, 1024:]).view(np.float16).astype(np.float64)
    pieces = memory[..., 1024:].reshape(-1, supers, 4, 2, 32)
    high = np.stack([pieces[:, :, 1, g // 4] >> 2 * (g % 4) & 3 for g in range(8)], -1)
    low = np.stack([pieces[:, :, 2 + g // 4, g // 2 % 2] >> 4 * (g % 2) & 15 for g in range(8)], -1)
    scales = units[..., None] * ((low | high << 4).astype(np.float64) - 32)
    assert packed.layout.table is not None
    numbers = np.array(packed.layout.table)[_read_nibbles(memory[..., :1024])]
    products = scales.transpose(0, 2, 1, 3).repeat(32, -1) * numbers
    return products, np.zeros_like(products)


def _outputs(packed: PackedIntegers, panels: np.ndarray) -> np.ndarray:
    """[panel, 32, blocks, 64] -> [N, K] in the order of the parts."""
    rows = panels.reshape(len(panels), 32, -1)
    assert not rows[:, :, packed.num_in :].any(), "what pads k weighs nothing"
    rows = rows[:, :, : packed.num_in]
    if not packed.gated:
        assert not rows.reshape(-1, packed.num_in)[packed.num_out :].any(), "what pads the outputs weighs nothing"
        return rows.reshape(-1, packed.num_in)[: packed.num_out]
    half = packed.num_out // 2
    return np.concatenate([rows[which::2].reshape(-1, packed.num_in)[:half] for which in (0, 1)])
