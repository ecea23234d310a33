"""Writes a schema of objects as alternatives that only name properties, for formats of calls that write each argument
by itself. `call_spelling` calls it. It gives up rather than admit an object that the schema refuses, unless the caller
checks objects by the schema itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from octavo.structured_output.schema_alternatives import AlternativesWriter
from octavo.structured_output.schema_keywords import (
    IN_PLACE,
    SILENT,
    Base,
    Document,
    Schema,
    SchemaError,
    as_list,
    as_map,
    check_kinds,
    size_of,
    text_of,
)
from octavo.structured_output.schema_logic import Logic
from octavo.structured_output.schema_validation import names_in, same, types_in

_MAX_ALTERNATIVES = 16  # of one function: each is written into the grammar
_MAX_DEPTH = 8
# The front end waits for the alternatives: bounds that keep them to some milliseconds.
_MAX_VALUES = 5_000  # of a schema with combined schemas
_BUDGET = 1_000  # schemas looked at, each with a few names
_MAX_COMPARED = 100  # steps to compare two schemas
_NAMES_AT_ONCE = 4
_CHARACTERS_AT_ONCE = 64
_WRITTEN = {
    "type", "properties", "required", "additionalProperties", "strict", "$ref", "allOf", "anyOf", "oneOf", "not", "if",
    "then", "else", "dependencies", "dependentRequired", "dependentSchemas", "minProperties", "maxProperties", *SILENT,
}  # fmt: skip
# Keywords that say the same of a value whatever stands beside them.
_OF_SCALARS = {
    "type", "enum", "const", "format", "pattern", "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum", "multipleOf", *SILENT,
}  # fmt: skip

# Booleans in draft 4, which exclude the bound beside them.
_OF_NEIGHBOURS = ("exclusiveMinimum", "exclusiveMaximum")
_ANY: dict[str, Any] = {"properties": {}, "required": [], "additionalProperties": True, "least": 0, "most": None}


def flat_objects(schema: Mapping[str, Any], *, is_checked: bool = False) -> list[dict[str, Any]] | None:
    """Return schemas with `properties`, `required` and `additionalProperties` alone. An object of named properties
    satisfies `schema` if it satisfies one of them. References in properties are to `schema`. Return None if there is no
    such list, or it is too long. With `is_checked` an object may satisfy several alternatives of a `oneOf`."""
    try:
        writer = _FlatWriter(Document(schema), is_checked)
        flats = writer.alternatives(schema, 0)
        found = [_finished(counted) for one in flats for counted in _counted(one)]
    except (ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError):
        return None  # the schema makes no sense, which the grammar says, or cannot be flat
    known = [one for one in found if one is not None]
    return known if 0 < len(known) <= _MAX_ALTERNATIVES else None


def _finished(flat: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a flat schema in the words of JSON Schema; None if it requires a property that must be absent."""
    properties, others = flat["properties"], flat["additionalProperties"]
    if any(properties.get(name, others) is False for name in flat["required"]):
        return None
    if others is False:
        properties = {name: one for name, one in properties.items() if one is not False}
    rest = {} if others is True else {"additionalProperties": True if others == {} else others}
    return {"type": "object", "properties": properties, "required": flat["required"], **rest}


def _counted(flat: dict[str, Any]) -> list[dict[str, Any]]:
    """Return `flat` as its least and greatest number of properties limit it. Raises `SchemaError` if no list of a few
    schemas does."""
    least, most, required = flat["least"], flat["most"], flat["required"]
    if most is None and least <= len(required):
        return [flat]
    known = set(required)
    optional = [name for name, one in flat["properties"].items() if one is not False and name not in known]
    if most is not None:
        if most < max(least, len(required)):
            return []
        if most == len(required):
            absent = dict.fromkeys(optional, False)
            return [{**flat, "properties": {**flat["properties"], **absent}, "additionalProperties": False}]
        if most < len(required) + len(optional) or not isinstance(flat["additionalProperties"], bool):
            raise SchemaError("this greatest number of properties has no flat form")
        flat = {**flat, "additionalProperties": False}
    if least <= len(required):
        return [flat]
    if least > len(required) + 1 or len(optional) > _MAX_ALTERNATIVES:
        raise SchemaError("this least number of properties has no flat form")
    return [{**flat, "required": [*required, name]} for name in optional]


