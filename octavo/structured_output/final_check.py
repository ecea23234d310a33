"""The check of a finished answer against a schema that its grammar could enforce only in part. `grammar_builder` makes
a `FinalCheck` if one is needed; `octavo.engine.output_processor` runs it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from octavo.structured_output.schema_validation import Validator

_ESCAPED = re.compile(r"(?<!\\)(?:\\\\)*\\u")
MISMATCH = "schema_mismatch"  # the `stop_reason` of an answer that the check finds wrong
UNCHECKED = "schema_unchecked"  # the `stop_reason` of an answer that could not be checked


class CallChecks:
    """Compares the calls of one request's answers with the schemas of their functions. The event loop waits for it: all
    calls share the steps of one check."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self._schemas = dict(schemas)
        self._validators: dict[str, Validator] = {}
        self._num_steps = 0

    def __contains__(self, name: str) -> bool:
        return name in self._schemas

    def leave_out(self, held: Mapping[str, Mapping[str, Any]]) -> None:
        """Check no more calls of functions that have these schemas, because a grammar holds their arguments
        completely."""
        for name, schema in held.items():
            if name in self._schemas and self._schemas[name] == schema:
                del self._schemas[name]

    def verdict(self, calls: Iterable[tuple[str, str]]) -> str | None:
        """Return the `stop_reason` of an answer with `calls`, functions with their arguments: `MISMATCH` if one does
        not satisfy its schema, otherwise `UNCHECKED` if one could not be checked, else None."""
        found = None
        for name, arguments in calls:
            try:
                if self._problem(name, arguments) is not None:
                    return MISMATCH
            except Exception:  # an unreadable part of a schema, or too much work
                found = UNCHECKED
        return found

    def _problem(self, name: str, arguments: str) -> str | None:
        from octavo.structured_output.schema_validation import Validator  # imported late: few answers need it

        if (validator := self._validators.get(name)) is None:
            validator = self._validators[name] = Validator(self._schemas[name])
        try:
            return validator.check_text(arguments, self._num_steps)
        finally:
            self._num_steps = validator.num_steps


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
        # A function's name may begin like the text before the content, or the other way round: the longer text counts.
        begun = "".join(text.split())
        if _length_at_begin(begun, self.calls) > _length_at_begin(begun, (self.start,)):
            return None
        if self.is_of_names and _ESCAPED.search(text) is None:
            return None
        text = text.strip().removeprefix(self.start.strip()).removesuffix(self.end.strip())
        return problem_of(text, self.schema)


def _length_at_begin(text: str, heads: Iterable[str]) -> int:
    """Return the length of the longest of `heads` that `text` begins with, 0 if there is none. `text` has no blanks,
    and those of `heads` do not count."""
    lengths = [len(head) for head in ("".join(one.split()) for one in heads) if text.startswith(head)]
    return max(lengths, default=0)
