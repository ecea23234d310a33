"""Lark grammars of texts that stand within a call: between the quotes of JSON, or before a mark that ends them."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from graphlib import CycleError, TopologicalSorter
from itertools import count, pairwise

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
_DIRECTIVE = re.compile(r"^[ \t]*%[^\n]*", re.MULTILINE)
_IGNORE = re.compile(r"^[ \t]*%ignore(?!\w)")
_NAME = re.compile(r"[A-Za-z_]\w*")
_ALIAS = re.compile(r"->[ \t]*\w+")
# A range, a text, an expression, an alias or a name.
_ITEM = re.compile(rf"{_RANGE.pattern}|{_PIECES.pattern}|{_ALIAS.pattern}|{_NAME.pattern}")
_ATTRIBUTES = re.compile(r"^[ \t]*\w+[ \t]*\[[^\]\n]*\][ \t]*:", re.MULTILINE)  # llguidance's, of a rule
# What is otherwise in terminals, and lines that stay: rules have new names, `[x]` is `(x)?`, and aliases are left out.
_CHANGED = re.compile(r"%import[^\n]*|->[ \t]*\w+|[\[\]]|[A-Za-z_]\w*")
_CHANGES = {"->": "", "[": "(", "]": ")?"}
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
_USUAL = "a0 _é"  # characters of which one at least is in most classes
_CONTROLS = frozenset(_QUOTED[chr(code)] for code in range(32))
_ALL_CONTROLS = r"\\([bfnrt]|u00(0[0-7bef]|1[0-9a-f]))"  # the same as an expression


def quoted_lark(grammar: str, *, as_terminals: bool = True) -> str:
    """Return the grammar of the same texts as JSON writes them, without the quotes around them. It has terminals in the
    place of rules where it can, `as_terminals`. Raises `ValueError` for what cannot be written so."""

    def of_string(text: str, flags: str) -> str:
        given = json.loads(text, strict=False)
        quoted = json.dumps(given, ensure_ascii=False)[1:-1]
        if "i" in flags and quoted != given:
            return of_regex(f"/{escaped(given)}/", flags)
        return json.dumps(quoted, ensure_ascii=False) + flags

    def of_regex(text: str, flags: str) -> str:
        return f"/{_quoted_regex(text[1:-1], flags)}/{flags}"

    if found := _NESTED.search(_PIECES.sub("", grammar)):
        raise ValueError(f"{found[0]} cannot be within a text in JSON")
    grammar = _IMPORT.sub(_imported, grammar)
    grammar = _RANGE.sub(lambda found: f"/[{_in_class(found[1])}-{_in_class(found[2])}]/", grammar)
    if as_terminals and (terminals := _as_terminals(_rewritten(grammar, of_string, of_regex))) is not None:
        return f"start: {terminals[0]}\n{terminals[1]}"
    return _rewritten(_with_runs(grammar), of_string, of_regex)


def lark_without(grammar: str, ends: Sequence[str]) -> str:
    """Return the grammar, in which no regular expression matches a text that has one of `ends`."""
    return _rewritten(grammar, lambda text, flags: text + flags, lambda text, flags: text + flags, _without(ends))


def lark_before(grammar: str, ends: Sequence[str], after: str, *, is_end: bool) -> str | None:
    """Return the grammar of the same texts without those that have one of `ends`, each with `after` behind it; None if
    the grammar is not regular. With `is_end` the text is over where `after` is first read."""
    if _NESTED.search(_PIECES.sub("", grammar)) or (found := _as_terminals(grammar)) is None:
        return None
    whole, lines = found
    text = f"TEXT{whole.removeprefix('RULE')}"
    head = f"value{'[lazy]' if is_end else ''}" if after else "value"
    return (
        f"start: {head.partition('[')[0]}\n{head}: {text} {json.dumps(after)}\n{text}: {whole}{_without(ends)}\n{lines}"
    )


def _without(ends: Sequence[str]) -> str:
    return "".join(f" & ~/(.|\\n)*{escaped(end)}(.|\\n)*/" for end in ends)


def _as_terminals(grammar: str) -> tuple[str, str] | None:
    """Return the grammar with its rules as terminals, and before it the name of the first one; None if a rule refers
    back to itself or cannot be a terminal. A lexer reads the longest text of a terminal: in JSON a backslash may go on
    with it or begin the next one, so the whole text must be one terminal."""
    grammar = _with_ignored(grammar)
    outside = _PIECES.sub(_blank, grammar)  # same places, without strings and expressions
    masked = _ALIAS.sub(_blank, outside)
    bodies = _bodies(masked)
    names = {name for name, _, _ in bodies}
    references = {name: names & set(_NAME.findall(masked[begin:end])) for name, begin, end in bodies}
    is_plain = "%ignore" not in masked and _ATTRIBUTES.search(masked) is None
    if len(names) < len(bodies) or "start" not in names or not is_plain:
        return None
    try:
        TopologicalSorter(references).prepare()
    except CycleError:
        return None
    suffix = _unused(grammar)
    terminals = {
        name: f"RULE_{i}{suffix}" for i, (name, _, _) in enumerate(bodies) if not name.lstrip("_")[:1].isupper()
    }
    out, end = list[str](), 0
    for found in _CHANGED.finditer(outside):
        out += [grammar[end : found.start()], _CHANGES.get(found[0][:2], terminals.get(found[0], found[0]))]
        end = found.end()
    return terminals["start"], f"{''.join(out)}{grammar[end:]}"


def _bodies(masked: str) -> list[tuple[str, int, int]]:
    """Return the name of each rule and terminal, and where its body begins and ends. Those with attributes are left
    out. `masked` is a grammar without strings, expressions and aliases, in the same places."""
    heads = list(_HEAD.finditer(masked))
    ends = [*(head.start() for head in heads), len(masked)][1:]
    return [(head[1], head.end(), end) for head, end in zip(heads, ends, strict=True)]


def _with_ignored(grammar: str) -> str:
    """Return a grammar with `%ignore` as one that says itself where the ignored texts may stand: before each text of a
    rule, as llguidance takes it."""
    grammar = _PIECES.sub(
        lambda found: found[0] if found[1] else "", grammar
    )  # a comment would hide what is joined to it
    outside = _PIECES.sub(_blank, grammar)
    directives = list(_DIRECTIVE.finditer(outside))
    ignored = [one for one in directives if _IGNORE.match(one[0])]
    if not ignored or _ATTRIBUTES.search(outside) is not None:
        return grammar
    texts = [_IGNORE.sub("", grammar[one.start() : one.end()]).strip() for one in ignored]
    if not all(texts):
        raise ValueError("%ignore names no texts")
    name = f"IGNORED{_unused(grammar)}"
    lines = [f"{name}: {' | '.join(texts)}"]
    heads = list(_HEAD.finditer(_ALIAS.sub(_blank, outside)))
    begins = sorted({0, len(grammar), *(one.start() for one in (*heads, *directives))})
    of_rules = {one.start(): one.end() for one in heads if not one[1].lstrip("_")[:1].isupper()}
    for begin, end in pairwise(begins):
        part = grammar[begin:end]
        if begin in of_rules:
            head, body = grammar[begin : of_rules[begin]], grammar[of_rules[begin] : end]
            part = head + _ITEM.sub(partial(_after_ignored, name=name), body)
        if not any(one.start() == begin for one in ignored):
            lines.append(part.rstrip("\n"))
    return "\n".join(lines)


def _after_ignored(found: re.Match[str], name: str) -> str:
    """Return an item of a rule with the ignored texts before it, which rules have themselves."""
    is_rule = re.match(r"_*[a-z]", found[0]) is not None
    return found[0] if is_rule or found[0].startswith(("//", "#", "->")) else f"({name}* {found[0]})"


def _with_runs(grammar: str) -> str:
    """Return a grammar in whose rules repeated characters are repeated terminals. One terminal would take a backslash
    of JSON that begins the text behind it."""
    outside = _PIECES.sub(_blank, grammar)
    if _ATTRIBUTES.search(outside) is not None:
        return grammar
    bodies = _bodies(_ALIAS.sub(_blank, outside))
    suffix, lines, known = _unused(grammar), list[str](), dict[str, str]()

    def written(piece: re.Match[str]) -> str:
        run = _run(piece[1], piece[2], f"{len(lines)}{suffix}") if (piece[1] or "").startswith("/") else None
        if run is not None:
            lines.extend(run[1])
        return piece[0] if run is None else run[0]

    def is_rule(name: str) -> bool:
        return name.lstrip("_")[:1].islower()

    for name, begin, end in bodies:  # terminals that are one expression
        piece = _PIECES.search(grammar, begin, end)
        if is_rule(name) or piece is None or outside[begin:end].strip() or piece.end() < len(grammar[:end].rstrip()):
            continue
        if (text := written(piece)) != piece[0]:
            known[name] = f"rule_{len(known)}{suffix}"
            lines.append(f"{known[name]}: {text}")
    names = re.compile(rf"{_PIECES.pattern}|(?P<name>{_NAME.pattern})")
    out, last = list[str](), 0
    for name, begin, end in bodies:
        if is_rule(name):
            body = names.sub(
                lambda one: known.get(one["name"], one[0]) if one["name"] else written(one), grammar[begin:end]
            )
            out += [grammar[last:begin], body]
            last = end
    return "\n".join(["".join([*out, grammar[last:]]).rstrip("\n"), *lines])


def _run(written: str, flags: str, suffix: str) -> tuple[str, list[str]] | None:
    """Return an expression for `/abc[d-f]*/` in a rule, and the lines of its terminals; None if the regular expression
    is no text that ends in a repeated character or class."""
    atoms = list(_atoms(written[1:-1]))
    if len(atoms) < 2 or not (atoms[-1] in ("*", "+") or re.fullmatch(r"\{\d+(?:,\d*)?\}", atoms[-1])):
        return None
    *text, repeated, times = atoms
    if any(atom in _SYNTAX or atom in _ASSERTIONS or (len(atom) > 1 and atom[0] in "({") for atom in (*text, repeated)):
        return None
    if repeated == ".":
        repeated = r"[\s\S]" if "s" in flags else r"[^\n]"
    escapes = "".join(f"\\x{ord(one):02x}" for one in _QUOTED if matches_character(repeated, one))
    if not escapes:
        return None
    before, lines, item = "", [f"CHARACTER_{suffix}: /{repeated}/{flags}"], f"CHARACTER_{suffix}"
    # Many short terminals are dear, so that the characters between escapes are one.
    if times in ("*", "+") and any(matches_character(repeated, one) for one in _USUAL):
        lines = [f"RUN_{suffix}: /[{repeated}&&{_PLAIN}]+/{flags}", f"ESCAPE_{suffix}: /[{escapes}]/"]
        item = f"(RUN_{suffix} | ESCAPE_{suffix})"
    if text:
        before = f"BEFORE_{suffix} "
        lines.append(f"BEFORE_{suffix}: /{''.join(text)}/{flags}")
    return f"({before}{item}{times})", lines


def _blank(found: re.Match[str]) -> str:
    return " " * len(found[0])


def _unused(grammar: str) -> str:
    """Return an end of names that no name in the grammar has."""
    used = set(re.findall(r"__(\d+)", grammar))
    return next(f"__{i}" for i in count() if str(i) not in used)


def regex_as_lark(regex: str) -> str:
    """Return a grammar of the texts that match a regular expression as a whole."""
    return "start: TEXT\nTEXT: /" + re.sub(r"(?s)\\.|/|\n", lambda found: _IN_LARK.get(found[0], found[0]), regex) + "/"


_IN_LARK = {"/": r"\/", "\n": r"\n"}


def _rewritten(
    grammar: str, of_string: Callable[[str, str], str], of_regex: Callable[[str, str], str], beside: str = ""
) -> str:
    """Return the grammar with other strings and regular expressions, without comments. With `beside` each regular
    expression becomes a terminal, with this text after it."""
    terminals, suffix = list[str](), _unused(grammar)

    def rewrite(found: re.Match[str]) -> str:
        piece, flags = found[1], found[2]
        if piece is None:
            return ""
        if piece.startswith('"'):
            return of_string(piece, flags)
        written = of_regex(piece, flags)
        if not beside:
            return written
        terminals.append(f"PIECE_{len(terminals)}{suffix}: {written}{beside}")
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
    parts = list[str]()
    for atom in _atoms(regex):
        if atom in _SYNTAX or atom in _ASSERTIONS or (len(atom) > 1 and atom[0] in "({"):
            parts.append(atom)
        else:
            parts.append(_quoted_atom((r"[\s\S]" if has_all else r"[^\n]") if atom == "." else atom))
    return "".join(parts)


def _atoms(regex: str) -> Iterator[str]:
    """Yield the characters, classes and operators of a regular expression. Raises `ValueError` for a class without an
    end."""
    i = 0
    while i < len(regex):
        end = _class_end(regex, i)
        if end is None:
            found = _ATOM.match(regex, i)
            assert found is not None
            end = found.end()
        yield regex[i:end]
        i = end


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


@lru_cache(maxsize=4096)
def _quoted_atom(atom: str) -> str:
    """Return an expression for the character or class `atom` as JSON writes it."""
    if len(atom) == 1:
        return f"(?-i:{escaped(_QUOTED[atom])})" if atom in _QUOTED else atom
    special = [written for character, written in _QUOTED.items() if matches_character(atom, character)]
    if not special:
        return atom
    if set(special) >= _CONTROLS:
        special = [written for written in special if written not in _CONTROLS]
        texts = "|".join([_ALL_CONTROLS, *map(escaped, special)])
    else:
        texts = "|".join(map(escaped, special))
    return f"([{atom}&&{_PLAIN}]|(?-i:{texts}))"
