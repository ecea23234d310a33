"""Formats that grammars hold: llguidance's own, and those written here as patterns. Others are annotations."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING

from octavo.structured_output.schema_patterns import read_pattern

if TYPE_CHECKING:
    from llguidance import LLMatcher

_KNOWN = frozenset(("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"))
_WRITTEN = {  # RFC 3986, RFC 6901
    "json-pointer": "^(/([^/~]|~[01])*)*$",
    "relative-json-pointer": "^(0|[1-9][0-9]*)(#|(/([^/~]|~[01])*)*)$",
    "uri-reference": r"^([!$&-;=?-\[\]_a-z~]|%[0-9A-Fa-f]{2})*(#([!$&-;=?-Z_a-z~]|%[0-9A-Fa-f]{2})*)?$",
}


def format_keywords(form: object) -> dict[str, str] | None:
    """Return the keywords that hold a text to a format; None if a grammar does not hold it."""
    if not isinstance(form, str):
        return None
    return {"format": form} if form in _KNOWN else {"pattern": _WRITTEN[form]} if form in _WRITTEN else None


def has_format(text: str, form: object) -> bool:
    """Return whether a text has a format as grammars hold it; any text has a format that they do not hold."""
    said = format_keywords(form)
    if said is None:
        return True
    if "pattern" in said:
        return read_pattern(said["pattern"]).matches(text)
    matcher = _matcher(said["format"]).deep_copy()
    data = list(json.dumps(text, ensure_ascii=False).encode(errors="replace"))
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


@lru_cache(maxsize=16)
def _matcher(form: str) -> LLMatcher:
    from llguidance import LLMatcher, LLTokenizer

    grammar = {"grammars": [{"json_schema": {"type": "string", "format": form}}]}
    return LLMatcher(LLTokenizer("byte"), json.dumps(grammar), log_level=0)
