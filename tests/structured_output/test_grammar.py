"""What makes a grammar of `structured_outputs`, and what is refused at the door."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

import pytest

from octavo.errors import RequestError
from octavo.sampling_params import SamplingParams, StructuredOutputsParams
from octavo.structured_output.grammar import CallText, ReasoningMarks, Spelling, ToolCalls, make_grammar

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


def test_objects_are_closed_where_a_schema_says_nothing_of_other_properties() -> None:
    nested = {"type": "object", "properties": {"o": OBJECT, "p": {**OBJECT, "additionalProperties": True}}}
    closed: dict[str, Any] = {"json": nested}
    assert accepts('{"o": {"a": 1}}', **closed)
    assert not accepts('{"o": {"a": 1, "b": 2}}', **closed)
    assert accepts('{"p": {"a": 1, "b": 2}}', **closed)
    of_pydantic = {"definitions": {"O": OBJECT}, "type": "object", "properties": {
        "o": {"title": "O", "allOf": [{"$ref": "#/definitions/O"}]},
    }}  # fmt: skip
    assert accepts('{"o": {"a": 1}}', json=of_pydantic) and not accepts('{"o": {"a": 1, "b": 2}}', json=of_pydantic)
    assert not accepts('{"o": {"a": 1}, "p": 2}', json=of_pydantic)
    open_grammar = make_grammar(StructuredOutputsParams(**closed), closes_objects=False)
    assert follows(open_grammar, '{"o": {"a": 1, "b": 2}}')
    assert not accepts('{"o": {"a": 1, "b": 2}}', **closed, disable_additional_properties=True)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"allOf": [OBJECT, {"type": "object", "properties": {"b": {}}}]}, '{"a": 1, "b": 2}'),
        ({**OBJECT, "required": ["a", "b"]}, '{"a": 1, "b": 2}'),
        ({"type": "object", "properties": {"p": {"const": {"properties": {}}}}}, '{"p": {"properties": {}}}'),
        ({"type": "object", "properties": {"type": {"type": "string"}}}, '{"type": "x"}'),
    ],
)  # fmt: skip
def test_closing_takes_nothing_away_that_a_schema_needs(schema: dict[str, Any], text: str) -> None:
    assert accepts(text, json=schema)


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
    calls = ToolCalls({"f": {}, "g": {"not": {}}}, LIST)
    with pytest.raises(RequestError, match=r"^tools\[1\].function.parameters cannot be followed"):
        make_grammar(calls)


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
        ({"json": {"$ref": "http://example.com/x"}}, "not present"),
        ({"json": {"uniqueItems": True}}, "Unimplemented keys"),
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
        ({"structural_tag": {**OLD, "format": {}}}, 'it has "format", which is not known'),
        ({"structural_tag": tag("<a>", json_of({"not": {}}), "")}, "structural_tag cannot be followed: Unimplemented"),
        ({"structural_tag": {"format": {"type": "mood"}}}, "format.type is one of const_string, json_schema, grammar"),
        ({"structural_tag": {"format": {"type": "token", "token": 1}}}, "format.type token is not built"),
        ({"structural_tag": tag("<a>", {**json_of({}), "style": "qwen_xml"}, "")}, '"qwen_xml" is not built'),
        ({"structural_tag": tag("<a>", text("regex", pattern="("), "</a>")}, "structural_tag cannot be followed"),
        ({"structural_tag": tag(1, ANY, "</a>")}, "format.begin is a text, not 1"),
        ({"structural_tag": tag("<a>", ANY, [])}, "format.end is a text or a list of texts"),
        (
            {"structural_tag": sequence(ANY, json_of({}))},
            "format.elements[0] has no end: any text is last, or in a tag",
        ),
        (
            {"structural_tag": sequence(constant("x" * 20_000))},
            "a part of it has 20000 characters, and 16384 is the most",
        ),
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


@pytest.mark.parametrize(
    "wanted",
    [
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
    ],
)
def test_hostile_structures_are_taken_or_refused(wanted: dict[str, Any]) -> None:
    with contextlib.suppress(RequestError):  # by our own limits, by llguidance's, or by the time that a trial may take
        make_grammar(StructuredOutputsParams(**wanted))
