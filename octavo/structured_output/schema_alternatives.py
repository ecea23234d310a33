"""Writes schemas that apply to the same value: `allOf`, `anyOf`, `oneOf`, and keywords that are rewritten as these
(`not`, `if`, and schemas that depend on a property)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from octavo.structured_output.schema_keywords import SILENT, Base, Schema, as_list, as_map
from octavo.structured_output.schema_validation import types_in
from octavo.structured_output.schema_writer import SchemaWriter

_MAX_BRANCHES = 32  # most combinations of alternatives for one value
_MAX_REWRITTEN = 2_000  # most schemas in parts that are written more than once


class AlternativesWriter(SchemaWriter):
    """Writes the keywords whose schemas apply to the same value."""

    def _alternatives(
        self, schema: dict[str, Any], base: Base, out: dict[str, Any], both: list[Schema], *, is_alone: bool
    ) -> None:
        is_alone = is_alone and len(schema.keys() - SILENT - {"type"}) == 1
        if "allOf" in schema:
            parts = as_list("allOf", schema["allOf"])
            both += [self.write(one, base, is_alone=is_alone and len(parts) == 1) for one in parts]
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
                written = [self.write(one, base, is_alone=is_alone) for one in parts]
            if any(one is True or one == {} for one in written):
                continue
            written = [one for one in written if one is not False]
            if not written:
                both.append(False)
            elif len(written) == 1:
                both.append(written[0])
            else:
                self._origins[id(written)] = written, keyword
                if "anyOf" in out:
                    both.append({"anyOf": written})
                else:
                    out["anyOf"] = written

    def _exclusive(self, parts: list[Schema], base: Base) -> list[Schema] | None:
        """Return each of a few alternatives without the values of the others, or None if this cannot be written."""
        if self._is_coarse or len(parts) > 3 or self._num_rewritten > _MAX_REWRITTEN:
            return None
        opposites = [self._logic.opposite(one, base) for one in parts]
        if any(one is None for one in opposites):
            return None
        return [
            {"allOf": [one, *(other for j, other in enumerate(opposites) if j != i)]} for i, one in enumerate(parts)
        ]

    def _rewritten(self, schema: dict[str, Any], base: Base, out: dict[str, Any], both: list[Schema]) -> None:
        """Write keywords as other keywords: `not`, `if`, and schemas that depend on a property."""
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
                self._origins[id(written)] = written, keyword

    def _again(self, schema: Schema, base: Base) -> Schema:
        self._rewriting += 1
        try:
            return self.write(schema, base, is_alone=False)
        finally:
            self._rewriting -= 1

    def _rewritings(self, schema: dict[str, Any], base: Base) -> Iterator[tuple[str, list[Schema] | None]]:
        """Yield each keyword with schemas of which one must hold, or None if it cannot be rewritten."""
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
