"""Proofs about schemas without values: that no value satisfies two schemas, and the opposite of a schema. Both give up
rather than be wrong, and have a budget, because schemas come from requests.
"""

from __future__ import annotations

from functools import cached_property
from itertools import combinations
from typing import Any

from octavo.structured_output.schema_formats import format_keywords
from octavo.structured_output.schema_keywords import TYPES, Base, Document, Schema, SchemaError, size_of
from octavo.structured_output.schema_validation import Validator, bounds_of, is_type, same, types_in

_BUDGET = 20_000  # schemas looked at
_NAMES_AT_ONCE = 16  # required names that take as long as a schema
_MAX_DEPTH = 4
_MAX_NUMBERS = 4  # most numbers that a value must differ from
_ANNOTATIONS = frozenset(
    ("$anchor", "$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description", "example",
     "examples", "id", "readOnly", "title", "writeOnly")
)  # fmt: skip
_OF_NUMBERS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
_WITH_OPPOSITES = _ANNOTATIONS | _OF_NUMBERS | {
    "type", "enum", "const", "format", "required", "properties", "anyOf", "oneOf", "allOf", "not", "minLength",
    "maxLength", "minItems", "maxItems",
}  # fmt: skip
_CLASSES = [  # classes of values: integers are whole numbers
    name for name in TYPES if name != "integer"
]


