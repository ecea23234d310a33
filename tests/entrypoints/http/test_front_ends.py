"""What several front ends of a server share: the port, counts, the store."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from octavo.engine import async_engine
from octavo.entrypoints.http import front_end
from octavo.entrypoints.http.front_end import FrontEndArgs, _end_with_hub, _sample
from octavo.entrypoints.http.front_ends import check_engines, one_store, share_port
from octavo.entrypoints.http.server import _bind
from octavo.entrypoints.http.server_args import ServerArgs
from octavo.entrypoints.http.server_state import ServerState
from octavo.entrypoints.http.shared_counts import CONNECTIONS, REQUESTS_PER_S, WAITING_TOKENS, SharedCounts, num_bytes
from octavo.errors import ConfigError
from octavo.metrics.log_line import LogLine
from octavo.metrics.prometheus import EngineMetrics
from tests.entrypoints.fake_engine import FakeEngine
from tests.ports import held_port


def test_each_front_end_writes_its_own_counts_and_reads_the_sums() -> None:
    memory = bytearray(num_bytes(3, 2))
    counts = [SharedCounts(memory, place, 3) for place in range(3)]
    for place, one in enumerate(counts):
        one.share(WAITING_TOKENS + 1, 10**place)
    assert counts[0].share(CONNECTIONS, 7) == 7
    assert [one.total(WAITING_TOKENS + 1) for one in counts] == [111, 111, 111]
    counts[1].clear()
    assert counts[2].total(WAITING_TOKENS + 1) == 101
    assert counts[2].total(CONNECTIONS) == 7
    assert counts[2].total(WAITING_TOKENS) == 0


def test_the_rate_of_requests_is_of_all_front_ends() -> None:
    memory = bytearray(num_bytes(2, 1))
    seen = []
    for place in range(2):
        metrics, counts = EngineMetrics("stub", 64), SharedCounts(memory, place, 2)
        metrics.total_rate = partial(counts.total, REQUESTS_PER_S)
        line = LogLine(metrics, 0.0)
        metrics.num_finished["stop"] += 10 + place
        _sample(metrics, [line], counts, 10.0)
        seen.append(metrics)
    assert [one.all_requests_per_s for one in seen] == [2.1, 2.1]


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        (ServerArgs(max_log_len=3), {"logs_requests": True, "max_log_len": 3}),
        (ServerArgs(disable_log_requests=True), {"logs_requests": False, "max_log_len": 100}),
    ],
)
def test_a_front_end_logs_requests_as_its_flags_say(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, args: ServerArgs, wanted: dict[str, Any]
) -> None:
    class Made(Exception):
        pass

    def make(*_: Any, **options: Any) -> None:
        raise Made({name: options[name] for name in wanted})

    monkeypatch.setattr(async_engine, "AsyncLLMEngine", make)
    monkeypatch.setattr(front_end, "_counts", lambda _: SharedCounts(bytearray(num_bytes(1, 1)), 0, 1))
    with pytest.raises(Made) as made:
        asyncio.run(front_end._serve(FrontEndArgs(engine.config, args, 0, 0, os.getpid(), -1, -1, -1, [])))
    assert made.value.args == (wanted,)


def test_requests_of_all_front_ends_fill_the_queue(engine: FakeEngine) -> None:
    memory = bytearray(num_bytes(2, 1))
    args = ServerArgs(max_queue_len=1)
    one, other = (ServerState(cast(Any, engine), args, SharedCounts(memory, place, 2)) for place in range(2))
    one.num_engine_requests += engine.config.num_slots
    assert other.queue_retry_after_s() is None
    other.num_engine_requests += 1
    assert one.queue_retry_after_s() is not None
    assert one.num_all_engine_requests == other.num_all_engine_requests == engine.config.num_slots + 1
    other.num_engine_requests -= 1
    assert one.queue_retry_after_s() is None


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere one socket is shared")
def test_front_ends_listen_at_one_port_and_nobody_else_can() -> None:
    args = ServerArgs(host="127.0.0.1", port=held_port())
    with _bind(args, listens=False) as first, share_port(first, 3, is_path=False) as sockets:
        assert {sock.getsockname() for sock in sockets} == {("127.0.0.1", args.port)}
        with socket.create_connection(("127.0.0.1", args.port)):
            pass
        with pytest.raises(ConfigError, match="cannot listen"), _bind(args, listens=False):
            pass


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere one socket is shared")
def test_a_port_that_somebody_takes_before_the_front_ends_do_is_an_error_of_the_configuration() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        first = SimpleNamespace(family=socket.AF_INET, getsockname=other.getsockname, close=lambda: None)
        with pytest.raises(ConfigError, match="cannot listen at 127"), share_port(cast(Any, first), 2, is_path=False):
            pass


def test_a_store_of_several_front_ends_is_a_file_that_ends_with_the_server() -> None:
    with one_store(ServerArgs()) as (args, name):
        assert args.response_store is not None and name is not None
        folder = Path(name)
        assert Path(args.response_store).parent == folder
        assert folder.stat().st_mode & 0o77 == 0
    assert not folder.exists()
    with one_store(ServerArgs(response_store="own.sqlite")) as (args, name):
        assert (args.response_store, name) == ("own.sqlite", None)


def test_the_store_of_a_killed_server_is_removed_and_a_users_store_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "_exit", lambda status: None)
    users = tmp_path / "octavo-store-1"  # named as the server names its own
    users.mkdir()
    with one_store(ServerArgs(response_store=str(users / "store.sqlite"))) as (_, name):
        _end_with_hub(name, parent=-1)
    assert users.exists()
    with one_store(ServerArgs()) as (_, name):
        assert name is not None
        _end_with_hub(name, parent=-1)
        assert not Path(name).exists()
        Path(name).mkdir()  # as this process lives on


def test_engines_of_other_hosts_are_refused() -> None:
    config = SimpleNamespace(engine_hosts=object(), served_ranks=range(4), local_ranks=range(2))
    with pytest.raises(ConfigError, match="--api-server-count 2: engines on other hosts have one front end"):
        check_engines(cast(Any, config), ServerArgs(api_server_count=2))
    config.local_ranks = config.served_ranks
    check_engines(cast(Any, config), ServerArgs(api_server_count=2))
