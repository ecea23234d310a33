"""Structural tags as a grammar: text whose parts between tags follow a grammar, such as calls within prose.

The forms are xgrammar's, which vLLM takes: a tree of formats (its documentation's "Structural Tag Usage"), and the
older list of structures with their triggers, which is one format of that tree. Here they become rules of
a Lark grammar; `octavo.structured_output.grammar_builder` writes the schemas, regular expressions and grammars within
them.

llguidance's lexer takes the longest lexeme and never goes back. So free text and the text that ends it are one lazy
lexeme. For this, `write` gets the texts that end a format, and returns the format together with its end.
"""

import json
import re
from collections.abc import Callable, Mapping
from functools import partial, partialmethod
from typing import Any

from octavo.structured_output import lark

_MAX_DEPTH = 40
_TEXTS = "(.|\\n)*"
_NOTHING = '""'
_EMPTY: tuple[Any, ...] = (None, [], {})
# A regular expression whose end matches any text of any length.
_OPEN_ENDED = re.compile(r"(\.|\[\\s\\S\]|\[\^\]|\((?:\?:)?\.\|\\n\))[*+]\??\)*\$?$")
# The fields of each format, by its type.
_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # required, optional
    "const_string": (("value",), ()),
    "json_schema": (("json_schema",), ("style", "any_order")),
    "grammar": (("grammar",), ()),
    "regex": (("pattern",), ()),
    "any_text": ((), ("excludes",)),
    "sequence": (("elements",), ()),
    "or": (("elements",), ()),
    "optional": (("content",), ()),
    "plus": (("content",), ()),
    "star": (("content",), ()),
    "repeat": (("min", "max", "content"), ()),
    "tag": (("begin", "content", "end"), ()),
    "triggered_tags": (("triggers", "tags"), ("at_least_one", "stop_after_first", "excludes")),
    "tags_with_separator": (("tags", "separator"), ("at_least_one", "stop_after_first")),
    "dispatch": (("rules",), ("loop", "excludes")),
}
_NOT_BUILT = (
    "token", "exclude_token", "any_tokens", "token_triggered_tags", "token_dispatch", "qwen_xml_parameter",
)  # fmt: skip
# The texts of which one comes after a format. (): the answer ends with the format. None: something follows that the
# format does not know.
_Ends = tuple[str, ...] | None


