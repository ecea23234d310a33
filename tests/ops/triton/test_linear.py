"""Products with float matrices against the reference, at shapes that fill no tile."""

from __future__ import annotations

import pytest
import torch

from octavo.ops.triton import linear as kernels
from octavo.ops.triton.schedule import row_class
from tests.ops.tensors import torch_ref
from tests.ops.triton.conftest import DEVICE, products

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Of the largest output. The interpreter cuts bfloat16 off where the device rounds.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def assert_near(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    bound = tolerance * expected.abs().max().clamp(min=1)
    assert (found.float() - expected.float()).abs().max() <= bound


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 48, 64), (5, 100, 72), (17, 72, 300), (3, 7, 33)])
def test_linear_is_the_product_plus_bias(dtype: torch.dtype, rows: int, n: int, k: int) -> None:
    x, parts, bias = draw(rows, k, dtype=dtype), [draw(n, k, dtype=dtype, seed=1), draw(8, k, dtype=dtype)], draw(n + 8)
    weight = products.pack_linear(parts, bias)
    assert (weight.out_features, weight.in_features) == (n + 8, k)
    expected = torch_ref.linear(x.float(), torch_ref.pack_linear([part.float() for part in parts], bias))
    for out_dtype in (None, torch.float32):
        found = products.linear(x, weight, out_dtype)
        assert found.dtype is (out_dtype or dtype)
        assert_near(found, expected, TOLERANCE[found.dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_add_adds_to_the_residual_in_place_and_rounds_once(dtype: torch.dtype) -> None:
    x, matrix, bias, residual = draw(6, 80, dtype=dtype), draw(40, 80, dtype=dtype), draw(40), draw(6, 40, dtype=dtype)
    expected = residual.float() + 0.25 * (x.float() @ matrix.float().T + bias)
    products.linear_add(x, products.pack_linear([matrix], bias), residual, 0.25)
    assert_near(residual, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "activation"), [(8, "silu"), (52, "gelu"), (52, "relu2"), (96, "gelu_tanh")])
def test_gate_and_up_lie_together(dtype: torch.dtype, width: int, activation: str) -> None:
    x, bias = draw(4, 48, dtype=dtype), draw(2 * width)
    gate, up = draw(width, 48, dtype=dtype, seed=1), draw(width, 48, dtype=dtype, seed=2)
    reference = torch_ref.pack_linear([gate.float(), up.float()], bias, gated=True)
    found = products.linear_silu_and_mul(x, products.pack_linear([gate, up], bias, gated=True), activation=activation)
    assert found.dtype is dtype
    assert found.shape == (4, width)
    expected = torch_ref.linear_silu_and_mul(x.float(), reference, activation=activation)
    assert_near(found, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "activation"), [(8, "silu"), (52, "gelu"), (96, "relu2")])
def test_products_without_a_gate_are_activated(dtype: torch.dtype, width: int, activation: str) -> None:
    x, up, bias = draw(4, 48, dtype=dtype), draw(width, 48, dtype=dtype, seed=1), draw(width)
    found = products.linear_activated(x, products.pack_linear([up], bias), activation)
    expected = torch_ref.linear_activated(x.float(), torch_ref.pack_linear([up.float()], bias), activation)
    assert found.dtype is dtype
    assert_near(found, expected, TOLERANCE[dtype])


def test_input_may_be_a_view_of_wider_rows() -> None:
    wide = draw(5, 200, dtype=torch.bfloat16)
    weight = products.pack_linear([draw(24, 64, dtype=torch.bfloat16)])
    for first in (0, 64, 67):
        x = wide[:, first : first + 64]
        assert torch.equal(products.linear(x, weight), products.linear(x.contiguous(), weight))


def test_no_rows_give_no_rows() -> None:
    weight = products.pack_linear([draw(24, 64)])
    assert products.linear(draw(0, 64), weight).shape == (0, 24)


def test_rows_do_not_depend_on_the_others() -> None:
    """Bit for bit, whatever tile their number makes the kernel choose."""
    weight = products.pack_linear([draw(96, 264, dtype=torch.bfloat16)])
    for rows in (3, 40, 150) if DEVICE.type == "cpu" else (2, 16, 30, 64, 90, 128, 200, 300, 2000):
        x = draw(rows, 264, dtype=torch.bfloat16)
        together = products.linear(x, weight, torch.float32)
        assert torch.equal(products.linear(x[:1], weight, torch.float32)[0], together[0])
        x[1:] *= float("nan")
        assert torch.equal(products.linear(x, weight, torch.float32)[0], together[0])


@pytest.mark.parametrize(("rows", "n"), [(1, 4096), (200, 4096), (2048, 4096), (1, 28672), (2048, 128256), (1, 56)])
def test_tiles_hold_the_channels_that_they_are_given(rows: int, n: int) -> None:
    for dtype in (*DTYPES, torch.int8, torch.float8_e4m3fn):
        for unit in (8, 16):
            for machine in (((9, 0), 132), ((9, 0), 4), ((8, 0), 108), ((8, 9), 142)):
                tile, channels = kernels.choose_tile(*machine, rows, n, 4096 * dtype.itemsize, dtype, unit)
                assert channels % unit == 0
                assert 0 < channels <= tile.block_n


def test_tiles_are_chosen_once_a_class_of_rows() -> None:
    kernels._tile_of_class.cache_clear()
    for rows in (*range(1, 300), *range(1900, 4000, 7)):
        kernels.choose_tile((9, 0), 132, rows, 4096, 8192, torch.bfloat16, 8)
    classes = {row_class(rows) for rows in (*range(1, 300), *range(1900, 4000, 7))}
    assert kernels._tile_of_class.cache_info().misses == len(classes)


def test_input_of_another_type_is_refused() -> None:
    weight = products.pack_linear([draw(24, 64)])
    with pytest.raises(TypeError, match="packed as"):
        products.linear(draw(1, 64, dtype=torch.bfloat16), weight)
