"""The API's description: complete, true, and readable without a network."""

from __future__ import annotations

import os
import re
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode, checks
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from octavo.gateway.proxy_request import ROUTES
from tests.entrypoints.fake_engine import FakeEngine, serving
from tests.waiting import within

NUM_EXAMPLES = int(os.environ.get("OCTAVO_TEST_EXAMPLES", "20"))  # of each route and kind; more are for an afternoon
POST_ROUTES = {
    "/v1/completions", "/v1/chat/completions", "/generate", "/tokenize", "/detokenize", "/v1/responses", "/v1/messages",
    "/v1/messages/count_tokens",
}  # fmt: skip
GET_ROUTES = {"/v1/models", "/v1/models/{model_id}", "/health", "/ping", "/version", "/metrics"}


@pytest.fixture(scope="module")
def description(shared_http: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = shared_http.get("/openapi.json").json()
    return found


def operations(description: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        f"{method.upper()} {path}": operation
        for path, methods in description["paths"].items()
        for method, operation in methods.items()
    }


def test_every_route_says_what_it_does_and_how_it_fails(description: dict[str, Any]) -> None:
    found = operations(description)
    assert {f"POST {path}" for path in POST_ROUTES} | {f"GET {path}" for path in GET_ROUTES} <= found.keys()
    for name, operation in found.items():
        assert operation["summary"], name
        assert len(operation["description"]) > 10, name
        assert operation["tags"], name
        assert {"200", "500", "503"} <= operation["responses"].keys(), name
        assert "422" not in operation["responses"], name
        assert operation["responses"]["200"]["content"], name
    for path in POST_ROUTES:
        responses = found[f"POST {path}"]["responses"]
        assert {"400", "401", "404", "413", "415", "429"} <= responses.keys()
        for status in responses.keys() - {"200"}:
            schema = responses[status]["content"]["application/json"]["schema"]
            name = "AnthropicError" if path.startswith("/v1/messages") else "ErrorResponse"
            assert schema == {"$ref": f"#/components/schemas/{name}"}, (path, status)


def test_no_schema_is_named_by_the_module_that_it_stands_in(description: dict[str, Any]) -> None:
    assert not [name for name in description["components"]["schemas"] if name.startswith("octavo__")]


def test_every_field_of_a_request_is_explained(description: dict[str, Any]) -> None:
    models = description["components"]["schemas"]
    for name in (
        "CompletionRequest", "GenerateRequest", "TokenizeRequest", "DetokenizeRequest", "StreamOptions",
        "ResponsesRequest", "MessagesRequest", "BatchRequest",
    ):  # fmt: skip
        for field, schema in models[name]["properties"].items():
            assert schema.get("description") or field == "include_obfuscation", f"{name}.{field}"


@pytest.mark.parametrize("value", [5, [5.5]])
def test_an_error_names_every_kind_of_value_that_the_description_allows(
    description: dict[str, Any], http: httpx.Client, value: Any
) -> None:
    words = {"array": "list", "object": r"object|\{", "boolean": "boolean|true", "string": "string|text|'|\""}
    models, checked = description["components"]["schemas"], set()
    for path in POST_ROUTES:
        content = description["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        body = next(iter(content["examples"].values()))["value"]
        for field, schema in models[content["schema"]["$ref"].rsplit("/", 1)[1]]["properties"].items():
            kinds = {one.get("type", "object") for one in schema.get("anyOf", [schema])} - {"null"}
            error = http.post(path, json={**body, field: value}).json().get("error")
            if error is None or len(kinds) == 1 or not re.search(rf"^{field} should be ", error["message"]):
                continue
            checked.add(field)
            message = error["message"].partition(", got")[0]
            assert all(re.search(words.get(kind, kind), message) for kind in kinds), (path, field, message)
    assert {"prompt", "conversation", "guided_json", "early_stopping"} <= checked


def test_streams_are_described_and_are_as_described(description: dict[str, Any], http: httpx.Client) -> None:
    for path, body in {
        "/v1/completions": {"prompt": "a"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
        "/generate": {"prompt": "a"},
        "/v1/responses": {"input": "a"},
        "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4},
    }.items():
        response = http.post(path, json={**body, "stream": True})
        media_type = response.headers["content-type"].partition(";")[0]
        described = description["paths"][path]["post"]["responses"]["200"]["content"]
        assert media_type in described
        assert described[media_type]["example"]
        assert "application/json" in described


def test_every_example_is_answered(description: dict[str, Any], http: httpx.Client) -> None:
    num_examples = 0
    for path in POST_ROUTES:
        content = description["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        for name, example in content["examples"].items():
            body = dict(example["value"])
            if "tokens" in body:
                body["tokens"] = [token % 259 for token in body["tokens"]]  # the fake engine's vocabulary
            response = http.post(path, json=body)
            assert response.status_code == 200, (path, name, response.text)
            num_examples += 1
    assert num_examples >= 10


def test_the_page_needs_nothing_from_elsewhere(http: httpx.Client) -> None:
    page = http.get("/docs")
    assert page.status_code == 200
    links = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(links) == 3
    assert all(link.startswith("/docs/") for link in links)
    for link in links:
        file = http.get(link)
        assert (file.status_code, len(file.content) > 1000) == (200, True)
    assert "url: '/openapi.json'" in page.text
    assert http.get("/docs/../app.py").status_code == 404
    assert http.get("/docs/redoc.standalone.js").status_code == 404


def test_the_page_is_open_where_keys_are_asked_for_and_knows_its_prefix(shared_engine: FakeEngine) -> None:
    shared_engine.reset()
    with serving(shared_engine, api_key=["secret"], root_path="/llm", disable_log_requests=True) as url:
        page = httpx.get(f"{url}/llm/docs")
        assert page.status_code == 200
        assert 'src="/llm/docs/swagger-ui-bundle.js"' in page.text
        assert httpx.get(f"{url}/llm/docs/swagger-ui.css").status_code == 200
        description = httpx.get(f"{url}/llm/openapi.json", timeout=within(60)).json()  # it takes seconds to make
        assert description["servers"] == [{"url": "/llm"}]
        assert httpx.get(f"{url}/llm/v1/models").status_code == 401


@pytest.mark.long
@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize(
    "operation",
    [
        *sorted(f"POST {path}" for path in POST_ROUTES if not path.endswith("/count_tokens")),
        "POST /v1/embeddings",
        "POST /v1/batches",
        "POST /v1/chat/completions/{completion_id}",
        "POST /v1/conversations",
        "POST /v1/conversations/{conversation_id}/items",
        "GET /v1/models/{model_id}",
        "GET /v1/responses/{response_id}",
        "GET /v1/responses/{response_id}/input_items",
        "GET /v1/conversations/{conversation_id}/items",
        "GET /v1/chat/completions",
        "GET /v1/files",
        "GET /v1/batches",
    ],
)
def test_whatever_the_description_allows_or_forbids_is_answered_as_described(
    address: str, engine: FakeEngine, operation: str, mode: GenerationMode
) -> None:
    method, path = operation.split(" ")
    described = schemathesis.openapi.from_url(f"{address}/openapi.json")[path][method]
    expected = [
        checks.not_a_server_error,
        status_code_conformance,
        content_type_conformance,
        response_schema_conformance,
    ]
    if mode is GenerationMode.NEGATIVE:
        if method == "GET":
            pytest.skip("every path is a name that could be a model's")
        expected.append(negative_data_rejection)

    @given(case=described.as_strategy(generation_mode=mode))
    @settings(
        max_examples=NUM_EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def answer(case: schemathesis.Case) -> None:
        case.call_and_validate(checks=expected)

    answer()


@pytest.mark.parametrize(
    ("path", "method", "status"), [("/tokenizer_info", "get", "404"), ("/v1/files/{file_id}", "delete", "409")]
)
def test_errors_of_single_routes_are_described(http: httpx.Client, path: str, method: str, status: str) -> None:
    described = http.get("/openapi.json").json()["paths"][path][method]["responses"][status]
    assert described["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ErrorResponse"}


def test_the_gateway_gives_a_keys_priority_to_the_routes_that_take_one(http: httpx.Client) -> None:
    description = http.get("/openapi.json").json()
    schemas, takers = description["components"]["schemas"], set()
    for path, operations in description["paths"].items():
        body = operations.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json", {})
        name = body.get("schema", {}).get("$ref", "").rpartition("/")[2]
        if "priority" in schemas.get(name, {}).get("properties", ()):
            takers.add(path)
    forwarded = {path for path, traits in ROUTES.items() if "priority" in traits}
    assert takers | {"/invocations"} == forwarded | {"/v1/responses/input_tokens"}
