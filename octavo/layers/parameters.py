"""`Parameters`: the way of weights from a checkpoint to a backend.

Layers name the tensors that they need and their purpose. This module reads and packs them while the model is built,
layer by layer, so that a checkpoint is never in memory twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ConfigError, LoadError
from octavo.layers.product import EndingMatrix
from octavo.layers.rotary import AttentionTemperature, RopeConfig, distance_buckets, identity_table, rotary_table
from octavo.layers.tensor_parallel import Shard
from octavo.loading.weights import Weights, floats
from octavo.ops import BIAS_PADDING, Array, ExpertsWeight, LinearWeight, Ops, SegmentOps

if TYPE_CHECKING:
    from octavo.layers.sparse_indexer import SparseIndexer

logger = logging.getLogger(__name__)

_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True)
class StackedModule:
    """The place of a module in a tensor of all experts."""

    name: str  # the tensor's name
    expert: int
    rows: slice  # the module's rows among those of this expert
    is_untransposed: bool = False  # PEFT takes the tensor's inputs for its outputs


@dataclass(frozen=True, slots=True)
class Module:
    """One of the checkpoint's modules in a packed matrix. Its rows are first scaled, then ordered."""

    name: str
    num_stored: int  # rows in the checkpoint
    scales: NDArray[np.float32] | None  # [num_stored] factors of the rows
    order: NDArray[np.intp] | None  # [num_out] the rows that are packed, in this order; None: all rows
    bias: NDArray[np.float32] | None  # [num_out] in the packed order
    is_transposed: bool = False  # the module is stored [inputs, outputs]
    aliases: tuple[str, ...] = ()  # other names that adapters may use for the module
    stacked: tuple[StackedModule, ...] = ()  # tensors of all experts in which adapters may have the module

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @property
    def all_names(self) -> tuple[str, ...]:
        """Return the module's names, and the names of tensors that it is a part of."""
        return (*self.names, *(part.name for part in self.stacked))

    @property
    def num_out(self) -> int:
        """Return the number of the module's rows in the packed matrix."""
        return self.num_stored if self.order is None else len(self.order)


@dataclass(frozen=True, slots=True)
class NamedMatrix:
    """A packed matrix, and the modules whose outputs lie side by side in it."""

    weight: LinearWeight | ExpertsWeight | None  # None: it is another worker's
    num_in: int
    gated: bool
    modules: tuple[Module, ...]
    first_in: int = 0  # the first input of this matrix among the inputs of the checkpoint's modules
    stored_in: int | None = None  # number of inputs of the checkpoint's modules; None: `num_in`
    replaceable: bool = False  # adapters may replace the matrix, if it is a single module
    is_embedding: bool = False  # rows are looked up by token; there is no product
    expert: int | None = None  # index in the stack of experts, if `weight` is a stack

    @property
    def all_in(self) -> int:
        """Return the number of inputs of the checkpoint's modules."""
        return self.num_in if self.stored_in is None else self.stored_in

    @property
    def columns(self) -> slice:
        """Return this matrix's inputs among those of the checkpoint's modules."""
        return slice(self.first_in, self.first_in + self.num_in)