class Logic:
    """Proofs within one document."""

    def __init__(self, document: Document, budget: int = _BUDGET) -> None:
        """`budget` is the number of schemas that all proofs together look at."""
        self._document = document
        self._budget = self._max_steps = budget

    @cached_property
    def validator(self) -> Validator:
        return Validator(self._document, self._max_steps)

    def satisfies(self, schema: Schema, base: Base, value: Any, *, asserts_formats: bool = False) -> bool:
        return self.validator.satisfies(schema, base, value, asserts_formats=asserts_formats)

    def resolved(self, schema: Schema, base: Base) -> tuple[Schema, Base]:
        """Return a schema and its base, or, if it is only a reference, those of its target."""
        for _ in range(20):
            if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
                break
            if self._document.has_plain_refs and not schema.keys() <= {"$ref", *_ANNOTATIONS}:
                break
            base = self._document.base_within(schema, base)
            schema, base = self._document.find(schema["$ref"], base)
        return schema, base

    def are_disjoint(self, schemas: list[Schema], base: Base, types: list[str] | None = None) -> bool:
        """Return whether it is certain that no value of one of `types` satisfies two of these schemas."""
        if len(schemas) > 100:
            return False
        return all(
            self._have_none_in_common(one, other, base, base, 0, types) for one, other in combinations(schemas, 2)
        )

    def _have_none_in_common(
        self, a: Schema, b: Schema, base_a: Base, base_b: Base, depth: int, types: list[str] | None = None
    ) -> bool:
        self._budget -= 1
        if self._budget < 0 or depth > _MAX_DEPTH:
            return False
        a, base_a = self.resolved(a, base_a)
        b, base_b = self.resolved(b, base_b)
        if a is False or b is False:
            return True
        if not isinstance(a, dict) or not isinstance(b, dict):
            return False
        for one, other, base, other_base in ((a, b, base_a, base_b), (b, a, base_b, base_a)):
            values = _listed(one)
            if values is not None:
                self._budget -= len(values)
                try:
                    return self._budget >= 0 and not any(
                        self.satisfies(other, other_base, value, asserts_formats=True) for value in values
                    )
                except SchemaError:  # too many steps: not known
                    return False
            for keyword in ("anyOf", "oneOf"):
                if isinstance(parts := one.get(keyword), list) and all(
                    self._have_none_in_common(part, other, base, other_base, depth + 1, types) for part in parts
                ):
                    return True
            if isinstance(parts := one.get("allOf"), list) and any(
                self._have_none_in_common(part, other, base, other_base, depth + 1, types) for part in parts
            ):
                return True
            if not self._document.has_plain_refs or not isinstance(one.get("$ref"), str):
                continue
            found, its_base = self._document.find(one["$ref"], base)
            if self._have_none_in_common(found, other, its_base, other_base, depth + 1, types):
                return True
        common = _classes(a) & _classes(b) & _classes({} if types is None else {"type": types})
        if not common:
            return True
        if common == {"number"}:
            return _ranges_are_apart(a, b)
        return common == {"object"} and self._objects_are_apart(a, b, base_a, base_b, depth)

    def _objects_are_apart(self, a: dict[str, Any], b: dict[str, Any], base_a: Base, base_b: Base, depth: int) -> bool:
        """Return whether a property that one or both of them require distinguishes the objects of two schemas."""
        for one, other, base, other_base in ((a, b, base_a, base_b), (b, a, base_b, base_a)):
            of_one, of_other = one.get("properties", {}), other.get("properties", {})
            if not isinstance(of_one, dict) or not isinstance(of_other, dict):
                return False
            required = one["required"] if isinstance(one.get("required"), list) else []
            self._budget -= len(required) // _NAMES_AT_ONCE
            for name in required:
                if not isinstance(name, str):
                    continue
                if name not in of_other:
                    if other.get("additionalProperties") is False and not other.get("patternProperties"):
                        return True
                elif self._have_none_in_common(of_one.get(name, True), of_other[name], base, other_base, depth + 1):
                    return True
        return False

    def opposite(self, schema: Schema, base: Base, within: dict[str, Any] | None = None) -> Schema | None:
        """Return the schema of all values that do not satisfy `schema`, or None if the vocabulary cannot say it.
        `within` is the surrounding schema, whose `type` and `properties` limit the opposite.
        """
        return self._opposite(schema, base, 0, within or {})

    def _opposite(self, schema: Schema, base: Base, depth: int, within: dict[str, Any]) -> Schema | None:
        self._budget -= 1
        types = types_in(within)
        if self._budget < 0 or depth > _MAX_DEPTH:
            return None
        schema, its_base = self.resolved(schema, base)
        if isinstance(schema, bool):
            return not schema
        if not isinstance(schema, dict) or its_base != base:
            return None
        parts = list[Schema]()
        if not schema.keys() <= _WITH_OPPOSITES or format_keywords(schema.get("format")) is not None:
            return None
        values = _listed(schema)
        if values is not None:
            values = [value for value in values if self.satisfies(schema, its_base, value)]
            return _without(values, types)
        if (names := types_in(schema)) is not None:
            if not set(names) <= set(TYPES) or ("integer" in names and "number" not in names and _numbers(types)):
                return None
            others = [name for name in _CLASSES if name not in names and not (name == "number" and "integer" in names)]
            parts.append({"type": others} if others else False)
        for keyword, kind, other in (
            ("minLength", "string", "maxLength"), ("maxLength", "string", "minLength"),
            ("minItems", "array", "maxItems"), ("maxItems", "array", "minItems"),
        ):  # fmt: skip
            if (bound := size_of(keyword, schema)) is not None:
                bound += -1 if keyword.startswith("min") else 1
                parts.append({"type": kind, other: bound} if bound >= 0 else False)
        for keyword, other in (
            ("minimum", "exclusiveMaximum"), ("maximum", "exclusiveMinimum"),
            ("exclusiveMinimum", "maximum"), ("exclusiveMaximum", "minimum"),
        ):  # fmt: skip
            if keyword in schema:
                if isinstance(schema[keyword], bool) or isinstance(schema.get("exclusive" + keyword.title()), bool):
                    return None
                parts.append({"type": "number", other: schema[keyword]})
        if "multipleOf" in schema:
            return None
        for name in schema.get("required", ()) if isinstance(schema.get("required"), list) else ():
            parts.append({"type": "object", "properties": {name: False}})
        for name, one in schema.get("properties", {}).items():
            if one is not True and one != {}:
                around = self.resolved(within.get("properties", {}).get(name), its_base)[0]
                around = around if isinstance(around, dict) else {}
                if (known := _listed(around)) is not None and len(known) <= self._budget:
                    self._budget -= len(known)
                    rest = [value for value in known if not self.satisfies(one, its_base, value)]
                    opposite: Schema | None = {"enum": rest} if rest else False
                else:
                    opposite = self._opposite(one, its_base, depth + 1, around)
                if opposite is None:
                    return None
                parts.append({"type": "object", "properties": {name: opposite}, "required": [name]})
        for one in schema.get("allOf", ()):
            parts.append(self._opposite(one, its_base, depth + 1, within))
        if "anyOf" in schema:
            all_of = [self._opposite(one, its_base, depth + 1, within) for one in schema["anyOf"]]
            if None in all_of:
                return None
            parts.append({"allOf": all_of})
        if "oneOf" in schema:
            if not self.are_disjoint(schema["oneOf"], its_base):
                return None
            all_of = [self._opposite(one, its_base, depth + 1, within) for one in schema["oneOf"]]
            if None in all_of:
                return None
            parts.append({"allOf": all_of})
        if "not" in schema:
            parts.append(schema["not"])
        if None in parts:
            return None
        parts = [one for one in parts if one is not False]
        if not parts:
            return False
        return parts[0] if len(parts) == 1 else {"anyOf": parts}


