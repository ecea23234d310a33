"""Regular expressions of JSON Schema (ECMAScript's), translated to the syntax of Rust's, which llguidance and the final
check read. Neither ever goes back in a text. Look-ahead at a known place, and look-behind at the end, become separate
conditions; other expressions that need to go back are refused."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

_SPACES = r"\t-\r \x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}\x{feff}"  # of ECMAScript
_CLASSES = {
    "d": "[0-9]", "D": "[^0-9]", "w": "[0-9A-Za-z_]", "W": "[^0-9A-Za-z_]", "s": f"[{_SPACES}]", "S": f"[^{_SPACES}]",
}  # fmt: skip
_CONTROLS = {"t": r"\t", "n": r"\n", "r": r"\r", "f": r"\f", "v": r"\v"}
_REPEATED = re.compile(r"\{\d+(,\d*)?\}")
# Characters, classes and escapes of one character, with fixed counts, so that the place after them is known.
_FIXED = re.compile(
    r"(?:(?:[^\\\[\](){}?*+|^$]|\\[dDwWsS.\-_/ ]|\[(?:[^\]\\]|\\.)+\])(?:\{\d+\}(?![?*+]))?(?![?*+{]))*"
)
_LONE_HALF = r"\\u(?:[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|[dD][c-fC-F][0-9a-fA-F]{2})"
_LONE_HALVES = re.compile(f"{_LONE_HALF}(?:-{_LONE_HALF})?(?!-)")
_CLASS_BEGIN = re.compile(r"\\[pP](?:\{[^{}]*\}|.)|\\.|\[", re.DOTALL)  # or an escape sequence
_OWN_CLASS = re.compile(r"\\[dDwWsSpP]")
_META = frozenset(r"\.+*?()|[]{}^$#&-~")


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern to find anywhere in a text, with patterns that must be found too, and that must not be found."""

    text: str  # in Rust's syntax
    required: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()
    has_boundaries: bool = False  # \b or \B, which only the final check knows

    @property
    def grammar(self) -> str:
        """Return the pattern in a form that llguidance handles correctly within the quotes of JSON."""
        return _in_json(self.text)

    @property
    def is_plain(self) -> bool:
        return not (self.required or self.forbidden or self.has_boundaries)

    @property
    def of_whole_text(self) -> str | None:
        """Return an expression that matches whole texts in which the pattern is found; None if it looks around, or has
        anchors in other places than its edges."""
        begin = self.text.startswith("^")
        marks = [(i, c) for i, c, _ in _outside_of_classes(self.text) if c in "^$"]
        end = bool(marks) and marks[-1] == (len(self.text) - 1, "$")
        inner = self.text[begin : len(self.text) - end]
        if not self.is_plain or len(marks) > begin + end or ((begin or end) and _has_alternatives(inner)):
            return None
        before, after = ("" if is_edge else r"(.|\n)*" for is_edge in (begin, end))
        return f"{before}({inner}){after}"

    def check(self) -> None:
        """Raise `ValueError` with the reason if `matches` cannot work."""
        for one in (self.text, *self.required, *self.forbidden):
            _matcher(one)

    def matches(self, text: str) -> bool:
        return (
            _found(self.text, text)
            and all(_found(one, text) for one in self.required)
            and not any(_found(one, text) for one in self.forbidden)
        )


@lru_cache(maxsize=1024)
def read_pattern(pattern: str) -> Pattern:
    """Return the pattern of a schema. Raises `ValueError` with the reason if it cannot be followed."""
    required, forbidden = list[str](), list[str]()
    rest, anchor = pattern, ""
    if pattern.startswith("^"):
        rest, anchor = pattern[1:], "^"
    while (place := _place_of_look_ahead(rest, is_anchored=bool(anchor))) is not None:
        before, ahead = rest[:place], rest[place:]
        end = _end_of_group(ahead)
        body = f"{anchor}{_translated(before)[0]}(?:{_translated(ahead[3:end])[0]})"
        if not anchor and ahead[2] == "!":
            raise ValueError(f"pattern {pattern!r:.80} has a look-ahead without ^ before it, which is not built")
        (required if ahead[2] == "=" else forbidden).append(body)
        rest = before + ahead[end + 1 :]
    if (required or forbidden) and (not anchor or _has_alternatives(rest)):
        raise ValueError(f"pattern {pattern!r:.80} has alternatives beside a look-ahead, which is not built")
    if (place := _place_of_last_look_behind(rest)) is not None and not _has_alternatives(rest):
        body = f"(?:{_translated(rest[place + 4 : -2])[0]})$"
        (required if rest[place + 3] == "=" else forbidden).append(body)
        rest = rest[:place] + "$"
    text, has_boundaries = _translated(anchor + rest)
    made = Pattern(text, tuple(required), tuple(forbidden), has_boundaries)
    if not made.is_plain:  # only the final check reads it; llguidance reads the plain ones
        made.check()
    return made


