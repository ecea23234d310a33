"""Shares of stored weights, and floats in and out of them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.quantization import StoredWeight, dequantize, layout_of, packed_bytes
from octavo.quantization.array_functions import FLOATS, converted
from octavo.quantization.formats import PLAIN
from octavo.quantization.layout import Layout
from tests.quantization.blocks import BLOCKS, random_matrix
from tests.quantization.groups import awq_matrix, gptq_matrix, grouped_matrix

N, K = 64, 1024
# format of a matrix [64, 1024] -> of what its bounds must be multiples: rows, columns
UNITS = {
    **dict.fromkeys(PLAIN, (1, 1)),
    **{name: (1, elements) for name, (_, elements, _) in BLOCKS.items()},
    "INT8": (1, 32),
    "INT4": (1, 32),
    "GPTQ": (8, 128),
    "GPTQ_V2": (4, 256),
    "GPTQ single group": (8, 8),
    "AWQ": (8, 256),
    "AWQ single group": (8, 1),
}


def _matrix(name: str) -> StoredWeight:
    if name in BLOCKS:
        return random_matrix(name, N, K)
    if name in PLAIN or name in ("INT8", "INT4", "FP8"):
        values = np.random.default_rng(0).standard_normal((N, K)).astype(np.float32)
        return StoredWeight(name, {"data": converted(values, PLAIN.get(name, "bfloat16"))}, (N, K))
    groups = {"GPTQ": 8, "GPTQ_V2": 4, "AWQ": 4}.get(name, 1)
    bits = 8 if name == "GPTQ_V2" else 4
    tensors = grouped_matrix(0, groups, bits, K, N)
    if name.startswith("AWQ"):
        return awq_matrix(*tensors)
    return gptq_matrix(*tensors, bits=bits, less_one=name != "GPTQ_V2")


@pytest.mark.parametrize("name", UNITS)
def test_rows_can_be_put_in_another_order_where_they_stand_alone(name: str) -> None:
    matrix, order = _matrix(name), np.random.default_rng(1).permutation(N)[:40]
    if UNITS[name][0] > 1:
        with pytest.raises(ConfigError, match="cannot be put in another order"):
            matrix.take_rows(order)
        return
    taken = matrix.take_rows(order)
    assert (taken.format, taken.shape) == (matrix.format, (40, K))
    assert np.array_equal(dequantize(taken), dequantize(matrix)[order])


@settings(max_examples=25, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", UNITS)
def test_shares_are_shares_of_the_values(name: str, data: st.DataObject) -> None:
    matrix = _matrix(name)
    values = dequantize(matrix)
    rows, columns = (
        sorted(unit * data.draw(st.integers(0, size // unit)) for _ in range(2))
        for unit, size in zip(UNITS[name], (N, K), strict=True)
    )
    if rows[0] == rows[1] or columns[0] == columns[1]:
        return
    share = matrix.rows(*rows).columns(*columns)
    assert share.format == matrix.format
    assert share.shape == (rows[1] - rows[0], columns[1] - columns[0])
    expected = values[slice(*rows), slice(*columns)]
    assert np.array_equal(dequantize(share), expected)
    assert np.array_equal(dequantize(matrix.columns(*columns).rows(*rows)), expected)
    for tensor_name, tensor in share.tensors.items():
        # Group indices count from the share's own first group.
        assert tensor_name == "g_idx" or np.shares_memory(tensor, matrix.tensors[tensor_name])


@pytest.mark.parametrize("name", UNITS)
def test_bounds_inside_of_a_block_are_refused_with_the_numbers(name: str) -> None:
    matrix = _matrix(name)
    for what, cut, unit, size in zip(
        ("rows", "columns"), (matrix.rows, matrix.columns), UNITS[name], (N, K), strict=True
    ):
        if unit == 1:
            continue
        for begin, end in [(0, unit // 2), (unit // 2, size), (unit, size - 1)]:
            message = rf"{what} {begin} to {end} of a {matrix.format} matrix \[64, 1024\] .* groups of {unit}\."
            with pytest.raises(ConfigError, match=message):
                cut(begin, end)
    assert matrix.rows(0, N).columns(0, K).num_bytes == matrix.num_bytes


def test_fp8_quantizes_the_rows_of_a_share_by_themselves() -> None:
    matrix = _matrix("FP8")
    assert np.array_equal(dequantize(matrix.rows(8, 24)), dequantize(matrix)[8:24])
    own = StoredWeight("FP8", {"data": matrix.data[:, 100:300]}, (N, 200))
    assert np.array_equal(dequantize(matrix.columns(100, 300)), dequantize(own))


@pytest.mark.parametrize("name", ["FP8", "INT8"])
def test_floats_quantized_at_load_are_what_torch_makes_of_them(name: str) -> None:
    values = _matrix(name).data.astype(np.float32)
    values[3] = 0
    values[4] *= 1e-20
    stored = torch.from_numpy(values)
    if name == "FP8":
        scales = stored.abs().amax(1) / 448
        codes = (stored / torch.where(scales > 0, scales, 1.0)[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
        expected = codes.float() * scales[:, None]
    else:
        groups = stored.view(N, -1, 32)
        scales = groups.abs().amax(-1, keepdim=True) / 127
        unit = 2.0 ** (float(scales.max().log2().floor()) + 1 - 15)
        scales = (scales / unit).half().float() * unit
        expected = torch.where(scales > 0, groups / scales, 0.0).round().clamp(-127, 127).mul(scales).view(N, K)
    found = dequantize(StoredWeight(name, {"data": values}, (N, K)))
    assert np.array_equal(found, expected.numpy())


# Floats


def _rounded_by_torch(values: np.ndarray, dtype: str) -> np.ndarray:
    rounded = torch.from_numpy(values).to(getattr(torch, dtype))
    return rounded.view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize("source", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_floats_are_rounded_as_torch_rounds_them(dtype: str, source: type) -> None:
    rng = np.random.default_rng(0)
    width = np.dtype(source).itemsize
    random = rng.integers(0, 256, width << 20, np.uint8).view(source)
    info = np.finfo(source)
    largest = float(ml_dtypes.finfo(FLOATS[dtype]).max)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, info.tiny, -info.tiny, info.smallest_subnormal, info.max, -info.max]
    with np.errstate(over="ignore"):
        ties = (1 + np.arange(1, 4096) / 2.0**12).astype(source)  # halfway between two, and next to it
        around = np.array([largest, largest * (1 + 2.0**-9), largest * (1 + 2.0**-12)]).astype(source)
        values = np.concatenate([random, np.array(special, source), ties, np.nextafter(ties, source(0)), around])
    if source is np.float64:  # in the range of float32, where something is left to round
        values = np.concatenate([values, rng.standard_normal(1 << 20)])
    found = converted(values, dtype)
    assert found.dtype == FLOATS[dtype]
    is_nan = np.isnan(values)
    assert np.isnan(found[is_nan]).all()  # which NaN is any library's choice
    assert np.array_equal(found[~is_nan].view(np.uint16), _rounded_by_torch(values, dtype)[~is_nan])


@pytest.mark.parametrize("source", FLOATS)
def test_floats_of_fewer_bits_become_float32_exactly(source: str) -> None:
    if source == "float32":
        values = np.random.default_rng(0).standard_normal(100).astype(np.float32)
        assert converted(values, "float32") is values
        return
    values = np.arange(1 << 16, dtype=np.uint16).view(FLOATS[source])
    expected = torch.from_numpy(values.view(np.int16)).view(getattr(torch, source)).float().numpy()
    assert np.array_equal(converted(values, "float32"), expected, equal_nan=True)


# Memory


@pytest.mark.parametrize("name", [*PLAIN, *BLOCKS, "INT8", "INT4", "FP8"])
def test_what_a_packed_matrix_takes_is_known_before(name: str) -> None:
    if name in PLAIN:
        assert packed_bytes(name, (100, 70)) == 100 * 70 * FLOATS[PLAIN[name]].itemsize
    elif name == "FP8":
        assert packed_bytes(name, (64, 256)) >= 64 * 256
    else:
        on_gpu = {"MXFP4": Layout(4, 32, False)}.get(name, layout_of(name))  # scales of two bytes
        assert packed_bytes(name, (64, 256)) == on_gpu.packed_bytes(64, 256)


def test_experts_of_gpt_oss_120b_take_what_their_file_takes() -> None:
    """36 layers of 128 experts: 61 GB."""
    shapes = [(128 * 5760, 2880), (128 * 2880, 2880)]
    found = sum(packed_bytes("FP4_SCALED", shape, layout_of("MXFP4"), keeps_superblocks=True) for shape in shapes)
    assert found == sum(rows * columns * 17 // 32 for rows, columns in shapes)  # a byte beside 16 bytes of codes
    assert round(36 * found / 1e9) == 61
    on_gpu = sum(packed_bytes("FP4_SCALED", shape, layout_of("MXFP4")) for shape in shapes)
    assert round(36 * on_gpu / 1e9) == 64, "one H100 holds it"


@pytest.mark.parametrize("name", ["FP8", "GPTQ", "AWQ", "F32"])
def test_formats_without_a_layout_of_integers_are_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=r"8-bit floats|no layout of their own"):
        layout_of(name)
