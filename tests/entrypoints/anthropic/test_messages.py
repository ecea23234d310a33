"""The Messages API over an engine that says what it is told, through the real `anthropic` client and as plain HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from pydantic import TypeAdapter

from octavo.errors import RequestError
from tests.entrypoints.fake_engine import MODEL, FakeEngine, serving
from tests.waiting import within

HELLO: Any = [{"role": "user", "content": "Hi"}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
CALL_BLOCK = {"type": "tool_use", "id": "a", "name": "b", "input": {}}
EVENTS: TypeAdapter[Any] = TypeAdapter(anthropic.types.RawMessageStreamEvent)


@pytest.fixture(scope="module")
def agent_address(tiny_tokenizer: Path) -> Iterator[tuple[str, FakeEngine]]:
    """A server that reads reasoning and calls."""
    engine = FakeEngine(tiny_tokenizer, max_model_len=4096)
    flags = {"reasoning_parser": "qwen3", "enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    with serving(engine, disable_log_requests=True, api_key=["secret"], **flags) as url:
        yield url, engine


@pytest.fixture
def agent(agent_address: tuple[str, FakeEngine]) -> Iterator[tuple[anthropic.Anthropic, FakeEngine]]:
    url, engine = agent_address
    engine.reset()
    with anthropic.Anthropic(base_url=url, api_key="secret", max_retries=0, timeout=within(60)) as client:
        yield client, engine


def read_events(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    """A stream's events, each of a type that the package knows."""
    body = {"max_tokens": 200, "messages": HELLO, "stream": True, **fields}
    text = http.post("/v1/messages", json=body, headers={"x-api-key": "secret"}).text
    events = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] not in ("ping", "error"):
            EVENTS.validate_python(event)
        events.append(event)
    return events


def test_a_message_is_answered(agent: tuple[anthropic.Anthropic, FakeEngine]) -> None:
    client, engine = agent
    message = client.messages.create(
        model=MODEL,
        max_tokens=50,
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "c"},
        ],
        extra_body={"temperature": 0.5},  # the package of late has no argument for it
        metadata={"user_id": "me"},
    )
    (block,) = message.content
    assert isinstance(block, anthropic.types.TextBlock) and block.text == "Hello there"
    assert (message.role, message.model, message.stop_reason) == ("assistant", MODEL, "end_turn")
    prompt, params, _ = engine.seen[0]
    assert engine.tokenizer.decode(prompt) == "system: Be brief.\nuser: a\nb\nc\nassistant:"
    assert params.temperature == 0.5
    usage = message.usage
    assert usage.input_tokens == len(prompt) - 3 and usage.cache_read_input_tokens == 3 and usage.output_tokens == 12
    assert message._request_id


def test_texts_of_a_turn_are_joined_as_the_chat_template_joins_them(tiny_tokenizer: Path) -> None:
    """As in chats: the prompt of a conversation is the same in every API."""
    engine = FakeEngine(tiny_tokenizer)
    with serving(engine, disable_log_requests=True) as url, httpx.Client(base_url=url, timeout=within(60)) as http:
        turn = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
        items = {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}
        each = "{% for p in m.content %}[{{ p.text }}]{% endfor %}"
        join = f"{{% if m.content is string %}}{{{{ m.content }}}}{{% else %}}{each}{{% endif %}}"
        for template, prompt in (("{{ m.content }}", "a\nb"), (join, "[a][b]")):
            engine.tokenizer.chat_template = f"{{% for m in messages %}}{template}{{% endfor %}}"
            engine.seen.clear()
            assert http.post("/v1/chat/completions", json={"messages": [turn], "max_tokens": 9}).status_code == 200
            assert http.post("/v1/messages", json={"messages": [turn], "max_tokens": 9}).status_code == 200
            assert http.post("/v1/responses", json={"input": [items], "max_output_tokens": 9}).status_code == 200
            assert [engine.tokenizer.decode(seen[0]) for seen in engine.seen] == [prompt] * 3


