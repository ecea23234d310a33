"""The workers that share a model: the first, in the engine core's process, and its followers, one process each.

The first worker sends each follower its plans and the sampled tokens. Within a step workers exchange logits and layers'
sums themselves (`octavo.ops.cpu_collectives`, `cuda_collectives`). They are connected by sockets: when a worker ends,
its socket closes, which the others notice even in the middle of a step.

Workers that shard the same layers (tensor parallelism) are a stage; stages have different layers (pipeline
parallelism). The first worker is in the last stage, which samples tokens."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import subprocess
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from octavo.config import EngineConfig
from octavo.distributed.group import NodeGroup
from octavo.errors import ConfigError, LoadError, RequestError
from octavo.execution import worker_messages
from octavo.execution.host_workers import FollowerArgs, HostWorkers, configured_worker_ranks, end_processes
from octavo.execution.stage_links import HUNG_UP, NO_LINKS, WorkerRank
from octavo.layers.tensor_parallel import Shard
from octavo.models.description import ModelDescription
from octavo.request import AdapterSource
from octavo.sampling_params import SamplingParams
from octavo.step_plan import Admission, BlockMoves, StepPlan

logger = logging.getLogger(__name__)

_LOOK_S = 0.02  # between checks whether another thread has read the answer, or the group is closed
_ANSWER_S = 60.0  # longest wait for a follower's blocks: a follower that hangs in a step sends none

_Message = TypeVar("_Message", bound=worker_messages.ToLeader)


class WorkerGroup:
    """One worker's view of its group. This class is a group of one worker."""

    worker_rank = WorkerRank()
    is_leader = True  # the first worker, which samples
    stage_links = NO_LINKS
    memory = -1
    memory_bytes = 0

    @property
    def shard(self) -> Shard:
        return self.worker_rank.shard

    @property
    def connections(self) -> list[int]:
        """Sockets to the other workers that this one is connected to."""
        return []

    def agree(self, choose: Callable[[], worker_messages.Sizes]) -> worker_messages.Sizes:
        """Return the sizes that the first worker chooses with `choose`."""
        return choose()

    def smallest(self, own: worker_messages.Offer) -> worker_messages.Offer:
        """Return the smallest offer of all workers, on the first one. The others learn the choice from `agree`."""
        return own

    def largest(self, own: int) -> int:
        """Return the largest of the workers' numbers."""
        return own

    def send_plan(self, plan: StepPlan) -> None:
        """Send a plan to the other workers; this group has none."""

    def begin_step(self) -> None:
        """Called when this worker begins to compute the next plan's rows."""

    def send_tokens(self, tokens: NDArray[np.int64]) -> None:
        """Send the sampled tokens [N] to the other workers."""

    def check(self) -> None:
        """Raise `ConnectionError` if another worker has ended: the last step's results are invalid then."""
        if not self.connections:
            return
        poll = select.poll()
        for connection in self.connections:
            poll.register(connection, HUNG_UP)  # whatever there is still to be read
        if poll.poll(0):
            raise ConnectionError("another worker of this model has ended.")


ALONE = WorkerGroup()


