"""Whether a JSON value satisfies a schema: the final check of answers whose schema is no grammar as a whole.

All of the vocabulary counts. `format` asserts only within `oneOf`, `not` and `if`, because grammars tell alternatives
apart by it. A value is checked as Python's `json` reads it. The event loop waits for the check of an answer: one that
takes more than `_MAX_STEPS` is not checked to its end. Regular expressions take linear time (`schema_patterns`).
"""

from __future__ import annotations

import json
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

from octavo.structured_output.schema_formats import has_format
from octavo.structured_output.schema_keywords import Document, Schema, SchemaError, children, shown
from octavo.structured_output.schema_patterns import read_pattern

_MAX_STEPS = 10_000  # schemas applied to values, each of which takes 2 to 5 µs
_FORMAT_STEPS = 16  # that a format takes, and one for eight characters
_MAX_FORMAT_STEPS = 200_000  # of all values in a schema
_MAX_DEPTH = 200


class Invalid(Exception):
    """A value that does not satisfy its schema. The message has the place and the keyword."""


class _TooManySteps(SchemaError):
    pass


class Validator:
    """Checks answers against one schema."""

    def __init__(self, schema: Schema) -> None:
        self._document = Document(schema)
        self._draft = self._document.draft
        self._num_steps = self._num_format_steps = 0
        self._asserts_formats = False
        self._enums: dict[int, tuple[list[Any], frozenset[Any]]] = {}  # by the identity of the lists, which stay

    def check_text(self, text: str) -> str | None:
        """Why a text is not JSON that satisfies the schema, or None if it is."""
        try:
            value = json.loads(text)
        except (RecursionError, ValueError) as e:
            return f"it is no JSON: {e}"
        return self.check(value)

    def check(self, value: Any) -> str | None:
        """Why a value does not satisfy the schema, or None if it does or takes too many steps."""
        self._num_steps = self._num_format_steps = 0
        try:
            self._apply(self._document.root, "", value, "$", 0)
        except Invalid as e:
            return str(e)
        except _TooManySteps:
            return None
        except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as e:
            return f"it could not be checked: {str(e)[:200] or type(e).__name__}"
        return None

    def satisfies(self, schema: Schema, base: str, value: Any, *, asserts_formats: bool = False) -> bool:
        """Whether a value satisfies a schema within the document, whose references are relative to `base`."""
        self._num_steps = 0
        return self._satisfies(schema, base, value, 0, asserts_formats=asserts_formats)

    def _satisfies(self, schema: Schema, base: str, value: Any, depth: int, *, asserts_formats: bool = False) -> bool:
        outer, self._asserts_formats = self._asserts_formats, self._asserts_formats or asserts_formats
        try:
            self._apply(schema, base, value, "", depth)
        except Invalid:
            return False
        finally:
            self._asserts_formats = outer
        return True

    def _apply(self, schema: Schema, base: str, value: Any, at: str, depth: int) -> None:
        self._num_steps += 1
        if self._num_steps > _MAX_STEPS:
            raise _TooManySteps("the schema takes too many steps for this value")
        if depth > _MAX_DEPTH:
            raise SchemaError("the schema is too deep for this value")
        if schema is True:
            return
        if schema is False:
            raise Invalid(f"{at}: nothing may stand here")
        if not isinstance(schema, dict):
            raise SchemaError(f"a schema is an object, true or false, not {shown(schema)}")
        base = self._document.base_within(schema, base)
        for keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
            if isinstance(target := schema.get(keyword), str):
                found, its_base = self._document.find(target, base)
                self._apply(found, its_base, value, at, depth + 1)
                if keyword == "$ref" and not self._document.has_plain_refs:
                    return
        _check_value(schema, value, at, self._draft)
        if self._asserts_formats and isinstance(value, str) and "format" in schema:
            num = _FORMAT_STEPS + len(value) // 8
            self._num_steps += num
            self._num_format_steps += num
            if self._num_steps > _MAX_STEPS or self._num_format_steps > _MAX_FORMAT_STEPS:
                raise _TooManySteps("formats take too many steps for these values")
            if not has_format(value, schema["format"]):
                raise Invalid(f"{at}: {shown(value)} has not the format {shown(schema['format'])}")
        if "enum" in schema and same(value) not in self._enum(schema["enum"]):
            raise Invalid(f"{at}: {shown(value)} is not in enum")
        self._apply_within(schema, base, value, at, depth + 1)
        if isinstance(value, dict):
            self._apply_to_object(schema, base, value, at, depth + 1)
        elif isinstance(value, list):
            self._apply_to_array(schema, base, value, at, depth + 1)

    def _enum(self, values: list[Any]) -> frozenset[Any]:
        if id(values) not in self._enums:
            self._enums[id(values)] = values, frozenset(map(same, values))
        return self._enums[id(values)][1]

    def _apply_within(self, schema: dict[str, Any], base: str, value: Any, at: str, depth: int) -> None:
        """The keywords that apply schemas to the value itself."""
        for one in schema.get("allOf", ()):
            self._apply(one, base, value, at, depth)
        if "anyOf" in schema and not any(self._satisfies(one, base, value, depth) for one in schema["anyOf"]):
            raise Invalid(f"{at}: none of anyOf holds")
        if "oneOf" in schema:
            num = sum(self._satisfies(one, base, value, depth, asserts_formats=True) for one in schema["oneOf"])
            if num != 1:
                raise Invalid(f"{at}: {num} alternatives of oneOf hold, and one must")
        if "not" in schema and self._satisfies(schema["not"], base, value, depth, asserts_formats=True):
            raise Invalid(f"{at}: not forbids it")
        if "if" in schema and self._draft >= 7:
            is_so = self._satisfies(schema["if"], base, value, depth, asserts_formats=True)
            branch = "then" if is_so else "else"
            if branch in schema:
                self._apply(schema[branch], base, value, at, depth)

    def _apply_to_object(self, schema: dict[str, Any], base: str, value: dict[str, Any], at: str, depth: int) -> None:
        missing = [name for name in names_in(schema.get("required")) if name not in value]
        if missing:
            raise Invalid(f"{at}: {missing[0]!r:.60} is required")
        properties = schema.get("properties", {})
        patterns = {name: read_pattern(name) for name in schema.get("patternProperties", ())}
        self._num_steps += len(patterns) * len(value)
        for name, one in value.items():
            here = f"{at}.{name:.60}"
            if name in properties:
                self._apply(properties[name], base, one, here, depth)
            matching = [key for key, pattern in patterns.items() if pattern.matches(name)]
            for key in matching:
                self._apply(schema["patternProperties"][key], base, one, here, depth)
            if "additionalProperties" in schema and not matching and name not in properties:
                self._apply(schema["additionalProperties"], base, one, here, depth)
            if "propertyNames" in schema:
                self._apply(schema["propertyNames"], base, name, here, depth)
        for name, needed in schema.get("dependencies", {}).items():
            if name in value and self._document.has_dependencies:
                if isinstance(needed, list | str):
                    self._need(names_in(needed), value, at, name)
                else:
                    self._apply(needed, base, value, at, depth)
        for name, needed in schema.get("dependentRequired", {}).items():
            if name in value:
                self._need(names_in(needed), value, at, name)
        for name, needed in schema.get("dependentSchemas", {}).items():
            if name in value:
                self._apply(needed, base, value, at, depth)
        if "unevaluatedProperties" in schema:
            known = self._evaluated({**schema, "unevaluatedProperties": None}, base, value, depth)
            for name, one in value.items():
                if name not in known:
                    self._apply(schema["unevaluatedProperties"], base, one, f"{at}.{name:.60}", depth)

    def _need(self, names: list[str], value: dict[str, Any], at: str, of: str) -> None:
        missing = [name for name in names if name not in value]
        if missing:
            raise Invalid(f"{at}: {of!r:.60} needs {missing[0]!r:.60} beside it")

    def _apply_to_array(self, schema: dict[str, Any], base: str, value: list[Any], at: str, depth: int) -> None:
        first, rest = array_parts(schema, self._draft)
        for i, one in enumerate(value):
            part = first[i] if i < len(first) else rest
            if part is not True:
                self._apply(part, base, one, f"{at}[{i}]", depth)
        if "contains" in schema and self._draft >= 6:
            num = sum(self._satisfies(schema["contains"], base, one, depth) for one in value)
            least, most = schema.get("minContains", 1), schema.get("maxContains")
            if self._draft < 2019:
                least, most = 1, None
            if num < least or (most is not None and num > most):
                raise Invalid(f"{at}: contains holds for {num} items")
        if "unevaluatedItems" in schema:
            known = self._evaluated({**schema, "unevaluatedItems": None}, base, value, depth)
            for i, one in enumerate(value):
                if i not in known:
                    self._apply(schema["unevaluatedItems"], base, one, f"{at}[{i}]", depth)

    def _evaluated(self, schema: Schema, base: str, value: Any, depth: int) -> set[Any]:
        """The names or indices in `value` that keywords of `schema`, which it satisfies, have looked at."""
        if not isinstance(schema, dict):
            return set()
        known = set[Any]()
        base = self._document.base_within(schema, base)
        for keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
            if isinstance(target := schema.get(keyword), str):
                known |= self._evaluated(*self._document.find(target, base), value, depth + 1)
        for keyword, key, one in children(schema):
            if keyword in ("allOf", "anyOf", "oneOf", "if", "then", "else") or (
                keyword in ("dependentSchemas", "dependencies") and isinstance(value, dict) and key in value
            ):
                is_branch = keyword in ("then", "else")
                if is_branch and "if" not in schema:
                    continue
                if is_branch and (keyword == "then") != self._satisfies(
                    schema["if"], base, value, depth, asserts_formats=True
                ):
                    continue
                if self._satisfies(one, base, value, depth, asserts_formats=keyword in ("oneOf", "if")):
                    known |= self._evaluated(one, base, value, depth + 1)
        if isinstance(value, dict):
            known |= schema.get("properties", {}).keys() & value.keys()
            patterns = [read_pattern(name) for name in schema.get("patternProperties", ())]
            known |= {name for name in value if any(pattern.matches(name) for pattern in patterns)}
            if "additionalProperties" in schema or schema.get("unevaluatedProperties") is not None:
                known |= value.keys()
        elif isinstance(value, list):
            first, _ = array_parts(schema, self._draft)
            has_rest = "additionalItems" in schema if isinstance(schema.get("items"), list) else "items" in schema
            if has_rest or schema.get("unevaluatedItems") is not None:
                known |= set(range(len(value)))
            known |= set(range(min(len(first), len(value))))
            if "contains" in schema and self._draft >= 2020:
                known |= {i for i, one in enumerate(value) if self._satisfies(schema["contains"], base, one, depth)}
        return known


