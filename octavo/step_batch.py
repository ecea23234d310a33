"""A step as the model sees it: arrays that the runner has filled and that every layer reads."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class GroupTables:
    """The places of a step's tokens in the cache of one group of layers."""

    # [T] int64: block * block_size + offset, or -1 without a slot; for a state group the block of the state after each
    # token
    slot_mapping: Any
    block_tables: Any  # [S, max_blocks] int32; not for a state group


@dataclass(frozen=True, slots=True)
class StepBatch:
    """T tokens of S sequences, of which N are sampled after. Arrays are the backend's."""

    token_ids: Any  # [T] int32
    positions: Any  # [T] int64
    query_start_loc: Any  # [S + 1] int32: the tokens of sequence s are query_start_loc[s] .. query_start_loc[s + 1] - 1
    seq_lens: Any  # [S] int32: cached tokens, this step's included
    sample_rows: Any  # [N] int64: tokens whose logits are sampled; a token that starts forks comes several times
    groups: tuple[GroupTables, ...]  # by cache group
    # For models that take media: rows [1 + D, M, H] float32. media_rows[0] replaces embeddings, the others are added
    # after the first D layers. media_indices [T] int32 is each token's row of M, or -1.
    media_rows: Any = None
    media_indices: Any = None
    axis_positions: Any = None  # [3, T] int64: time, height and width, for models whose tokens have three positions
    key_ends: Any = None  # [T] int32: see `Ops.paged_attention`; for models whose tokens see later tokens
    cross_lens: Any = None  # [S] int32: rows of another network's output that each sequence attends to
    cross_mask: Any = None  # [T] int32: 0 for tokens that see none of these rows, -1 for others
    hidden_in: Any = None  # [T, H] in the stream's type, overwritten: hidden states from the previous stage
    token_types: Any = None  # [T] int64: 0 in the first text of a pair, 1 in the second
