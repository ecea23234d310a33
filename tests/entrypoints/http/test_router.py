"""How requests find their routes: methods, what is not built, fields that nobody knows, streams that are idle."""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import BaseModel, ValidationError

from octavo.entrypoints.anthropic.messages_protocol import CountTokensRequest, MessagesRequest
from octavo.entrypoints.chat import reasoning_effort
from octavo.entrypoints.chat.reasoning_effort import effort_options
from octavo.entrypoints.http import engine_control
from octavo.entrypoints.http.app import LAZY_ROUTES, ROUTERS
from octavo.entrypoints.http.error_responses import UNBUILT_PATHS
from octavo.entrypoints.http.pagination import read_boolean
from octavo.entrypoints.http.router import validate_body
from octavo.entrypoints.openai.invocations import _path_of
from octavo.entrypoints.openai.request_bodies import ChatCompletionRequest, CompletionRequest
from octavo.entrypoints.responses.responses_protocol import ResponsesRequest
from octavo.errors import RequestError
from octavo.pooling_params import PoolingConfig
from octavo.stats import EngineStats
from tests.entrypoints.fake_engine import FakeEngine, serving
from tests.entrypoints.http.test_errors import error_of

HELLO: Any = [{"role": "user", "content": "Hi"}]


def test_modules_that_are_imported_later_have_the_routes_that_are_said_of_them() -> None:
    for module, routes in LAZY_ROUTES.items():
        declared = importlib.import_module(module).router.specs
        assert {f"{one.method} {one.path}" for one in declared} == set(routes)


def test_a_method_that_a_route_lacks_is_refused_before_the_body(http: httpx.Client) -> None:
    allowed: dict[str, set[str]] = {}
    routes = [(one.method, one.path) for router in ROUTERS for one in router.specs]
    for method, path in [*routes, *(route.split(" ") for routes in LAZY_ROUTES.values() for route in routes)]:
        allowed.setdefault(path, set()).update({method, "HEAD"} if method == "GET" else {method})
    assert allowed["/v1/chat/completions"] == {"GET", "HEAD", "POST"} and len(allowed) > 30
    for path, methods in allowed.items():
        path = re.sub("{[a-z_]+}", "x1", path)
        for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"):
            answer = http.request(method, path, content=b"not JSON", headers={"Content-Type": "text/plain"})
            assert (answer.status_code == 405) == (method not in methods), (method, path)
            if answer.status_code == 405:
                assert set(answer.headers["allow"].split(", ")) == methods, (method, path)


def test_a_full_queue_refuses_what_would_wait_in_it_and_nothing_else(engine: FakeEngine) -> None:
    waits = {
        "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/generate", "/invocations",
        "/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank",
        "/v2/rerank", "/v1/audio/transcriptions", "/v1/audio/translations", "/api/chat", "/api/generate", "/api/embed",
        "/api/embeddings",
    }  # fmt: skip
    routes = [(one.method, one.path) for router in [*ROUTERS, engine_control.router] for one in router.specs]
    routes += [tuple(route.split(" ")) for routes in LAZY_ROUTES.values() for route in routes]
    engine.stats = EngineStats(num_running=8, num_waiting=2)
    with serving(engine, disable_log_requests=True, max_queue_len=2, enable_server_dev_mode=True) as url:
        refused = set()
        for path in {path for method, path in routes if method == "POST"}:
            # of no type, so that nothing is done
            answer = httpx.post(
                url + re.sub("{[a-z_]+}", "x1", path), headers={"Content-Type": "text/plain"}, content="x"
            )
            refused |= {path} if answer.status_code == 429 else set()
    assert refused == waits


BOOLEANS = dict.fromkeys(("true", "True", "1", "yes", "on", " TRUE "), True) | dict.fromkeys(
    ("False", "0", "no", "off"), False
)


