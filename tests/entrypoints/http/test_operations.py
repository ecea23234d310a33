"""Health, readiness, models, metrics, keys and CORS; and that a client who hangs up is noticed."""

from __future__ import annotations

import asyncio
import gc
import logging
import re
import socket
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from octavo import logs
from octavo.errors import EngineDeadError, RequestError
from octavo.logs import LINES_PER_SECOND, LineLimit, configure_logging
from octavo.stats import EngineStats
from octavo.version import __version__
from tests.entrypoints.fake_engine import MODEL, FakeEngine, serving
from tests.leaving import ask_and_leave
from tests.waiting import wait_until

OPEN_PATHS = ["/health", "/ping", "/metrics", "/version", "/load"]


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_health_is_200_when_ready(http: httpx.Client, path: str) -> None:
    assert http.get(path).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_health_is_503_with_the_reason_before_that_and_after_a_death(
    http: httpx.Client, engine: FakeEngine, path: str
) -> None:
    engine.is_ready = False
    response = http.get(path)
    assert (response.status_code, response.json()["status"]) == (503, "loading")
    engine.fatal_error = EngineDeadError("the engine core has ended (exit status -9).")
    response = http.get(path)
    assert response.status_code == 503
    assert response.json() == {"status": "dead", "reason": "the engine core has ended (exit status -9)."}


