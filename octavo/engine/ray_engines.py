"""Engines that Ray starts (`--data-parallel-backend ray`): an actor on each of several hosts of the cluster runs some
of them, like an `engine_node.py` that is started by hand. When an actor ends, Ray starts another one on its host, or on
another host with room."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from octavo.distributed.ray_hosts import RayHosts
from octavo.errors import LoadError, OctavoError

if TYPE_CHECKING:
    from octavo.config import EngineConfig

logger = logging.getLogger(__name__)

_PAUSE_S = 2.0  # before an ended actor is replaced


class RayEngines:
    """Reserves room for the engines of all hosts in Ray's cluster, and runs the actors of the other hosts."""

    def __init__(self, config: EngineConfig, *, max_restarts: int = 0, ready_timeout_s: float | None = None) -> None:
        """The options are those of `EngineNode`. Raises `ConfigError` if there is no cluster, or if it has too few
        resources."""
        hosts = config.engine_hosts
        assert hosts is not None
        self._serve = partial(_have_engines, max_restarts, ready_timeout_s)
        # The engines of each host except this one.
        self._ranks = [
            range(first, min(first + hosts.num_local, config.data_parallel_size))
            for first in range(hosts.num_local, config.data_parallel_size, hosts.num_local)
        ]
        num_workers = hosts.num_local * config.tensor_parallel_size * config.pipeline_parallel_size
        advice = "--data-parallel-size-local says how many engines each host has."
        num_cpus = config.cpu_threads or num_workers
        self._hosts = RayHosts("--data-parallel-backend", 1 + len(self._ranks), num_cpus, advice)
        self.config = replace(config, engine_hosts=replace(hosts, address=hosts.address or self._hosts.address))
        self._is_closed = threading.Event()

    def start(self, fail: Callable[[OctavoError], None]) -> None:
        """Start the actors, and replace those that end, until `close`. `fail` is called, in any thread, each time an
        actor ends."""
        for number, ranks in enumerate(self._ranks, 1):
            name = f"host of engine {ranks.start}"
            threading.Thread(target=self._keep, args=(number, name, ranks, fail), name=name, daemon=True).start()

    def _keep(self, number: int, name: str, ranks: range, fail: Callable[[OctavoError], None]) -> None:
        hosts = self.config.engine_hosts
        assert hosts is not None and hosts.ray_flags is not None
        own = {
            "data_parallel_size_local": len(ranks), "data_parallel_start_rank": ranks.start,
            "data_parallel_address": hosts.address, "data_parallel_rpc_port": hosts.port,
        }  # fmt: skip
        while not self._is_closed.is_set():
            why = self._hosts.run(number, name, self._serve, hosts.ray_flags | own)
            if not self._is_closed.is_set():
                error = LoadError(f"the {name}, which Ray had started, has ended: {why}.")
                logger.error("%s", error)
                fail(error)
            self._is_closed.wait(_PAUSE_S)

    def close(self) -> None:
        self._is_closed.set()
        self._hosts.close()


def _have_engines(max_restarts: int, ready_timeout_s: float | None, flags: dict[str, Any]) -> None:
    from octavo.config import EngineArgs
    from octavo.engine.engine_node import EngineNode

    config = EngineArgs(**flags).create_engine_config()
    # Actors are killed, not told to stop.
    EngineNode(config, max_restarts=max_restarts, ready_timeout_s=ready_timeout_s, shutdown_timeout_s=0.0).run()
