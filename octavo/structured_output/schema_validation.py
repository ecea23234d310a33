"""Checks whether a JSON value satisfies a schema: the final check of answers whose schema a grammar enforces only in
part. It supports the whole vocabulary. `format` is checked only within `oneOf`, `not` and `if`, because grammars
distinguish alternatives by it; `regex`, which no grammar enforces, is checked everywhere. A value is checked as
Python's `json` reads it. The event loop waits for the check of an answer: an answer that takes more than `_MAX_STEPS`
is reported as unchecked. Large values, lists and regular expressions are several steps each.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

from octavo.structured_output.pattern_cost import is_tame, num_positions
from octavo.structured_output.schema_formats import CHECKED_FORMATS, has_format
from octavo.structured_output.schema_keywords import Base, Document, Schema, SchemaError, children, shown
from octavo.structured_output.schema_patterns import Pattern, read_pattern

_MAX_STEPS = 10_000  # a step takes up to 5 µs: a schema applied to a value, or one of these amounts:
_CHARACTERS_PER_STEP = 1024  # characters of parsed JSON
_PARSED_PER_STEP = 32  # values of parsed JSON
_NAMES_PER_STEP = 16  # properties, types or keywords that are searched
_VALUES_PER_STEP = 4  # parts of compared values; a text or number counts as one more for each _CHARACTERS_PER_STEP
_BITS_PER_STEP = 256  # bits of divided whole numbers
_POSITIONS_PER_STEP = 16  # positions of compiled regular expressions
_UNICODE_CLASS_SIZE = 800  # \p{L} and the like count as so many positions, because they have hundreds of ranges
_MATCHES_PER_STEP = 256  # characters times positions of a regular expression at which they may be matched
_TAME_MATCHES_PER_STEP = 64  # characters matched by an expression with few positions
_FORMAT_STEPS = 16  # for a format; one more for eight characters, or for two characters of a regular expression
_MAX_FORMAT_STEPS = 200_000  # steps for formats of all values in a schema
_MAX_DEPTH = 200
_MAX_TYPES = 8  # most types that a message names
_TOO_MANY_STEPS = "it takes too many steps"


class Invalid(Exception):
    """A value that does not satisfy its schema. The message has the place and the keyword."""

    def __init__(self, at: str, message: str, *values: Any) -> None:
        """`message` has a pair of braces for each of `values`, which are formatted only if the message is read. Text
        from a client must be a value, never a part of `message`."""
        self._at, self._message, self._values = at, message, values

    def __str__(self) -> str:
        return f"{self._at}: {self._message.format(*map(shown, self._values))}"


class NotChecked(SchemaError):
    """A value that could not be compared with its schema. The message says why."""


def problem_of(text: str, schema: str) -> str | None:
    """Return why a text is not JSON that satisfies `schema`, also JSON text; None if it is. Raises `NotChecked`."""
    num_steps = _steps_to_parse(schema)
    if num_steps > _MAX_STEPS:
        raise NotChecked(_TOO_MANY_STEPS)
    return Validator(json.loads(schema)).check_text(text, num_steps)


def _steps_to_parse(text: str) -> int:
    return len(text) // _CHARACTERS_PER_STEP + sum(map(text.count, "[{,")) // _PARSED_PER_STEP


class Validator:
    """Checks answers against one schema."""

    def __init__(self, schema: Schema | Document, max_steps: int = _MAX_STEPS) -> None:
        """A check of one value takes at most `max_steps`, and never more than `_MAX_STEPS`."""
        self._max_steps = min(max_steps, _MAX_STEPS)
        self._document = schema if isinstance(schema, Document) else Document(schema)
        self._draft = self._document.draft
        self.num_steps = self._num_format_steps = 0  # taken by the last check, with those before it
        self._has_dependencies = self._document.has_dependencies
        self._asserts_formats = False
        self._enums: dict[int, tuple[list[Any], set[str]]] = {}  # by id() of the lists, which the schema keeps alive
        self._patterns: dict[str, Pattern] = {}  # patterns that have been used

    def check_text(self, text: str, num_steps: int = 0) -> str | None:
        """Return why a text is not JSON that satisfies the schema, or None if it is. `num_steps` were already taken.
        Raises `NotChecked`."""
        self.num_steps = num_steps
        num_steps += _steps_to_parse(text)
        if num_steps > _MAX_STEPS:
            raise NotChecked(_TOO_MANY_STEPS)
        self.num_steps = num_steps
        try:
            value = json.loads(text)
        except json.JSONDecodeError as e:
            return f"it is no JSON: {e}"
        except (RecursionError, ValueError) as e:  # nested too deep, or a number with thousands of digits
            raise NotChecked(str(e)) from None
        return self.check(value, num_steps)

    def check(self, value: Any, num_steps: int = 0) -> str | None:
        """Return why a value does not satisfy the schema, or None if it does. `num_steps` were already taken. Raises
        `NotChecked`."""
        self.num_steps, self._num_format_steps = num_steps, 0
        self._document.spend = self._spend
        try:
            try:
                self._apply(self._document.root, Base(), value, "$", 0)
            except Invalid as e:
                return str(e)  # raises `RecursionError` for values that are nested too deep
        except NotChecked:
            raise
        except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as e:
            raise NotChecked(str(e)[:200] or type(e).__name__) from None
        return None

    def satisfies(self, schema: Schema, base: Base, value: Any, *, asserts_formats: bool = False) -> bool:
        """Return whether a value satisfies a schema of the document, whose references are relative to `base`."""
        self.num_steps = 0
        return self._satisfies(schema, base, value, 0, asserts_formats=asserts_formats)

    def _spend(self, num_steps: int = 1) -> None:
        self.num_steps += num_steps
        if self.num_steps > self._max_steps:
            raise NotChecked(_TOO_MANY_STEPS)

    def _satisfies(self, schema: Schema, base: Base, value: Any, depth: int, *, asserts_formats: bool = False) -> bool:
        outer, self._asserts_formats = self._asserts_formats, self._asserts_formats or asserts_formats
        try:
            self._apply(schema, base, value, "", depth)
        except Invalid:
            return False
        finally:
            self._asserts_formats = outer
        return True

    def _apply(self, schema: Schema, base: Base, value: Any, at: str, depth: int) -> None:
        self.num_steps += 1
        if self.num_steps > self._max_steps:
            raise NotChecked(_TOO_MANY_STEPS)
        if depth > _MAX_DEPTH:
            raise SchemaError("the schema is too deep for this value")
        if schema is True:
            return
        if schema is False:
            raise Invalid(at, "nothing may stand here")
        if not isinstance(schema, dict):
            raise SchemaError(f"a schema is an object, true or false, not {shown(schema)}")
        base = self._document.base_within(schema, base)
        for keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
            if isinstance(target := schema.get(keyword), str):
                if base.url:  # joining URIs takes time
                    self._spend(2)
                found, its_base = self._document.find(target, base, keyword)
                self._apply(found, its_base, value, at, depth + 1)
                if keyword == "$ref" and not self._document.has_plain_refs:
                    return
        self._check_value(schema, value, at)
        form = schema.get("format")
        if isinstance(value, str) and form is not None and (self._asserts_formats or form in CHECKED_FORMATS):
            num = _FORMAT_STEPS + len(value) // (2 if form in CHECKED_FORMATS else 8)
            self._spend(num)
            self._num_format_steps += num
            if self._num_format_steps > _MAX_FORMAT_STEPS:
                raise NotChecked(_TOO_MANY_STEPS)
            if not has_format(value, form):
                raise Invalid(at, "{} has not the format {}", value, form)
        if "enum" in schema and self._same(value) not in self._enum(schema["enum"]):
            raise Invalid(at, "{} is not in enum", value)
        self._apply_within(schema, base, value, at, depth + 1)
        if isinstance(value, dict):
            self._apply_to_object(schema, base, value, at, depth + 1)
        elif isinstance(value, list):
            self._apply_to_array(schema, base, value, at, depth + 1)

    def _enum(self, values: list[Any]) -> set[str]:
        if id(values) not in self._enums:
            self._enums[id(values)] = values, self._same_of_each(values)
        return self._enums[id(values)][1]

    def _same(self, value: Any) -> str:
        return same(value, self._spend)

    def _same_of_each(self, values: list[Any]) -> set[str]:
        self._spend(1 + len(values) // _VALUES_PER_STEP)
        return set(map(self._same, values))

    def _matches(self, expression: str, text: str) -> bool:
        """Return whether a regular expression of the schema is found in a text."""
        if (pattern := self._patterns.get(expression)) is None:
            self._spend(len(expression) // _POSITIONS_PER_STEP)
            pattern = self._patterns[expression] = read_pattern(expression)
            size = _UNICODE_CLASS_SIZE if "\\p" in expression.lower() else 1
            self._spend(num_positions(expression) * size // _POSITIONS_PER_STEP)
        num_matches, per_step = len(text), _TAME_MATCHES_PER_STEP
        if not is_tame(expression):
            num_matches, per_step = num_matches * num_positions(expression), _MATCHES_PER_STEP
        self._spend(num_matches // per_step)
        return pattern.matches(text)

    def _check_value(self, schema: dict[str, Any], value: Any, at: str) -> None:
        """Check the keywords that contain no schemas. Raises `Invalid`."""
        types = types_in(schema)
        if types is not None:
            if len(types) > _NAMES_PER_STEP:
                self._spend(len(types) // _NAMES_PER_STEP)
            if not any(is_type(value, name, self._draft) for name in types):
                raise Invalid(at, "{} is not of type {}", value, " or ".join(types[:_MAX_TYPES]))
        if "const" in schema and self._draft >= 6 and self._same(value) != self._same(schema["const"]):
            raise Invalid(at, "{} is not {}", value, schema["const"])
        if isinstance(value, str):
            _check_size(schema, "Length", len(value), at)
            if "pattern" in schema and not self._matches(schema["pattern"], value):
                raise Invalid(at, "{} does not match {}", value, schema["pattern"])
        elif isinstance(value, list):
            _check_size(schema, "Items", len(value), at)
            if schema.get("uniqueItems") is True and len(self._same_of_each(value)) < len(value):
                raise Invalid(at, "items are not unique")
        elif isinstance(value, dict):
            _check_size(schema, "Properties", len(value), at)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            self._check_number(schema, value, at)

    def _check_number(self, schema: dict[str, Any], value: float, at: str) -> None:
        for name, bound, is_exclusive in bounds_of(schema):
            is_beyond = value < bound if name == "minimum" else value > bound
            if is_beyond or (is_exclusive and value == bound):
                raise Invalid(at, "{} is beyond the " + name + " {}", value, bound)
        for keyword in ("multipleOf", "divisibleBy"):
            divisor = schema.get(keyword)
            if not divisor or not math.isfinite(value):
                continue
            self._spend(1 + sum(int(one).bit_length() for one in (value, divisor)) // _BITS_PER_STEP)
            if exact(value) % exact(divisor) != 0:
                raise Invalid(at, "{} is not a multiple of {}", value, divisor)

    def _apply_within(self, schema: dict[str, Any], base: Base, value: Any, at: str, depth: int) -> None:
        """Check the keywords that apply schemas to the value itself. Raises `Invalid`."""
        for one in schema.get("allOf", ()):
            self._apply(one, base, value, at, depth)
        if "anyOf" in schema and not any(self._satisfies(one, base, value, depth) for one in schema["anyOf"]):
            raise Invalid(at, "none of anyOf holds")
        if "oneOf" in schema:
            num = sum(self._satisfies(one, base, value, depth, asserts_formats=True) for one in schema["oneOf"])
            if num != 1:
                raise Invalid(at, f"{num} alternatives of oneOf hold, and one must")
        if "not" in schema and self._satisfies(schema["not"], base, value, depth, asserts_formats=True):
            raise Invalid(at, "not forbids it")
        if "if" in schema and self._draft >= 7:
            is_so = self._satisfies(schema["if"], base, value, depth, asserts_formats=True)
            branch = "then" if is_so else "else"
            if branch in schema:
                self._apply(schema[branch], base, value, at, depth)

    def _apply_to_object(self, schema: dict[str, Any], base: Base, value: dict[str, Any], at: str, depth: int) -> None:
        if "required" in schema:
            self._need(schema["required"], value, at, "{} is required")
        properties, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        if patterns:
            self._spend(len(patterns) * len(value))
        for name, one in value.items():
            here = f"{at}.{name:.60}"
            if name in properties:
                self._apply(properties[name], base, one, here, depth)
            matching = [key for key in patterns if self._matches(key, name)]
            for key in matching:
                self._apply(patterns[key], base, one, here, depth)
            if "additionalProperties" in schema and not matching and name not in properties:
                self._apply(schema["additionalProperties"], base, one, here, depth)
            if "propertyNames" in schema:
                self._apply(schema["propertyNames"], base, name, here, depth)
        for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
            if not (dependent := schema.get(keyword)) or (keyword == "dependencies" and not self._has_dependencies):
                continue
            self._spend(len(dependent) // _NAMES_PER_STEP)
            for name, needed in dependent.items():
                if name in value and isinstance(needed, list | str):
                    self._need(needed, value, at, "{} is needed beside {}", name)
                elif name in value:
                    self._apply(needed, base, value, at, depth)
        if "unevaluatedProperties" in schema:
            known = self._evaluated({**schema, "unevaluatedProperties": None, "$id": None}, base, value, depth)
            for name, one in value.items():
                if name not in known:
                    self._apply(schema["unevaluatedProperties"], base, one, f"{at}.{name:.60}", depth)

    def _need(self, names: Any, value: dict[str, Any], at: str, message: str, *of: str) -> None:
        if isinstance(names, list) and len(names) > _NAMES_PER_STEP:
            self._spend(len(names) // _NAMES_PER_STEP)
        missing = [name for name in names_in(names) if name not in value]
        if missing:
            raise Invalid(at, message, missing[0], *of)

    def _apply_to_array(self, schema: dict[str, Any], base: Base, value: list[Any], at: str, depth: int) -> None:
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
                raise Invalid(at, f"contains holds for {num} items")
        if "unevaluatedItems" in schema:
            known = self._evaluated({**schema, "unevaluatedItems": None, "$id": None}, base, value, depth)
            for i, one in enumerate(value):
                if i not in known:
                    self._apply(schema["unevaluatedItems"], base, one, f"{at}[{i}]", depth)

    def _evaluated(self, schema: Schema, base: Base, value: Any, depth: int) -> set[Any]:
        """Return the names or indices in `value` that keywords of `schema` have evaluated; `value` satisfies
        `schema`."""
        if not isinstance(schema, dict):
            return set()
        num_names = len(schema) + sum(len(one) for one in (*schema.values(), value) if isinstance(one, dict | list))
        self._spend(1 + num_names // _NAMES_PER_STEP)
        known = set[Any]()
        base = self._document.base_within(schema, base)
        for keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
            if isinstance(target := schema.get(keyword), str):
                known |= self._evaluated(*self._document.find(target, base, keyword), value, depth + 1)
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
            patterns = schema.get("patternProperties", {})
            self._spend(len(patterns) * len(value))
            known |= {name for name in value if any(self._matches(key, name) for key in patterns)}
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
    """Return the schemas of an array's first items, and the schema of the other items."""
    items = schema.get("items", True)
    if isinstance(items, list):  # drafts before 2020, and schemas that use this form without naming a draft
        return items, schema.get("additionalItems", True)
    first = schema.get("prefixItems", []) if draft >= 2020 else []
    return first, items


