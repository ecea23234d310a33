"""What adapters add to Triton's products: as the reference has it, and to each row as if it were alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from octavo.ops import ExpandExperts, FactorShape, Lookup, cuda
from octavo.ops.triton import adapter_tables, lora
from octavo.ops.triton.lora import rows_by_adapter
from tests.ops.adapter_cases import LOOKUPS, SHAPES, filled_experts, filled_table, parts, run
from tests.ops.kernel_cases import DTYPES, assert_same_bits, generated, generated_few, random
from tests.ops.tensors import OverTensors, stored, torch_ref
from tests.ops.triton.conftest import DEVICE


class _OnDevice(OverTensors):
    def arena(self, memory: np.ndarray) -> Tensor:
        return torch.from_numpy(memory).to(DEVICE)


triton_ops = _OnDevice(cuda, takes_numpy=False)

# With ranks in several blocks, and outputs in several pieces.
LARGE = [FactorShape(300, (200, 72), False, 70), FactorShape(64, (264,), False, 3)]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """K in several chunks, which few rows are split by, and factors in several pieces."""
    monkeypatch.setattr(lora, "_CHUNK", 128)
    monkeypatch.setattr(lora, "_MAX_SPLIT_ROWS", 32)
    monkeypatch.setattr(adapter_tables, "_PIECE_BYTES", 0)


def kinds(shape: FactorShape) -> tuple[str, ...]:
    return ("gated",) if shape.gated else ("store", "add", "activated")


def some_slots(rows: int, seed: int, num_slots: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, num_slots, (rows,), generator=generator, dtype=torch.int32).to(DEVICE)


def drawn(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return random(seed, *shape, dtype=dtype).to(DEVICE)


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype, bfloat16: float = 2**-6) -> None:
    """Against the largest: the shrunk rows are rounded by both, after sums in another order, and the interpreter cuts
    bfloat16 off where the device rounds."""
    bound = (2e-5 if dtype is torch.float32 else bfloat16) * float(expected.abs().max().clamp(min=1))
    assert (found.float().cpu() - expected.float().cpu()).abs().max() <= bound


@generated
@given(rows=st.integers(0, 200), num_slots=st.integers(1, 40), seed=st.integers(0, 9))
def test_rows_lie_in_tiles_of_one_adapter_each(rows: int, num_slots: int, seed: int) -> None:
    slots = some_slots(rows, seed, num_slots)
    found = rows_by_adapter(slots)
    num_tiles, sources = int(found.num_tiles), found.sources.view(-1, found.block_t).tolist()
    placed = []
    for tile in range(num_tiles):
        of_tile = [row for row in sources[tile] if row >= 0]
        assert of_tile and of_tile == sorted(of_tile)
        assert {int(slots[row]) for row in of_tile} == {int(found.tile_slots[tile])}
        placed += of_tile
    assert sorted(placed) == [row for row in range(rows) if slots[row] >= 0]
    assert num_tiles <= (rows // found.block_t) + len(set(slots.tolist()) - {-1})


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (SHAPES[4], torch.float32),
        *(pytest.param(shape, dtype, marks=pytest.mark.long) for shape in [*SHAPES, *LARGE] for dtype in DTYPES),
    ],
    ids=str,
)
@generated_few
@given(rows=st.integers(1, 40), seed=st.integers(0, 5), bias=st.booleans())
def test_a_product_with_adapters_is_the_reference(
    shape: FactorShape, dtype: torch.dtype, rows: int, seed: int, bias: bool
) -> None:
    slots, total = some_slots(rows, seed, 4), sum(shape.widths)
    x, out = drawn(seed, rows, shape.num_in, dtype=dtype), drawn(8, rows, total, dtype=dtype)
    b = random(7, total, dtype=dtype) if bias else None
    for kind in kinds(shape)[seed % len(kinds(shape)) :][:1]:
        results = []
        for ops in (triton_ops, torch_ref):
            table, arena = filled_table(ops, shape, 4, dtype, seed)
            weight = ops.pack_linear(parts(shape, dtype), b, shape.gated)
            given_to = [tensor if ops is triton_ops else tensor.cpu() for tensor in (x, slots, out)]
            results.append(run(ops, kind, given_to[0], weight, table, given_to[1], given_to[2]))
            del arena
        assert_close(*results, dtype)


@pytest.mark.parametrize(
    ("shape", "form", "dtype"),
    [
        (SHAPES[3], "INT4", torch.bfloat16),
        *(
            pytest.param(shape, form, dtype, marks=pytest.mark.long)
            for shape in (*SHAPES[:2], SHAPES[3], SHAPES[5], LARGE[0])
            for form in (None, "INT8", "FP8", "INT4")
            for dtype in DTYPES
            if form in (None, "INT4") or shape.num_in % 16 == 0
        ),
    ],
    ids=str,
)
def test_a_row_does_not_depend_on_its_company(shape: FactorShape, form: str | None, dtype: torch.dtype) -> None:
    """Nor on how many there are, whatever tiles and chunks their number makes the kernels choose."""
    rows = 70
    x, out = drawn(1, rows, shape.num_in, dtype=dtype), drawn(8, rows, sum(shape.widths), dtype=dtype)
    slots = some_slots(rows, 3)
    slots[10:20] = 2
    table, arena = filled_table(triton_ops, shape, 6, dtype, 0)
    weight = triton_ops.pack_linear(parts(shape, dtype, form), None, shape.gated)
    x = triton_ops.quantize(x, weight)
    for kind in kinds(shape)[-2:]:
        mixed = run(triton_ops, kind, x, weight, table, slots, out)
        base = run(triton_ops, kind, x, weight, table, None, out)
        is_base = (slots == -1) | (slots == 5)  # nobody's, and a slot without factors
        assert_same_bits(mixed[is_base], base[is_base])
        assert (mixed[~is_base] != base[~is_base]).any(1).all()
        for begin, end in [(0, 1), (2, 3), (11, 12), (3, 30)]:
            here = slice(begin, end)
            assert_same_bits(run(triton_ops, kind, x[here], weight, table, slots[here], out[here]), mixed[here])
    del arena


@pytest.mark.parametrize("form", ["INT8", pytest.param("FP8", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "shape", [pytest.param(SHAPES[1], marks=pytest.mark.long), FactorShape(64, (75,), False, 8, replaceable=True)],
    ids=str,
)  # fmt: skip
def test_quantized_rows_are_taken_for_what_they_stand_for(shape: FactorShape, form: str) -> None:
    from octavo.ops.triton.quantize import codes_of, scales_of

    rows, dtype = 9, torch.float32
    slots = torch.arange(rows, dtype=torch.int32, device=DEVICE) % 6 - 1
    table, arena = filled_table(triton_ops, shape, 6, dtype, 0)
    weight = triton_ops.pack_linear(parts(shape, dtype, form))
    x = triton_ops.quantize(drawn(1, rows, shape.num_in, dtype=dtype), weight)
    stands_for = codes_of(x, weight.activation_dtype).float() * scales_of(x)[:, None]
    found = run(triton_ops, "store", x, weight, table, slots, torch.empty(0))
    floats = triton_ops.pack_linear(parts(shape, dtype))
    added = [
        run(triton_ops, "store", given_rows, matrix, table, slots, torch.empty(0))
        - run(triton_ops, "store", given_rows, matrix, table, None, torch.empty(0))
        for given_rows, matrix in ((x, weight), (stands_for, floats))
    ]
    assert found.isfinite().all()
    # Scales and whole matrices take the base's product in, whose matrix is quantized here.
    plain = [slot for slot in range(5) if slot % 3 != 1 and not (shape.replaceable and slot % 2 == 0)]
    is_plain = torch.isin(slots, torch.tensor(plain, dtype=torch.int32, device=DEVICE))
    assert is_plain.any()
    assert_close(added[0][is_plain], added[1][is_plain], dtype)
    del arena


@pytest.mark.parametrize("form", [None, *(pytest.param(form, marks=pytest.mark.long) for form in ("INT8", "INT4"))])
@pytest.mark.parametrize("dtype", [DTYPES[0], *(pytest.param(dtype, marks=pytest.mark.long) for dtype in DTYPES[1:])])
@pytest.mark.parametrize("shape", [*LOOKUPS, FactorShape(64, (300,), False, 3, True, True)], ids=str)
def test_rows_that_are_looked_up_are_the_references_and_their_own(
    dtype: torch.dtype, shape: FactorShape, form: str | None
) -> None:
    if form == "INT8" and shape.num_in % 16:
        pytest.skip("such rows are not quantized")
    rows, [num_tokens] = 37, shape.widths
    token_ids = torch.randint(0, num_tokens, (rows,), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    token_ids, slots = token_ids.to(DEVICE), some_slots(rows, 2)
    table, arena = filled_table(triton_ops, shape, 6, dtype, 0)
    weight = triton_ops.pack_linear(parts(shape, dtype, form))

    def look_up(here: slice) -> Tensor:
        found: Tensor = triton_ops.embedding(
            token_ids[here], weight, dtype, 3.0, Lookup(table, rows_by_adapter(slots[here]))
        )  # fmt: skip
        return found

    together, base = look_up(slice(None)), triton_ops.embedding(token_ids, weight, dtype, 3.0)
    for row in range(rows):
        here = slice(row, row + 1)
        assert_same_bits(look_up(here), together[here])
        assert torch.equal(together[here], base[here]) == (int(slots[row]) in (-1, 5))
    if form is None:
        expected_table, expected_arena = filled_table(torch_ref, shape, 6, dtype, 0)
        adapted = Lookup(expected_table, slots.cpu())
        reference = torch_ref.pack_linear(parts(shape, dtype))
        assert_close(together, torch_ref.embedding(token_ids.cpu(), reference, dtype, 3.0, adapted), dtype)
        del expected_arena
    del arena


@pytest.mark.parametrize("shape", [*SHAPES, *LARGE, *LOOKUPS], ids=str)
def test_pieces_fit_pages_and_slots_are_cleared(shape: FactorShape) -> None:
    table, arena = filled_table(triton_ops, shape, 4, torch.float32, 0)  # which asserts the former
    assert all(int(table.entries[slot, 0]) for slot in range(3))
    for slot in range(4):
        table.clear(slot)
    assert not table.entries.any()
    assert np.all(np.array(table.largest(table.least_page_bytes())) <= table.least_page_bytes())
    del arena


NUM_EXPERTS, NUM_SLOTS = 6, 5
EXPERT_SETTINGS: list[dict[str, Any]] = [
    {},
    {"clamp": (1.702, 0.7)},
    {"scales_inputs": True},
    {"activation": "relu2", "gated": False},
]


def expert_layer(ops: OverTensors, hidden: int, inner: int, dtype: torch.dtype, gated: bool, form: str | None) -> Any:
    """gate and up, and down."""
    gate_ups, downs = [], []
    for e in range(NUM_EXPERTS):
        first = [stored(random(3 * e + i, inner, hidden, dtype=dtype) / hidden**0.5, form) for i in range(1 + gated)]
        gate_ups.append(ops.pack_linear(first, random(e, (1 + gated) * inner), gated))
        second = stored(random(3 * e + 2, hidden, inner, dtype=dtype) / inner**0.5, form)
        downs.append(ops.pack_linear([second], random(e, hidden)))
    return [ops.stack_experts(stack, NUM_EXPERTS) for stack in (gate_ups, downs)]


def expert_tables(ops: OverTensors, hidden: int, inner: int, gated: bool, dtype: torch.dtype) -> list[Any]:
    shapes = FactorShape(hidden, (inner,) * (1 + gated), gated, 5), FactorShape(inner, (hidden,), False, 5)
    return [filled_experts(ops, shape, NUM_EXPERTS, NUM_SLOTS, dtype, i) for i, shape in enumerate(shapes)]


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("settings", EXPERT_SETTINGS, ids=str)
def test_experts_with_adapters_are_the_reference(dtype: torch.dtype, settings: dict[str, Any]) -> None:
    settings, gated = {k: v for k, v in settings.items() if k != "gated"}, settings.get("gated", True)
    rows, hidden, inner = 23, 48, 72
    ids = torch.stack([torch.randperm(NUM_EXPERTS)[:2] for _ in range(rows)]).int().to(DEVICE)
    x, weights = drawn(1, rows, hidden, dtype=dtype), drawn(2, rows, 2, dtype=torch.float32).abs()
    slots, results = some_slots(rows, 4, NUM_SLOTS), []
    for ops in (triton_ops, torch_ref):
        (up, up_arena), (down, down_arena) = expert_tables(ops, hidden, inner, gated, dtype)
        given_to = [tensor if ops is triton_ops else tensor.cpu() for tensor in (x, ids, weights, slots)]
        expand = ExpandExperts(ops.rows_by_adapter(given_to[3]), up, down)
        layer = expert_layer(ops, hidden, inner, dtype, gated, None)
        results.append(ops.experts(*given_to[:3], *layer, expand=expand, **settings))
        del up_arena, down_arena
    assert_close(*results, dtype, 2**-4)


@pytest.mark.long
@pytest.mark.parametrize("form", [None, "INT8", "INT4"])
def test_a_token_of_experts_does_not_depend_on_its_company(form: str | None) -> None:
    rows, hidden, inner = 40, 64, 96
    ids = torch.stack([torch.randperm(NUM_EXPERTS)[:3] for _ in range(rows)]).int().to(DEVICE)
    x, weights = drawn(1, rows, hidden, dtype=torch.float32), drawn(2, rows, 3, dtype=torch.float32).abs()
    slots, layer = some_slots(rows, 4, NUM_SLOTS), expert_layer(triton_ops, hidden, inner, torch.float32, True, form)
    (up, up_arena), (down, down_arena) = expert_tables(triton_ops, hidden, inner, True, torch.float32)

    def run_rows(begin: int, end: int, adapted: bool = True) -> Tensor:
        here = slice(begin, end)
        expand = ExpandExperts(rows_by_adapter(slots[here]), up, down) if adapted else None
        found: Tensor = triton_ops.experts(x[here], ids[here], weights[here], *layer, expand=expand)
        return found

    mixed, base = run_rows(0, rows), run_rows(0, rows, adapted=False)
    is_base = (slots == -1) | (slots == NUM_SLOTS - 1)
    assert_same_bits(mixed[is_base], base[is_base])
    assert (mixed != base).any(1)[~is_base].float().mean() > 0.9
    for begin, end in [(0, 1), (1, 2), (7, 8), (3, 20)]:
        assert_same_bits(run_rows(begin, end), mixed[begin:end])
    del up_arena, down_arena
