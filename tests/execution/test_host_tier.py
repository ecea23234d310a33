"""Blocks that leave a device with memory of its own come back from the host with their bits, whatever the layers keep,
and answers are those of an engine that keeps none on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.config import CacheConfig, EngineConfig
from octavo.engine.core import EngineCore
from octavo.kv_cache import host_tier
from octavo.kv_cache.block_pool import BlockName
from octavo.request import EngineRequest, Prompt
from octavo.sampling_params import SamplingParams
from tests.execution.late_device import LateDevice
from tests.execution.small_overrides import BAMBA, CUT, DEEPSEEK, GEMMA_3N, MAMBA
from tests.execution.test_runner import config_of, device_core, model, requests, run, told
from tests.ops import torch_ref

__all__ = ["model"]

KINDS: dict[str, dict[str, Any]] = {
    "full": {"num_gpu_blocks_override": 13},
    "swapped too": {"num_gpu_blocks_override": 13, "preemption_mode": "swap"},
    "eight bits": {"num_gpu_blocks_override": 17, "kv_cache_dtype": "int8"},
    "windows": {"num_gpu_blocks_override": 40, "hf_overrides": CUT | GEMMA_3N},
    "states": {"num_gpu_blocks_override": 9, "hf_overrides": CUT | MAMBA},
    "states and attention": {"num_gpu_blocks_override": 13, "hf_overrides": CUT | BAMBA},
    "latent attention": {"num_gpu_blocks_override": 13, "hf_overrides": CUT | DEEPSEEK},
    "n-grams": {"num_gpu_blocks_override": 13, "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
}


@pytest.fixture(autouse=True)
def loads_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models compute faster than a bus."""
    monkeypatch.setattr(host_tier, "_LOAD_S_PER_BYTE", 0.0)


def kept(config: EngineConfig, num_bytes: int = 1 << 20) -> EngineConfig:
    return replace(config, cache=replace(config.cache, host_bytes=num_bytes))


class LoadedBlocks:
    """The blocks of a pool that have come from the host since they were last indexed."""

    def __init__(self, core: EngineCore, pool: int) -> None:
        self.cache, self.worker, self.pool = core.scheduler.cache, core.executor.worker, pool
        self.blocks: dict[bytes, int] = {}
        self.cache.pools[pool].watchers.append(self)

    def entered(self, name: BlockName, block: int) -> None:
        if self.cache.is_loaded_later(self.pool, block):
            self.blocks[name[1]] = block

    def leaves(self, name: BlockName, block: int) -> None:
        self.blocks.pop(name[1], None)

    def check(self) -> int:
        """Compare them with the host's, and return their number."""
        on_host = {key: block for key, block in self.cache.host_pools[self.pool]._index.items() if key in self.blocks}
        for key, block in on_host.items():
            device = torch_ref.gather_blocks(np.array([self.blocks[key]]), self.worker._cache[self.pool]).numpy()
            assert (self.worker._mover._pools[self.pool]._host[block] == device).all()
        return len(on_host)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.long] * (i > 0)) for i, kind in enumerate(KINDS)]
)
def test_a_block_from_the_host_has_the_bits_of_a_computed_one(kind: str, model: Path) -> None:
    config, device = config_of(model, **KINDS[kind]), LateDevice(1)
    core, plain = device_core(kept(config), device), device_core(config, LateDevice(1))
    loaded = [LoadedBlocks(core, pool) for pool in range(len(core.scheduler.cache.pools))]
    num_checked = 0
    for seed in (1, 2, 1):
        found, expected = run(core, requests(seed), seed), run(plain, requests(seed), seed)
        assert {key: told(one) for key, one in found.items()} == {key: told(one) for key, one in expected.items()}
        for stream in (device.compute, device.copies):
            stream.record().wait()
        num_checked += sum(of_pool.check() for of_pool in loaded)
    assert num_checked > 0


