"""What an answer must be, as a grammar in llguidance's own form: JSON text that names Lark grammars and JSON schemas.

The front end makes and checks it before a request is queued; it crosses the wire as text, and
`octavo.sampling.structured` has it followed. llguidance bounds the work that a grammar may make (see `limits`), and
lets other threads run meanwhile.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from octavo.errors import RequestError
from octavo.sampling_params import STRUCTURES, StructuredOutputsParams

MAX_CHARACTERS = 1 << 20  # of a schema, a regular expression or a grammar
# JSON allows any amount of whitespace, and small models are known to go on with it for ever: a line break and an
# indentation, or a few spaces, are what people write.
DEFAULT_WHITESPACE = r"\r?\n(?: {0,24}|\t{0,6})| {1,2}"
_MAX_DEPTH = 100  # of a schema


def limits() -> Any:
    """What one grammar may cost. Where llguidance's default is not taken: a state of the lexer is about 2 kB."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=50_000, verbose_errors=False)


def make_grammar(wanted: StructuredOutputsParams) -> str:
    """The grammar of `wanted`, checked. Takes up to a second for the largest ones.

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
    if problem := _problem(grammar):
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
        return LLMatcher.grammar_from_regex(wanted.regex)
    if wanted.choice is not None:
        alternatives = " | ".join(json.dumps(text, ensure_ascii=False) for text in wanted.choice)
        return _of_lark(f"start: {alternatives}")
    if wanted.grammar is not None:
        if len(wanted.grammar) > MAX_CHARACTERS:
            return wanted.grammar  # is refused for its length
        return _of_lark(grammar_from("grammar", wanted.grammar))
    schema = {"type": "object"} if wanted.json is None else wanted.json
    if isinstance(schema, str):
        schema = json.loads(schema)
    _check_depth(schema)
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


def _check_depth(schema: Any) -> None:
    level, depth = [schema], 0
    while level := [
        child
        for node in level
        if isinstance(node, dict | list)
        for child in (node.values() if isinstance(node, dict) else node)
    ]:
        depth += 1
        if depth > _MAX_DEPTH:
            raise ValueError(f"it is nested more than {_MAX_DEPTH} deep")


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
    from llguidance import LLMatcher

    return _first_line(LLMatcher.validate_grammar(grammar, limits=limits()))


def _first_line(problem: object) -> str:
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    if not lines:
        return ""
    # What is wrong with a regular expression comes after a drawing of where it is.
    reasons = [line for line in lines[1:] if line.startswith("error:")]
    shown = " ".join([lines[0], *reasons[:1]])
    return shown if len(shown) <= 300 else shown[:300] + "..."
