"""A subscriber that applies the events knows which blocks the prefix cache has, and of which tokens."""

from __future__ import annotations

import random

from octavo.kv_cache.block_events import AllBlocksCleared, BlockRemoved, BlockStored
from octavo.kv_cache.groups import LayerCacheSpec, group_layers
from octavo.kv_cache.manager import KVCacheManager
from octavo.sequence import Sequence
from tests.kv_cache.test_manager import SIZE, compute, manager, sequence

FULL = LayerCacheSpec("full", num_kv_heads=2, key_size=8, value_size=8)
WINDOW = LayerCacheSpec("window", num_kv_heads=2, key_size=8, value_size=8, window=6)
STATE = LayerCacheSpec("state", num_bytes=64)


class Subscriber:
    """Knows the tokens of each cached block from the beginning of its sequence, by hash."""

    def __init__(self, cache: KVCacheManager) -> None:
        events = cache.collect_events()
        assert events is not None
        self.cache, self._events = cache, events
        self.known: dict[int, tuple[int, ...]] = {}

    def read(self) -> None:
        for event in self._events.take():
            if isinstance(event, AllBlocksCleared):
                self.known.clear()
            elif isinstance(event, BlockRemoved):
                for block in event.block_hashes:
                    del self.known[block]
            else:
                self._store(event)

    def _store(self, event: BlockStored) -> None:
        # The blocks before may have left the cache: their tokens are unknown then.
        parent = event.parent_block_hash
        before = () if parent is None else self.known.get(parent, (-1,))
        assert event.block_size == SIZE and len(event.token_ids) == SIZE * len(event.block_hashes)
        for i, block in enumerate(event.block_hashes):
            assert block not in self.known
            before = (*before, *event.token_ids[i * SIZE : (i + 1) * SIZE])
            self.known[block] = before

    def prefix(self, tokens: list[int]) -> int:
        """Return how many of the first tokens it believes to be cached."""
        whole = set(self.known.values())
        num_blocks = 0
        while tuple(tokens[: (num_blocks + 1) * SIZE]) in whole and (num_blocks + 1) * SIZE <= len(tokens):
            num_blocks += 1
        return num_blocks * SIZE


def test_a_subscriber_knows_what_a_new_prompt_would_find() -> None:
    rng = random.Random(0)
    subscriber = Subscriber(manager(num_blocks=12))
    cache, running = subscriber.cache, list[Sequence]()
    for _ in range(300):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 20))]
        salt = rng.choice([None, None, "s"])
        seq = sequence(tokens, salt)
        found = cache.find_prefix(seq)
        subscriber.read()
        if salt is None:
            assert subscriber.prefix(tokens[: (len(tokens) - 1) // SIZE * SIZE]) == found.num_tokens
        if cache.share_prefix(seq, found, 64):
            compute(cache, seq)
            running.append(seq)
        while running and (len(running) > 2 or rng.random() < 0.3):
            cache.release(running.pop(rng.randrange(len(running))))
        if rng.random() < 0.02:
            cache.forget_prefixes()
            subscriber.read()
            assert not subscriber.known


def test_blocks_of_a_salt_are_not_reported() -> None:
    subscriber = Subscriber(manager())
    compute(subscriber.cache, sequence(list(range(9)), salt="tenant"))
    subscriber.read()
    assert not subscriber.known


def test_one_group_is_reported_and_layers_without_attention_are_not() -> None:
    groups = group_layers([WINDOW, FULL, WINDOW])
    num_pools = 1 + max(group.pool for group in groups)
    subscriber = Subscriber(KVCacheManager(groups, [16] * num_pools, SIZE, [0] * num_pools, True))
    seq = sequence(list(range(1, 14)))
    compute(subscriber.cache, seq)
    subscriber.read()
    assert sorted(map(len, subscriber.known.values())) == [4, 8, 12]
    states = group_layers([STATE])
    assert KVCacheManager(states, [8], SIZE, [0], True).collect_events() is None
