"""POST /v1/chat/completions/render and /v1/completions/render, in vLLM's form."""

from __future__ import annotations

from typing import Any

import httpx

from octavo.stats import EngineStats
from tests.entrypoints.fake_engine import MAX_MODEL_LEN, MODEL, FakeEngine
from tests.entrypoints.http.test_errors import error_of

HI = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "greet", "description": "Says hello."}}]


def test_the_tokens_are_those_that_the_engine_gets(http: httpx.Client, engine: FakeEngine) -> None:
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": HI}),
        ("/v1/chat/completions", {"messages": HI, "tools": TOOLS, "stream": True}),
        ("/v1/completions", {"prompt": "Grüße"}),
        ("/v1/completions", {"prompt": "a b c", "truncate_prompt_tokens": 2}),
        ("/v1/completions", {"prompt": ["a", "b c"], "n": 2}),
    ]
    for route, body in bodies:
        rendered = http.post(f"{route}/render", json=body).json()
        assert not engine.seen
        http.post(route, json=body)
        prompts = rendered if isinstance(rendered, list) else [rendered]
        assert [one["token_ids"] for one in prompts] == [tokens for tokens, *_ in engine.seen]
        assert {one["model"] for one in prompts} == {MODEL}
        engine.seen.clear()


def test_load_refuses_no_rendering(http: httpx.Client, engine: FakeEngine) -> None:
    engine.forecast.record_step([], EngineStats(prompt_token_s=0.01))
    engine.forecast.add("other", 450)
    body = {"prompt": "a b c", "max_ttft": 1.0}
    assert http.post("/v1/completions", json=body).status_code == 429
    assert http.post("/v1/completions/render", json=body).status_code == 200
    engine.forecast.forget("other")


def test_what_is_refused_is_not_rendered(http: httpx.Client) -> None:
    long = "word " * MAX_MODEL_LEN
    for route, body in (
        ("/v1/chat/completions/render", {"messages": HI, "max_tokens": "a"}),
        ("/v1/chat/completions/render", {"messages": [{"role": "user", "content": long}]}),
        ("/v1/completions/render", {"prompt": long}),
    ):
        assert http.post(route, json=body).status_code == 400
    answer = http.post("/v1/chat/completions/render", json={"messages": HI, "model": "other"})
    assert (answer.status_code, error_of(answer)["code"]) == (404, "model_not_found")
