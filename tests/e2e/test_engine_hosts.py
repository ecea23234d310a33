"""A real server of two engines, one of which another process brings over loopback, as another host would."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.server import MODEL, running_server
from tests.ports import held_port
from tests.waiting import wait_until, within

pytestmark = pytest.mark.long

LOST = "engine_dead"


def complete(url: str, prompt: str, **fields: Any) -> Any:
    question = {"model": MODEL, "prompt": prompt, "temperature": 0, "ignore_eos": True} | fields
    body = json.dumps(question).encode()
    return urllib.request.urlopen(
        urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"}), timeout=300
    )


def test_a_host_that_dies_or_falls_silent_costs_its_streams_only_and_comes_back(tmp_path: Path) -> None:
    port = str(held_port())
    shared = ["-dp", "2", "--data-parallel-size-local", "1", "--data-parallel-rpc-port", port]
    shared += ["--max-model-len", "2048", "--cpu-threads", "1", "--kv-cache-memory-bytes", "200000000"]
    elsewhere = ["--data-parallel-start-rank", "1", "--headless"]
    other = [sys.executable, "-m", "octavo.entrypoints.openai.api_server", *shared, *elsewhere]
    log = tmp_path / "node.log"
    with open(log, "wb") as out:
        nodes = [subprocess.Popen(other, stdout=out, stderr=subprocess.STDOUT)]
        try:
            with running_server(tmp_path, *shared, "--on-engine-death", "fail") as server:
                prompts = [f"The {name} of the house is" for name in ("colour", "roof", "door", "owner")]
                answers = [json.load(complete(server.url, one, max_tokens=8))["choices"] for one in prompts]
                for kill in (True, False):
                    tree = [psutil.Process(nodes[-1].pid), *psutil.Process(nodes[-1].pid).children(recursive=True)]
                    assert len(tree) == 2
                    streams = [complete(server.url, one, max_tokens=600, stream=True) for one in prompts[:2]]
                    for stream in streams:
                        stream.readline()
                    for process in tree:
                        process.kill() if kill else process.suspend()
                    whole = [stream.read().decode() for stream in streams]
                    # Each engine has one of them, the one that came back a while ago as well.
                    assert sorted(LOST in one for one in whole) == [False, True]
                    assert server.get("/health")[0] == 200
                    assert json.load(complete(server.url, prompts[3], max_tokens=8))["choices"] == answers[3]
                    num_back = server.log.read_text().count("takes requests again")
                    if kill:
                        nodes[-1].wait(within(60))
                        nodes.append(subprocess.Popen(other, stdout=out, stderr=subprocess.STDOUT))
                    else:
                        for process in tree:
                            process.resume()
                    wait_until(
                        lambda before=num_back: server.log.read_text().count("takes requests again") > before,
                        lambda: server.log.read_text() + log.read_text(),
                        300,
                    )
                    assert [json.load(complete(server.url, one, max_tokens=8))["choices"] for one in prompts] == answers
                counted = server.get("/metrics")[1]
                for engine in (0, 1):
                    assert f'vllm:request_success_total{{engine="{engine}",finished_reason="length"' in counted
                cores = psutil.Process(nodes[-1].pid).children(recursive=True)
                assert server.stop() == 0
            assert nodes[-1].wait(within(60)) == 0
            assert not any(core.is_running() for core in cores)
            assert "has not been heard of for 1.5 s" in server.log.read_text()
            assert "the server has ended" in log.read_text()
        finally:
            for node in nodes:
                node.kill()
                node.wait()
