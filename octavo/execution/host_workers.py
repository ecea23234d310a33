"""The worker processes of one host, and the memory and sockets through which they exchange rows.

The first worker starts the workers of its own host. On other hosts `octavo.execution.node` starts them.
"""

import contextlib
import logging
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from octavo.config import EngineConfig
from octavo.execution.stage_links import LinkEnd, LinkEnds, LinkPair, WorkerRank, shared_memory, worker_ranks_of
from octavo.logs import current_format
from octavo.models.description import ModelDescription
from octavo.models.sharding import all_gather_size
from octavo.ops.cpu_collectives import group_bytes
from octavo.processes import child_command

_EXIT_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class FollowerArgs:
    """The arguments of a follower: a line of JSON on its standard input, which stays open while its parent lives."""

    config: EngineConfig
    worker_rank: WorkerRank
    control: int  # its connection to the first worker
    memory: int  # the file of the stage's collectives; workers with devices only find each other there
    memory_bytes: int
    ends: LinkEnds
    log_level: int
    log_format: str


def configured_worker_ranks(config: EngineConfig) -> list[WorkerRank]:
    return worker_ranks_of(config.pipeline_parallel_size, config.tensor_parallel_size, config.nodes.size)


class HostWorkers:
    """The workers of a host's stages: shared memory, links between stages, processes."""

    def __init__(
        self, config: EngineConfig, description: ModelDescription, entering: Sequence[int], leaving: Sequence[int]
    ) -> None:
        """`entering` are connections from the stage before this host's first one, `leaving` to the stage after its last
        one, by rank; empty at the ends of the pipeline. `let_go` closes them."""
        self._config, self._entering, self._leaving = config, entering, leaving
        self.worker_ranks = [
            worker_rank for worker_rank in configured_worker_ranks(config) if worker_rank.node == config.nodes.rank
        ]
        size, num_stages, limits = config.tensor_parallel_size, config.pipeline_parallel_size, config.scheduler
        num_samples = max(limits.max_num_batched_tokens, limits.max_num_seqs)
        of_token = max(size * description.hidden_size, all_gather_size(description))
        most = max(limits.max_num_batched_tokens * of_token, num_samples * description.vocab_size)
        # Devices exchange rows by NCCL; the file only holds what they need to find each other.
        self.memory_bytes = 0 if config.device == "cuda" else group_bytes(size, most)
        stages = range(self.worker_ranks[0].stage, self.worker_ranks[-1].stage + 1)
        self._memories = {stage: shared_memory(self.memory_bytes) for stage in stages}
        self._slots, self._slot_bytes = num_stages + 1, limits.max_num_batched_tokens * description.stage_width * 4
        self._pairs = {
            stage: [LinkPair(self._slots, self._slot_bytes) for _ in range(size)] for stage in stages[:-1]
        }  # by the sending stage
        self._first, self._last = stages[0], stages[-1]
        self.processes: list[subprocess.Popen[bytes]] = []

    def memory(self, worker_rank: WorkerRank) -> int:
        """Return the descriptor of the memory of a worker's stage."""
        return self._memories[worker_rank.stage]

    def ends(self, worker_rank: WorkerRank) -> LinkEnds:
        """Return a worker's ends of the links to the previous and the next stage."""
        stage, rank = worker_rank.stage, worker_rank.shard.rank
        previous = following = None
        if stage > self._first:
            previous = self._pairs[stage - 1][rank].end
        elif self._entering:
            previous = LinkEnd(self._entering[rank])
        if stage < self._last:
            following = self._pairs[stage][rank].start
        elif self._leaving:
            following = LinkEnd(self._leaving[rank])
        return LinkEnds(self._slots, self._slot_bytes, previous, following)

    def start(self, worker_rank: WorkerRank, control: int) -> None:
        """Start a worker. `control` is its connection to the first one."""
        ends, memory = self.ends(worker_rank), self.memory(worker_rank)
        level = logging.getLogger("octavo").getEffectiveLevel()
        args = FollowerArgs(
            self._config, worker_rank, control, memory, self.memory_bytes, ends, level, current_format()
        )
        process = subprocess.Popen(
            child_command("octavo.execution.follower"), stdin=subprocess.PIPE,
            pass_fds=[control, memory, *ends.descriptors],
        )  # fmt: skip
        self.processes.append(process)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once: the first worker notices when it waits for it
            process.stdin.write(msgspec.json.encode(args) + b"\n")
            process.stdin.flush()

    def let_go(self, own: WorkerRank | None = None) -> None:
        """Close descriptors that only the worker processes use. This process, the worker `own`, keeps its stage's
        memory and its link to the stage before."""
        for stage, pairs in self._pairs.items():
            for rank, pair in enumerate(pairs):
                pair.let_go(keeps_end=own is not None and (stage, rank) == (own.stage - 1, own.shard.rank))
        for stage, memory in self._memories.items():
            if own is None or stage != own.stage:
                os.close(memory)
        for rank, connection in enumerate(self._entering):
            if own is None or (self._first, rank) != (own.stage, own.shard.rank):
                os.close(connection)
        for connection in self._leaving:
            os.close(connection)


def end_processes(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait for workers whose connections to the first one are closed, and kill those that do not end."""
    deadline = time.monotonic() + _EXIT_GRACE_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # if it has not read its input
                process.stdin.close()
