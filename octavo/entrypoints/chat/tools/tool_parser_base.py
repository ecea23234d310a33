"""Common parts of the readers of tool calls.

A reader takes the text of one answer in pieces and gives content and calls. The sums do not depend on how the text is
cut. A call is given when it is complete, because only then is it known to be a call; text that only looks like a call
is content.
"""

import json
import math
import re
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, TypeVar

from octavo.entrypoints.chat.reasoning import held_back

ToolSchemas = Mapping[str, Mapping[str, Any]]  # JSON schemas of the arguments, by the function's name


@dataclass(frozen=True, slots=True)
class Call:
    """A whole call, or (`name` None) a piece of the last call's arguments. `id` is the id that the model wrote."""

    name: str | None
    arguments: str
    id: str = ""


Piece = str | Call  # content, or a call
T = TypeVar("T")
Steps = Generator[None, None, T]  # pauses until more text has come

_MIN_DAMAGED = 6  # characters of a mark that is known without one of them
_NO_SPACE = re.compile(r"\S")
_JSON_MARKS = re.compile(r'\\.?|["\[\]{}]', re.DOTALL)


class ToolParser(Protocol):
    """Reads one answer."""

    def add(self, text: str) -> list[Piece]:
        """Return the pieces that `text` completes."""
        ...

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """Return the pieces still held back when the answer ends. `is_cut`: not by the model's own choice."""
        ...


class TextParser:
    """Holds the text of an answer as it arrives, and reads on from where it stopped, so that it looks at no character
    of a call twice. Subclasses implement `_read`."""

    def __init__(self, tools: ToolSchemas) -> None:
        self._tools = tools
        self._text = ""
        self._begin = 0  # begin of the text that has not been given
        self._seen = 0  # characters already looked at
        self._is_whole = False  # the answer is complete
        self._is_cut = False  # and the model would have gone on
        self._pieces: list[Piece] = []  # completed pieces
        self._had_call = False
        self._is_after_call = False  # no content since the last call
        self._reading = self._read()

    def add(self, text: str) -> list[Piece]:
        # Without another reference Python appends in place.
        held, self._text = self._text, ""
        held += text
        self._text = held
        return self._read_on()

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        self._is_whole, self._is_cut = True, is_cut
        return self._read_on()

    def _read_on(self) -> list[Piece]:
        next(self._reading, None)
        pieces, self._pieces = self._pieces, []
        return pieces

    def _read(self) -> Steps[None]:
        """Give the pieces of the whole text."""
        raise NotImplementedError

    def _give_calls(self, calls: Sequence[Call]) -> None:
        self._pieces += calls
        self._had_call = self._is_after_call = True
        self._begin = self._seen

    def _give(self, text: str) -> None:
        """Give content. Text of only blanks after a call is dropped."""
        if text and not (self._is_after_call and text.isspace()):
            self._pieces.append(text)
            self._is_after_call = False

    def _give_until(self, end: int) -> None:
        """Give the content before `end`, and drop it from the held text."""
        self._give(self._text[self._begin : end])
        self._text = self._text[end:]
        self._seen -= end
        self._begin = 0

    def _give_rest(self) -> Steps[None]:
        """Give the rest of the answer as content."""
        while True:
            # Whether blanks after a call are content depends on what follows them.
            if not (self._is_after_call and self._text[self._begin :].isspace()):
                self._give_until(len(self._text))
            if not (yield from self._more()):
                return

    def _more(self) -> Steps[bool]:
        """Wait for more text. Return False if the answer has ended."""
        if self._is_whole:
            return False
        yield
        return True

    def _skip_spaces(self, others: re.Pattern[str] = _NO_SPACE) -> Steps[bool]:
        """Go to the next match of `others`. Return False without one."""
        while (found := others.search(self._text, self._seen)) is None:
            self._seen = len(self._text)
            if not (yield from self._more()):
                return False
        self._seen = found.start()
        return True

    def _skip_mark(self, mark: str) -> Steps[bool]:
        """Go behind spaces and `mark`. If other text comes, skip nothing and return False."""
        begin = self._seen
        if (yield from self._skip_spaces()):
            while mark.startswith(self._text[self._seen : self._seen + len(mark)]):
                if self._text.startswith(mark, self._seen):
                    self._seen += len(mark)
                    return True
                if not (yield from self._more()):
                    break
        self._seen = begin
        return False

    def _skip_damaged(self, marks: Sequence[str], others: Collection[str]) -> Steps[str | None]:
        """Go behind spaces and a mark that lacks a character or, at the end of the answer, its rest. Return the whole
        mark, or None without one. A text of `others` is not a damaged mark."""
        damaged = {one: mark for mark in marks for one in damaged_marks(mark) if one not in others}
        longest, begin = max(map(len, marks), default=0), self._seen
        if (yield from self._skip_spaces()):
            while any(one.startswith(self._text[self._seen : self._seen + longest]) for one in (*marks, *damaged)):
                if not (yield from self._more()):
                    rest, self._seen = self._text[self._seen :], len(self._text)
                    return next(mark for mark in (*marks, *damaged) if mark.startswith(rest))
            found = [one for one in damaged if self._text.startswith(one, self._seen)]
            if found:
                one = max(found, key=len)
                self._seen += len(one)
                return damaged[one]
        self._seen = begin
        return None

    def _take_until(self, mark: str) -> Steps[str | None]:
        """Return the text before the next `mark`, and go behind the mark. Return None without a mark."""
        begin = self._seen
        while (found := find(self._text, mark, max(begin, self._seen - len(mark) + 1))) < 0:
            self._seen = len(self._text)
            if not (yield from self._more()):
                return None
        self._seen = found + len(mark)
        return self._text[begin:found]

    def _take_json(self) -> Steps[Any]:
        """Return the value of the JSON object or list that begins here, and go behind it. Return None if it has no end
        or is not JSON."""
        begin, scanner = self._seen, JsonScanner()
        while (end := scanner.end(self._text, self._seen)) is None:
            self._seen = len(self._text)
            if not (yield from self._more()):
                return None
        self._seen = end
        return load_json(self._text[begin:end])


