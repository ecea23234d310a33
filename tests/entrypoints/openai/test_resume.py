"""Streams that another server goes on with, as if nothing had happened."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.entrypoints.http import uvicorn_server
from octavo.entrypoints.http.server_args import ServerArgs
from octavo.entrypoints.http.uvicorn_server import HttpServer
from octavo.errors import EngineDeadError, EngineStoppingError, RequestError
from tests.entrypoints.fake_engine import MODEL, FakeEngine, serving
from tests.waiting import until, within

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "stream_options": {"include_usage": True}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Hi", "echo": True, "stop": ["end"], "max_tokens": 64},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 64},
}


def stream(http: httpx.Client, path: str, **fields: Any) -> tuple[httpx.Headers, list[str]]:
    """The headers and events of a stream whose caller wants to be able to go on with it."""
    body = {"model": MODEL, "stream": True, **BODIES[path], **fields}
    response = http.post(path, json=body, headers={"X-Octavo-Resumable": "1"})
    assert response.status_code == 200, response.text
    return response.headers, response.text.split("\n\n")[:-1]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("answer", ['It\'s "é"\n\nthe en!', "x", "<think>hm</think>so"])
def test_a_stream_goes_on_at_each_token(http: httpx.Client, engine: FakeEngine, path: str, answer: str) -> None:
    engine.answer = answer
    headers, events = stream(http, path)
    about = json.loads(headers["x-octavo-resumable"])
    seed = engine.seen[-1][1].seed
    assert about["seed"] == seed
    tokens: list[list[int]] = []
    for number, event in enumerate(events):
        if not event.startswith(": tokens "):
            continue
        tokens.append(json.loads(event.removeprefix(": tokens ")))
        _, rest = stream(http, path, resume={**about, "tokens": tokens})
        assert rest == events[number + 1 :]
        assert engine.seen[-1][1].seed == seed
    assert tokens and sum(map(len, tokens)) == len(engine.inputs.encode(answer, add_special_tokens=False))


def test_only_streams_of_one_answer_are_resumable(http: httpx.Client, engine: FakeEngine) -> None:
    path = "/v1/completions"
    for fields in ({"n": 2}, {"logprobs": 0}, {"prompt": ["a", "b"]}):
        headers, events = stream(http, path, **fields)
        assert "x-octavo-resumable" not in headers and not any(event.startswith(":") for event in events)
    plain = http.post(path, json={"model": MODEL, "stream": True, "prompt": "a"})
    assert "x-octavo-resumable" not in plain.headers and ": tokens" not in plain.text
    about = {"id": "cmpl-1", "created": 1, "seed": 1}
    for fields, says in (
        ({"stream": False, "resume": {**about, "tokens": []}}, "goes with a stream"),
        ({"n": 2, "resume": {**about, "tokens": []}}, "goes with a stream"),
        ({"resume": {**about, "tokens": [[2000]]}}, "beyond the model's"),
        ({"max_tokens": 2, "resume": {**about, "tokens": [[5], [6]]}}, "all 2 tokens"),
        ({"resume": {**about, "tokens": [], "prompt": [5]}}, "resume.prompt is for chats"),
    ):
        refused = http.post(path, json={"model": MODEL, "stream": True, "prompt": "a", **fields})
        assert refused.status_code == 400 and says in refused.json()["error"]["message"]
    stored = {"messages": [{"role": "user", "content": "x"}], "stream": True, "store": True}
    refused = http.post("/v1/chat/completions", json={**stored, "resume": {**about, "tokens": []}})
    assert refused.status_code == 400 and "store" in refused.json()["error"]["message"]
    of_rows = [{"role": "user", "content": [{"type": "prompt_embeds", "data": "AAAA"}]}]
    body = {"messages": of_rows, "stream": True, "resume": {**about, "tokens": [], "prompt": [5]}}
    refused = http.post("/v1/chat/completions", json=body)
    assert refused.status_code == 400 and "with media or prompt_embeds" in refused.json()["error"]["message"]


@pytest.mark.parametrize("path", [*BODIES, "/v1/responses"])
@pytest.mark.parametrize(
    ("error", "is_given_up"),
    [(EngineStoppingError("x"), True), (EngineDeadError("x"), True), (RequestError("x", status=500), False)],
)
def test_a_stream_whose_engine_has_ended_is_given_up(
    http: httpx.Client, engine: FakeEngine, path: str, error: Exception, is_given_up: bool
) -> None:
    engine.fails_after = 2, error
    body = {"model": MODEL, "stream": True, **BODIES.get(path, {"input": "Hi"})}
    for headers in ({"X-Octavo-Resumable": "1"}, {}):
        events = http.post(path, json=body, headers=headers).text.split("\n\n")[:-1]
        assert events.count(": given up") == (is_given_up and bool(headers)) and "error" in events[-1]
        assert not (is_given_up and headers) or events[-2] == ": given up" or path == "/v1/responses"
        if path == "/v1/responses":
            failed = json.loads(events[-1].partition("data: ")[2])["response"]
            assert http.get(f"{path}/{failed['id']}").json()["status"] == "failed"


@pytest.mark.parametrize("path", [*BODIES, "/v1/responses"])
def test_an_answer_whose_engine_has_died_is_for_another_server(
    http: httpx.Client, engine: FakeEngine, path: str
) -> None:
    for error, is_given_up in ((EngineDeadError("x"), True), (RequestError("x", status=500), False)):
        engine.fails_after = 2, error
        body = {name: value for name, value in BODIES.get(path, {"input": "Hi"}).items() if name != "stream_options"}
        answer = http.post(path, json={"model": MODEL, **body})
        assert answer.status_code == 500 and ("x-octavo-cut-off" in answer.headers) == is_given_up


def test_what_a_server_that_stops_cuts_off_is_for_another_server(engine: FakeEngine) -> None:
    engine.is_paused = True
    server = HttpServer(engine, ServerArgs(shutdown_timeout=0.0, disable_log_requests=True))  # type: ignore[arg-type]
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]

    async def stream(http: httpx.AsyncClient, path: str, **headers: str) -> list[str]:
        body = {"model": MODEL, "stream": True, **BODIES.get(path, {"input": "Hi"})}
        answer = await http.post(path, json=body, headers=headers)
        return answer.text.split("\n\n")[:-1]

    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as sock:
            serving = asyncio.ensure_future(server.serve([sock]))
            url = f"http://127.0.0.1:{sock.getsockname()[1]}"
            async with httpx.AsyncClient(base_url=url, timeout=within(60)) as http:
                paths = [*BODIES, "/v1/responses"]
                asked = [asyncio.ensure_future(stream(http, path, **{"X-Octavo-Resumable": "1"})) for path in paths]
                asked.append(asyncio.ensure_future(stream(http, "/v1/completions")))
                body = {"model": MODEL, **BODIES["/v1/completions"]}
                whole = asyncio.ensure_future(http.post("/v1/completions", json=body))
                await until(lambda: len(engine.active) == len(asked) + 1)
                server.stop()
                *resumable, plain = await asyncio.gather(*asked)
                for events in resumable:
                    assert not any(event.startswith(": tokens ") for event in events[events.index(": given up") :])
                assert ": given up" not in plain and '"abort"' in plain[-2]
                assert (await whole).headers["x-octavo-cut-off"] == "1"
                assert "store" not in vars(server.state), "the response is for the other server to keep"
            await serving

    asyncio.run(run())


def test_a_response_that_is_given_up_is_stored_as_failed_until_another_server_continues_it(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uvicorn_server, "FLUSH_TIMEOUT_S", within(60))
    engine.is_paused = True
    store = str(tmp_path / "responses.db")
    args = ServerArgs(shutdown_timeout=0.0, disable_log_requests=True, response_store=store)
    server = HttpServer(engine, args)  # type: ignore[arg-type]
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    body, header = {"model": MODEL, "stream": True, "input": "Hi"}, {"X-Octavo-Resumable": "1"}

    async def run() -> str:
        with socket.create_server(("127.0.0.1", 0)) as sock:
            in_service = asyncio.ensure_future(server.serve([sock]))
            url = f"http://127.0.0.1:{sock.getsockname()[1]}"
            async with httpx.AsyncClient(base_url=url, timeout=within(60)) as http:
                asked = asyncio.ensure_future(http.post("/v1/responses", json=body, headers=header))
                await until(lambda: engine.active)
                server.stop()
                answer = await asked
                assert ": given up" in answer.text
            await in_service
        return answer.headers["x-octavo-resumable"]

    about = json.loads(asyncio.run(run()))
    engine.reset()
    with serving(engine, response_store=store) as url, httpx.Client(base_url=url, timeout=within(60)) as http:
        path = f"/v1/responses/{about['id']}"
        assert http.get(path).json()["status"] == "failed"
        http.post("/v1/responses", json={**body, "resume": {**about, "tokens": []}}, headers=header)
        assert http.get(path).json()["status"] == "completed"
