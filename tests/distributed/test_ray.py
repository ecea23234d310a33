"""Nodes and engines that Ray starts on the hosts of a cluster, which here are two raylets of this machine.

The tests' environment lacks Ray. The first test puts it beside that for one process, which runs the others.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from octavo.config import EngineConfig
from octavo.distributed import ray_hosts
from octavo.engine.core import EngineCore
from octavo.engine.engine_client import make_engine
from octavo.errors import ConfigError, LoadError, OctavoError
from octavo.execution.executor import MultiprocExecutor
from tests.distributed.rays import install_ray
from tests.distributed.test_nodes import FOUR_LAYERS, assert_same
from tests.e2e.server import running_server
from tests.e2e.test_nodes import complete
from tests.execution.test_draft_tokens import guessed_requests
from tests.execution.test_runner import config_of, model, run
from tests.ports import held_port
from tests.waiting import wait_until, within

__all__ = ["model"]

HAS_RAY = find_spec("ray") is not None
ROOT = Path(__file__).parents[2]
needs_ray = pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed: the first test runs these where it is")
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


@pytest.mark.skipif(HAS_RAY, reason="Ray is here: the tests below are run")
def test_the_tests_below_pass_where_ray_is(tmp_path: Path) -> None:
    if why := install_ray(tmp_path):
        pytest.skip(why)
    # Behind what the tests' environment has.
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT), str(tmp_path)]))
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-n", "0", "--all", __file__]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " 1 skipped" in done.stdout.splitlines()[-1], "this one"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Of two hosts with two processors each, the first of which is this one."""
    from ray.cluster_utils import Cluster

    small = {"num_cpus": 2, "object_store_memory": 80 << 20}
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("RAY_raylet_start_wait_time_s", "300")  # instead of 30, where others compute too
        cluster = Cluster(initialize_head=True, head_node_args=small | {"include_dashboard": False})
        try:
            cluster.add_node(**small)
            changed.setenv("RAY_ADDRESS", cluster.address)
            yield cluster
        finally:
            sys.modules["ray"].shutdown()
            cluster.shutdown()


def ray_config(model: Path, **flags: Any) -> EngineConfig:
    shared = {"pipeline_parallel_size": 2, "distributed_executor_backend": "ray", "master_port": held_port()}
    return config_of(model, **(shared | FOUR_LAYERS | flags))


def wait_until_free() -> None:
    """Until nothing of the cluster is taken."""
    import ray

    ray_hosts._connect("--distributed-executor-backend")
    wait_until(lambda: ray.available_resources().get("CPU") == 4, of_what=ray.available_resources)
    wait_until(lambda: not actors(), of_what=actors)


def actors() -> list[psutil.Process]:
    found = psutil.process_iter(["cmdline"])
    return [one for one in found if (one.info["cmdline"] or [""])[0].startswith("ray::RayNode")]


@needs_ray
@pytest.mark.parametrize(
    "flags",
    [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 4, "nnodes": 2, "cpu_threads": 2}],
    ids=["pp 2", "tp 2 x pp 2", "pp 4 on 2 hosts"],
)
def test_nodes_of_ray_answer_as_one_worker(
    cluster: Any, model: Path, monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any]
) -> None:
    """The same bits, where each layer is one worker's, and tokens in any case. The token is made at the start."""
    monkeypatch.setenv("OCTAVO_NODES_TOKEN", "")
    executor = MultiprocExecutor(config := ray_config(model, **flags))
    try:
        assert executor.worker_group._group is not None
        assert executor.worker_group._group._nodes.master_addr == cluster.address.rpartition(":")[0]
        found = run(EngineCore(config, executor), guessed_requests(1), 1)
    finally:
        executor.worker_group.close()
    expected = run(EngineCore(config_of(model, **FOUR_LAYERS)), guessed_requests(1), 1)
    assert_same(found, expected, flags)
    wait_until_free()


@needs_ray
@pytest.mark.parametrize(
    ("flags", "of_node", "kind", "message"),
    [
        ({"cpu_threads": 3}, {}, ConfigError, r"no room for 2 nodes .* 3 CPUs each .* 2, .* 2, of which 4 are free"),
        ({"pipeline_parallel_size": 4}, {}, ConfigError, "no room for 4 nodes .* --nnodes says how many hosts"),
        ({}, {"model": "/nowhere"}, LoadError, "node 1 has ended, which Ray had started: .*/nowhere"),
        ({}, {"max_num_seqs": 4}, ConfigError, r"node 1 .* cannot join: its scheduler.max_num_seqs is 4"),
    ],
)
def test_a_bad_start_is_told(
    cluster: Any, model: Path, monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], of_node: dict[str, Any],
    kind: type[Exception], message: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(ray_hosts, "_PLACEMENT_S", 2.0 if kind is ConfigError and not of_node else 60.0)
    config = ray_config(model, **flags)
    assert config.nodes.ray_flags is not None
    config.nodes.ray_flags.update(of_node)
    with pytest.raises(kind, match=message):
        MultiprocExecutor(config)
    wait_until_free()


