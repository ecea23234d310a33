"""Texts in schemas: formats, and regular expressions."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

from octavo.errors import RequestError
from octavo.sampling_params import StructuredOutputsParams
from octavo.structured_output.grammar_builder import WantedGrammar, make_checked_grammar
from octavo.structured_output.schema_formats import has_format
from octavo.structured_output.schema_keywords import SchemaError
from octavo.structured_output.schema_lowering import lower
from octavo.structured_output.schema_patterns import read_pattern
from octavo.structured_output.schema_validation import Validator
from tests.structured_output.corpus import admits
from tests.structured_output.grammars import INTEGER, TEXT, check_of, grammar_of


def test_formats_of_long_lists_are_bounded() -> None:
    with pytest.raises(SchemaError, match="too many steps"):
        lower({"enum": [f"text {i}" for i in range(13_000)], "not": {"format": "email"}})
    assert not lower({"enum": [f"text {i}" for i in range(50)], "not": {"format": "email"}}).unheld


@pytest.mark.parametrize("name", ["path", "binary", "password", "decimal", "uri-reference", "uuid4", "int64", "odd"])
def test_a_format_that_is_not_known_says_nothing(name: str) -> None:
    grammar = grammar_of({"type": "object", "properties": {"a": {"type": "string", "format": name}}})
    assert admits(grammar, {"a": "anything"})


@pytest.mark.parametrize(
    ("beside", "right", "wrong"),
    [
        ({"format": "date", "pattern": "^2"}, "2026-11-27", ["1999-12-31", "2 days"]),
        ({"format": "email", "maxLength": 12, "pattern": "@a"}, "b@a.org", ["b@c.org", "no@a@b", "longer.name@a.org"]),
        ({"format": "uri", "minLength": 6, "pattern": "^https?:"}, "https://a", ["ftp://abcd", "https:a b"]),
        ({"format": "date", "pattern": "^[0-9]+/[0-9]+$"}, "11/2026", ["2026-11-27"]),  # no date is like that
        ({"format": "uuid", "maxLength": 32}, "0" * 32, ["0" * 33]),
        ({"format": "uri-reference", "minLength": 1}, "/a/%20?b=[c]#d", ["", "a b", "%2", "a#b#c", "a\\b"]),
        ({"format": "uri-reference"}, "a/b:c", ["://", "1:a", ":"]),
        ({"format": "uri-reference"}, "a+b:1#c?d", ["a#b#c"]),
        (
            {"format": "uri-reference"},
            "//b@[::1]:8000?c",
            ["http://a:b/", "//::1/", "http://[x]/", "a://b//c:[#d#", "/[::1]", "//[::1.2.3.04]"],
        ),
        ({"format": "iri"}, "https://müller.example/ö?q=ü#ä", ["müller", "ö:a", "a:b c", "a:<", 'a:"', "a://::1"]),
        ({"format": "iri-reference"}, "ö/b:c#d", ["://", "a b", "a#b#c", "ö:", "//::1"]),
        ({"format": "ipv6"}, "1::d6:192.168.0.1", ["1:2:3:4:5:6:7:1.2.3.4", "::1.2.3.256", "::1::", "::1.2.3.4:5"]),
        ({"format": "ipv6"}, "1:2:3:4:5:6:7::", ["1:2:3:4:5:6:7::8", "1:2:3:4:5:6:7", "::12345", "::1%25"]),
        ({"format": "date"}, "2024-02-29", ["2023-02-29", "1900-02-29", "2024-04-31", "2024-13-01", "2024-1-01"]),
        ({"format": "date", "maxLength": 9}, "a", ["ten letters"]),  # no date is as short
        ({"format": "date-time"}, "2000-02-29t23:59:60.5z", ["2001-02-29T00:00:00Z", "2000-01-01T00:00:60Z"]),
        ({"format": "date-time", "pattern": "Z$"}, "2026-11-30T09:00:00Z", ["2026-11-30T09:00:00+01:00", "Z"]),
        ({"format": "time"}, "23:59:60+00:00", ["22:59:60Z", "23:58:60Z", "23:59:60+01:00", "24:00:00Z", "10:00Z"]),
        ({"pattern": r"^a\s\S[\s-]$"}, "a\ufeffb\u2003", ["ab\ufeff ", "a b\x1c", "a \u00a0-", "a\x85b-"]),
        ({"format": "json-pointer"}, "/a b/~0/ö", ["a", "/~", "/~2"]),
        ({"format": "relative-json-pointer"}, "10/a", ["/a", "01", "1a"]),
        (
            {"format": "uri-template"},
            "http://a/{b:3}/ö{?c.d*,%20}%7B",
            ["/{a", "/a}", "{}", "{a b}", "{a:0}", "a b", "%2"],
        ),
        ({"format": "idn-email"}, "jö.b@ö.example", ["jö", "a@", "@b", "a b@c", "a@b@c", "a..b@c", "a@b."]),
    ],
)
def test_a_format_holds_beside_a_pattern_unless_nothing_has_both(
    beside: dict[str, Any], right: str, wrong: list[str]
) -> None:
    grammar = grammar_of({"type": "object", "properties": {"a": {"type": "string", **beside}}})
    assert admits(grammar, {"a": right})
    assert not any(admits(grammar, {"a": one}) for one in wrong)


@pytest.mark.parametrize(
    "text",
    [
        r"^(?<year>\d+)-\k<year>$",
        "[^]*",
        r"(?=a)[\w-.]\/",
        "",
        r"\p{L}(?i:a)",
        "a{2,3}?",
        r"[^\[]*",
        "[[]",
        "[(*]",
        "[]|a",
    ],
)
def test_a_text_is_a_regular_expression(text: str) -> None:
    check = check_of({"properties": {"a": {"type": "string", "format": "regex"}}})
    assert check.problem(json.dumps({"a": text})) is None


def test_classes_of_a_regular_expression_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python takes milliseconds for each, and the event loop waits."""
    compiled = list[str]()
    with monkeypatch.context() as patch:
        patch.setattr("octavo.structured_output.schema_formats.re.compile", compiled.append)
        assert has_format("[Ā-\uffff]" * 3 + r"\[a", "regex")
    assert compiled == [r"xxx\[a"]


