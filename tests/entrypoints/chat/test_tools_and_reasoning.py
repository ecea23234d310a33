"""Tools and reasoning over HTTP: what reaches the model, and what comes back, streamed or not."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from octavo.call_arguments import with_whole_pairs, without_open_escape
from octavo.engine import input_processor, off_loop
from octavo.entrypoints.chat import chat_run
from octavo.entrypoints.chat.chat_template import render_chat
from octavo.entrypoints.chat.reasoning import STYLES, Reasoning, new_splitter
from octavo.entrypoints.chat.reasoning_count import ReasoningCounter
from octavo.entrypoints.chat.tools.format_parser import FormatParser
from octavo.entrypoints.chat.tools.tool_formats import FORMATS
from octavo.entrypoints.http.server_args import ServerArgs
from octavo.entrypoints.openai.chat_messages import SentToolCall
from octavo.errors import ConfigError
from octavo.structured_output.grammar_builder import make_checked_grammar
from tests.entrypoints.fake_engine import MODEL, FakeEngine, serving
from tests.waiting import within

USER = {"role": "user", "content": "Hi"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}\n"
    "{% endfor %}"
)
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
HIDDEN = {"include_reasoning": False}
THOUGHT = "<think>\nWhich city?\n</think>\n\n"


@pytest.fixture(scope="module")
def chatty(tiny_tokenizer: Path) -> FakeEngine:
    engine = FakeEngine(tiny_tokenizer)
    engine.tokenizer.chat_template = TEMPLATE
    return engine


@pytest.fixture(scope="module")
def url(chatty: FakeEngine) -> Iterator[str]:
    with serving(
        chatty, disable_log_requests=True, enable_auto_tool_choice=True, tool_call_parser="hermes",
        reasoning_parser="qwen3",
    ) as url:  # fmt: skip
        yield url


@pytest.fixture
def client(url: str, chatty: FakeEngine) -> Iterator[openai.OpenAI]:
    chatty.reset()
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=within(60)) as client:
        yield client


def both(client: openai.OpenAI, **fields: Any) -> Any:
    """The whole answer's choice, after comparing it with the streamed one."""
    asked: dict[str, Any] = {"model": MODEL, "messages": [USER], **fields}
    choice = client.chat.completions.create(**asked).choices[0]
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "reasoning": "", "calls": []}
    reason = None
    for chunk in client.chat.completions.create(**asked, stream=True):
        for part in chunk.choices:
            reason = part.finish_reason or reason
            for name in ("content", "reasoning_content", "reasoning"):
                message[name] += getattr(part.delta, name, None) or ""
            for call in part.delta.tool_calls or ():
                if call.id:
                    assert call.index == len(message["calls"])
                    message["calls"].append([call.function.name, ""])
                message["calls"][call.index][1] += call.function.arguments
    assert reason == choice.finish_reason
    assert message["content"] == (choice.message.content or "")
    assert message["reasoning_content"] == message["reasoning"] == (getattr(choice.message, "reasoning", None) or "")
    calls = choice.message.tool_calls or ()
    assert message["calls"] == [[call.function.name, call.function.arguments] for call in calls]
    return choice


def grammar_of(engine: FakeEngine) -> str:
    return str(engine.seen[-1][1].grammar)


def test_an_answer_with_reasoning_and_a_call(client: openai.OpenAI, chatty: FakeEngine) -> None:
    chatty.answer = THOUGHT + "One moment.\n" + CALL
    choice = both(client, tools=[WEATHER])
    assert choice.finish_reason == "tool_calls"
    assert choice.message.reasoning_content == "Which city?"
    assert choice.message.content == "One moment."
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
        "function", "get_weather", {"city": "Zürich"},
    )  # fmt: skip
    assert call.id.startswith("call_")


