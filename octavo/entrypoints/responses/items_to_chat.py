"""Turns a Responses request into a chat."""

from __future__ import annotations

from typing import Any

from octavo.entrypoints.chat.chat_run import make_chat
from octavo.entrypoints.openai.request_bodies import ChatCompletionRequest, TokenRequest
from octavo.entrypoints.responses.items import name_for_model
from octavo.entrypoints.responses.responses_protocol import ResponsesRequest, ResponsesTool
from octavo.field_names import FieldNames

# Names of the chat's fields in errors.
NAMES = FieldNames({
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "tools[].custom.format.grammar": "tools[].format",
    "tools[].function.parameters": "tools[].parameters",
})  # fmt: skip
_OF_TOOLS = {"name", "description", "parameters", "strict", "format"}


def to_chat(body: ResponsesRequest, messages: list[dict[str, Any]]) -> ChatCompletionRequest:
    """Return the chat that `body` asks for, with a stream of one answer to `messages`. Raises `RequestError`."""
    fields: dict[str, Any] = {name: getattr(body, name) for name in TokenRequest.model_fields}
    fields |= {
        "model": body.model,
        "messages": messages,
        "stream": True,
        "resume": body.resume,
        "max_tokens": body.max_output_tokens,
        "chat_template_kwargs": body.chat_template_kwargs,
        "parallel_tool_calls": body.parallel_tool_calls,
        "logprobs": body.wants_logprobs or None,
        "top_logprobs": (body.top_logprobs or 0) if body.wants_logprobs else None,
        "reasoning_effort": body.reasoning and body.reasoning.effort,
        "verbosity": body.text and body.text.verbosity,
    }
    if body.structured_outputs is not None:
        fields["structured_outputs"] = body.structured_outputs.model_dump(exclude_none=True)
    wanted = body.text.format if body.text is not None else None
    if wanted is not None and wanted.type != "text":
        fields["response_format"] = {"type": wanted.type}
        if wanted.schema_ is not None:
            fields["response_format"]["json_schema"] = {
                "name": wanted.name,
                "schema": wanted.schema_,
                "strict": wanted.strict,
            }
    _add_tools(fields, body)
    return make_chat(fields)


def _add_tools(fields: dict[str, Any], body: ResponsesRequest) -> None:
    choice, tools = body.tool_choice, body.tools or ()
    is_idle = not tools and choice in (None, "auto", "none")  # clients send "auto" without tools
    fields["tool_choice"] = None if is_idle else choice if isinstance(choice, str) else choice and choice.model_dump()
    if tools:
        fields["tools"] = [{"type": tool.type, tool.type: _for_chat(tool)} for tool in tools]


def _for_chat(tool: ResponsesTool) -> dict[str, Any]:
    """Return a tool as the model knows it: the description of a namespace comes before those of its tools."""
    fields = tool.model_dump(include=_OF_TOOLS, exclude_none=True)
    if tool.namespace is not None:
        fields["name"] = name_for_model(tool.name, tool.namespace.name)
        fields["description"] = "\n".join(filter(None, (tool.namespace.description, tool.description)))
    return fields
