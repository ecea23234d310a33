"""Custom tools: their inputs follow a grammar in every format of calls, and are read from the arguments."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from octavo.entrypoints.chat.answer_reader import AnswerReader, CallDelta, answer_format, wanted_grammar
from octavo.entrypoints.chat.tools.format_detection import ModelFormats
from octavo.entrypoints.chat.tools.tool_formats import FORMATS, HARMONY, ToolFormat
from octavo.entrypoints.openai.custom_tools import CustomInput, regex_as_lark, whole_input
from octavo.entrypoints.openai.request_bodies import ChatCompletionRequest
from octavo.errors import RequestError
from octavo.structured_output.grammar_builder import make_checked_grammar
from octavo.structured_output.lark_in_calls import lark_without, quoted_lark
from tests.entrypoints.chat.tools.written import content_of, write
from tests.structured_output.test_grammar import follows

PATCH = r"""
start: begin hunk+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?
hunk: "*** Update File: " name LF line+  // a file
name: /(.+)/
line: "+" /(.*)/ LF -> added | "-" /(.*)/ LF -> removed
    | " " /(.*)/ LF
%import common.LF
"""
RIGHT = '*** Begin Patch\n*** Update File: a.py\n-print("a\\n")\n+\tprint("ü😀 </x> \'\')")\n*** End Patch'
WRONG = [RIGHT.replace("*** End Patch", ""), RIGHT.replace("\n+\t", "\n?\t"), "", "print()"]
USER = {"role": "user", "content": "Hi"}


def custom(definition: str | None = None, syntax: str = "lark", name: str = "patch") -> dict[str, Any]:
    grammar = {"definition": definition, "syntax": syntax}
    own = {} if definition is None else {"format": {"type": "grammar", "grammar": grammar}}
    return {"type": "custom", "custom": {"name": name, "description": "Edits files.", **own}}


def asked(*tools: dict[str, Any], **fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate({"messages": [USER], "tools": list(tools), **fields})


def grammar_of(body: ChatCompletionRequest, form: ToolFormat) -> str | None:
    formats = ModelFormats(form)
    structure = body.structure()
    wanted = wanted_grammar(body, answer_format(body, formats, ""), formats, structure and structure[1], {}, None)
    return None if wanted is None else make_checked_grammar(wanted).text


def read(body: ChatCompletionRequest, form: ToolFormat, text: str) -> list[CallDelta]:
    reader = AnswerReader(answer_format(body, ModelFormats(form), ""))
    deltas = [delta for i, letter in enumerate(text) for delta in reader.add(letter, i == len(text) - 1)]
    return [delta for delta in deltas if isinstance(delta, CallDelta)]


SPELLED = {form: name for name, form in FORMATS.items()}
CASES = [pytest.param(form, "required", id=name) for form, name in SPELLED.items()]
CASES += [
    pytest.param(FORMATS[name], "auto", id=f"auto-{name}")
    for name in ("hermes", "qwen3_coder", "llama3_json", "lfm2", "deepseek_v32", "openai", "gemma4")
]


@pytest.mark.parametrize(("form", "choice"), CASES)
def test_inputs_follow_the_grammar_in_every_format(form: ToolFormat, choice: str) -> None:
    body = asked(custom(PATCH), tool_choice=choice)
    grammar = grammar_of(body, form)
    if grammar is None:
        assert (form, choice) == (HARMONY, "auto")
        return
    written = partial(write, form, as_forced=True)
    right = written([("patch", {"input": RIGHT})]).replace(repr(RIGHT), json.dumps(RIGHT, ensure_ascii=False))
    assert follows(grammar, right)
    for text in WRONG:
        call = written([("patch", {"input": text})]).replace(repr(text), json.dumps(text, ensure_ascii=False))
        assert not follows(grammar, call)
    deltas = read(body, form, content_of(form, right))
    assert all(delta.is_custom for delta in deltas) and deltas[0].name == "patch" and deltas[-1].is_whole
    assert "".join(delta.arguments for delta in deltas) == RIGHT


def test_without_marks_a_grammar_and_a_structure_exclude_each_other() -> None:
    body = asked(custom(PATCH), response_format={"type": "json_object"})
    with pytest.raises(RequestError, match="excludes patch"):
        grammar_of(body, FORMATS["llama3_json"])
    assert grammar_of(body, FORMATS["hermes"]) is not None


TEXTS = [
    "", "a", "ab", '"', "\\", "\n", "\t", "\r\n", "\x00", "\x1f", "é", "😀", "a\nb", '"a"', "\\n", "b\\", "/", "[",
    "A", "z", " ", "aaa", "]", "\\\\", '""', "-", "\na", "\n\n",
]  # fmt: skip


@pytest.mark.parametrize(
    "grammar",
    [
        "start: /.*/",
        "start: /(?s:.*)/",
        "start: /.*/s",
        "start: /[^a]+/",
        'start: /["a\\\\]+/',
        r"start: /\s+/",
        r"start: /\S*/",
        r"start: /\W/",
        r"start: /\//",
        r"start: /[\n\t]/",
        r"start: /\x22|\u0041/",
        r"start: /[^\]a]{1,2}/",
        r"start: /[[a-z]\n]+/",
        "start: /[]a]+/",
        r"start: /[\x00-\x1f]/",
        r"start: /\p{L}+/",
        "start: /(?P<n>a)?/",
        r'start: "\""',
        r'start: "\\" "n"?',
        r'start: ("a" | /\n/)*',
        'start: "A"i "b"?',
        'start: " ".."~"',
        'start: a+ // "\na: "a" # /x/\n',
        'start: a | "b"\na: "a" a | "z"',  # not regular
        'start: line+\nline: /.*/ "\\n"',
        "start: WS | LF\n%import common (LF, WS)",
        "start: X\n%import common.ESCAPED_STRING -> X",
        "start: NEWLINE WORD?\n%import common.NEWLINE\n%import common.WORD",
        r"start: /a|\n/i",
        r"start: /(?i)[a\n]+/",
        r'start: "a\nb"i "\""i?',
        "start: /[^x]/i",
        "start: RULE_0__0 b\nb: /[^a]/\nRULE_0__0: /a?/",
        'start: a+ "\\n"?\n%ignore "/" | "-" // x\n%ignore "b"\na: "a".."b" -> x | /["]/',
        "start: a+\na: /[a-z]/\n%ignore/ +/\n%ignore/-/",
        'start: a+ # all\na: /[a-z]/ // "\n%ignore / +/ // blanks\n%ignore "-" # "a"\n%ignore /\\//',
        "%import common.WS\n%ignore WS\nstart: [a] LF | a start -> more // a\na: /.*/\n%import common.LF",
        'start: a\n  | /[^\\n]/ "\\n"\na: /.*/ "\\n"\n%ignore " "',
        'start: all -> one\nall: /.*/ [LF] -> all\n  | "b" LF -> b\nb: "x"\n%import common.LF',
    ],
)
def test_a_quoted_grammar_has_the_texts_of_the_grammar_as_json_writes_them(grammar: str) -> None:
    of = lambda text: json.dumps({"grammars": [{"lark_grammar": text}]})  # noqa: E731
    quoted, taken = of(quoted_lark(grammar)), [text for text in TEXTS if follows(of(grammar), text)]
    assert taken
    assert [text for text in TEXTS if follows(quoted, json.dumps(text, ensure_ascii=False)[1:-1])] == taken


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "gemma4"])
def test_ignored_texts_stand_before_the_texts_of_rules(name: str) -> None:
    text = 'start: _line+\n_line: "say" /.*/ "\\n"\n%ignore / +/ // blanks\n%ignore /\\n+/ # lines\n'
    form, right = FORMATS[name], ["say a\n", "say a\nsay b\n", " say\n\na b\n\n  say\n", "say </x>\n"]
    made = grammar_of(asked(custom(text), tool_choice="required"), form)
    for given in [*right, "sa y a\n", "say a", "a\n", ""]:
        call = write(form, [("patch", {"input": given})], as_forced=True)
        assert made is not None and follows(made, call) is (given in right), given


def test_long_grammars_are_rewritten_and_longer_ones_refused() -> None:
    long = "start: r0\n" + "".join(f"r{i}: r{i + 1} -> x | r{i + 1} -> y\n" for i in range(20_000)) + "r20000: /a/"
    assert "->" not in quoted_lark(long) and "->" in quoted_lark(f"{long} r0"), "the last one refers to the first"
    with pytest.raises(RequestError, match="is the most"):
        grammar_of(asked(custom("a" * (1 << 21)), tool_choice="required"), FORMATS["hermes"])


@pytest.mark.parametrize(
    "grammar",
    [
        'start: %json {"type": "object"}',
        "start: /a b/x",
        "start: /[a/",
        "start: <[5]>",
        'start: "\\q"',
        "start: /a/\n%ignore",
        "start: /a/\n%ignore // texts",
    ],
)
def test_what_cannot_be_quoted_is_refused(grammar: str) -> None:
    with pytest.raises(RequestError, match="cannot be read") as refused:
        grammar_of(asked(custom(grammar), tool_choice="required"), FORMATS["hermes"])
    assert refused.value.param == "tools[0].custom.format.grammar"


def test_a_regular_expression_holds_for_the_whole_input() -> None:
    grammar = grammar_of(asked(custom(r'[a/]{2}\n|"', "regex"), tool_choice="required"), FORMATS["hermes"])
    taken = [text for text in ("a/\n", '"', "a", "a/\nb", "") if grammar is not None and follows(
        grammar, write(FORMATS["hermes"], [("patch", {"input": text})], as_forced=True)
    )]  # fmt: skip
    assert taken == ["a/\n", '"']
    assert regex_as_lark("a/\\/\n") == "start: TEXT\nTEXT: /a\\/\\/\\n/"


@pytest.mark.parametrize(
    ("grammar", "taken"),
    [
        (r"start: /[\s\S]+/", ["a", "a\nb", "a</b>\n", "</b"]),
        ("start: C+\nC: /[\\s\\S]/", ["a", "a\nb", "a</b>\n", "</b"]),
        ('start: "</" "parameter>"? /.*/', ["</b"]),
        ("start: start2\nstart2: /a/ start2 | /a/", ["a"]),  # not regular
    ],
)
def test_no_text_between_tags_has_the_mark_that_ends_it(grammar: str, taken: list[str]) -> None:
    form, texts = FORMATS["qwen3_coder"], ["a", "a\nb", "a</b>\n", "</b", "a</parameter>b", "</parameter>b"]
    made = grammar_of(asked(custom(grammar), tool_choice="required"), form)
    assert made is not None
    assert [text for text in texts if follows(made, write(form, [("patch", {"input": text})]))] == taken


@pytest.mark.parametrize(
    "line",
    [
        r'/[^()\n]*/ "\n"', r'LINE "\n"¶LINE: /# [^()\n]+/', r'/[^()"]*/ "\""', r'/a[^()\\]+/i "\\"',
        r'/[^()\n]{1,3}/ "\n"', r'/["\\]+/ "\n"', r'/a?b*/ "\n"', r'/[^()\n]*/ LINE?¶LINE: /\n+/',
        r'LINE "\n" | "b" A¶LINE: /[^()\n]*/¶A: LINE "\n"',
        r'a_line -> x | "\n"¶a_line: /[^()\n]+/ // a comment',
    ],
)  # fmt: skip
def test_in_json_a_grammar_that_refers_to_itself_takes_the_same_texts(line: str) -> None:
    """A backslash that begins the text behind a terminal was taken for one of the terminal's own."""
    grammar = f'start: item\nitem: "(" item* ")" | {line}'.replace("¶", "\n")
    made = grammar_of(asked(custom(grammar), tool_choice="required"), FORMATS["hermes"])
    alone = json.dumps({"grammars": [{"lark_grammar": grammar}]})
    inner = ["a\n", "\n", '"', 'a"', "Ab\\", "# \t\\é\n", '"\\\n', "abbb\n", "a;", "(a\n)", "b\\n\n", "\\\\"]
    texts = [*inner, *(f"(({one}){one}(){one})" for one in inner), "(", "()", "a\na"]
    assert made is not None and any(follows(alone, text) for text in texts)
    for text in texts:
        call = write(FORMATS["hermes"], [("patch", {"input": text})], as_forced=True)
        assert follows(made, call) is follows(alone, text), text


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ("", "it has no rules"),
        ("// a: b", "it has no rules"),
        ('start: "a" b', '1\\(8\\): unknown name: "b"'),
        ("start: /(/", 'the regular expression "\\(" cannot'),
    ],
)
def test_an_error_is_about_the_grammar_of_the_request(grammar: str, why: str) -> None:
    for name in ("hermes", "qwen3_coder"):
        with pytest.raises(RequestError, match=why) as refused:
            grammar_of(asked(custom(grammar), tool_choice="required"), FORMATS[name])
        assert refused.value.param == "tools[0].custom.format.grammar"


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_all_rules_of_a_grammar_may_have_attributes(name: str) -> None:
    """Such a grammar was refused for the number of its rules."""
    made = grammar_of(asked(custom("start[capture]: /a+/"), tool_choice="required"), FORMATS[name])
    assert made is not None
    for text, is_right in (("aa", True), ("ab", False)):
        assert follows(made, write(FORMATS[name], [("patch", {"input": text})], as_forced=True)) is is_right


