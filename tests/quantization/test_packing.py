"""Packed integer matrices against the gguf package's values of the same blocks, through a reader of their memory."""

import itertools
from collections.abc import Sequence

import ml_dtypes
import numpy as np
import pytest

from octavo import _cpu
from octavo.ops.cpu_pack import PackedIntegers, PackedStack, pack_linear, pack_quantized
from octavo.quantization import Layout, StoredWeight, common_layout, dequantize, layout_of, packed_bytes
from tests.quantization.blocks import BLOCKS, KEPT_BITS, random_matrix, read_packed, values_of

_EXACT = ("Q4_0", "Q5_0", "Q8_0", "IQ4_NL")  # float16 scales and no minima: nothing to round
_KEPT = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")  # in their superblocks
_SHARED = [name for name in BLOCKS if name != "Q2_K"]  # whose values another layout has but for rounding


def _check(packed: PackedIntegers, expected: np.ndarray, exact: bool) -> None:
    """The packed values are the expected ones but for the rounding of scales to 11 bits and of minima to 8."""
    products, minima = read_packed(packed)
    expected = expected.astype(np.float64)
    assert products.shape == expected.shape
    if exact:
        assert np.array_equal(products + minima, expected)
        return
    if packed.format in KEPT_BITS:  # exact, but expected values were rounded to float32
        assert (np.abs(products + minima - expected) <= 2.0**-22 * (np.abs(products) + np.abs(minima))).all()
        return
    # Half a last bit of scale and of minimum; scales below float16's normal numbers have absolute bits.
    largest = 32 if packed.layout.bits == 4 and packed.layout.table is None else 256
    tiny = packed.factor * 2.0**-25 * largest if packed.factor != 1 else 0
    allowed = np.abs(products) * 2.0**-11 + np.abs(minima) * 2.0**-8 + tiny
    # What was shifted out of the minimum into the codes was rounded in float32.
    allowed += np.abs(expected) * 2.0**-20 + np.abs(products) * 2.0**-20
    wrong = np.abs(products + minima - expected) > allowed
    assert not wrong.any(), (np.argwhere(wrong)[:3], (products + minima)[wrong][:3], expected[wrong][:3])


@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize(("rows", "blocks"), [(32, 1), (1, 3), (37, 5), (96, 2)])
@pytest.mark.parametrize("name", BLOCKS)
def test_every_format_is_packed_to_its_own_values(name: str, rows: int, blocks: int, extreme: bool) -> None:
    # Blocks of 32 make rows of which some are no multiple of 64.
    matrix = random_matrix(name, rows, blocks * BLOCKS[name][1], extreme=extreme)
    packed = pack_quantized([matrix])
    assert packed.layout == layout_of(name)
    has_plain_scales = name == "IQ4_NL" or not (name.endswith("_K") or name.startswith("IQ") or name.endswith("FP4"))
    assert (packed.factor == 1) == has_plain_scales or extreme
    assert (packed.format in KEPT_BITS) == (name in _KEPT)
    if packed.format in KEPT_BITS:
        weights = -(-rows // 32) * 32 * matrix.shape[1]
        assert packed.data.nbytes == weights * KEPT_BITS[packed.format] / 8
        assert packed.data.nbytes == packed_bytes(name, matrix.shape, keeps_superblocks=True)
    else:
        assert packed.data.nbytes == packed.layout.packed_bytes(*matrix.shape)
    _check(packed, values_of(matrix), name in _EXACT)


@pytest.mark.parametrize(
    ("name", "bits"),
    [("IQ1_S", 4.5), ("IQ1_M", 5), ("IQ2_XXS", 4.5), ("IQ2_XS", 5), ("IQ2_S", 5), ("IQ3_XXS", 4.5), ("IQ3_S", 4.5)],
)
def test_codebooks_take_indices_of_four_bits_and_their_scales(name: str, bits: float) -> None:
    packed = pack_quantized([random_matrix(name, 64, 512)])
    assert packed.format == _cpu.WEIGHT_TABLE
    assert packed.data.nbytes * 8 == bits * 64 * 512
    assert packed_bytes(name, (64, 512), keeps_superblocks=True) == packed.data.nbytes
    assert packed_bytes(name, (64, 512)) == packed.data.nbytes  # on GPUs


@pytest.mark.parametrize("name", ["Q4_1", "Q5_1"])
def test_the_rounding_of_minima_is_far_below_a_step(name: str) -> None:
    """Blocks as quantizers make them: the minimum is about half of all steps below zero."""
    rng = np.random.default_rng(0)
    matrix = random_matrix(name, 64, 512)
    blocks = matrix.data.reshape(-1, BLOCKS[name][0])
    steps = rng.uniform(0.01, 0.02, len(blocks)).astype(np.float16)
    minima = (-steps * 2.0 ** int(name[1]) * rng.uniform(0.4, 0.6, len(blocks))).astype(np.float16)
    blocks[:, :4] = np.stack([steps, minima], axis=1).view(np.uint8)
    products, packed_minima = read_packed(pack_quantized([matrix]))
    error = np.abs(products + packed_minima - values_of(matrix))
    assert error.max() < 0.01 * steps.max()


# Superset layouts


def _stacked(names: Sequence[str], rows: Sequence[int], num_in: int, gated: bool = False) -> PackedIntegers:
    parts = [random_matrix(name, n, num_in, seed=i) for i, (name, n) in enumerate(zip(names, rows, strict=True))]
    packed = pack_quantized(parts, gated)
    assert packed.layout == common_layout(layout_of(name) for name in names)
    _check(packed, np.concatenate([values_of(part) for part in parts]), all(name in _EXACT for name in names))
    return packed


@pytest.mark.parametrize(("name", "other"), itertools.combinations_with_replacement(_SHARED, 2))
def test_any_two_formats_share_a_layout(name: str, other: str) -> None:
    _stacked([name, other], [40, 24], 256)


def test_the_widest_layout_is_that_of_four_bits_with_minima_beside_six() -> None:
    assert _stacked(["Q4_K", "Q4_K", "Q6_K"], [64, 32, 32], 512).layout == Layout(8, 16, True)


def test_blocks_with_minima_by_16_are_rounded_to_eight_bits_beside_another_format() -> None:
    matrix, other = random_matrix("Q2_K", 37, 512), random_matrix("Q3_K", 5, 512)
    packed = pack_quantized([matrix, other])
    assert packed.format == _cpu.WEIGHT_INT8
    products, _ = read_packed(packed)
    expected = values_of(matrix).reshape(37, 512).astype(np.float64)
    largest = np.abs(expected).reshape(37, -1, 16).max(-1).repeat(16, -1)
    assert (np.abs(products[:37] - expected) <= largest * (0.5 / 127 + 2.0**-11) + 1e-7).all()


@pytest.mark.parametrize("rows", [(32, 64, 32), (17, 5, 3), (1, 1, 1), (33, 31, 40), (100, 7, 64)])
def test_parts_of_any_number_of_rows_are_stacked(rows: tuple[int, ...]) -> None:
    _stacked(["Q4_1", "Q4_1", "Q4_0"], rows, 96)


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 96, 100])
@pytest.mark.parametrize("names", [("Q4_1", "Q4_1"), ("Q8_0", "Q5_1")])
def test_gate_and_up_alternate(names: tuple[str, str], rows: int) -> None:
    packed = _stacked(names, [rows, rows], 160, gated=True)
    assert packed.gated
    assert packed.data.nbytes == 2 * packed.layout.packed_bytes(rows, 160)


