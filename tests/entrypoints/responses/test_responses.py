"""The Responses API over an engine that says what it is told, through the real clients and as plain HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from octavo.entrypoints.chat.answer_reader import AnswerFormat, AnswerReader
from octavo.entrypoints.chat.chat_run import AnswerPart
from octavo.entrypoints.chat.reasoning import STYLES, Reasoning
from octavo.entrypoints.chat.tools.format_parser import FormatParser
from octavo.entrypoints.chat.tools.tool_formats import FORMATS
from octavo.entrypoints.http.store import DEAD_AFTER_S, Database
from octavo.entrypoints.responses.items import read_items, to_messages
from octavo.entrypoints.responses.response_builder import ResponseBuilder
from octavo.entrypoints.responses.response_run import BackgroundRun
from octavo.entrypoints.responses.responses_protocol import ResponsesRequest
from octavo.structured_output.final_check import CallChecks
from tests.entrypoints.fake_engine import MODEL, FakeEngine, serving
from tests.waiting import wait_until, within

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
FLAGS: Any = {
    "disable_log_requests": True,
    "reasoning_parser": "qwen3",
    "enable_auto_tool_choice": True,
    "tool_call_parser": "hermes",
}


@pytest.fixture(scope="module")
def shared_agent(tiny_tokenizer: Path) -> Iterator[tuple[str, FakeEngine]]:
    """A server that reads reasoning and calls."""
    engine = FakeEngine(tiny_tokenizer, max_model_len=4096)
    with serving(engine, **FLAGS) as url:
        yield url, engine


@pytest.fixture
def engine(shared_agent: tuple[str, FakeEngine]) -> FakeEngine:
    shared_agent[1].reset()
    return shared_agent[1]


@pytest.fixture
def http(shared_agent: tuple[str, FakeEngine], engine: FakeEngine) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=shared_agent[0], timeout=within(60)) as client:
        yield client


@pytest.fixture
def client(shared_agent: tuple[str, FakeEngine], engine: FakeEngine) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=shared_agent[0] + "/v1", api_key="none", max_retries=0, timeout=within(60)) as client:
        yield client


def prompt(engine: FakeEngine, index: int = -1) -> str:
    return str(engine.tokenizer.decode(engine.seen[index][0]))


def read_events(answer: httpx.Response) -> list[dict[str, Any]]:
    """A stream's events, numbered, each of a type that the package knows."""
    events = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENTS.validate_python(event)
        events.append(event)
    numbers = [event["sequence_number"] for event in events]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    return events


