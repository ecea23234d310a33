"""The grammar of a JSON schema. If llguidance cannot follow a schema, simpler forms of it are tried."""

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any, Self

from octavo.errors import RequestError
from octavo.sampling_params import StructuredOutputsParams
from octavo.structured_output.grammar_check import check_parts, problem_of
from octavo.structured_output.schema_lowering import Lowered, lower

# JSON allows any amount of whitespace, and small models may write it for ever. People write a line break and an
# indentation, or a few spaces.
DEFAULT_WHITESPACE = r"\r?\n(?: {0,24}|\t{0,6})| {1,2}"
# llguidance's errors for references that it merges without end, or multiplies by each other too often.
_TOO_MANY_MERGES = (
    "circular references with sibling keys", "Schema intersection stack level exceeded", "schema too large",
)  # fmt: skip
_EMPTY_DEFINITION = re.compile(r"^Unsatisfiable.* while processing \S*#/\$defs/(\d+)$")
_WHERE = re.compile(r" while processing \S*#/\$defs/\d+\S*$")  # a place with numbers that mean nothing to callers
_PLAIN = StructuredOutputsParams(json={})  # options of JSON in calls
_UNSATISFIABLE = "Unsatisfiable schema"  # begins errors about schemas that no value satisfies
_MAX_EMPTY = 8  # definitions without a value; each is found by trying the whole schema
_LEVELS: tuple[dict[str, bool], ...] = ({}, {"is_picky": True}, {"is_coarse": True})  # of `lower`, the most exact first


class NoValueError(RequestError):
    """A schema that no value satisfies."""


@dataclasses.dataclass
class GrammarDraft:
    """The findings about a grammar while its parts are written."""

    special_tokens: Mapping[str, int]  # ids by text
    tries_each: bool  # each schema and each input is tried alone
    unheld: set[str] = dataclasses.field(default_factory=set)  # keywords of schemas that the grammar does not enforce
    has_open_objects: bool = False  # some object allows other names: a known name may be written with escapes
    # Functions whose arguments the grammar holds completely, and fields of schemas that it holds only in part.
    held: dict[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    fields_held_in_part: set[str] = dataclasses.field(default_factory=set)
    is_simple: bool = True  # llguidance's work on the grammar is bounded by its size
    is_certain: bool = True  # and llguidance never refuses such a grammar
    has_parts: bool = False  # schemas or grammars, which may be tried one by one


def schema_grammar(
    draft: GrammarDraft,
    schema: dict[str, Any],
    field: str,
    *,
    start: Any = None,
    closes: bool = True,
    options: StructuredOutputsParams = _PLAIN,
) -> dict[str, Any]:
    """Return the grammar of a schema, or of `start`, a part of it. `closes`: objects whose schema names properties have
    no others, unless the schema says otherwise. Raises `RequestError`, of the kind `NoValueError` if no value satisfies
    the schema."""
    try:
        check_parts(schema)
    except ValueError as e:
        raise RequestError(f"{field} cannot be read: {e}.", param=field) from None
    blanks: dict[str, Any] = {"whitespace_pattern": options.whitespace_pattern or DEFAULT_WHITESPACE}
    if options.disable_any_whitespace:
        blanks = {"whitespace_flexible": False}
    draft.has_parts = True
    form = _Form()
    while True:
        lowered = _lower(schema, field, form, start, closes)
        grammar = {"json_schema": {**lowered.schema, "x-guidance": blanks}}
        if not draft.tries_each:
            break
        problem = problem_of(json.dumps({"grammars": [grammar]}), field, is_simple=lowered.is_simple)
        if not problem:
            break
        form = form.after(problem, field)
    if lowered.unheld or lowered.has_open_objects:
        draft.fields_held_in_part.add(field)
    draft.unheld |= lowered.unheld
    draft.has_open_objects |= lowered.has_open_objects
    draft.is_simple &= lowered.is_simple and options.whitespace_pattern is None
    draft.is_certain &= lowered.is_certain
    return grammar


@dataclasses.dataclass(frozen=True, slots=True)
class _Form:
    """How a schema is lowered: see `lower`."""

    level: int = 0  # in `_LEVELS`
    merges_references: bool = True
    empty: frozenset[str] = frozenset()  # numbers of definitions that no value satisfies

    def after(self, problem: str, field: str) -> Self:
        """Return the form to try after llguidance's error `problem`. Raises `RequestError` if there is none."""
        # A definition that no value satisfies may be in a place that the schema does not need.
        of_definition = _EMPTY_DEFINITION.search(problem)
        if of_definition is not None and of_definition[1] not in self.empty:
            if len(self.empty) == _MAX_EMPTY:
                message = f"more than {_MAX_EMPTY} of its definitions are satisfied by no value."
                raise RequestError(f"{field} cannot be followed: {message}", param=field)
            return dataclasses.replace(self, empty=self.empty | {of_definition[1]})
        other = dataclasses.replace(self, empty=frozenset())  # definitions have other numbers in another form
        if self.merges_references and problem.startswith(_TOO_MANY_MERGES):
            return dataclasses.replace(other, merges_references=False)
        # If no value satisfies a part of the schema, none satisfies the whole.
        if problem.startswith(_UNSATISFIABLE) or self.level + 1 == len(_LEVELS):
            raise _refusal(problem, field)
        return dataclasses.replace(other, level=self.level + 1)


def _lower(schema: dict[str, Any], field: str, form: _Form, start: Any, closes: bool) -> Lowered:
    try:
        return lower(
            schema, start=start, closes=closes, merges_references=form.merges_references, empty=form.empty,
            **_LEVELS[form.level],
        )  # fmt: skip
    except RecursionError:
        raise RequestError(f"{field} cannot be followed: it is nested too deep.", param=field) from None
    except ValueError as e:
        raise _refusal(f"{e}.", field) from None


def _refusal(problem: str, field: str) -> RequestError:
    kind = NoValueError if problem.startswith(_UNSATISFIABLE) else RequestError
    return kind(f"{field} cannot be followed: {without_place(problem)}", param=field)


def without_place(problem: str) -> str:
    """Return llguidance's error without a place that means nothing to callers."""
    return _WHERE.sub("", problem)
