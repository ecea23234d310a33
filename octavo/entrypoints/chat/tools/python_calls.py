"""Reads calls in notations other than JSON: Python's, and Gemma's keyed values."""

from __future__ import annotations

import ast
import json
import keyword
import re
from collections.abc import Collection, Mapping
from typing import Any

from octavo.entrypoints.chat.tools.tool_formats import KeyedValues
from octavo.entrypoints.chat.tools.tool_parser_base import Call, load_json, to_json

_CONSTANTS = {"true": True, "false": False, "null": None}  # models write JSON's constants, too
# Keys and Python's constants in a text of keyed values, outside of texts.
_KEY = re.compile(r"([{,]\s*)([^\s{}\[\],:\"](?:[^{}\[\],:\"]*[^\s{}\[\],:\"])?)\s*:")
_CONSTANT = re.compile(r"(?<=[:,\[])\s*(None|True|False)(?=\s*[,}\]])")
_JSON_CONSTANTS = {"None": "null", "True": "true", "False": "false"}
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
# A quote ends a text only if the call continues after it, because models do not escape apostrophes and line breaks.
_TEXTS = {
    quote: re.compile(rf"{quote}((?:[^\\]|\\.)*?){quote}(?=\s{{0,64}}(?:[,)\]}}:]|\Z))", re.DOTALL) for quote in "'\""
}
_WITHIN_TEXT = re.compile(r'\\.|["\n\r]', re.DOTALL)
_LINE_BREAKS = {"\n": "\\n", "\r": "\\r"}
_LEADING_ZEROS = re.compile(r"(?<![\w.])0+(?=\d)")
# A name of a function or an argument. Python has no names such as `read-file` and `from`: others stand for them.
_NAME = r"[^\s,()\[\]{}='\"]+"
_CALLED = re.compile(rf"(?<![^\s,(\[]){_NAME}(?=\s{{0,64}}(=(?!=)|\())")
_STAND_IN = "name_{}_"
_HEAD = re.compile(r"\s*([\w.\-]{1,256})\s*(?=\{)")


def is_python_name(text: str) -> bool:
    """Return whether a text can be the name of a function or an argument: no mark of the notation is in it."""
    return re.fullmatch(_NAME, text) is not None


def python_calls(text: str) -> list[Call] | None:
    """Return the calls of `[f(a="b"), g()]`, or of one `f(a="b")` a line. None for any other text."""
    calls = _parsed_calls(text, {})
    if calls is not None:
        return calls
    names = dict[str, str]()
    repaired = _repaired(text, names)
    return _parsed_calls(repaired, {stand_in: name for name, stand_in in names.items()})


def python_list(text: str) -> tuple[list[Call], int] | None:
    """Return the calls of the list at the beginning of `text`, and the list's end. None if `text` does not begin with a
    list of calls."""
    depth, position, open_quotes = 0, 0, set[str]()
    while position < len(text):
        if (quoted := _text_at(text, position, open_quotes)) is not None:
            position = quoted.end()
            continue
        depth += (text[position] in "[({") - (text[position] in "])}")
        position += 1
        if depth <= 0:
            calls = python_calls(text[:position])
            return None if calls is None else (calls, position)
    return None


def ends_within_text(text: str) -> bool:
    """Return whether the beginning of a call ends within a quoted text."""
    position, open_quotes = 0, set[str]()
    while position < len(text):
        quoted = _text_at(text, position, open_quotes)
        position = position + 1 if quoted is None else quoted.end()
    return bool(open_quotes)


def _text_at(text: str, position: int, open_quotes: set[str]) -> re.Match[str] | None:
    """Return the quoted text that begins at `position`, or None. `open_quotes` has the quotes whose end was not found
    from an earlier place; they are not searched again, so that reading takes linear time."""
    quote = text[position]
    if quote not in _TEXTS or quote in open_quotes:
        return None
    found = _TEXTS[quote].match(text, position)
    if found is None:
        open_quotes.add(quote)
    return found