class Leader(WorkerGroup):
    """The first worker's view. It starts and ends the processes of this host, and is connected to the processes
    of other nodes."""

    def __init__(self, config: EngineConfig, description: ModelDescription) -> None:
        """Start the workers, and wait for the other nodes. Raises `ConfigError` if the process already has a group, or
        if a node does not fit."""
        collectives = _collectives(config.device)
        collectives.check_is_in_no_group()
        worker_ranks = configured_worker_ranks(config)
        self.worker_rank = next(
            worker_rank for worker_rank in worker_ranks if worker_rank.stage == worker_rank.num_stages - 1
        )
        self._worker_ranks = [worker_rank for worker_rank in worker_ranks if worker_rank != self.worker_rank]
        self._group = _gather(config) if config.nodes.size > 1 else None
        self._host = host = HostWorkers(config, description, self._group.links if self._group is not None else [], [])
        self.memory, self.memory_bytes = host.memory(self.worker_rank), host.memory_bytes
        self._followers: list[Connection] = []
        for worker_rank in self._worker_ranks:
            if self._group is not None and worker_rank.node != config.nodes.rank:
                self._followers.append(Connection(self._group.controls[worker_rank.number]))
                continue
            own, theirs = socket.socketpair()
            host.start(worker_rank, theirs.fileno())
            theirs.close()
            self._followers.append(Connection(own.detach()))
        self.stage_links = host.ends(self.worker_rank).open(self.connections)
        host.let_go(self.worker_rank)
        # The other workers of the last stage, if there are earlier stages. They get a plan when this worker begins to
        # compute it. If they had it earlier, they would wait for this worker in the middle of the step, and it could
        # wait for them: for blocks, or until they read a long message.
        self._late = {
            worker_rank
            for worker_rank in self._worker_ranks
            if worker_rank.num_stages > 1 and worker_rank.stage == self.worker_rank.stage
        }
        # Messages for the workers of `_late`, by step: rows of media, and the plan. The last list is of the next plan.
        self._unsent = deque[list[bytes]]([[]])
        self._listener = ThreadPoolExecutor(1, "others' adapters")  # waits for the followers' answers
        self._inboxes = [_Inbox(*one) for one in zip(self._worker_ranks, self._followers, strict=True)]
        self.block_bytes: list[list[int]] = []  # by follower and pool, once they are ready
        self.hardware: list[str] = []  # by follower
        self.other_nodes: list[str] = []  # `WorkerReady.node`
        # Runs at `close`, and when the group is garbage-collected.
        self.close = weakref.finalize(
            self, _end, collectives.leave_group, self._followers, host.processes, self.memory, self._group
        )
        if self._group is not None:
            self._group.on_loss(lambda loss: self._hang_up())

    @property
    def processes(self) -> list[subprocess.Popen[bytes]]:
        """The worker processes of this host."""
        return self._host.processes

    @property
    def connections(self) -> list[int]:
        return [follower.fileno() for follower in self._followers]

    def agree(self, choose: Callable[[], worker_messages.Sizes]) -> worker_messages.Sizes:
        chosen = choose()
        self._tell(worker_messages.AgreedSizes(chosen))
        return chosen

    def smallest(self, own: worker_messages.Offer) -> worker_messages.Offer:
        found = own
        for worker_rank, message in zip(self._worker_ranks, self._hear_all(worker_messages.MemoryOffer), strict=True):
            if message.offer.num_bytes < found.num_bytes:
                where = (
                    f"{message.offer.source} on node {worker_rank.node}"
                    if worker_rank.num_nodes > 1
                    else message.offer.source
                )
                found = worker_messages.Offer(message.offer.num_bytes, where)
        return found

    def largest(self, own: int) -> int:
        found: int = max([own, *(message.value for message in self._hear_all(worker_messages.Number))])
        self._tell(worker_messages.Number(found))
        return found

    def wait_until_ready(self) -> None:
        """Return when all followers are ready. Raises the error of one that could not start."""
        ready = self._hear_all(worker_messages.WorkerReady)
        self.block_bytes, self.hardware = [one.block_bytes for one in ready], [one.hardware for one in ready]
        self.other_nodes = [one.node for one in ready if one.node]
        if self._group is not None:
            self._group.be_ready()

    def _hear_all(self, kind: type[_Message]) -> list[_Message]:
        """Return each follower's message. Raises the error of one that could not start."""
        found = []
        for worker_rank, follower in zip(self._worker_ranks, self._followers, strict=True):
            try:
                message = worker_messages.decode_to_leader(follower.recv_bytes())
            except (EOFError, OSError):
                lost = None if self._group is None else self._group.lost
                raise LoadError(str(lost or f"{worker_rank} ended before it was ready.")) from None
            if isinstance(message, worker_messages.CannotStart):
                kind_of_error = ConfigError if message.is_of_flags else LoadError
                where = f"node {worker_rank.node}: " if worker_rank.node != self.worker_rank.node else ""
                raise kind_of_error(where + message.error)
            assert isinstance(message, kind), f"{worker_rank} says {message}"
            found.append(message)
        return found

    def _hang_up(self) -> None:
        """Close the connections to all other nodes after one is lost, so that no worker waits for another."""
        for worker_rank, follower in zip(self._worker_ranks, self._followers, strict=True):
            if worker_rank.node != self.worker_rank.node:
                hang_up(follower)
        self.stage_links.hang_up()

    def send_rows(self, rows: dict[bytes, NDArray[np.float32]]) -> None:
        """Send the rows of the next plan's media."""
        self._tell_before_step(worker_messages.encode(worker_messages.TowerRows.of(rows)))

    def send_plan(self, plan: StepPlan) -> None:
        """Send a plan, without sampling parameters, to the other workers, which do not need them. The other workers of
        the last of several stages get it with `begin_step`."""
        admissions = [_without_sampling(admission) for admission in plan.admissions]
        self._tell_before_step(worker_messages.encode(worker_messages.Plan(replace(plan, admissions=admissions))))
        self._unsent.append([])

    def begin_step(self) -> None:
        """Send the next plan, and the rows before it, to the other workers of the last of several stages."""
        if len(self._unsent) > 1:
            for data in self._unsent.popleft():
                self._tell_each(data, is_late=True)

    def send_tokens(self, tokens: NDArray[np.int64]) -> None:
        self._tell(worker_messages.SampledTokens(tokens.tobytes()))

    def prepare_adapter(self, source: AdapterSource, own: Future[int]) -> Future[int]:
        """Have the other workers read an adapter too, beside the first worker's `own` future. The result is the most
        pages that a worker needs."""
        self._tell(worker_messages.PrepareAdapter(source))
        return self._listener.submit(self._all_read, source.identity, own)

    def _all_read(self, identity: str, own: Future[int]) -> int:
        """Return the most pages of all workers. Waits for every answer even if this worker's read failed: later answers
        belong to a later request."""
        answers = [inbox.wait_for_adapter(identity) for inbox in self._inboxes]
        num_pages = own.result()
        for answer in answers:
            if answer.error is not None:
                raise (RequestError(answer.error, param="model") if answer.is_of_request else LoadError(answer.error))
        return max(num_pages, *(answer.num_pages for answer in answers))

    def move_blocks(self, moves: Sequence[BlockMoves]) -> None:
        self._tell(worker_messages.MoveBlocks(list(moves)))

    def read_blocks(self, pool: int, blocks: Sequence[int]) -> list[NDArray[np.uint8]]:
        """Return each follower's part of blocks, [len(blocks), bytes of its part]."""
        self._tell(worker_messages.ReadBlocks(pool, list(blocks)))
        return [np.frombuffer(inbox.next_contents(), np.uint8).reshape(len(blocks), -1) for inbox in self._inboxes]

    def write_blocks(self, pool: int, blocks: Sequence[int], parts: Sequence[NDArray[np.uint8]], is_late: bool) -> None:
        """Overwrite each follower's part of blocks, [len(blocks), bytes of its part]. `is_late`: of the workers that
        get plans with `begin_step`; otherwise of all others."""
        for part, worker_rank, follower in zip(parts, self._worker_ranks, self._followers, strict=True):
            if (worker_rank in self._late) == is_late:
                self._tell_one(
                    worker_rank,
                    follower,
                    worker_messages.encode(worker_messages.WriteBlocks(pool, list(blocks), part.tobytes())),
                )

    def forget_adapter(self, identity: str) -> None:
        self._tell(worker_messages.ForgetAdapter(identity))

    def release_cache(self) -> None:
        self._tell(worker_messages.ReleaseCache())

    def on_death(self, act: Callable[[str], None]) -> None:
        """Have a thread call `act`, with a reason for clients, when a follower of this host ends or another node is
        lost, unless the group is closed first."""

        def watch(worker_rank: WorkerRank, process: subprocess.Popen[bytes]) -> None:
            status = process.wait()
            if self.close.alive:
                act(f"{worker_rank} ended with status {status}")

        own = [worker_rank for worker_rank in self._worker_ranks if worker_rank.node == self.worker_rank.node]
        for worker_rank, process in zip(own, self.processes, strict=True):
            threading.Thread(target=watch, args=(worker_rank, process), name=str(worker_rank), daemon=True).start()
        if (group := self._group) is not None:
            group.on_loss(lambda loss: act(loss.for_clients))

    def abandon(self, why: str) -> None:
        """End a group that cannot start."""
        if self._group is not None:
            self._group.close(why)
        self.close()

    def say_goodbye(self) -> None:
        """Tell other nodes that this engine ends for good, on purpose."""
        if self._group is not None:
            self._group.close()

    def _tell_before_step(self, data: bytes) -> None:
        """Send a message now, and to the workers of `_late` with `begin_step`."""
        self._tell_each(data, is_late=False)
        self._unsent[-1].append(data)

    def _tell(self, message: worker_messages.ToFollower) -> None:
        data = worker_messages.encode(message)
        for is_late in (False, True):
            self._tell_each(data, is_late)

    def _tell_each(self, data: bytes, is_late: bool) -> None:
        for worker_rank, follower in zip(self._worker_ranks, self._followers, strict=True):
            if (worker_rank in self._late) == is_late:
                self._tell_one(worker_rank, follower, data)

    def _tell_one(self, worker_rank: WorkerRank, follower: Connection, data: bytes) -> None:
        try:
            follower.send_bytes(data)
        except OSError:
            raise RuntimeError(f"{worker_rank} has ended.") from None


