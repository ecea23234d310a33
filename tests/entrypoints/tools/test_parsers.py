"""Each format of tool calls over answers as models write them, whole, cut anywhere, and broken."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest

from octavo.entrypoints.openai.answer import AnswerFormat, AnswerReader
from octavo.entrypoints.openai.tools import PARSERS

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "metric": {"type": "boolean"}},
}
TOOLS = {"get_weather": WEATHER, "now": {"type": "object"}}


def read(parser: str, text: str, cuts: list[int] | None = None) -> tuple[str | None, list[tuple[str, Any]]]:
    """Content and calls of an answer that comes in pieces."""
    reader = AnswerReader(AnswerFormat(new_tool_parser=lambda: PARSERS[parser](TOOLS)))
    content, calls = "", list[list[str]]()
    edges = [0, *(cuts or []), len(text)]
    for i, (begin, end) in enumerate(itertools.pairwise(edges)):
        for delta in reader.add(text[begin:end], is_end=i == len(edges) - 2):
            content += delta.get("content", "")
            for call in delta.get("tool_calls", ()):
                assert call["index"] == len(calls) - ("id" not in call)
                if "id" in call:
                    assert call["function"]["arguments"] == ""
                    calls.append([call["function"]["name"], ""])
                calls[-1][1] += call["function"]["arguments"]
    return content or None, [(name, json.loads(arguments)) for name, arguments in calls]


PARIS = ("get_weather", {"city": "Paris"})
NOW: tuple[str, dict[str, Any]] = ("now", {})
GOOD: list[tuple[str, str, str | None, list[Any]]] = [
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', None, [PARIS]),
    (
        "hermes",
        'Let me look.\n<tool_call>\n{"arguments": {"city": "Paris"}, "name": "get_weather"}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n',
        "Let me look.",
        [PARIS, NOW],
    ),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}}', None, [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{}"}</tool_call> Done.', " Done.", [NOW]),
    (
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "a </tool_call> \\" } { ü"}}</tool_call>',
        None,
        [("get_weather", {"city": 'a </tool_call> " } { ü'})],
    ),
    ("hermes", "Plain text with < and <tool> in it.\n\n", "Plain text with < and <tool> in it.\n\n", []),
    ("qwen", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', None, [PARIS]),
    (
        "qwen3_coder",
        "I'll check.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n"
        "3\n</parameter>\n<parameter=metric>\nTrue\n</parameter>\n<parameter=other>\n[1, null]\n</parameter>\n"
        "</function>\n</tool_call>",
        "I'll check.",
        [("get_weather", {"city": "Paris", "days": 3, "metric": True, "other": [1, None]})],
    ),
    (
        "qwen",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n12\nlines\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        None,
        [("get_weather", {"city": "12\nlines"}), NOW],
    ),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": {}}]',
        None,
        [PARIS, NOW],
    ),
    ("mistral", '[TOOL_CALLS] [{"name": "now", "arguments": {}}]', None, [NOW]),
    ("mistral", 'Sure.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now{}', "Sure.", [PARIS, NOW]),
    ("mistral", "[TOOL_CALLS]now[CALL_ID]a1B2c3D4e[ARGS]{}", None, [NOW]),
    ("mistral", "No calls [TOOL] here", "No calls [TOOL] here", []),
    ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris"}}', None, [PARIS]),
    (
        "llama3_json",
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "now", "arguments": {}}',
        None,
        [PARIS, NOW],
    ),
    ("llama3_json", 'Use {"name": "now", "parameters": {}}', 'Use {"name": "now", "parameters": {}}', []),
    ("llama3_json", '{"name": "Ada"}', '{"name": "Ada"}', []),
    ("pythonic", '[get_weather(city="Paris"), now()]', None, [PARIS, NOW]),
    ("pythonic", '<|python_start|>[get_weather(city="Paris")]<|python_end|>', None, [PARIS]),
    (
        "pythonic",
        "[get_weather(city='a [b] (c)', days=-3, metric=true, more={'x': [1.5, None]})]",
        None,
        [("get_weather", {"city": "a [b] (c)", "days": -3, "metric": True, "more": {"x": [1.5, None]}})],
    ),
    ("pythonic", "[1, 2, 3] is a list.", "[1, 2, 3] is a list.", []),
    ("pythonic", "Text first [now()]", "Text first [now()]", []),
]
BROKEN = [
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": }}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par'),
    ("hermes", '<tool_call>\n{"name": 7, "arguments": {}}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call>'),
    ("hermes", "<tool_call>get_weather(Paris)</tool_call>"),
    ("hermes", "<tool_call>"),
    ("hermes", "<tool_ca"),
    ("hermes", "</tool_call>"),
    ("hermes", '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 3000 + "1" + "}" * 3000 + "}</tool_call>"),
    ("qwen", "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</function>\n</tool_call>"),
    ("qwen", "<tool_call>\n<function=>\n</function>\n</tool_call>"),
    ("qwen", "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar"),
    ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}'),
    ("mistral", '[TOOL_CALLS][{"nom": "now"}]'),
    ("mistral", "[TOOL_CALLS]now now now"),
    ("mistral", "[TOOL_CALLS]"),
    ("llama3_json", '{"name": "now", "parameters": {"a": }}'),
    ("llama3_json", '{"name": "now", "parameters": {'),
    ("llama3_json", "<|python_tag|>import os"),
    ("pythonic", "[get_weather(city=open('x'))]"),
    ("pythonic", "[get_weather('Paris')]"),
    ("pythonic", "[get_weather(city='Paris'"),
    ("pythonic", "[get_weather(**{})]"),
    ("pythonic", "[f(a=" + "(" * 2000 + ")" * 2000 + ")]"),
]


@pytest.mark.parametrize(("parser", "text", "content", "calls"), GOOD)
def test_calls_are_found(parser: str, text: str, content: str | None, calls: list[Any]) -> None:
    assert read(parser, text) == (content, calls)


@pytest.mark.parametrize(("parser", "text"), BROKEN)
def test_what_is_broken_is_content(parser: str, text: str) -> None:
    assert read(parser, text) == (text, [])


@pytest.mark.parametrize(("parser", "text"), [case[:2] for case in GOOD] + BROKEN)
def test_how_a_text_is_cut_makes_no_difference(parser: str, text: str) -> None:
    text = text[:400]
    whole = read(parser, text)
    assert read(parser, text, list(range(1, len(text)))) == whole
    rng = random.Random(0)
    for _ in range(20):
        cuts = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randint(1, 4))))
        assert read(parser, text, cuts) == whole
