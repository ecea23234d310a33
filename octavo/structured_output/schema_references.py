"""References among the definitions of a lowered schema: finds cycles without a value in between, and definitions that
only endless values satisfy. `schema_lowering` calls it when all definitions are written."""

import math
from collections.abc import Iterator

from octavo.structured_output.schema_keywords import TYPES, Schema, SchemaError, children
from octavo.structured_output.schema_validation import is_type, types_in

_SIZES = (("string", "minLength", "maxLength"), ("array", "minItems", "maxItems"))
_MAX_LOOKS = 20_000  # most looks at definitions to find those that only endless values satisfy


def refs_in(schema: Schema, *, in_place: bool = False) -> Iterator[str]:
    """Yield the references in a lowered schema; with `in_place` those that apply to the schema's own value."""
    stack = [schema]
    while stack:
        one = stack.pop()
        if not isinstance(one, dict):
            continue
        if "$ref" in one:
            yield one["$ref"]
        for keyword, _, child in children(one):
            if not in_place or keyword in ("allOf", "anyOf"):
                stack.append(child)


def check_cycles(definitions: dict[str, Schema]) -> None:
    """Raise `SchemaError` if a schema applies itself to the same value without end."""
    after = {name: {ref.removeprefix("#/$defs/") for ref in refs_in(one, in_place=True)}
             for name, one in definitions.items()}  # fmt: skip
    done, active = set[str](), set[str]()
    for first in after:
        stack: list[tuple[str, Iterator[str]]] = [(first, iter(after[first]))] if first not in done else []
        active = {first}
        while stack:
            name, rest = stack[-1]
            following = next(rest, None)
            if following is None:
                stack.pop()
                active.discard(name)
                done.add(name)
            elif following in active:
                raise SchemaError("$ref leads back to where it stands, with no property or item between")
            elif following not in done:
                active.add(following)
                stack.append((following, iter(after[following])))


def prune_empty(definitions: dict[str, Schema]) -> None:
    """Replace by `false` each definition that no value satisfies: no type is left, or every value would have to contain
    another without end. llguidance refuses a schema with a reference to such a definition, even if no value needs
    it."""
    ending, types = set[str](), dict[str, frozenset[str]]()
    empty = {name for name in definitions if not _types_of({"$ref": f"#/$defs/{name}"}, definitions, types)}
    using: dict[str, list[str]] = {name: [] for name in definitions}
    for name, one in definitions.items():
        for ref in set(refs_in(one)):
            using[ref.removeprefix("#/$defs/")].append(name)
    dirty, num_looks = list(definitions), 0
    while dirty:
        name = dirty.pop()
        num_looks += 1
        if name not in ending | empty and (num_looks > _MAX_LOOKS or _can_end(definitions[name], ending)):
            ending.add(name)
            dirty += using[name]
    if len(ending) == len(definitions):
        return
    for name, one in definitions.items():
        definitions[name] = _without_endless(one, ending) if name in ending else False


def _types_of(schema: Schema, definitions: dict[str, Schema], known: dict[str, frozenset[str]]) -> frozenset[str]:
    """Return the types that values of a lowered schema may have, according to types, enumerations and sizes. `known`
    has the types of definitions, which have no cycles (`check_cycles`)."""
    if not isinstance(schema, dict):
        return frozenset(TYPES if schema else ())
    found = set(types_in(schema) or TYPES)
    if "number" in found:
        found.add("integer")
    for kind, least, most in _SIZES:
        if schema.get(least, 0) > schema.get(most, math.inf):
            found.discard(kind)
    if "enum" in schema:
        found &= {name for name in TYPES if any(is_type(value, name) for value in schema["enum"])}
    if "$ref" in schema:
        name = schema["$ref"].removeprefix("#/$defs/")
        if name not in known:
            known[name] = _types_of(definitions[name], definitions, known)
        found &= known[name]
    for one in schema.get("allOf", ()):
        found &= _types_of(one, definitions, known)
    if "anyOf" in schema:
        found &= frozenset().union(*(_types_of(one, definitions, known) for one in schema["anyOf"]))
    return frozenset(found)


def _can_end(schema: Schema, ending: set[str]) -> bool:
    """Return whether a finite value may satisfy a lowered schema if only the definitions in `ending` have finite
    values."""
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema and schema["$ref"].removeprefix("#/$defs/") not in ending:
        return False
    if "enum" in schema:
        return True
    if "anyOf" in schema and not any(_can_end(one, ending) for one in schema["anyOf"]):
        return False
    if not all(_can_end(one, ending) for one in schema.get("allOf", ())):
        return False
    types = types_in(schema)
    if types is None or set(types) - {"array", "object"}:
        return True
    if "array" in types:
        num = schema.get("minItems", 0)
        first = schema.get("prefixItems", [])
        if all(_can_end(one, ending) for one in first[:num]) and (
            num <= len(first) or _can_end(schema.get("items", True), ending)
        ):
            return True
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    return "object" in types and all(
        _can_end(properties.get(name, others), ending)
        or (name not in properties and bool(schema.get("patternProperties")))
        for name in schema.get("required", ())
    )


def _without_endless(schema: Schema, ending: set[str]) -> Schema:
    if not isinstance(schema, dict):
        return schema
    if not _can_end(schema, ending):
        return False
    out = dict(schema)
    for keyword, key, one in children(schema):
        if key is None:
            out[keyword] = _without_endless(one, ending)
        else:
            if out[keyword] is schema[keyword]:
                out[keyword] = out[keyword].copy()
            out[keyword][key] = _without_endless(one, ending)
    if "anyOf" in out:
        out["anyOf"] = [one for one in out["anyOf"] if one is not False]
    return out
