"""What models of published shapes keep of a sequence: bytes of a token, blocks of a long sequence."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.execution.block_mover import block_bytes
from octavo.kv_cache.groups import LayerCacheSpec, group_layers
from octavo.kv_cache.manager import KVCacheManager
from octavo.models.registry import describe
from octavo.ops import load
from tests.kv_cache.test_group_tables import compute, sequence

# What transformers has as defaults is left out.
_GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"], "vocab_size": 262208, "hidden_size": 2560, "intermediate_size": 10240,
    "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "sliding_window": 1024, "sliding_window_pattern": 6,
}  # fmt: skip
_DEEPSEEK: dict[str, Any] = {
    "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 27,
    "num_attention_heads": 16, "q_lora_rank": None, "num_experts_per_tok": 6, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}  # fmt: skip
_MAMBA: dict[str, Any] = {
    "architectures": ["MambaForCausalLM"], "vocab_size": 50280, "hidden_size": 768, "num_hidden_layers": 24,
    "intermediate_size": 1536, "state_size": 16,
}  # fmt: skip


def num_blocks_in_use(config: dict[str, Any], num_tokens: int, step: int = 512, block_size: int = 16) -> int:
    """Times layers, as a token is computed behind a prompt of that length that took steps."""
    specs = describe(config).layer_caches
    groups = group_layers(specs)
    pools = 1 + max(group.pool for group in groups)
    cache = KVCacheManager(groups, [4 * num_tokens] * pools, block_size, [0] * pools, enable_prefix_caching=False)
    seq = sequence(num_tokens + 1)
    for end in (*range(step, num_tokens + 1, step), num_tokens + 1):
        compute(cache, seq, end)
    return sum(
        sum(block not in (blocks.null, -1) for block in table) * len(group.layers)
        for table, blocks, group in zip(seq.block_tables, cache._groups, groups, strict=True)
    )


def test_windows_of_gemma_3_leave_less_than_30_percent_of_the_blocks_at_8192_tokens() -> None:
    all_full = 8192 // 16 * _GEMMA3["num_hidden_layers"]
    assert num_blocks_in_use(_GEMMA3, 8192) <= 0.3 * all_full


def test_a_state_is_one_block_however_long_the_sequence() -> None:
    assert num_blocks_in_use(_MAMBA, 512) == num_blocks_in_use(_MAMBA, 8192) == _MAMBA["num_hidden_layers"]


@pytest.mark.parametrize("architecture", ["DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"])
def test_a_token_of_deepseek_takes_1152_bytes_of_each_layer(architecture: str) -> None:
    specs = describe(_DEEPSEEK | {"architectures": [architecture]}).layer_caches
    assert set(specs) == {LayerCacheSpec("full", num_kv_heads=1, key_size=64, value_size=512)}
    cache = load().allocate_kv_cache(4, 16, 1, specs[0].key_size, "bfloat16", specs[0].value_size)
    assert block_bytes(cache) == 16 * 1152
