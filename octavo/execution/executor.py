"""The executor stands between the engine core and the workers that run a model: it sends them plans and returns
results.

`LocalExecutor` has one worker in its own process. `MultiprocExecutor` has the first of several workers and sends plans
to the others.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.execution.device import Device
from octavo.execution.worker import Worker
from octavo.execution.worker_group import ALONE, Leader, WorkerGroup
from octavo.layers.tensor_parallel import Shard
from octavo.loading.default_model import cache_dir
from octavo.models.registry import describe
from octavo.ops import Ops, load, load_cuda
from octavo.phases import Phases
from octavo.request import AdapterSource, MediaInput
from octavo.step_plan import AdapterMemory, BlockMoves, StepPlan, StepResult


class PendingStep(Protocol):
    """A step that was submitted to a device."""

    def result(self) -> StepResult:
        """Wait until it is computed, and return its result."""


class LocalExecutor:
    """One worker, in the core's own process."""

    def __init__(
        self,
        config: EngineConfig,
        device: Device | None = None,
        ops: Ops | None = None,
        worker_group: WorkerGroup = ALONE,
        on_loading: Callable[[float], None] | None = None,
    ) -> None:
        """Device and operations follow from `config.device`; tests pass their own. `on_loading` is called with the
        share of the weights that are loaded. Raises `LoadError` or `ConfigError` if model or cache do not fit."""
        phases = Phases()
        if device is None or ops is None:
            device, ops = _open_device(config, worker_group)
        phases.end("kernels")
        self.worker = worker = Worker(config, device, ops, phases, worker_group, on_loading)
        self.runs_ahead = device.runs_ahead  # a step may be submitted before the last step's tokens are known
        self.num_stages = worker_group.worker_rank.num_stages  # as many steps may be in flight
        self.cache_groups = worker.groups
        self.max_model_len = worker.max_model_len  # the configuration's, or less with --max-model-len auto
        self.num_blocks, self.num_host_blocks = worker.num_blocks, worker.num_host_blocks  # by pool
        self.weight_bytes, self.cache_bytes = worker.weight_bytes, worker.cache_bytes  # packed; used or not
        self.block_bytes: Sequence[int] = worker.block_bytes  # of a block of the cache, by pool
        self.part_bytes = self.block_bytes  # of the largest part of a block that one worker has, by pool
        self.hardware = [device.hardware]  # by worker
        self.other_nodes: list[str] = []  # `node_identity` of each, with a cache on disk
        self.startup = phases.seconds  # by phase
        adapters = worker.adapters
        self.adapter_memory = AdapterMemory(0, 0, 0, 1) if adapters is None else adapters.memory

    def submit(self, plan: StepPlan) -> PendingStep:
        """Submit a step, which runs after those submitted before. Raises `DeviceMemoryError` if there is too little
        memory for it; only this step is lost then."""
        return self.worker.submit(plan)

    def read_blocks(self, pool: int, blocks: Sequence[int]) -> NDArray[np.uint8]:
        """Return a copy of the contents of blocks, [len(blocks), block_bytes[pool]], the parts of several workers side
        by side. The blocks are those in the host's memory: on CPUs the cache's, and no step may be in flight, except
        with several stages; on GPUs the host tier's, after the moves under way."""
        return self.worker.read_blocks(pool, blocks)

    def write_blocks(self, pool: int, blocks: Sequence[int], contents: NDArray[np.uint8]) -> bool:
        """Overwrite blocks with `contents`, as `read_blocks` has returned them, behind the steps in flight and before
        the next one. Returns False, and changes nothing, where that needs a wait for steps in flight."""
        self.worker.write_blocks(pool, blocks, contents)
        return True

    def move_blocks(self, moves: Sequence[BlockMoves]) -> None:
        """Move blocks, by pool, outside of a step, after all steps submitted before."""
        self.worker.move_blocks(moves)

    def is_settled(self, pool: int, blocks: Sequence[int], waits: bool = False) -> bool:
        """Return whether host blocks can be read and written now: no move of them is under way, or left for lack of
        memory. With `waits`, wait for moves under way."""
        return self.worker.is_settled(pool, blocks, waits)

    def wait_for_workers(self) -> bool:
        """Wait until the other workers have computed their parts of the steps in flight: then they answer at once.
        Returns whether steps are later for it: not with two stages, as the next step waits for the first one too. A
        third stage could compute while the first one begins the next step."""
        return False

    def release_cache(self) -> None:
        """Give the cache's memory back to the system, with its contents. Raises `NotImplementedError` on devices with
        memory of their own: end the process instead."""
        self.worker.release_cache()

    def load_vocabulary(self) -> None:
        """Make the vocabulary that grammars need, in a thread which holds up steps."""
        self.worker.grammars.load_vocabulary()

    def prepare_grammar(self, grammar: str, holder: object) -> Future[None]:
        """Compile a grammar and keep it while `holder` exists. Plans may admit sequences with it when the future is
        done; it raises `RequestError` if the grammar cannot be followed."""
        return self.worker.grammars.prepare(grammar, holder)

    def prepare_adapter(self, source: AdapterSource) -> Future[int]:
        """Read an adapter into the host's memory. The future returns how many pages it takes; then plans may load it.
        It raises `RequestError` if the adapter cannot be served."""
        assert self.worker.adapters is not None, "adapters are not served"
        return self.worker.adapters.prepare(source)

    def prepare_media(self, media: Sequence[MediaInput], in_use: Callable[[], set[bytes]]) -> list[Future[Any]] | None:
        """Compute the rows of a request's media. Plans may admit sequences with them when the futures are done and
        while their hashes are in `in_use()`, which is called only if room is short. Returns None if there is no room
        beside those in use."""
        assert self.worker.tower_cache is not None, "media are not served"
        return self.worker.tower_cache.prepare(media, in_use)

    def makes_media(self) -> bool:
        """Return whether a tower computes now."""
        return self.worker.tower_cache is not None and self.worker.tower_cache.is_making

    def take_media_stats(self) -> tuple[int, int, float]:
        """Return, since the last call: media looked up, media found, and the tower's seconds for the others."""
        assert self.worker.tower_cache is not None, "media are not served"
        return self.worker.tower_cache.take_stats()

    def forget_adapter(self, identity: str) -> None:
        """Free an adapter's memory on the host."""
        assert self.worker.adapters is not None, "adapters are not served"
        self.worker.adapters.forget(identity)


