"""The input arrays of a step, defined once: `StepArrays` has a line for each. Buffers, views, padding and uploads
follow from it. All arrays of a step are in one buffer, which the host writes in pinned memory and uploads at once. A
`StepLayout` gives each array its place, for steps up to a certain shape. If the shape is larger than the step, as in
captured graphs, `pad` fills the rest with rows that change nothing: tokens without a slot, sequences without tokens,
samples of no sequence."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from math import prod
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

_ALIGNMENT = 64  # bytes, of each array: a cache line
_SHAPE_DIMS = {"tokens", "seqs", "samples", "updates", "media"}  # of `StepShape`
UPDATES_PER_DECODE = 2  # a decode changes at most two entries of a group's block tables: a new block and a copied one

_A = TypeVar("_A")


@dataclass(frozen=True, slots=True)
class StepShape:
    """The sizes of one step's arrays."""

    tokens: int
    seqs: int
    samples: int
    updates: int  # changed entries of the device's block tables
    media: int = 0  # tokens whose embeddings are replaced by media rows
    adapted: bool = False  # whether rows may have adapters; a step without any skips them


@dataclass(frozen=True, slots=True)
class StepLimits:
    """An engine's largest step, and the sizes that are equal in all of its steps."""

    largest: StepShape  # the maximum of each field; `media` is 0 and `adapted` False in engines without them
    groups: int = 1  # cache groups
    blocks: int = 0  # entries of the longest block table, if the host gathers the step's tables
    media_width: int = 0  # elements of a media row; 0 if the model takes no media
    media_parts: int = 1  # rows of a media token: the first replaces its embedding, layers add the others
    axes: int = 0  # position axes of a token besides its place in the sequence
    sees_ahead: bool = False  # whether tokens may see later ones
    crosses: bool = False  # whether tokens attend to an encoder's output
    hidden_in_bytes: int = 0  # bytes of a token's hidden state from the stage before
    # Of models that pool: whether a step computes whole "texts", or "parts" of prompts.
    pools: Literal["", "texts", "parts"] = ""

    def extent(self, shape: StepShape, dim: str) -> int:
        """Return the length of a dimension (`array_of`) in a step of a shape."""
        if dim in _SHAPE_DIMS:
            return int(getattr(shape, dim))
        if dim == "bounds":
            return shape.seqs + 1
        if dim == "media_tokens":
            return shape.tokens if self.media_width else 0
        if dim == "tokens_ahead":
            return shape.tokens if self.sees_ahead else 0
        if dim == "cross_mask_tokens":
            return shape.tokens if self.crosses else 0
        if dim == "hidden_in_tokens":
            return shape.tokens if self.hidden_in_bytes else 0
        if dim in ("adapted_tokens", "adapted_samples"):
            return int(getattr(shape, dim.removeprefix("adapted_"))) if shape.adapted else 0
        return int(getattr(self, dim))


def array_of(*dims: str, dtype: type[np.generic], padding: int | str = 0) -> Any:
    """Declare a field of `StepArrays`: its dimensions, its type, and its padding, which is a number or the name of a
    field of `Padding`. Dimensions are named by fields of `StepShape` and `StepLimits`, and these: "bounds" is the
    sequences plus one. The others are the tokens or samples of certain models or steps, otherwise 0: "media_tokens" if
    the model takes media, "tokens_ahead" if tokens see later ones, "cross_mask_tokens" with cross attention,
    "hidden_in_tokens" in stages after the first, "adapted_tokens" and "adapted_samples" in steps with adapters."""
    return field(metadata={"dims": dims, "dtype": np.dtype(dtype), "padding": padding})


@dataclass(frozen=True, slots=True)
class Padding:
    """The padding values that differ by step or engine."""

    num_tokens: int  # of the step
    no_row: int  # a table row that no sequence uses
    no_place: int  # a place in the block tables that no sequence reads