@pytest.mark.parametrize("marks", [["<think>", "</think>"], []])
def test_the_usage_counts_the_tokens_of_reasoning(tiny_tokenizer: Path, marks: list[str]) -> None:
    """Alike in streams and where the reasoning is not shown, with its marks, be they tokens or not."""
    engine = FakeEngine(tiny_tokenizer)
    engine.tokenizer.backend_tokenizer.add_tokens(marks)
    with serving(engine, reasoning_parser="qwen3", disable_log_requests=True) as url:

        def count(answer: str, **fields: Any) -> int:
            engine.answer = answer
            body = {"messages": [USER], "stream_options": {"include_usage": True}, **fields}
            with httpx.Client(timeout=within(60)) as http:
                whole = http.post(f"{url}/v1/chat/completions", json={"messages": [USER], **fields}).json()["usage"]
                streamed = http.post(f"{url}/v1/chat/completions", json={**body, "stream": True}).text
                hidden = http.post(f"{url}/v1/chat/completions", json={**body, "stream": True, **HIDDEN}).text
                asked = {"input": "Hi", "max_output_tokens": fields.get("max_tokens")}
                response = http.post(f"{url}/v1/responses", json=asked).json()["usage"]
            found = int(whole["completion_tokens_details"]["reasoning_tokens"])
            for text in (streamed, hidden):
                assert json.loads(text.split("data: ")[-2])["usage"] == whole
            assert response["output_tokens_details"] == {"reasoning_tokens": found}
            return found

        assert count("Four.") == 0
        length = len(engine.tokenizer.backend_tokenizer.encode("<think>abc</think>", add_special_tokens=False).ids)
        assert count("<think>abc</think>Four.") == length
        assert count("<think>abcdef", max_tokens=4 if marks else 9) == (4 if marks else 9), "it has not ended"
        engine.answer = "<think>abc</think>Four."
        two = httpx.post(f"{url}/v1/chat/completions", json={"messages": [USER], "n": 2}, timeout=within(60)).json()
        assert two["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2 * length


def test_the_reasoning_of_a_long_answer_is_counted_by_a_thread(
    url: str, chatty: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """30,000 tokens would hold the event loop for a tenth of a second."""
    threads: list[str] = []
    add = ReasoningCounter.add

    def noted(counter: ReasoningCounter, token_ids: list[int]) -> None:
        threads.append(threading.current_thread().name)
        add(counter, token_ids)

    monkeypatch.setattr(ReasoningCounter, "add", noted)
    monkeypatch.setattr(off_loop, "MAX_INLINE_LENGTH", 40)
    monkeypatch.setattr(chat_run, "MAX_INLINE_LENGTH", 40)
    for answer, by_thread in (("<think>a</think>b", False), ("<think>" + "a b " * 20 + "</think>Yes.", True)):
        chatty.answer = answer
        body = {"messages": [USER], "n": 2}
        usage = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=within(60)).json()["usage"]
        reasoning, _, _ = answer.partition("</think>")
        least = len(chatty.tokenizer.backend_tokenizer.encode(reasoning, add_special_tokens=False).ids)
        assert usage["completion_tokens_details"]["reasoning_tokens"] > 2 * least
        assert len(threads) == 2 and all(name.startswith("octavo-text") == by_thread for name in threads)
        threads.clear()


def test_log_probabilities_are_those_of_every_token(client: openai.OpenAI, chatty: FakeEngine) -> None:
    chatty.answer = THOUGHT + "Four."
    for fields in ({}, {"extra_body": HIDDEN}):
        choice = both(client, logprobs=True, **fields)
        assert "".join(one.token for one in choice.logprobs.content).startswith("<think>")
        assert choice.message.content == "Four."


TOKENS = ["\n", "<think>", "a", "</think>", "b", "<tool_call>", CALL.removeprefix("<tool_call>")]


class TableDetokenizer:
    def add(self, token_ids: list[int]) -> str:
        return "".join(TOKENS[token] for token in token_ids)

    def flush(self) -> str:
        return ""


@pytest.mark.parametrize(
    ("prompt", "text", "count"),
    [
        ("assistant\n", [1, 2, 3, 4], 3),  # was 0 where they came as one output
        ("assistant\n", [0, 1, 2, 2, 3, 4, 4], 5),
        ("assistant\n", [4, 1, 2, 3], 0),
        ("assistant\n", [0, 0], 0),
        ("<think>", [2, 2, 2], 3),
        ("<think>", [2, 3, 1, 2, 3], 2),
        ("<think>", [2, 2, 5, 6], 2),  # a call ends it
        ("<think>", [2, 5, 2, 3, 4], 4),  # a mark of calls that begins none
        ("<think>", [2, 5], 2),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 9])
def test_reasoning_is_counted_token_by_token(prompt: str, text: list[int], count: int, size: int) -> None:
    reasoning = Reasoning.after(prompt, STYLES["qwen3"])
    assert reasoning is not None
    parser = partial(FormatParser, FORMATS["hermes"], {"get_weather": {}})
    counter = ReasoningCounter(new_splitter(reasoning, ("<tool_call>",), parser), TableDetokenizer())
    for i in range(0, len(text), size):
        counter.add(text[i : i + size])
    counter.finish()
    assert counter.num_tokens == count


def test_where_calls_are_not_to_be_parallel_the_first_is_the_only_one(
    client: openai.OpenAI, url: str, chatty: FakeEngine
) -> None:
    now = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    chatty.answer = "Well.\n" + CALL + "\n" + now + "\n" + CALL
    for choice in ("auto", None):
        fields: Any = {} if choice is None else {"tool_choice": choice}
        found = both(client, tools=[NOW, WEATHER], parallel_tool_calls=False, **fields)
        assert [call.function.name for call in found.message.tool_calls] == ["get_weather"]
        assert (found.message.content, found.finish_reason) == ("Well.", "tool_calls")
    assert len(both(client, tools=[NOW, WEATHER]).message.tool_calls) == 3
    tools = [{"name": "now", "input_schema": {"type": "object"}}, {"name": "get_weather", "input_schema": {}}]
    body = {"model": MODEL, "max_tokens": 300, "messages": [USER], "tools": tools}
    body["tool_choice"] = {"type": "auto", "disable_parallel_tool_use": True}
    blocks = httpx.post(f"{url}/v1/messages", json=body).json()["content"]
    assert [block["type"] for block in blocks] == ["text", "tool_use"]
    items: Any = [{"type": "function", **tool["function"]} for tool in (NOW, WEATHER)]
    answer = httpx.post(f"{url}/v1/responses", json={"input": "Hi", "tools": items, "parallel_tool_calls": False})
    assert [item["type"] for item in answer.json()["output"]] == ["message", "function_call"]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_arguments_are_json_whatever_python_reads(client: openai.OpenAI, chatty: FakeEngine, number: str) -> None:
    chatty.answer = CALL.replace('"Zürich"', number)
    message = both(client, tools=[WEATHER]).message
    assert message.tool_calls is None and number in message.content


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "get_weather"}}])
def test_no_grammar_of_tools_is_made_in_the_event_loop(
    url: str, chatty: FakeEngine, choice: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However short the body: a grammar can take a minute."""
    threads: list[str] = []

    def noted(*args: Any, **options: Any) -> Any:
        threads.append(threading.current_thread().name)
        return make_checked_grammar(*args, **options)

    monkeypatch.setattr(input_processor, "make_checked_grammar", noted)
    chatty.answer = CALL
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    body = {"messages": [USER], "tools": [strict], "tool_choice": choice}
    assert httpx.post(f"{url}/v1/chat/completions", json=body).status_code == 200
    assert [name.startswith("octavo-grammar") for name in threads] == [True]


def test_reasoning_may_have_a_budget(tiny_tokenizer: Path) -> None:
    """Where its marks are tokens. Messages to other models go on without: their clients send it to any."""
    budget: Any = {"messages": [USER], "thinking_token_budget": 3}
    message: Any = {"messages": [USER], "max_tokens": 9, "thinking": {"type": "enabled", "budget_tokens": 3}}
    for marks in (["<think>", "</think>"], []):
        engine = FakeEngine(tiny_tokenizer)
        engine.tokenizer.backend_tokenizer.add_tokens(marks)
        with serving(engine, reasoning_parser="qwen3", disable_log_requests=True, unknown_fields="ignore") as url:
            chat = httpx.post(f"{url}/v1/chat/completions", json=budget)
            assert chat.status_code == (200 if marks else 400), chat.text
            assert not marks or "token{0,3}" in grammar_of(engine)
            assert httpx.post(f"{url}/v1/messages", json=message).status_code == 200
            assert ("token{0,3}" in grammar_of(engine)) == bool(marks)
    with serving(engine, reasoning_parser="none", disable_log_requests=True) as url:
        assert httpx.post(f"{url}/v1/chat/completions", json=budget).status_code == 200, "nothing to bound"


def test_where_thinking_is_off_the_content_has_no_marks_and_the_grammar_no_reasoning(tiny_tokenizer: Path) -> None:
    engine = FakeEngine(tiny_tokenizer)
    engine.tokenizer.chat_template = TEMPLATE + "<think>\n\n</think>\n"
    engine.answer = "<answer>\nFour.\n</answer>"
    with (
        serving(engine, reasoning_parser="hunyuan_a13b", disable_log_requests=True) as url,
        openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=within(60)) as client,
    ):
        message = both(client, extra_body={"thinking_token_budget": 3}).message
        assert message.content == "Four." and "reasoning_content" not in message.model_dump(exclude_none=True)
        assert engine.seen[-1][1].grammar is None, "nothing to bound"
        both(client, response_format={"type": "json_object"})
        assert "answer>" not in grammar_of(engine) and "think>" not in grammar_of(engine)


def test_reasoning_can_be_left_out(client: openai.OpenAI, chatty: FakeEngine) -> None:
    chatty.answer = THOUGHT + "Four."
    choice = both(client, extra_body={"include_reasoning": False})
    assert choice.message.content == "Four."
    assert choice.message.reasoning is choice.message.reasoning_content is None
    both(client, logprobs=True)


def test_without_tools_or_with_none_of_them_calls_are_text(client: openai.OpenAI, chatty: FakeEngine) -> None:
    chatty.answer = CALL
    for fields in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        choice = both(client, **fields)
        assert (choice.message.content, choice.finish_reason, choice.message.tool_calls) == (CALL, "stop", None)
        assert "get_weather" not in chatty.tokenizer.decode(chatty.seen[-1][0])


def test_half_of_a_surrogate_pair_in_a_call_ends_no_conversation(
    url: str, client: openai.OpenAI, chatty: FakeEngine
) -> None:
    arguments, read = '{"city": "Z\\ud83d \\ud83d\\ude00"}', {"city": "Z\ufffd \U0001f600"}
    chatty.answer = f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>'

    def post(path: str, body: dict[str, Any]) -> Any:
        answer = httpx.post(url + path, content=json.dumps(body), headers={"content-type": "application/json"})
        assert answer.status_code == 200, answer.text
        return answer.json()

    named = {"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}  # type: ignore[index]
    message: dict[str, Any] = {"messages": [USER], "max_tokens": 200, "tools": [named]}
    assert post("/v1/messages", message)["content"][0]["input"] == read
    asked = {"model": MODEL, "messages": [USER], "tools": [WEATHER], "stream": False}
    (call,) = post("/api/chat", asked)["message"]["tool_calls"]
    assert call["function"]["arguments"] == read
    # The packages' streams fail at half of a pair.
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=within(60)) as other:
        for choice in ({}, {"tool_choice": {"type": "tool", "name": "get_weather"}}):
            with other.messages.stream(model=MODEL, **message, **choice) as stream:
                assert [block.input for block in stream.get_final_message().content] == [read]
    answer = post("/v1/chat/completions", asked)["choices"][0]["message"]
    called = {"type": "tool_use", "id": "x", "name": "get_weather", "input": json.loads(arguments)}
    result = {"type": "tool_result", "tool_use_id": "x", "content": "Rain"}
    turns = [USER, {"role": "assistant", "content": [called]}, {"role": "user", "content": [result]}]
    for path, body in (
        ("/v1/chat/completions", asked | {"messages": [USER, answer, {"role": "tool", "content": "Rain"}]}),
        ("/v1/messages", message | {"messages": turns}),
    ):
        post(path, body)
        assert json.dumps(read, ensure_ascii=False) in chatty.tokenizer.decode(chatty.seen[-1][0])


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        (r'"\ud83d"', r'"\ufffd"'), (r'"\uDE00\ud83d\ude00\ud83D"', r'"\ufffd\ud83d\ude00\ufffd"'),
        (r'"\\ud83d"', r'"\\ud83d"'), (r'"\\\ud83d\n"', r'"\\\ufffd\n"'), ('"\\', '"\\'),
        (r'"\u00e9\ud83d\ud83d\ude00"', r'"\u00e9\ufffd\ud83d\ude00"'),
    ],
)  # fmt: skip
def test_only_halves_of_pairs_are_replaced(text: str, whole: str) -> None:
    assert with_whole_pairs(text) == whole
    for end in range(len(text) + 1):  # also in pieces, of which none ends within an escape or a pair
        first = without_open_escape(text[:end])
        assert with_whole_pairs(first) + with_whole_pairs(text[len(first) :]) == whole
        assert len(first) >= end - len(r"\ud83d\ude0")


def test_a_broken_or_cut_call_is_content(client: openai.OpenAI, chatty: FakeEngine) -> None:
    chatty.answer = CALL.replace("}}", "}")
    choice = both(client, tools=[WEATHER])
    assert (choice.message.content, choice.finish_reason) == (chatty.answer, "stop")
    chatty.answer = CALL
    choice = both(client, tools=[WEATHER], max_tokens=40)
    assert (choice.message.content, choice.finish_reason) == (CALL[:40], "length")


def test_a_named_function_gets_arguments_by_its_grammar(client: openai.OpenAI, chatty: FakeEngine) -> None:
    chatty.answer = CALL
    choice = both(client, tools=[NOW, WEATHER], tool_choice={"type": "function", "function": {"name": "get_weather"}})
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Zürich"}')
    assert (choice.message.content, choice.finish_reason) == (None, "stop"), "as OpenAI says it"
    assert '"city"' in grammar_of(chatty) and "now" not in grammar_of(chatty)
    assert "think" in grammar_of(chatty)


def test_required_calls_are_read_as_they_are_spelled(client: openai.OpenAI, chatty: FakeEngine) -> None:
    chatty.answer = (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "a]}, {\\""}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    )
    choice = both(client, tools=[NOW, WEATHER], tool_choice="required")
    assert [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls] == [
        ("get_weather", {"city": 'a]}, {"'}), ("now", {}),
    ]  # fmt: skip
    assert choice.finish_reason == "tool_calls"
    assert "{0,31}" in grammar_of(chatty)
    both(client, tools=[NOW], tool_choice="required", parallel_tool_calls=False)
    assert "{0,31}" not in grammar_of(chatty)


@pytest.mark.parametrize("city", ["ab", "ba"])
@pytest.mark.parametrize("is_strict", [True, False])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_call_that_its_grammar_holds_in_part_is_compared_with_its_schema(
    client: openai.OpenAI, chatty: FakeEngine, choice: str, is_strict: bool, city: str
) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string", "pattern": "^(?!b)[ab]*$"}}}
    tool = {"type": "function", "function": {"name": "go", "parameters": schema, "strict": is_strict}}
    chatty.answer = f'<tool_call>\n{{"name": "go", "arguments": {{"city": "{city}"}}}}\n</tool_call>'
    asked: Any = {"model": MODEL, "messages": [USER], "tools": [tool], "tool_choice": choice}
    is_wrong = city == "ba" and (is_strict or choice == "required")
    expected = ("tool_calls", "schema_mismatch" if is_wrong else None)
    whole = client.chat.completions.create(**asked).choices[0]
    assert (whole.finish_reason, whole.stop_reason) == expected  # type: ignore[attr-defined]
    last = list(client.chat.completions.create(**asked, stream=True))[-1].choices[0]
    assert (last.finish_reason, last.stop_reason) == expected  # type: ignore[attr-defined]
    cut = client.chat.completions.create(**asked, max_tokens=len(chatty.answer) - 2).choices[0]
    assert (cut.finish_reason, cut.stop_reason) == ("length", None)  # type: ignore[attr-defined]
    cut = client.chat.completions.create(**asked, stop=[f'{city}"']).choices[0]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", f'{city}"')  # type: ignore[attr-defined]


def test_a_checked_call_ends_where_another_begins(client: openai.OpenAI, chatty: FakeEngine) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string", "pattern": "^(?!b)[ab]*$"}}}
    tool: Any = {"type": "function", "function": {"name": "go", "parameters": schema}}
    chatty.answer = '<tool_call>\n{"name": "go", "arguments": {"city": "ab"}}\n</tool_call>\n' + PATCHED
    asked: Any = {"model": MODEL, "messages": [USER], "tools": [tool, PATCH], "tool_choice": "required"}
    choice: Any = client.chat.completions.create(**asked).choices[0]
    assert len(choice.message.tool_calls) == 2 and choice.stop_reason is None


def test_a_call_that_its_grammar_holds_completely_is_not_checked(client: openai.OpenAI, chatty: FakeEngine) -> None:
    schema = {"type": "object", "properties": {"all": {"type": "array", "items": {"type": "integer"}}}}
    tool: Any = {"type": "function", "function": {"name": "go", "parameters": schema, "strict": True}}
    arguments = json.dumps({"all": [1] * 10_500})
    chatty.answer = f'<tool_call>\n{{"name": "go", "arguments": {arguments}}}\n</tool_call>'
    for asked in ("auto", "required"):
        assert both(client, tools=[tool], tool_choice=asked).stop_reason is None


PATCH: dict[str, Any] = {"type": "custom", "custom": {"name": "patch", "description": "Edits files."}}
PATCHED = '<tool_call>\n{"name": "patch", "arguments": {"input": "+a\\n-\\"ü\\""}}\n</tool_call>'


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "custom", "custom": {"name": "patch"}}])
@pytest.mark.parametrize("definition", [None, "start: /(.|\\n)+/"])
def test_a_custom_tool_is_called_with_a_text_and_the_call_can_be_sent_back(
    client: openai.OpenAI, chatty: FakeEngine, choice: Any, definition: str | None
) -> None:
    tool, chatty.answer = {**PATCH, "custom": dict(PATCH["custom"])}, PATCHED
    if definition:
        grammar = {"syntax": "lark", "definition": definition}
        tool["custom"]["format"] = {"type": "grammar", "grammar": grammar}
    asked: Any = {"model": MODEL, "messages": [USER], "tools": [tool, WEATHER], "tool_choice": choice}
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.message.tool_calls is not None
    (call,) = whole.message.tool_calls
    assert call.type == "custom" and (call.custom.name, call.custom.input) == ("patch", '+a\n-"ü"')
    assert whole.finish_reason == ("stop" if isinstance(choice, dict) else "tool_calls")
    assert (chatty.seen[-1][1].grammar is None) is (choice == "auto" and definition is None)
    deltas: list[Any] = []
    for chunk in client.chat.completions.create(**asked, stream=True):
        deltas += chunk.choices[0].delta.tool_calls or ()
    first = deltas[0].to_dict()
    assert first.pop("id").startswith("call_")
    assert first == {"index": 0, "type": "custom", "custom": {"name": "patch", "input": ""}}
    assert all(delta.to_dict().keys() == {"index", "custom"} for delta in deltas[1:])
    assert "".join(delta.custom["input"] for delta in deltas) == '+a\n-"ü"'
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    client.chat.completions.create(**{**asked, "messages": [USER, whole.message.to_dict(), result]})
    told = chatty.tokenizer.decode(chatty.seen[-1][0])
    assert told == 'patch;get_weather;user: Hiassistant: patch({"input": "+a\\n-\\"ü\\""})tool: done'


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "custom"}, "tools[0].custom"),
        ({"type": "custom", "custom": {}}, "tools[0].custom.name"),
        ({"type": "custom", "custom": {"name": "f"}, "function": {"name": "f"}}, "tools[0].function"),
        ({"type": "function"}, "tools[0].function"),
        ({**WEATHER, "custom": {"name": "f"}}, "tools[0].custom"),
        ({"type": "custom", "custom": {"name": "f", "format": {"type": "json"}}}, "tools[0].custom.format.type"),
        ({"type": "web"}, "tools[0].type"),
    ],
)  # fmt: skip
def test_what_a_tool_lacks_is_named(client: openai.OpenAI, tool: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=[USER], tools=[tool])  # type: ignore[list-item]
    assert refused.value.param == param
    for custom in ({"name": "f"}, {"input": "x"}):
        call: Any = {"id": "c", "type": "custom", "custom": custom}
        with pytest.raises(openai.BadRequestError, match='should have "custom"'):
            client.chat.completions.create(model=MODEL, messages=[{"role": "assistant", "tool_calls": [call]}])
    half: Any = {"type": "custom", "custom": {"name": "f", "input": "\ud800"}}
    with pytest.raises(ValueError, match=r"has a custom\.input that should be valid Unicode"):
        SentToolCall.model_validate(half)


def test_the_templates_that_know_tools_get_them_and_others_a_description(chatty: FakeEngine) -> None:
    messages: list[dict[str, Any]] = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]  # fmt: skip
    knowing = (
        "{% for t in tools %}{{ t.function.name }};{% endfor %}{% for m in messages %}{% if m.tool_calls %}"
        "{% set f = m.tool_calls[0].function %}{{ f.name }}{{ f.arguments | tojson }}"
        "{% else %}{{ m.role }}={{ m.content }}{% endif %};{% endfor %}"
    )
    tools: list[dict[str, Any]] = [WEATHER]
    rendered = render_chat(chatty.tokenizer, messages, chat_template=knowing, tools=tools)
    assert rendered == 'get_weather;user=Hi;get_weather{"city": "Rome"};tool=rain;'
    plain = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    rendered = render_chat(chatty.tokenizer, messages, chat_template=plain, tools=tools)
    assert rendered.startswith("[system]You may call one or more functions")
    assert '"description": "The weather."' in rendered
    assert '[assistant]<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>' in rendered
    assert rendered.endswith("[user]<tool_response>\nrain\n</tool_response>")
    system = {"role": "system", "content": "Be kind."}
    rendered = render_chat(chatty.tokenizer, [system, USER], chat_template=plain, tools=tools)
    assert rendered.startswith("[system]Be kind.\n\nYou may call")


def test_an_answer_with_calls_can_be_sent_back(client: openai.OpenAI, chatty: FakeEngine) -> None:
    chatty.answer = THOUGHT + CALL
    message = both(client, tools=[WEATHER]).message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sun"}
    chatty.answer = "It is sunny."
    messages: list[Any] = [USER, message.model_dump(), result]
    assert both(client, tools=[WEATHER], messages=messages).message.content == "It is sunny."
    prompt = chatty.tokenizer.decode(chatty.seen[-1][0])
    assert prompt == 'get_weather;user: Hiassistant: get_weather({"city": "Zürich"})tool: sun'


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"tool_call_parser": "x"}, "--tool-call-parser must be one of auto, none, apertus, cohere"),
        ({"reasoning_parser": "x"}, "--reasoning-parser must be one of auto, none, cohere, deepseek_r1"),
    ],
)
def test_flags_are_checked(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerArgs(**flags).check()
