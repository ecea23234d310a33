"""The workers that share a model: the first, in the engine core's process, and its followers, one process each.

A follower is told each plan as the first worker gets it, and the tokens that the first one samples; logits and layers'
sums they exchange themselves, within the step (`octavo.ops.cpu_collectives`, `cuda_collectives`). The connection is a
pair of sockets: whoever ends closes his, which the others notice even in the middle of a step.

Workers that share every layer are a stage; stages that follow each other share the layers out. The first worker is of
the last stage, where tokens are sampled.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import subprocess
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from octavo.config import EngineConfig
from octavo.distributed.group import NodeGroup
from octavo.errors import ConfigError, LoadError, RequestError
from octavo.execution.host_workers import FollowerArgs, HostWorkers, configured_worker_ranks, end_processes
from octavo.execution.stage_links import HUNG_UP, NO_LINKS, WorkerRank
from octavo.execution.worker_messages import (
    AdapterRead,
    AgreedSizes,
    CannotStart,
    ForgetAdapter,
    MemoryOffer,
    Number,
    Offer,
    PictureRows,
    Plan,
    PrepareAdapter,
    ReleaseCache,
    SampledTokens,
    Sizes,
    ToFollower,
    ToLeader,
    WorkerReady,
    decode_to_follower,
    decode_to_leader,
    encode,
)
from octavo.layers.tensor_parallel import Shard
from octavo.models.description import ModelDescription
from octavo.plan import Admission, StepPlan
from octavo.request import AdapterSource
from octavo.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_CLOSED_CHECK_S = 0.2

_Message = TypeVar("_Message", bound=ToLeader)


class WorkerGroup:
    """One worker's view of it. This one is alone."""

    worker_rank = WorkerRank()
    is_leader = True  # the first worker, which samples
    links = NO_LINKS
    memory = -1
    memory_bytes = 0

    @property
    def shard(self) -> Shard:
        return self.worker_rank.shard

    @property
    def connections(self) -> list[int]:
        """Sockets to the other workers, as far as there are some."""
        return []

    def agree(self, choose: Callable[[], Sizes]) -> Sizes:
        """What the first worker chooses."""
        return choose()

    def smallest(self, own: Offer) -> Offer:
        """The smallest offer of a worker, told to the first one; the others go by `agree`."""
        return own

    def largest(self, own: int) -> int:
        """The largest number that a worker says."""
        return own

    def tell_plan(self, plan: StepPlan) -> None:
        """Nobody is to be told."""

    def tell_tokens(self, tokens: NDArray[np.int64]) -> None:
        """What the first worker has sampled, [N]."""

    def check(self) -> None:
        """Raises `ConnectionError` if another worker has gone, so that what came of the last step means nothing."""
        if not self.connections:
            return
        poll = select.poll()
        for connection in self.connections:
            poll.register(connection, HUNG_UP)  # whatever there is still to be read
        if poll.poll(0):
            raise ConnectionError("another worker of this model has ended.")


ALONE = WorkerGroup()


