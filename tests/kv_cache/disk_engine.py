"""An engine of pools, their memory and a tier on disk, for tests of the tier."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.kv_cache.block_files import BlockFiles
from octavo.kv_cache.block_pool import BlockName
from octavo.kv_cache.disk_fetches import Fetch, Readiness
from octavo.kv_cache.disk_tier import DiskTier
from octavo.kv_cache.groups import LayerCacheSpec, group_layers
from octavo.kv_cache.manager import KVCacheManager
from octavo.request import EngineRequest, Prompt
from octavo.sampling_params import SamplingParams
from octavo.sequence import Sequence as TokenSequence
from octavo.stats import EngineStats
from octavo.step_cost import StepCostModel
from tests.waiting import wait_until

SIZE, NUM_BLOCKS = 4, 12
BLOCK_BYTES = 64
FULL = LayerCacheSpec("full", num_kv_heads=2, key_size=8, value_size=8)
WINDOW = LayerCacheSpec("window", num_kv_heads=2, key_size=8, value_size=8, window=6)
STATE = LayerCacheSpec("state", num_bytes=32)


class Memory:
    """The memory of the pools."""

    is_in_use = False  # by a step in flight

    def __init__(self, num_blocks: list[int]) -> None:
        self.block_bytes = [BLOCK_BYTES] * len(num_blocks)
        self.blocks = [np.zeros((count, BLOCK_BYTES), np.uint8) for count in num_blocks]

    def read_blocks(self, pool: int, blocks: Sequence[int]) -> NDArray[np.uint8]:
        return self.blocks[pool][list(blocks)]

    def wait_for_workers(self) -> bool:
        return False

    def write_blocks(self, pool: int, blocks: Sequence[int], contents: NDArray[np.uint8]) -> bool:
        if self.is_in_use:
            return False
        self.blocks[pool][list(blocks)] = contents
        return True


class Engine:
    """Pools, their memory, and the tier. A block is computed by writing a hash of its key."""

    def __init__(self, folder: Path, layers: Sequence[LayerCacheSpec] = (FULL,)) -> None:
        groups = group_layers(layers)
        num_pools = 1 + max(group.pool for group in groups)
        num_blocks = [NUM_BLOCKS * sum(group.pool == pool for group in groups) for pool in range(num_pools)]
        self.cache = KVCacheManager(groups, num_blocks, SIZE, [0] * num_pools, True)
        self.memory, self.now = Memory(num_blocks), 0.0
        self.cost = StepCostModel.derived(10**9, 1000, 1e10, 1e11)
        self.files = BlockFiles(str(folder), b"f" * 16, 1 << 20)
        self.tier = DiskTier(self.files, self.memory, self.cache, self.cost, lambda: self.now)

    def compute(self, tokens: list[int]) -> TokenSequence:
        """Run a prompt to its end, a block at a time as with states, and keep its blocks."""
        seq = TokenSequence(request=request(tokens), key=(0, 0), seed=0, token_ids=list(tokens))  # type: ignore[arg-type]
        assert self.cache.share_prefix(seq, self.cache.find_prefix(seq), 64)
        while seq.num_computed_tokens < len(tokens):
            end = min(len(tokens), seq.num_computed_tokens + SIZE)
            assert self.cache.grow(seq, end) is not None
            for pool, moves in enumerate(self.cache.take_moves()):
                for source, target in moves.copy:
                    self.memory.blocks[pool][target] = self.memory.blocks[pool][source]
            for group, table in enumerate(seq.block_tables):
                pool = self.cache._pool_of[group]
                self.memory.blocks[pool][table[-1]] = np.random.default_rng([group, *tokens[:end]]).integers(
                    0, 256, BLOCK_BYTES, np.uint8
                )
            seq.num_computed_tokens = end
            self.cache.register_computed(seq, end)
        self.cache.release(seq)
        return seq

    def contents(self) -> dict[BlockName, bytes]:
        """What the index of each pool leads to."""
        return {
            (number, key): self.memory.blocks[number][block].tobytes()
            for number, pool in enumerate(self.cache.pools)
            for key, block in pool._index.items()
        }

    def save(self) -> None:
        while self.tier.save_while_idle():
            pass
        self.tier.writer.wait_until_saved()

    def begin(
        self, tokens: list[int], name: str = "r", may_wait: bool = True, **params: Any
    ) -> tuple[TokenSequence, Fetch | None]:
        """Let it be the turn of a prompt."""
        asked = request(tokens, **params)
        asked.request_id = name
        seq = TokenSequence(request=asked, key=(0, 0), seed=0, token_ids=list(tokens))  # type: ignore[arg-type]
        self.tier.fetches.prepare(seq, may_wait)
        return seq, self.tier.fetches._by_request[name]

    def fetched(self, tokens: list[int], **params: Any) -> Fetch | None:
        """Let it be the turn of a prompt until it starts."""
        seq, fetch = self.begin(tokens, **params)
        wait_until(lambda: self.tier.fetches.prepare(seq, may_wait=True) is Readiness.READY)
        self.tier.fetches.forget(seq)
        return fetch

    def stats(self) -> EngineStats:
        stats = EngineStats()
        self.tier.take_stats(stats)
        return stats


def request(tokens: list[int], **params: Any) -> EngineRequest:
    return EngineRequest("r", Prompt(list(tokens)), SamplingParams(**params), [0], 16, 0.0)


def takes_3_ms(one: Engine) -> None:
    """Have the copy of a block take so long, and nothing else."""
    read = one.memory.read_blocks

    def slow(pool: int, blocks: Sequence[int]) -> NDArray[np.uint8]:
        one.now += 0.003
        one.tier.writer.write_s = 0.0
        return read(pool, blocks)

    one.memory.read_blocks = slow  # type: ignore[method-assign]


def held(work: Callable[..., Any]) -> tuple[Callable[..., Any], threading.Event, threading.Event]:
    """Return `work` that says when it has begun and waits until it may go on."""
    began, may_go = threading.Event(), threading.Event()

    def wait(*args: Any) -> Any:
        began.set()
        may_go.wait()
        return work(*args)

    return wait, began, may_go


def turn_of(engine: Engine, tokens: list[int], session: str, ttl_s: float = 1000.0) -> None:
    """Run a prompt of a session."""
    seq = engine.compute(tokens)
    seq.request.cache_session, seq.request.cache_ttl_s = session, ttl_s
    engine.tier.sessions.keep(seq)
