"""Writes JSON schemas in the part of the vocabulary that llguidance follows. `lower` returns a schema that llguidance
takes and that admits every valid value. If it also admits other values (`not`, `uniqueItems`, overlapping alternatives
of `oneOf`, ...), `Lowered.unheld` has the keywords, and `schema_validation` checks the finished answer. The work is
linear in the schema's size: each definition is written once, and parts that are written more than once (`if`, `not`)
have a budget.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from octavo.structured_output.pattern_cost import is_tame, length_is_costly, patterns_meet
from octavo.structured_output.schema_alternatives import AlternativesWriter
from octavo.structured_output.schema_formats import CHECKED_FORMATS, format_keywords
from octavo.structured_output.schema_keywords import (
    IN_PLACE,
    SILENT,
    TYPES,
    Base,
    Document,
    Schema,
    SchemaError,
    check_kinds,
    shown,
    size_of,
    text_of,
)
from octavo.structured_output.schema_numbers import divisors, integer_ranges, is_exact, number_ranges
from octavo.structured_output.schema_objects import ObjectWriter
from octavo.structured_output.schema_patterns import Pattern, read_pattern
from octavo.structured_output.schema_references import check_cycles, prune_empty, refs_in
from octavo.structured_output.schema_validation import array_parts, bounds_of, is_type, types_in

_MAX_LENGTH = 1 << 31  # longer than any answer
_NO_FORMAT: Mapping[str, str] = {}
_MAX_TRIED = 40  # most trials of text schemas, each of which takes llguidance about a millisecond
# Schemas within these limits take llguidance milliseconds; only larger ones are tried in another process.
_MAX_SIMPLE_NODES = 400
_MAX_SIMPLE_DEFINITIONS = 50
_MAX_SIMPLE_ALTERNATIVES, _MAX_ALTERNATIVES = 64, 256  # product of the numbers of alternatives for one value


@dataclass(frozen=True, slots=True)
class Lowered:
    schema: dict[str, Any]
    unheld: frozenset[str]  # keywords that the grammar does not enforce, or not fully
    has_open_objects: bool  # some object has named and other properties: a name written with escapes passes for another
    is_simple: bool  # llguidance's work on it is bounded by its size
    is_certain: bool  # and llguidance will not refuse it


def lower(
    root: Schema, *, start: Schema = None, closes: bool = False, is_picky: bool = False, is_coarse: bool = False,
    merges_references: bool = True, empty: Collection[str] = (),
) -> Lowered:  # fmt: skip
    """Return `root`, or `start`, a schema within it, for llguidance.

    `closes`: an object that names properties and says nothing about others has no others, unless another schema applies
    to it too. `is_picky`: leave out patterns that llguidance refuses by themselves. `is_coarse`: leave out parts that
    may be too much for llguidance (patterns, rewritten keywords). Without `merges_references`, a reference beside other
    keywords is left out; if these say at most a type, they are left out instead: llguidance cannot merge references
    that lead back to themselves. `empty`: names of definitions in the result that no value satisfies. Raises
    `SchemaError` for an invalid schema, and for one that no finite value satisfies.
    """
    document = Document(root)
    writer = _Writer(document, closes, is_picky, is_coarse, merges_references)
    try:
        whole = writer.whole(root if start is None else start, empty)
    except (AttributeError, KeyError, OverflowError, TypeError) as e:  # raised deep within a keyword
        raise SchemaError(f"a keyword has a value of a wrong type: {e}") from None
    is_simple = (
        writer.num_nodes <= _MAX_SIMPLE_NODES
        and len(writer.definitions) <= _MAX_SIMPLE_DEFINITIONS
        and not writer.is_costly
        and not (writer.has_patterns and writer.has_merges and writer.patterns_meet())
    )
    is_certain = is_simple and not (writer.has_merges or writer.may_be_empty)
    return Lowered(whole, frozenset(writer.unheld), writer.has_open_objects, is_simple, is_certain)


@lru_cache(maxsize=1024)
def _some_text_has(keywords: tuple[tuple[str, Any], ...], form: tuple[tuple[str, str], ...]) -> bool:
    """Return whether llguidance follows a schema for texts, and some text satisfies it."""
    from llguidance import LLMatcher

    schema = {"type": "string", "allOf": [dict(keywords), dict(form)]}
    return not LLMatcher.validate_grammar(json.dumps({"grammars": [{"json_schema": schema}]}))


class _Writer(ObjectWriter, AlternativesWriter):
    def whole(self, root: Schema, empty: Collection[str]) -> dict[str, Any]:
        base = (
            self._document.base_within(self._document.root, Base()) if isinstance(self._document.root, dict) else Base()
        )
        first = self._ref_to(root, base, is_alone=True)
        while self._waiting:
            name, schema, base, is_alone = self._waiting.pop()
            self.definitions[name] = self.write(schema, base, is_alone=is_alone)
        self.definitions |= dict.fromkeys(empty, False)
        check_cycles(self.definitions)
        prune_empty(self.definitions)
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

    def _ref(self, reference: str, base: Base, keyword: str = "$ref", *, is_alone: bool) -> dict[str, Any]:
        found, its_base = self._document.find(reference, base, keyword)
        for _ in range(100):  # follow references to references
            if not isinstance(found, dict) or not isinstance(found.get("$ref"), str):
                break
            if self._document.has_plain_refs and not found.keys() <= {"$ref", *SILENT}:
                break
            its_base = self._document.base_within(found, its_base)
            found, its_base = self._document.find(found["$ref"], its_base)
        else:
            raise SchemaError(f"$ref {shown(reference)} leads from reference to reference without end")
        return {"$ref": self._ref_to(found, its_base, is_alone=is_alone)}

    def _ref_to(self, schema: Schema, base: Base, *, is_alone: bool) -> str:
        key = (id(schema), base, is_alone or not self._closes)
        if key not in self._names:
            self._names[key] = str(len(self._names))
            self._waiting.append((self._names[key], schema, base, is_alone))
        return f"#/$defs/{self._names[key]}"

    def write(self, schema: Schema, base: Base, *, is_alone: bool) -> Schema:
        """Return one schema for llguidance. `is_alone`: no other schema applies to the same value."""
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
            return self._ref(text_of("$ref", schema), base, is_alone=is_alone)
        if "enum" in schema or ("const" in schema and self._draft >= 6):
            return self._listed(schema, base)
        types = self._types(schema)
        if types == []:
            return False
        is_alone_here = is_alone and schema.keys() <= _ALONE
        out: dict[str, Any] = {}
        both: list[Schema] = []  # schemas that must hold too
        if types is not None:
            out["type"] = types[0] if len(types) == 1 else types
        for keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
            if keyword in schema:
                is_only = is_alone and schema.keys() <= {keyword, *SILENT}
                found = self._ref(text_of(keyword, schema), base, keyword, is_alone=is_only)
                if "$ref" in out:
                    both.append(found)
                else:
                    out.update(found)
        if types is None or "number" in types or "integer" in types:
            self._number(schema, types, out, both)
        if types is None or "string" in types:
            self._string(schema, out, both)
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
        if not self._merges_references:
            own = {key: one for key, one in out.items() if key not in ("$ref", "anyOf")}
            apart = [{key: out[key]} for key in ("$ref", "anyOf") if key in out]
            parts = [one for one in (own, *apart, *both) if one]
            # llguidance also merges the parts of objects and arrays.
            plain = [one for one in parts if not any(refs_in(one, in_place=not self._is_coarse))]
            if len(plain) < len(parts) > 1:
                self.unheld.add("$ref")
                says_more = any(one.keys() - {"type"} for one in plain)
                out, both = {}, plain if says_more else [next(one for one in parts if one not in plain)]
        both = [one for one in self._bounded(out, both) if one != {}]
        if not both:
            if len(out) > 1 and ("$ref" in out or "anyOf" in out):
                self.has_merges = True
            return out
        if not out and len(both) == 1:
            return both[0]
        self.has_merges = True
        return {**out, "allOf": both}

    def _bounded(self, out: dict[str, Any], both: list[Schema]) -> list[Schema]:
        """Return `both` with only as many alternatives as llguidance has room for, because it multiplies them by each
        other."""
        num, kept = _num_alternatives(out), list[Schema]()
        for one in both:
            more = _num_alternatives(one)
            if num > 1 and more > 1 and num * more > _MAX_ALTERNATIVES:
                kept.append(self._without_alternatives(one))
                continue
            num *= more
            kept.append(one)
        self.is_costly |= len(kept) > 1 and num > _MAX_SIMPLE_ALTERNATIVES
        return kept

    def _without_alternatives(self, schema: Schema) -> Schema:
        if not isinstance(schema, dict):
            return schema
        out = dict(schema)
        if "anyOf" in out:
            self.unheld.add(self._origins.get(id(out["anyOf"]), (None, "anyOf"))[1])
            del out["anyOf"]
        if "allOf" in out:
            out["allOf"] = [self._without_alternatives(one) for one in out["allOf"]]
        return out

    def _listed(self, schema: dict[str, Any], base: Base) -> Schema:
        """Return a schema for `enum` or `const`: the values that satisfy all other keywords too."""
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        if not isinstance(values, list):
            raise SchemaError(f"enum is a list, not {shown(values)}")
        if not schema.keys() <= {"enum", "const", *SILENT} or len(schema.keys() & {"enum", "const"}) > 1:
            self._types(schema)
            rest = {keyword: one for keyword, one in schema.items() if keyword != "enum"}
            values = [one for one in values if self._logic.satisfies(rest, base, one)]
        self.may_be_empty |= not values
        if not values:
            return False
        if not (inexact := [one for one in values if not is_exact(one)]):
            return {"enum": values}
        self.unheld.add("enum" if "enum" in schema else "const")
        types = list({next(name for name in TYPES if is_type(one, name)): None for one in inexact})
        listed = [one for one in values if is_exact(one)]
        return {"anyOf": [{"enum": listed}, {"type": types}]} if listed else {"type": types}

    def _types(self, schema: dict[str, Any]) -> list[str] | None:
        types = types_in(schema)
        for name in types or ():
            if name not in TYPES:
                raise SchemaError(f"Invalid type: {shown(name)[1:-1]}; a type is one of {', '.join(TYPES)}")
        return types

    def _number(self, schema: dict[str, Any], types: list[str] | None, out: dict[str, Any], both: list[Schema]) -> None:
        divisor, is_integer = schema.get("multipleOf"), _are_integers(types)
        if divisor is not None:
            if isinstance(divisor, bool) or not isinstance(divisor, int | float) or not 0 < divisor < math.inf:
                raise SchemaError(f"multipleOf is a number above 0, not {shown(divisor)}")
            if found := divisors(divisor):
                ways = [{"multipleOf": one} for one in (found[:1] if is_integer else found)]
                self._one_of_numbers(ways, types, "multipleOf", out, both)
                self.may_be_empty = True
            else:
                self.unheld.add("multipleOf")
        bounds = bounds_of(schema)
        if not bounds:
            return
        low = [(bound, is_out) for name, bound, is_out in bounds if name == "minimum"]
        high = [(bound, is_out) for name, bound, is_out in bounds if name == "maximum"]
        find = integer_ranges if is_integer else number_ranges
        self._one_of_numbers(find(low, high, self.unheld), types, "minimum" if low else "maximum", out, both)

    def _one_of_numbers(
        self, ways: list[dict[str, Any]], types: list[str] | None, keyword: str, out: dict[str, Any], both: list[Schema]
    ) -> None:
        """Write `keyword` as `ways`, of which numbers must satisfy one."""
        if len(ways) == 1:
            out.update(ways[0])
            return
        others = [name for name in TYPES if name not in ("integer", "number") and (types is None or name in types)]
        kind = "integer" if _are_integers(types) else "number"
        whole: list[Schema] = [{"type": kind, **one} for one in ways]
        whole += [{"type": others}] if others else []
        self._origins[id(whole)] = whole, keyword
        both.append({"anyOf": whole} if len(whole) > 1 else whole[0] if whole else False)

    def _string(self, schema: dict[str, Any], out: dict[str, Any], both: list[Schema]) -> None:
        least, most = size_of("minLength", schema), size_of("maxLength", schema)
        if most is not None and most >= _MAX_LENGTH:
            most = None
        if least:
            out["minLength"] = least
        if most is not None:
            out["maxLength"] = most
        self.is_costly |= (least or 0) > 10_000
        self.may_be_empty |= most is not None and (least or 0) > most
        if "pattern" in schema:
            pattern = read_pattern(text_of("pattern", schema))
            is_left_out = self._is_coarse or not self._follows(pattern)
            if is_left_out or not pattern.is_plain:
                self.unheld.add("pattern")
            if not is_left_out and not pattern.has_boundaries:
                out["pattern"] = pattern.grammar
                if most is not None and length_is_costly(pattern.grammar, most):
                    self.unheld.add("maxLength")
                    del out["maxLength"]
                self.has_patterns = self.may_be_empty = True
                self.is_costly |= len(pattern.grammar) > 500
        if schema.get("format") in CHECKED_FORMATS:
            self.unheld.add("format")
        if (said := format_keywords(schema.get("format"))) is not None and not self._is_coarse:
            beside = {name: out[name] for name in ("pattern", "minLength", "maxLength") if name in out}
            # The format is left out if no text has it and satisfies the other keywords: by itself it forbids nothing.
            if not beside or self._some_text_has(said, **beside):
                if said.keys() & beside:
                    both.append(said)
                else:
                    out.update(said)
                self.has_patterns = True
                self.has_merges |= "pattern" in beside

    def _follows(self, pattern: Pattern) -> bool:
        """Return whether to give an expression to llguidance: if `is_picky`, only if it follows it. Raises `ValueError`
        for an expression that the final check cannot read either."""
        if not self._is_picky or self._some_text_has(pattern=pattern.grammar):
            return True
        pattern.check()
        return False

    def _some_text_has(self, form: Mapping[str, str] = _NO_FORMAT, **keywords: Any) -> bool:
        """Return whether some text satisfies keywords and those of a format; also False if finding out takes too
        long."""
        found = tuple(keywords.items()), tuple(form.items())
        self._tried.add(found)
        return len(self._tried) <= _MAX_TRIED and is_tame(keywords.get("pattern", "")) and _some_text_has(*found)

    def _array(self, schema: dict[str, Any], base: Base, out: dict[str, Any]) -> None:
        first, rest = array_parts(schema, self._draft)
        if first:
            out["prefixItems"] = [self.write(one, base, is_alone=True) for one in first]
        items = rest if isinstance(rest, bool) else self.write(rest, base, is_alone=True)
        least, most = size_of("minItems", schema), size_of("maxItems", schema)
        if "unevaluatedItems" in schema and schema["unevaluatedItems"] is not True:
            if schema.keys().isdisjoint(("items", "additionalItems", "contains", *IN_PLACE)):
                items = self.write(schema["unevaluatedItems"], base, is_alone=True)
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

    def patterns_meet(self) -> bool:
        """Return whether two regular expressions may apply to one value, so that llguidance must build their
        product."""
        return any(patterns_meet(one)[1] for one in self.definitions.values())


def _num_alternatives(schema: Schema) -> int:
    if not isinstance(schema, dict):
        return 1
    return len(schema.get("anyOf", "1")) * math.prod(map(_num_alternatives, schema.get("allOf", ())))


def _are_integers(types: list[str] | None) -> bool:
    return types is not None and "integer" in types and "number" not in types


# Keywords of an object that only one schema describes.
_ALONE = SILENT | {
    "type", "properties", "required", "additionalProperties", "minProperties", "maxProperties", "propertyNames",
    "unevaluatedProperties", "patternProperties",
}  # fmt: skip