def test_thinking_text_and_calls_are_blocks_in_order(
    agent: tuple[anthropic.Anthropic, FakeEngine], agent_address: tuple[str, FakeEngine]
) -> None:
    client, engine = agent
    engine.answer = f"<think>\nHm, so.\n</think>\n\nLet me look.\n{CALL}\n{CALL}"
    asked: Any = {"model": MODEL, "max_tokens": 400, "messages": HELLO, "tools": [WEATHER]}
    with client.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    whole = client.messages.create(**asked)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert message.stop_reason == "tool_use"
    thinking, text, call, _ = message.content
    assert isinstance(thinking, anthropic.types.ThinkingBlock) and thinking.thinking == "Hm, so." and thinking.signature
    assert isinstance(text, anthropic.types.TextBlock) and text.text.strip() == "Let me look."
    assert isinstance(call, anthropic.types.ToolUseBlock) and call.input == {"city": "Paris"}
    for ours, other in zip(message.content, whole.content, strict=True):
        assert ours.model_dump(exclude={"id"}) == other.model_dump(exclude={"id"})
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"

    # What came back is sent again, with results.
    results: Any = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "Rain", "is_error": i == 1}
        for i, block in enumerate(message.content[2:])
    ]
    engine.seen.clear()
    engine.answer = "It rains."
    again = client.messages.create(
        model=MODEL, max_tokens=50, tools=[WEATHER],
        messages=[*HELLO, {"role": "assistant", "content": message.content}, {"role": "user", "content": results}],
    )  # fmt: skip
    assert again.content[0].text == "It rains."  # type: ignore[union-attr]
    prompt = engine.tokenizer.decode(engine.seen[0][0])
    assert '"arguments": {"city": "Paris"}' in prompt and "Rain" in prompt and "Error: Rain" in prompt


def test_documents_and_search_results_are_texts_between_marks(agent: tuple[anthropic.Anthropic, FakeEngine]) -> None:
    client, engine = agent
    text: dict[str, Any] = {"type": "text", "text": "Lakes rest."}
    source: dict[str, Any] = {"type": "text", "media_type": "text/plain", "data": "Rivers flow."}
    document = {"type": "document", "title": "Water", "context": "A draft", "source": source}
    found = {"type": "search_result", "source": "https://a.example", "title": "Lakes", "content": [text, text]}
    shown = (
        "<document>\n<title>Water</title>\n<context>A draft</context>\nRivers flow.\n</document>",
        "<search_result>\n<source>https://a.example</source>\n<title>Lakes</title>\n"
        "Lakes rest.\nLakes rest.\n</search_result>",
    )
    call = {"type": "tool_use", "id": "c", "name": "get_weather", "input": {}}
    blocks = {"type": "document", "source": {"type": "content", "content": [text]}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [found, blocks]}
    asked: Any = {"model": MODEL, "max_tokens": 5}
    for messages, expected in (
        ([{"role": "user", "content": [document, found, {"type": "text", "text": "Sum up."}]}], shown),
        (
            [*HELLO, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}],
            (shown[1], "<document>\nLakes rest.\n</document>"),
        ),
    ):
        engine.seen.clear()
        client.messages.create(**asked, messages=messages)
        assert "\n".join(expected) in engine.tokenizer.decode(engine.seen[0][0])
    pdf = {"type": "base64", "media_type": "application/pdf", "data": "JVBE"}
    for wrong, match in (
        ({**document, "source": pdf}, "source.type should be 'text' or 'content', got 'base64'"),
        ({**document, "citations": {"enabled": True}}, "citations.enabled"),
        ({**found, "content": []}, "content should have at least 1"),
    ):
        with pytest.raises(anthropic.BadRequestError, match=match):
            client.messages.create(**asked, messages=[{"role": "user", "content": [wrong]}])


def test_the_model_sees_examples_of_a_tools_input(tiny_tokenizer: Path) -> None:
    engine = FakeEngine(tiny_tokenizer, max_model_len=4096)
    tool = {**WEATHER, "input_examples": [{"city": "Zermatt"}, {"city": "Ürgüp"}]}
    with serving(engine, disable_log_requests=True) as url:
        assert httpx.post(url + "/v1/messages", json={"max_tokens": 5, "messages": HELLO, "tools": [tool]}).is_success
    asked = engine.tokenizer.decode(engine.seen[0][0])
    assert "Examples of its input:" in asked and "Zermatt" in asked and "Ürgüp" in asked


def test_tools_that_run_at_anthropic_are_left_out_with_unknown_fields(tiny_tokenizer: Path) -> None:
    engine = FakeEngine(tiny_tokenizer, max_model_len=4096)
    search = {"type": "web_search_20250305", "name": "web_search"}
    body = {"max_tokens": 5, "messages": HELLO, "tools": [search, WEATHER]}
    with serving(engine, disable_log_requests=True, unknown_fields="ignore") as url:
        assert httpx.post(url + "/v1/messages", json=body).status_code == 200
    asked = engine.tokenizer.decode(engine.seen[0][0])
    assert "get_weather" in asked and "web_search" not in asked


