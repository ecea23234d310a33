"""The list of tensors that a model's checkpoint must contain. It is found by running the model's constructor over
weights that only record requests, so that tensor names and shapes are stated in one place.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

from octavo.errors import LoadError, OctavoError
from octavo.loading.recording import RecordedTensor, RecordingWeights
from octavo.models.description import ModelDescription
from octavo.models.registry import Builder, build
from octavo.ops import Ops


def record(description: ModelDescription, weights: RecordingWeights, builder: Builder = build) -> None:
    """Run the model's constructor over `weights`, which record the tensors that it takes. Raises `LoadError` for a
    description whose sizes do not fit each other."""
    try:
        builder(description, weights, cast(Ops, _NoOps()), 1, "float32")
    except (TypeError, ValueError, LookupError, ArithmeticError, AssertionError) as e:
        if isinstance(e, OctavoError):
            raise
        reason = f"{type(e).__name__}: {e}"
        raise LoadError(f"the sizes of the model's configuration do not fit each other ({reason}).") from e


def adaptable_modules(description: ModelDescription) -> list[str]:
    """Return the names of modules that adapters may change, and of tensors that stack them, for a model in stages.

    The list covers all stages and workers. It is empty for a model of one stage, which knows all names itself."""
    if description.own_layers is None:
        return []
    whole = replace(description, own_layers=None)
    model = build(whole, RecordingWeights("float32"), cast(Ops, _NoOps()), 1, "float32")
    modules = [module for matrix in model.matrices for module in matrix.modules]
    return list(dict.fromkeys(name for module in modules for name in module.all_names))


def required_tensors(description: ModelDescription) -> list[RecordedTensor]:
    """Return every tensor that the model takes, once, in the order of first use."""
    weights = RecordingWeights("float32")
    record(description, weights)
    return list({tensor.name: tensor for tensor in weights.tensors}.values())


def repeated_tensors(description: ModelDescription) -> list[RecordedTensor]:
    """Return the tensors that a step reads more than once because several layers share them, once per repeated read."""
    weights = RecordingWeights("float32")
    record(description, weights)
    return weights.repeated


class _NoOps:
    """The part of `Ops` that constructors call; its functions do nothing."""

    num_bytes, in_features, takes_float32 = 0, 0, False

    def place(self, array: Any) -> Any:
        return array

    def pack_linear(self, *_: Any) -> _NoOps:
        return _NoOps()  # a new object for each matrix, because matrices are told apart by identity

    def sum_by_segments(self, weight: _NoOps, segments: int) -> int:
        return 1

    def stack_experts(self, experts: Iterable[Any], num_experts: int) -> _NoOps:
        for _ in experts:
            pass
        return self