@pytest.mark.parametrize(
    "text",
    [
        "*",
        "[",
        "\\",
        "(a",
        "a)",
        "a**",
        "{2}+*",
        "a{3,2}",
        "(?<n>",
        "[]*(",
        "[(](",
        r"\a",
        "(?P<n>a)",
        "(?#a)",
        "(?i)a",
    ],
)
def test_a_text_is_no_regular_expression(text: str) -> None:
    check = check_of({"properties": {"a": {"type": "string", "format": "regex"}}})
    assert "format 'regex'" in str(check.problem(json.dumps({"a": text})))


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"oneOf": [{**TEXT, "format": "ipv4"}, {**TEXT, "format": "ipv6"}]}, ["1.2.3.4", "::1"], ["x", 1]),
        ({"oneOf": [{**TEXT, "format": "date"}, {"const": ""}]}, ["2026-11-27", ""], ["x"]),
        ({"oneOf": [{**TEXT, "format": "ipv4"}, {**TEXT, "format": "hostname"}]}, ["a.org"], ["1.2.3.4", "a b"]),
        ({**TEXT, "not": {"format": "json-pointer"}}, ["a"], ["/a"]),
        ({**TEXT, "if": {"format": "date"}, "then": {"pattern": "^2"}}, ["2026-11-27", "a"], ["1999-11-27"]),
        ({**TEXT, "not": {"format": "of its own"}, "minLength": 1}, [], []),
    ],
)  # fmt: skip
def test_formats_tell_alternatives_apart(schema: dict[str, Any], right: list[Any], wrong: list[Any]) -> None:
    if not right:
        with pytest.raises(SchemaError, match="Unsatisfiable"):
            lower(schema)
        return
    made = make_checked_grammar(WantedGrammar(StructuredOutputsParams(json=schema)))

    def takes(value: Any) -> bool:
        return admits(made.text, value) and (made.check is None or made.check.problem(json.dumps(value)) is None)

    assert [value for value in right if not takes(value)] == []
    assert [value for value in wrong if takes(value)] == []


def test_a_pattern_that_cannot_be_followed_loosens_no_other() -> None:
    inner_end = {"type": "string", "pattern": "^(a($|/))*$"}
    others = {"b": {"type": "string", "pattern": "^[0-9]+$"}, "c": {"type": "string", "format": "date"}}
    made = make_checked_grammar(
        WantedGrammar(StructuredOutputsParams(json={"type": "object", "properties": {"a": inner_end, **others}}))
    )
    assert made.check is not None and made.check.problem('{"a": "a/b"}') is not None
    assert admits(made.text, {"a": "a/a", "b": "1", "c": "2026-11-27"})
    assert not admits(made.text, {"b": "one"}) and not admits(made.text, {"c": "today"})


@pytest.mark.parametrize(
    "pattern",
    [
        r'^[^"]*$',
        r"^[^\\]*$",
        r'^[^"\n]+$',
        r'^[^"\\/]+$',
        r'^(a|[^"])$',
        r"^\P{P}*$",
        r"^[\x00-!#-z]*$",
        r'^(?:[^\d"])+$',
    ],
)
def test_a_class_without_quotes_or_backslashes_has_none(pattern: str) -> None:
    """llguidance adds them to classes with all control characters."""
    grammar = grammar_of({"type": "string", "pattern": pattern})
    named = grammar_of({"type": "object", "patternProperties": {pattern: INTEGER}, "additionalProperties": False})
    read, rng = read_pattern(pattern), random.Random(pattern)
    for _ in range(60):
        text = "".join(rng.choices('"\\a/\n\x01 5', k=rng.randrange(4)))
        assert admits(grammar, text) == admits(named, {text: 1}) == read.matches(text), text


