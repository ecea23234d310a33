"""JSON schemas as grammars: nothing that is invalid, everything that is valid, and what only the final check sees."""

from __future__ import annotations

import contextlib
import json
import random
import sys
from fractions import Fraction
from itertools import islice, product
from typing import Any

import pytest
from jsonschema import Draft7Validator, Draft202012Validator, FormatChecker
from jsonschema.validators import validator_for

from octavo.errors import RequestError
from octavo.sampling_params import StructuredOutputsParams
from octavo.structured_output import schema_grammar, schema_keywords
from octavo.structured_output.answer_parts import ReasoningMarks
from octavo.structured_output.final_check import CallChecks
from octavo.structured_output.grammar_builder import WantedGrammar, make_checked_grammar
from octavo.structured_output.schema_keywords import SchemaError
from octavo.structured_output.schema_lowering import lower
from octavo.structured_output.schema_validation import NotChecked, Validator, problem_of, same
from tests.structured_output.corpus import admits, published_schema, random_answer, variants
from tests.structured_output.grammars import INTEGER, TEXT, check_of, grammar_of

AB = {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "additionalProperties": False}


def oracle_of(schema: Any) -> Any:
    default = Draft7Validator if "dependencies" in schema else Draft202012Validator
    return validator_for(schema, default=default)(schema, format_checker=FormatChecker(["date", "uuid"]))


@pytest.mark.parametrize("seed", range(60))
def test_published_shapes_admit_what_is_valid_and_nothing_else(seed: int) -> None:
    """By `jsonschema`: answers at random, and what differs from them in one place. Keys come in the schema's order."""
    schema, rng = published_schema(seed), random.Random(seed)
    made, oracle = make_checked_grammar(WantedGrammar(StructuredOutputsParams(json=schema))), oracle_of(schema)
    for _ in range(3):
        answer = random_answer(made.text, rng)
        if answer is None:
            continue
        value = json.loads(answer)
        for one in [value, *islice(variants(value, rng), 12)]:
            text = json.dumps(one)
            if "Infinity" in text:
                continue
            is_taken = admits(made.text, one)
            if made.check is not None:
                is_taken = is_taken and made.check.problem(text) is None
            assert is_taken == oracle.is_valid(one), (schema, one)


@pytest.mark.parametrize("is_integer", [True, False])
def test_bounds_hold_to_the_last_digit(is_integer: bool) -> None:
    bounds = [None, -100, -2.5, -1, -0.25, -0.125, 0, 0.05, 0.25, 0.5, 1, 1.5, 2, 9.99, 180]
    texts = [str(n) for n in (-101, -100, -3, -2, -1, 0, 1, 2, 3, 9, 10, 99, 179, 180, 181)]
    if not is_integer:
        fractions = (".1", ".12", ".125", ".13", ".2", ".24", ".25", ".3", ".49", ".5", ".51", ".9", ".99", ".999")
        texts += [f"{n}{f}" for n in ("-3", "-2", "-1", "-0", "0", "1", "2", "9", "179", "180") for f in fractions]
        texts += ["0.05", "0.04", "0.051", "0.000001", "-0.01"]
    rng = random.Random(1)
    for low, high in rng.sample([*product(bounds, bounds)], 40):
        names = rng.choice(["minimum", "exclusiveMinimum"]), rng.choice(["maximum", "exclusiveMaximum"])
        given = {name: bound for name, bound in zip(names, (low, high), strict=True) if bound is not None}
        schema = {"type": "integer" if is_integer else "number", **given}
        wanted = [text for text in texts if Draft202012Validator(schema).is_valid(json.loads(text))]
        try:
            grammar = grammar_of(schema)
        except RequestError:
            assert not wanted, schema
            continue
        assert [text for text in texts if admits_text(grammar, text)] == wanted, schema


def admits_text(grammar: str, text: str) -> bool:
    from llguidance import LLMatcher

    from tests.structured_output.corpus import BYTES

    matcher = LLMatcher(BYTES, grammar, log_level=0)
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


@pytest.mark.parametrize(
    "bounds",
    [
        {"minimum": -1e308, "maximum": 1e308},
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        {"exclusiveMinimum": 1e-9},
        {"multipleOf": 123456789},
        {"multipleOf": 1e-12},
        {"minimum": 10**18},
        {"minimum": 2**53 + 1},
        {"const": 2**53 + 1},
        {"enum": [1, 2**53 + 1]},
    ],
)
def test_numbers_beyond_what_a_grammar_writes_are_checked_at_the_end(bounds: dict[str, Any]) -> None:
    made = make_checked_grammar(WantedGrammar(StructuredOutputsParams(json={"type": "number", **bounds})))
    assert made.check is not None
    for value in (0, 1, 123456789, -(2**64), 10**18, 1.5, 2**53, 2**53 + 1):
        assert (made.check.problem(str(value)) is None) == Draft202012Validator(bounds).is_valid(value)
        assert admits(made.text, value) or not Draft202012Validator({"type": "number", **bounds}).is_valid(value)


