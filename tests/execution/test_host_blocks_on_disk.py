"""`--kv-cache-disk` below the host tier of a device with memory of its own: what reaches the disk has the bits that the
device has, what comes back has them too, and answers are those of an engine that keeps nothing."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from octavo.config import DiskCacheConfig, EngineConfig
from octavo.engine.core import EngineCore
from octavo.execution.block_mover import BlockMover
from octavo.execution.drafting_runner import DraftingRunner
from octavo.execution.executor import MultiprocExecutor
from octavo.execution.stage_links import WorkerRank
from octavo.execution.worker import Worker
from octavo.kv_cache import disk_fetches, host_tier
from octavo.kv_cache.block_pool import BlockName
from octavo.kv_cache.reader_threads import ReaderThreads
from octavo.layers.tensor_parallel import Shard
from octavo.ops import LayerKVCache
from octavo.request import EngineRequest, Prompt
from octavo.sampling_params import SamplingParams
from octavo.stats import EngineStats
from octavo.step_cost import ReadCost
from octavo.step_plan import BlockMoves, StepPlan
from tests.execution.late_device import LateDevice
from tests.execution.test_draft_model import assert_same, run_with_right_guesses, sometimes
from tests.execution.test_host_tier import KINDS, LoadedBlocks
from tests.execution.test_runner import EOS, config_of, device_core, late_executor, model, requests, run
from tests.ops import torch_ref

__all__ = ["model"]
pytestmark = pytest.mark.usefixtures("reads_are_worth_it")

DOCUMENT = [5 + i % 200 for i in range(60)]
BLOCK_BYTES = 4096  # of `model`, for 8 tokens: two layers with two heads of 16 keys and 16 values each


@pytest.fixture
def reads_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models compute faster than a bus and a disk. What is read is there at once, so that no thread decides in
    which step a sequence starts."""

    def run_now(threads: ReaderThreads, work: Callable[[], Any]) -> Future[Any]:
        done = Future[Any]()
        done.set_result(work())
        return done

    monkeypatch.setattr(host_tier, "_LOAD_S_PER_BYTE", 0.0)
    monkeypatch.setattr(ReadCost, "seconds", lambda self, num_bytes: 0.0)
    monkeypatch.setattr(disk_fetches, "_PATIENCE", 1e9)
    monkeypatch.setattr(ReaderThreads, "run", run_now)


def on_disk(config: EngineConfig, folder: Path, host_bytes: int = 4 << 20) -> EngineConfig:
    disk = DiskCacheConfig(str(folder), 1 << 30)
    return replace(config, cache=replace(config.cache, host_bytes=host_bytes, disk=disk))


def late_core(config: EngineConfig, folder: Path, seed: int = 1, **settings: Any) -> EngineCore:
    return device_core(on_disk(config, folder, **settings), LateDevice(seed))


def saved(core: EngineCore) -> dict[BlockName, bytes]:
    """Save all blocks. Return those on disk that the device has too."""
    assert core.disk is not None and core.disk.save_all()
    found = {}
    for number, pool in enumerate(core.scheduler.cache.pools):
        for name in [(number, key) for key in pool._index]:
            into = np.empty(core.executor.block_bytes[number], np.uint8)
            if core.disk.files.read(name, into):
                found[name] = into.tobytes()
    return found


def blocks_read(core: EngineCore) -> dict[BlockName, bytes]:
    """Return a dictionary that gets the blocks that are read from disk from now on."""
    assert core.disk is not None
    files, found = core.disk.files, dict[BlockName, bytes]()
    read = files.read

    def noted(name: BlockName, into: Any) -> bool:
        is_read = read(name, into)
        if is_read:
            found[name] = into.tobytes()
        return is_read

    files.read = noted  # type: ignore[method-assign]
    return found


def on_host(core: EngineCore) -> dict[BlockName, bytes]:
    return {
        (number, key): core.executor.read_blocks(number, [block]).tobytes()
        for number, pool in enumerate(core.scheduler.cache.host_pools)
        for key, block in pool._index.items()
    }