@lru_cache(maxsize=1024)
def _in_json(text: str) -> str:
    """Return the expression with U+0000 removed from classes that have every control character but lack the quote or
    the backslash. llguidance would add both to such classes."""
    parts, i = list[str](), 0
    while (found := _CLASS_BEGIN.search(text, i)) is not None:
        begin = end = found.start()
        if text[begin] == "[":
            depth = 0
            while (end == begin or depth) and end < len(text):
                depth += {"[": 1, "]": -1}.get(text[end], 0)
                piece = _CLASS_BEGIN.match(text, end)
                end = end + 1 if piece is None else piece.end()
        else:
            end = found.end()
        one = text[begin:end]
        parts += [text[i:begin], _without_zero(one) if _is_misquoted(one) else one]
        i = end
    return "".join(parts) + text[i:]


def _without_zero(text: str) -> str:
    return f"[^\\x00{text[2:]}" if text.startswith("[^") else f"[{text}&&[^\\x00]]"


def _is_misquoted(text: str) -> bool:
    if text.startswith("\\") and text[1] not in "pP":
        return False
    try:
        return all(_found(text, chr(i)) for i in range(32) if i != 10) and not (
            _found(text, '"') and _found(text, "\\")
        )
    except ValueError:  # unreadable: reported elsewhere
        return False


def _place_of_look_ahead(pattern: str, *, is_anchored: bool) -> int | None:
    """Return where the first look-ahead with a known place in a text begins; None if there is none."""
    place = 0
    if is_anchored and not _has_alternatives(pattern):
        fixed = _FIXED.match(pattern)
        place = 0 if fixed is None else fixed.end()
    return place if pattern.startswith(("(?=", "(?!"), place) else None


def _place_of_last_look_behind(pattern: str) -> int | None:
    """Return where a look-behind right before the end of a text begins; None if there is none."""
    places = [i for i, c, depth in _outside_of_classes(pattern) if c == "(" and depth == 1]
    if not places or not pattern.endswith(")$") or not pattern.startswith(("(?<=", "(?<!"), places[-1]):
        return None
    return places[-1] if _end_of_group(pattern[places[-1] :]) == len(pattern) - 2 - places[-1] else None


def matches_character(expression: str, character: str) -> bool:
    """Return whether a class, an escape or a character in Rust's syntax matches `character`."""
    return _found(rf"\A(?:{expression})\z", character)


def _found(pattern: str, text: str) -> bool:
    return bool(_matcher(pattern).isinstance_python(text))


@lru_cache(maxsize=256)
def _matcher(pattern: str) -> Any:
    """Return a matcher of Rust's engine, by way of pydantic. Its time is linear in the text's length."""
    from pydantic_core import SchemaError, SchemaValidator, core_schema

    try:
        return SchemaValidator(core_schema.str_schema(pattern=pattern, regex_engine="rust-regex"))
    except SchemaError as e:
        reasons = [line.strip() for line in str(e).splitlines() if line.strip().startswith("error:")]
        reason = reasons[0].removeprefix("error:").strip() if reasons else "it is no regular expression"
        raise ValueError(f"pattern {pattern!r:.80} cannot be read: {reason}") from None


def _translated(pattern: str) -> tuple[str, bool]:
    """Return the pattern in Rust's syntax, and whether it has word boundaries."""
    out, i, has_boundaries = list[str](), 0, False
    while i < len(pattern):
        c = pattern[i]
        if c == "\\":
            if pattern[i + 1 : i + 2] in ("b", "B"):
                has_boundaries = True
                out.append(pattern[i : i + 2])
                i += 2
            else:
                text, i = _escape(pattern, i)
                out.append(text)
        elif c == "[":
            text, i = _class(pattern, i)
            out.append(text)
        elif c == "(":
            if pattern.startswith(("(?=", "(?!", "(?<=", "(?<!"), i):
                raise ValueError(
                    f"pattern {pattern!r:.80} has a look-around at a place that is not known, which is not built"
                )
            if pattern.startswith("(?<", i):
                out.append("(?P<")
                i += 3
            else:
                out.append("(")
                i += 1
        elif c == "{" and not (_REPEATED.match(pattern, i) and i):
            out.append(r"\{")
            i += 1
        elif c == "{":
            repeated = _REPEATED.match(pattern, i)
            assert repeated is not None
            out.append(repeated[0])
            i = repeated.end()
        elif c in "}]":
            out.append("\\" + c)
            i += 1
        else:
            out.append(c)
            i += 1
    return "".join(out), has_boundaries


