"""What a checkpoint of a model must contain: found by running the model's constructor over weights that only take
notes, so that it is stated once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from octavo.loading.recording import RecordingWeights
from octavo.models.description import ModelDescription
from octavo.models.registry import Builder, build
from octavo.ops import Ops


class RequiredTensor(NamedTuple):
    name: str
    shape: tuple[int, ...]
    is_matrix: bool  # one that is packed, and may be quantized


def record(description: ModelDescription, weights: RecordingWeights, builder: Builder = build) -> None:
    """Let the model's constructor take what it needs from `weights`."""
    builder(description, weights, cast(Ops, _NoOps()), 1, "float32")


def required_tensors(description: ModelDescription, builder: Builder = build) -> list[RequiredTensor]:
    """Every tensor that the model takes, once, in the order in which it is taken first."""
    weights = RecordingWeights("float32")
    record(description, weights, builder)
    tensors = {t.name: RequiredTensor(t.name, t.shape, t.is_matrix) for t in weights.tensors}
    return list(tensors.values())


def num_matrix_elements(tensors: Sequence[RequiredTensor]) -> int:
    """Parameters of the matrices (norms and biases are noise beside them)."""
    return sum(math.prod(tensor.shape) for tensor in tensors if tensor.is_matrix)


class _NoOps:
    """As much of `Ops` as constructors call, doing nothing."""

    num_bytes = 0

    def place(self, array: Any) -> Any:
        return array

    def pack_linear(self, *_: Any) -> _NoOps:
        return self
