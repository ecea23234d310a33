"""Every format by its description: calls are read however their text is cut, and forced calls are written as they are
read."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from octavo.entrypoints.chat.answer_reader import AnswerFormat, AnswerReader, answer_format, wanted_grammar
from octavo.entrypoints.chat.reasoning import FUNCTIONARY, STYLES
from octavo.entrypoints.chat.tools.call_spelling import list_of_calls, spelling
from octavo.entrypoints.chat.tools.forced_calls import ForcedCallsReader
from octavo.entrypoints.chat.tools.format_detection import ModelFormats, model_formats
from octavo.entrypoints.chat.tools.format_parser import FormatParser, trigger_marks
from octavo.entrypoints.chat.tools.text_rules import text_rules
from octavo.entrypoints.chat.tools.tool_formats import FORMATS, HERMES, KeyedValues, Tags, ToolFormat
from octavo.entrypoints.chat.tools.tool_parser_base import Call, ToolParser
from octavo.entrypoints.openai.request_bodies import ChatCompletionRequest
from octavo.errors import RequestError
from octavo.sampling_params import StructuredOutputsParams
from octavo.structured_output.answer_parts import ReasoningMarks, ToolCalls
from octavo.structured_output.final_check import MISMATCH, CallChecks
from octavo.structured_output.grammar_builder import WantedGrammar, make_checked_grammar
from octavo.structured_output.schema_formats import has_format
from tests.entrypoints.chat.test_answer_memory import bytes_tokenizer
from tests.entrypoints.chat.tools.test_format_detection import Templated, chat, each
from tests.entrypoints.chat.tools.written import TOOLS, content_of, write
from tests.structured_output.corpus import random_answer
from tests.structured_output.grammars import make_grammar
from tests.structured_output.test_grammar import follows

NAMES = {form: name for name, form in FORMATS.items()}  # once each
BY_FORMAT = pytest.mark.parametrize("form", [pytest.param(form, id=name) for form, name in NAMES.items()])
SOME = ("gemma4", "hermes", "llama3_json", "pythonic", "qwen3_coder")
TEXT = {"type": "string"}
NEVER_ENDING = ("hy_v3", "hy_v3_plain", "minimax", "minimax_m2", "minimax_m3")  # at random, within 500 bytes
# Letters, blanks, what JSON and Python escape, and parts of marks.
TEXTS = st.text(st.sampled_from("ab é世\n\t\"'\\{}[]<>|/=:,`0"), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | TEXTS, lambda inner: st.lists(inner, max_size=2), max_leaves=3
)
ARGUMENTS = st.fixed_dictionaries(
    {"city": TEXTS},
    optional={
        "days": st.integers(), "metric": st.booleans(), "unit": st.sampled_from("CF"),
        "more": st.dictionaries(st.sampled_from(["k", "key_2"]), VALUES, max_size=2),
    },
)  # fmt: skip
CALLS = st.lists(st.tuples(st.just("get_weather"), ARGUMENTS) | st.just(("now", {})), min_size=1, max_size=3)


def read(
    new_reader: Callable[[], ToolParser], text: str, cuts: list[int], *, is_cut: bool = False
) -> tuple[str, list[tuple[str, Any]]]:
    reader, content, calls = new_reader(), "", list[list[str]]()
    edges = [0, *sorted(cuts), len(text)]
    pieces = [piece for i in range(len(edges) - 1) for piece in reader.add(text[edges[i] : edges[i + 1]])]
    for piece in pieces + reader.finish(is_cut=is_cut):
        if not isinstance(piece, Call):
            content += piece
        elif piece.name is not None:
            calls.append([piece.name, piece.arguments])
        else:
            calls[-1][1] += piece.arguments
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


def sayable(form: ToolFormat, calls: list[tuple[str, dict[str, Any]]]) -> bool:
    """Whether a format has a way to say these texts: what stands between marks cannot hold them."""
    texts = json.dumps(calls, ensure_ascii=False)
    if isinstance(form.body, KeyedValues):
        return form.body.quote not in texts and form.end not in texts
    return True


@BY_FORMAT
@settings(max_examples=10, deadline=None, derandomize=True)
@given(calls=CALLS, before=TEXTS, after=TEXTS, data=st.data())
def test_calls_are_read_however_their_text_is_cut(
    form: ToolFormat, calls: list[tuple[str, dict[str, Any]]], before: str, after: str, data: st.DataObject
) -> None:
    if not sayable(form, calls):
        return
    text = write(form, calls)
    if not form.is_whole_answer:
        text = f"{before}x{text}\nx{after}"
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    whole = read(lambda: FormatParser(form, TOOLS), text, [])
    assert whole[1] == calls
    if not form.is_whole_answer:
        assert whole[0].replace("\n", "") == f"{before}xx{after}".replace("\n", "")
    assert read(lambda: FormatParser(form, TOOLS), text, cuts) == whole
    assert read(lambda: FormatParser(form, TOOLS), text, list(range(len(text)))) == whole


FORCED: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": "Aé <b> } \n x", "days": 3, "unit": "C", "more": {"k": [1, "</x>"]}}), ("now", {}),
]  # fmt: skip


@BY_FORMAT
def test_forced_calls_are_written_and_read_in_the_format(form: ToolFormat) -> None:
    spelled, forced = spelling(form, TOOLS), partial(write, as_forced=True)
    assert spelled is not None
    grammar = make_grammar(ToolCalls(TOOLS, spelled))
    text = forced(form, FORCED).replace("'", '"')
    assert follows(grammar, text)
    assert follows(grammar, forced(form, FORCED[1:]))
    assert not follows(grammar, forced(form, [("get_weather", {"days": 3})]))
    assert not follows(grammar, forced(form, [("get_weather", {"city": "A", "unit": "K"})]))
    assert not follows(grammar, forced(form, [("other", {})]))
    assert not follows(make_grammar(ToolCalls(TOOLS, spelled, is_parallel=False)), text)
    text = content_of(form, text)
    readers: list[Callable[[], ToolParser]] = [lambda: FormatParser(form, TOOLS)]
    if spelled.has_json_arguments:
        readers.append(lambda: ForcedCallsReader(spelled))
    for new_reader in readers:
        for cuts in ([], list(range(len(text))), [7, 20, 21]):
            assert read(new_reader, text, cuts) == ("", FORCED)


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "string", "pattern": "^a+$"}, ['<|"|>aa<|"|>'], ['<|"|>ab<|"|>', "aa", '"aa"']),
        ({"type": ["string", "integer"], "minimum": 3}, ['<|"|>2<|"|>', "3"], ["2", "null"]),
        ({"enum": ["b c", 5, None]}, ['<|"|>b c<|"|>', "5", "null"], ['<|"|>5<|"|>', "6"]),
        (
            {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
            ["[1]", "[1,2]"],
            ["[]", "[1,2,3]", "[,]"],
        ),
        ({"type": "array", "maxItems": 0}, ["[]"], ["[1]"]),
        (
            {"anyOf": [{"type": "boolean"}, {"$ref": "#/$defs/D"}]},
            ["true", "{k:1}", "{}"],
            ["{j:1}", '{k:<|"|>1<|"|>}', "1"],
        ),
        ({"type": "object"}, ["{}", '{a:1,b-c:[{d:<|"|>x<|"|>},null]}'], ["[]", '{"a":1}', "{a:}"]),
        ({}, ["1", "[]", "{a:{}}", '<|"|><|"|>'], ["a", "[1"]),
        ({"allOf": [{"type": "string"}, {"minLength": 1}]}, ['<|"|>x<|"|>'], ['<|"|><|"|>', "1"]),
        ({"allOf": [{"type": "array"}, {"minItems": 1}]}, None, None),
        ({"type": "array", "uniqueItems": True}, None, None),
        # A mark would end the text or the call.
        ({"enum": ['x<|"|>y', "k"]}, None, None),
        ({"enum": ["x<tool_call|>y"]}, None, None),
    ],
)  # fmt: skip
def test_gemmas_calls_hold_the_schemas_that_their_notation_can_express(
    schema: dict[str, Any], right: list[str] | None, wrong: list[str] | None
) -> None:
    defined = {"D": {"type": "object", "properties": {"k": {"type": "integer"}}}}
    tools = {
        "f": {"type": "object", "properties": {"b": schema, "a": {"type": "null"}}, "required": ["b"], "$defs": defined}
    }
    spelled = spelling(FORMATS["gemma4"], tools)
    assert (spelled is None) is (right is None)
    if spelled is None or right is None or wrong is None:
        return
    grammar = make_grammar(ToolCalls(tools, spelled))
    for before in ("", "a:null,"):
        for values, is_right in ((right, True), (wrong, False)):
            for value in values:
                call = f"<|tool_call>call:f{{{before}b:{value}}}<tool_call|>"
                assert follows(grammar, call) is is_right, value
                read_back = read(lambda: FormatParser(FORMATS["gemma4"], tools), call, [])[1]
                assert not is_right or Draft202012Validator(tools["f"]).is_valid(read_back[0][1]), value
    assert not follows(grammar, "<|tool_call>call:f{a:null}<tool_call|>")
    assert not follows(grammar, "<|tool_call>call:f{b:1,a:null}<tool_call|>")  # keys are in the order of the template


_A, _B = {"a": {"type": "string"}}, {"b": {"type": "integer"}}
_KEYS = {"A": {"type": "object", "properties": _A, "required": ["a"]}, "K": {"enum": ["x", "y"]}}
# Schemas of arguments that are not only properties, with arguments that are valid and others.
COMBINED: list[tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]] = [
    ({"$ref": "#/$defs/A"}, [{"a": "1"}], [{}, {"a": "x", "b": 1}]),
    (
        {"allOf": [{"$ref": "#/$defs/A"}, {"properties": {**_A, **_B}, "required": ["b"]}]},
        [{"a": "x", "b": 1}],
        [{"a": "x"}, {"b": 1}],
    ),
    (
        {"properties": {**_A, **_B}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": "x"}, {"b": 1}, {"a": "x", "b": 1}],
        [{}],
    ),
    (
        {"properties": {**_A, **_B}, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": "x"}, {"b": 1}],
        [{}, {"a": "x", "b": 1}],
    ),
    (
        {
            "type": ["object", "null"], "properties": {"k": {"allOf": [{"$ref": "#/$defs/K"}]}}, "required": ["k"],
            "oneOf": [
                {"properties": {"k": {"const": "x"}, **_A}, "required": ["a"]},
                {"properties": {"k": {"const": "y"}, **_B}}, {"type": "null"},
            ],
        },
        [{"k": "x", "a": "z"}, {"k": "y", "b": 3}, {"k": "y"}],
        [{"k": "x"}, {"k": "y", "a": "z"}, {"k": "z"}, {"a": "z"}],
    ),
    ({"properties": {**_A, **_B}, "minProperties": 1}, [{"a": ""}, {"b": 0}, {"a": "x", "b": 1}], [{}]),
    (
        {"properties": {"k": {"enum": ["x", "y"]}, **_B}, "dependentRequired": {"k": ["b"]},
         "not": {"properties": {"k": {"const": "y"}}, "required": ["k"]}},
        [{"b": 1}, {"k": "x", "b": 8}, {}],
        [{"k": "x"}, {"k": "y", "b": 7}],
    ),
    (
        {"properties": {"k": {"enum": ["x", "y"]}, **_B}, "required": ["k"],
         "if": {"properties": {"k": {"const": "x"}}}, "then": {"required": ["b"]},
         "else": {"properties": {"b": False}}},
        [{"k": "x", "b": 1}, {"k": "y"}],
        [{"k": "x"}, {"k": "y", "b": 1}],
    ),
    (  # no text matches both patterns
        {"properties": {"a": {"type": "string", "pattern": "^x+$"}, **_B}, "required": ["b"],
         "anyOf": [{"properties": {"a": {"pattern": "^y$"}}, "required": ["a"]}, {"properties": {"b": {"const": 2}}}]},
        [{"b": 2}, {"a": "x", "b": 2}],
        [{"a": "y", "b": 1}, {"b": 1}],
    ),
    (
        {"properties": _A, "additionalProperties": False, "anyOf": [{"properties": _B, "required": ["b"]}, {}]},
        [{"a": "x"}],
        [{"b": 1}, {"a": "x", "b": 1}],
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["qwen3_coder", "glm45", "minimax_m2", "minimax_m3", "deepseek_v32", "step3", "pythonic", "gemma4", "hermes"],
)
@pytest.mark.parametrize("case", range(len(COMBINED)))
def test_combined_schemas_of_arguments_are_written_in_the_models_notation(name: str, case: int) -> None:
    schema, valid, others = COMBINED[case]
    form, tools = FORMATS[name], {"f": {**schema, "$defs": _KEYS}}
    spelled = spelling(form, tools)
    assert spelled is not None
    grammar = make_grammar(ToolCalls(tools, spelled))
    for arguments in valid + others:
        text = write(form, [("f", arguments)], as_forced=True).replace("'", '"')
        assert follows(grammar, text) is (arguments in valid), text
        assert Draft202012Validator(tools["f"]).is_valid(arguments) or arguments in others
        assert arguments in others or read(lambda: FormatParser(form, tools), text, [])[1] == [("f", arguments)]
    assert not follows(grammar, write(form, [("f", {**valid[0], "z": 1})], as_forced=True))  # objects are closed


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"$ref": "#"}, {"properties": _A}]},
        {"anyOf": [{"properties": {"a": {"type": "integer"}}}, {"properties": _A}]},  # "1" is read as 1
        {"properties": _A, "patternProperties": {"^x": {}}},
        {  # only the second part can hold, where 1 would be read as the text that the first part has
            "additionalProperties": {"type": "integer"}, "properties": {"k": {"const": "x"}}, "required": ["k"],
            "oneOf": [{"properties": {"k": {"const": "y"}, **_A}}, {"properties": {"k": {"const": "x"}, "a": {}}}],
        },
        {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for i in range(5)]} for j in range(2)]},  # 25 ways
        {"allOf": [{"properties": _A, "required": ["a"]}, {"properties": {"a": False}}]},
        {"properties": {**_A, **_B, "c": {}}, "minProperties": 2},
        {"properties": {**_A, **_B}, "maxProperties": 1},
    ],
)  # fmt: skip
def test_a_schema_that_lists_of_parameters_cannot_say_has_no_native_spelling(schema: dict[str, Any]) -> None:
    assert spelling(FORMATS["qwen3_coder"], {"f": schema}) is None


@pytest.mark.parametrize("name", ["qwen3_coder", "pythonic", "gemma4", "glm45", "kimi_k3"])
def test_arguments_that_satisfy_several_alternatives_of_a_one_of_are_reported(name: str) -> None:
    """Such a schema had no spelling in the model's own notation."""
    form, a, b = FORMATS[name], {"a": {"type": "integer"}}, {"b": {"type": "integer"}}
    schema = {"oneOf": [{"properties": a, "required": ["a"]}, {"properties": b, "required": ["b"], "minProperties": 1}]}
    overlapping = {**schema, "oneOf": [*schema["oneOf"], {"properties": {**a, **b}, "required": ["a"]}]}
    tools = {"f": {"type": "object", **overlapping}}
    spelled = spelling(form, tools)
    assert spelled is not None
    checks = CallChecks(tools)
    grammar = make_checked_grammar(WantedGrammar(ToolCalls(tools, spelled), checks=checks)).text
    for arguments, is_valid in (({"b": 1}, True), ({"a": 1}, False)):
        text = write(form, [("f", arguments)], as_forced=True)
        assert follows(grammar, text) and read(lambda: FormatParser(form, tools), text, [])[1] == [("f", arguments)]
        assert checks.verdict([("f", json.dumps(arguments))]) == (None if is_valid else MISMATCH)
    assert not follows(grammar, write(form, [("f", {"c": 1})], as_forced=True))


