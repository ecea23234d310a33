"""What the server says to requests that it cannot or will not serve: OpenAI's error body, with the right status."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import octavo.errors
from octavo.errors import EngineDeadError, error_code
from octavo.loading.jinja_template import limited_lines
from tests.entrypoints.fake_engine import FakeEngine, serving
from tests.waiting import wait_until, within

ROUTES = ["/v1/completions", "/v1/chat/completions"]
JSON = {"Content-Type": "application/json"}


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert "Traceback" not in response.text
    error: dict[str, Any] = body["error"]
    return error


def test_every_status_of_a_refusal_has_a_code_in_words() -> None:
    sources = [file.read_text("utf-8") for file in Path(octavo.errors.__file__).parent.rglob("*.py")]
    statuses = {int(one) for source in sources for one in re.findall(r"\bstatus=(\d{3})\b", source)}
    assert {400 <= status < 600 for status in statuses} == {True} and len(statuses) > 9
    assert not [status for status in (*statuses, 504) if error_code(status, None, None).isdigit()]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"prompt": 5}, "prompt", "prompt should be a string, a list of token ids, or a list of strings or of lists"),
        ({"prompt": []}, "prompt", "prompt should not be empty"),
        ({"prompt": ""}, "prompt", "the prompt is empty"),
        ({"prompt": [999]}, "prompt", "token id 999 is not an integer from 0 to 258."),
        ({"prompt": [-1]}, "prompt", "prompt should be"),
        ({"prompt": ["a", 1]}, "prompt", "prompt should be"),
        ({"prompt": "x" * 600}, "prompt", "the prompt has 600 tokens and the model takes 512"),
        ({"max_tokens": "5"}, "max_tokens", "max_tokens should be a valid integer, got '5'."),
        (
            {"structured_outputs": {"json": [1]}},
            "structured_outputs.json",
            "structured_outputs.json should be a valid string or an object, got [1].",
        ),
        ({"guided_json": True}, "guided_json", "guided_json should be a valid string or an object, got true."),
        ({"guided_choice": [None]}, "guided_choice[0]", "guided_choice[0] should be a valid string, got null."),
        ({"max_tokens": -1}, "max_tokens", "max_tokens must be 1 or more, got -1."),
        ({"max_tokens": 1.5}, "max_tokens", "max_tokens should be a valid integer"),
        ({"temperature": "hot"}, "temperature", "temperature should be a valid number, got 'hot'."),
        ({"temperature": -0.5}, "temperature", "temperature must be 0 or more, got -0.5."),
        ({"temperature": True}, "temperature", "temperature should be a valid number"),
        ({"top_p": 0}, "top_p", "top_p must be greater than 0 and at most 1, got 0."),
        ({"n": 0}, "n", "n must be between 1 and 128, got 0."),
        ({"n": 2, "best_of": 3, "stream": True}, "best_of", "best_of must be equal to n (2) in a stream"),
        ({"logprobs": 21}, "logprobs", "logprobs: a request may have 20 log-probabilities of a position here"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids", "is only allowed with logprobs"),
        ({"truncation_side": "middle"}, "truncation_side", "truncation_side should be 'left' or 'right'"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "here (--max-logprobs), got -1 (all 259 of the vocabulary)."),
        ({"logit_bias": {"a": 1}}, "logit_bias", "logit_bias must be a map of token ids to numbers"),
        ({"logit_bias": {"300": 1}}, "logit_bias", "logit_bias has token id 300"),
        ({"stop": 5}, "stop", "stop should be a string or a list of strings, got 5."),
        ({"stop": ["a", 5]}, "stop[1]", "stop[1] should be a valid string, got 5."),
        ({"early_stopping": 5}, "early_stopping", "early_stopping should be a valid boolean or 'never', got 5."),
        ({"stream_options": {"y": 1}}, "stream_options.y", "supplied: stream_options.y"),
        ({"stop": [""]}, "stop", "stop must be a list of non-empty strings"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "only allowed when stream is true"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "supplied: stream_options.x"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "only allowed when stream is false"),
        ({"priority": 1}, "priority", "--scheduling-policy priority"),
        ({"request_id": "a b"}, "request_id", "request_id should match pattern"),
        ({"session_id": ""}, "session_id", "session_id should have at least 1 item"),
        ({"suffix": "end", "echo": True}, "suffix", "suffix goes with prompts that are text, without echo"),
        ({"use_beam_search": True, "top_p": 0.5}, "top_p", "top_p must be left out with use_beam_search"),
        ({"length_penalty": 2.0}, "length_penalty", "length_penalty must be 1.0 without use_beam_search"),
        ({"guided_decoding_backend": "x"}, "guided_decoding_backend", "guided_decoding_backend is not a field here"),
        ({"guided_decoding_backend": "xgrammar"}, "guided_decoding_backend", "always made by llguidance"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs", "vllm_xargs is not a field here: nothing reads it"),
        ({"repetition_detection": {"max_pattern_size": 4}}, "repetition_detection", "frequency_penalty and rep"),
        ({"media_io_kwargs": {"video": {}}}, "media_io_kwargs", "--media-io-kwargs is the server's"),
        ({"prompt_token_ids": [1]}, "prompt_token_ids", "supplied: prompt_token_ids; did you mean prompt,"),
        ({"lora_request": {}}, "lora_request", "did you mean model, which is the adapter's name?"),
        ({"choice": ["a"]}, "choice", "; did you mean structured_outputs.choice?"),
        ({"num_predict": 4}, "num_predict", "; did you mean max_tokens?"),
        ({"structured_outputs": {"choices": ["a"]}}, "structured_outputs.choices", "structured_outputs.choice?"),
        ({"colour": "red"}, "colour", "Unrecognized request argument supplied: colour"),
        ({"temprature": 0}, "temprature", "supplied: temprature; did you mean temperature?"),
        ({"guided_choice": []}, "guided_choice", "guided_choice must be a list of non-empty strings"),
        (
            {"response_format": "json"},
            "response_format",
            'response_format should be an object such as {"type": "json_object"}, got \'json\'.',
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"type": "object"}}},
            "response_format.json_schema.type",
            "did you mean response_format.json_schema.schema, which holds the schema?",
        ),
    ],
)
def test_a_bad_field_is_named(http: httpx.Client, fields: dict[str, Any], param: str, message: str) -> None:
    response = http.post("/v1/completions", json={"prompt": "a", **fields})
    error = error_of(response)
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert message in error["message"]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("stricct", "; did you mean response_format.json_schema.strict?"),
        ("$schema", "; did you mean response_format.json_schema.schema, which holds the schema?"),
        ("colour", ""),
    ],
)
def test_an_unknown_name_beside_a_schema_is_taken_for_a_similar_one(http: httpx.Client, name: str, meant: str) -> None:
    wrapped = {"name": "a", "schema": {}, name: True}
    body = {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": wrapped}}
    message = error_of(http.post("/v1/completions", json=body))["message"]
    assert message == f"Unrecognized request argument supplied: response_format.json_schema.{name}{meant}"


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "The request has no body"),
        (b"{", "The body is not valid JSON"),
        (b"[]", "The body must be a JSON object."),
        (b"null", "The body must be a JSON object."),
        (b'{"prompt": "\xff"}', "The body is not valid UTF-8."),
        (b'{"prompt": ' + b"9" * 5000 + b"}", "a number has too many digits"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "The body is nested too deeply: "),
    ],
)
def test_a_body_that_is_not_a_json_object_is_refused(
    http: httpx.Client, route: str, content: bytes, message: str
) -> None:
    response = http.post(route, content=content, headers=JSON)
    assert response.status_code == 400
    assert message in error_of(response)["message"]


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", None])
def test_only_json_is_read(http: httpx.Client, content_type: str | None) -> None:
    headers = {"Content-Type": content_type} if content_type else {}
    response = http.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers)
    assert response.status_code == 415
    assert "Content-Type: application/json" in error_of(response)["message"]


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ("", 400), ("; charset=utf-8", 400), ('; charset="UTF-8"', 400), ("; charset=punycode", 415),
        ("; charset=utf-8; charset=punycode", 415), ("; charset*=utf-8''punycode", 415), ("; charset*0=puny", 415),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/files", "/v1/audio/transcriptions"])
def test_a_forms_texts_are_in_utf_8(http: httpx.Client, path: str, options: str, status: int) -> None:
    body = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x--\r\n'
    for kind in (f"multipart/form-data; boundary=x{options}", f"multipart/form-data{options}; boundary=x"):
        response = http.post(path, content=body, headers={"Content-Type": kind})
        assert response.status_code == status, response.text


def test_an_empty_conversation_is_said_to_be_too_short(http: httpx.Client) -> None:
    response = http.post("/v1/chat/completions", json={"messages": []})
    assert error_of(response)["message"] == "messages should have at least 1 item, got []."


@pytest.mark.parametrize(
    ("path", "fields", "unknown", "meant"),
    [
        ("responses", {"input": "a"}, "max_tokens", "max_output_tokens"),
        ("responses", {"input": "a"}, "response_format", "text.format"),
        ("responses", {"input": "a"}, "system", "instructions"),
        ("responses", {}, "messages", "input"),  # which is required
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "max_output_tokens",
         "max_completion_tokens"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "system",
         'messages, whose first may have the role "system"'),
        ("chat/completions", {}, "input", "messages"),
        ("chat/completions", {}, "prompt", "messages"),
        ("completions", {"prompt": "a"}, "max_output_tokens", "max_tokens"),
        ("completions", {}, "messages", "prompt"),
        ("embeddings", {}, "prompt", "input"),
        ("messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}, "stop", "stop_sequences"),
        ("messages", {"messages": [{"role": "user", "content": "a"}]}, "max_completion_tokens", "max_tokens"),
    ],
)  # fmt: skip
def test_fields_of_another_api_are_refused_with_those_of_this_one(
    http: httpx.Client, path: str, fields: Any, unknown: str, meant: str
) -> None:
    error = http.post(f"/v1/{path}", json={**fields, unknown: 1}).json()["error"]
    assert error["message"] == f"Unrecognized request argument supplied: {unknown}; did you mean {meant}?"


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("generate", {"prompt": []}, "prompt should not be empty, got []."),
        ("v1/chat/completions", {"messages": [{"role": "user", "content": 5}]},
         "messages[0].content should be a string or a list of parts, got 5."),
        ("v1/responses", {"input": []}, "input should not be empty, got []."),
        ("v1/responses", {"input": "a", "conversation": 5},
         "conversation should be a valid string or an object, got 5."),
        ("v1/responses", {"input": "a", "conversation": {}}, "conversation.id is required."),
        ("v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [{"text": "a"}]}]},
         "messages[0].content[0].type is required."),
        ("v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [
            {"type": "image", "source": {"type": "file"}}]}]}, "source.type should be 'base64' or 'url', got 'file'."),
    ],
)  # fmt: skip
def test_the_field_within_a_field_of_several_kinds_is_named(
    http: httpx.Client, path: str, fields: dict[str, Any], message: str
) -> None:
    answer = http.post(f"/{path}", json=fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].endswith(message)


def test_values_are_shown_as_json(http: httpx.Client) -> None:
    value = {"a": [None, True, 1.5, "x" * 99, 'say "é"']}
    message = error_of(http.post("/v1/chat/completions", json={"messages": value}))["message"]
    assert message.endswith('got {"a": [null, true, 1.5, "%s...", "say \\"é\\""]}.' % ("x" * 30))
    parts = [{"type": "input_text", "text": "a"}]
    body = {"messages": [{"role": "user", "content": parts}]}
    message = error_of(http.post("/v1/chat/completions", json=body))["message"]
    assert "has a part of type 'input_text', which belongs to Responses; here a text has the type 'text'" in message


def test_a_compressed_body_is_refused_as_that(http: httpx.Client) -> None:
    content = gzip.compress(b'{"prompt": "a"}')
    response = http.post("/v1/completions", content=content, headers={**JSON, "Content-Encoding": "gzip"})
    assert (response.status_code, response.headers["Accept-Encoding"]) == (415, "identity")
    assert error_of(response)["message"] == "The body must be sent as it is, got Content-Encoding: gzip."


def test_of_several_prompts_the_wrong_one_is_named(http: httpx.Client) -> None:
    prompts: list[object] = [[5], [5, 10**6], [5]]
    error = error_of(http.post("/v1/completions", json={"prompt": prompts, "max_tokens": 1}))
    assert error["message"].startswith("prompt[1]: ") and error["param"] == "prompt"
    error = error_of(http.post("/v1/completions", json={"prompt": [[5], [5]], "n": 10**3}))
    assert error["param"] == "n" and "prompt[" not in error["message"], "it is wrong for all of them"


@pytest.mark.parametrize("route", ROUTES)
def test_an_unknown_model_is_not_found(http: httpx.Client, route: str) -> None:
    body = (
        {"model": "gpt-9", "prompt": "a"}
        if "chat" not in route
        else {"model": "gpt-9", "messages": [{"role": "user", "content": "a"}]}
    )
    response = http.post(route, json=body)
    error = error_of(response)
    assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "'gpt-9'" in error["message"]
    nameless = http.post(route, json=body | {"model": "", "max_tokens": 1})
    assert nameless.json()["model"] == http.get("/v1/models").json()["data"][0]["id"]


def test_the_client_library_knows_the_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as not_found:
        client.completions.create(model="gpt-9", prompt="a")
    assert not_found.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="alias", prompt="a", n=0)
    assert bad.value.param == "n"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("POST", "/nothing", 404),
        ("POST", "/", 405),
        ("GET", "/v1/completions", 405),
        ("PUT", "/v1/models", 405),
    ],
)
def test_unknown_routes_and_methods_have_the_error_body_too(
    http: httpx.Client, method: str, path: str, status: int
) -> None:
    response = http.request(method, path, headers=JSON)
    assert response.status_code == status
    assert path in error_of(response)["message"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/v1/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("/v1/embedding", "did you mean /v1/embeddings?"),
        ("/api/pull", "/api/pull is for octavo gateway"),
        ("/api/create", "/api/create is not built; docs/gateway.md lists"),
    ],
)
def test_a_path_that_is_nearly_right_is_answered_with_the_right_one(
    http: httpx.Client, path: str, message: str
) -> None:
    response = http.post(path, json={})
    assert response.status_code == 404
    assert message in str(response.json()["error"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_dead_engine_is_503_with_retry_after(http: httpx.Client, engine: FakeEngine, stream: bool) -> None:
    engine.fatal_error = EngineDeadError("the engine core has ended.")
    response = http.post("/v1/completions", json={"prompt": "a", "stream": stream})
    error = error_of(response)
    assert (response.status_code, error["type"], error["code"]) == (503, "server_error", "engine_dead")
    assert int(response.headers["retry-after"]) > 0


def test_a_request_that_is_lost_with_its_engine_is_500(http: httpx.Client, engine: FakeEngine) -> None:
    engine.fails_after = (3, EngineDeadError("the engine core has ended."))
    response = http.post("/v1/completions", json={"prompt": ["a", "b"]})
    assert (response.status_code, error_of(response)["message"]) == (500, "the engine core has ended.")


@pytest.mark.parametrize("route", ROUTES)
def test_an_error_in_mid_stream_is_an_event_and_the_end(http: httpx.Client, engine: FakeEngine, route: str) -> None:
    engine.fails_after = (3, EngineDeadError("the engine core has ended."))
    body = {"prompt": "a"} if "chat" not in route else {"messages": [{"role": "user", "content": "a"}]}
    response = http.post(route, json={**body, "stream": True})
    *_, last, rest = response.text.split("\n\n")
    assert rest == ""
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the engine core has ended."
    assert "[DONE]" not in response.text


def test_the_client_library_raises_an_error_in_mid_stream(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.fails_after = (3, EngineDeadError("the engine core has ended."))
    stream = client.completions.create(model="alias", prompt="a", stream=True)
    assert [next(stream).choices[0].text for _ in range(3)] == ["H", "e", "l"]
    with pytest.raises(openai.APIError, match="the engine core has ended"):
        next(stream)


@pytest.mark.parametrize("stream", [False, True])
def test_what_goes_wrong_inside_stays_inside(
    http: httpx.Client, engine: FakeEngine, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    engine.fails_after = (0, ZeroDivisionError("secret"))
    response = http.post("/v1/completions", json={"prompt": "a", "stream": stream})
    assert "Internal error." in response.text
    assert "secret" not in response.text
    assert response.status_code == (200 if stream else 500)
    wait_until(lambda: [record for record in caplog.records if record.exc_info])
    assert sum(bool(record.exc_info) for record in caplog.records) == 1, "the operator finds the traceback, once"


def hostile_bodies() -> list[bytes]:
    """Each value of this list in the place of each field, and some more."""
    values: list[Any] = [
        None,
        True,
        -1,
        0,
        2**31,
        2**63,
        2**64,
        10**400,
        -(10**400),
        1e308,
        float("nan"),
        float("inf"),
        -0.0,
        "",
        "x",
        "\ud800",
        "\x00",
        "🦜" * 50,
        [],
        [[]],
        [None],
        [""],
        ["\udfff"],
        [2**70],
        [[2**70]],
        {},
        {"": {}},
        {"a": []},
        {"9" * 30: 1},
        {"\ud800": "\ud800"},
        [{"role": "user"}],
        [{"role": "user", "content": "\ud800"}],
        [{"role": "user", "content": [{"type": []}]}],
        [{"role": [], "content": {}}],
    ]
    fields = [
        "prompt",
        "messages",
        "model",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "n",
        "best_of",
        "stop",
        "stop_token_ids",
        "bad_words",
        "seed",
        "logit_bias",
        "logprobs",
        "top_logprobs",
        "prompt_logprobs",
        "min_tokens",
        "allowed_token_ids",
        "truncate_prompt_tokens",
        "stream",
        "stream_options",
        "echo",
        "priority",
        "request_id",
        "cache_salt",
        "user",
        "metadata",
        "chat_template_kwargs",
        "tools",
        "response_format",
        "\ud800",
        "presence_penalty",
        "repetition_penalty",
        "min_p",
    ]
    base: dict[str, Any] = {"max_tokens": 2, "min_tokens": 0}
    bodies = []
    for field in fields:
        for value in values:
            for prompt in ({"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}):
                bodies.append(json.dumps({**base, **prompt, field: value}).encode())
    deep = b'{"metadata":' * 500 + b"1" + b"}" * 500
    return [*bodies, deep, b'{"messages": [' + b'{"content":' * 400 + b"1" + b"}" * 400 + b"]}"]


def test_no_body_makes_the_server_fail(http: httpx.Client, engine: FakeEngine) -> None:
    for body in hostile_bodies():
        route = ROUTES[b'"messages"' in body]
        response = http.post(route, content=body, headers=JSON)
        assert response.status_code in (200, 400, 404), (body, response.text)
        if response.status_code != 200:
            assert len(error_of(response)["message"]) < 1000
    assert not engine.active


def test_a_header_that_is_no_id_is_refused(http: httpx.Client) -> None:
    for header in (b"a b", b"\xff\xfe", b"x" * 300):
        response = http.post("/v1/completions", json={"prompt": "a"}, headers={b"X-Request-Id": header})
        assert response.status_code == 400
        assert error_of(response)["param"] == "request_id"


def test_a_template_without_an_end_fails_its_chats_and_not_the_start(
    tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, num_runs = FakeEngine(tiny_tokenizer), 0
    engine.tokenizer.chat_template = (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{# of this test #}"
    )

    def counted() -> Any:
        nonlocal num_runs
        num_runs += 1
        return limited_lines()

    monkeypatch.setattr("octavo.entrypoints.chat.template_traits.limited_lines", counted)
    with (
        serving(engine, disable_log_requests=True) as address,
        httpx.Client(base_url=address, timeout=within(60)) as http,
    ):
        for _ in range(2):
            response = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
            assert response.status_code == 400
            assert "lines for a small conversation" in error_of(response)["message"]
        assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 200
    assert num_runs == 1
