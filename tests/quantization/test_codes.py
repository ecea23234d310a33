"""Unpacking of formats of few bits: what each file means, by other means."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from octavo.errors import ConfigError
from octavo.quantization import Codes, Layout, StoredWeight, dequantize, gguf_codebooks, unpack
from octavo.quantization.gguf_blocks import LAYOUTS
from tests.quantization.blocks import BLOCKS, random_matrix, values_of
from tests.quantization.groups import awq_matrix, expected_of, gptq_matrix, grouped_matrix

Library = Callable[[StoredWeight], StoredWeight]


def _on_torch(stored: StoredWeight) -> StoredWeight:
    """As packers of a GPU have it."""
    return StoredWeight(
        stored.format, {name: torch.from_numpy(np.array(t)) for name, t in stored.tensors.items()}, stored.shape
    )


@pytest.fixture(params=["numpy", "torch"])
def library(request: pytest.FixtureRequest) -> Library:
    """Unpackers run on both."""
    return _on_torch if request.param == "torch" else lambda stored: stored


def _numpy(x: Any) -> np.ndarray:
    return np.asarray(x)


@pytest.mark.parametrize("name", BLOCKS)
def test_gguf_codes_are_exactly_what_the_blocks_say(name: str, library: Library) -> None:
    matrix = random_matrix(name, 6, 512)
    found, layout = unpack(library(matrix)), LAYOUTS[name]
    assert (found.bits, found.group, found.minima is not None) == (layout.bits, layout.group, layout.minima)
    assert int(found.codes.max()) < 1 << found.bits
    values = _numpy(found.dequantize())
    assert values.dtype == np.float32
    expected = values_of(matrix).reshape(6, 512)
    assert np.array_equal(dequantize(matrix), expected)
    if name != "Q2_K":  # whose codes are rounded from the values
        assert np.array_equal(values, expected)
    assert np.abs(values - expected).max() <= np.abs(expected).max() / 250


@pytest.mark.parametrize("name", BLOCKS)
def test_wider_codes_are_the_same_matrix(name: str, library: Library) -> None:
    codes = unpack(library(random_matrix(name, 3, 512)))
    for minima in (True, False) if codes.minima is None else (True,):
        wide = codes.widened(Layout(8, 16, minima))
        assert (wide.bits, wide.group, wide.minima is not None) == (8, 16, minima)
        assert np.allclose(_numpy(wide.dequantize()), _numpy(codes.dequantize()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", BLOCKS)
def test_both_libraries_unpack_the_same(name: str) -> None:
    matrix = random_matrix(name, 5, 256, extreme=True)
    found, other = unpack(matrix), unpack(_on_torch(matrix))
    for field in ("codes", "scales", "minima"):
        ours, theirs = getattr(found, field), getattr(other, field)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert isinstance(ours, np.ndarray) and isinstance(theirs, torch.Tensor)
            assert np.array_equal(ours, theirs.numpy())


def test_codebooks_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gguf_codebooks._codebook.cache_clear()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"IQ3_S matrices need the codebooks .* scripts/install gguf"):
        unpack(random_matrix("IQ3_S", 2, 256))


def assert_same(found: Codes, expected: np.ndarray) -> None:
    assert np.allclose(_numpy(found.dequantize()), expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_awq(groups: int, library: Library) -> None:
    codes, zeros, scales = grouped_matrix(1, groups)
    found = unpack(library(awq_matrix(codes, zeros, scales)))
    assert np.array_equal(_numpy(found.codes), codes.T)
    assert_same(found, expected_of(codes, zeros, scales))


@pytest.mark.parametrize("less_one", [True, False])
@pytest.mark.parametrize("groups", [1, 4])
def test_gptq_with_four_bits(groups: int, less_one: bool, library: Library) -> None:
    codes, zeros, scales = grouped_matrix(2, groups)
    found = unpack(library(gptq_matrix(codes, zeros, scales, less_one=less_one, indices=False)))
    assert np.array_equal(_numpy(found.codes), codes.T)
    assert_same(found, expected_of(codes, zeros, scales))


def test_gptq_with_eight_bits_and_zeros_in_the_middle_has_no_minima(library: Library) -> None:
    codes, _, scales = grouped_matrix(3, 2, bits=8)
    zeros = np.full((2, 24), 128)
    found = unpack(library(gptq_matrix(codes, zeros, scales, bits=8)))
    assert found.minima is None
    assert_same(found, expected_of(codes, zeros, scales))


def test_gptq_in_the_order_of_activations_has_its_columns_in_that_of_groups(library: Library) -> None:
    codes, zeros, scales = grouped_matrix(4, 2)
    stored = gptq_matrix(codes, zeros, scales)
    g_idx = np.random.default_rng(0).permutation(stored.tensors["g_idx"])
    found = unpack(library(StoredWeight("GPTQ", {**stored.tensors, "g_idx": g_idx}, stored.shape)))
    order = np.argsort(g_idx, kind="stable")
    assert np.array_equal(_numpy(found.order), order)
    assert np.array_equal(_numpy(found.codes), codes.T[:, order])
    assert_same(found, (scales.astype(np.float64)[g_idx] * (codes - zeros[g_idx])).T)
    with pytest.raises(ConfigError, match="g_idx does not divide 128 columns into 2 groups of 64"):
        unpack(library(StoredWeight("GPTQ", {**stored.tensors, "g_idx": g_idx * 0}, stored.shape)))


def test_gptq_with_other_bits_is_refused() -> None:
    words = np.zeros((20, 24), np.int32)
    tensors = {"qweight": words, "qzeros": np.zeros((1, 3), np.int32), "scales": np.ones((1, 24), np.float16)}
    with pytest.raises(ConfigError, match="GPTQ with 5 bits is not built; 2, 3, 4 and 8 are"):
        unpack(StoredWeight("GPTQ", tensors, (24, 128)))


@pytest.mark.parametrize("stored_format", ["F32", "BF16", "FP8"])
def test_floats_have_no_codes(stored_format: str) -> None:
    stored = StoredWeight(stored_format, {"data": np.ones((2, 64), np.float32)}, (2, 64))
    with pytest.raises(ConfigError, match=f"{stored_format} matrices have no codes; these have: Q4_0"):
        unpack(stored)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_groups_that_are_not_finite_spoil_themselves_alone(bad: float) -> None:
    values = np.random.default_rng(0).standard_normal((4, 95)).astype(np.float32)
    values[2, 40] = bad
    with np.errstate(invalid="ignore"):
        found = dequantize(StoredWeight("INT8", {"data": values}, (4, 95)))
    spoiled = np.isnan(found)
    assert spoiled[2, 32:64].all()
    spoiled[2, 32:64] = False
    assert not spoiled.any()
