"""The workers that share a model: the first, in the engine core's process, and its followers, one process each.

A follower is told each plan as the first worker gets it, and the tokens that the first one samples; logits and layers'
sums they exchange themselves, within the step (`octavo.ops.cpu_collectives`). The connection is a pair of sockets:
whoever ends closes his, which the others notice even in the middle of a step.
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
from octavo.errors import ConfigError, LoadError, OctavoError, RequestError
from octavo.layers.share import WHOLE, Share
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


class AdapterPages(NamedTuple):
    """Memory for adapters, which all workers divide alike."""

    page_bytes: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class Orders:
    """What a follower is started with."""

    config: EngineConfig
    share: Share
    memory: int  # the file that rows are exchanged through
    memory_bytes: int
    log_level: int
    log_format: str


class ReleaseCache(NamedTuple):
    """The cache's memory goes back to the system."""


class PictureRows(NamedTuple):
    """What the tower has made of the pictures that the next plan's admissions have, by content."""

    rows: dict[bytes, NDArray[np.float32]]


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

    share = WHOLE
    memory = -1
    memory_bytes = 0

    @property
    def connections(self) -> list[int]:
        """Sockets to the other workers, as far as there are some."""
        return []

    def agree(self, choose: Callable[[], _Agreed]) -> _Agreed:
        """What the first worker chooses."""
        return choose()

    def sample(self, draw: Callable[[], Array]) -> Array:
        """The tokens [N] that the first worker draws."""
        return draw()


ALONE = Team()


class Leader(Team):
    """The first worker's team, whose other processes it starts and ends."""

    def __init__(self, config: EngineConfig, description: ModelDescription) -> None:
        """Raises `ConfigError` in a process that has a team."""
        check_is_in_no_group()
        size, limits = config.tensor_parallel_size, config.scheduler
        self.share = Share(0, size)
        num_samples = max(limits.max_num_batched_tokens, limits.max_num_seqs)
        most = max(size * limits.max_num_batched_tokens * description.hidden_size, num_samples * description.vocab_size)
        self.memory_bytes = group_bytes(size, most)
        self.memory = _shared_memory(self.memory_bytes)
        self.processes: list[subprocess.Popen[bytes]] = []
        self._followers: list[Connection] = []
        for rank in range(1, size):
            own, theirs = socket.socketpair()
            os.set_inheritable(theirs.fileno(), True)
            command = python_command("octavo.execution.follower", str(theirs.fileno()))
            self.processes.append(
                subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno(), self.memory])
            )
            theirs.close()
            follower = Connection(own.detach())
            self._followers.append(follower)
            level = logging.getLogger("octavo").getEffectiveLevel()
            orders = Orders(config, Share(rank, size), self.memory, self.memory_bytes, level, current_format())
            follower.send(orders)
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

    def wait_until_ready(self) -> None:
        """Raises what a follower could not start for."""
        for rank, follower in enumerate(self._followers, 1):
            try:
                error: OctavoError | None = follower.recv()
            except (EOFError, OSError):
                raise LoadError(f"worker {rank} of {self.share.size} ended before it was ready.") from None
            if error is not None:
                raise error

    def tell_rows(self, rows: dict[bytes, NDArray[np.float32]]) -> None:
        self._tell(PictureRows(rows))

    def tell_plan(self, plan: StepPlan) -> None:
        """Others need not know how tokens are sampled."""
        self._tell(replace(plan, admissions=[_without_sampling(admission) for admission in plan.admissions]))

    def sample(self, draw: Callable[[], Array]) -> Array:
        tokens = draw()
        self._tell(np.array(tokens))
        return tokens

    def prepare_adapter(self, source: AdapterSource, own: Future[int]) -> Future[int]:
        """Have the others read an adapter too, as the first worker does by its `own` future. The result is the largest
        number of pages that a worker takes."""
        self._tell(PrepareAdapter(source))
        return self._listener.submit(self._all_read, own)

    def _all_read(self, own: Future[int]) -> int:
        """The others' answers come in the order of the questions, so each is awaited though the own reading failed."""
        answers = [self._answer(rank) for rank in range(1, self.share.size)]
        num_pages = own.result()
        for answer in answers:
            if answer.error is not None:
                raise (RequestError(answer.error, param="model") if answer.is_of_request else LoadError(answer.error))
        return max(num_pages, *(answer.num_pages for answer in answers))

    def _answer(self, rank: int) -> AdapterRead:
        follower = self._followers[rank - 1]
        try:
            while not follower.poll(_CLOSED_CHECK_S):  # which raises once the team is closed
                pass
            answer: AdapterRead = follower.recv()
        except (EOFError, OSError):
            raise LoadError(f"worker {rank} of {self.share.size} has ended.") from None
        return answer

    def forget_adapter(self, identity: str) -> None:
        self._tell(ForgetAdapter(identity))

    def release_cache(self) -> None:
        self._tell(ReleaseCache())

    def on_death(self, act: Callable[[str], None]) -> None:
        """Have a thread call `act`, with what has happened, when a follower ends before the team is closed."""

        def watch(rank: int, process: subprocess.Popen[bytes]) -> None:
            status = process.wait()
            if self.close.alive:
                act(f"worker {rank} of {self.share.size} ended with status {status}")

        for rank, process in enumerate(self.processes, 1):
            threading.Thread(target=watch, args=(rank, process), name=f"worker {rank}", daemon=True).start()

    def _tell(self, message: Any) -> None:
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        for rank, follower in enumerate(self._followers, 1):
            try:
                follower.send_bytes(data)
            except OSError:
                raise RuntimeError(f"worker {rank} of {self.share.size} has ended.") from None


class Follower(Team):
    """Another worker's team: what it hears of the first."""

    def __init__(self, leader: Connection, orders: Orders) -> None:
        self.share, self.memory, self.memory_bytes = orders.share, orders.memory, orders.memory_bytes
        self._leader = leader

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

    def sample(self, draw: Callable[[], Array]) -> Array:
        tokens: Array = self._leader.recv()
        return tokens


def has_hung_up(other: Connection) -> bool:
    """Whether the process at the other end has gone."""
    poll = select.poll()
    poll.register(other.fileno(), select.POLLHUP)
    return any(events & select.POLLHUP for _, events in poll.poll(0))


def _without_sampling(admission: Admission) -> Admission:
    params = SamplingParams(temperature=0.0, prompt_logprobs=admission.params.prompt_logprobs)
    return replace(admission, params=params, stop_token_ids=[])


def _shared_memory(num_bytes: int) -> int:
    """A file of zeros that takes memory only where it is written, and is gone with the last process that has it. Not
    in /dev/shm, of which containers have 64 MB."""
    if not hasattr(os, "memfd_create"):
        raise ConfigError("--tensor-parallel-size above 1 needs Linux.")
    memory = os.memfd_create("octavo")
    os.set_inheritable(memory, True)
    os.ftruncate(memory, num_bytes)
    return memory


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
