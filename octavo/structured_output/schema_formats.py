"""Formats that grammars enforce: llguidance's own, and those written here as patterns. The final check enforces
`regex` and the rules of labels in `idn-hostname`, which no grammar can. Other formats are annotations."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import TYPE_CHECKING
from unicodedata import bidirectional

from octavo.structured_output.schema_patterns import read_pattern

if TYPE_CHECKING:
    from llguidance import LLMatcher

_KNOWN = frozenset(("duration", "email", "hostname", "ipv4", "uri", "uuid"))  # written by llguidance
_MAIL_NAME = r"[^\s\x00-\x1f\"(),.:;<>@\[\\\]]+"
_NAME = "([0-9A-Z_a-z]|%[0-9A-Fa-f]{2})+"
_VARIABLE = rf"{_NAME}(\.{_NAME})*(:[1-9][0-9]{{0,3}}|\*)?"
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DATE = (
    "([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP_YEAR}-02-29)"
)
# A leap second is the last second of a day in UTC. Each other offset would take an alternative of its own.
_TIME = (
    r"(([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]+)?([Zz]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
    r"|23:59:60(\.[0-9]+)?([Zz]|[+-]00:00))"
)
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_HEX = "[0-9A-Fa-f]{1,4}"
_LAST = rf"({_HEX}:{_HEX}|{_BYTE}(\.{_BYTE}){{3}})"  # 32 bits
_IPV6 = (
    f"({_HEX}:){{6}}{_LAST}", f"::({_HEX}:){{5}}{_LAST}",
    *(f"({_HEX}(:{_HEX}){{0,{num}}})?::({_HEX}:){{{4 - num}}}{_LAST}" for num in range(5)),
    f"({_HEX}(:{_HEX}){{0,5}})?::{_HEX}", f"({_HEX}(:{_HEX}){{0,6}})?::",
)  # fmt: skip


def _references(character: str) -> tuple[str, str]:
    """Return expressions of references with and without a scheme. `character` is one that may stand anywhere in
    them."""
    one, path = f"({character}|[:@])", f"({character}|[/:@])*"
    # RFC 3986 has no brackets in queries, but URLs do.
    end = rf"(\?({character}|[/:?@\[\]])*)?(#({character}|[/:?@\[\]])*)?"
    address = rf"\[({'|'.join(_IPV6)}|[Vv][0-9A-Fa-f]+\.[!$&-.0-:;=A-Z_a-z~]+)\]"
    host = rf"(({character}|:)*@)?({address}|{character}*)(:[0-9]*)?"
    named, rooted = f"//{host}(/{path})?", f"/({one}{path})?"
    return (
        f"[A-Za-z][A-Za-z0-9+.-]*:({named}|{rooted}|({one}{path})?){end}",
        f"({named}|{rooted}|(({character}|@)+(/{path})?)?){end}",
    )


_LABEL = r"[^\s\x00-,./:-@\[-`{-\x7f\u3002\uff0e\uff61]+"
_URI, _RELATIVE_URI = _references("([!$&-.0-9;=A-Z_a-z~]|%[0-9A-Fa-f]{2})")
_IRI, _RELATIVE_IRI = _references(r"[^\s\x00-\x1f\"#/:<>?@\[\\\]^`{|}]")
WRITTEN_FORMATS = {  # RFC 3339, RFC 3986, RFC 3987, RFC 4291, RFC 6531, RFC 6570, RFC 6901
    "date": f"^{_DATE}$",
    "date-time": f"^{_DATE}[Tt]{_TIME}$",
    "idn-email": rf"^{_MAIL_NAME}(\.{_MAIL_NAME})*@{_MAIL_NAME}(\.{_MAIL_NAME})*$",
    "idn-hostname": f"^{_LABEL}([.\u3002\uff0e\uff61]{_LABEL})*$",
    "ipv6": f"^({'|'.join(_IPV6)})$",
    "iri": f"^{_IRI}$",
    "iri-reference": f"^({_IRI}|{_RELATIVE_IRI})$",
    "json-pointer": "^(/([^/~]|~[01])*)*$",
    "relative-json-pointer": "^(0|[1-9][0-9]*)(#|(/([^/~]|~[01])*)*)$",
    "time": f"^{_TIME}$",
    "uri-reference": f"^({_URI}|{_RELATIVE_URI})$",
    "uri-template": r"^([^\s\x00-\x1f\"%<>\\^`{|}]|%[0-9A-Fa-f]{2}"
    rf"|\{{[!#&+,./;=?@|]?{_VARIABLE}(,{_VARIABLE})*\}})*$",
}
CHECKED_FORMATS = frozenset(("idn-hostname", "regex"))  # by the final check
_MAX_HOSTNAME = 253
_CLASS_OR_ESCAPE = re.compile(r"\\.|\[\^?\]|\[(?:\\.|[^\]\\])+\]", re.DOTALL)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
# Letters that make no escape in ECMAScript. A, z and Z make none either, but `schema_patterns` reads them as Python's.
_OTHER_LETTERS = frozenset("aCeEFgGhHiIjJKlLmMNoOqQRTUVXyY")
_NAMED_GROUP = re.compile(r"\(\?<(?![=!])")
_PYTHON_GROUP = re.compile(r"\(\?(?:[P#]|[a-z]+\))")
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
    if form == "idn-hostname" and not _is_hostname(text):
        return False
    said = format_keywords(form)
    if said is None:
        return True
    if "pattern" in said:
        return read_pattern(said["pattern"]).matches(text)
    matcher = _matcher(said["format"]).deep_copy()
    data = list(json.dumps(text, ensure_ascii=False).encode(errors="replace"))
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def _is_hostname(text: str) -> bool:
    """Return whether the labels of an internationalized host name are valid, RFC 5890 to 5893."""
    import idna

    if len(text) > _MAX_HOSTNAME:
        return False
    try:
        labels = idna.decode(idna.encode(text)).split(".")
        if labels[-1] == "":
            return False
        if any(bidirectional(character) in ("R", "AL", "AN") for character in "".join(labels)):
            for label in labels:
                idna.check_bidi(label, check_ltr=True)
    except idna.IDNAError:
        return False
    return True


def _is_expression(text: str) -> bool:
    """Return whether a text is a regular expression of ECMAScript, as far as Python's parser can tell; it takes about 2
    µs a character. Classes are left out: Python reads them differently, and takes a millisecond for some."""
    if not _OTHER_LETTERS.isdisjoint(_ESCAPE.findall(text)):
        return False
    without_classes = _CLASS_OR_ESCAPE.sub(lambda found: "x" if found[0][0] == "[" else found[0], text)
    if _PYTHON_GROUP.search(_ESCAPE.sub("", without_classes)):
        return False
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
