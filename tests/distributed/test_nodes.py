"""Stages on several nodes, which here are threads and processes of one host, over loopback."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from octavo.config import AsyncEngineArgs, EngineConfig, data_parallel_flags
from octavo.distributed import group, joining
from octavo.distributed.connection import listen
from octavo.distributed.group import NodeGroup
from octavo.distributed.messages import Joined
from octavo.engine.core import EngineCore
from octavo.entrypoints.http.server import run_server
from octavo.entrypoints.http.server_args import ServerArgs
from octavo.errors import ConfigError, LoadError
from octavo.execution import node
from octavo.execution.cache_fingerprint import cache_fingerprint, model_identity, node_identity
from octavo.execution.executor import MultiprocExecutor, make_executor
from octavo.execution.node import Node
from octavo.models.registry import describe
from octavo.speculative.proposer import ToBeDrafted
from octavo.speculative.speculation import Speculation
from tests.execution.test_draft_tokens import guessed_requests
from tests.execution.test_host_blocks_on_disk import counted, reads_are_worth_it
from tests.execution.test_runner import config_of, model, run, told
from tests.open_files import open_files
from tests.ports import held_port
from tests.waiting import within

__all__ = ["model", "reads_are_worth_it"]

RAY = {"distributed_executor_backend": "ray", "pipeline_parallel_size": 2}
ELSEWHERE = {"data_parallel_size": 4, "data_parallel_size_local": 2}
HYBRID = ELSEWHERE | {"data_parallel_hybrid_lb": True}
RAY_ENGINES = ELSEWHERE | {"data_parallel_backend": "ray"}
FOUR_LAYERS = {"hf_overrides": {"num_hidden_layers": 4}}


@pytest.fixture
def port() -> int:
    return held_port()


class Beside:
    """Runs what may wait for ever, if a test fails, in threads that nobody waits for."""

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(work(*args))
            except Exception as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return future


@pytest.fixture
def pool() -> Beside:
    return Beside()


def node_config(model: Path, port: int, rank: int, size: int = 2, **flags: Any) -> EngineConfig:
    stages = {"pipeline_parallel_size": size} | FOUR_LAYERS
    return config_of(model, nnodes=size, node_rank=rank, master_port=port, **(stages | flags))


@pytest.mark.parametrize(
    ("size", "flags"),
    [
        pytest.param(2, {"num_gpu_blocks_override": 16}, marks=pytest.mark.long),
        (2, {"num_speculative_tokens": 3}),  # of a draft on node 0, which the model is to itself
        pytest.param(3, {}, marks=pytest.mark.long),  # rows go past node 0
        pytest.param(2, {"pipeline_parallel_size": 4, "dtype": "bfloat16"}, marks=pytest.mark.long),
        pytest.param(2, {"tensor_parallel_size": 2}, marks=pytest.mark.long),
    ],
)
def test_nodes_answer_as_one_worker(model: Path, port: int, pool: Beside, size: int, flags: dict[str, Any]) -> None:
    """The same bits, where each layer is one worker's, and tokens in any case."""
    speculation = None
    if "num_speculative_tokens" in flags:
        flags, speculation = flags | {"speculative_model": str(model)}, Speculation(ToBeDrafted(96), 3)
    others = [pool.submit(Node(node_config(model, port, rank, size, **flags), 60).run) for rank in range(1, size)]
    executor = MultiprocExecutor(config := node_config(model, port, 0, size, **flags))
    try:
        found = run(EngineCore(config, executor, speculation), guessed_requests(1), 1)
    finally:
        executor.worker_group.close()
    for other in others:
        other.result(within(60))
    alone = {name: value for name, value in flags.items() if "parallel" not in name and "speculative" not in name}
    expected = run(EngineCore(config_of(model, **(FOUR_LAYERS | alone))), guessed_requests(1), 1)
    assert_same(found, expected, flags)


def assert_same(found: dict[str, Any], expected: dict[str, Any], flags: dict[str, Any]) -> None:
    """The same bits, where each layer is one worker's, and tokens in any case."""
    assert found.keys() == expected.keys()
    for key, outputs in found.items():
        was, should_be = told(outputs), told(expected[key])
        tolerance = 2e-3 if "tensor_parallel_size" in flags else 0
        assert was.pop("values") == pytest.approx(should_be.pop("values"), abs=tolerance)
        assert was == should_be