@pytest.mark.parametrize("divisor", [0.25, 0.12, 0.125, 2.5, 0.01, 0.035])
def test_multiples_may_have_fewer_digits_than_the_divisor(divisor: float) -> None:
    made = make_checked_grammar(WantedGrammar(StructuredOutputsParams(json={"type": "number", "multipleOf": divisor})))
    step, half = Fraction(str(divisor)), Fraction(str(divisor)) / 2
    for number in range(101):
        right, wrong = (f"{float(number * step):g}", f"{float(number * step + half):.7g}")
        assert admits_text(made.text, right), right
        assert not admits_text(made.text, wrong) or (made.check is not None and made.check.problem(wrong)), wrong


@pytest.mark.parametrize(
    ("low", "high", "inside"), [(-1.05, -1, -1.04), (1, 1.05, 1.04), (-0.5, 0, -0.4), (0, 0.5, 0.4)]
)
def test_whole_bounds_that_are_left_out_are_not_within(low: float, high: float, inside: float) -> None:
    bounds = [{"exclusiveMinimum": low}, {"exclusiveMaximum": high}]
    for schema in ({**bounds[0], **bounds[1]}, {"allOf": bounds}):
        grammar = grammar_of({"type": "number", **schema})
        assert [value for value in (low, inside, high) if admits(grammar, value)] == [inside]


def test_draft_4_excludes_bounds_by_a_flag() -> None:
    schema = {"type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": 3, "exclusiveMaximum": False}
    grammar = grammar_of(schema)
    assert [value for value in (-1, 0, 0.5, 3, 4) if admits(grammar, value)] == [0.5, 3]


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}], **AB}, [{"a": 1}, {"b": 1}], [{}, {"a": 1, "b": 1}]),
        ({"not": {"required": ["a"]}, **AB}, [{}, {"b": 1}], [{"a": 1}]),
        ({"not": {"type": ["array", "string"]}}, [1, None, {}, True], ["", []]),
        ({**TEXT, "not": {"enum": ["", "ab", "b"]}}, ["a", "abc", "ba"], ["", "ab", "b"]),
        ({**TEXT, "not": {"minLength": 3.0}}, ["", "ab"], ["abc"]),
        ({**INTEGER, "not": {"minimum": 3}}, [2, -4], [3, 9]),
        ({"dependentRequired": {"a": ["b"]}, **AB}, [{}, {"b": 1}, {"a": 1, "b": 1}], [{"a": 1}]),
        ({"dependencies": {"a": ["b"]}, **AB}, [{}, {"a": 1, "b": 1}], [{"a": 1}]),
        ({"dependentSchemas": {"a": {"properties": {"b": {"const": 1}}}}, **AB}, [{"a": 1, "b": 1}, {"b": 2}],
         [{"a": 1, "b": 2}]),
        ({"if": {"properties": {"a": {"const": 1}}, "required": ["a"]}, "then": {"required": ["b"]}, **AB,
          "properties": {"a": {"enum": [1, 2]}, "b": INTEGER}}, [{}, {"a": 2}, {"a": 1, "b": 1}], [{"a": 1}]),
        ({"type": "object", "propertyNames": {"pattern": "^[a-c]+$"}}, [{}, {"ab": 1}], [{"d": 1}, {"a": 1, "": 2}]),
        ({"type": "object", "propertyNames": {"enum": ["x", 3]}}, [{}, {"x": 1}], [{"y": 1}]),
        ({"type": "object", "patternProperties": {"b$": {}}, "propertyNames": False}, [{}], [{"b": 1}, {"y": 1}]),
        ({**AB, "minProperties": 1}, [{"a": 1}, {"b": 1}, {"a": 1, "b": 1}], [{}]),
        ({**AB, "maxProperties": 1}, [{"a": 1}, {"b": 1}, {}], [{"a": 1, "b": 1}]),
        ({"type": "array", "uniqueItems": True, "maxItems": 1}, [[], [1]], [[1, 1]]),
        ({"patternProperties": {"^a": INTEGER, "^b": TEXT}, "additionalProperties": False}, [{"a": 1, "b": ""}],
         [{"a": ""}, {"c": 1}]),
        ({"definitions": {"default": INTEGER, "enum": TEXT, "properties": {"type": "null"}},
          "properties": {"allOf": {"$ref": "#/definitions/default"}, "$ref": {"$ref": "#/definitions/properties"},
                         "const": {"$ref": "#/definitions/enum"}}},
         [{"allOf": 1, "$ref": None, "const": ""}], [{"allOf": ""}, {"$ref": 1}, {"const": 2}]),
        ({"$id": "http://x/y", "$defs": {"a": {"$id": "z", "type": "null"}, "b": {"$anchor": "n", **TEXT}},
          "items": {"anyOf": [{"$ref": "z"}, {"$ref": "#n"}]}}, [[None, ""]], [[1]]),
        ({**TEXT, "pattern": r"^(?!x-)(?=.*\d)[a-z0-9-]+$"}, [], ["A", "a b"]),
        ({"enum": [1, "ab", None, True], "type": ["string", "null"], "minLength": 1}, ["ab", None], [1, True]),
        ({**TEXT, "pattern": r"^[[\w&&-]+\cJ?$"}, ["[a&-"], ["]", " "]),
        ({**TEXT, "pattern": "^a{,2}$"}, ["a{,2}"], ["aa"]),
    ],
)  # fmt: skip
def test_keywords_that_no_grammar_has_are_written_with_others(
    schema: dict[str, Any], right: list[Any], wrong: list[Any]
) -> None:
    grammar = grammar_of(schema)
    assert [value for value in right if not admits(grammar, value)] == []
    assert [value for value in wrong if admits(grammar, value)] == []


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "array", "uniqueItems": True, "items": INTEGER}, [1, 2], [1, 1]),
        ({"type": "array", "contains": {"const": 1}}, [2, 1], [2]),
        ({"oneOf": [{"properties": {"a": INTEGER}}, {"properties": {"a": INTEGER, "b": INTEGER}}]},
         {"a": 1, "b": ""}, {"a": 1, "b": 2}),
        ({**TEXT, "not": {"pattern": "^a"}}, "b", "a"),
        ({**TEXT, "pattern": r"\bon\b"}, "on it", "once"),
        ({**TEXT, "pattern": r"^(?!on)[a-z]+$"}, "off", "one"),
        ({"type": "object", "minProperties": 2}, {"a": 1, "b": 2}, {"a": 1}),
        ({"type": "object", "allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": ["b"]}]} for i in range(20)]},
         {"b": 2}, {f"a{i}": 1 for i in range(19)}),
        ({"type": "string", "pattern": r"^(?:\S+\s+){0,49}\S+$", "maxLength": 500}, "ab " * 20 + "c", "a" * 501),
        ({**AB, "unevaluatedProperties": False, "allOf": [True], "additionalProperties": True}, {"a": 1}, {"a": ""}),
    ],
)  # fmt: skip
def test_the_rest_is_seen_when_the_answer_has_ended(schema: dict[str, Any], right: Any, wrong: Any) -> None:
    made = make_checked_grammar(WantedGrammar(StructuredOutputsParams(json=schema)))
    assert admits(made.text, right)
    assert made.check is None or made.check.problem(json.dumps(right)) is None
    assert not admits(made.text, wrong) or made.check is not None
    if admits(made.text, wrong) and made.check is not None:
        assert made.check.problem(json.dumps(wrong)) is not None
    assert Validator(schema).check(right) is None


