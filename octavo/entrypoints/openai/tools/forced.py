"""Calls that a request insists on (`tool_choice` "required", or a function): reading answers that follow the grammar of
`octavo.sampling.grammar.ToolCalls`."""

from __future__ import annotations

import json

from octavo.entrypoints.openai.tools.calls import Call, JsonScanner, Piece


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
    """The answer is a list of calls; arguments are given as they come."""

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
