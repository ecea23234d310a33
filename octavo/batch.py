"""A step as the model sees it: one table of arrays, made by the runner and read by every layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class GroupTables:
    """Where a step's tokens are in the cache of one group of layers."""

    slot_mapping: Tensor  # [T] int64: block * block_size + offset; of a state group, the block of the token's sequence
    block_tables: Tensor  # [S, max_blocks] int32


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The model's input for T tokens of S sequences. Tensors are views of persistent buffers."""

    token_ids: Tensor  # [T] int32
    positions: Tensor  # [T] int64
    slot_mapping: Tensor  # [T] int64: block * block_size + offset
    query_start_loc: Tensor  # [S + 1] int32: the tokens of sequence s are query_start_loc[s] .. [s + 1]
    seq_lens: Tensor  # [S] int32: cached tokens, this step's included
    block_tables: Tensor  # [S, max_blocks] int32
    sample_rows: Tensor  # [N] int64: tokens whose logits are sampled; a token that starts forks comes several times

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]
