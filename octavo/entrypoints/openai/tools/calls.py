"""What the parsers of tool calls have in common.

A parser takes the text of one answer in pieces and gives content and calls, the same in sum however the text is cut. A
call is given when it is whole, since only then is it known to be one: what looks like a call and is none is content.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from octavo.entrypoints.openai.reasoning import held_back

ToolSchemas = Mapping[str, Mapping[str, Any]]  # JSON schemas of the arguments, by the function's name


@dataclass(frozen=True, slots=True)
class Call:
    """A whole call, or (`name` None) a piece of the arguments of the last one."""

    name: str | None
    arguments: str


_CLOSING = re.compile(r"[\]})>]")

Piece = str | Call  # content, or a call


class ToolParser(Protocol):
    """Reads one answer."""

    def add(self, text: str) -> list[Piece]:
        """What `text` completes."""
        ...

    def finish(self) -> list[Piece]:
        """What is still held back when the answer ends."""
        ...


class MarkedParser:
    """For formats with a mark before each call, and mostly one after it. Formats say how to `_take` a call."""

    start: str  # the mark before a call

    def __init__(self, tools: ToolSchemas) -> None:
        self._tools = tools
        self._held = ""
        self._is_inside = False  # `_held` follows a start mark
        self._had_call = False

    def add(self, text: str) -> list[Piece]:
        self._held += text
        # A call ends with a bracket of some kind: long arguments are not looked at for every token.
        if self._is_inside and len(self._held) > 200 and not _CLOSING.search(text):
            return []
        return self._read(is_end=False)

    def finish(self) -> list[Piece]:
        return self._read(is_end=True)

    def _take(self, text: str, is_end: bool) -> tuple[list[Call], int] | None:
        """The calls at the beginning of `text`, which follows a start mark, and how many characters they are.

        No calls and 0 characters: more must come, which it cannot if `is_end`. None: this is no call.
        """
        raise NotImplementedError

    def _read(self, is_end: bool) -> list[Piece]:
        pieces: list[Piece] = []
        while self._held or (self._is_inside and is_end):
            if self._is_inside:
                found = self._take(self._held, is_end)
                if found == ([], 0):
                    break
                self._is_inside = False
                if found is None:
                    self._give(pieces, self.start)
                    continue
                calls, length = found
                pieces += calls
                self._had_call = True
                self._held = self._held[length:]
                continue
            before, mark, after = self._held.partition(self.start)
            if not mark and not is_end:
                shown = len(before) - held_back(before, self.start)
                # Line breaks around calls are no content.
                shown = len(before[:shown].rstrip())
                before, after = before[:shown], before[shown:]
            self._give(pieces, before.rstrip() if mark else before)
            self._held = after
            self._is_inside = bool(mark)
            if not mark:
                break
        return pieces

    def _give(self, pieces: list[Piece], text: str) -> None:
        if self._had_call and not text.strip():
            return
        if text:
            pieces.append(text)


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def json_call(value: Any, *argument_names: str) -> Call | None:
    """A decoded `{"name": …, "arguments": {…}}` as a call, or None if it is none."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments: Any = next((value[name] for name in argument_names if name in value), {})
    if isinstance(arguments, str):  # some models write the object as text
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    return Call(value["name"], to_json(arguments)) if isinstance(arguments, dict) else None


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


class JsonScanner:
    """Finds the end of a JSON object or array in a text that comes in pieces, without reading anything twice."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_string = False
        self._is_escaped = False

    def end(self, text: str) -> int | None:
        """How many characters of `text` the value still takes, or None if it goes on beyond it."""
        for i, char in enumerate(text):
            if self._is_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif char == "\\":
                    self._is_escaped = True
                elif char == '"':
                    self._is_string = False
            elif char == '"':
                self._is_string = True
            elif char in "[{":
                self._depth += 1
            elif char in "]}":
                self._depth -= 1
                if self._depth <= 0:
                    return i + 1
        return None


def load_json(text: str) -> Any:
    """The value, or None if `text` is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