def test_an_aborted_request_leaves_what_is_being_copied_right(model: Path) -> None:
    """Its blocks are on their way, to the host or back."""
    device = LateDevice(1)
    core = device_core(kept(config_of(model, num_gpu_blocks_override=13)), device)
    plain = device_core(config_of(model, num_gpu_blocks_override=13), LateDevice(1))
    expected = {key: told(one) for key, one in run(plain, requests(1), 1).items()}
    num_copied = num_hits = 0
    for _ in range(3):
        for request in requests(1):
            core.add(request)
            for _ in range(2):
                stats = core.step().stats
                num_copied, num_hits = num_copied + stats.num_host_copied, num_hits + stats.num_host_hits
            core.abort(request.request_id)
        assert {key: told(one) for key, one in run(core, requests(1), 1).items()} == expected
    assert num_copied > 0 and num_hits > 0


def test_a_prefix_cache_that_is_reset_is_empty_on_the_host_too(model: Path) -> None:
    """Nothing is found, and what has not yet been copied never is."""
    core = device_core(kept(config_of(model, num_gpu_blocks_override=13)), LateDevice(1))
    cache = core.scheduler.cache
    run(core, requests(1), 1)
    prompt = EngineRequest("r", Prompt(list(range(3, 60))), SamplingParams(temperature=0.0, max_tokens=8), [], 8, 0.0)
    for _ in range(3):
        core.reset_prefix_cache()
        assert not any(pool._index for pool in [*cache.pools, *cache.host_pools])
        core.add(prompt)
        for _ in range(3):
            stats = core.step().stats
            assert (stats.num_host_copied, stats.num_host_hits) == (0, 0)
            if cache.pools[0]._index:
                break
        assert len(cache.pools[0]._index) > 1, "blocks that are not yet copied"
        core.abort(prompt.request_id)


def test_the_memory_of_the_host_is_bounded_and_shared_out(model: Path) -> None:
    core = device_core(kept(config_of(model), 1 << 20), LateDevice(0))
    [num_blocks], [block_bytes] = core.executor.num_host_blocks, core.executor.block_bytes
    assert num_blocks * block_bytes <= 1 << 20 < (num_blocks + 1) * block_bytes
    assert core.scheduler.cache.host_pools[0].num_blocks == num_blocks


def test_buffers_for_copies_are_counted_before_the_cache(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = list[int]()
    offer = LateDevice.cache_bytes

    def noted(device: LateDevice, config: CacheConfig, step: Callable[[], None], other_bytes: int) -> tuple[int, str]:
        counted.append(other_bytes)
        return offer(device, config, step, other_bytes)

    monkeypatch.setattr(LateDevice, "cache_bytes", noted)
    for config in (config_of(model), kept(config_of(model), 1 << 20), config_of(model, preemption_mode="swap")):
        core = device_core(config, LateDevice(0))
        [pool] = core.executor.worker._mover._pools
        taken = sum(buffer.blocks.nbytes for buffer in pool._staging_buffers)
        assert counted[-1] - counted[0] >= taken * 3 // 2
    assert taken > 0


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("flags", [{}, {"preemption_mode": "swap"}])
def test_memory_that_runs_out_beside_copies_ends_the_newest_request_only(model: Path, flags: dict[str, Any]) -> None:
    """At one piece of work in ten, each in a run of its own; what the host keeps goes from run to run."""
    device = LateDevice(0)
    core = device_core(kept(config_of(model, num_gpu_blocks_override=13, **flags)), device)
    asked = requests(5, 8, ignore_eos=True)
    expected = {key: told(one) for key, one in run(core, asked, 5).items()}
    device.num_given, ended = 0, set[tuple[str, int]]()
    assert {key: told(one) for key, one in run(core, asked, 5).items()} == expected
    for first in range(0, device.num_given, 10):
        device.num_given, device.refused = 0, range(first, first + 2)
        found = {key: told(one) for key, one in run(core, asked, 5).items()}
        failed = {key for key, outcome in found.items() if outcome["end"][0] == "error"}
        assert len({request_id for request_id, _ in failed}) <= 2
        assert all(found[key]["status"] == 503 for key in failed)
        assert all(found[key] == expected[key] for key in found.keys() - failed)
        ended |= failed
    assert ended
