"""`Ops.paged_attention` by torch's FlashAttention (Dao 2023).

The keys are always one split: FlashAttention chooses a number of splits by the whole batch, which changes results.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cache
from typing import Any

from torch import Tensor

from octavo.ops import LayerKVCache


@cache
def why_not(dtype: str, cache_dtype: str, score_settings: Sequence[str] = ()) -> str | None:
    """Return the reason why this kernel cannot be used; None if it can."""
    if dtype not in ("float16", "bfloat16") or cache_dtype != dtype:
        return "it takes 16-bit queries and a cache of their type"
    if score_settings:
        return f"it does not have {' and '.join(score_settings)}"
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return "this torch does not have it"
    if not {"block_table", "num_splits"} <= inspect.signature(varlen_attn).parameters.keys():
        return "this torch has it without paged caches"
    return None


def paged_attention(
    query: Tensor, cache: LayerKVCache, block_tables: Tensor, query_start_loc: Tensor, seq_lens: Tensor, scale: float,
    sliding_window: int = 0, softcap: float = 0.0, slopes: Tensor | None = None, sinks: Tensor | None = None,
    bidirectional: bool = False, distance_biases: Tensor | None = None, key_ends: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`Ops.paged_attention`. Rows that belong to no sequence have arbitrary values."""
    from torch.nn.attention import varlen

    assert softcap == 0 and slopes is None and sinks is None and not bidirectional and distance_biases is None
    assert key_ends is None, "pictures are refused on GPUs"
    num_tokens, num_seqs = len(query), len(seq_lens)
    longest = 1 if num_tokens == num_seqs else num_tokens  # sequences that pad a captured step have no tokens
    attend: Any = varlen.varlen_attn
    out: Tensor = attend(
        query, cache.key, cache.value, query_start_loc, None,
        longest, block_tables.shape[1] * cache.key.shape[1],
        scale=scale, window_size=(sliding_window - 1 if sliding_window else -1, 0), enable_gqa=True,
        seqused_k=seq_lens, block_table=block_tables, num_splits=1,
    )  # fmt: skip
    return out.flatten(1)
