"""What a checkpoint of a model must contain: found by running the model's constructor over weights that only take
notes, so that it is stated once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

from octavo.loading.recording import RecordedTensor, RecordingWeights
from octavo.models.description import ModelDescription
from octavo.models.registry import Builder, build
from octavo.ops import Ops


def record(description: ModelDescription, weights: RecordingWeights, builder: Builder = build) -> None:
    """Let the model's constructor take what it needs from `weights`."""
    builder(description, weights, cast(Ops, _NoOps()), 1, "float32")


def adaptable_modules(description: ModelDescription) -> list[str]:
    """Names of the checkpoint's modules whose products adapters may add to, and of tensors of all experts in which they
    are: those of all stages and workers, of a model in stages; none of another, which has them itself."""
    if description.own_layers is None:
        return []
    whole = replace(description, own_layers=None)
    model = build(whole, RecordingWeights("float32"), cast(Ops, _NoOps()), 1, "float32")
    modules = [module for matrix in model.matrices for module in matrix.modules]
    return list(dict.fromkeys(name for module in modules for name in module.all_names))


def required_tensors(description: ModelDescription, builder: Builder = build) -> list[RecordedTensor]:
    """Every tensor that the model takes, once, in the order in which it is taken first."""
    weights = RecordingWeights("float32")
    record(description, weights, builder)
    return list({tensor.name: tensor for tensor in weights.tensors}.values())


def repeated_tensors(description: ModelDescription) -> list[RecordedTensor]:
    """Those that a step reads again, for each time: layers share them with layers before."""
    weights = RecordingWeights("float32")
    record(description, weights)
    return weights.repeated


class _NoOps:
    """As much of `Ops` as constructors call, doing nothing."""

    num_bytes, in_features, takes_float32 = 0, 0, False

    def place(self, array: Any) -> Any:
        return array

    def pack_linear(self, *_: Any) -> _NoOps:
        return _NoOps()  # another for each matrix

    def sum_by_segments(self, weight: _NoOps, segments: int) -> int:
        return 1

    def stack_experts(self, experts: Iterable[Any], num_experts: int) -> _NoOps:
        for _ in experts:
            pass
        return self