class Leader(WorkerGroup):
    """The first worker's team: the processes of this host, which it starts and ends, and those of other nodes."""

    def __init__(self, config: EngineConfig, description: ModelDescription) -> None:
        """Waits for the other nodes, if there are some. Raises `ConfigError` in a process that has a team, and for
        nodes that do not fit."""
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
        self.links = host.ends(self.worker_rank).open(self.connections)
        host.let_go(self.worker_rank)
        self._listener = ThreadPoolExecutor(1, "others' adapters")  # to what followers answer
        self._early_answers: dict[int, dict[str, AdapterRead]] = {}  # by seat and adapter: of those not asked about yet
        # Also when nobody refers to the team any more.
        self.close = weakref.finalize(
            self, _end, collectives.leave_group, self._followers, host.processes, self.memory, self._group
        )
        if self._group is not None:
            self._group.on_loss(lambda loss: self._hang_up())

    @property
    def processes(self) -> list[subprocess.Popen[bytes]]:
        """Those of this host."""
        return self._host.processes

    @property
    def connections(self) -> list[int]:
        return [follower.fileno() for follower in self._followers]

    def agree(self, choose: Callable[[], Sizes]) -> Sizes:
        chosen = choose()
        self._tell(AgreedSizes(chosen))
        return chosen

    def smallest(self, own: Offer) -> Offer:
        found = own
        for worker_rank, message in zip(self._worker_ranks, self._hear_all(MemoryOffer), strict=True):
            if message.offer.num_bytes < found.num_bytes:
                where = (
                    f"{message.offer.source} on node {worker_rank.node}"
                    if worker_rank.num_nodes > 1
                    else message.offer.source
                )
                found = Offer(message.offer.num_bytes, where)
        return found

    def largest(self, own: int) -> int:
        found: int = max([own, *(message.value for message in self._hear_all(Number))])
        self._tell(Number(found))
        return found

    def wait_until_ready(self) -> None:
        """Raises what a follower could not start for."""
        self._hear_all(WorkerReady)
        if self._group is not None:
            self._group.be_ready()

    def _hear_all(self, kind: type[_Message]) -> list[_Message]:
        """What each follower says. Raises what one could not start for."""
        found = []
        for worker_rank, follower in zip(self._worker_ranks, self._followers, strict=True):
            try:
                message = decode_to_leader(follower.recv_bytes())
            except (EOFError, OSError):
                lost = None if self._group is None else self._group.lost
                raise LoadError(str(lost or f"{worker_rank} ended before it was ready.")) from None
            if isinstance(message, CannotStart):
                kind_of_error = ConfigError if message.is_of_flags else LoadError
                where = f"node {worker_rank.node}: " if worker_rank.node != self.worker_rank.node else ""
                raise kind_of_error(where + message.error)
            assert isinstance(message, kind), f"{worker_rank} says {message}"
            found.append(message)
        return found

    def _hang_up(self) -> None:
        """On the workers of other nodes, one of which is lost, so that nobody waits for them."""
        for worker_rank, follower in zip(self._worker_ranks, self._followers, strict=True):
            if worker_rank.node != self.worker_rank.node:
                hang_up(follower)
        self.links.hang_up()

    def tell_rows(self, rows: dict[bytes, NDArray[np.float32]]) -> None:
        self._tell(PictureRows.of(rows))

    def tell_plan(self, plan: StepPlan) -> None:
        """Others need not know how tokens are sampled."""
        self._tell(Plan(replace(plan, admissions=[_without_sampling(admission) for admission in plan.admissions])))

    def tell_tokens(self, tokens: NDArray[np.int64]) -> None:
        self._tell(SampledTokens(tokens.tobytes()))

    def prepare_adapter(self, source: AdapterSource, own: Future[int]) -> Future[int]:
        """Have the others read an adapter too, as the first worker does by its `own` future. The result is the largest
        number of pages that a worker takes."""
        self._tell(PrepareAdapter(source))
        return self._listener.submit(self._all_read, source.identity, own)

    def _all_read(self, identity: str, own: Future[int]) -> int:
        """Each answer is awaited though the own reading failed: the next question about the adapter has others."""
        answers = [self._answer(identity, *one) for one in zip(self._worker_ranks, self._followers, strict=True)]
        num_pages = own.result()
        for answer in answers:
            if answer.error is not None:
                raise (RequestError(answer.error, param="model") if answer.is_of_request else LoadError(answer.error))
        return max(num_pages, *(answer.num_pages for answer in answers))

    def _answer(self, identity: str, worker_rank: WorkerRank, follower: Connection) -> AdapterRead:
        early = self._early_answers.setdefault(worker_rank.number, {})
        while identity not in early:
            try:
                while not follower.poll(_CLOSED_CHECK_S):  # which raises once the team is closed
                    pass
                answer = decode_to_leader(follower.recv_bytes())
            except (EOFError, OSError):
                raise LoadError(f"{worker_rank} has ended.") from None
            assert isinstance(answer, AdapterRead)
            early[answer.identity] = answer
        return early.pop(identity)

    def forget_adapter(self, identity: str) -> None:
        self._tell(ForgetAdapter(identity))

    def release_cache(self) -> None:
        self._tell(ReleaseCache())

    def on_death(self, act: Callable[[str], None]) -> None:
        """Have a thread call `act`, with what clients may know of it, when a follower of this host ends, or another
        node is lost, before the team is closed."""

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
        """End a team that cannot start."""
        if self._group is not None:
            self._group.close(why)
        self.close()

    def say_goodbye(self) -> None:
        """Tell other nodes that this engine ends for good, and not by accident."""
        if self._group is not None:
            self._group.close()

    def _tell(self, message: ToFollower) -> None:
        data = encode(message)
        for worker_rank, follower in zip(self._worker_ranks, self._followers, strict=True):
            try:
                follower.send_bytes(data)
            except OSError:
                raise RuntimeError(f"{worker_rank} has ended.") from None


