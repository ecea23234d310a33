"""Mixtures of experts: routing in all its forms, and products grouped by expert, against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from octavo import _cpu
from octavo.ops import Routing
from octavo.ops import cpu as native
from octavo.ops.cpu_program import Program
from tests.ops.int_matrices import FORMATS, Format, pack, random_matrix, reference
from tests.ops.kernel_cases import DTYPES, assert_same_bits, generated, generated_few, random
from tests.ops.tensors import OverTensors, cpu, stored, to_numpy, torch_ref

ROUTINGS = {
    "softmax": Routing(3),
    "softmax as it is, scaled": Routing(2, normalize=False, scale=2.5),
    "softmax, the best group by its best": Routing(2, normalize=False, num_groups=3, kept_groups=1),
    "sigmoid": Routing(4, "sigmoid", scale=0.5),
    "sigmoid of the input's weight": Routing(1, "sigmoid", normalize=False),
    "sigmoid, two groups by their two best": Routing(4, "sigmoid", num_groups=4, kept_groups=2, group_by_two=True),
    "sigmoid, bias on logits": Routing(3, "sigmoid", bias_logits=True),
    "sigmoid, soft cap": Routing(3, "sigmoid", softcap=1.5),
    "sparsemixer": Routing(2, "sparsemixer", jitter=0.3),
}


@pytest.mark.parametrize("name", ROUTINGS)
@generated_few
@given(rows=st.integers(1, 40), experts=st.sampled_from([12, 24, 60, 120]), bias=st.booleans())
def test_routing_is_the_reference(isa: str, name: str, rows: int, experts: int, bias: bool) -> None:
    routing, logits = ROUTINGS[name], random(rows, rows, experts) * 3
    b = random(experts, experts) if bias else None
    scales = None if bias or routing.scoring == "sparsemixer" else random(experts + 1, experts)
    ids, weights = cpu.route(logits, routing, b, scales)
    expected_ids, expected = torch_ref.route(logits, routing, b, scales)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ROUTINGS)
def test_routing_takes_the_first_of_equals_and_never_one_twice(isa: str, name: str) -> None:
    routing = ROUTINGS[name]
    ids, _ = cpu.route(torch.zeros(3, 12), routing)
    assert ids.tolist() == [list(range(routing.top_k))] * 3
    logits = random(0, 4, 12)
    logits[1, 3:9], logits[2], logits[3, 5] = float("nan"), float("nan"), float("inf")
    ids, _ = cpu.route(logits, routing)
    assert all(len(set(row)) == routing.top_k and min(row) >= 0 and max(row) < 12 for row in ids.tolist())
    assert torch.equal(ids[:1], cpu.route(logits[:1], routing)[0])


def choices(seed: int, rows: int, experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    """Experts of each token, some of them popular, and weights."""
    liking = random(seed, rows, experts) + random(seed + 1, 1, experts)
    return liking.topk(top_k).indices.int(), random(seed + 2, rows, top_k).abs()


class Layer:
    """Experts of `hidden` by `inner`, in a backend."""

    def __init__(self, ops: OverTensors, gate_up: list[Any], down: list[Any]) -> None:
        self.ops, self.gate_up, self.down = (
            ops,
            ops.stack_experts(gate_up, len(gate_up)),
            ops.stack_experts(down, len(down)),
        )

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, **settings: Any) -> Tensor:
        out = self.ops.experts(x, ids, weights, self.gate_up, self.down, **settings)
        assert isinstance(out, Tensor)
        return out


def float_layer(
    ops: OverTensors, num: int, hidden: int, inner: int, dtype: torch.dtype, bias: bool, gated: bool = True
) -> Layer:
    gate_up, down = [], []
    for e in range(num):
        parts = [random(3 * e + i, inner, hidden, dtype=dtype) / hidden**0.5 for i in range(2)]
        second = random(3 * e + 2, hidden, inner, dtype=dtype) / inner**0.5
        biases = [random(e, (1 + gated) * inner), random(e, hidden)] if bias else [None, None]
        gate_up.append(ops.pack_linear(parts if gated else parts[:1], biases[0], gated=gated))
        down.append(ops.pack_linear([second], biases[1]))
    return Layer(ops, gate_up, down)


def int_layer(num: int, hidden: int, inner: int, form: Format, packed: bool, gated: bool = True) -> Layer:
    make, ops = (pack, cpu) if packed else (reference, torch_ref)
    gates, ups, downs = (
        [random_matrix(3 * e + i, n, k, form, 2.0 ** (e % 2)) for e in range(num)]
        for i, (n, k) in enumerate([(inner, hidden), (inner, hidden), (hidden, inner)])
    )
    gate_up = [make(gate, random(e, 2 * inner), up) for e, (gate, up) in enumerate(zip(gates, ups, strict=True))]
    if not gated:
        gate_up = [make(gate, random(e, inner)) for e, gate in enumerate(gates)]
    return Layer(ops, gate_up, [make(down) for down in downs])


SETTINGS: list[dict[str, Any]] = [
    {}, {"activation": "gelu"}, {"activation": "gelu_tanh"}, {"clamp": (1.702, 0.7)}, {"scales_inputs": True},
    {"activation": "relu2", "gated": False}, {"scales_inputs": True, "gated": False},
]  # fmt: skip
sizes = st.sampled_from([1, 33, 64, 100, 200])
row_counts = st.one_of(st.integers(1, 20), st.sampled_from([70, 300]))


@pytest.mark.parametrize("dtype", DTYPES)
@generated
@given(
    rows=row_counts, hidden=sizes, inner=sizes, num=st.integers(1, 9), bias=st.booleans(), data=st.data(),
    settings=st.sampled_from(SETTINGS),
)  # fmt: skip
def test_products_of_experts_are_the_reference(
    isa: str, dtype: torch.dtype, rows: int, hidden: int, inner: int, num: int, bias: bool, data: Any, settings: Any
) -> None:
    ids, weights = choices(rows, rows, num, data.draw(st.integers(1, num)))
    ids[rows // 2, 0] = data.draw(st.sampled_from([-1, num, int(ids[rows // 2, 0])]))
    x = random(rows, rows, hidden, dtype=dtype)
    settings, gated = {k: v for k, v in settings.items() if k != "gated"}, settings.get("gated", True)
    first = data.draw(st.sampled_from([0, 0, 5]))  # others have those before
    expected, actual = (
        float_layer(ops, num, hidden, inner, dtype, bias, gated)(
            x, ids + first, weights, first_expert=first, **settings
        )
        for ops in (torch_ref, cpu)
    )
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2  # what lies between the products is rounded to bfloat16
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


@pytest.mark.parametrize("form", FORMATS)
@generated_few
@given(rows=row_counts, hidden=sizes, inner=sizes, num=st.integers(1, 5), settings=st.sampled_from(SETTINGS))
def test_products_of_integer_experts_are_the_reference(
    isa: str, form: Format, rows: int, hidden: int, inner: int, num: int, settings: Any
) -> None:
    ids, weights = choices(rows, rows, num, min(num, 2))
    x = random(rows, rows, hidden)
    settings, gated = {k: v for k, v in settings.items() if k != "gated"}, settings.get("gated", True)
    expected = int_layer(num, hidden, inner, form, False, gated)(x, ids, weights, **settings)
    actual = int_layer(num, hidden, inner, form, True, gated)(x, ids, weights, **settings)
    # An element between the products that lies on the border between two codes may get either.
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-2 * float(expected.abs().max()))


def test_float_experts_feed_integer_ones(isa: str) -> None:
    ids, weights = choices(0, 9, 4, 2)
    x, form = random(0, 9, 64), FORMATS[0]
    layers = []
    for ops, make in ((torch_ref, reference), (cpu, pack)):
        first = float_layer(ops, 4, 64, 96, torch.float32, bias=False).gate_up.weights
        layers.append(Layer(ops, list(first), [make(random_matrix(e, 64, 96, form)) for e in range(4)]))
    expected, actual = (layer(x, ids, weights) for layer in layers)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-2 * float(expected.abs().max()))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, FORMATS[1], FORMATS[4]])
@pytest.mark.parametrize("settings", [{}, {"scales_inputs": True}])
def test_a_row_of_experts_has_the_same_bits_in_every_batch(
    isa: str, threads: None, kind: Any, settings: dict[str, Any]
) -> None:
    num, hidden, inner, total = 6, 96, 160, 80
    is_float = isinstance(kind, torch.dtype)
    x = random(0, total, hidden, dtype=kind if is_float else torch.float32)
    layer = float_layer(cpu, num, hidden, inner, kind, True) if is_float else int_layer(num, hidden, inner, kind, True)
    ids, weights = choices(1, total, num, 3)
    _cpu.set_threads(1)
    alone = torch.cat([layer(x[i : i + 1], ids[i : i + 1], weights[i : i + 1], **settings) for i in range(total)])
    for num_threads in (1, 2, 3):
        _cpu.set_threads(num_threads)
        for begin, end in [(0, 2), (1, 4), (3, 8), (5, 17), (7, 40), (0, total)]:
            part = layer(x[begin:end], ids[begin:end], weights[begin:end], **settings)
            assert_same_bits(part, alone[begin:end])


def test_more_tokens_than_memory_between_products_take_several_passes(threads: None) -> None:
    """8 * (4 + 1) KB a token, of 32 MB."""
    hidden, inner, num = 1024, 256, 8
    layer = float_layer(cpu, num, hidden, inner, torch.float32, bias=False)
    x, (ids, weights) = random(0, 1000, hidden), choices(1, 1000, num, num)
    whole = layer(x, ids, weights)
    for begin, end in [(0, 5), (300, 420), (500, 501), (990, 1000)]:
        assert_same_bits(whole[begin:end], layer(x[begin:end], ids[begin:end], weights[begin:end]))


def test_what_is_not_finite_spoils_its_own_row_alone(isa: str) -> None:
    layer = float_layer(cpu, 4, 64, 64, torch.float32, bias=False)
    x, (ids, weights) = random(0, 12, 64), choices(1, 12, 4, 2)
    clean = layer(x, ids, weights)
    x[5, 3] = float("nan")
    spoilt = layer(x, ids, weights)
    others = [i for i in range(12) if i != 5]
    assert spoilt[5].isnan().all()
    assert_same_bits(spoilt[others], clean[others])


def test_no_tokens_and_tokens_without_experts_are_no_work(isa: str) -> None:
    layer = float_layer(cpu, 4, 64, 64, torch.float32, bias=True)
    assert layer(torch.empty(0, 64), torch.empty(0, 2, dtype=torch.int32), torch.empty(0, 2)).shape == (0, 64)
    nobody = torch.full((3, 2), -1, dtype=torch.int32)
    assert not layer(random(0, 3, 64), nobody, torch.ones(3, 2)).any()


def test_a_recorded_step_routes_anew_each_time(threads: None) -> None:
    rows, hidden, num = 50, 64, 8
    layer, routing = float_layer(cpu, num, hidden, 96, torch.float32, bias=True), Routing(2, "sigmoid")
    int8 = int_layer(num, hidden, 96, FORMATS[2], packed=True)
    router = native.pack_linear([stored(random(1, num, hidden))])
    bias = to_numpy(random(2, num))

    def forward(x: Any) -> Any:
        for stack in (layer, int8):
            ids, weights = native.route(native.linear(x, router, "float32"), routing, bias)
            x = native.experts(x, ids, weights, stack.gate_up, stack.down)
        return x

    given, program = np.zeros((rows, hidden), np.float32), Program()
    with program.record(per_sample=False):
        out = program.output(forward(program.input(given)))
    for seed, (num_threads, count) in enumerate([(1, rows), (2, 5), (2, rows), (1, 1)]):
        _cpu.set_threads(num_threads)
        given[:count] = to_numpy(random(seed, count, hidden))
        program.run(count, 0, 0)
        assert np.array_equal(out[:count], forward(given[:count].copy()))
    names = [name for name, _ in program.profile(3, 0, 0)]
    assert names[:6] == ["linear", "route", "group_experts", "gather_experts", "experts_up", "experts_down"]


def test_stacks_are_of_matrices_that_are_alike() -> None:
    one, other = (cpu.pack_linear([random(0, n, 64)]) for n in (64, 96))
    with pytest.raises(ValueError, match="experts of"):
        cpu.stack_experts([one, other], 2)
    assert cpu.stack_experts([one, one], 2).num_bytes == 2 * one.num_bytes
