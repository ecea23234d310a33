"""Ollama's routes at a server of one model, asked by Ollama's own Python client. tests/gateway/test_ollama.py has what
the two share."""

from __future__ import annotations

from typing import Any

import httpx
import ollama
import pytest

from octavo.errors import RequestError
from octavo.ollama import TRUNCATION_HEADER
from octavo.ollama.to_openai import translate_value
from tests.entrypoints.fake_engine import MODEL, FakeEngine


@pytest.fixture
def client(address: str, engine: FakeEngine) -> ollama.Client:
    return ollama.Client(address)


def test_answers_are_those_of_the_openai_routes(client: ollama.Client, engine: FakeEngine) -> None:
    engine.answer = 'It\'s "so"\n'
    messages = [{"role": "user", "content": "Hi"}]
    options = {"seed": 3, "num_predict": 4, "top_k": 5}
    parts = list(client.chat(MODEL, messages, stream=True, options=options, logprobs=True, top_logprobs=1))
    assert "".join(part.message.content or "" for part in parts) == "It's"
    assert [part.done_reason for part in parts if part.done] == ["length"]
    logprobs = [one for part in parts for one in part.logprobs or ()]
    assert len(logprobs) == 4 and all(one.top_logprobs for one in logprobs)
    params = engine.seen[-1][1]
    assert (params.seed, params.max_tokens, params.top_k) == (3, 4, 5)
    whole = client.generate(MODEL, "Hi", raw=True, logprobs=True, top_logprobs=1)
    assert whole.response == engine.answer and whole.done_reason == "stop" and whole.logprobs
    assert (whole.prompt_eval_count, whole.eval_count) == (len(engine.seen[-1][0]), len(engine.answer) + 1)
    assert engine.inputs.tokenizer.decode(engine.seen[-1][0]).endswith("Hi"), "without the chat template"
    chat_tokens = engine.inputs.encode("user: Hi\nassistant:", add_special_tokens=False)
    client.generate(MODEL, "Hi")
    assert engine.seen[-1][0][-len(chat_tokens) :] == chat_tokens


def test_the_model_is_listed_shown_and_stays(client: ollama.Client, http: httpx.Client) -> None:
    assert [one.model for one in client.list().models] == [MODEL, "alias"]
    (running,) = client.ps().models
    assert running.name == MODEL and running.context_length == 512 and running.expires_at is not None
    shown = client.show("alias")
    assert shown.capabilities == ["completion", "tools"] and "m.role" in (shown.template or "")
    assert client.generate("alias", keep_alive="1h").done_reason == "load"
    with pytest.raises(ollama.ResponseError, match="octavo gateway"):
        client.generate(MODEL, keep_alive=0)
    for ask in (lambda: client.show("other"), lambda: client.chat("other"), lambda: client.pull("other")):
        with pytest.raises(ollama.ResponseError) as caught:
            ask()
        assert caught.value.status_code == 404
    refused = http.post("/api/chat", json={"model": MODEL, "messages": [{"role": "user", "content": "refuse me"}]})
    assert refused.status_code == 400 and isinstance(refused.json()["error"], str)


def test_a_broken_stream_ends_with_an_error(client: ollama.Client, engine: FakeEngine) -> None:
    engine.fails_after = 2, RuntimeError("no")
    parts = client.generate(MODEL, "Hi", stream=True)
    assert next(parts).response == "H" and next(parts).response == "e"
    with pytest.raises(ollama.ResponseError, match="Internal error"):
        next(parts)


