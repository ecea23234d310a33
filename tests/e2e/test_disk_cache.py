"""`--kv-cache-disk` in a server: it writes blocks while it is idle, and the next one has them and their session."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.e2e.server import Server, running_server
from tests.waiting import wait_until, within

PROMPT = "The history of the port is long. Ships came from the north and from the south. " * 10


def ask(server: Server) -> dict[str, object]:
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "logprobs": 2, "cache_session": "ada"}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=within(60))
    assert answer.status_code == 200, answer.text
    choice: dict[str, object] = answer.json()["choices"][0]
    return choice


def drop(server: Server) -> int:
    return httpx.delete(f"{server.url}/v1/cache/sessions/ada", timeout=within(60)).status_code


@pytest.mark.long
def test_a_killed_servers_blocks_and_sessions_are_the_next_ones(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    flags = ("--max-model-len", "512", "--kv-cache-disk", str(disk), "--kv-cache-disk-gib", "1")

    def blocks() -> int:
        return sum(1 for path in disk.rglob("*-0") if path.is_file())

    with running_server(tmp_path, *flags) as server:
        computed = ask(server)
        wait_until(lambda: blocks() >= 11 and list(disk.rglob("*.session")))
        server.process.kill()
        server.process.wait()
    num_blocks = blocks()
    with running_server(tmp_path, *flags) as server:
        assert ask(server) == computed
        assert (drop(server), drop(server)) == (200, 404)
        wait_until(lambda: blocks() == 0 and not list(disk.rglob("*.session")))
    assert num_blocks >= 11 and "Traceback" not in server.log.read_text()
