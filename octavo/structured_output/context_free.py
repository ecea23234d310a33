"""Context-free grammars of requests as llguidance's Lark: GBNF (llama.cpp's EBNF, `root ::= ...`), and Lark where
llguidance spells it otherwise."""

import json
import re

# Strings, regular expressions or classes, and comments, which are not searched for rules.
_LARK_PIECES = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?![/*])(?:\\.|[^/\\\n])+/|//[^\n]*|#[^\n]*')
_GBNF_PIECES = re.compile(r'"(?:\\.|[^"\\\n])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*')
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
        raise ValueError(f"the EBNF cannot be read: {e}") from None


def _of_lark(text: str) -> str:
    if ":" not in _LARK_PIECES.sub("", text):
        raise ValueError("it has no rules")
    out, at = list[str](), 0
    for found in _LARK_PIECES.finditer(text):
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
