"""A real server with two front ends: they share engine, counts and store, and one that dies takes nothing along."""

from __future__ import annotations

import re
import signal
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.server import MODEL, Server, running_server
from tests.waiting import wait_until, within

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.skipif(sys.platform == "win32", reason="sockets are not inherited there"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("front-ends")
    with running_server(folder, "--api-server-count", "2", "--max-model-len", "4096") as server:
        yield server
        assert server.process.poll() is None
        assert server.stop() == 0
        assert "Traceback" not in server.log.read_text()


def ask(server: Server, **more: object) -> tuple[int, str]:
    """Ask on a connection of its own. Returns the front end that answered, and the text."""
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 4, "temperature": 0, **more}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=within(100)).json()
    return front_end_of(server, answer["id"]), answer["choices"][0]["text"]


def front_end_of(server: Server, name: str) -> int:
    found = re.search(rf"front end (\d)\] {name}", server.log.read_text())
    assert found is not None
    return int(found[1])


def process_of(server: Server, place: int) -> psutil.Process:
    """The process of a front end."""
    children = psutil.Process(server.process.pid).children()
    [found] = [one for one in children if one.cmdline()[-2:] == ["octavo.entrypoints.http.front_end", str(place)]]
    return found


def client_ports(server: Server, place: int) -> set[int]:
    """The ports of the clients that are connected to a front end."""
    return {one.raddr.port for one in process_of(server, place).net_connections() if one.raddr}


def test_both_answer_alike_and_their_metrics_are_one(server: Server) -> None:
    seen: dict[int, str] = {}

    def both() -> bool:
        place, text = ask(server)
        assert seen.setdefault(place, text) == text
        return len(seen) == 2

    wait_until(both)
    assert seen[0] == seen[1]
    num_asked = len(re.findall(r"front end \d\] cmpl-", server.log.read_text()))
    for _ in range(4):
        assert server.count('vllm:request_success_total{finished_reason="length"}') == num_asked
        assert server.count("vllm:generation_tokens_total") == 4 * num_asked


def test_background_work_of_one_is_found_and_cancelled_by_any(server: Server) -> None:
    body = {"model": MODEL, "input": "Tell a story.", "background": True, "max_output_tokens": 4000, "ignore_eos": True}
    name = httpx.post(f"{server.url}/v1/responses", json=body, timeout=within(100)).json()["id"]
    for _ in range(8):  # connections of their own: to both
        assert httpx.get(f"{server.url}/v1/responses/{name}").json()["status"] in ("queued", "in_progress")
    for _ in range(8):
        answer = httpx.post(f"{server.url}/v1/responses/{name}/cancel", json={}, timeout=within(100))
        assert answer.json()["status"] == "cancelled"
    server.wait_until_idle()


def test_a_front_end_that_dies_takes_only_its_own_requests_and_comes_again(server: Server) -> None:
    url, body = f"{server.url}/v1/completions", {"model": MODEL, "prompt": "One, two,", "stream": True}
    body |= {"max_tokens": 3000, "ignore_eos": True}
    counted = server.count('vllm:request_success_total{finished_reason="length"}')

    def read(number: int) -> tuple[int, bool]:
        """The front end, and whether the stream came to its end."""
        has_ended, place = False, -1
        with httpx.stream("POST", url, json=body | {"request_id": f"s-{number}"}, timeout=within(100)) as answer:
            try:
                for line in answer.iter_lines():
                    has_ended |= line == "data: [DONE]"
                    if place < 0:
                        port = answer.extensions["network_stream"].get_extra_info("client_addr")[1]
                        place = next(one for one in (0, 1) if port in client_ports(server, one))
                        begun.append(place)
            except httpx.RemoteProtocolError:
                return place, False
        return place, has_ended

    begun: list[int] = []
    with ThreadPoolExecutor(8) as threads:
        streams = [threads.submit(read, number) for number in range(8)]
        wait_until(lambda: len(begun) == 8)
        victim = begun[0]
        process_of(server, victim).send_signal(signal.SIGKILL)
        for stream in streams:
            place, ended = stream.result()
            assert ended == (place != victim)
    assert "it is being started again" in server.log.read_text()
    server.wait_until_idle()
    wait_until(lambda: ask(server)[0] == victim)
    assert server.count('vllm:request_success_total{finished_reason="length"}') > counted


def test_front_ends_end_with_a_server_that_is_killed_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory() as folder:  # a path that is short enough for sockets
        monkeypatch.setenv("TMPDIR", folder)
        with running_server(tmp_path, "--api-server-count", "2", "--max-model-len", "4096") as server:
            assert {path.name.partition("-")[0] for path in Path(folder).iterdir()} == {"octavo"}
            children = psutil.Process(server.process.pid).children()
            assert len(children) == 3
            server.process.kill()
            server.process.wait()
            gone, alive = psutil.wait_procs(children, within(30))
            assert not alive and len(gone) == 3
        assert not list(Path(folder).iterdir())
