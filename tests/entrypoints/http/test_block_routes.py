"""Servers with a key give blocks of their folder to other servers; a header names the server to copy blocks from."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.types import Message

from octavo.config import DiskCacheConfig
from octavo.entrypoints.http import block_routes
from octavo.entrypoints.http.server_args import ServerArgs
from octavo.errors import ConfigError
from octavo.kv_cache.block_files import block_paths
from octavo.peer_addresses import BLOCKS_PROOF, address_proof
from octavo.request import BlockPeer
from tests.entrypoints.fake_engine import FakeEngine, serving
from tests.waiting import within

PRINT = "f0" * 16
NAMES = [f"{number:032x}-0" for number in range(4)]


@pytest.fixture
def disk(engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """An engine whose folder has the first three blocks."""
    cache = replace(engine.config.cache, disk=DiskCacheConfig(str(tmp_path), 1 << 30))
    monkeypatch.setattr(engine, "config", replace(engine.config, cache=cache))
    for name, at in zip(NAMES[:3], block_paths(str(tmp_path), PRINT, NAMES) or (), strict=False):
        path = Path(at)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name[-3:].encode())
    return engine


def test_files_are_found_and_read_up_to_the_first_that_is_missing(
    disk: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(disk, disable_log_requests=True, api_key=["a"]) as url:
        http = httpx.Client(base_url=f"{url}/v1/cache/blocks", headers={"x-api-key": "a"}, timeout=within(60))
        with http:
            order = [NAMES[3], *NAMES[:3]]
            assert http.post(f"/{PRINT}/find", json=order).content == b"0111"
            assert http.post(f"/{PRINT}/read", json=NAMES).content == b"0-01-02-0"
            assert http.post(f"/{PRINT}/read", json=order).content == b""
            monkeypatch.setattr(block_routes, "_MAX_ANSWER_BYTES", 6)
            assert http.post(f"/{PRINT}/read", json=NAMES).content == b"0-01-0"
            monkeypatch.setattr(block_routes, "_MAX_ANSWER_BYTES", 2)
            assert http.post(f"/{PRINT}/read", json=NAMES).content == b"0-0", "one block, however large"
            for said in ({}, [], ["../x-0"], [NAMES[0] + "/.."], [7], ["0" * 32], NAMES[:1] * 2):
                assert http.post(f"/{PRINT}/read", json=said).status_code == 400, said
            assert http.post("/..%2f..%2fx/read", json=NAMES).status_code in (400, 404)
            assert http.post("/nothing/find", json=NAMES).status_code == 400
            with monkeypatch.context() as patch:
                patch.setattr(block_routes, "_MAX_BODY_BYTES", 8)
                assert http.post(f"/{PRINT}/find", json=NAMES).status_code == 400
            monkeypatch.setattr(block_routes, "MAX_NAMES", 3)
            assert http.post(f"/{PRINT}/find", json=NAMES).status_code == 400
            for key in ("", "b"):
                answer = http.post(f"/{PRINT}/find", json=NAMES, headers={"x-api-key": key})
                assert answer.status_code == 401


def test_an_answer_counts_as_one_in_memory_until_it_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "block").write_bytes(b"0123456789")
    monkeypatch.setattr(block_routes, "_answers", answers := asyncio.Semaphore(1))
    monkeypatch.setattr(block_routes, "PIECE_BYTES", 4)
    sent: list[Any] = []

    async def send(message: Message) -> None:
        assert answers.locked()
        sent.append(message.get("body"))

    async def receive() -> Message:
        raise NotImplementedError

    asyncio.run(block_routes._FilesResponse([str(tmp_path / "block")])({"type": "http"}, receive, send))
    assert sent == [None, b"0123", b"4567", b"89", b""] and not answers.locked()


def test_the_event_loop_does_not_read_names(disk: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    loops: list[Any] = []

    def paths_of(*_: Any) -> list[str]:
        loops.append(asyncio._get_running_loop())
        return NAMES

    monkeypatch.setattr(block_routes, "_paths_of", paths_of)
    request = SimpleNamespace(body=lambda: asyncio.sleep(0, b"[]"))
    config = SimpleNamespace(engine=disk, args=SimpleNamespace(api_keys=["a"]))
    request.app = SimpleNamespace(state=SimpleNamespace(octavo=config))
    assert asyncio.run(block_routes._paths(PRINT, request)) == NAMES  # type: ignore[arg-type]
    assert loops == [None]


def test_a_server_without_a_key_or_a_folder_gives_nothing(
    http: httpx.Client, disk: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert http.post(f"/v1/cache/blocks/{PRINT}/find", json=NAMES).status_code == 404
    monkeypatch.undo()
    with serving(disk, disable_log_requests=True, api_key=["a"]) as url:
        asked = {"json": NAMES, "headers": {"x-api-key": "a"}, "timeout": within(60)}
        assert httpx.post(f"{url}/v1/cache/blocks/{PRINT}/find", **asked).status_code == 404


def test_blocks_are_copied_from_servers_that_the_operator_names(
    disk: FakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def asked(url: str, at: str) -> Any:
        headers = {"x-octavo-blocks-at": at, "x-api-key": "a"}
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, headers=headers).status_code == 200
        return disk.seen[-1][2]["blocks_from"]

    peers = ["http://Host:1/", "https://other/LLM", "http://plain"]
    with serving(disk, api_key=["a", "b"], kv_cache_peers=peers) as url:
        assert asked(url, "http://host:1") == BlockPeer("http://Host:1", "a")
        assert asked(url, "https://OTHER:443/LLM/") == BlockPeer("https://other/LLM", "a")
        assert asked(url, "HTTP://plain:80") == BlockPeer("http://plain", "a")
        for at in ("http://host:2", "http://host", "https://host:1", "http://host:1/x", "http://x@host:1", ""):
            assert asked(url, at) is None
        assert asked(url, "https://other/llm") is None and asked(url, "http://host:x") is None
        assert "no blocks are copied from http://host:2: it is not in" in caplog.text
    monkeypatch.setenv("OCTAVO_KV_CACHE_PEER_KEY", "c\n")
    with serving(disk, api_key=["a"], kv_cache_peers=["http://host:1"]) as url:
        assert asked(url, "http://host:1") == BlockPeer("http://host:1", "c")
    caplog.clear()
    with serving(disk, api_key=["a"]) as url:
        assert asked(url, "http://host:1") is None and "no blocks" not in caplog.text, "no fault of the operator"


def test_a_host_of_a_network_is_a_peer_if_a_gateway_names_it(
    disk: FakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OCTAVO_KV_CACHE_PEER_KEY", "p")

    def asked(url: str, at: str, proof: str | None) -> Any:
        headers = {"x-octavo-blocks-at": at.encode(), "x-api-key": b"a"}
        if proof is not None:
            headers[BLOCKS_PROOF] = proof.encode("latin-1")
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, headers=headers).status_code == 200
        return disk.seen[-1][2]["blocks_from"]

    peers = ["10.1.0.0/16:80", "[fd00::/64]:8000", "http://host:1"]
    with serving(disk, api_key=["a"], kv_cache_peers=peers) as url:
        for at in ("http://10.1.2.3:80", "http://10.1.255.255", "http://[fd00::5]:8000"):
            assert asked(url, at, address_proof("p", at)) == BlockPeer(at, "p")
            for proof in (None, "", address_proof("a", at), address_proof("p", "http://10.1.2.4:80"), "\xe9"):
                assert asked(url, at, proof) is None, proof
        assert "no blocks are copied from http://10.1.2.3:80: only a gateway" in caplog.text
        for at in (
            "http://10.2.0.1:80", "http://10.1.2.3:8000", "https://10.1.2.3:80", "http://10.1.2.3:80/llm",
            "http://[::ffff:10.1.2.3]:80", "http://[fd00:0:0:1::5]:8000", "http://10.1.2.3.example:80", "http://010.1.2.3:80",
            "http://167837187:80", "http://x@10.1.2.3:80", "10.1.2.3:80",
        ):  # fmt: skip
            assert asked(url, at, address_proof("p", at)) is None, at
        assert asked(url, "http://host:1", None) == BlockPeer("http://host:1", "p")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kv_cache_peers": ["host:1"], "api_key": ["a"]}, "takes addresses such as"),
        ({"kv_cache_peers": ["http://me@host:1"], "api_key": ["a"]}, "takes addresses such as"),
        ({"kv_cache_peers": ["http://host:1?x"], "api_key": ["a"]}, "takes addresses such as"),
        ({"kv_cache_peers": ["http://host:80a0"], "api_key": ["a"]}, "takes addresses such as"),
        ({"kv_cache_peers": ["http://host:70000"], "api_key": ["a"]}, "takes addresses such as"),
        ({"kv_cache_peers": ["10.0.0.1/16:80"], "api_key": ["a"]}, "has host bits set"),
        ({"kv_cache_peers": ["10.0.0.0/33:80"], "api_key": ["a"]}, "10.0.0.0/33"),
        ({"kv_cache_peers": ["10.0.0.0/16:0"], "api_key": ["a"]}, "the port is not between"),
        ({"kv_cache_peers": ["10.0.0.0/16:65536"], "api_key": ["a"]}, "the port is not between"),
        ({"kv_cache_peers": ["10.0.0.0/16"], "api_key": ["a"]}, "it has another form"),
        ({"kv_cache_peers": ["fd00::/64:80"], "api_key": ["a"]}, "it has another form"),
        ({"kv_cache_peers": ["http://host:1"]}, "needs the servers' API key"),
        ({"kv_cache_peers": ["10.0.0.0/16:80"], "api_key": ["a"]}, "with a network needs OCTAVO_KV_CACHE_PEER_KEY"),
    ],
)
def test_addresses_without_a_key_or_a_form_are_refused(
    given: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OCTAVO_API_KEY", "VLLM_API_KEY", "OCTAVO_KV_CACHE_PEER_KEY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=said):
        ServerArgs(**given).check()


def test_the_key_for_a_network_is_none_of_the_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_KV_CACHE_PEER_KEY", "p\n")
    ServerArgs(kv_cache_peers=["10.0.0.0/16:80"], api_key=["a"]).check()
    with pytest.raises(ConfigError, match="must be none of this server"):
        ServerArgs(kv_cache_peers=["10.0.0.0/16:80"], api_key=["a", "p"]).check()
