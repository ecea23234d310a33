"""Recognises the formats of a model's tool calls and reasoning.

Sources, in this order: the checkpoint's statement (`response_template`), the chat template's rendering of calls and
reasoning (`template_traits` renders them), and marks of known families in the template. A known format is taken if it
writes the same text as the template; unknown marks are derived from the renderings. Two calls with nothing in common
are rendered alone and together, so text that they share comes from the template. A format counts only if it reads all
renderings, whole and in pieces. The idea of controlled differences is llama.cpp's (pull request 18675).
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from octavo.entrypoints.chat.reasoning import FUNCTIONARY as FUNCTIONARY_STYLE
from octavo.entrypoints.chat.reasoning import STYLES, ReasoningStyle
from octavo.entrypoints.chat.template_traits import (
    ANSWER,
    THOUGHT,
    TOOLS,
    ProbeCall,
    Rendered,
    rendered_answer,
    rendered_calls,
    template_traits,
)
from octavo.entrypoints.chat.tools import tool_formats
from octavo.entrypoints.chat.tools.call_ids import CallIdForm
from octavo.entrypoints.chat.tools.call_spelling import written_calls
from octavo.entrypoints.chat.tools.format_parser import FormatParser, trigger_marks
from octavo.entrypoints.chat.tools.tool_parser_base import Call, JsonScanner, load_json
from octavo.loading.jinja_template import EndlessTemplateError

if TYPE_CHECKING:
    from octavo.loading.tokenizer import ModelTokenizer

_SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
_HARMONY_MARK = "<|channel|>commentary"
_FUNCTIONARY_MARK = ">>>all"
_MARK = r"<[^<>\s]{1,40}>|\[/?[A-Z_]{2,40}\]"
_LAST_MARK = re.compile(rf"({_MARK})\s*\Z")
_FIRST_MARK = re.compile(rf"\s*({_MARK})")
# Formats of models whose templates do not write calls.
_OF_MODEL_TYPES = {"gpt_oss": "openai", "llama4": "llama4_pythonic", "llama": "llama3_json", "mllama": "llama3_json"}
# Formats that a template asks for in words.
_INSTRUCTIONS = (
    ('{"name": function name, "parameters":', "llama3_json"), ("[func_name1(param", "pythonic"),
    ("<function_calls>", "olmo3"), ("```tool_code", "gemma3"), ("functools[", "phi4_mini_json"),
    # LFM2's and LFM2.5's templates only list the tools.
    ("<|tool_list_start|>", "lfm2"), ("List of tools: [", "lfm2"),
)  # fmt: skip
# Marks that end a turn without being special tokens.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<end_of_turn>", "<turn|>", "<|end|>",
              "<|endoftext|>", "<|end_of_text|>", "</s>", "[e~[")  # fmt: skip
_ATTRIBUTE_PIECE = re.compile(r"""[^\s"'>]+|["']|\s+|>""")
_PIECE = re.compile(r"<[^<>\s]*>?|\[/?[A-Z_]+\]|\s+|[^\s<>\[\]]+|.", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ModelFormats:
    """The formats of a model's calls and reasoning; None if the model has none, or if they are unknown."""

    tools: tool_formats.ToolFormat | None = None
    reasoning: ReasoningStyle | None = None
    why_no_choice: str = ""
    call_ids: CallIdForm = CallIdForm.LONG


def model_formats(
    tokenizer: ModelTokenizer,
    tool_parser: str = tool_formats.AUTO,
    reasoning_parser: str = tool_formats.AUTO,
    *,
    model_type: str | None = None,
    response_template: Mapping[str, Any] | None = None,
) -> ModelFormats:
    """Return the named formats; those named `AUTO` are recognised. A template without an end counts as none."""
    template: str | None = None
    with suppress(Exception):
        template = tokenizer.get_chat_template(None, TOOLS)
    try:
        return _formats(tokenizer, template, tool_parser, reasoning_parser, model_type, response_template)
    except EndlessTemplateError:  # each chat fails with it
        return _formats(tokenizer, None, tool_parser, reasoning_parser, model_type, response_template)


def _formats(
    tokenizer: ModelTokenizer,
    template: str | None,
    tool_parser: str,
    reasoning_parser: str,
    model_type: str | None,
    response_template: Mapping[str, Any] | None,
) -> ModelFormats:
    stated = (response_template or {}).get("fields")
    fields = stated if isinstance(stated, Mapping) else {}
    why = ""
    if tool_parser == tool_formats.NONE:
        tools, why = None, "the server was started with --tool-call-parser none."
    elif tool_parser != tool_formats.AUTO:
        tools = tool_formats.FORMATS[tool_parser]
    elif template is None:
        tools, why = None, "the model has no chat template."
    else:
        tools = _stated_tools(fields) or _recognised_tools(tokenizer, template, model_type)
        if tools is None:
            why = f"{_unread(tokenizer, template)}; name the format with --tool-call-parser."
    if reasoning_parser == tool_formats.NONE:
        reasoning = None
    elif reasoning_parser != tool_formats.AUTO:
        reasoning = STYLES[reasoning_parser]
    else:
        reasoning = _stated_reasoning(fields)
        if reasoning is None and template is not None:
            reasoning = _recognised_reasoning(tokenizer, template)
    if tools is None and tool_parser == tool_formats.AUTO and reasoning is not None and reasoning.blocks is not None:
        calls = reasoning.blocks.calls
        tools, why = next(form for form in _known() if calls in (form.open, form.start)), ""
    return ModelFormats(tools, reasoning, why, _call_ids(tokenizer, template, tools))


def _unread(tokenizer: ModelTokenizer, template: str) -> str:
    """Return why no format of calls was recognised."""
    if not (rendered := _cut_calls(tokenizer, template)):
        return "how the model writes calls was not recognised: its chat template writes none"
    return f"no known format reads calls as the chat template writes them, such as {rendered[0].text.strip()!r:.300}"


def _call_ids(tokenizer: ModelTokenizer, template: str | None, tools: tool_formats.ToolFormat | None) -> CallIdForm:
    if tools is not None and tools.counts_calls:
        return CallIdForm.COUNTED
    if template is not None and template_traits(tokenizer, template).needs_short_ids:
        return CallIdForm.SHORT
    return CallIdForm.SHORT if tools is not None and tools.start == "[TOOL_CALLS]" else CallIdForm.LONG


def _stated_tools(fields: Mapping[str, Any]) -> tool_formats.ToolFormat | None:
    field = fields.get("tool_calls")
    if not isinstance(field, Mapping) or not isinstance(field.get("open"), str):
        return None
    opened, closed = field["open"].strip(), field.get("close")
    for form in _known():
        if opened in trigger_marks(form) and (not isinstance(closed, str) or closed.strip() in form.marks):
            return form
    if field.get("content") != "json":
        return None
    return tool_formats.ToolFormat(
        tool_formats.JsonCalls(), start=opened, end=closed if isinstance(closed, str) else ""
    )


def _stated_reasoning(fields: Mapping[str, Any]) -> ReasoningStyle | None:
    for name in ("thinking", "reasoning_content", "reasoning"):
        field = fields.get(name)
        if isinstance(field, Mapping) and isinstance(field.get("open"), str) and isinstance(field.get("close"), str):
            return _style(field["open"].strip(), field["close"].strip())
    return None


def _recognised_tools(
    tokenizer: ModelTokenizer, template: str, model_type: str | None
) -> tool_formats.ToolFormat | None:
    if _HARMONY_MARK in template:
        return tool_formats.HARMONY
    if _FUNCTIONARY_MARK in template:
        return tool_formats.FUNCTIONARY
    rendered = _cut_calls(tokenizer, template)
    form = _rendered_format(rendered) if rendered else None
    if form is not None and not form.is_whole_answer:
        return replace(form, code_mark=tool_formats.CODE_MARK) if tool_formats.CODE_MARK in template else form
    for instruction, name in _INSTRUCTIONS:
        if instruction in template:
            return tool_formats.FORMATS[name]
    if form is not None:
        return form
    traits = template_traits(tokenizer, template)
    marked = [form for form in _known() if (marks := trigger_marks(form)) and all(mark in template for mark in marks)]
    if not traits.describes_tools and not (traits.writes_calls and marked):
        return tool_formats.HERMES  # `render_chat` describes tools in this format
    if marked:
        return max(marked, key=lambda form: sum(1 if mark.strip() in template else -1 for mark in form.marks))
    if model_type in _OF_MODEL_TYPES:
        return tool_formats.FORMATS[_OF_MODEL_TYPES[model_type]]
    # Special tokens that are used only in calls.
    added = {token.content for token in getattr(tokenizer, "added_tokens_decoder", {}).values()}
    return next((form for form in _known() if (marks := trigger_marks(form)) and added.issuperset(marks)), None)


def _known() -> list[tool_formats.ToolFormat]:
    return list(dict.fromkeys(tool_formats.FORMATS.values()))


def _cut_calls(tokenizer: ModelTokenizer, template: str) -> list[Rendered]:
    """Return the template's renderings of calls, without the text around every answer."""
    plain = rendered_answer(tokenizer, template, TOOLS)
    if plain is None:
        return []
    ends = {*_TURN_ENDS, *map(str, getattr(tokenizer, "special_tokens_map", {}).values())}
    header, _, after = plain.partition(ANSWER)
    if (mark := _FIRST_MARK.match(after)) is not None:
        ends.add(mark[1])
    headers = set(re.findall(_MARK, header))
    return [
        replace(
            one, text=_without_thoughts(_without_ends(_before_turn(_difference(one.text, plain), one, headers), ends))
        )
        for one in rendered_calls(tokenizer, template)
    ]


def _without_thoughts(text: str) -> str:
    """Return `text` without empty reasoning at its beginning, which templates write before calls without content."""
    for style in STYLES.values():
        after = text.lstrip().removeprefix(style.start.rstrip()).lstrip()
        if after.startswith(style.end):
            return after.removeprefix(style.end)
    return text


def _before_turn(text: str, one: Rendered, headers: set[str]) -> str:
    """Return `text` before the next turn, which begins with one of the marks that are in `headers` of answers."""
    position = max(text.rfind(part) + len(part) for part in one.calls[-1].texts)
    begins = [begin for mark in headers if (begin := text.find(mark, position)) >= 0]
    return text[: min(begins, default=len(text))]


def _without_ends(text: str, ends: set[str]) -> str:
    """Return `text` without the marks of a turn's end."""
    while (end := next((end for end in ends if end and text.rstrip().endswith(end)), None)) is not None:
        text = text.rstrip().removesuffix(end)
    return text


def _rendered_format(rendered: Sequence[Rendered]) -> tool_formats.ToolFormat | None:
    """Return the format of rendered calls: a known format that writes the same text, otherwise a derived format,
    otherwise a known format that reads them."""
    known = [form for form in _known() if _reads(form, rendered)]
    found = [form for form in known if all(_writes(form, one) for one in rendered if len(one.calls) == 1)]
    if found:
        return max(found, key=lambda form: (all(_writes(form, one) for one in rendered), not form.is_whole_answer))
    read_off = _read_off(rendered)
    if read_off is not None:
        return read_off
    return max(known, key=lambda form: sum(mark.strip() in rendered[0].text for mark in form.marks), default=None)


def _writes(form: tool_formats.ToolFormat, one: Rendered) -> bool:
    """Return whether `form` writes the calls as rendered, apart from blanks."""
    return _squeezed(written_calls(form, [(call.name, call.arguments) for call in one.calls]), one) == _squeezed(
        one.text.replace(one.says, "", 1) if one.says else one.text, one
    )


def _squeezed(text: str, one: Rendered) -> str:
    for call in one.calls:  # formats may include ids
        for own_id in (call.short_id, call.long_id):
            text = re.sub(rf'"id"\s*:\s*"{own_id}"\s*,?|,?\s*"id"\s*:\s*"{own_id}"', "", text)
            text = re.sub(rf"\[CALL_ID\]{own_id}", "", text)
    return re.sub(r",(?=})", "", "".join(text.split()).replace("'", '"'))


def _reads(form: tool_formats.ToolFormat, rendered: Sequence[Rendered]) -> bool:
    """Return whether `form` reads all renderings, whole and in pieces, without leftovers."""
    for one in rendered:
        if one.says and form.is_whole_answer:
            continue
        expected = [(call.name, call.arguments) for call in one.calls]
        pieces = random.Random(one.text)
        cuts = sorted(pieces.sample(range(len(one.text)), min(7, len(one.text))))
        parts = [one.text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(one.text)], strict=True)]
        for texts in ([one.text], parts):
            content, calls = _read(form, texts)
            # Text before calls may be a separate turn, whose end mark is not cut off.
            if calls != expected or not content.strip().startswith(one.says) or bool(content.strip()) != bool(one.says):
                return False
    return True