class _Inbox:
    """Messages of one follower once it is ready. One thread waits for adapters and another for blocks; each stores the
    messages that are for the other."""

    def __init__(self, worker_rank: WorkerRank, follower: Connection) -> None:
        self._worker_rank, self._follower = worker_rank, follower
        self._adapters: dict[str, worker_messages.AdapterRead] = {}  # by identity
        self._contents: deque[bytes] = deque()
        self._lock = threading.Lock()  # held while reading the next message

    def wait_for_adapter(self, identity: str) -> worker_messages.AdapterRead:
        """Raises `LoadError` if the worker ends."""
        try:
            while identity not in self._adapters:
                if self._follower.poll(_LOOK_S):  # raises once the group is closed
                    with self._lock:
                        if self._follower.poll(0):
                            self._take_in()
        except (EOFError, OSError):
            raise LoadError(f"{self._worker_rank} has ended.") from None
        return self._adapters.pop(identity)

    def next_contents(self) -> bytes:
        """Raises `RuntimeError` if the worker ends or hangs."""
        try:
            with self._lock:
                while not self._contents:
                    if not self._follower.poll(_ANSWER_S):
                        raise RuntimeError(f"{self._worker_rank} does not answer.")
                    self._take_in()
                return self._contents.popleft()
        except (EOFError, OSError):
            raise RuntimeError(f"{self._worker_rank} has ended.") from None

    def _take_in(self) -> None:
        match worker_messages.decode_to_leader(self._follower.recv_bytes()):
            case worker_messages.AdapterRead() as answer:
                self._adapters[answer.identity] = answer
            case worker_messages.BlockContents(contents):
                self._contents.append(contents)
            case other:
                raise AssertionError(f"{self._worker_rank} says {other}")