def names_in(value: Any) -> list[str]:
    """Return the names in a list such as `required`."""
    if isinstance(value, str):  # draft 3
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
    """Return the types that `type` names, or None if every type is allowed."""
    given = schema.get("type")
    if given is None or given == "any":
        return None
    return [given] if isinstance(given, str) else list(given)


def same(value: Any, spend: Callable[[int], None] | None = None) -> str:
    """Return a text that is the same exactly for values that are equal in JSON, where 1 equals 1.0 but not true. Python
    seeds the hashes of texts, so that nobody can make many values with one hash. `spend` is called with numbers of
    steps."""
    if isinstance(value, str):
        text = f'"{len(value)}:{value}'  # its length comes first, so no text in the value can end it
    elif isinstance(value, dict | list):
        parts: list[str] = []
        _write(value, parts, spend)
        return "".join(parts)
    elif isinstance(value, bool | None):
        text = f"{value},"
    elif isinstance(value, int) or value.is_integer():
        text = f"{int(value):x},"  # hexadecimal, because decimal digits take quadratic time
    else:
        text = f"{value!r},"
    if spend is not None and len(text) >= _CHARACTERS_PER_STEP:
        spend(len(text) // _CHARACTERS_PER_STEP)
    return text


def _write(value: Any, parts: list[str], spend: Callable[[int], None] | None) -> None:
    """Append what `same` returns for a value to `parts`, so that deeply nested values are not copied at each level."""
    if not isinstance(value, dict | list):
        parts.append(same(value, spend))
        return
    if spend is not None:
        spend(1 + len(value) // _VALUES_PER_STEP)
    if isinstance(value, dict):
        parts.append("{")
        for name in sorted(value):
            parts.append(same(name, spend))
            _write(value[name], parts, spend)
        parts.append("}")
    else:
        parts.append("[")
        for one in value:
            _write(one, parts, spend)
        parts.append("]")


def exact(value: float | Decimal) -> Fraction:
    """Return a number exactly as it is written: 0.1 is a tenth."""
    return Fraction(value) if isinstance(value, int) else Fraction(repr(value))


def bounds_of(schema: dict[str, Any]) -> list[tuple[str, Any, bool]]:
    """Return the bounds of a number: ("minimum" or "maximum", the bound, whether it is excluded). Understands draft 4's
    booleans too."""
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


def _check_size(schema: dict[str, Any], noun: str, size: int, at: str) -> None:
    least, most = schema.get("min" + noun), schema.get("max" + noun)
    if (least is not None and size < least) or (most is not None and size > most):
        raise Invalid(at, f"{size} is not within min{noun} and max{noun}")
