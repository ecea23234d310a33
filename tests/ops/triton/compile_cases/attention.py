"""Attention over the cache, in the shapes of models that people serve: (query heads, key/value heads, head size)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from octavo.ops import BIAS_PADDING, LayerKVCache
from octavo.ops.triton.choose_keys import choose_keys
from octavo.ops.triton.mla_attention import latent_attention
from octavo.ops.triton.paged_attention import paged_attention
from tests.ops.triton.compiling import Case

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def attend(
    heads: tuple[int, int, int], num_tokens: int, num_seqs: int = 64, dtype: torch.dtype = BF16,
    cache_dtype: torch.dtype | None = None, block_size: int = 16, window: int = 0, softcap: float = 0.0,
    scores: bool = False, value_size: int | None = None, ahead: bool = False, both_ways: bool = False,
    biases: bool = False,
) -> None:  # fmt: skip
    num_heads, num_kv_heads, head_size = heads
    query = torch.empty(num_tokens, num_heads + 2 * num_kv_heads, head_size, dtype=dtype)[:, :num_heads]
    shape, sizes = (64, block_size, num_kv_heads), (head_size, value_size or head_size)
    parts = [torch.empty((*shape, size), dtype=cache_dtype or dtype) for size in sizes]
    scales = torch.empty((*shape, 2), dtype=torch.bfloat16) if cache_dtype is not None else None
    cache = LayerKVCache(*parts, scales)
    tables = torch.zeros(num_seqs, 8192 // block_size, dtype=torch.int32)
    starts, lengths = torch.zeros(num_seqs + 1, dtype=torch.int32), torch.zeros(num_seqs, dtype=torch.int32)
    by_head = torch.empty(num_heads) if scores else None
    paged_attention(
        query, cache, tables, starts, lengths, head_size**-0.5, window, softcap, by_head, by_head,
        bidirectional=both_ways, value_size=value_size,
        distance_biases=torch.empty(num_heads, 2 * 512 + BIAS_PADDING) if biases else None,
        key_ends=torch.zeros(num_tokens, dtype=torch.int32) if ahead else None,
    )  # fmt: skip


def attend_latent(cache_dtype: torch.dtype | None = None, num_heads: int = 16, num_tokens: int = 64) -> None:
    """As DeepSeek's models: 512 latent values and 64 rotated ones for all heads."""
    query, rotated = (torch.empty(num_tokens, num_heads, size, dtype=BF16) for size in (512, 64))
    key, value = (torch.empty(64, 16, 1, size, dtype=cache_dtype or BF16) for size in (64, 512))
    scales = torch.empty(64, 16, 1, 2, dtype=BF16) if cache_dtype is not None else None
    tables, starts = torch.zeros(num_tokens, 512, dtype=torch.int32), torch.zeros(num_tokens + 1, dtype=torch.int32)
    latent_attention(query, rotated, LayerKVCache(key, value, scales), tables, starts, starts[:num_tokens], 0.1)


def choose(num_heads: int, num_tokens: int = 64) -> None:
    """As DeepSeek V3.2 (64 heads) and GLM 5 (32), whose queries and weights lie beside others."""
    both = torch.empty(num_tokens, 129 * num_heads, dtype=BF16)
    cache = LayerKVCache(torch.empty(64, 16, 1, 192, dtype=BF16), torch.empty(64, 16, 1, 512, dtype=BF16))
    tables, starts = torch.zeros(num_tokens, 8192, dtype=torch.int32), torch.zeros(num_tokens + 1, dtype=torch.int32)
    query = both[:, : num_heads * 128].view(num_tokens, num_heads, 128)
    choose_keys(query, both[:, num_heads * 128 :], cache, tables, starts, starts[:num_tokens], 2048)


