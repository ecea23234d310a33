"""Colours of lines on a terminal. Pipes, files, dumb terminals and `NO_COLOR` (https://no-color.org) get plain text."""

import os
from typing import TextIO

BOLD, DIM, RED = "1", "2", "1;31"  # ECMA-48, "select graphic rendition"


def has_styles(stream: TextIO) -> bool:
    """Return whether `stream` is a terminal that shows colours."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


def styled(text: str, style: str, stream: TextIO) -> str:
    return f"\x1b[{style}m{text}\x1b[0m" if has_styles(stream) else text