def _escape(pattern: str, i: int) -> tuple[str, int]:
    """Return the translation of the escape at `i`, valid inside and outside of classes, and where the escape ends."""
    c = pattern[i + 1 : i + 2]
    if not c:
        raise ValueError(f"pattern {pattern!r:.80} ends in a backslash")
    if c in _CLASSES:
        return _CLASSES[c], i + 2
    if c in _CONTROLS:
        return _CONTROLS[c], i + 2
    if c == "u" and (found := re.compile(r"\\u\{([0-9A-Fa-f]+)\}|\\u([0-9A-Fa-f]{4})").match(pattern, i)):
        code, end = int(found[1] or found[2], 16), found.end()
        low = re.compile(r"\\u(D[C-F][0-9A-F]{2})", re.IGNORECASE).match(pattern, end)
        if 0xD800 <= code < 0xDC00 and low:
            code, end = 0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00, low.end()
        if 0xD800 <= code < 0xE000:
            raise ValueError(f"pattern {pattern!r:.80} has half of a surrogate pair")
        return f"\\x{{{code:x}}}", end
    if c == "x" and (found := re.compile(r"\\x([0-9A-Fa-f]{2})").match(pattern, i)):
        return f"\\x{{{found[1]}}}", found.end()
    if c == "c" and (found := re.compile(r"\\c([A-Za-z])").match(pattern, i)):
        return f"\\x{{{ord(found[1]) % 32:x}}}", found.end()
    if c in "pP" and (found := re.compile(r"\\[pP](\{[^{}]*\}|[A-Z])").match(pattern, i)):
        return found[0].replace("{Script=", "{sc="), found.end()
    if c == "0":
        return r"\x{0}", i + 2
    if c.isdigit() or (c == "k" and pattern.startswith("<", i + 2)):
        raise ValueError(f"pattern {pattern!r:.80} has a back reference, which is not built")
    if c in "zZ":  # the end of a text in Python; hardly meant as the letter
        return "$", i + 2
    if c == "A":
        return "^", i + 2
    return ("\\" + c if c in _META else c), i + 2


def _class(pattern: str, i: int) -> tuple[str, int]:
    """Return the translation of the class at `i`, and where it ends. In ECMAScript brackets and `&&` have no meaning in
    it."""
    start, negated = i, pattern.startswith("[^", i)
    i += 2 if negated else 1
    if pattern.startswith("]", i):  # [] matches nothing, [^] anything
        return (r"[\s\S]" if negated else r"[^\s\S]"), i + 1
    out = ["[^" if negated else "["]
    while i < len(pattern) and pattern[i] != "]":
        c = pattern[i]
        if pattern[i - 1] != "-" and (halves := _LONE_HALVES.match(pattern, i)):  # lone surrogates: no text has them
            i = halves.end()
            continue
        if c == "\\":
            if pattern[i + 1 : i + 2] == "b":
                text, i = r"\x{8}", i + 2
            else:
                text, i = _escape(pattern, i)
            out.append(r"\^" if text == "^" else r"\$" if text == "$" else text)
            continue
        is_doubled = c in "&~-" and pattern.startswith(c, i - 1)
        # Beside a class such as \d a hyphen is itself, not a range.
        is_hyphen = c == "-" and (out[-1].startswith((r"\p", r"\P", "[")) and len(out) > 1)
        is_hyphen = is_hyphen or (c == "-" and _OWN_CLASS.match(pattern, i + 1) is not None)
        out.append("\\" + c if c == "[" or is_doubled or is_hyphen else c)
        i += 1
    if i >= len(pattern):
        raise ValueError(f"pattern {pattern!r:.80} has a class that does not end: {pattern[start:]!r:.20}")
    if len(out) == 1:
        return (r"[\s\S]" if negated else r"[^\s\S]"), i + 1
    return "".join(out) + "]", i + 1


def _end_of_group(pattern: str) -> int:
    """Return the place of the parenthesis that closes the one at the beginning of the pattern."""
    end = next((i for i, c, depth in _outside_of_classes(pattern) if c == ")" and depth == 0), None)
    if end is None:
        raise ValueError(f"pattern {pattern!r:.80} has a group that does not end")
    return end


def _has_alternatives(pattern: str) -> bool:
    return any(c == "|" and depth == 0 for _, c, depth in _outside_of_classes(pattern))


def _outside_of_classes(pattern: str) -> Iterator[tuple[int, str, int]]:
    """Yield each character that is not escaped and in no class: its place, itself, and how many groups are open after
    it."""
    depth, i = 0, 0
    while i < len(pattern):
        if pattern[i] == "\\":
            i += 2
        elif pattern[i] == "[":
            i = _class(pattern, i)[1]
        else:
            depth += {"(": 1, ")": -1}.get(pattern[i], 0)
            yield i, pattern[i], depth
            i += 1
