"""JSON schemas in the part of the vocabulary that llguidance follows.

`lower` writes a schema as one that llguidance takes and that admits every valid value. Where it admits more than that
(`not`, `uniqueItems`, alternatives of `oneOf` that overlap, ...) the keywords are named in `Lowered.unheld`, and
`schema_validation` checks the answer when it has ended. The work is linear in the schema's size: each definition is
written once, and what is written more than once (`if`, `not`) has a budget.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from octavo.structured_output.pattern_cost import are_disjoint, is_tame, patterns_meet
from octavo.structured_output.schema_keywords import (
    TYPES,
    Document,
    Schema,
    SchemaError,
    as_list,
    as_map,
    check_kinds,
    shown,
)
from octavo.structured_output.schema_logic import Logic
from octavo.structured_output.schema_numbers import integer_ranges, number_ranges
from octavo.structured_output.schema_patterns import read_pattern
from octavo.structured_output.schema_references import check_cycles, prune_endless, refs_in
from octavo.structured_output.schema_validation import array_parts, bounds_of, names_in, types_in

# What llguidance has an expression for. Others say something to readers, as the specification has it.
_FORMATS = frozenset(("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"))
_MAX_BRANCHES = 32  # combinations of alternatives that stand beside each other
_MAX_REWRITTEN = 2_000  # schemas within what is written more than once
_MAX_DIVISOR = 250  # llguidance takes 20 µs for each unit of it
_MAX_LISTED = 16  # alternatives that one keyword is written as
# Simple schemas take llguidance milliseconds, whatever is in them: the trial in a process of its own is for the others.
_MAX_SIMPLE_NODES = 400
_MAX_SIMPLE_DEFINITIONS = 50


@dataclass(frozen=True, slots=True)
class Lowered:
    schema: dict[str, Any]
    unheld: frozenset[str]  # keywords that the grammar does not hold answers to, or not fully
    is_simple: bool  # whether llguidance's work on it is bounded by its size
    is_certain: bool  # and nothing in it could make llguidance refuse it


def lower(root: Schema, *, start: Schema = None, closes: bool = False, is_coarse: bool = False) -> Lowered:
    """`root`, or `start`, which is a schema within it, for llguidance.

    `closes`: objects that name their properties and say nothing of others have no others, where nothing else applies to
    the same object. `is_coarse`: leave out what llguidance may find too much (patterns, rewritten keywords). Raises
    `SchemaError` for what is no schema and for one that no finite value satisfies.
    """
    document = Document(root)
    writer = _Writer(document, closes=closes, is_coarse=is_coarse)
    try:
        whole = writer.whole(root if start is None else start)
    except (AttributeError, KeyError, OverflowError, TypeError) as e:  # deep within what is written by other keywords
        raise SchemaError(f"a keyword of it has a value of another kind than it takes: {e}") from None
    if writer.unheld:
        writer.check_references()
    is_simple = (
        writer.num_nodes <= _MAX_SIMPLE_NODES
        and len(writer.definitions) <= _MAX_SIMPLE_DEFINITIONS
        and not writer.is_costly
        and not (writer.has_patterns and writer.has_merges and writer.patterns_meet())
    )
    is_certain = is_simple and not (writer.has_merges or writer.may_be_empty)
    return Lowered(whole, frozenset(writer.unheld), is_simple, is_certain)


class _Writer:
    def __init__(self, document: Document, *, closes: bool, is_coarse: bool) -> None:
        self.unheld = set[str]()
        self.definitions: dict[str, Schema] = {}
        self.num_nodes = 0
        self.has_patterns = self.has_merges = self.is_costly = False
        self.may_be_empty = False  # some part of it
        self._document = document
        self._draft = document.draft
        self._closes = closes
        self._is_coarse = is_coarse
        self._logic = Logic(document)
        self._names: dict[tuple[int, str, bool], str] = {}
        self._waiting: list[tuple[str, Schema, str, bool]] = []
        self._rewriting = 0
        self._num_rewritten = 0

    def whole(self, root: Schema) -> dict[str, Any]:
        base = self._document.base_within(self._document.root, "") if isinstance(self._document.root, dict) else ""
        first = self._ref_to(root, base, is_alone=True)
        while self._waiting:
            name, schema, base, is_alone = self._waiting.pop()
            self.definitions[name] = self._write(schema, base, is_alone=is_alone)
        check_cycles(self.definitions)
        prune_endless(self.definitions)
        name = first.removeprefix("#/$defs/")
        found = self.definitions[name]
        if found is False:
            raise SchemaError("Unsatisfiable schema: no value satisfies it")
        is_used = any(ref == first for one in self.definitions.values() for ref in refs_in(one))
        if found is True:
            found = {}
        rest = {key: one for key, one in self.definitions.items() if is_used or key != name}
        top = {"$ref": first} if is_used else found
        return {**top, "$defs": rest} if rest else dict(top)

    def _ref(self, reference: str, base: str, *, is_alone: bool) -> dict[str, Any]:
        found, its_base = self._document.find(reference, base)
        for _ in range(100):  # a reference to a reference
            if not isinstance(found, dict) or not isinstance(found.get("$ref"), str):
                break
            if self._document.has_plain_refs and not found.keys() <= {"$ref", *_SILENT}:
                break
            its_base = self._document.base_within(found, its_base)
            found, its_base = self._document.find(found["$ref"], its_base)
        else:
            raise SchemaError(f"$ref {shown(reference)} leads from reference to reference without end")
        return {"$ref": self._ref_to(found, its_base, is_alone=is_alone)}

    def _ref_to(self, schema: Schema, base: str, *, is_alone: bool) -> str:
        key = (id(schema), base, is_alone or not self._closes)
        if key not in self._names:
            self._names[key] = str(len(self._names))
            self._waiting.append((self._names[key], schema, base, is_alone))
        return f"#/$defs/{self._names[key]}"

    def _write(self, schema: Schema, base: str, *, is_alone: bool) -> Schema:
        """One schema. `is_alone`: nothing else applies to the same value."""
        self.num_nodes += 1
        if self._rewriting:
            self._num_rewritten += 1
        if isinstance(schema, bool):
            self.may_be_empty |= not schema
            return schema
        if not isinstance(schema, dict):
            raise SchemaError(f"a schema is an object, true or false, not {shown(schema)}")
        check_kinds(schema)
        base = self._document.base_within(schema, base)
        if "$ref" in schema and not self._document.has_plain_refs:
            return self._ref(_text("$ref", schema), base, is_alone=is_alone)
        if "enum" in schema or ("const" in schema and self._draft >= 6):
            return self._listed(schema, base)
        types = self._types(schema)
        if types == []:
            return False
        is_alone_here = is_alone and schema.keys() <= _ALONE
        out: dict[str, Any] = {}
        both: list[Schema] = []  # what must hold too
        if types is not None:
            out["type"] = types[0] if len(types) == 1 else types
        for keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
            if keyword in schema:
                if keyword != "$ref":
                    self.check_references()
                is_only = is_alone and schema.keys() <= {keyword, *_SILENT}
                found = self._ref(_text(keyword, schema), base, is_alone=is_only)
                if "$ref" in out:
                    both.append(found)
                else:
                    out.update(found)
        if types is None or "number" in types or "integer" in types:
            self._number(schema, types, out, both)
        if types is None or "string" in types:
            self._string(schema, out)
        if types is None or "array" in types:
            self._array(schema, base, out)
        if (types is None or "object" in types) and self._object(schema, base, out, both, is_alone=is_alone_here):
            if types is None:
                both.append({"type": [name for name in TYPES if name not in ("object", "integer")]})
            else:
                types = [name for name in types if name != "object"]
                if not types:
                    return False
                out["type"] = types[0] if len(types) == 1 else types
        self._alternatives(schema, base, out, both, is_alone=is_alone)
        self._rewritten(schema, base, out, both)
        return self._together(out, both)

    def _together(self, out: dict[str, Any], both: list[Schema]) -> Schema:
        both = [one for one in both if one is not True and one != {}]
        if False in both:
            return False
        if not both:
            if len(out) > 1 and ("$ref" in out or "anyOf" in out):
                self.has_merges = True
            return out
        if not out and len(both) == 1:
            return both[0]
        self.has_merges = True
        return {**out, "allOf": both}

    def _listed(self, schema: dict[str, Any], base: str) -> Schema:
        """A schema with `enum` or `const`: those of the values that satisfy all of it."""
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        if not isinstance(values, list):
            raise SchemaError(f"enum is a list, not {shown(values)}")
        if not schema.keys() <= {"enum", "const", *_SILENT} or len(schema.keys() & {"enum", "const"}) > 1:
            self._types(schema)
            rest = {keyword: one for keyword, one in schema.items() if keyword != "enum"}
            values = [one for one in values if self._logic.satisfies(rest, base, one)]
        self.may_be_empty |= not values
        return {"enum": values} if values else False

    def _types(self, schema: dict[str, Any]) -> list[str] | None:
        types = types_in(schema)
        for name in types or ():
            if name not in TYPES:
                raise SchemaError(f"Invalid type: {shown(name)[1:-1]}; a type is one of {', '.join(TYPES)}")
        return types

    def check_references(self) -> None:
        """Raise `SchemaError` where it depends on the way to a reference what it leads to."""
        if len(self._logic.dynamic_anchors) > 1 and self._logic.has_dynamic_references:
            raise SchemaError("$dynamicRef or $recursiveRef among several dynamic anchors is not built: write $ref")

    def _number(self, schema: dict[str, Any], types: list[str] | None, out: dict[str, Any], both: list[Schema]) -> None:
        divisor = schema.get("multipleOf")
        if divisor is not None:
            if isinstance(divisor, bool) or not isinstance(divisor, int | float) or not divisor > 0:
                raise SchemaError(f"multipleOf is a number above 0, not {shown(divisor)}")
            written = Decimal(repr(divisor)).normalize()
            if int("".join(map(str, written.as_tuple().digits))) > _MAX_DIVISOR or abs(written.adjusted()) > 8:
                self.unheld.add("multipleOf")
            else:
                out["multipleOf"] = divisor
                self.may_be_empty = True
        bounds = bounds_of(schema)
        if not bounds:
            return
        is_integer = types is not None and "integer" in types and "number" not in types
        low = [(bound, is_out) for name, bound, is_out in bounds if name == "minimum"]
        high = [(bound, is_out) for name, bound, is_out in bounds if name == "maximum"]
        find = integer_ranges if is_integer else number_ranges
        ranges = find(low, high, self.unheld)
        kind = "integer" if is_integer else "number"
        others = [name for name in TYPES if name not in ("integer", "number") and (types is None or name in types)]
        if ranges == []:
            rest = {"type": others} if others else False
            both.append(rest)
        elif len(ranges) == 1:
            out.update(ranges[0])
        else:
            whole: list[Schema] = [{"type": kind, **one} for one in ranges]
            both.append({"anyOf": [*whole, {"type": others}] if others else whole})

    def _string(self, schema: dict[str, Any], out: dict[str, Any]) -> None:
        least, most = _size("minLength", schema), _size("maxLength", schema)
        if least:
            out["minLength"] = least
        if most is not None:
            out["maxLength"] = most
        self.is_costly |= (least or 0) > 10_000
        self.may_be_empty |= most is not None and (least or 0) > most
        if "pattern" in schema:
            pattern = read_pattern(_text("pattern", schema))
            if not pattern.is_plain:
                self.unheld.add("pattern")
            if self._is_coarse:
                self.unheld.add("pattern")
            elif not pattern.has_boundaries:
                out["pattern"] = pattern.text
                self.has_patterns = self.may_be_empty = True
                self.is_costly |= len(pattern.text) > 500
        elif schema.get("format") in _FORMATS and not self._is_coarse:
            out["format"] = schema["format"]
            self.has_patterns = True
            self.may_be_empty |= bool(least) or most is not None

    def _array(self, schema: dict[str, Any], base: str, out: dict[str, Any]) -> None:
        first, rest = array_parts(schema, self._draft)
        if first:
            out["prefixItems"] = [self._write(one, base, is_alone=True) for one in first]
        items = rest if isinstance(rest, bool) else self._write(rest, base, is_alone=True)
        least, most = _size("minItems", schema), _size("maxItems", schema)
        if "unevaluatedItems" in schema and schema["unevaluatedItems"] is not True:
            if schema.keys().isdisjoint(("items", "additionalItems", "contains", *_IN_PLACE)):
                items = self._write(schema["unevaluatedItems"], base, is_alone=True)
            else:
                self.unheld.add("unevaluatedItems")
        if "contains" in schema and self._draft >= 6:
            needed = schema.get("minContains", 1) if self._draft >= 2019 else 1
            if needed or schema.get("maxContains") is not None:
                self.unheld.add("contains")
                least = max(least or 0, int(needed))
        if schema.get("uniqueItems") is True and not (most is not None and most <= 1):
            self.unheld.add("uniqueItems")
            if not first and isinstance(items, dict) and items.keys() == {"enum"}:
                most = min(len(items["enum"]), len(items["enum"]) if most is None else most)
        if items is not True:
            out["items"] = items
        if least:
            out["minItems"] = least
            self.may_be_empty |= items is False or (most is not None and least > most)
        if most is not None:
            out["maxItems"] = most

    def _object(
        self, schema: dict[str, Any], base: str, out: dict[str, Any], both: list[Schema], *, is_alone: bool
    ) -> bool:
        """Write the keywords of objects. True if no object satisfies them."""
        given = as_map("properties", schema.get("properties", {}))
        properties = {name: self._write(one, base, is_alone=True) for name, one in given.items()}
        required = schema.get("required")
        needed = names_in(required)
        least, most = _size("minProperties", schema) or 0, _size("maxProperties", schema)
        others = schema.get("additionalProperties")
        if others is None and "unevaluatedProperties" in schema:
            if schema.keys().isdisjoint(_IN_PLACE):
                others = schema["unevaluatedProperties"]
            elif schema["unevaluatedProperties"] is not True:
                self.unheld.add("unevaluatedProperties")
        is_described = bool(given) and all(name in given for name in needed) and least <= len(given)
        if others is None and self._closes and is_alone and is_described and schema.keys().isdisjoint(_OF_NAMES):
            others = False
        rest: Schema = True if others is None else others
        if not isinstance(rest, bool):
            rest = self._write(rest, base, is_alone=True)
        self.may_be_empty |= rest is False and not all(name in properties for name in needed)
        patterns, rest = self._patterns(schema, base, rest)
        if "propertyNames" in schema and self._draft >= 6 and schema["propertyNames"] is not True:
            patterns, rest = self._named(schema["propertyNames"], base, properties, patterns, rest)
        if properties:
            out["properties"] = properties
        if patterns:
            out["patternProperties"] = patterns
            self.has_patterns = self.may_be_empty = True
            self.is_costly |= len(patterns) > 3 or not all(map(is_tame, patterns))
        if rest is not True:
            out["additionalProperties"] = rest
        if needed:
            out["required"] = needed
        return self._counted(least, most, properties, needed, patterns, rest, out, both)

    def _patterns(self, schema: dict[str, Any], base: str, rest: Schema) -> tuple[dict[str, Schema], Schema]:
        """`patternProperties`, and what other properties are."""
        given = as_map("patternProperties", schema.get("patternProperties", {}))
        written, is_fuzzy = dict[str, Schema](), self._is_coarse and bool(given)
        for name, one in given.items():
            pattern = read_pattern(name)
            is_fuzzy |= not pattern.is_plain
            written[pattern.text] = self._write(one, base, is_alone=True)
        if is_fuzzy:
            self.unheld.add("patternProperties")
            return {}, True
        if len(written) > 1 and not are_disjoint(list(written)):
            # A name that several of them match must satisfy each: any of them is what can be said of it here.
            schemas = list(written.values())
            if any(one != schemas[0] for one in schemas):
                self.unheld.add("patternProperties")
            whole = schemas[0] if all(one == schemas[0] for one in schemas) else {"anyOf": schemas}
            return {"|".join(f"(?:{text})" for text in written): whole}, rest
        return written, rest

    def _named(
        self, names: Schema, base: str, properties: dict[str, Schema], patterns: dict[str, Schema], rest: Schema
    ) -> tuple[dict[str, Schema], Schema]:
        """What `propertyNames` leaves of the properties."""
        for name in properties:
            if not self._logic.satisfies(names, base, name):
                properties[name] = False
        if rest is False and not patterns:
            return patterns, rest
        found, its_base = self._logic.resolved(names, base)
        if isinstance(found, dict) and not patterns:
            keys = found.keys() - _SILENT - {"format", "type"}
            if "string" not in (types_in(found) or ["string"]):
                return patterns, False
            if not keys:
                return patterns, rest
            if keys <= {"enum", "const"}:
                values = found.get("enum", [found.get("const")])
                for one in values if isinstance(values, list) else ():
                    if isinstance(one, str) and self._logic.satisfies(found, its_base, one):
                        properties.setdefault(one, rest)
                return patterns, False
            if keys == {"pattern"} and not self._is_coarse and (read := read_pattern(found["pattern"])).is_plain:
                return {read.text: rest}, False
            if keys <= {"minLength", "maxLength"} and not self._is_coarse:
                least, most = _size("minLength", found) or 0, _size("maxLength", found)
                if (most or least) <= 200:
                    return {f"^[\\s\\S]{{{least},{'' if most is None else most}}}$": rest}, False
        elif found is False:
            return patterns, False
        self.unheld.add("propertyNames")
        return patterns, rest

    def _counted(
        self, least: int, most: int | None, properties: dict[str, Schema], needed: list[str],
        patterns: dict[str, Schema], rest: Schema, out: dict[str, Any], both: list[Schema],
    ) -> bool:  # fmt: skip
        """`minProperties` and `maxProperties`, which llguidance counts only where all named properties are required."""
        possible = [name for name, one in properties.items() if one is not False]
        is_closed = rest is False and not patterns
        if is_closed and least > len(possible):
            return True
        if most is not None and most < len(needed):
            return True
        if is_closed and most is not None and most >= len(possible):
            most = None
        if least <= len(needed):
            least = 0
        if not least and most is None:
            return False
        if self._is_coarse:
            self.unheld |= {"minProperties"} if least else set()
            self.unheld |= {"maxProperties"} if most is not None else set()
            return False
        optional = [name for name in possible if name not in needed]
        if not optional:
            if least:
                out["minProperties"] = least
                if least > len(needed) + 1:  # a key that comes twice counts once, and the grammar does not see that
                    self.unheld.add("minProperties")
            if most is not None:
                out["maxProperties"] = most
            return False
        if is_closed and least == len(needed) + 1 and len(optional) <= _MAX_LISTED:
            both.append({"anyOf": [{"required": [name]} for name in optional]})
            least = 0
        if is_closed and most is not None and most == len(needed):
            for name in optional:
                properties[name] = False
            most = None
        if is_closed and most == len(needed) + 1 and len(optional) <= _MAX_LISTED:
            both.append({"anyOf": [
                {"properties": {name: False for name in optional if name != one}} for one in optional
            ]})  # fmt: skip
            most = None
        if least:
            self.unheld.add("minProperties")
        if most is not None:
            self.unheld.add("maxProperties")
        return False

    def _alternatives(
        self, schema: dict[str, Any], base: str, out: dict[str, Any], both: list[Schema], *, is_alone: bool
    ) -> None:
        is_alone = is_alone and len(schema.keys() - _SILENT - {"type"}) == 1
        if "allOf" in schema:
            parts = as_list("allOf", schema["allOf"])
            both += [self._write(one, base, is_alone=is_alone and len(parts) == 1) for one in parts]
        for keyword in ("anyOf", "oneOf"):
            if keyword not in schema:
                continue
            parts = as_list(keyword, schema[keyword])
            rewritten = None
            if keyword == "oneOf" and not self._logic.are_disjoint(parts, base, types_in(schema)):
                rewritten = self._exclusive(parts, base)
                if rewritten is None:
                    self.unheld.add("oneOf")
            if rewritten is not None:
                written = [self._again(one, base) for one in rewritten]
            else:
                written = [self._write(one, base, is_alone=is_alone) for one in parts]
            if any(one is True or one == {} for one in written):
                continue
            written = [one for one in written if one is not False]
            if not written:
                both.append(False)
            elif len(written) == 1:
                both.append(written[0])
            elif "anyOf" in out:
                both.append({"anyOf": written})
            else:
                out["anyOf"] = written

    def _exclusive(self, parts: list[Schema], base: str) -> list[Schema] | None:
        """Each of a few alternatives without the others."""
        if self._is_coarse or len(parts) > 3 or self._num_rewritten > _MAX_REWRITTEN:
            return None
        opposites = [self._logic.opposite(one, base) for one in parts]
        if any(one is None for one in opposites):
            return None
        return [
            {"allOf": [one, *(other for j, other in enumerate(opposites) if j != i)]} for i, one in enumerate(parts)
        ]

    def _rewritten(self, schema: dict[str, Any], base: str, out: dict[str, Any], both: list[Schema]) -> None:
        """Keywords that are written with others: `not`, `if`, and what depends on a property."""
        for keyword, alternatives in self._rewritings(schema, base):
            if alternatives is None or self._is_coarse or self._num_rewritten > _MAX_REWRITTEN:
                self.unheld.add(keyword)
                continue
            num = math.prod(len(one["anyOf"]) for one in [out, *both] if isinstance(one, dict) and "anyOf" in one)
            if num * len(alternatives) > _MAX_BRANCHES:
                self.unheld.add(keyword)
                continue
            written = [one for one in (self._again(one, base) for one in alternatives) if one is not False]
            if not written:
                both.append(False)
            elif not any(one is True or one == {} for one in written):
                both.append({"anyOf": written} if len(written) > 1 else written[0])

    def _again(self, schema: Schema, base: str) -> Schema:
        self._rewriting += 1
        try:
            return self._write(schema, base, is_alone=False)
        finally:
            self._rewriting -= 1

    def _rewritings(self, schema: dict[str, Any], base: str) -> Iterator[tuple[str, list[Schema] | None]]:
        """Keyword by keyword, schemas of which one must hold, or None if there are no such schemas."""
        if "not" in schema:
            opposite = self._logic.opposite(schema["not"], base, within=schema)
            yield "not", None if opposite is None else [opposite]
        if "if" in schema and self._draft >= 7 and ("then" in schema or "else" in schema):
            opposite = self._logic.opposite(schema["if"], base, within=schema)
            then, otherwise = schema.get("then", True), schema.get("else", True)
            yield "if", None if opposite is None else [
                {"allOf": [schema["if"], then]}, {"allOf": [opposite, otherwise]},
            ]  # fmt: skip
        for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
            if (keyword == "dependencies") > self._document.has_dependencies:
                continue
            for name, needed in as_map(keyword, schema.get(keyword, {})).items():
                without = {"properties": {name: False}}
                if isinstance(needed, list | str):
                    names = [needed] if isinstance(needed, str) else needed
                    others = [one for one in names if one not in (schema.get("required") or ())]
                    if others:
                        yield keyword, [without, {"required": [name, *others]}]
                elif needed is not True:
                    yield keyword, [without, {"allOf": [{"required": [name]}, needed]}]

    def patterns_meet(self) -> bool:
        """Whether two regular expressions may be applied to one value, whose product llguidance looks at."""
        return any(patterns_meet(one)[1] for one in self.definitions.values())


# Keywords that mean nothing to the values that a schema takes.
_SILENT = frozenset(
    ("$anchor", "$comment", "$defs", "$dynamicAnchor", "$id", "$schema", "contentEncoding", "contentMediaType",
     "contentSchema", "default", "definitions", "deprecated", "description", "discriminator", "example", "examples",
     "id", "nullable", "readOnly", "title", "writeOnly", "$recursiveAnchor", "$vocabulary")
)  # fmt: skip
_OF_NAMES = ("patternProperties", "propertyNames")
_IN_PLACE = ("$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "if", "not", "dependentSchemas",
             "dependencies", "dependentRequired")  # fmt: skip
# Keywords of an object that is described in one place.
_ALONE = _SILENT | {
    "type", "properties", "required", "additionalProperties", "minProperties", "maxProperties", "propertyNames",
    "unevaluatedProperties", "patternProperties",
}  # fmt: skip


def _text(keyword: str, schema: dict[str, Any]) -> str:
    value = schema[keyword]
    if not isinstance(value, str):
        raise SchemaError(f"{keyword} is a text, not {shown(value)}")
    return value


def _size(keyword: str, schema: dict[str, Any]) -> int | None:
    value = schema.get(keyword)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 0:
        raise SchemaError(f"{keyword} is a whole number from 0 on, not {shown(value)}")
    return int(value)
