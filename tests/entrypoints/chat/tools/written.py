"""Calls as models write them in any format, by its description."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.entrypoints.chat.reasoning import FUNCTIONARY, STYLES, Reasoning, new_splitter
from octavo.entrypoints.chat.tools.tool_formats import JsonCalls, KeyedValues, NamedJson, PythonCalls, Tags, ToolFormat

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "metric": {"type": "boolean"},
        "unit": {"enum": ["C", "F"]}, "more": {"type": "object"}, "note": {"type": ["string", "null"]},
    },
    "required": ["city"],
}  # fmt: skip
TOOLS = {"get_weather": SCHEMA, "now": {"type": "object", "properties": {}}}


def write(form: ToolFormat, calls: Sequence[tuple[str, Mapping[str, Any]]], *, as_forced: bool = False) -> str:
    """Calls in `form`; with `as_forced` in the one of its notations that grammars write."""
    body, close = form.body, "" if form.is_whole_answer else form.close
    if isinstance(body, JsonCalls) and body.is_list:
        return f"{form.open}{form.start}[{', '.join(one(body, *call) for call in calls)}]{form.end}{close}"
    if isinstance(body, PythonCalls):
        texts = [one(body, *call) for call in calls]
        whole = f"[{', '.join(texts)}]" if body.is_list else "\n".join(texts)
        return f"{form.open}{form.start}{whole}{form.end}"
    texts = [f"{form.start}{one(body, *call, as_forced=as_forced)}{form.end}" for call in calls]
    if as_forced and form.address:
        texts = [form.address.replace("{name}", name) + text for text, (name, _) in zip(texts, calls, strict=True)]
    text = form.open + form.separator.join(texts) + form.close
    return text.removeprefix(form.start) if as_forced and form.text_start else text


def content_of(form: ToolFormat, answer: str) -> str:
    """The content of an answer, which readers of calls get: without the addresses of calls."""
    style, prompt = (FUNCTIONARY, ">>>") if form.text_start else (STYLES["muse_glimmer"], "<|start|>assistant")
    if not (form.text_start or form.address):
        return answer
    reasoning = Reasoning.after(prompt, style)
    assert reasoning is not None
    splitter = new_splitter(reasoning)
    return splitter.add(answer)[1] + splitter.finish()[1]


def one(body: Any, name: str, arguments: Mapping[str, Any], *, as_forced: bool = False) -> str:
    written = json.dumps(arguments, ensure_ascii=False)
    if isinstance(body, JsonCalls) and not body.name:
        return f'{{"{name}": {written}}}'
    if isinstance(body, JsonCalls):
        return f'{{{body.first}"{body.name}": "{name}", "{body.arguments}": {written}}}'
    if isinstance(body, NamedJson):
        own_id = f"call000000{body.id_before}" if body.id_before else ""
        return f"{own_id}{body.before}{name}{body.call_id.replace(chr(92) + 'd', '0')}{body.after}{written}{body.end}"
    if isinstance(body, PythonCalls):
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
    if isinstance(body, KeyedValues):
        arguments = dict(sorted(arguments.items())) if as_forced and body.sorts_keys else arguments
        return f"{body.before}{name}{_keyed(arguments, body.quote)}"
    assert isinstance(body, Tags)
    text = f"{body.name_before}{name}{body.index.replace(chr(92) + 'd', '1')}{body.name_after}"
    if as_forced and body.json_before:
        return f"{text}{body.json_before}{written}{body.json_after}{body.end}"
    for key, value in arguments.items():
        is_text = isinstance(value, str)
        attribute = body.text_attribute if is_text else body.json_attribute
        shown = value if is_text else json.dumps(value, ensure_ascii=False)
        text += f"{body.key_before}{key}{body.key_after}{attribute}{body.value_before}{shown}"
        text += body.value_after.replace("{key}", key)
    return text + body.end


def _keyed(value: Any, quote: str) -> str:
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_keyed(item, quote)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_keyed(item, quote) for item in value) + "]"
    return f"{quote}{value}{quote}" if isinstance(value, str) else json.dumps(value)
