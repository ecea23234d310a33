"""Context-free grammars of requests as llguidance's Lark: GBNF (llama.cpp's EBNF, `root ::= ...`), and Lark where
llguidance spells it otherwise."""

import json
import re
from contextlib import suppress

# Strings, regular expressions or classes, and comments, which are not searched for rules. They may lack their ends, so
# that no text is read twice.
_LARK_PIECES = re.compile(
    r'(?:"(?:\\.|[^"\\\n])*+(?!")|/(?![/*])(?:\\.|[^/\\\n])++(?!/))(?P<open>)'
    r'|"(?:\\.|[^"\\\n])*+"|/(?![/*])(?:\\.|[^/\\\n])++/|//[^\n]*|#[^\n]*'
)
_MAX_OPEN_LINE = 1000  # characters of an expression that goes on in the next line
_GBNF_PIECES = re.compile(r'"(?:\\.|[^"\\\n])*+"?|\[(?:\\(?s:.)|[^\]\\])*+\]?|#[^\n]*')
_GBNF_PARTS = re.compile(rf"{_GBNF_PIECES.pattern}|\s++")
_RULE = re.compile(r"[\w-]++\s*+::=")
_ESCAPES = {"a": 7, "b": 8, "f": 12, "v": 11}  # unknown to llguidance
_WIDE = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|x([0-9A-Fa-f]{2})|(.))", re.DOTALL)


def to_lark(text: str) -> str:
    """Return the grammar in llguidance's Lark. Raises `ValueError` with the place that cannot be read."""
    outside = _GBNF_PIECES.sub("", text)
    if "::=" not in outside:
        return _of_lark(text)
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(_GBNF_PIECES.sub(lambda found: _gbnf_piece(found[0]), text))
    except Exception as e:
        with suppress(Exception):
            return gbnf_to_lark(_with_whole_rules(text))
        raise ValueError(f"the EBNF cannot be read: {e}") from None  # the places are those of `text`


def _with_whole_rules(text: str) -> str:
    """Return a GBNF grammar with one line for each rule, which llama.cpp wants and other readers of EBNF do not."""

    def one(found: re.Match[str]) -> str:
        if not found[0].isspace():
            return "" if found[0].startswith("#") else _gbnf_piece(found[0])
        return found[0] if _RULE.match(text, found.end()) else " "

    return _GBNF_PARTS.sub(one, text)


def _of_lark(text: str) -> str:
    if ":" not in _LARK_PIECES.sub("", text):
        raise ValueError("it has no rules")
    out, at = list[str](), 0
    for found in _LARK_PIECES.finditer(text):
        # Readers of pieces look for the end of an open one again and again.
        if found["open"] is not None and (found[0][0] == '"' or len(found[0]) > _MAX_OPEN_LINE):
            raise ValueError(f"{found[0]:.40} has no end on its line")
        out += [_lark_outside(text[at : found.start()]), _lark_piece(found[0])]
        at = found.end()
    return "".join([*out, _lark_outside(text[at:])])


def _lark_outside(text: str) -> str:
    # Remove marks for the parse tree (? and !) and priorities of terminals: they do not change which texts are valid.
    text = re.sub(r"(^|\n)[ \t]*[?!]+(?=[a-zA-Z_])", r"\1", text)
    text = re.sub(r"((?:^|\n)[ \t]*[a-zA-Z_]\w*)\.-?\d+(?=\s*:)", r"\1", text)
    return re.sub(r":[ \t]*\n\s*(?=\S|$)", ": ", text)


def _lark_piece(piece: str) -> str:
    if not piece.startswith('"'):
        return piece
    return _WIDE.sub(lambda found: found[0] if found[1] or found[4] else _in_string(_character(found)), piece)


def _gbnf_piece(piece: str) -> str:
    if piece.startswith("#"):
        return piece
    is_class = piece.startswith("[")

    def one(found: re.Match[str]) -> str:
        if found[4] in _ESCAPES:
            return f"\\x{_ESCAPES[found[4]]:02X}"
        if found[4] is not None:
            # Remove needless backslashes, because llguidance knows few escapes.
            known = found[4] in ("\\", '"', "[", "]", "n", "r", "t")
            if known or found[4].isalnum():
                return found[0]
            return f"\\x{ord(found[4]):02X}" if is_class and found[4] in "-^" else found[4]
        if found[3] is not None and int(found[3], 16) < 0x80:
            return found[0]
        character = _character(found)
        if ord(character) < 0x80:
            return f"\\x{ord(character):02X}"
        return character if is_class else _in_string(character)

    return _WIDE.sub(one, piece)


def _character(found: re.Match[str]) -> str:
    code = int(found[1] or found[2] or found[3], 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise ValueError(f"{found[0]} is no character")
    return chr(code)


def _in_string(character: str) -> str:
    return json.dumps(character, ensure_ascii=False)[1:-1]