class MultiprocExecutor(LocalExecutor):
    """The first of several workers, in the core's process; the others compute the same plans."""

    def __init__(self, config: EngineConfig, on_loading: Callable[[float], None] | None = None) -> None:
        model = config.model
        description = describe(model.checkpoint.config, model.impl, model.code_folder, model.pooling)
        self.worker_group = Leader(config, description)
        self._has_drafter = config.draft is not None  # True: the worker sends plans itself, with its draft tokens
        try:
            super().__init__(config, worker_group=self.worker_group, on_loading=on_loading)
            self.worker_group.wait_until_ready()
        except BaseException as error:
            self.worker_group.abandon(str(error))
            raise
        # The last steps, at least all in flight, of several stages.
        self._last_steps = deque[_LateStep](maxlen=self.num_stages)
        # By pool: host blocks that get their contents with one of these steps.
        self._copied_last = deque[list[set[int]]](maxlen=self.num_stages)
        self._num_submitted = 0  # steps
        self._unwritten = deque[_LateWrite]()  # in order
        # Blocks of the cache that are read may be those that a step in flight has still to compute.
        self._indexes_early = config.device == "cpu" and any(group.spec.kind != "full" for group in self.cache_groups)
        self._parts = list(zip(self.worker.block_bytes, *self.worker_group.block_bytes, strict=True))  # by pool
        self.block_bytes = [sum(of_pool) for of_pool in self._parts]
        self.part_bytes = [max(of_pool) for of_pool in self._parts]
        self.hardware += self.worker_group.hardware
        self.other_nodes = self.worker_group.other_nodes

    def submit(self, plan: StepPlan) -> PendingStep:
        media, rows = self.worker.tower_cache, dict[bytes, NDArray[np.float32]]()
        hashes = {item.content_hash for admission in plan.admissions for item in admission.media}
        if media is not None and hashes:
            rows = {content_hash: media.rows(content_hash) for content_hash in hashes}
            self.worker_group.send_rows(rows)
        if not self._has_drafter:
            self.worker_group.send_plan(plan)
        if self.num_stages == 1:
            return super().submit(plan)
        self._num_submitted += 1
        submit = partial(self._submit_late, plan, rows, self._num_submitted)
        # With a drafter the worker drafts now, and computes later.
        step = cast("_LateStep", submit()) if self._has_drafter else _LastStage(submit)
        self._last_steps.append(step)
        self._copied_last.append([{host_block for _, host_block in moves.swap_out} for moves in plan.moves])
        return step

    def _submit_late(self, plan: StepPlan, rows: dict[bytes, NDArray[np.float32]], number: int) -> PendingStep:
        """Submit a step of the last stage, which is computed later: `rows` are kept, as their requests may have ended
        by then. `number` counts the steps."""
        self._write_before(number)
        if rows:
            self.worker.take_rows(rows)
        return super().submit(plan)

    def wait_for_workers(self) -> bool:
        if self.num_stages > 1:
            self.worker_group.read_blocks(0, [0])
        return self.num_stages > 2

    def move_blocks(self, moves: Sequence[BlockMoves]) -> None:
        if any(moves):
            self._finish_steps()
            self.worker_group.move_blocks(moves)
            super().move_blocks(moves)

    def is_settled(self, pool: int, blocks: Sequence[int], waits: bool = False) -> bool:
        if waits:
            self._finish_steps()
        elif any(not copied[pool].isdisjoint(blocks) for copied in self._copied_last if copied):
            return False  # the last stage may not have begun to copy them
        return super().is_settled(pool, blocks, waits)

    def read_blocks(self, pool: int, blocks: Sequence[int]) -> NDArray[np.uint8]:
        is_unwritten = any(one.pool == pool and not one.blocks.isdisjoint(blocks) for one in self._unwritten)
        if self._indexes_early or is_unwritten:
            self._finish_steps()
        parts = self.worker_group.read_blocks(pool, blocks)
        return np.concatenate([super().read_blocks(pool, blocks), *parts], axis=1)

    def write_blocks(self, pool: int, blocks: Sequence[int], contents: NDArray[np.uint8]) -> bool:
        if self.worker.waiting_steps_use(pool, blocks):
            return False
        ends = np.cumsum(self._parts[pool])
        own, *parts = np.split(contents, ends[:-1], axis=1)
        self.worker_group.write_blocks(pool, blocks, parts, is_late=False)
        write = partial(self._write_last_stage, pool, blocks, parts, np.ascontiguousarray(own))
        # The last stage computes steps late. They may use the blocks for sequences that have ended since. With a
        # drafter no waiting step uses them (checked above), and the next step's drafts read them, so they are written
        # now.
        is_late = not self._has_drafter and not all(step.is_done for step in self._last_steps)
        if is_late or self._unwritten:
            self._unwritten.append(_LateWrite(self._num_submitted + 1, pool, set(blocks), write))
        else:
            write()
        return True

    def _write_last_stage(
        self, pool: int, blocks: Sequence[int], parts: Sequence[NDArray[np.uint8]], own: NDArray[np.uint8]
    ) -> None:
        """Overwrite blocks on the workers that compute a step when this one does."""
        self.worker_group.write_blocks(pool, blocks, parts, is_late=True)
        super().write_blocks(pool, blocks, own)

    def _finish_steps(self) -> None:
        """Compute the last stage of the steps in flight. Earlier stages handle plans, reads and writes of blocks in
        order, so they need no wait."""
        while self._last_steps:
            self._last_steps.popleft().result()
        self._write_before(self._num_submitted + 1)
        self._copied_last.clear()  # the worker has these copies now

    def _write_before(self, number: int) -> None:
        """Write the blocks that the step of this number, or one before it, may read."""
        while self._unwritten and self._unwritten[0].before <= number:
            self._unwritten.popleft().write()

    def prepare_adapter(self, source: AdapterSource) -> Future[int]:
        return self.worker_group.prepare_adapter(source, super().prepare_adapter(source))

    def forget_adapter(self, identity: str) -> None:
        self.worker_group.forget_adapter(identity)
        super().forget_adapter(identity)

    def release_cache(self) -> None:
        self.worker_group.release_cache()
        super().release_cache()