UNIONS: list[dict[str, Any]] = [
    {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
    {"type": ["string", "array"], "items": {"type": "string"}, "pattern": "^[a-z'1, ]*$"},
    {"anyOf": [{"$ref": "#/$defs/D"}, {"type": "string", "minLength": 2}, {"type": "null"}]},
]


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "minimax_m2", "minimax_m3", "deepseek_v32", "step3"])
def test_a_text_or_a_list_stands_between_tags_as_the_model_writes_it(name: str) -> None:
    form = FORMATS[name]
    defined = {"D": {"type": "object", "properties": {"k": {"type": "integer"}}, "required": ["k"]}}
    tools = {"f": {"type": "object", "properties": dict(zip("abc", UNIONS, strict=True)), "$defs": defined}}
    spelled = spelling(form, tools)
    assert spelled is not None
    grammar = make_grammar(ToolCalls(tools, spelled))
    for arguments in (
        {"a": "x"}, {"a": ["x", "y"]}, {"a": []}, {"a": "1, 2"}, {"b": "ab 1"}, {"b": ["A"]}, {"c": "ab"},
        {"c": {"k": 1}}, {"c": "nul l"}, {"a": "x [1]", "b": "a", "c": {"k": 5}},
    ):  # fmt: skip
        text = write(form, [("f", arguments)], as_forced=True)
        assert follows(grammar, text), text
        assert read(lambda: FormatParser(form, tools), text, [])[1] == [("f", arguments)]
    for value in ('u"ab"', "r'ab'"):  # texts, and no values of Python
        text = write(form, [("f", {"a": value})], as_forced=True)
        assert read(lambda: FormatParser(form, tools), text, [])[1] == [("f", {"a": value})]
    for arguments in ({"a": [1]}, {"b": "AB"}, {"b": [1]}, {"c": "a"}, {"c": {"k": "1"}}, {"c": [1]}, {"c": {}}):
        assert not follows(grammar, write(form, [("f", arguments)], as_forced=True)), arguments


