"""Reads and checks the items of a conversation in the Responses API, and turns them into chat messages.

Items of an answer may be sent back unchanged. An item's id contains its response and its place there, so that
references can be resolved.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.entrypoints.responses.response_tools import SEARCH, callable_tools, joined_name, read_loaded_tools
from octavo.errors import RequestError

Item = dict[str, Any]

_ROLES = ("user", "assistant", "system", "developer")
_MEDIA = ("input_image", "input_audio")  # parts of the user's messages, and of results of functions
_TEXTS = ("input_text", "output_text", "text", "refusal")
# Prefixes of items' ids, by kind; a reference has another item's id.
ID_PREFIXES = {
    "message": "msg", "function_call": "fc", "function_call_output": "fc", "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctc", "reasoning": "rs", "tool_search_call": "tsc", "tool_search_output": "tso",
    "additional_tools": "at",
}  # fmt: skip
TEXT_OF_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}  # by kind, the field with a call's text
KINDS = (*ID_PREFIXES, "item_reference")


def item_id(prefix: str, response_id: str, index: int) -> str:
    """Return the id of a response's item. Items of the answer count up from 0, items of the input down from -1."""
    place = f"{index}" if index >= 0 else f"i{-index}"
    return f"{prefix}_{response_id.removeprefix('resp_')}_{place}"


def response_of(id: str) -> str | None:
    """Return the id of the response that made an item, or None."""
    parts = id.split("_")
    return f"resp_{parts[1]}" if len(parts) == 3 else None


def _owner(id: str) -> str:
    """Return what ids of the items of one answer have in common; empty for other ids, such as "msg_1"."""
    begin, _, place = id.rpartition("_")
    return begin if response_of(id) is not None and place.isdecimal() else ""


def read_items(value: str | list[Any], owner_id: str, field: str = "input") -> list[Item]:
    """Return the items of a request's `field`, each with an id, which is made of `owner_id` if it has none. Raises
    `RequestError` naming the place."""
    is_content = isinstance(value, str) or (field == "input" and _are_parts(value))
    given = [{"role": "user", "content": value}] if is_content else value
    items = []
    for i, item in enumerate(given):
        if not isinstance(item, dict):
            raise _wrong(f"{field}[{i}]", "should be an object")
        items.append(_read_item(item, f"{field}[{i}]", owner_id, -1 - i))
    return items


def _are_parts(value: list[Any]) -> bool:
    """Return whether a list has only parts of a message. As in transformers' server, it stands for one message."""
    return bool(value) and all(isinstance(one, dict) and one.get("type") in ("input_text", *_MEDIA) for one in value)


def _read_item(item: Mapping[str, Any], where: str, owner_id: str, index: int) -> Item:
    kind = item.get("type")
    if kind is None:
        kind = "message" if "role" in item else "item_reference" if "id" in item else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise _wrong(f"{where}.type", f"is {kind!r:.60}, which is not built; {', '.join(KINDS)} are")
    if kind == "item_reference":
        return {"type": kind, "id": _text(item, "id", where)}
    id = item.get("id") or item_id(ID_PREFIXES[kind], owner_id, index)
    _text({"id": id}, "id", where)
    if kind == "message":
        role = item.get("role")
        if role not in _ROLES:
            raise _wrong(f"{where}.role", f"should be one of {', '.join(_ROLES)}")
        kind_of_part = "output_text" if role == "assistant" else "input_text"
        parts = _parts(item.get("content"), f"{where}.content", kind_of_part, takes_media=role == "user")
        return {"type": kind, "id": id, "role": role, "status": "completed", "content": parts}
    if kind in TEXT_OF_CALLS:
        names = ["call_id", "name", TEXT_OF_CALLS[kind], *(["namespace"] if item.get("namespace") is not None else [])]
        fields = {name: _text(item, name, where) for name in names}
        return {"type": kind, "id": id, **fields, "status": "completed"}
    if kind == "tool_search_call":
        arguments = item.get("arguments")
        if not isinstance(arguments, dict):
            raise _wrong(f"{where}.arguments", "should be an object")
        _check_unicode(json.dumps(arguments, ensure_ascii=False), f"{where}.arguments")
        fields = {"call_id": _text(item, "call_id", where), "execution": "client"}
        return {"type": kind, "id": id, **fields, "arguments": arguments, "status": "completed"}
    if kind == "additional_tools":
        tools = read_loaded_tools(item.get("tools"), f"{where}.tools")
        return {"type": kind, "id": id, "role": "developer", "tools": tools}
    if kind == "tool_search_output":
        fields = {"call_id": _text(item, "call_id", where), "execution": "client"}
        tools = read_loaded_tools(item.get("tools"), f"{where}.tools")
        return {"type": kind, "id": id, **fields, "tools": tools, "status": "completed"}
    if kind in ("function_call_output", "custom_tool_call_output"):
        found = _parts(item.get("output"), f"{where}.output", "input_text", takes_media=True)
        output = found if _has_media(found) else "\n".join(part["text"] for part in found)
        call_id = _text(item, "call_id", where)
        return {"type": kind, "id": id, "call_id": call_id, "output": output, "status": "completed"}
    return _read_reasoning(item, where, id)


