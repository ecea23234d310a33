"""Reserves room on several hosts of a Ray cluster, and starts an actor on each host except this one. An actor does the
work of `octavo serve --headless`: `octavo.execution.ray_nodes` defines it for stages, `octavo.engine.ray_engines` for
engines.

Ray finds the hosts, starts the actors with this host's flags, and ends them. It sees no steps and no requests: hosts
connect to each other as they do without Ray. The actors and their reserved processors are released when the process
that started them ends, however it ends.
"""

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from octavo.errors import ConfigError, OctavoError
from octavo.logs import configure_logging, current_format
from octavo.node_token import TOKEN_VARIABLE

logger = logging.getLogger(__name__)

# After these times a start that cannot succeed fails. Ray itself would wait for ever for room, and for minutes for a
# missing cluster.
_PROBE_S, _ANSWER_S, _PLACEMENT_S = 4.0, 10.0, 6.0
_CONNECT_S = 60.0  # to a cluster that exists
_NOTICE_S = 30.0  # between notices while waiting for room
# Ray speaks HTTP/2. This is a client's preface and an empty settings frame (RFC 9113, 3.4 and 4.1).
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_CARRIED = ("OCTAVO_", "HF_")  # environment variables with these prefixes are copied to all hosts

# A function of a module whose imports do not read the environment: an actor changes the environment before the call.
Serve = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class _Start:
    """The start message of an actor."""

    name: str  # in the log
    serve: Serve
    flags: dict[str, Any]
    environment: dict[str, str]
    folder: str  # working directory of the starting process, for relative file names
    log_level: int
    log_format: str


class RayNode:
    """An actor on another host. Ray's log shows this class name."""

    def run(self, start: _Start) -> str | None:
        """Serve until the end. Return the error if serving failed, otherwise None."""
        os.environ.update(start.environment)
        with contextlib.suppress(OSError):
            os.chdir(start.folder)
        configure_logging(start.name, start.log_level, log_format=start.log_format)
        try:
            start.serve(start.flags)
        except OctavoError as error:
            return str(error)
        return None


class RayHosts:
    """Reserved room on `size` hosts, this host first, and the actors on the other hosts."""

    def __init__(self, flag: str, size: int, num_cpus: int, advice: str, *, waits: bool = False) -> None:
        """Connect to this host's cluster, and reserve processors on its hosts. Raises `ConfigError` without a cluster,
        or if it has too little room and `waits` is false. The error names `flag`, the flag that asks for Ray, and
        `advice`, how to ask for less."""
        import ray

        _connect(flag)
        self.address: str = ray.util.get_node_ip_address()
        self._num_cpus = num_cpus
        self._actors: dict[int, Any] = {}
        self._reserved = _reserve(ray.get_runtime_context().get_node_id(), size, num_cpus, advice, waits)
        if not os.environ.get(TOKEN_VARIABLE):
            os.environ[TOKEN_VARIABLE] = secrets.token_hex(32)

    def run(self, number: int, name: str, serve: Serve, flags: dict[str, Any]) -> str:
        """Run `serve` with these flags in an actor on host `number`, its only actor. Return the reason when the actor
        has ended."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        environment = {name: value for name, value in os.environ.items() if name.startswith(_CARRIED)}
        level = logging.getLogger("octavo").getEffectiveLevel()
        start = _Start(name, serve, flags, environment, os.getcwd(), level, current_format())
        place = PlacementGroupSchedulingStrategy(self._reserved, number)
        try:
            actor = ray.remote(RayNode).options(num_cpus=self._num_cpus, scheduling_strategy=place).remote()
            self._actors[number] = actor
            why = ray.get(actor.run.remote(start)) or "its engine has ended"
        except Exception as error:
            logger.debug("%s, as Ray tells it: %s", name, error)
            why = _first_line(getattr(error, "cause", None) or error)
        return str(why).removesuffix(".")

    def close(self) -> None:
        """End the actors and release the room."""
        import ray

        with contextlib.suppress(Exception):  # Ray may have gone
            for actor in list(self._actors.values()):
                ray.kill(actor)
            ray.util.remove_placement_group(self._reserved)


def _reserve(own_id: str, size: int, num_cpus: int, advice: str, waits: bool) -> Any:
    import ray

    room = ray.util.placement_group(
        [{"CPU": num_cpus}] * size, "STRICT_SPREAD",
        bundle_label_selector=[{"ray.io/node-id": own_id}, *({} for _ in range(1, size))],
    )  # fmt: skip
    next_notice = 0.0
    while not room.wait(_PLACEMENT_S):
        hosts = [node for node in ray.nodes() if node["Alive"]]
        have = ", ".join(f"{one['NodeManagerHostname']} {one['Resources'].get('CPU', 0):g}" for one in hosts)
        lacks = (
            f"Ray's cluster has no room for {size} nodes on hosts of their own, this one among them, with "
            f"{num_cpus} CPUs each (--cpu-threads, or as many as workers): its CPUs are {have}, of which "
            f"{ray.available_resources().get('CPU', 0):g} are free."
        )
        if not waits:
            ray.util.remove_placement_group(room)
            raise ConfigError(f"{lacks} {advice}")
        if time.monotonic() > next_notice:
            next_notice = time.monotonic() + _NOTICE_S
            logger.warning("%s It is waited for.", lacks)
    return room


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].removesuffix(".")


def _connect(flag: str) -> None:
    """Connect as a driver to the cluster at RAY_ADDRESS, or to this host's cluster. Raises `ConfigError`."""
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
        _probe(address)
        # In a thread, because Ray takes no timeout and would replace the main thread's SIGTERM handler.
        threading.Thread(target=connect, args=(address,), name="Ray", daemon=True).start()
        connected.result(_CONNECT_S)
    except Exception as error:
        where = f" at RAY_ADDRESS {os.environ['RAY_ADDRESS']}" if os.environ.get("RAY_ADDRESS") else ""
        why = _first_line(error) or f"it has not let this host in within {_CONNECT_S:g} s"
        raise ConfigError(
            f"{flag} ray finds no cluster{where} that this host belongs to: {why}. Run `ray start --head` here, and "
            "`ray start --address` on the other hosts."
        ) from None


def _probe(address: str) -> None:
    """Raise `OSError` if nothing listens at the address, or if the listener does not answer."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), _PROBE_S) as probe:
        probe.settimeout(_ANSWER_S)
        try:
            with contextlib.suppress(ConnectionError):  # with TLS it hangs up, which counts as an answer
                probe.sendall(_HELLO)
                probe.recv(1)
        except TimeoutError:
            raise TimeoutError(f"{address} accepts connections and says nothing within {_ANSWER_S:g} s") from None
