"""Which architectures run: each name with the reader of its configuration and the builder of its model.

The rest of the engine knows models by `describe`, `build` and the `Model` that comes of them. `register` adds an
architecture from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from octavo.batch import StepBatch
from octavo.errors import LoadError
from octavo.kv_cache.groups import LayerCacheSpec
from octavo.layers.cross_attention import CrossAttention
from octavo.layers.parameters import NamedMatrix
from octavo.loading.weights import Weights
from octavo.models.decoder import Decoder
from octavo.models.description import ModelDescription
from octavo.models.families import FAMILIES
from octavo.models.multimodal_models import MEDIA_FAMILIES, OTHER_NAMES, read_media
from octavo.models.pooling_models import decoder_of, with_pooling
from octavo.models.readers import read, unread
from octavo.models.whisper import WHISPER, read_whisper
from octavo.ops import Array, LayerKVCache, Ops
from octavo.pooling_params import PoolingConfig


class Model(Protocol):
    """A network over `Ops` and a paged cache."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def layer_caches(self) -> tuple[LayerCacheSpec, ...]:
        """What each layer that keeps something keeps of a sequence; `group_layers` of them gives the order of
        `StepBatch.groups`."""

    @property
    def is_recordable(self) -> bool:
        """Whether it computes by operations of `Ops` only, so that a step can be captured."""

    @property
    def matrices(self) -> tuple[NamedMatrix, ...]:
        """The products that adapters may add to."""

    def num_weight_bytes(self) -> int:
        """Bytes of the packed matrices."""

    def forward(self, batch: StepBatch, caches: Sequence[LayerKVCache]) -> Array:
        """-> hidden [T, H] before the final norm. Caches are those of `layer_caches`."""

    def logits(self, hidden: Array) -> Array:
        """hidden [N, H] -> [N, vocab_size] float32."""


class PoolingModel(Model, Protocol):
    """One that was described with pooling."""

    def pool(self, hidden: Array, starts: Array, ends: Array) -> Array:
        """hidden [T, H], rows starts[n] .. ends[n] of which are pooled ([N] int64) -> vectors [N, size] float32."""


class StageModel(Model, Protocol):
    """One of which other processes compute the layers before, or behind."""

    stream_dtype: str  # of hidden states between layers, which all stages must have alike

    @property
    def stage_width(self) -> int:
        """Elements of what a token's row is on its way to the next."""


class CrossModel(Model, Protocol):
    """One that attends to another network's output."""

    hidden_size: int

    @property
    def cross_layers(self) -> list[tuple[CrossAttention, int]]:
        """The layers of this stage that do, in order, each with the number of its cache among the stage's."""

    def write_encoder_kv(self, rows: Array, positions: Array, slots: Array, caches: Sequence[LayerKVCache]) -> None:
        """Have its cross attention keep what it reads of a sequence: of rows [N, H] of that output, in `slots` [N]
        int64 of its group; `positions` [N] int64 are any. Caches are those of `forward`."""


# Raises `LoadError` for a setting that is not built, and `KeyError` for one that it needs and that is absent.
Reader = Callable[[Mapping[str, Any]], ModelDescription]
# description, weights, backend, how many positions a sequence may have, element type
Builder = Callable[[ModelDescription, Weights, Ops, int, str], Model]


_ARCHITECTURES: dict[str, tuple[Reader, Builder]] = {
    **{name: (partial(read, name, family), Decoder) for name, family in FAMILIES.items()},
    **{name: (partial(read_media, name), Decoder) for name in MEDIA_FAMILIES},
    WHISPER: (read_whisper, Decoder),
}


def register(name: str, reader: Reader, builder: Builder = Decoder) -> None:
    """Let checkpoints whose config.json names architecture `name` be served, in this process."""
    _ARCHITECTURES[name] = reader, builder


def architectures() -> list[str]:
    """Names of the architectures that run."""
    return sorted(_ARCHITECTURES)


def by_transformers(config: Mapping[str, Any], impl: str) -> bool:
    """Whether `describe` leaves the model to transformers."""
    return impl == "transformers" or (impl == "auto" and decoder_of(_named(config)) not in _ARCHITECTURES)


def _named(config: Mapping[str, Any]) -> str:
    name = str((config.get("architectures") or ["(none)"])[0])
    return OTHER_NAMES.get(name, name)


def describe(
    config: Mapping[str, Any], impl: str = "auto", code_folder: str | None = None, pooling: PoolingConfig | None = None
) -> ModelDescription:
    """Read config.json. Raises `LoadError` for an architecture or a setting that is not built.

    `impl` "octavo" and "transformers" say who computes the model; "auto" is Octavo where it can. `code_folder` is the
    checkpoint whose own Python code transformers may run. With `pooling` it is a model that pools as that says.
    """
    given = _named(config)
    name = decoder_of(given)
    if by_transformers(config, impl):
        return _describe_by_transformers(name, config, code_folder)
    if name not in _ARCHITECTURES:
        raise LoadError(
            f"architecture {name} is not built; `octavo models` lists those that are, and --model-impl transformers "
            "runs many more."
        )
    try:
        reader, _ = _ARCHITECTURES[name]
        description = reader(config)
        return description if pooling is None else with_pooling(given, description, config, pooling)
    except KeyError as e:
        raise LoadError(f"the model's configuration has no {e.args[0]!r}.") from None
    except IndexError:
        raise LoadError(
            f"{name}: a list of the model's configuration has fewer entries than there are layers."
        ) from None
    except LoadError as e:
        raise LoadError(f"{name}: {e}") from None


def unread_settings(config: Mapping[str, Any], impl: str) -> list[str]:
    """The keys of config.json that change nothing of a model that `describe` takes, though somebody may have meant them
    to. What the configurations of models that see or hear, and of transformers', hold is not looked into."""
    name = decoder_of(_named(config))
    if name not in FAMILIES or by_transformers(config, impl) or config.get("has_standard_names"):
        return []
    return unread(name, FAMILIES[name], config)


def build(description: ModelDescription, weights: Weights, ops: Ops, max_positions: int, dtype: str) -> Model:
    """The model that `describe` has described."""
    if description.impl == "transformers":
        from octavo.models.transformers_model import TransformersDescription, TransformersModel

        assert isinstance(description, TransformersDescription)
        return TransformersModel(description, weights, ops, max_positions, dtype)
    _, builder = _ARCHITECTURES[description.architecture]
    return builder(description, weights, ops, max_positions, dtype)


def _describe_by_transformers(name: str, config: Mapping[str, Any], code_folder: str | None) -> ModelDescription:
    about = "" if name in _ARCHITECTURES else " is not built in Octavo itself, and"
    try:
        from octavo.models.transformers_model import describe
    except ImportError:
        raise LoadError(
            f"architecture {name}{about} runs through transformers only if that is installed: "
            "pip install octavo[transformers]. `octavo models` lists those that need it not."
        ) from None
    try:
        return describe(config, code_folder)
    except (LoadError, AttributeError, TypeError, ValueError) as e:  # configurations lack what others have
        reason = str(e).rstrip(".")
        raise LoadError(
            f"architecture {name}{about} cannot run through transformers: {reason}. `octavo models` lists those that "
            "are built."
        ) from None