def test_alternatives_that_are_too_many_are_named_and_leave_the_rest() -> None:
    parts = [{"if": {"required": [f"a{i}"]}, "then": {"required": ["b"]}, "properties": {f"c{i}": INTEGER}}
             for i in range(9)]  # fmt: skip
    lowered = lower({"type": "object", "allOf": parts})
    assert lowered.unheld == {"if"}
    assert [f"c{i}" for i in range(9) if f'"c{i}"' not in json.dumps(lowered.schema)] == []


@pytest.mark.parametrize(
    ("part", "keyword"),
    [
        ({"multipleOf": 0.25}, "multipleOf"),
        ({"minimum": -1.125}, "minimum"),
        ({"maximum": 1.125}, "maximum"),
        ({"type": "object", "properties": {"a": TEXT, "b": TEXT}, "additionalProperties": False, "minProperties": 1},
         "minProperties"),
        ({"type": "object", "properties": {"a": TEXT, "b": TEXT}, "additionalProperties": False, "maxProperties": 1},
         "maxProperties"),
    ],
)  # fmt: skip
def test_alternatives_that_are_left_out_are_named_by_the_keyword_they_stand_for(
    part: dict[str, Any], keyword: str
) -> None:
    """Not `anyOf`, which the schema has not."""
    unheld = lower({"allOf": [part] * 12}).unheld
    assert keyword in unheld and "anyOf" not in unheld


def test_alternatives_behind_references_are_checked_where_they_are_too_many() -> None:
    """llguidance multiplies them, and refused the schema."""
    parts = {f"p{i}": {"anyOf": [{"required": [f"a{i}_{j}"]} for j in range(20)]} for i in range(4)}
    whole = [{"$ref": f"#/$defs/{name}"} for name in parts]
    check = check_of({"type": "object", "properties": {"n": INTEGER}, "$defs": parts, "allOf": whole})
    assert check is not None
    right = {f"a{i}_{i}": 1 for i in range(4)}
    assert check.problem(json.dumps(right)) is None
    assert check.problem(json.dumps(dict(list(right.items())[1:]))) is not None


def test_a_mark_of_reasoning_within_an_answer_without_reasoning_is_part_of_it() -> None:
    marks = ReasoningMarks("<think>", "</think>", is_optional=True)
    schema = {"type": "array", "contains": {"const": 1}}
    check = make_checked_grammar(WantedGrammar(StructuredOutputsParams(json=schema), marks)).check
    assert check is not None
    assert check.problem('["</think>", 1]') is None
    assert check.problem('<think>[1]</think>\n\n["</think>", 1]') is None
    assert check.problem('<think>[1]</think>["</think>", 2]') is not None


