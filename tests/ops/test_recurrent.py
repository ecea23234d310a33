"""Layers with a state: convolutions, selective scans and the gated delta rule against the reference, over sequences in
steps of any size; and the product of two matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import _cpu
from octavo.errors import LoadError
from octavo.ops import cpu as native
from tests.ops.kernel_cases import DTYPES, assert_near, assert_same_bits, random
from tests.ops.tensors import OverTensors, cpu, torch_ref

LENGTHS = (1, 19, 6, 33)
CHUNKS = ([1, 2, 0, 17], [0, 3, 5, 1], [1, 9, 1, 0])  # of a first step, by sequence
Operation = Callable[..., Tensor]


def conv(kernel: int, width: int, activation: str, dtype: torch.dtype) -> tuple[str, list[Tensor], list[Any], int]:
    """An operation's name, what it has a row of for each token, its other arguments, and the size of a state."""
    rows = [random(0, sum(LENGTHS), 2 * width, dtype=dtype)[:, width:]]
    return "causal_conv", rows, [random(1, kernel, width), random(2, width), activation], (kernel - 1) * width


def scan(
    heads: int, head_size: int, groups: int, size: int, wide: bool, dtype: torch.dtype
) -> tuple[str, list[Tensor], list[Any], int]:
    channels, num = heads * head_size, sum(LENGTHS)
    x, time, b, c = (
        random(i, num, width, dtype=dtype) for i, width in enumerate((channels, heads, groups * size, groups * size))
    )
    rates = -random(5, size, channels).exp() if wide else -random(5, channels).exp()
    others = [rates, random(6, channels), random(7, heads), (0.1, 1.5)]
    rows = [x, time, b.view(num, groups, size), c.view(num, groups, size)]
    return "selective_scan", rows, others, native.num_scan_floats(channels, groups, size)


def delta(
    key_heads: int, heads: int, size: int, width: int, dtype: torch.dtype
) -> tuple[str, list[Tensor], list[Any], int]:
    num = sum(LENGTHS)
    query, key = (torch.nn.functional.normalize(random(i, num, key_heads, size), dim=-1).to(dtype) for i in range(2))
    value, decay, beta = random(2, num, heads, width, dtype=dtype), *random(3, 2, num, heads, dtype=dtype)
    others = [-random(4, heads).exp(), random(5, heads), 1.5]
    return "gated_delta", [query, key, value, decay, beta], others, native.num_scan_floats(heads * width, heads, size)


CASES: dict[str, Callable[[torch.dtype], tuple[str, list[Tensor], list[Any], int]]] = {
    "conv 4": lambda dtype: conv(4, 40, "silu", dtype),
    "conv 3, as it is, partial vectors": lambda dtype: conv(3, 37, "identity", dtype),
    "conv 1": lambda dtype: conv(1, 5, "silu", dtype),
    "conv 8": lambda dtype: conv(8, 16, "silu", dtype),
    "mamba 1": lambda dtype: scan(45, 1, 1, 6, True, dtype),
    "mamba 2": lambda dtype: scan(6, 16, 2, 32, False, dtype),
    "mamba 2, heads across tiles": lambda dtype: scan(6, 11, 3, 7, False, dtype),
    "gated delta": lambda dtype: delta(2, 4, 12, 20, dtype),
    "gated delta, whole tiles": lambda dtype: delta(2, 2, 16, 32, dtype),
}


class Run:
    """Sequences of `LENGTHS` tokens, a chunk of each a step."""

    def __init__(self, ops: OverTensors, case: tuple[str, list[Tensor], list[Any], int]) -> None:
        name, self.rows, self.others, num_floats = case
        self.operation: Operation = getattr(ops, name)
        # Nothing may be read that was not written; and the floats behind a state are not its own.
        self.states = torch.full((7, num_floats + 3), float("nan"))
        self.tables = torch.tensor([[5], [0], [6], [2]], dtype=torch.int32)
        self.starts = [sum(LENGTHS[:s]) for s in range(len(LENGTHS))]

    def step(self, done: list[int], chunks: list[int]) -> list[Tensor]:
        places = torch.cat([torch.arange(s + d, s + d + c) for s, d, c in zip(self.starts, done, chunks, strict=True)])
        bounds = torch.tensor([0, *torch.tensor(chunks).cumsum(0).tolist()], dtype=torch.int32)
        lengths = torch.tensor([d + c for d, c in zip(done, chunks, strict=True)], dtype=torch.int32)
        states = self.states[:, :-3]
        out = self.operation(*(row[places] for row in self.rows), *self.others, states, self.tables, bounds, lengths)
        return list(out.split(chunks))

    def all(self, first: list[int]) -> list[Tensor]:
        """In steps of `first` tokens of each sequence, then of one, then of all the others -> each one's outputs."""
        done, outputs = [0] * len(LENGTHS), [list[Tensor]() for _ in LENGTHS]
        for wanted in (first, [1] * len(LENGTHS), list(LENGTHS)):
            chunks = [min(w, length - d) for w, length, d in zip(wanted, LENGTHS, done, strict=True)]
            if sum(chunks):
                for s, out in enumerate(self.step(done, chunks)):
                    outputs[s].append(out)
            done = [d + c for d, c in zip(done, chunks, strict=True)]
        assert self.states[:, -3:].isnan().all() and self.states[[1, 3, 4]].isnan().all()
        return [torch.cat(parts) for parts in outputs]


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


def test_a_scan_without_time_steps_is_linear_attention(isa: str) -> None:
    name, (x, _, b, c), (rates, *_), size = CASES["mamba 2"](torch.float32)
    case = name, [x, b, c], [], size

    def run(ops: OverTensors) -> Tensor:
        states = torch.full((1, size), float("nan"))
        places = [torch.tensor(values, dtype=torch.int32) for values in ([[0]], [0, len(x)], [len(x)])]
        return ops.selective_scan(x, None, b, c, rates, None, None, (0.0, 1.0), states, *places)

    assert case[0] == "selective_scan"
    assert_near(run(cpu), run(torch_ref))


def test_states_outside_the_cache_and_sizes_that_are_not_built_are_refused() -> None:
    case = Run(cpu, CASES["mamba 1"](torch.float32))
    case.tables[2, 0] = 7
    with pytest.raises(IndexError, match="block 7 of sequence 2 is not below 7"):
        case.step([0] * 4, [1] * 4)
    with pytest.raises(ValueError, match="cannot compute"):
        case.step([0, 0, -3, 0], [1, 1, 4, 1])
    with pytest.raises(LoadError, match="states of 600"):
        native.num_scan_floats(16, 1, 600)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["identity", "silu", "sigmoid"])
def test_products_of_rows(isa: str, dtype: torch.dtype, activation: str) -> None:
    x, y = random(0, 9, 90, dtype=dtype)[:, 13:80], random(1, 9, 67, dtype=dtype) * 3
    found = cpu.multiply(x, y, activation)
    assert_near(found, torch_ref.multiply(x, y, activation))
    assert_same_bits(found[4:6], cpu.multiply(x[4:6], y[4:6], activation))