@pytest.mark.parametrize("name", _KEPT)
def test_superblocks_are_kept_where_all_parts_have_them(name: str) -> None:
    for packed in (_stacked([name] * 3, [17, 5, 43], 512), _stacked([name] * 2, [33, 33], 512, gated=True)):
        assert packed.format in KEPT_BITS
    if name in _SHARED:
        assert _stacked([name, "IQ3_XXS"], [17, 5], 512).format == _cpu.WEIGHT_INT8


def test_codebooks_of_one_table_share_a_matrix_of_four_bits() -> None:
    for names, group in ([("IQ1_S", "IQ2_XXS"), 32], [("IQ1_M", "IQ2_XXS"), 16], [("IQ2_XS", "IQ2_S"), 16]):
        for packed in (_stacked(names, [17, 5], 512), _stacked(names, [33, 33], 512, gated=True)):
            assert (packed.format, packed.layout.group) == (_cpu.WEIGHT_TABLE, group)
    assert _stacked(["IQ3_XXS", "IQ3_S"], [33, 33], 512, gated=True).format == _cpu.WEIGHT_INT8


def test_codebooks_of_different_tables_lie_side_by_side() -> None:
    packed = pack_linear([random_matrix(name, 64, 512) for name in ("IQ3_XXS", "IQ2_S", "IQ3_S")])
    assert isinstance(packed, PackedStack)
    assert [part.num_bytes * 8 / (64 * 512) for part in packed.parts] == [4.5, 5, 4.5]


def test_rows_may_lie_apart() -> None:
    """A part of a larger matrix, such as the gate of a fused gate_up_proj, and rows with bytes between them."""
    whole = random_matrix("Q4_0", 70, 128)
    values = values_of(whole)
    _check(pack_quantized([whole.rows(10, 43)]), values[10:43], True)
    _check(pack_quantized([whole.rows(35, 70), whole.rows(0, 35)], gated=True), np.roll(values, 35, axis=0), True)
    wide = np.zeros((70, whole.data.shape[1] + 13), np.uint8)
    wide[:, : whole.data.shape[1]] = whole.data
    apart = StoredWeight("Q4_0", {"data": wide[:, : whole.data.shape[1]]}, whole.shape)
    _check(pack_quantized([apart]), values, True)


def test_threads_do_not_change_a_bit() -> None:
    matrix = random_matrix("Q5_K", 200, 512)
    threads = _cpu.num_threads()
    found = []
    for n in (1, 3):
        _cpu.set_threads(n)
        found.append(pack_quantized([matrix]).data)
    _cpu.set_threads(threads)
    assert np.array_equal(*found)


