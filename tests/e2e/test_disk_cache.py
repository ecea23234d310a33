"""`--kv-cache-disk` in a server: it writes blocks while it is idle, and the next one has them and their session."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.e2e.server import Server, running_gateway, running_server
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
def test_a_server_copies_the_blocks_of_a_prompt_from_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVERS_KEY", "k")
    monkeypatch.setenv("PROMPTS_KEY", "p")
    monkeypatch.setenv("OCTAVO_KV_CACHE_PEER_KEY", "p")
    flags = ("--max-model-len", "512", "--kv-cache-disk-gib", "1", "--served-model-name", "m", "--api-key")
    asked = {"model": "m", "prompt": PROMPT, "temperature": 0.0, "max_tokens": 8, "logprobs": 2}

    def ask(server: Server, **headers: str) -> dict[str, Any]:
        headers["Authorization"] = "Bearer k"
        answer = httpx.post(f"{server.url}/v1/completions", json=asked, headers=headers, timeout=within(60))
        assert answer.status_code == 200, answer.text
        body: dict[str, Any] = answer.json()
        return body

    with running_server(tmp_path, *flags, "p", "--kv-cache-disk", str(tmp_path / "first")) as first:
        port = urlsplit(first.url).port
        network = ("k", "--kv-cache-peers", f"127.0.0.0/8:{port}", "--kv-cache-disk")
        with running_server(tmp_path, *flags, *network, str(tmp_path / "second")) as second:
            chats = {"served_model_name": "m", "api_key_env": "SERVERS_KEY", "prefill_model": "p"}
            models = {
                "m": {"addresses": [second.url], "prefill_min_tokens": 100, **chats},
                "p": {
                    "discover": f"dns+http://127.0.0.1:{port}",
                    "served_model_name": "m",
                    "api_key_env": "PROMPTS_KEY",
                },
            }
            with running_gateway(tmp_path, models) as gateway:
                copied = ask(gateway)
            assert copied["usage"]["prompt_tokens_details"]["cached_tokens"] >= 11 * 16
            assert second.count("octavo:disk_cache_copied_bytes_total") > 0
            first.stop()
        address = ("k", "--kv-cache-peers", first.url, "--kv-cache-disk")
        with running_server(tmp_path, *flags, *address, str(tmp_path / "third")) as third:
            computed = ask(third, **{"X-Octavo-Blocks-At": first.url})
            assert computed["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert computed["choices"] == copied["choices"], "the same bits"
            assert f"{first.url} gives no blocks" in third.log.read_text()
