"""Sizes the KV cache: how many blocks fit in the memory of device and host."""

from __future__ import annotations

import logging
import sys
from bisect import bisect_right
from collections.abc import Sequence

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.kv_cache.groups import CacheGroup
from octavo.kv_cache.manager import KVCacheManager
from octavo.kv_cache.state_blocks import MAX_DRAFT_TOKENS
from octavo.loading.memory import available_memory_bytes

logger = logging.getLogger(__name__)

_GIB = 1 << 30


def num_pools(groups: Sequence[CacheGroup]) -> int:
    return 1 + max(group.pool for group in groups)


def _counted_pool(groups: Sequence[CacheGroup]) -> int:
    """Return the pool whose blocks --num-gpu-blocks-override counts: the first with keys and values, if there is
    one."""
    return next((group.pool for group in groups if group.spec.kind != "state"), 0)


def num_blocks(
    config: EngineConfig, groups: Sequence[CacheGroup], block_bytes: Sequence[int], budget_bytes: int, source: str
) -> list[int]:
    """Return, by pool, how many blocks `budget_bytes` hold. The numbers are in the proportion that the longest request
    needs, at least what it needs, and at most what can be in use, unless --kv-cache-memory-bytes asks for more blocks
    to share prefixes. `block_bytes` are by pool.

    Each running sequence needs a state, and one for each draft token. They get up to a quarter of the budget, but leave
    enough keys and values for the longest request.

    `source` says where the budget comes from. Raises `ConfigError` if it is too small."""
    limits, max_model_len = config.scheduler, config.model.max_model_len
    if config.cache.is_scratch and config.cache.num_blocks_override is None:
        return _scratch_blocks(config, groups)
    least, override, counted = _longest_request(config, groups), config.cache.num_blocks_override, _counted_pool(groups)
    costs = [count * size for count, size in zip(least, block_bytes, strict=True)]
    state_pools = {group.pool for group in groups if group.spec.kind == "state"}
    state_bytes = sum(costs[pool] for pool in state_pools)
    token_bytes = sum(costs) - state_bytes
    share = budget_bytes / sum(costs) if override is None else override / least[counted]
    num_states = share
    if state_bytes and token_bytes:
        num_states = max(share, min(budget_bytes / 4, budget_bytes - token_bytes) / state_bytes)
    if override is None or token_bytes:
        num_draft_tokens = (
            0 if config.speculative is None else min(config.speculative.num_speculative_tokens, MAX_DRAFT_TOKENS)
        )
        num_states = min(num_states, limits.max_num_seqs * (1 + num_draft_tokens))
    if override is None and token_bytes:
        most = limits.max_num_seqs
        if config.cache.memory_bytes is not None and config.cache.enable_prefix_caching:
            most = sys.maxsize
        share = min((budget_bytes - num_states * state_bytes) / token_bytes, most)
    found = [int(max(0.0, num_states if pool in state_pools else share) * count) for pool, count in enumerate(least)]
    if override is None:
        source, needed = f"{source} buys {found[counted]} blocks and", f"{sum(costs) / 2**30:.2g} GiB"
    else:
        found[counted] = override
        source, needed = f"--num-gpu-blocks-override {override}", f"{least[counted]} blocks"
    if any(count < minimum for count, minimum in zip(found, least, strict=True)):
        holds = int(share * max_model_len) // config.cache.block_size * config.cache.block_size
        has_cross = any(group.spec.kind == "cross" for group in groups)
        fewer = ", or --limit-mm-per-prompt" if config.media is not None and has_cross else ""
        lower = f"lower --max-model-len to at most {holds}{fewer}, or " if holds else ""
        raise ConfigError(
            f"{source} holds {holds} tokens, less than one request of --max-model-len {max_model_len}, which needs "
            f"{needed}; {lower}give more memory."
        )
    return found


