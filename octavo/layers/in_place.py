"""Operations that change an array in place, made of those that backends have."""

from __future__ import annotations

from octavo.ops import Array, Ops


def scale_in_place(ops: Ops, x: Array, scale: float) -> None:
    """Multiply x by a factor."""
    if scale != 1.0:
        ops.add(x, x, scale - 1.0)
