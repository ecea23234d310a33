"""The vocabulary of JSON Schema: which keywords hold schemas, what `$ref` points at, and in which draft a schema is
written.

`children` is the only place that knows where schemas are within a schema; all code that walks a schema calls it. It
never takes names of properties or definitions for keywords.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

# A schema, true or false.
Schema = Any
ONE = frozenset(
    ("additionalItems", "additionalProperties", "contains", "else", "if", "not", "propertyNames", "then",
     "unevaluatedItems", "unevaluatedProperties")
)  # fmt: skip
LISTS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems"))
MAPS = frozenset(("$defs", "definitions", "dependentSchemas", "patternProperties", "properties"))
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_DRAFTS = {"draft-03": 3, "draft-04": 4, "draft-06": 6, "draft-07": 7, "2019-09": 2019, "2020-12": 2020}
# Keywords that do not restrict values.
SILENT = frozenset(
    ("$anchor", "$comment", "$defs", "$dynamicAnchor", "$id", "$schema", "contentEncoding", "contentMediaType",
     "contentSchema", "default", "definitions", "deprecated", "description", "discriminator", "example", "examples",
     "id", "nullable", "readOnly", "title", "writeOnly", "$recursiveAnchor", "$vocabulary")
)  # fmt: skip
IN_PLACE = ("$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "if", "not", "dependentSchemas",
             "dependencies", "dependentRequired")  # fmt: skip

# Amounts of work that take some microseconds:
_INDEXED_AT_ONCE = 4  # schemas
_CHARACTERS_AT_ONCE = 64  # of references and URIs

# The types of other keywords' values, and the types' names in errors.
_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "$anchor": (str, "a text"),
    "$id": (str, "a text"),
    "$ref": (str, "a text"),
    "dependentRequired": (dict, "an object of lists of names"),
    "enum": (list, "a list"),
    "format": (str, "a text"),
    "maxContains": ((int, float), "a whole number"),
    "minContains": ((int, float), "a whole number"),
    "pattern": (str, "a text"),
    "required": ((list, bool), "a list of names"),
    "type": ((str, list), "the name of a type or a list of them"),
    "uniqueItems": (bool, "true or false"),
}


class SchemaError(ValueError):
    """An invalid schema. The message has the keyword, what was found and what is allowed."""


def children(schema: Mapping[str, Any]) -> Iterator[tuple[str, str | int | None, Schema]]:
    """Yield the schemas directly within `schema`: (keyword, name or index within the keyword, schema)."""
    for keyword, value in schema.items():
        if keyword in ONE:
            yield keyword, None, value
        elif keyword in LISTS:
            for i, one in enumerate(as_list(keyword, value)):
                yield keyword, i, one
        elif keyword in MAPS:
            for name, one in as_map(keyword, value).items():
                yield keyword, name, one
        elif keyword == "items":
            if isinstance(value, list):
                for i, one in enumerate(value):
                    yield keyword, i, one
            else:
                yield keyword, None, value
        elif keyword == "dependencies":
            for name, one in as_map(keyword, value).items():
                if not isinstance(one, list | str):
                    yield keyword, name, one


def without_nulls(schema: Any) -> Any:
    """Return a schema without its keywords that are null, which some clients write in the place of absent ones."""
    if not isinstance(schema, dict):
        return schema
    found = {}
    for keyword, value in schema.items():
        if value is None and keyword not in ("const", "default", "example"):
            continue
        if keyword in MAPS and isinstance(value, dict):
            value = {name: without_nulls(one) for name, one in value.items()}
        elif isinstance(value, list) and (keyword in LISTS or keyword == "items"):
            value = [without_nulls(one) for one in value]
        elif keyword in ONE or keyword == "items":
            value = without_nulls(value)
        found[keyword] = value
    return found


def check_kinds(schema: Mapping[str, Any]) -> None:
    """Raise `SchemaError` for a keyword whose value has the wrong type."""
    for keyword, value in schema.items():
        if (kind := _KINDS.get(keyword)) is not None and not isinstance(value, kind[0]):
            raise SchemaError(f"{keyword} is {kind[1]}, not {shown(value)}")


def as_map(keyword: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise SchemaError(f"{keyword} is an object of schemas, not {shown(value)}")
    return value


def as_list(keyword: str, value: Any) -> list[Any]:
    if not isinstance(value, list) or (not value and keyword != "prefixItems"):
        raise SchemaError(f"{keyword} is a list of at least one schema, not {shown(value)}")
    return value


def text_of(keyword: str, schema: dict[str, Any]) -> str:
    value = schema[keyword]
    if not isinstance(value, str):
        raise SchemaError(f"{keyword} is a text, not {shown(value)}")
    return value


def size_of(keyword: str, schema: dict[str, Any]) -> int | None:
    value = schema.get(keyword)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 0:
        raise SchemaError(f"{keyword} is a whole number from 0 on, not {shown(value)}")
    return int(value)


def shown(value: Any) -> str:
    """Return a value for an error message: Python's notation, shortened."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def draft_of(schema: Schema) -> int:
    """Return the number or year of the draft that `$schema` names; 2020 if it names none."""
    named = schema.get("$schema") if isinstance(schema, dict) else None
    return next((draft for name, draft in _DRAFTS.items() if isinstance(named, str) and name in named), 2020)


