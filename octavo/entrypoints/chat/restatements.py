"""Other words for what a chat template refuses: of its tools, of calls and of empty answers. They mean the same.

`render_chat` tries them only after a refusal.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from octavo.call_arguments import read_arguments, with_whole_pairs
from octavo.loading.jinja_template import REASONING

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]] | None


class TemplateRefusalError(Exception):
    """The chat template has failed with its `__cause__`."""


_Change = Callable[[Tools, Messages], tuple[Tools, Messages]]


def render_restated(
    render: Callable[[Tools, Messages], str], tools: Tools, conversation: Messages, *, takes_text_arguments: bool
) -> str:
    """Render a conversation with its tools. If the template refuses them, render them with the first change that helps,
    or else with the changes that help together. A change that is not needed would make the prompt differ from those of
    earlier turns.

    Tools get the fields that they lack, parameters with a type and a description, then one type each. Calls get an
    object for arguments that are none, such as those that the end of an answer has cut off, and no text beside
    reasoning; then each call becomes a message of its own, each result of a tool gets an answer before the user speaks,
    and each empty answer a blank. At last, without tools the template gets an empty list of them."""

    def changed(changes: Sequence[_Change]) -> tuple[Tools, Messages]:
        asked = sent
        for change in changes:
            asked = change(*asked)
        return asked

    sent: tuple[Tools, Messages] = (None if tools is None else list(tools), list(conversation))
    try:
        return render(*sent)
    except TemplateRefusalError as error:
        refusal = error
    changes: list[_Change] = [_for_tools(change) for change in (_with_all_fields, _with_whole_parameters, _with_types)]
    restatements = (
        partial(_with_objects, as_text=takes_text_arguments), _with_thoughts, with_single_calls, _with_answers,
        _with_blanks,
    )  # fmt: skip
    changes += [_for_messages(restated) for restated in restatements]
    # Hermes 3's `tool_use` needs it. It is last, because other templates refuse an empty list.
    changes.append(lambda tools, messages: (() if tools is None else tools, messages))
    for change in changes:
        if (asked := change(*sent)) != sent:
            with suppress(TemplateRefusalError):
                return render(*asked)
    needed, asked, prompt = list[_Change](), sent, None
    for change in changes:
        if (other := change(*asked)) != asked:
            needed.append(change)
            asked = other
            if len(needed) > 1:
                with suppress(TemplateRefusalError):
                    prompt = render(*asked)
                    break
    if prompt is None:
        raise refusal
    for change in needed[-2::-1]:  # the last first: it changes more
        fewer = [one for one in needed if one is not change]
        with suppress(TemplateRefusalError):
            prompt = render(*changed(fewer))
            needed = fewer
    return prompt


def _for_tools(change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> _Change:
    return lambda tools, messages: (None if tools is None else [change(tool) for tool in tools], messages)


def _for_messages(restated: Callable[[Messages], Messages]) -> _Change:
    return lambda tools, messages: (tools, restated(messages))


def _with_all_fields(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool with the fields that clients may leave out, because some templates read them of every tool."""
    sent = tool.get("function")
    if not isinstance(sent, Mapping):
        return dict(tool)
    function = {name: value for name, value in sent.items() if value is not None}
    given = function.get("parameters")
    parameters = {"type": "object", "properties": {}, **(given if isinstance(given, Mapping) else {})}
    return {**tool, "function": {"description": "", **function, "parameters": parameters}}


