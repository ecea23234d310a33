"""What a text between marks is, by the parameter's schema."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest

from octavo.entrypoints.chat.tools import parameter_values
from octavo.entrypoints.chat.tools.call_spelling import property_schema, schema_types
from octavo.entrypoints.chat.tools.format_parser import FormatParser
from octavo.entrypoints.chat.tools.tool_formats import FORMATS, Tags
from octavo.entrypoints.chat.tools.tool_parser_base import Call

DEFINITIONS = {
    "Text": {"type": "string"},
    "A/B [~]": {"type": "string"},
    "Count": {"allOf": [{"type": "integer"}, {"minimum": 0}]},
}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "12", "12"),
        ({"allOf": [{"type": "string"}]}, "12", "12"),
        ({"allOf": [{"$ref": "#/$defs/Text"}, {"minLength": 1}]}, "12", "12"),
        ({"$ref": "#/$defs/A~1B%20[~0]"}, "12", "12"),
        ({"allOf": [{"type": ["string", "integer"]}, {"type": "string"}]}, "12", "12"),
        ({"anyOf": [{"allOf": [{"type": "string"}]}]}, "true", "true"),
        ({"$ref": "#/$defs/Count"}, "12", 12),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"const": "1"}, "1", "1"),
        ({"type": "array"}, "['a', 'b']", ["a", "b"]),
        ({"type": "array"}, '["a"]', ["a"]),
        ({"type": "array"}, "('a', 1, None)", ["a", 1, None]),
        ({"type": "object"}, "{'a': True, 'b': [None]}", {"a": True, "b": [None]}),
        ({"type": "null"}, "None", None),
        ({"type": ["array", "null"]}, "None", None),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": ["string", "null"]}, "12", "12"),
        ({"type": "string"}, "None", "None"),
        ({"type": "string"}, "['a']", "['a']"),
        ({"type": "boolean"}, "True", True),
        ({"type": "integer"}, '"12"', 12),
        ({"type": "integer"}, "twelve", "twelve"),
        # Python reads it as infinity, which JSON does not have.
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "array"}, "[-1e999, None]", "[-1e999, None]"),
        ({}, "{'a': 1e999}", "{'a': 1e999}"),
        ({"type": "array"}, "['a", "['a"),
        ({"type": "array"}, "[open('x')]", "[open('x')]"),
        ({"type": "object"}, "{1: 2}", "{1: 2}"),
        ({"type": ["string", "integer"]}, "12", 12),
        ({"type": ["string", "integer"]}, "true", "true"),
        ({"type": "array"}, "", []),
        ({"type": ["object", "null"]}, " ", {}),
        ({"type": "null"}, "", None),
        ({"type": "integer"}, "", ""),
        ({"type": ["string", "null"]}, "", ""),
        ({}, "12", 12),
        ({}, "a b", "a b"),
        ({}, "", ""),
        ({}, "{'a': [None]}", {"a": [None]}),
        ({}, "('a', 1)", "('a', 1)"),
    ],
)
def test_the_schema_says_what_a_text_is(schema: dict[str, Any], text: str, value: Any) -> None:
    tools = {"f": {"type": "object", "properties": {"a": schema}, "$defs": DEFINITIONS}}
    parser = FormatParser(FORMATS["qwen3_coder"], tools)
    answer = f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
    (call,) = [piece for letter in answer for piece in parser.add(letter)] + parser.finish()
    assert isinstance(call, Call) and json.loads(call.arguments) == {"a": value}


TEXT = {"properties": {"a": {"type": "string"}}}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/Arguments", "$defs": {"Arguments": {"type": "object", **TEXT}}},
        {"allOf": [{"$ref": "#/definitions/One"}, {"required": ["a"]}], "definitions": {"One": TEXT}},
        {"anyOf": [{"properties": {"b": {}}}, TEXT]},
        {**TEXT, "allOf": [{"properties": {"a": {"minLength": 1}}}]},
        {"type": "object", "additionalProperties": {"type": "string"}},
        {"properties": {"b": {"anyOf": [{"type": "string"}, {}]}, "a": {"$ref": "#/properties/b/anyOf/0"}}},
        {"properties": {"b": {"prefixItems": [{"type": "string"}]}, "a": {"$ref": "#/properties/b/prefixItems/0"}}},
    ],
)  # fmt: skip
def test_the_schema_of_a_parameter_is_found_behind_references_and_in_parts(schema: dict[str, Any]) -> None:
    parser = FormatParser(FORMATS["glm45"], {"f": schema})
    (call,) = (
        parser.add("<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>12</arg_value>\n</tool_call>") + parser.finish()
    )
    assert isinstance(call, Call) and json.loads(call.arguments) == {"a": "12"}


class Counted(dict[str, Any]):
    """A schema that counts how often its type is read."""

    num_reads = 0

    def get(self, key: str, default: Any = None) -> Any:
        self.num_reads += key == "type"
        return super().get(key, default)


def test_a_schema_that_repeats_itself_is_read_once() -> None:
    own = Counted(anyOf=[{"$ref": "#/properties/a"}] * 100)
    root = Counted(properties={"a": own}, allOf=[{"$ref": "#"}] * 100)
    assert schema_types(own, root) == {"unknown"} and own.num_reads == 1
    assert property_schema(root, "a", root) is own
    chain = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 100} for i in range(6)}
    last = Counted(type="string")
    assert schema_types({"$ref": "#/$defs/d0"}, {"$defs": {**chain, "d6": last}}) == {"string"}
    assert last.num_reads == 1


def test_a_reference_to_an_anchor_says_nothing() -> None:
    root = {"type": "object", "$defs": {"city": {"$anchor": "city", "type": "string"}}}
    assert schema_types({"$ref": "#city"}, root) == set() and schema_types({"$ref": "#"}, root) == {"object"}


def test_items_of_an_optional_list_have_its_type() -> None:
    zips = {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]}
    assert property_schema(zips, "item", {}) == {"type": "string"}


def test_objects_and_lists_may_be_tags_in_tags() -> None:
    ns = "]<]minimax[>["
    item = {"type": "object", "properties": {"sku": {"type": "string"}, "qty": {"type": "integer"}}}
    properties = {
        "to": {"type": "object", "properties": {"zip": {"type": "string"}}},
        "items": {"type": "array", "items": item},
    }
    parser = FormatParser(FORMATS["minimax_m3"], {"f": {"type": "object", "properties": properties}})
    answer = (
        f'{ns}<tool_call>\n{ns}<invoke name="f">{ns}<to>{ns}<zip>018{ns}</zip>{ns}</to>{ns}<items>'
        f"{ns}<item>{ns}<sku>7{ns}</sku>{ns}<qty>2{ns}</qty>{ns}</item>{ns}<item>{ns}<sku>x{ns}</sku>{ns}</item>"
        f"{ns}</items>{ns}</invoke>\n{ns}</tool_call>"
    )
    (call,) = [piece for letter in answer for piece in parser.add(letter)] + parser.finish()
    assert isinstance(call, Call)
    assert json.loads(call.arguments) == {"to": {"zip": "018"}, "items": [{"sku": "7", "qty": 2}, {"sku": "x"}]}


def test_the_steps_for_nested_tags_are_as_many_as_the_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    num_lines, num_expressions = 0, 0

    def count(frame: Any, event: str, arg: Any) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        return count if frame.f_code.co_filename == parameter_values.__file__ else None

    def compiled(pattern: str) -> re.Pattern[str]:
        nonlocal num_expressions
        num_expressions += 1
        return compile_expression(pattern)

    compile_expression, tags, before = re.compile, FORMATS["minimax_m3"].body, sys.gettrace()
    monkeypatch.setattr(parameter_values.re, "compile", compiled)
    assert isinstance(tags, Tags)
    tag = "]<]minimax[>["
    text = "".join(f"{tag}<k{i}>{i}{tag}</k{i}>" for i in range(400))
    sys.settrace(count)
    try:
        value = parameter_values.nested_value(text, tags, {}, {})
    finally:
        sys.settrace(before)
    assert value == {f"k{i}": i for i in range(400)}
    assert num_lines < 100 * 400 and num_expressions <= 2
