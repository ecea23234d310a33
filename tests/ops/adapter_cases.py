"""Tables of adapters for the kernel tests: random factors, placed in an arena at odd places."""

from __future__ import annotations

from typing import Any

import numpy as np

from octavo.ops import Factors, FactorShape, LowRank, Whole
from tests.ops.tensors import OverTensors, dtype_name


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
    if shape.looked_up:
        return Factors(tuple(projections))
    total = sum(shape.widths)
    scales, bias = (generator.standard_normal(total, np.float32) for _ in range(2))
    has_scales = seed % 3 == 1 and not isinstance(projections[0], Whole)
    return Factors(tuple(projections), scales if has_scales else None, bias if seed % 3 == 2 else None)


def filled_table(ops: OverTensors, shape: FactorShape, num_slots: int, dtype: Any, seed: int) -> Any:
    """A table whose slots all have factors, but for the last, and the arena that these lie in."""
    table = ops.module.adapter_table(shape, num_slots, dtype_name(dtype))
    page_bytes = table.least_page_bytes()
    packed = [table.pack(random_factors(shape, seed + slot), page_bytes) for slot in range(num_slots - 1)]
    arena = np.zeros(sum(piece.nbytes + 128 for one in packed for piece in one.pieces) + 64, np.uint8)
    end = 0
    for slot, one in enumerate(packed):
        assert max(piece.nbytes for piece in one.pieces) <= page_bytes
        if not shape.replaceable:
            assert sum(piece.nbytes for piece in one.pieces) <= sum(table.largest(page_bytes))
        places = []
        for piece in one.pieces:
            arena[end : end + piece.nbytes] = piece
            places.append(end)
            end += -(-piece.nbytes // 64) * 64 + 64
        table.put(slot, one, ops.arena(arena), places)
    return table, arena
