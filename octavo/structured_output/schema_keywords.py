"""The vocabulary of JSON Schema: which keywords hold schemas, what `$ref` points at, and in which draft a schema is
written.

`children` is the only place that knows where schemas are within a schema; all code that walks a schema calls it. It
never takes names of properties or definitions for keywords.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote, urldefrag, urljoin

from octavo.structured_output.metaschemas import metaschema

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
_MAX_SCOPED = 4_000  # most schemas times scopes of dynamic anchors; each takes about 20 µs
_RECURSIVE = "#"  # the name of `$recursiveAnchor`, which other anchors cannot have

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


class Base(NamedTuple):
    """The place of a reference: what its target depends on."""

    url: str = ""  # the base URI
    scope: int = 0  # the number, in a `Document`, of the dynamic anchors on the way there


class Document:
    """A whole schema, in which references are looked up. Nothing is fetched."""

    def __init__(self, root: Schema) -> None:
        self.root = root
        self.draft = draft_of(root)
        # Later drafts lack `dependencies`, but schemas that use it without naming a draft mean it.
        self.has_dependencies = self.draft < 2019 or not isinstance(root, dict) or "$schema" not in root
        self.has_plain_refs = self.draft >= 2019  # keywords beside `$ref` count
        self._id = "id" if self.draft < 6 else "$id"
        self._resources: dict[str, Schema] = {}  # schemas by URI; "" is the whole document
        self._anchors: dict[tuple[str, str], Schema] = {}
        self._dynamic: dict[str, dict[str, Schema]] = {}  # dynamic anchors by URI and name
        self._dynamic_names = {_RECURSIVE, "meta"}  # that references name; the metaschemas' are indexed late
        self._num_schemas = 0
        # Dynamic anchors, by name with the URI of the outermost resource that has one. The root's are not among them.
        self._scopes: list[dict[str, str]] = [{}]
        self._numbers: dict[frozenset[tuple[str, str]], int] = {}  # of scopes
        self._entered: dict[tuple[str, int], int] = {}  # scopes by the URI of a resource and the scope around it
        self._urls: dict[int, tuple[Schema, str]] = {}  # by id() of the schemas, which the document keeps alive
        self._found: dict[tuple[str, Base, str], tuple[Schema, Base]] = {}
        self.spend: Callable[[int], None] | None = None  # called with numbers of steps before they are taken

    def base_within(self, schema: Mapping[str, Any], base: Base) -> Base:
        """Return the base of references within `schema`, if references around it have the base `base`."""
        url = self._url_within(schema, base.url)
        return base if url == base.url else self._enter(url, base.scope, is_root=schema is self.root)

    def _url_within(self, schema: Mapping[str, Any], url: str) -> str:
        own = schema.get(self._id)
        if not isinstance(own, str) or own.startswith("#") or ("$ref" in schema and not self.has_plain_refs):
            return url
        # Kept, because a relative URI must not be joined twice.
        if (known := self._urls.get(id(schema))) is None:
            self._spend_on(url, own)
            known = self._urls[id(schema)] = schema, urldefrag(urljoin(url, own))[0]
        return known[1]

    def _enter(self, url: str, scope: int, *, is_root: bool = False) -> Base:
        """Return the base within the resource `url`, if `scope` is around it."""
        if is_root:
            return Base(url, scope)
        if (inner := self._entered.get((url, scope))) is None:
            self._index_all()
            around = self._scopes[scope]
            own = self._dynamic.get(url, {}).keys() & self._dynamic_names
            new = dict.fromkeys(sorted(own - around.keys() - self._of_root.keys()), url)
            inner = scope
            if new:
                self._spend_on(url, "")
                whole = {**around, **new}
                inner = self._numbers.setdefault(frozenset(whole.items()), len(self._scopes))
                if inner * self._num_schemas > _MAX_SCOPED:
                    raise SchemaError("dynamic references have too many targets")
                if inner == len(self._scopes):
                    self._scopes.append(whole)
            self._entered[url, scope] = inner
        return Base(url, inner)

    @property
    def _of_root(self) -> dict[str, Schema]:
        """The root's dynamic anchors, which are the outermost everywhere."""
        is_schema = isinstance(self.root, dict)
        return self._dynamic.get(self._url_within(self.root, "") if is_schema else "", {})

    def find(self, reference: str, base: Base, keyword: str = "$ref") -> tuple[Schema, Base]:
        """Return the schema that `reference`, the value of `keyword`, points at, and its base. Raises
        `SchemaError`."""
        if (found := self._found.get((reference, base, keyword))) is None:
            self._spend_on(base.url, reference)
            schema, url = self._look_up(reference, base.url)
            if keyword != "$ref":
                schema, url = self._outermost(schema, url, reference, base.scope, keyword)
            if isinstance(schema, dict):
                url = self._url_within(schema, url)
            found = schema, base if url == base.url else self._enter(url, base.scope)
            self._found[reference, base, keyword] = found
        return found

    def _outermost(self, schema: Schema, url: str, reference: str, scope: int, keyword: str) -> tuple[Schema, str]:
        """Return the outermost schema with the dynamic anchor of `schema`, and its URI."""
        self._index_all()
        name = _RECURSIVE if keyword == "$recursiveRef" else unquote(reference.partition("#")[2])
        if self._dynamic.get(url, {}).get(name) is not schema:
            return schema, url  # the static target, which has no dynamic anchor, or another
        if name in self._of_root:
            return self._of_root[name], self._url_within(self.root, "")
        outermost = self._scopes[scope].get(name, url)
        return self._dynamic[outermost][name], outermost

    def _spend_on(self, url: str, reference: str) -> None:
        if self.spend is not None:
            self.spend((len(url) + len(reference)) // _CHARACTERS_AT_ONCE)

    def _look_up(self, reference: str, base: str) -> tuple[Schema, str]:
        if reference == "#" and not base:
            return self.root, base
        if reference.startswith("#/") and not base:
            return self._at_pointer(self.root, base, reference)
        self._index_all()
        url, fragment = urldefrag(urljoin(base, reference) if not reference.startswith("#") else base + reference)
        fragment = unquote(fragment)
        if url not in self._resources and (known := metaschema(url)) is not None:
            self._index(known, url)
        if fragment and not fragment.startswith("/"):
            if (url, fragment) in self._anchors:
                return self._anchors[url, fragment], url
            raise SchemaError(f"$ref {shown(reference)} names an anchor that is not in the schema")
        if url not in self._resources:
            raise SchemaError(
                f"$ref {shown(reference)} is not within the schema, and no others are fetched: put it under $defs"
            )
        return self._at_pointer(self._resources[url], url, "#" + fragment, is_decoded=True)

    def _at_pointer(self, schema: Schema, url: str, reference: str, *, is_decoded: bool = False) -> tuple[Schema, str]:
        node = schema
        for part in reference[1:].split("/")[1:]:
            name = (part if is_decoded else unquote(part)).replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict) and node is not schema:
                url = self._url_within(node, url)
            if isinstance(node, dict) and name in node:
                node = node[name]
            elif isinstance(node, list) and name.isdecimal() and len(name) < 10 and int(name) < len(node):
                node = node[int(name)]
            else:
                raise SchemaError(f"$ref {shown(reference)} points at nothing: there is no {shown(name)}")
        return node, url

    def _index_all(self) -> None:
        if not self._resources:
            self._index(self.root, "")

    def _index(self, root: Schema, url: str) -> None:
        """Record the identifiers and anchors of all schemas in a document."""
        self._resources[url] = root
        stack: list[tuple[Schema, str]] = [(root, url)]
        while stack:
            schema, url = stack.pop()
            if not isinstance(schema, dict):
                continue
            self._num_schemas += 1
            if self.spend is not None and not self._num_schemas % _INDEXED_AT_ONCE:
                self.spend(1)
            inner = self._url_within(schema, url)
            if inner != url:
                self._resources.setdefault(inner, schema)
            own = schema.get(self._id)
            if isinstance(own, str) and "#" in own and (anchor := own.partition("#")[2]):
                self._anchors.setdefault((inner, anchor), schema)
            for keyword in ("$anchor", "$dynamicAnchor"):
                if isinstance(schema.get(keyword), str):
                    self._anchors.setdefault((inner, schema[keyword]), schema)
            if isinstance(reference := schema.get("$dynamicRef"), str):
                self._dynamic_names.add(unquote(reference.partition("#")[2]))
            if isinstance(name := schema.get("$dynamicAnchor"), str):
                self._dynamic.setdefault(inner, {}).setdefault(name, schema)
            if schema.get("$recursiveAnchor") is True and schema is self._resources.get(inner):
                self._dynamic.setdefault(inner, {})[_RECURSIVE] = schema
            stack.extend((child, inner) for _, _, child in children(schema))