def _classes(schema: dict[str, Any]) -> set[str]:
    types = types_in(schema)
    return set(_CLASSES) if types is None else {"number" if name == "integer" else name for name in types}


def _numbers(types: list[str] | None) -> bool:
    return types is None or "number" in types


def _listed(schema: dict[str, Any]) -> list[Any] | None:
    if isinstance(schema.get("enum"), list):
        values: list[Any] = schema["enum"]
        return values
    return [schema["const"]] if "const" in schema else None


def _without(values: list[Any], types: list[str] | None) -> Schema | None:
    """Return the schema of everything except these values, if they are strings, booleans or null; other values must not
    be of `types`."""
    parts, others = list[Schema](), [name for name in _CLASSES if types is None or name in types]
    if types is not None and "integer" in types and "number" not in types:
        others.append("integer")
    texts = [value for value in values if isinstance(value, str)]
    if texts and "string" in others:
        others.remove("string")
        if sum(map(len, texts)) > 500:
            return None
        parts.append({"type": "string", "pattern": f"^(?:{_all_but(texts)})$"})
    numbers = sorted({value for value in values if isinstance(value, int | float) and not isinstance(value, bool)})
    if numbers and "number" in others and len(numbers) <= _MAX_NUMBERS:
        others = [name for name in others if name not in ("number", "integer")]
        bounds = zip([None, *numbers], [*numbers, None], strict=True)
        for low, high in bounds:
            between = {"exclusiveMinimum": low, "exclusiveMaximum": high}
            parts.append({"type": "number", **{name: one for name, one in between.items() if one is not None}})
    for value in values:
        if isinstance(value, bool) and "boolean" in others:
            others.remove("boolean")
            rest = [one for one in (True, False) if same(one) not in list(map(same, values))]
            if rest:
                parts.append({"enum": rest})
        elif value is None and "null" in others:
            others.remove("null")
        elif not isinstance(value, str | bool | None) and any(is_type(value, name) for name in others):
            return None
    if others:
        parts.append({"type": others})
    if not parts:
        return False
    return parts[0] if len(parts) == 1 else {"anyOf": parts}


def _all_but(texts: list[str]) -> str:
    """Return a regular expression for every text except these: texts that leave their prefix tree, or end inside of
    it."""
    following: dict[str, list[str]] = {}
    for text in texts:
        if text:
            following.setdefault(text[0], []).append(text[1:])
    firsts = "".join(f"\\u{{{ord(c):x}}}" for c in following)
    other = f"[^{firsts}]" if firsts else r"[\s\S]"
    parts = [rf"{other}[\s\S]*"]
    if "" not in texts:
        parts.append("")
    parts += [f"\\u{{{ord(c):x}}}(?:{_all_but(rest)})" for c, rest in following.items()]
    return "|".join(parts)


def _ranges_are_apart(a: dict[str, Any], b: dict[str, Any]) -> bool:
    for one, other in ((a, b), (b, a)):
        highs = [(bound, not is_out) for name, bound, is_out in bounds_of(one) if name == "maximum"]
        lows = [(bound, is_out) for name, bound, is_out in bounds_of(other) if name == "minimum"]
        if highs and lows:
            (high, is_high_in), (low, is_low_out) = min(highs), max(lows)
            if high < low or (high == low and (is_low_out or not is_high_in)):
                return True
    return False
