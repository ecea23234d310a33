"""What adapters add to products: grouped by adapter, added before anything is rounded, row by row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import octavo._cpu as _cpu
from octavo.ops import Expand, FactorShape, Lookup
from octavo.ops.cpu_arrays import CODES
from octavo.ops.cpu_pack import PackedStack, pack_quantized, packed_weight
from octavo.quantization import StoredWeight
from tests.ops.adapter_cases import LOOKUPS, SHAPES, filled_table, parts, run
from tests.ops.kernel_cases import DTYPES, assert_near, assert_same_bits, generated_few, random
from tests.ops.tensors import cpu, stored, torch_ref


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@generated_few
@given(rows=st.integers(1, 40), seed=st.integers(0, 5), bias=st.booleans())
def test_a_product_with_adapters_is_the_reference(
    isa: str, dtype: torch.dtype, shape: FactorShape, rows: int, seed: int, bias: bool
) -> None:
    slots = torch.randint(-1, 4, (rows,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    x, total = random(seed, rows, shape.num_in, dtype=dtype), sum(shape.widths)
    b = random(7, total, dtype=dtype) if bias else None
    out = random(8, rows, total, dtype=dtype)
    for kind in ("gated",) if shape.gated else ("store", "add", "activated"):
        results = []
        for ops in (cpu, torch_ref):
            table, arena = filled_table(ops, shape, 4, dtype, seed)
            weight = ops.pack_linear(parts(shape, dtype), b, shape.gated)
            results.append(run(ops, kind, x, weight, table, slots, out))
            del arena
        # The shrunk rows are rounded to bfloat16 by both, after sums in another order.
        assert_near(*results, bfloat16_atol=2e-2)


@pytest.mark.parametrize("form", [None, "INT8", "INT4"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_does_not_depend_on_its_company(
    isa: str, dtype: torch.dtype, shape: FactorShape, form: str | None
) -> None:
    rows = 37
    x, out = random(1, rows, shape.num_in, dtype=dtype), random(8, rows, sum(shape.widths), dtype=dtype)
    slots = torch.randint(-1, 6, (rows,), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    slots[10:20] = 2
    table, arena = filled_table(cpu, shape, 6, dtype, 0)
    weight = cpu.pack_linear(parts(shape, dtype, form), None, shape.gated)
    if form is not None:
        x = cpu.quantize(x, weight)
    for kind in ("gated",) if shape.gated else ("store", "add"):
        mixed = run(cpu, kind, x, weight, table, slots, out)
        base = run(cpu, kind, x, weight, table, None, out)
        for row in range(rows):
            here = slice(row, row + 1)
            alone = run(cpu, kind, x[here], weight, table, slots[here], out[here])
            assert_same_bits(mixed[here], alone)
            if slots[row] in (-1, 5):  # nobody's, and a slot without factors
                assert_same_bits(mixed[here], base[here])
            else:
                assert not torch.equal(mixed[here], base[here])
    del arena


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantized_rows_are_read_with_their_outliers(isa: str, dtype: torch.dtype, shape: FactorShape) -> None:
    rows = 9
    x = random(1, rows, shape.num_in)
    x[:, 5] *= 40
    x[::2, 32] = -30
    slots = torch.arange(rows, dtype=torch.int32) % 6 - 1
    table, arena = filled_table(cpu, shape, 6, dtype, 0)
    weight = cpu.pack_linear(parts(shape, dtype, "INT8"), None, shape.gated)
    stood_for = torch_ref.module.fake_quantize(x).float()
    found = cpu.shrink(cpu.quantize(x, weight), table, slots, weight)
    expected = cpu.shrink(stood_for.to(dtype), table, slots, weight)
    ranks = [int(table.factors["rank"][slot]) if slot >= 0 else 0 for slot in slots.tolist()]
    assert any(ranks)
    for row, rank in enumerate(ranks):  # what lies behind is not written
        assert_same_bits(found[row, :rank], expected[row, :rank])
    del arena


@pytest.mark.parametrize("form", [None, "INT8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", LOOKUPS, ids=str)
def test_rows_that_are_looked_up_are_the_references_and_their_own(
    isa: str, dtype: torch.dtype, shape: FactorShape, form: str | None
) -> None:
    rows, [num_tokens] = 37, shape.widths
    generator = torch.Generator().manual_seed(2)
    token_ids = torch.randint(0, num_tokens, (rows,), generator=generator, dtype=torch.int32)
    slots = torch.randint(-1, 6, (rows,), generator=generator, dtype=torch.int32)
    results = []
    for ops in (cpu, torch_ref):
        table, arena = filled_table(ops, shape, 6, dtype, 0)
        weight = ops.pack_linear(parts(shape, dtype, form), is_embedding=form is None)
        results.append(ops.embedding(token_ids, weight, dtype, 3.0, Lookup(table, slots)))
        if ops is not cpu:
            continue
        base = cpu.embedding(token_ids, weight, dtype, 3.0)
        for row in range(rows):
            here = slice(row, row + 1)
            alone = cpu.embedding(token_ids[here], weight, dtype, 3.0, Lookup(table, slots[here]))
            assert_same_bits(results[0][here], alone)
            assert torch.equal(alone, base[here]) == (slots[row] in (-1, 5))
        del arena
    assert_near(*results)


def test_adapters_of_a_stack_of_formats_add_to_their_own_outputs(isa: str) -> None:
    """Against the same parts in one layout, which holds them all."""
    shape, rows = SHAPES[1], 37
    x, out = random(1, rows, shape.num_in), random(8, rows, sum(shape.widths))
    slots = torch.arange(rows, dtype=torch.int32) % 6 - 1
    mixed = mixed_parts(shape)
    stack, flat = cpu.pack_linear(mixed), pack_quantized(mixed)
    assert isinstance(stack, PackedStack)
    layout, size = flat.layout, (flat.num_out, flat.num_in)
    one = packed_weight(flat.data, size, flat.format, None, False, layout.group, layout.minima, flat.factor)
    for seed in range(3):  # with neither, with scales, with biases
        table, arena = filled_table(cpu, shape, 6, torch.float32, seed)
        for kind in ("store", "add"):
            assert_same_bits(*(run(cpu, kind, x, weight, table, slots, out) for weight in (stack, one)))
        del arena


def mixed_parts(shape: FactorShape) -> list[StoredWeight]:
    forms = ["INT4", "INT8", "INT4"]
    return [
        stored(random(i, n, shape.num_in), form) for i, (n, form) in enumerate(zip(shape.widths, forms, strict=True))
    ]


@pytest.mark.parametrize("make", [lambda shape: parts(shape, torch.float32), mixed_parts], ids=["floats", "mixed"])
def test_a_recorded_product_reads_the_slots_of_each_step(
    isa: str, make: Callable[[FactorShape], list[StoredWeight]]
) -> None:
    import numpy as np

    from octavo.ops import cpu as native
    from octavo.ops.cpu_program import Program

    shape = SHAPES[1]
    table, arena = filled_table(cpu, shape, 5, torch.float32, 0)
    weight = cpu.pack_linear(make(shape))
    x, slots = random(0, 12, shape.num_in).numpy(), np.zeros(12, np.int32)
    program = Program()
    watched, watched_slots = program.input(x), program.input(slots)
    results = []
    with program.record(per_sample=False):
        for _ in range(2):  # the first fetches what the second reads
            expand = Expand(table, watched_slots, native.shrink(watched, table, watched_slots, weight))
            results.append(program.output(native.linear(watched, weight, expand=expand)))
    for step in ([0, 3, 0, -1, 1], [-1] * 12, [2] * 12):
        slots[: len(step)] = step
        program.run(len(step), 1, 0)
        now = torch.tensor(step, dtype=torch.int32)
        expected = run(cpu, "store", torch.from_numpy(x[: len(step)].copy()), weight, table, now, torch.empty(0))
        for result in results:
            assert_same_bits(torch.from_numpy(result[: len(step)].copy()), expected)
    slots[:] = 5
    with pytest.raises(IndexError, match="adapter slot 5"):
        program.run(12, 1, 0)
    del arena


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)], ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(3, 1), (16, 130), (5, 67)])
def test_rows_are_rounded_once_and_dealt_out_to_their_lanes(dtype: np.dtype[Any], rows: int, columns: int) -> None:
    lanes, step = 8, 4 // dtype.itemsize
    values = np.random.default_rng(rows).standard_normal((rows, columns + 3), np.float32)
    values[0, :1] = 1 + 2.0**-8  # halfway: to the even one
    words = -(-columns // step)
    out = np.full((-(-rows // lanes), words, lanes), 7, np.uint32)
    numbers = np.arange(rows)
    places = numbers // lanes * (words * lanes) + numbers % lanes
    places[1] = -1
    _cpu.pack_factor_rows(
        source=values, stride=values.shape[1], rows=rows, columns=columns, places=places, out=out, lanes=lanes,
        dtype=CODES[dtype],
    )  # fmt: skip
    padded = np.zeros((rows, words * step), dtype)
    padded[:, :columns] = values[:, :columns]
    expected = np.full((len(out) * lanes, words), 7, np.uint32)
    expected[:rows] = padded.view(np.uint32)
    expected[1] = 7
    assert np.array_equal(out.swapaxes(1, 2).reshape(-1, words), expected)
