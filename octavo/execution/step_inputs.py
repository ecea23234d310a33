"""What a device is told of a step, as one block of bytes: written by the host in pinned memory, uploaded at once.

A layout gives every array its place for a step of a certain shape. Where the shape is larger than the step, as it is
for captured graphs, `pad` fills the rest with rows that change nothing: tokens without a slot, sequences without
tokens, samples that belong to nobody.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.execution.step_batch import StepArrays

_ALIGNMENT = 16  # bytes, of each array
_A = TypeVar("_A", Tensor, NDArray[Any])


@dataclass(frozen=True, slots=True)
class StepShape:
    """Room for T tokens of S sequences, N samples and U changes of block tables."""

    num_tokens: int
    num_seqs: int
    num_samples: int
    num_updates: int


@dataclass(frozen=True, slots=True)
class StepInputs(Generic[_A]):
    """The arrays, on the host or on the device. The first six are those of `StepBatch`.

    An owner is a row of the runner's tables, or the number of rows for nobody. A token whose owner is somebody is the
    last one that was sampled for it, whatever `token_ids` says.
    """

    positions: _A  # [T] int64
    slot_mapping: _A  # [T] int64; -1 has no slot
    token_ids: _A  # [T] int32
    query_start_loc: _A  # [S + 1] int32
    seq_lens: _A  # [S] int32
    sample_rows: _A  # [N] int64
    token_owners: _A  # [T] int64
    seq_owners: _A  # [S] int64
    sample_owners: _A  # [N] int64; nobody for forks, which bring their token when they are admitted
    block_places: _A  # [U] int64: places in the block tables, flat
    new_blocks: _A  # [U] int32: what is written there
    temperature: _A  # [N] float32, 0 takes the most likely token
    top_k: _A  # [N] int64
    top_p: _A  # [N] float32
    min_p: _A  # [N] float32
    dice: _A  # [N] float64


_FIELDS: tuple[tuple[str, str, type[np.generic]], ...] = (
    ("positions", "T", np.int64),
    ("slot_mapping", "T", np.int64),
    ("token_ids", "T", np.int32),
    ("query_start_loc", "S+1", np.int32),
    ("seq_lens", "S", np.int32),
    ("sample_rows", "N", np.int64),
    ("token_owners", "T", np.int64),
    ("seq_owners", "S", np.int64),
    ("sample_owners", "N", np.int64),
    ("block_places", "U", np.int64),
    ("new_blocks", "U", np.int32),
    ("temperature", "N", np.float32),
    ("top_k", "N", np.int64),
    ("top_p", "N", np.float32),
    ("min_p", "N", np.float32),
    ("dice", "N", np.float64),
)
_TORCH = {np.int64: torch.int64, np.int32: torch.int32, np.float32: torch.float32, np.float64: torch.float64}


class StepLayout:
    """Where each array of a step of `shape` lies."""

    def __init__(self, shape: StepShape) -> None:
        self.shape = shape
        sizes = {
            "T": shape.num_tokens, "S": shape.num_seqs, "S+1": shape.num_seqs + 1, "N": shape.num_samples,
            "U": shape.num_updates,
        }  # fmt: skip
        self._places: list[tuple[int, int, type[np.generic]]] = []  # offset, bytes, element type
        end = 0
        for _, size, dtype in _FIELDS:
            num_bytes = sizes[size] * np.dtype(dtype).itemsize
            self._places.append((end, num_bytes, dtype))
            end += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        self.num_bytes = end

    def on_host(self, buffer: NDArray[np.uint8]) -> StepInputs[NDArray[Any]]:
        """The arrays in `buffer` [≥ num_bytes]."""
        return StepInputs(*(buffer[at : at + size].view(dtype) for at, size, dtype in self._places))

    def on_device(self, buffer: Tensor) -> StepInputs[Tensor]:
        """The arrays in `buffer` [≥ num_bytes] uint8."""
        return StepInputs(*(buffer[at : at + size].view(_TORCH[dtype]) for at, size, dtype in self._places))


def step_arrays(inputs: StepInputs[NDArray[Any]]) -> StepArrays:
    """What `SequenceTable.gather` fills."""
    arrays = inputs.token_ids, inputs.positions, inputs.slot_mapping, inputs.query_start_loc, inputs.seq_lens
    return StepArrays(*arrays, inputs.sample_rows)


def pad(inputs: StepInputs[NDArray[Any]], used: StepShape, nobody: int, nowhere: int) -> None:
    """Fill what lies beyond the `used` beginnings. `nowhere` is a place of the block tables that no sequence reads."""
    for array in (inputs.positions, inputs.token_ids):
        array[used.num_tokens :] = 0
    inputs.slot_mapping[used.num_tokens :] = -1
    inputs.query_start_loc[used.num_seqs + 1 :] = used.num_tokens
    inputs.seq_lens[used.num_seqs :] = 0
    inputs.sample_rows[used.num_samples :] = 0
    inputs.token_owners[used.num_tokens :] = nobody
    inputs.seq_owners[used.num_seqs :] = nobody
    inputs.sample_owners[used.num_samples :] = nobody
    inputs.block_places[used.num_updates :] = nowhere
    inputs.new_blocks[used.num_updates :] = 0
    inputs.temperature[used.num_samples :] = 0
