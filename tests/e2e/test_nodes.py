"""A real server whose second stage's input comes from another node, a process of its own, over loopback."""

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

QUESTION = {"model": MODEL, "prompt": "The capital of France is", "temperature": 0, "ignore_eos": True}


def complete(url: str, **fields: Any) -> Any:
    body = json.dumps(QUESTION | fields).encode()
    return urllib.request.urlopen(
        urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"}), timeout=300
    )


def test_a_node_that_dies_or_falls_silent_costs_its_requests_and_comes_back(tmp_path: Path) -> None:
    port = str(held_port())
    shared = ["-pp", "2", "--nnodes", "2", "--master-port", port, "--max-model-len", "2048", "--cpu-threads", "1"]
    other = [sys.executable, "-m", "octavo.entrypoints.openai.api_server", *shared, "--node-rank", "1", "--headless"]
    own = ["--kv-cache-memory-bytes", "100000000", "--on-engine-death", "fail"]
    log = tmp_path / "node.log"
    with open(log, "wb") as out:
        nodes = [subprocess.Popen(other, stdout=out, stderr=subprocess.STDOUT)]
        try:
            with running_server(tmp_path, *shared, *own) as server:
                assert "Paris" in complete(server.url, max_tokens=8).read().decode()
                for kill in (True, False):
                    tree = [psutil.Process(nodes[-1].pid), *psutil.Process(nodes[-1].pid).children(recursive=True)]
                    assert len(tree) == 2
                    stream = complete(server.url, max_tokens=2000, stream=True)
                    stream.readline()
                    for process in tree:
                        process.kill() if kill else process.suspend()
                    assert "engine_dead" in stream.read().decode()
                    if kill:
                        nodes[-1].wait(within(60))
                        nodes.append(subprocess.Popen(other, stdout=out, stderr=subprocess.STDOUT))
                    else:
                        for process in tree[:1]:
                            process.resume()
                    wait_until(
                        lambda: server.get("/health")[0] == 200, lambda: server.log.read_text() + log.read_text(), 300
                    )
                    assert "Paris" in complete(server.url, max_tokens=8).read().decode()
                assert not any(process.is_running() for process in tree[1:])
                workers = psutil.Process(nodes[-1].pid).children(recursive=True)
                assert server.stop() == 0
            assert nodes[-1].wait(within(60)) == 0
            assert not any(process.is_running() for process in workers)
            assert "has not been heard of for 1.5 s" in server.log.read_text()
            assert "node 0 has ended" in log.read_text()
        finally:
            for node in nodes:
                node.kill()
                node.wait()
