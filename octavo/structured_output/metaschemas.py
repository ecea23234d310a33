"""JSON Schema's metaschemas: the schemas of schemas, to which a `$ref` may point without a definition. They are made
from the tables of `schema_keywords`, and leave out formats."""

from functools import lru_cache
from typing import Any

_URLS = {
    "http://json-schema.org/draft-04/schema": 4,
    "http://json-schema.org/draft-06/schema": 6,
    "http://json-schema.org/draft-07/schema": 7,
    "https://json-schema.org/draft/2019-09/schema": 2019,
    "https://json-schema.org/draft/2020-12/schema": 2020,
}
_TYPES = ["array", "boolean", "integer", "null", "number", "object", "string"]
_TEXT, _NUMBER, _BOOLEAN, _LIST = ({"type": name} for name in ("string", "number", "boolean", "array"))
_SIZE = {"type": "integer", "minimum": 0}
_ANCHOR = {"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9._-]*$"}
_NAMES = {"type": "array", "items": _TEXT, "uniqueItems": True}
# By draft: the keywords that it adds, with the schemas of their values, or the names of such schemas.
_ADDED: dict[int, dict[str, Any]] = {
    4: {
        **dict.fromkeys(("$schema", "id", "$ref", "title", "description", "pattern", "format"), _TEXT),
        **dict.fromkeys(("maximum", "minimum"), _NUMBER),
        **dict.fromkeys(("exclusiveMaximum", "exclusiveMinimum", "uniqueItems"), _BOOLEAN),
        **dict.fromkeys(("maxLength", "maxItems", "maxProperties"), _SIZE),
        **dict.fromkeys(("minLength", "minItems", "minProperties"), _SIZE),
        **dict.fromkeys(("definitions", "properties", "patternProperties"), "map"),
        **dict.fromkeys(("allOf", "anyOf", "oneOf"), "list"),
        **dict.fromkeys(("additionalItems", "additionalProperties"), "schema or boolean"),
        "multipleOf": {"type": "number", "exclusiveMinimum": 0},
        "required": {**_NAMES, "minItems": 1},
        "enum": {"type": "array", "minItems": 1, "uniqueItems": True},
        "type": {"anyOf": [
            {"enum": _TYPES},
            {"type": "array", "items": {"enum": _TYPES}, "minItems": 1, "uniqueItems": True},
        ]},
        "not": "schema",
        "items": "schema or list",
        "dependencies": "dependencies",
    },
    6: {
        **dict.fromkeys(("$id", "$ref"), _TEXT),
        **dict.fromkeys(("exclusiveMaximum", "exclusiveMinimum"), _NUMBER),
        **dict.fromkeys(("contains", "propertyNames"), "schema"),
        "required": _NAMES,
        "examples": _LIST,
        "enum": {"type": "array"},
    },
    7: {
        **dict.fromkeys(("if", "then", "else"), "schema"),
        **dict.fromkeys(("$comment", "contentEncoding", "contentMediaType"), _TEXT),
        **dict.fromkeys(("readOnly", "writeOnly"), _BOOLEAN),
    },
    2019: {
        **dict.fromkeys(("contentSchema", "unevaluatedItems", "unevaluatedProperties"), "schema"),
        **dict.fromkeys(("$defs", "dependentSchemas"), "map"),
        **dict.fromkeys(("maxContains", "minContains"), _SIZE),
        **dict.fromkeys(("deprecated", "$recursiveAnchor"), _BOOLEAN),
        "$anchor": _ANCHOR,
        "$id": {"type": "string", "pattern": "^[^#]*#?$"},
        "$recursiveRef": _TEXT,
        "$vocabulary": {"type": "object", "additionalProperties": _BOOLEAN},
        "dependentRequired": {"type": "object", "additionalProperties": _NAMES},
    },
    2020: {"$dynamicAnchor": _ANCHOR, "$dynamicRef": _TEXT, "items": "schema", "prefixItems": "list"},
}  # fmt: skip
# A grammar has properties in this order, and others after them.
_FIRST = ("$schema", "$id", "id", "title", "description", "type", "properties", "required", "items")
_ANCHORS: dict[int, dict[str, Any]] = {2019: {"$recursiveAnchor": True}, 2020: {"$dynamicAnchor": "meta"}}
_DROPPED = {6: {"id"}, 2020: {"additionalItems", "$recursiveAnchor", "$recursiveRef"}}


@lru_cache(maxsize=len(_URLS))
def metaschema(url: str) -> dict[str, Any] | None:
    """Return the metaschema that has a URI; None for any other URI."""
    draft = _URLS.get(url)
    if draft is None:
        return None
    own = {2019: {"$recursiveRef": "#"}, 2020: {"$dynamicRef": "#meta"}}.get(draft, {"$ref": "#"})
    several, kind = {"type": "array", "items": own, "minItems": 1}, ["object"] if draft == 4 else ["object", "boolean"]
    named: dict[str, Any] = {
        "schema": own,
        "map": {"type": "object", "additionalProperties": own},
        "list": several,
        "schema or boolean": {"anyOf": [_BOOLEAN, own]},
        "schema or list": {"anyOf": [own, several]},
        "dependencies": {
            "type": "object",
            "additionalProperties": {"anyOf": [own, _NAMES | {"minItems": int(draft == 4)}]},
        },
    }
    known: dict[str, Any] = {}
    for since, added in _ADDED.items():
        if since <= draft:
            known |= {name: named[one] if isinstance(one, str) else one for name, one in added.items()}
            known = {name: one for name, one in known.items() if name not in _DROPPED.get(since, ())}
    known = {name: known[name] for name in (*_FIRST, *known) if name in known}
    # Schemas refer to these definitions too.
    size = "positiveInteger" if draft == 4 else "nonNegativeInteger"
    definitions = {
        size: _SIZE, f"{size}Default0": _SIZE, "simpleTypes": {"enum": _TYPES}, "stringArray": known["required"],
        "schemaArray": several,
    }  # fmt: skip
    anchor = _ANCHORS.get(draft, {})
    held: dict[str, Any] = {"type": kind, "properties": known, "definitions": definitions, **anchor}
    if draft == 4:
        held["allOf"] = [
            {"anyOf": [{"required": [bound]}, {"properties": {f"exclusive{bound.capitalize()}": False}}]}
            for bound in ("maximum", "minimum")
        ]
    return held
