"""Grammars as text, for tests that have no use for the final check."""

from __future__ import annotations

from typing import Any

from octavo.errors import RequestError
from octavo.structured_output.answer_parts import ToolCalls
from octavo.structured_output.grammar_builder import StructuredOutputsParams, WantedGrammar, make_checked_grammar
from octavo.structured_output.grammar_check import problem_of

INTEGER, TEXT = {"type": "integer"}, {"type": "string"}


def make_grammar(
    content: StructuredOutputsParams | ToolCalls | None, *more: Any, closes_objects: bool = False, **options: Any
) -> str:
    return make_checked_grammar(WantedGrammar(content, *more, **options), closes_objects=closes_objects).text


def grammar_of(schema: Any, **options: Any) -> str:
    return make_grammar(StructuredOutputsParams(json=schema, **options))


def check_of(schema: Any) -> Any:
    return make_checked_grammar(WantedGrammar(StructuredOutputsParams(json=schema))).check


def check_grammar(grammar: str, field: str) -> None:
    """Raise `RequestError` with the reason if a grammar cannot be followed."""
    if problem := problem_of(grammar, field):
        raise RequestError(f"{field} cannot be followed: {problem}", param=field)