@pytest.mark.parametrize(
    "pattern",
    [
        r"^[0-9a-z\.\-]*(?<!\.)$", r"^[a-zA-Z_](?!.*--)[a-zA-Z0-9_-]*$", r"^[a-z]{2}(?!b)[a-z]+$", r"[a-z-]+(?<!-)$",
        r"^a(?=.*c)[a-z]*(?<=z|c)$", r"^[ab]\d(?![01])\w*$", r"^a.(?!b)(?=c)..$", r"^(?!a)[^b](?!b).*$",
        r"^[ -\uD7FF\uE000-\uFFFD\uD800\uDBFF-\uDC00\uDFFF\t]*$", r"^[\uD800-\uDFFF]?a$", r"^[^\uDC00]$",
    ],
)  # fmt: skip
def test_patterns_that_look_around_at_a_known_place_mean_what_they_mean(pattern: str) -> None:
    read, rng = read_pattern(pattern), random.Random(pattern)
    for _ in range(2000):
        text = "".join(rng.choices("abcxz-.01_d😀\ue000\t", k=rng.randrange(6)))
        assert read.matches(text) == bool(re.search(pattern, text)), text


@pytest.mark.parametrize(
    ("pattern", "meaning"),
    [
        (r"^[\p{L}\p{N}-_]*$", r"^([^\W_]|[_-])*$"), (r"^[\d-z]+$", r"^[\dz-]+$"), (r"^[a-\d]+$", r"^[a\d-]+$"),
        (r"^[\w-]+$", r"^[\w-]+$"), (r"^[a-z-9]+$", r"^[a-z9-]+$"), (r"^[^\s-x]+$", r"^[^\sx-]+$"),
    ],
)  # fmt: skip
def test_a_hyphen_beside_a_class_is_a_hyphen(pattern: str, meaning: str) -> None:
    read, rng = read_pattern(pattern), random.Random(pattern)
    for _ in range(500):
        text = "".join(rng.choices("a5-zq _x[9", k=rng.randrange(4)))
        assert read.matches(text) == bool(re.search(meaning, text)), text


@pytest.mark.parametrize(
    "pattern",
    [
        r"^a?(?!b)c$", r"^(ab|c)(?!d)x$", r"^a|b(?<!b)$", r"^a+(?!b)c$", r"a(?!b)", r"^(a(?<!b)$)", r"\uD800",
        r"[a-\uD800]",
    ],
)  # fmt: skip
def test_patterns_that_need_to_go_back_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"not known|not built|half of a surrogate"):
        read_pattern(pattern)


@pytest.mark.parametrize("pattern", [r"[\p{[}]", r"[\p{]}]", r"[\p"])
def test_a_class_that_cannot_be_read_is_refused_with_the_field(pattern: str) -> None:
    with pytest.raises(RequestError, match="pattern"):
        grammar_of({"type": "string", "pattern": pattern})
    with pytest.raises(RequestError, match="pattern"):
        grammar_of({"type": "object", "patternProperties": {pattern: INTEGER}})


def test_formats_tell_evaluated_properties_apart() -> None:
    parts = [{"properties": {"k": {"format": form}, name: True}} for form, name in (("ipv4", "a"), ("ipv6", "b"))]
    validator = Validator({"oneOf": parts, "unevaluatedProperties": False})
    assert validator.check({"k": "1.2.3.4", "a": 1}) is None
    assert validator.check({"k": "1.2.3.4", "b": 1}) is not None


@pytest.mark.parametrize("text", ["müller.example", "실례。테스트", "xn--mller-kva.de", "a-1.b", "א׳ב", "क्‍ष"])
def test_a_text_is_an_internationalized_host_name(text: str) -> None:
    assert admits(grammar_of({"format": "idn-hostname"}), text)
    assert check_of({"type": "string", "format": "idn-hostname"}).problem(json.dumps(text)) is None


@pytest.mark.parametrize(
    "text",
    ["", ".", "a.", "a..b", "-a", "a_b", "a b", "〮ä", "l·a", "xn--a-b", "0a.א", "ä" * 64, "a." * 127 + "a", "א1٠", "א."],
)
def test_a_text_is_no_internationalized_host_name(text: str) -> None:
    assert not has_format(text, "idn-hostname")
    is_taken = admits(grammar_of({"type": "string", "format": "idn-hostname"}), text)
    assert not is_taken or check_of({"format": "idn-hostname"}).problem(json.dumps(text)) is not None