def _with_whole_parameters(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool whose parameters have a type and a description, because some templates read both."""
    return _with_parameters(tool, _whole)


def _with_types(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool whose parameters have one type each, and a type of their values, because some templates write a
    parameter as a Python type, and fail at lists of types, at null and at objects of any values."""
    return _with_parameters(tool, _of_one_type)


def _with_parameters(
    tool: Mapping[str, Any], change: Callable[[Any, Mapping[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    tool = _with_all_fields(tool)
    if not isinstance(function := tool.get("function"), Mapping):
        return tool
    root = function["parameters"]
    properties = root["properties"] if isinstance(root["properties"], Mapping) else {}
    changed = {name: change(one, root) for name, one in properties.items()}
    return {**tool, "function": {**function, "parameters": {**root, "properties": changed}}}


def _whole(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    given = schema if isinstance(schema, Mapping) else {}
    kind = given.get("type") or _one_type(schema, root)
    whole = {**given, "type": kind, "description": given.get("description") or ""}
    if kind == "array":
        whole.setdefault("items", {})
    return _with_inner(whole, root, _whole)


def _of_one_type(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    given = schema if isinstance(schema, Mapping) else {}
    kind = _one_type(schema, root)
    one = {**given, "type": kind}
    if kind in ("array", "object"):
        one.setdefault("items" if kind == "array" else "additionalProperties", {})
    return _with_inner(one, root, _of_one_type)


def _with_inner(
    schema: dict[str, Any], root: Mapping[str, Any], change: Callable[[Any, Mapping[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """Return a schema with its schemas of values changed. `additionalProperties: false` is none."""
    names = ("items", "additionalProperties")
    return schema | {name: change(schema[name], root) for name in names if isinstance(schema.get(name), Mapping)}


def _one_type(schema: Any, root: Mapping[str, Any]) -> str:
    from octavo.entrypoints.chat.tools.call_spelling import schema_types

    kinds = schema_types(schema, root)
    return next(
        (one for one in ("string", "number", "integer", "boolean", "array", "object") if one in kinds), "string"
    )


def _with_objects(conversation: Sequence[Mapping[str, Any]], *, as_text: bool) -> list[Mapping[str, Any]]:
    """Return a conversation whose calls have an object, or its JSON text, for arguments that are none."""

    def changed(call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": _object_of(function["arguments"], as_text=as_text)}}

    return [
        {**message, "tool_calls": [changed(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in conversation
    ]


def _with_thoughts(conversation: Messages) -> list[Mapping[str, Any]]:
    """Return a conversation whose texts beside both reasoning and calls are the end of the reasoning. gpt-oss' template
    takes no others."""
    found = list[Mapping[str, Any]]()
    for message in conversation:
        reasoning = next((message[name] for name in REASONING if message.get(name)), None)
        content = message.get("content")
        if message.get("tool_calls") and isinstance(reasoning, str) and isinstance(content, str) and content:
            kept = {name: value for name, value in message.items() if name not in REASONING}
            message = {**kept, "reasoning_content": f"{reasoning}\n\n{content}", "content": None}
        found.append(message)
    return found


def with_single_calls(conversation: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return a conversation with a message for each call, and its result after it. Llama 3's templates take no
    others."""
    found, position = list[Mapping[str, Any]](), 0
    while position < len(conversation):
        message = conversation[position]
        position += 1
        if len(calls := message.get("tool_calls") or ()) < 2:
            found.append(message)
            continue
        results, places = dict[int, Mapping[str, Any]](), defaultdict[Any, deque[int]](deque)
        while position < len(conversation) and conversation[position].get("role") == "tool":
            results[position] = conversation[position]
            places[conversation[position].get("tool_call_id")].append(position)
            position += 1
        for i, call in enumerate(calls):
            found.append({**(message if i == 0 else {"role": message["role"], "content": None}), "tool_calls": [call]})
            if own := places[call.get("id")]:
                found.append(results.pop(own.popleft()))
        found += results.values()
    return found


def _with_answers(conversation: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return a conversation with an empty answer between the result of a tool and the user's next message, because some
    templates, such as Mistral's, want an answer to each message of the user."""
    found = list[Mapping[str, Any]]()
    for message in conversation:
        if found and found[-1].get("role") == "tool" and message.get("role") == "user":
            found.append({"role": "assistant", "content": ""})
        found.append(message)
    return found


def _with_blanks(conversation: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return a conversation whose empty answers are a blank. An answer that was cut within its reasoning is empty."""
    return [
        {**message, "content": " "}
        if message.get("role") == "assistant" and not message.get("content") and not message.get("tool_calls")
        else message
        for message in conversation
    ]


def _object_of(arguments: Any, *, as_text: bool) -> Any:
    """Return arguments that are an object, or its text. Of others return the beginning of an object, or an empty
    one."""
    if not isinstance(read_arguments(arguments), Mapping):
        from pydantic_core import from_json  # not needed by other chats

        with suppress(ValueError, TypeError):
            arguments = from_json(with_whole_pairs(arguments), allow_partial="trailing-strings")
        begun = arguments if isinstance(arguments, Mapping) else {}
        return json.dumps(begun, ensure_ascii=False) if as_text else begun
    return arguments
