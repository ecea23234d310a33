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


@pytest.mark.long
def test_a_server_goes_on_from_a_prompt_that_another_one_has_computed(tmp_path: Path) -> None:
    flags = ("--max-model-len", "512", "--kv-cache-disk", str(tmp_path / "disk"), "--kv-cache-disk-gib", "1")
    with running_server(tmp_path, *flags) as first, running_server(tmp_path, *flags) as second:
        for path, body in (
            ("/v1/completions", {"prompt": PROMPT, "n": 2, "stream": True, "max_tokens": 8}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8}),
        ):
            asked = {"temperature": 0.0} | body
            answer = httpx.post(first.url + path, json=asked, headers={"X-Octavo-Only-Prompt": "1"}, timeout=within(60))
            assert (answer.status_code, answer.content) == (204, b"")
            whole = {**asked, "stream": False}
            found = httpx.post(second.url + path, json=whole, timeout=within(60)).json()
            assert found["usage"]["prompt_tokens_details"]["cached_tokens"] >= 11 * 16, "read from the disk"
            again = httpx.post(first.url + path, json=whole, timeout=within(60)).json()
            assert [one.get("text", one.get("message")) for one in found["choices"]] == [
                one.get("text", one.get("message")) for one in again["choices"]
            ]
    with running_server(tmp_path, "--max-model-len", "512") as server:
        body = {"prompt": PROMPT}
        headers = {"X-Octavo-Only-Prompt": "1"}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=within(60))
        assert answer.status_code == 400 and "--kv-cache-disk" in answer.json()["error"]["message"]


@pytest.mark.long
def test_a_server_copies_the_blocks_of_a_prompt_from_another_one(tmp_path: Path) -> None:
    flags = ("--max-model-len", "512", "--kv-cache-disk-gib", "1", "--api-key", "k", "--kv-cache-disk")
    asked = {"prompt": PROMPT, "temperature": 0.0, "max_tokens": 8, "logprobs": 2}
    key = {"Authorization": "Bearer k"}

    def ask(server: Server, **headers: str) -> httpx.Response:
        return httpx.post(f"{server.url}/v1/completions", json=asked, headers=key | headers, timeout=within(60))

    with running_server(tmp_path, *flags, str(tmp_path / "first")) as first:
        peers = ("--kv-cache-peers", first.url)
        with running_server(tmp_path, *flags, str(tmp_path / "second"), *peers) as second:
            assert ask(first, **{"X-Octavo-Only-Prompt": "1"}).status_code == 204
            copied = ask(second, **{"X-Octavo-Blocks-At": first.url}).json()
            assert copied["usage"]["prompt_tokens_details"]["cached_tokens"] >= 11 * 16
            assert second.count("octavo:disk_cache_hits_total") >= 11 * 16
            first.stop()
        with running_server(tmp_path, *flags, str(tmp_path / "third"), *peers) as third:
            computed = ask(third, **{"X-Octavo-Blocks-At": first.url}).json()
            assert computed["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert computed["choices"] == copied["choices"], "the same bits"
            assert f"{first.url} gives no blocks" in third.log.read_text()
