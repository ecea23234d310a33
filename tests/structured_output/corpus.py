"""Schemas in the shapes that people publish, and values near to what they admit, made of a seed alone."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

from llguidance import LLMatcher, LLTokenizer

Schema = dict[str, Any]
BYTES = LLTokenizer("byte")
_NAMES = ["id", "name", "type", "kind", "version", "title", "description", "url", "tags", "count", "price", "a b",
          "enabled", "items", "default", "enum", "allOf", "$ref", "required", "owner", "größe", "x-y"]  # fmt: skip
_PATTERNS = ["^[a-z][a-z0-9_-]*$", "^\\d{1,3}(\\.\\d+)*$", "^v[0-9]+", "[A-Z]{2}", "^(?!x-)[a-z-]+$",
             "^#[0-9a-fA-F]{6}$", "\\.json$", "^[^/&&[\\s]+$"]  # fmt: skip
_DRAFTS = ["http://json-schema.org/draft-04/schema#", "http://json-schema.org/draft-07/schema#",
           "https://json-schema.org/draft/2020-12/schema"]  # fmt: skip


def published_schema(seed: int) -> Schema:
    """One of a dozen shapes: entities, configurations, unions with and without a tag, trees, models of pydantic's."""
    rng = random.Random(seed)
    shapes = [_entity, _configuration, _tagged_union, _loose_union, _tree, _pydantic, _manifest, _conditional,
              _exclusive, _numbers, _lists, _maps]  # fmt: skip
    schema: Schema = rng.choice(shapes)(rng)
    if rng.random() < 0.4 and "$schema" not in schema:
        schema = {"$schema": rng.choice(_DRAFTS[1:]), **schema}
    if rng.random() < 0.3:
        schema["title"] = "A thing"
    return schema


def _leaf(rng: random.Random) -> Schema:
    low = rng.choice([0, 1, -5, 10])
    return copy.deepcopy(
        rng.choice(
            [
                {"type": "string"},
                {"type": "string", "description": "Says what it is."},
                {"type": "string", "minLength": 1, "maxLength": rng.choice([5, 64])},
                {"type": "string", "pattern": rng.choice(_PATTERNS)},
                {"type": "string", "format": rng.choice(["date", "uuid", "int32", "path", "password"])},
                {"type": "string", "enum": ["draft", "open", "closed"][: rng.randint(1, 3)]},
                {"type": "integer", "minimum": low},
                {"type": "integer", "format": "int64", "minimum": low, "maximum": low + rng.choice([1, 99])},
                {"type": "number", "minimum": 0, "maximum": 1},
                {"type": "number", "exclusiveMinimum": low, "multipleOf": 0.5},
                {"type": "boolean", "default": False},
                {"type": ["string", "null"]},
                {"const": rng.choice(["fixed", 7, None, {"a": [1]}])},
                {"enum": [1, "one", None, True]},
                {"type": "array", "items": {"type": "string"}, "maxItems": 3},
                {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True},
                {},
            ]
        )
    )


def _properties(rng: random.Random, num: int) -> dict[str, Schema]:
    return {name: _leaf(rng) for name in rng.sample(_NAMES, num)}


def _object(rng: random.Random, depth: int = 0) -> Schema:
    properties = _properties(rng, rng.randint(1, 4))
    if depth:
        properties["inner"] = _object(rng, depth - 1)
    names = list(properties)
    schema: Schema = {"type": "object", "properties": properties}
    if rng.random() < 0.7:
        schema["required"] = [name for name in names if rng.random() < 0.5] or names[:1]
    if rng.random() < 0.4:
        schema["additionalProperties"] = rng.choice([False, {"type": "string"}, True])
    return schema


def _entity(rng: random.Random) -> Schema:
    return _object(rng, rng.randint(1, 2))


