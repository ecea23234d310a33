"""A real server whose engine dies, hangs, is overloaded or is told to stop."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from tests.e2e.server import MODEL, Server, running_server

pytestmark = pytest.mark.slow

NO_END = {"ignore_eos": True}
BODY = {"model": MODEL, "prompt": "Count to a thousand: one, two,", "max_tokens": 4000, **NO_END}
LONG = {"model": MODEL, "prompt": BODY["prompt"], "max_tokens": 4000, "extra_body": NO_END}  # for the client


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(
        tmp_path_factory.mktemp("supervised"), "--max-model-len", "4096", "--max-num-seqs", "4", "--max-queue-len", "3",
        "--max-engine-restarts", "5", "--engine-step-timeout", "8", "--max-request-time", "100", "--check-invariants",
    ) as server:  # fmt: skip
        yield server
        assert server.process.poll() is None
        assert server.stop() == 0
        assert "Traceback" not in server.log.read_text()


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


def greedy(client: openai.OpenAI) -> str:
    done = client.completions.create(model=MODEL, prompt="The capital of France is", max_tokens=12, temperature=0)
    return done.choices[0].text


def wait_for_health(server: Server, status: int, timeout_s: float = 60) -> dict[str, str]:
    deadline = time.monotonic() + timeout_s
    while (found := server.get("/health"))[0] != status:
        assert time.monotonic() < deadline, found
        time.sleep(0.01)
    return json.loads(found[1])


@pytest.mark.parametrize("how", ["kill", "hang"])
def test_an_engine_that_dies_or_hangs_is_replaced_and_its_requests_get_an_error(
    server: Server, client: openai.OpenAI, how: str
) -> None:
    server.wait_until_idle()
    expected = greedy(client)
    num_tokens, num_restarts = server.metric("generation_tokens_total"), server.count("octavo:engine_restarts_total")
    streams = [client.completions.create(**LONG, stream=True) for _ in range(3)]
    for stream in streams:
        next(iter(stream))
    with ThreadPoolExecutor() as pool:
        unstreamed = pool.submit(client.completions.create, **LONG)
        queued = pool.submit(client.completions.create, **LONG)
        deadline = time.monotonic() + 30
        while server.metric("num_requests_running") + server.metric("num_requests_waiting") < 5:
            assert time.monotonic() < deadline
        core = server.core_process()
        if how == "kill":
            core.kill()
            reason = wait_for_health(server, 503, timeout_s=5)
            assert reason["status"] == "restarting"
            assert "exit status -9" in reason["reason"]
        else:
            core.send_signal(signal.SIGSTOP)
            assert "no step for 8 s" in wait_for_health(server, 503)["reason"]
        for stream in streams:
            with pytest.raises(openai.APIError) as ended:
                for _ in stream:
                    pass
            assert ended.value.code == "engine_dead"
        for request in (unstreamed, queued):
            with pytest.raises(openai.InternalServerError) as refused:
                request.result()
            assert refused.value.status_code == 503
    wait_for_health(server, 200)
    assert server.core_process().pid != core.pid
    assert greedy(client) == expected
    server.wait_until_idle()
    assert server.metric("generation_tokens_total") > num_tokens, "the counts go on"
    assert server.count("octavo:engine_restarts_total") == num_restarts + 1
    assert server.count('octavo:startup_seconds{phase="imports",process="core"}') > 0


def test_a_full_queue_is_429_with_the_time_to_come_back(server: Server) -> None:
    server.wait_until_idle()

    async def ask(http: httpx.AsyncClient) -> httpx.Response:
        return await http.post("/v1/completions", json={**BODY, "max_tokens": 60})

    async def ask_all() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
            return await asyncio.gather(*(ask(http) for _ in range(20)))

    answers = asyncio.run(ask_all())
    statuses = [answer.status_code for answer in answers]
    # Four run and three wait; more are taken only if some of these have ended before the last came.
    assert statuses.count(200) >= 7
    assert statuses.count(429) >= 5
    assert set(statuses) == {200, 429}
    for answer in answers:
        if answer.status_code == 429:
            assert 1 <= int(answer.headers["retry-after"]) <= 120
            assert answer.json()["error"]["code"] == "queue_full"
    server.wait_until_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_ends_with_its_partial_text_when_its_time_is_up(
    server: Server, client: openai.OpenAI, stream: bool
) -> None:
    server.wait_until_idle()
    asked = {**LONG, "temperature": 0, "extra_body": {**NO_END, "timeout": 2}, "stream": stream}
    answer = client.completions.create(**asked)
    if stream:
        chunks = [chunk.choices[0] for chunk in answer]
        text, last = "".join(choice.text for choice in chunks), chunks[-1]
    else:
        text, last = answer.choices[0].text, answer.choices[0]
        assert 0 < answer.usage.completion_tokens < 4000
    assert (last.finish_reason, last.stop_reason) == ("abort", "timeout")
    assert len(text) > 0
    server.wait_until_idle(timeout_s=5)


def test_a_request_whose_time_is_up_in_the_queue_ends_without_text(server: Server, client: openai.OpenAI) -> None:
    server.wait_until_idle()
    streams = [client.completions.create(**LONG, stream=True) for _ in range(4)]
    for stream in streams:
        next(iter(stream))
    chat = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hello"}], extra_body={"timeout": 0.3}
    )
    assert (chat.choices[0].finish_reason, chat.choices[0].message.content) == ("abort", "")
    assert server.metric("num_requests_running") == 4
    for stream in streams:
        stream.close()
    server.wait_until_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_who_hangs_up_in_the_queue_leaves_it(server: Server, client: openai.OpenAI, stream: bool) -> None:
    server.wait_until_idle()
    streams = [client.completions.create(**LONG, stream=True) for _ in range(4)]
    for running in streams:
        next(iter(running))
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json={**BODY, "stream": stream}, timeout=0.5).raise_for_status()
    deadline = time.monotonic() + 10
    while server.metric("num_requests_waiting"):
        assert time.monotonic() < deadline
    assert server.metric("num_requests_running") == 4
    for running in streams:
        running.close()
    server.wait_until_idle()


def test_an_engine_that_keeps_dying_ends_the_server_with_status_1(tmp_path: Path) -> None:
    with running_server(tmp_path, "--max-model-len", "256", "--max-engine-restarts", "1") as server:
        first = server.core_process()
        first.kill()
        wait_for_health(server, 503, timeout_s=5)
        wait_for_health(server, 200)
        server.core_process().kill()
        assert server.process.wait(30) == 1
        log = server.log.read_text()
        assert "octavo: error: the engine has died and the server gives up" in log
        assert "Traceback" not in log


def test_sigterm_lets_requests_end_while_new_ones_are_refused(tmp_path: Path) -> None:
    with running_server(
        tmp_path, "--max-model-len", "1024", "--shutdown-timeout", "60", "--log-format", "json"
    ) as server:
        core = server.core_process()
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)
        stream = client.completions.create(**{**LONG, "max_tokens": 300, "stream": True})
        chunks = [next(iter(stream)).choices[0]]
        with ThreadPoolExecutor() as pool:
            whole = pool.submit(client.completions.create, **{**LONG, "max_tokens": 200})
            time.sleep(0.3)
            for process in (*psutil.Process(server.process.pid).children(recursive=True), server.process):
                process.send_signal(signal.SIGTERM)  # as systemd does, to every process of a unit
            assert wait_for_health(server, 503, timeout_s=5)["status"] == "stopping"
            refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "Hello"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_stopping")
            assert "retry-after" in refused.headers
            chunks += [chunk.choices[0] for chunk in stream]
            assert chunks[-1].finish_reason == "length"
            assert whole.result().choices[0].finish_reason == "length"
        assert server.process.wait(10) == 0
        assert not core.is_running()
        lines = [json.loads(line) for line in server.log.read_text().splitlines()]
        assert {line["process"] for line in lines} >= {"server"}
        assert next(line["message"] for line in lines if "ready" in line).startswith("Octavo")


def test_what_has_not_ended_in_time_ends_with_its_partial_text(tmp_path: Path) -> None:
    with running_server(
        tmp_path, "--max-model-len", "4096", "--max-num-seqs", "2", "--shutdown-timeout", "1"
    ) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)
        asked = LONG
        stream = client.completions.create(**asked, stream=True)
        chunks = [next(iter(stream)).choices[0]]
        with ThreadPoolExecutor() as pool:
            whole = pool.submit(client.completions.create, **asked)
            deadline = time.monotonic() + 30
            while server.metric("num_requests_running") < 2:
                assert time.monotonic() < deadline
            queued = pool.submit(client.completions.create, **asked)
            time.sleep(0.3)
            server.process.send_signal(signal.SIGTERM)
            chunks += [chunk.choices[0] for chunk in stream]
            assert chunks[-1].finish_reason == "abort"
            answer = whole.result().choices[0]
            assert (answer.finish_reason, bool(answer.text)) == ("abort", True)
            with pytest.raises(openai.InternalServerError) as refused:
                queued.result()
            assert (refused.value.status_code, refused.value.code) == (503, "engine_stopping")
        assert server.process.wait(10) == 0


def test_a_second_signal_ends_the_server_at_once(tmp_path: Path) -> None:
    with running_server(tmp_path, "--max-model-len", "4096", "--shutdown-timeout", "100") as server:
        asked = {**BODY, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=asked, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            reader = threading.Thread(target=lambda: list(lines), daemon=True)
            reader.start()
            server.process.send_signal(signal.SIGTERM)
            wait_for_health(server, 503, timeout_s=5)
            server.process.send_signal(signal.SIGTERM)
            server.process.wait(10)
            reader.join(10)
            assert not reader.is_alive()


def test_a_server_that_is_killed_takes_its_engine_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves no sockets."""
    folder = tmp_path / "t"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    with running_server(tmp_path, "--max-model-len", "256") as server:
        assert list(folder.glob("octavo-*"))
        core = server.core_process()
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
        psutil.wait_procs([core], timeout=10)
        assert not core.is_running()
        assert not list(folder.glob("octavo-*"))
