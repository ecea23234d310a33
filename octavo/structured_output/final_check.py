"""The check of an answer, when it has ended, against a schema that its grammar did not hold it to as a whole.

`grammar_builder` makes a `FinalCheck` where one is needed; `octavo.engine.output_processor` has it carried out.
"""

from __future__ import annotations

import re

import msgspec

_ESCAPED = re.compile(r"(?<!\\)(?:\\\\)*\\u")
MISMATCH = "schema_mismatch"  # the `stop_reason` of an answer that the check finds wrong
UNCHECKED = "schema_unchecked"  # that of an answer that could not be checked


class FinalCheck(msgspec.Struct, frozen=True, array_like=True):
    """What an answer must satisfy, and what becomes of one that does not."""

    schema: str  # JSON
    mode: str  # of `StructuredOutputsParams.final_check`
    after: str | None = None  # the content follows the first of these, if there is one
    start: str = ""  # what stands around the content
    end: str = ""
    calls: tuple[str, ...] = ()  # what begins like this calls functions instead
    reasoning_start: str = ""  # an answer that does not begin with this has no reasoning
    # The grammar holds everything but names of properties that are written with escapes: it takes them for others.
    is_of_names: bool = False

    def problem(self, text: str) -> str | None:
        """Why the answer `text` does not satisfy the schema, or None if it does. Raises `NotChecked`."""
        from octavo.structured_output.schema_validation import problem_of

        if self.after is not None and self.after in text and text.lstrip().startswith(self.reasoning_start):
            text = text[text.index(self.after) + len(self.after) :]
        if "".join(text.split()).startswith(tuple("".join(head.split()) for head in self.calls)):
            return None
        if self.is_of_names and _ESCAPED.search(text) is None:
            return None
        text = text.strip().removeprefix(self.start.strip()).removesuffix(self.end.strip())
        return problem_of(text, self.schema)
