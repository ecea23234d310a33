"""Unpacking of formats of few bits: what each file means, by other means."""

from __future__ import annotations

import pytest
import torch

from octavo.errors import ConfigError
from octavo.quantization import awq, gguf_codes, gptq
from octavo.quantization.codes import Codes
from octavo.quantization.gguf import LAYOUTS
from tests.quantization.blocks import BLOCKS, random_matrix, values_of


@pytest.mark.parametrize("name", BLOCKS)
def test_gguf_codes_are_exactly_what_the_blocks_say(name: str) -> None:
    matrix = random_matrix(name, 6, 512)
    found, layout = gguf_codes.unpack(matrix), LAYOUTS[name]
    assert (found.bits, found.group, found.minima is not None) == (layout.bits, layout.group, layout.minima)
    assert int(found.codes.max()) < 1 << found.bits
    assert torch.equal(found.dequantize(), torch.from_numpy(values_of(matrix)).view(6, 512))


@pytest.mark.parametrize("name", BLOCKS)
def test_wider_codes_are_the_same_matrix(name: str) -> None:
    codes = gguf_codes.unpack(random_matrix(name, 3, 512))
    for minima in (True, False) if codes.minima is None else (True,):
        wide = codes.widened(8, 16, minima)
        assert (wide.bits, wide.group, wide.minima is not None) == (8, 16, minima)
        assert torch.allclose(wide.dequantize(), codes.dequantize(), rtol=1e-5, atol=1e-6)


def pack_nibbles(values: torch.Tensor, order: list[int]) -> torch.Tensor:
    """[R, C] values of four bits -> int32 [R, C / 8], element order[i] of eight in nibble i."""
    words = torch.zeros(values.shape[0], values.shape[1] // 8, dtype=torch.int64)
    for i, element in enumerate(order):
        words += values[:, element::8].long() * 16**i
    return words.to(torch.int32)  # wraps


def grouped_matrix(seed: int, groups: int, bits: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """codes [K, N], zeros [groups, N] from 1, scales [groups, N]; K = 128, N = 24."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (128, 24), generator=generator)
    zeros = torch.randint(1, 1 << bits, (groups, 24), generator=generator)
    return codes, zeros, torch.rand(groups, 24, generator=generator).half()


def expected_of(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    repeats = len(codes) // len(zeros)
    return (scales.double().repeat_interleave(repeats, 0) * (codes - zeros.repeat_interleave(repeats, 0))).T


def assert_same(found: Codes, expected: torch.Tensor) -> None:
    assert torch.allclose(found.dequantize().double(), expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_awq(groups: int) -> None:
    codes, zeros, scales = grouped_matrix(1, groups)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    found = awq.unpack(pack_nibbles(codes, order), pack_nibbles(zeros, order), scales)
    assert torch.equal(found.codes.long(), codes.T)
    assert_same(found, expected_of(codes, zeros, scales))


@pytest.mark.parametrize("less_one", [True, False])
@pytest.mark.parametrize("groups", [1, 4])
def test_gptq_with_four_bits(groups: int, less_one: bool) -> None:
    codes, zeros, scales = grouped_matrix(2, groups)
    order = list(range(8))
    qweight = pack_nibbles(codes.T, order).T.contiguous()
    found = gptq.unpack(qweight, pack_nibbles(zeros - int(less_one), order), scales, None, 4, less_one)
    assert torch.equal(found.codes.long(), codes.T)
    assert_same(found, expected_of(codes, zeros, scales))


def test_gptq_with_eight_bits_and_zeros_in_the_middle_has_no_minima() -> None:
    codes, _, scales = grouped_matrix(3, 2, bits=8)
    zeros = torch.full((2, 24), 128)
    qweight = codes.to(torch.uint8).T.contiguous().view(torch.int32).T
    qzeros = (zeros - 1).to(torch.uint8).view(torch.int32)
    found = gptq.unpack(qweight, qzeros, scales, torch.arange(128) // 64, 8)
    assert found.minima is None
    assert_same(found, expected_of(codes, zeros, scales))


def test_gptq_in_the_order_of_activations_is_refused() -> None:
    words = torch.zeros(16, 24, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int32), torch.ones(2, 24)
    with pytest.raises(ConfigError, match="desc_act"):
        gptq.unpack(*words, torch.arange(128).flip(0) // 64, 4)