def test_a_long_answer_is_checked_as_a_whole() -> None:
    kinds = [{"type": "object", "properties": {"kind": {"const": i}, "n": INTEGER}} for i in range(20)]
    check = check_of({"type": "array", "items": {"oneOf": kinds}, "uniqueItems": True})
    answer = [{"kind": i % 20, "n": i} for i in range(220)]
    assert check.problem(json.dumps(answer)) is None
    assert check.problem(json.dumps([*answer, answer[0]])) is not None
    assert check.problem(json.dumps([*answer, {"kind": 20}])) is not None
    longer = [{"kind": i % 20, "n": i} for i in range(1000)]
    with pytest.raises(NotChecked, match="too many steps"):  # the event loop would wait too long
        check.problem(json.dumps([*longer, {"kind": 20}]))


@pytest.mark.parametrize(
    ("schema", "answer"),
    [
        ({"const": [[i] for i in range(20_000)]}, [[i] for i in range(20_000)]),
        ({"enum": [{"a": i} for i in range(20_000)]}, {"a": -1}),
        ({"uniqueItems": True}, list(range(60_000))),
        ({"items": {"not": {"pattern": "[ab]*a[ab]{3000}c"}}}, ["ab" * 200] * 10),
        ({"allOf": [{"pattern": f"^[\\p{{L}} ]{{1,{i}}}$"} for i in range(20, 40)]}, "abc"),
        ({"items": {"required": ["a"] * 3000}}, [{"a": 1}] * 200),
        ({"items": {"dependentRequired": {f"a{i}": ["b"] for i in range(3000)}}}, [{}] * 200),
        ({"items": {"type": ["string"] * 3000 + ["integer"]}}, [1] * 200),
        ({"items": {"anyOf": [*[{"multipleOf": 0.7}] * 30, {}]}}, [10**300] * 200),
        ({"$id": "http://a/b", "$defs": {f"a{i}": {} for i in range(50_000)}, "$ref": "#/$defs/a1"}, 5),
        ({"items": {"unevaluatedItems": False, "prefixItems": [{}] * 900}}, [[1]] * 300),
        ({"type": "string"}, [[]] * 200_000),
        ({"allOf": [{"$ref": "#/$defs/" + "%41" * i} for i in range(700)],
          "$defs": {"A" * i: {} for i in range(700)}}, 5),
        ({"$id": "http://a/" + "x/" * 5000, "allOf": [{"$id": f"{i}"} for i in range(100)]}, 5),
        ({"items": {"anyOf": [{"const": ["a" * 100_000]}, {}]}}, [["b"]] * 200),
    ],
)  # fmt: skip
def test_what_a_check_may_take_is_counted_by_size(schema: dict[str, Any], answer: Any) -> None:
    """Each of these took many times what its few steps stand for, and the event loop waits for a check."""
    with pytest.raises(NotChecked, match="too many steps"):
        problem_of(json.dumps(answer), json.dumps(schema))


