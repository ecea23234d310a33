"""Rows of sixteen bits: pairs of quantized rows, of which the second has what the first leaves of the elements."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import _cpu
from octavo.ops import cpu as native
from octavo.ops.cpu_pack import PackedStack
from tests.ops.adapter_cases import SHAPES, filled_table, parts
from tests.ops.int_matrices import FORMATS, pack, random_matrix
from tests.ops.kernel_cases import DTYPES, assert_same_bits, random
from tests.ops.tensors import cpu
from tests.ops.test_experts import int_layer
from tests.ops.test_linear_int import consumer, dequantized, with_outliers
from tests.ops.test_segments import in_tree
from tests.quantization.blocks import random_matrix as random_blocks


def sixteen_bit(weight: Any) -> Any:
    return replace(weight, sixteen_bit_inputs=True)


def halves(pairs: Tensor) -> tuple[Tensor, Tensor]:
    first, second = pairs.chunk(2, 1)
    return first.contiguous(), second.contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 40, 64, 200, 577])
def test_the_second_row_has_what_the_first_leaves(isa: str, dtype: torch.dtype, k: int) -> None:
    x, weight = with_outliers(k, 30, k, dtype), consumer(k)
    first, second = halves(cpu.quantize(x, sixteen_bit(weight)))
    assert torch.equal(first, cpu.quantize(x, weight))
    stood_for = dequantized(first, k)
    if isa == "portable":  # whose products are rounded before they are subtracted
        stood_for = stood_for.float().double()
    rest = (x.double() - stood_for).float()
    assert torch.equal(second, cpu.quantize(rest, weight))
    left = (rest.double() - dequantized(second, k)).abs().amax()
    assert left <= rest.abs().amax() / 253


def test_what_is_not_finite_spoils_its_own_row_alone(isa: str) -> None:
    x, weight = random(0, 5, 200), sixteen_bit(pack(random_matrix(1, 40, 200, FORMATS[0])))
    clean = cpu.linear(x, weight)
    for poison in (float("nan"), float("inf"), float("-inf")):
        x[2, 70] = poison
        out = cpu.linear(x, weight)
        assert out[2].isnan().all()
        assert_same_bits(out[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


def test_products_are_sums_of_both_rows_products(isa: str, threads: None) -> None:
    """In any batch, by any number of threads, in every layout; and a hundred times closer to those of the floats."""
    k, n, total = 330, 70, 100
    for form in FORMATS:
        matrix, b, x = random_matrix(2, n, k, form), random(3, n), with_outliers(1, total, k)
        weight = pack(matrix)
        pairs = cpu.quantize(x, sixteen_bit(weight))
        first, second = halves(pairs)
        expected = cpu.linear(first, weight) + cpu.linear(second, weight)
        if matrix.minima is None:  # with those the sum of a group is a bfloat16
            exact = x.double() @ matrix.products().T
            assert (expected - exact).norm() < (cpu.linear(first, weight) - exact).norm() / 100
        for num_threads in (1, 3):
            _cpu.set_threads(num_threads)
            for begin, end in [(0, 1), (5, 6), (0, 2), (1, 4), (3, 10), (7, 23), (20, 84), (0, total)]:
                assert_same_bits(cpu.linear(pairs[begin:end], weight), expected[begin:end])
        residual = random(4, total, n)
        added = residual.clone()
        cpu.linear_add(pairs, weight, added, 0.5)
        assert torch.allclose(added, residual + 0.5 * expected, atol=1e-5)
        assert_same_bits(cpu.linear(pairs, pack(matrix, b)), expected + b)


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_superblocks_and_stacks_of_them_take_pairs(isa: str, name: str) -> None:
    blocks = [random_blocks(name, 64, 512, seed=0), random_blocks("Q8_0", 40, 512, seed=1)]
    stack = native.pack_linear(blocks, sixteen_bit_inputs=True)
    assert isinstance(stack, PackedStack) and all(part.sixteen_bit_inputs for part in stack.parts)
    x = with_outliers(5, 100, 512)
    for rows in (1, 2, 16, 100):
        pairs = cpu.rms_norm(x[:rows], torch.ones(512), 1e-5, stack)
        first, second = halves(pairs)
        assert_same_bits(cpu.linear(pairs, stack), cpu.linear(first, stack) + cpu.linear(second, stack))


def test_what_writes_quantized_rows_writes_pairs(isa: str) -> None:
    for rows, k, width in [(1, 70, 100), (5, 200, 64), (70, 64, 200)]:
        x, down, here = (random(0, rows, k), sixteen_bit(consumer(width)), sixteen_bit(consumer(k)))
        weight, bias = random(7, k), random(8, k)
        normed = cpu.layer_norm(x, weight, bias, 1e-5)
        assert torch.equal(cpu.layer_norm(x, weight, bias, 1e-5, here), cpu.quantize(normed, here))
        normed = cpu.rms_norm(x, weight, 1e-5)
        assert torch.equal(cpu.rms_norm(x, weight, 1e-5, here), cpu.quantize(normed, here))
        assert torch.equal(cpu.activation(x, "gelu", here), cpu.quantize(cpu.activation(x, "gelu"), here))
        assert torch.equal(cpu.multiply(x, x, "silu", here), cpu.quantize(cpu.multiply(x, x, "silu"), here))
        gate, up = (random_matrix(i, width, k, FORMATS[0]) for i in (1, 2))
        for inputs in (x, cpu.quantize(x, here)):
            gated = cpu.linear_silu_and_mul(inputs, pack(gate, None, up))
            assert torch.equal(cpu.linear_silu_and_mul(inputs, pack(gate, None, up), down), cpu.quantize(gated, down))
            plain = cpu.linear_activated(inputs, pack(gate), "gelu")
            assert torch.equal(cpu.linear_activated(inputs, pack(gate), "gelu", down), cpu.quantize(plain, down))


@pytest.mark.parametrize("form", ["Q4_1", "Q8_0", "Q4_K", "Q6_K"])
def test_shares_of_pairs_add_up_to_the_bits_of_the_whole(isa: str, form: str) -> None:
    k, n = 8 * 256, 70
    weight, x = random_blocks(form, n, k), with_outliers(2, 70, k)
    whole = native.pack_linear([weight], sixteen_bit_inputs=True)
    native.sum_by_segments(whole, 8)
    size = k // 8
    own = [weight.columns(i * size, (i + 1) * size) for i in range(8)]
    summands = [
        cpu.linear(x[:, i * size : (i + 1) * size].contiguous(), native.pack_linear([part], sixteen_bit_inputs=True))
        for i, part in enumerate(own)
    ]
    assert_same_bits(cpu.linear(x, whole), in_tree(summands))


def test_experts_and_adapters_read_the_first_of_a_pair(isa: str) -> None:
    layer = int_layer(3, 200, 64, FORMATS[1], packed=True)
    x = with_outliers(0, 20, 200)
    ids = torch.randint(0, 3, (20, 2), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    ids[:, 1] = (ids[:, 0] + 1) % 3
    weights = torch.rand(20, 2)
    pairs = cpu.quantize(x, sixteen_bit(consumer(200)))
    assert_same_bits(layer(pairs, ids, weights), layer(halves(pairs)[0], ids, weights))
    shape = SHAPES[4]
    table, arena = filled_table(cpu, shape, 6, torch.float32, 0)
    weight = cpu.pack_linear(parts(shape, torch.float32, "INT8"), None, shape.gated)
    x, slots = with_outliers(1, 9, shape.num_in), torch.arange(9, dtype=torch.int32) % 6
    pairs = cpu.quantize(x, sixteen_bit(weight))
    found, expected = (cpu.shrink(rows, table, slots, weight) for rows in (pairs, halves(pairs)[0]))
    ranks = [int(table.factors["rank"][slot]) for slot in slots.tolist()]
    assert any(ranks)
    for row, rank in enumerate(ranks):  # what lies behind is not written
        assert_same_bits(found[row, :rank], expected[row, :rank])
    del arena
