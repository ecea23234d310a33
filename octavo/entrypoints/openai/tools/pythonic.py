"""Calls as a list of Python's own, which Llama 3.2, Llama 4 and others write as the whole answer:

[get_weather(city="Paris"), get_time(zone="CET", exact=True)]
"""

from __future__ import annotations

import ast
import re
from typing import Any

from octavo.entrypoints.openai.tools.calls import Call, Steps, TextParser, to_json

_BEGIN = re.compile(r"\s{0,32}(?:<\|python_start\|>)?\s{0,32}\[\s{0,32}[A-Za-z_][\w.]{0,255}\s{0,32}\(")
_BEGIN_SO_FAR = re.compile(r"\s{0,32}(?:<[|a-z_>]{0,16})?\s{0,32}(?:\[\s{0,32}(?:[A-Za-z_][\w.]{0,255})?\s{0,32})?")
_MARKS = ("<|python_start|>", "<|python_end|>")


class PythonicParser(TextParser):
    """The text is read as a whole at its end, if it begins as calls do."""

    def _read(self) -> Steps[None]:
        while not _BEGIN.match(self._text):
            if not _BEGIN_SO_FAR.fullmatch(self._text) or not (yield from self._more()):
                yield from self._give_rest()
                return
        while (yield from self._more()):
            pass
        text = self._text.strip()
        for mark in _MARKS:
            text = text.removeprefix(mark).removesuffix(mark).strip()
        if (calls := _parse(text)) is not None:
            self._give_calls(calls)
        else:
            self._give(self._text)


def _parse(text: str) -> list[Call] | None:
    try:
        whole = ast.parse(text, mode="eval").body
        if not isinstance(whole, ast.List) or not whole.elts:
            return None
        return [_call(node) for node in whole.elts]
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return None


def _call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with named arguments")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("** has no name")
        arguments[keyword.arg] = ast.literal_eval(_with_json_names(keyword.value))
    return Call(ast.unparse(node.func), to_json(arguments))


def _with_json_names(node: ast.expr) -> Any:
    """Models write true, false and null, too."""
    names = {"true": True, "false": False, "null": None}
    for parent in ast.walk(node):
        for name, value in ast.iter_fields(parent):
            if isinstance(value, list):
                setattr(parent, name, [_constant(item, names) for item in value])
            else:
                setattr(parent, name, _constant(value, names))
    return _constant(node, names)


def _constant(node: object, names: dict[str, bool | None]) -> object:
    return ast.Constant(names[node.id]) if isinstance(node, ast.Name) and node.id in names else node
