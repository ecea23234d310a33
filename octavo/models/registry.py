"""The registry of architectures: each name with the reader of its configuration and the builder of its model.

The rest of the engine uses `describe`, `build` and the returned `Model` only. `register` adds an architecture from
outside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from octavo.errors import LoadError
from octavo.kv_cache.groups import LayerCacheSpec
from octavo.layers.cross_attention import CrossAttention
from octavo.layers.parameters import NamedMatrix
from octavo.loading.weights import Weights
from octavo.models.config_reader import read, unread
from octavo.models.decoder import Decoder
from octavo.models.description import ModelDescription, check_numbers
from octavo.models.families import FAMILIES
from octavo.models.multimodal_models import MEDIA_FAMILIES, OTHER_NAMES, read_media
from octavo.models.pooling_models import decoder_of, with_pooling
from octavo.models.whisper import WHISPER, read_whisper
from octavo.ops import Array, LayerKVCache, Ops
from octavo.pooling_params import PoolingConfig
from octavo.step_batch import StepBatch


class Model(Protocol):
    """A network over `Ops` and a paged cache."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def layer_caches(self) -> tuple[LayerCacheSpec, ...]:
        """Return the cache of each layer that has one. `group_layers` of this list gives the order of
        `StepBatch.groups`."""

    @property
    def is_recordable(self) -> bool:
        """Return whether the model computes by operations of `Ops` only, so that a step can be captured."""

    @property
    def matrices(self) -> tuple[NamedMatrix, ...]:
        """Return the matrices that adapters may change."""

    def num_weight_bytes(self) -> int:
        """Return the bytes of the packed matrices."""

    def forward(self, batch: StepBatch, caches: Sequence[LayerKVCache]) -> Array:
        """Return hidden states [T, H]: before the final norm, or after it if the model pools. A stage that is not the
        last returns rows [T, `stage_width`] (`StageModel`). `caches` belong to the entries of `layer_caches`."""

    def logits(self, hidden: Array) -> Array:
        """Return the logits [N, vocab_size] float32 of hidden [N, H]."""


class PoolingModel(Model, Protocol):
    """A model that was described with pooling."""

    def pool(self, hidden: Array, starts: Array, ends: Array) -> Array:
        """Return vectors [N, size] float32; vector n pools rows starts[n] .. ends[n] ([N] int64) of hidden [T, H]."""


class StageModel(Model, Protocol):
    """A model whose earlier or later layers other processes may compute."""

    # Type of hidden states between layers. Before the worker builds a runner, it gives all stages the same.
    residual_dtype: str

    @property
    def stage_width(self) -> int:
        """Return the number of elements of a token's row that a stage sends to the next stage."""


class CrossModel(Model, Protocol):
    """A model that attends to another network's output."""

    hidden_size: int

    @property
    def cross_layers(self) -> list[tuple[CrossAttention, int]]:
        """Return the cross-attention layers of this stage, in order, each with the index of its cache in the stage."""

    def write_encoder_kv(self, rows: Array, positions: Array, slots: Array, caches: Sequence[LayerKVCache]) -> None:
        """Write the cross-attention keys and values of rows [N, H] of the other network's output to `slots` [N] int64
        of their group. `positions` [N] int64 may be any valid positions: keys are not rotated. `caches` are as in
        `forward`."""


# Raises `LoadError` for a setting that is not built, and `KeyError` for a needed setting that is absent.
Reader = Callable[[Mapping[str, Any]], ModelDescription]
# Arguments: description, weights, backend, most positions of a sequence, element type.
Builder = Callable[[ModelDescription, Weights, Ops, int, str], Model]


_ARCHITECTURES: dict[str, tuple[Reader, Builder]] = {
    **{name: (partial(read, name, family), Decoder) for name, family in FAMILIES.items()},
    **{name: (partial(read_media, name), Decoder) for name in MEDIA_FAMILIES},
    WHISPER: (read_whisper, Decoder),
}


def register(name: str, reader: Reader, builder: Builder = Decoder) -> None:
    """Add an architecture: this process can then serve checkpoints whose config.json names `name`."""
    _ARCHITECTURES[name] = reader, builder