@pytest.mark.parametrize("keyword", ["$ref", "$id"])
def test_what_is_applied_to_many_values_is_looked_up_once(keyword: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """References and URIs may be long."""
    looked_up = list[str]()

    def counted(function: Any) -> Any:
        def call(*texts: str) -> str:
            looked_up.append(texts[-1])
            return str(function(*texts))

        return call

    monkeypatch.setattr(schema_keywords, "unquote", counted(schema_keywords.unquote))
    monkeypatch.setattr(schema_keywords, "urljoin", counted(schema_keywords.urljoin))
    schema: Any = {
        "$ref": {"items": {"$ref": "#/$defs/%41"}, "$defs": {"A": INTEGER}},
        "$id": {"$id": "http://a/b", "items": {"$id": "c", **INTEGER}},
    }[keyword]
    assert Validator(schema).check([1] * 50) is None
    assert len(looked_up) == 2, looked_up


@pytest.mark.parametrize("name", ["{x}", "{", "}", "{}", "{0}", "{!}"])
@pytest.mark.parametrize("around", [
    lambda part: part, lambda part: {"items": part}, lambda part: {"if": {"uniqueItems": True}, "then": part},
    lambda part: {"if": {"minItems": 5}, "else": part},
])  # fmt: skip
def test_what_a_client_calls_a_type_is_no_place_for_a_value(name: str, around: Any) -> None:
    problem = problem_of("[1]", json.dumps(around({"type": [name]})))
    assert problem is not None and f"is not of type {name!r}" in problem


def test_a_value_that_is_nested_too_deep_for_a_message_is_not_checked() -> None:
    value: list[Any] = []
    for _ in range(sys.getrecursionlimit() * 2):
        value = [value]
    with pytest.raises(NotChecked):
        Validator(TEXT).check(value)


def test_values_are_the_same_if_they_are_equal_in_json() -> None:
    different = [
        None, True, False, 0, 1, -1, 0.5, 1e-7, 1e999, -1e999, 12, 1 << 60, (1 << 60) + 1, 1 << 70, (1 << 70) + 1,
        "", "0", "1", "1,", "a", "None", "None,", "True,", "[]", '"1:a', "\ud800", [], [[]], [[], []], [[[]]], {}, [{}],
        [1], [1, 2], [12], [True], ["1"], ["1,"], ["a"], ["a", "b"], ["ab"], [["a"], "b"], ['a"1:b'], ["a", ["b"]],
        {"a": 1}, {"a": True}, {"a": "1"}, ["a", 1], {"a": {"b": 1}}, {"a": {}, "b": 1}, {"b": {}, "a": 1},
        ["number", "0x1000000000000001"], ["boolean", True],
    ]  # fmt: skip
    assert len(set(map(same, different))) == len(different)
    for one, other in [
        (1, 1.0), (0, -0.0), (float(1 << 70), 1 << 70), (1e999, 1e999), ([1, {"a": 2.0}], [1.0, {"a": 2}]),
        ({"a": 1, "b": [2]}, {"b": [2], "a": 1}),
    ]:  # fmt: skip
        assert same(one) == same(other)
    assert Validator({"uniqueItems": True}).check(different) is None
    assert Validator({"uniqueItems": True}).check([*different, {"b": 1, "a": {}}]) is not None


def test_nobody_can_make_values_of_one_hash() -> None:
    """Sets of such values would take the square of their number. Only the hashes of texts are keyed."""
    modulus = sys.hash_info.modulus
    numbers = [i * modulus for i in range(2, 100)]
    assert {type(same(one)) for one in (None, True, 1, 0.5, *numbers, [], [1, 2], {}, {"a": [[]]}, "a")} == {str}


def test_a_name_written_with_escapes_is_the_name() -> None:
    """llguidance takes it for another."""
    schema = {"type": "object", "properties": {"größe": INTEGER}}
    made = make_checked_grammar(WantedGrammar(StructuredOutputsParams(json=schema, final_check="refuse")))
    assert made.check is not None
    for answer, is_right in [
        ('{"gr\\u00f6\\u00dfe": ""}', False), ('{"gr\\u00f6\\u00dfe": 1}', True),
        ('{"größe": 1, "\\u00e9": ""}', True), ('{"größe": 1, "x": "\\u001b"}', True),
    ]:  # fmt: skip
        assert admits_text(made.text, answer)
        assert (made.check.problem(answer) is None) == is_right, answer
    assert made.check.problem('{"größe": "", "x": "C:\\\\users"}') is None  # no escape: the grammar holds it
    odd = check_of({"type": "object", "properties": {"a\nb": INTEGER}})
    assert odd.problem('{"a\\u000ab": ""}') is not None
    assert check_of({**schema, "additionalProperties": False}) is None


def test_a_key_that_comes_twice_counts_once() -> None:
    check = check_of({"type": "object", "minProperties": 2})
    assert check.problem('{"a": 1, "a": 2}') is not None
    assert check.problem('{"a": 1, "b": 2}') is None


@pytest.mark.parametrize(
    "inner",
    [
        {"allOf": [{"$ref": "#"}, {"required": ["b"], "properties": {"c": {"type": "null"}}}]},
        {"$ref": "#", "required": ["b"], "properties": {"c": {"type": "null"}}},
        {"$ref": "#", "type": "object", "not": {"required": ["c"]}},
        {"anyOf": [{"$ref": "#"}, INTEGER], "allOf": [{"$ref": "#/$defs/needs_b"}]},
        {"properties": {"a": {"required": ["b"]}}, "allOf": [{"properties": {"a": {"$ref": "#"}}}], "required": ["b"]},
    ],
)
def test_what_stands_beside_a_reference_to_the_whole_is_checked(inner: dict[str, Any]) -> None:
    needs_b = {"required": ["b"], "properties": {"a": {"$ref": "#"}}}
    schema = {"type": "object", "properties": {"a": inner, "b": INTEGER}, "$defs": {"needs_b": needs_b}}
    made, right = make_checked_grammar(WantedGrammar(StructuredOutputsParams(json=schema))), {"a": {"b": 1}, "b": 2}
    assert admits(made.text, right)
    assert made.check is not None and made.check.problem(json.dumps(right)) is None
    assert made.check.problem('{"a": {"c": 1}}') is not None


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"type": "object", "minProperties": 2, "maxProperties": 1},
        {"$defs": {"a": {"type": "array", "prefixItems": [{"$ref": "#/$defs/b"}], "minItems": 1},
                   "b": {"type": "object", "additionalProperties": {"$ref": "#/$defs/a"}, "required": ["x"]}},
         "$ref": "#/$defs/a"},
        {"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#"}, False]}}, "required": ["a"]},
        {"$ref": "#"},
        {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"anyOf": [{"$ref": "#/$defs/a"}, TEXT]}},
         "$ref": "#/$defs/a"},
    ],
)  # fmt: skip
def test_a_schema_that_only_endless_values_satisfy_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(SchemaError, match=r"Unsatisfiable|leads back|without end"):
        lower(schema)