@lru_cache(maxsize=1024)
def damaged_marks(mark: str) -> tuple[str, ...]:
    """Return the texts that lack one character of a mark, which models write in its place. None of a short mark."""
    if len(mark) < _MIN_DAMAGED:
        return ()
    return tuple(dict.fromkeys(mark[:i] + mark[i + 1 :] for i in range(len(mark))))


def without_damaged_end(text: str, mark: str) -> str:
    """Return a text without spaces, and a damaged `mark` or the first part of it, at its end."""
    text = text.rstrip()
    found = next((one for one in damaged_marks(mark) if text.endswith(one)), None)
    return text[: len(text) - (held_back(text, mark) if found is None else len(found))].rstrip()


def find(text: str, mark: str, begin: int) -> int:
    """Return where `mark` begins, or -1. Every search for a mark goes through here or `search`, so that tests can count
    the work."""
    return text.find(mark, begin)


def search(text: str, marks: re.Pattern[str], begin: int) -> re.Match[str] | None:
    return marks.search(text, begin)


def json_call(value: Any, argument_names: Sequence[str], key: str = "name") -> Call | None:
    """Return a decoded `{"name": …, "arguments": {…}}` as a call, or None if it is no call. `key` is the key of the
    name."""
    if isinstance(value, dict) and key not in value and isinstance(value.get("function"), dict):
        value = value["function"]  # models repeat the form in which the functions are described
    if not isinstance(value, dict) or not isinstance(value.get(key), str) or not value[key]:
        return None
    arguments: Any = next((sent for name in argument_names if (sent := value.get(name)) is not None), {})
    if isinstance(arguments, str):  # some models write the object as a text
        arguments = load_json(arguments) if arguments.strip() not in ("", "null") else {}
    own_id = value.get("id")
    own_id = own_id if isinstance(own_id, str) else ""
    return Call(value[key], to_json(arguments), own_id) if isinstance(arguments, dict) else None


def to_json(value: Any) -> str:
    """Return a value as JSON. Raises `ValueError` for NaN and the infinities, which Python reads but JSON does not
    have."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which JSON can only escape
        return json.dumps(value)
    return text


class JsonScanner:
    """Finds the end of a JSON object or array in a text that arrives in pieces, without reading a character twice."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_string = False
        self._is_escaped = False

    def end(self, text: str, begin: int = 0) -> int | None:
        """Return where in `text` the value ends; None if it goes on. Earlier calls have read the text before
        `begin`."""
        if self._is_escaped and begin < len(text):
            begin += 1
            self._is_escaped = False
        for found in _JSON_MARKS.finditer(text, begin):
            mark = found[0]
            if mark[0] == "\\":
                self._is_escaped = len(mark) == 1  # the escaped character has not come yet
            elif mark == '"':
                self._is_string = not self._is_string
            elif not self._is_string:
                self._depth += 1 if mark in "[{" else -1
                if self._depth <= 0:
                    return found.end()
        return None


def load_json(text: str) -> Any:
    """Return the value of `text`, or None if it is not JSON. NaN and numbers that Python reads as infinite are not
    JSON. Texts may have real line breaks and tabs, which models do not always escape."""
    try:
        return json.loads(text, parse_constant=_finite, parse_float=_finite, strict=False)
    except (ValueError, RecursionError):
        return None


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is no number of JSON")
    return value