@needs_ray
@pytest.mark.parametrize(
    "flags",
    [
        ["-pp", "2", "--distributed-executor-backend", "ray"],
        ["-dp", "2", "--data-parallel-size-local", "1", "--data-parallel-backend", "ray"],
    ],
    ids=["stages", "engines"],
)
def test_without_a_cluster_the_server_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{held_port()}")
    with running_server(tmp_path, *flags, "--max-model-len", "512", wait=False) as server:
        assert server.process.wait(within(120)) == 1
        assert "finds no cluster at RAY_ADDRESS 127.0.0.1" in server.log.read_text()


@needs_ray
def test_an_actor_that_dies_costs_its_requests_and_all_start_again(cluster: Any, tmp_path: Path) -> None:
    flags = ["-pp", "2", "--distributed-executor-backend", "ray", "--master-port", str(held_port())]
    small = ["--cpu-threads", "1", "--max-model-len", "2048", "--kv-cache-memory-bytes", "100000000"]
    small += ["--on-engine-death", "fail"]
    with running_server(tmp_path, *flags, *small) as server:
        assert "Paris" in complete(server.url, max_tokens=8).read().decode()
        for part in ("actor", "worker", "core"):
            (actor,) = actors()
            (worker,) = actor.children()
            (core,) = psutil.Process(server.process.pid).children()
            stream = complete(server.url, max_tokens=2000, stream=True)
            stream.readline()
            {"actor": actor, "worker": worker, "core": core}[part].kill()
            told = stream.read().decode()
            why = "exit status -9" if part == "core" else "node 1 "
            assert "engine_dead" in told and f"the engine core has ended ({why}" in told
            assert cluster.address.partition(":")[0] not in told
            wait_until(lambda: server.get("/health")[0] == 200, server.log.read_text)
            assert "Paris" in complete(server.url, max_tokens=8).read().decode()
            assert not worker.is_running()
        assert server.stop() == 0
    wait_until_free()


ENGINES: dict[str, Any] = {
    "data_parallel_size": 2, "data_parallel_size_local": 1, "data_parallel_backend": "ray", "cpu_threads": 1
}  # fmt: skip


@needs_ray
@pytest.mark.parametrize(
    ("flags", "of_host", "message"),
    [
        ({"cpu_threads": 3}, {}, r"no room for 2 nodes .* 3 CPUs each .* how many engines each host has"),
        ({"data_parallel_size": 3}, {}, "no room for 3 nodes on hosts of their own"),
        ({}, {"model": "/nowhere"}, "the host of engine 1, which Ray had started, has ended: .*/nowhere"),
        ({}, {"max_num_seqs": 4}, r"engine 1 .* cannot join: its scheduler.max_num_seqs is 4"),
    ],
)
def test_a_bad_start_of_engines_is_told(
    cluster: Any, model: Path, monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], of_host: dict[str, Any],
    message: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(ray_hosts, "_PLACEMENT_S", 60.0 if of_host else 2.0)
    config = config_of(model, **(ENGINES | {"data_parallel_rpc_port": held_port()} | flags))
    assert config.engine_hosts is not None and config.engine_hosts.ray_flags is not None
    config.engine_hosts.ray_flags.update(of_host)

    async def start() -> None:
        engine = make_engine(config)
        try:
            await engine.wait_ready()
        finally:
            engine.shutdown()

    with pytest.raises(OctavoError, match=message):
        asyncio.run(start())
    wait_until_free()


@needs_ray
def test_engines_of_ray_answer_alike_and_one_that_dies_takes_its_own_streams_only(cluster: Any, tmp_path: Path) -> None:
    flags = ["-dp", "2", "--data-parallel-size-local", "1", "--data-parallel-backend", "ray"]
    small = ["--cpu-threads", "1", "--max-model-len", "2048", "--kv-cache-memory-bytes", "100000000"]
    small += ["--on-engine-death", "fail"]
    prompts = [f"The {name} of the house is" for name in ("colour", "roof", "door", "owner")]
    with running_server(tmp_path, *flags, "--data-parallel-rpc-port", str(held_port()), *small) as server:

        def answers() -> list[Any]:
            return [json.load(complete(server.url, prompt=one, max_tokens=8))["choices"] for one in prompts]

        expected = answers()
        for num_deaths, part in enumerate(("actor", "core"), 1):
            (actor,) = actors()
            (core,) = actor.children()
            streams = [complete(server.url, prompt=one, max_tokens=1000, stream=True) for one in prompts]
            for stream in streams:
                stream.readline()
            {"actor": actor, "core": core}[part].kill()
            lost = ["engine_dead" in stream.read().decode() for stream in streams]
            # Later all go to the engine that was lost, and has less behind it.
            assert 0 < sum(lost) < (4 if num_deaths == 1 else 5)
            assert server.get("/health")[0] == 200
            wait_until(
                lambda num=num_deaths: server.log.read_text().count("takes requests again") == num,  # type: ignore[misc]
                server.log.read_text,
            )
            assert answers() == expected
            assert not core.is_running()
        counted = server.get("/metrics")[1]
        for engine in (0, 1):
            assert f'vllm:request_success_total{{engine="{engine}",finished_reason="length"' in counted
        assert server.stop() == 0
    wait_until_free()
