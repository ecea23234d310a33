"""An engine's process: where its sockets lie, and its end."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.config import DiskCacheConfig, EngineArgs, EngineConfig
from octavo.engine import core_client
from octavo.engine.core_client import CoreClient, CoreProcess, _make_socket_folder
from octavo.engine.wire import CoreProcessArgs
from octavo.entrypoints.http.server_args import ServerArgs
from octavo.entrypoints.http.uvicorn_server import FLUSH_TIMEOUT_S
from octavo.errors import OctavoError
from octavo.gateway.serve_process import STOP_TIMEOUT_S
from tests.waiting import within


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RUNTIME_DIRECTORY", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", None)  # which Python remembers


def test_the_folder_is_for_its_user_only_and_goes_with_its_holder(tmp_path: Path) -> None:
    folder = _make_socket_folder()
    assert Path(folder.name).stat().st_mode & 0o777 == 0o700
    folder.cleanup()
    assert not Path(folder.name).exists()


def test_the_folder_is_in_systemds_runtime_directory_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNTIME_DIRECTORY", f"{tmp_path}:/run/other")
    with _make_socket_folder() as name:
        assert Path(name).parent == tmp_path


def test_without_a_writable_folder_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNTIME_DIRECTORY", "/proc/no/such")
    with pytest.raises(OctavoError, match=r"no folder to write the engine's sockets to .* PrivateTmp=yes or Runtime"):
        _make_socket_folder()


def test_a_path_that_is_too_long_for_sockets_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    with pytest.raises(OctavoError, match="is too long for sockets; set TMPDIR to a folder with a shorter path"):
        _make_socket_folder()
    assert not list(long.iterdir())


def test_a_core_that_hangs_before_it_has_a_configuration_does_not_keep_its_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(core_client, "EXIT_GRACE_S", 0.01)
    stops = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"]
    monkeypatch.setattr(core_client, "child_command", lambda *args: stops)
    core = CoreProcess()
    os.waitpid(core.process.pid, os.WUNTRACED)
    core.close()
    assert core.process.returncode == -signal.SIGKILL
    core.close()


@pytest.mark.parametrize(("disk", "takes_s"), [(None, 1e6), (DiskCacheConfig("/tmp", 1 << 30), 0.3)])
def test_a_core_with_blocks_to_save_gets_more_time_to_end(
    monkeypatch: pytest.MonkeyPatch, disk: DiskCacheConfig | None, takes_s: float
) -> None:
    monkeypatch.setattr(core_client, "EXIT_GRACE_S", 0.01)
    ends_late = f"import sys, time; sys.stdin.read(); time.sleep({takes_s})"
    monkeypatch.setattr(core_client, "child_command", lambda *args: [sys.executable, "-c", ends_late])
    core = CoreProcess()
    config = EngineArgs().create_engine_config()
    config = replace(config, cache=replace(config.cache, disk=disk))
    core.configure(CoreProcessArgs(config, "", "", "", 0))
    core.begin_close(within(60))
    core.close()
    assert core.process.returncode == (-signal.SIGKILL if disk is None else 0)


def test_a_core_is_told_how_long_it_may_save_blocks() -> None:
    lasts = "import sys; sys.stdin.readline(); sys.exit(int(sys.stdin.read()))"
    core = _process_of(lasts)
    core.configure(CoreProcessArgs(EngineArgs().create_engine_config(), "", "", "", 0))
    core.begin_close(7.0)
    core.begin_close(8.0)
    assert core.process.wait() == 7
    core.close()


def test_a_drain_and_the_saving_of_blocks_share_the_time_of_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    assert [core_client.saving_s(since) for since in (None, 100.0, 90.0, 80.0, 40.0)] == [25, 25, 15, 5, 5]
    drain_s = ServerArgs().shutdown_timeout
    assert drain_s + FLUSH_TIMEOUT_S + core_client.saving_s(100.0 - drain_s) < STOP_TIMEOUT_S


CONNECTS_LATE = """
import sys, time
import msgspec, zmq
args = msgspec.json.decode(sys.stdin.buffer.readline())
context = zmq.Context()
receiver, sender = context.socket(zmq.PULL), context.socket(zmq.PUSH)
sender.connect(args["output_address"])
sender.send(b"ready")
time.sleep(0.2)  # in which ZeroMQ's thread of the parent accepts one connection and not yet the other
receiver.connect(args["input_address"])
sender.send(receiver.recv())
sys.stdin.buffer.read()
"""


def test_what_answers_a_cores_first_message_reaches_it(stub_config: EngineConfig) -> None:
    client, heard = CoreClient(stub_config, _process_of(CONNECTS_LATE)), list[bytes]()

    async def answer() -> None:
        answered = asyncio.get_running_loop().create_future()

        def handle(data: bytes) -> None:
            heard.append(data)
            if data == b"ready":
                client.send_data(b"request")
            else:
                answered.set_result(None)

        reading = asyncio.create_task(client.receive_data(handle))
        await asyncio.wait((answered, reading), return_when=asyncio.FIRST_COMPLETED)
        client.end()
        await reading

    try:
        asyncio.run(answer())
    finally:
        client.close()
    assert heard == [b"ready", b"request"]


TELLS_WHAT_CAME_TOGETHER = """
import sys
import msgspec, zmq
args = msgspec.json.decode(sys.stdin.buffer.readline())
context = zmq.Context()
receiver, sender = context.socket(zmq.PULL), context.socket(zmq.PUSH)
receiver.connect(args["input_address"])
sender.connect(args["output_address"])
sender.send(b"ready")
while True:
    sender.send(receiver.recv() + (b"+" if receiver.getsockopt(zmq.RCVMORE) else b"."))
