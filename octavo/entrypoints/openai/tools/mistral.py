"""Mistral's formats: a list after one mark, or (since version 11 of its tokenizer) a mark before each call:

[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]
[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}
"""

from __future__ import annotations

import re

from octavo.entrypoints.openai.tools.calls import Call, MarkedParser, Steps, json_call, to_json

# A name, perhaps an id, perhaps the mark of the arguments; it ends where the arguments begin.
_HEAD = re.compile(r"([\w.-]{1,256})(?:\[CALL_ID\][\w-]{0,256})?(?:\[ARGS\])?\s{0,32}(?=\{)")
_HEAD_SO_FAR = re.compile(r"[\w.-]{0,256}(?:\[[A-Z_]{0,8}\]?[\w-]{0,256}){0,2}\s{0,32}")
_LIST_SO_FAR = re.compile(r"\[[{ \n]|\[$")


class MistralParser(MarkedParser):
    start = "[TOOL_CALLS]"

    def _take_calls(self) -> Steps[list[Call] | None]:
        if not (yield from self._skip_spaces()):
            return None
        if _LIST_SO_FAR.match(self._text, self._seen):
            value = yield from self._take_json()
            calls = [json_call(item, "arguments", "parameters") for item in value] if isinstance(value, list) else []
            whole = [call for call in calls if call is not None]
            return whole if whole and len(whole) == len(calls) else None
        while (head := _HEAD.match(self._text, self._seen)) is None:
            if not _HEAD_SO_FAR.fullmatch(self._text, self._seen) or not (yield from self._more()):
                return None
        self._seen = head.end()
        value = yield from self._take_json()
        return [Call(head[1], to_json(value))] if isinstance(value, dict) else None