def _configuration(rng: random.Random) -> Schema:
    schema = _object(rng)
    schema["definitions"] = {"default": _object(rng), "enum": _leaf(rng)}
    schema["properties"]["a part"] = {"$ref": "#/definitions/default"}
    schema["properties"]["others"] = {"type": "array", "items": {"$ref": "#/definitions/enum"}}
    if rng.random() < 0.5:
        schema["dependencies"] = {next(iter(schema["properties"])): ["a part"]}
    return schema


def _tagged_union(rng: random.Random) -> Schema:
    branches = []
    for tag in ("circle", "square", "line")[: rng.randint(2, 3)]:
        part = _object(rng)
        part["properties"] = {"shape": {rng.choice(["const", "enum"]): tag}, **part["properties"]}
        if "enum" in part["properties"]["shape"]:
            part["properties"]["shape"]["enum"] = [tag]
        part["required"] = ["shape"]
        branches.append(part)
    return {"oneOf": branches} if rng.random() < 0.7 else {"type": "array", "items": {"oneOf": branches}}


def _loose_union(rng: random.Random) -> Schema:
    return {rng.choice(["oneOf", "anyOf"]): [_object(rng), _leaf(rng), {"type": "object", "required": ["id"]}]}


def _tree(rng: random.Random) -> Schema:
    return {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"value": _leaf(rng), "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
                "required": ["value"],
                "additionalProperties": rng.random() < 0.5,
            }
        },
    }


def _pydantic(rng: random.Random) -> Schema:
    part = _object(rng)
    return {
        "$defs": {"Part": part, "Color": {"enum": ["red", "green"], "title": "Color", "type": "string"}},
        "properties": {
            "part": {"$ref": "#/$defs/Part"},
            "color": {"anyOf": [{"$ref": "#/$defs/Color"}, {"type": "null"}], "default": None},
            "old": {"allOf": [{"$ref": "#/$defs/Part"}], "title": "Old"},
        },
        "required": ["part"],
        "title": "Model",
        "type": "object",
    }


def _manifest(rng: random.Random) -> Schema:
    return {
        "$schema": _DRAFTS[0],
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[a-z]+$"},
            "weight": {"type": "number", "minimum": 0, "exclusiveMinimum": True},
            "files": {"type": "array", "items": {"type": "string"}, "uniqueItems": rng.random() < 0.5, "minItems": 1},
            "scripts": {"type": "object", "additionalProperties": {"type": "string"}},
        },
        "patternProperties": {"^x-": {}},
        "additionalProperties": False,
        "required": ["name"],
    }


def _conditional(rng: random.Random) -> Schema:
    return {
        "type": "object",
        "properties": {"mode": {"enum": ["fast", "safe"]}, "level": {"type": "integer"}, "note": _leaf(rng)},
        "required": ["mode"],
        "if": {"properties": {"mode": {"const": "safe"}}, "required": ["mode"]},
        "then": {"required": ["level"]},
        **({"else": {"properties": {"level": {"maximum": 3}}}} if rng.random() < 0.5 else {}),
    }


