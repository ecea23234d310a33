"""The scheduler's statistics: counters of prompt tokens, gauges after a step, and how far a sequence is."""

from octavo.kv_cache.host_tier import HostTier
from octavo.kv_cache.manager import KVCacheManager
from octavo.scheduling.sequence_queues import SequenceQueues
from octavo.sequence import Sequence
from octavo.stats import EngineStats, SequenceProgress


def count_admission(
    stats: EngineStats, seq: Sequence, num_cached_tokens: int, cache: KVCacheManager, host_tier: HostTier | None
) -> None:
    """Count a prompt's look-up and its cached tokens, at its first admission. Its other tokens are counted with the
    steps that compute them, or when a later admission finds them in the cache."""
    if seq.num_uncounted_tokens is not None:
        count_computed(stats, seq, seq.num_uncounted_tokens - (seq.num_tokens - num_cached_tokens))
        return
    seq.num_uncounted_tokens = seq.num_tokens - num_cached_tokens
    seq.num_cached_tokens = num_cached_tokens
    stats.num_prompt_tokens += num_cached_tokens
    if cache.looks_up(seq):
        stats.num_prefix_queries += seq.num_tokens
    stats.num_prefix_hits += num_cached_tokens
    if host_tier is not None:
        host_tier.count_hits(seq, num_cached_tokens)


def count_computed(stats: EngineStats, seq: Sequence, num_tokens: int) -> None:
    """Count tokens of a prompt, as a step computes them; not again after a preemption."""
    assert seq.num_uncounted_tokens is not None
    num_counted = max(0, min(num_tokens, seq.num_uncounted_tokens))
    seq.num_uncounted_tokens -= num_counted
    stats.num_prompt_tokens += num_counted


def set_gauges(stats: EngineStats, queues: SequenceQueues, cache: KVCacheManager) -> None:
    running, waiting = queues.running, queues.waiting
    stats.num_running = len(running)
    for pool in cache.pools:
        stats.num_blocks += pool.num_usable
        stats.num_blocks_used += pool.num_used
    for pool in cache.host_pools:
        stats.num_host_blocks += pool.num_blocks
        stats.num_host_blocks_used += pool.num_used
    if stats.num_host_blocks_used:
        stats.num_swapped = sum([bool(seq.host_blocks) for seq in waiting])
    stats.num_waiting = len(waiting) - stats.num_swapped
    num_with_slots = stats.num_blocks_used
    for state in cache.states:
        num_with_slots -= state.pool.num_used
    stats.num_slots_allocated = num_with_slots * cache.block_size
    has_forks = len(running) + len(waiting) > len(queues.requests)
    stats.num_slots_filled = stats.num_slots_allocated - _num_unfilled_slots(running, has_forks, cache)


def progress_of(seq: Sequence, num_step_tokens: int) -> SequenceProgress:
    """Return how far a sequence is, of which the last step computed `num_step_tokens`."""
    return SequenceProgress(
        request_id=seq.request_id,
        is_running=seq.row is not None,
        num_prompt_tokens=seq.num_prompt_tokens,
        num_computed_tokens=min(seq.num_computed_tokens, seq.num_prompt_tokens),
        num_output_tokens=seq.num_output_tokens,
        num_blocks=sum(len(table) for table in seq.block_tables),
        num_step_tokens=num_step_tokens,
    )


def _num_unfilled_slots(running: list[Sequence], has_forks: bool, cache: KVCacheManager) -> int:
    """Return the number of slots in referenced blocks that hold no token: the slots behind each sequence's tokens, and
    the slots of draft tokens in flight."""
    size, unfilled = cache.block_size, 0
    for group in [attention.group for attention in cache.attention]:
        # A step reads the numbers of slots, but few block tables: by now these are in no cache of the processor.
        slots = [seq.num_ready_slots or len(seq.block_tables[group]) * size for seq in running]
        unfilled += sum(slots) - sum([seq.num_computed_tokens for seq in running])
        if has_forks:  # they may still share the block that they write to next
            seen: set[int] = set()
            for seq in running:
                num_unfilled = -seq.num_computed_tokens % size
                if num_unfilled:
                    block = seq.block_tables[group][seq.num_computed_tokens // size]
                    unfilled -= num_unfilled if block in seen else 0
                    seen.add(block)
    return unfilled