def test_what_only_endless_values_satisfy_is_left_out() -> None:
    endless = {"type": "object", "properties": {"next": {"$ref": "#/$defs/endless"}}, "required": ["next"]}
    schema = {"$defs": {"endless": endless}, "anyOf": [{"$ref": "#/$defs/endless"}, TEXT]}
    assert not admits_start(grammar_of(schema), "{")
    optional = {"$defs": {"endless": endless}, "type": "object", "properties": {"a": {"$ref": "#/$defs/endless"}}}
    grammar = grammar_of(optional)
    assert admits(grammar, {}) and not admits_start(grammar, '{"a"')


@pytest.mark.parametrize(
    "definition",
    [
        {"type": "object", "oneOf": [{"$ref": "#/$defs/text"}, {"$ref": "#/$defs/short"}]},
        {"type": "string", "enum": [1, None]},
        {"type": "string", "maxLength": 1, "not": {"maxLength": 2}},
        {"type": "object", "required": ["x"], "properties": {"x": TEXT}, "allOf": [{"properties": {"x": INTEGER}}]},
        {"type": "array", "items": {"type": "array", "items": {"$ref": "#/$defs/none"}, "minItems": 1}, "minItems": 1},
        {"allOf": [{"$ref": "#/$defs/text"}, {"enum": [1.5, 2]}]},
        {"type": "array", "minItems": 2, "maxItems": 1},
        {"anyOf": [{"$ref": "#/$defs/text", "minLength": 5, "maxLength": 4}, {"type": "object", "enum": []}]},
    ],
)
def test_a_definition_that_nothing_satisfies_is_left_out(definition: dict[str, Any]) -> None:
    none = {"type": "string", "pattern": "^a$", "allOf": [{"pattern": "^b$"}]}
    texts = {"text": TEXT, "short": {"type": "string", "maxLength": 1}, "none": none}
    schema = {"$defs": {"empty": definition, **texts}, "properties": {"a": {"$ref": "#/$defs/empty"}, "b": INTEGER}}
    grammar = grammar_of({"type": "object", **schema})
    assert admits(grammar, {"b": 1}) and not admits_start(grammar, '{"a"')


def test_the_number_of_empty_definitions_that_are_looked_for_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    num = 0

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal num
        num += 1
        return lower(*args, **options)

    monkeypatch.setattr(schema_grammar, "lower", counted)
    empty = {f"a{i}": {"type": "string", "pattern": "^a$", "allOf": [{"pattern": f"^b{i}$"}]} for i in range(12)}
    properties = {name: {"$ref": f"#/$defs/{name}"} for name in empty}
    with pytest.raises(RequestError, match="more than 8 of its definitions are satisfied by no value") as caught:
        grammar_of({"type": "object", "properties": properties, "$defs": empty})
    assert num == 10 and "$defs" not in str(caught.value)


@pytest.mark.parametrize("name", ["a/b/whole.json", "whole", "https://a.example/b/whole.json"])
def test_references_within_a_schema_that_has_a_name_are_found(name: str) -> None:
    inner = {"$id": "c/inner.json", "items": {"$ref": "#/$defs/number"}, "$defs": {"number": INTEGER}, "type": "array"}
    schema = {"$id": name, "type": "object", "additionalProperties": {"$ref": "#/$defs/list"},
              "$defs": {"list": {"type": "array", "items": {"$ref": "c/inner.json"}}, "inner": inner}}  # fmt: skip
    made = grammar_of(schema)
    assert admits(made, {"x": [[1], []]}) and not admits(made, {"x": [["1"]]})
    assert Validator(schema).check({"x": [[1]]}) is None and Validator(schema).check({"x": [["1"]]}) is not None


def admits_start(grammar: str, text: str) -> bool:
    from llguidance import LLMatcher

    from tests.structured_output.corpus import BYTES

    return LLMatcher(BYTES, grammar, log_level=0).try_consume_tokens(list(text.encode())) == len(text)


@pytest.mark.parametrize("shape", ["properties", "not", "if", "anyOf", "oneOf", "definitions", "additionalProperties"])
def test_the_work_on_a_schema_grows_with_its_size(shape: str) -> None:
    """Counted in calls, so that it is the same on every machine."""

    def nested(depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "object", "properties": {"a": TEXT}}
        for _ in range(depth):
            within: dict[str, Any] = {
                "properties": {"properties": {"a": schema, "b": INTEGER}},
                "not": {"not": schema},
                "if": {"if": schema, "then": {"required": ["a"]}},
                "anyOf": {"anyOf": [schema, {"type": "null"}]},
                "oneOf": {"oneOf": [schema, {"required": ["b"]}]},
                "definitions": {"definitions": {"x": schema}, "properties": {"y": {"$ref": "#"}}},
                "additionalProperties": {"additionalProperties": schema},
            }[shape]
            schema = {"type": "object", **within} if shape != "not" else within
        return schema

    def num_calls(depth: int) -> int:
        schema, num = nested(depth), 0

        def count(frame: Any, event: str, arg: Any) -> None:
            nonlocal num
            num += event == "call"

        sys.setprofile(count)
        try:
            lower(schema, closes=True)
        except SchemaError:
            pass
        finally:
            sys.setprofile(None)
        return num

    assert num_calls(16) <= 300_000
    if shape not in ("if", "oneOf", "not"):  # these are written again, within a budget
        assert num_calls(24) <= 4 * num_calls(12)


