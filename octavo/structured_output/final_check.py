"""The check of a finished answer against a schema that its grammar could enforce only in part. `grammar_builder` makes
a `FinalCheck` if one is needed; `octavo.engine.output_processor` runs it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

_ESCAPED = re.compile(r"(?<!\\)(?:\\\\)*\\u")
MISMATCH = "schema_mismatch"  # the `stop_reason` of an answer that the check finds wrong
UNCHECKED = "schema_unchecked"  # the `stop_reason` of an answer that could not be checked


def verdict(text: str, schema: Mapping[str, Any]) -> str | None:
    """Return the `stop_reason` for a JSON text that does not satisfy `schema` or cannot be checked, else None."""
    from octavo.structured_output.schema_validation import problem_of  # imported late: few answers need it

    try:
        return None if problem_of(text, json.dumps(schema)) is None else MISMATCH
    except Exception:  # an unreadable part of a schema, or too much work
        return UNCHECKED


class FinalCheck(msgspec.Struct, frozen=True, array_like=True):
    """The schema that an answer must satisfy, and the consequence if it does not."""

    schema: str  # JSON
    mode: str  # a value of `StructuredOutputsParams.final_check`
    after: str | None = None  # the content follows the first occurrence of this text, if there is one
    start: str = ""  # texts around the content
    end: str = ""
    calls: tuple[str, ...] = ()  # an answer that begins with one of these calls functions instead
    reasoning_start: str = ""  # an answer that does not begin with this has no reasoning
    # True: the grammar enforces everything, except that it takes names of properties that are written with escapes for
    # other names.
    is_of_names: bool = False

    def problem(self, text: str) -> str | None:
        """Return why the answer `text` does not satisfy the schema, or None if it does. Raises `NotChecked`."""
        from octavo.structured_output.schema_validation import problem_of

        if self.after is not None and self.after in text and text.lstrip().startswith(self.reasoning_start):
            text = text[text.index(self.after) + len(self.after) :]
        if "".join(text.split()).startswith(tuple("".join(head.split()) for head in self.calls)):
            return None
        if self.is_of_names and _ESCAPED.search(text) is None:
            return None
        text = text.strip().removeprefix(self.start.strip()).removesuffix(self.end.strip())
        return problem_of(text, self.schema)
