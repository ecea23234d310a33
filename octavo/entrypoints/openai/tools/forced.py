"""Calls that a request insists on (`tool_choice` "required", or a function): grammars, and reading what follows them.

A named function's answer is its arguments. Where any function will do, the answer is a list in one spelling, of which
only the arguments are the model's to lay out: `[{"name": "f", "parameters": {…}}, {"name": "g", "parameters": {…}}]`.
"""

from __future__ import annotations

import json
from typing import Any

from octavo.entrypoints.openai.tools.calls import Call, JsonScanner, Piece, ToolSchemas
from octavo.errors import RequestError
from octavo.sampling.grammar import make_grammar
from octavo.sampling_params import StructuredOutputsParams

MAX_CALLS = 32  # in one answer


def grammar_of_tools(tools: ToolSchemas, *, is_parallel: bool) -> str:
    """The grammar of an answer that calls one of `tools` or (`is_parallel`) several. Raises `RequestError`."""
    grammars = []
    lines = []
    for i, (name, schema) in enumerate(tools.items()):
        head = json.dumps(json.dumps({"name": name, "parameters": 0})[:-2], ensure_ascii=False)
        lines.append(f'call{i}: {head} @arguments{i} "}}"')
        grammars.append({**_arguments(schema, i), "name": f"arguments{i}"})
    calls = " | ".join(f"call{i}" for i in range(len(tools)))
    more = f' (", " call){{0,{MAX_CALLS - 1}}}' if is_parallel else ""
    lark = "\n".join([f'start: "[" call{more} "]"', f"call: {calls}", *lines])
    return json.dumps({"grammars": [{"lark_grammar": lark}, *grammars]})


def grammar_of_arguments(tools: ToolSchemas, name: str) -> str:
    """The grammar of an answer that is the arguments of one function. Raises `RequestError`."""
    return json.dumps({"grammars": [_arguments(tools[name], list(tools).index(name))]})


def _arguments(schema: Any, index: int) -> dict[str, Any]:
    """The grammar of a function's arguments: an object, without properties that the schema does not know of."""
    field = f"tools[{index}].function.parameters"
    schema = {"type": "object", **schema}
    if schema["type"] != "object":
        raise RequestError(f"{field} must describe an object, not {schema['type']!r:.100}.", param=field)
    # Parts of an allOf know nothing of each other's properties.
    is_closed = '"allOf"' not in json.dumps(schema)
    wanted = StructuredOutputsParams(json=schema, disable_additional_properties=is_closed)
    try:
        grammar: dict[str, Any] = json.loads(make_grammar(wanted))["grammars"][0]
    except RequestError as error:
        raise RequestError(str(error).replace("structured_outputs.json", field, 1), param=field) from None
    return grammar


class NamedCallReader:
    """The whole answer is the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def add(self, text: str) -> list[Piece]:
        if not text:
            return []
        name, self._name = self._name, None
        return [Call(name, text)]

    def finish(self) -> list[Piece]:
        return []


class RequiredCallsReader:
    """The answer is the list that `grammar_of_tools` describes; arguments are given as they come."""

    def __init__(self) -> None:
        self._held = ""
        self._scanner: JsonScanner | None = None  # within arguments

    def add(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while self._held:
            if self._scanner is None:
                name, mark, rest = self._held.partition(', "parameters": ')
                if not mark:
                    break
                name = name[name.index('{"name": ') + len('{"name": ') :]
                pieces.append(Call(json.loads(name), ""))
                self._held, self._scanner = rest, JsonScanner()
            else:
                end = self._scanner.end(self._held)
                taken = self._held[:end]
                if taken:
                    pieces.append(Call(None, taken))
                self._held = self._held[len(taken) :]
                if end is not None:
                    self._scanner = None
        return pieces

    def finish(self) -> list[Piece]:
        return []