def test_long_lists_of_values_are_read_once() -> None:
    """Counted in calls: 4,000 values of which each is compared with the others' keywords and not with the others."""
    num = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal num
        num += event == "call"

    schema = {
        "enum": [f"value {i}" for i in range(4000)],
        "type": "string",
        "minLength": 1,
        "not": {"const": "value 7"},
    }
    sys.setprofile(count)
    try:
        lowered = lower(schema)
        assert Validator({"items": schema}).check(["value 1"] * 100) is None
    finally:
        sys.setprofile(None)
    assert len(lowered.schema["enum"]) == 3999
    assert num < 40 * 4000


def test_closing_never_makes_a_value_valid() -> None:
    for seed in range(60, 100):
        schema, rng = published_schema(seed), random.Random(seed)
        oracle = oracle_of(schema)
        made = make_checked_grammar(
            WantedGrammar(StructuredOutputsParams(json=schema, disable_additional_properties=True))
        )
        answer = random_answer(made.text, rng)
        if answer is None or "Infinity" in json.dumps(json.loads(answer)):
            continue
        if made.check is None or made.check.problem(answer) is None:
            assert oracle.is_valid(json.loads(answer)), (schema, answer)


_ODD = [None, True, -1, 2.5, "", "(", "^a", "#", "object", [], {}, ["a"], [{}], {"a": []}, {"$ref": "#"}, 10**30, 1e400]


def with_odd_value(schema: Any, rng: random.Random) -> Any:
    """The schema with one value in it, anywhere, that is of another kind."""
    if isinstance(schema, dict) and schema and rng.random() < 0.8:
        name = rng.choice(list(schema))
        return {**schema, name: with_odd_value(schema[name], rng)}
    if isinstance(schema, list) and schema and rng.random() < 0.8:
        i = rng.randrange(len(schema))
        return [*schema[:i], with_odd_value(schema[i], rng), *schema[i + 1 :]]
    return rng.choice(_ODD)


@pytest.mark.parametrize("seed", range(8))
def test_odd_schemas_are_taken_or_refused_with_the_field(seed: int) -> None:
    rng, refusals = random.Random(seed), list[tuple[str | None, str]]()
    for _ in range(60):
        schema = with_odd_value(published_schema(rng.randrange(10**6)), rng)
        if not isinstance(schema, dict):
            continue
        try:
            made = make_checked_grammar(WantedGrammar(StructuredOutputsParams(json=schema)))
        except RequestError as e:
            refusals.append((e.param, str(e)))
            continue
        if made.check is not None:
            with contextlib.suppress(NotChecked):
                made.check.problem('{"a": [1, {"b": null}], "name": "x"}')
    assert {param for param, _ in refusals} <= {"structured_outputs.json"}
    assert [text for _, text in refusals if not text.startswith("structured_outputs.json cannot be ")] == []


def test_a_branch_without_a_condition_is_nothing() -> None:
    validator = Validator({"then": {"properties": {"a": True}}, "unevaluatedProperties": False})
    assert validator.check({}) is None and validator.check({"a": 1}) is not None


def test_a_bound_is_as_it_is_written() -> None:
    validator = Validator({"multipleOf": 0.01})
    assert validator.check(0.07) is None and validator.check(0.075) is not None
    assert Fraction("0.07") % Fraction("0.01") == 0
    check = check_of({"type": "number", "multipleOf": 0.07})  # whose digits llguidance does not find
    assert check.problem("0.14") is None and check.problem("0.1") is not None


def test_the_calls_of_a_request_share_the_steps_of_one_check() -> None:
    odd = {"type": "array", "items": {"not": {"const": 0}}}
    checks = CallChecks({"f": odd, "g": {"$ref": "https://example.com/other"}})
    long = json.dumps([1] * 2500)
    assert checks.verdict([("f", long)]) is None
    assert checks.verdict([("g", "1"), ("f", "[0]")]) == "schema_mismatch"  # whatever cannot be checked before it
    assert checks.verdict([("g", "1"), ("f", "[1]")]) == "schema_unchecked"
    assert checks.verdict([("f", long)] * 10) == "schema_unchecked"


def list_of(kind: str) -> dict[str, Any]:
    """A schema in which a list's items are what the schema around it says, or anything."""
    return {
        "$id": f"https://example.com/{kind}", "$ref": "list",
        "$defs": {"own": {"$dynamicAnchor": "item", "type": kind}},
    }  # fmt: skip


