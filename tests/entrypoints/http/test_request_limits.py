"""What one request may have of each thing, in every API."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import httpx
import pytest

from octavo.entrypoints.http.request_limits import RequestLimits
from octavo.errors import RequestError
from octavo.json_size import CONTAINER_NODES
from tests.entrypoints.fake_engine import FakeEngine, serving
from tests.entrypoints.http.test_json_worker import any_json

HI: Any = [{"role": "user", "content": "Hi"}]
# Route: a body that is answered, and the names by which this API calls what is limited.
APIS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "/v1/completions": ({"prompt": "a"}, {}),
    "/v1/chat/completions": ({"messages": HI}, {}),
    "/v1/messages": ({"messages": HI, "max_tokens": 5, "model": "alias"}, {"stop": "stop_sequences"}),
    "/v1/responses": ({"input": HI}, {"messages": "input", "response_format": "text"}),
    "/generate": ({"prompt": "a"}, {}),
    "/tokenize": ({"messages": HI}, {}),
    "/invocations": ({"messages": HI}, {}),
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "description": "x" * 300}}}
# Limit: its value here, the field that has it, what is just allowed, and what is one too much.
CASES: dict[str, tuple[int, str, Any, Any]] = {
    "max_stops": (3, "stop", ["a"] * 3, ["a"] * 4),
    "max_stop_chars": (10, "stop", ["a" * 10], ["b", "a" * 11]),
    "max_bad_words": (3, "bad_words", ["a"] * 3, ["a"] * 4),
    "max_logit_biases": (3, "logit_bias", {"1": 1, "2": 1, "3": 1}, {"1": 1, "2": 1, "3": 1, "4": 1}),
    "max_tools": (2, "tools", None, [TOOL] * 3),
    "max_schema_bytes": (600, "tools", None, [TOOL] * 2),
    "max_template_bytes": (40, "chat_template", None, "ü" * 21),
    "max_parts": (4, "messages", HI * 4, HI * 5),
}


def built(path: str, limit: str) -> bool:
    """Whether an API has the field."""
    if path == "/tokenize":
        return limit in ("max_tools", "max_schema_bytes", "max_template_bytes", "max_parts")
    if path in ("/v1/completions", "/generate"):
        return limit in ("max_stops", "max_stop_chars", "max_bad_words", "max_logit_biases")
    if path in ("/v1/messages", "/v1/responses"):
        missing = {"max_bad_words", "max_logit_biases", "max_template_bytes"}
        return limit not in missing | ({"max_stops", "max_stop_chars"} if path == "/v1/responses" else set())
    return True


@pytest.fixture(scope="module")
def url(shared_engine: FakeEngine) -> Any:
    limits = {name: limit for name, (limit, *_) in CASES.items()}
    with serving(shared_engine, disable_log_requests=True, **limits, max_logprob_entries=60) as url:
        yield url


@pytest.mark.parametrize("limit", CASES)
@pytest.mark.parametrize("path", APIS)
def test_each_api_refuses_too_much_and_names_the_field_and_the_limit(
    url: str, engine: FakeEngine, path: str, limit: str
) -> None:
    if not built(path, limit):
        return
    body, names = APIS[path]
    most, field, allowed, beyond = CASES[limit]
    field = names.get(field, field)
    if allowed is not None:
        answer = httpx.post(url + path, json={**body, field: allowed})
        assert answer.status_code == 200, answer.text
    num_seen = len(engine.seen)
    answer = httpx.post(url + path, json={**body, field: beyond})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["message"].startswith(f"{field} has ")
    assert f"a request may have {most} here (--{limit.replace('_', '-')})" in error["message"]
    assert path == "/v1/messages" or (error["param"], error["code"]) == (field, "request_too_large")
    assert len(engine.seen) == num_seen


@pytest.mark.parametrize("field", ["response_format", "structured_outputs", "guided_json", "guided_choice", "tools"])
def test_whatever_a_schema_is_called_it_is_limited(url: str, engine: FakeEngine, field: str) -> None:
    answer = httpx.post(f"{url}/v1/chat/completions", json={"messages": HI, field: {"x": "y" * 600}})
    assert answer.json()["error"]["param"] == field and "--max-schema-bytes" in answer.text


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"prompt": [1] * 30, "prompt_logprobs": 1}, None),
        ({"prompt": [1] * 31, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"logprobs": 2, "max_tokens": 20}, None),
        ({"logprobs": 2, "max_tokens": 21}, "logprobs"),
        ({"logprobs": 2, "max_tokens": 7, "n": 3}, "logprobs"),
    ],
)
def test_an_answer_has_so_many_log_probabilities(
    url: str, engine: FakeEngine, fields: dict[str, Any], refused: str | None
) -> None:
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a", **fields})
    assert answer.status_code == (400 if refused else 200), answer.text
    if refused:
        error = answer.json()["error"]
        assert error["param"] == refused and "--max-logprob-entries" in error["message"]


def test_an_answer_that_names_no_length_ends_where_its_log_probabilities_would_be_too_many(
    url: str, engine: FakeEngine
) -> None:
    engine.answer = "x" * 100
    body = {"messages": HI, "logprobs": True, "top_logprobs": 2}
    [choice] = httpx.post(f"{url}/v1/chat/completions", json=body).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("x" * 20, "length")


def nodes_and_depth(value: Any) -> tuple[int, int]:
    inner = value if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else None
    if inner is None:
        return 1, 0
    sizes = [nodes_and_depth(one) for one in inner]
    # A list of n has n - 1 commas, and an empty one none.
    num_nodes = CONTAINER_NODES + max(len(inner) - 1, 0) + sum(nodes - 1 for nodes, _ in sizes)
    return 1 + num_nodes, 1 + max((depth for _, depth in sizes), default=0)


def test_values_and_depth_are_counted_as_json_has_them_whatever_texts_say(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(3)
    for _ in range(200):
        monkeypatch.setattr("octavo.json_size.PIECE_BYTES", rng.choice((1, 2, 3, 10, 1 << 16)))
        value = [any_json(rng, 2), 'a"[{,\\', {'[[,\\"': ["{[,"]}]
        body = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode(errors="surrogatepass")
        num_nodes, depth = nodes_and_depth(value)
        RequestLimits(max_json_nodes=num_nodes, max_json_depth=depth).refuse_json(body)
        with pytest.raises(RequestError, match=f"more than {num_nodes - 1} values.*--max-json-nodes"):
            RequestLimits(max_json_nodes=num_nodes - 1, max_json_depth=depth).refuse_json(body)
        with pytest.raises(RequestError, match="--max-json-depth"):
            RequestLimits(max_json_nodes=num_nodes, max_json_depth=depth - 1).refuse_json(body)


def test_a_body_with_too_many_values_is_refused_on_every_route(engine: FakeEngine) -> None:
    with serving(engine, disable_log_requests=True, max_json_nodes=1000, max_json_depth=9) as url:
        for path, (body, _) in APIS.items():
            for key, value in {"nodes": [[1]] * 200, "depth": json.loads("[" * 9 + "]" * 9)}.items():
                answer = httpx.post(url + path, json={**body, "metadata": {"x": value}})
                assert answer.status_code == 400 and f"--max-json-{key}" in answer.json()["error"]["message"]


def test_every_limit_is_documented_with_its_default() -> None:
    with open("docs/server.md", encoding="utf-8") as file:
        text = file.read()
    for field in dataclasses.fields(RequestLimits):
        assert f"`--{field.name.replace('_', '-')}` ({field.default:,})" in text, field.name


def test_a_word_is_forbidden_once_however_often_it_is_given(http: httpx.Client, engine: FakeEngine) -> None:
    assert http.post("/v1/completions", json={"prompt": "a", "bad_words": ["b", "c", "b"] * 50}).status_code == 200
    ids = engine.seen[-1][1].bad_words_token_ids
    assert ids == [engine.inputs.encode(text, False) for text in ("b", " b", "c", " c")]
    answer = http.post("/v1/completions", json={"prompt": "a", "allowed_token_ids": [1] * 300})
    assert answer.json()["error"]["param"] == "allowed_token_ids"


def test_messages_are_counted_before_they_are_read() -> None:
    with pytest.raises(RequestError, match="--max-parts"):
        RequestLimits(max_parts=8).refuse_fields({"messages": [[]] * 9})
    RequestLimits(max_parts=8).refuse_fields({"input": [1] * 9})
