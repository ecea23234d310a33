"""Objects in schemas for llguidance: properties, their names, and how many there are."""

from __future__ import annotations

from typing import Any

from octavo.structured_output.pattern_cost import are_disjoint, is_tame
from octavo.structured_output.schema_keywords import IN_PLACE, SILENT, Base, Schema, as_map, size_of
from octavo.structured_output.schema_patterns import read_pattern
from octavo.structured_output.schema_validation import names_in, types_in
from octavo.structured_output.schema_writer import SchemaWriter

_MAX_LISTED = 16  # most alternatives that one keyword is written as
_OF_NAMES = ("patternProperties", "propertyNames")


class ObjectWriter(SchemaWriter):
    """Writes the keywords of objects."""

    def _object(
        self, schema: dict[str, Any], base: Base, out: dict[str, Any], both: list[Schema], *, is_alone: bool
    ) -> bool:
        """Write the keywords of objects. Returns True if no object satisfies them."""
        given = as_map("properties", schema.get("properties", {}))
        properties = {name: self.write(one, base, is_alone=True) for name, one in given.items()}
        required = schema.get("required")
        needed = names_in(required)
        least, most = size_of("minProperties", schema) or 0, size_of("maxProperties", schema)
        others = schema.get("additionalProperties")
        if others is None and "unevaluatedProperties" in schema:
            if schema.keys().isdisjoint(IN_PLACE):
                others = schema["unevaluatedProperties"]
            elif schema["unevaluatedProperties"] is not True:
                self.unheld.add("unevaluatedProperties")
        is_described = bool(given) and all(name in given for name in needed) and least <= len(given)
        if others is None and self._closes and is_alone and is_described and schema.keys().isdisjoint(_OF_NAMES):
            others = False
        rest: Schema = True if others is None else others
        if not isinstance(rest, bool):
            rest = self.write(rest, base, is_alone=True)
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
        self.has_open_objects |= rest is not False and bool(properties or patterns or needed)
        return self._counted(least, most, properties, needed, patterns, rest, out, both)

    def _patterns(self, schema: dict[str, Any], base: Base, rest: Schema) -> tuple[dict[str, Schema], Schema]:
        """Return `patternProperties` for llguidance, and the schema of other properties."""
        given = as_map("patternProperties", schema.get("patternProperties", {}))
        written, is_fuzzy = dict[str, Schema](), self._is_coarse and bool(given)
        for name, one in given.items():
            pattern = read_pattern(name)
            is_fuzzy |= not pattern.is_plain or not self._follows(pattern)
            written[pattern.grammar] = self.write(one, base, is_alone=True)
        if is_fuzzy:
            self.unheld.add("patternProperties")
            return {}, True
        if len(written) > 1 and not are_disjoint(list(written)):
            # A property whose name matches several patterns must satisfy all their schemas; the grammar only enforces
            # one of them.
            schemas = list(written.values())
            if any(one != schemas[0] for one in schemas):
                self.unheld.add("patternProperties")
            whole = schemas[0] if all(one == schemas[0] for one in schemas) else {"anyOf": schemas}
            return {"|".join(f"(?:{text})" for text in written): whole}, rest
        return written, rest

    def _named(
        self, names: Schema, base: Base, properties: dict[str, Schema], patterns: dict[str, Schema], rest: Schema
    ) -> tuple[dict[str, Schema], Schema]:
        """Return patterns and the schema of other properties as `propertyNames` limits them; changes `properties` in
        place."""
        for name in properties:
            if not self._logic.satisfies(names, base, name):
                properties[name] = False
        if rest is False and not patterns:
            return patterns, rest
        found, its_base = self._logic.resolved(names, base)
        # A pattern also applies to named properties, unlike the schema of other properties.
        takes_pattern = not self._is_coarse and (rest is True or all(one is False for one in properties.values()))
        if isinstance(found, dict) and not patterns:
            keys = found.keys() - SILENT - {"format", "type"}
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
            read = read_pattern(found["pattern"]) if keys == {"pattern"} and takes_pattern else None
            if read is not None and read.is_plain and self._follows(read):
                return {read.grammar: rest}, False
            if keys <= {"minLength", "maxLength"} and takes_pattern:
                least, most = size_of("minLength", found) or 0, size_of("maxLength", found)
                if (most or least) <= 200:
                    return {f"^[\\s\\S]{{{least},{'' if most is None else most}}}$": rest}, False
        elif found is False:
            return {}, False
        self.unheld.add("propertyNames")
        return patterns, rest

    def _either(self, keyword: str, ways: list[Schema], both: list[Schema]) -> None:
        self._origins[id(ways)] = ways, keyword
        both.append({"anyOf": ways})

    def _counted(
        self, least: int, most: int | None, properties: dict[str, Schema], needed: list[str],
        patterns: dict[str, Schema], rest: Schema, out: dict[str, Any], both: list[Schema],
    ) -> bool:  # fmt: skip
        """Write `minProperties` and `maxProperties`, which llguidance counts only if all named properties are required.
        Returns True if no object satisfies them."""
        possible = [name for name, one in properties.items() if one is not False]
        is_closed = rest is False and not patterns
        if is_closed and least > len(possible):
            return True
        if most is not None and most < max(least, len(needed)):
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
                if least > len(needed) + 1:  # a repeated key counts once, but the grammar counts it twice
                    self.unheld.add("minProperties")
            if most is not None:
                out["maxProperties"] = most
            return False
        if is_closed and least == len(needed) + 1 and len(optional) <= _MAX_LISTED:
            self._either("minProperties", [{"required": [name]} for name in optional], both)
            least = 0
        if is_closed and most is not None and most == len(needed):
            for name in optional:
                properties[name] = False
            most = None
        if is_closed and most == len(needed) + 1 and len(optional) <= _MAX_LISTED:
            others = [{"properties": {name: False for name in optional if name != one}} for one in optional]
            self._either("maxProperties", others, both)
            most = None
        if least:
            self.unheld.add("minProperties")
        if most is not None:
            self.unheld.add("maxProperties")
        return False