def array_parts(schema: dict[str, Any], draft: int) -> tuple[list[Schema], Schema]:
    """The schemas of an array's first items, and that of the others."""
    items = schema.get("items", True)
    if isinstance(items, list):  # of drafts before 2020, and of people who write them without saying so
        return items, schema.get("additionalItems", True)
    first = schema.get("prefixItems", []) if draft >= 2020 else []
    return first, items


def names_in(value: Any) -> list[str]:
    """The names in a list such as `required`."""
    if isinstance(value, str):  # of draft 3
        return [value]
    return list(dict.fromkeys(name for name in value if isinstance(name, str))) if isinstance(value, list) else []


def is_type(value: Any, name: str, draft: int = 2020) -> bool:
    if name == "null":
        return value is None
    if name == "boolean":
        return isinstance(value, bool)
    if name in ("integer", "number"):
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return name == "number" or isinstance(value, int) or (draft != 4 and value.is_integer())
    if name == "string":
        return isinstance(value, str)
    if name == "array":
        return isinstance(value, list)
    return name == "object" and isinstance(value, dict)


def types_in(schema: dict[str, Any]) -> list[str] | None:
    """What `type` names, or None where everything may be."""
    given = schema.get("type")
    if given is None or given == "any":
        return None
    return [given] if isinstance(given, str) else list(given)