"""


def test_further_messages_of_a_turn_go_together_and_in_order(stub_config: EngineConfig) -> None:
    client, heard = CoreClient(stub_config, _process_of(TELLS_WHAT_CAME_TOGETHER)), list[bytes]()

    async def tell() -> None:
        answered = asyncio.get_running_loop().create_future()

        def handle(data: bytes) -> None:
            heard.append(data)
            if len(heard) == 1:
                for message in (b"1", b"2", b"3", b"4"):
                    client.send_data(message)
            elif len(heard) == 5:
                client.send_data(b"5")
            elif len(heard) == 6:
                answered.set_result(None)

        reading = asyncio.create_task(client.receive_data(handle))
        await asyncio.wait((answered, reading), return_when=asyncio.FIRST_COMPLETED)
        client.kill()
        await reading

    try:
        asyncio.run(tell())
    finally:
        client.close()
    assert heard == [b"ready", b"1.", b"2+", b"3+", b"4.", b"5."]


def _process_of(code: str) -> CoreProcess:
    """Return a core that runs `code`."""
    core = CoreProcess.__new__(CoreProcess)
    core.process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    return core


def test_a_client_that_nobody_has_closed_can_be_collected(stub_config: EngineConfig) -> None:
    """With what refers to it, as an engine's parts do to each other."""
    client = CoreClient(stub_config)
    context, process = client._context, client.process
    cycle = [client]
    cycle.append(cycle)  # type: ignore[arg-type]
    del client, cycle
    gc.collect()
    assert context.closed
    process.kill()
    process.wait()


class _Waiting:
    """A socket with messages that all wait to be read."""

    def __init__(self, num_messages: int) -> None:
        self.messages = [b"%d" % i for i in range(num_messages)]
        self.descriptor, self._other = os.pipe()

    def recv(self) -> bytes:
        return self.messages.pop(0)

    def fileno(self) -> int:
        return self.descriptor

    def close(self) -> None:
        os.close(self.descriptor)
        os.close(self._other)


@pytest.mark.parametrize("has_ended", [False, True])
def test_whatever_waits_for_the_loop_runs_between_messages_and_none_is_lost(
    has_ended: bool, stub_config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting, handled, turns = _Waiting(1000), list[bytes](), list[int]()
    client = CoreClient(stub_config)
    monkeypatch.setattr(client, "_receiver", waiting)
    monkeypatch.setattr(core_client, "_READ_S", 0.0)  # one message takes a turn's time
    monkeypatch.setattr(core_client.wire, "is_readable", lambda socket: bool(socket.messages))
    if has_ended:  # its last messages are read all the same
        client.process.kill()
        client.process.wait()

    async def use() -> None:
        reading = asyncio.ensure_future(client.receive_data(handled.append))
        while len(handled) < 1000:
            turns.append(len(handled))
            await asyncio.sleep(0)
        if has_ended:
            await reading
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)

    asyncio.run(use())
    assert handled == [b"%d" % i for i in range(1000)]
    # One of `receive_data` itself, one of the reader, one that the end has left.
    assert max(after - before for before, after in itertools.pairwise(turns)) <= 3
    client.process.kill()
    client.close()
    waiting.close()