def test_blocks_on_disk_have_the_parts_of_all_nodes(
    model: Path, port: int, pool: Beside, tmp_path: Path, reads_are_worth_it: None
) -> None:
    """Node 0 keeps them. A damaged file is found, whichever node's part it is that is damaged."""
    expected = run(EngineCore(config_of(model, **FOUR_LAYERS)), guessed_requests(1), 1)
    found = list[tuple[bool, bool]]()
    for number in range(3):
        configs = [node_config(model, port, rank, kv_cache_disk=str(tmp_path / f"disk {rank}")) for rank in range(2)]
        other = pool.submit(Node(configs[1], 60).run)
        executor = MultiprocExecutor(configs[0])
        core = EngineCore(configs[0], executor)
        total = counted(core)
        try:
            assert_same(run(core, guessed_requests(1), 1), expected, {})
            assert core.disk is not None and core.disk.save_all()
            core.disk.close()
        finally:
            executor.worker_group.close()
        other.result(within(60))
        found.append((total.num_disk_hits > 0, total.num_disk_damaged > 0))
        own, part = executor._parts[0]
        if number == 1:
            [fingerprint] = {file.parent.parent for file in tmp_path.glob("disk 0/octavo-kv-1/*/*/*-0")}
            for file in fingerprint.glob("*/*-0"):
                contents = bytearray(file.read_bytes())
                contents[own + part - 1] ^= 1  # of node 1's part
                file.write_bytes(contents)
    assert found == [(False, False), (True, False), (False, True)]
    assert not list(tmp_path.glob("disk 1/octavo-kv-1/*/*/*-0"))
    assert executor.other_nodes == [node_identity(model_identity(configs[0].model, tmp_path))]


def test_blocks_of_a_node_with_other_files_are_others(model: Path) -> None:
    config = node_config(model, 29501, 0)

    def fingerprint(*other_nodes: str) -> bytes:
        return cache_fingerprint(config, ["w"], [], [], 96, [], other_nodes)

    same = node_identity("w")
    assert fingerprint() == fingerprint(same) == fingerprint(same, same) != fingerprint(node_identity("v"))
    assert fingerprint(same, node_identity("v")) != fingerprint(node_identity("v"), same)


def of_other_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "__version__", "0.0.9")


def of_other_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "group_token", lambda: b"other")


def nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pass


@pytest.mark.parametrize(
    ("flags", "prepare", "of_node", "of_node_0"),
    [
        ({"size": 4}, nothing, "its --nnodes is 4, and node 0's 2", "--nnodes is 4"),
        ({}, of_other_version, "it is Octavo 0.0.9, and node 0 0.1", "it is Octavo 0.0.9"),
        ({"max_num_seqs": 4}, nothing, "its scheduler.max_num_seqs is 4, and node 0's 6", "max_num_seqs is 4"),
        ({"hf_overrides": {"num_hidden_layers": 2}}, nothing, "its model.config is", "its model.config is"),
        ({}, of_other_token, "has another token; OCTAVO_NODES_TOKEN must be the same", None),
    ],
)
def test_a_node_that_does_not_fit_is_told_why(
    model: Path, port: int, pool: Beside, monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any],
    prepare: Callable[[pytest.MonkeyPatch], None], of_node: str, of_node_0: str | None,
) -> None:  # fmt: skip
    """And so is node 0, if it is one that knows the token."""
    gathering = pool.submit(NodeGroup.gather, node_config(model, port, 0))
    monkeypatch.setattr(joining, "_NOTICE_S", 0.0)
    with monkeypatch.context() as changed:
        prepare(changed)
        with pytest.raises(ConfigError, match=rf"node 1 \(.*\) cannot join.*127.0.0.1:{port}.*{of_node}"):
            Node(node_config(model, port, 1, **flags), 60).run()
    if of_node_0 is None:
        assert not gathering.done()
        Node(node_config(model, port, 1), 60)
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100)
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(100):  # it is hung up on
                    pass
        assert not gathering.done()
        with pytest.raises(ConfigError):
            Node(node_config(model, port, 1, max_num_seqs=4), 60).run()
        of_node_0 = "max_num_seqs"
    with pytest.raises(ConfigError, match=rf"node 1 \(.*, 127.0.0.1\) cannot join: .*{of_node_0}"):
        gathering.result(within(60))


