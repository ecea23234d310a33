"""Texts within a grammar in llguidance's Lark, where special tokens have no text and are named by their ids."""

import json
import re
from collections.abc import Mapping


def literal(text: str, special_tokens: Mapping[str, int]) -> str:
    """Return an expression for exactly `text`, "" for an empty text; `special_tokens` are ids by text."""
    parts = (f"<[{special_tokens[p]}]>" if p in special_tokens else json.dumps(p) for p in pieces(text, special_tokens))
    return " ".join(parts)


def pieces(text: str, special_tokens: Mapping[str, int]) -> list[str]:
    """Return `text` in pieces, so that each special token in it is a piece of its own."""
    found, begin = list[str](), 0
    while True:
        places = [
            (at, -len(token), token) for token in special_tokens if token and (at := text.find(token, begin)) >= 0
        ]
        if not places:
            return [piece for piece in [*found, text[begin:]] if piece]
        at, _, token = min(places)  # the longest token at a place: one token may begin with another
        found += [text[begin:at], token]
        begin = at + len(token)


def escaped(text: str) -> str:
    """Return `text` escaped for a regular expression."""
    return re.sub(r"[\\.+*?()|\[\]{}^$/]", lambda found: "\\" + found[0], text).replace("\n", "\\n")


def as_grammar(text: str) -> str:
    """Return a Lark grammar in llguidance's own form, JSON text; `text` may have this form already."""
    return text if text.lstrip().startswith("{") else json.dumps({"grammars": [{"lark_grammar": text}]})
