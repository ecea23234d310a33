"""The JSON format of Llama 3.1 to 3.3, which is the whole answer, with or without a mark before it:

{"name": "get_weather", "parameters": {"city": "Paris"}}
<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}
"""

from __future__ import annotations

from octavo.entrypoints.openai.tools.calls import Call, JsonScanner, Piece, ToolSchemas, json_call, load_json

_MARK = "<|python_tag|>"


class Llama3JsonParser:
    def __init__(self, tools: ToolSchemas) -> None:
        self._held = ""
        self._is_content = False  # no call can follow any more
        self._num_calls = 0

    def add(self, text: str) -> list[Piece]:
        self._held += text
        return self._read(is_end=False)

    def finish(self) -> list[Piece]:
        return self._read(is_end=True)

    def _read(self, is_end: bool) -> list[Piece]:
        pieces: list[Piece] = []
        while self._held and not self._is_content:
            found = self._take(is_end)
            if found is None:
                self._is_content = True
            elif isinstance(found, int):
                return pieces
            else:
                pieces.append(found)
        if self._held and (not self._num_calls or self._held.strip()):
            pieces.append(self._held)
        self._held = ""
        return pieces

    def _take(self, is_end: bool) -> Call | int | None:
        """The next call; 0 if more must come; None if there is none."""
        text = self._held.lstrip("; \n\t") if self._num_calls else self._held.lstrip()
        if not is_end and (not text or _MARK.startswith(text)):
            return 0
        text = text.removeprefix(_MARK).lstrip()
        if not text and not is_end:
            return 0
        if not text.startswith("{"):
            return None
        length = JsonScanner().end(text)
        if length is None:
            return None if is_end else 0
        value = load_json(text[:length])
        has_arguments = isinstance(value, dict) and ("parameters" in value or "arguments" in value)
        call = json_call(value, "parameters", "arguments") if has_arguments else None
        if call is not None:
            self._num_calls += 1
            self._held = text[length:]
        return call