def on_device(core: EngineCore) -> dict[BlockName, bytes]:
    """Return the blocks that the device has, when it has done all its work."""
    device: Any = core.executor.worker._device
    for stream in (device.compute, device.copies):
        stream.record().wait()
    return {
        (number, key): torch_ref.gather_blocks(np.array([block]), core.executor.worker._cache[number]).numpy().tobytes()
        for number, pool in enumerate(core.scheduler.cache.pools)
        for key, block in pool._index.items()
    }


def counted(core: EngineCore) -> EngineStats:
    """Count what steps report from now on."""
    total, step = EngineStats(), core.step

    def counting() -> Any:
        outputs = step()
        for name in ("num_disk_hits", "num_disk_damaged", "num_disk_written", "disk_read_bytes", "num_host_hits"):
            setattr(total, name, getattr(total, name) + getattr(outputs.stats, name))
        return outputs

    core.step = counting  # type: ignore[method-assign]
    return total


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.long] * (i > 1)) for i, kind in enumerate(KINDS)]
)
def test_the_next_engine_has_from_disk_what_the_last_one_computed(kind: str, model: Path, tmp_path: Path) -> None:
    config = config_of(model, **KINDS[kind])
    first, plain = late_core(config, tmp_path), device_core(config, LateDevice(1))
    expected = run(plain, requests(1), 1)
    assert_same(run(first, requests(1), 1), expected, "late device")
    kept, computed = saved(first), on_device(first)
    assert kept and kept == {name: computed[name] for name in kept}
    assert kept.keys() == computed.keys()
    assert first.disk is not None
    first.disk.close()

    second = late_core(config, tmp_path, seed=2)
    loaded, total = [LoadedBlocks(second, pool) for pool in range(len(second.scheduler.cache.pools))], counted(second)
    read = blocks_read(second)
    assert_same(run(second, requests(1), 1), expected, "late device")
    assert total.num_disk_hits > 0 and total.disk_read_bytes > 0 and total.num_host_hits > 0
    on_device(second)
    assert sum(of_pool.check() for of_pool in loaded) > 0
    assert read and all(on_host(second)[name] == contents for name, contents in read.items())
    assert second.disk is not None
    second.disk.close()


def test_damaged_files_are_computed_again(model: Path, tmp_path: Path) -> None:
    config = config_of(model)
    first = late_core(config, tmp_path)
    expected = run(first, requests(1), 1)
    names = saved(first)
    assert first.disk is not None
    first.disk.close()
    for pool, key in names:
        [file] = tmp_path.rglob(f"{key.hex()}-{pool}")
        file.write_bytes(file.read_bytes()[:-40])
    second = late_core(config, tmp_path)
    total = counted(second)
    assert_same(run(second, requests(1), 1), expected, "late device")
    assert total.num_disk_damaged > 0 and total.num_disk_hits == 0
    assert second.disk is not None
    second.disk.close()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 6))])
