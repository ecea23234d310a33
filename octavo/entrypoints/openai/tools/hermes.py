"""Hermes' format, which Qwen 2.5, Qwen 3, SmolLM 3 and many others write:

<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

from __future__ import annotations

from octavo.entrypoints.openai.tools.calls import Call, MarkedParser, Steps, json_call

END = "</tool_call>"  # which a model may forget


class HermesParser(MarkedParser):
    start = "<tool_call>"

    def _take_calls(self) -> Steps[list[Call] | None]:
        if not (yield from self._skip_spaces()) or self._text[self._seen] != "{":
            return None
        call = json_call((yield from self._take_json()), "arguments", "parameters")
        if call is None:
            return None
        yield from self._skip_mark(END)
        return [call]
