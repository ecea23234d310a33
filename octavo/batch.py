"""A step as the model sees it: arrays that the runner has filled and that every layer reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class GroupTables:
    """Where the tokens of a step lie in the cache of one group of layers."""

    # [T] int64: block * block_size + offset, -1 has no slot; of a state group the block for the state after it
    slot_mapping: Any
    block_tables: Any  # [S, max_blocks] int32; not of a state group


@dataclass(frozen=True, slots=True)
class StepBatch:
    """T tokens of S sequences, of which N are sampled after. Arrays are the backend's."""

    token_ids: Any  # [T] int32
    positions: Any  # [T] int64
    query_start_loc: Any  # [S + 1] int32: the tokens of sequence s are query_start_loc[s] .. query_start_loc[s + 1] - 1
    seq_lens: Any  # [S] int32: cached tokens, this step's included
    sample_rows: Any  # [N] int64: tokens whose logits are sampled; one that starts forks comes several times
    groups: tuple[GroupTables, ...]  # by cache group
    # Of models that take media: rows [1 + D, M, H] float32, of which the first M stand in the place of embeddings and
    # others are added after the first D layers; and which of M each token has ([T] int32, -1: none).
    media_rows: Any = None
    media_indices: Any = None
    axis_positions: Any = None  # [3, T] int64: in time, height and width, of models whose tokens have three positions
    key_ends: Any = None  # [T] int32: see `Ops.paged_attention`; of models whose tokens see later ones
    cross_lens: Any = None  # [S] int32: rows of another network's output that each sequence attends to
    cross_mask: Any = None  # [T] int32: 0 for tokens that see nothing of that output, -1 for others
    hidden_in: Any = None  # [T, H] of the stream's type, overwritten: what the stage before has made of these tokens
    token_types: Any = None  # [T] int64: 0 in the first text of a pair, 1 in the second
