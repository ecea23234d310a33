"""Lark grammars of texts that stand within a call: between the quotes of JSON, or before a mark that ends them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from graphlib import CycleError, TopologicalSorter

from octavo.structured_output.lark import escaped
from octavo.structured_output.schema_patterns import matches_character

# Strings, regular expressions and comments of Lark; the flags after the first two.
_PIECES = re.compile(r'("(?:\\.|[^"\\\n])*"|/(?![/*])(?:\\.|[^/\\\n])+/)([imslux]*)|//[^\n]*|#[^\n]*')
_RANGE = re.compile(r'"(\\.[^"]*|[^"\\\n])"[ \t]*\.\.[ \t]*"(\\.[^"]*|[^"\\\n])"')
_IMPORT = re.compile(
    r"^[ \t]*%import[ \t]+common[ \t]*(?:\.[ \t]*(\w+)(?:[ \t]*->[ \t]*(\w+))?|\(([^)]*)\))", re.MULTILINE
)
_NESTED = re.compile(r"%(json|lark|regex)\b|<\[|@")
_HEAD = re.compile(r"^[ \t]*(\w+)[ \t]*:", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z_]\w*")
_NAME_OR_ALIAS = re.compile(r"%import[^\n]*|(->[ \t]*\w+)|[A-Za-z_]\w*")
# Terminals of Lark's library that have line breaks, tabs, quotes or backslashes.
_COMMON = {
    "C_COMMENT": r"\/\*([^*]|\*+[^*\/])*\*+\/",
    "CPP_COMMENT": r"\/\/[^\n]*",
    "CR": r"\r",
    "ESCAPED_STRING": r'"([^"\\\n]|\\.)*"',
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "SQL_COMMENT": r"--[^\n]*",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
}
# A class, an escape, the beginning of a group, a count, or another character of a regular expression.
_CLASS_BEGIN = re.compile(r"\[\^?\]?")
_ATOM = re.compile(
    r"\\(?:[xuU]\{[^}]*\}|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|[pP]\{[^}]*\}|[pP].|.)"
    r"|\(\?(?:P?<\w+>|[a-zA-Z-]*:?)|\{\d+(?:,\d*)?\}|.",
    re.DOTALL,
)
_SYNTAX = frozenset("()|*+?^$")
_ASSERTIONS = frozenset((r"\b", r"\B", r"\A", r"\z"))
_QUOTED = {chr(code): json.dumps(chr(code))[1:-1] for code in (*range(32), ord('"'), ord("\\"))}
_PLAIN = r'[^"\\\x00-\x1f]'


def quoted_lark(grammar: str, *, as_terminals: bool = True) -> str:
    """Return the grammar of the same texts as JSON writes them, without the quotes around them. It has terminals in the
    place of rules where it can, `as_terminals`. Raises `ValueError` for what cannot be written so."""

    def of_string(text: str) -> str:
        quoted = json.dumps(json.loads(text, strict=False), ensure_ascii=False)[1:-1]
        return json.dumps(quoted, ensure_ascii=False)

    if found := _NESTED.search(_PIECES.sub("", grammar)):
        raise ValueError(f"{found[0]} cannot be within a text in JSON")
    grammar = _IMPORT.sub(_imported, grammar)
    grammar = _RANGE.sub(lambda found: f"/[{_in_class(found[1])}-{_in_class(found[2])}]/", grammar)
    quoted = _rewritten(grammar, of_string, lambda text, flags: f"/{_quoted_regex(text[1:-1], flags)}/{flags}")
    return _as_terminals(quoted) if as_terminals else quoted


def lark_without(grammar: str, ends: Sequence[str]) -> str:
    """Return the grammar, in which no regular expression matches a text that has one of `ends`."""
    out = "".join(f" & ~/(.|\\n)*{escaped(end)}(.|\\n)*/" for end in ends)
    return _rewritten(grammar, lambda text: text, lambda text, flags: f"{text}{flags}", out)


def _as_terminals(grammar: str) -> str:
    """Return the grammar with its rules as terminals, unless one refers back to itself or needs to be a rule. A lexer
    reads the longest text of a terminal: in JSON a backslash may go on with it or begin the next one, so the whole text
    must be one terminal."""
    masked = _PIECES.sub(lambda found: " " * len(found[0]), grammar)  # same places, without strings and expressions
    heads = list(_HEAD.finditer(masked))
    names = {found[1] for found in heads}
    bodies = {
        found[1]: (found.end(), following.start() if following is not None else len(grammar))
        for found, following in zip(heads, [*heads[1:], None], strict=True)
    }
    references = {name: names & set(_NAME.findall(masked[begin:end])) for name, (begin, end) in bodies.items()}
    if len(bodies) < len(heads) or "start" not in names or any(mark in masked for mark in ("%ignore", "[")):
        return grammar
    try:
        TopologicalSorter(references).prepare()
    except CycleError:
        return grammar
    out, end = list[str](), 0
    for found in _NAME_OR_ALIAS.finditer(masked):
        if found[1] is not None:  # the name of a branch in a parse tree, which terminals lack
            out.append(grammar[end : found.start(1)])
            end = found.end()
        elif (name := found[0]) in names:
            out += [grammar[end : found.start()], f"{name.upper()}__" if name.islower() else name]
            end = found.end()
    return f"start: START__\n{''.join(out)}{grammar[end:]}"


def regex_as_lark(regex: str) -> str:
    """Return a grammar of the texts that match a regular expression as a whole."""
    return "start: TEXT\nTEXT: /" + re.sub(r"(?s)\\.|/|\n", lambda found: _IN_LARK.get(found[0], found[0]), regex) + "/"


_IN_LARK = {"/": r"\/", "\n": r"\n"}


def _rewritten(
    grammar: str, of_string: Callable[[str], str], of_regex: Callable[[str, str], str], beside: str = ""
) -> str:
    """Return the grammar with other strings and regular expressions, without comments. With `beside` each regular
    expression becomes a terminal, with this text after it."""
    terminals = list[str]()

    def rewrite(found: re.Match[str]) -> str:
        piece, flags = found[1], found[2]
        if piece is None:
            return ""
        if piece.startswith('"'):
            return of_string(piece) + flags
        written = of_regex(piece, flags)
        if not beside:
            return written
        terminals.append(f"PIECE_{len(terminals)}__: {written}{beside}")
        return terminals[-1].partition(":")[0]

    return "\n".join([_PIECES.sub(rewrite, grammar), *terminals])


def _imported(found: re.Match[str]) -> str:
    names = [found[1]] if found[1] else [name.strip() for name in found[3].split(",")]
    return "\n".join(
        f"{found[2] or name}: /{_COMMON[name]}/" if name in _COMMON else f"%import common.{name}" + (
            f" -> {found[2]}" if found[2] else ""
        )
        for name in names
    )  # fmt: skip


def _in_class(written: str) -> str:
    text = json.loads(f'"{written}"')
    if len(text) != 1:
        raise ValueError(f'"{written}" is no character of a range')
    return f"\\x{{{ord(text):x}}}"


def _quoted_regex(regex: str, flags: str) -> str:
    if "x" in flags or "(?x" in regex:
        raise ValueError(f"the flag x of /{regex:.80}/ is not built here")
    has_all = "s" in flags or re.search(r"\(\?[a-zA-Z]*s", regex) is not None
    parts, i = list[str](), 0
    while i < len(regex):
        end = _class_end(regex, i)
        if end is None:
            found = _ATOM.match(regex, i)
            assert found is not None
            end = found.end()
        atom, i = regex[i:end], end
        if atom in _SYNTAX or atom in _ASSERTIONS or (len(atom) > 1 and atom[0] in "({"):
            parts.append(atom)
        else:
            parts.append(_quoted_atom((r"[\s\S]" if has_all else r"[^\n]") if atom == "." else atom))
    return "".join(parts)


def _class_end(regex: str, begin: int) -> int | None:
    """Return where the class at `begin` ends; None if there is none. Classes may have classes in them."""
    depth, i = 0, begin
    while i < len(regex):
        if (found := _CLASS_BEGIN.match(regex, i)) is not None:
            depth, i = depth + 1, found.end()
        elif depth == 0:
            return None
        elif regex[i] == "\\":
            i += 2
        else:
            depth, i = depth - (regex[i] == "]"), i + 1
            if depth == 0:
                return i
    raise ValueError(f"/{regex:.80}/ has a class that does not end")


def _quoted_atom(atom: str) -> str:
    """Return an expression for the character or class `atom` as JSON writes it."""
    if len(atom) == 1:
        return escaped(_QUOTED[atom]) if atom in _QUOTED else atom
    special = [written for character, written in _QUOTED.items() if matches_character(atom, character)]
    if not special:
        return atom
    texts = "|".join(escaped(written) for written in special)
    return f"([{atom}&&{_PLAIN}]|{texts})"
