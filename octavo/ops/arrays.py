"""The types that operations take and return: arrays, a layer's cache, packed matrices, settings of the expert choice.

Callers import these names from `octavo.ops`.
"""

from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self

from numpy.typing import NDArray

NO_TOKEN = -1  # stands for a token where no token could be chosen
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
# Activations with parameters: the number of parameters of each.
PARAMETRIC_ACTIVATIONS = {"xielu": 4, "softcap": 1, "clip": 1}
POOLINGS = ("mean", "max", "mean_sqrt", "weighted_mean")
BIAS_PADDING = 64  # padding columns after the distance biases: kernels read a whole tile of 64 keys

HostArray = NDArray[Any]


class Array(Protocol):
    """The part of an array's interface that models, runner and sampler may use. Slices and reshapes are views."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...
    @property
    def nbytes(self) -> int: ...
    def __len__(self) -> int: ...
    def __getitem__(self, key: Any, /) -> Self: ...
    def reshape(self, *shape: int) -> Self: ...


@dataclass(frozen=True, slots=True)
class LayerKVCache:
    """One layer's keys and values. The first dimension of both arrays is the block; the backend chooses the rest.

    Elements of one byte (int8 and eight-bit floats) are multiplied by the scale of their token and head. The scale is
    computed when the token's key or value is written, from that row alone, so a row's bytes do not depend on other
    tokens. For int8 the scale is the largest magnitude over 127, rounded up to bfloat16. For floats it is the smallest
    power of two that brings the largest magnitude into the range of the type. `scales` holds the scales of keys and
    values if the backend keeps them in an array of their own.
    """

    key: Any
    value: Any
    scales: Any = None

    @property
    def arrays(self) -> tuple[Any, ...]:
        """Return the arrays that a block consists of. The state of a recurrent layer has no values."""
        return tuple(part for part in (self.key, self.value, self.scales) if part is not None and part.nbytes)

    @property
    def num_blocks(self) -> int:
        return int(self.key.shape[0])


@dataclass(frozen=True, slots=True)
class Routing:
    """How a token's experts follow from its router's logits [E].

    Scores: softmax over all logits, or the sigmoid of each logit. With `softcap` C > 0 each logit x is first replaced
    by C * tanh(x / C).

    Choice: the `top_k` experts with the largest score plus bias (or logit plus bias with `bias_logits`); the first of
    equals wins. With groups, the experts are divided into `num_groups` equal parts, and only the `kept_groups` best
    parts are searched. A part is as good as its best expert, or as the sum of its two best with `group_by_two`.

    Weights: the chosen expert's score without the bias, divided by the sum of the chosen scores if `normalize`, times
    `scale`. (Softmax over the chosen logits alone is "softmax" with `normalize`.)

    "sparsemixer" uses only `top_k`, `softcap` and `jitter` (Liu et al. 2023). It chooses one expert after the other.
    The weight of each is a softmax over the experts not chosen yet, without those whose relative distance from the
    largest remaining logit is above 2 * `jitter`.
    """

    top_k: int
    scoring: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    normalize: bool = True
    scale: float = 1.0
    bias_logits: bool = False
    num_groups: int = 1
    kept_groups: int = 1
    group_by_two: bool = False
    softcap: float = 0.0
    jitter: float = 0.0


class ExpertsWeight(Protocol):
    """Matrices of one shape and format, one matrix for each expert."""

    @property
    def num_experts(self) -> int: ...
    @property
    def out_features(self) -> int: ...
    @property
    def in_features(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...


class LinearWeight(Protocol):
    """A weight matrix [out_features, in_features] in the layout of the backend's products, with its bias.

    Integer matrices multiply quantized activations: each 32 elements of a row become int8 with one scale, and outliers
    are kept apart. Norms, activations and `linear_silu_and_mul` write quantized activations for the matrix that
    consumes them; `linear` and `linear_add` quantize inputs that are not quantized yet.
    """

    @property
    def out_features(self) -> int: ...
    @property
    def in_features(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def takes_float32(self) -> bool:
        """True if inputs may be float32 whatever the model's type, because products quantize them."""
