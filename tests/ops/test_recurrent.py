"""Layers with a state: convolutions, selective scans and the gated delta rule against the reference, over sequences in
steps of any size; and the product of two matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo import _cpu
from octavo.errors import LoadError
from octavo.ops import cpu as native
from tests.ops.kernel_cases import DTYPES, assert_near, assert_same_bits, random
from tests.ops.recurrent_cases import CASES, CHUNKS, LENGTHS, Run, delta, neighbours_and_alternating, one_sequence
from tests.ops.tensors import OverTensors, cpu, torch_ref

KERNELS = "others"  # of an instruction set that are tested here: conftest.py


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_chunks_of_any_size_give_the_reference_and_equal_bits(
    isa: str, threads: None, name: str, dtype: torch.dtype
) -> None:
    case = CASES[name](dtype)
    whole, expected = Run(cpu, case).all(list(LENGTHS)), Run(torch_ref, case).all(CHUNKS[0])
    for num_threads, chunks in enumerate(CHUNKS, 1):
        _cpu.set_threads(num_threads)
        for found, other, reference in zip(Run(cpu, case).all(chunks), whole, expected, strict=True):
            assert_same_bits(found, other)
            assert_near(found, reference, bfloat16_atol=1e-3)


@pytest.mark.parametrize("by_element", [False, True])
def test_decays_with_a_bound(isa: str, by_element: bool) -> None:
    _, rows, others, sizes = delta(2, 4, 12, 20, torch.float32, by_element)

    def run(ops: OverTensors) -> Tensor:
        states = torch.full((1, ops.num_scan_floats(*sizes)), float("nan"))
        return ops.gated_delta(*rows, *others, states, *one_sequence(len(rows[0])), -5.0)

    assert_near(run(cpu), run(torch_ref))


def test_value_heads_may_alternate(isa: str) -> None:
    for ops in (cpu, torch_ref):
        assert torch.equal(*neighbours_and_alternating(ops))


def test_a_scan_without_time_steps_is_linear_attention(isa: str) -> None:
    _, (x, _, b, c), (rates, *_), sizes = CASES["mamba 2"](torch.float32)

    def run(ops: OverTensors) -> Tensor:
        states = torch.full((1, ops.num_scan_floats(*sizes)), float("nan"))
        return ops.selective_scan(x, None, b, c, rates, None, None, (0.0, 1.0), states, *one_sequence(len(x)))

    assert_near(run(cpu), run(torch_ref))


def test_states_outside_the_cache_and_sizes_that_are_not_built_are_refused() -> None:
    case = Run(cpu, CASES["mamba 1"](torch.float32))
    case.blocks[2] = 16
    with pytest.raises(IndexError, match="block 16 of sequence 2 is not below 16"):
        case.step([0] * 4, [1] * 4)
    with pytest.raises(ValueError, match="cannot compute"):
        case.step([0, 0, -3, 0], [1, 1, 4, 1])
    with pytest.raises(LoadError, match="states of 600"):
        native.num_scan_floats(16, 1, 600)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["identity", "silu", "sigmoid", "softplus"])
@pytest.mark.parametrize("shared", [1, 3, 22])
def test_products_of_rows(isa: str, dtype: torch.dtype, activation: str, shared: int) -> None:
    x, y = random(0, 9, 90, dtype=dtype)[:, 13:79], random(1, 9, 66 // shared, dtype=dtype) * 3
    found = cpu.multiply(x, y, activation)
    assert_near(found, torch_ref.multiply(x, y, activation))
    assert_same_bits(found[4:6], cpu.multiply(x[4:6], y[4:6], activation))