def _read(form: tool_formats.ToolFormat, texts: Sequence[str]) -> tuple[str, list[tuple[str, Any]]]:
    parser = FormatParser(form, _SCHEMAS)
    content, calls = "", []
    for piece in [piece for text in texts for piece in parser.add(text)] + parser.finish():
        if isinstance(piece, Call):
            calls.append((piece.name or "", json.loads(piece.arguments)))
        else:
            content += piece
    return content, calls


def _difference(text: str, plain: str) -> str:
    """Return the part of `text` in the place of the answer in `plain`. Marks are not cut in two."""
    before, _, after = plain.partition(ANSWER)
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


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a call's body in a text, and the body."""

    begin: int
    end: int
    body: tool_formats.JsonCalls | tool_formats.NamedJson | tool_formats.Tags


def _read_off(rendered: Sequence[Rendered]) -> tool_formats.ToolFormat | None:
    """Return a format derived from renderings with unknown marks. None if it does not read all of them."""
    alone = [one for one in rendered if len(one.calls) == 1 and not one.says]
    both = next((one for one in rendered if len(one.calls) == 2), None)
    for place_of in (_json_place, _named_place, _tags_place):
        forms = {_assembled(place_of, one, both) for one in alone}
        form = forms.pop() if len(forms) == 1 else None  # both calls must give the same format
        if form is not None and _reads(form, rendered):
            return form
    return None


