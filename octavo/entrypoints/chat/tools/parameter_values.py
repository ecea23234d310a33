"""Turns texts between marks into values of parameters, by the parameters' schemas."""

import ast
import math
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from octavo.entrypoints.chat.tools.call_spelling import json_type, property_schema, resolve_ref, schema_types
from octavo.entrypoints.chat.tools.tool_formats import Tags
from octavo.entrypoints.chat.tools.tool_parser_base import load_json

_MAX_DEPTH = 32  # of tags in tags


def parameter_value(text: str, kinds: set[str], *, says_text: bool = False, says_json: bool = False) -> Any:
    """Return the value of `text`. Its schema allows `kinds` (empty without a schema). If the schema does not decide,
    the call's own attribute (`says_text`, `says_json`) does."""
    known = kinds - {"unknown"}
    stripped = text.strip()
    if "string" in known and known <= {"string", "null"}:
        if "null" in known and stripped in ("null", "None") and not says_text:
            return None
        written = load_json(stripped) if says_json else None
        return written if isinstance(written, str) else text
    if says_text and ("string" in kinds or not known):
        return text
    if not stripped and known and "string" not in known:
        return next((empty() for kind, empty in _EMPTY.items() if kind in known), text)
    value = load_json(stripped)
    if value is None and stripped != "null":
        value = _literal(stripped, known)
        if value is _NOTHING:
            return text
    if isinstance(value, str) and known and "string" not in known:  # the model put a number in quotes
        inner = load_json(value)
        return inner if _fits(inner, known) else value
    return text if "string" in known and kinds == known and not _fits(value, known) else value


_NOTHING = object()
_EMPTY: dict[str, Callable[[], Any]] = {"array": list, "object": dict, "null": lambda: None}


def _literal(text: str, kinds: set[str]) -> Any:
    """Return the value of a Python literal, or of a truth value in any letter case; `_NOTHING` if the schema does not
    allow it. Without a schema a list or a dictionary is a value, and other literals are texts."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true" if not kinds or "boolean" in kinds or "string" not in kinds else _NOTHING
    if not kinds and text[:1] not in ("[", "{"):
        return _NOTHING
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return _NOTHING
    if "string" in kinds and isinstance(value, str | tuple):  # u"a" and "1, 2" may be meant as texts
        return _NOTHING
    if isinstance(value, tuple):
        value = list(value)
    return value if _fits(value, kinds or {"array", "object"}) and _is_json(value) else _NOTHING


def _fits(value: Any, kinds: set[str]) -> bool:
    kind = json_type(value)
    return kind in kinds or (kind == "integer" and "number" in kinds)


def _is_json(value: Any, depth: int = 0) -> bool:
    if depth > _MAX_DEPTH:
        return False
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(item, depth + 1) for key, item in value.items())
    if isinstance(value, list):
        return all(_is_json(item, depth + 1) for item in value)
    return value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


@lru_cache(maxsize=64)  # templates of requests may bring new bodies
def _nested_marks(body: Tags) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return what a nested tag begins with, and any mark of a nested tag: groups "opened" and "closed" are keys."""
    opened = rf"{re.escape(body.key_before)}(?P<opened>[^<>\s/]+){re.escape(body.key_after)}"
    before, _, after = body.value_after.strip().partition("{key}")
    closed = rf"{re.escape(before)}(?P<closed>[^<>\s/]+){re.escape(after)}"
    return re.compile(rf"\s*{opened}"), re.compile(f"{opened}|{closed}")


def nested_value(text: str, body: Tags, schema: Any, root: Mapping[str, Any], depth: int = 0) -> Any:
    """Return the object or list that `text` writes with a tag for each key or item, or if it has no tags, the value of
    the text."""
    schema = resolve_ref(schema, root)
    kinds = schema_types(schema, root)
    begin, any_mark = _nested_marks(body)
    if depth > _MAX_DEPTH or (found := begin.match(text)) is None:
        return parameter_value(text, kinds)
    values: dict[str, list[Any]] = {}
    while found is not None:
        key, position, end, level = found["opened"], found.end(), found.end(), 1
        while level:
            mark = any_mark.search(text, position)
            if mark is None:
                return parameter_value(text, kinds)
            position, end = mark.end(), mark.start()
            level += (mark["opened"] == key) - (mark["closed"] == key)
        inner = text[found.end() : end]
        value = nested_value(inner, body, property_schema(schema, key, root), root, depth + 1)
        values.setdefault(key, []).append(value)
        found = begin.match(text, position)
    if values.keys() == {"item"} and ("array" in kinds or "object" not in kinds):
        return values["item"]
    return {key: found if len(found) > 1 else found[0] for key, found in values.items()}
