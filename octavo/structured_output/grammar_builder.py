"""Makes the grammar of a request's answer, in llguidance's own form: JSON text with Lark grammars and JSON schemas. The
front end makes and checks a grammar before the request is queued; it crosses the wire as text, and
`octavo.structured_output.grammar_matching` follows it. llguidance tries grammars out in a process of its own (`trial`).
"""

import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from octavo.errors import RequestError
from octavo.sampling_params import STRUCTURES, StructuredOutputsParams
from octavo.structured_output import lark, structural_tag
from octavo.structured_output.answer_parts import ReasoningMarks, ThinkingBudget, ToolCalls
from octavo.structured_output.call_grammars import calls_grammar
from octavo.structured_output.final_check import CallChecks, FinalCheck
from octavo.structured_output.grammar_check import (
    COMMENTS,
    MAX_CHARACTERS,
    check_length,
    check_parts,
    checked_lark,
    first_line,
    problem_of,
    validated,
)
from octavo.structured_output.reasoning_grammar import after_reasoning, joined, of_budget
from octavo.structured_output.schema_grammar import GrammarDraft, schema_grammar, without_place
from octavo.structured_output.schema_keywords import without_nulls

_MAX_SIMPLE_CHARACTERS = 1 << 16  # the most characters of a grammar that is not tried in another process


class WantedGrammar(NamedTuple):
    """The wanted form of an answer: `content` or `calls`, after `reasoning` if there is any. Without content only the
    `budget` limits the answer."""

    content: StructuredOutputsParams | ToolCalls | None
    reasoning: ReasoningMarks | None = None
    field: str | None = None  # name of the structure's field in errors, if not `structured_outputs`
    special_tokens: Mapping[str, int] | None = None  # ids by text: grammars name these tokens by id
    budget: ThinkingBudget | None = None
    calls: ToolCalls | None = None
    checks: CallChecks | None = None  # functions whose arguments the grammar holds completely are left out of these


class MadeGrammar(NamedTuple):
    """A grammar that can be followed, and the check of the parts of a schema that it does not enforce."""

    text: str
    check: FinalCheck | None = None


def make_checked_grammar(wanted: WantedGrammar, *, closes_objects: bool = False) -> MadeGrammar:
    """Return the grammar of the wanted answers, and the check of what it leaves open. Every grammar is made here.

    `closes_objects`: objects whose schema names properties have no others, unless the schema or the request says
    otherwise. Raises `RequestError` with the reason if the grammar cannot be followed. The largest grammars take some
    seconds.
    """
    content, reasoning, field, special_tokens, budget, calls, checks = wanted
    if isinstance(content, StructuredOutputsParams) and isinstance(content.json, dict):
        with suppress(RecursionError):  # a schema of this depth is refused
            content = msgspec.structs.replace(content, json=without_nulls(content.json))
    is_call = isinstance(content, ToolCalls)
    if content is None:
        assert budget is not None
        field, reasoning = "thinking_token_budget", None
    elif isinstance(content, ToolCalls):
        field = "tools"
    elif field is None:
        field = "structured_outputs." + next(n for n in STRUCTURES if getattr(content, n) not in (None, False))
    problem = ""
    # A grammar is tried as a whole. If this fails, its schemas and inputs are tried one by one, to name the wrong
    # one, or to leave out parts that are too much for llguidance.
    for tries_each in (False, True):
        draft = GrammarDraft(special_tokens or {}, tries_each)
        if content is None:
            assert budget is not None
            draft.is_certain = False
            grammar = of_budget(budget)
        elif isinstance(content, ToolCalls):
            grammar = calls_grammar(draft, content)
        else:
            grammar = _StructureGrammars(draft, closes_objects).of_structure(content, field)
        or_calls = None if calls is None else calls_grammar(draft, calls, is_beside_json=True)
        if reasoning is not None:
            draft.is_certain = False
            grammar = after_reasoning(
                grammar, reasoning, special_tokens or {}, budget, or_calls, field, is_call=is_call
            )
        elif or_calls is not None:
            grammar = joined("start: @answer | @calls", grammar, or_calls, field)
        is_simple = draft.is_simple and len(grammar) <= _MAX_SIMPLE_CHARACTERS
        problem = "" if is_simple and draft.is_certain else problem_of(grammar, field, is_simple=is_simple)
        if not problem:
            check = None
            is_checked = bool(draft.unheld) or draft.has_open_objects
            if isinstance(content, StructuredOutputsParams) and content.json is not None and is_checked:
                check = _final_check(content, reasoning, field, draft.unheld, calls)
            if checks is not None:
                checks.leave_out(draft.held)
            return MadeGrammar(grammar, check)
        if not draft.has_parts:
            break
    raise RequestError(f"{field} cannot be followed: {without_place(problem)}", param=field)


