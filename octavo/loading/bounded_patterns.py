"""Regular expressions over modules' names that come from a checkpoint or an adapter, so they are not trusted.

Python's matcher may take very long for some expressions, and nothing can interrupt it. So an expression is refused if
the number of ways to match it, counted as the product of its choices, is large.
"""

import math
import re
from collections.abc import Iterable
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from octavo.errors import LoadError

_MAX_WAYS = 1 << 20  # sum over all expressions of a setting: about a second of work for the modules of a large model
_WAYS_OF_REPEAT = 64  # about the number of characters of a module's name
_SINGLE = frozenset({op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN})
_REPEATS = (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT)


def bounded_patterns(setting: str, expressions: Iterable[str]) -> list[re.Pattern[str]]:
    """Return the compiled expressions of a setting. Raises `LoadError` for a text that is no regular expression, and if
    matching may take too long."""
    ways, patterns = 0, []
    for expression in expressions:
        try:
            ways += _ways(parser.parse(expression))
            patterns.append(re.compile(expression))
        except (re.error, RecursionError, OverflowError, TypeError) as e:
            raise LoadError(f"{setting}: {str(expression)[:80]!r} is no regular expression: {e}.") from None
        if ways > _MAX_WAYS:
            raise LoadError(f"{setting}: {expression[:80]!r} may take too long to match; write it with fewer choices.")
    return patterns


def _ways(items: Any) -> int:
    """Return how many ways a matcher may have to try. The number of an expression that cannot be bounded is
    `_TOO_MANY`, which exceeds `_MAX_WAYS`."""
    ways, num_open = 1, 0
    for kind, what in items:
        if kind in _REPEATS:
            least, most, body = what
            num_open += most - least >= _WAYS_OF_REPEAT
            if least != most:
                ways *= min(most - least + 1, _WAYS_OF_REPEAT)
            is_simple = len(body) == 1 and body[0][0] in _SINGLE
            ways *= 1 if is_simple else _ways(body) if most == 1 else _TOO_MANY
        elif kind is op.BRANCH:
            ways *= sum(_ways(branch) for branch in what[1])
        elif kind is op.SUBPATTERN:
            ways *= _ways(what[3])
        elif kind in (op.ASSERT, op.ASSERT_NOT):
            ways *= _ways(what[1])
        elif kind not in _SINGLE and kind is not op.AT:
            ways *= _TOO_MANY  # back references and conditions
        if ways > _TOO_MANY:
            return _TOO_MANY
    return min(ways // math.factorial(num_open), _TOO_MANY)  # long repeats divide one name among them


_TOO_MANY = _MAX_WAYS << 24
