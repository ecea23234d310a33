"""Hosts of a cluster that Ray keeps: room on several of them, and an actor on each but this one, which does what
`octavo serve --headless` does elsewhere. What that is, is the business of `octavo.execution.ray_nodes`, for stages, and
`octavo.engine.ray_engines`, for engines.

Ray finds the hosts, starts the actors with the flags of this one, and ends them; it knows nothing of steps and
requests, for hosts connect to each other as they do without it. The actors and what they have of the hosts go with the
process that has started them, however that ends.
"""

from __future__ import annotations

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

# Within which a start that cannot succeed says so. Ray itself would wait for ever for room, and for minutes for a
# cluster that is not there.
_PROBE_S, _ANSWER_S, _PLACEMENT_S = 4.0, 10.0, 6.0
_CONNECT_S = 60.0  # to one that is
_NOTICE_S = 30.0  # of room that is waited for
# What a client of HTTP/2, which Ray speaks, begins with, and settings without an entry (RFC 9113, 3.4 and 4.1).
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_CARRIED = ("OCTAVO_", "HF_")  # variables of these names are those of this host on all hosts

# Of a module that imports nothing which reads the environment: an actor changes that before it is called.
Serve = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class _Start:
    """What an actor is told."""

    name: str  # in the log
    serve: Serve
    flags: dict[str, Any]
    environment: dict[str, str]
    folder: str  # of the process that starts it, which names of files may be relative to
    log_level: int
    log_format: str


class RayNode:
    """A host other than this one, as an actor. Ray's log calls it by this name."""

    def run(self, start: _Start) -> str | None:
        """Serve until that ends. Returns why it could not, if so."""
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
    """Room on so many hosts, of which this one is the first, and the actors on the others."""

    def __init__(self, flag: str, size: int, num_cpus: int, advice: str, *, waits: bool = False) -> None:
        """Connect to the cluster that this host belongs to, and reserve processors of its hosts. Raises `ConfigError`
        without a cluster, or one that has too little, unless it `waits` for that: `flag` asks for it, and `advice` is
        how to ask for less."""
        import ray

        _connect(flag)
        self.address: str = ray.util.get_node_ip_address()
        self._num_cpus = num_cpus
        self._actors: dict[int, Any] = {}
        self._reserved = _reserve(ray.get_runtime_context().get_node_id(), size, num_cpus, advice, waits)
        if not os.environ.get(TOKEN_VARIABLE):
            os.environ[TOKEN_VARIABLE] = secrets.token_hex(32)

    def run(self, number: int, name: str, serve: Serve, flags: dict[str, Any]) -> str:
        """Have an actor on the host of that number, the only one there, `serve` with these flags. Returns when it has
        ended, with the reason."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        environment = {name: value for name, value in os.environ.items() if name.startswith(_CARRIED)}
        level = logging.getLogger("octavo").getEffectiveLevel()
        start = _Start(name, serve, flags, environment, os.getcwd(), level, current_format())
        place = PlacementGroupSchedulingStrategy(self._reserved, number)
        try:
            actor = ray.remote(RayNode).options(num_cpus=self._num_cpus, scheduling_strategy=place).remote()
            self._actors[number] = actor
            why = ray.get(actor.run.remote(start)) or "what it served is no more"
        except Exception as error:
            logger.debug("%s, as Ray tells it: %s", name, error)
            why = _first_line(getattr(error, "cause", None) or error)
        return str(why).removesuffix(".")

    def close(self) -> None:
        """End the actors, and let go of the room."""
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
        _probe(address)
        # A thread, because Ray neither takes a timeout nor lets the main thread keep its SIGTERM.
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
    """Raises `OSError` where nobody listens, or who does says nothing."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), _PROBE_S) as probe:
        probe.settimeout(_ANSWER_S)
        try:
            with contextlib.suppress(ConnectionError):  # with TLS it hangs up, which is an answer too
                probe.sendall(_HELLO)
                probe.recv(1)
        except TimeoutError:
            raise TimeoutError(f"{address} accepts connections and says nothing within {_ANSWER_S:g} s") from None
