"""Streams of the Responses and the Messages API: every event in its place, whatever the answer is made of, wherever it
is cut or fails, and whenever its client leaves. That each event has its published type is checked by `read_events`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.entrypoints.anthropic import test_messages
from tests.entrypoints.fake_engine import FakeEngine, serving
from tests.entrypoints.responses import test_responses
from tests.waiting import wait_until, within

CALL = test_responses.CALL
ANSWERS = {
    "text": "Hello there",
    "nothing": "",
    "reasoning": "<think>Hm, so.</think>",
    "calls": CALL + CALL,
    "reasoning and text": "<think>Hm.</think>Yes.",
    "all": f"<think>Hm.</think>Yes.{CALL}{CALL}",
    "text that begins like a call": "A <tool_call> is that.",
}
SUMMARY = (
    "reasoning_summary_part.added (reasoning_summary_text.delta )+reasoning_summary_text.done "
    "reasoning_summary_part.done "
)
INSIDE = {
    "message": "content_part.added (output_text.delta )*output_text.done content_part.done ",
    "reasoning": f"((reasoning_text.delta )+reasoning_text.done |{SUMMARY})",
    "function_call": "(function_call_arguments.delta )*function_call_arguments.done ",
}
ITEM = "|".join(f"{kind}.added {inside}{kind}.done " for kind, inside in INSIDE.items())
RESPONSE = re.compile(f"created in_progress ({ITEM})*(completed|incomplete|failed) ".replace(".", r"\."))
DELTAS = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}
BLOCK = "|".join(
    f"start:{kind} ({delta} )*{'signature_delta ' if kind == 'thinking' else ''}stop " for kind, delta in DELTAS.items()
)
MESSAGE = re.compile(f"message_start ({BLOCK})*message_delta message_stop ")
API: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "Hi", "tools": [test_responses.WEATHER]},
    "/v1/messages": {"messages": test_messages.HELLO, "tools": [test_messages.WEATHER], "max_tokens": 400},
}


@pytest.fixture(scope="module")
def agent(tiny_tokenizer: Path) -> Iterator[tuple[httpx.Client, FakeEngine]]:
    engine = FakeEngine(tiny_tokenizer, max_model_len=4096)
    with serving(engine, **test_responses.FLAGS) as url, httpx.Client(base_url=url, timeout=within(60)) as http:
        yield http, engine


def response_events(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    body = {**API["/v1/responses"], "stream": True, **fields}
    return test_responses.read_events(http.post("/v1/responses", json=body))


def message_events(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    return [e for e in test_messages.read_events(http, **(API["/v1/messages"] | fields)) if e["type"] != "ping"]


def response_order(events: list[dict[str, Any]]) -> str:
    """The events' names; those of items with the kind of the item."""
    names = []
    for event in events:
        name = event["type"].removeprefix("response.")
        names.append(name.replace("output_item", event["item"]["type"]) if name.startswith("output_item") else name)
    return "".join(f"{name} " for name in names)


def message_order(events: list[dict[str, Any]]) -> str:
    names = {
        "content_block_start": lambda event: f"start:{event['content_block']['type']}",
        "content_block_delta": lambda event: event["delta"]["type"],
        "content_block_stop": lambda event: "stop",
    }
    return "".join(f"{names.get(event['type'], lambda e: e['type'])(event)} " for event in events)


def check_response(events: list[dict[str, Any]]) -> None:
    assert RESPONSE.fullmatch(response_order(events)), response_order(events)
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == [event["item"] for event in done]
    for index, item in enumerate(event["item"] for event in done):
        own = [event for event in events if event.get("output_index") == index]
        assert {event.get("item_id", item["id"]) for event in own} == {item["id"]}
        text = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        parts = item.get("content") or item.get("summary") or [{"text": item.get("arguments")}]
        assert text == parts[0]["text"] and own[0]["item"]["id"] == item["id"]