def _assembled(place_of: Any, one: Rendered, both: Rendered | None) -> tool_formats.ToolFormat | None:
    """Return the format of one call's text, with the text between the calls of `both`."""
    place = place_of(one.text, one.calls[0], 0)
    if place is None:
        return None
    before, after = one.text[: place.begin], one.text[place.end :]
    opened = start = end = close = separator = ""
    between = None
    if both is not None:
        first = place_of(both.text, both.calls[0], 0)
        second = None if first is None else place_of(both.text, both.calls[1], first.end)
        if first is not None and second is not None:
            between = both.text[first.end : second.begin]
    is_list = before.rstrip().endswith("[") and after.lstrip().startswith("]") and not set(between or "") & set("[]")
    if isinstance(place.body, tool_formats.JsonCalls) and is_list:
        body = replace(place.body, is_list=True)
        return tool_formats.ToolFormat(body, start=before.rstrip()[:-1], end=after.lstrip()[1:])
    if between is None:
        start, end, separator = before, after, "\n"
    else:
        kept = _common_end(_pieces(before), _pieces(between))
        start, left = "".join(kept), between.removesuffix("".join(kept))
        end = "".join(_common_end(_pieces(after)[::-1], _pieces(left)[::-1])[::-1])
        opened, close, separator = before.removesuffix(start), after.removeprefix(end), left.removeprefix(end)
    if isinstance(place.body, tool_formats.NamedJson | tool_formats.Tags) and not (opened + start).strip():
        return None
    return tool_formats.ToolFormat(place.body, opened, start, end, separator, close)