def _repaired(text: str, names: dict[str, str]) -> str:
    """Return `text` as valid Python: line breaks and apostrophes in texts are escaped, leading zeros of numbers
    removed, and names that Python does not have replaced. `names` gets the replacement of each."""

    def code(part: str) -> str:
        return _LEADING_ZEROS.sub("", _CALLED.sub(lambda found: _python_name(found, names), part))

    parts, position, begin, open_quotes = list[str](), 0, 0, set[str]()
    while position < len(text):
        if (quoted := _text_at(text, position, open_quotes)) is None:
            position += 1
            continue
        parts.append(code(text[begin:position]))
        parts.append(f'"{_WITHIN_TEXT.sub(_escaped, quoted[1])}"')
        position = begin = quoted.end()
    return "".join(parts) + code(text[begin:])


def _python_name(found: re.Match[str], names: dict[str, str]) -> str:
    name = found[0]
    parts = name.split(".") if found[1] == "(" else [name]  # only functions may have a path
    is_name = all(part.isidentifier() and not keyword.iskeyword(part) for part in parts)
    is_name &= re.fullmatch(_STAND_IN.format(r"\d+"), name) is None  # else it would stand for another one
    return name if is_name else names.setdefault(name, _STAND_IN.format(len(names)))


def _escaped(found: re.Match[str]) -> str:
    return _LINE_BREAKS.get(found[0], '\\"' if found[0] == '"' else found[0])


def _parsed_calls(text: str, names: Mapping[str, str]) -> list[Call] | None:
    """Return the calls of valid Python; None for any other text. `names` has the names that others stand for."""
    try:
        # JSON's texts may escape a slash, Python's may not.
        statements = ast.parse(_ESCAPE.sub(lambda found: "/" if found[1] == "/" else found[0], text.strip())).body
        if not all(isinstance(statement, ast.Expr) for statement in statements):
            return None
        values = [statement.value for statement in statements if isinstance(statement, ast.Expr)]
        nodes = [node for value in values for node in (value.elts if isinstance(value, ast.List) else [value])]
        return [_call(node, names) for node in nodes] or None
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return None


def _call(node: ast.expr, names: Mapping[str, str]) -> Call:
    if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name | ast.Attribute):
        raise ValueError("not a call with named arguments")
    arguments = {}
    for argument in node.keywords:
        if argument.arg is None:
            raise ValueError("** has no name")
        arguments[names.get(argument.arg, argument.arg)] = ast.literal_eval(_with_json_names(argument.value))
    # JSON's texts may escape a character as two surrogates; join them.
    written = json.loads(json.dumps(arguments))
    name = ast.unparse(node.func)
    return Call(names.get(name, name), to_json(written))


def _with_json_names(node: ast.expr) -> Any:
    for parent in ast.walk(node):
        for name, value in ast.iter_fields(parent):
            if isinstance(value, list):
                setattr(parent, name, [_constant(item) for item in value])
            else:
                setattr(parent, name, _constant(value))
    return _constant(node)


def _constant(node: object) -> object:
    return ast.Constant(_CONSTANTS[node.id]) if isinstance(node, ast.Name) and node.id in _CONSTANTS else node


def keyed_call(text: str, body: KeyedValues, names: Collection[str]) -> Call | None:
    """Return the call of `call:f{city:"Paris",days:3}`, in which `body.quote` replaces the quotes. None if the text is
    no such call. Models forget the mark before the name: without it only functions in `names` are called."""
    text = text.strip()
    is_marked = text.startswith(body.before)
    if is_marked and text.removeprefix(body.before) in names:  # no arguments
        text += "{}"
    head = _HEAD.match(text.removeprefix(body.before) if is_marked else text.removeprefix(":"))
    if head is None or not (is_marked or head[1] in names):
        return None
    text = head.string
    # Every second part is a text; the other parts are JSON with unquoted keys.
    parts = text[head.end() :].split(body.quote)
    written = [json.dumps(part) if i % 2 else _as_json(part) for i, part in enumerate(parts)]
    arguments = load_json("".join(written)) if len(parts) % 2 else None
    return Call(head[1], to_json(arguments)) if isinstance(arguments, dict) else None


def _as_json(part: str) -> str:
    quoted = _KEY.sub(lambda found: f"{found[1]}{json.dumps(found[2])}:", part)
    return _CONSTANT.sub(lambda found: _JSON_CONSTANTS[found[1]], quoted)
