"""Tables of adapters for the kernel tests: random factors, placed in an arena at odd places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.ops import Expand, Factors, FactorShape, LowRank, Whole
from octavo.quantization import StoredWeight
from tests.ops.kernel_cases import random
from tests.ops.tensors import OverTensors, dtype_name, stored

SHAPES = [
    FactorShape(33, (48, 16, 16), False, 5),  # projections that share panels
    FactorShape(64, (96, 32, 64), False, 16),
    FactorShape(70, (40,), False, 40),
    FactorShape(96, (64, 64), True, 8),
    FactorShape(128, (70, 70), True, 3),  # the last panels are padded
    FactorShape(33, (75,), False, 8, replaceable=True),
]
LOOKUPS = [FactorShape(33, (75,), False, 5, True, True), FactorShape(640, (64,), False, 16, True, True)]


def run(ops: OverTensors, kind: str, x: Tensor, weight: Any, table: Any, slots: Tensor | None, out: Tensor) -> Tensor:
    expand = None
    if slots is not None:
        slots = ops.rows_by_adapter(slots)
        expand = Expand(table, slots, ops.shrink(x, table, slots, weight))
    if kind == "gated":
        return ops.linear_silu_and_mul(x, weight, expand=expand)
    if kind == "activated":
        return ops.linear_activated(x, weight, "gelu", expand=expand)
    if kind == "store":
        return ops.linear(x, weight, expand=expand)
    out = out.clone()
    ops.linear_add(x, weight, out, 0.5, expand=expand)
    return out


def parts(shape: FactorShape, dtype: torch.dtype, form: str | None = None) -> list[StoredWeight]:
    return [stored(random(i, width, shape.num_in, dtype=dtype), form) for i, width in enumerate(shape.widths)]


def random_factors(shape: FactorShape, seed: int) -> Factors:
    """Of some projections, of any rank up to the largest, sometimes with scales and biases; every second of what may be
    replaced is."""
    generator = np.random.default_rng(seed)
    projections: list[LowRank | Whole | None] = []
    for width in shape.widths:
        rank = int(generator.integers(0, shape.max_rank + 1))
        a, b = (generator.standard_normal(size, np.float32) for size in ((rank, shape.num_in), (width, rank)))
        projections.append(LowRank(a, b) if rank else None)
    if shape.replaceable and seed % 2 == 0:
        [width] = shape.widths
        projections = [Whole(generator.standard_normal((width, shape.num_in), np.float32))]
    if shape.is_embedding:
        return Factors(tuple(projections))
    total = sum(shape.widths)
    scales, bias = (generator.standard_normal(total, np.float32) for _ in range(2))
    has_scales = seed % 3 == 1 and not isinstance(projections[0], Whole)
    return Factors(tuple(projections), scales if has_scales else None, bias if seed % 3 == 2 else None)


def filled_table(ops: OverTensors, shape: FactorShape, num_slots: int, dtype: Any, seed: int) -> Any:
    """A table whose slots all have factors, but for the last, and the arena that these lie in."""
    table = ops.module.adapter_table(shape, num_slots, dtype_name(dtype))
    return table, fill(ops, table, num_slots, [random_factors(shape, seed + slot) for slot in range(num_slots - 1)])


def filled_experts(
    ops: OverTensors, shape: FactorShape, num_experts: int, num_slots: int, dtype: Any, seed: int
) -> tuple[Any, Any]:
    """Likewise a table of experts, of which some have no factors, and some projections that share an A."""
    table = ops.module.experts_adapter_table(shape, num_experts, num_slots, dtype_name(dtype))
    generator = np.random.default_rng(seed)

    def of_expert(number: int) -> Factors:
        if number % 3 or len(shape.widths) == 1:
            return random_factors(shape, number)
        rank = shape.max_rank * len(shape.widths)
        a = generator.standard_normal((rank, shape.num_in), np.float32)
        bs = (generator.standard_normal((width, rank), np.float32) for width in shape.widths)
        return Factors(tuple(LowRank(a, b) for b in bs))

    adapters = [
        {e: of_expert(seed + slot + e) for e in range(num_experts) if (e + slot) % 4} for slot in range(num_slots - 1)
    ]
    return table, fill(ops, table, num_slots, adapters)


def fill(ops: OverTensors, table: Any, num_slots: int, adapters: Sequence[Any]) -> Any:
    """-> the arena that holds them."""
    page_bytes, shape = table.least_page_bytes(), table.shape
    packed = [table.pack(factors, page_bytes) for factors in adapters]
    arena = np.zeros(sum(piece.nbytes + 128 for one in packed for piece in one.pieces) + 64, np.uint8)
    end, places = 0, []
    for one in packed:
        assert max(piece.nbytes for piece in one.pieces) <= page_bytes
        if not shape.replaceable and isinstance(adapters[0], Factors):
            assert sum(piece.nbytes for piece in one.pieces) <= sum(table.largest(page_bytes))
        places.append([])
        for piece in one.pieces:
            arena[end : end + piece.nbytes] = piece
            places[-1].append(end)
            end += -(-piece.nbytes // 64) * 64 + 64
    there = ops.arena(arena)
    for slot, one in enumerate(packed):
        table.put(slot, one, there, places[slot])
    return there