def _pieces(text: str) -> list[str]:
    """Return the marks, blanks and words of a text."""
    return _PIECE.findall(text)


def _common_end(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """Return the pieces at the end of both sequences."""
    size = 0
    while size < min(len(first), len(second)) and first[-1 - size] == second[-1 - size]:
        size += 1
    return list(first[len(first) - size :])


def _objects(core: str) -> Iterator[tuple[int, int, Any]]:
    """Yield the JSON objects in a text: begin, end, value."""
    for found in re.finditer("{", core):
        if (end := JsonScanner().end(core, found.start())) is not None:
            value = load_json(core[found.start() : end])
            if isinstance(value, dict):
                yield found.start(), end, value


def _json_place(text: str, call: ProbeCall, position: int) -> _Place | None:
    for begin, end, value in _objects(text):
        names = [key for key, one in value.items() if one == call.name]
        arguments = [key for key, one in value.items() if one == call.arguments]
        if begin >= position and names and arguments:
            return _Place(begin, end, tool_formats.JsonCalls(names[0], arguments[0]))
    return None


def _named_place(text: str, call: ProbeCall, position: int) -> _Place | None:
    begin = text.find(call.name, position)
    for found, end, value in _objects(text):
        if value == call.arguments and 0 <= begin < found:
            return _Place(begin, end, tool_formats.NamedJson(after=text[begin + len(call.name) : found]))
    return None


def _tags_place(text: str, call: ProbeCall, position: int) -> _Place | None:
    (first_key, first_value), (second_key, second_value) = call.arguments.items()
    between, begin = list[str](), text.find(call.name, position)
    position = begin
    for part in (call.name, first_key, str(first_value), second_key, str(second_value)):
        found = text.find(part, position)
        if found < 0:
            return None
        between.append(text[position:found])
        position = found + len(part)
    _, name_to_key, key_to_value, value_to_key, key_to_number = between
    key_before = "".join(_common_end(_pieces(name_to_key), _pieces(value_to_key)))
    value_after = value_to_key.removesuffix(key_before).replace(first_key, "{key}")
    if not (key_before.strip() and key_to_value.strip() and value_after.strip()):
        return None
    kept = key_before.lstrip()
    blanks = key_before.removesuffix(kept)  # they follow the name and each value
    value_after += blanks
    last = value_after.replace("{key}", second_key)
    if not text.startswith(last.rstrip(), position):
        return None
    size = len(last) if text.startswith(last, position) else len(last.rstrip())
    name_after = name_to_key.removesuffix(kept)
    is_line = key_to_value.endswith("\n")
    key_after, value_before, attributes = key_to_value.removesuffix("\n"), "\n" if is_line else "", ("", "")
    if key_to_value != key_to_number:  # the first value is a text, the second is none
        pieces = [_ATTRIBUTE_PIECE.findall(one) for one in (key_to_value, key_to_number)]
        same = "".join(_common_end(*(one[::-1] for one in pieces))[::-1])
        key_after, value_before = same[: same.rfind(" ")], "".join(_common_end(*pieces))
        if " " not in same or not value_before:
            return None
        of_text, of_number = (
            one[len(key_after) : len(one) - len(value_before)] for one in (key_to_value, key_to_number)
        )
        attributes = of_text, of_number
    tags = tool_formats.Tags("", name_after, kept, key_after, value_before, value_after, "", *attributes)
    return _Place(begin, position + size, replace(tags, has_nested="{key}" in value_after))


def _recognised_reasoning(tokenizer: ModelTokenizer, template: str) -> ReasoningStyle | None:
    if _FUNCTIONARY_MARK in template:
        return FUNCTIONARY_STYLE
    text = rendered_answer(tokenizer, template, reasoning_content=THOUGHT)
    if text is not None and THOUGHT in text and ANSWER in text.partition(THOUGHT)[2]:
        before, _, after = text.partition(THOUGHT)
        for style in STYLES.values():
            if before.rstrip().endswith(style.start.rstrip()) and after.lstrip().startswith(style.end):
                return _style(style.start, style.end, after.partition(ANSWER)[0])
        start, end = _LAST_MARK.search(before), _FIRST_MARK.match(after)
        plain = rendered_answer(tokenizer, template) or ""
        if start is not None and end is not None and start[1] not in plain:
            return _style(start[1], end[1])
    # Templates that drop the reasoning of earlier answers still contain its mark.
    for style in dict.fromkeys(STYLES.values()):
        if style.end in template or (style.has_channels and style.start.partition("<|message|>")[0] in template):
            return _style(style.start, style.end, template)
    return None


def _style(start: str, end: str, template: str = "") -> ReasoningStyle:
    """Return the known style with these marks. Of several styles, prefer one whose marks of content are in the
    template."""
    known = [
        style for style in STYLES.values()
        if (style.start, style.end) == (start, end) and not style.is_implied and not style.stays_in_content
    ]  # fmt: skip
    known.sort(key=lambda style: bool(style.answer_start))
    marked = [style for style in known if style.answer_start and style.answer_start in template]
    return next(iter(marked or known), ReasoningStyle(start, end))