@pytest.mark.parametrize(
    ("form", "report"),
    [
        ("TEXT", "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=3.0"),
        ("json", 'JSON {"named_metrics": {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 3.0}}'),
        ("BIN", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_answers_report_the_load_in_the_form_that_is_asked_for(
    http: httpx.Client, engine: FakeEngine, form: str, report: str | None, stream: bool
) -> None:
    engine.stats = EngineStats(num_waiting=3, num_blocks=8, num_blocks_used=2)
    headers = {"endpoint-load-metrics-format": form}
    answer = http.post("/v1/completions", json={"prompt": "a", "stream": stream}, headers=headers)
    assert answer.status_code == 200 and answer.headers.get("endpoint-load-metrics") == report
    assert "endpoint-load-metrics" not in http.post("/v1/completions", json={"prompt": "a"}).headers


def test_routes_answer_503_until_the_engine_is_ready(http: httpx.Client, engine: FakeEngine) -> None:
    engine.is_ready = False
    for response in (http.get("/v1/models"), http.post("/v1/completions", json={"prompt": "a"})):
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "engine_loading"
        assert "retry-after" in response.headers
    assert http.get("/version").json() == {"version": __version__}


def test_models_lists_every_name(client: openai.OpenAI) -> None:
    cards = client.models.list().data
    assert [card.id for card in cards] == [MODEL, "alias"]
    assert cards[0].object == "model"
    assert cards[0].max_model_len == 512  # type: ignore[attr-defined]


def test_a_model_is_found_by_a_name_with_a_slash(client: openai.OpenAI, http: httpx.Client) -> None:
    assert http.get(f"/v1/models/{MODEL}").json()["id"] == MODEL
    assert client.models.retrieve("alias").id == "alias"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_models_are_listed_with_a_slash_at_the_end_too(http: httpx.Client) -> None:
    assert http.get("/v1/models/").json() == http.get("/v1/models").json()


def test_an_answer_carries_the_name_that_was_asked_for(http: httpx.Client) -> None:
    assert http.post("/v1/completions", json={"prompt": "a", "model": "alias"}).json()["model"] == "alias"
    assert http.post("/v1/completions", json={"prompt": "a"}).json()["model"] == MODEL


def test_metrics_are_in_prometheus_text_form(
    http: httpx.Client, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is written off the event loop: streams would wait."""
    render = engine.metrics.render

    def render_off_loop() -> Any:
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        return render()

    monkeypatch.setattr(engine.metrics, "render", render_off_loop)
    http.post("/v1/completions", json={"prompt": "a"})
    response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert f'vllm:request_success_total{{engine="0",finished_reason="stop",model_name="{MODEL}"}}' in response.text


def test_the_load_is_the_requests_that_are_not_answered_in_full(http: httpx.Client, engine: FakeEngine) -> None:
    wait_until(lambda: http.get("/load").json() == {"server_load": 0})  # when those of other tests have ended
    engine.answer, engine.is_paused = "x" * 200, True
    with http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True, "max_tokens": 300}) as answer:
        chunks = answer.iter_raw()  # which closes the answer when nobody holds it
        next(chunks)
        assert http.get("/load").json() == {"server_load": 1}
        http.post("/tokenize", json={"prompt": "a"})
        engine.is_paused = False
    wait_until(lambda: http.get("/load").json() == {"server_load": 0})


@pytest.mark.parametrize("path", ["/v1/completions", "/invocations"])
def test_a_body_is_not_kept_while_its_answer_streams(http: httpx.Client, engine: FakeEngine, path: str) -> None:
    """Blanks are a part of the body that nothing of the request is made of."""
    size = 1 << 20
    body = b'{"prompt": "a", "stream": true, "max_tokens": 300' + b" " * size + b"}"
    engine.answer, engine.is_paused = "x" * 200, True
    tracemalloc.start()
    try:
        headers = {"Content-Type": "application/json"}
        with http.stream("POST", path, content=body, headers=headers) as answer:
            chunks = answer.iter_raw()  # which closes the answer when nobody holds it
            next(chunks)
            gc.collect()
            held = [trace for trace in tracemalloc.take_snapshot().traces if trace.size >= size]
            assert held == []
            engine.is_paused = False
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("keys", [["one", "two"], ["schlüssel"]])
def test_each_key_opens_and_nothing_else_does(shared_engine: FakeEngine, keys: list[str]) -> None:
    with serving(shared_engine, api_key=keys) as url, httpx.Client(base_url=url) as http:
        for key in keys:
            assert http.get("/v1/models", headers={"Authorization": f"Bearer {key}".encode()}).status_code == 200
        for wrong in ("", "Bearer", "Bearer three", "Basic one", "one", "Bearer on", "Bearer onee"):
            response = http.get("/v1/models", headers={"Authorization": wrong})
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
        assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 401
        assert http.get("/nothing").status_code == 401
        assert [http.get(path).status_code for path in OPEN_PATHS] == [200] * 5


def test_a_key_may_come_from_the_environment(shared_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "from-env")
    with serving(shared_engine) as url, openai.OpenAI(base_url=url + "/v1", api_key="from-env") as client:
        assert client.models.list().data
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="other").models.list()


def test_browsers_may_ask_before_they_send_a_key(shared_engine: FakeEngine) -> None:
    preflight = {
        "Origin": "https://app.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    with serving(shared_engine, api_key=["k"], allowed_origins=["https://app.example"]) as url:
        response = httpx.options(url + "/v1/completions", headers=preflight)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "https://app.example"
        refused = httpx.get(url + "/v1/models", headers={"Origin": "https://app.example"})
        assert refused.status_code == 401
        assert "access-control-allow-origin" in refused.headers, "a page can read why it was refused"
        other = httpx.options(url + "/v1/completions", headers={**preflight, "Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers
        program = httpx.get(f"{url}/version")
        assert "access-control-allow-origin" not in program.headers
        assert program.headers["vary"] == "Origin", "a cache must not give a page this answer"


def test_pages_can_read_what_went_wrong_inside(http: httpx.Client, engine: FakeEngine) -> None:
    engine.fails_after = (0, ZeroDivisionError("secret"))
    failed = http.post("/v1/completions", json={"prompt": "a"}, headers={"Origin": "https://app.example"})
    assert failed.status_code == 500
    assert failed.headers["access-control-allow-origin"] == "*"
    assert {"x-request-id", "retry-after"} <= set(failed.headers["access-control-expose-headers"].lower().split(", "))


def test_paths_work_with_and_without_the_root_path(shared_engine: FakeEngine) -> None:
    with serving(shared_engine, root_path="/llm", api_key=["k"]) as url, httpx.Client(base_url=url) as http:
        for prefix in ("", "/llm"):
            assert http.get(prefix + "/health").status_code == 200
            assert http.get(prefix + "/v1/models").status_code == 401
            assert http.get(prefix + "/v1/models", headers={"Authorization": "Bearer k"}).status_code == 200


def test_the_description_of_the_api_can_be_built(http: httpx.Client) -> None:
    description = http.get("/openapi.json").json()
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/health"} <= description["paths"].keys()


CHAT = {"messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("route", "body"),
    [("/v1/completions", {"prompt": "a"}), ("/v1/completions", {"prompt": ["a", "b"]}), ("/v1/chat/completions", CHAT)],
)
def test_a_client_who_hangs_up_ends_the_request(
    address: str, engine: FakeEngine, route: str, body: dict[str, Any], stream: bool
) -> None:
    engine.may_begin = lambda: False  # the engine is deep in a step: nothing but the hang-up can end the request
    num_prompts = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
    ask_and_leave(address, route, {**body, "stream": stream}, once=lambda: len(engine.active) == num_prompts)
    wait_until(lambda: not engine.active)


def test_a_client_who_leaves_in_mid_stream_ends_the_request_and_no_other(
    address: str, http: httpx.Client, engine: FakeEngine
) -> None:
    engine.answer, engine.is_paused = "x" * 200, True
    body = {"prompt": "a", "stream": True, "max_tokens": 300}
    with httpx.Client(base_url=address) as leaver, http.stream("POST", "/v1/completions", json=body) as staying:
        with leaver.stream("POST", "/v1/completions", json=body) as leaving:
            chunks = leaving.iter_raw()  # kept: httpx hangs up when it is collected
            next(chunks)
            wait_until(lambda: len(engine.active) == 2)
        wait_until(lambda: len(engine.active) == 1)
        engine.is_paused = False
        assert staying.read().count(b'"text":"x"') == 200


def test_requests_are_logged_with_as_much_of_the_prompt_as_allowed(
    tiny_tokenizer: Path, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="octavo")
    engine.max_log_len = 3
    with serving(engine) as url:
        httpx.post(url + "/v1/completions", json={"prompt": "abcdef", "request_id": "r", "seed": 7})
    assert "6 prompt tokens (3 cached), 12 output tokens: 'abc'... {'seed': 7" in caplog.text
    assert "cmpl-r: stop after" in caplog.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}),
        ("/v1/responses", {"input": "a"}),
        ("/generate", {"prompt": "a"}),
    ],
)
@pytest.mark.parametrize("given", [{}, {"X-Request-Id": "mine"}])
def test_every_line_of_a_request_has_the_id_that_its_client_sees(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture, path: str, body: dict[str, Any], given: dict[str, str]
) -> None:
    caplog.set_level("INFO", logger="octavo")
    with serving(engine) as url:
        answered = httpx.post(url + path, json=body, headers=given)
        engine.fails_after = (0, RequestError("no", param="model"))
        refused = httpx.post(url + path, json=body, headers=given)
    assert (answered.status_code, refused.status_code) == (200, 400)
    [first] = [one for one in caplog.records if getattr(one, "engine_request_id", None) == "0"]
    assert first.__dict__["request_id"] == answered.headers["x-request-id"]
    if path != "/generate":
        assert first.__dict__["response_id"] == answered.json()["id"]
        assert answered.json()["id"] in first.getMessage()
    ids = {one.__dict__["request_id"] for one in caplog.records[caplog.records.index(first) + 1 :]}
    assert ids == {refused.headers["x-request-id"]} and refused.headers["x-request-id"] == given.get(
        "X-Request-Id", *ids
    )
    if path == "/v1/messages":
        for answer in (answered, refused):
            assert answer.headers["request-id"] == "req_" + answer.headers["x-request-id"]
        assert answered.json()["id"] == "msg_" + answered.headers["x-request-id"]
        assert refused.json()["request_id"] == refused.headers["request-id"]


def test_clients_without_a_key_cannot_fill_the_log(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    admits = LineLimit.admits
    monkeypatch.setattr(LineLimit, "admits", lambda limit, now: admits(limit, 7.5))  # one second
    monkeypatch.setattr(logs, "_few_warnings", logs._FewWarnings())  # another test's has counted in that second
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "filters", [])
    caplog.set_level("INFO", logger="octavo.server")
    configure_logging("server")
    with serving(engine, api_key=["k"]) as url, httpx.Client(base_url=url, headers={"X-Request-Id": "r"}) as http:
        for _ in range(4):
            assert http.get("/v1/models").status_code == 401
            assert http.post("/health").status_code == 405
        http.headers["x-api-key"] = "k"
        for _ in range(8):
            assert http.post("/v1/completions", json={"prompt": "a", "temperature": -1}).status_code == 400
        for _ in range(8):
            with socket.create_connection((http.base_url.host, http.base_url.port or 0)) as sock:
                sock.sendall(b"\0\r\n\r\n")
                assert sock.recv(12) == b"HTTP/1.1 400"
    lines = [record.getMessage() for record in caplog.records]
    assert sum("401" in one or "405" in one for one in lines) == LINES_PER_SECOND
    assert sum("is refused: 400" in one for one in lines) == 8
    assert sum("Invalid HTTP request" in one for one in lines) == LINES_PER_SECOND


def test_a_refused_request_is_one_line_without_what_the_client_wrote(
    tiny_tokenizer: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine(tiny_tokenizer)  # the other tests' engine has the counts of their servers
    caplog.set_level("INFO", logger="octavo.server")
    with serving(engine, api_key=["k"]) as url, httpx.Client(base_url=url, headers={"X-Request-Id": "r"}) as http:
        http.get("/v1/models")
        http.headers["x-api-key"] = "k"
        for body in ({"prompt": "SECRET", "temperature": -1}, {"prompt": "a", "SECRET prompt": 1}):
            assert http.post("/v1/completions", json=body).status_code == 400
        http.get("/v1/responses/SECRET")
        http.get("/SECRET")
        for content in (b'{"SECRET', b'["SECRET"]', b""):
            http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
        http.post("/v1/completions", content=b"SECRET")
        http.post("/v1/completions", json={"prompt": "SECRET"}, headers={"Content-Encoding": "SECRET"})
        http.put("/v1/completions")
        http.post("/v1/load_lora_adapter", json={"lora_name": "SECRET", "lora_path": "SECRET"})
        assert http.post("/v1/messages", json={"prompt": "SECRET"}).status_code == 400
        for body in ({"input": "a", "metadata": {"SECRET": 5}}, {"input": "a", "SECRET": 5}):
            assert http.post("/v1/responses", json=body).status_code == 400
        counts = {
            "invalid_api_key": 1, "invalid_value": 2, "unknown_parameter": 3, "not_found": 2, "invalid_body": 3,
            "unsupported_media_type": 2, "method_not_allowed": 1, "not_enabled": 1,
        }  # fmt: skip
        counter = re.compile(r'^octavo:http_errors_total{code="(\w+)"} (\d+)', re.M)
        # An answer is counted after its last byte, which the client may have read before.
        wait_until(lambda: {code: int(count) for code, count in counter.findall(http.get("/metrics").text)} == counts)
    assert [record.getMessage() for record in caplog.records if "refused" in record.getMessage()] == [
        "r: GET /v1/models is refused: 401, invalid_api_key",
        "r: POST /v1/completions is refused: 400, temperature, invalid_value",
        "r: POST /v1/completions is refused: 400, unknown_parameter",
        "r: GET /v1/responses/{response_id} is refused: 404, not_found",
        "r: GET (unknown route) is refused: 404, not_found",
        *["r: POST /v1/completions is refused: 400, invalid_body"] * 3,
        *["r: POST /v1/completions is refused: 415, unsupported_media_type"] * 2,
        "r: PUT /v1/completions is refused: 405, method_not_allowed",
        "r: POST /v1/load_lora_adapter is refused: 404, not_enabled",
        "r: POST /v1/messages is refused: 400, prompt, unknown_parameter",
        "r: POST /v1/responses is refused: 400, metadata, invalid_value",
        "r: POST /v1/responses is refused: 400, unknown_parameter",
    ]
    assert "SECRET" not in caplog.text


def test_gateways_find_what_they_have_sent_and_the_resident_adapters(http: httpx.Client, engine: FakeEngine) -> None:
    def read(**place: str) -> dict[str, Any]:
        return http.get("/v1/routing_notes", params=place).json()

    for number in range(3):
        body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
        http.post("/v1/completions", json=body, headers={"X-Octavo-Prompt-Names": f"a{number}"}).raise_for_status()
    http.post("/v1/completions", json=body, headers={"X-Octavo-Prompt-Names": "x" * 2000}).raise_for_status()
    first = read()
    assert first["prompts"] == ["a0", "a1", "a2"] and first["next"] == 3 and not first["has_more"]
    assert read(id=first["id"], after="2")["prompts"] == ["a2"]
    assert read(id=first["id"], after="9")["prompts"] == []
    assert read(id="of an earlier server", after="2")["prompts"] == first["prompts"]
    assert all(read(id=first["id"], after=said)["prompts"] == first["prompts"] for said in ("x", "-1", "9" * 5000))
    engine.stats = EngineStats(resident_adapters=["pirate"])
    assert read()["adapters"] == {"pirate": True}
    ready = replace(engine.config.cache, enable_prefix_caching=True, num_gpu_blocks=7)
    for cache, num_tokens in (
        (ready, 7 * ready.block_size), (replace(ready, num_gpu_blocks=None), 0), (replace(ready, host_bytes=1), 0),
        (replace(ready, enable_prefix_caching=False), 0),
    ):  # fmt: skip
        engine.config = replace(engine.config, cache=cache)
        assert read()["cache_tokens"] == num_tokens
