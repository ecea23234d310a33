"""The JSON format of Llama 3.1 to 3.3, which is the whole answer, with or without a mark before it:

{"name": "get_weather", "parameters": {"city": "Paris"}}
<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}
"""

from __future__ import annotations

import re

from octavo.entrypoints.openai.tools.calls import Call, Steps, TextParser, json_call

_MARK = "<|python_tag|>"
_NO_SEPARATOR = re.compile(r"[^; \n\t]")


class Llama3JsonParser(TextParser):
    def _read(self) -> Steps[None]:
        while (call := (yield from self._take_call())) is not None:
            self._give_calls([call])
        yield from self._give_rest()

    def _take_call(self) -> Steps[Call | None]:
        if self._had_call and not (yield from self._skip_spaces(_NO_SEPARATOR)):
            return None
        yield from self._skip_mark(_MARK)
        if not (yield from self._skip_spaces()) or self._text[self._seen] != "{":
            return None
        value = yield from self._take_json()
        has_arguments = isinstance(value, dict) and ("parameters" in value or "arguments" in value)
        return json_call(value, "parameters", "arguments") if has_arguments else None
