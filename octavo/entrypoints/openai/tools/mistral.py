"""Mistral's formats: a list after one mark, or (since version 11 of its tokenizer) a mark before each call:

[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]
[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}
"""

from __future__ import annotations

import re

from octavo.entrypoints.openai.tools.calls import Call, JsonScanner, MarkedParser, json_call, load_json, to_json

# A name, perhaps an id, perhaps the mark of the arguments; it ends where the arguments begin.
_HEAD = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\][\w-]*)?(?:\[ARGS\])?\s*(?=\{)")
_HEAD_SO_FAR = re.compile(r"\s*[\w.-]*(?:\[[A-Z_]*\]?[\w-]*){0,2}\s*")


class MistralParser(MarkedParser):
    start = "[TOOL_CALLS]"

    def _take(self, text: str, is_end: bool) -> tuple[list[Call], int] | None:
        stripped = text.lstrip()
        begin = len(text) - len(stripped)
        head = None
        if not stripped.startswith(("[{", "[ ", "[\n")) and stripped != "[":
            head = _HEAD.match(text)
            if head is None:
                more = not is_end and _HEAD_SO_FAR.fullmatch(text) is not None
                return ([], 0) if more else None
            begin = head.end()
        length = JsonScanner().end(text[begin:])
        if length is None:
            return None if is_end else ([], 0)
        value = load_json(text[begin : begin + length])
        if head is not None:
            return ([Call(head[1], to_json(value))], begin + length) if isinstance(value, dict) else None
        calls = [json_call(item, "arguments", "parameters") for item in value] if isinstance(value, list) else []
        whole = [call for call in calls if call is not None]
        return (whole, begin + length) if whole and len(whole) == len(calls) else None