def check_message(events: list[dict[str, Any]]) -> None:
    assert MESSAGE.fullmatch(message_order(events)), message_order(events)
    indices = [event["index"] for event in events if "index" in event]
    assert indices == sorted(indices) and set(indices) == set(range(len(set(indices))))


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_events_are_in_order_wherever_the_answer_is_cut(agent: tuple[httpx.Client, FakeEngine], answer: str) -> None:
    http, engine = agent
    engine.reset()
    engine.answer = answer
    num_tokens = len(engine.inputs.encode(answer, add_special_tokens=False)) + 1
    for length in (*range(1, num_tokens, max(1, num_tokens // 12)), num_tokens):
        for summary in (None, "auto"):
            check_response(response_events(http, max_output_tokens=length, reasoning={"summary": summary}))
        check_message(message_events(http, max_tokens=length))


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_an_error_in_the_middle_is_the_last_event(agent: tuple[httpx.Client, FakeEngine], answer: str) -> None:
    http, engine = agent
    engine.reset()
    engine.answer = answer
    whole_message = message_order(message_events(http))
    num_tokens = len(engine.inputs.encode(answer, add_special_tokens=False))
    for step in range(1, num_tokens, max(1, num_tokens // 12)):
        engine.fails_after = (step, RuntimeError("boom"))
        events = response_events(http)
        check_response(events)
        failed = events[-1]["response"]
        assert failed["status"] == "failed" and events[-1]["type"] == "response.failed"
        assert all(item["status"] == "incomplete" for item in failed["output"][-1:]), step
        messages = message_events(http)
        assert messages[-1].pop("request_id").startswith("req_")
        assert messages[-1] == {"type": "error", "error": {"type": "api_error", "message": "Internal error."}}
        assert whole_message.startswith(message_order(messages[:-1])), step


def muse_call(city: str) -> str:
    return (
        ' to=get_weather<|message|><atem:function_calls>\n<atem:invoke name="get_weather">\n'
        f'<atem:parameter name="city">{city}</atem:parameter>\n</atem:invoke>\n</atem:function_calls>'
    )


MUSE_NEXT = "<|eom|><|start|>assistant"
CITIES = ('Pa"ris\n\\', "<a> né 😀 {}")
# By format: the end of the prompt, and an answer of a text and two calls. Muse Glimmer's begins with reasoning.
OF_FORMATS = {
    "functionary": (
        ">>>", "all\nLet me look." + "".join(f">>>get_weather\n{json.dumps({'city': city})}" for city in CITIES)
    ),
    "muse_glimmer": (
        "<|start|>assistant", MUSE_NEXT.join([
            " to=self<|message|>Hm.", " to=user<|message|>Let me look.", *map(muse_call, CITIES)
        ]) + "<|eot|>",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_FORMATS)
def test_answers_of_messages_are_the_same_in_every_api(tiny_tokenizer: Path, name: str) -> None:
    prompt_end, answer = OF_FORMATS[name]
    engine = FakeEngine(tiny_tokenizer, max_model_len=4096)
    begin = "{# >>>all #}" if name == "functionary" else ""
    turns = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    engine.tokenizer.chat_template = f"{begin}{turns}{{% if add_generation_prompt %}}{prompt_end}{{% endif %}}"
    flags = {} if begin else {"tool_call_parser": name, "reasoning_parser": name}
    with (
        serving(engine, disable_log_requests=True, **flags) as url,
        httpx.Client(base_url=url, timeout=within(60)) as http,
    ):
        engine.answer = answer
        events = response_events(http)
        whole = http.post("/v1/responses", json=API["/v1/responses"]).json()
        kinds = ["reasoning"] * (not begin) + ["message", "function_call", "function_call"]
        for output in (events[-1]["response"]["output"], whole["output"]):
            assert [item["type"] for item in output] == kinds
            assert [json.loads(item["arguments"])["city"] for item in output[-2:]] == list(CITIES)
            assert output[-3]["content"][0]["text"] == "Let me look."
        (last,) = [e for e in message_events(http, max_tokens=999) if e["type"] == "message_delta"]
        message = http.post("/v1/messages", json=API["/v1/messages"] | {"max_tokens": 999}).json()
        assert last["delta"]["stop_reason"] == message["stop_reason"] == "tool_use"
        assert [one["type"] for one in message["content"]] == ["thinking"] * (not begin) + ["text"] + ["tool_use"] * 2
        assert [one["input"]["city"] for one in message["content"][-2:]] == list(CITIES)
        assert message["content"][-3]["text"] == "Let me look."
        num_tokens = len(engine.inputs.encode(answer, add_special_tokens=False)) + 1
        for length in range(1, num_tokens, num_tokens // 12):
            check_response(response_events(http, max_output_tokens=length))
            check_message(message_events(http, max_tokens=length))


@pytest.mark.parametrize("path", API)
@pytest.mark.parametrize("answer", ["Hello there", f"<think>Hm.</think>{CALL}", CALL])
def test_a_client_that_leaves_ends_its_request(agent: tuple[httpx.Client, FakeEngine], path: str, answer: str) -> None:
    http, engine = agent
    engine.reset()
    engine.answer, engine.is_paused = answer, True
    with http.stream("POST", path, json={**API[path], "stream": True}) as stream:
        lines = stream.iter_lines()  # which must outlive its first line: a generator that is gone hangs up
        first = next(line for line in lines if line.startswith("data: "))
        assert json.loads(first.removeprefix("data: "))["type"] in ("response.created", "message_start")
        wait_until(lambda: len(engine.active) == 1)
    wait_until(lambda: not engine.active)
    engine.is_paused = False
    assert http.post(path, json=API[path]).status_code == 200
