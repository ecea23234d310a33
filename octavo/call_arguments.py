"""Reads what models and clients write as the arguments of calls."""

import json
import re
from contextlib import suppress
from typing import Any

# An escape of JSON: two halves of a surrogate pair, one half alone, or any other.
_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)

# An escape at the end of a text that more text may complete, or complete to a pair.
_OPEN_ESCAPE = re.compile(
    r"(?<!\\)(?:\\\\)*(\\(?:u(?:[0-9a-fA-F]{0,3}|[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?))?)\Z"
)


def without_open_escape(text: str) -> str:
    """Return JSON that goes on, without an escape or pair of escapes at its end that is not complete."""
    found = _OPEN_ESCAPE.search(text)
    return text if found is None else text[: found.start(1)]


def with_whole_pairs(text: str) -> str:
    """Return JSON in which each half of a surrogate pair without the other is U+FFFD. Models write halves where they
    cannot spell a character, and no answer and no prompt can have them."""
    if "\\ud" not in text and "\\uD" not in text:
        return text
    return _ESCAPE.sub(lambda escape: escape[0] if escape[1] is None else "\\ufffd", text)


def read_arguments(sent: Any) -> Any:
    """Return the arguments of a call as an object; arguments that are no object stay unchanged."""
    if isinstance(sent, str):
        if not sent.strip():
            return {}
        with suppress(ValueError, RecursionError):
            value = json.loads(with_whole_pairs(sent))
            return {} if value is None else value if isinstance(value, dict) else sent
    return {} if sent is None else sent
