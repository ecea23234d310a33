"""Tools for chat templates that know nothing of them: described to the model in words, in Hermes' format.

Calls in the conversation are written as the model would have written them, and their results as messages of the user,
the one role that every template has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_INSTRUCTIONS = """You may call one or more functions to assist with the user query. You are provided with function \
signatures within <tools></tools> tags:
<tools>
{tools}
</tools>
For each function call return a JSON object with the function's name and arguments within <tool_call></tool_call> tags:
<tool_call>
{{"name": <function name>, "arguments": <arguments as a JSON object>}}
</tool_call>"""


def describe_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """`messages` with the description of `tools` in the system's message."""
    text = _INSTRUCTIONS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    result = [dict(message) for message in messages]
    if result and result[0].get("role") in ("system", "developer"):
        result[0]["content"] = f"{result[0].get('content') or ''}\n\n{text}".lstrip()
        return result
    return [{"role": "system", "content": text}, *result]


def without_tool_roles(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """`messages` with calls and their results as text."""
    return [_as_text(message) for message in messages]


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    result = {name: value for name, value in message.items() if name not in ("tool_calls", "tool_call_id")}
    if message.get("role") == "tool":
        result["role"] = "user"
        result["content"] = f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
    elif calls := message.get("tool_calls"):
        texts = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
        content = message.get("content")
        lines = [*([content] if content else []), *(f"<tool_call>\n{text}\n</tool_call>" for text in texts)]
        result["content"] = "\n".join(lines)
    return result
