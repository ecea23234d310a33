"""Combined schemas of objects as alternatives that only name properties: they admit what the schema admits."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from jsonschema import Draft4Validator, Draft202012Validator

from octavo.structured_output import flat_objects as module
from octavo.structured_output.flat_objects import flat_objects
from octavo.structured_output.schema_logic import Logic

Schema = Any
_A, _B, _C = ({name: {"type": "integer"}} for name in "abc")
_DRAFT_4 = "http://json-schema.org/draft-04/schema#"


def admits(flats: list[dict[str, Any]], schema: Schema, value: dict[str, Any]) -> bool:
    """Return whether a value satisfies one of the flat schemas, whose references are to `schema`."""
    beside = {key: schema[key] for key in ("$schema", "$defs", "definitions") if key in schema}
    validator = Draft4Validator if schema.get("$schema") == _DRAFT_4 else Draft202012Validator
    return bool(validator({"anyOf": flats, **beside}).is_valid(value))


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (  # an absent property is none of the others
            {"properties": _A, "additionalProperties": {"type": "string"}, "not": {"required": ["b"]}},
            [{"a": 1}, {"c": "x"}], [{"b": "x"}],
        ),
        (
            {"allOf": [{"maxProperties": 2, "properties": {**_A, **_B}}, {"properties": _C}]},
            None, [{"a": 1, "b": 1, "c": 1}],
        ),
        (
            {"properties": {**_A, **_B}, "anyOf": [{"maxProperties": 0}, {"required": ["a"]}]},
            [{}, {"a": 1}, {"a": 1, "b": 1}], [{"b": 1}],
        ),
        ({"allOf": [{"minProperties": 1, "properties": _A}, {"properties": _B}]}, [{"a": 1}, {"b": 1}], [{}]),
        ({"properties": {**_A, **_B}, "anyOf": [{"minProperties": 1}, {"required": ["a"]}]}, [{"b": 1}], [{}]),
        ({"properties": _A, "maxProperties": 1, "additionalProperties": {}}, None, [{"a": 1, "b": 1}]),
        ({"properties": {**_A, **_B}, "required": ["a"], "maxProperties": 1}, [{"a": 1}], [{"a": 1, "b": 1}, {}]),
        (
            {"allOf": [{"properties": {"a": {"enum": [1, 2], "const": 1}}}, {"properties": {"a": {"enum": [1, 2]}}}]},
            [{"a": 1}], [{"a": 2}],
        ),
        (
            {"$schema": _DRAFT_4, "allOf": [
                {"properties": {"a": {"type": "number", "minimum": 5}}},
                {"properties": {"a": {"type": "number", "exclusiveMinimum": True, "minimum": 5}}},
                {"properties": {"a": {"maximum": 9}}}, {"properties": {"a": {"exclusiveMaximum": True}}},
            ]},
            [{"a": 6}, {"a": 9}], [{"a": 5}],
        ),
        (  # an impossible alternative is left out
            {"anyOf": [{"required": ["x"], "additionalProperties": False}, {"properties": _A, "required": ["a"]}]},
            [{"a": 1}], [{}, {"x": 1}],
        ),
        (
            {"allOf": [{"properties": {"a": {"$ref": "o#"}}}, {"properties": {"a": {"minProperties": 1}}}],
             "$defs": {"o": {"$id": "o", "properties": {"k": {"$ref": "#/$defs/k"}}, "$defs": {"k": {"const": 1}}},
                       "k": {"const": 2}}},
            None, [],
        ),
        (  # either may hold with the other, so the first part cannot be written
            {"anyOf": [{"oneOf": [{"properties": {"a": {"pattern": "x"}}}, {"minProperties": 1}]}, {"properties": _B}]},
            None, [],
        ),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/A", "type": "string",
          "definitions": {"A": {"properties": _A, "required": ["a"]}}}, [{"a": 1}], [{}]),
    ],
)  # fmt: skip
def test_a_flat_form_admits_what_the_schema_admits(
    schema: Schema, right: list[dict[str, Any]] | None, wrong: list[dict[str, Any]]
) -> None:
    flats = flat_objects(schema)
    assert (flats is None) is (right is None)
    if flats is None:
        return
    assert all(admits(flats, schema, value) for value in right or ())
    assert not any(admits(flats, schema, value) for value in wrong)


def chain(num: int, last: Schema, depth: int = 4) -> Schema:
    defined = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * num} for i in range(depth)}
    return {"$ref": "#/$defs/d0", "$defs": {**defined, f"d{depth}": last}}


@pytest.mark.parametrize(
    "schema",
    [
        chain(200, {"type": "string"}),
        chain(8, {"type": "string"}, 7),
        {"anyOf": [{"allOf": [{"type": "string"}, {"properties": {str(i): {}}}]} for i in range(2_000)]},
        {"properties": {str(i): {} for i in range(4_000)}, "allOf": [{"required": ["0"]}] * 400},
        {"oneOf": [{"required": [str(j) for j in range(i, i + 40)]} for i in range(90)], "properties": _A},
        {"allOf": [{"properties": {"a": {"enum": list(range(i, i + 1_000))}}} for i in range(4)]},
        {"allOf": [{"properties": {"a": {"enum": ["x" * 400 + str(i)] * 20, "pattern": "x" * 99}}} for i in range(99)]},
    ],
)  # fmt: skip
def test_the_work_on_a_schema_is_bounded(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    num_steps = 0

    def counted(of: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal num_steps
            num_steps += 1
            return of(*args, **kwargs)

        return call

    for owner, name in (
        (module._FlatWriter, "alternatives"), (module._FlatWriter, "_both"), (Logic, "_have_none_in_common"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
    flat_objects(schema)
    assert num_steps < 30_000


def test_a_schema_of_many_alternatives_has_no_flat_form() -> None:
    many: Schema = {f"p{i}": {} for i in range(1_000)}
    assert flat_objects({"properties": many, "minProperties": 1}) is None
    two = [{"required": ["p0"]}, {"properties": {"p0": False}}]
    few: Schema = {f"p{i}": {} for i in range(16)}
    assert flat_objects({"properties": few, "minProperties": 1, "anyOf": two}) is not None
    more = {"properties": {**few, "p16": {}, "p17": {}}, "minProperties": 1, "anyOf": two}
    assert flat_objects(more) is None


_VALUES = [0, 1, 5, "", "ab", None]
_OF_VALUES: list[Schema] = [
    True, False, {}, {"type": "integer"}, {"type": ["string", "null"]}, {"enum": [0, 1, "ab"]}, {"const": 1},
    {"minimum": 1}, {"type": "integer", "maximum": 4}, {"maxLength": 1}, {"enum": [1, 5], "const": 1},
    {"allOf": [{"minimum": 1}, {"type": "number"}]}, {"not": {"const": 1}}, {"$ref": "#/$defs/v"},
    {"exclusiveMinimum": 0, "type": "number"}, {"anyOf": [{"const": 0}, {"type": "string"}]},
]  # fmt: skip


class Combined:
    """Random combined schemas of objects with the properties a, b and c."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def root(self) -> Schema:
        schema = self._schema(3)
        if not isinstance(schema, dict):
            schema = {"allOf": [schema]}
        if "properties" in schema or self._rng.random() < 0.7:  # every alternative names every property
            schema["properties"] = {**dict.fromkeys("abc", True), **schema.get("properties", {})}
        return {**schema, "$defs": {"v": self._rng.choice(_OF_VALUES[:-3]), "o": self._schema(1, refers=False)}}

    def _schema(self, depth: int, *, refers: bool = True) -> Schema:
        choose, rng = self._rng.choice, self._rng
        if rng.random() < 0.04:
            return choose([True, False, {"type": "string"}])
        parts: dict[str, Callable[[], Any]] = {
            "properties": lambda: {name: choose(_OF_VALUES) for name in rng.sample("abc", rng.randint(1, 2))},
            "required": lambda: rng.sample("abc", rng.randint(1, 2)),
            "additionalProperties": lambda: choose([True, False, {}, {"type": "string"}, {"minimum": 1}]),
            "minProperties": lambda: choose([0, 1, 1, 2]),
            "maxProperties": lambda: rng.randint(0, 3),
            "type": lambda: choose(["object", ["object", "null"]]),
        }
        if depth:
            inner = lambda: self._schema(depth - 1, refers=refers)  # noqa: E731
            some = lambda: [inner() for _ in range(rng.randint(1, 3))]  # noqa: E731
            parts |= {
                "allOf": some, "anyOf": some, "oneOf": some, "not": inner, "if": inner, "then": inner, "else": inner,
                "dependentRequired": lambda: {choose("abc"): rng.sample("abc", 1)},
                "dependentSchemas": lambda: {choose("abc"): inner()},
            }  # fmt: skip
        if refers:
            parts["$ref"] = lambda: "#/$defs/o"
        names = rng.sample(list(parts), rng.randint(1, 3))
        return {name: parts[name]() for name in names}


def test_random_combined_schemas_admit_what_their_flat_forms_admit() -> None:
    values = [
        {name: value for name, value in zip("abc", given, strict=True) if value is not Ellipsis}
        for given in product([*_VALUES, ...], repeat=3)
    ]
    num_flat = 0
    for seed in range(160):
        schema = Combined(seed).root()
        if (flats := flat_objects(schema)) is None:
            continue
        num_flat += 1
        is_named = schema.get("properties", {}).keys() >= set("abc")  # by the schema, so by each alternative
        rng, original = random.Random(seed), Draft202012Validator(schema)
        text = re.sub(
            r"\\\\u\{([0-9a-f]+)\}", lambda found: chr(int(found[1], 16)), json.dumps(flats)
        )  # as `re` has it
        validator = Draft202012Validator({"anyOf": json.loads(text), "$defs": schema["$defs"]})
        for value in [{}, *rng.sample(values, 30)]:
            is_flat, is_valid = validator.is_valid(value), original.is_valid(value)
            assert is_flat <= is_valid, (seed, schema, flats, value)
            assert is_flat == is_valid or not is_named, (seed, schema, flats, value)
    assert num_flat > 20