def test_a_schema_whose_references_name_too_many_values_is_not_written_out_in_gemmas_notation() -> None:
    tools: dict[str, Any] = {"f": {"type": "object", "properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": {}}}
    for i in range(8):
        fields = {name: {"$ref": f"#/$defs/d{i + 1}"} for name in "abcdefghij"}
        tools["f"]["$defs"][f"d{i}"] = {"type": "object", "properties": fields}
    tools["f"]["$defs"]["d8"] = {"type": "null"}
    assert spelling(FORMATS["gemma4"], tools) is None


LEAVES: list[dict[str, Any]] = [
    *UNIONS[:2],
    {"type": "string"}, {"type": "integer"}, {"type": ["string", "null"]}, {"enum": ["a", "b c", "</x>"]},
    {"enum": [1, 2]}, {"type": "array", "items": {"type": "string"}, "maxItems": 2}, {"$ref": "#/$defs/D"},
    {"const": "x"}, {"type": "boolean"},
    {"type": "object", "properties": {"k": {"type": ["integer", "null"]}}, "required": ["k"]},
]  # fmt: skip


@BY_FORMAT
def test_any_forced_calls_are_read_as_their_schemas_say(form: ToolFormat) -> None:
    rng, num_read = random.Random(NAMES[form]), 0
    for i in range(40):
        if i >= 3 and (num_read or NAMES[form] in NEVER_ENDING):
            break
        names = rng.sample(["city", "from", "größe", "x_y"], rng.randint(1, 3))
        schema = {
            "type": "object", "properties": {name: rng.choice(LEAVES) for name in names}, "required": names[:1],
            "$defs": {"D": rng.choice(LEAVES[:3])},
        }  # fmt: skip
        tools: dict[str, Any] = {"get": schema, "get_all": {"type": "object", "properties": {}}}
        spelled = spelling(form, tools) or list_of_calls(tools)
        answer = random_answer(make_grammar(ToolCalls(tools, spelled)), rng, 500)
        if answer is None:
            continue
        new_reader: Callable[[], ToolParser] = partial(FormatParser, form, tools)
        if spelled.has_json_arguments:
            new_reader = partial(ForcedCallsReader, spelled)
        answer = content_of(form, answer)
        content, calls = read(new_reader, answer, rng.sample(range(len(answer)), min(len(answer), 5)))
        assert content == "" and calls, answer
        for name, arguments in calls:
            assert Draft202012Validator(tools[name]).is_valid(arguments), (answer, schema)
        num_read += 1
    assert num_read or NAMES[form] in NEVER_ENDING


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "deepseek_v31", "step3", "llama3_json", "pythonic"])
def test_strict_calls_may_come_after_any_text_and_are_valid(name: str) -> None:
    form = FORMATS[name]
    spelled = spelling(form, TOOLS)
    assert spelled is not None
    grammar = make_grammar(ToolCalls(TOOLS, spelled, marks=trigger_marks(form)))
    text = write(form, FORCED, as_forced=True).replace("'", '"')
    before = "" if form.is_whole_answer else "One < moment.\n"
    assert follows(grammar, before + text)
    assert follows(grammar, "There is no call.")
    wrong = write(form, [("get_weather", {"city": "A", "unit": "K"})])
    assert not follows(grammar, before + wrong)


