"""The JSON format of Llama 3.1 to 3.3, which is the whole answer, with or without a mark before it:

{"name": "get_weather", "parameters": {"city": "Paris"}}
<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}
"""

from __future__ import annotations

import re

from octavo.entrypoints.openai.tools.calls import Call, Piece, Steps, TextParser, ToolSchemas, json_call

_MARK = "<|python_tag|>"
_NO_SEPARATOR = re.compile(r"[^; \n\t]")


class Llama3JsonParser(TextParser):
    def __init__(self, tools: ToolSchemas) -> None:
        super().__init__(tools)
        self._call: Steps[Call | None] | None = None  # reads the next one
        self._is_content = False  # no call can follow any more
        self._num_calls = 0

    def _read(self) -> list[Piece]:
        pieces: list[Piece] = []
        while not self._is_content:
            self._call = self._call or self._take_call()
            try:
                next(self._call)
                return pieces
            except StopIteration as end:
                call: Call | None = end.value
            self._call = None
            if call is None:
                self._is_content = True
            else:
                pieces.append(call)
                self._num_calls += 1
                self._begin = self._seen
        rest = self._text[self._begin :]
        if rest and (not self._num_calls or rest.strip()):
            pieces.append(rest)
        self._begin = len(self._text)
        self._drop_given()
        return pieces

    def _take_call(self) -> Steps[Call | None]:
        if self._num_calls and not (yield from self._skip_spaces(_NO_SEPARATOR)):
            return None
        yield from self._skip_mark(_MARK)
        if not (yield from self._skip_spaces()) or self._text[self._seen] != "{":
            return None
        value = yield from self._take_json()
        has_arguments = isinstance(value, dict) and ("parameters" in value or "arguments" in value)
        return json_call(value, "parameters", "arguments") if has_arguments else None
