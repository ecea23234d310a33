"""A conversation as the text that the model continues, by the tokenizer's chat template. For `LLM` and the server."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from octavo.entrypoints.tool_prompt import describe_tools, without_tool_roles
from octavo.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def render_chat(
    tokenizer: PreTrainedTokenizerFast,
    messages: Sequence[Mapping[str, Any]],
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    template_options: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """The prompt of a conversation. `chat_template` takes the place of the model's own; `template_options` are
    variables that the template may read. `tools`, in OpenAI's form, are the template's to describe; if it does not know
    of any, they are described in the system's message.

    Raises `RequestError` when there is no template or the template refuses the messages.
    """
    template = chat_template or tokenizer.chat_template
    if not template:
        raise RequestError(
            "This model has no chat template: start the server with --chat-template FILE, or use completions.",
            param="messages",
        )
    options = dict(template_options or {})
    reserved = options.keys() & (inspect.signature(tokenizer.apply_chat_template).parameters.keys() - {"kwargs"})
    if reserved:
        raise RequestError(
            f"chat_template_kwargs must not set {', '.join(sorted(reserved))}.", param="chat_template_kwargs"
        )
    conversation = [_with_objects(message) for message in messages]
    if tools and "tools" not in str(template):
        conversation, tools = describe_tools(conversation, tools), None
    if "tool_calls" not in str(template):
        conversation = without_tool_roles(conversation)
    # OpenAI's "developer" is what models know as "system"; a template that knows it by name gets it as it is.
    knows_developer = "developer" in str(template)
    try:
        prompt = tokenizer.apply_chat_template(
            [_renamed(message, knows_developer) for message in conversation],
            tools=[dict(tool) for tool in tools] if tools else None,
            chat_template=chat_template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **options,
        )
        prompt.encode()
    except Exception as error:  # the template is the model's program, run on the caller's data
        lines = str(error).splitlines() or [type(error).__name__]
        raise RequestError(f"The chat template refuses these messages: {lines[0]}", param="messages") from error
    return str(prompt)


def _with_objects(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose calls have their arguments as objects, which is what templates expect, not as JSON text."""
    result = dict(message)
    if result.get("tool_calls"):
        result["tool_calls"] = [_with_object(call) for call in result["tool_calls"]]
    return result


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            function["arguments"] = value
    return {**call, "function": function}


def _renamed(message: Mapping[str, Any], knows_developer: bool) -> dict[str, Any]:
    result = dict(message)
    if result.get("role") == "developer" and not knows_developer:
        result["role"] = "system"
    return result
