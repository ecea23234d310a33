"""Reads what models write as the arguments of calls."""

from __future__ import annotations

import re

# An escape of JSON: two halves of a surrogate pair, one half alone, or any other.
_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)


def with_whole_pairs(text: str) -> str:
    """Return JSON in which each half of a surrogate pair without the other is U+FFFD. Models write halves where they
    cannot spell a character, and no answer and no prompt can have them."""
    if "\\ud" not in text and "\\uD" not in text:
        return text
    return _ESCAPE.sub(lambda escape: escape[0] if escape[1] is None else "\\ufffd", text)
