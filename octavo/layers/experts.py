"""Mixtures of experts (Shazeer et al. 2017): a router chooses, for each token, the few feed-forwards that see it.
Shared experts, which see every token, stand beside them.

Checkpoints have experts one by one, or stacked in tensors; `EXPERT_NAMES` lists the usual names. A layer uses the names
that it finds in the checkpoint. Matrices are read and packed expert by expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from octavo.errors import ConfigError, LoadError
from octavo.layers.feed_forward import FeedForward, FeedForwardDescription
from octavo.layers.norm import Norm, NormDescription
from octavo.layers.parameters import Module, NamedMatrix, Parameters, StackedModule
from octavo.layers.tensor_parallel import WHOLE, Shard
from octavo.loading.weights import Weights
from octavo.ops import ACTIVATIONS, Array, ExpertsWeight, LinearWeight, Ops, ParallelOps, Routing
from octavo.quantization import StoredWeight


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of the tensors of a layer's experts, without the layer's prefix.

    `gate_up` has two names (gate and up), or one name of a tensor with both, or one name of up if there are no gates. A
    name with "{}" is the matrix of the expert of that number; other tensors hold all experts, [experts, N, K]."""

    gate_up: tuple[str, ...]
    down: str
    is_transposed: bool = False  # matrices are stored [inputs, outputs]
    is_down_transposed: bool = False
    is_interleaved: bool = False  # gate and up of one tensor alternate
    is_flat: bool = False  # tensors of all experts are [experts * N, K]
    confuses_peft: bool = False  # tensors are [experts, K, N], but PEFT takes their inputs for outputs


def one_by_one(gate: str, up: str, down: str) -> ExpertNames:
    return ExpertNames((f"{gate}.weight", f"{up}.weight"), f"{down}.weight")


def stacked(
    gate_up: str, down: str, *, is_transposed: bool = False, is_interleaved: bool = False, confuses_peft: bool = False
) -> ExpertNames:
    return ExpertNames(
        (gate_up,), down, is_transposed, is_transposed, is_interleaved, confuses_peft=confuses_peft
    )  # fmt: skip


