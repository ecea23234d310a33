"""Which formats a model's tool calls and reasoning have, found out without being told.

In this order: what the checkpoint states (`response_template`), what its chat template makes of a call and of reasoning
in a conversation that differs in nothing else, and the marks of known families in the template. What is rendered is
compared with the known formats; marks that none of them has are read off. The idea of controlled differences is
llama.cpp's (pull request 18675).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from octavo.entrypoints.chat.reasoning import STYLES, ReasoningStyle
from octavo.entrypoints.chat.tools.call_spelling import spelling
from octavo.entrypoints.chat.tools.format_parser import FormatParser, trigger_marks
from octavo.entrypoints.chat.tools.tool_formats import (
    AUTO,
    FORMATS,
    HARMONY,
    HERMES,
    NONE,
    JsonCalls,
    NamedJson,
    Tags,
    ToolFormat,
)
from octavo.entrypoints.chat.tools.tool_parser import Call, JsonScanner, load_json

if TYPE_CHECKING:
    from octavo.loading.tokenizer import ModelTokenizer

_QUESTION, _ANSWER, _THOUGHT = "Qz7question", "Az7answer", "Tz7thought"
_NAME, _KEYS = "probe_name", ("first_key", "second_key")
_ARGUMENTS = {_KEYS[0]: "Vz7value", _KEYS[1]: 74}
_SCHEMA = {"type": "object", "properties": {_KEYS[0]: {"type": "string"}, _KEYS[1]: {"type": "integer"}}}
_TOOLS = [{"type": "function", "function": {"name": _NAME, "description": "D.", "parameters": _SCHEMA}}]
_ASKED: dict[str, Any] = {"role": "user", "content": _QUESTION}
_ANSWERED: dict[str, Any] = {"role": "assistant", "content": _ANSWER}
_HARMONY_MARK = "<|channel|>commentary"
_MARK = r"<[^<>\s]{1,40}>|\[/?[A-Z_]{2,40}\]"
_LAST_MARK = re.compile(rf"({_MARK})\s*\Z")
_FIRST_MARK = re.compile(rf"\s*({_MARK})")
# Of models whose templates do not write calls.
_OF_MODEL_TYPES = {"gpt_oss": "openai", "llama4": "llama4_pythonic", "llama": "llama3_json", "mllama": "llama3_json"}
# Formats that a template asks for in words.
_INSTRUCTIONS = (
    ('{"name": function name, "parameters":', "llama3_json"), ("[func_name1(params_name1=", "pythonic"),
    ("<function_calls>", "olmo3"), ("```tool_code", "gemma3"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelFormats:
    """How a model calls tools and reasons; None if it does not, or nobody knows."""

    tools: ToolFormat | None = None
    reasoning: ReasoningStyle | None = None
    why_no_choice: str = ""


def model_formats(
    tokenizer: ModelTokenizer,
    tool_parser: str = AUTO,
    reasoning_parser: str = AUTO,
    *,
    model_type: str | None = None,
    response_template: Mapping[str, Any] | None = None,
) -> ModelFormats:
    """The formats that are named, or recognised where it says `AUTO`."""
    template: str | None = None
    with suppress(Exception):
        template = tokenizer.get_chat_template(None, _TOOLS)
    stated = (response_template or {}).get("fields")
    fields = stated if isinstance(stated, Mapping) else {}
    why = ""
    if tool_parser == NONE:
        tools, why = None, "the server was started with --tool-call-parser none."
    elif tool_parser != AUTO:
        tools = FORMATS[tool_parser]
    elif template is None:
        tools, why = None, "the model has no chat template."
    else:
        tools = _stated_tools(fields) or _recognised_tools(tokenizer, template, model_type)
        if tools is None:
            why = "how the model writes calls was not recognised; name the format with --tool-call-parser."
    if reasoning_parser == NONE:
        reasoning = None
    elif reasoning_parser != AUTO:
        reasoning = STYLES[reasoning_parser]
    else:
        reasoning = _stated_reasoning(fields)
        if reasoning is None and template is not None:
            reasoning = _recognised_reasoning(tokenizer, template)
    return ModelFormats(tools, reasoning, why)


def _stated_tools(fields: Mapping[str, Any]) -> ToolFormat | None:
    field = fields.get("tool_calls")
    if not isinstance(field, Mapping) or not isinstance(field.get("open"), str):
        return None
    opened, closed = field["open"].strip(), field.get("close")
    for form in _known():
        if opened in trigger_marks(form) and (not isinstance(closed, str) or closed.strip() in form.marks):
            return form
    if field.get("content") != "json":
        return None
    return ToolFormat(JsonCalls(), start=opened, end=closed if isinstance(closed, str) else "")


def _stated_reasoning(fields: Mapping[str, Any]) -> ReasoningStyle | None:
    for name in ("thinking", "reasoning_content", "reasoning"):
        field = fields.get(name)
        if isinstance(field, Mapping) and isinstance(field.get("open"), str) and isinstance(field.get("close"), str):
            return _style(field["open"].strip(), field["close"].strip())
    return None


def _recognised_tools(tokenizer: ModelTokenizer, template: str, model_type: str | None) -> ToolFormat | None:
    if "tools" not in template:
        return HERMES  # in which `render_chat` describes them
    if _HARMONY_MARK in template:
        return HARMONY
    for text, plain in _rendered_calls(tokenizer):
        if (form := _known_format(text, plain) or _read_off(text, plain)) is not None:
            return form
    for instruction, name in _INSTRUCTIONS:
        if instruction in template:
            return FORMATS[name]
    marked = [form for form in _known() if (marks := trigger_marks(form)) and all(mark in template for mark in marks)]
    if marked:
        return max(marked, key=lambda form: sum(mark.strip() in template for mark in form.marks))
    if model_type in _OF_MODEL_TYPES:
        return FORMATS[_OF_MODEL_TYPES[model_type]]
    # Tokens that only calls have use for.
    added = {token.content for token in getattr(tokenizer, "added_tokens_decoder", {}).values()}
    return next((form for form in _known() if (marks := trigger_marks(form)) and added.issuperset(marks)), None)


def _known() -> list[ToolFormat]:
    return list(dict.fromkeys(FORMATS.values()))


def _rendered_calls(tokenizer: ModelTokenizer) -> Iterator[tuple[str, str]]:
    """What the template makes of a call, and of an answer in its place. Templates differ in what they take."""
    result = {"role": "tool", "name": _NAME, "tool_call_id": "abcdefgh1", "content": "Rz7result"}
    for arguments in (_ARGUMENTS, json.dumps(_ARGUMENTS)):
        call = {"id": "abcdefgh1", "type": "function", "function": {"name": _NAME, "arguments": arguments}}
        for content in ({}, {"content": ""}):
            for after in ([], [result]):
                calling = {"role": "assistant", **content, "tool_calls": [call]}
                text = _render(tokenizer, [_ASKED, calling, *after], _TOOLS)
                plain = _render(tokenizer, [_ASKED, _ANSWERED], _TOOLS)
                if text is not None and plain is not None and _NAME in text and _KEYS[1] in text:
                    yield text, plain


def _render(tokenizer: ModelTokenizer, messages: list[dict[str, Any]], tools: Any = None) -> str | None:
    """The text after the question."""
    try:
        text = str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=False))
    except Exception:  # the template is the model's program
        return None
    _, found, after = text.rpartition(_QUESTION)
    return after if found else None


def _known_format(text: str, plain: str) -> ToolFormat | None:
    """The format in which `text` holds the call; of several the one of whose marks most are there."""
    core = _difference(text, plain)
    found = []
    for form in _known():
        content, calls = _read(form, core if form.is_whole_answer else text)
        if calls == [(_NAME, _ARGUMENTS)] and not (form.is_whole_answer and content.strip()):
            found.append(form)
    return max(found, key=lambda form: _likeness(form, text), default=None)


def _likeness(form: ToolFormat, text: str) -> tuple[bool, int]:
    spelled = spelling(form, {_NAME: _SCHEMA})
    squeezed = "".join(text.split())
    is_spelled = spelled is not None and "".join((spelled.open + spelled.calls[_NAME].before).split()) in squeezed
    marks = [mark for mark in (form.open, form.start, form.end, form.close) if mark.strip()]
    return is_spelled, sum(mark.strip() in text for mark in marks) * 2 - len(marks)


def _read(form: ToolFormat, text: str) -> tuple[str, list[tuple[str, Any]]]:
    parser = FormatParser(form, {_NAME: _SCHEMA})
    content, calls = "", []
    for piece in parser.add(text) + parser.finish():
        if isinstance(piece, Call):
            calls.append((piece.name or "", json.loads(piece.arguments)))
        else:
            content += piece
    return content, calls


def _difference(text: str, plain: str) -> str:
    """What stands in `text` where `plain` has the answer; marks are not cut in two."""
    before, _, after = plain.partition(_ANSWER)
    begin = 0
    while begin < len(before) and text[begin : begin + 1] == before[begin]:
        begin += 1
    end = 0
    while end < min(len(after), len(text) - begin) and text[-1 - end] == after[-1 - end]:
        end += 1
    if begin < len(before):
        begin = max(before.rfind(mark, 0, begin) + 1 for mark in ("\n", ">", "]", " "))
    if end < len(after):
        kept = after[len(after) - end :]
        starts = [found for mark in ("\n", "<", "[", " ") if (found := kept.find(mark)) >= 0]
        end = len(kept) - min(starts) if starts else 0
    return text[begin : len(text) - end]


def _read_off(text: str, plain: str) -> ToolFormat | None:
    """The format of a call whose marks nobody knows. None if it does not read what it was made of."""
    core = _difference(text, plain)
    for form in (_json_format(core), _named_format(core), _tag_format(core)):
        if form is not None and _read(form, core)[1] == [(_NAME, _ARGUMENTS)]:
            return form
    return None


def _objects(core: str) -> Iterator[tuple[int, int, Any]]:
    """JSON objects: begin, end, value."""
    for found in re.finditer("{", core):
        if (end := JsonScanner().end(core, found.start())) is not None:
            value = load_json(core[found.start() : end])
            if isinstance(value, dict):
                yield found.start(), end, value


def _json_format(core: str) -> ToolFormat | None:
    for begin, end, value in _objects(core):
        names = [key for key, one in value.items() if one == _NAME]
        arguments = [key for key, one in value.items() if one == _ARGUMENTS]
        if names and arguments:
            before, after = core[:begin], core[end:]
            is_list = before.rstrip().endswith("[") and after.lstrip().startswith("]")
            if is_list:
                before, after = before.rstrip()[:-1], after.lstrip()[1:]
            return ToolFormat(JsonCalls(names[0], arguments[0], is_list), start=before, end=after)
    return None


def _named_format(core: str) -> ToolFormat | None:
    begin = core.find(_NAME)
    for found, end, value in _objects(core):
        if value == _ARGUMENTS and 0 <= begin < found and core[:begin].strip():
            return ToolFormat(NamedJson(after=core[begin + len(_NAME) : found]), start=core[:begin], end=core[end:])
    return None


def _tag_format(core: str) -> ToolFormat | None:
    texts = (_NAME, _KEYS[0], str(_ARGUMENTS[_KEYS[0]]), _KEYS[1], str(_ARGUMENTS[_KEYS[1]]))
    between, position = list[str](), 0
    for text in texts:
        found = core.find(text, position)
        if found < 0:
            return None
        between.append(core[position:found])
        position = found + len(text)
    start, name_to_key, key_to_value, value_to_key, _ = between
    rest = core[position:]
    size = next((n for n in range(len(value_to_key), 0, -1) if name_to_key.endswith(value_to_key[-n:])), 0)
    key_before = value_to_key[len(value_to_key) - size :].lstrip()
    value_after = value_to_key[: len(value_to_key) - len(key_before)]
    if _NAME in "".join(between) + rest:
        return None
    if not (start.strip() and key_before and key_to_value.strip() and value_after.strip()):
        return None
    if not rest.startswith(value_after.rstrip()) or not (end := rest[len(value_after.rstrip()) :].lstrip()):
        return None
    tags = Tags("", name_to_key.removesuffix(key_before), key_before, key_to_value.rstrip("\n"), "", value_after, end)
    if key_to_value.endswith("\n"):
        tags = replace(tags, value_before="\n")
    return ToolFormat(tags, start=start)


def _recognised_reasoning(tokenizer: ModelTokenizer, template: str) -> ReasoningStyle | None:
    text = _render(tokenizer, [_ASKED, {**_ANSWERED, "reasoning_content": _THOUGHT}])
    if text is not None and _THOUGHT in text and _ANSWER in text.partition(_THOUGHT)[2]:
        before, _, after = text.partition(_THOUGHT)
        for style in STYLES.values():
            if before.rstrip().endswith(style.start.rstrip()) and after.lstrip().startswith(style.end):
                return _style(style.start, style.end, template)
        start, end = _LAST_MARK.search(before), _FIRST_MARK.match(after)
        plain = _render(tokenizer, [_ASKED, _ANSWERED]) or ""
        if start is not None and end is not None and start[1] not in plain:
            return _style(start[1], end[1])
    # Templates that drop the reasoning of earlier answers name its mark all the same.
    for style in dict.fromkeys(STYLES.values()):
        if style.end in template or (style.has_channels and style.start.partition("<|message|>")[0] in template):
            return _style(style.start, style.end, template)
    return None


def _style(start: str, end: str, template: str = "") -> ReasoningStyle:
    """The known style with these marks; of several the one whose marks of content are in the template."""
    known = [style for style in STYLES.values() if (style.start, style.end) == (start, end) and not style.is_implied]
    known.sort(key=lambda style: bool(style.answer_start))
    marked = [style for style in known if style.answer_start and style.answer_start in template]
    return next(iter(marked or known), ReasoningStyle(start, end))
