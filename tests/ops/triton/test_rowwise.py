"""Norms, activations, quantized rows and rows by index: Triton's kernels against the reference."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from octavo.ops import ACTIVATIONS, POOLINGS
from octavo.ops.triton import norm_kernels
from octavo.ops.triton.norm_kernels import layer_norm, rms_norm
from octavo.ops.triton.pool_rows import pool
from octavo.ops.triton.quantize import codes_of, quantize_rows, scales_of
from octavo.ops.triton.rows import activation, add, take_rows
from tests.ops.kernel_cases import PARAMETERS, assert_near, assert_same_bits, random
from tests.ops.tensors import torch_ref
from tests.ops.triton.conftest import DEVICE, products

pytestmark = pytest.mark.long

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CODES = [torch.int8, torch.float8_e4m3fn]


@dataclass(frozen=True)
class Consumer:
    """As much of a quantized matrix as `rms_norm` asks for."""

    activation_dtype: torch.dtype | None
    in_features: int = 0
    out_features: int = 0
    num_bytes: int = 0


def on_device(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return random(seed, *shape, dtype=dtype).to(DEVICE)


def decoded(quantized: Tensor, dtype: torch.dtype) -> Tensor:
    assert quantized.dtype is torch.uint8
    return codes_of(quantized, dtype).float() * scales_of(quantized)[:, None]


def assert_quantized(quantized: Tensor, dtype: torch.dtype, expected: Tensor) -> None:
    """Within half a step of the codes from `expected` [T, K], with the scale that the largest magnitude gives."""
    largest = expected.float().abs().amax(-1)
    scale = scales_of(quantized)
    torch.testing.assert_close(scale, largest / (127 if dtype is torch.int8 else 448), rtol=1e-5, atol=0)
    expected = expected.float().abs()
    error = (decoded(quantized, dtype).abs() - expected).abs()
    if dtype is torch.int8:
        assert (error <= 0.5001 * scale[:, None]).all()
        return
    # Three bits of mantissa, and steps of 2^-9 below the smallest normal number.
    near = error <= torch.maximum(expected * 2.0**-3.99, 2.0**-9.99 * scale[:, None])
    if DEVICE.type == "cpu":  # the interpreter loses the carry of mantissas that round up to 2, and cuts small numbers
        code = (expected / scale[:, None]).to(dtype).float()
        near |= (code.frexp().mantissa == 0.5) | (code < 2.0**-6)
    assert near.all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 64), (5, 300), (17, 128), (2, 2048), (2, 16384), (2, 20000)])
def test_rms_norm(rows: int, width: int, dtype: torch.dtype) -> None:
    x, weight = on_device(rows, rows, width, dtype=dtype) * 3, on_device(1, width, dtype=dtype)
    assert_near(rms_norm(x, weight, 1e-5), torch_ref.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 64), (5, 300), (17, 128), (2, 16384), (2, 20000)])
def test_layer_norm(rows: int, width: int, dtype: torch.dtype) -> None:
    x, weight = on_device(rows, rows, width, dtype=dtype) * 3 + 2, on_device(1, width, dtype=dtype)
    for bias in (None, on_device(2, width, dtype=dtype)):
        assert_near(layer_norm(x, weight, bias, 1e-5), torch_ref.layer_norm(x, weight, bias, 1e-5))


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("width", [16, 304])
def test_layer_norm_quantizes_for_its_consumer(width: int, codes: torch.dtype) -> None:
    x, weight, bias = on_device(0, 4, width) + 1, on_device(1, width), on_device(2, width)
    out = layer_norm(x, weight, bias, 1e-5, Consumer(codes))
    assert_quantized(out, codes, torch_ref.layer_norm(x, weight, bias, 1e-5))


@pytest.mark.parametrize("kind", [*ACTIVATIONS, *PARAMETERS])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (5, 300), (2, 3000)])
def test_activations(rows: int, width: int, dtype: torch.dtype, kind: str) -> None:
    x = (on_device(rows, rows, 2 * width, dtype=dtype) * 4)[:, :width]
    settings = {"parameters": PARAMETERS.get(kind, ())}
    assert_near(activation(x, kind, **settings), torch_ref.activation(x, kind, **settings))
    assert activation(x[:0], kind, **settings).shape == (0, width)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_quantize_for_their_consumer(kind: str) -> None:
    x = on_device(1, 4, 96, dtype=torch.bfloat16)
    quantized = activation(x, kind, Consumer(torch.int8))
    expected = quantize_rows(activation(x.float(), kind), torch.int8)
    assert torch.equal(quantized[:, :100], expected[:, :100])  # the codes and the scale


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_gives_the_bits_of_linear_add(dtype: torch.dtype) -> None:
    x, residual = on_device(0, 6, 80, dtype=dtype), on_device(1, 6, 1100, dtype=dtype)
    weight = products.pack_linear([on_device(2, 1100, 80, dtype=dtype)], on_device(3, 1100))
    for scale in (1.0, 0.22):
        expected, found = residual.clone(), residual.clone()
        products.linear_add(x, weight, expected, scale)
        add(found, products.linear(x, weight, torch.float32), scale)
        assert_same_bits(found, expected)
        add(found, residual, scale)
        torch_ref.add(expected, residual, scale)
        assert_near(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_may_have_weights_of_their_own(dtype: torch.dtype) -> None:
    heads = on_device(0, 21, 7, 40, dtype=dtype)[:, 2:5]
    weight, bias = on_device(1, 3, 40), on_device(2, 3, 40)
    assert_near(rms_norm(heads, weight, 1e-6), torch_ref.rms_norm(heads, weight, 1e-6))
    assert_near(layer_norm(heads, weight, bias, 1e-6), torch_ref.layer_norm(heads, weight, bias, 1e-6))


def test_rms_norm_of_views_and_of_a_float32_weight() -> None:
    qkv = on_device(0, 5, 6 * 32, dtype=torch.bfloat16).view(5, 6, 32)
    weight = on_device(1, 32)
    for x in (qkv[:, 1:5], qkv[:, 5], qkv[1, 2], qkv[:0], qkv.transpose(0, 1)[1:3]):
        out = rms_norm(x, weight, 1e-6)
        assert out.is_contiguous()
        assert_near(out, torch_ref.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("width", [32, 300, 4096])
def test_the_norm_of_a_row_does_not_depend_on_other_rows(width: int) -> None:
    x, weight = on_device(0, 37, width, dtype=torch.bfloat16), on_device(1, width)
    together = rms_norm(x, weight, 1e-5)
    for start, end in ((0, 1), (3, 4), (8, 31)):
        assert_same_bits(rms_norm(x[start:end], weight, 1e-5), together[start:end])


def test_long_rows_are_normalised_alike_wherever_the_tile_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = on_device(0, 3, 500), on_device(1, 500)
    expected = torch_ref.rms_norm(x, weight, 1e-5)
    monkeypatch.setattr(norm_kernels, "_MAX_TILE", 256)
    assert_near(rms_norm(x, weight, 1e-5), expected)


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("width", [16, 304, 4096])
def test_rms_norm_quantizes_for_its_consumer(width: int, codes: torch.dtype) -> None:
    x, weight = on_device(0, 4, width, dtype=torch.bfloat16), on_device(1, width)
    out = rms_norm(x, weight, 1e-5, Consumer(codes))
    assert out.shape == (4, width + 16)
    assert_quantized(out, codes, torch_ref.rms_norm(x.float(), weight, 1e-5))
    assert rms_norm(x, weight, 1e-5, Consumer(None)).dtype is torch.bfloat16


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize(("width", "dtype"), [(16, torch.float32), (208, torch.bfloat16), (9008, torch.float16)])
def test_quantized_rows(width: int, dtype: torch.dtype, codes: torch.dtype) -> None:
    x = on_device(2, 3, 2 * width, dtype=dtype)[:, width:] * 20
    assert_quantized(quantize_rows(x, codes), codes, x)


@pytest.mark.parametrize("codes", CODES)
def test_rows_of_zeros_and_rows_that_are_not_finite(codes: torch.dtype) -> None:
    x = on_device(0, 5, 32)
    x[0] = 0
    x[1] = 2.0**-110
    x[2, 3] = float("nan")
    x[3, 31] = -float("inf")
    values = decoded(quantize_rows(x, codes), codes)
    assert (values[:2] == 0).all()
    assert values[2:4].isnan().all()
    assert values[4].isfinite().all()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint8])
def test_take_rows(dtype: torch.dtype) -> None:
    x = (on_device(0, 9, 2 * 2100) * 9).to(dtype)[:, 2100:]
    rows = torch.tensor([8, 0, 3, 3])
    assert torch.equal(take_rows(x, rows), x[rows])
    assert take_rows(x, rows[:0]).shape == (0, 2100)


@pytest.mark.parametrize("kind", POOLINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_pooled_each_text_for_itself(dtype: torch.dtype, kind: str) -> None:
    lengths = torch.tensor([1, 3, 32, 33, 100])
    ends = (lengths.cumsum(0) - 1).to(DEVICE)
    starts = ends - (lengths - 1).to(DEVICE)
    x = on_device(0, int(lengths.sum()) + 5, 2 * 300, dtype=dtype)[:, :300] + 0.5
    for out in ("float32", None):
        pooled = pool(x, starts, ends, kind, out)
        assert_near(pooled, torch_ref.pool(x, starts, ends, kind, out))
        assert torch.equal(pooled[0], x[0].to(pooled.dtype))
        last = slice(int(starts[-1]), None)
        assert_same_bits(pool(x[last], starts[-1:] * 0, ends[-1:] - starts[-1], kind, out), pooled[-1:])
    assert pool(x, starts[:0], ends[:0], kind).shape == (0, 300)
