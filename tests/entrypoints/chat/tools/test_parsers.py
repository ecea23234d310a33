"""Each format of tool calls over answers as models write them, whole, cut anywhere, and broken."""

# ruff: noqa: E501 - answers are easier to read in one line

from __future__ import annotations

import itertools
import json
import random
import re
from typing import Any

import pytest

from octavo.entrypoints.chat.answer_reader import AnswerFormat, AnswerReader, CallDelta, TextDelta
from octavo.entrypoints.chat.tools import format_parser, tool_parser_base
from octavo.entrypoints.chat.tools.format_parser import FormatParser
from octavo.entrypoints.chat.tools.tool_formats import FORMATS

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "metric": {"type": "boolean"}},
}
TOOLS = {"get_weather": WEATHER, "now": {"type": "object"}}


def read(parser: str, text: str, cuts: list[int] | None = None) -> tuple[str | None, list[tuple[str, Any]]]:
    """Content and calls of an answer that comes in pieces."""
    reader = AnswerReader(AnswerFormat(new_tool_parser=lambda: FormatParser(FORMATS[parser], TOOLS)))
    content, calls = "", list[list[str]]()
    edges = [0, *(cuts or []), len(text)]
    for i, (begin, end) in enumerate(itertools.pairwise(edges)):
        for delta in reader.add(text[begin:end], is_end=i == len(edges) - 2):
            if isinstance(delta, TextDelta):
                content += delta.text
                continue
            assert isinstance(delta, CallDelta) and delta.index == len(calls) - (not delta.name)
            if delta.name:
                assert delta.id and not delta.arguments
                calls.append([delta.name, ""])
            calls[-1][1] += delta.arguments
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
    ("hermes", '<tool_call>{"name": "now", "arguments": "null"}</tool_call>', None, [NOW]),
    (
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": null, "parameters": {"city": "Paris"}}</tool_call>',
        None,
        [PARIS],
    ),
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
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\na </parameter> b\n</parameter>\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        None,
        [("get_weather", {"city": "a </parameter> b", "days": 3})],
    ),
    ("qwen3_coder", '<tool_call>\n<function=get_weather>\n{"city": "Paris"}\n</function>\n</tool_call>', None, [PARIS]),
    ("glm45", "<tool_call>now<tool_call>now</tool_call>", None, [NOW, NOW]),
    ("gemma4", "<|tool_call>call:now<tool_call|>", None, [NOW]),
    ("gemma4", "<|tool_call>call:later<tool_call|>", "<|tool_call>call:later<tool_call|>", []),
    (
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        None,
        [NOW],
    ),
    ("mistral", "[TOOL_CALLS]now[ARGS][TOOL_CALLS]now[ARGS]{}", None, [NOW, NOW]),
    ("mistral", "[TOOL_CALLS]later[TOOL_CALLS]now[ARGS]{}", "[TOOL_CALLS]later", [NOW]),
    ("mistral", "[TOOL_CALLS]now", None, [NOW]),
    ("mistral", "[TOOL_CALLS]later", "[TOOL_CALLS]later", []),
    ("functionary", "x\n>>>now\n", "x", [NOW]),
    ("functionary", "x >>> now", "x >>> now", []),  # without its line, the mark is text
    ("functionary", ">>>now\n>>>now\n{}", None, [NOW, NOW]),
    ("glm45", "The <tool_call>word<tool_call> is a mark", "The <tool_call>word<tool_call> is a mark", []),
    (
        "openai",
        '<|channel|>commentary to=repo_browser.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>',
        None,
        [PARIS],
    ),
    (
        "glm45",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value></arg_value> ends it</arg_value>\n</tool_call>",
        None,
        [("get_weather", {"city": "</arg_value> ends it"})],
    ),
    (
        "kimi_k2",
        '<|tool_calls_section_begin|><|tool_call_begin|>functions_get_weather_2<|tool_call_argument_begin|>{"city": "Paris"}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        None,
        [PARIS],
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
    ("llama3_json", '<|python_tag|>get_weather.call(city="a (b)")', None, [("get_weather", {"city": "a (b)"})]),
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
    ("pythonic", "Text first [now()]", "Text first", [("now", {})]),
    ("pythonic", "Text [first()] of it", "Text [first()] of it", []),
    (
        "apertus",
        '<|tools_prefix|>[{"get_weather": {"city": "Paris"}}, {"now": {}}]<|tools_suffix|>',
        None,
        [PARIS, NOW],
    ),
    (
        "solar_open",
        '<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>get_weather<|tool_call:args|>{"city": "Paris"}'
        "<|tool_call:end|><|tool_call:begin|>f6<|tool_call:name|>now<|tool_call:args|>{}<|tool_call:end|><|calls|>",
        None,
        [PARIS, NOW],
    ),
    (
        "minicpm5",
        'Well.\n<function name="get_weather">\n  <param name="city">Paris</param>\n</function>',
        "Well.",
        [PARIS],
    ),
    ("pythonic", 'Let me see: [get_weather(city="Paris"), now()] Wait.', "Let me see: Wait.", [PARIS, NOW]),
    ("pythonic", '[get_weather(city="Paris")] Wait.', " Wait.", [PARIS]),
    # What models leave as it is in texts, and zeros before numbers.
    (
        "pythonic",
        "[get_weather(city='It's\nhere', days=07)]",
        None,
        [("get_weather", {"city": "It's\nhere", "days": 7})],
    ),
    # Python keeps some names for itself.
    (
        "pythonic",
        '[now(from="in=3, (if", in=07), now(is=[1])]',
        None,
        [("now", {"from": "in=3, (if", "in": 7}), ("now", {"is": [1]})],
    ),
    # It does not have the names of many tools and arguments.
    (
        "lfm2",
        "<|tool_call_start|>[read-file(file-path=\"a-b(c)\", $top=01, name_0_=2), a.b-01(a.b='it's')]<|tool_call_end|>",
        None,
        [("read-file", {"file-path": "a-b(c)", "$top": 1, "name_0_": 2}), ("a.b-01", {"a.b": "it's"})],
    ),
    ("pythonic", '[resolve-library-id(q="a"), 21st_f()]', None, [("resolve-library-id", {"q": "a"}), ("21st_f", {})]),
    ("pythonic", "[now(a=1-b)]", "[now(a=1-b)]", []),
    (
        "gemma4",
        '<|tool_call>call:now{a:<|"|>None<|"|>,my key:None,$x:[True,{é-1:False}]}<tool_call|>',
        None,
        [("now", {"a": "None", "my key": None, "$x": [True, {"é-1": False}]})],
    ),
    (
        "minicpm5",
        '<function name="get_weather"><param name="city"><![CDATA[<b>\n</param> ]] ]]></param>'
        '<param name="days"><![CDATA[3]]></param></function>',
        None,
        [("get_weather", {"city": "<b>\n</param> ]] ", "days": 3})],
    ),
    (
        "minicpm5",
        '<function name="get_weather"><param name="city"><![CDATA[a</param></function>',
        None,
        [("get_weather", {"city": "<![CDATA[a"})],
    ),
    ("gemma3", "```tool_code\nassert(class='a', not=None)\n```", None, [("assert", {"class": "a", "not": None})]),
    (
        "lfm2",
        '<|tool_call_start|>[get_weather(city="a\nb \\"c\\"", days=0)]<|tool_call_end|>',
        None,
        [("get_weather", {"city": 'a\nb "c"', "days": 0})],
    ),
    (
        "gemma3",
        "```tool_code\nget_weather(city='the dog's', days=007)\n```",
        None,
        [("get_weather", {"city": "the dog's", "days": 7})],
    ),
    # Calls without arguments, and sections without calls.
    ("deepseek_v32", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="now"/>\n</｜DSML｜function_calls>', None, [NOW]),
    (
        "deepseek_v4",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="now" />\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        None,
        [NOW, NOW],
    ),
    ("minimax_m2", '<minimax:tool_call><invoke name="now"/></minimax:tool_call>', None, [NOW]),
    ("qwen", "<tool_call>\n<function=now/>\n</tool_call>", None, [NOW]),
    ("deepseek_v4", "Well.<｜DSML｜tool_calls>\n</｜DSML｜tool_calls>", "Well.", []),
    ("kimi_k2", "Well.<|tool_calls_section_begin|><|tool_calls_section_end|>", "Well.", []),
    ("hermes", "Well.<tool_call>\n</tool_call>", "Well.", []),
    ("jamba", "Well.<tool_calls>[]</tool_calls>", "Well.", []),
    ("kimi_k2", "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|><|tool_call_end|>", None, [NOW]),
    ("deepseek_v31", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>\n<｜tool▁call▁end｜>", None, [NOW]),
    ("openai", "<|channel|>commentary to=functions.now <|constrain|>json<|message|><|call|>", None, [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', None, [NOW]),
    ("llama3_json", '{"name": "now", "parameters": " "}', None, [NOW]),
    ("gemma4", 'Well.<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}\n', "Well.", [PARIS]),
    # Real line breaks and tabs in the texts of JSON.
    (
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "a\n\tb"}}\n</tool_call>',
        None,
        [("get_weather", {"city": "a\n\tb"})],
    ),
    ("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "a\nb"}', None, [("get_weather", {"city": "a\nb"})]),
    (
        "qwen",
        '<tool_call>\n<function=now>\n<parameter=x>\n["a\nb"]\n</parameter>\n</function>\n</tool_call>',
        None,
        [("now", {"x": ["a\nb"]})],
    ),
    # Argument marks that were forgotten.
    (
        "qwen",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        None,
        [("get_weather", {"city": "Paris", "days": 3})],
    ),
    (
        "glm45",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        None,
        [("get_weather", {"city": "Paris", "days": 3})],
    ),
    (
        "qwen",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</function>\n</tool_call>\n<tool_call>\n<function=get_weather>\n"
        "<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>",
        None,
        [PARIS, ("get_weather", {"city": "Rome"})],
    ),
    # Texts in which marks stand, and lines.
    (
        "qwen",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\na\n</function> <parameter=x> b\n\n</parameter>\n</function>\n</tool_call>",
        None,
        [("get_weather", {"city": "a\n</function> <parameter=x> b\n"})],
    ),
    # The schema decides what a text is, whatever the call says.
    (
        "deepseek_v32",
        '<｜DSML｜function_calls><｜DSML｜invoke name="get_weather"><｜DSML｜parameter name="days" string="true">1</｜DSML｜parameter>'
        '<｜DSML｜parameter name="city" string="false">12</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>',
        None,
        [("get_weather", {"days": 1, "city": "12"})],
    ),
    # A counter in the place of a name.
    (
        "kimi_k2",
        '<|tool_calls_section_begin|><|tool_call_begin|>0<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>',
        None,
        [PARIS],
    ),
    (
        "minimax_m3",
        ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="get_weather">]<]minimax[>[<city>Paris]<]minimax[>[</city>'
        "]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
        None,
        [PARIS],
    ),
    # The next mark ends an argument whose own was forgotten.
    (
        "qwen",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</function>\n</tool_call>",
        None,
        [("get_weather", {"city": "Paris"})],
    ),
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
    ("qwen", "<tool_call>\n<function=>\n</function>\n</tool_call>"),
    ("kimi_k2", "<|tool_call_begin|>nothing<|tool_call_end|>"),
    ("gemma4", '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>'),
    ("kimi_k2", '<|tool_call_begin|>7<|tool_call_argument_begin|>{"odd": 1}<|tool_call_end|>'),
    ("qwen", "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar"),
    ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}'),
    ("mistral", '[TOOL_CALLS][{"nom": "now"}]'),
    ("mistral", "[TOOL_CALLS]now now now"),
    ("mistral", "[TOOL_CALLS]"),
    ("llama3_json", '{"name": "now", "parameters": {"a": }}'),
    ("llama3_json", '{"name": "now", "parameters": {'),
    ("llama3_json", "<|python_tag|>import os"),
    ("llama3_json", '<|python_tag|>get_weather.call(city="'),
    ("llama3_json", "<|python_tag|>other.call()"),
    ("pythonic", "[get_weather(city=open('x'))]"),
    ("pythonic", "[get_weather('Paris')]"),
    ("pythonic", "[get_weather(city='Paris'"),
    ("pythonic", "[get_weather(**{})]"),
    ("pythonic", "[get_weather(city=" + "'x" * 200_000),
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


def _arguments(size: int) -> str:
    return json.dumps({"city": ['}] \\ "<' for _ in range(size // 12)]})


LARGE = {
    "hermes": lambda size: f'<tool_call>{{"name": "get_weather", "arguments": {_arguments(size)}}}</tool_call>',
    "qwen": lambda size: f"<tool_call><function=now>\n<parameter=x>{'a < b > ' * (size // 8)}</parameter></function>",
    "mistral": lambda size: f"[TOOL_CALLS]get_weather[ARGS]{_arguments(size)}",
    "llama3_json": lambda size: f'{{"name": "get_weather", "parameters": {_arguments(size)}}}',
}
NEVER = {
    "spaces": ("hermes", lambda size: '<tool_call>{"name": "now"}' + " " * size),
    "spaces in text": ("hermes", lambda size: "<tool_call>" + " " * size),
    "marks": ("hermes", lambda size: '<tool_call>{"' * (size // 13)),
    "nested": ("hermes", lambda size: '<tool_call>{"a": ' * (size // 34) + "}" * (size // 34)),
    "functions": ("qwen", lambda size: "<tool_call><function=f>" * (size // 23)),
    "ends of values": ("qwen", lambda size: "<tool_call><function=f><parameter=a>x</parameter> y" * (size // 50)),
    "names": ("mistral", lambda size: "[TOOL_CALLS]" + "a" * size),
    "python": ("pythonic", lambda size: "[" + "a" * size),
}


class Work:
    """Counts the characters that parsers look at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_characters = 0
        end, find, search = tool_parser_base.JsonScanner.end, tool_parser_base.find, tool_parser_base.search

        def counted_end(scanner: tool_parser_base.JsonScanner, text: str, begin: int = 0) -> int | None:
            found = end(scanner, text, begin)
            self.num_characters += (len(text) if found is None else found) - begin
            return found

        def counted_find(text: str, mark: str, begin: int) -> int:
            found = find(text, mark, begin)
            self.num_characters += (len(text) if found < 0 else found + len(mark)) - begin
            return found

        def counted_search(text: str, marks: re.Pattern[str], begin: int) -> re.Match[str] | None:
            found = search(text, marks, begin)
            self.num_characters += (len(text) if found is None else found.end()) - begin
            return found

        monkeypatch.setattr(tool_parser_base.JsonScanner, "end", counted_end)
        monkeypatch.setattr(tool_parser_base, "find", counted_find)
        monkeypatch.setattr(format_parser, "search", counted_search)


@pytest.mark.parametrize("parser", LARGE)
def test_a_long_call_in_small_pieces_is_looked_at_once(parser: str, monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(monkeypatch)
    for size in (10_000, 20_000, 40_000):
        text = LARGE[parser](size)
        work.num_characters = 0
        assert len(read(parser, text, list(range(4, len(text), 4)))[1]) == 1
        # A mark of up to 12 characters may begin in every piece of 4.
        assert work.num_characters <= 5 * len(text)


@pytest.mark.parametrize("kind", NEVER)
def test_what_only_looks_like_calls_takes_no_more_than_twice_the_work_for_twice_the_length(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parser, make = NEVER[kind]
    work = Work(monkeypatch)
    for size in (20_000, 40_000, 80_000):
        text = make(size)
        for cuts in ([], list(range(4, len(text), 4))):
            work.num_characters = 0
            read(parser, text, cuts)
            assert work.num_characters <= 6 * len(text) + format_parser._MAX_REREAD
