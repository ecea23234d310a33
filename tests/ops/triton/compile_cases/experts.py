"""Experts, at the shapes of Qwen3-30B-A3B: routing, and both products in every kind of tile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from octavo.ops import Routing
from octavo.ops.triton import expert_kernels as kernels
from octavo.ops.triton.packed_weights import FloatWeight, IntWeight, PackedWeight, ScaledWeight
from tests.ops.triton.compile_cases.products import F32, INT8, empty, integers
from tests.ops.triton.compiling import Case

NUM, HIDDEN, INNER = 128, 2048, 768


def floats(n: int, k: int, gated: bool = False) -> FloatWeight:
    return FloatWeight(n, k, gated, empty(NUM * n, k), empty(NUM * n, dtype=F32))


def codes(n: int, k: int, gated: bool = False, has_table: bool = False) -> IntWeight:
    one = integers(n, k, 4, 32, not has_table, gated, has_table)
    table = None if one.table is None else one.table.repeat(NUM)
    return replace(one, codes=one.codes.repeat(NUM, 1), scales=one.scales.repeat(NUM, 1), table=table)


indices = partial(codes, has_table=True)


def scaled(n: int, k: int, gated: bool = False) -> ScaledWeight:
    return ScaledWeight(n, k, gated, empty(NUM * n, k, dtype=INT8), empty(NUM * n, dtype=F32), None)


def layer(rows: int, make: Callable[..., PackedWeight], clamp: tuple[float, float] | None = None) -> None:
    factors = empty(NUM, dtype=F32)
    stacks = (kernels.StackedWeight(NUM, w, factors) for w in (make(2 * INNER, HIDDEN, True), make(HIDDEN, INNER)))
    ids = torch.zeros(rows, 8, dtype=torch.int32)
    kernels.experts(empty(rows, HIDDEN), ids, empty(rows, 8, dtype=F32), *stacks, clamp=clamp)


def route(routing: Routing) -> None:
    kernels.route(empty(4, NUM, dtype=F32), routing, empty(NUM, dtype=F32))


CASES = {f"experts_{rows}": Case(lambda rows=rows: layer(rows, floats), 4) for rows in (1, 1024, 8192)}
CASES |= {f"experts_int4_{rows}": Case(lambda rows=rows: layer(rows, codes), 4) for rows in (1, 1024, 8192)}
CASES |= {f"experts_table_{rows}": Case(lambda rows=rows: layer(rows, indices), 4) for rows in (1, 8192)}
CASES |= {"experts_w8a8": Case(lambda: layer(1, scaled), 4)}
CASES |= {"experts_clamped": Case(lambda: layer(1, floats, (1.702, 7.0)), 4)}
CASES |= {"route_softmax": Case(lambda: route(Routing(8)), 4)}
CASES |= {
    "route_groups": Case(
        lambda: route(Routing(8, "sigmoid", num_groups=8, kept_groups=4, group_by_two=True, softcap=2.0)), 4
    ),
    "route_sparsemixer": Case(lambda: route(Routing(2, "sparsemixer", jitter=0.01)), 4),
}
