"""Calls as a list of Python's own, which Llama 3.2, Llama 4 and others write as the whole answer:

[get_weather(city="Paris"), get_time(zone="CET", exact=True)]
"""

from __future__ import annotations

import ast
import re
from typing import Any

from octavo.entrypoints.openai.tools.calls import Call, Piece, ToolSchemas, to_json

_BEGIN = re.compile(r"\s*(?:<\|python_start\|>)?\s*\[\s*[A-Za-z_][\w.]*\s*\(")
_BEGIN_SO_FAR = re.compile(r"\s*(?:<[|a-z_>]*)?\s*(?:\[\s*(?:[A-Za-z_][\w.]*)?\s*)?")
_MARKS = ("<|python_start|>", "<|python_end|>")


class PythonicParser:
    def __init__(self, tools: ToolSchemas) -> None:
        self._held = ""
        self._is_content = False

    def add(self, text: str) -> list[Piece]:
        self._held += text
        may_be_calls = _BEGIN.match(self._held) or _BEGIN_SO_FAR.fullmatch(self._held)
        self._is_content = self._is_content or not may_be_calls
        return self._give() if self._is_content else []

    def finish(self) -> list[Piece]:
        text = self._held.strip()
        for mark in _MARKS:
            text = text.removeprefix(mark).removesuffix(mark).strip()
        calls = None if self._is_content else _parse(text)
        return self._give() if calls is None else [*calls]

    def _give(self) -> list[Piece]:
        text, self._held = self._held, ""
        return [text] if text else []


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