class Follower(WorkerGroup):
    """Another worker's team: what it hears of the first."""

    is_leader = False

    def __init__(self, leader: Connection, orders: FollowerArgs) -> None:
        self.worker_rank, self.memory, self.memory_bytes = orders.worker_rank, orders.memory, orders.memory_bytes
        self._leader = leader
        self._answering = threading.Lock()  # adapters are read by several threads
        self.links = orders.ends.open(self.connections)

    @property
    def connections(self) -> list[int]:
        return [self._leader.fileno()]

    def agree(self, choose: Callable[[], Sizes]) -> Sizes:
        chosen = self.hear()
        assert isinstance(chosen, AgreedSizes)
        return chosen.sizes

    def smallest(self, own: Offer) -> Offer:
        self.tell(MemoryOffer(own))
        return own

    def hear(self) -> ToFollower:
        """What the first worker says next. Raises `EOFError` or `OSError` when that has gone."""
        message: ToFollower = decode_to_follower(self._leader.recv_bytes())
        return message

    def tell(self, message: ToLeader) -> None:
        self._leader.send_bytes(encode(message))

    def tell_read(self, identity: str, read: Future[int]) -> None:
        """Answer `PrepareAdapter`, from whichever thread has read it."""
        error = read.exception()
        if error is None:
            answer = AdapterRead(identity, read.result())
        elif isinstance(error, RequestError):
            answer = AdapterRead(identity, 0, str(error))
        else:
            logger.error("an adapter could not be read", exc_info=error)
            answer = AdapterRead(identity, 0, type(error).__name__, is_of_request=False)
        # Where the first worker has gone the main thread notices.
        with contextlib.suppress(OSError), self._answering:
            self.tell(answer)

    def largest(self, own: int) -> int:
        self.tell(Number(own))
        found = self.hear()
        assert isinstance(found, Number)
        return found.value


def _gather(config: EngineConfig) -> NodeGroup:
    """The other nodes, which Ray starts if it is to."""
    if config.nodes.ray_flags is None:
        return NodeGroup.gather(config)
    from octavo.execution.ray_nodes import RayNodes

    others = RayNodes(config)
    try:
        return NodeGroup.gather(others.config, others)
    except BaseException:
        others.close()  # also where there has been no group to do it
        raise


def has_hung_up(other: Connection, timeout_s: float = 0.0) -> bool:
    """Whether the process at the other end has gone, or goes within so many seconds."""
    poll = select.poll()
    poll.register(other.fileno(), HUNG_UP)  # whatever there is still to be read
    return bool(poll.poll(timeout_s * 1000))


def hang_up(other: Connection) -> None:
    """So that neither end waits any more. What has come can still be read."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(other.fileno())) as connection:
        connection.shutdown(socket.SHUT_RDWR)


def _without_sampling(admission: Admission) -> Admission:
    asked = admission.params  # of the model, which all compute
    params = SamplingParams(
        temperature=0.0, prompt_logprobs=asked.prompt_logprobs, alignment_heads=asked.alignment_heads
    )
    return replace(admission, params=params, stop_token_ids=[])


def _collectives(device: str) -> Any:
    """Of the backend, which is not imported before it is needed."""
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