# Names in most checkpoints; names of transformers 5 in memory; names of GGUF files.
EXPERT_NAMES = (
    one_by_one("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj"),
    stacked("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    one_by_one("mlp.experts.gate_proj", "mlp.experts.up_proj", "mlp.experts.down_proj"),
)


@dataclass(frozen=True, slots=True)
class PartNorms:
    """The norms before and after the shared expert, and before and after the other experts: names of modules, without
    the layer's prefix.

    Each norm before experts reads the layer's input. The router's input is the layer's input under a norm without
    weights, times the tensor `router_scale` [H], divided by the square root of H."""

    norm: NormDescription
    before_shared: str
    after_shared: str
    before: str
    after: str
    router_scale: str


@dataclass(frozen=True, slots=True)
class ExpertsDescription:
    """The description of a layer of experts. Names are those of the checkpoint's modules, without the layer's prefix;
    of several names the first that the checkpoint has is used.

    `shared` is the expert that sees every token. Its output is multiplied by `shared_scale`, or, with
    `shared_gate_name`, by the sigmoid of one more product.
    """

    num_experts: int
    intermediate_size: int
    routing: Routing
    activation: str = "silu"
    gated: bool = True
    clamp: tuple[float, float] | None = None  # the clamped activation of gpt-oss; see `Ops.experts`
    scales_inputs: bool = False  # weights multiply the experts' inputs
    bias: bool = False
    shared: FeedForwardDescription | None = None
    shared_scale: float = 1.0
    router_names: tuple[str, ...] = ("mlp.gate",)
    router_bias: bool = False
    correction_names: tuple[str, ...] = ()  # names of the bias for the choice; empty: no bias
    correction_is_row: bool = False  # the bias is stored as a matrix of one row
    needs_correction: bool = True  # a checkpoint without the bias is refused
    names: tuple[ExpertNames, ...] = EXPERT_NAMES
    shared_gate_name: str | None = None
    weight_scales: str | None = None  # tensor [experts]: factors of the routing weights of chosen experts
    num_identities: int = 0  # number of experts after the others that return their input
    part_norms: PartNorms | None = None  # None: router and experts read the same normed input
    shard: Shard = WHOLE  # this worker's experts (whole ones) and inner elements of the shared expert

    def __post_init__(self) -> None:
        if self.clamp is None and self.activation not in ACTIVATIONS:
            raise LoadError(f"activation {self.activation!r} of experts is not built; {', '.join(ACTIVATIONS)} are.")
        top_k, routing = self.routing.top_k, self.routing
        if routing.scoring == "sparsemixer" and top_k != 2:
            raise LoadError(f"{top_k} experts by sparsemixer are not built; it chooses 2.")
        available = self.num_choices // max(1, routing.num_groups) * routing.kept_groups
        if not 0 < top_k <= available or self.num_choices % routing.num_groups:
            raise LoadError(
                f"{top_k} of {self.num_choices} experts, out of {routing.kept_groups} of {routing.num_groups} groups, "
                "cannot be chosen."
            )

    @property
    def num_choices(self) -> int:
        """Return the number of experts that the router chooses from."""
        return self.num_experts + self.num_identities

    @property
    def own(self) -> range:
        """Return this worker's experts; workers' numbers differ by one at most. Raises `ConfigError` if a worker would
        have none."""
        rank, size = self.shard.rank, self.shard.size
        if size > self.num_experts:
            raise ConfigError(f"--tensor-parallel-size {size} is more than the {self.num_experts} experts.")
        return range(rank * self.num_experts // size, (rank + 1) * self.num_experts // size)

    def build(self, hidden_size: int, parameters: Parameters, prefix: str) -> Experts:
        return Experts(self, hidden_size, parameters, prefix)


@dataclass(frozen=True, slots=True)
class _Sum:
    """A summand: the sum of a layer's experts, [T, H] float32."""

    ops: Ops
    sum: Array

    def value(self, dtype: str = "float32") -> Array:
        assert dtype == "float32"
        return self.sum

    def add_to(self, residual: Array, scale: float = 1.0) -> None:
        self.ops.add(residual, self.sum, scale)


class Experts:
    consumer: LinearWeight | None = None  # the router reads floats, so the norm before does not quantize

    def __init__(self, description: ExpertsDescription, hidden_size: int, parameters: Parameters, prefix: str) -> None:
        self.description, self._ops = description, parameters.ops
        weights, num = parameters.weights, description.num_choices
        router = _first(weights, prefix, description.router_names, ".weight")
        # The choice depends on small differences, so a router stays in floats if matrices are quantized at load.
        bias = weights.take(f"{router}.bias", (num,)) if description.router_bias else None
        self._router = parameters.packed(weights.take(f"{router}.weight", (num, hidden_size)), bias)
        own_bias = None if bias is None else np.asarray(bias, np.float32)
        aliases = tuple(f"{prefix}{name}" for name in (*description.router_names, "mlp.gate"))
        of_router = Module(router, num, None, None, own_bias, aliases=aliases)
        parameters.matrices.append(NamedMatrix(self._router, hidden_size, False, (of_router,)))
        self._correction: Array | None = None
        if description.correction_names:
            name = _first(weights, prefix, description.correction_names)
        if description.correction_names and (description.needs_correction or name in weights):
            shape = (1, num) if description.correction_is_row else (num,)
            self._correction = self._ops.place(weights.take(name, shape, "float32").reshape(num))
        self._gate_up, self._down = _stacks(description, hidden_size, parameters, prefix)
        self._weight_scales: Array | None = None
        if description.weight_scales is not None:
            name = f"{prefix}{description.weight_scales}"
            self._weight_scales = self._ops.place(weights.take(name, (num,), "float32"))
        self._parts = None
        if description.part_norms is not None:
            self._parts = _Parts(description.part_norms, hidden_size, parameters, prefix)
        self._shared: FeedForward | None = None
        self._gated_shared: _GatedExpert | None = None
        if description.shared_gate_name is not None:
            self._gated_shared = _GatedExpert(description, hidden_size, parameters, prefix)
        elif description.shared is not None:
            self._shared = FeedForward(description.shared, hidden_size, parameters, prefix)

    def forward(self, hidden: Array) -> _Sum:
        ops, parts = self._ops, self._parts
        if parts is not None:
            assert self._shared is not None
            chosen = self._chosen(parts.before.forward(hidden), parts.routed(hidden))
            out = parts.after.forward(chosen)
            shared = self._shared.forward(parts.before_shared.forward(hidden, self._shared.consumer))
            ops.add(out, parts.after_shared.forward(shared.value()))
            return _Sum(ops, out)
        out = self._chosen(hidden, hidden, None if self._gated_shared is None else self._gated_shared.forward(hidden))
        if self._shared is not None:
            self._shared.forward(hidden).add_to(out, self.description.shared_scale)
        return _Sum(ops, out)

    def _chosen(self, hidden: Array, routed: Array, beside: Array | None = None) -> Array:
        """Return the sum [T, H] float32 of the chosen experts' outputs for `hidden`, over all workers.

        `routed` [T, H] is the router's input. `beside` [T, H] is a part of the sum that each worker adds to its own."""
        ops, description = self._ops, self.description
        logits = ops.linear(routed, self._router, "float32")
        ids, weights = ops.route(logits, description.routing, self._correction, self._weight_scales)
        out = ops.experts(
            hidden, ids, weights, self._gate_up, self._down, description.activation, description.clamp,
            description.scales_inputs, description.own.start, description.shard.own_summands,
        )  # fmt: skip
        if beside is not None:
            ops.add(out, beside)
        if not description.shard.is_whole:
            cast(ParallelOps, ops).all_reduce(out)
        if description.num_identities:
            ops.add_chosen(out, hidden, ids, weights, description.num_experts)
        return out


class _Parts:
    """The norms of `PartNorms`."""

    def __init__(self, description: PartNorms, hidden_size: int, parameters: Parameters, prefix: str) -> None:
        def norm(name: str) -> Norm:
            return Norm(description.norm, parameters, f"{prefix}{name}", hidden_size)

        self.before_shared, self.after_shared = norm(description.before_shared), norm(description.after_shared)
        self.before, self.after = norm(description.before), norm(description.after)
        self._ops, self._eps = parameters.ops, description.norm.eps
        scale = parameters.weights.take(f"{prefix}{description.router_scale}", (hidden_size,), "float32")
        self._router_scale = self._ops.place(scale * np.float32(hidden_size**-0.5))

    def routed(self, hidden: Array) -> Array:
        """Return the router's input for hidden [T, H]."""
        return self._ops.rms_norm(hidden, self._router_scale, self._eps)


class _GatedExpert:
    """A shared expert whose output is weighted by a sigmoid. It is computed as a mixture of one expert."""

    _ROUTING = Routing(1, "sigmoid", normalize=False)

    def __init__(self, description: ExpertsDescription, hidden_size: int, parameters: Parameters, prefix: str) -> None:
        shared = description.shared
        assert shared is not None and shared.gated and not shared.bias
        self._ops, self._activation, size = parameters.ops, shared.activation, shared.intermediate_size
        shard = description.shard
        own = shard.of(size, "inner elements of a shared expert")
        self._gate = parameters.linear([f"{prefix}{description.shared_gate_name}"], [1], hidden_size)
        up = parameters.linear(
            [f"{prefix}{name}" for name in shared.up_names], (size, size), hidden_size, gated=True,
            own=own,
        )  # fmt: skip
        down = parameters.ending(f"{prefix}{shared.down_name}", hidden_size, len(own), False, shard).weight
        self._up, self._down = self._ops.stack_experts([up], 1), self._ops.stack_experts([down], 1)
        of_up, of_down = parameters.matrices[-2:]
        parameters.matrices[-2:] = [
            replace(of_up, weight=self._up, expert=0), replace(of_down, weight=self._down, expert=0)
        ]  # fmt: skip

    def forward(self, hidden: Array) -> Array:
        ids, weights = self._ops.route(self._ops.linear(hidden, self._gate, "float32"), self._ROUTING)
        return self._ops.experts(hidden, ids, weights, self._up, self._down, self._activation)


def _first(weights: Weights, prefix: str, names: tuple[str, ...], suffix: str = "") -> str:
    """Return the first name that the checkpoint has; if it has none, the first name, for the error message."""
    found = [f"{prefix}{name}" for name in names]
    return next((name for name in found if f"{name}{suffix}" in weights), found[0])


def _bias_of(name: str) -> str:
    """Return the name of the tensor of biases that belongs to a tensor of all experts' matrices."""
    return f"{name.removesuffix('weight')}bias" if name.endswith(".weight") else f"{name}_bias"


def _stacks(
    description: ExpertsDescription, hidden_size: int, parameters: Parameters, prefix: str
) -> tuple[ExpertsWeight, ExpertsWeight]:
    weights, ops, num, size = parameters.weights, parameters.ops, description.num_experts, description.intermediate_size
    own = description.own
    known = (*description.names, EXPERT_NAMES[2])  # GGUF files name experts alike in all architectures
    names = next((n for n in known if f"{prefix}{n.down.format(0)}" in weights), known[0])
    gate_up_bias = down_bias = None
    if description.bias:
        assert description.gated
        gate_up_bias = np.concatenate(
            [weights.take(f"{prefix}{_bias_of(n)}", (num, 2 * size // len(names.gate_up))) for n in names.gate_up], 1
        )
        down_bias = weights.take(f"{prefix}{_bias_of(names.down)}", (num, hidden_size))
        if names.is_interleaved:
            gate_up_bias = np.concatenate([gate_up_bias[:, ::2], gate_up_bias[:, 1::2]], 1)

    def matrix(name: str, expert: int, rows: int, columns: int, is_transposed: bool) -> StoredWeight:
        """Return the matrix [rows, columns] of an expert; only this expert's part of the tensor is read."""
        untransposed_shape = None if rows == columns else (num, rows, columns)  # transformers 5 may have saved this
        is_transposed = is_transposed and not weights.is_untransposed(f"{prefix}{name}", untransposed_shape)
        stored = (columns, rows) if is_transposed else (rows, columns)
        if "{}" in name:
            found = weights.take_matrix(f"{prefix}{name.format(expert)}", stored)
        else:
            shape = (num * stored[0], stored[1]) if names.is_flat else (num, *stored)
            found = weights.take_matrix(f"{prefix}{name}", shape, (expert * stored[0], (expert + 1) * stored[0]))
        return found.transposed() if is_transposed else found

    def gate_up(expert: int) -> list[StoredWeight]:
        if not description.gated:
            return [matrix(names.gate_up[-1], expert, size, hidden_size, names.is_transposed)]
        if len(names.gate_up) == 2:
            return [matrix(name, expert, size, hidden_size, names.is_transposed) for name in names.gate_up]
        both = matrix(names.gate_up[0], expert, 2 * size, hidden_size, names.is_transposed)
        if names.is_interleaved:
            return [both.every_second_row(side) for side in range(2)]
        return [both.rows(0, size), both.rows(size, 2 * size)]

    def gate_ups() -> Iterator[LinearWeight]:
        for e in own:
            bias = None if gate_up_bias is None else gate_up_bias[e]
            yield ops.pack_linear(gate_up(e), bias, description.gated)

    def downs() -> Iterator[LinearWeight]:
        for e in own:
            down = matrix(names.down, e, hidden_size, size, names.is_down_transposed)
            yield ops.pack_linear([down], None if down_bias is None else down_bias[e])

    stacks = ops.stack_experts(gate_ups(), len(own)), ops.stack_experts(downs(), len(own))
    for e in set(range(num)) - set(own):
        for name in (*names.gate_up, names.down):
            if "{}" in name:
                weights.ignore(f"{prefix}{name.format(e)}")
    parameters.num_matrix_bytes += sum(stack.num_bytes for stack in stacks)
    parameters.expert_matrices.append(lambda: _named(description, hidden_size, prefix, known, stacks))
    return stacks


def _named(
    description: ExpertsDescription, hidden_size: int, prefix: str, known: Sequence[ExpertNames],
    stacks: tuple[ExpertsWeight, ExpertsWeight],
) -> Iterator[NamedMatrix]:  # fmt: skip
    """Yield the experts' matrices that adapters may change, with all names in checkpoints, transformers and GGUF
    files."""
    size, own = description.intermediate_size, description.own
    halves = 2 if description.gated else 1
    for half_of_layer, stack in enumerate(stacks):
        for e in range(description.num_experts):
            names: list[list[str]] = [[] for _ in range(1 if half_of_layer else halves)]
            parts: list[dict[str, StackedModule]] = [{} for _ in names]
            for way in (*known, *EXPERT_NAMES):
                tensors = (way.down,) if half_of_layer else way.gate_up[-halves:]
                for i in range(len(names)):
                    fused = len(tensors) < len(names)
                    name = f"{prefix}{tensors[0 if fused else i]}".removesuffix(".weight")
                    rows = slice(None)
                    if fused:
                        rows = slice(i, None, 2) if way.is_interleaved else slice(i * size, (i + 1) * size)
                    if "{}" in name:
                        names[i].append(name.format(e))
                    elif not way.is_flat:
                        parts[i].setdefault(name, StackedModule(name, e, rows, way.confuses_peft))
            rows_of_module, inputs = (hidden_size, size) if half_of_layer else (size, hidden_size)
            modules = tuple(
                Module(own_names[0], rows_of_module, None, None, None, aliases=tuple(own_names[1:]),
                       stacked=tuple(stacked.values()))
                for own_names, stacked in zip(names, parts, strict=True)
            )  # fmt: skip
            is_own = e in own
            yield NamedMatrix(
                stack if is_own else None, inputs, len(modules) == 2, modules,
                expert=e - own.start if is_own else None,
            )  # fmt: skip