@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize(
    "form",
    [pytest.param(form, id=name, marks=() if name in SOME else pytest.mark.long) for form, name in NAMES.items()],
)
def test_beside_a_structure_an_answer_is_calls_or_the_structure(form: ToolFormat, is_strict: bool) -> None:
    """A model that could not call, with tools at hand, had to make up what they would have said."""
    functions = [{"name": name, "parameters": schema, "strict": is_strict} for name, schema in TOOLS.items()]
    city = {"type": "object", "properties": {"name": {"type": "string"}, "city": {"type": "string"}}}
    body = ChatCompletionRequest.model_validate({
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"type": "function", "function": function} for function in functions],
        "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": city, "strict": True}},
    })  # fmt: skip
    structure = body.structure()
    assert structure is not None
    for style in (None, STYLES["qwen3"]) if form is HERMES else (None,):
        formats = ModelFormats(form, style)
        read_as = answer_format(body, formats, "assistant:")
        wanted = wanted_grammar(body, read_as, formats, structure[1], {}, None)
        assert wanted is not None
        grammar, thought = make_checked_grammar(wanted).text, "" if style is None else "<think>So.</think>\n\n"
        for calls in (FORCED, FORCED[1:]):
            assert follows(grammar, thought + write(form, calls, as_forced=True).replace("'", '"'))
        assert follows(grammar, thought + '{"name": "get_weather", "city": "A"}')
        for wrong in ("There is no call.", '{"town": "A"}', "[]", ""):
            assert not follows(grammar, thought + wrong)
        invalid = write(form, [("get_weather", {"city": "A", "unit": "K"})], as_forced=True).replace("'", '"')
        is_held = is_strict
        assert follows(grammar, thought + invalid) is not is_held


def test_calls_beside_a_structure_are_not_checked_by_its_schema() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    schema = {"type": "array", "uniqueItems": True}
    calls = ToolCalls({"f": {}}, spelling(FORMATS["hermes"], {"f": {}}))
    for marks, thought in ((None, ""), (ReasoningMarks("<think>", "</think>", True), "<think>\n</think>\n\n")):
        wanted = WantedGrammar(StructuredOutputsParams(json=schema), marks, calls=calls)
        check = make_checked_grammar(wanted).check
        assert check is not None
        assert check.problem(thought + call) is None
        assert check.problem(thought + "[1, 1]") is not None


@pytest.mark.parametrize("name", ["a", "all_of_it"])
def test_a_structure_is_checked_whatever_the_names_of_functions(name: str) -> None:
    """Functionary marks an answer with "all", which was read as the beginning of a call of `a`."""
    schema, tools = {"type": "array", "uniqueItems": True}, {name: {"type": "object"}}
    formats = ModelFormats(FORMATS["functionary"], FUNCTIONARY)
    body = ChatCompletionRequest.model_validate({
        "messages": [{"role": "user", "content": "Hi"}], "structured_outputs": {"json": schema},
        "tools": [{"type": "function", "function": {"name": name, "parameters": tools[name]}}],
    })  # fmt: skip
    structure = body.structure()
    assert structure is not None
    read_as = answer_format(body, formats, ">>>")
    wanted = wanted_grammar(body, read_as, formats, structure[1], {}, None)
    assert wanted is not None
    made = make_checked_grammar(wanted)
    assert made.check is not None
    for text, is_right in (("all\n[1, 2]", True), ("all\n[1, 1]", False), (f"{name}\n{{}}", True)):
        assert follows(made.text, text) and (made.check.problem(text) is None) is is_right, text


KEYWORDS = st.sampled_from(["type", "anyOf", "$ref", "properties", "required", "enum", "a"])
JUNK = st.recursive(
    st.sampled_from([None, True, 5, "string", "object", "#/$defs/a", "#", []]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["type", "anyOf", "$ref", "properties", "required", "enum", "a"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(schema=st.dictionaries(st.sampled_from(["type", "properties", "required", "$defs", "$ref"]), JUNK))
def test_schemas_that_make_no_sense_are_for_the_grammar_to_refuse(schema: dict[str, Any]) -> None:
    for name in ("qwen3_coder", "pythonic", "hermes"):
        spelling(FORMATS[name], {"f": schema})
    cyclic = {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}
    text = "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>"
    for odd in (schema, cyclic):
        assert read(lambda odd=odd: FormatParser(FORMATS["qwen3_coder"], {"f": odd}), text, [])[1]  # type: ignore[misc]


def test_a_text_between_tags_nests_only_where_the_schema_has_objects() -> None:
    form = FORMATS["minimax_m3"]
    for kind, value in (("string", "]<]minimax[>[<k>v]<]minimax[>[</k>"), ("object", {"k": "v"})):
        tools = {"f": {"type": "object", "properties": {"a": {"type": kind}}}}
        text = write(form, [("f", {"a": "]<]minimax[>[<k>v]<]minimax[>[</k>"})])
        assert read(lambda tools=tools: FormatParser(form, tools), text, []) == ("", [("f", {"a": value})])  # type: ignore[misc]


TREE = {"type": "object", "properties": {"name": TEXT, "children": {"type": "array", "items": {"$ref": "#/$defs/T"}}}}


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {**TREE, "$defs": {"T": TREE}},
        {"type": "object", "oneOf": [{**TREE, "required": ["name"]}, {"properties": {"id": {}}}], "$defs": {"T": TREE}},
    ],
)
@pytest.mark.parametrize("is_cut", [False, True])
def test_tags_within_tags_are_no_further_arguments_whatever_their_names(schema: dict[str, Any], is_cut: bool) -> None:
    """The inner `children` ended the outer ones, and `name` within them was taken for an argument."""
    form, tag = FORMATS["minimax_m3"], "]<]minimax[>["
    grandchildren = f"{tag}<children>{tag}<item>{tag}<name>c{tag}</name>{tag}</item>{tag}</children>"
    inner = f"{tag}<item>{tag}<name>b{tag}</name>{grandchildren}{tag}</item>"
    text = (
        f'{tag}<tool_call>\n{tag}<invoke name="f">{tag}<children>{inner}{tag}</children>{tag}<name>a{tag}</name>'
        f"{tag}</invoke>\n{tag}</tool_call>"
    )
    child = {"name": "b", "children": [{"name": "c"}]}
    cuts = list(range(len(text))) if is_cut else []
    found = read(lambda: FormatParser(form, {"f": schema}), text, cuts)
    assert found == ("", [("f", {"children": [child], "name": "a"})])
    # Without its end the value ends with the next argument.
    broken = text.replace(f"{inner}{tag}</children>", f"{tag}<item>x")
    assert [name for name, _ in read(lambda: FormatParser(form, {"f": schema}), broken, cuts)[1]] == ["f"]


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "pythonic", "gemma4"])
def test_keywords_that_are_null_are_as_if_absent(name: str) -> None:
    """Clients that write every field of their own classes send them."""
    schema = {
        "type": "object", "required": None, "additionalProperties": None, "$defs": None,
        "properties": {
            "required": {**TEXT, "enum": None, "description": None, "default": None},
            "a": {"anyOf": [{"const": None, "items": None}, {"type": "integer", "minimum": None}]},
        },
    }  # fmt: skip
    bare = {
        "type": "object",
        "properties": {"required": {**TEXT, "default": None}, "a": {"anyOf": [{"const": None}, {"type": "integer"}]}},
    }
    function = {"name": "f", "parameters": schema}
    body = ChatCompletionRequest.model_validate({
        "messages": [{"role": "user", "content": "Hi"}], "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
    })  # fmt: skip
    assert body.chosen_tools == {"f": bare}
    formats = ModelFormats(FORMATS[name], None)
    wanted = wanted_grammar(body, answer_format(body, formats, "x"), formats, None, {}, None)
    assert wanted is not None and make_checked_grammar(wanted).text


