"""Projection heads: a matrix, an activation and a norm, before an output matrix or after pooling."""

from dataclasses import dataclass

from octavo.layers.norm import Norm, NormDescription
from octavo.layers.parameters import Parameters
from octavo.ops import Array, LinearWeight


@dataclass(frozen=True, slots=True)
class ProjectionHeadDescription:
    """A matrix, then an activation, then a norm. Names are those of the checkpoint's modules."""

    name: str
    size: int  # size of the output
    bias: bool = False
    activation: str | None = None
    norm: NormDescription | None = None
    norm_name: str = ""


class ProjectionHead:
    def __init__(self, description: ProjectionHeadDescription, num_inputs: int, parameters: Parameters) -> None:
        self._ops, self._dtype, self._activation = parameters.ops, parameters.dtype, description.activation
        self.consumer = parameters.linear([description.name], [description.size], num_inputs, description.bias)
        self._norm: Norm | None = None
        if description.norm is not None:
            self._norm = Norm(description.norm, parameters, description.norm_name, description.size)

    def forward(self, hidden: Array, consumer: LinearWeight | None, dtype: str | None = None) -> Array:
        """Return the head's output [N, size] of hidden [N, inputs] in `dtype` (default: the model's).

        If there is a norm, it quantizes for a `consumer` that multiplies quantized activations."""
        hidden = self._ops.linear(hidden, self.consumer, dtype or self._dtype)
        if self._activation == "tanh":
            hidden = self._ops.activation(hidden, "softcap", parameters=(1.0,))
        elif self._activation is not None:
            hidden = self._ops.activation(hidden, self._activation)
        return hidden if self._norm is None else self._norm.forward(hidden, consumer)