class Parameters:
    """Takes the weights of one model, which computes in `dtype` on one backend, for positions below `max_positions`."""

    def __init__(self, weights: Weights, ops: Ops, max_positions: int, dtype: str) -> None:
        self.weights, self.ops, self.max_positions, self.dtype = weights, ops, max_positions, dtype
        self.num_matrix_bytes = 0  # bytes of all packed matrices
        self.matrices: list[NamedMatrix] = []  # the matrices that `linear` has packed
        # Functions that name the matrices of each layer's experts. They are called only on demand: there are many.
        self.expert_matrices: list[Callable[[], Iterator[NamedMatrix]]] = []
        self._made: dict[object, object] = {}  # key of `once` -> the object that layers share
        self.index: SparseIndexer | None = None  # of the last layer with an index; later layers may share its choice
        self._has_warned = False
        self._sixteen_bit_inputs = False

    @contextmanager
    def sixteen_bit_inputs(self, wanted: bool) -> Iterator[None]:
        """Inside this context, if `wanted`, `linear` makes matrices whose inputs are quantized to 16 bits instead of 8,
        on backends that quantize inputs. Gate and up are left out: they are half of a layer and gain least."""
        self._sixteen_bit_inputs = wanted
        yield
        self._sixteen_bit_inputs = False

    def array(self, name: str, shape: tuple[int, ...]) -> Array:
        """Return a constant in the model's type, such as a norm or a table."""
        return self.ops.place(self.weights.take(name, shape))

    def linear(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        num_in: int,
        bias: bool | str | NDArray[Any] = False,
        gated: bool = False,
        *,
        orders: Sequence[NDArray[np.intp]] | None = None,
        is_transposed: bool = False,
        is_reversed: bool = False,
        scales: Sequence[float] = (),
        part: tuple[int, int] = (0, 1),
        columns: tuple[int, int] | None = None,
        own: range | Sequence[range] | None = None,
        without_bias: Collection[str] = (),
        is_embedding: bool = False,
    ) -> LinearWeight:
        """Return projections of one input of `num_in` elements to `sizes` outputs as one packed matrix.

        Outputs are side by side, or gate and up if `gated`.
        - `names`: the checkpoint's modules, one for each projection, or one module that has all of them stacked. GGUF
          files may have the parts of a stacked module as NAME.0, NAME.1 and so on.
        - `bias`: whether there is one, the name of its tensor, or the biases themselves. Modules in `without_bias` have
          none although others have one.
        - `orders`: for each module, the rows to take, in order (columns, if the module `is_transposed`).
        - `is_reversed`: a stacked module has up before gate.
        - `scales`: factors of the projections and their biases.
        - `part`: (number, count) if the input is one of `count` equal parts of the modules' input.
        - `columns`: (first, count) if the input is `num_in` of the modules' `count` inputs, from `first` on.
        - `own`: the rows to take of each projection: one range for all, or a range for each.
        - `is_embedding`: rows are looked up by token and never multiplied.
        """
        stored_sizes = sizes if len(names) == len(sizes) else [sum(sizes)]
        if orders is not None and all(map(np.array_equal, orders, map(np.arange, stored_sizes))):
            orders = None
        in_parts = len(names) < len(sizes) and f"{names[0]}.weight" not in self.weights
        if in_parts and f"{names[0]}.0.weight" in self.weights:
            names, stored_sizes = [f"{names[0]}.{number}" for number in range(len(sizes))], sizes
        owns = [own] * len(sizes) if isinstance(own, range) else own
        if owns is not None and all(rows == range(size) for rows, size in zip(owns, sizes, strict=True)):
            owns = None
        parts, held = [], list[NDArray[np.intp]]()
        first_in, all_in = (part[0] * num_in, num_in * part[1]) if columns is None else columns
        own_in = None if num_in == all_in else (first_in, first_in + num_in)
        for name, size in zip(names, stored_sizes, strict=True):
            is_cut = (gated or owns is not None) and len(names) != len(sizes)
            shares = list(pairwise(accumulate(sizes, initial=0) if is_cut else (0, size)))
            if owns is not None:
                of_name = owns if is_cut else [owns[len(held)]]
                shares = [(first + o.start, first + o.stop) for (first, _), o in zip(shares, of_name, strict=True)]
            held.append(np.concatenate([np.arange(*shard) for shard in (reversed(shares) if is_reversed else shares)]))
            shape = (all_in, size) if is_transposed else (size, all_in)
            wanted = None if orders is None else orders[len(held) - 1]
            for shard in shares:
                parts.append(
                    self.weights.take_matrix(
                        f"{name}.weight", shape, shard if wanted is None else None, own_in,
                        is_transposed=is_transposed, order=wanted,
                    )
                )  # fmt: skip
        if is_reversed:
            assert gated and bias is False and len(names) == 1
            parts.reverse()
        assert orders is None or not any(scale != 1.0 for scale in scales)
        if any(scale != 1.0 for scale in scales):
            if len(parts) != len(sizes):
                parts = [parts[0].rows(*shard) for shard in pairwise(accumulate(sizes, initial=0))]
            parts = [part.scaled(scale) for part, scale in zip(parts, scales, strict=True)]
        row_scales: list[NDArray[np.float32] | None] = [None] * len(names)
        if any(scale != 1.0 for scale in scales):
            rows = [np.full(size, scale, np.float32) for size, scale in zip(sizes, scales, strict=True)]
            row_scales = [*rows] if len(names) == len(sizes) else [np.concatenate(rows)]
        biases: NDArray[Any] | None = None
        own_biases: list[NDArray[np.float32] | None] = [None] * len(names)
        if isinstance(bias, np.ndarray) or bias:
            if isinstance(bias, np.ndarray):
                taken = [*np.split(bias, np.cumsum(stored_sizes)[:-1])]
            else:
                bias_names = [bias] if isinstance(bias, str) else [f"{name}.bias" for name in names]
                taken = [
                    np.zeros(size, self.dtype) if name in without_bias else self.weights.take(n, (size,))
                    for name, n, size in zip(names, bias_names, stored_sizes, strict=True)
                ]
            scaled = zip(taken, row_scales, strict=True)
            taken = [part if s is None else (part.astype(np.float32) * s).astype(part.dtype) for part, s in scaled]
            if owns is not None or orders is not None:
                taken = [part[order] for part, order in zip(taken, orders or held, strict=True)]
            biases = np.concatenate(taken)
            own_biases = [np.asarray(part, np.float32) for part in taken]
        packed = self.ops.pack_linear(parts, biases, gated, is_embedding, self._sixteen_bit_inputs and not gated)
        self.num_matrix_bytes += packed.num_bytes
        own_orders = [None] * len(names) if orders is None else orders
        if orders is None and (owns is not None or is_reversed):
            own_orders = held
        what = zip(names, stored_sizes, row_scales, own_orders, own_biases, strict=True)
        self.matrices.append(
            NamedMatrix(
                packed, num_in, gated, tuple(Module(*module, is_transposed) for module in what), first_in, all_in
            )
        )
        return packed

    def packed(self, matrix: NDArray[Any], bias: NDArray[Any] | None = None) -> LinearWeight:
        """Return a packed matrix [N, K] of floats, which is never quantized at load. Adapters cannot change it."""
        weight = self.ops.pack_linear([floats(matrix)], bias)
        self.num_matrix_bytes += weight.num_bytes
        return weight

    def mean_of(self, size: int) -> LinearWeight:
        """Return the matrix [1, size] whose product is the mean of a row."""
        return self.once(("mean", size), lambda: self.packed(np.full((1, size), 1 / size, self.dtype)))

    def ending(
        self, name: str, num_out: int, num_in: int, bias: bool | str, shard: Shard, *, is_transposed: bool = False
    ) -> EndingMatrix:
        """Return the matrix that ends a layer, with this worker's `num_in` inputs.

        Raises `ConfigError` if its products must have the same bits for any number of workers and cannot."""
        weight = self.linear(
            [name], [num_out], num_in, bias if shard.is_whole else False, is_transposed=is_transposed,
            part=(shard.rank, shard.size),
        )  # fmt: skip
        if shard.summands > 1:
            self._sum_by_segments(name, weight, shard)
        if shard.is_whole or not bias:
            return EndingMatrix(self.ops, weight, shard=shard)
        taken = np.asarray(self.weights.take(bias if isinstance(bias, str) else f"{name}.bias", (num_out,)), np.float32)
        whole = self.matrices[-1]
        self.matrices[-1] = replace(whole, modules=(replace(whole.modules[0], bias=taken),))
        return EndingMatrix(self.ops, weight, self.ops.place(taken), shard)

    def _sum_by_segments(self, name: str, weight: LinearWeight, shard: Shard) -> None:
        """Make products with `weight` sums of segments. Warn, or raise `ConfigError` if the shard `must_agree`, if this
        worker's inputs do not end with a block of weights."""
        block = cast(SegmentOps, self.ops).sum_by_segments(weight, shard.own_summands)
        if shard.is_whole or weight.in_features % block == 0:
            return
        reason = f"the {weight.in_features} inputs of {name} that each worker has do not end with a block of {block}"
        if shard.must_agree:
            raise ConfigError(f"--reproducible-parallel with --tensor-parallel-size {shard.size}: {reason}.")
        if not self._has_warned:
            logger.warning("answers of another --tensor-parallel-size can have other bits: %s", reason)
        self._has_warned = True

    def rotary(self, rope: RopeConfig | None, head_size: int) -> Array:
        """Return the table of cosines and sines; without `rope`, the table that rotates nothing."""
        if rope is None:
            return self._table(("identity",), lambda: identity_table(self.max_positions))
        if not 0 <= rope.rotary_dim <= head_size:
            raise LoadError(f"{rope.rotary_dim} rotated elements do not fit into heads of {head_size}.")
        key = rope, head_size
        if key not in self._made:
            self.weights.position_bytes += rotary_table(rope, 1).nbytes
        return self._table(key, lambda: rotary_table(rope, self.max_positions))

    def attention_temperature(self, settings: AttentionTemperature | None) -> Array | None:
        """Return the multipliers of queries by position, [max_positions] float32."""
        return None if settings is None else self._table((settings,), lambda: settings.table(self.max_positions))

    def distance_biases(self, name: str, num_buckets: int, num_heads: int, own: range) -> Array:
        """Return the biases of scores by distance for this worker's `own` heads: [own, 2 * max_positions +
        BIAS_PADDING] float32."""

        def make() -> NDArray[np.float32]:
            buckets = self.weights.take(name, (num_buckets, num_heads))[:, own].astype(np.float32)
            distances = np.arange(2 * self.max_positions + BIAS_PADDING) - self.max_positions
            return np.ascontiguousarray(buckets[distance_buckets(distances, num_buckets)].T)

        return self._table((name,), make)

    def _table(self, key: tuple[object, ...], make: Callable[[], NDArray[np.float32]]) -> Array:
        try:
            return self.once(key, lambda: self.ops.place(make()))
        except MemoryError:
            raise LoadError(
                f"a table of {self.max_positions} positions does not fit into the memory; lower --max-model-len."
            ) from None

    def once(self, key: object, make: Callable[[], _Made]) -> _Made:
        """Return the object that layers with the same `key` share; `make` makes it for the first of them."""
        if key not in self._made:
            self._made[key] = make()
        else:
            self.weights.read_again(make)
        return cast(_Made, self._made[key])