class _QuickLogic(Logic):
    """Proofs that take some milliseconds together, with the values that they validate."""

    def satisfies(self, schema: Schema, base: Base, value: Any, *, asserts_formats: bool = False) -> bool:
        if self._budget < 0:
            raise SchemaError("the proofs take too many steps")
        try:
            return super().satisfies(schema, base, value, asserts_formats=asserts_formats)
        finally:
            self._budget -= self.validator.num_steps


class _FlatWriter(AlternativesWriter):
    def __init__(self, document: Document, is_checked: bool) -> None:
        super().__init__(document, closes=False, is_picky=False, is_coarse=False, merges_references=True)
        self._base = document.base_within(document.root, Base()) if isinstance(document.root, dict) else Base()
        self._logic = _QuickLogic(document, _BUDGET)
        self._is_checked = is_checked
        self._num_left = _BUDGET
        # By `id` of schemas, which stand beside the alternatives to keep them alive.
        self._known: dict[int, tuple[Schema, list[dict[str, Any]]]] = {}

    def _spend(self, num: int) -> None:
        self._num_left -= num
        if self._num_left < 0:
            raise SchemaError("this schema takes too many steps")

    @cached_property
    def _is_small(self) -> bool:
        """Whether the document has at most `_MAX_VALUES`."""
        stack, num_left = [self._document.root], _MAX_VALUES
        while stack and num_left >= 0:
            one = stack.pop()
            inner = list(one.values()) if isinstance(one, dict) else one if isinstance(one, list) else []
            num_left -= len(one) // _CHARACTERS_AT_ONCE if isinstance(one, str) else len(inner)
            stack += inner
        return num_left >= 0

    def alternatives(self, schema: Schema, depth: int) -> list[dict[str, Any]]:
        """Return the flat schemas of `schema`. Raises `SchemaError` if there are none."""
        if isinstance(schema, bool):
            return [_ANY] if schema else []
        if (known := self._known.get(id(schema))) is None:
            self._spend(1)
            known = self._known[id(schema)] = schema, self._new_alternatives(schema, depth)
        return known[1]

    def _new_alternatives(self, schema: dict[str, Any], depth: int) -> list[dict[str, Any]]:
        check_kinds(schema)
        if depth > _MAX_DEPTH or schema.keys() - _WRITTEN or (depth and self._document.base_within(schema, Base()).url):
            raise SchemaError("this schema has no flat form")
        if "$ref" in schema and not self._document.has_plain_refs:
            return self.alternatives(self._target(schema), depth + 1)
        if "object" not in (types_in(schema) or ["object"]):
            return []
        given = as_map("properties", schema.get("properties", {}))
        properties = {name: self._simplified(one) for name, one in given.items()}
        # True if the schema does not say it; {} if it says that there may be any.
        others = schema.get("additionalProperties", True)
        others = {} if others is True and "additionalProperties" in schema else others
        required = names_in(schema.get("required"))
        least, most = size_of("minProperties", schema) or 0, size_of("maxProperties", schema)
        found = [{"properties": properties, "required": required, "additionalProperties": others,
                  "least": least, "most": most}]  # fmt: skip
        if not schema.keys().isdisjoint(IN_PLACE) and not self._is_small:
            raise SchemaError("this schema has too many values")
        for options in self._options(schema):
            flats = [flat for one in options for flat in self.alternatives(one, depth + 1)]
            pairs = ((one, other) for one in found for other in flats)
            found = [merged for pair in pairs if (merged := self._merged(*pair)) is not None]
            if len(found) > _MAX_ALTERNATIVES:
                raise SchemaError("this schema has too many alternatives")
        return found

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
                if (exclusive := self._exclusive(parts, self._base)) is not None:
                    parts = exclusive
                elif not self._is_checked:
                    raise SchemaError("alternatives of this oneOf may hold together")
            found.append(parts)
        for _, alternatives in self._rewritings({"type": "object", **schema}, self._base):
            if alternatives is None:
                raise SchemaError("this keyword has no flat form")
            found.append(alternatives)
        return found

    def _requiring(self, schema: Schema, names: list[str]) -> Schema:
        """Return `schema` with further required names, if it has no references."""
        found = self._resolved(schema)
        if not names or not isinstance(found, dict) or "$ref" in found:
            return schema
        return {**found, "required": [*names_in(found.get("required")), *names]}

    def _target(self, schema: dict[str, Any]) -> Schema:
        found, base = self._document.find(text_of("$ref", schema), self._base)
        if base != self._base:
            raise SchemaError("this reference leads to another resource")
        return found

    def _merged(self, one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any] | None:
        """Return the schema of objects that satisfy both; None if there are none."""
        properties, names = dict[str, Any](), {**one["properties"], **other["properties"]}
        self._spend(1 + len(names) // _NAMES_AT_ONCE)
        for name in names:
            parts = [flat["properties"].get(name, flat["additionalProperties"]) for flat in (one, other)]
            properties[name] = self._both(*parts)
        required = list(dict.fromkeys([*one["required"], *other["required"]]))
        others = self._both(one["additionalProperties"], other["additionalProperties"])
        if any(properties.get(name, others) is False for name in required):
            return None
        sizes = [flat["most"] for flat in (one, other) if flat["most"] is not None]
        return {
            "properties": properties, "required": required, "additionalProperties": others,
            "least": max(one["least"], other["least"]), "most": min(sizes, default=None),
        }  # fmt: skip

    def _resolved(self, schema: Schema) -> Schema:
        """Return a schema, or the target of a schema that is only a reference."""
        found, base = self._logic.resolved(schema, self._base)
        if base != self._base:
            raise SchemaError("this reference leads to another resource")
        return found

    def _both(self, one: Schema, other: Schema) -> Schema:
        """Return the schema of values that satisfy both."""
        one, other = (self._resolved(part) for part in (one, other))
        if one is False or other is False:
            return False
        if one is True or (one == {} and other is not True):
            return other
        if other is True or other == {} or self._are_same(one, other):
            return one
        if self._logic.are_disjoint([one, other], self._base):
            return False
        if one.keys() | other.keys() <= _OF_SCALARS:
            merged = _scalars(one, other, self._spend)
            if merged is not None:
                return merged
        return {"allOf": [one, other]}

    def _are_same(self, one: Schema, other: Schema) -> bool:
        """Return whether two schemas are the same, as far as a few steps tell."""
        self._spend(2)
        least_left = self._num_left - _MAX_COMPARED

        def spend(num: int) -> None:
            self._num_left -= num
            if self._num_left < least_left:
                raise SchemaError("these schemas are too large to be compared")

        try:
            return same(one, spend) == same(other, spend)
        except (RecursionError, SchemaError):
            return False

    def _simplified(self, schema: Schema) -> Schema:
        """Return a property's schema with the parts of its `allOf` as one, if these are of scalars."""
        if not isinstance(schema, dict) or not isinstance(schema.get("allOf"), list) or "$ref" in schema:
            return schema
        if self._document.base_within(schema, self._base) != self._base or not self._is_small:
            return schema
        found: Schema = {key: value for key, value in schema.items() if key != "allOf"}
        for one in schema["allOf"]:
            found = self._both(found, one)
        return schema if isinstance(found, dict) and "allOf" in found else found


def _scalars(one: dict[str, Any], other: dict[str, Any], spend: Callable[[int], None]) -> Schema | None:
    """Return the keywords of both, which are of scalars; None if a keyword says two things or changes its neighbour."""
    if any(isinstance(part.get(key), bool) for part in (one, other) for key in _OF_NEIGHBOURS):
        return None
    merged = {**{key: value for key, value in other.items() if key in SILENT}, **one}
    listed = [part["enum"] for part in (one, other) if "enum" in part]
    listed += [[part["const"]] for part in (one, other) if "const" in part]
    if len(listed) > 1:
        spend(sum(map(len, listed)) // _NAMES_AT_ONCE)
        known = [{same(value, spend) for value in values} for values in listed[1:]]
        values = [value for value in listed[0] if all(same(value, spend) in texts for texts in known)]
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
        if key in SILENT or (key in ("enum", "const") and len(listed) > 1) or (key == "type" and len(types) == 2):
            continue
        if merged.setdefault(key, value) != value:
            return None
    return merged
