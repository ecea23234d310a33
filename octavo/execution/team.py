"""The workers that share a model: the first, in the engine core's process, and its followers, one process each.

A follower is told each plan as the first worker gets it, and the tokens that the first one samples; logits and layers'
sums they exchange themselves, within the step (`octavo.ops.cpu_collectives`). The connection is a pair of sockets:
whoever ends closes his, which the others notice even in the middle of a step.

Workers that share every layer are a stage; stages that follow each other share the layers out. The first worker is of
the last stage, where tokens are sampled.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import select
import socket
import subprocess
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from octavo.config import EngineConfig
from octavo.errors import LoadError, OctavoError, RequestError
from octavo.execution.stage_links import NO_LINKS, LinkEnds, Seat, Way, ends_of, shared_memory
from octavo.layers.share import Share
from octavo.logs import current_format
from octavo.models.description import ModelDescription
from octavo.ops import Array
from octavo.ops.cpu_collectives import check_is_in_no_group, group_bytes, leave_group
from octavo.plan import Admission, StepPlan
from octavo.processes import python_command
from octavo.request import AdapterSource
from octavo.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_EXIT_GRACE_S = 5.0
_CLOSED_CHECK_S = 0.2

_Agreed = TypeVar("_Agreed", bound=tuple[Any, ...])


class Sizes(NamedTuple):
    """What the first worker has found to fit, and all keep to."""

    num_blocks: list[int]  # by pool
    num_host_blocks: list[int]
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Orders:
    """What a follower is started with."""

    config: EngineConfig
    seat: Seat
    memory: int  # the file that rows are exchanged through within the stage
    memory_bytes: int
    ends: LinkEnds
    log_level: int
    log_format: str


class ReleaseCache(NamedTuple):
    """The cache's memory goes back to the system."""


class PictureRows(NamedTuple):
    """What the tower has made of the pictures that the next plan's admissions have, by content."""

    rows: dict[bytes, NDArray[np.float32]]


class SampledTokens(NamedTuple):
    """Of the oldest step of which they are not known yet, [N]."""

    tokens: NDArray[np.int64]


class PrepareAdapter(NamedTuple):
    """An adapter is read; `AdapterRead` answers, in the order of the questions."""

    source: AdapterSource


class AdapterRead(NamedTuple):
    """How many pages it takes, or why it cannot be served: said to the client if it is the request's fault."""

    num_pages: int
    error: str | None = None
    is_of_request: bool = True


class ForgetAdapter(NamedTuple):
    """No plan loads it any more."""

    identity: str


class Team:
    """One worker's view of it. This one is alone."""

    seat = Seat()
    is_leader = True  # the first worker, which samples
    links = NO_LINKS
    memory = -1
    memory_bytes = 0

    @property
    def share(self) -> Share:
        return self.seat.share

    @property
    def connections(self) -> list[int]:
        """Sockets to the other workers, as far as there are some."""
        return []

    def agree(self, choose: Callable[[], _Agreed]) -> _Agreed:
        """What the first worker chooses."""
        return choose()

    def largest(self, own: int) -> int:
        """The largest number that a worker says."""
        return own

    def tell_tokens(self, tokens: Array) -> None:
        """What the first worker has sampled, [N]."""


ALONE = Team()