_NO_NAME = "(none)"


def architectures() -> list[str]:
    """Return the names of all architectures that Octavo builds itself."""
    return sorted(_ARCHITECTURES)


def by_transformers(config: Mapping[str, Any], impl: str) -> bool:
    """Return whether `describe` leaves the model to transformers."""
    return impl == "transformers" or (impl == "auto" and decoder_of(_named(config)) not in _ARCHITECTURES)


def _named(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or [_NO_NAME]
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise LoadError(f"architectures = {str(names)[:60]} of the model's configuration is not a list of names.")
    name = names[0]
    return OTHER_NAMES.get(name, name)


def describe(
    config: Mapping[str, Any], impl: str = "auto", code_folder: str | None = None, pooling: PoolingConfig | None = None
) -> ModelDescription:
    """Return the description of the model of config.json. Raises `LoadError` for an architecture or a setting that is
    not built.

    `impl` is the code that computes the model, "octavo" or "transformers"; "auto" is Octavo if it builds the
    architecture. `code_folder` is the checkpoint whose own Python code transformers may run. With `pooling`, the model
    pools by this configuration.
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
        check_numbers(description)
        return description if pooling is None else with_pooling(given, description, config, pooling)
    except KeyError as e:
        raise LoadError(f"the model's configuration has no {e.args[0]!r}.") from None
    except IndexError:
        raise LoadError(
            f"{name}: a list of the model's configuration has fewer entries than there are layers."
        ) from None
    except LoadError as e:
        raise LoadError(f"{name}: {e}") from None
    except (TypeError, ValueError, ArithmeticError, AttributeError) as e:
        reason = f"{type(e).__name__}: {e}"
        raise LoadError(f"{name}: a setting of the model's configuration has a wrong value ({reason}).") from None


def unread_settings(config: Mapping[str, Any], impl: str) -> list[str]:
    """Return the keys of config.json that have no effect though a user may expect one.

    The list is empty for models with media, for models that transformers computes, and for other file formats: their
    configurations are not checked."""
    name = decoder_of(_named(config))
    if name not in FAMILIES or by_transformers(config, impl) or config.get("has_standard_names"):
        return []
    return unread(name, FAMILIES[name], config)


def build(description: ModelDescription, weights: Weights, ops: Ops, max_positions: int, dtype: str) -> Model:
    """Return the model of a description that `describe` returned."""
    if description.impl == "transformers":
        from octavo.models.transformers_model import TransformersDescription, TransformersModel

        assert isinstance(description, TransformersDescription)
        return TransformersModel(description, weights, ops, max_positions, dtype)
    _, builder = _ARCHITECTURES[description.architecture]
    return builder(description, weights, ops, max_positions, dtype)


def _describe_by_transformers(name: str, config: Mapping[str, Any], code_folder: str | None) -> ModelDescription:
    if name == _NO_NAME:
        kind = str(config.get("model_type") or "")
        likely = f"{kind.replace('_', '')}forcausallm"
        named = next((one for one in _ARCHITECTURES if one.lower() == likely), "NameOfTheModelsClass")
        raise LoadError(
            f'config.json has no architectures, and its model_type is {kind!r}: write "architectures": ["{named}"] '
            f'there, or pass --hf-overrides \'{{"architectures": ["{named}"]}}\'. `octavo models` lists the names.'
        )
    about = "" if name in _ARCHITECTURES else " is not built in Octavo itself, and"
    try:
        from octavo.models.transformers_model import describe
    except ImportError:
        raise LoadError(
            f"architecture {name}{about} runs through transformers only if that is installed: "
            "run scripts/install transformers. `octavo models` lists those that need none."
        ) from None
    try:
        return describe(config, code_folder)
    except Exception as e:  # a configuration may lack attributes, or have wrong ones
        reason = str(e).rstrip(".")
        raise LoadError(
            f"architecture {name}{about} cannot run through transformers: {reason}. `octavo models` lists those that "
            "are built."
        ) from None
