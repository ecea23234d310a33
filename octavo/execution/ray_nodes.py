"""Nodes that Ray starts (`--distributed-executor-backend ray`): an actor on each of several hosts of its cluster, which
is what `octavo serve --headless` is elsewhere.

Ray finds the hosts, starts the actors with the flags of node 0, and ends them; it knows nothing of steps, for nodes
connect to each other as they do without it. The actors and what they have of the hosts go with the process of node 0,
however it ends. An engine that is started again starts all of them anew.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from octavo.errors import ConfigError, OctavoError
from octavo.logs import configure_logging, current_format
from octavo.node_token import TOKEN_VARIABLE

if TYPE_CHECKING:
    from octavo.config import EngineConfig

logger = logging.getLogger(__name__)

# Within which a start that cannot succeed says so. Ray itself would wait for ever for room, and for minutes for a
# cluster that is not there.
_PROBE_S, _PLACEMENT_S = 4.0, 8.0
_CONNECT_S = 60.0  # to one that is
_CARRIED = ("OCTAVO_", "HF_")  # variables of these names are those of node 0 on all hosts


@dataclass(frozen=True, slots=True)
class _Start:
    """What an actor is told."""

    flags: dict[str, Any]
    environment: dict[str, str]
    folder: str  # of node 0's process, which names of files may be relative to
    log_level: int
    log_format: str


class RayNode:
    """A node other than node 0, as an actor. Ray's log calls it by this name."""

    def run(self, start: _Start) -> str | None:
        """Be the node until its group ends. Returns why it could not join, if so."""
        os.environ.update(start.environment)  # before what reads it is imported
        with contextlib.suppress(OSError):
            os.chdir(start.folder)
        configure_logging(f"node {start.flags['node_rank']}", start.log_level, log_format=start.log_format)
        from octavo.config import EngineArgs
        from octavo.execution.node import Node

        try:
            Node(EngineArgs(**start.flags).create_engine_config(), None).run(rejoins=False)
        except OctavoError as error:
            return str(error)
        return None


class RayNodes:
    """Room for all nodes in Ray's cluster, and the actors that are the others."""

    def __init__(self, config: EngineConfig) -> None:
        """Connect to the cluster that this host belongs to, and reserve processors of as many of its hosts as there are
        nodes. Raises `ConfigError` without a cluster, or one that has too little."""
        import ray

        _connect()
        nodes = config.nodes
        address = nodes.master_addr or ray.util.get_node_ip_address()
        self.config = replace(config, nodes=replace(nodes, master_addr=address))
        self._num_cpus = config.cpu_threads or (
            config.tensor_parallel_size * config.pipeline_parallel_size // nodes.size
        )
        self._actors: list[Any] = []
        self._reserved = self._reserve(ray.get_runtime_context().get_node_id())
        if not os.environ.get(TOKEN_VARIABLE):
            os.environ[TOKEN_VARIABLE] = secrets.token_hex(32)

    def _reserve(self, own_id: str) -> Any:
        import ray

        size = self.config.nodes.size
        room = ray.util.placement_group(
            [{"CPU": self._num_cpus}] * size, "STRICT_SPREAD",
            bundle_label_selector=[{"ray.io/node-id": own_id}, *({} for _ in range(1, size))],
        )  # fmt: skip
        if not room.wait(_PLACEMENT_S):
            ray.util.remove_placement_group(room)
            hosts = [node for node in ray.nodes() if node["Alive"]]
            have = ", ".join(f"{one['NodeManagerHostname']} {one['Resources'].get('CPU', 0):g}" for one in hosts)
            raise ConfigError(
                f"Ray's cluster has no room for {size} nodes on hosts of their own, this one among them, with "
                f"{self._num_cpus} CPUs each (--cpu-threads, or as many as workers): its CPUs are {have}, of which "
                f"{ray.available_resources().get('CPU', 0):g} are free. --nnodes says how many hosts share the stages."
            )
        return room

    def start(self, fail: Callable[[int, str, str], None]) -> None:
        """Start the other nodes. See `octavo.distributed.group.Starter`."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        nodes = self.config.nodes
        assert nodes.ray_flags is not None
        flags = nodes.ray_flags | {
            "nnodes": nodes.size, "master_addr": nodes.master_addr, "master_port": nodes.master_port
        }  # fmt: skip
        environment = {name: value for name, value in os.environ.items() if name.startswith(_CARRIED)}
        level = logging.getLogger("octavo").getEffectiveLevel()
        for rank in range(1, nodes.size):
            place = PlacementGroupSchedulingStrategy(self._reserved, rank)
            actor = ray.remote(RayNode).options(num_cpus=self._num_cpus, scheduling_strategy=place).remote()
            self._actors.append(actor)
            start = _Start(flags | {"node_rank": rank}, environment, os.getcwd(), level, current_format())
            watching = (rank, actor.run.remote(start), fail)
            threading.Thread(target=_watch, args=watching, name=f"Ray's node {rank}", daemon=True).start()

    def close(self) -> None:
        """End the actors, and let go of the room."""
        import ray

        with contextlib.suppress(Exception):  # Ray may have gone
            for actor in self._actors:
                ray.kill(actor)
            ray.util.remove_placement_group(self._reserved)


def _watch(rank: int, end: Any, fail: Callable[[int, str, str], None]) -> None:
    import ray

    try:
        why = ray.get(end) or "its group is no more"
    except Exception as error:
        logger.debug("node %d, as Ray tells it: %s", rank, error)
        why = _first_line(getattr(error, "cause", None) or error)
    fail(rank, "has ended", f", which Ray had started: {why.removesuffix('.')}")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].removesuffix(".")


def _connect() -> None:
    """Be a driver of RAY_ADDRESS's cluster, or of this host's. Raises `ConfigError`."""
    import ray
    from ray._private.services import canonicalize_bootstrap_address_or_die

    if ray.is_initialized():
        return
    connected: Future[None] = Future()

    def connect(address: str) -> None:
        try:
            ray.init(address, logging_level=logging.ERROR)
            connected.set_result(None)
        except BaseException as error:
            connected.set_exception(error)

    try:
        address: str = canonicalize_bootstrap_address_or_die("auto")
        host, _, port = address.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), _PROBE_S).close()
        # A thread, because Ray neither takes a timeout nor lets the main thread keep its SIGTERM.
        threading.Thread(target=connect, args=(address,), name="Ray", daemon=True).start()
        connected.result(_CONNECT_S)
    except Exception as error:
        where = f" at RAY_ADDRESS {os.environ['RAY_ADDRESS']}" if os.environ.get("RAY_ADDRESS") else ""
        why = _first_line(error) or f"it does not answer within {_CONNECT_S:g} s"
        raise ConfigError(
            f"--distributed-executor-backend ray finds no cluster{where} that this host belongs to: {why}. Run `ray "
            "start --head` here, and `ray start --address` on the other hosts."
        ) from None