def test_a_class_of_all_control_characters_stays_short() -> None:
    assert len(quoted_lark("start: /[^x]/")) < 120


def test_an_input_with_an_unknown_escape_is_returned_as_it_is() -> None:
    assert CustomInput().add('{"input": "a\\Nb"}') == "a\\Nb"


def test_texts_of_a_grammar_have_no_mark_that_ends_them() -> None:
    form = FORMATS["qwen3_coder"]
    grammar = grammar_of(asked(custom("start: /.*/"), tool_choice="required"), form)
    for text, is_right in (("a </b>", True), ("a </parameter> b", False), ("<parameter=x>", False)):
        assert grammar is not None and follows(grammar, write(form, [("patch", {"input": text})])) is is_right
    assert lark_without('start: "a" /b/i', []) == 'start: "a" /b/i'


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\nb"}', "a\nb"), ('{"patch": "a"}', "a"), ("{}", ""), ('{"input": 5}', '{"input": 5}'),
        ('{"a": "b", "c": "d"}', '{"a": "b", "c": "d"}'), ("no JSON", "no JSON"), ('{"input": "a", "more": 1}', "a"),
    ],
)  # fmt: skip
def test_the_input_is_found_in_any_arguments(arguments: str, text: str) -> None:
    assert whole_input(arguments) == text


def test_a_forced_call_of_a_free_tool_streams_its_input_as_it_comes() -> None:
    body = asked(custom(), tool_choice="required")
    arguments = '{ "input" : "a\\"\\u00e9\\ud83d\\ude00\\ud83d\\n"}'
    text = f'<tool_call>\n{{"name": "patch", "arguments": {arguments}}}\n</tool_call>'
    deltas = read(body, FORMATS["hermes"], text)
    assert [delta.arguments for delta in deltas] == ["", "a", '"', "é", "😀", "\ufffd\n", ""]
    assert [delta.is_whole for delta in deltas[-2:]] == [False, True]
    cut = CustomInput()
    assert (cut.add('{"inp') + cut.add('ut": "a\\'), cut.is_whole) == ("a", False)