# INT8


def _floats(values: np.ndarray) -> StoredWeight:
    return StoredWeight("INT8", {"data": values}, (values.shape[0], values.shape[1]))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(32, 64), (5, 33), (70, 576), (3, 1), (64, 95)])
def test_floats_are_quantized_by_32(dtype: type, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    spread = np.exp(3 * rng.standard_normal((shape[0], 1)))
    values = (rng.standard_normal(shape) * 0.02 * spread).astype(dtype)
    packed = pack_quantized([_floats(values)])
    assert packed.layout == Layout(8, 32, False)
    found, _ = read_packed(packed)
    # Half a step, and the rounding of the scale.
    exact = values.astype(np.float64)
    padded = np.pad(exact, ((0, 0), (0, -shape[1] % 32))).reshape(shape[0], -1, 32)
    step = (np.abs(padded).max(-1, keepdims=True) / 127).repeat(32, -1).reshape(shape[0], -1)[:, : shape[1]]
    assert (np.abs(found - exact) <= step * (0.5 + 127 * 2.0**-11)).all()
    # The same as in numpy, but for ties that fall the other way in float32.
    reference = dequantize(_floats(values)).astype(np.float64)
    assert (np.abs(found - reference) <= 1.01 * step).all()
    assert (found == reference).mean() > 0.99


@pytest.mark.parametrize("magnitude", [0.0, 1e-35, 1e-5, 3e38])
def test_floats_of_any_magnitude_are_quantized(magnitude: float) -> None:
    values = (np.linspace(-1, 1, 64 * 3).reshape(3, 64) * magnitude).astype(np.float32)
    values[1] = 0
    products, _ = read_packed(pack_quantized([_floats(values)]))
    assert np.all(np.abs(products - values.astype(np.float64)) <= magnitude / 127)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_floats_that_are_not_finite_spoil_their_own_group_alone(bad: float) -> None:
    values = np.random.default_rng(0).standard_normal((40, 128)).astype(np.float32)
    values[7, 40] = bad
    products, _ = read_packed(pack_quantized([_floats(values)]))
    # The packed scale of the group is NaN, whatever the code.
    spoiled = np.isnan(products)
    assert spoiled[7, 32:64].sum() >= 31
    spoiled[7, 32:64] = False
    assert not spoiled.any()
    assert np.abs(np.delete(products - values, 7, axis=0)).max() < 0.02


def test_float_parts_are_stacked_with_blocks() -> None:
    values = (np.random.default_rng(0).standard_normal((24, 256)) * 0.02).astype(np.float32)
    blocks = random_matrix("Q6_K", 40, 256)
    products, _ = read_packed(pack_quantized([blocks, _floats(values)]))
    assert np.abs(products[:40] - values_of(blocks)).max() < 1e-3 * np.abs(products[:40]).max()
    assert np.abs(products[40:] - values).max() < 0.001


# What the native packer refuses


def test_rows_that_do_not_fit_are_refused() -> None:
    memory = np.zeros(1 << 16, np.uint8)
    address = memory.ctypes.data

    def pack(name: str, *, bits: int = 8, group: int = 32, minima: bool = True, gated: bool = False, first: int = 0,
             stride: int = 1000, rows: int = 2, k: int = 256) -> None:  # fmt: skip
        form = _cpu.WEIGHT_INT4 if bits == 4 else _cpu.WEIGHT_INT8
        matrix = _cpu.Matrix(address, 0, 4, k, 1.0, form, group, minima, gated)
        _cpu.pack_part(
            to=matrix, first_row=first, source=address, source_format=_cpu.SOURCE_FORMATS[name],
            stride=stride, rows=rows,
        )  # fmt: skip

    for name, bits, group, minima in [("Q8_0", 4, 32, True), ("Q4_1", 4, 32, False), ("Q6_K", 8, 32, True)]:
        with pytest.raises(ValueError, match=f"{name} does not fit into {bits} bits"):
            pack(name, bits=bits, group=group, minima=minima)
    for name, form in [("Q8_0", _cpu.WEIGHT_Q4_K), ("Q4_K", _cpu.WEIGHT_Q6_K), ("Q5_K", _cpu.WEIGHT_Q4_K)]:
        matrix = _cpu.Matrix(address, 0, 4, 256, 1.0, form, 32, True, False)
        with pytest.raises(ValueError, match=f"{name} does not fit into the superblocks of another format"):
            _cpu.pack_part(
                to=matrix, first_row=0, source=address, source_format=_cpu.SOURCE_FORMATS[name],
                stride=1000, rows=2,
            )  # fmt: skip
    with pytest.raises(ValueError, match="Q4_K rows of 96 elements do not fit"):
        pack("Q4_K", k=96)
    with pytest.raises(ValueError, match="Q8_0 rows of 256 elements do not fit into 271 bytes"):
        pack("Q8_0", stride=271)
    for options in ({"first": 3}, {"rows": 5}, {"gated": True, "rows": 3}, {"gated": True, "first": 2}):
        with pytest.raises(ValueError, match="are not in a matrix of"):
            pack("Q8_0", **options)
