"""`Ops.paged_attention` by FlashAttention 3 (Shah et al. 2024), if the package `flash_attn_interface` is installed.

The keys are always one split, as in `octavo.ops.flash`: FlashAttention chooses a number of splits by the whole batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from octavo.ops import LayerKVCache

_NEEDED = {"page_table", "cache_seqlens", "cu_seqlens_q", "max_seqlen_q", "softmax_scale", "num_splits"}


@cache
def why_not(dtype: str, cache_dtype: str, score_settings: Sequence[str] = ()) -> str | None:
    """Return the reason why this kernel cannot be used; None if it can."""
    if find_spec("flash_attn_interface") is None:
        return "its package is not installed"
    if dtype not in ("float16", "bfloat16") or cache_dtype != dtype:
        return "it takes 16-bit queries and a cache of their type"
    if score_settings:
        return f"it is not asked for {' and '.join(score_settings)}"
    if not inspect.signature(_function()).parameters.keys() >= _NEEDED:
        return "the version that is installed has it without paged caches"
    return None


def _function() -> Any:
    from flash_attn_interface import flash_attn_with_kvcache  # type: ignore[import-not-found]  # optional

    return flash_attn_with_kvcache


def paged_attention(
    query: Tensor, cache: LayerKVCache, block_tables: Tensor, query_start_loc: Tensor, seq_lens: Tensor, scale: float,
    sliding_window: int = 0, softcap: float = 0.0, slopes: Tensor | None = None, sinks: Tensor | None = None,
    bidirectional: bool = False, distance_biases: Tensor | None = None, key_ends: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`Ops.paged_attention`. Rows that belong to no sequence have arbitrary values."""
    assert softcap == 0 and slopes is None and sinks is None and not bidirectional and distance_biases is None
    assert key_ends is None, "pictures are refused on GPUs"
    num_tokens = len(query)
    out: Tensor = _function()(
        query, cache.key, cache.value, cache_seqlens=seq_lens, page_table=block_tables, cu_seqlens_q=query_start_loc,
        # Sequences that pad a captured step have no tokens, so one sequence may have all tokens of the step.
        max_seqlen_q=1 if num_tokens == len(seq_lens) else num_tokens,
        softmax_scale=scale, causal=True, window_size=(sliding_window - 1 if sliding_window else -1, 0),
        num_splits=1,
    )  # fmt: skip
    return out.flatten(1)
