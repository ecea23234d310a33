"""Routing and products of experts, against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.errors import ConfigError
from octavo.ops import Routing
from octavo.ops.triton import expert_kernels as triton_experts
from tests.ops.tensors import OverTensors, stored, torch_ref
from tests.ops.triton.conftest import DEVICE, products
from tests.ops.triton.test_linear import TOLERANCE, assert_near, draw
from tests.quantization.blocks import random_matrix

pytestmark = pytest.mark.long

kernels = OverTensors(triton_experts, takes_numpy=False)
ROUTINGS = {
    "softmax": Routing(3),
    "softmax, the best group by its best": Routing(2, normalize=False, scale=2.5, num_groups=3, kept_groups=1),
    "sigmoid, two groups by their two best": Routing(4, "sigmoid", num_groups=4, kept_groups=2, group_by_two=True),
    "sigmoid, bias on logits, soft cap": Routing(3, "sigmoid", bias_logits=True, softcap=1.5),
    "sparsemixer": Routing(2, "sparsemixer", jitter=0.3),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ROUTINGS)
def test_routing_is_the_reference(name: str, bias: bool) -> None:
    for experts in (12, 60):
        logits, b = 3 * draw(5, experts), draw(experts) if bias else None
        scales = None if bias or name == "sparsemixer" else draw(experts)
        ids, weights = kernels.route(logits, ROUTINGS[name], b, scales)
        expected_ids, expected = torch_ref.route(logits, ROUTINGS[name], b, scales)
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7)


def test_routing_takes_the_first_of_equals_and_never_one_twice() -> None:
    logits = torch.zeros(3, 12, device=DEVICE)
    logits[1], logits[2, 3:9] = float("nan"), float("nan")
    ids, _ = kernels.route(logits, Routing(4, "sigmoid"))
    assert ids.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 9]]


def choices(rows: int, experts: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    liking = draw(rows, experts) + draw(1, experts, seed=1)
    return liking.topk(top_k).indices.int(), draw(rows, top_k, seed=2).abs()


def run(ops: Any, pack: Any, gate_ups: Any, downs: Any, bias: bool, *args: Any, **settings: Any) -> torch.Tensor:
    gated = len(gate_ups[0]) == 2
    biases = [
        [draw((1 + gated) * parts[0].shape[0], seed=e), None] if bias else [None, None]
        for e, parts in enumerate(gate_ups)
    ]
    first = [pack.pack_linear(parts, biases[e][0], gated) for e, parts in enumerate(gate_ups)]
    second = [pack.pack_linear([part], biases[e][1]) for e, part in enumerate(downs)]
    stacks = ops.stack_experts(first, len(first)), ops.stack_experts(second, len(second))
    out = ops.experts(*args, *stacks, **settings)
    assert isinstance(out, torch.Tensor)
    return out


# Those with relu2 are not gated.
SETTINGS: list[dict[str, Any]] = [
    {}, {"activation": "gelu"}, {"clamp": (1.702, 0.7)}, {"scales_inputs": True}, {"activation": "relu2"}
]  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_experts_are_the_reference(dtype: torch.dtype, settings: dict[str, Any]) -> None:
    num, hidden, inner = 3, 40, 52
    sides = 1 if "relu2" in settings.values() else 2
    gate_ups = [[draw(inner, hidden, dtype=dtype, seed=10 * e + i) / 6 for i in range(sides)] for e in range(num)]
    downs = [draw(hidden, inner, dtype=dtype, seed=10 * e + 2) / 6 for e in range(num)]
    for rows in (1, 30):
        x, (ids, weights) = draw(rows, hidden, dtype=dtype), choices(rows, num, 2)
        ids[-1, 0] = -1
        found = run(kernels, products, gate_ups, downs, True, x, ids, weights, **settings)
        expected = run(torch_ref, torch_ref, gate_ups, downs, True, x, ids, weights, **settings)
        assert_near(found, expected, 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "MXFP4", "IQ4_NL", "Q8_0", "INT8"])
def test_products_of_quantized_experts(name: str) -> None:
    num, hidden, inner = 3, 256, 256

    def matrix(n: int, k: int, seed: int) -> Any:
        return stored(draw(n, k, seed=seed).cpu(), "INT8") if name == "INT8" else random_matrix(name, n, k, seed)

    gate_ups = [[matrix(inner, hidden, 10 * e + i) for i in range(2)] for e in range(num)]
    downs = [matrix(hidden, inner, 10 * e + 2) for e in range(num)]
    x, (ids, weights) = draw(5, hidden) / 16, choices(5, num, 2)
    for sides in (2, 1):
        parts = [matrices[:sides] for matrices in gate_ups]
        found = run(kernels, products, parts, downs, False, x, ids, weights)
        expected = run(torch_ref, torch_ref, parts, downs, False, x, ids, weights)
        assert_near(found, expected, 5e-2 if name == "INT8" else 2e-3)  # activations have 8 bits twice


def test_a_stack_has_codes_of_one_meaning() -> None:
    """Both formats have four bits and a scale for 32."""
    packed = [products.pack_linear([random_matrix(name, 64, 64)]) for name in ("Q4_0", "MXFP4")]
    with pytest.raises(ConfigError, match="quantized differently"):
        triton_experts.stack_experts(packed, 2)


@pytest.mark.parametrize("block_t", [16, 64, 128])
def test_each_experts_rows_begin_with_a_tile_and_stay_in_order(block_t: int) -> None:
    """Against a loop, with ids of other devices' experts, experts that nobody chose, and more entries than a piece."""
    for rows, num, top_k, first in ((1, 4, 2, 0), (30, 12, 3, 6), (700, 5, 2, 2), (3, 200, 8, 100), (1, 1, 1, 0)):
        ids, _ = choices(rows, 2 * num, top_k)
        tile_experts, found = triton_experts.group(ids, first, num, block_t)
        expected_tiles, expected = [], torch.full((rows * top_k,), -1)
        for expert in range(num):
            entries = (ids.reshape(-1) == first + expert).nonzero()[:, 0]
            begin = block_t * len(expected_tiles)
            expected[entries.cpu()] = torch.arange(begin, begin + len(entries))
            expected_tiles += [expert] * -(-len(entries) // block_t)
        assert torch.equal(found.reshape(-1).cpu(), expected)
        more = len(tile_experts) - len(expected_tiles)
        assert more >= 0
        assert tile_experts.tolist() == expected_tiles + [-1] * more


def test_tiles_are_as_large_as_an_experts_rows_are_many() -> None:
    tiles = [triton_experts._tile_rows(tokens, 8, 128) for tokens in (1, 256, 257, 2048, 4095, 4096, 8192)]
    assert tiles == [16, 16, 64, 64, 64, 128, 128]
    assert triton_experts._tile_rows(2048, 4, 32) == 128
    assert triton_experts._tile_rows(8192, 8, 128, is_hopper=False) == 64


def test_tiles_of_rows_do_not_change_bits() -> None:
    num, hidden, inner = 3, 40, 48
    gate_ups = [[draw(inner, hidden, dtype=torch.bfloat16, seed=10 * e + i) / 6 for i in range(2)] for e in range(num)]
    downs = [draw(hidden, inner, dtype=torch.bfloat16, seed=10 * e + 2) / 6 for e in range(num)]
    x, (ids, weights) = draw(20, hidden, dtype=torch.bfloat16), choices(20, num, 2)
    found = []
    for block_t in (16, 64, 128):
        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(triton_experts, "_tile_rows", lambda *args, size=block_t: size)
            found.append(run(kernels, products, gate_ups, downs, False, x, ids, weights))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_rows_do_not_depend_on_the_others() -> None:
    num, hidden, inner = 3, 40, 48
    gate_ups = [[draw(inner, hidden, seed=10 * e + i) for i in range(2)] for e in range(num)]
    downs = [draw(hidden, inner, seed=10 * e + 2) for e in range(num)]
    x, (ids, weights) = draw(12, hidden), choices(12, num, 2)
    together = run(kernels, products, gate_ups, downs, False, x, ids, weights)
    for begin, end in [(0, 1), (3, 8), (11, 12)]:
        part = run(kernels, products, gate_ups, downs, False, x[begin:end], ids[begin:end], weights[begin:end])
        assert torch.equal(part, together[begin:end])


def test_tokens_without_experts_get_zeros() -> None:
    matrix = [draw(16, 16)] * 2
    nobody = torch.full((3, 2), -1, dtype=torch.int32, device=DEVICE)
    assert not run(kernels, products, [matrix], matrix[:1], False, draw(3, 16), nobody, draw(3, 2)).any()
    assert run(kernels, products, [matrix], matrix[:1], False, draw(0, 16), nobody[:0], draw(0, 2)).shape == (0, 16)