class Follower(WorkerGroup):
    """Another worker's view: its connection to the first worker."""

    is_leader = False

    def __init__(self, leader: Connection, args: FollowerArgs) -> None:
        self.worker_rank, self.memory, self.memory_bytes = args.worker_rank, args.memory, args.memory_bytes
        self._leader = leader
        self._answering = threading.Lock()  # threads that read adapters answer too
        self.stage_links = args.ends.open(self.connections)

    @property
    def connections(self) -> list[int]:
        return [self._leader.fileno()]

    def agree(self, choose: Callable[[], worker_messages.Sizes]) -> worker_messages.Sizes:
        chosen = self.hear()
        assert isinstance(chosen, worker_messages.AgreedSizes)
        return chosen.sizes

    def smallest(self, own: worker_messages.Offer) -> worker_messages.Offer:
        self.tell(worker_messages.MemoryOffer(own))
        return own

    def hear(self) -> worker_messages.ToFollower:
        """Return the first worker's next message. Raises `EOFError` or `OSError` if it has ended."""
        message: worker_messages.ToFollower = worker_messages.decode_to_follower(self._leader.recv_bytes())
        return message

    def tell(self, message: worker_messages.ToLeader) -> None:
        data = worker_messages.encode(message)
        with self._answering:
            self._leader.send_bytes(data)

    def tell_read(self, identity: str, read: Future[int]) -> None:
        """Answer `PrepareAdapter`, in the thread that has read the adapter."""
        error = read.exception()
        if error is None:
            answer = worker_messages.AdapterRead(identity, read.result())
        elif isinstance(error, RequestError):
            answer = worker_messages.AdapterRead(identity, 0, str(error))
        else:
            logger.error("an adapter could not be read", exc_info=error)
            answer = worker_messages.AdapterRead(identity, 0, type(error).__name__, is_of_request=False)
        # If the first worker has ended, the main thread notices.
        with contextlib.suppress(OSError):
            self.tell(answer)

    def largest(self, own: int) -> int:
        self.tell(worker_messages.Number(own))
        found = self.hear()
        assert isinstance(found, worker_messages.Number)
        return found.value


