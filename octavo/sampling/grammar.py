"""What an answer must be, as a grammar in llguidance's own form: JSON text that names Lark grammars and JSON schemas.

The front end makes and checks it before a request is queued; it crosses the wire as text, and
`octavo.sampling.grammar_masks` has it followed. llguidance itself looks at it in a process of its own
(`grammar_trial`).
"""

from __future__ import annotations

import atexit
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from octavo.errors import RequestError
from octavo.sampling.grammar_trial import GrammarTrial, TrialFailed
from octavo.sampling_params import STRUCTURES, StructuredOutputsParams

MAX_CHARACTERS = 1 << 20  # of a schema or a grammar
# Of one regular expression, choice, constant or pattern. A mask takes a microsecond a character, and streams wait.
MAX_PIECE_CHARACTERS = 1 << 14
# JSON allows any amount of whitespace, and small models are known to go on with it for ever: a line break and an
# indentation, or a few spaces, are what people write.
DEFAULT_WHITESPACE = r"\r?\n(?: {0,24}|\t{0,6})| {1,2}"
MAX_CALLS = 32  # in one answer
_MAX_DEPTH = 100  # of a schema
_COMMENTS = ("$comment", "title", "description", "examples")  # of a schema, which make no work
_PIECES = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/')  # of Lark: strings and regular expressions

_trial = GrammarTrial()
atexit.register(_trial.close)


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """An answer that calls functions. That of one function by `name` is its arguments; otherwise it is a list in one
    spelling, of which only the arguments are the model's to lay out:
    `[{"name": "f", "parameters": {…}}, {"name": "g", "parameters": {…}}]`."""

    schemas: Mapping[str, Mapping[str, Any]]  # of the functions' arguments, by name
    name: str | None = None
    is_parallel: bool = True  # more than one call is allowed


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """What stands around the reasoning that an answer begins with, as `mark` writes it."""

    start: str | None  # None if the answer begins inside of the reasoning
    end: str
    is_optional: bool


class WantedGrammar(NamedTuple):
    """What an answer must be: the arguments of `make_grammar`."""

    content: StructuredOutputsParams | ToolCalls
    reasoning: ReasoningMarks | None = None
    field: str | None = None


def make_grammar(
    content: StructuredOutputsParams | ToolCalls, reasoning: ReasoningMarks | None = None, field: str | None = None
) -> str:
    """The grammar of answers that are `content`, after `reasoning` if any, checked. Every grammar is made here.

    `field` is what errors call a structure, where that is not `structured_outputs`. Takes some seconds for the largest.
    Raises `RequestError` with the reason if it is not one that can be followed.
    """
    if isinstance(content, ToolCalls):
        field = "tools"
        grammar = _of_tool_calls(content)
    else:
        if field is None:
            field = "structured_outputs." + next(n for n in STRUCTURES if getattr(content, n) not in (None, False))
        grammar = _of_structure(content, field)
    if reasoning is not None:
        grammar = _after_reasoning(grammar, reasoning)
    check_grammar(grammar, field)
    return grammar


def check_grammar(grammar: str, field: str) -> None:
    """Raise `RequestError` with the reason if a grammar, which comes from `field`, cannot be followed."""
    if len(grammar) > MAX_CHARACTERS:
        raise RequestError(f"{field} has {len(grammar)} characters; {MAX_CHARACTERS} is the most.", param=field)
    try:
        problem = _problem(grammar)
    except TrialFailed as e:
        problem = str(e)
    if problem:
        raise RequestError(f"{field} cannot be followed: {problem}", param=field)


def mark(text: str, special_token_id: int | None) -> str:
    """A text within a grammar. A special token has no text there and is named by its id."""
    return json.dumps(text) if special_token_id is None else f"<[{special_token_id}]>"


def _of_structure(wanted: StructuredOutputsParams, field: str) -> str:
    try:
        grammar = _write(wanted)
    except (ValueError, RecursionError) as e:
        raise RequestError(f"{field} cannot be read: {_first_line(e)}.", param=field) from None
    check_grammar(grammar, field)
    return grammar


def _of_tool_calls(calls: ToolCalls) -> str:
    schemas = list(calls.schemas.items())
    if calls.name is not None:
        i = list(calls.schemas).index(calls.name)
        return json.dumps({"grammars": [_of_arguments(schemas[i][1], i)]})
    grammars, lines = [], []
    for i, (name, schema) in enumerate(schemas):
        head = json.dumps(json.dumps({"name": name, "parameters": 0})[:-2], ensure_ascii=False)
        lines.append(f'call{i}: {head} @arguments{i} "}}"')
        grammars.append({**_of_arguments(schema, i), "name": f"arguments{i}"})
    names = " | ".join(f"call{i}" for i in range(len(schemas)))
    more = f' (", " call){{0,{MAX_CALLS - 1}}}' if calls.is_parallel else ""
    lark = "\n".join([f'start: "[" call{more} "]"', f"call: {names}", *lines])
    return json.dumps({"grammars": [{"lark_grammar": lark}, *grammars]})


