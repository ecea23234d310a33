"""Mixtures of experts in the native backend: routing, stacks of packed matrices, and their products.

A stack is a list of packed matrices and an array of their addresses: the memory of an expert that no token chooses is
never read. The tokens of each expert are found when the step runs (csrc/cpu/experts.h).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

import octavo._cpu as _cpu
from octavo.errors import ConfigError
from octavo.ops import ExpandExperts, ExpertsWeight, LinearWeight, Routing
from octavo.ops.cpu_adapters import experts_arguments
from octavo.ops.cpu_arrays import FLOAT32, INT32, UINT8, code_of, is_dense, require, stride
from octavo.ops.cpu_pack import PackedWeight
from octavo.ops.cpu_program import check_inputs, empty
from octavo.ops.cpu_quantize import quantize


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """A stack of experts. `matrices` are the same matrices as `weights`, in the form that the kernels take."""

    weights: tuple[PackedWeight, ...]
    matrices: _cpu.Matrices = field(repr=False)

    @property
    def num_experts(self) -> int:
        return len(self.weights)

    @property
    def out_features(self) -> int:
        return self.weights[0].out_features

    @property
    def in_features(self) -> int:
        return self.weights[0].in_features

    @property
    def num_bytes(self) -> int:
        return sum(weight.num_bytes for weight in self.weights)


def stack_experts(experts: Iterable[LinearWeight], num_experts: int) -> PackedExperts:
    """`Ops.stack_experts`. Raises `ConfigError` for more experts than a router may have."""
    if num_experts > _cpu.MAX_EXPERTS:
        raise ConfigError(f"{num_experts} experts in a layer are not built for CPUs; up to {_cpu.MAX_EXPERTS} are.")
    weights = []
    for weight in experts:
        assert isinstance(weight, PackedWeight)
        weights.append(weight)
    require(len(weights) == num_experts)
    alike = {(w.out_features, w.in_features, w.gated) for w in weights}
    require(len(alike) == 1, f"experts of {alike}")
    if any(weight.order is not None for weight in weights):
        raise ConfigError("experts that were quantized in the order of activations (desc_act) are not built.")
    if len({(weight.format, weight.data.nbytes) for weight in weights}) > 1:
        raise ConfigError("experts of one layer that are quantized differently are not built.")
    return PackedExperts(tuple(weights), _cpu.Matrices([weight.matrix for weight in weights]))


def route(
    logits: NDArray[Any], routing: Routing, bias: NDArray[Any] | None = None, scales: NDArray[Any] | None = None
) -> tuple[NDArray[Any], NDArray[Any]]:
    num_tokens, num_experts = logits.shape
    require(logits.dtype == FLOAT32 and is_dense(logits))
    for added in (bias, scales):
        require(added is None or (added.shape == (num_experts,) and added.dtype == FLOAT32))
    require(num_experts <= _cpu.MAX_EXPERTS and num_experts % routing.num_groups == 0)
    require(routing.top_k <= num_experts // routing.num_groups * routing.kept_groups)
    check_inputs("route", logits=logits)
    ids, weights = empty((num_tokens, routing.top_k), INT32), empty((num_tokens, routing.top_k), FLOAT32)
    _cpu.route(
        logits=logits, stride=stride(logits), rows=num_tokens, bias=bias, scales=scales, ids=ids,
        weights=weights, num_experts=num_experts, top_k=routing.top_k, scoring=_cpu.SCORINGS[routing.scoring],
        bias_logits=routing.bias_logits, num_groups=routing.num_groups, kept_groups=routing.kept_groups,
        group_by_two=routing.group_by_two, normalize=routing.normalize, scale=routing.scale,
        softcap=routing.softcap, jitter=routing.jitter,
    )  # fmt: skip
    return ids, weights


def experts(
    x: NDArray[Any], ids: NDArray[Any], weights: NDArray[Any], gate_up: ExpertsWeight, down: ExpertsWeight,
    activation: str = "silu", clamp: tuple[float, float] | None = None, scales_inputs: bool = False,
    first_expert: int = 0, segments: int = 1, expand: ExpandExperts | None = None,
) -> NDArray[Any]:  # fmt: skip
    assert isinstance(gate_up, PackedExperts) and isinstance(down, PackedExperts)
    first, second = gate_up.weights[0], down.weights[0]
    require(not second.gated and gate_up.num_experts == down.num_experts)
    require(first.out_features == (2 if first.gated else 1) * second.in_features and (first.gated or clamp is None))
    num_tokens, top_k = ids.shape
    require(x.shape[0] == num_tokens and weights.shape == ids.shape and is_dense(x))
    require(ids.dtype == INT32 and weights.dtype == FLOAT32 and ids.flags.c_contiguous and weights.flags.c_contiguous)
    check_inputs("experts", x=x, ids=ids, weights=weights)
    if x.dtype == UINT8:
        require(first.is_quantized and not scales_inputs)
        require(x.shape[1] in (first.row_bytes, 2 * first.row_bytes), "experts: quantized for other matrices")
        code = _cpu.Q8
    else:
        require(x.shape[1] == first.in_features, f"experts: {x.shape[1]} inputs for matrices of {first.in_features}")
        code = code_of("experts", x)
        expected = {_cpu.WEIGHT_F32: _cpu.F32, _cpu.WEIGHT_BF16: _cpu.BF16}.get(first.format, code)
        if code != expected:
            raise TypeError(f"experts: the input is {x.dtype}, not of the type that the matrices are packed as.")
        if first.is_quantized and not scales_inputs:
            x, code = quantize(x, first), _cpu.Q8
    out = empty((num_tokens, second.out_features), FLOAT32)
    kind, slope, limit = (activation, 0.0, 0.0) if clamp is None else ("clamped", *clamp)
    x_stride = stride(x) // _cpu.QBLOCK_BYTES if code == _cpu.Q8 else stride(x)
    _cpu.experts(
        x=x, x_stride=x_stride, x_dtype=code, rows=num_tokens, ids=ids, weights=weights, up=gate_up.matrices,
        down=down.matrices, num_experts=down.num_experts, first_expert=first_expert, out=out, top_k=top_k,
        scale_inputs=scales_inputs, activation=_cpu.ACTIVATIONS[kind], slope=slope, limit=limit, segments=segments,
        **experts_arguments(expand),
    )  # fmt: skip
    return out