class _LateStep(PendingStep, Protocol):
    """A step that earlier stages compute now."""

    @property
    def is_done(self) -> bool:
        """Whether the result is known."""
        ...


class _LateWrite(NamedTuple):
    """Contents of blocks that the last stage writes before it computes a step."""

    before: int  # the number of the step
    pool: int
    blocks: set[int]
    write: Callable[[], object]


class _LastStage:
    """A step that earlier stages compute now; the last stage computes it when its result is wanted."""

    def __init__(self, submit: Callable[[], PendingStep]) -> None:
        self._submit = submit
        self._result: StepResult | None = None

    @property
    def is_done(self) -> bool:
        return self._result is not None

    def result(self) -> StepResult:
        if self._result is None:
            self._result = self._submit().result()
        return self._result


def make_executor(config: EngineConfig, on_loading: Callable[[float], None] | None = None) -> LocalExecutor:
    """Return an executor with the configured workers. Raises as `LocalExecutor` does."""
    if config.nodes.rank:
        raise ConfigError(
            f"--node-rank {config.nodes.rank} has no engine of its own: run `octavo serve --headless` there."
        )
    num_workers = config.tensor_parallel_size * config.pipeline_parallel_size
    if num_workers == 1:
        return LocalExecutor(config, on_loading=on_loading)
    return MultiprocExecutor(config, on_loading)


