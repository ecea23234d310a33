"""What makes a grammar of `structured_outputs`, and what is refused at the door."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

import pytest

from octavo.errors import RequestError
from octavo.sampling_params import SamplingParams, StructuredOutputsParams
from octavo.structured_output.answer_parts import (
    CallText,
    ParameterList,
    ParameterText,
    ReasoningMarks,
    Spelling,
    ToolCalls,
)
from octavo.structured_output.grammar_check import checked_lark
from tests.structured_output.grammars import make_grammar

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
# Structural tags, in the forms that xgrammar's documentation gives.
OLD = {
    "structures": [
        {"begin": "<call=f>", "schema": OBJECT, "end": "</call>"},
        {"begin": "<call=g>", "schema": {"type": "object"}, "end": "</call>"},
    ],
    "triggers": ["<call="],
}
ANY: dict[str, Any] = {"type": "any_text"}


def text(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


def constant(value: str) -> dict[str, Any]:
    return text("const_string", value=value)


def json_of(schema: Any) -> dict[str, Any]:
    return text("json_schema", json_schema=schema)


def whole(format_: dict[str, Any]) -> dict[str, Any]:
    return {"type": "structural_tag", "format": format_}


def tag(begin: Any, content: Any, end: Any) -> dict[str, Any]:
    return whole(text("tag", begin=begin, content=content, end=end))


def sequence(*elements: Any) -> dict[str, Any]:
    return whole(text("sequence", elements=list(elements)))


def nested(levels: int) -> dict[str, Any]:
    inner = constant("a")
    for _ in range(levels):
        inner = text("optional", content=inner)
    return whole(inner)


A, F = '<a>{"a": 1}</a>', '<call=f>{"a": 1}</call>'
TAGGED = text("triggered_tags", triggers=["<a"], tags=[tag("<a>", json_of(OBJECT), "</a>")["format"]])
DIGITS = tag("<b>", text("regex", pattern="[0-9]+"), "</b>")["format"]
LISTED = text("tags_with_separator", tags=[TAGGED["tags"][0], DIGITS], separator=", ")
RULES = text("dispatch", rules=[["<a>", json_of(OBJECT)], ["<g>", constant("G")]])
LIST = Spelling("[", "]", ", ", {name: CallText(f'{{"name": "{name}", "parameters": ', "}") for name in ("f", "g")})


def accepts(text: str, **wanted: Any) -> bool:
    """Whether a grammar takes exactly this text, byte by byte."""
    return follows(make_grammar(StructuredOutputsParams(**wanted)), text)


def follows(grammar: str, text: str) -> bool:
    from llguidance import LLMatcher, LLTokenizer

    matcher = LLMatcher(LLTokenizer("byte"), grammar)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


def test_a_schema_takes_what_is_valid_and_nothing_else() -> None:
    assert accepts('{"a": 1}', json=OBJECT)
    assert accepts('{"a": 1, "b": []}', json=OBJECT, disable_additional_properties=False)
    assert accepts('{\n    "a": 1\n}', json='{"type": "object", "properties": {"a": {"type": "integer"}}}')
    assert not accepts('{"a": "x"}', json=OBJECT)
    assert not accepts('{"b": 1}', json=OBJECT)
    assert accepts("[1]", json={})


def test_whitespace_within_json_is_bounded_and_can_be_chosen() -> None:
    assert not accepts('{"a":' + 50 * " " + "1}", json=OBJECT)
    assert accepts('{"a":1}', json=OBJECT, disable_any_whitespace=True)
    assert not accepts('{"a": 1}', json=OBJECT, disable_any_whitespace=True)
    assert accepts('{"a":__1}', json=OBJECT, whitespace_pattern="_*")


def test_objects_are_closed_only_where_that_is_asked_for() -> None:
    nested = {"type": "object", "properties": {"o": OBJECT, "p": {**OBJECT, "additionalProperties": True}}}
    assert accepts('{"o": {"a": 1, "b": 2}, "q": 1}', json=nested)
    closed: dict[str, Any] = {"json": nested, "disable_additional_properties": True}
    assert accepts('{"o": {"a": 1}}', **closed)
    assert not accepts('{"o": {"a": 1, "b": 2}}', **closed)
    assert accepts('{"p": {"a": 1, "b": 2}}', **closed)
    of_pydantic = {"definitions": {"O": OBJECT}, "type": "object", "properties": {
        "o": {"title": "O", "allOf": [{"$ref": "#/definitions/O"}]},
        "n": {"anyOf": [{"$ref": "#/definitions/O"}, {"type": "null"}]},
    }}  # fmt: skip
    closed = {"json": of_pydantic, "disable_additional_properties": True}
    assert accepts('{"o": {"a": 1}, "n": {"a": 2}}', **closed) and not accepts('{"o": {"a": 1, "b": 2}}', **closed)
    assert not accepts('{"n": {"a": 1, "b": 2}}', **closed) and not accepts('{"p": 2}', **closed)
    by_default = make_grammar(StructuredOutputsParams(json=nested), closes_objects=True)
    assert not follows(by_default, '{"o": {"a": 1, "b": 2}}')


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"allOf": [OBJECT, {"type": "object", "properties": {"b": {}}}]}, '{"a": 1, "b": 2}'),
        ({**OBJECT, "required": ["a", "b"]}, '{"a": 1, "b": 2}'),
        ({"$defs": {"B": OBJECT}, "$ref": "#/$defs/B", "required": ["b"]}, '{"a": 1, "b": 2}'),
        ({**OBJECT, "anyOf": [{"properties": {"b": {}}, "required": ["b"]}, {"required": ["a"]}]}, '{"a": 1, "b": 2}'),
        ({**OBJECT, "minProperties": 2}, '{"a": 1, "b": 2}'),
        ({**OBJECT, "if": {}, "then": {"properties": {"b": {"type": "integer"}}}}, '{"a": 1, "b": 2}'),
        ({"type": "object", "properties": {"p": {"const": {"properties": {}}}}}, '{"p": {"properties": {}}}'),
        ({"type": "object", "properties": {"type": {"type": "string"}}}, '{"type": "x"}'),
    ],
)  # fmt: skip
def test_closing_takes_nothing_away_that_a_schema_needs(schema: dict[str, Any], text: str) -> None:
    assert accepts(text, json=schema, disable_additional_properties=True)


def test_other_structures() -> None:
    assert accepts("{}", json_object=True) and not accepts("[]", json_object=True)
    assert accepts("ab/c", regex="a./c", disable_fallback=True) and not accepts("ab/cd", regex="a./c")
    assert accepts('say "no"\n', choice=["yes", 'say "no"\n', "世界"]) and accepts("世界", choice=["yes", "世界"])
    assert not accepts("ye", choice=["yes", "no"])
    assert accepts("a1", grammar='start: "a" NUMBER\nNUMBER: /[0-9]+/')
    assert accepts("yes!", grammar='root ::= ("yes" | "no") "!"')


@pytest.mark.parametrize(
    ("wanted", "right", "wrong"),
    [
        (OLD, ["", "1 < 2", f"so {F} and <call=g>{{}}</call>.", F + F], ["<call=h>{}</call>", "<call=f>{}", F[:-1]]),
        (whole(TAGGED), [f"so {A} < {A}", "none"], ["<ab>", "<a>{}</a>"]),
        (whole({**TAGGED, "at_least_one": True}), [A, f"{A} so {A}"], ["", f"so {A}"]),
        (whole({**TAGGED, "stop_after_first": True}), ["so", f"so {A}"], [f"{A} so"]),
        (whole({**TAGGED, "at_least_one": True, "stop_after_first": True}), [A], ["", f"{A} so", A + A]),
        (whole({**TAGGED, "excludes": ["no"]}), [f"so n {A} n"], ["so no", f"no {A}", f"{A} no"]),
        (tag("<r>", TAGGED, "</r>"), [f"<r>so {A} n</r>", "<r></r>"], ["<r>so", "<r>so</r> ", "<r><ab></r>"]),
        (tag("<x>", text("regex", pattern=".*"), "</x>"), ["<x>ab</x>", "<x></x>"], ["<x>ab", "<x>a</x>b</x>"]),
        (tag("<x>", text("regex", pattern="^a.*$"), ["</x>", "</y>"]), ["<x>a</y>", "<x>ab</x>"], ["<x>b</x>"]),
        (sequence(text("regex", pattern="[a-z]*"), constant("zz"), constant("!")), ["abzz!", "zz!"], ["abz!"]),
        (sequence(text("or", elements=[constant("foo"), constant("foobar")]), constant("bard")),
         ["foobard", "foobarbard"], ["foo", "foobarb"]),
        (whole({**ANY, "excludes": [], "max_whitespace_cnt": None, "more": {}}), ["a"], []),
        (whole({**json_of(OBJECT), "style": None, "any_order": None}), ['{"a": 1}'], ["{}"]),
        (tag("<r>", json_of(OBJECT), ["</r>", "</s>"]), ['<r>{"a": 1}</s>'], ['<r>{"a": 1}', '<r>{"a": 1}</t>']),
        (tag("<r>", ANY, ["</r>", "</s>"]), ["<r>a < b</s>"], ["<r>a", "<r>a</r></s>"]),
        (tag("<r>", ANY, ""), ["<r>so", "<r>"], ["so"]),
        (whole({**ANY, "excludes": ["no", "/"]}), ["", "n o"], ["so no", "/"]),
        (sequence(ANY, constant("so: "), json_of(OBJECT)), ['a so so: {"a": 1}'], ['so {"a": 1}']),
        (sequence(DIGITS, text("or", elements=[constant("x"), constant("")])), ["<b>1</b>x", "<b>12</b>"], ["<b>"]),
        (sequence(text("optional", content=constant("a")), text("plus", content=constant("b"))), ["bb", "ab"], ["a"]),
        (whole(text("star", content=constant("ab"))), ["", "abab"], ["aba"]),
        (whole(text("repeat", min=1, max=2, content=DIGITS)), ["<b>1</b>", 2 * "<b>1</b>"], ["", 3 * "<b>1</b>"]),
        (whole(text("repeat", min=1, max=-1, content=constant("x"))), ["x", "xxxxx"], [""]),
        (whole(LISTED), ["", A, f"{A}, <b>2</b>, {A}"], [f"{A}, ", f"{A} {A}"]),
        (whole({**LISTED, "at_least_one": True, "stop_after_first": True}), [A], ["", f"{A}, {A}"]),
        (tag("<l>\n", {**LISTED, "separator": "\n"}, "\n</l>"), [f"<l>\n{A}\n{A}\n</l>"], [f"<l>\n{A}\n"]),
        (whole(RULES), ['so <a>{"a": 1}<g>G.', "so"], ["<g>H", "<a>"]),
        (tag("<r>", {**RULES, "loop": False}, "</r>"), ["<r>o<g>G</r>", "<r>o</r>"], ["<r><g>Ga</r>", "<r>"]),
        (tag("<r>", {**RULES, "excludes": ["</r>", "no"]}, "</r>"), ["<r>o<g>G</r>"], ["<r><g>Gno</r>", "<r>no</r>"]),
        (whole(text("grammar", grammar='root ::= ("yes" | "no") "!"')), ["yes!"], ["yes"]),
        (json.dumps(sequence(text("grammar", grammar="start: /[a-c]/ /[d-f]/"), constant("!"))), ["ad!"], ["ad"]),
    ],
)  # fmt: skip
def test_structural_tags(wanted: Any, right: list[str], wrong: list[str]) -> None:
    grammar = make_grammar(StructuredOutputsParams(structural_tag=wanted))
    assert [text for text in right if not follows(grammar, text)] == []
    assert [text for text in wrong if follows(grammar, text)] == []


def test_structural_tags_name_special_tokens_by_their_ids_and_take_the_options_of_json() -> None:
    wanted = StructuredOutputsParams(structural_tag=OLD, disable_any_whitespace=True)
    rules, schema, _ = json.loads(make_grammar(wanted, special_tokens={"<call=": 7, "</call>": 8}))["grammars"]
    assert re.search(r'<\[7\]> \("f>" rest_\d+ \| "g>" rest_\d+\)', rules["lark_grammar"])
    assert "<[8]>" in rules["lark_grammar"] and "lazy" not in rules["lark_grammar"]
    assert schema["json_schema"]["x-guidance"] == {"whitespace_flexible": False}
    after = make_grammar(wanted, ReasoningMarks("<think>", "</think>", False))
    assert follows(after, f'<think>{F}</think>so <call=f>{{"a":1}}</call>') and not follows(after, "<think>so")


@pytest.mark.parametrize(("text", "expected"), [("<think>\nso {\n</think>\n\n[1]", True), ("so</think>[1]", False)])
def test_a_grammar_begins_after_the_reasoning(text: str, expected: bool) -> None:
    wanted = StructuredOutputsParams(json={"type": "array", "items": {"type": "integer"}})
    think, end = "<think>", "</think>"

    def takes(start: str | None, text: str, *, is_optional: bool = False) -> bool:
        return follows(make_grammar(wanted, ReasoningMarks(start, end, is_optional)), text)

    assert takes(think, text) is expected
    assert takes(None, text)  # anything is a thought
    assert takes(think, "[1]", is_optional=True)
    assert not takes(think, "[1]")


def test_errors_name_the_field_that_a_structure_comes_from() -> None:
    with pytest.raises(RequestError, match=r"^guided_regex cannot be followed") as refused:
        make_grammar(StructuredOutputsParams(regex="("), field="guided_regex")
    assert refused.value.param == "guided_regex"
    for wrong in ({"not": {}}, {"properties": {"a": {"allOf": [{"type": "string", "minLength": 3}, {"maxLength": 2}]}},
                                "required": ["a"]}):  # fmt: skip
        calls = ToolCalls({"f": {}, "g": wrong}, LIST)
        with pytest.raises(RequestError, match=r"^tools\[1\].function.parameters cannot be followed"):
            make_grammar(calls)


@pytest.mark.parametrize(
    ("grammar", "right"),
    [
        (r'root ::= "\u00e9"', "é"),
        (r'root ::= "\x41" [\u00e0-\u00ff]', "Aé"),
        (r'root ::= "\U0001F600"', "😀"),
        (r"root ::= [a\-z] [\.\*\^]+", "-^."),
        ('root ::= "a"\n  | "b" # c\n\n  x # ::=\nx ::=\n  [#]', "b#"),
        (r'root ::= "\b\f" [\b]', "\b\f\b"),
        (r'root ::= "\u0022\u005c"', '"\\'),
        ('root ::= "?x: " [^"\\\\]*', "?x: a"),
        ('root ::= a # ::= "\na ::= "#"', "#"),
        ('?start: "a" x\n!x: "b"', "ab"),
        (r'start: "\U0001F600" "\u00e9\x41"', "😀éA"),
        ('start: A\nA.2: "a"', "a"),
        ('start:\n  "a"\n  | "b"', "b"),
        ('start: "::=" /x:\\/?!/', "::=x:/!"),
    ],
)
def test_grammars_are_read_in_their_own_dialect(grammar: str, right: str) -> None:
    assert accepts(right, grammar=grammar) and not accepts(right + '"', grammar=grammar)


@pytest.mark.parametrize("grammar", ['start: "' + '\\"' * 50_000 + "\n", "start: /" + "\\/" * 50_000 + "\n"])
def test_lark_without_the_end_of_a_text_is_refused_before_its_pieces_are_sought(grammar: str) -> None:
    with pytest.raises(ValueError, match="has no end on its line"):
        checked_lark(grammar)


@pytest.mark.parametrize("reference", ["#", "#/properties/a", "#/$defs/A", "#/$defs/odd~1name%25"])
def test_references_in_parameters_are_to_the_whole_schema(reference: str) -> None:
    """Where each parameter is written on its own, as Qwen3-Coder has it."""
    properties = {"a": {"type": "integer"}, "b": {"$ref": reference}}
    defined = {"A": {"type": "integer"}, "odd/name%": {"type": "integer"}}
    whole = {"type": "object", "properties": properties, "$defs": defined}
    form, parameters = ParameterText("<", ">", ">", "</>"), ParameterList({"a": None, "b": None}, (), properties)
    spelling = Spelling("", "", "", {"f": CallText("(", ")", form, (parameters,))})
    grammar = make_grammar(ToolCalls({"f": whole}, spelling))
    value = '{"a": 1}' if reference == "#" else "2"
    assert follows(grammar, f"(<a>1</><b>{value}</>)") and not follows(grammar, '(<b>"x"</>)')


@pytest.mark.parametrize("schema", [{"type": "object", "properties": {}}, {"type": "object"}, {}, {"title": "f"}])
def test_a_function_without_parameters_gets_no_arguments(schema: dict[str, Any]) -> None:
    spelling = Spelling("", "", "", {"f": CallText("", "")})
    grammar = make_grammar(ToolCalls({"f": schema}, spelling))
    assert follows(grammar, "{}") and not follows(grammar, '{"time": 1}')
    opened = make_grammar(ToolCalls({"f": {**schema, "additionalProperties": True}}, spelling))
    assert follows(opened, '{"time": 1}')
    assert follows(make_grammar(ToolCalls({"f": {"type": "object", "required": ["a"]}}, spelling)), '{"a": 1}')


def test_calls_are_written_as_they_are_spelled() -> None:
    schemas = {"f": OBJECT, "g": {}}
    one = '{"name": "f", "parameters": {"a": 1}}'
    both = f'[{one}, {{"name": "g", "parameters": {{}}}}]'
    assert follows(make_grammar(ToolCalls(schemas, LIST)), both)
    assert not follows(make_grammar(ToolCalls(schemas, LIST, is_parallel=False)), both)
    assert follows(make_grammar(ToolCalls(schemas, LIST, is_parallel=False)), f"[{one}]")
    assert follows(make_grammar(ToolCalls(schemas, Spelling("", "", "", {"f": CallText("", "")}))), '{"a": 1}')


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({}, "structured_outputs needs exactly one of json, regex, choice, grammar, json_object, structural_tag"),
        ({"json": {}, "choice": ["a"]}, "got json and choice"),
        ({"json": "{"}, "structured_outputs.json cannot be read"),
        ({"json": "[]"}, "a schema is an object"),
        ({"json": 7}, "structured_outputs.json must be a JSON schema"),
        ({"json": {"type": "strange"}}, "structured_outputs.json cannot be followed: Invalid type: strange"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "Unsatisfiable schema"),
        (
            {"json": {"$ref": "http://example.com/x"}},
            "cannot be followed: $ref 'http://example.com/x' is not within the schema",
        ),
        ({"json": {"$ref": "#/anyOf/" + "9" * 5000, "anyOf": [{}]}}, "points at nothing"),
        ({"json": {"$ref": "#/$defs/a"}}, "$ref '#/$defs/a' points at nothing: there is no '$defs'"),
        ({"json": {"uniqueItems": True}, "final_check": "refuse"}, "has uniqueItems, which a grammar cannot enforce"),
        ({"json": {"properties": []}}, "properties is an object of schemas, not []"),
        ({"json": {"anyOf": {}}}, "anyOf is a list of at least one schema, not {}"),
        ({"json": {"items": 3}}, "a schema is an object, true or false, not 3"),
        ({"json": {"minLength": -1}}, "minLength is a whole number from 0 on, not -1"),
        ({"json": {"minimum": "1"}}, "minimum is a number, not '1'"),
        ({"json": {"multipleOf": 0}}, "multipleOf is a number above 0, not 0"),
        ({"json": {"pattern": "(a)\\1"}}, "has a back reference"),
        ({"json": {"pattern": "["}}, "has a class that does not end"),
        ({"json": {"enum": 3}}, "enum is a list, not 3"),
        ({"json": {}, "whitespace_pattern": "("}, "outputs.whitespace_pattern cannot be followed: "),
        ({"json": {"not": {}}}, "json cannot be followed: Unsatisfiable schema"),
        ({"json": {}, "final_check": "x"}, "structured_outputs.final_check must be one of report, error, refuse"),
        ({"regex": "("}, "structured_outputs.regex cannot be followed"),
        ({"regex": "(?=a)"}, "look-around"),
        ({"regex": ""}, "structured_outputs.regex must be a non-empty string"),
        ({"choice": []}, "structured_outputs.choice must be a list of non-empty strings"),
        ({"choice": "yes"}, "structured_outputs.choice must be a list"),
        ({"choice": ["\ud800"]}, "valid Unicode"),
        ({"grammar": "start: nobody"}, "unknown name"),
        ({"grammar": "root ::= ("}, "structured_outputs.grammar cannot be"),
        ({"grammar": "x" * (1 << 21)}, "1048576 is the most"),
        ({"json_object": True, "disable_fallback": 1}, "structured_outputs.disable_fallback must be true or false"),
        ({"json_object": "yes"}, "structured_outputs.json_object must be true or false"),
        ({"structural_tag": 7}, "structured_outputs.structural_tag must be a structural tag, as an object or as text"),
        ({"structural_tag": "{"}, "structured_outputs.structural_tag cannot be read: Expecting property name"),
        ({"structural_tag": "[]"}, "a structural tag is an object, not []"),
        ({"structural_tag": {}}, "structured_outputs.structural_tag cannot be read: it has no format"),
        ({"structural_tag": {**OLD, "triggers": ["<f"]}}, 'a tag begins "<call=f>", and none of the triggers does'),
        ({"structural_tag": {**OLD, "triggers": []}}, "structures.triggers is a list of non-empty texts"),
        ({"structural_tag": {"structures": [], "triggers": ["<"]}}, "a list of at least one object with begin, schema"),
        ({"structural_tag": {"structures": [{"begin": "<"}], "triggers": ["<"]}}, "structures[0] has no schema"),
        ({"structural_tag": {**OLD, "format": ANY}}, 'it has "format", which is not known'),
        ({"structural_tag": tag("<a>", json_of({"not": {}}), "")}, "structural_tag cannot be followed: Unsatisfiable"),
        ({"structural_tag": {"format": {"type": "mood"}}}, "format.type is one of const_string, json_schema, grammar"),
        ({"structural_tag": {"format": {"type": "token", "token": 1}}}, "format.type token is not built"),
        ({"structural_tag": tag("<a>", {**json_of({}), "style": "qwen_xml"}, "")}, '"qwen_xml" is not built'),
        ({"structural_tag": tag("<a>", text("regex", pattern="("), "</a>")}, "structural_tag cannot be followed"),
        ({"structural_tag": sequence(text("regex", pattern="a.*"), json_of({}))}, "elements[0].pattern has no end: it"),
        ({"structural_tag": whole(text("star", content=text("regex", pattern="(.|\\n)+")))}, "pattern has no end"),
        ({"structural_tag": tag(1, ANY, "</a>")}, "format.begin is a text, not 1"),
        ({"structural_tag": tag("<a>", ANY, [])}, "format.end is a text or a list of texts"),
        (
            {"structural_tag": sequence(ANY, json_of({}))},
            "format.elements[0] has no end: any text is last, or in a tag",
        ),
        ({"structural_tag": sequence(constant("x" * 20_000))}, "a part has 20000 characters, and 16384 is the most"),
        ({"structural_tag": nested(60)}, "formats are nested more than 40 deep"),
        ({"structural_tag": "[" * 500 + "]" * 500}, "nested more than 100 deep"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_the_field_and_the_reason(wanted: Any, message: str) -> None:
    with pytest.raises(RequestError) as refused:
        make_grammar(SamplingParams(structured_outputs=wanted).structured_outputs)  # type: ignore[arg-type]
    assert message in str(refused.value)
    assert (refused.value.param or "").startswith("structured_outputs")
    assert "\n" not in str(refused.value)


def _deep(levels: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def _bomb(levels: int) -> Any:
    defs: dict[str, Any] = {
        f"d{i}": {"type": "object", "properties": {name: {"$ref": f"#/$defs/d{i + 1}"} for name in "abcdef"}}
        for i in range(levels)
    }
    return {"$defs": {**defs, f"d{levels}": {"type": "object"}}, "$ref": "#/$defs/d0"}


_HOSTILE: list[dict[str, Any]] = [
    {"json": _deep(3000)},
    {"json": _bomb(200)},
    {"json": {"allOf": [{"anyOf": [_deep(2) for _ in range(30)]} for _ in range(8)]}},
    {"json": {"properties": {f"p{i}": {"pattern": "^(a|b)*c{1,50}$"} for i in range(2000)}}},
    {"regex": "((((a{1,100}){1,100}){1,100}){1,100}){1,100}"},
    {"regex": "(.*x.*)" * 2000},
    {"regex": "(" + "|".join("abcdefghijklmnopqrstuvwxyz") + "){1000}{1000}"},
    {"json": {"type": "integer", "multipleOf": 99991}},
    {"choice": [f"choice {i}" for i in range(30000)]},
    {"grammar": "start: " + " | ".join(f'"{i}"' for i in range(30000))},
    {"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000},
    {"grammar": "root ::= " + "[" * 300_000},  # no character is read again for each of them
    {"grammar": 'root ::= "' + '\\"' * 300_000 + "\n"},
]


@pytest.mark.parametrize("index", range(len(_HOSTILE)))
def test_hostile_structures_are_taken_or_refused(index: int) -> None:
    wanted = _HOSTILE[index]
    with contextlib.suppress(RequestError):  # by our own limits, by llguidance's, or by the time that a trial may take
        make_grammar(StructuredOutputsParams(**wanted))
