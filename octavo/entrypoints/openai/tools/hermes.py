"""Hermes' format, which Qwen 2.5, Qwen 3, SmolLM 3 and many others write:

<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

from __future__ import annotations

from octavo.entrypoints.openai.tools.calls import Call, JsonScanner, MarkedParser, json_call, load_json

_END = "</tool_call>"


class HermesParser(MarkedParser):
    start = "<tool_call>"

    def _take(self, text: str, is_end: bool) -> tuple[list[Call], int] | None:
        stripped = text.lstrip()
        offset = len(text) - len(stripped)
        if not stripped:
            return None if is_end else ([], 0)
        if not stripped.startswith("{"):
            return None
        length = JsonScanner().end(stripped)
        if length is None:
            return None if is_end else ([], 0)
        call = json_call(load_json(stripped[:length]), "arguments", "parameters")
        if call is None:
            return None
        return end_of_call([call], text, offset + length, _END, is_end)


def end_of_call(calls: list[Call], text: str, length: int, mark: str, is_end: bool) -> tuple[list[Call], int] | None:
    """Calls that take `length` characters of `text`, and the end mark after them, which a model may forget."""
    rest = text[length:].lstrip()
    if rest.startswith(mark):
        return calls, len(text) - len(rest) + len(mark)
    if mark.startswith(rest) and not is_end:
        return [], 0
    return calls, length