def _open_device(config: EngineConfig, worker_group: WorkerGroup) -> tuple[Device, Ops]:
    if config.device == "cuda":
        return _open_cuda(worker_group)
    from octavo.execution.cpu_device import CpuDevice

    shard, on_host = worker_group.shard, worker_group.worker_rank.on_host
    num_workers = on_host.size * len(config.local_ranks)
    if num_workers == 1:
        return CpuDevice(), load(config.cpu_threads, config.cpus)
    from octavo.ops import cpu

    # The number of workers of all the server's engines on this host.
    of_threads = Shard(config.place * on_host.size + on_host.rank, num_workers)
    num_threads, default_cpus = cpu.default_threads()
    own = of_threads.cut(config.cpu_threads or num_threads)
    cpus = None if config.cpus is None else [config.cpus[i] for i in own]
    ops = load(max(1, len(own)), cpus or None)
    if default_cpus and own and not (config.cpus or config.cpu_threads):
        cpu.keep_threads_on([default_cpus[i] for i in own])
    if not shard.is_whole:
        cpu.join_group(shard.rank, shard.size, worker_group.memory, worker_group.memory_bytes, worker_group.connections)
    return CpuDevice(), ops


def _open_cuda(worker_group: WorkerGroup) -> tuple[Device, Ops]:
    """Open the device of this worker: its index among the host's workers."""
    from octavo.execution.cuda_device import CudaDevice

    device, shard = CudaDevice(worker_group.worker_rank.on_host.rank), worker_group.shard
    if archive := os.environ.get("OCTAVO_KERNELS"):
        from octavo.ops.triton.kernel_archive import use_archive

        use_archive(archive, cache_dir() / "kernels")
    worker_group.largest(0)  # waits for all workers: one without a device has failed by now
    if not shard.is_whole:
        from octavo.ops.cuda_collectives import join_group

        join_group(shard.rank, shard.size, worker_group.memory, worker_group.connections)
    return device, load_cuda()