def _gather(config: EngineConfig) -> NodeGroup:
    """Gather the other nodes; with --distributed-executor-backend ray, Ray starts them."""
    if config.nodes.ray_flags is None:
        return NodeGroup.gather(config)
    from octavo.execution.ray_nodes import RayNodes

    others = RayNodes(config)
    try:
        return NodeGroup.gather(others.config, others)
    except BaseException:
        others.close()  # also if no group was made that would close it
        raise


def has_hung_up(other: Connection, timeout_s: float = 0.0) -> bool:
    """Return whether the process at the other end has ended, or ends within `timeout_s`."""
    poll = select.poll()
    poll.register(other.fileno(), HUNG_UP)  # whatever there is still to be read
    return bool(poll.poll(timeout_s * 1000))


def hang_up(other: Connection) -> None:
    """Shut a connection down, so that neither end waits. Received data can still be read."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(other.fileno())) as connection:
        connection.shutdown(socket.SHUT_RDWR)


def _without_sampling(admission: Admission) -> Admission:
    asked = admission.params  # parameters that change the model's computation, in which all workers take part
    params = SamplingParams(
        temperature=0.0, prompt_logprobs=asked.prompt_logprobs, alignment_heads=asked.alignment_heads
    )
    return replace(admission, params=params, stop_token_ids=[])


def _collectives(device: str) -> Any:
    """Return the collectives of the device's backend, imported late."""
    if device == "cuda":
        from octavo.ops import cuda_collectives

        return cuda_collectives
    from octavo.ops import cpu_collectives

    return cpu_collectives


def _end(
    leave_group: Callable[[], None],
    followers: list[Connection],
    processes: list[subprocess.Popen[bytes]],
    memory: int,
    group: NodeGroup | None,
) -> None:
    leave_group()
    if group is not None:
        group.close()
    for follower in followers:
        follower.close()
    os.close(memory)
    end_processes(processes)