@pytest.mark.parametrize("others", [True, {"type": "integer"}])
def test_further_parameters_are_left_out_where_some_are_named(others: Any) -> None:
    form = FORMATS["qwen3_coder"]
    schema = {"type": "object", "properties": {"a": TEXT}, "additionalProperties": others}
    spelled = spelling(form, {"f": schema})
    assert spelled is not None
    grammar = make_grammar(ToolCalls({"f": schema}, spelled))
    assert follows(grammar, write(form, [("f", {"a": "x"})]))
    assert not follows(grammar, write(form, [("f", {"a": "x", "b": 1})]))
    assert spelling(form, {"f": {"type": "object", "additionalProperties": others}}) is None


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "pythonic"])
def test_a_parameter_without_valid_values_is_left_out(name: str) -> None:
    form = FORMATS[name]
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {**TEXT, "enum": []}, "b": TEXT}}
    spelled = spelling(form, {"f": schema})
    assert spelled is not None
    grammar = make_grammar(ToolCalls({"f": schema}, spelled))
    assert follows(grammar, write(form, [("f", {"b": "x"})], as_forced=True).replace("'", '"'))
    assert not follows(grammar, write(form, [("f", {"a": "", "b": "x"})], as_forced=True).replace("'", '"'))


@pytest.mark.parametrize(
    "own",
    [
        {**TEXT, "pattern": "^a$", "allOf": [{"pattern": "^b$"}]},
        {**TEXT, "minLength": 3, "maxLength": 2},
        {"type": "integer", "minimum": 3, "maximum": 2},
        {"type": "array", "minItems": 3, "maxItems": 2},
        {"type": "array", "minItems": 1, "items": {**TEXT, "pattern": "^a$", "allOf": [{"pattern": "^b$"}]}},
        {"type": "object", "properties": {"x": {"enum": []}}, "required": ["x"]},
        {"not": {}},
    ],
)
@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "pythonic", "gemma4"])
def test_an_optional_parameter_that_contradicts_itself_is_left_out(name: str, own: dict[str, Any]) -> None:
    """The whole request was refused in Python's notation, and between tags for lists and objects."""
    form = FORMATS[name]
    schema: dict[str, Any] = {"type": "object", "properties": {"a": own, "b": {"type": "integer"}}}
    for one in (schema, {**schema, "properties": {"a": {}, "b": {"type": "integer"}}, "allOf": [schema]}):
        spelled = spelling(form, {"f": one})
        call = write(form, [("f", {"b": 1})], as_forced=True) if spelled else '[{"name": "f", "parameters": {"b": 1}}]'
        assert follows(make_grammar(ToolCalls({"f": one}, spelled or list_of_calls({"f": one}))), call)
        wanted = {"f": {**one, "required": ["a"]}}
        with pytest.raises(RequestError, match="cannot be followed"):
            make_grammar(ToolCalls(wanted, spelling(form, wanted) or list_of_calls(wanted)))


@pytest.mark.parametrize("name", ["qwen3_coder", "pythonic"])
def test_an_optional_parameter_that_is_no_schema_is_refused_whatever_its_texts_say(name: str) -> None:
    """A text of the schema was taken for the reason of the refusal, and the parameter was left out."""
    for word in ("odd", "Unsatisfiable schema"):
        schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": word}}, "b": TEXT}}
        spelled = spelling(FORMATS[name], {"f": schema})
        assert spelled is not None
        with pytest.raises(RequestError, match=f"Invalid type: {word}"):
            make_grammar(ToolCalls({"f": schema}, spelled))


def test_special_tokens_are_named_by_their_ids() -> None:
    form = FORMATS["deepseek_v31"]
    spelled = spelling(form, TOOLS)
    assert spelled is not None
    ids = {mark: i for i, mark in enumerate([form.open, form.start, "<｜tool▁sep｜>", form.end, form.close], 500)}
    grammar = make_grammar(ToolCalls(TOOLS, spelled), special_tokens=ids)
    for token_id in ids.values():
        assert f"<[{token_id}]>" in grammar
    assert "begin" not in grammar


