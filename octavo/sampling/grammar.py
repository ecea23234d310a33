"""What an answer must be, as a grammar in llguidance's own form: JSON text that names Lark grammars and JSON schemas.

The front end makes and checks it before a request is queued; it crosses the wire as text, and
`octavo.sampling.structured` has it followed. llguidance itself looks at it in a process of its own (`grammar_trial`).
"""

from __future__ import annotations

import atexit
import json
import re
from functools import lru_cache
from typing import Any

from octavo.errors import RequestError
from octavo.sampling.grammar_trial import GrammarTrial, TrialFailed
from octavo.sampling_params import STRUCTURES, StructuredOutputsParams

MAX_CHARACTERS = 1 << 20  # of a schema or a grammar
# Of one regular expression, choice, constant or pattern. A mask takes a microsecond a character, and streams wait.
MAX_PIECE_CHARACTERS = 1 << 14
# JSON allows any amount of whitespace, and small models are known to go on with it for ever: a line break and an
# indentation, or a few spaces, are what people write.
DEFAULT_WHITESPACE = r"\r?\n(?: {0,24}|\t{0,6})| {1,2}"
_MAX_DEPTH = 100  # of a schema
_COMMENTS = ("$comment", "title", "description", "examples")  # of a schema, which make no work
_PIECES = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/')  # of Lark: strings and regular expressions

_trial = GrammarTrial()
atexit.register(_trial.close)


def make_grammar(wanted: StructuredOutputsParams) -> str:
    """The grammar of `wanted`, checked. Takes some seconds for the largest ones.

    Raises `RequestError` with the reason if it is not one that can be followed.
    """
    name = next(name for name in STRUCTURES if getattr(wanted, name) not in (None, False))
    field = f"structured_outputs.{name}"
    try:
        text = _write(wanted)
    except (ValueError, RecursionError) as e:
        raise RequestError(f"{field} cannot be read: {_first_line(e)}.", param=field) from None
    check_grammar(text, field)
    return text


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


def after_reasoning(grammar: str, start: str | None, end: str, *, is_optional: bool) -> str:
    """`grammar` for an answer that begins with reasoning: any text up to the mark `end`, after the mark `start` unless
    that is None; or, if it `is_optional`, no reasoning at all. Marks are as `mark` writes them."""
    whole = json.loads(grammar)
    first, *others = whole["grammars"]
    is_token = end.startswith("<[")
    thought = f"thought: /(.|\\n)*/ {end}" if is_token else f"thought: upto\nupto[lazy]: /(.|\\n)*/ {end}"
    lark = (
        f"start: {'reasoning?' if is_optional else 'reasoning'} @answer\n"
        f"reasoning: {start or ''} thought SPACE?\n{thought}\nSPACE: /\\n{{1,2}}/\n"
    )
    return json.dumps({**whole, "grammars": [{"lark_grammar": lark}, {**first, "name": "answer"}, *others]})


def mark(text: str, special_token_id: int | None) -> str:
    """A text within a grammar. A special token has no text there and is named by its id."""
    return json.dumps(text) if special_token_id is None else f"<[{special_token_id}]>"


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
    return json.dumps({"grammars": [{"json_schema": {**schema, "x-guidance": _json_options(wanted)}}]})


def _of_lark(text: str) -> str:
    return text if text.lstrip().startswith("{") else json.dumps({"grammars": [{"lark_grammar": text}]})


def _json_options(wanted: StructuredOutputsParams) -> dict[str, Any]:
    if wanted.disable_any_whitespace:
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": wanted.whitespace_pattern or DEFAULT_WHITESPACE}


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
