"""Finds out whether a grammar can be followed, and refuses grammars that are too long. Each verdict is kept, so that a
grammar that comes again costs nothing."""

import atexit
import hashlib
import re
import threading
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

from octavo.errors import RequestError
from octavo.structured_output import context_free
from octavo.structured_output.trial import GrammarTrial, TrialFailed, TrialsBusy, limits

MAX_CHARACTERS = 1 << 20  # the most characters of a schema or a grammar
# The most characters of one regular expression, choice, constant or pattern. A mask takes a microsecond a character,
# and streams wait for it.
MAX_PIECE_CHARACTERS = 1 << 14
_MAX_DEPTH = 100  # of a schema
COMMENTS = ("$comment", "title", "description", "examples")  # keywords of a schema that cost nothing
# Strings and regular expressions in Lark. Escapes outside begin none: a text without an end is read once.
_PIECES = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/|\\.')
_verdicts: OrderedDict[bytes, str] = OrderedDict()  # by a grammar's hash: why it cannot be followed, or ""
_verdicts_lock = threading.Lock()
_MAX_VERDICTS = 8192
_OF_REGEX = re.compile(r'(?:(?:at )?\d+\(\d+\): invalid regex (?P<regex>".*") \(in \w+\): )?regex parse error:')

_trial = GrammarTrial()
atexit.register(_trial.close)


def problem_of(grammar: str, field: str, *, is_simple: bool = False) -> str:
    """Return why a grammar cannot be followed, or "". Each grammar is tried once, even if it takes too long."""
    if len(grammar) > MAX_CHARACTERS:
        raise RequestError(f"{field} has {len(grammar)} characters; {MAX_CHARACTERS} is the most.", param=field)
    key = hashlib.blake2b(grammar.encode(), digest_size=20).digest()
    with _verdicts_lock:
        if (known := _verdicts.get(key)) is not None:
            _verdicts.move_to_end(key)
            return known
    try:
        problem = first_line(validated(grammar) if is_simple else _trial.problem(grammar))
    except TrialsBusy as e:
        raise RequestError(f"{field} was not tried to its end: {e}", param=field, status=503) from None
    except TrialFailed as e:
        problem = str(e)
    with _verdicts_lock:
        _verdicts[key] = problem
        while len(_verdicts) > _MAX_VERDICTS:
            _verdicts.popitem(last=False)
    return problem


def validated(grammar: str) -> str:
    """Return llguidance's error for a grammar on which its work is bounded, or "". Releases the interpreter's lock."""
    from llguidance import LLMatcher

    try:
        return LLMatcher.validate_grammar(grammar, limits=limits())
    except BaseException as e:
        if type(e).__name__ != "PanicException":  # a panic of Rust, which is not an Exception
            raise
        return "llguidance fails on it."


def first_line(problem: object) -> str:
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    if not lines:
        return ""
    # For a regular expression, a drawing of the place comes before the reason.
    reasons = [line for line in lines[1:] if line.startswith(("error:", "while processing"))]
    if reasons and (found := _OF_REGEX.fullmatch(lines[0])):
        named = f"the regular expression {found['regex'] or '':.200}".rstrip()
        lines[0] = f"{named} cannot be read:"
        reasons[0] = reasons[0].removeprefix("error: ") + "."
    shown = " ".join([lines[0], *reasons[:1]])
    return shown if len(shown) <= 300 else shown[:300] + "..."


def checked_lark(text: str) -> str:
    """Return a request's grammar in llguidance's Lark. Raises `ValueError` if it cannot be read or a piece is too
    long."""
    for piece in _PIECES.finditer(text):
        check_length(piece[0])
    return context_free.to_lark(text)


def check_length(piece: str) -> None:
    if len(piece) > MAX_PIECE_CHARACTERS:
        raise ValueError(f"a part has {len(piece)} characters, and {MAX_PIECE_CHARACTERS} is the most")


def check_parts(schema: Any, passed_over: Collection[str] = COMMENTS) -> None:
    """Raise `ValueError` if a schema is too deep or one of its strings too long, except under the names
    `passed_over`."""
    level, depth = [schema], 0
    while level:
        if depth > _MAX_DEPTH:
            raise ValueError(f"it is nested more than {_MAX_DEPTH} deep")
        depth += 1
        children: list[Any] = []
        for node in level:
            if isinstance(node, str):
                check_length(node)
            elif isinstance(node, list):
                children += node
            elif isinstance(node, dict):
                children += node.keys()
                children += (value for name, value in node.items() if name not in passed_over)
        level = children
