"""Layers with a state: Triton's kernels against the reference, over sequences in steps of any size."""

from __future__ import annotations

import pytest
import torch

from octavo.ops import LayerKVCache
from octavo.ops.triton import recurrent_kernels
from octavo.ops.triton.cache import copy_blocks
from tests.ops.kernel_cases import assert_near, assert_same_bits, random
from tests.ops.recurrent_cases import CASES, CHUNKS, LENGTHS, Run, neighbours_and_alternating
from tests.ops.tensors import OverTensors, torch_ref
from tests.ops.triton.conftest import DEVICE

pytestmark = pytest.mark.long

kernels = OverTensors(recurrent_kernels, takes_numpy=False)


# Some of the cases: the interpreter takes a second for each.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("conv 4", torch.float32), ("conv 3, as it is, partial vectors", torch.float16),
        ("mamba 1, two groups", torch.float32), ("mamba 2, heads across tiles", torch.float32),
        ("mamba 2", torch.float16),
        ("gated delta", torch.float32), ("gated delta, decays by element", torch.float32),
    ],
)  # fmt: skip
def test_chunks_of_any_size_give_the_reference_and_equal_bits(name: str, dtype: torch.dtype) -> None:
    case = CASES[name](dtype)
    whole, found = Run(kernels, case, DEVICE).all(list(LENGTHS)), Run(kernels, case, DEVICE).all(CHUNKS[0])
    expected = Run(torch_ref, case).all(list(LENGTHS))
    for one, other, reference in zip(found, whole, expected, strict=True):
        assert_same_bits(one, other)
        assert_near(one.cpu(), reference)


def test_value_heads_may_alternate() -> None:
    assert torch.equal(*neighbours_and_alternating(kernels, DEVICE))


def test_states_are_copied() -> None:
    states = [random(i, 4, 20).to(DEVICE) for i in range(2)]
    expected = [x[1].clone() for x in states]
    copy_blocks([(1, 3)], [LayerKVCache(x, x[:, :0]) for x in states])
    assert all(torch.equal(x[3], y) for x, y in zip(states, expected, strict=True))


@pytest.mark.parametrize(("activation", "shared"), [("identity", 1), ("silu", 1), ("sigmoid", 11), ("softplus", 3)])
def test_products_of_rows(activation: str, shared: int) -> None:
    x, y = random(0, 5, 90).to(DEVICE)[:, 13:79], random(1, 5, 66 // shared).to(DEVICE) * 3
    assert_near(recurrent_kernels.multiply(x, y, activation).cpu(), torch_ref.multiply(x, y, activation).cpu())