# What a schema says of texts, valid ones and others. None is null.
RULES: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({**TEXT, "minLength": 2, "maxLength": 3}, ["ab", "é世\n", "\n\n"], ["a", "abcd", "", None]),
    ({**TEXT, "pattern": "^x/[0-9]+$"}, ["x/1"], ["x/", "ax/1", "x/1\n"]),
    ({**TEXT, "pattern": "b|cc"}, ["b", "a\ncc"], ["c"]),
    ({**TEXT, "pattern": r"^\S+$", "maxLength": 2}, ["ab", "</"], ["a b", "abc"]),
    ({**TEXT, "format": "date"}, ["2024-02-29"], ["2024-13-01"]),
    ({**TEXT, "format": "path"}, ["a b"], []),
    ({"anyOf": [{**TEXT, "format": "uri"}, {"type": "null"}]}, ["https://a.b/c?d=e#f", "mailto:x@y", None], ["a b"]),
    ({"anyOf": [{"enum": ["a", "b/c"]}, {"type": "null"}], "default": None}, ["a", "b/c", None], ["c", "None"]),
    ({"type": ["string", "null"], "enum": ["a", None]}, ["a", None], ["b"]),
    ({"anyOf": [{**TEXT, "const": "a"}, {**TEXT, "pattern": "^x"}]}, ["a", "xy"], ["b"]),
    ({"allOf": [{**TEXT, "minLength": 1}, {"pattern": "a"}]}, ["ba"], ["", "b"]),
    ({}, ["a b", 12, [1], None], []),
    ({"type": ["string", "integer"]}, ["a", 12, "1.5"], []),
    ({"anyOf": [TEXT, {"type": "number"}, {"type": "null"}]}, ["a", 1.5, None], []),
]  # fmt: skip


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "minimax_m2", "deepseek_v4"])
@pytest.mark.parametrize(("rule", "valid", "others"), RULES)
def test_texts_without_quotes_follow_what_the_schema_says_of_them(
    name: str, rule: dict[str, Any], valid: list[Any], others: list[Any]
) -> None:
    form, tools = FORMATS[name], {"f": {"type": "object", "properties": {"a": rule, "b": {"type": "integer"}}}}
    assert isinstance(form.body, Tags)
    spelled = spelling(form, tools)
    if form.body.text_attribute and any(not isinstance(value, str | None) for value in valid):
        assert spelled is None  # the format would make each value a text
        return
    assert spelled is not None
    grammar = make_grammar(ToolCalls(tools, spelled))
    assert "<[500]>" in make_grammar(ToolCalls(tools, spelled), special_tokens={form.body.value_after.strip(): 500})
    for value in valid + others:
        text = write(form, [("f", {"a": value, "b": 1})], as_forced=True)
        assert follows(grammar, text) is (value in valid), value
        if value in valid:
            assert read(lambda: FormatParser(form, tools), text, []) == ("", [("f", {"a": value, "b": 1})])


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("date", "2024-02-29"), ("date", "2023-11-30"), ("date-time", "2000-02-28T23:59:59.5Z"),
        ("time", "12:00:00+05:30"), ("email", "a.b+c@x-y.uk"), ("hostname", "a-b.c"), ("ipv4", "1.20.255.0"),
        ("uri", "http://u:p@h:80/c?d=e#f"), ("uri", "urn:x:%41"), ("uuid", "123e4567-e89b-12d3-a456-426614174000"),
    ],
)  # fmt: skip
def test_texts_that_follow_the_rule_of_a_format_have_the_format(form: str, text: str) -> None:
    rules, rng, num_valid = text_rules({"format": form}), random.Random(text), 0
    assert rules is not None and re.fullmatch(rules[0], text)
    for _ in range(200):  # texts that differ in a place or two
        other = text
        for _ in range(rng.randint(0, 2)):
            at, size = rng.randrange(len(other)), rng.randrange(2)
            other = other[:at] + rng.choice(["", *"09aZ.-:/@?#%[_ <"]) + other[at + size :]
        if re.fullmatch(rules[0], other):
            assert has_format(other, form), other
            num_valid += 1
    assert num_valid > 10


def test_a_schema_that_texts_cannot_be_told_by_has_no_native_spelling() -> None:
    form = FORMATS["qwen3_coder"]
    assert isinstance(form.body, Tags)
    for one in (
        {"anyOf": [{"type": ["string", "array"]}, {"type": "array"}]},
        {"anyOf": [TEXT, {"type": "integer", "minimum": 1}]},
        {"oneOf": [TEXT, {"type": "integer"}]}, {"anyOf": [TEXT, {}]}, {"enum": ["</parameter>"]},
        {"$ref": "#/$defs/T", "pattern": "a+"}, {**TEXT, "pattern": r"a\b"}, {**TEXT, "pattern": "^a|b$"},
        {**TEXT, "pattern": "a$b"}, {**TEXT, "not": {"const": "a"}}, {**TEXT, "format": "duration"},
        {**TEXT, "maxLength": 1 << 20}, {"type": ["string", "null"], "enum": ["null"]},
        {"anyOf": [{**TEXT, "minLength": 2, "pattern": "a"}, {**TEXT, "const": "b"}]},
        {**TEXT, "format": "date", "pattern": "^x"}, {**TEXT, "format": "uuid", "maxLength": 4},
        {**TEXT, "pattern": "^[a-z]{5}$", "maxLength": 4}, {**TEXT, "minLength": 5, "maxLength": 3},
        {"oneOf": [{**TEXT, "minLength": 1}, {**TEXT, "maxLength": 5}]},
    ):  # fmt: skip
        schema = {"type": "object", "properties": {"a": one}, "required": ["a"], "$defs": {"T": {"type": "string"}}}
        assert spelling(form, {"f": schema}) is None
    referred = {"type": "object", "properties": {"a": {"$ref": "#/$defs/E"}}, "$defs": {"E": {"enum": ["x", "y"]}}}
    spelled = spelling(form, {"f": referred})
    assert spelled is not None
    grammar = make_grammar(ToolCalls({"f": referred}, spelled))
    text = write(form, [("f", {"a": "x"})])
    assert follows(grammar, text) and not follows(grammar, text.replace("x", "z"))
    assert read(lambda: FormatParser(form, {"f": referred}), text, []) == ("", [("f", {"a": "x"})])


def test_keywords_beside_any_of_several_references_have_no_native_spelling() -> None:
    schemas = {"A": {"$ref": "#/$defs/B", "pattern": "^x"}, "B": TEXT}
    for name, is_spelled in (("A", False), ("B", True)):
        schema = {"type": "object", "properties": {"a": {"$ref": f"#/$defs/{name}"}}, "$defs": schemas}
        assert (spelling(FORMATS["qwen3_coder"], {"f": schema}) is not None) is is_spelled


def test_names_that_python_does_not_have_are_written_and_read() -> None:
    schema = {"type": "object", "properties": {"file-path": {"type": "string"}, "$top": {"type": "integer"}}}
    tools, form = {"read-file": schema, "a.b": schema}, FORMATS["pythonic"]
    text = '[read-file(file-path="a-b", $top=1), a.b($top=2)]'
    for free in ((), ("read-file",)):
        spelled = spelling(form, tools, free=free)
        assert spelled is not None
        grammar = make_grammar(ToolCalls(tools, spelled))
        assert follows(grammar, text) and not follows(grammar, text.replace("2", '"2"'))
    expected = [("read-file", {"file-path": "a-b", "$top": 1}), ("a.b", {"$top": 2})]
    assert read(lambda: FormatParser(form, tools), text, []) == ("", expected)
    assert spelling(form, {"f": {"type": "object", "properties": {"my key": {"type": "string"}}}}) is None


