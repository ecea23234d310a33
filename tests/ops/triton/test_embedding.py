"""Rows of every kind of packed matrix."""

from __future__ import annotations

import pytest
import torch

from octavo.ops.triton import pack
from octavo.quantization import dequantize
from tests.ops.tensors import stored
from tests.ops.triton.conftest import DEVICE, products
from tests.ops.triton.test_linear import draw
from tests.ops.triton.test_linear_int import random_codes
from tests.quantization.blocks import random_matrix

IDS = torch.tensor([3, 0, 39, 3], dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_float_rows_are_the_matrix_itself(dtype: torch.dtype) -> None:
    matrix = draw(40, 1100, dtype=dtype)
    weight = products.pack_linear([matrix])
    assert torch.equal(products.embedding(IDS, weight), matrix[IDS.long()])
    scaled = products.embedding(IDS, weight, torch.float32, 1.5)
    assert torch.equal(scaled, matrix[IDS.long()].float() * 1.5)
    assert products.embedding(IDS[:0], weight).shape == (0, 1100)


@pytest.mark.parametrize(
    ("bits", "group", "minima"), [(4, 32, True), (4, 128, False), (8, 16, False), (8, 16, True), (8, 32, False)]
)
def test_integer_rows_are_what_they_stand_for(bits: int, group: int, minima: bool) -> None:
    codes = random_codes(bits, group, minima, 40, 600)
    found = products.embedding(IDS, pack.pack_codes([codes]), scale=0.5)
    assert found.dtype is torch.float32
    assert torch.allclose(found, codes.dequantize().to(DEVICE)[IDS.long()] * 0.5, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0", "Q6_K"])
def test_rows_of_gguf_matrices(name: str) -> None:
    matrix = random_matrix(name, 40, 256)
    expected = torch.from_numpy(dequantize(matrix)).to(DEVICE)[IDS.long()]
    found = products.embedding(IDS, products.pack_linear([matrix]))
    assert torch.allclose(found, expected, rtol=1e-3 if name == "Q6_K" else 1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["INT8", "FP8"])
def test_rows_of_matrices_quantized_at_load(name: str) -> None:
    matrix = draw(40, 64)
    found = products.embedding(IDS, products.pack_linear([stored(matrix, name)]))
    if name == "FP8":
        assert torch.equal(found, torch.from_numpy(dequantize(stored(matrix, name))).to(DEVICE)[IDS.long()])
    bound = matrix.abs().amax(1, keepdim=True) / (16 if name == "FP8" else 254) * 1.001
    assert ((found - matrix[IDS.long()]).abs() <= bound[IDS.long()]).all()
