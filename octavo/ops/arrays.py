"""What operations take and return: arrays, a layer's cache, packed matrices, how experts are chosen. Callers have these
names from `octavo.ops`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self

from numpy.typing import NDArray

NO_TOKEN = -1  # in the place of a token where none could be chosen
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
# And with how many parameters.
PARAMETRIC_ACTIVATIONS = {"xielu": 4, "softcap": 1, "clip": 1}
POOLINGS = ("mean", "max", "mean_sqrt", "weighted_mean")
BIAS_PADDING = 64  # columns behind those of distances, which kernels may read: a tile of keys

HostArray = NDArray[Any]


class Array(Protocol):
    """What models, runner and sampler may know of an array. Slices and reshapes are views."""

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
    """One layer's keys and values, as arrays. The first dimension of both is the block; the rest is the backend's own
    layout.

    Elements of one byte, int8 and eight-bit floats, are multiplied with the scale of their token and head. A token's
    scales follow from its own key and value, as they are written: of int8 the largest magnitude over 127 as bfloat16,
    rounded up; of floats the least power of two by which the largest magnitude does not exceed what the type holds. So
    a row's bytes do not depend on other tokens. `scales` are those of keys and values where the backend keeps them by
    themselves.
    """

    key: Any
    value: Any
    scales: Any = None

    @property
    def arrays(self) -> tuple[Any, ...]:
        """All that a block consists of. A state has no values."""
        return tuple(part for part in (self.key, self.value, self.scales) if part is not None and part.nbytes)

    @property
    def num_blocks(self) -> int:
        return int(self.key.shape[0])


@dataclass(frozen=True, slots=True)
class Routing:
    """How a token's experts follow from its router's logits [E].

    A score is the softmax of all logits, or each one's sigmoid. Chosen are the `top_k` of the largest score plus bias
    or, with `bias_logits`, logit plus bias, where there is a bias; of equals the first. With groups these come from the
    `kept_groups` of `num_groups` equal parts whose best, or with `group_by_two` whose two best, are largest. The weight
    of a chosen one is its score without the bias, divided by their sum if `normalize`, times `scale`. (Softmax over the
    chosen logits alone is a softmax that is normalized.) "sparsemixer" weighs each choice by a softmax over what is
    left and not relatively further than 2 * `jitter` from the largest, and nothing else of this (Liu et al. 2023).
    With a soft cap C > 0 logits x are C * tanh(x / C) from the start.
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
    """Matrices of one shape and format, an expert each."""

    @property
    def num_experts(self) -> int: ...
    @property
    def out_features(self) -> int: ...
    @property
    def in_features(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...


class LinearWeight(Protocol):
    """A weight matrix [out_features, in_features] in the layout that the backend's products want, with its bias.

    Integer matrices multiply quantized activations: each 32 elements of a row as int8 with one scale, but for one that
    stands out of the others. Norms, activations and `linear_silu_and_mul` write those for the matrix that consumes
    them; `linear` and `linear_add` quantize what is not quantized yet.
    """

    @property
    def out_features(self) -> int: ...
    @property
    def in_features(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def takes_float32(self) -> bool:
        """Whether rows may be float32 whatever the model's type, because products quantize them."""
