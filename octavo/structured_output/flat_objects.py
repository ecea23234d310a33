"""Writes a schema of objects as alternatives that only name properties, for formats of calls that write each argument
by itself. `call_spelling` calls it. It gives up rather than admit an object that the schema refuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.structured_output.schema_alternatives import AlternativesWriter
from octavo.structured_output.schema_keywords import (
    SILENT,
    Document,
    Schema,
    SchemaError,
    as_list,
    as_map,
    check_kinds,
    size_of,
    text_of,
)
from octavo.structured_output.schema_validation import names_in, same, types_in

_MAX_ALTERNATIVES = 16  # of one function: each is written into the grammar
_MAX_DEPTH = 8
_WRITTEN = {
    "type", "properties", "required", "additionalProperties", "strict", "$ref", "allOf", "anyOf", "oneOf", "not", "if",
    "then", "else", "dependencies", "dependentRequired", "dependentSchemas", "minProperties", "maxProperties", *SILENT,
}  # fmt: skip
# Keywords that say the same of a value whatever stands beside them.
_OF_SCALARS = {
    "type", "enum", "const", "format", "pattern", "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum", "multipleOf", *SILENT,
}  # fmt: skip


def flat_objects(schema: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return schemas with `properties`, `required` and `additionalProperties` alone. An object of named properties
    satisfies `schema` if it satisfies one of them. References in properties are to `schema`. Return None if there is no
    such list, or it is too long."""
    try:
        writer = _FlatWriter(Document(schema))
        found = [_finished(one) for one in writer.alternatives(schema, 0)]
    except (ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError):
        return None  # the schema makes no sense, which the grammar says, or cannot be flat
    return [one for one in found if one is not None] or None


