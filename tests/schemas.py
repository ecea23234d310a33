"""Random JSON schemas whose answers cannot grow without bound, made of a seed alone."""

from __future__ import annotations

import random
from typing import Any

_PATTERNS = ["^[a-z]{2,5}$", "^[A-Z]{3}-[0-9]{4}$", "^(yes|no|maybe)$", "^[0-9]{1,3}(\\.[0-9]{1,2})?$"]
_FORMATS = ["date", "ipv4", "uuid"]
_WORDS = ["name", "age", "city", "zip", "größe", "is open", 'a"b', "kind", "items", "price", "note", "x"]


def random_schema(seed: int) -> dict[str, Any]:
    """An object's schema: nested objects, arrays, enums, bounds, patterns, formats, options, anyOf and $ref."""
    rng = random.Random(seed)
    schema = _object(rng, depth=2)
    if rng.random() < 0.4:
        schema["$defs"] = {"part": _object(rng, depth=0), "tag": _leaf(rng)}
        schema["properties"]["of a part"] = {"$ref": "#/$defs/part"}
        schema["properties"]["tags"] = {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2}
        schema["required"].append("of a part")
    return schema


def chained_schema(length: int) -> dict[str, Any]:
    """Flat to look at, and nested by its references."""
    parts: dict[str, Any] = {
        f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(length)
    }
    return {"$defs": {**parts, f"d{length}": {"type": "object"}}, "$ref": "#/$defs/d0"}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_WORDS, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _value(rng, depth) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": False,
    }


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    kind = rng.random()
    if depth == 0 or kind < 0.5:
        return _leaf(rng)
    if kind < 0.65:
        return _object(rng, depth - 1)
    if kind < 0.8:
        least = rng.randint(0, 2)
        return {"type": "array", "items": _value(rng, depth - 1), "minItems": least, "maxItems": least + 1}
    if kind < 0.9:
        return {"anyOf": [_leaf(rng), _value(rng, depth - 1)]}
    return {"type": "array", "prefixItems": [_leaf(rng), _leaf(rng)], "items": False, "minItems": 2}


def _leaf(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-1000, 1000)
    return rng.choice(
        [
            {"type": "string", "maxLength": rng.randint(0, 12)},
            {"type": "string", "minLength": 2, "maxLength": 6},
            {"type": "string", "pattern": rng.choice(_PATTERNS)},
            {"type": "string", "format": rng.choice(_FORMATS)},
            {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 5000)},
            {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 20},
            {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": rng.choice([2, 5, 7])},
            {"type": "number", "minimum": 0, "maximum": rng.choice([1, 2.5, 1000]), "multipleOf": 0.25},
            {"type": "boolean"},
            {"type": "null"},
            {"type": ["boolean", "null"]},
            {"const": rng.choice(["fixed", 7, None, {"a": [1, 2]}])},
            {"enum": ["red", "grün", 3, True, None]},
        ]
    )
