"""Products and experts whose sums are made of segments: whoever has which of them, all add up to the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import _cpu
from octavo.ops import cpu as native
from octavo.quantization import StoredWeight
from tests.ops.kernel_cases import assert_same_bits, random
from tests.ops.tensors import cpu, stored
from tests.ops.test_experts import Layer, choices, float_layer, int_layer
from tests.ops.test_linear_int import with_outliers
from tests.quantization.blocks import random_matrix

# Elements of a segment that is as short as can be, or has what the widest tile instructions leave over.
BLOCKS = {"F32": 9, "BF16": 38, "INT8": 64, "INT4": 64, "Q4_0": 64, "Q4_1": 64, "Q8_0": 64} | dict.fromkeys(
    ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"), 256
)


def matrix(form: str, n: int, k: int) -> StoredWeight:
    if form in ("F32", "BF16"):
        return stored(random(1, n, k, dtype=torch.float32 if form == "F32" else torch.bfloat16))
    if form in ("INT8", "INT4"):
        return stored(random(1, n, k) * torch.linspace(0.1, 7, k), form)  # so that shares have other largest scales
    return random_matrix(form, n, k)


def in_tree(summands: Sequence[Tensor]) -> Tensor:
    """Neighbours first, then the sums of neighbours, what is left over from the last to the first."""
    waiting: list[tuple[int, Tensor]] = []
    for summand in summands:
        waiting.append((1, summand))
        while len(waiting) > 1 and waiting[-1][0] == waiting[-2][0]:
            (count, last), (_, before) = waiting.pop(), waiting.pop()
            waiting.append((2 * count, before + last))
    while len(waiting) > 1:
        (count, last), (other, before) = waiting.pop(), waiting.pop()
        waiting.append((count + other, before + last))
    return waiting[0][1]


@pytest.mark.parametrize("form", BLOCKS)
@pytest.mark.parametrize(("segments", "sizes"), [(8, (2, 4, 8)), (3, (3,)), (7, (7,))])
def test_shares_add_up_to_the_bits_of_the_whole(
    isa: str, threads: None, form: str, segments: int, sizes: tuple[int, ...]
) -> None:
    n, k = 70, segments * BLOCKS[form]
    weight, x = matrix(form, n, k), with_outliers(2, 100, k)
    x = x.bfloat16() if form == "BF16" else x
    whole = native.pack_linear([weight])
    unlike = cpu.linear(x, whole, torch.float32)
    native.sum_by_segments(whole, segments)
    assert whole.matrix.segments == segments
    _cpu.set_threads(1)
    expected = cpu.linear(x, whole, torch.float32)
    assert not torch.equal(expected, unlike)
    torch.testing.assert_close(expected, unlike, rtol=1e-4, atol=1e-5 * float(unlike.abs().max()))
    for size in sizes:
        shares = []
        for begin in range(0, k, k // size):
            share = native.pack_linear([weight.columns(begin, begin + k // size)])
            native.sum_by_segments(share, segments // size)
            shares.append(cpu.linear(x[:, begin : begin + k // size], share, torch.float32))
        assert_same_bits(in_tree(shares), expected)
    residual = random(3, 100, n)
    for num_threads in (1, 3):
        _cpu.set_threads(num_threads)
        for rows in (1, 2, 5, 13, 17, 64):
            assert_same_bits(cpu.linear(x[:rows], whole, torch.float32), expected[:rows])
            added, added_apart = residual[:rows].clone(), residual[:rows].clone()
            cpu.linear_add(x[:rows], whole, added, 0.5)
            cpu.add(added_apart, expected[:rows], 0.5)
            assert_same_bits(added, added_apart)


@pytest.mark.parametrize("form", BLOCKS)
def test_segments_are_halved_until_blocks_are_whole(form: str) -> None:
    def segments(k: int, wanted: int) -> tuple[int, int]:
        weight = native.pack_linear([matrix(form, 32, k)])
        return native.sum_by_segments(weight, wanted), weight.matrix.segments

    block = {9: 1, 38: 2}.get(BLOCKS[form], BLOCKS[form])
    assert segments(8 * block, 8) == (block, 8)
    assert segments(12 * block, 8) == (block, 4)
    assert segments(5 * block, 8) == (block, 1)
    assert segments(4 * block, 3) == (block, 1)
    with pytest.raises(ValueError, match="do not make 9 segments"):
        native.pack_linear([matrix(form, 32, 18 * block)]).matrix.segments = 9


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, (8, 32, False), (4, 32, True)])
@pytest.mark.parametrize("settings", [{}, {"scales_inputs": True}])
def test_shares_of_experts_add_up_to_the_bits_of_all(
    isa: str, threads: None, kind: Any, settings: dict[str, Any]
) -> None:
    num, hidden, inner, total, segments = 12, 100, 64, 50, 4
    if isinstance(kind, torch.dtype):
        x, layer = random(0, total, hidden, dtype=kind), float_layer(cpu, num, hidden, inner, kind, True)
    else:
        x, layer = random(0, total, hidden), int_layer(num, hidden, inner, kind, True)
    ids, weights = choices(1, total, num, 5)
    unlike = layer(x, ids, weights, **settings)
    _cpu.set_threads(1)
    expected = layer(x, ids, weights, segments=segments, **settings)
    assert not torch.equal(expected, unlike)
    torch.testing.assert_close(expected, unlike, rtol=1e-4, atol=1e-5 * float(unlike.abs().max()))
    for size in (2, 4):
        each, shares = num // size, []
        for first in range(0, num, each):
            own = [part.weights[first : first + each] for part in (layer.gate_up, layer.down)]
            shares.append(
                Layer(cpu, *map(list, own))(
                    x, ids, weights, first_expert=first, segments=segments // size, **settings
                )
            )  # fmt: skip
        assert_same_bits(in_tree(shares), expected)
    for num_threads in (1, 3):
        _cpu.set_threads(num_threads)
        for begin, end in [(0, 1), (1, 3), (7, 40)]:
            part = layer(x[begin:end], ids[begin:end], weights[begin:end], segments=segments, **settings)
            assert_same_bits(part, expected[begin:end])
    with pytest.raises(ValueError, match="12 experts do not make 5 segments"):
        layer(x, ids, weights, segments=5)
