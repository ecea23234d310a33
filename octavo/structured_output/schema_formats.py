"""Formats that grammars enforce: llguidance's own, and those written here as patterns. The final check enforces
`regex`, which no grammar can. Other formats are annotations."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import TYPE_CHECKING

from octavo.structured_output.schema_patterns import read_pattern

if TYPE_CHECKING:
    from llguidance import LLMatcher

_KNOWN = frozenset(("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"))
_MAIL_NAME = r"[^\s\x00-\x1f\"(),.:;<>@\[\\\]]+"
_NAME = "([0-9A-Z_a-z]|%[0-9A-Fa-f]{2})+"
_VARIABLE = rf"{_NAME}(\.{_NAME})*(:[1-9][0-9]{{0,3}}|\*)?"
WRITTEN_FORMATS = {  # RFC 3986, RFC 3987, RFC 6531, RFC 6570, RFC 6901
    "idn-email": rf"^{_MAIL_NAME}(\.{_MAIL_NAME})*@{_MAIL_NAME}(\.{_MAIL_NAME})*$",
    "iri": r"^[A-Za-z][A-Za-z0-9+.-]*:[^\s\x00-\x1f\"<>\\^`{|}]*$",
    "iri-reference": r"^([A-Za-z][A-Za-z0-9+.-]*:[^\s\x00-\x1f\"#<>\\^`{|}]*"
    r"|[^\s\x00-\x1f\"#/:<>?\\^`{|}]*([/?][^\s\x00-\x1f\"#<>\\^`{|}]*)?)(#[^\s\x00-\x1f\"#<>\\^`{|}]*)?$",
    "json-pointer": "^(/([^/~]|~[01])*)*$",
    "relative-json-pointer": "^(0|[1-9][0-9]*)(#|(/([^/~]|~[01])*)*)$",
    "uri-reference": r"^([A-Za-z][A-Za-z0-9+.-]*:([!$&-;=?-\[\]_a-z~]|%[0-9A-Fa-f]{2})*"
    r"|([!$&-.0-9;=@-Z_a-z~]|%[0-9A-Fa-f]{2})*([/?]([!$&-;=?-\[\]_a-z~]|%[0-9A-Fa-f]{2})*)?)"
    r"(#([!$&-;=?-Z_a-z~]|%[0-9A-Fa-f]{2})*)?$",
    "uri-template": r"^([^\s\x00-\x1f\"%<>\\^`{|}]|%[0-9A-Fa-f]{2}"
    rf"|\{{[!#&+,./;=?@|]?{_VARIABLE}(,{_VARIABLE})*\}})*$",
}
CHECKED_FORMATS = frozenset(("regex",))  # by the final check
_CLASS_OR_ESCAPE = re.compile(r"\\.|\[\^?\]|\[(?:\\.|[^\]\\])+\]", re.DOTALL)
_NAMED_GROUP = re.compile(r"\(\?<(?![=!])")
# Errors of Python's `re` that mean that a text is no expression of ECMAScript either.
_WRONG_EXPRESSION = re.compile(
    r"nothing to repeat|multiple repeat|missing \)|unbalanced|unterminated character set|bad escape \(end|min repeat"
)


def format_keywords(form: object) -> dict[str, str] | None:
    """Return the keywords that enforce a format; None if grammars do not enforce it."""
    if not isinstance(form, str):
        return None
    if form in _KNOWN:
        return {"format": form}
    pattern = WRITTEN_FORMATS.get(form)
    return None if pattern is None else {"pattern": pattern}


def has_format(text: str, form: object) -> bool:
    """Return whether a text has a format, as grammars and the final check define it; True for formats that they do not
    enforce."""
    if form == "regex":
        return _is_expression(text)
    said = format_keywords(form)
    if said is None:
        return True
    if "pattern" in said:
        return read_pattern(said["pattern"]).matches(text)
    matcher = _matcher(said["format"]).deep_copy()
    data = list(json.dumps(text, ensure_ascii=False).encode(errors="replace"))
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def _is_expression(text: str) -> bool:
    """Return whether a text is a regular expression of ECMAScript, as far as Python's parser can tell; it takes about 2
    µs a character. Classes are left out: Python reads them differently, and takes a millisecond for some."""
    without_classes = _CLASS_OR_ESCAPE.sub(lambda found: "x" if found[0][0] == "[" else found[0], text)
    try:
        re.compile(_NAMED_GROUP.sub("(?P<", without_classes))
    except re.error as e:
        return _WRONG_EXPRESSION.match(e.msg) is None
    except (OverflowError, RecursionError):
        return True
    return True


@lru_cache(maxsize=16)
def _matcher(form: str) -> LLMatcher:
    from llguidance import LLMatcher, LLTokenizer

    grammar = {"grammars": [{"json_schema": {"type": "string", "format": form}}]}
    return LLMatcher(LLTokenizer("byte"), json.dumps(grammar), log_level=0)