def _of_arguments(schema: Mapping[str, Any], index: int) -> dict[str, Any]:
    """The grammar of a function's arguments: an object, without properties that the schema does not know of."""
    field = f"tools[{index}].function.parameters"
    schema = {"type": "object", **schema}
    if schema["type"] != "object":
        raise RequestError(f"{field} must describe an object, not {schema['type']!r:.100}.", param=field)
    # Parts of an allOf know nothing of each other's properties.
    is_closed = '"allOf"' not in json.dumps(schema)
    wanted = StructuredOutputsParams(json=schema, disable_additional_properties=is_closed)
    grammar: dict[str, Any] = json.loads(_of_structure(wanted, field))["grammars"][0]
    return grammar


def _after_reasoning(grammar: str, marks: ReasoningMarks) -> str:
    """`grammar` after any text up to the mark at its end, or, if that is optional, after none."""
    whole = json.loads(grammar)
    first, *others = whole["grammars"]
    is_token = marks.end.startswith("<[")
    thought = f"thought: /(.|\\n)*/ {marks.end}" if is_token else f"thought: upto\nupto[lazy]: /(.|\\n)*/ {marks.end}"
    lark = (
        f"start: {'reasoning?' if marks.is_optional else 'reasoning'} @answer\n"
        f"reasoning: {marks.start or ''} thought SPACE?\n{thought}\nSPACE: /\\n{{1,2}}/\n"
    )
    return json.dumps({**whole, "grammars": [{"lark_grammar": lark}, {**first, "name": "answer"}, *others]})


def _write(wanted: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher, grammar_from

    if wanted.regex is not None:
        _check_length(wanted.regex)
        return LLMatcher.grammar_from_regex(wanted.regex)
    if wanted.choice is not None:
        for text in wanted.choice:
            _check_length(text)
        alternatives = " | ".join(json.dumps(text, ensure_ascii=False) for text in wanted.choice)
        # As one terminal, which the lexer makes an automaton of: as a rule each one would be an item of the parser.
        return _of_lark(f"start: CHOICE\nCHOICE: {alternatives}")
    if wanted.grammar is not None:
        if len(wanted.grammar) > MAX_CHARACTERS:
            return wanted.grammar  # is refused for its length
        for piece in _PIECES.finditer(wanted.grammar):
            _check_length(piece[0])
        return _of_lark(grammar_from("grammar", wanted.grammar))
    schema = {"type": "object"} if wanted.json is None else wanted.json
    if isinstance(schema, str):
        schema = json.loads(schema)
    _check_parts(schema)
    if not isinstance(schema, dict):
        raise ValueError(f"a schema is an object, not {json.dumps(schema)[:40]}")
    if wanted.disable_additional_properties:
        schema = _closed(schema)
    options: dict[str, Any] = {"whitespace_pattern": wanted.whitespace_pattern or DEFAULT_WHITESPACE}
    if wanted.disable_any_whitespace:
        options = {"whitespace_flexible": False}
    return json.dumps({"grammars": [{"json_schema": {**schema, "x-guidance": options}}]})


def _of_lark(text: str) -> str:
    return text if text.lstrip().startswith("{") else json.dumps({"grammars": [{"lark_grammar": text}]})


def _check_length(piece: str) -> None:
    if len(piece) > MAX_PIECE_CHARACTERS:
        raise ValueError(f"a part of it has {len(piece)} characters, and {MAX_PIECE_CHARACTERS} is the most")


def _check_parts(schema: Any) -> None:
    """That a schema is not too deep and that none of its strings is too long."""
    level, depth = [schema], 0
    while level:
        if depth > _MAX_DEPTH:
            raise ValueError(f"it is nested more than {_MAX_DEPTH} deep")
        depth += 1
        children: list[Any] = []
        for node in level:
            if isinstance(node, str):
                _check_length(node)
            elif isinstance(node, list):
                children += node
            elif isinstance(node, dict):
                children += node.keys()
                children += (value for name, value in node.items() if name not in _COMMENTS)
        level = children


def _closed(schema: Any) -> Any:
    """With `additionalProperties: false` wherever properties are named and nothing is said of others."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(value) for name, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not {"additionalProperties", "patternProperties"} & schema.keys():
        closed["additionalProperties"] = False
    return closed


@lru_cache(maxsize=256)
def _problem(grammar: str) -> str:
    """Why a grammar cannot be followed, or nothing."""
    return _first_line(_trial.problem(grammar))


def _first_line(problem: object) -> str:
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    if not lines:
        return ""
    # What is wrong with a regular expression comes after a drawing of where it is.
    reasons = [line for line in lines[1:] if line.startswith("error:")]
    shown = " ".join([lines[0], *reasons[:1]])
    return shown if len(shown) <= 300 else shown[:300] + "..."