def test_a_suffix_needs_tokens_for_it(
    client: ollama.Client, http: httpx.Client, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ollama.ResponseError, match="not trained to fill in"):
        client.generate(MODEL, "def f(", suffix="return x")
    # One symbol of the tokenizer stands for each token.
    for marks, prompt in ((("P", "S", "M"), "Pdef f(Sreturn xM"), (("S", "P"), "Sreturn xPdef f(")):
        monkeypatch.setattr("octavo.entrypoints.openai.fill_in_middle._MARKS", (("no", "such", "token"), marks))
        monkeypatch.setattr("octavo.entrypoints.openai.fill_in_middle._SUFFIX_FIRST", ("S", "P"))
        if len(marks) == 2:
            monkeypatch.setattr("octavo.entrypoints.openai.fill_in_middle._MARKS", ())
        client.generate(MODEL, "def f(", suffix="return x")
        assert engine.inputs.tokenizer.decode(engine.seen[-1][0], skip_special_tokens=True) == prompt
    body = {"model": MODEL, "prompt": [5, 6], "suffix": "x"}
    assert "text" in http.post("/v1/completions", json=body).json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"model": "m", "options": ' + b"[" * 2000 + b"]" * 2000 + b"}", "--max-json-depth"),
        (b'{"model": "m", "options": [' + b"[]," * 1_000_000, "--max-json-nodes"),
        (b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}', "surrogate"),
        (b'{"model": "m", "\\ud800": 1}', "surrogate"),
        (b'{"model": 5}', "model should be a string, got an integer."),
    ],
)
def test_bodies_have_the_limits_of_other_routes(http: httpx.Client, body: bytes, said: str) -> None:
    answer = http.post("/api/chat", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert said in answer.json()["error"]


@pytest.mark.parametrize("content_type", [None, "application/x-www-form-urlencoded"])
def test_curl_needs_no_content_type_and_pages_in_a_browser_do(http: httpx.Client, content_type: str | None) -> None:
    headers = {"Content-Type": content_type} if content_type else {}
    body = b'{"model": "org/fake", "prompt": "Hi"}'
    assert http.post("/api/generate", content=body, headers=headers).status_code == 200
    refused = http.post("/api/generate", content=body, headers={**headers, "Origin": "http://example.com"})
    assert refused.status_code == 415 and "application/json" in refused.json()["error"]


def test_the_first_request_of_ollamas_command_line_is_answered(http: httpx.Client) -> None:
    assert http.get("/").text == "Ollama is running"
    assert http.head("/").status_code == 200
    assert http.get("/", headers={"Accept": "text/html,*/*"}).status_code == 404


def test_the_oldest_messages_make_room(http: httpx.Client, engine: FakeEngine) -> None:
    turns: Any = [{"role": "system", "content": "Be brief."}]
    for i in range(9):
        turns += [{"role": "user", "content": f"{i}" * 60}, {"role": "assistant", "content": "Yes."}]
    turns.append({"role": "user", "content": "Last?"})
    asked = {"model": MODEL, "messages": turns, "stream": False}
    assert http.post("/api/chat", json=asked).json()["message"]["content"] == "Hello there"
    kept = engine.inputs.tokenizer.decode(engine.seen[-1][0])
    assert "Be brief." in kept and "Last?" in kept and "333" not in kept and "444" in kept
    streamed = http.post("/api/chat", json=asked | {"stream": True}).text
    assert streamed.count("\n") > 5 and '"eval_count":12' in streamed
    refused = http.post("/api/chat", json=asked | {"truncate": False})
    assert refused.status_code == 400 and refused.json()["error"].endswith("together; shorten it.")
    embedded = http.post("/api/embed", json={"model": MODEL, "input": "x" * 600, "truncate": False})
    assert "truncate" not in embedded.json()["error"]
    engine.answer = "x" * 600
    for body in ({"messages": turns[-1:]}, {"prompt": "Hi"}, {"prompt": "Hi", "raw": True}):
        path = "/api/chat" if "messages" in body else "/api/generate"
        for options in ({"num_predict": 9000}, {}):
            asked = {"model": MODEL, "stream": False, "options": options, **body}
            answer = http.post(path, json=asked).json()
            assert answer["done_reason"] == "length" and answer["prompt_eval_count"] + answer["eval_count"] == 512


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize(("num_predict", "num_kept"), [(-1, 256), (9000, 256), (12, 500)])
def test_a_prompt_that_is_too_long_alone_keeps_its_end(
    http: httpx.Client, engine: FakeEngine, raw: bool, num_predict: int, num_kept: int
) -> None:
    text = "a" * 600 + "The end."
    body = {"model": MODEL, "stream": False, "options": {"num_predict": num_predict}}
    asked = body | ({"prompt": text, "raw": True} if raw else {"prompt": text, "system": "Be brief."})
    answer = http.post("/api/generate", json=asked).json()
    assert answer["response"] == "Hello there" and answer["prompt_eval_count"] == num_kept
    end = engine.inputs.tokenizer.decode(engine.seen[-1][0])
    assert end.endswith("The end." if raw else "The end.\nassistant:") and end.startswith("a")
    engine.seen.clear()
    for refused in (asked | {"truncate": False}, asked | {"suffix": "x"} if raw else asked | {"images": ["iVBOR"]}):
        assert http.post("/api/generate", json=refused).status_code == 400
    assert not engine.seen


def test_of_several_prompts_only_those_that_are_too_long_are_cut(http: httpx.Client, engine: FakeEngine) -> None:
    body = {"model": MODEL, "prompt": ["a" * 600, "b" * 300], "max_tokens": 300}
    assert http.post("/v1/completions", json=body, headers={TRUNCATION_HEADER: "auto"}).status_code == 200
    assert [len(token_ids) for token_ids, *_ in engine.seen[-2:]] == [256, 300]


def test_a_model_that_cannot_think_is_not_asked_to(http: httpx.Client) -> None:
    asked = {"model": "alias:latest", "prompt": "Hi", "stream": False}
    for think in (True, "high"):
        refused = http.post("/api/generate", json=asked | {"think": think})
        assert refused.status_code == 400
        assert refused.json()["error"] == '"alias:latest" does not support thinking'
    assert http.post("/api/generate", json=asked | {"think": False}).status_code == 200


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"num_predict": 3.0}, {"max_tokens": 3}),
        ({"num_predict": 0}, {}),
        ({"num_predict": -2}, {}),
        ({"num_predict": 10**400}, {"max_tokens": 10**400}),
        ({"top_p": 0.0, "top_k": 40}, {"top_k": 1}),
        ({"repeat_penalty": 0}, {}),
        ({"stop": ["\n", ""]}, {"stop": ["\n"]}),
        ({"stop": ""}, {"stop": []}),
        ({"seed": None}, {}),
    ],
)
def test_options_become_fields(options: dict[str, Any], fields: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    plain, body = (translate_value("/api/chat", {**asked, "options": one}).body for one in ({}, options))
    assert body == plain | fields


def test_a_call_without_text_has_no_content_and_a_tool_may_show_pictures() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    result = {"role": "tool", "content": "Seen.", "images": ["iVBOR"]}
    asked, shown = translate_value("/api/chat", {"model": "m", "messages": [call, result]}).body["messages"]
    assert asked["content"] is None
    thought = {"role": "assistant", "content": "", "thinking": "So"}
    assert translate_value("/api/chat", {"model": "m", "messages": [thought]}).body["messages"][0]["content"] is None
    assert [part["type"] for part in shown["content"]] == ["image_url", "text"]


@pytest.mark.parametrize("value", [True, 1.5, float("inf"), float("nan"), "3"])
def test_num_predict_is_a_whole_number(value: object) -> None:
    with pytest.raises(RequestError, match=r"options\.num_predict"):
        translate_value("/api/generate", {"model": "m", "prompt": "Hi", "options": {"num_predict": value}})


def test_what_a_tool_does_not_have_is_null(http: httpx.Client) -> None:
    function = {"name": "f", "description": None, "parameters": {"type": "object", "$defs": None, "properties": {}}}
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": False}
    tools = [{"type": "function", "items": None, "function": function}]
    assert http.post("/api/chat", json=body | {"tools": tools}).status_code == 200


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"top_p": 2}, "options.top_p must be"),
        ({"temperature": -1}, "options.temperature must be"),
        ({"stop": [5]}, "options.stop"),
        ({"num_predict": 10**400}, "options.num_predict should be"),
        ({"repeat_penalty": -1}, "options.repeat_penalty must be"),
    ],
)
def test_errors_name_ollamas_fields(http: httpx.Client, options: dict[str, Any], said: str) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "options": options}
    assert http.post("/api/chat", json=body).json()["error"].startswith(said)