class Document:
    """A whole schema, in which references are looked up. Nothing is fetched."""

    def __init__(self, root: Schema) -> None:
        self.root = root
        self.draft = draft_of(root)
        # Later drafts lack `dependencies`, but schemas that use it without naming a draft mean it.
        self.has_dependencies = self.draft < 2019 or not isinstance(root, dict) or "$schema" not in root
        self.has_plain_refs = self.draft >= 2019  # keywords beside `$ref` count
        self._id = "id" if self.draft < 6 else "$id"
        self._resources: dict[str, Schema] | None = None  # schemas by URI; "" is the whole document
        self._anchors: dict[tuple[str, str], tuple[Schema, str]] = {}
        self._bases: dict[int, tuple[Schema, str]] = {}  # by id() of the schemas, which the document keeps alive
        self._found: dict[tuple[str, str], tuple[Schema, str]] = {}  # by reference and base
        self.spend: Callable[[int], None] | None = None  # called with numbers of steps before they are taken

    def base_within(self, schema: Mapping[str, Any], base: str) -> str:
        """Return the base URI of references within `schema`, if references around it have the base URI `base`."""
        own = schema.get(self._id)
        if not isinstance(own, str) or own.startswith("#") or ("$ref" in schema and not self.has_plain_refs):
            return base
        # Kept, because a relative URI must not be joined twice.
        if (known := self._bases.get(id(schema))) is None:
            self._spend_on(base, own)
            known = self._bases[id(schema)] = schema, urldefrag(urljoin(base, own))[0]
        return known[1]

    def find(self, reference: str, base: str) -> tuple[Schema, str]:
        """Return the schema that `reference` points at, and its base URI. Raises `SchemaError`."""
        if (found := self._found.get((reference, base))) is None:
            self._spend_on(base, reference)
            found = self._found[reference, base] = self._look_up(reference, base)
        return found

    def _spend_on(self, base: str, reference: str) -> None:
        if self.spend is not None:
            self.spend((len(base) + len(reference)) // _CHARACTERS_AT_ONCE)

    def _look_up(self, reference: str, base: str) -> tuple[Schema, str]:
        if reference == "#" and not base:
            return self.root, base
        if reference.startswith("#/") and not base:
            return self._at_pointer(self.root, base, reference)
        if self._resources is None:
            self._resources = {"": self.root}
            self._index(self.root)
        url, fragment = urldefrag(urljoin(base, reference) if not reference.startswith("#") else base + reference)
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            if (found := self._anchors.get((url, fragment))) is not None:
                return found
            raise SchemaError(f"$ref {shown(reference)} names an anchor that is not in the schema")
        if url not in self._resources:
            raise SchemaError(
                f"$ref {shown(reference)} is not within the schema, and no others are fetched: put it under $defs"
            )
        return self._at_pointer(self._resources[url], url, "#" + fragment, is_decoded=True)

    def _at_pointer(self, schema: Schema, base: str, reference: str, *, is_decoded: bool = False) -> tuple[Schema, str]:
        node = schema
        for part in reference[1:].split("/")[1:]:
            name = (part if is_decoded else unquote(part)).replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict) and node is not schema:
                base = self.base_within(node, base)
            if isinstance(node, dict) and name in node:
                node = node[name]
            elif isinstance(node, list) and name.isdecimal() and len(name) < 10 and int(name) < len(node):
                node = node[int(name)]
            else:
                raise SchemaError(f"$ref {shown(reference)} points at nothing: there is no {shown(name)}")
        return node, base

    def _index(self, root: Schema) -> None:
        """Record the identifiers and anchors of all schemas in the document."""
        assert self._resources is not None
        stack: list[tuple[Schema, str]] = [(root, "")]
        num_schemas = 0
        while stack:
            schema, base = stack.pop()
            if not isinstance(schema, dict):
                continue
            num_schemas += 1
            if self.spend is not None and not num_schemas % _INDEXED_AT_ONCE:
                self.spend(1)
            inner = self.base_within(schema, base)
            if inner != base:
                self._resources.setdefault(inner, schema)
            own = schema.get(self._id)
            if isinstance(own, str) and "#" in own and (anchor := own.partition("#")[2]):
                self._anchors.setdefault((inner, anchor), (schema, inner))
            for keyword in ("$anchor", "$dynamicAnchor"):
                if isinstance(schema.get(keyword), str):
                    self._anchors.setdefault((inner, schema[keyword]), (schema, inner))
            stack.extend((child, inner) for _, _, child in children(schema))
