"""Feed-forward layers: an activation between two matrices, or an activated gate times a third matrix's output (Shazeer
2020)."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from octavo.errors import LoadError
from octavo.layers.all_gather import AllGather
from octavo.layers.norm import NormDescription, SharedNorm
from octavo.layers.parameters import Parameters
from octavo.layers.product import Adapters, Summand
from octavo.layers.tensor_parallel import WHOLE, Shard
from octavo.ops import ACTIVATIONS, Array

_LEAST_VARIANCE = 1e-10


@dataclass(frozen=True, slots=True)
class FeedForwardDescription:
    """The description of a feed-forward. Names are those of the checkpoint's modules, without the layer's prefix.
    Raises `LoadError` for an activation that is not built."""

    intermediate_size: int
    activation: str = "silu"
    gated: bool = True
    bias: bool = False
    down_bias: bool | None = None  # None: as `bias`
    gate_multiplier: float = 1.0
    inner_norm: NormDescription | None = None  # norm of the second matrix's input
    up_names: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")  # gate and up; one name if stacked or ungated
    down_name: str = "mlp.down_proj"
    inner_norm_name: str = ""
    up_first: bool = False  # in a stacked matrix, up comes before gate
    xielu: tuple[float, ...] = ()  # alpha_p, alpha_n, beta, eps of "xielu"; empty: read from the checkpoint's tensors
    # Share of gates that become zero: gates below this quantile of a normal distribution (Gemma Team 2025).
    sparsity: float = 0.0
    has_adapters: bool = False  # a reused layer's adapters are added to gate and up
    is_transposed: bool = False  # matrices are stored [inputs, outputs]
    shard: Shard = WHOLE  # this worker's part of the intermediate size

    def __post_init__(self) -> None:
        built = ACTIVATIONS if self.gated else (*ACTIVATIONS, "xielu")
        if self.activation not in built:
            kind = "gated" if self.gated else "ungated"
            raise LoadError(
                f"activation {self.activation!r} in a {kind} feed-forward is not built yet; Octavo has "
                f"{', '.join(built)}."
            )

    @property
    def all_gather_size(self) -> int:
        """Return the number of elements of a row that workers gather."""
        return self.intermediate_size if self.inner_norm is not None or self.sparsity else 0

    def build(self, hidden_size: int, parameters: Parameters, prefix: str) -> FeedForward:
        return FeedForward(self, hidden_size, parameters, prefix)


class FeedForward:
    def __init__(
        self, description: FeedForwardDescription, hidden_size: int, parameters: Parameters, prefix: str
    ) -> None:
        self.description, self._ops, self._dtype = description, parameters.ops, parameters.dtype
        size, transposed, shard = description.intermediate_size, description.is_transposed, description.shard
        own = shard.of(size, "inner elements of a feed-forward")
        names = [f"{prefix}{name}" for name in description.up_names]
        sizes = (size, size) if description.gated else (size,)
        self._sparse = _Cutoff(description.sparsity, size, shard, own, parameters) if description.sparsity else None
        assert self._sparse is None or description.gated
        self._size = len(own)
        is_fused = description.gated and self._sparse is None and not description.has_adapters
        self._up = parameters.linear(
            names, sizes, hidden_size, description.bias, is_fused, is_transposed=transposed,
            is_reversed=description.up_first,
            scales=(description.gate_multiplier, 1.0) if description.gated else (),
            own=own,
        )  # fmt: skip
        self._ending = parameters.ending(
            f"{prefix}{description.down_name}", hidden_size, len(own),
            description.bias if description.down_bias is None else description.down_bias, shard,
            is_transposed=transposed,
        )  # fmt: skip
        self._down = self._ending.weight
        self.consumer = self._up  # the only matrix that reads the layer's input
        self._inner_norm: SharedNorm | None = None
        if description.inner_norm is not None:
            name = f"{prefix}{description.inner_norm_name}"
            self._inner_norm = SharedNorm(description.inner_norm, parameters, name, size, shard, own)
        self._parameters: tuple[float, ...] = ()
        if description.activation == "xielu":
            self._parameters = _xielu_parameters(description.xielu or _taken_xielu(parameters, f"{prefix}mlp.act_fn"))

    def forward(self, hidden: Array, adapters: Adapters | None = None) -> Summand:
        ops, activation = self._ops, self.description.activation
        consumer = self._down if self._inner_norm is None else None
        if self._sparse is not None or adapters is not None:
            both = ops.linear(hidden, self._up, self._dtype)
            if adapters is not None:
                adapters.add_to(both, hidden)
            size = self._size
            gate = both[:, :size] if self._sparse is None else self._sparse.forward(both[:, :size])
            inner = ops.multiply(ops.activation(gate, activation), both[:, size:], consumer=consumer)
        elif self.description.gated:
            inner = ops.linear_silu_and_mul(hidden, self._up, consumer, self._dtype, activation)
        elif self._parameters:
            inner = ops.activation(ops.linear(hidden, self._up, self._dtype), activation, consumer, self._parameters)
        else:
            inner = ops.linear_activated(hidden, self._up, activation, consumer, self._dtype)
        if self._inner_norm is not None:
            inner = self._inner_norm.forward(inner, self._down)
        return self._ending.product(inner)


class _Cutoff:
    """Returns max(x - threshold, 0) for x [T, I]. A row's threshold is the quantile `below` of a normal distribution
    with the row's mean and deviation, over all workers' elements."""

    def __init__(self, below: float, size: int, shard: Shard, own: range, parameters: Parameters) -> None:
        self._ops, self._dtype, self._own = parameters.ops, parameters.dtype, slice(own.start, own.stop)
        self._all_gather = AllGather(parameters.ops, shard, own, size, "inner elements of a feed-forward")
        ones, threshold = np.ones(size, parameters.dtype), NormalDist().inv_cdf(below)
        self._ones, self._shift = self._ops.place(ones), self._ops.place((-threshold * ones).astype(ones.dtype))
        self._mean = parameters.mean_of(size)

    def forward(self, x: Array) -> Array:
        """Return the result for this worker's elements; x [T, own]."""
        ops, x = self._ops, self._all_gather.forward(x)
        # The deviation of a row is the mean of x * norm(x).
        deviation = ops.multiply(x, ops.layer_norm(x, self._ones, None, _LEAST_VARIANCE))
        above = ops.activation(ops.layer_norm(x, self._ones, self._shift, _LEAST_VARIANCE), "relu")
        return ops.multiply(above, ops.linear(deviation, self._mean, self._dtype))[:, self._own]


def _taken_xielu(parameters: Parameters, name: str) -> tuple[float, ...]:
    return tuple(
        float(parameters.weights.take(f"{name}.{part}", shape).reshape(()))
        for part, shape in (("alpha_p", (1,)), ("alpha_n", (1,)), ("beta", ()), ("eps", ()))
    )


def _xielu_parameters(numbers: tuple[float, ...]) -> tuple[float, ...]:
    """Return the parameters (a, c, b, e) of "xielu" in `Ops.activation`, from the checkpoint's alpha_p, alpha_n, beta
    and eps (Huang & Schlag 2024)."""
    a, c, b, eps = numbers
    return float(np.logaddexp(0.0, a)), b + float(np.logaddexp(0.0, c)), b, eps
