"""Hermes' format, which Qwen 2.5, Qwen 3, SmolLM 3 and many others write:

<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>

and within the same marks the XML of Qwen 3 Coder, whose values are read by the function's schema:

<tool_call>
<function=get_weather>
<parameter=city>
Paris
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from octavo.entrypoints.openai.tools.calls import Call, MarkedParser, Steps, json_call, load_json, to_json

_END = "</tool_call>"  # which a model may forget
_START_FUNCTION = "<function="
_END_FUNCTION = "</function>"
_NAME = re.compile(r"([^>\s]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)


class HermesParser(MarkedParser):
    start = "<tool_call>"

    def _take_calls(self) -> Steps[list[Call] | None]:
        if not (yield from self._skip_spaces()) or self._text[self._seen] != "{":
            return None
        call = json_call((yield from self._take_json()), "arguments", "parameters")
        if call is None:
            return None
        yield from self._skip_mark(_END)
        return [call]


class QwenParser(HermesParser):
    def _take_calls(self) -> Steps[list[Call] | None]:
        if not (yield from self._skip_mark(_START_FUNCTION)):
            return (yield from super()._take_calls())
        body = yield from self._take_until(_END_FUNCTION)
        call = None if body is None else self._parse(body)
        if call is None:
            return None
        yield from self._skip_mark(_END)
        return [call]

    def _parse(self, body: str) -> Call | None:
        head = _NAME.match(body)
        if head is None:
            return None
        properties = self._tools.get(head[1], {}).get("properties")
        if not isinstance(properties, Mapping):
            properties = {}
        arguments: dict[str, Any] = {}
        position = head.end()
        while (found := _PARAMETER.match(body, position)) is not None:
            arguments[found[1]] = _value(found[2], properties.get(found[1]))
            position = found.end()
        return None if body[position:].strip() else Call(head[1], to_json(arguments))


def _value(text: str, schema: Any) -> Any:
    """The value of a parameter: its text if the schema wants one, else the JSON that it is, if it is."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "string":
        return text
    value = load_json(text)
    if value is not None or text.strip() == "null":
        return value
    lowered = text.strip().lower()
    return lowered == "true" if lowered in ("true", "false") else text