def _final_check(
    content: StructuredOutputsParams,
    reasoning: ReasoningMarks | None,
    field: str,
    unheld: Collection[str],
    calls: ToolCalls | None,
) -> FinalCheck:
    if unheld and content.final_check == "refuse":
        raise RequestError(
            f"{field} has {', '.join(sorted(unheld))}, which a grammar cannot enforce; with final_check "
            '"report" or "error" the answer is checked when it has ended.',
            param=field,
        )
    schema = content.json if isinstance(content.json, str) else json.dumps(content.json)
    heads = () if calls is None else tuple(calls.heads.values())
    check = FinalCheck(schema, content.final_check, calls=heads, is_of_names=not unheld)
    if reasoning is None:
        return check
    start = reasoning.start if reasoning.is_optional and reasoning.start is not None else ""
    return msgspec.structs.replace(
        check, after=reasoning.end, reasoning_start=start, start=reasoning.answer_start, end=reasoning.answer_end
    )


class _StructureGrammars:
    """Writes the grammar of a request's structure: a schema, a regular expression, a choice, a grammar or a tag."""

    def __init__(self, draft: GrammarDraft, closes_objects: bool) -> None:
        self._draft = draft
        self._closes_objects = closes_objects

    def of_structure(self, wanted: StructuredOutputsParams, field: str) -> str:
        try:
            if wanted.structural_tag is not None:
                return self._of_structural_tag(wanted, field)
            return self._write(wanted, field)
        except RequestError:
            raise
        except RecursionError:
            raise RequestError(f"{field} cannot be read: it is nested too deep.", param=field) from None
        except ValueError as e:
            raise RequestError(f"{field} cannot be read: {first_line(e)}.", param=field) from None

    def _of_structural_tag(self, wanted: StructuredOutputsParams, field: str) -> str:
        def part(kind: str, value: Any) -> dict[str, Any]:
            """Return the grammar of a schema, a regular expression or a grammar in the tag, with the request's
            options."""
            one = msgspec.structs.replace(wanted, structural_tag=None, **{kind: value})
            grammars: list[dict[str, Any]] = json.loads(self._write(one, field))["grammars"]
            return grammars[0]

        tag = wanted.structural_tag
        self._draft.is_simple = False
        if isinstance(tag, str):
            if len(tag) > MAX_CHARACTERS:
                return tag  # is refused for its length
            tag = json.loads(tag)
        check_parts(tag, (*COMMENTS, "grammar"))  # parts of a "grammar" are checked where it is written
        return json.dumps({"grammars": structural_tag.grammars_of(tag, self._draft.special_tokens, part)})

    def _write(self, wanted: StructuredOutputsParams, field: str) -> str:
        from llguidance import LLMatcher

        if wanted.json is None and not wanted.json_object:
            self._draft.is_simple = False
        if wanted.regex is not None:
            check_length(wanted.regex)
            return LLMatcher.grammar_from_regex(wanted.regex)
        if wanted.choice is not None:
            for text in wanted.choice:
                check_length(text)
            alternatives = " | ".join(json.dumps(text, ensure_ascii=False) for text in wanted.choice)
            # One terminal, from which the lexer makes an automaton; in a rule each choice would be an item of the
            # parser.
            return lark.as_grammar(f"start: CHOICE\nCHOICE: {alternatives}")
        if wanted.grammar is not None:
            if len(wanted.grammar) > MAX_CHARACTERS or wanted.grammar.lstrip().startswith("{"):
                return wanted.grammar  # is refused for its length, or is in llguidance's own form
            return lark.as_grammar(checked_lark(wanted.grammar))
        schema: Any = {"type": "object"} if wanted.json is None else wanted.json
        if isinstance(schema, str):
            schema = json.loads(schema)
        if not isinstance(schema, dict):
            raise ValueError(f"a schema is an object, not {json.dumps(schema)[:40]}")
        if wanted.whitespace_pattern is not None and (
            problem := first_line(validated(LLMatcher.grammar_from_regex(wanted.whitespace_pattern)))
        ):
            name = "structured_outputs.whitespace_pattern"
            raise RequestError(f"{name} cannot be followed: {problem}", param=name)
        closes = wanted.disable_additional_properties
        closes = self._closes_objects if closes is None else closes
        return json.dumps({"grammars": [schema_grammar(self._draft, schema, field, closes=closes, options=wanted)]})