def test_notes_and_lists_of_types_change_nothing_of_a_spelling() -> None:
    text = {"type": "string", "example": "x", "nullable": False, "x-order": 1, "minimum": 0}
    noted = {"type": ["object", "null"], "$id": "urn:x", "deprecated": True, "properties": {"a": text}}
    plain = {"type": "object", "properties": {"a": {"type": "string"}}}
    for name in ("qwen3_coder", "hermes"):
        spelled = spelling(FORMATS[name], {"f": noted})
        assert spelled is not None and spelled == spelling(FORMATS[name], {"f": plain})
        answer = write(FORMATS[name], [("f", {"a": "b"})], as_forced=True)
        assert follows(make_grammar(ToolCalls({"f": noted}, spelled)), answer)
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(2000):
        deep = {"type": "string", "allOf": [deep]}
    nested = {"type": "object", "properties": {"a": deep}}
    assert spelling(FORMATS["qwen3_coder"], {"f": nested}) == spelling(FORMATS["qwen3_coder"], {"f": plain})
    with pytest.raises(RequestError, match="must describe an object, not"):
        make_grammar(ToolCalls({"f": {"type": ["null"]}}, list_of_calls({"f": {}})))


def test_a_strict_function_that_the_format_cannot_spell_leaves_others_strict() -> None:
    def tool(name: str, a: dict[str, Any]) -> dict[str, Any]:
        parameters = {"type": "object", "properties": {"a": a}, "required": ["a"]}
        return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": True}}

    tools = [tool("f", {"type": "integer"}), tool("g", {"type": "string", "pattern": r"\bx"})]
    body = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "Hi"}], "tools": tools})
    form = FORMATS["qwen3_coder"]
    formats = ModelFormats(form)
    wanted = wanted_grammar(body, answer_format(body, formats, "Hi"), formats, None, {}, None)
    assert wanted is not None
    grammar = make_checked_grammar(wanted).text
    assert follows(grammar, write(form, [("f", {"a": 1})], as_forced=True))
    assert not follows(grammar, write(form, [("f", {"a": True})], as_forced=True))
    assert follows(grammar, write(form, [("g", {"a": "y"})], as_forced=True))
    assert follows(grammar, "No call.")


def test_a_forced_call_comes_in_pieces_that_part_no_escape() -> None:
    arguments = r'{"a": "\\\ud83d\ude00\u00e9\n\\"}'
    for end in range(len(arguments) + 1):  # where the answer is cut
        reader = ForcedCallsReader(list_of_calls({"f": {}}))
        text = f'[{{"name": "f", "parameters": {arguments[:end]}'
        pieces = [piece for character in text for piece in reader.add(character)] + reader.finish()
        shown = [piece.arguments for piece in pieces if isinstance(piece, Call) and piece.name is None]
        assert "".join(shown) == arguments[:end]
        assert not any(re.search(r"\\(u[0-9a-f]{0,3})?$|ud83d$", piece.replace("\\\\", "")) for piece in shown[:-1])


def test_a_forced_call_that_a_stop_string_cuts_off_is_no_reason_to_call() -> None:
    reader = AnswerReader(AnswerFormat(new_tool_parser=partial(ForcedCallsReader, list_of_calls({"f": {}}))))
    reader.add('[{"name": "f", "parameters": {"a": "EN', is_end=False)
    assert reader.finish_reason("stop") == "stop" and reader.finish_reason(None) is None
    reader.add('D"}}]', is_end=True)
    assert reader.finish_reason("stop") == "tool_calls" and reader.finish_reason("length") == "length"


HARMONY_MARKS = ["<|start|>", "<|end|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>", "<|return|>"]


@pytest.fixture(scope="module")
def harmony() -> tuple[Tokenizer, LLTokenizer]:
    """A tokenizer of bytes with Harmony's marks, and the same for grammars."""
    backend = bytes_tokenizer("", HARMONY_MARKS).backend_tokenizer
    return backend, LLTokenizer(backend.to_str())


THOUGHT = "<|channel|>analysis<|message|>Call to=functions.f <b>\n<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        (THOUGHT + CALL.format("f", '{"a": 1}'), True),
        (THOUGHT + CALL.format("f", '{"a": "1"}'), False),
        (CALL.format("f", "{}"), False),
        (CALL.format("f.g", '{"a": "x"}'), True),  # not strict
        (CALL.format("f.g", "[1]"), False),
        (CALL.format("h", "{}"), False),
        (" to=functions.f<|channel|>commentary json<|message|>{\"a\": 1}<|call|>", True),
        (" to=functions.f<|channel|>commentary json<|message|>{\"b\": 1}<|call|>", False),
        ("<|channel|>commentary to=functions.f json<|message|>{\"a\": 1}<|call|>", True),
        ("<|channel|>commentary to=functions.f<|message|>{\"a\": 1}<|call|>", True),
        ('<|channel|>commentary to=functions.fjson<|message|>{"a": 1}<|call|>', False),
        ("<|channel|>analysis to=functions.f code<|message|>{\"a\": 1}<|call|>", False),
        ("<|channel|>commentary<|message|>One moment.<|end|><|start|>assistant" + CALL.format("f", '{"a": 1}'), True),
        ("<|channel|>analysis to=browser.search code<|message|>{\"query\": 5<|call|>", True),
        (THOUGHT + "<|channel|>final<|message|>It is {to=functions.f}.", True),
        ("<|channel|>final<|message|>a<|end|>", True),
        ('<|channel|>final <|constrain|>json<|message|>{"b": 1}', True),
        (' to=browser.search<|channel|>analysis code<|message|>{"query": 5<|call|>', True),
        (' to=functions.h<|channel|>commentary json<|message|>{}<|call|>', False),
        ("<|channel|>final to=functions.f <|constrain|>json<|message|>{}<|call|>", False),
        ("Plain text", True),
        (CALL.format("f", '{"a": 1}') + "<|start|>assistant" + CALL.format("f", '{"a": 2}'), True),
        (CALL.format("f", '{"a": 1}') + "<|start|>assistant" + CALL.format("f", '{"a": ""}'), False),
        (CALL.format("f", '{"a": 1}') + " more", False),
        (CALL.format("patch", '{"input": "abc"}'), True),
        (CALL.format("patch", '{"input": "ABC"}'), False),
    ],
)  # fmt: skip
def test_strict_functions_are_held_among_harmonys_channels(
    harmony: tuple[Tokenizer, LLTokenizer], text: str, is_right: bool
) -> None:
    tools = [
        {"type": "function", "function": {"name": name, "strict": name == "f", "parameters": {
            "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}}
        for name in ("f", "f.g")
    ]  # fmt: skip
    rule = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[a-z]+"}}
    tools.append({"type": "custom", "custom": {"name": "patch", "format": rule}})
    body = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "Hi"}], "tools": tools})
    formats, (backend, tokens) = ModelFormats(FORMATS["openai"], STYLES["openai_gptoss"]), harmony
    special = {mark: backend.token_to_id(mark) for mark in HARMONY_MARKS}
    wanted = wanted_grammar(body, answer_format(body, formats, "Hi"), formats, None, special, None)
    assert wanted is not None
    matcher = LLMatcher(tokens, make_checked_grammar(wanted).text)
    assert not matcher.is_error(), matcher.get_error()
    ids = backend.encode(text).ids
    assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) is is_right
    # Without tokens for the marks the calls are only checked.
    assert wanted_grammar(body, answer_format(body, formats, "Hi"), formats, None, {}, None) is None


