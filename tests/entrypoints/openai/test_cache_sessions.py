"""`cache_session` and `cache_ttl_s` of requests, their headers, and the route that frees a session."""

from __future__ import annotations

from dataclasses import replace

import httpx
import pytest

from octavo.config import DiskCacheConfig
from tests.entrypoints.fake_engine import FakeEngine

USER = {"role": "user", "content": "Hi"}


@pytest.fixture
def disk(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """An engine with a cache on disk."""
    cache = replace(engine.config.cache, disk=DiskCacheConfig("/nowhere", 1 << 30))
    monkeypatch.setattr(engine, "config", replace(engine.config, cache=cache))
    return engine


def test_body_or_headers_say_what_is_kept(http: httpx.Client, disk: FakeEngine) -> None:
    for path, body in {
        "/v1/chat/completions": {"messages": [USER]},
        "/v1/completions": {"prompt": "a"},
        "/v1/responses": {"input": "a"},
        "/v1/messages": {"messages": [USER], "max_tokens": 4, "model": "alias"},
    }.items():
        headers = {"X-Cache-Session": "mine", "X-Cache-TTL": "90"}

        def kept(answer: httpx.Response) -> tuple[str | None, float]:
            assert answer.status_code == 200, answer.text
            return disk.seen[-1][2]["cache_session"], disk.seen[-1][2]["cache_ttl_s"]

        assert kept(http.post(path, json=body, headers=headers)) == ("mine", 90.0)
        assert kept(http.post(path, json=body, headers={"X-Cache-Session": "mine"})) == ("mine", 3600.0)
        assert kept(http.post(path, json=body)) == (None, 0.0)
        if path in ("/v1/chat/completions", "/v1/completions"):
            named = {**body, "cache_session": "other", "cache_ttl_s": 5}
            assert kept(http.post(path, json=named, headers=headers)) == ("other", 5.0)


@pytest.mark.parametrize(
    ("fields", "headers", "said"),
    [
        ({"cache_ttl_s": 5}, {}, "cache_ttl_s needs cache_session"),
        ({"cache_session": "a", "cache_ttl_s": 0}, {}, "cache_ttl_s"),
        ({"cache_session": "a", "cache_ttl_s": 1e9}, {}, "cache_ttl_s"),
        ({"cache_session": "a/b"}, {}, "cache_session"),
        ({}, {"X-Cache-Session": "a/b"}, "X-Cache-Session must be 1 to 200"),
        ({}, {"X-Cache-Session": "a", "X-Cache-TTL": "soon"}, "X-Cache-TTL must be above 0"),
        ({}, {"X-Cache-Session": "a", "X-Cache-TTL": "nan"}, "X-Cache-TTL must be above 0"),
    ],
)
def test_what_makes_no_sense_is_refused(
    fields: dict[str, object], headers: dict[str, str], said: str, http: httpx.Client, disk: FakeEngine
) -> None:
    answer = http.post("/v1/completions", json={"prompt": "a", **fields}, headers=headers)
    assert answer.status_code == 400 and said in str(answer.json()["error"]), answer.text


def test_a_session_is_freed_with_its_salt(http: httpx.Client, disk: FakeEngine) -> None:
    answer = http.delete("/v1/cache/sessions/mine", params={"cache_salt": "salt"})
    assert answer.json() == {"id": "mine", "object": "cache.session.deleted", "deleted": True}
    for path in ("/v1/cache/sessions/mine", "/v1/cache/sessions/other?cache_salt=salt"):
        answer = http.delete(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


def test_a_server_without_a_disk_keeps_no_sessions(http: httpx.Client, engine: FakeEngine) -> None:
    for answer in (
        http.post("/v1/completions", json={"prompt": "a", "cache_session": "mine"}),
        http.delete("/v1/cache/sessions/mine"),
    ):
        assert answer.status_code == 400 and "needs a server with --kv-cache-disk" in answer.text
