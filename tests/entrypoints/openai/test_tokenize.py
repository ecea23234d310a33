"""POST /tokenize and /detokenize, in vLLM's form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.entrypoints.fake_engine import MAX_MODEL_LEN, MODEL, FakeEngine, serving
from tests.entrypoints.http.test_errors import error_of


def test_a_prompt_becomes_token_ids_with_their_number(http: httpx.Client, engine: FakeEngine) -> None:
    response = http.post("/tokenize", json={"model": MODEL, "prompt": "Grüße"})
    ids = engine.inputs.encode("Grüße")
    assert response.json() == {"count": 7, "max_model_len": MAX_MODEL_LEN, "tokens": ids, "token_strs": None}


def test_the_tokens_names_come_when_asked(http: httpx.Client, engine: FakeEngine) -> None:
    answer = http.post("/tokenize", json={"prompt": "a b", "return_token_strs": True}).json()
    assert answer["token_strs"] == ["a", "Ġ", "b"]
    assert http.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []


def test_a_conversation_passes_the_chat_template(http: httpx.Client, engine: FakeEngine) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}

    def text(**fields: Any) -> str:
        tokens = http.post("/tokenize", json={**body, **fields}).json()["tokens"]
        return str(http.post("/detokenize", json={"tokens": tokens}).json()["prompt"])

    assert text() == "user: Hi\nassistant:"
    assert text(add_generation_prompt=False) == "user: Hi\n"
    assert text(chat_template_kwargs={"shout": True}) == "user: Hi\nLOUD assistant:"


def test_chat_and_tokenize_agree_on_the_prompt(http: httpx.Client, engine: FakeEngine) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    http.post("/v1/chat/completions", json=body)
    assert http.post("/tokenize", json=body).json()["tokens"] == engine.seen[0][0]
    tools = [{"type": "function", "function": {"name": "greet", "description": "Says hello."}}]
    http.post("/v1/chat/completions", json={**body, "tools": tools, "tool_choice": "required"})
    assert http.post("/tokenize", json={**body, "tools": tools}).json()["tokens"] == engine.seen[1][0]
    assert "Says hello." in engine.tokenizer.decode(engine.seen[1][0])


def test_chat_and_tokenize_agree_on_the_prompt_of_calls_in_a_named_format(engine: FakeEngine) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "greet", "arguments": "{}"}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    body = {
        "messages": [{"role": "user", "content": "Hi"}, answer, {"role": "tool", "tool_call_id": "a", "content": "."}]
    }
    with serving(engine, tool_call_parser="kimi_k2") as address, httpx.Client(base_url=address) as http:
        http.post("/v1/chat/completions", json=body)
        assert http.post("/tokenize", json=body).json()["tokens"] == engine.seen[-1][0]
    assert "functions.greet:0" in engine.tokenizer.decode(engine.seen[-1][0])


def test_detokenize_gives_the_text_back(http: httpx.Client, engine: FakeEngine) -> None:
    for text in ("Grüße, 世界 👋🏽!", "", "a </s> b", "x" * 20_000):
        tokens = engine.inputs.encode(text)
        assert http.post("/detokenize", json={"model": MODEL, "tokens": tokens}).json() == {"prompt": text}


@pytest.mark.parametrize(
    ("route", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, 400, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, 400, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, 400, "add_generation_prompt"),
        ("/tokenize", {"prompt": "a", "colour": 1}, 400, "colour"),
        ("/tokenize", {"prompt": "a", "model": "gpt-9"}, 404, "model"),
        ("/tokenize", {"messages": [{"role": "user", "content": "refuse me"}]}, 400, "messages"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [259]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [2**31]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": "1"}, 400, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "gpt-9"}, 404, "model"),
    ],
)
def test_what_cannot_be_read_is_refused(
    http: httpx.Client, route: str, body: dict[str, Any], status: int, param: str
) -> None:
    response = http.post(route, content=json.dumps(body).encode(), headers={"Content-Type": "application/json"})
    assert (response.status_code, error_of(response)["param"]) == (status, param)


def test_the_tokenizer_is_described_where_that_is_wanted(http: httpx.Client, engine: FakeEngine) -> None:
    refused = http.get("/tokenizer_info")
    assert refused.status_code == 404 and "--enable-tokenizer-info-endpoint" in error_of(refused)["message"]
    with serving(engine, enable_tokenizer_info_endpoint=True) as url:
        found = httpx.get(url + "/tokenizer_info").json()
    folder = Path(engine.config.model.checkpoint.tokenizer_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert found == {**config, "chat_template": engine.tokenizer.chat_template}
    assert found["tokenizer_class"] and found["chat_template"]


def test_long_lists_of_tokens_are_decoded_alike(engine: FakeEngine) -> None:
    ids = engine.inputs.encode("Hello, wörld! 🙂 " * 400, False)
    assert len(ids) > 2048
    assert engine.tokenizer.decode(ids) == "Hello, wörld! 🙂 " * 400
    assert engine.tokenizer.decode(ids) == engine.tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)