class Leader(Team):
    """The first worker's team, whose other processes it starts and ends."""

    def __init__(self, config: EngineConfig, description: ModelDescription) -> None:
        """Raises `ConfigError` in a process that has a team."""
        check_is_in_no_group()
        size, num_stages, limits = config.tensor_parallel_size, config.pipeline_parallel_size, config.scheduler
        num_samples = max(limits.max_num_batched_tokens, limits.max_num_seqs)
        most = max(size * limits.max_num_batched_tokens * description.hidden_size, num_samples * description.vocab_size)
        self.memory_bytes = group_bytes(size, most)
        memories = [shared_memory(self.memory_bytes) for _ in range(num_stages)]
        slot_bytes = limits.max_num_batched_tokens * description.hidden_size * 4
        ways = [[Way(num_stages + 1, slot_bytes) for _ in range(size)] for _ in range(1, num_stages)]
        seats = [Seat(stage, num_stages, Share(rank, size)) for stage in range(num_stages) for rank in range(size)]
        self.seat, self.memory = Seat(num_stages - 1, num_stages, Share(0, size)), memories[-1]
        self._seats = [seat for seat in seats if seat != self.seat]
        self.processes: list[subprocess.Popen[bytes]] = []
        self._followers: list[Connection] = []
        level = logging.getLogger("octavo").getEffectiveLevel()
        for seat in self._seats:
            own, theirs = socket.socketpair()
            os.set_inheritable(theirs.fileno(), True)
            command = python_command("octavo.execution.follower", str(theirs.fileno()))
            memory, ends = memories[seat.stage], ends_of(ways, seat)
            passed = [theirs.fileno(), memory, *ends.descriptors]
            self.processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=passed))
            theirs.close()
            follower = Connection(own.detach())
            self._followers.append(follower)
            follower.send(Orders(config, seat, memory, self.memory_bytes, ends, level, current_format()))
        self.links = ends_of(ways, self.seat).open(self.connections)
        for way in (way for of_stage in ways for way in of_stage):
            way.let_go(keeps_end=way is ways[-1][0])
        for memory in memories[:-1]:
            os.close(memory)
        self._listener = ThreadPoolExecutor(1, "others' adapters")  # to what followers answer
        # Also when nobody refers to the team any more.
        self.close = weakref.finalize(self, _end, self._followers, self.processes, self.memory)

    @property
    def connections(self) -> list[int]:
        return [follower.fileno() for follower in self._followers]

    def agree(self, choose: Callable[[], _Agreed]) -> _Agreed:
        chosen = choose()
        self._tell(chosen)
        return chosen

    def largest(self, own: int) -> int:
        found: int = max([own, *self._hear_all()])
        self._tell(found)
        return found

    def wait_until_ready(self) -> None:
        """Raises what a follower could not start for."""
        self._hear_all()

    def _hear_all(self) -> list[Any]:
        """What each follower says. Raises what one could not start for."""
        found = []
        for seat, follower in zip(self._seats, self._followers, strict=True):
            try:
                found.append(follower.recv())
            except (EOFError, OSError):
                raise LoadError(f"{seat} ended before it was ready.") from None
            if isinstance(found[-1], OctavoError):
                raise found[-1]
        return found

    def tell_rows(self, rows: dict[bytes, NDArray[np.float32]]) -> None:
        self._tell(PictureRows(rows))

    def tell_plan(self, plan: StepPlan) -> None:
        """Others need not know how tokens are sampled."""
        self._tell(replace(plan, admissions=[_without_sampling(admission) for admission in plan.admissions]))

    def tell_tokens(self, tokens: Array) -> None:
        self._tell(SampledTokens(np.array(tokens)))

    def prepare_adapter(self, source: AdapterSource, own: Future[int]) -> Future[int]:
        """Have the others read an adapter too, as the first worker does by its `own` future. The result is the largest
        number of pages that a worker takes."""
        self._tell(PrepareAdapter(source))
        return self._listener.submit(self._all_read, own)

    def _all_read(self, own: Future[int]) -> int:
        """The others' answers come in the order of the questions, so each is awaited though the own reading failed."""
        answers = [self._answer(*one) for one in zip(self._seats, self._followers, strict=True)]
        num_pages = own.result()
        for answer in answers:
            if answer.error is not None:
                raise (RequestError(answer.error, param="model") if answer.is_of_request else LoadError(answer.error))
        return max(num_pages, *(answer.num_pages for answer in answers))

    def _answer(self, seat: Seat, follower: Connection) -> AdapterRead:
        try:
            while not follower.poll(_CLOSED_CHECK_S):  # which raises once the team is closed
                pass
            answer: AdapterRead = follower.recv()
        except (EOFError, OSError):
            raise LoadError(f"{seat} has ended.") from None
        return answer

    def forget_adapter(self, identity: str) -> None:
        self._tell(ForgetAdapter(identity))

    def release_cache(self) -> None:
        self._tell(ReleaseCache())

    def on_death(self, act: Callable[[str], None]) -> None:
        """Have a thread call `act`, with what has happened, when a follower ends before the team is closed."""

        def watch(seat: Seat, process: subprocess.Popen[bytes]) -> None:
            status = process.wait()
            if self.close.alive:
                act(f"{seat} ended with status {status}")

        for seat, process in zip(self._seats, self.processes, strict=True):
            threading.Thread(target=watch, args=(seat, process), name=str(seat), daemon=True).start()

    def _tell(self, message: Any) -> None:
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        for seat, follower in zip(self._seats, self._followers, strict=True):
            try:
                follower.send_bytes(data)
            except OSError:
                raise RuntimeError(f"{seat} has ended.") from None


class Follower(Team):
    """Another worker's team: what it hears of the first."""

    is_leader = False

    def __init__(self, leader: Connection, orders: Orders) -> None:
        self.seat, self.memory, self.memory_bytes = orders.seat, orders.memory, orders.memory_bytes
        self._leader = leader
        self.links = orders.ends.open(self.connections)

    @property
    def connections(self) -> list[int]:
        return [self._leader.fileno()]

    def agree(self, choose: Callable[[], _Agreed]) -> _Agreed:
        chosen: _Agreed = self._leader.recv()
        return chosen

    def tell_read(self, read: Future[int]) -> None:
        """Answer `PrepareAdapter`, from whichever thread has read it."""
        error = read.exception()
        if error is None:
            answer = AdapterRead(read.result())
        elif isinstance(error, RequestError):
            answer = AdapterRead(0, str(error))
        else:
            logger.error("an adapter could not be read", exc_info=error)
            answer = AdapterRead(0, type(error).__name__, is_of_request=False)
        with contextlib.suppress(OSError):  # the first worker has gone, which the main thread notices
            self._leader.send(answer)

    def largest(self, own: int) -> int:
        self._leader.send(own)
        found: int = self._leader.recv()
        return found


def has_hung_up(other: Connection, timeout_s: float = 0.0) -> bool:
    """Whether the process at the other end has gone, or goes within so many seconds."""
    poll = select.poll()
    poll.register(other.fileno(), 0)  # whatever there is still to be read
    return any(events & select.POLLHUP for _, events in poll.poll(timeout_s * 1000))


def _without_sampling(admission: Admission) -> Admission:
    params = SamplingParams(temperature=0.0, prompt_logprobs=admission.params.prompt_logprobs)
    return replace(admission, params=params, stop_token_ids=[])


def _end(followers: list[Connection], processes: list[subprocess.Popen[bytes]], memory: int) -> None:
    leave_group()
    for follower in followers:
        follower.close()
    os.close(memory)
    for process in processes:
        try:
            process.wait(_EXIT_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
