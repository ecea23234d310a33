"""A backend's operations that also apply adapters.

Models are built with these operations in place of the backend's, and know nothing about adapters. A product with a
matrix that has a table of factors also adds the adapters' part. All other operations are the backend's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from octavo.ops import (
    AdapterOps,
    AdapterTable,
    Array,
    Expand,
    ExpandExperts,
    ExpertsAdapterTable,
    ExpertsWeight,
    LinearWeight,
    Lookup,
    Ops,
)


class AdaptedOps:
    """`Ops` whose products apply the adapter of each row."""

    def __init__(self, ops: AdapterOps) -> None:
        self.backend = self._ops = ops
        self._tables: dict[int, AdapterTable] = {}  # by id() of the matrix, which `_matrices` keeps alive
        self._lookups: dict[int, AdapterTable] = {}  # by id() too
        self._stacks: dict[int, ExpertsAdapterTable] = {}  # by id() too
        self._matrices: list[LinearWeight | ExpertsWeight] = []
        self._slots: Any = None  # the result of `AdapterOps.rows_by_adapter`

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def as_ops(self) -> Ops:
        return cast(Ops, self)

    @contextmanager
    def taking(self, slots: Array) -> Iterator[None]:
        """Apply adapters within the `with` block: each row takes the adapter in its slot, or none for slot -1.

        `slots` is int32, [T] for the step's tokens or [N] while logits are computed. Outside the block no adapters are
        applied, because draft heads use the model's matrices without adapters.
        """
        self._slots = self._ops.rows_by_adapter(slots)
        try:
            yield
        finally:
            self._slots = None

    def adapt(self, weight: LinearWeight, table: AdapterTable) -> None:
        """Let products with `weight` add the adapters in the table."""
        self._matrices.append(weight)
        self._tables[id(weight)] = table

    def adapt_lookup(self, weight: LinearWeight, table: AdapterTable) -> None:
        """Let rows that are looked up in `weight` include the adapters in the table."""
        self._matrices.append(weight)
        self._lookups[id(weight)] = table

    def adapt_experts(self, stack: ExpertsWeight, table: ExpertsAdapterTable) -> None:
        """Let products with the experts of `stack` add the adapters in the table."""
        self._matrices.append(stack)
        self._stacks[id(stack)] = table

    def experts(
        self, x: Array, ids: Array, weights: Array, gate_up: ExpertsWeight, down: ExpertsWeight,
        activation: str = "silu", clamp: tuple[float, float] | None = None, scales_inputs: bool = False,
        first_expert: int = 0, segments: int = 1,
    ) -> Array:  # fmt: skip
        tables = self._stacks.get(id(gate_up)), self._stacks.get(id(down))
        expand = None
        if self._slots is not None and tables != (None, None):
            expand = ExpandExperts(self._slots, *tables)
        return self._ops.experts(
            x, ids, weights, gate_up, down, activation, clamp, scales_inputs, first_expert, segments, expand
        )

    def embedding(
        self, token_ids: Array, weight: LinearWeight, out_dtype: str | None = None, scale: float = 1.0
    ) -> Array:
        table = self._lookups.get(id(weight))
        adapted = None if table is None or self._slots is None else Lookup(table, self._slots)
        return self._ops.embedding(token_ids, weight, out_dtype, scale, adapted)

    def linear(self, x: Array, weight: LinearWeight, out_dtype: str | None = None) -> Array:
        return self._ops.linear(x, weight, out_dtype, self._expand(x, weight))

    def linear_add(self, x: Array, weight: LinearWeight, residual: Array, scale: float = 1.0) -> None:
        self._ops.linear_add(x, weight, residual, scale, self._expand(x, weight))

    def linear_silu_and_mul(
        self, x: Array, gate_up: LinearWeight, consumer: LinearWeight | None = None, out_dtype: str | None = None,
        activation: str = "silu",
    ) -> Array:  # fmt: skip
        return self._ops.linear_silu_and_mul(x, gate_up, consumer, out_dtype, activation, self._expand(x, gate_up))

    def linear_activated(
        self, x: Array, weight: LinearWeight, activation: str, consumer: LinearWeight | None = None,
        out_dtype: str | None = None,
    ) -> Array:  # fmt: skip
        return self._ops.linear_activated(x, weight, activation, consumer, out_dtype, self._expand(x, weight))

    def _expand(self, x: Array, weight: LinearWeight) -> Expand | None:
        table = self._tables.get(id(weight))
        if table is None or self._slots is None:
            return None
        return Expand(table, self._slots, self._ops.shrink(x, table, self._slots, weight))