def test_events_come_in_the_order_of_the_api(agent_address: tuple[str, FakeEngine]) -> None:
    url, engine = agent_address
    engine.reset()
    engine.answer = f"<think>Hm.</think>Yes.{CALL}"
    with httpx.Client(base_url=url) as http:
        events = read_events(http, tools=[WEATHER])
        names = [event["type"] for event in events]
        assert names[0] == "message_start" and names[-2:] == ["message_delta", "message_stop"]
        assert events[0]["message"]["content"] == [] and events[0]["message"]["stop_reason"] is None
        index = -1
        is_open = False
        for event in events[1:-2]:
            if event["type"] == "content_block_start":
                assert not is_open and event["index"] == index + 1
                index, is_open = index + 1, True
                continue
            assert is_open and event["index"] == index
            is_open = event["type"] != "content_block_stop"
        assert index == 2 and not is_open
        kinds = [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"]
        assert list(dict.fromkeys(kinds)) == ["thinking_delta", "signature_delta", "text_delta", "input_json_delta"]

        hidden = read_events(http, thinking={"type": "adaptive", "display": "omitted"})
        kinds = [event["delta"]["type"] for event in hidden if event["type"] == "content_block_delta"]
        assert "thinking_delta" not in kinds and kinds[0] == "signature_delta"
        off = read_events(http, thinking={"type": "disabled"})
        assert not any("thinking" in json.dumps(event) for event in off[1:-2])
        for shown in (events, hidden, off):
            counts = [one["usage"]["output_tokens_details"] for one in (shown[0]["message"], shown[-2])]
            assert counts == [{"thinking_tokens": 0}, {"thinking_tokens": len("<think>Hm.</think>")}]

        engine.fails_after = (3, RuntimeError("boom"))
        failed = read_events(http)
        assert failed[-1].pop("request_id").startswith("req_")
        assert failed[-1] == {"type": "error", "error": {"type": "api_error", "message": "Internal error."}}


def test_what_a_coding_agent_sends_is_taken(http: httpx.Client, engine: FakeEngine) -> None:
    mark = {"type": "ephemeral", "ttl": "1h"}
    thought = {"type": "thinking", "thinking": "Old.", "signature": "x"}
    answer = http.post(
        "/v1/messages?beta=true",
        headers={"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219,interleaved-thinking"},
        json={
            "model": MODEL,
            "max_tokens": 32000,
            "temperature": 1,
            "system": [{"type": "text", "text": "You are an agent.", "cache_control": mark}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "<system-reminder>", "cache_control": mark}]},
                {"role": "assistant", "content": [thought, {"type": "text", "text": "Yes."}]},
                {"role": "user", "content": "Go on."},
            ],
            "tools": [],
            "metadata": {"user_id": "user_1_account__session_2"},
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"},  # which the template knows nothing of
        },
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["content"][0]["text"] == "Hello there"


def test_deferred_tools_are_seen_once_they_are_named(agent_address: tuple[str, FakeEngine]) -> None:
    url, engine = agent_address
    engine.reset()
    http = httpx.Client(base_url=url, headers={"x-api-key": "secret"}, timeout=within(60))
    read = {**WEATHER, "name": "read", "defer_loading": True}
    call = {"type": "tool_use", "id": "a", "name": "get_weather", "input": {"city": "read"}}
    found = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "tool_reference", "tool_name": "read"}]}
    searched = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [found]}]
    named = {"tool": {"type": "tool_reference", "name": "read"}}
    added = [{"role": "system", "content": [{"type": "text", "text": "More."}, {"type": "tool_addition", **named}]}]
    removed = [{"role": "system", "content": [{"type": "tool_removal", **named}]}]
    for turns, is_seen in (([], False), (searched, True), (added, True), ([*added, *removed], False)):
        messages = [*HELLO, *turns, *HELLO]
        answer = http.post("/v1/messages", json={"messages": messages, "max_tokens": 9, "tools": [WEATHER, read]})
        assert answer.status_code == 200, answer.text
        prompt = str(engine.tokenizer.decode(engine.seen[-1][0]))
        assert ('"name": "read"' in prompt) is is_seen and '"name": "get_weather"' in prompt
        assert ("The tool read can be called." in prompt) is (turns is searched)
        assert "tool_addition" not in prompt
    alone = {"messages": HELLO, "max_tokens": 9, "tools": [read], "tool_choice": {"type": "auto"}}
    assert http.post("/v1/messages", json=alone).status_code == 200
    for clear_at, is_seen in (("never", True), (None, True), ("next_user_message", False)):
        said = {"role": "system", "content": "Be brief.", "clear_at": clear_at}
        http.post("/v1/messages", json={"messages": [*HELLO, said, *HELLO], "max_tokens": 9})
        assert ("Be brief." in engine.tokenizer.decode(engine.seen[-1][0])) is is_seen
        http.post("/v1/messages", json={"messages": [*HELLO, said], "max_tokens": 9})
        assert "Be brief." in engine.tokenizer.decode(engine.seen[-1][0])


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({"max_tokens": 3}, "max_tokens", None),
        ({"max_tokens": 50, "stop_sequences": ["there"]}, "stop_sequence", "there"),
        ({"max_tokens": 50}, "end_turn", None),
        ({"max_tokens": 9000}, "model_context_window_exceeded", None),
    ],
)
def test_stop_reasons(http: httpx.Client, engine: FakeEngine, fields: Any, reason: str, sequence: str | None) -> None:
    if fields["max_tokens"] == 9000:
        engine.answer = "x" * 600
    message = http.post("/v1/messages", json={"messages": HELLO, **fields}).json()
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


