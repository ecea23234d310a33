"""Calls that models write wrongly, cut off, or leave at an answer's end: they are read alike however their text is cut,
and leave no marks."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.entrypoints.chat.answer_reader import AnswerReader, CallDelta, ReasoningDelta, TextDelta, answer_format
from octavo.entrypoints.chat.reasoning import FUNCTIONARY, STYLES
from octavo.entrypoints.chat.tools.format_detection import ModelFormats
from octavo.entrypoints.chat.tools.format_parser import FormatParser
from octavo.entrypoints.chat.tools.tool_formats import FORMATS, Tags, ToolFormat
from octavo.entrypoints.openai.request_bodies import ChatCompletionRequest
from tests.entrypoints.chat.tools.test_tool_formats import BY_FORMAT, NAMES, read
from tests.entrypoints.chat.tools.written import TOOLS, write


@BY_FORMAT
@settings(max_examples=10, deadline=None, derandomize=True)
@given(data=st.data())
def test_broken_calls_are_read_alike_however_their_text_is_cut(form: ToolFormat, data: st.DataObject) -> None:
    whole = write(form, [("get_weather", {"city": "a b", "days": 3}), ("now", {})])
    # Pieces of calls in any order.
    edges = data.draw(st.lists(st.tuples(st.integers(0, len(whole)), st.integers(0, len(whole))), max_size=4))
    text = "".join(whole[begin:end] for begin, end in edges)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    expected = read(lambda: FormatParser(form, TOOLS), text, [])
    assert read(lambda: FormatParser(form, TOOLS), text, cuts) == expected
    if not expected[1]:
        assert expected[0] == text


OSLO_NOW: list[tuple[str, dict[str, Any]]] = [("get_weather", {"city": "Oslo", "days": 3}), ("now", {})]


def damaged(form: ToolFormat, text: str) -> Iterator[str]:
    """Answers in which the model wrote one mark of its calls wrongly: twice, among blanks, with the end of reasoning
    behind it; and an end mark not at all, or without one of its characters."""
    body = form.body
    value_end = body.value_after.strip() if isinstance(body, Tags) else ""
    begins = {form.open.strip(), form.start.strip()} - {""}
    ends = {form.end.strip(), form.close.strip(), getattr(body, "end", "").strip()} - {""}
    marks = sorted({*begins, *ends, value_end} - {""}, key=len, reverse=True)
    for found in re.finditer("|".join(map(re.escape, marks)) or "(?!)", text):
        before, mark, after = text[: found.start()], found[0], text[found.end() :]
        if mark == "```":  # twice, it begins another block
            yield before if not after else text
            continue
        yield f"{before}{mark}{mark}{after}"
        if mark != value_end:
            yield f"{before} \n{mark}\n\n{after}"
            yield f"{before}{mark}\n</think>\n{after}"
            yield f"{before}{mark}\n{mark}{after}"
        if mark not in begins:
            yield before + after
            # Of these two, some damaged marks are, or begin with, other marks.
            is_clear = form not in (FORMATS["minimax_m3"], FORMATS["muse_glimmer"]) and len(mark) > 5
            for i in range(len(mark)) if is_clear else ():
                yield before + mark[:i] + mark[i + 1 :] + after


@BY_FORMAT
def test_calls_with_damaged_marks_are_calls_and_leave_no_marks(form: ToolFormat) -> None:
    rng = random.Random(NAMES[form])
    for calls in (OSLO_NOW, OSLO_NOW[1:]):
        for text in damaged(form, write(form, calls)):
            for cuts in ([], sorted(rng.choices(range(len(text)), k=6))):
                content, found = read(lambda: FormatParser(form, TOOLS, "</think>"), text, cuts)
                assert (content.strip(), found) == ("", calls), text


@BY_FORMAT
def test_a_cut_answer_has_whole_calls_only(form: ToolFormat) -> None:
    text, reader = write(form, OSLO_NOW), lambda: FormatParser(form, TOOLS)
    for end in range(len(text)):
        content, found = read(reader, text[:end], [end // 2], is_cut=True)
        assert found == OSLO_NOW[: len(found)], text[:end]
        assert content == text[:end] if not found else len(found) == 1 or not content.strip(), text[:end]
        assert read(reader, text[:end], [], is_cut=True) == (content, found)


@pytest.mark.parametrize(
    ("name", "prompt", "text", "is_cut", "deltas"),
    [
        ("functionary", ">>>", "now\n", False, ("", "", ["now"])),
        ("functionary", ">>>", "other\n", False, ("", "other\n", [])),
        ("functionary", ">>>", "now\n", True, ("", ">>>now\n", [])),
        ("mistral", "", "[TOOL_CALLS]now", True, ("", "[TOOL_CALLS]now", [])),
        ("gemma4", "", "<|tool_call>call:now", True, ("", "<|tool_call>call:now", [])),
        ("hermes", "<think>", 'a\n<tool_call></think>{"name": "now"}</tool_call>', False, ("a", "", ["now"])),
        ("hermes", "<think>", 'a<tool_call>{"name": "now"}\n</think>\n\nb', False, ("a", "\n\nb", ["now"])),
        ("glm45", "<think>", "a<tool_call>now", False, ("a<tool_call>now", "", [])),
    ],
)
def test_calls_at_the_end_of_answers_and_beside_reasoning(
    name: str, prompt: str, text: str, is_cut: bool, deltas: tuple[str, str, list[str]]
) -> None:
    style = FUNCTIONARY if name == "functionary" else STYLES["qwen3"]
    fields = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": {"name": "now"}}],
    }
    body = ChatCompletionRequest.model_validate(fields)
    form = answer_format(body, ModelFormats(FORMATS[name], style), prompt)
    for size in (1, 3, len(text)):
        reader = AnswerReader(form)
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        found = [one for piece in pieces for one in reader.add(piece, is_end=False)]
        found += reader.add("", is_end=True, is_cut=is_cut)
        thought = "".join(one.text for one in found if isinstance(one, ReasoningDelta))
        content = "".join(one.text for one in found if isinstance(one, TextDelta))
        assert (thought, content, [one.name for one in found if isinstance(one, CallDelta) and one.name]) == deltas


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gemma4", '<|tool_call>:now{a:<|"|>x<|"|>}<tool_call|>'),
        ("gemma4", '<|tool_call>now{a:<|"|>x<|"|>}<tool_call|>'),
        ("hermes", '<tool_call>{"type": "function", "function": {"name": "now", "arguments": {"a": "x"}}}</tool_call>'),
        ("llama3_json", '{"type": "function", "function": {"name": "now", "parameters": {"a": "x"}}}'),
        ("llama3_json", '{"type": "function", "name": "now", "parameters": {"a": "x"}}'),
    ],
)
def test_calls_are_read_as_models_write_them_by_mistake(name: str, text: str) -> None:
    for cuts in ([], list(range(len(text)))):
        found = read(lambda: FormatParser(FORMATS[name], {"now": {}}), text, cuts)
        assert found == ("", [("now", {"a": "x"})])
        other = text.replace("now", "later")
        is_known_by_name = name == "gemma4"
        assert bool(read(lambda other=other: FormatParser(FORMATS[name], {"now": {}}), other, cuts)[1]) is not (  # type: ignore[misc]
            is_known_by_name
        )
    plain = '{"function": {"name": "now"}}'  # an object that is no call
    assert read(lambda: FormatParser(FORMATS["llama3_json"], {"now": {}}), plain, []) == (plain, [])
