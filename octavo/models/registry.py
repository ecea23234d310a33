"""Which architectures run: each name with the reader of its configuration and the builder of its model.

The rest of the engine knows models by `describe`, `build` and the `Model` that comes of them. `register` adds an
architecture from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from octavo.batch import StepBatch
from octavo.errors import LoadError
from octavo.kv_cache.groups import LayerCacheSpec
from octavo.loading.weights import Weights
from octavo.models.decoder import Decoder
from octavo.models.description import ModelDescription
from octavo.models.readers import READERS
from octavo.ops import Array, LayerKVCache, Ops


class Model(Protocol):
    """A network over `Ops` and a paged cache."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def layer_caches(self) -> tuple[LayerCacheSpec, ...]:
        """What each layer keeps of a sequence; `group_layers` of them gives the order of `StepBatch.groups`."""

    def num_weight_bytes(self) -> int:
        """Bytes of the packed matrices."""

    def forward(self, batch: StepBatch, caches: Sequence[LayerKVCache]) -> Array:
        """-> hidden [T, H] before the final norm. One cache a layer."""

    def logits(self, hidden: Array) -> Array:
        """hidden [N, H] -> [N, vocab_size] float32."""


# Raises `LoadError` for a setting that is not built, and `KeyError` for one that it needs and that is absent.
Reader = Callable[[Mapping[str, Any]], ModelDescription]
# description, weights, backend, how many positions a sequence may have, element type
Builder = Callable[[ModelDescription, Weights, Ops, int, str], Model]


class _Architecture(NamedTuple):
    read: Reader
    build: Builder


_ARCHITECTURES: dict[str, _Architecture] = {name: _Architecture(read, Decoder) for name, read in READERS.items()}


def register(name: str, reader: Reader, builder: Builder = Decoder) -> None:
    """Let checkpoints whose config.json names architecture `name` be served, in this process."""
    _ARCHITECTURES[name] = _Architecture(reader, builder)


def architectures() -> list[str]:
    """Names of the architectures that run."""
    return sorted(_ARCHITECTURES)


def describe(config: Mapping[str, Any]) -> ModelDescription:
    """Read config.json. Raises `LoadError` for an architecture or a setting that is not built."""
    name = (config.get("architectures") or ["(none)"])[0]
    architecture = _ARCHITECTURES.get(name)
    if architecture is None:
        raise LoadError(f"architecture {name} is not built yet; Octavo runs {', '.join(architectures())}.")
    try:
        return architecture.read(config)
    except KeyError as e:
        raise LoadError(f"the model's configuration has no {e.args[0]!r}.") from None
    except LoadError as e:
        raise LoadError(f"{name}: {e}") from None


def build(description: ModelDescription, weights: Weights, ops: Ops, max_positions: int, dtype: str) -> Model:
    """The model that `describe` has described."""
    return _ARCHITECTURES[description.architecture].build(description, weights, ops, max_positions, dtype)