LIST = {
    "$id": "https://example.com/list", "type": "array", "items": {"$dynamicRef": "#item"},
    "$defs": {"any": {"$dynamicAnchor": "item"}},
}  # fmt: skip
TREE = {
    "$id": "https://example.com/tree", "$dynamicAnchor": "node", "type": "object",
    "properties": {"data": True, "children": {"type": "array", "items": {"$dynamicRef": "#node"}}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        # Two lists of the same definition, by the resource around them.
        (
            {"$id": "https://example.com/root", "type": "object",
             "properties": {"texts": {"$ref": "string"}, "numbers": {"$ref": "integer"}, "all": {"$ref": "list"}},
             "$defs": {"l": LIST, "s": list_of("string"), "i": list_of("integer")}},
            [{"texts": ["a"], "numbers": [1], "all": [1, "a"]}],
            [{"texts": [1]}, {"numbers": ["a"]}],
        ),
        # A tree without other properties, at every level.
        (
            {"$id": "https://example.com/strict", "$dynamicAnchor": "node", "$ref": "tree",
             "unevaluatedProperties": False, "$defs": {"tree": TREE}},
            [{"children": [{"data": 1}]}],
            [{"daat": 1}, {"children": [{"daat": 1}]}, {"children": [{"children": [{"daat": 1}]}]}],
        ),
        # An anchor in a resource that was left.
        (
            {"$id": "https://example.com/root", "$defs": {"l": LIST, "s": list_of("string")},
             "type": "object", "properties": {"a": {"allOf": [{"$ref": "string"}, True]}, "b": {"$ref": "list"}}},
            [{"a": ["x"], "b": [1]}],
            [{"a": [1], "b": [1]}],
        ),
        # Draft 2019-09.
        (
            {"$schema": "https://json-schema.org/draft/2019-09/schema", "$id": "https://example.com/strict",
             "$recursiveAnchor": True, "allOf": [{"$ref": "tree"}], "unevaluatedProperties": False,
             "$defs": {"tree": {"$id": "tree", "$recursiveAnchor": True, "type": "object",
                                "properties": {"data": True, "child": {"$recursiveRef": "#"}}}}},
            [{"child": {"data": 1}}],
            [{"daat": 1}, {"child": {"daat": 1}}],
        ),
    ],
)  # fmt: skip
def test_dynamic_references_lead_to_the_outermost_anchor_on_the_way(
    schema: dict[str, Any], right: list[Any], wrong: list[Any]
) -> None:
    made = make_checked_grammar(WantedGrammar(StructuredOutputsParams(json=schema)))
    for values, is_right in ((right, True), (wrong, False)):
        for value in values:
            is_taken = admits(made.text, value)
            if made.check is not None:
                is_taken = is_taken and made.check.problem(json.dumps(value)) is None
            assert is_taken == is_right, value
            assert (Validator(schema).check(value) is None) == is_right, value


def test_targets_of_dynamic_references_are_bounded() -> None:
    defs = {
        f"r{i}": {
            "$id": f"https://example.com/r{i}", "$dynamicAnchor": f"a{i}",
            "properties": {f"p{j}": {"$ref": f"r{j}"} for j in range(10)} | {"q": {"$dynamicRef": f"#a{i}"}},
        }
        for i in range(10)
    }  # fmt: skip
    schema = {"$id": "https://example.com/root", "type": "object", "properties": {"a": {"$ref": "r0"}}, "$defs": defs}
    with pytest.raises(SchemaError, match="dynamic references have too many targets"):
        lower(schema)


@pytest.mark.parametrize(
    ("draft", "wrong"),
    [
        ("http://json-schema.org/draft-04/schema#", {"required": []}),
        ("http://json-schema.org/draft-04/schema#", {"exclusiveMinimum": True}),
        ("http://json-schema.org/draft-06/schema#", {"const": 1, "items": 2}),
        ("http://json-schema.org/draft-07/schema", {"if": "x"}),
        ("https://json-schema.org/draft/2019-09/schema", {"dependentRequired": {"a": "b"}}),
        ("https://json-schema.org/draft/2020-12/schema", {"properties": {"a": {"prefixItems": []}}}),
    ],
)
def test_a_schema_may_be_asked_for(draft: str, wrong: dict[str, Any]) -> None:
    """References to metaschemas, by the examples of `jsonschema`."""
    oracle = validator_for({"$schema": draft.removesuffix("#") + ("" if "20" in draft else "#")})
    right = {"type": "object", "properties": {"a": {"type": ["string", "null"], "minLength": 1}}, "required": ["a"]}
    for value in (right, wrong, {"type": "text"}, {"minLength": -1}, {"enum": []}, {"allOf": [{"not": 1}]}, []):
        is_right = not any(oracle(oracle.META_SCHEMA).iter_errors(value))
        assert (Validator({"$ref": draft}).check(value) is None) == is_right, value
        if not admits(grammar_of({"$ref": draft}), value):
            assert not is_right, value
    definition = {"$ref": "http://json-schema.org/draft-07/schema#/definitions/nonNegativeInteger"}
    assert admits(grammar_of({"type": "array", "items": definition}), [0, 1])
    assert not admits(grammar_of({"type": "array", "items": definition}), [-1])
