"""Settings of adapters that depend on the module: keys are regular expressions, written by whoever wrote the adapter.

Python's matcher may take longer than anyone waits for some of them, and nothing can interrupt it; so an expression is
refused whose number of ways to match, counted as the product of its choices, is large.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from octavo.errors import LoadError

_MAX_WAYS = 1 << 20  # of all keys of a setting together: a second's work over the modules of a large model
_WAYS_OF_REPEAT = 64  # about the characters of a module's name
_SINGLE = frozenset({op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN})


class ModulePatterns:
    """Values by pattern: the first key that matches a module's name, or what follows one of its dots, to the end (as
    PEFT's `get_pattern_key`)."""

    def __init__(self, setting: str, patterns: Mapping[str, Any]) -> None:
        """Raises `LoadError` for expressions that are none or would take too long."""
        self._patterns: list[tuple[re.Pattern[str], Any]] = []
        ways = 0
        for key, value in patterns.items():
            try:
                ways += _ways(parser.parse(key))
                found = re.compile(key)
            except (re.error, RecursionError, OverflowError) as e:
                raise LoadError(f"{setting}: {key[:80]!r} is no regular expression: {e}.") from None
            if ways > _MAX_WAYS:
                raise LoadError(f"{setting}: {key[:80]!r} may take too long to match; write it with fewer choices.")
            self._patterns.append((found, value))

    def value(self, module: str, default: Any) -> Any:
        if not self._patterns:
            return default
        ends = [module, *(module[dot.end() :] for dot in re.finditer(r"\.", module))]
        for pattern, value in self._patterns:
            if any(pattern.fullmatch(end) for end in ends):
                return value
        return default


def _ways(items: Any) -> int:
    """How many ways a matcher may have to try. What cannot be bounded this way has more than all are allowed."""
    ways = 1
    for kind, what in items:
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT):
            least, most, body = what
            if least != most:
                ways *= min(most - least + 1, _WAYS_OF_REPEAT)
            is_simple = len(body) == 1 and body[0][0] in _SINGLE
            ways *= 1 if is_simple else _ways(body) if most == 1 else _MAX_WAYS + 1
        elif kind is op.BRANCH:
            ways *= sum(_ways(branch) for branch in what[1])
        elif kind is op.SUBPATTERN:
            ways *= _ways(what[3])
        elif kind not in _SINGLE and kind is not op.AT:
            ways *= _MAX_WAYS + 1  # references, conditions, looking ahead
        if ways > _MAX_WAYS:
            return _MAX_WAYS + 1
    return ways