def same(value: Any) -> Any:
    """Something hashable that is equal for values that are equal in JSON, where 1 is 1.0 and not true."""
    if isinstance(value, bool):
        return ("boolean", value)
    if isinstance(value, dict):
        return frozenset((name, same(one)) for name, one in value.items())
    if isinstance(value, list):
        return tuple(map(same, value))
    return value


def exact(value: float | Decimal) -> Fraction:
    """A number as it is written: 0.1 is a tenth."""
    return Fraction(value) if isinstance(value, int) else Fraction(repr(value))


def bounds_of(schema: dict[str, Any]) -> list[tuple[str, Any, bool]]:
    """The bounds of a number: ("minimum" or "maximum", the bound, whether it is left out). Draft 4's booleans too."""
    bounds = []
    for name, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        at, beyond = schema.get(name), schema.get(exclusive)
        if at is not None:
            bounds.append((name, at, beyond is True))
        if beyond is not None and not isinstance(beyond, bool):
            bounds.append((name, beyond, True))
    for name, bound, _ in bounds:
        if isinstance(bound, bool) or not isinstance(bound, int | float):
            raise SchemaError(f"{name} is a number, not {shown(bound)}")
    return bounds


def _check_value(schema: dict[str, Any], value: Any, at: str, draft: int) -> None:
    """The keywords that have no schemas in them."""
    types = types_in(schema)
    if types is not None and not any(is_type(value, name, draft) for name in types):
        raise Invalid(f"{at}: {shown(value)} is not of type {' or '.join(map(str, types))}")
    if "const" in schema and draft >= 6 and same(value) != same(schema["const"]):
        raise Invalid(f"{at}: {shown(value)} is not {shown(schema['const'])}")
    if isinstance(value, str):
        _check_size(schema, "Length", len(value), at)
        if "pattern" in schema and not read_pattern(schema["pattern"]).matches(value):
            raise Invalid(f"{at}: {shown(value)} does not match {shown(schema['pattern'])}")
    elif isinstance(value, list):
        _check_size(schema, "Items", len(value), at)
        if schema.get("uniqueItems") is True and len(set(map(same, value))) < len(value):
            raise Invalid(f"{at}: items are not unique")
    elif isinstance(value, dict):
        _check_size(schema, "Properties", len(value), at)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        _check_number(schema, value, at)


def _check_size(schema: dict[str, Any], noun: str, size: int, at: str) -> None:
    least, most = schema.get("min" + noun), schema.get("max" + noun)
    if (least is not None and size < least) or (most is not None and size > most):
        raise Invalid(f"{at}: {size} is not within min{noun} and max{noun}")


def _check_number(schema: dict[str, Any], value: float, at: str) -> None:
    for name, bound, is_exclusive in bounds_of(schema):
        is_beyond = value < bound if name == "minimum" else value > bound
        if is_beyond or (is_exclusive and value == bound):
            raise Invalid(f"{at}: {shown(value)} is beyond the {name} {shown(bound)}")
    for keyword in ("multipleOf", "divisibleBy"):
        divisor = schema.get(keyword)
        if divisor and math.isfinite(value) and exact(value) % exact(divisor) != 0:
            raise Invalid(f"{at}: {shown(value)} is not a multiple of {shown(divisor)}")
