"""What adapters add to the products of experts: to each before anything is rounded, row by row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from octavo import _cpu
from octavo.ops import ExpandExperts, FactorShape
from octavo.ops import cpu as native
from octavo.ops.cpu_program import Program
from tests.ops.adapter_cases import filled_experts
from tests.ops.int_matrices import FORMATS
from tests.ops.kernel_cases import DTYPES, assert_same_bits, generated_few, random
from tests.ops.tensors import OverTensors, cpu, to_numpy, torch_ref
from tests.ops.test_experts import SETTINGS, Layer, choices, float_layer, int_layer

NUM, SLOTS = 6, 5


def tables(ops: OverTensors, hidden: int, inner: int, gated: bool, dtype: torch.dtype, seed: int) -> list[Any]:
    """Of the first product and of the second, with their arenas."""
    up = FactorShape(hidden, (inner, inner) if gated else (inner,), gated, 5)
    down = FactorShape(inner, (hidden,), False, 5)
    return [
        filled_experts(ops, shape, NUM, SLOTS, dtype, seed + i) if shape is not None else (None, None)
        for i, shape in enumerate((up if seed != 1 else None, down if seed != 2 else None))
    ]


def some_slots(rows: int, seed: int) -> Tensor:
    return torch.randint(-1, SLOTS, (rows,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@generated_few
@given(rows=st.sampled_from([1, 7, 40]), sizes=st.sampled_from([(33, 70), (64, 96)]), seed=st.integers(0, 3))
def test_experts_with_adapters_are_the_reference(
    isa: str, dtype: torch.dtype, rows: int, sizes: tuple[int, int], seed: int, settings: dict[str, Any]
) -> None:
    settings, gated = {k: v for k, v in settings.items() if k != "gated"}, settings.get("gated", True)
    (ids, weights), slots = choices(rows, rows, NUM, 2), some_slots(rows, seed)
    x, results = random(rows, rows, sizes[0], dtype=dtype), []
    for ops in (cpu, torch_ref):
        (up, up_arena), (down, down_arena) = tables(ops, *sizes, gated, dtype, seed)
        layer = float_layer(ops, NUM, *sizes, dtype, True, gated)
        results.append(layer(x, ids, weights, expand=ExpandExperts(slots, up, down), **settings))
        del up_arena, down_arena
    actual, expected = results
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, FORMATS[1], FORMATS[4]], ids=str)
@pytest.mark.parametrize("settings", [{}, {"scales_inputs": True}], ids=str)
def test_a_token_does_not_depend_on_its_company(isa: str, threads: None, kind: Any, settings: dict[str, Any]) -> None:
    hidden, inner, total = 96, 160, 70
    is_float = isinstance(kind, torch.dtype)
    dtype = kind if is_float else torch.bfloat16
    layer: Layer
    layer = float_layer(cpu, NUM, hidden, inner, kind, True) if is_float else int_layer(NUM, hidden, inner, kind, True)
    x = random(0, total, hidden, dtype=kind if is_float else torch.float32)
    (up, up_arena), (down, down_arena) = tables(cpu, hidden, inner, True, dtype, 0)
    (ids, weights), slots = choices(1, total, NUM, 3), some_slots(total, 0)
    slots[20:45] = 2

    def run(begin: int, end: int) -> Tensor:
        expand = ExpandExperts(slots[begin:end], up, down)
        return layer(x[begin:end], ids[begin:end], weights[begin:end], expand=expand, **settings)

    _cpu.set_threads(1)
    alone = torch.cat([run(i, i + 1) for i in range(total)])
    base = layer(x, ids, weights, **settings)
    is_base = (slots == -1) | (slots == SLOTS - 1)  # nobody's, and a slot without factors
    assert_same_bits(alone[is_base], base[is_base])
    assert (alone != base).any(1)[~is_base].float().mean() > 0.9  # others may choose experts without factors alone
    for num_threads in (1, 3):
        _cpu.set_threads(num_threads)
        for begin, end in [(0, 2), (3, 8), (5, 17), (7, 40), (0, total)]:
            assert_same_bits(run(begin, end), alone[begin:end])
    del up_arena, down_arena


def test_a_recorded_step_reads_its_slots_anew(threads: None) -> None:
    rows, hidden, inner = 30, 64, 96
    layer = float_layer(cpu, NUM, hidden, inner, torch.float32, bias=True)
    (up, up_arena), (down, down_arena) = tables(cpu, hidden, inner, True, torch.float32, 0)
    given, slots, program = np.zeros((rows, hidden), np.float32), np.zeros(rows, np.int32), Program()
    ids, weights = (to_numpy(part) for part in choices(1, rows, NUM, 2))

    def forward(x: Any, ids: Any, weights: Any, slots: Any) -> Any:
        return native.experts(x, ids, weights, layer.gate_up, layer.down, expand=ExpandExperts(slots, up, down))

    with program.record(per_sample=False):
        out = program.output(forward(*map(program.input, (given, ids, weights, slots))))
    shrinks = {"experts_shrink_up", "experts_shrink_down"}
    for seed, slot in enumerate((0, -1, 3)):
        given[:] = to_numpy(random(seed, rows, hidden))
        slots[:] = slot
        slots[5:9] = -1
        program.run(rows, 0, 0)
        assert np.array_equal(out, forward(given.copy(), ids, weights, slots.copy()))
        names = {name for name, _ in program.profile(rows, 0, 0)}
        assert (names & shrinks == shrinks) == (slot >= 0), "the base alone is not held up"
    slots[0] = SLOTS
    with pytest.raises(IndexError, match=f"adapter slot {SLOTS}"):
        program.run(rows, 0, 0)
    del up_arena, down_arena
