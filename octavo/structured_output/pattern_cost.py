"""How costly regular expressions in a schema may be for llguidance, found without building their automata."""

import math
import re
from functools import lru_cache
from itertools import combinations

from octavo.structured_output.schema_keywords import Schema, children

_MAX_TAME = 100  # characters of a regular expression
_MAX_COUNT, _MAX_COUNT_AFTER_ANY = 256, 8
_COUNTED = re.compile(r"\{(\d+)(?:,(\d*))?\}")
# A counted group that ends in one or more characters of a class, such as `(\S+\s+){0,49}`.
_COUNTED_OPEN_END = re.compile(r"(?:\\[dDsSwW]|[.\]])[+*]\)+\{\d")
_MAX_LENGTH_OF_OPEN_ENDS = 100
# A class, an escape, a count of the piece before, or another character.
_PIECE = re.compile(r"\[(?:[^\]\\]|\\.)*\]|\\[xpP]\{[^}]*\}|\\.|\{(\d+)(?:,(\d*))?\}|.", re.DOTALL)


def patterns_meet(schema: Schema) -> tuple[bool, bool]:
    """Return whether a lowered schema has a regular expression, perhaps behind a reference, and whether two may apply
    to one value."""
    if not isinstance(schema, dict):
        return False, False
    has_one = not schema.keys().isdisjoint(("pattern", "format", "patternProperties"))
    num_parts, num_beside = int("$ref" in schema) + ("pattern" in schema and "format" in schema), 0
    for keyword, _, child in children(schema):
        child_has, child_meets = patterns_meet(child)
        if child_meets:
            return True, True
        if keyword == "allOf":
            num_parts += child_has
        elif keyword == "anyOf":
            num_beside |= child_has
        else:
            has_one |= child_has
    num_parts += num_beside + has_one
    return num_parts > 0, num_parts > 1


def is_tame(pattern: str) -> bool:
    """Return whether an expression's automaton is about as large as the expression. It is not if counts follow any
    text."""
    counts = [int(found[2] or found[1]) for found in _COUNTED.finditer(pattern)]
    is_unbounded = not pattern.startswith("^") or any(sign in pattern for sign in ("*", "+", ",}"))
    most = _MAX_COUNT_AFTER_ANY if is_unbounded else _MAX_COUNT
    return len(pattern) <= _MAX_TAME and math.prod(max(1, count) for count in counts) <= most


@lru_cache(maxsize=1024)
def num_positions(pattern: str) -> int:
    """Return the number of positions of an expression at which a character may be matched, with counted parts written
    out."""
    totals, last = [0], 0  # positions of the open groups; of the last piece, which may be counted
    for piece in _PIECE.finditer(pattern):
        if piece[1] is not None:
            totals[-1] += last * (max(int(piece[2] or piece[1]), 1) - 1)
        elif piece[0] == "(":
            totals.append(0)
            last = 0
        elif piece[0] == ")":
            last = totals.pop() if len(totals) > 1 else 0
            totals[-1] += last
        else:
            last = 1
            totals[-1] += 1
    return sum(totals)


def length_is_costly(pattern: str, most: int) -> bool:
    """Return whether a maximum length of `most` beside the expression makes so many states that llguidance gives up
    during an answer: with counted groups that may end anywhere, their number grows with the square of the length."""
    return most > _MAX_LENGTH_OF_OPEN_ENDS and _COUNTED_OPEN_END.search(pattern) is not None


def are_disjoint(patterns: list[str]) -> bool:
    """Return whether expressions begin with different plain texts, so that no text matches two."""
    heads = [pattern[1 : 1 + _plain_length(pattern[1:])] if pattern.startswith("^") else "" for pattern in patterns]
    return all(not one.startswith(other) and not other.startswith(one) for one, other in combinations(heads, 2))


def _plain_length(pattern: str) -> int:
    """Return the number of leading characters that stand for themselves and are not repeated."""
    num = next((i for i, c in enumerate(pattern) if not (c.isalnum() or c in "_-:/@ ")), len(pattern))
    if "|" in pattern:
        return 0
    return max(0, num - 1) if pattern[num : num + 1] in ("*", "?", "{", "+") else num