@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
def test_no_block_is_saved_before_it_is_copied_or_written_while_it_is_copied(
    preemption_mode: str, seed: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host blocks for a few plans, which all that is saved, read, copied and swapped out takes from each other."""
    monkeypatch.setattr("octavo.kv_cache.disk_tier._GPU_BUSY_SHARE", 1e9)
    flags: dict[str, Any] = {"num_gpu_blocks_override": 13, "preemption_mode": preemption_mode, "swap_space": 1e-9}
    large = device_core(config_of(model, num_gpu_blocks_override=2000), LateDevice(seed))
    asked = [one for one in requests(seed) if not one.params.use_beam_search]  # some have no room
    expected = run(large, asked, seed)
    computed = on_device(large)
    num_read = 0
    for number in range(3):
        core = late_core(config_of(model, **flags), tmp_path, 3 * seed + number, host_bytes=24 * BLOCK_BYTES)
        assert core.scheduler.cache.host_pools[0].num_blocks == 24
        total = counted(core)
        assert_same(run(core, asked, seed), expected, "late device")
        num_read += total.disk_read_bytes // BLOCK_BYTES
        assert core.disk is not None
        core.disk.close()
        files = core.disk.files
        names = [name for name in computed if files.knows(name)]
        assert len(names) > 10
        for name in names:
            assert files.read(name, into := np.empty(BLOCK_BYTES, np.uint8))
            assert np.allclose(into.view(np.float32), np.frombuffer(computed[name], np.float32), atol=1e-4)
    assert num_read > 10


def test_a_host_block_is_read_after_its_copy_and_written_after_it_is_read() -> None:
    device = LateDevice(0)
    ops: Any = torch_ref
    keys = torch.arange(32, dtype=torch.uint8).reshape(4, 8)
    cache = LayerKVCache(keys, torch.zeros((4, 0), dtype=torch.uint8))
    mover = BlockMover(ops, device, [[cache]], [4])
    mover.move([BlockMoves(swap_out=[(1, 2)])])
    assert mover.is_settled(0, [0, 1], waits=False) and not mover.is_settled(0, [1, 2], waits=False)
    assert mover.read_host_blocks(0, [2]).tolist() == [[*range(8, 16)]]
    assert mover.is_settled(0, [2], waits=False)
    mover.move([BlockMoves(swap_in=[(2, 3)])])
    assert not mover.is_settled(0, [2], waits=False)
    mover.write_host_blocks(0, [2], np.zeros((1, 8), np.uint8))
    assert mover.read_host_blocks(0, [2]).tolist() == [[0] * 8]
    device.compute.record().wait()
    assert keys[3].tolist() == [*range(8, 16)]


def test_copies_that_are_done_are_forgotten_where_nobody_asks_for_them() -> None:
    device = LateDevice(0)
    ops: Any = torch_ref
    parts = torch.zeros((4, 8), dtype=torch.uint8), torch.zeros((4, 0), dtype=torch.uint8)
    mover = BlockMover(ops, device, [[LayerKVCache(*parts)]], [4])
    for block in range(1, 4):
        mover.move([BlockMoves(swap_out=[(block, block)])])
        device.copies.record().wait()
    [(_, blocks)] = mover._pools[0]._under_way
    assert blocks == {3}


def test_copies_of_steps_that_are_finished_are_not_waited_for() -> None:
    executor: Any = MultiprocExecutor.__new__(MultiprocExecutor)
    step, worker = Future[Any](), SimpleNamespace(is_settled=lambda pool, blocks, waits: True)
    step.set_result(None)
    executor.worker, executor._last_steps, executor._copied_last = worker, deque([step]), deque([[{3}]])
    executor._num_submitted, executor._unwritten = 1, deque()
    assert executor.is_settled(0, [2]) and not executor.is_settled(0, [3])
    assert executor.is_settled(0, [3], waits=True) and executor.is_settled(0, [3])


@pytest.mark.parametrize(
    ("of_host", "moves", "used"),
    [
        (True, BlockMoves(swap_in=[(2, 3)]), {2}), (True, BlockMoves(swap_out=[(2, 3)]), {3}),
        (True, BlockMoves(copy=[(2, 3)]), set()), (False, BlockMoves(copy=[(2, 3)]), {2, 3}),
        (False, BlockMoves(swap_in=[(2, 3)]), {3}), (False, BlockMoves(swap_out=[(2, 3)]), {2}),
    ],
)  # fmt: skip
def test_blocks_that_others_of_a_stage_still_have_to_move_are_not_overwritten(
    of_host: bool, moves: BlockMoves, used: set[int]
) -> None:
    """They get the plan of a step that waits for earlier stages when the first worker computes it."""

    def found(size: int, is_done: bool = False) -> set[int]:
        group: Any = SimpleNamespace(shard=Shard(0, size), worker_rank=WorkerRank(1, 2, Shard(0, size)))
        runner: Any = SimpleNamespace(sequence_table=SimpleNamespace(blocks=np.zeros((1, 1, 1), np.int32)))
        worker: Any = Worker.__new__(Worker)
        worker._worker_group, worker._device = group, SimpleNamespace(shares_memory=not of_host)
        worker.groups, worker._drafting = [SimpleNamespace(pool=0)], DraftingRunner(runner, cast(Any, None), group)
        worker._drafting._waiting.append(SimpleNamespace(is_done=is_done, plan=StepPlan(moves=[moves])))
        return {block for block in range(1, 5) if worker.waiting_steps_use(0, [block])}

    assert found(2) == used and found(2, is_done=True) == found(1) == set()


def test_other_hardware_finds_nothing(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_hits = []
    for hardware in ("one GPU", "one GPU", "another GPU"):
        monkeypatch.setattr(LateDevice, "hardware", hardware)
        core = late_core(config_of(model), tmp_path)
        total = counted(core)
        core.add(EngineRequest("r", Prompt(DOCUMENT), SamplingParams(max_tokens=1), [EOS], 1, 0.0))
        while core.has_work:
            core.step()
        assert core.disk is not None
        core.disk.close()
        num_hits.append(total.num_disk_hits)
    assert num_hits == [0, 56, 0]


def test_a_device_without_memory_for_copies_saves_later(model: Path, tmp_path: Path) -> None:
    device = LateDevice(1)
    core = device_core(on_disk(config_of(model), tmp_path), device)
    core.add(EngineRequest("r", Prompt(DOCUMENT), SamplingParams(max_tokens=1), [EOS], 1, 0.0))
    while core.has_work:
        core.step()
    assert core.disk is not None
    device.memory_failures = 1.0
    assert not core.save_blocks() and device.num_failures > 0
    device.memory_failures = 0.0
    while core.save_blocks():
        pass
    kept = saved(core)
    assert len(kept) == 7 and kept == on_device(core)
    core.disk.close()


def test_a_draft_has_its_part_of_blocks_from_disk(model: Path, tmp_path: Path) -> None:
    """The model drafts for itself: where its keys were lost, draft tokens would be wrong."""
    flags = {"speculative_config": {"model": str(model), "num_speculative_tokens": 3}, "num_gpu_blocks_override": 13}
    config = on_disk(config_of(model, **flags), tmp_path)
    for seed in range(2):
        rng = random.Random(0)
        core = EngineCore(config, late_executor(config, LateDevice(seed)), sometimes(rng))
        total = counted(core)
        _, num_drafted = run_with_right_guesses(core, rng)
        assert core.disk is not None and num_drafted > 30 and (total.num_disk_hits > 0) == (seed > 0)
        core.disk.close()


def test_a_session_is_kept_and_dropped_on_all_tiers(model: Path, tmp_path: Path) -> None:
    core = late_core(config_of(model), tmp_path)
    params = SamplingParams(max_tokens=1)
    core.add(EngineRequest("r", Prompt(DOCUMENT), params, [EOS], 1, 0.0, cache_session="ada", cache_ttl_s=1000.0))
    while core.has_work:
        core.step()
    disk, cache = core.disk, core.scheduler.cache
    assert disk is not None and disk.save_all()
    assert disk.files.num_kept_bytes >= 7 * BLOCK_BYTES and cache.host_pools[0]._index
    assert disk.sessions.drop("ada", None) == 7
    disk.writer.wait_until_saved()
    assert not cache.pools[0]._index and not cache.host_pools[0]._index
    assert not saved(core) and disk.files.num_kept_bytes == 0
    assert not core.save_blocks() and not disk.files.sessions()
    disk.close()


def test_a_saved_prompt_is_on_disk_when_its_output_comes(model: Path, tmp_path: Path) -> None:
    core = late_core(config_of(model, max_num_batched_tokens=16), tmp_path)
    for i in range(4):
        prompt, params = Prompt([3 + i, *DOCUMENT]), SamplingParams(max_tokens=10, ignore_eos=True)
        core.add(EngineRequest(str(i), prompt, params, [EOS], 10, 0.0))
    params = SamplingParams(max_tokens=1)
    core.add(EngineRequest("r", Prompt(DOCUMENT), params, [EOS], 1, 0.0, saves_prompt=True))
    while not any(one.request_id == "r" for one in core.step().outputs):
        assert core.has_work
    assert core.disk is not None
    core.disk.close(saves=False)
    second = late_core(config_of(model), tmp_path)
    total = counted(second)
    second.add(EngineRequest("r", Prompt(DOCUMENT), params, [EOS], 1, 0.0))
    while second.has_work:
        second.step()
    assert total.num_disk_hits == 56
    assert second.disk is not None
    second.disk.close()