def test_booleans_are_read_as_http_clients_write_them(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    async def pause(mode: str, *, clear_cache: bool) -> None:
        seen.append((mode, clear_cache))

    monkeypatch.setattr(engine, "pause_generation", pause, raising=False)
    with serving(engine, disable_log_requests=True, enable_server_dev_mode=True) as url:
        for text, expected in BOOLEANS.items():
            assert read_boolean(text, "x") is expected
            assert httpx.post(f"{url}/pause", params={"clear_cache": text}).status_code == 200
        assert httpx.post(f"{url}/pause", params={"clear_cache": "maybe"}).json()["error"]["param"] == "clear_cache"
        assert httpx.get(f"{url}/v1/responses/x", params={"stream": "maybe"}).json()["error"]["param"] == "stream"
    assert seen == [("abort", expected) for expected in BOOLEANS.values()]


def test_control_routes_do_nothing_with_a_parameter_that_they_lack(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script for vLLM whose pause should spare requests must not abort them."""
    seen = list[Any]()

    async def pause(mode: str, *, clear_cache: bool) -> None:
        seen.append(mode)

    async def reset_prefix_cache(reset_running_requests: bool) -> bool:
        seen.append(reset_running_requests)
        return True

    monkeypatch.setattr(engine, "pause_generation", pause, raising=False)
    monkeypatch.setattr(engine, "reset_prefix_cache", reset_prefix_cache, raising=False)
    with serving(engine, disable_log_requests=True, enable_server_dev_mode=True) as url:
        for path in (
            "/pause?wait_for_inflight_requests=true",
            "/reset_prefix_cache?reset_running_requests=true&reset_external=true",
        ):
            assert httpx.post(url + path).status_code == 200
        for path in ("/pause?wait=true", "/sleep?lvl=2", "/wake_up?tag=weights", "/reset_prefix_cache?all=true"):
            answer = httpx.post(url + path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unknown_parameter"), path
    assert seen == ["wait", True]


def test_known_routes_that_are_not_built_say_so(http: httpx.Client) -> None:
    for path, instead in UNBUILT_PATHS.items():  # some of them look like the id of something that is stored
        answer = http.post(path, json={})
        said = f"{path} is not built yet. {instead}".rstrip()
        assert (answer.status_code, answer.json()["error"]["message"]) == (404, said)
    assert "/v1/batches" in http.post("/v1/chat/completions/batch", json={}).json()["error"]["message"]
    assert http.post("/v1/audio/speech", json={}).json()["error"]["code"] == "not_built"
    error = http.post("/sleep").json()["error"]
    assert error["code"] == "not_enabled" and "--enable-server-dev-mode" in error["message"]
    assert "Invalid URL" in http.post("/v1/nothing", json={}).json()["error"]["message"]


def test_what_an_invocation_asks_follows_from_its_fields(http: httpx.Client) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}]}
    for path, body in {"/v1/chat/completions": chat, "/v1/completions": {"prompt": "a"}}.items():
        asked, expected = (
            http.post(where, json=body | {"request_id": "one"}).json() for where in ("/invocations", path)
        )
        assert asked | {"created": 0} == expected | {"created": 0}
        with http.stream("POST", "/invocations", json=body | {"stream": True}) as stream:
            assert stream.read().endswith(b"data: [DONE]\n\n")
    refused = http.post("/invocations", json={"prompt": "a", "temprature": 1})
    assert (refused.status_code, error_of(refused)["param"]) == (400, "temprature")
    for body in ({"input": "a"}, [1], "a"):
        response = http.post("/invocations", json=body)
        assert response.status_code == 400
        assert "The body must be a JSON object with messages or prompt" in error_of(response)["message"]


@pytest.mark.parametrize(
    ("fields", "task", "path"),
    [
        ({"input": "a"}, "embed", "/v1/embeddings"), ({"messages": []}, "classify", "/classify"),
        ({"input": "a"}, "token_embed", "/pooling"), ({"text_1": "a", "text_2": "b"}, "embed", "/score"),
        ({"queries": "a", "documents": ["b"]}, "embed", "/score"),
        ({"query": "a", "documents": []}, "embed", "/rerank"),
    ],
)  # fmt: skip
def test_an_invocation_of_a_model_that_pools_goes_to_its_task(fields: dict[str, Any], task: str, path: str) -> None:
    assert _path_of(fields, PoolingConfig(task, "MEAN")) == path


def test_whole_numbers_may_be_written_as_floats(http: httpx.Client, engine: FakeEngine) -> None:
    body = {"messages": HELLO, "max_tokens": 4.0, "n": 1.0, "seed": 7.0}
    assert http.post("/v1/chat/completions", json=body).json()["usage"]["completion_tokens"] == 4
    assert http.post("/v1/chat/completions", json={**body, "max_tokens": 4.5}).status_code == 400


def test_unknown_fields_are_refused_or_overlooked(tiny_tokenizer: Path, caplog: pytest.LogCaptureFixture) -> None:
    body = {
        "messages": [{"role": "user", "content": "Hi", "nonsense": 1}],
        "tools": [{"type": "function", "function": {"name": "f", "odd": {}}, "odd": []}],
        "tool_choice": {"type": "function", "function": {"name": "f", "odd": 1}},
        "nonsense": {"a": 1},
        "reasoning_effort": "high",
    }
    for policy, status in (("error", 400), ("warn", 200), ("ignore", 200)):
        caplog.clear()
        with serving(FakeEngine(tiny_tokenizer), unknown_fields=policy, disable_log_requests=True) as url:
            answer = httpx.post(f"{url}/v1/chat/completions", json=body)
            assert answer.status_code == status, answer.text
            # What has a meaning is never overlooked.
            refused = httpx.post(f"{url}/v1/chat/completions", json={"messages": HELLO, "audio": {"voice": "x"}})
            assert refused.status_code == 400
        assert ("nonsense" in caplog.text) == (policy == "warn")


@pytest.mark.parametrize(
    ("kind", "body", "wrong"),
    [
        (ChatCompletionRequest, {"messages": []}, {"odd": 1}),
        (
            ChatCompletionRequest,
            {"messages": HELLO, "tools": []},
            {"type": "function", "function": {"name": "f", "a": 1}},
        ),
        (CompletionRequest, {"prompt": "a", "stop": []}, 1),
        (CompletionRequest, {"prompt": "a", "logit_bias": {}}, "x"),
        (ResponsesRequest, {"input": "a", "metadata": {}}, 1),
        (ResponsesRequest, {"input": "a", "tools": []}, {"odd": 1}),
        (MessagesRequest, {"messages": [], "max_tokens": 1}, {"role": "user", "content": [1]}),
        (CountTokensRequest, {"messages": HELLO, "system": []}, "a"),
    ],
)
def test_lists_and_objects_end_at_their_first_wrong_item(kind: type[BaseModel], body: Any, wrong: Any) -> None:
    # A server that collected all errors of a body of 16 MB would stop for a second.
    def num_errors(num_wrong: int) -> int:
        changed = copy.deepcopy(body)
        given = next(one for one in changed.values() if one in ([], {}))
        if isinstance(given, dict):
            given.update({str(i): wrong for i in range(num_wrong)})
        else:
            given.extend([wrong] * num_wrong)
        with pytest.raises(ValidationError) as caught:
            kind.model_validate(changed)
        return caught.value.error_count()

    assert num_errors(1000) == num_errors(1)


@pytest.mark.parametrize("unknown", ["error", "warn", "ignore"])
@pytest.mark.parametrize(
    ("body", "said"),
    [
        (lambda many: {"messages": HELLO, **many}, "The body should have at most "),
        (lambda many: {"messages": [{**HELLO[0], **many}]}, "messages\\[0\\] should have at most "),
        (lambda many: {"messages": HELLO, "stream_options": many}, "stream_options should have at most "),
    ],
)
def test_an_object_of_thousands_of_unknown_fields_is_refused_by_their_number(
    body: Callable[[Any], Any], said: str, unknown: Any
) -> None:
    with pytest.raises(RequestError, match=f"{said}\\d+ fields"):
        validate_body(body({f"odd{i}": 1 for i in range(1000)}), ChatCompletionRequest, unknown)


@pytest.mark.parametrize(
    ("template", "fields", "options"),
    [
        ("{% if enable_thinking %}a{% endif %}", {"reasoning_effort": "none"}, {"enable_thinking": False}),
        ("{% if enable_thinking is defined %}a{% endif %}", {"reasoning_effort": "low"}, {"enable_thinking": True}),
        ("{{ reasoning_effort }}", {"reasoning_effort": "xhigh"}, {"reasoning_effort": "high"}),
        ("{{ reasoning_effort }}", {"reasoning_effort": "none"}, None),
        ("{{ message.thinking }} thinking", {"reasoning_effort": "none"}, {}),
        ("{{ message.thinking }} thinking", {"reasoning_effort": "high"}, None),
        ("", {"reasoning_effort": "medium", "verbosity": "medium"}, {}),
        ("{{ verbosity }}", {"verbosity": "low"}, {"verbosity": "low"}),
        ("x", {"verbosity": "low"}, None),
    ],
)
def test_hints_become_variables_of_the_template(template: str, fields: Any, options: Any) -> None:
    class Tokenizer:
        chat_template = template or "x"

        def get_chat_template(self, *_: Any) -> str:
            return self.chat_template

    body = ChatCompletionRequest.model_validate({"messages": HELLO, **fields})
    if options is None:
        with pytest.raises(RequestError, match="template"):
            effort_options(Tokenizer(), body, is_strict=True)  # type: ignore[arg-type]
        options = {}
    assert effort_options(Tokenizer(), body, is_strict=False) == options  # type: ignore[arg-type]


def test_an_idle_stream_is_kept_alive(tiny_tokenizer: Path) -> None:
    engine = FakeEngine(tiny_tokenizer)
    with serving(engine, stream_keep_alive=0.05, disable_log_requests=True) as url:
        for path, expected in (
            ("/v1/chat/completions", ": keep-alive"), ("/v1/responses", ": keep-alive"),
            ("/v1/messages", "event: ping"), ("/generate", None),
        ):  # fmt: skip
            engine.is_paused = True
            body: Any = {"stream": True, "max_tokens": 5}
            if path == "/v1/responses":
                body = {"stream": True, "input": "Hi"}
            else:
                body |= {"prompt": "Hi"} if path == "/generate" else {"messages": HELLO}
            with httpx.stream("POST", url + path, json=body) as stream:
                lines = stream.iter_lines()
                if expected is None:
                    talk = {"stream": True, "max_tokens": 5, "messages": HELLO}
                    with httpx.stream("POST", url + "/v1/messages", json=talk) as other:
                        pings = (line for line in other.iter_lines() if line == "event: ping")
                        assert next(pings) == next(pings), "as much time has passed as others are idle for"
                else:
                    assert expected in lines
                engine.is_paused = False
                rest = list(lines)
            assert rest and (expected is not None or all(line.startswith("{") for line in rest))


def test_a_template_is_searched_from_left_to_right_once() -> None:
    assert not re.search(r"[*+?]|\d", reasoning_effort._BRACES.pattern), "no search may reach over the template"
    assert reasoning_effort._variables("{% if %}{{ thinking }}{{ verbosity") == {"thinking"}
    assert reasoning_effort._variables("{% {% {{ thinking %} verbosity }}") == {"thinking"}