def _scratch_blocks(config: EngineConfig, groups: Sequence[CacheGroup]) -> list[int]:
    """Return, by pool, the blocks that the tokens and sequences of the largest step need; of two steps on a GPU, where
    two are in flight."""
    limits, num_steps = config.scheduler, 2 if config.device == "cuda" else 1
    count = num_steps * (limits.max_num_batched_tokens // config.cache.block_size + limits.max_num_seqs)
    found = [0] * num_pools(groups)
    for group in groups:
        found[group.pool] += limits.max_num_seqs + 1 if group.spec.kind == "state" else count + 1
    return found


def shortened(
    config: EngineConfig, groups: Sequence[CacheGroup], block_bytes: Sequence[int], budget_bytes: int
) -> EngineConfig:
    """Return `config` with a `max_model_len` that fits in the cache, if --max-model-len auto allows a shorter one. The
    result is at least one block: `num_blocks` refuses a cache that is too small for that."""
    override, block_size = config.cache.num_blocks_override, config.cache.block_size

    def excess(length: int) -> int:
        counts = _longest_request(config.with_max_model_len(length), groups)
        if override is not None:
            return counts[_counted_pool(groups)] - override
        return sum(count * size for count, size in zip(counts, block_bytes, strict=True)) - budget_bytes

    longest = config.model.max_model_len
    if not config.model.may_shorten or excess(longest) <= 0:
        return config
    lengths = range(block_size, longest + 1, block_size)
    length = lengths[max(0, bisect_right(lengths, 0, key=excess) - 1)] if lengths else longest
    logger.info("--max-model-len auto is %d: the cache does not hold the model's %d tokens", length, longest)
    return config.with_max_model_len(length)


def _longest_request(config: EngineConfig, groups: Sequence[CacheGroup]) -> list[int]:
    """Return, by pool, the blocks that the longest request needs, the null block of windows included."""
    needed = request_blocks(config, groups, config.model.max_model_len)
    windowed = {group.pool for group in groups if group.spec.kind == "window"}
    return [count + (pool in windowed) for pool, count in enumerate(needed)]


def request_blocks(config: EngineConfig, groups: Sequence[CacheGroup], num_tokens: int) -> list[int]:
    """Return, by pool, the most blocks that a request of `num_tokens` needs."""
    none = [0] * num_pools(groups)
    cache = KVCacheManager(groups, none, config.cache.block_size, none, enable_prefix_caching=False)
    return cache.most_blocks(num_tokens, config.scheduler.max_num_batched_tokens)


def host_bytes(config: EngineConfig) -> int:
    """Return the bytes of a worker's host memory for blocks."""
    cache, num_workers = config.cache, config.tensor_parallel_size * config.pipeline_parallel_size
    of_swapped = cache.swap_space_bytes if config.scheduler.preemption_mode == "swap" else 0
    return cache.host_bytes // num_workers + of_swapped


def num_host_blocks(config: EngineConfig, num_blocks: Sequence[int], block_bytes: Sequence[int]) -> list[int]:
    """Return the blocks of a worker's host memory, by pool, in the proportion of the device's: for swapped sequences
    and for the host tier."""
    num_bytes = host_bytes(config)
    total = sum(count * size for count, size in zip(num_blocks, block_bytes, strict=True))
    return [count * num_bytes // total for count in num_blocks]


def check_host_memory(config: EngineConfig, host_bytes: int, cache_bytes_on_host: int, num_workers: int) -> None:
    """Raise `ConfigError` if a worker's host blocks do not fit in the free RAM, for `num_workers` on its host. On CPUs
    the KV cache takes RAM too."""
    available = available_memory_bytes() // num_workers
    if host_bytes and host_bytes + cache_bytes_on_host > available:
        cache, num_engines, flags = config.cache, len(config.local_ranks), []
        if config.scheduler.preemption_mode == "swap":
            flags.append(f"--swap-space {cache.swap_space_bytes * num_engines / _GIB:g}")
        if cache.host_bytes:
            flags.append(f"--kv-cache-host-gib {cache.host_bytes * num_engines / _GIB:g}")
        beside = f" beside {cache_bytes_on_host / _GIB:.2f} GiB of KV cache" if cache_bytes_on_host else ""
        each = f" in each of {num_workers} workers" if num_workers > 1 else ""
        raise ConfigError(
            f"{' and '.join(flags)} {'take' if len(flags) > 1 else 'takes'} {host_bytes / _GIB:.2f} GiB{beside}{each}, "
            f"more than the {available / _GIB:.2f} GiB of free RAM{' for it' if num_workers > 1 else ''}; lower it."
        )


def log_capacity(
    config: EngineConfig,
    groups: Sequence[CacheGroup],
    cache_bytes: int,
    num_blocks: Sequence[int],
    num_host_blocks: Sequence[int],
) -> None:
    num_states = min((num_blocks[group.pool] for group in groups if group.spec.kind == "state"), default=0)
    states = f"; states of {num_states} sequences" if num_states else ""
    swapped = f"; {sum(num_host_blocks)} more blocks on the host" if any(num_host_blocks) else ""
    if all(group.spec.kind == "state" for group in groups):
        logger.info("cache: %.2f GiB%s%s", cache_bytes / _GIB, states, swapped)
        return
    counted = _counted_pool(groups)
    num_tokens = num_blocks[counted] * config.cache.block_size
    if any(group.spec.kind == "cross" for group in groups):  # the pool that needs the most blocks for a request
        longest = config.model.max_model_len
        num_tokens = num_blocks[counted] * longest // request_blocks(config, groups, longest)[counted]
    logger.info(
        "KV cache: %d blocks of %d tokens (%.2f GiB) hold %d tokens: %.1f requests of %d tokens at once%s%s",
        sum(num_blocks), config.cache.block_size, cache_bytes / _GIB, num_tokens,
        num_tokens / config.model.max_model_len, config.model.max_model_len, states, swapped,
    )  # fmt: skip
