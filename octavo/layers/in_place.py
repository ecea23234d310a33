"""Operations that change an array in place, composed of the backends' operations."""

from octavo.ops import Array, Ops


def scale_in_place(ops: Ops, x: Array, scale: float) -> None:
    """Multiply x, of any shape, by a factor. A factor of 1 costs nothing."""
    if scale != 1.0:
        ops.add(x, x, scale - 1.0)