def _read_reasoning(item: Mapping[str, Any], where: str, id: str) -> Item:
    result: Item = {"type": "reasoning", "id": id}
    for name in ("summary", "content"):
        parts = item.get(name) or []
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            raise _wrong(f"{where}.{name}", "should be a list of objects")
        texts = [_text(part, "text", f"{where}.{name}[{i}]") for i, part in enumerate(parts)]
        part_kind = "summary_text" if name == "summary" else "reasoning_text"
        result[name] = [{"type": part_kind, "text": text} for text in texts]
    packed = item.get("encrypted_content")
    if isinstance(packed, str) and not result["summary"] and not result["content"]:
        try:
            text = base64.b64decode(packed, validate=True).decode()
        except (binascii.Error, ValueError):
            raise _wrong(f"{where}.encrypted_content", "is not of this server") from None
        result["content"] = [{"type": "reasoning_text", "text": text}]
    return result


def _parts(value: Any, where: str, kind: str, takes_media: bool = False) -> list[dict[str, Any]]:
    if isinstance(value, str):
        _check_unicode(value, where)
        return [_part(kind, value)]
    if not isinstance(value, list):
        raise _wrong(where, "should be a string or a list of parts")
    parts = []
    for i, part in enumerate(value):
        of = part.get("type") if isinstance(part, dict) else None
        if of in _MEDIA and takes_media:
            parts.append(_picture(part, f"{where}[{i}]") if of == "input_image" else _sound(part, f"{where}[{i}]"))
            continue
        if not isinstance(of, str) or of not in _TEXTS:
            built = "text and, of the user and of functions, input_image and input_audio are"
            raise _wrong(f"{where}[{i}]", f"has the type {of!r:.60}, which is not built here; {built}")
        text = _text(part, "refusal" if of == "refusal" else "text", f"{where}[{i}]")
        parts.append(_part(kind, text))
    return parts


def _picture(part: Mapping[str, Any], where: str) -> dict[str, Any]:
    if part.get("file_id") is not None:
        raise _wrong(f"{where}.file_id", "is not built; image_url is")
    uuid = _uuid(part, where)
    url = None if uuid and part.get("image_url") is None else _text(part, "image_url", where)
    detail = "auto" if part.get("detail") is None else _text(part, "detail", where)
    return {"type": "input_image", "image_url": url, "detail": detail, **uuid}


def _sound(part: Mapping[str, Any], where: str) -> dict[str, Any]:
    given, uuid = part.get("input_audio"), _uuid(part, where)
    if given is None and uuid:
        return {"type": "input_audio", "input_audio": None, **uuid}
    if not isinstance(given, Mapping):
        raise _wrong(f"{where}.input_audio", "should be an object with data and format")
    fields = {name: _text(given, name, f"{where}.input_audio") for name in ("data", "format")}
    return {"type": "input_audio", "input_audio": fields, **uuid}


