"""Nodes that Ray starts (`--distributed-executor-backend ray`): an actor on each of several hosts of its cluster runs a
node's stages. An engine that is started again starts new actors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from octavo.distributed.ray_hosts import RayHosts

if TYPE_CHECKING:
    from octavo.config import EngineConfig


class RayNodes:
    """Reserves room for all nodes in Ray's cluster, and runs the actors of the other nodes. See
    `octavo.distributed.group.Starter` for `start` and `close`."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises `ConfigError` if there is no cluster, or if it has too few resources. At a restart it waits instead
        until the cluster has replaced a lost host."""
        nodes = config.nodes
        num_workers = config.tensor_parallel_size * config.pipeline_parallel_size // nodes.size
        advice = "--nnodes says how many hosts share the stages."
        num_cpus = config.cpu_threads or num_workers
        self._hosts = RayHosts(
            "--distributed-executor-backend", nodes.size, num_cpus, advice, waits=nodes.have_been_complete
        )
        self.config = replace(config, nodes=replace(nodes, master_addr=nodes.master_addr or self._hosts.address))

    def start(self, fail: Callable[[int, str, str], None]) -> None:
        for rank in range(1, self.config.nodes.size):
            threading.Thread(target=self._run, args=(rank, fail), name=f"Ray's node {rank}", daemon=True).start()

    def _run(self, rank: int, fail: Callable[[int, str, str], None]) -> None:
        nodes = self.config.nodes
        assert nodes.ray_flags is not None
        own = {
            "nnodes": nodes.size, "node_rank": rank, "master_addr": nodes.master_addr, "master_port": nodes.master_port
        }  # fmt: skip
        why = self._hosts.run(rank, f"node {rank}", _be_node, nodes.ray_flags | own)
        fail(rank, "has ended", f", which Ray had started: {why}")

    def close(self) -> None:
        self._hosts.close()


def _be_node(flags: dict[str, Any]) -> None:
    from octavo.config import EngineArgs
    from octavo.execution.node import Node

    Node(EngineArgs(**flags).create_engine_config(), None).run(rejoins=False)