BLOCKS = {
    "cohere": ("", "<|START_THINKING|>So.<|END_THINKING|>", "<|START_RESPONSE|>{}<|END_RESPONSE|>", ""),
    "inkling": (
        "<|message_model|>", "<|content_thinking|>So.<|end_message|><|message_model|>",
        "<|content_text|>{}<|end_message|>", "<|message_model|>",
    ),
    "kimi_k3": (
        "", "<|open|>think<|sep|>So.<|close|>think<|sep|>", "<|open|>response<|sep|>{}<|close|>response<|sep|>", ""
    ),
    "muse_glimmer": (
        "<|start|>assistant", " to=self<|message|>So.<|eom|><|start|>assistant", " to=user<|message|>{}<|eom|>",
        "<|start|>assistant",
    ),
    "solar_open": (
        "<|begin|>assistant", "<|think|>So.<|end|><|begin|>assistant", "<|content|>{}<|end|>", "<|begin|>assistant"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BLOCKS)
def test_strict_functions_are_held_among_the_blocks_of_an_answer(name: str) -> None:
    """The grammar had no place for the marks of content and reasoning, so that a model could not say anything."""
    form, style = FORMATS[name], STYLES[name]
    prompt, thought, content, header = BLOCKS[name]
    marks = sorted(set(re.findall(r"<\|[^|]*\|>", "".join((*form.marks, *style.marks, prompt)))))
    backend = bytes_tokenizer("", marks).backend_tokenizer
    special = {mark: backend.token_to_id(mark) for mark in marks}
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {
        "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}}  # fmt: skip
    for choice in ("auto", "required"):
        body = ChatCompletionRequest.model_validate(
            {"messages": [{"role": "user", "content": "Hi"}], "tools": [tool], "tool_choice": choice}
        )
        formats = ModelFormats(form, style)
        wanted = wanted_grammar(body, answer_format(body, formats, prompt), formats, None, special, None)
        assert wanted is not None
        made = make_checked_grammar(wanted).text

        def takes(text: str, made: str = made) -> bool:
            matcher = LLMatcher(LLTokenizer(backend.to_str()), made)
            assert not matcher.is_error(), matcher.get_error()
            ids = backend.encode(text).ids
            return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

        right, wrong = (write(form, [("f", {"a": value})], as_forced=True) for value in (1, "x"))
        twice = write(form, [("f", {"a": 1}), ("f", {"a": 2})], as_forced=True)
        spoken = content.format("One moment.") + header
        for before in ("", thought) if choice == "required" else ("", thought, spoken, thought + spoken):
            assert takes(before + right) and takes(before + twice) and not takes(before + wrong), before
            assert takes(before) is (choice == "auto")


def test_strict_functions_are_held_where_the_prompt_has_begun_a_message() -> None:
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {
        "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}}  # fmt: skip
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "tools": [tool]}
    of_json = {"response_format": {"type": "json_object"}}
    call, wrong, spoken = 'f\n{"a": 1}', 'f\n{"a": "x"}', "all\nOne > 0."
    for style in (FUNCTIONARY, None):
        formats = ModelFormats(FORMATS["functionary"], style)
        for more, right, others in (
            ({}, [call, f"{call}>>>{call}", f"{spoken}>>>{call}", spoken], [wrong, f"{spoken}>>>{wrong}", spoken[3:]]),
            ({"tool_choice": "required"}, [call, f"{call}>>>{call}"], [wrong, spoken, f">>>{call}"]),
            (of_json, [call, f"{call}>>>{call}", 'all\n{"b": 1}' if style else '{"b": 1}'], [wrong, spoken]),
            ({**of_json, "tools": []}, ['all\n{"b": 1}' if style else '{"b": 1}'], [call, spoken]),
        ):
            body = ChatCompletionRequest.model_validate({**asked, **more})
            structure = body.structure()
            read_as = answer_format(body, formats, "assistant\n\n>>>")
            wanted = wanted_grammar(body, read_as, formats, structure and structure[1], {}, None)
            assert wanted is not None
            made = make_checked_grammar(wanted).text
            assert all(follows(made, text) for text in right) and not any(follows(made, text) for text in others)


@pytest.mark.parametrize("name", ["lfm2", "gemma3", "olmo3", "gemma4", "functiongemma", "llama4_pythonic", "hermes"])
def test_a_text_in_quotes_may_contain_the_marks_of_calls(name: str) -> None:
    form = FORMATS[name]
    marks = [mark.strip() for mark in (form.open, form.start, form.end, form.close) if mark.strip()]
    calls = [("f", {"a": f"{mark}\n{mark}", "b": [f"x {mark}"]}) for mark in marks or ["```"]]
    text = write(form, calls, as_forced=True)
    for cuts in ([], range(len(text)), [11, 27]):
        assert read(lambda: FormatParser(form, {"f": {}}), text, list(cuts)) == ("", calls)


CODE: dict[str, Any] = {"type": "object", "properties": {"code": TEXT}, "required": ["code"]}


FUNCTIONARY_31 = chat(each(
    "{% if f.name == 'python' %}<|python_tag|>{{ f.arguments | tojson }}{% else %}<function={{ f.name }}>"
    "{{ f.arguments | tojson }}</function>{% endif %}"
))  # fmt: skip


@pytest.mark.parametrize("is_listed", [True, False])
def test_code_after_its_mark_is_a_call_of_the_function_that_takes_code(is_listed: bool) -> None:
    read_off = model_formats(Templated(FUNCTIONARY_31)).tools  # type: ignore[arg-type]
    form = FORMATS["llama3_json"] if is_listed else read_off
    assert form is not None
    code = 'print("a")\n\nprint({})'
    for tools, calls in (
        ({"python": CODE}, [("python", {"code": code})]),
        ({"ipython": {"type": "object", "properties": {"source": TEXT}}}, [("ipython", {"source": code})]),
        ({"python": {"type": "object", "properties": {"a": TEXT, "b": TEXT}}}, []),
        ({"f": {}}, []),
    ):
        for before in ("", "Let me see.\n")[: 2 - is_listed]:
            answer = f"{before}<|python_tag|>{code}"
            for cuts in ([], list(range(len(answer)))):
                found = read(lambda tools=tools: FormatParser(form, tools), answer, cuts)  # type: ignore[misc]
                assert found == ((before.rstrip() if calls else answer), calls)
    written = '<|python_tag|>{"code": "1"}'
    assert read(lambda: FormatParser(form, {"python": CODE}), written, []) == ("", [("python", {"code": "1"})])
