"""Turns a Responses request into a chat."""

from collections.abc import Sequence
from typing import Any

from octavo.entrypoints.chat.chat_run import make_chat
from octavo.entrypoints.openai.request_bodies import ChatCompletionRequest, TokenRequest
from octavo.entrypoints.openai.tool_choice import ToolChoice
from octavo.entrypoints.responses.response_tools import ResponsesTool
from octavo.entrypoints.responses.responses_protocol import ResponsesRequest
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


def to_chat(
    body: ResponsesRequest, messages: list[dict[str, Any]], tools: Sequence[ResponsesTool]
) -> ChatCompletionRequest:
    """Return the chat that `body` asks for, with a stream of one answer to `messages`, which may call `tools`. Raises
    `RequestError`."""
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
    fields["tool_choice"] = _choice(body.tool_choice, tools)
    if tools:
        fields["tools"] = [tool.for_chat() for tool in tools]
    return make_chat(fields)


def _choice(choice: ToolChoice, tools: Sequence[ResponsesTool]) -> Any:
    """Return the choice with the names that the model sees. A tool of a namespace may be chosen by its own name."""
    if not tools and choice in (None, "auto", "none"):
        return None  # clients send "auto" without tools
    if choice is None or isinstance(choice, str):
        return choice
    seen = {tool.name: tool.name_for_model for tool in tools} | {
        tool.name_for_model: tool.name_for_model for tool in tools
    }
    fields = choice.model_dump()
    for one in fields["allowed_tools"]["tools"] if "allowed_tools" in fields else [fields]:
        named = one["function"]["name"]
        one["function"]["name"] = seen.get(named, named)
    return fields