def grammars_of(
    tag: Any, special_tokens: Mapping[str, int], part: Callable[[str, Any], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the grammars of a structural tag; the first is the answer's. `special_tokens` are ids by text. `part(kind,
    value)` returns the grammar of a "json" schema, a "regex" or a "grammar" in the tag. Raises `ValueError` with the
    place of an error.
    """
    if not isinstance(tag, Mapping):
        raise ValueError(f"a structural tag is an object, not {json.dumps(tag)[:40]}")
    writer = _Writer(special_tokens, part)
    if "structures" in tag or "triggers" in tag:
        _check_fields(tag, "it", ("structures", "triggers"), ("type",))
        found, where = _of_structures(tag), "structures"
    else:
        _check_fields(tag, "it", ("format",), ("type",))
        found, where = tag["format"], "format"
    if tag.get("type", "structural_tag") != "structural_tag":
        raise ValueError(f'type is "structural_tag", not {json.dumps(tag["type"])[:40]}')
    start = writer.write(found, (), where)
    return [{"lark_grammar": "\n".join([f"start: {start}", *writer.lines])}, *writer.grammars]


def _of_structures(tag: Mapping[str, Any]) -> dict[str, Any]:
    structures = tag["structures"]
    if not isinstance(structures, list) or not structures:
        raise ValueError("structures is a list of at least one object with begin, schema and end")
    tags = []
    for i, one in enumerate(structures):
        where = f"structures[{i}]"
        if not isinstance(one, Mapping):
            raise ValueError(f"{where} is an object with begin, schema and end")
        _check_fields(one, where, ("begin", "schema", "end"), ())
        content = {"type": "json_schema", "json_schema": one["schema"]}
        tags.append({"begin": one["begin"], "content": content, "end": one["end"]})
    return {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}


class _Writer:
    def __init__(self, special_tokens: Mapping[str, int], part: Callable[[str, Any], dict[str, Any]]) -> None:
        self.lines: list[str] = []
        self.grammars: list[dict[str, Any]] = []
        self._special_tokens = special_tokens
        self._literal = partial(lark.literal, special_tokens=special_tokens)
        self._part = part
        self._depth = 0
        self._num_names = 0

    def write(self, wanted: Any, ends: _Ends, where: str) -> str:
        """Return an expression of Lark for one format and, if there are `ends`, for one of these after it."""
        if not isinstance(wanted, Mapping):
            raise ValueError(f"{where} is an object with a type, not {json.dumps(wanted)[:40]}")
        wanted = {name: value for name, value in wanted.items() if value is not None}
        kind = wanted.get("type")
        if kind in _NOT_BUILT:
            raise ValueError(f"{where}.type {kind} is not built")
        if not isinstance(kind, str) or kind not in _FIELDS:
            raise ValueError(f"{where}.type is one of {', '.join(_FIELDS)}, not {json.dumps(kind)[:40]}")
        _check_fields(wanted, where, _FIELDS[kind][0], ("type", *_FIELDS[kind][1]))
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise ValueError(f"formats are nested more than {_MAX_DEPTH} deep")
        method: Callable[[Mapping[str, Any], _Ends, str], str] = getattr(self, f"_{kind}")
        written = method(wanted, ends, where)
        self._depth -= 1
        return written

    # Formats that end by themselves.

    def _const_string(self, wanted: Mapping[str, Any], ends: _Ends, where: str) -> str:
        value = _text(wanted["value"], f"{where}.value")
        # The constant and its end are one text: of two texts the lexer would take the longer one, which may be wrong.
        return f"({' | '.join(self._literal(value + end) or _NOTHING for end in ends or ('',))})"

    def _json_schema(self, wanted: Mapping[str, Any], ends: _Ends, where: str) -> str:
        if (style := wanted.get("style", "json")) != "json":
            raise ValueError(f'{where}.style must be "json"; {json.dumps(style)[:40]} is not built')
        if wanted.get("any_order", False) is not False:
            raise ValueError(f"{where}.any_order is not built: properties come in the order of their schema")
        return self._of_part("json", wanted["json_schema"], ends)

    def _grammar(self, wanted: Mapping[str, Any], ends: _Ends, where: str) -> str:
        text = _text(wanted["grammar"], f"{where}.grammar")
        if text.lstrip().startswith("{"):
            raise ValueError(f"{where}.grammar is EBNF or Lark")
        return self._of_part("grammar", text, ends)

    def _regex(self, wanted: Mapping[str, Any], ends: _Ends, where: str) -> str:
        pattern = _text(wanted["pattern"], f"{where}.pattern")
        if ends is None and _OPEN_ENDED.search(pattern):
            raise ValueError(f"{where}.pattern has no end: it is last, or in a tag, or before a const_string")
        if not ends:
            return self._of_part("regex", pattern, ends)
        if pattern.startswith("^") and pattern.endswith("$") and not pattern.endswith("\\$") and "|" not in pattern:
            pattern = pattern[1:-1]
        expression = self._part("regex", pattern)["lark_grammar"].removeprefix("start: ")
        name = self._name("expression").upper()
        self.lines.append(f"{name}: {expression}")
        # Stop at the first end, because an expression such as `.*` would also match the end.
        return f"({' | '.join(self._up_to_first(name, end) for end in ends)})"

    def _of_part(self, kind: str, value: Any, ends: _Ends) -> str:
        name = self._name("part")
        self.grammars.append({**self._part(kind, value), "name": name})
        return self._before(f"@{name}", ends)

    # Text that may be anything.

    def _any_text(self, wanted: Mapping[str, Any], ends: _Ends, where: str) -> str:
        return self._up_to(ends, _texts(wanted.get("excludes", []), f"{where}.excludes"), where)

    def _up_to(self, ends: _Ends, kept_out: list[str], where: str) -> str:
        """Return an expression for any text without the texts `kept_out`, and one of `ends` after it."""
        if ends is None:
            raise ValueError(f"{where} has no end: any text is last, or in a tag, or before a const_string")
        if not ends:
            return self._text_without(kept_out)
        return f"({' | '.join(self._text_with(end, kept_out) for end in ends)})"

    def _text_without(self, kept_out: list[str], head: str = "") -> str:
        """Return a terminal for the longest text that ends in `head` and has none of `kept_out` in it. Special tokens
        are no text."""
        name = self._name("text").upper()
        texts = [text for text in kept_out if not self._special_tokens.keys() & self._pieces(text)]
        out = "".join(f" & ~/{_TEXTS}{lark.escaped(text)}{_TEXTS}/" for text in texts)
        self.lines.append(f"{name}: /{_TEXTS}{lark.escaped(head)}/{out}")
        return name

    def _text_with(self, end: str, kept_out: list[str]) -> str:
        """Return an expression for text up to and including the first `end`."""
        pieces = self._pieces(end)
        special = next((i for i, piece in enumerate(pieces) if piece in self._special_tokens), None)
        head = "".join(pieces[:special])
        text = self._text_without(kept_out, head)
        if special is not None:
            return f"{text} {self._literal(end[len(head) :])}"
        name = self._name("upto")
        self.lines.append(f"{name}[lazy]: {text}")
        return name

    def _up_to_first(self, terminal: str, end: str) -> str:
        """Return an expression for a terminal up to and including the first `end`."""
        if self._pieces(end)[0] in self._special_tokens:  # a special token is no text, so it ends the terminal
            return f"{terminal} {self._literal(end)}"
        name = self._name("upto")
        self.lines.append(f"{name}[lazy]: {terminal} {self._literal(end)}")
        return name

    def _pieces(self, text: str) -> list[str]:
        return lark.pieces(text, self._special_tokens)

    # Formats made of others.

    def _sequence(self, wanted: Mapping[str, Any], ends: _Ends, where: str) -> str:
        elements = _list(wanted["elements"], f"{where}.elements")
        written, i = [], 0
        while i < len(elements):
            here, following = f"{where}.elements[{i}]", elements[i + 1 : i + 2]
            if not following:
                written.append(self.write(elements[i], ends, here))
            elif text := _constant(following[0]):
                written.append(self.write(elements[i], (text,), here))
                i += 1
                if i + 1 == len(elements):
                    written.append(self._before("", ends))
            else:
                written.append(self.write(elements[i], None, here))
            i += 1
        return f"({' '.join(written)})"

    def _or(self, wanted: Mapping[str, Any], ends: _Ends, where: str) -> str:
        elements = _list(wanted["elements"], f"{where}.elements")
        return f"({' | '.join(self.write(one, ends, f'{where}.elements[{i}]') for i, one in enumerate(elements))})"

    def _repeated(self, mark: str, wanted: Mapping[str, Any], ends: _Ends, where: str) -> str:
        return self._before(f"({self.write(wanted['content'], None, f'{where}.content')}){mark}", ends)

    _optional = partialmethod(_repeated, "?")
    _plus = partialmethod(_repeated, "+")
    _star = partialmethod(_repeated, "*")

    def _repeat(self, wanted: Mapping[str, Any], ends: _Ends, where: str) -> str:
        least, most = wanted["min"], wanted["max"]
        if type(least) is not int or type(most) is not int or least < 0 or not (most == -1 or most >= max(1, least)):
            raise ValueError(f"{where}.min and max are whole numbers, 0 <= min <= max, and a max of -1 is no limit")
        content = self.write(wanted["content"], None, f"{where}.content")
        return self._before(f"({content}){{{least},{'' if most == -1 else most}}}", ends)

    # Tags.

    def _tag(self, wanted: Mapping[str, Any], ends: _Ends, where: str) -> str:
        return f"({self._literal(_text(wanted['begin'], f'{where}.begin'))} {self._rest(wanted, ends, where)})"

    def _rest(self, tag: Mapping[str, Any], ends: _Ends, where: str) -> str:
        """Return an expression for what follows a tag's `begin`: its content and its end."""
        given = tag["end"]
        own = [_text(given, f"{where}.end")] if isinstance(given, str) else _texts(given, f"{where}.end")
        if not own:
            raise ValueError(f"{where}.end is a text or a list of texts")
        if own == [""]:
            return self.write(tag["content"], ends, f"{where}.content")
        if "" in own:
            raise ValueError(f"{where}.end has an empty text among others")
        return self._before(self.write(tag["content"], tuple(own), f"{where}.content"), ends)

    def _triggered_tags(self, wanted: Mapping[str, Any], ends: _Ends, where: str) -> str:
        triggers = _texts(wanted["triggers"], f"{where}.triggers")
        if not triggers or "" in triggers:
            raise ValueError(f"{where}.triggers is a list of non-empty texts")
        tags = self._tags(wanted, where)
        begun: dict[str, list[str]] = {}  # by trigger: expressions that may follow it
        whole = []
        for tag, rest in tags:
            # Text ends at the first trigger in it; if two begin at one place, at the shorter.
            trigger = min((text for text in triggers if tag.startswith(text)), key=len, default=None)
            if trigger is None:
                raise ValueError(f"{where}: a tag begins {json.dumps(tag)[:60]}, and none of the triggers does")
            begun.setdefault(trigger, []).append(f"{self._literal(tag[len(trigger) :])} {rest}")
            whole.append(f"{self._literal(tag)} {rest}")
        excludes = _texts(wanted.get("excludes", []), f"{where}.excludes")
        is_whole = _flag(wanted, "at_least_one", where)
        first = f"({' | '.join(whole)})" if is_whole else None
        return self._in_text(
            begun, triggers, excludes, first, not _flag(wanted, "stop_after_first", where), ends, where
        )

    def _dispatch(self, wanted: Mapping[str, Any], ends: _Ends, where: str) -> str:
        begun: dict[str, list[str]] = {}
        for i, rule in enumerate(_list(wanted["rules"], f"{where}.rules")):
            here = f"{where}.rules[{i}]"
            if not (isinstance(rule, list) and len(rule) == 2 and isinstance(rule[0], str) and rule[0]):
                raise ValueError(f"{here} is a list of a non-empty text and a format")
            begun.setdefault(rule[0], []).append(self.write(rule[1], None, f"{here}[1]"))
        excludes = _texts(wanted.get("excludes", []), f"{where}.excludes")
        loops = _flag(wanted, "loop", where, default=True)
        return self._in_text(begun, list(begun), excludes, None, loops, ends, where)

    def _in_text(
        self,
        begun: Mapping[str, list[str]],
        triggers: list[str],
        excludes: list[str],
        first: str | None,
        loops: bool,
        ends: _Ends,
        where: str,
    ) -> str:
        """Return an expression for text in which one of the expressions `begun[trigger]` follows each trigger; the text
        follows `first`, if given."""
        alternatives = []
        for trigger in triggers:
            # A trigger that no tag begins with must not occur.
            if trigger in begun:
                alternatives.append(f"{self._text_with(trigger, excludes)} ({' | '.join(begun[trigger])})")
        tagged, name = f"({' | '.join(alternatives)})", self._name("tagged")
        self.lines.append(f"{name}: {tagged}")
        if first is not None and not loops:
            return self._before(first, ends)
        tail = self._up_to(ends, [*triggers, *(text for text in excludes if text not in (ends or ()))], where)
        if not loops:
            return f"({tail} | {self._before(name, ends)})"
        return f"({first or ''} {name}* {tail})"

    def _tags_with_separator(self, wanted: Mapping[str, Any], ends: _Ends, where: str) -> str:
        separator = _text(wanted["separator"], f"{where}.separator")
        tags = self._tags(wanted, where)
        first = " | ".join(f"{self._literal(begin)} {rest}" for begin, rest in tags)
        # Separator and begin are one text, because the lexer cannot go back to the end of the separator.
        following = " | ".join(f"{self._literal(separator + begin)} {rest}" for begin, rest in tags)
        more = "" if _flag(wanted, "stop_after_first", where) else f" ({following})*"
        is_optional = "" if _flag(wanted, "at_least_one", where) else "?"
        return self._before(f"(({first}){more}){is_optional}", ends)

    def _tags(self, wanted: Mapping[str, Any], where: str) -> list[tuple[str, str]]:
        """Return the begin of each tag, and an expression for the rest of it."""
        found = []
        for i, tag in enumerate(_list(wanted["tags"], f"{where}.tags")):
            here = f"{where}.tags[{i}]"
            if not isinstance(tag, Mapping) or tag.get("type", "tag") != "tag":
                raise ValueError(f"{here} is a tag: an object with begin, content and end")
            _check_fields(tag, here, *_FIELDS["tag"][:1], ("type",))
            begin = _text(tag["begin"], f"{here}.begin")
            if not begin:
                raise ValueError(f"{here}.begin is a non-empty text")
            name = self._name("rest")
            self.lines.append(f"{name}: {self._rest(tag, None, here)}")
            found.append((begin, name))
        return found

    def _before(self, written: str, ends: _Ends) -> str:
        if not ends:
            return written
        return f"{written} ({' | '.join(map(self._literal, ends))})"

    def _name(self, kind: str) -> str:
        self._num_names += 1
        return f"{kind}_{self._num_names}"


def _constant(wanted: Any) -> str | None:
    """Return the text of a format that is one constant text; otherwise None."""
    if not isinstance(wanted, Mapping) or wanted.get("type") != "const_string":
        return None
    return wanted["value"] if wanted.keys() == {"type", "value"} and isinstance(wanted["value"], str) else None


def _check_fields(given: Mapping[str, Any], where: str, required: tuple[str, ...], optional: tuple[str, ...]) -> None:
    missing = [name for name in required if name not in given]
    if missing:
        raise ValueError(f"{where} has no {missing[0]}")
    # xgrammar's own classes write all of their fields, most of them empty.
    unknown = [name for name, value in given.items() if name not in (*required, *optional) and value not in _EMPTY]
    if unknown:
        raise ValueError(f"{where} has {json.dumps(unknown[0])[:40]}, which is not known")


def _text(given: Any, where: str) -> str:
    if not isinstance(given, str):
        raise ValueError(f"{where} is a text, not {json.dumps(given)[:40]}")
    return given


def _texts(given: Any, where: str) -> list[str]:
    return [_text(one, f"{where}[{i}]") for i, one in enumerate(_list(given, where, least=0))]


def _list(given: Any, where: str, least: int = 1) -> list[Any]:
    if not isinstance(given, list) or len(given) < least:
        raise ValueError(f"{where} is a list{' of at least one' if least else ''}, not {json.dumps(given)[:40]}")
    return given


def _flag(given: Mapping[str, Any], name: str, where: str, *, default: bool = False) -> bool:
    value = given.get(name, default)
    if type(value) is not bool:
        raise ValueError(f"{where}.{name} is true or false, not {json.dumps(value)[:40]}")
    return value
