"""Which attention a GPU gets, with kernels that are stood in for by the reference, and times that are made up."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from octavo.errors import ConfigError
from octavo.ops import LayerKVCache, attention_choice, flash, flash3, torch_ref
from octavo.ops.attention_choice import AttentionShape, with_attention

SHAPE = AttentionShape(4, 2, 32, 16, 0, "bfloat16", "bfloat16", torch.device("cpu"))


def documented_varlen_attn(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: None, max_q: int, max_k: int, *,
    scale: float, window_size: tuple[int, int], enable_gqa: bool, seqused_k: Tensor, block_table: Tensor,
    num_splits: int,
) -> Tensor:  # fmt: skip
    """What torch documents, row by row, so that it is the same in any batch."""
    assert enable_gqa and num_splits == 1 and window_size[1] == 0 and cu_seq_k is None
    assert max_q >= int((cu_seq_q[1:] - cu_seq_q[:-1]).max()) and max_k >= int(seqused_k.max())
    rows = []
    cache = LayerKVCache(key, value)
    for s, length in enumerate(seqused_k.tolist()):
        start, end = cu_seq_q[s : s + 2].tolist()
        for row in range(start, end):
            keys = torch.tensor([length - (end - 1 - row)], dtype=torch.int32)
            one = torch.tensor([0, 1], dtype=torch.int32)
            rows.append(
                torch_ref.paged_attention(
                    query[row : row + 1], cache, block_table[s : s + 1], one, keys, scale, window_size[0] + 1
                )
            )
    return torch.cat(rows).view(len(query), query.shape[1], query.shape[2])


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_NUM_SEQS", 3), ("_CONTEXT", 48), ("_PROMPT", 48)):
        monkeypatch.setattr(attention_choice, name, value)
    monkeypatch.setattr(varlen, "varlen_attn", documented_varlen_attn)


def times(own: float, other: float) -> Callable[[Callable[[], object]], float]:
    given = iter([own, own, other, other])
    return lambda work: next(given)


def chosen(wanted: str, own: float = 1.0, other: float = 1.0, shape: AttentionShape = SHAPE) -> Any:
    return with_attention(cast(Any, torch_ref), wanted, shape, times(own, other)).paged_attention


def test_the_adapter_computes_what_attention_means(small_steps: None) -> None:
    generator = torch.Generator().manual_seed(1)
    cache = LayerKVCache(*(torch.randn(9, 16, 2, 32, generator=generator).bfloat16() for _ in range(2)))
    tables = torch.randperm(9, generator=generator).int().view(3, 3)
    starts, lens = torch.tensor([0, 1, 6, 14], dtype=torch.int32), torch.tensor([40, 5, 30], dtype=torch.int32)
    query = torch.randn(14, 4, 32, generator=generator).bfloat16()
    for window in (0, 7):
        found = flash.paged_attention(query, cache, tables, starts, lens, 0.2, window)
        expected = torch_ref.paged_attention(query, cache, tables, starts, lens, 0.2, window)
        torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)


def test_the_faster_one_is_taken(small_steps: None) -> None:
    assert chosen("auto", own=1.0, other=0.8) is flash.paged_attention
    assert chosen("auto", own=1.0, other=0.99) is torch_ref.paged_attention
    assert chosen("flash_attn", own=1.0, other=5.0) is flash.paged_attention
    assert chosen("triton", own=1.0, other=0.1) is torch_ref.paged_attention


def test_flash_attention_3_is_preferred_where_it_is_installed(
    small_steps: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def documented(
        query: Tensor, key: Tensor, value: Tensor, *, cache_seqlens: Tensor, page_table: Tensor, cu_seqlens_q: Tensor,
        max_seqlen_q: int, softmax_scale: float, causal: bool, window_size: tuple[int, int],
        num_splits: int,
    ) -> Tensor:  # fmt: skip
        assert causal
        return documented_varlen_attn(
            query, key, value, cu_seqlens_q, None, max_seqlen_q, 1 << 20, scale=softmax_scale, window_size=window_size,
            enable_gqa=True, seqused_k=cache_seqlens, block_table=page_table, num_splits=num_splits,
        )  # fmt: skip

    module = ModuleType("flash_attn_interface")
    module.__spec__ = ModuleSpec("flash_attn_interface", None)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    module.flash_attn_with_kvcache = documented  # type: ignore[attr-defined]
    flash3.why_not.cache_clear()
    try:
        assert chosen("auto", own=1.0, other=0.8) is flash3.paged_attention
        module.flash_attn_with_kvcache = lambda q, k_cache, v_cache: q  # type: ignore[attr-defined]
        flash3.why_not.cache_clear()
        assert chosen("auto", own=1.0, other=0.8) is flash.paged_attention
    finally:
        flash3.why_not.cache_clear()


def test_one_whose_bits_depend_on_the_batch_is_not_taken(small_steps: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def moody(query: Tensor, *args: Any, **more: Any) -> Tensor:
        return documented_varlen_attn(query, *args, **more) + 1e-2 * (len(query) == 1)

    monkeypatch.setattr(varlen, "varlen_attn", moody)
    assert chosen("auto", other=0.1) is torch_ref.paged_attention
    with pytest.raises(
        ConfigError, match=r"FlashAttention: a row's bits depend on what else is computed\. Use auto or triton"
    ):
        chosen("flash_attn")


def test_one_that_fails_or_computes_something_else_is_not_taken(
    small_steps: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*args: Any, **more: Any) -> Tensor:
        raise RuntimeError("Paged KV cache block size must be divisible by 256\nand a long trace")

    monkeypatch.setattr(varlen, "varlen_attn", failing)
    with pytest.raises(ConfigError, match=r"shapes \(Paged KV cache block size must be divisible by 256\)\. Use"):
        chosen("flash_attn")
    monkeypatch.setattr(varlen, "varlen_attn", lambda query, *args, **more: torch.zeros_like(query))
    with pytest.raises(ConfigError, match="its results are others"):
        chosen("flash_attn")


def test_types_that_it_does_not_have(small_steps: None) -> None:
    for dtype, cache_dtype in (("float32", "float32"), ("bfloat16", "float8_e4m3fn")):
        shape = AttentionShape(4, 2, 32, 16, 0, dtype, cache_dtype, torch.device("cpu"))
        assert chosen("auto", other=0.1, shape=shape) is torch_ref.paged_attention
        with pytest.raises(ConfigError, match="16-bit queries and a cache of their type"):
            chosen("flash_attn", shape=shape)