def post(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer = http.post("/v1/responses", json={"input": "Hi", **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    Response.model_validate(found, strict=False)
    return found


def test_a_response_is_made_kept_listed_and_deleted(client: openai.OpenAI, engine: FakeEngine) -> None:
    made = client.responses.create(model=MODEL, input="Hi", instructions="Be brief.", metadata={"k": "v"}, top_p=0.9)
    assert made.output_text == "Hello there" and made.status == "completed" and made.metadata == {"k": "v"}
    assert prompt(engine) == "system: Be brief.\nuser: Hi\nassistant:"
    assert made.usage is not None and made.usage.input_tokens_details.cached_tokens == 3
    assert made.usage.total_tokens == made.usage.input_tokens + made.usage.output_tokens == len(engine.seen[0][0]) + 12
    assert (made.temperature, made.top_p, made.tool_choice, made.tools) == (1.0, 0.9, "auto", [])
    assert client.responses.retrieve(made.id).to_dict() == made.to_dict()
    (item,) = client.responses.input_items.list(made.id).data
    assert item.content[0].text == "Hi"  # type: ignore[union-attr]
    client.responses.delete(made.id)
    for again in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            again(made.id)
    unkept = client.responses.create(model=MODEL, input="Hi", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)


def test_a_conversation_goes_on_with_its_calls_and_their_results(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.answer = f"<think>Rain?</think>Let me look.{CALL}"
    first = client.responses.create(model=MODEL, input="Weather?", instructions="Be brief.", tools=[WEATHER])
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    call = first.output[2]
    assert call.type == "function_call" and json.loads(call.arguments) == {"city": "Paris"} and call.call_id
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain"}
    engine.answer = "</think>It rains."
    second = client.responses.create(model=MODEL, input=[output], previous_response_id=first.id)
    assert second.output_text == "</think>It rains." or second.output_text == "It rains."
    chained = prompt(engine)
    assert "Weather?" in chained and CALL.split("\n")[1] in chained and "Rain" in chained
    assert "Be brief." not in chained  # instructions are of one response
    # The same without the server's memory: what came back is sent again.
    items: Any = [{"role": "user", "content": "Weather?"}, *(item.to_dict() for item in first.output), output]
    client.responses.create(model=MODEL, input=items, store=False)
    assert prompt(engine) == chained
    # References are found by their ids.
    references: Any = [{"role": "user", "content": "Weather?"}]
    references += [{"type": "item_reference", "id": item.id} for item in first.output]
    client.responses.create(model=MODEL, input=[*references, output], store=False)
    assert prompt(engine) == chained


@pytest.mark.parametrize("summary", [None, "auto"])
def test_events_come_in_the_order_of_the_api(http: httpx.Client, engine: FakeEngine, summary: str | None) -> None:
    engine.answer = f"<think>Hm, so.</think>Yes.{CALL}"
    body = {"input": "Hi", "tools": [WEATHER], "stream": True, "reasoning": {"summary": summary}}
    events = read_events(http.post("/v1/responses", json=body))
    assert events[0]["sequence_number"] == 0
    kinds = [event["type"].removeprefix("response.") for event in events]
    order = [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]]
    reasoning = ["reasoning_text.delta", "reasoning_text.done"]
    if summary:
        texts = ["reasoning_summary_text.delta", "reasoning_summary_text.done"]
        reasoning = ["reasoning_summary_part.added", *texts, "reasoning_summary_part.done"]
    assert order == [
        "created", "in_progress",
        "output_item.added", *reasoning, "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    added = [event for event in events if event["type"] == "response.output_item.added"]
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["output_index"] for event in added] == [event["output_index"] for event in done] == [0, 1, 2]
    response = events[-1]["response"]
    assert response["output"] == [event["item"] for event in done]
    for kind, place in (("output_text.delta", 1), ("function_call_arguments.delta", 2)):
        text = "".join(event["delta"] for event in events if event["type"] == f"response.{kind}")
        item = response["output"][place]
        assert text == (item["content"][0]["text"] if place == 1 else item["arguments"])
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 10
    assert (response["presence_penalty"], response["frequency_penalty"]) == (0, 0)
    assert not any("encrypted_content" in item for item in response["output"]), "nobody has asked for it"
    # A whole response is what the events add up to, but for ids and times.
    whole = post(http, tools=[WEATHER], reasoning={"summary": summary})

    def stripped(item: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in item.items() if name not in ("id", "call_id")}

    assert [stripped(item) for item in whole["output"]] == [stripped(item) for item in response["output"]]
    assert http.get(f"/v1/responses/{response['id']}").json() == response


def test_the_model_sees_the_schema_of_a_tools_output(http: httpx.Client, engine: FakeEngine) -> None:
    tool = {**WEATHER, "output_schema": {"type": "object", "properties": {"degrees": {"type": "number"}}}}
    made = post(http, tools=[tool, {"type": "namespace", "name": "sky", "description": "The sky.", "tools": [tool]}])
    asked = prompt(engine)
    assert asked.count("Its output is JSON of this schema") == asked.count("degrees") == 2 and "The sky." in asked
    assert made["tools"][0]["output_schema"] == tool["output_schema"]
    assert made["tools"][0].get("description") == tool.get("description")


def test_tools_of_a_namespace_are_called_by_their_own_names(http: httpx.Client, engine: FakeEngine) -> None:
    group = {"type": "namespace", "name": "mcp__sky", "description": "The sky.", "tools": [WEATHER]}
    tools = [WEATHER, group]
    engine.answer = '<tool_call>\n{"name": "mcp__sky__get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    made = post(http, tools=tools)
    [call] = made["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "mcp__sky", "get_weather")
    asked = prompt(engine)
    assert '"name": "mcp__sky__get_weather"' in asked and '"name": "get_weather"' in asked and "The sky." in asked
    assert [tool["type"] for tool in made["tools"]] == ["function", "namespace"]
    assert made["tools"][1]["tools"] == [made["tools"][0]]
    for choice in (
        named := {"type": "function", "name": "get_weather"},
        {"type": "allowed_tools", "mode": "required", "tools": [named]},
    ):
        chosen = post(http, tools=[group], tool_choice=choice)
        assert chosen["output"][0]["namespace"] == "mcp__sky" and chosen["tool_choice"] == choice
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "Rain"}
    engine.answer = "Rain."
    for fields in (
        {"input": [{"role": "user", "content": "Hi"}, call, output]},
        {"input": [output], "previous_response_id": made["id"]},
    ):
        post(http, tools=tools, **fields)
        assert prompt(engine, -1).count('"name": "mcp__sky__get_weather", "arguments"') == 1
    for wrong in (
        {**group, "tools": []},
        {**group, "tools": [{**WEATHER, "name": "x" * 128}]},
        {**group, "name": "a b"},
    ):
        assert http.post("/v1/responses", json={"input": "Hi", "tools": [wrong]}).status_code == 400


def test_tools_that_run_at_openai_are_refused_or_left_out_with_unknown_fields(
    tiny_tokenizer: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Codex sends web_search, and labels of its own, to any server."""
    body = {"input": "Hi", "client_metadata": {"a": "b"}, "access_programs": {}, "tool_choice": "auto"}
    body |= {"tools": [{"type": "web_search", "external_web_access": False}, WEATHER]}
    engine = FakeEngine(tiny_tokenizer, max_model_len=4096)
    with serving(engine, **FLAGS) as url:
        error = httpx.post(url + "/v1/responses", json=body).json()["error"]
        assert error["param"] == "tools" and "'web_search', which is not built" in error["message"]
    with serving(engine, **FLAGS, unknown_fields="warn") as url:
        made = httpx.post(url + "/v1/responses", json=body).json()
    assert [tool["name"] for tool in made["tools"]] == [WEATHER["name"]] and "tools" in caplog.text


PATCH: Any = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "regex", "definition": ".+"}}
PATCHED = '<tool_call>\n{"name": "patch", "arguments": {"input": "\\"a\\""}}\n</tool_call>'


def test_custom_tools_are_called_with_a_text_and_their_calls_are_sent_again(
    http: httpx.Client, client: openai.OpenAI, engine: FakeEngine
) -> None:
    engine.answer = PATCHED
    choice = {"type": "custom", "name": "patch"}
    for asked in ({}, {"tool_choice": "required"}, {"tool_choice": choice}):
        body = {"input": "Hi", "tools": [PATCH, WEATHER], "stream": True, **asked}
        events = read_events(http.post("/v1/responses", json=body))
        of_call = [event for event in events if "custom_tool_call" in event["type"]]
        assert "".join(event.get("delta", "") for event in of_call) == of_call[-1]["input"] == '"a"'
        types = [event["type"].removeprefix("response.") for event in events]
        deltas = ["custom_tool_call_input.delta"] * (len(of_call) - 1)
        assert types == [
            "created", "in_progress", "output_item.added", *deltas, "custom_tool_call_input.done", "output_item.done",
            "completed",
        ]  # fmt: skip
        (item,) = events[-1]["response"]["output"]
        assert item["id"].startswith("ctc_") and item["call_id"].startswith("call_")
        assert {**item, "id": "", "call_id": ""} == {
            "id": "", "type": "custom_tool_call", "status": "completed", "call_id": "", "name": "patch", "input": '"a"',
        }  # fmt: skip
        assert events[-1]["response"]["tools"][0] == PATCH
        assert events[-1]["response"]["tool_choice"] == asked.get("tool_choice", "auto")
    assert engine.seen[0][1].grammar is not None
    output: Any = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "Done"}
    made = client.responses.create(model=MODEL, input=[{"role": "user", "content": "Hi"}, item, output])
    assert '"input": "\\"a\\""' in prompt(engine) and "Done" in prompt(engine)
    kept = client.responses.input_items.list(made.id, order="asc").data
    assert [one.type for one in kept] == ["message", "custom_tool_call", "custom_tool_call_output"]
    free = {"type": "custom", "name": "patch"}
    assert post(http, tools=[free])["tools"] == [{**free, "format": {"type": "text"}}]
    assert post(http, tools=[{"type": "custom", "custom": {"name": "patch"}}])["tools"][0]["name"] == "patch"


def called(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


READ: Any = {"type": "function", "name": "read", "description": "Read a file.", "parameters": WEATHER["parameters"]}
FILES: Any = {"type": "namespace", "name": "mcp__files__", "description": "The disk.", "tools": [READ, PATCH]}


def test_tools_of_a_namespace_are_called_by_its_name_and_their_own(http: httpx.Client, engine: FakeEngine) -> None:
    engine.answer = called("mcp__files__read", '{"city": "a"}') + called("mcp__files__patch", '{"input": "b"}')
    body = {"input": "Hi", "tools": [WEATHER, FILES], "stream": True}
    response = read_events(http.post("/v1/responses", json=body))[-1]["response"]
    assert response["tools"][1] == {**FILES, "tools": [{**READ, "strict": False}, PATCH]}
    assert [{**item, "id": "", "call_id": ""} for item in response["output"]] == [
        {"id": "", "type": "function_call", "status": "completed", "call_id": "", "name": "read",
         "arguments": '{"city": "a"}', "namespace": "mcp__files__"},
        {"id": "", "type": "custom_tool_call", "status": "completed", "call_id": "", "name": "patch", "input": "b",
         "namespace": "mcp__files__"},
    ]  # fmt: skip
    assert '"mcp__files__read", "description": "The disk.\\nRead a file."' in prompt(engine)
    items = [{"role": "user", "content": "Hi"}, *response["output"]]
    post(http, input=items, tools=[WEATHER, FILES])
    assert engine.answer.replace("</tool_call><tool_call>", "</tool_call>\n<tool_call>") in prompt(engine)
    for choice in ({"type": "function", "name": "read"}, {"type": "function", "name": "mcp__files__read"}):
        assert post(http, tools=[WEATHER, FILES], tool_choice=choice)["tool_choice"] == choice
        assert "mcp__files__read" in str(engine.seen[-1][1].grammar)
        assert "get_weather" not in str(engine.seen[-1][1].grammar)


SEARCH: Any = {"type": "tool_search", "execution": "client", "description": "Find tools."}


@pytest.mark.parametrize("is_found", [True, False])
def test_tools_that_the_client_finds_can_be_called(http: httpx.Client, engine: FakeEngine, is_found: bool) -> None:
    engine.answer = called("tool_search", '{"query": "files"}')
    body = {"input": "Hi", "tools": [SEARCH], "stream": True}
    events = read_events(http.post("/v1/responses", json=body))
    (item,) = events[-1]["response"]["output"]
    assert item == {
        "id": item["id"], "type": "tool_search_call", "status": "completed", "call_id": item["call_id"],
        "execution": "client", "arguments": {"query": "files"},
    }  # fmt: skip
    types = [event["type"].removeprefix("response.") for event in events]
    assert types == ["created", "in_progress", "output_item.added", "output_item.done", "completed"]
    tools = [{**FILES, "tools": [{**READ, "defer_loading": True}]}]
    found: Any = {"type": "tool_search_output", "execution": "client", "call_id": item["call_id"], "tools": tools}
    if not is_found:
        found = {"type": "additional_tools", "role": "developer", "tools": tools}
    engine.answer = called("mcp__files__read", '{"city": "a"}')
    items = [{"role": "user", "content": "Hi"}, *([item] if is_found else []), found]
    first = post(http, input=items, tools=[SEARCH])
    (call,) = first["output"]
    assert (call["type"], call["name"], call["namespace"]) == ("function_call", "read", "mcp__files__")
    assert ('"name": "tool_search", "arguments": {"query": "files"}' in prompt(engine)) is is_found
    assert prompt(engine).count("Read a file.") == 1 + is_found
    # The tools stay those of the conversation.
    again = post(http, input=[{"role": "user", "content": "More"}], tools=[SEARCH], previous_response_id=first["id"])
    assert again["output"][0]["namespace"] == "mcp__files__"


def test_calls_are_not_compared_with_their_schemas(
    http: httpx.Client, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = []
    monkeypatch.setattr(CallChecks, "verdict", lambda _, calls: checked.extend(calls))
    city = {"type": "string", "pattern": "^(?!b)[ab]*$"}
    tool = {**WEATHER, "parameters": {"type": "object", "properties": {"city": city}}}
    engine.answer = CALL
    assert post(http, tools=[tool], tool_choice="required")["output"][0]["type"] == "function_call"
    assert not checked


@pytest.mark.parametrize(("length", "status"), [(-22, "incomplete"), (-4, "completed")])
def test_a_custom_call_is_complete_if_its_input_is(
    http: httpx.Client, engine: FakeEngine, length: int, status: str
) -> None:
    engine.answer = PATCHED
    made = post(http, tools=[PATCH], tool_choice="required", max_output_tokens=len(PATCHED) + length)
    assert [(item["type"], item["status"]) for item in made["output"]] == [("custom_tool_call", status)]


def test_the_stream_helper_and_parse_work(client: openai.OpenAI, engine: FakeEngine) -> None:
    class Weather(pydantic.BaseModel):
        city: str

    engine.answer = '{"city": "Rome"}'
    with client.responses.stream(model=MODEL, input="Hi", text_format=Weather) as stream:
        kinds = [event.type for event in stream]
        parsed = stream.get_final_response()
    assert parsed.output_parsed == Weather(city="Rome") and kinds[-1] == "response.completed"
    assert engine.seen[0][1].grammar is not None
    assert client.responses.parse(model=MODEL, input="Hi", text_format=Weather).output_parsed == Weather(city="Rome")
    engine.answer = '<tool_call>\n{"name": "Weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    (tool,) = client.responses.parse(
        model=MODEL, input="Hi", tools=[openai.pydantic_function_tool(Weather)["function"] | {"type": "function"}],  # type: ignore[operator, list-item]
        tool_choice={"type": "function", "name": "Weather"},
    ).output  # fmt: skip
    assert tool.type == "function_call" and tool.name == "Weather" and json.loads(tool.arguments) == {"city": "Rome"}


@pytest.mark.parametrize(
    ("fields", "status", "item_status"),
    [
        ({}, "completed", "completed"),
        ({"max_output_tokens": len(CALL) - 18}, "incomplete", "incomplete"),  # within the arguments
        ({"max_output_tokens": len(CALL) - 4}, "incomplete", "completed"),  # after them
        ({"stop": ["Par"]}, "completed", "incomplete"),
    ],
)
def test_a_call_is_complete_if_its_arguments_are(
    http: httpx.Client, engine: FakeEngine, fields: dict[str, Any], status: str, item_status: str
) -> None:
    engine.answer = CALL
    made = post(http, tools=[WEATHER], tool_choice="required", **fields)
    (call,) = made["output"]
    assert (made["status"], call["type"], call["status"]) == (status, "function_call", item_status)
    assert call["arguments"].endswith("}") is (item_status == "completed")


def test_what_cuts_or_fails_an_answer_is_said(http: httpx.Client, engine: FakeEngine) -> None:
    cut = post(http, max_output_tokens=4)
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert cut["output"][0]["status"] == "incomplete"
    events = read_events(http.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 4, "stream": True}))
    assert events[-1]["type"] == "response.incomplete"
    engine.fails_after = (3, RuntimeError("boom"))
    events = read_events(http.post("/v1/responses", json={"input": "Hi", "stream": True}))
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"] == {"code": "server_error", "message": "Internal error."}
    assert http.post("/v1/responses", json={"input": "Hi"}).status_code == 500


def test_log_probabilities_are_of_the_text(http: httpx.Client, engine: FakeEngine) -> None:
    made = post(http, top_logprobs=2, include=["message.output_text.logprobs"])
    logprobs = made["output"][0]["content"][0]["logprobs"]
    assert "".join(one["token"] for one in logprobs) == "Hello there"
    assert len(logprobs[0]["top_logprobs"]) == 2 and logprobs[0]["bytes"] == [ord("H")]


class Token:
    def __init__(self, text: str) -> None:
        self._text = text

    def model_dump(self) -> dict[str, Any]:
        return {"token": self._text, "bytes": list(self._text.encode())}


@pytest.mark.parametrize(
    ("tokens", "texts"),
    [
        (["<think>", "n", "</think>", "n", "o", "<|im_end|>"], [["n", "o"]]),
        (["n", "<think>", "o", "n", "<|im_end|>"], [["n", "<think>", "o", "n"]]),
        (["<think>", "a", "</think>", "\n\n", "a", "<", " b", "<|im_end|>"], [["a", "<", " b"]]),
        (["<think>", "a", "</think>", "\n\na", "b", "<|im_end|>"], [["\n\na", "b"]]),
        (["<think>", "a", "</think>", "b", CALL, "b", "<|im_end|>"], [["b"], ["b"]]),
        (["b", *CALL, "b", "<|im_end|>"], [["b"], ["b"]]),
    ],
)
def test_log_probabilities_are_of_the_text_wherever_the_answer_is_cut(
    tokens: list[str], texts: list[list[str]]
) -> None:
    reasoning = Reasoning.after("assistant:", STYLES["qwen3"])
    parser = partial(FormatParser, FORMATS["hermes"], {"get_weather": {}})
    form = AnswerFormat(reasoning, True, parser, call_marks=("<tool_call>",))
    body = ResponsesRequest.model_validate({"input": "Hi", "top_logprobs": 1})
    for size in range(1, len(tokens) + 1):
        formatter: Any = SimpleNamespace(chat=lambda ids, *_: SimpleNamespace(content=[Token(tokens[i]) for i in ids]))
        reader, builder, shown = AnswerReader(form), ResponseBuilder(body, "resp_1", MODEL, formatter), list[str]()
        events = builder.begin()
        for begin in range(0, len(tokens), size):
            ids = list(range(len(tokens)))[begin : begin + size]
            is_end = begin + size >= len(tokens)
            text = "".join(tokens[i] for i in ids).removesuffix("<|im_end|>")
            deltas = reader.add(text, is_end=is_end)
            events += builder.add(AnswerPart(deltas, ids, [], "stop" if is_end else None, None, 1, 0, 1, 0))
        messages = [item for item in builder.response["output"] if item["type"] == "message"]
        assert [[one["token"] for one in item["content"][0]["logprobs"]] for item in messages] == texts
        assert ["".join(one).strip() for one in texts] == [item["content"][0]["text"].strip() for item in messages]
        for event in events:
            if event["type"] == "response.output_text.delta":
                shown += [one["token"] for one in event["logprobs"]]
        assert shown == [one for text in texts for one in text]


def test_reasoning_is_sent_again_in_any_form(http: httpx.Client, engine: FakeEngine) -> None:
    engine.answer = "<think>Secret.</think>Yes."
    made = post(http, include=["reasoning.encrypted_content"], store=False)
    reasoning = made["output"][0]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Secret."}]
    short = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": reasoning["encrypted_content"]}
    for item in (reasoning, short):
        post(
            http, input=[{"role": "user", "content": "Hi"}, item, *made["output"][1:], {"role": "user", "content": "?"}]
        )
    assert prompt(engine, -1) == prompt(engine, -2)


def test_an_empty_answer_is_a_turn(http: httpx.Client, engine: FakeEngine) -> None:
    engine.answer = ""
    first = post(http)
    (message,) = first["output"]
    assert (message["status"], [part["text"] for part in message["content"]]) == ("completed", [""])
    post(http, input="Still there?", previous_response_id=first["id"])
    chat = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": ""}]}
    chat["messages"].append({"role": "user", "content": "Still there?"})
    assert http.post("/v1/chat/completions", json=chat).status_code == 200
    assert prompt(engine, -1) == prompt(engine, -2)
    empty = [chat["messages"][0], {"role": "assistant", "content": []}, chat["messages"][2]]
    assert http.post("/v1/messages", json={"messages": empty, "max_tokens": 9}).status_code == 200
    assert prompt(engine, -1) == prompt(engine, -2)


def test_texts_of_one_answer_are_sent_again_as_they_were_generated(http: httpx.Client, engine: FakeEngine) -> None:
    engine.answer = f"Let me look.{CALL}\nDone."
    made = post(http, tools=[WEATHER])
    assert [item["type"] for item in made["output"]] == ["message", "function_call", "message"]
    asked = {"role": "user", "content": "Hi"}
    answer, _ = to_messages(read_items([asked, *made["output"], asked], "resp_1"), None)[1:]
    assert answer["content"] == "Let me look.\nDone."
    assert to_messages(read_items(made["output"][1:2], "resp_1"), None)[0]["content"] is None
    others = [{"role": "assistant", "content": text} for text in ("One.", "Two.")]
    assert to_messages(read_items(others, "resp_1"), None)[0]["content"] == "One.\nTwo."
    with_own_ids = [{**item, "id": f"msg_{i}"} for i, item in enumerate(others)]
    assert to_messages(read_items(with_own_ids, "resp_1"), None)[0]["content"] == "One.\nTwo."


def test_reasoning_without_a_text_is_no_turn() -> None:
    def sent(*items: Any) -> list[Any]:
        asked = {"role": "user", "content": "Hi"}
        return to_messages(read_items([asked, *items, asked], "x"), None)

    empty = {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": None}
    answer = {"role": "assistant", "content": "Yes."}
    assert sent(empty) == sent()
    assert sent(empty, answer) == sent(answer)


def test_background_responses_are_polled_followed_and_cancelled(http: httpx.Client, engine: FakeEngine) -> None:
    engine.is_paused = True
    made = post(http, background=True)
    assert made["status"] == "queued"
    path = f"/v1/responses/{made['id']}"
    wait_until(lambda: http.get(path).json()["status"] == "in_progress")
    assert http.post("/v1/responses", json={"input": "x", "previous_response_id": made["id"]}).status_code == 400
    engine.is_paused = False
    wait_until(lambda: http.get(path).json()["status"] == "completed")
    events = read_events(http.get(path, params={"stream": "true"}))
    assert [event["type"] for event in events[:3]] == [
        "response.created", "response.queued", "response.in_progress"
    ]  # fmt: skip
    assert events[-1]["response"] == http.get(path).json()
    assert read_events(http.get(path, params={"stream": "true", "starting_after": 4})) == events[5:]

    # A client that follows and leaves harms nothing.
    engine.is_paused = True
    with http.stream("POST", "/v1/responses", json={"input": "Hi", "background": True, "stream": True}) as stream:
        lines = stream.iter_lines()
        first = json.loads(next(line for line in lines if line.startswith("data: "))[6:])
    path = f"/v1/responses/{first['response']['id']}"
    engine.is_paused = False
    wait_until(lambda: http.get(path).json()["status"] == "completed")

    engine.is_paused = True
    path = f"/v1/responses/{post(http, background=True)['id']}"
    wait_until(lambda: len(engine.active) == 1)
    assert http.post(path + "/cancel").json()["status"] == "cancelled"
    wait_until(lambda: not engine.active)
    assert http.post(path + "/cancel").json()["status"] == http.get(path).json()["status"] == "cancelled"
    assert http.delete(path).json()["deleted"]
    engine.is_paused = False
    plain = post(http)
    assert http.post(f"/v1/responses/{plain['id']}/cancel").status_code == 400


def test_a_background_response_that_the_full_store_does_not_take_is_failed(
    http: httpx.Client, shared_agent: tuple[Any, FakeEngine], engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.is_paused = True
    path = f"/v1/responses/{post(http, background=True)['id']}"
    monkeypatch.setattr(shared_agent[0].server.state.store.database, "_max_bytes", 0)
    engine.is_paused = False
    wait_until(lambda: http.get(path).json()["status"] == "failed")
    assert "has no room" in http.get(path).json()["error"]["message"]


def test_a_background_response_that_is_cancelled_twice_lets_its_followers_go() -> None:
    async def run() -> None:
        state, builder, is_asked, may_store = SimpleNamespace(), SimpleNamespace(), asyncio.Event(), asyncio.Event()

        async def store(work: Any) -> None:
            is_asked.set()
            await may_store.wait()

        async def progress() -> AsyncGenerator[Any, None]:
            await asyncio.Event().wait()
            yield

        builder.response = {"id": "r"}
        builder.begin, builder.cancel = list, lambda: None
        state.store = SimpleNamespace(run=store)
        job: Any = BackgroundRun(state, builder, [], progress())  # type: ignore[arg-type]
        task, follower = asyncio.ensure_future(job.run()), asyncio.ensure_future(anext(job.follow(-1), None))
        await asyncio.sleep(0)
        task.cancel()
        await is_asked.wait()
        task.cancel()
        await asyncio.sleep(0)
        may_store.set()
        await task
        assert await follower is None

    asyncio.run(run())


def test_a_client_that_leaves_ends_its_request(http: httpx.Client, engine: FakeEngine) -> None:
    engine.is_paused = True
    with http.stream("POST", "/v1/responses", json={"input": "Hi", "stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        wait_until(lambda: len(engine.active) == 1)
    wait_until(lambda: not engine.active)


def test_the_oldest_turns_make_room(http: httpx.Client, engine: FakeEngine) -> None:
    turns: Any = [{"role": "system", "content": "Be brief."}]
    for i in range(9):
        turns += [{"role": "user", "content": f"{i}" * 600}, {"role": "assistant", "content": "Yes."}]
    turns.append({"role": "user", "content": "Last?"})
    refused = http.post("/v1/responses", json={"input": turns})
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
    assert refused.json()["error"]["param"] == "input"
    made = http.post("/v1/responses", json={"input": turns, "truncation": "auto"}).json()
    assert made["status"] == "completed" and made["truncation"] == "auto"
    kept = prompt(engine)
    assert "Be brief." in kept and "Last?" in kept and "000" not in kept and "888" in kept and "333" in kept


def test_pages_of_input_items(http: httpx.Client) -> None:
    items = [{"role": "user", "content": str(i)} for i in range(5)]
    path = f"/v1/responses/{post(http, input=items)['id']}/input_items"
    page = http.get(path, params={"limit": 2}).json()
    assert [item["content"][0]["text"] for item in page["data"]] == ["4", "3"] and page["has_more"]
    page = http.get(path, params={"limit": 3, "after": page["last_id"]}).json()
    assert [item["content"][0]["text"] for item in page["data"]] == ["2", "1", "0"] and not page["has_more"]
    page = http.get(path, params={"order": "asc"}).json()
    assert [item["content"][0]["text"] for item in page["data"]] == ["0", "1", "2", "3", "4"]
    for params in ({"limit": "0"}, {"limit": "x"}, {"order": "up"}, {"after": "no"}):
        assert http.get(path, params=params).status_code == 400


def test_what_is_included_of_stored_items_is_refused_unless_they_have_it(http: httpx.Client) -> None:
    """Responses have no calls of built-in tools, so their results are all there."""
    path = f"/v1/responses/{post(http, include=['file_search_call.results'])['id']}"
    for below in ("", "/input_items"):
        assert http.get(path + below, params={"include[]": "message.input_image.image_url"}).status_code == 200
        for name in ("include", "include[]"):
            answer = http.get(path + below, params={name: "message.output_text.logprobs"})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "include")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
        ({"previous_response_id": "resp_no"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "tool_search"}]}, "tools"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]}, "tools[0].name"),
        ({"input": [{"type": "additional_tools", "tools": [{"type": "function"}]}]}, "input[0].tools[0].name"),
        ({"input": [{"type": "tool_search_call", "call_id": "c", "arguments": "{}"}]}, "input[0].arguments"),
        ({"tools": [{"type": "mcp", "server_url": "x"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "no"}, "tools": [WEATHER]}, "tool_choice"),
        ({"include": ["file_search_call.nothing"]}, "include"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"conversation": {"id": "conv_1"}}, "conversation"),
        ({"conversation": "conv_1", "previous_response_id": "resp_1"}, "conversation"),
        ({"enable_response_messages": True}, "enable_response_messages"),
        ({"previous_response": {"id": "r"}}, "previous_response"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True, "store": False}, "background"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "no"}}}}, "text.format.schema"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"nonsense": 1}, "nonsense"),
        ({"input": [{"role": "user", "content": "x", "id": "\ud800"}]}, "input[0].id"),
        ({"input": [{"role": "user", "content": "x", "id": 5}]}, "input[0].id"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x", "detail": "\ud800"}]}]},
            "input[0].content[0].detail",
        ),
        ({"tools": [{**WEATHER, "parameters": {"title": "\ud800"}}]}, "tools[0].parameters"),
        ({"tools": [{**WEATHER, "format": {"type": "text"}}]}, "tools[0]"),
        ({"tools": [{**WEATHER, "type": "custom"}]}, "tools[0]"),
        (
            {"tools": [{"type": "custom", "name": "f", "format": {"type": "grammar"}}]},
            "tools[0].format.grammar.definition",
        ),
        (
            {"tools": [{**PATCH, "format": {**PATCH["format"], "definition": "("}}], "tool_choice": "required"},
            "tools[0].format",
        ),
        ({"tools": [{**WEATHER, "parameters": {"not": {}}}], "tool_choice": "required"}, "tools[0].parameters"),
        ({"metadata": {"\ud800": "x"}}, "metadata.\ufffd\ufffd\ufffd"),
    ],
)
def test_refusals_name_the_field(http: httpx.Client, fields: Any, param: str) -> None:
    body = json.dumps({"input": "Hi", **fields})
    answer = http.post("/v1/responses", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 404) and answer.json()["error"]["param"] == param, answer.text


def test_fields_of_vllms_that_ask_for_nothing_are_taken(http: httpx.Client) -> None:
    post(http, enable_response_messages=False, previous_input_messages=None, vllm_xargs=None, stream_interval=1)


def test_what_is_strict_is_held_and_what_is_not_is_not_called_so(http: httpx.Client, engine: FakeEngine) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array"}, "b": {"type": "object", "properties": {"c": {}}}},
    }
    for strict in (None, False, True):
        form = {"type": "json_schema", "name": "x", "schema": schema, "strict": strict}
        post(http, text={"format": form}, store=False)
        assert ('"additionalProperties": false' in str(engine.seen[-1][1].grammar)) is bool(strict)
        made = post(http, tools=[WEATHER if strict is None else {**WEATHER, "strict": strict}], store=False)
        assert made["tools"][0]["strict"] is bool(strict)
        assert (engine.seen[-1][1].grammar is not None) is bool(strict)


def test_ids_of_what_is_sent_begin_as_their_kind_does(http: httpx.Client) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "1"}
    made = post(http, input=[{"role": "user", "content": "Hi"}, {"type": "reasoning", "summary": []}, call, output])
    items = http.get(f"/v1/responses/{made['id']}/input_items?order=asc").json()["data"]
    assert [item["id"].partition("_")[0] for item in items] == ["msg", "rs", "fc", "fc"]
    assert len({item["id"] for item in items}) == 4


def test_parts_alone_are_one_message_and_tools_may_have_the_form_of_chats(
    http: httpx.Client, engine: FakeEngine
) -> None:
    plain = {name: value for name, value in WEATHER.items() if name != "type"}
    post(http, tools=[WEATHER])
    expected = prompt(engine)
    made = post(http, input=[{"type": "input_text", "text": "Hi"}], tools=[{"type": "function", "function": plain}])
    assert prompt(engine) == expected and made["tools"][0]["name"] == WEATHER["name"]
    of_chat = {"type": "function", "function": {"name": WEATHER["name"]}}
    made = post(http, tools=[{"type": "function", "function": plain}], tool_choice=of_chat)
    assert made["tool_choice"] == {"type": "function", "name": WEATHER["name"]}


def test_tokens_are_counted_as_the_response_has_them(client: openai.OpenAI) -> None:
    said = client.responses.create(model=MODEL, input="Hi")
    asked: Any = {
        "model": MODEL, "input": "And?", "instructions": "Be brief.", "tools": [WEATHER | {"strict": False}],
        "previous_response_id": said.id,
    }  # fmt: skip
    counted = client.responses.input_tokens.count(**asked)
    usage = client.responses.create(**asked).usage
    assert usage is not None
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", usage.input_tokens)
    with pytest.raises(openai.BadRequestError, match="not found"):
        client.responses.input_tokens.count(**asked | {"previous_response_id": "resp_no"})


@contextlib.contextmanager
def sharing_a_store(folder: Path, engines: Sequence[FakeEngine]) -> Iterator[list[str]]:
    """Yield the addresses of servers that have one response store."""
    with contextlib.ExitStack() as stack:
        flags: dict[str, Any] = {"response_store": str(folder / "store.db"), "disable_log_requests": True}
        yield [stack.enter_context(serving(engine, **flags)) for engine in engines]


@pytest.mark.long
def test_two_servers_share_a_file_and_a_dead_one_is_noticed(
    tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = [FakeEngine(tiny_tokenizer) for _ in range(2)]
    with sharing_a_store(tmp_path, engines) as (one, other), httpx.Client(timeout=within(60)) as http:
        made = http.post(f"{one}/v1/responses", json={"input": "Hi"}).json()
        assert http.get(f"{other}/v1/responses/{made['id']}").json() == made
        answer = http.post(f"{other}/v1/responses", json={"input": "?", "previous_response_id": made["id"]})
        assert answer.status_code == 200
        # One cancels what the other works on.
        engines[0].is_paused = True
        working = http.post(f"{one}/v1/responses", json={"input": "Hi", "background": True}).json()["id"]
        wait_until(lambda: len(engines[0].active) == 1)
        assert http.post(f"{other}/v1/responses/{working}/cancel").json()["status"] == "cancelled"
        # A server that died has left something behind.
        left = http.post(f"{one}/v1/responses", json={"input": "Hi", "background": True}).json()["id"]
        now = time.time()
        monkeypatch.setattr("octavo.entrypoints.http.store.time.time", lambda: now + DEAD_AFTER_S + 60)
        monkeypatch.setattr(Database, "beat", lambda self: [])
        found = http.get(f"{other}/v1/responses/{left}").json()
        assert found["status"] == "failed" and found["error"]["code"] == "server_error"
        [failed] = read_events(http.get(f"{other}/v1/responses/{left}", params={"stream": "true"}))
        assert failed["type"] == "response.failed" and failed["response"] == found
        monkeypatch.undo()
        engines[0].is_paused = False


def test_events_of_another_servers_response_come_at_its_end(tiny_tokenizer: Path, tmp_path: Path) -> None:
    """Front ends share a port: a client that goes on with its stream may meet another one."""
    engines = [FakeEngine(tiny_tokenizer) for _ in range(2)]
    with sharing_a_store(tmp_path, engines) as (one, other), httpx.Client(timeout=within(60)) as http:
        engines[0].is_paused = True
        id = http.post(f"{one}/v1/responses", json={"input": "Hi", "background": True}).json()["id"]
        wait_until(lambda: len(engines[0].active) == 1)
        asked = {"stream": "true", "starting_after": "2"}
        with http.stream("GET", f"{other}/v1/responses/{id}", params=asked) as answer:  # while it is computed
            assert answer.status_code == 200
            engines[0].is_paused = False
            answer.read()
        events = read_events(answer)
        with httpx.Client(base_url=one) as own:
            assert events == read_events(own.get(f"/v1/responses/{id}", params=asked))
        assert events[-1]["type"] == "response.completed"


def test_a_full_store_loses_no_answer_and_the_oldest_leave(tiny_tokenizer: Path, tmp_path: Path) -> None:
    engine = FakeEngine(tiny_tokenizer)
    with (
        serving(engine, response_store_bytes=200_000, disable_log_requests=True) as url,
        httpx.Client(base_url=url, timeout=within(60)) as http,
    ):
        note = {"k": "x" * 20_000}
        ids = [http.post("/v1/responses", json={"input": "Hi", "metadata": note}).json()["id"] for _ in range(20)]
        assert http.get(f"/v1/responses/{ids[0]}").status_code == 404
        assert http.get(f"/v1/responses/{ids[-1]}").status_code == 200
        huge = {"input": "Hi", "metadata": {"k": "x" * 300_000}}
        answer = http.post("/v1/responses", json=huge).json()
        assert answer["status"] == "completed" and answer["store"] is False
        refused = http.post("/v1/responses", json={**huge, "background": True})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "store_failed"
        assert http.post("/v1/responses", json={"input": "Hi"}).json()["store"] is True


def resumable(http: httpx.Client, **fields: Any) -> tuple[dict[str, Any], list[str]]:
    """What is said about a stream whose caller wants to be able to go on with it, and its events."""
    body = {"model": MODEL, "input": "Hi", "tools": [WEATHER], "stream": True, **fields}
    response = http.post("/v1/responses", json=body, headers={"X-Octavo-Resumable": "1"})
    assert response.status_code == 200, response.text
    text = re.sub(r'"completed_at":\d+', '"completed_at":0', response.text)
    return json.loads(response.headers.get("x-octavo-resumable", "{}")), text.split("\n\n")[:-1]


@pytest.mark.parametrize("answer", ['It\'s "é"\n\nthe end', f"<think>hm</think>so {CALL}\n{CALL}"])
def test_another_server_goes_on_with_a_stream_at_each_token(
    http: httpx.Client, engine: FakeEngine, answer: str
) -> None:
    engine.answer = answer
    about, events = resumable(http)
    tokens: list[list[int]] = []
    shown = [event for event in events if not event.startswith(":")]
    _, from_start = resumable(http, resume={**about, "tokens": []})
    assert from_start == events, "its client has nothing yet"
    for number, event in enumerate(events):
        if event.startswith(": tokens "):
            tokens.append(json.loads(event.removeprefix(": tokens ")))
            _, rest = resumable(http, resume={**about, "tokens": tokens})
            assert rest == events[number + 1 :]
    assert len(tokens) > 5
    numbers = [json.loads(event.partition("data: ")[2])["sequence_number"] for event in shown]
    assert numbers == list(range(len(shown)))
    stored = http.get(f"/v1/responses/{about['id']}").json()
    last = json.loads(shown[-1].partition("data: ")[2])["response"]
    assert stored["output"] == last["output"] and stored["created_at"] == about["created"]


def test_a_response_that_is_stored_is_not_replaced_by_one_with_its_id(http: httpx.Client, engine: FakeEngine) -> None:
    engine.answer = "secret"
    about, _ = resumable(http)
    engine.answer = "other"
    assert "other" in resumable(http, resume={**about, "tokens": []})[1][-1]
    assert "secret" in http.get(f"/v1/responses/{about['id']}").text
    for fields in ({"include": ["message.output_text.logprobs"]}, {"background": True}):
        assert resumable(http, **fields)[0] == {}
    body = {"model": MODEL, "input": "Hi", "stream": True, "resume": {**about, "tokens": [[1]], "prompt": [1, 2, 3]}}
    counted = http.post("/v1/responses/input_tokens", json=body).json()
    assert counted["input_tokens"] == 3, counted
    for fields in ({"stream": False}, {"background": True}, {"top_logprobs": 2}, {"resume": {**about, "id": "resp_1"}}):
        body = {"model": MODEL, "input": "Hi", "stream": True, "resume": {**about, "tokens": []}, **fields}
        refused = http.post("/v1/responses", json=body)
        assert refused.status_code == 400 and refused.json()["error"]["param"] in ("resume", "resume.tokens")