@dataclass(frozen=True, slots=True)
class StepArrays(Generic[_A]):
    """The arrays of a step, on the host or on the device. Table rows are those of the runner's tables.

    A token with a pending row is the last token sampled for that row, whatever `token_ids` says: the host may not know
    it yet."""

    token_ids: _A = array_of("tokens", dtype=np.int32)
    positions: _A = array_of("tokens", dtype=np.int64)
    slot_mapping: _A = array_of("groups", "tokens", dtype=np.int64, padding=-1)
    query_start_loc: _A = array_of("bounds", dtype=np.int32, padding="num_tokens")
    seq_lens: _A = array_of("seqs", dtype=np.int32)
    cross_lens: _A = array_of("seqs", dtype=np.int32)  # 0 without cross attention
    sample_rows: _A = array_of("samples", dtype=np.int64)
    # Filled by the host if the device shares its memory; other devices have tables of their own.
    block_tables: _A = array_of("groups", "seqs", "blocks", dtype=np.int32)
    pending_token_rows: _A = array_of("tokens", dtype=np.int64, padding="no_row")
    seq_table_rows: _A = array_of("seqs", dtype=np.int64, padding="no_row")
    sample_table_rows: _A = array_of(
        "samples", dtype=np.int64, padding="no_row"
    )  # padding: the token is stored for no row
    block_places: _A = array_of("updates", dtype=np.int64, padding="no_place")  # flat places in the device's tables
    new_blocks: _A = array_of("updates", dtype=np.int32)  # the blocks to write there
    temperature: _A = array_of("samples", dtype=np.float32)  # 0 takes the most likely token
    top_k: _A = array_of("samples", dtype=np.int64)
    top_p: _A = array_of("samples", dtype=np.float32)
    min_p: _A = array_of("samples", dtype=np.float32)
    uniforms: _A = array_of("samples", dtype=np.float64)  # uniform in [0, 1)
    # Adapter slots of tokens and samples; -1: no adapter.
    adapter_slots: _A = array_of("adapted_tokens", dtype=np.int32, padding=-1)
    sample_adapter_slots: _A = array_of("adapted_samples", dtype=np.int32, padding=-1)
    # Only for models that pool. `pool_starts`: first token of the range of each sample, which ends at the sample's
    # token. `token_types`: 0 or 1, the text of a pair that each token is in.
    pool_starts: _A = array_of("samples", dtype=np.int64)
    token_types: _A = array_of("tokens", dtype=np.int64)
    # Only for models that take media: the media row of each token; -1: none.
    media_indices: _A = array_of("media_tokens", dtype=np.int32, padding=-1)
    media_rows: _A = array_of("media_parts", "media", "media_width", dtype=np.float32)
    axis_positions: _A = array_of("axes", "tokens", dtype=np.int64)
    key_ends: _A = array_of("tokens_ahead", dtype=np.int32)
    # Only for models with cross attention: 0 for tokens that see no encoder output, -1 for others.
    cross_mask: _A = array_of("cross_mask_tokens", dtype=np.int32, padding=-1)
    hidden_in: _A = array_of("hidden_in_tokens", "hidden_in_bytes", dtype=np.uint8)


_FIELDS = tuple((f.name, f.metadata["dims"], f.metadata["dtype"], f.metadata["padding"]) for f in fields(StepArrays))


class StepLayout:
    """The places of the arrays of a step of up to `shape` in a buffer of bytes."""

    def __init__(self, limits: StepLimits, shape: StepShape) -> None:
        self.shape = shape
        self._places: list[tuple[int, int, np.dtype[Any], tuple[int, ...]]] = []  # offset, bytes, type, dimensions
        end = 0
        for _, dims, dtype, _ in _FIELDS:
            dimensions = tuple(limits.extent(shape, dim) for dim in dims)
            num_bytes = prod(dimensions) * dtype.itemsize
            self._places.append((end, num_bytes, dtype, dimensions))
            end += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        self.num_bytes = end

    def on_host(self, buffer: NDArray[np.uint8]) -> StepArrays[NDArray[Any]]:
        """Return the arrays in `buffer` [≥ num_bytes]."""
        return StepArrays(*(buffer[at : at + size].view(dtype).reshape(dims) for at, size, dtype, dims in self._places))

    def on_device(self, buffer: _A, view: Callable[[Any, str], Any]) -> StepArrays[_A]:
        """Return the arrays in `buffer` [≥ num_bytes] uint8 of a device, whose `view` reads bytes as another type."""
        array: Any = buffer
        return StepArrays(
            *(view(array[at : at + size], dtype.name).reshape(dims) for at, size, dtype, dims in self._places)
        )


def pad(arrays: StepArrays[NDArray[Any]], limits: StepLimits, used: StepShape, values: Padding) -> None:
    """Fill the arrays after their `used` entries with padding."""
    for name, dims, _, padding in _FIELDS:
        value = padding if isinstance(padding, int) else getattr(values, padding)
        getattr(arrays, name)[..., limits.extent(used, dims[-1]) :] = value


def clear(arrays: StepArrays[NDArray[Any]], values: Padding) -> None:
    """Fill the arrays with padding: a step with them changes nothing."""
    for name, _, _, padding in _FIELDS:
        getattr(arrays, name)[...] = padding if isinstance(padding, int) else getattr(values, padding)
