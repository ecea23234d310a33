"""A real server whose engine dies, hangs, is overloaded or is told to stop."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.e2e.server import MODEL, Server, running_server
from tests.leaving import ask_and_leave
from tests.waiting import wait_until, within

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
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=within(120))


def wait_for_health(server: Server, status: int) -> None:
    wait_until(lambda: server.get("/health")[0] == status, lambda: server.get("/health"), 100)


def wait_for_log(server: Server, text: str, before: int = 0) -> None:
    """Until a text is in the log once more than `before` times: states of the server may pass before one has asked."""
    wait_until(lambda: server.log.read_text().count(text) > before, server.log.read_text)


RESTARTS = "it is being started again"


ASKED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 3, "logprobs": 2, "frequency_penalty": 0.5},
    {"n": 2, "temperature": 0.9, "seed": 4},
    {"temperature": 0, "logprobs": 1},  # waits in the queue
]


def text_of(client: openai.OpenAI, asked: dict[str, Any], stream: bool) -> Any:
    """Texts and log-probabilities by choice."""
    answer = client.completions.create(**{**LONG, "max_tokens": 100, **asked}, stream=stream)
    texts, logprobs = [""] * asked.get("n", 1), [list[Any]() for _ in range(asked.get("n", 1))]
    for choice in answer.choices if not stream else (choice for chunk in answer for choice in chunk.choices):
        texts[choice.index] += choice.text
        logprobs[choice.index] += choice.logprobs.token_logprobs if choice.logprobs else []
    return texts, logprobs


@pytest.mark.long
@pytest.mark.parametrize("how", ["kill", "hang"])
def test_an_engine_that_dies_or_hangs_is_replaced_and_its_requests_go_on(
    server: Server, client: openai.OpenAI, how: str
) -> None:
    server.wait_until_idle()
    with ThreadPoolExecutor(len(ASKED)) as pool:
        expected = list(pool.map(lambda asked: text_of(client, asked, False), ASKED))
    num_tokens, num_restarts = server.metric("generation_tokens_total"), server.count("octavo:engine_restarts_total")
    num_continued = server.count("octavo:requests_continued_total")
    with ThreadPoolExecutor(len(ASKED)) as pool:
        answers = [pool.submit(text_of, client, asked, asked.get("seed") != 4) for asked in ASKED]
        wait_until(lambda: server.metric("generation_tokens_total") > num_tokens + 40)
        core = server.core_process()
        core.send_signal(signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        assert [answer.result() for answer in answers] == expected
    reason = f"{'exit status -9)' if how == 'kill' else 'no step for 8 s and was killed'}; {RESTARTS}"
    assert reason in server.log.read_text()
    assert server.core_process().pid != core.pid
    server.wait_until_idle()
    assert server.count("octavo:engine_restarts_total") == num_restarts + 1
    assert server.count("octavo:requests_continued_total") > num_continued
    assert server.count('octavo:startup_seconds{phase="imports",process="core"}') > 0


def test_a_full_queue_is_429_with_the_time_to_come_back(server: Server, client: openai.OpenAI) -> None:
    server.wait_until_idle()
    streams = [client.completions.create(**LONG, stream=True) for _ in range(4)]
    for stream in streams:
        next(iter(stream))
    with ThreadPoolExecutor(3) as pool, httpx.Client(base_url=server.url, timeout=within(120)) as http:
        waiting = [pool.submit(http.post, "/v1/completions", json={**BODY, "max_tokens": 2}) for _ in range(3)]
        wait_until(lambda: server.metric("num_requests_waiting") == 3)
        for _ in range(3):
            answer = http.post("/v1/completions", json=BODY)
            assert answer.status_code == 429
            assert 1 <= int(answer.headers["retry-after"]) <= 120
            assert answer.json()["error"]["code"] == "queue_full"
        for stream in streams:
            stream.close()
        assert [one.result().status_code for one in waiting] == [200] * 3
    server.wait_until_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_ends_with_its_partial_text_when_its_time_is_up(
    server: Server, client: openai.OpenAI, stream: bool
) -> None:
    server.wait_until_idle()
    for timeout_s in (1, 4, 16, 64):  # the first in which there is a token
        asked = {**LONG, "temperature": 0, "extra_body": {**NO_END, "timeout": timeout_s}, "stream": stream}
        answer = client.completions.create(**asked)
        if stream:
            chunks = [chunk.choices[0] for chunk in answer]
            text, last = "".join(choice.text for choice in chunks), chunks[-1]
        else:
            text, last = answer.choices[0].text, answer.choices[0]
            assert answer.usage.completion_tokens < 4000
        assert (last.finish_reason, last.stop_reason) == ("abort", "timeout")
        if text:
            break
    assert text
    server.wait_until_idle()


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
    body = {**BODY, "stream": stream}
    ask_and_leave(server.url, "/v1/completions", body, once=lambda: server.metric("num_requests_waiting") == 1)
    wait_until(lambda: server.metric("num_requests_waiting") == 0)
    assert server.metric("num_requests_running") == 4
    for running in streams:
        running.close()
    server.wait_until_idle()


@pytest.mark.long
def test_an_engine_that_keeps_dying_ends_the_server_with_status_1(tmp_path: Path) -> None:
    with running_server(tmp_path, "--max-model-len", "256", "--max-engine-restarts", "1") as server:
        first = server.core_process()
        first.kill()
        wait_for_log(server, RESTARTS)
        wait_for_health(server, 200)
        server.core_process().kill()
        assert server.process.wait(within(60)) == 1
        log = server.log.read_text()
        assert "octavo: error: the engine has died and the server gives up" in log
        assert "Traceback" not in log


@pytest.mark.long
def test_sigterm_lets_requests_end_while_new_ones_are_refused(tmp_path: Path) -> None:
    with running_server(
        tmp_path, "--max-model-len", "1024", "--shutdown-timeout", "1000", "--log-format", "json", "--max-log-len", "1"
    ) as server:
        core = server.core_process()
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=within(120))
        stream = client.completions.create(**{**LONG, "max_tokens": 300, "stream": True})
        chunks = [next(iter(stream)).choices[0]]
        with ThreadPoolExecutor() as pool:
            whole = pool.submit(client.completions.create, **{**LONG, "max_tokens": 200})
            wait_until(lambda: server.metric("num_requests_running") == 2)
            core.suspend()  # so that they do not end meanwhile
            for process in (*psutil.Process(server.process.pid).children(recursive=True), server.process):
                process.send_signal(signal.SIGTERM)  # as systemd does, to every process of a unit
            wait_for_health(server, 503)
            assert json.loads(server.get("/health")[1])["status"] == "stopping"
            refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "Hello"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_stopping")
            assert "retry-after" in refused.headers
            core.resume()
            chunks += [chunk.choices[0] for chunk in stream]
            assert chunks[-1].finish_reason == "length"
            assert whole.result().choices[0].finish_reason == "length"
        assert server.process.wait(within(60)) == 0
        assert not core.is_running()
        lines = [json.loads(line) for line in server.log.read_text().splitlines()]
        assert {line["process"] for line in lines} >= {"server"}
        assert next(line["message"] for line in lines if "ready" in line).startswith("Octavo")
        ended = [line for line in lines if "ttft_s" in line]
        assert sorted(line["num_output_tokens"] for line in ended) == [200, 300]
        assert all(f" output tokens: {LONG['prompt'][:1]!r}... {{" in line["message"] for line in ended)


@pytest.mark.long
def test_what_has_not_ended_in_time_ends_with_its_partial_text(tmp_path: Path) -> None:
    with running_server(
        tmp_path, "--max-model-len", "4096", "--max-num-seqs", "2", "--shutdown-timeout", "1"
    ) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=within(120))
        asked = LONG
        stream = client.completions.create(**asked, stream=True)
        chunks = [next(iter(stream)).choices[0]]
        with ThreadPoolExecutor() as pool:
            whole = pool.submit(client.completions.create, **asked)
            wait_until(lambda: server.metric("num_requests_running") == 2)
            queued = pool.submit(client.completions.create, **asked)
            wait_until(lambda: server.metric("num_requests_waiting") == 1)
            chunks += [next(stream).choices[0] for _ in range(20)]  # the other one has come as far
            server.process.send_signal(signal.SIGTERM)
            chunks += [chunk.choices[0] for chunk in stream]
            assert chunks[-1].finish_reason == "abort"
            answer = whole.result().choices[0]
            assert (answer.finish_reason, bool(answer.text)) == ("abort", True)
            with pytest.raises(openai.InternalServerError) as refused:
                queued.result()
            assert (refused.value.status_code, refused.value.code) == (503, "engine_stopping")
        assert server.process.wait(within(60)) == 0


def test_a_second_signal_ends_the_server_at_once(tmp_path: Path) -> None:
    with running_server(tmp_path, "--max-model-len", "4096", "--shutdown-timeout", "100") as server:
        asked = {**BODY, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=asked, timeout=within(60)) as stream:
            lines = stream.iter_lines()
            next(lines)
            reader = threading.Thread(target=lambda: list(lines), daemon=True)
            reader.start()
            server.process.send_signal(signal.SIGTERM)
            wait_for_health(server, 503)
            server.process.send_signal(signal.SIGTERM)
            server.process.wait(within(60))
            reader.join(within(60))
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
        psutil.wait_procs([core], timeout=within(60))
        assert not core.is_running()
        assert not list(folder.glob("octavo-*"))
