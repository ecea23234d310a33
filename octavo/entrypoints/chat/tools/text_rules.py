"""Writes what a schema says of a text as regular expressions, for formats of calls in which texts have no quotes."""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from octavo.structured_output.lark import escaped
from octavo.structured_output.pattern_cost import is_tame, length_is_costly
from octavo.structured_output.schema_formats import format_keywords
from octavo.structured_output.schema_patterns import read_pattern

# Keywords that this module writes as expressions.
WRITTEN = frozenset(("const", "enum", "format", "maxLength", "minLength", "pattern"))
_MAX_LENGTH = 1 << 16  # of a text; longer limits would take the lexer too long

_HEX = "[0-9A-Fa-f]"
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IN_PATH = rf"([!$&-.0-;=@-Z_a-z~]|%{_HEX}{{2}})"
_AUTHORITY = rf"(([!$&-.0-;=A-Z_a-z~]|%{_HEX}{{2}})*@)?([!$&-.0-9;=A-Z_a-z~]|%{_HEX}{{2}})*(:[0-9]*)?"
# The usual texts of each format: some rare ones, such as quoted names in addresses, are left out.
_FORMATS = {
    "email": rf"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@{_LABEL}(\.{_LABEL})+",
    "hostname": rf"{_LABEL}(\.{_LABEL})*",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "uri": rf"[A-Za-z][A-Za-z0-9+.-]*:(//{_AUTHORITY}(/{_IN_PATH}*)*|/?({_IN_PATH}+(/{_IN_PATH}*)*)?)"
    rf"(\?({_IN_PATH}|[/?])*)?(#({_IN_PATH}|[/?])*)?",
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
}


def text_rules(schema: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return expressions that a whole text must match by the keywords in `WRITTEN`, beside which null may be allowed.
    Return None if expressions cannot say it."""
    rules = list[str]()
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is not None:
        texts = [value for value in values if isinstance(value, str)] if isinstance(values, list) else []
        kinds = schema.get("type")
        may_be_null = isinstance(kinds, list) and "null" in kinds and None not in values
        if not texts or may_be_null or any(not isinstance(value, str | None) for value in values):
            return None
        rules.append(f"({'|'.join(map(escaped, texts))})")
    least, most = schema.get("minLength", 0), schema.get("maxLength", _MAX_LENGTH)
    if type(least) is not int or type(most) is not int or not 0 <= least <= most <= _MAX_LENGTH:
        return None
    if "minLength" in schema or "maxLength" in schema:
        rules.append(f"(.|\\n){{{least},{most if 'maxLength' in schema else ''}}}")
    said = format_keywords(schema.get("format")) or {}
    expressions = [_FORMATS.get(said["format"])] if "format" in said else []
    if "pattern" in said:
        expressions.append(read_pattern(said["pattern"]).of_whole_text)
    if pattern := schema.get("pattern"):
        if not isinstance(pattern, str) or not is_tame(pattern) or length_is_costly(pattern, most):
            return None
        try:
            expressions.append(read_pattern(pattern).of_whole_text)
        except ValueError:
            return None
    if None in expressions:
        return None
    return (*rules, *(one.replace("/", r"\/") for one in expressions if one is not None))


@lru_cache(maxsize=1024)
def some_text_matches(rules: tuple[str, ...]) -> bool:
    """Return whether a text matches all of some expressions. A single one is taken to match some text."""
    from llguidance import LLMatcher

    schema = {"type": "string", "allOf": [{"pattern": f"^({rule})$"} for rule in rules]}
    return len(rules) < 2 or not LLMatcher.validate_grammar(json.dumps({"grammars": [{"json_schema": schema}]}))