def attend_chosen(num_heads: int, num_tokens: int = 64) -> None:
    query, rotated = (torch.empty(num_tokens, num_heads, size, dtype=BF16) for size in (512, 64))
    cache = LayerKVCache(torch.empty(64, 16, 1, 192, dtype=BF16), torch.empty(64, 16, 1, 512, dtype=BF16))
    tables, starts = torch.zeros(num_tokens, 8192, dtype=torch.int32), torch.zeros(num_tokens + 1, dtype=torch.int32)
    chosen = torch.zeros(num_tokens, 2048, dtype=torch.int32)
    latent_attention(query, rotated, cache, tables, starts, starts[:num_tokens], 0.1, chosen)


LLAMA, SMOLLM, GEMMA, PHI, BLOOM = (32, 8, 128), (9, 3, 64), (8, 4, 256), (32, 32, 96), (32, 32, 128)


def case(*args: Any, overlaps: bool = False, **settings: Any) -> Case:
    # What a program keeps from one piece of work to the next does not always fit beside the loop over keys.
    return Case(partial(attend, *args, **settings), max_stack_bytes=32, overlaps=overlaps)


CASES = {
    "llama_decode": case(LLAMA, 64),
    "llama_prefill": case(LLAMA, 2048, overlaps=True),
    "llama_prefill_1000": case(LLAMA, 4096, 1000, overlaps=True),
    "llama_fp8_decode": case(LLAMA, 64, cache_dtype=FP8),
    "llama_fp8_prefill": case(LLAMA, 2048, cache_dtype=FP8),
    "llama_int8_decode": case(LLAMA, 64, cache_dtype=torch.int8),
    "llama_big_blocks": case(LLAMA, 2048, block_size=256),
    "mistral_prefill": case(LLAMA, 2048, window=4096),
    "smollm_decode": case(SMOLLM, 64),
    "smollm_prefill": case(SMOLLM, 2048, overlaps=True),
    "gemma_decode": case(GEMMA, 64, window=4096, softcap=50.0),
    "gemma_prefill": case(GEMMA, 2048, window=4096, softcap=50.0),
    "gemma_3_decode": case(GEMMA, 64, window=1024, ahead=True),
    "gemma_3_prefill": case(GEMMA, 2048, window=1024, ahead=True),
    "whisper_decode": case((20, 20, 64), 64, both_ways=True),
    "whisper_prefill": case((20, 20, 64), 448, 4, both_ways=True),
    "minilm_prefill": case((12, 12, 32), 2048, both_ways=True),
    "bert_prefill": case((12, 12, 64), 2048, dtype=torch.float16, both_ways=True),
    "bert_short": case((12, 12, 64), 64, dtype=torch.float16, both_ways=True),
    "modernbert_prefill": case((12, 12, 64), 2048, window=65, both_ways=True),
    "mpnet_prefill": case((12, 12, 64), 2048, dtype=torch.float16, both_ways=True, biases=True),
    "mpnet_short": case((12, 12, 64), 64, dtype=torch.float16, both_ways=True, biases=True),
    "paligemma_prefill": case((8, 1, 256), 2048, ahead=True),
    "bloom_decode": case(BLOOM, 64, scores=True),
    "bloom_prefill": case(BLOOM, 2048, scores=True),
    "phi_prefill": case(PHI, 2048),
    "mimo_decode": case((64, 8, 192), 64, window=129, value_size=128),
    "latent_decode": Case(attend_latent, max_stack_bytes=32),
    "latent_128": Case(partial(attend_latent, None, 128)),
    "latent_fp8_decode": Case(partial(attend_latent, FP8), max_stack_bytes=32),
    "latent_chosen": Case(partial(attend_chosen, 128)),
    "latent_chosen_16_heads": Case(partial(attend_chosen, 16)),
    "index": Case(partial(choose, 64)),
    "index_32_heads": Case(partial(choose, 32)),
    "index_128_heads": Case(partial(choose, 128)),
    "float32": case(LLAMA, 64, dtype=torch.float32),
}
