"""A step as the model sees it: one table of arrays, made by the runner and read by every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class GroupTables:
    """Where one cache group's keys and values are."""

    slot_mapping: Any  # [T] int64: block * block_size + offset
    block_tables: Any  # [S, max_blocks] int32


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The model's input for T tokens of S sequences. Arrays are views of persistent buffers."""

    token_ids: Any  # [T] int32
    positions: Any  # [T] int64
    query_start_loc: Any  # [S + 1] int32: the tokens of sequence s are query_start_loc[s] .. [s + 1]
    seq_lens: Any  # [S] int32: cached tokens, this step's included
    sample_rows: Any  # [N] int64: tokens whose logits are sampled; a token that starts forks comes several times
    groups: tuple[GroupTables, ...]  # by cache group

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])
