"""Attention over the cache, in the shapes of models that people serve: (query heads, key/value heads, head size)."""

from __future__ import annotations

from functools import partial

import torch

from octavo.ops import LayerKVCache
from octavo.ops.triton.attention import paged_attention
from tests.ops.triton.compiling import Case

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def attend(
    heads: tuple[int, int, int], num_tokens: int, num_seqs: int = 64, dtype: torch.dtype = BF16,
    cache_dtype: torch.dtype | None = None, block_size: int = 16, window: int = 0, softcap: float = 0.0,
) -> None:  # fmt: skip
    num_heads, num_kv_heads, head_size = heads
    query = torch.empty(num_tokens, num_heads + 2 * num_kv_heads, head_size, dtype=dtype)[:, :num_heads]
    shape = (64, block_size, num_kv_heads, head_size)
    cache = LayerKVCache(torch.empty(shape, dtype=cache_dtype or dtype), torch.empty(shape, dtype=cache_dtype or dtype))
    tables = torch.zeros(num_seqs, 8192 // block_size, dtype=torch.int32)
    starts, lengths = torch.zeros(num_seqs + 1, dtype=torch.int32), torch.zeros(num_seqs, dtype=torch.int32)
    paged_attention(query, cache, tables, starts, lengths, head_size**-0.5, window, softcap)


LLAMA, SMOLLM, GEMMA, PHI = (32, 8, 128), (9, 3, 64), (8, 4, 256), (32, 32, 96)
CASES = {
    "llama_decode": Case(partial(attend, LLAMA, 64)),
    "llama_prefill": Case(partial(attend, LLAMA, 2048)),
    "llama_decode_1000": Case(partial(attend, LLAMA, 1000, 1000)),
    "llama_fp8_decode": Case(partial(attend, LLAMA, 64, cache_dtype=FP8)),
    "llama_fp8_prefill": Case(partial(attend, LLAMA, 2048, cache_dtype=FP8)),
    "llama_big_blocks": Case(partial(attend, LLAMA, 2048, block_size=256)),
    # For 8.0 it spills four registers, outside of the loop over keys.
    "mistral_prefill": Case(partial(attend, LLAMA, 2048, window=4096), capabilities=(90,)),
    "smollm_decode": Case(partial(attend, SMOLLM, 64)),
    "smollm_prefill": Case(partial(attend, SMOLLM, 2048)),
    "gemma_decode": Case(partial(attend, GEMMA, 64, window=4096, softcap=50.0)),
    "gemma_prefill": Case(partial(attend, GEMMA, 2048, window=4096, softcap=50.0)),
    "phi_prefill": Case(partial(attend, PHI, 2048)),
    "float32": Case(partial(attend, LLAMA, 64, dtype=torch.float32)),
}