def _uuid(part: Mapping[str, Any], where: str) -> dict[str, str]:
    """Return the uuid of a part's medium, as a dictionary; empty without one."""
    return {} if part.get("uuid") is None else {"uuid": _text(part, "uuid", where)}


def _part(kind: str, text: str) -> dict[str, Any]:
    part = {"type": kind, "text": text}
    return {**part, "annotations": []} if kind == "output_text" else part


def _text(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise _wrong(f"{where}.{name}", "should be a string")
    _check_unicode(value, f"{where}.{name}")
    return value


def _check_unicode(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _wrong(where, "should be valid Unicode, without lone surrogates") from None


def _wrong(where: str, what: str) -> RequestError:
    return RequestError(f"{where} {what}.", param=where)


def to_messages(items: Sequence[Item], instructions: str | None) -> list[dict[str, Any]]:
    """Return the chat messages of a conversation. The assistant's reasoning, text and calls form one message until
    another role has a turn: parts of one answer as they were generated, others as lines. The system's first items form
    one message, as templates expect."""
    messages: list[dict[str, Any]] = []
    owners: dict[str, str] = {}  # by field, the answer that its last text is from

    def add_to_answer(field: str, text: str, id: str) -> None:
        message, owner = _answer(messages), _owner(id)
        joint = "" if owner and owners.get(field) == owner else "\n"
        message[field] = joint.join(filter(None, (message.get(field), text)))
        owners[field] = owner

    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        match item["type"]:
            case "message":
                role = item["role"]
                if _has_media(item["content"]) or (role == "user" and len(item["content"]) > 1):
                    messages.append({"role": role, "content": [_for_chat(part) for part in item["content"]]})
                    continue
                text = "\n".join(part["text"] for part in item["content"])
                if role == "assistant":
                    add_to_answer("content", text, item["id"])
                elif role in ("system", "developer") and len(messages) == 1 and messages[0]["role"] in _ROLES[2:]:
                    messages[0] = {"role": "system", "content": f"{messages[0]['content']}\n\n{text}"}
                else:
                    messages.append({"role": role, "content": text})
            case "reasoning":
                text = "\n".join(part["text"] for part in item["content"] or item["summary"])
                if not text:  # it was encrypted elsewhere, or there was none
                    continue
                add_to_answer("reasoning_content", text, item["id"])
            case "function_call" | "custom_tool_call" as kind:
                of_chat = "function" if kind == "function_call" else "custom"
                text = TEXT_OF_CALLS[kind]
                called = {"name": joined_name(item["name"], item.get("namespace")), text: item[text]}
                call = {"id": item["call_id"], "type": of_chat, of_chat: called}
                _answer(messages).setdefault("tool_calls", []).append(call)
            case "tool_search_call":
                called = {"name": SEARCH, "arguments": json.dumps(item["arguments"], ensure_ascii=False)}
                call = {"id": item["call_id"], "type": "function", "function": called}
                _answer(messages).setdefault("tool_calls", []).append(call)
            case "tool_search_output":
                tools = [
                    {"name": one.name_for_model, "description": one.description} for one in callable_tools((), [item])
                ]
                listed = json.dumps({"tools": tools}, ensure_ascii=False)
                messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": listed})
            case "function_call_output" | "custom_tool_call_output":
                found = item["output"]
                content = found if isinstance(found, str) else [_for_chat(part) for part in found]
                messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
    return messages


def _has_media(parts: Sequence[Mapping[str, Any]]) -> bool:
    return any(part["type"] in _MEDIA for part in parts)


def _for_chat(part: Mapping[str, Any]) -> dict[str, Any]:
    if part["type"] == "input_image":
        url, uuid = part["image_url"], {name: part[name] for name in ("uuid",) if name in part}
        return {"type": "image_url", "image_url": url and {"url": url, "detail": part["detail"]}, **uuid}
    if part["type"] == "input_audio":
        return dict(part)
    return {"type": "text", "text": part["text"]}


def _answer(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the assistant's message at the end of `messages`; append one if there is none."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})  # null, as in chats: templates may ask for it
    return messages[-1]
