"""The arrays that a device is told a step with, defined once: `StepArrays` is a table of them, a line for each.

Buffers, views, padding and uploads follow from that table. All arrays of a step lie in one buffer of bytes, which the
host writes in pinned memory and uploads at once; a `StepLayout` gives each its place for steps up to a certain shape.
Where the shape is larger than the step, as it is for captured graphs, `pad` fills the rest with rows that change
nothing: tokens without a slot, sequences without tokens, samples of no sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from math import prod
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

_ALIGNMENT = 64  # bytes, of each array: a cache line
UPDATES_PER_DECODE = 2  # of block tables, in a group at most: a new block, and a copied one

_A = TypeVar("_A")


@dataclass(frozen=True, slots=True)
class StepShape:
    """How many there are of what arrays have an entry for. Groups, blocks and the width
    of media are constant in an engine."""

    tokens: int
    seqs: int
    samples: int
    updates: int  # entries of the device's block tables that change
    groups: int = 1  # of layers, in the cache
    blocks: int = 0  # of the longest block table, where the host gathers the tables of the step
    media: int = 0  # tokens that have rows of media in the place of their embeddings
    media_width: int = 0  # elements of such a row; 0 where a model takes no media
    media_parts: int = 1  # rows that such a token has: others are for layers
    axes: int = 0  # positions of a token beside that in its sequence
    sees_ahead: bool = False  # whether tokens may see later ones
    crosses: bool = False  # whether tokens attend to another network's output
    hidden_in_bytes: int = 0  # of a token, which the stage before sends
    adapted: bool = False  # whether rows may have adapters; a step where none has one needs not look for them
    # Of models that pool, whether whole "texts" are computed in a step, or prompts in "parts".
    pools: Literal["", "texts", "parts"] = ""

    def extent(self, name: str) -> int:
        if name == "bounds":
            return self.seqs + 1
        if name == "media_tokens":
            return self.tokens if self.media_width else 0
        if name == "tokens_ahead":
            return self.tokens if self.sees_ahead else 0
        if name == "cross_mask_tokens":
            return self.tokens if self.crosses else 0
        if name == "hidden_in_tokens":
            return self.tokens if self.hidden_in_bytes else 0
        if name in ("adapted_tokens", "adapted_samples"):
            return int(getattr(self, name.removeprefix("adapted_"))) if self.adapted else 0
        return int(getattr(self, name))


def array_of(*dims: str, dtype: type[np.generic], padding: int | str = 0) -> Any:
    """A field of `StepArrays`: what its dimensions are, named by `StepShape`'s fields ("bounds" is one more than the
    sequences, "media_tokens" the tokens of models that take media, "tokens_ahead" those of models where tokens see
    later ones, "cross_mask_tokens" those of models with cross attention, "hidden_in_tokens" those of stages that are
    not the first, "adapted_tokens" and "adapted_samples" those of steps with adapters), its type, and what lies behind
    the entries of a step: a number, or the name of a `Padding`."""
    return field(metadata={"dims": dims, "dtype": np.dtype(dtype), "padding": padding})


@dataclass(frozen=True, slots=True)
class Padding:
    """Values that differ from step to step or from engine to engine."""

    num_tokens: int  # of the step
    no_row: int  # an owner that is no row of the runner's tables
    no_place: int  # a place of the block tables that no sequence reads


@dataclass(frozen=True, slots=True)
class StepArrays(Generic[_A]):
    """The arrays of a step, on the host or on the device. An owner is a row of the runner's tables.

    A token with an owner is the last one that was sampled for that row, whatever `token_ids` says: the host may not
    know it yet.
    """

    token_ids: _A = array_of("tokens", dtype=np.int32)
    positions: _A = array_of("tokens", dtype=np.int64)
    slot_mapping: _A = array_of("groups", "tokens", dtype=np.int64, padding=-1)
    query_start_loc: _A = array_of("bounds", dtype=np.int32, padding="num_tokens")
    seq_lens: _A = array_of("seqs", dtype=np.int32)
    cross_lens: _A = array_of("seqs", dtype=np.int32)  # 0 where models have no cross attention
    sample_rows: _A = array_of("samples", dtype=np.int64)
    # Filled by the host where the device reads the host's memory; elsewhere the device has tables of its own.
    block_tables: _A = array_of("groups", "seqs", "blocks", dtype=np.int32)
    pending_token_rows: _A = array_of("tokens", dtype=np.int64, padding="no_row")
    seq_table_rows: _A = array_of("seqs", dtype=np.int64, padding="no_row")
    sample_table_rows: _A = array_of("samples", dtype=np.int64, padding="no_row")  # none: its token is kept for no row
    block_places: _A = array_of("updates", dtype=np.int64, padding="no_place")  # in the device's tables, flat
    new_blocks: _A = array_of("updates", dtype=np.int32)  # what is written there
    temperature: _A = array_of("samples", dtype=np.float32)  # 0 takes the most likely token
    top_k: _A = array_of("samples", dtype=np.int64)
    top_p: _A = array_of("samples", dtype=np.float32)
    min_p: _A = array_of("samples", dtype=np.float32)
    uniforms: _A = array_of("samples", dtype=np.float64)  # uniform in [0, 1)
    # Slots of adapters, -1 for none: of each token, and of each sample.
    adapter_slots: _A = array_of("adapted_tokens", dtype=np.int32, padding=-1)
    sample_adapter_slots: _A = array_of("adapted_samples", dtype=np.int32, padding=-1)
    # Of models that pool: the first token of what each sample is pooled from, up to its row; and which of two texts a
    # token is of.
    pool_starts: _A = array_of("samples", dtype=np.int64)
    token_types: _A = array_of("tokens", dtype=np.int64)
    # Of models that take media: which of the rows each token has, -1 for none.
    media_indices: _A = array_of("media_tokens", dtype=np.int32, padding=-1)
    media_rows: _A = array_of("media_parts", "media", "media_width", dtype=np.float32)
    axis_positions: _A = array_of("axes", "tokens", dtype=np.int64)
    key_ends: _A = array_of("tokens_ahead", dtype=np.int32)
    # Of models that attend to another network's output: 0 for tokens that see nothing of it, -1 for others.
    cross_mask: _A = array_of("cross_mask_tokens", dtype=np.int32, padding=-1)
    hidden_in: _A = array_of("hidden_in_tokens", "hidden_in_bytes", dtype=np.uint8)


_FIELDS = tuple((f.name, f.metadata["dims"], f.metadata["dtype"], f.metadata["padding"]) for f in fields(StepArrays))


class StepLayout:
    """Where each array of a step of up to `shape` lies in a buffer of bytes."""

    def __init__(self, shape: StepShape) -> None:
        self.shape = shape
        self._places: list[tuple[int, int, np.dtype[Any], tuple[int, ...]]] = []  # offset, bytes, type, dimensions
        end = 0
        for _, dims, dtype, _ in _FIELDS:
            dimensions = tuple(shape.extent(name) for name in dims)
            num_bytes = prod(dimensions) * dtype.itemsize
            self._places.append((end, num_bytes, dtype, dimensions))
            end += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        self.num_bytes = end

    def on_host(self, buffer: NDArray[np.uint8]) -> StepArrays[NDArray[Any]]:
        """The arrays in `buffer` [≥ num_bytes]."""
        return StepArrays(*(buffer[at : at + size].view(dtype).reshape(dims) for at, size, dtype, dims in self._places))

    def on_device(self, buffer: _A, view: Callable[[Any, str], Any]) -> StepArrays[_A]:
        """The arrays in `buffer` [≥ num_bytes] uint8 of a device, whose `view` reads bytes as another type."""
        array: Any = buffer
        return StepArrays(
            *(view(array[at : at + size], dtype.name).reshape(dims) for at, size, dtype, dims in self._places)
        )


def pad(arrays: StepArrays[NDArray[Any]], used: StepShape, values: Padding) -> None:
    """Fill what lies behind the `used` beginnings."""
    for name, dims, _, padding in _FIELDS:
        value = padding if isinstance(padding, int) else getattr(values, padding)
        getattr(arrays, name)[..., used.extent(dims[-1]) :] = value