def test_each_rank_is_there_once(model: Path, port: int, pool: Beside, monkeypatch: Any) -> None:
    monkeypatch.setattr(joining, "_NOTICE_S", 0.0)
    has_joined = threading.Event()
    taken = group.NodeGroup._take

    def take(self: NodeGroup, member: Any) -> None:
        taken(self, member)
        has_joined.set()

    monkeypatch.setattr(NodeGroup, "_take", take)
    gathering: Future[NodeGroup] = pool.submit(NodeGroup.gather, node_config(model, port, 0, 3, **FOUR_LAYERS))
    first = pool.submit(Node(node_config(model, port, 1, 3), 60).run)
    assert has_joined.wait(within(60))
    with pytest.raises(ConfigError, match=r"node 1 .* cannot join .* there is node 1 \(.*, 127.0.0.1\) already"):
        Node(node_config(model, port, 1, 3), 60).run()
    with pytest.raises(ConfigError, match=r"node 0 cannot listen at 127.0.0.1.* no other node 0 may be there"):
        NodeGroup.gather(node_config(model, port, 0, 3))
    with pytest.raises(ConfigError, match=r"its max|scheduler.max_num_seqs"):
        Node(node_config(model, port, 2, 3, max_num_seqs=4), 60).run()
    for waiting in (gathering, first):  # the others go with the one that does not fit
        with pytest.raises(ConfigError, match=r"node 2 .* cannot join"):
            waiting.result(within(60))


def test_what_a_node_cannot_load_is_told_by_all(model: Path, port: int, pool: Beside) -> None:
    other = pool.submit(Node(node_config(model, port, 1, kv_cache_memory_bytes=1 << 60), 60).run)
    with pytest.raises(ConfigError, match=r"node 1: --kv-cache-memory-bytes asks for 1073741824\.00 GiB, and"):
        MultiprocExecutor(node_config(model, port, 0))
    with pytest.raises(LoadError, match=r"node 1 \(.*\): the group has not got ready: .*--kv-cache-memory-bytes"):
        other.result(within(60))


def test_the_smallest_offer_of_memory_counts(model: Path, port: int, pool: Beside) -> None:
    flags = {"num_gpu_blocks_override": None}
    other = pool.submit(Node(node_config(model, port, 1, kv_cache_memory_bytes=200_000, **flags), 60).run)
    executor = MultiprocExecutor(node_config(model, port, 0, kv_cache_memory_bytes=30_000_000, **flags))
    executor.worker_group.close()
    other.result(within(60))
    # Of two layers: keys and values of 8 tokens, 2 heads of 16 numbers in four bytes.
    assert executor.num_blocks == [200_000 // (2 * 2 * 8 * 2 * 16 * 4)]


def test_without_node_0_a_node_gives_up(model: Path, port: int) -> None:
    with pytest.raises(LoadError, match=rf"cannot join node 0 at 127.0.0.1:{port}: Connection refused. Given up"):
        Node(node_config(model, port, 1), 0.1).run()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"nnodes": 2}, "shares out the stages of --pipeline-parallel-size, which is 1: it must be a multiple"),
        ({"nnodes": 2, "pipeline_parallel_size": 2, "node_rank": 2}, "--node-rank must be 0 to 1, as --nnodes says"),
        ({"node_rank": 1}, "--node-rank must be 0 to 0"),
        (
            {"master_addr": "10.0.0.1"},
            "--master-addr says where other hosts join: give --nnodes, too, or leave --master-a",
        ),
        ({"pipeline_parallel_size": 2, "master_port": 5}, "--master-port says where other hosts join: give --nnodes"),
        ({"data_parallel_rpc_port": 5}, "--data-parallel-rpc-port says where engines of other hosts join: give --data"),
        (
            {"data_parallel_size": 2, "data_parallel_address": "::1"},
            "--data-parallel-address says where engines of oth",
        ),
        (
            {"data_parallel_size": 4, "data_parallel_size_local": 4, "data_parallel_rpc_port": 5},
            "give --data-parallel-size-local below --data-parallel-size, or leave --data-parallel-rpc-port out",
        ),
        ({"nnodes": 2, "pipeline_parallel_size": 2, "master_port": 0}, "--master-port must be between 1 and 65535"),
        ({"nnodes": 2, "pipeline_parallel_size": 2, "master_addr": "10.0.0.1"}, "set OCTAVO_NODES_TOKEN to the same"),
        (
            {"nnodes": 2, "pipeline_parallel_size": 2, "data_parallel_size": 2},
            "not built yet with --data-parallel-size",
        ),
        ({"data_parallel_start_rank": 1}, "--data-parallel-start-rank 1 needs --data-parallel-size-local"),
        (ELSEWHERE | {"data_parallel_start_rank": 3}, "are engines 3 to 4, and --data-parallel-size 4 has 0 to 3"),
        (ELSEWHERE | {"data_parallel_start_rank": -1}, "are engines -1 to 0, and --data-parallel-size 4 has 0 to 3"),
        (ELSEWHERE | {"data_parallel_rpc_port": 0}, "--data-parallel-rpc-port must be between 1 and 65535"),
        (
            ELSEWHERE | {"data_parallel_address": "10.0.0.1"},
            "--data-parallel-address 10.0.0.1 is in a network: set OCTAVO",
        ),
        (ELSEWHERE | {"max_model_len": "auto"}, "--max-model-len auto is not built yet with engines on several hosts"),
        (ELSEWHERE | {"nnodes": 2, "pipeline_parallel_size": 2}, "not built yet with --data-parallel-size"),
        ({"data_parallel_hybrid_lb": True}, "--data-parallel-hybrid-lb needs --data-parallel-size-local"),
        ({"data_parallel_external_lb": True}, "--data-parallel-external-lb needs --data-parallel-rank"),
        ({"data_parallel_size": 2, "data_parallel_rank": 2}, "--data-parallel-rank must be 0 to 1, .*, got 2"),
        (ELSEWHERE | {"data_parallel_rank": 1}, "--data-parallel-rank 1 is the one engine of its server"),
        (HYBRID | {"data_parallel_rank": 1}, "--data-parallel-rank 1 is the one engine of its server"),
        (HYBRID | {"data_parallel_address": "10.0.0.1"}, "address does not go with .*-hybrid-lb: nobody joins this"),
        (
            {"data_parallel_size": 2, "data_parallel_rank": 1, "data_parallel_backend": "ray"},
            "backend does not go with --data-parallel-rank: this server starts nothing on other hosts",
        ),
        (HYBRID | {"nnodes": 2, "pipeline_parallel_size": 2}, "except where each engine has a server of its own"),
        ({"data_parallel_backend": "mpi"}, "--data-parallel-backend mpi is not built; mp and ray are"),
        (RAY_ENGINES, r"--data-parallel-backend ray needs Ray: scripts/install ray, on all hosts"),
        (RAY_ENGINES | {"data_parallel_size_local": 4}, "must say how many of the 4 of --data-parallel-size each host"),
        (RAY_ENGINES | {"data_parallel_start_rank": 2}, "--data-parallel-start-rank is for hosts that are started by"),
        (RAY, r"needs Ray: scripts/install ray, on all hosts"),
        (RAY | {"nnodes": 2, "node_rank": 1}, "--node-rank is for nodes that are started by hand"),
    ],
)
def test_flags_of_nodes_are_checked(
    model: Path, monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], message: str
) -> None:
    monkeypatch.delenv("OCTAVO_NODES_TOKEN", raising=False)
    monkeypatch.setattr(data_parallel_flags, "find_spec", lambda name: None)  # whether or not it is here
    with pytest.raises(ConfigError, match=message):
        config_of(model, **flags)


