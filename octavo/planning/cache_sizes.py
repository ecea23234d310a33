"""Computes the size of a model's cache, per token and per request, and how many requests fit into some memory. The
specifications of caches, the groups that share blocks and the blocks of a request come from the engine's own code.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from octavo.config import CacheConfig, EngineConfig
from octavo.execution import capacity
from octavo.execution.block_mover import block_bytes, layer_cache
from octavo.execution.cpu_device import CpuDevice
from octavo.kv_cache.groups import CacheGroup, LayerCacheSpec, group_layers
from octavo.ops import load

_SCALE_BYTES = 4  # two bfloat16 scales for a token and head on GPUs, if elements are bytes
_ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """The sizes of one model's caches in one type."""

    config: EngineConfig
    groups: tuple[CacheGroup, ...]
    block_bytes: tuple[int, ...]  # by pool: bytes of a block in all layers that share it

    @property
    def token_bytes(self) -> int:
        """Return the bytes of a token in a request that is shorter than every window."""
        return self._bytes_a_token("full", "window")

    @property
    def later_token_bytes(self) -> int:
        """Return the bytes that each further token adds to a request that is longer than every window."""
        return self._bytes_a_token("full")

    @property
    def state_bytes(self) -> int:
        """Return the bytes of a request's states, which do not depend on its length."""
        return sum(self.block_bytes[group.pool] for group in self.groups if group.spec.kind == "state")

    def _bytes_a_token(self, *kinds: str) -> int:
        of_block = sum(self.block_bytes[group.pool] for group in self.groups if group.spec.kind in kinds)
        return of_block // self.config.cache.block_size

    def request_bytes(self, num_tokens: int) -> int:
        """Return the bytes of one request of `num_tokens` tokens, prompt and output together."""
        needed = capacity.request_blocks(self.config, self.groups, num_tokens)
        return sum(count * size for count, size in zip(needed, self.block_bytes, strict=True))

    def num_requests(self, num_tokens: int, budget_bytes: int) -> int:
        """Return how many requests of `num_tokens` fit into `budget_bytes`, ignoring --max-num-seqs."""
        return max(0, budget_bytes) // max(1, self.request_bytes(num_tokens))


def cache_sizes(config: EngineConfig, specs: Sequence[LayerCacheSpec], dtype: str, on_gpu: bool) -> CacheSizes:
    """Return the sizes for a cache of `dtype`. Raises `ConfigError` if no kernel supports such a cache."""
    config = replace(config, cache=replace(config.cache, dtype=dtype))
    groups = group_layers(specs)
    sizes = []
    for pool in range(capacity.num_pools(groups)):
        of_pool = [group for group in groups if group.pool == pool]
        num_layers = 1 if config.cache.is_scratch else max(len(group.layers) for group in of_pool)
        one = _gpu_block_bytes if on_gpu else _cpu_block_bytes
        sizes.append(num_layers * one(config.cache, of_pool[0].spec))
    return CacheSizes(config, groups, tuple(sizes))


def _cpu_block_bytes(config: CacheConfig, spec: LayerCacheSpec) -> int:
    return block_bytes(layer_cache(config, CpuDevice(), load(), spec, 1))


def _gpu_block_bytes(config: CacheConfig, spec: LayerCacheSpec) -> int:
    """Return the bytes of a block as `octavo.ops.triton.cache` allocates it. That module needs torch, which may be
    missing on the machine that plans."""
    if spec.kind == "state":
        return spec.num_bytes
    element = _ELEMENT_BYTES.get(config.dtype, 1)
    head = (spec.key_size + spec.value_size) * element + (_SCALE_BYTES if element == 1 else 0)
    return int(np.prod((config.block_size, spec.num_kv_heads, head)))