def test_an_answer_goes_on_with_the_last_message(http: httpx.Client, engine: FakeEngine) -> None:
    engine.answer = "mat."
    messages = [*HELLO, {"role": "assistant", "content": "The cat sat on the "}]
    message = http.post("/v1/messages", json={"messages": messages, "max_tokens": 9}).json()
    assert message["content"] == [{"type": "text", "text": "mat."}]
    assert engine.tokenizer.decode(engine.seen[0][0]).endswith("assistant: The cat sat on the ")


def test_clients_that_want_threads_are_told_that_there_are_none(
    agent: tuple[anthropic.Anthropic, FakeEngine], http: httpx.Client
) -> None:
    client, engine = agent

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather"""
        engine.answer = f"It rains in {city}."
        return "Rain"

    engine.answer = CALL
    runner = client.beta.messages.tool_runner(model=MODEL, max_tokens=200, tools=[get_weather], messages=HELLO)
    assert runner.until_done().content[0].text == "It rains in Paris."  # type: ignore[union-attr]
    assert len(engine.seen) == 2
    idle: Any = dict.fromkeys(("thread", "compaction", "billing_policy", "fallback_credit_token"))
    answer = http.post("/v1/messages", json={"messages": HELLO, "max_tokens": 5, **idle})
    assert answer.status_code == 200 and answer.headers["request-id"]
    count = http.post("/v1/messages/count_tokens", json={"messages": HELLO, "output_config": {"task_budget": None}})
    assert count.status_code == 200 and count.headers["request-id"]


def test_forced_calls_follow_a_grammar(agent: tuple[anthropic.Anthropic, FakeEngine]) -> None:
    client, engine = agent
    engine.answer = '</think><tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    message = client.messages.create(
        model=MODEL, max_tokens=300, messages=HELLO, tools=[WEATHER],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )  # fmt: skip
    assert engine.seen[0][1].grammar is not None
    engine.answer = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    message = client.messages.create(
        model=MODEL,
        max_tokens=300,
        messages=HELLO,
        tools=[WEATHER],
        tool_choice={"type": "tool", "name": "get_weather"},
    )
    (call,) = message.content
    assert isinstance(call, anthropic.types.ToolUseBlock) and call.input == {"city": "Rome"}


def test_tokens_are_counted_as_the_message_has_them(agent: tuple[anthropic.Anthropic, FakeEngine]) -> None:
    client, _ = agent
    asked: Any = {"model": MODEL, "messages": HELLO, "system": "Be brief.", "tools": [WEATHER]}
    count = client.messages.count_tokens(**asked).input_tokens
    usage = client.messages.create(max_tokens=5, **asked).usage
    assert count == usage.input_tokens + (usage.cache_read_input_tokens or 0) > 100


@pytest.mark.parametrize(
    ("fields", "status", "said"),
    [
        ({}, 400, "messages is required"),
        ({"messages": []}, 400, "messages"),
        ({"messages": HELLO, "max_tokens": 0}, 400, "max_tokens"),
        ({"messages": HELLO, "model": "other"}, 404, "other"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "image.source is required"),
        ({"messages": HELLO, "tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 400, "web_search"),
        ({"messages": HELLO, "mcp_servers": [{"url": "x"}]}, 400, "mcp_servers"),
        ({"messages": HELLO, "nonsense": 1}, 400, "nonsense"),
        ({"messages": HELLO, "reasoning_effort": "low"}, 400, "supplied: reasoning_effort"),
        (
            {"messages": HELLO, "tools": [WEATHER], "tool_choice": {"type": "tool", "name": "reasoning_effort"}}, 400,
            "tool_choice names 'reasoning_effort', which",
        ),
        ({"messages": HELLO, "context_management": {"edits": [{"type": "compact_20260112"}]}}, 400, "compact"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, 400, "prompt is too long: 617 tokens > 512 maximum"),
        ({"messages": [{"role": "user", "content": "x" * 495}]}, 400, "prompt is too long: 512 tokens > 511 maximum"),
        ({"messages": [{"role": "user", "content": "x" * 600_000}]}, 400, " tokens > 512 maximum"),
        ({"messages": HELLO, "stop_sequences": [""]}, 400, "stop_sequences must be"),
        ({"messages": HELLO, "tools": [{**WEATHER, "name": "x y"}]}, 400, "tools[0].name "),
        ({"messages": HELLO, "tools": [{"type": "function", "function": {"name": "x"}}]}, 400, "form of OpenAI"),
        ({"messages": HELLO, "tools": [{"name": "x", "parameters": {}}]}, 400, 'here it is {"name": ...'),
        ({"messages": HELLO, "priority": 1}, 400, "priority 1 needs --scheduling-policy priority"),
        ({"messages": HELLO, "compaction": {}}, 400, "compaction is not built"),
        ({"messages": HELLO, "billing_policy": {}}, 400, "billing_policy is not built"),
        ({"messages": HELLO, "fallback_credit_token": "x"}, 400, "fallback_credit_token is not built"),
        ({"messages": HELLO, "output_config": {"task_budget": {}}}, 400, "output_config.task_budget is not built"),
        ({"messages": HELLO, "tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}}, 400, "other"),
        ({"messages": [{"role": "user", "content": [CALL_BLOCK]}]}, 400, "belongs"),
        ({"messages": [{"role": "user", "content": "Hi", "clear_at": "never"}]}, 400, "clear_at belongs"),
    ],
)  # fmt: skip
def test_refusals_have_the_form_of_the_api(http: httpx.Client, fields: Any, status: int, said: str) -> None:
    answer = http.post("/v1/messages", json={"max_tokens": 5, **fields})
    assert answer.status_code == status
    body = answer.json()
    kind = "not_found_error" if status == 404 else "invalid_request_error"
    assert body.keys() == {"type", "error", "request_id"} and body["type"] == "error" and body["error"]["type"] == kind
    assert body["request_id"] == answer.headers["request-id"]
    assert said in body["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/v1/messages", "/v1/message", "/v1/models/nope"])
def test_refusals_have_the_form_of_the_api_at_a_mistyped_path_too(http: httpx.Client, path: str) -> None:
    method = "GET" if "models" in path else "POST"
    answer = http.request(method, path, json={}, headers={"anthropic-version": "2023-06-01"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
    assert answer.json()["request_id"] == answer.headers["request-id"]
    answer = http.request(method, path, json={})
    assert answer.json()["error"]["type"] == "invalid_request_error" and "request-id" not in answer.headers


def test_an_error_amid_a_stream_names_the_fields_of_the_api(agent: tuple[anthropic.Anthropic, FakeEngine]) -> None:
    client, engine = agent
    engine.fails_after = (1, RequestError("response_format cannot be followed.", param="response_format"))
    with pytest.raises(anthropic.APIError, match=r"output_config\.format cannot be followed"):
        list(client.messages.create(model=MODEL, messages=HELLO, max_tokens=5, stream=True))


def test_models_are_listed_in_the_form_of_the_api(agent: tuple[anthropic.Anthropic, FakeEngine]) -> None:
    client, _ = agent
    assert [model.id for model in client.models.list()] == [MODEL, "alias"]
    assert client.models.retrieve(MODEL).display_name == MODEL


def test_keys_are_taken_from_either_header(agent_address: tuple[str, FakeEngine]) -> None:
    with httpx.Client(base_url=agent_address[0]) as http:
        body = {"messages": HELLO, "max_tokens": 2}
        for headers, status in (
            ({"x-api-key": "secret"}, 200), ({"Authorization": "Bearer secret"}, 200), ({"x-api-key": "no"}, 401),
            ({}, 401), ({"x-api-key": "é".encode("latin-1")}, 401),
        ):  # fmt: skip
            answer = http.post("/v1/messages", json=body, headers=headers)  # type: ignore[arg-type]
            assert answer.status_code == status
        assert answer.json()["error"]["type"] == "authentication_error"
        assert http.post("/v1/chat/completions", json={"messages": HELLO}).json()["error"]["code"] == "invalid_api_key"
