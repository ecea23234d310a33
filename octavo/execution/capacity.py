"""How many KV blocks the memory buys, on the device and on the host."""

from __future__ import annotations

import logging

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.loading.memory import available_memory_bytes

logger = logging.getLogger(__name__)

_GIB = 1 << 30


def num_blocks(config: EngineConfig, block_bytes: int, budget_bytes: int, source: str) -> int:
    """Blocks that `budget_bytes` buy: no fewer than one longest request needs, no more than could ever be in use.

    `source` says where the budget comes from. Raises `ConfigError` if it is too small."""
    size = config.cache.block_size
    least = -(-config.model.max_model_len // size)
    if config.cache.num_blocks_override is not None:
        found = config.cache.num_blocks_override
        source = f"--num-gpu-blocks-override {found}"
    else:
        found = max(0, min(budget_bytes // block_bytes, least * config.scheduler.max_num_seqs))
        source = f"{source} buys {found} blocks, which"
    if found < least:
        raise ConfigError(
            f"{source} holds {found * size} tokens, less than one request of --max-model-len "
            f"{config.model.max_model_len}; lower --max-model-len to at most {found * size}, or give more memory."
        )
    return found


def num_host_blocks(config: EngineConfig, block_bytes: int, cache_bytes_on_host: int) -> int:
    """Blocks of the swap tier, if there is one. On CPU it shares the RAM with the KV cache itself."""
    if config.scheduler.preemption_mode != "swap":
        return 0
    available = available_memory_bytes()
    wanted = config.cache.swap_space_bytes + cache_bytes_on_host
    if wanted > available:
        beside = f" and {cache_bytes_on_host / _GIB:.2f} GiB of KV cache are" if cache_bytes_on_host else " is"
        raise ConfigError(
            f"--swap-space {config.cache.swap_space_bytes / _GIB:g} GiB{beside} more than the "
            f"{available / _GIB:.2f} GiB of free RAM; lower one of them."
        )
    return config.cache.swap_space_bytes // block_bytes


def log_capacity(config: EngineConfig, block_bytes: int, num_blocks: int, num_host_blocks: int) -> None:
    """Say what the memory has bought."""
    num_tokens = num_blocks * config.cache.block_size
    logger.info(
        "KV cache: %d blocks of %d tokens (%.2f GiB) hold %d tokens: %.1f requests of %d tokens at once%s",
        num_blocks, config.cache.block_size, num_blocks * block_bytes / _GIB, num_tokens,
        num_tokens / config.model.max_model_len, config.model.max_model_len,
        f"; {num_host_blocks} more blocks to swap to" if num_host_blocks else "",
    )  # fmt: skip