def _exclusive(rng: random.Random) -> Schema:
    schema: Schema = {"type": "object", "properties": {"a": _leaf(rng), "b": _leaf(rng), "c": {"type": "integer"}}}
    schema |= copy.deepcopy(
        rng.choice(
            [
                {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
                {"not": {"required": ["a", "b"]}},
                {"not": {"anyOf": [{"required": ["a"]}, {"properties": {"c": {"const": 3}}, "required": ["c"]}]}},
                {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
                {"dependentRequired": {"a": ["b"]}},
                {"dependentSchemas": {"a": {"properties": {"c": {"minimum": 3}}, "required": ["c"]}}},
                {"minProperties": 1, "additionalProperties": False},
                {"allOf": [{"required": ["a"]}, {"properties": {"b": {"type": "string"}}}]},
                {"properties": {"a": {"type": "string", "not": {"enum": ["x", "xy", ""]}}}},
                {"properties": {"b": {"not": {"type": "null"}}}},
            ]
        )
    )  # fmt: skip
    return schema


def _numbers(rng: random.Random) -> Schema:
    low = rng.choice([0, -1, 0.25, -0.125, 2])
    high = low + rng.choice([0.5, 1, 2.75, 100])
    one = {rng.choice(["minimum", "exclusiveMinimum"]): low, rng.choice(["maximum", "exclusiveMaximum"]): high}
    return {"type": "object", "properties": {"v": {"type": "number", **one}, "n": {"type": "integer", **one}},
            "required": ["v"], "additionalProperties": False}  # fmt: skip


def _lists(rng: random.Random) -> Schema:
    return rng.choice(
        [
            {
                "$schema": _DRAFTS[2],
                "type": "array",
                "prefixItems": [_leaf(rng), _leaf(rng)],
                "items": False,
                "minItems": 1,
            },
            {"type": "array", "items": _object(rng), "minItems": 1, "maxItems": 2},
            {"type": "array", "items": {"type": "integer"}, "contains": {"const": 1}},
            {"$schema": _DRAFTS[1], "type": "array", "items": [_leaf(rng)], "additionalItems": {"type": "integer"}},
        ]
    )


def _maps(rng: random.Random) -> Schema:
    return rng.choice(
        [
            {"type": "object", "patternProperties": {"^a": {"type": "integer"}, "b$": {"type": "integer"}}},
            {"type": "object", "additionalProperties": _leaf(rng), "propertyNames": {"pattern": "^[a-z]+$"}},
            {"type": "object", "additionalProperties": _leaf(rng), "propertyNames": {"enum": ["id", "name"]}},
            {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1, "maxProperties": 2},
            {"type": "object", "propertyNames": {"maxLength": 3}},
        ]
    )


def random_answer(grammar: str, rng: random.Random, max_bytes: int = 400) -> str | None:
    """A text that a grammar admits, byte by byte at random with a liking for short ones; None if it got too long."""
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    text = bytearray()
    for _ in range(max_bytes):
        if matcher.is_accepting() and (matcher.is_stopped() or rng.random() < 0.8):
            return text.decode(errors="ignore")
        mask = matcher.compute_bitmask()
        allowed = [byte for byte in range(256) if mask[byte >> 3] >> (byte & 7) & 1]
        if not allowed:  # it may only end
            return text.decode(errors="ignore") if matcher.is_accepting() else None
        ends = [byte for byte in allowed if chr(byte) in '"}],:']
        plain = [byte for byte in allowed if (byte < 128 and chr(byte).isalnum()) or chr(byte) in '"{}[],:-._ ']
        byte = rng.choice(ends if ends and rng.random() < 0.5 else plain or allowed)
        matcher.consume_token(byte)
        text.append(byte)
    return None


def variants(value: Any, rng: random.Random) -> Iterator[Any]:
    """Values that differ from `value` in one place; keys keep their order."""
    if isinstance(value, dict):
        for name in value:
            yield {key: one for key, one in value.items() if key != name}
            for one in variants(value[name], rng):
                yield {**value, name: one}
        yield {**value, "zz": rng.choice([1, "text", None])}
    elif isinstance(value, list):
        yield value[:-1]
        yield [*value, *value[-1:]]
        for i, part in enumerate(value[:3]):
            for one in variants(part, rng):
                yield [*value[:i], one, *value[i + 1 :]]
    else:
        yield rng.choice(["x", "open", "", 0, 1, 2.5, -3, True, None, "abc-1", "2024-01-02"])
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield value + rng.choice([-1, 1, 0.5])


def admits(grammar: str, value: Any) -> bool:
    """Whether a grammar takes a value, written as `json` does."""
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    data = json.dumps(value, ensure_ascii=False).encode()
    return matcher.try_consume_tokens(list(data)) == len(data) and matcher.is_accepting()