def test_nodes_other_than_0_are_headless(model: Path) -> None:
    with pytest.raises(ConfigError, match="--data-parallel-start-rank 1 serves nothing, and needs --headless"):
        run_server(AsyncEngineArgs(data_parallel_size=2, data_parallel_start_rank=1), ServerArgs())
    with pytest.raises(ConfigError, match="--data-parallel-hybrid-lb starts a server on each host, --headless"):
        run_server(AsyncEngineArgs(**HYBRID, data_parallel_start_rank=2), ServerArgs(headless=True))
    for rank, headless, message in ((1, False, "serves nothing, and needs --headless"), (0, True, "--headless is for")):
        with pytest.raises(ConfigError, match=message):
            run_server(AsyncEngineArgs(node_rank=rank, nnodes=2), ServerArgs(headless=headless))
    with pytest.raises(ConfigError, match="--node-rank 1 has no engine of its own"):
        make_executor(node_config(model, 29501, 1))


@pytest.mark.parametrize(("rank", "refused"), [(1, 1), (1, 2), (2, None)])
def test_a_node_that_cannot_connect_keeps_nothing_open(
    model: Path, port: int, monkeypatch: pytest.MonkeyPatch, rank: int, refused: int | None
) -> None:
    """As it tries again for ever: the connections of its rows and its worker, and the memory of that."""
    config = node_config(model, port, rank, 3)
    description = describe(config.model.checkpoint.config)
    others = []

    def connect(address: tuple[str, int], token: bytes) -> socket.socket:
        if len(others) + 1 == refused:
            raise ConnectionRefusedError
        own, other = socket.socketpair()
        others.append(other)
        return own

    monkeypatch.setattr(node, "connect", connect)
    monkeypatch.setattr(node, "HANDSHAKE_S", 0.01)
    membership = node._Membership(config, description)
    if rank > 1:  # whose node before does not come
        membership._listener = listen(("127.0.0.1", 0))
    before = open_files()
    with pytest.raises(OSError):  # noqa: PT011 - of either kind
        membership._start(Joined(b"session", None))
    for other in others:
        other.close()
    assert open_files() <= before
    membership.__exit__()
