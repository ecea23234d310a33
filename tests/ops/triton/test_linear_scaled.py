"""Products of eight-bit activations and eight-bit weights, against the numbers that both stand for."""

from __future__ import annotations

import pytest
import torch

from octavo.errors import ConfigError
from octavo.ops.triton import pack
from octavo.ops.triton.packed_weights import FloatWeight, ScaledWeight
from octavo.ops.triton.quantize import codes_of, scales_of
from tests.ops.tensors import stored, torch_ref
from tests.ops.triton.conftest import DEVICE, products
from tests.ops.triton.test_linear import TOLERANCE, assert_near, draw

pytestmark = pytest.mark.long

FORMATS = ["INT8", "FP8"]


def values_of(weight: ScaledWeight) -> torch.Tensor:
    return weight.codes.double() * weight.scales.double()[:, None]


def seen(x: torch.Tensor, weight: ScaledWeight) -> torch.Tensor:
    """x as the product sees it."""
    quantized = products.quantize(x, weight)
    codes = codes_of(quantized, weight.activation_dtype)
    return codes.double() * scales_of(quantized).double()[:, None]


def packed(name: str, *parts: torch.Tensor, bias: torch.Tensor | None = None, gated: bool = False) -> ScaledWeight:
    weight = products.pack_linear([stored(part, name) for part in parts], bias, gated)
    assert isinstance(weight, ScaledWeight)
    return weight


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 40, 64), (5, 72, 656), (40, 24, 160)])
def test_linear(name: str, rows: int, n: int, k: int) -> None:
    x, bias = draw(rows, k, dtype=torch.bfloat16), draw(n)
    weight = packed(name, draw(n - 8, k, seed=1), draw(8, k, seed=2), bias=bias)
    expected = seen(x, weight) @ values_of(weight).T + bias
    found = products.linear(x, weight, torch.float32)
    # Tensor cores keep some 14 bits of a sum of 8-bit floats.
    assert_near(found, expected, 2e-3 if name == "FP8" and DEVICE.type != "cpu" else 1e-5)
    assert torch.equal(products.linear(products.quantize(x, weight), weight), found)
    assert products.linear(x, weight).dtype is torch.bfloat16


@pytest.mark.parametrize("name", FORMATS)
def test_scales_are_those_of_rows(name: str) -> None:
    values = draw(6, 64) * torch.tensor([1e-3, 1, 1e3, 0, 1, 1])[:, None]
    found = values_of(packed(name, values))
    bound = values.abs().amax(1, keepdim=True) / (16 if name == "FP8" else 254) * 1.001
    assert ((found - values).abs() <= bound).all()


@pytest.mark.parametrize("name", FORMATS)
def test_residual_and_gate(name: str) -> None:
    x = draw(3, 64, dtype=torch.bfloat16)
    gate_up = packed(name, draw(48, 64, seed=1), draw(48, 64, seed=2), gated=True)
    down, residual = packed(name, draw(32, 48, seed=3)), draw(3, 32)
    rows = torch.arange(96).view(-1, 2, 8).transpose(0, 1).flatten()
    values = values_of(gate_up)[rows].float()
    reference = torch_ref.DenseWeight(values, gated=True)
    gated = torch_ref.linear_silu_and_mul(seen(x, gate_up).float(), reference)
    assert_near(products.linear_silu_and_mul(x, gate_up), gated, TOLERANCE[torch.bfloat16])
    quantized = products.linear_silu_and_mul(x, gate_up, down)
    assert quantized.shape == (3, 48 + 16)
    up = packed(name, draw(48, 64, seed=1))
    activated = torch_ref.linear_activated(seen(x, up).float(), torch_ref.DenseWeight(values_of(up).float()), "gelu")
    assert_near(products.linear_activated(x, up, "gelu"), activated, TOLERANCE[torch.bfloat16])
    assert products.linear_activated(x, up, "gelu", down).shape == (3, 48 + 16)
    expected = residual + 2 * (seen(gated, down) @ values_of(down).T)
    products.linear_add(quantized, down, residual, 2.0)
    assert_near(residual, expected, 1e-2)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_do_not_depend_on_the_others(name: str) -> None:
    weight, x = packed(name, draw(40, 160)), draw(9, 160, dtype=torch.bfloat16)
    together = products.linear(x, weight)
    assert torch.equal(products.linear(x[4:5], weight)[0], together[4])


def test_matrices_that_do_not_fit_stay_floats() -> None:
    odd = products.pack_linear([stored(draw(16, 40), "INT8")])
    assert isinstance(odd, FloatWeight)
    mixed = products.pack_linear([stored(draw(16, 32), "INT8"), draw(8, 32, dtype=torch.float16)])
    assert isinstance(mixed, FloatWeight) and mixed.data.dtype is torch.float16


def test_gpus_without_eight_bit_floats_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "capability", lambda device: (8, 0))
    with pytest.raises(ConfigError, match=r"8\.0"):
        packed("FP8", draw(16, 32))