def _finished(flat: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a flat schema without properties that must be absent; None if one of them is required."""
    properties = {name: one for name, one in flat["properties"].items() if one is not False}
    if any(name in flat["properties"] and name not in properties for name in flat["required"]):
        return None
    others = flat["additionalProperties"]
    rest = {} if others is True else {"additionalProperties": True if others == {} else others}
    return {"type": "object", "properties": properties, "required": flat["required"], **rest}


class _FlatWriter(AlternativesWriter):
    def __init__(self, document: Document) -> None:
        super().__init__(document, closes=False, is_picky=False, is_coarse=False, merges_references=True)
        self._base = document.base_within(document.root, "") if isinstance(document.root, dict) else ""

    def alternatives(self, schema: Schema, depth: int) -> list[dict[str, Any]]:
        """Return the flat schemas of `schema`. Raises `SchemaError` if there are none."""
        if isinstance(schema, bool):
            return [{"properties": {}, "required": [], "additionalProperties": True}] if schema else []
        check_kinds(schema)
        if depth > _MAX_DEPTH or schema.keys() - _WRITTEN or (depth and self._document.base_within(schema, "") != ""):
            raise SchemaError("this schema has no flat form")
        if "object" not in (types_in(schema) or ["object"]):
            return []
        if "$ref" in schema and not self._document.has_plain_refs:
            return self.alternatives(self._target(schema), depth + 1)
        given = as_map("properties", schema.get("properties", {}))
        properties = {name: self._simplified(one) for name, one in given.items()}
        # True if the schema does not say it; {} if it says that there may be any.
        others = schema.get("additionalProperties", True)
        others = {} if others is True and "additionalProperties" in schema else others
        required = names_in(schema.get("required"))
        found = [{"properties": properties, "required": required, "additionalProperties": others}]
        for options in self._options(schema):
            flats = [flat for one in options for flat in self.alternatives(one, depth + 1)]
            pairs = ((one, other) for one in found for other in flats)
            found = [merged for pair in pairs if (merged := self._merged(*pair)) is not None]
            if len(found) > _MAX_ALTERNATIVES:
                raise SchemaError("this schema has too many alternatives")
        return [counted for one in found for counted in self._counted(schema, one)]

    def _options(self, schema: dict[str, Any]) -> list[list[Schema]]:
        """Return lists of schemas of which one must hold, beside the keywords of the object itself."""
        found: list[list[Schema]] = [[self._target(schema)]] if "$ref" in schema else []
        found += ([one] for one in (as_list("allOf", schema["allOf"]) if "allOf" in schema else ()))
        if "anyOf" in schema:
            found.append(as_list("anyOf", schema["anyOf"]))
        if "oneOf" in schema:
            parts = as_list("oneOf", schema["oneOf"])
            required = names_in(schema.get("required"))
            if not self._logic.are_disjoint([self._requiring(one, required) for one in parts], self._base, ["object"]):
                parts = self._exclusive(parts, self._base) or []
            found.append(parts)
        for _, alternatives in self._rewritings({"type": "object", **schema}, self._base):
            if alternatives is None:
                raise SchemaError("this keyword has no flat form")
            found.append(alternatives)
        return found

    def _requiring(self, schema: Schema, names: list[str]) -> Schema:
        """Return `schema` with further required names, if it has no references."""
        found = self._logic.resolved(schema, self._base)[0]
        if not names or not isinstance(found, dict) or "$ref" in found:
            return schema
        return {**found, "required": [*names_in(found.get("required")), *names]}

    def _target(self, schema: dict[str, Any]) -> Schema:
        found, base = self._document.find(text_of("$ref", schema), self._base)
        if base != self._base:
            raise SchemaError("this reference leads to another resource")
        return found

    def _counted(self, schema: dict[str, Any], flat: dict[str, Any]) -> list[dict[str, Any]]:
        """Return `flat` as `minProperties` and `maxProperties` limit it."""
        least, most = size_of("minProperties", schema) or 0, size_of("maxProperties", schema)
        optional = [name for name, one in flat["properties"].items() if one is not False]
        optional = [name for name in optional if name not in flat["required"]]
        num_required = len(flat["required"])
        if (most is not None and most < num_required + len(optional)) or least > num_required + 1:
            raise SchemaError("the number of properties has no flat form")
        if least <= num_required:
            return [flat]
        return [{**flat, "required": [*flat["required"], name]} for name in optional]

    def _merged(self, one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any] | None:
        """Return the schema of objects that satisfy both; None if there are none."""
        properties = dict[str, Any]()
        for name in {**one["properties"], **other["properties"]}:
            parts = [flat["properties"].get(name, flat["additionalProperties"]) for flat in (one, other)]
            properties[name] = self._both(*parts)
        required = list(dict.fromkeys([*one["required"], *other["required"]]))
        others = self._both(one["additionalProperties"], other["additionalProperties"])
        if any(properties.get(name, others) is False for name in required):
            return None
        return {"properties": properties, "required": required, "additionalProperties": others}

    def _both(self, one: Schema, other: Schema) -> Schema:
        """Return the schema of values that satisfy both."""
        one, other = (self._logic.resolved(part, self._base)[0] for part in (one, other))
        if one is False or other is False:
            return False
        if one is True or (one == {} and other is not True):
            return other
        if other is True or other == {} or _are_same(one, other):
            return one
        if self._logic.are_disjoint([one, other], self._base):
            return False
        if one.keys() | other.keys() <= _OF_SCALARS:
            merged = _scalars(one, other)
            if merged is not None:
                return merged
        return {"allOf": [one, other]}

    def _simplified(self, schema: Schema) -> Schema:
        """Return a property's schema with the parts of its `allOf` as one, if these are of scalars."""
        if not isinstance(schema, dict) or not isinstance(schema.get("allOf"), list) or "$ref" in schema:
            return schema
        found: Schema = {key: value for key, value in schema.items() if key != "allOf"}
        for one in schema["allOf"]:
            found = self._both(found, one)
        return schema if isinstance(found, dict) and "allOf" in found else found


def _are_same(one: Schema, other: Schema) -> bool:
    try:
        return same(one) == same(other)
    except RecursionError:
        return False


def _scalars(one: dict[str, Any], other: dict[str, Any]) -> Schema | None:
    """Return the keywords of both, which are of scalars; None if a keyword says two things."""
    merged = {**{key: value for key, value in other.items() if key in SILENT}, **one}
    listed = [
        part["enum"] if "enum" in part else [part["const"]] for part in (one, other) if part.keys() & {"enum", "const"}
    ]
    if len(listed) == 2:
        known = set(map(same, listed[1]))
        values = [value for value in listed[0] if same(value) in known]
        merged.pop("const", None)
        merged["enum"] = values
        if not values:
            return False
    types = [found for part in (one, other) if (found := types_in(part)) is not None]
    if len(types) == 2:
        kept = [kind for kind in types[0] if kind in types[1] or (kind == "integer" and "number" in types[1])]
        kept += ["integer"] if "integer" in types[1] and "number" in types[0] and "integer" not in kept else []
        if not kept:
            return False
        merged["type"] = kept[0] if len(kept) == 1 else kept
    for key, value in other.items():
        if key in SILENT or (key in ("enum", "const") and len(listed) == 2) or (key == "type" and len(types) == 2):
            continue
        if merged.setdefault(key, value) != value:
            return None
    return merged
